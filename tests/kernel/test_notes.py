"""The note beside a worker's lock: written anew for another spec, renewed in place for the next start of the same."""

import os
from pathlib import Path

import pytest

from everdeck import WorkerSpec
from everdeck.deck import notes
from everdeck.kernel.containment import new_cookie
from everdeck.registry.store import encoded_spec

SPEC = encoded_spec(WorkerSpec(("sleep", "1")))


def test_the_next_start_of_a_spec_writes_its_cookie_into_the_same_file(tmp_path: Path) -> None:
    """A rename over a file makes ext4 write it to the disk at once, and every replacement would wait for that."""
    first, second = new_cookie(), new_cookie()
    notes.write(str(tmp_path), first, SPEC)
    inode = (tmp_path / "note").stat().st_ino

    notes.write(str(tmp_path), second, SPEC)

    note = notes.read(tmp_path)
    assert note is not None
    assert (note.cookie, note.spec.command) == (second, ("sleep", "1"))
    assert (tmp_path / "note").stat().st_ino == inode


@pytest.mark.parametrize("command", [("sleep", "2"), ("sleep", "1000")])
def test_another_spec_is_another_file(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Of the same length or not: half an old spec and half a new one can never be read."""
    notes.write(str(tmp_path), new_cookie(), SPEC)
    (tmp_path / "kept").hardlink_to(tmp_path / "note")
    before = (tmp_path / "kept").read_bytes()

    notes.write(str(tmp_path), new_cookie(), encoded_spec(WorkerSpec(command)))

    note = notes.read(tmp_path)
    assert note is not None
    assert note.spec.command == command
    assert (tmp_path / "kept").read_bytes() == before


def test_what_is_no_note_of_ours_is_not_written_through(tmp_path: Path) -> None:
    """A name that leads elsewhere, or to a file with another name, is replaced."""
    elsewhere = tmp_path / "elsewhere"
    first = new_cookie()
    notes.write(str(tmp_path), first, SPEC)
    os.rename(tmp_path / "note", elsewhere)  # noqa: PTH104 - beside the links
    told = elsewhere.read_bytes()
    for plant in ("symlink_to", "hardlink_to"):
        getattr(tmp_path / "note", plant)(elsewhere)

        notes.write(str(tmp_path), new_cookie(), SPEC)

        assert elsewhere.read_bytes() == told
        assert not (tmp_path / "note").is_symlink()
        (tmp_path / "note").unlink()
