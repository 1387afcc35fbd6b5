"""What holds for every test that drives decks and daemons: nothing of it outlives the test."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from support.repo_processes import end_all_under

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _nothing_outlives_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """End what a failing test left in its directory, so that it cannot disturb the next one."""
    path: Path | None = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if path is not None:
        end_all_under(path)
