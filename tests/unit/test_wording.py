"""Ends and events in words."""

import logging
from typing import Any

import pytest

from everdeck import wording
from everdeck.cli import events, output
from everdeck.server import daemon
from support.wordings import WORDINGS


@pytest.mark.parametrize(("told", "words"), WORDINGS)
def test_an_event_is_told_in_words(told: dict[str, object], words: str) -> None:
    """No braces, no brackets, nothing that is empty; the page says the same (tests/browser/test_modules.py)."""
    assert wording.detail(told) == words


HOSTILE = "a\x1b]0;title\x07\x9b2J\r\nforged line\u202e\x7f"


def test_what_a_terminal_would_obey_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    """In events, tables and the daemon's log a worker's words stay one line, and none of them is carried out."""
    record = logging.LogRecord("everdeck", logging.INFO, "", 0, "alice: %s", (HOSTILE,), None)
    events._print(_event(HOSTILE), as_json=False)
    for shown in (
        capsys.readouterr().out.rstrip("\n"),
        output.table(("NAME", "NOTE"), [("alice", HOSTILE)]).split("\n", 1)[1],
        daemon._ForPeople(colour=False).format(record),
    ):
        assert shown.isprintable(), shown
        assert "forged line" in shown
    assert wording.plain("grüße, 世界") == "grüße, 世界"


def _event(text: str) -> dict[str, Any]:
    return {"id": 1, "at": "2026-01-01T00:00:00+00:00", "worker": "alice", "kind": "status", "detail": {"text": text}}
