"""``apply`` killed between its steps: the next one comes to the same deck."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import everdeck.server
from support.cli_daemon import Person

POINTS = sorted(
    point
    for path in Path(everdeck.server.__file__).parent.rglob("*.py")
    for point in re.findall(r'crash_point\("((?!notify\.)[^"]+)"\)', path.read_text(encoding="utf-8"))
)  # those of the notifier are tests/process/test_notify.py's


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    """A deck that nobody owns yet."""
    person = Person(tmp_path / "state")
    try:
        yield person
    finally:
        person.leaves()


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_apply_is_finished_by_the_next(person: Person, tmp_path: Path, point: str) -> None:
    """What a file brought is known whatever was killed: nothing of the old file stays, nothing by hand goes."""
    worker = '[worker.{}]\ncommand = ["sleep", "1000"]\n'
    file = tmp_path / "deck.toml"
    file.write_text(worker.format("old") + worker.format("kept"))
    person.up("--no-http", str(file))
    person.types("start", "by-hand", "--", "sleep", "1000")
    kept = person.worker("kept")["pid"]
    person.kills(person.owner())

    person.env["EVERDECK_CRASH_AT"] = point
    person.up("--no-http")
    del person.env["EVERDECK_CRASH_AT"]
    file.write_text(worker.format("kept") + worker.format("new"))
    killed = person.types("apply", str(file), expect=1)
    assert "went away before it answered" in killed.stderr
    person.up("--no-http")
    person.types("apply", str(file))

    assert [(one["name"], one["state"]) for one in person.seen()["workers"]] == [
        ("by-hand", "running"),
        ("kept", "running"),
        ("new", "running"),
    ]
    assert person.worker("kept")["pid"] == kept
