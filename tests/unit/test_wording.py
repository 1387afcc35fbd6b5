"""Ends and events in words."""

import pytest

from everdeck import wording
from support.wordings import WORDINGS


@pytest.mark.parametrize(("told", "words"), WORDINGS)
def test_an_event_is_told_in_words(told: dict[str, object], words: str) -> None:
    """No braces, no brackets, nothing that is empty; the page says the same (tests/browser/test_modules.py)."""
    assert wording.detail(told) == words
