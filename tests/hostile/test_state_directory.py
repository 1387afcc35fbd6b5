"""Whose directory it is, whose files are in it, and who may read them."""

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from everdeck import AsyncDeck, disk
from everdeck.deck import rights
from everdeck.errors import SpecError, StateDirRefused
from everdeck.model import Restart, WorkerSpec
from support.cli_daemon import Person
from support.hostile_accounts import Account

SLEEPER = ["sleep", "1000"]


def _open_and_close(state: Path) -> None:
    async def scenario() -> None:
        async with AsyncDeck(state):
            pass

    asyncio.run(scenario())


def test_root_refuses_a_directory_of_another_account(place: Path, mallory: Account) -> None:
    """Whoever owns it could put a file of his own in the place of ours at any moment."""
    state = place / "state"
    state.mkdir()
    os.chown(state, mallory.uid, mallory.gid)
    with pytest.raises(StateDirRefused, match=mallory.name):
        _open_and_close(state)
    assert list(state.iterdir()) == []


def test_root_refuses_a_directory_inside_that_of_another_account(place: Path, mallory: Account) -> None:
    """The owner of a directory above renames ours away and puts his own there."""
    above = place / "home"
    above.mkdir()
    os.chown(above, mallory.uid, mallory.gid)
    (above / "state").mkdir()
    with pytest.raises(StateDirRefused, match=mallory.name):
        _open_and_close(above / "state")


def test_up_in_the_background_writes_nothing_into_a_strange_directory(place: Path, mallory: Account) -> None:
    """The daemon's log is opened before the daemon runs: a link there would be followed as root."""
    state, treasure = place / "state", place / "treasure"
    treasure.write_text("root's own words")
    state.mkdir()
    (state / "daemon.log").symlink_to(treasure)
    os.chown(state, mallory.uid, mallory.gid)
    assert mallory.name in Person(state).types("up", "--detach", "--no-http", expect=1).stderr
    assert treasure.read_text() == "root's own words"


@pytest.mark.parametrize("name", ["deck.lock", "deck.db", "workers"])
def test_a_link_in_place_of_a_file_of_ours_is_refused(place: Path, mallory: Account, name: str) -> None:
    """The lock is made, locked and written; through a link that would be somebody else's file."""
    state, treasure = place / "state", place / "treasure"
    state.mkdir(mode=0o700)
    if name == "workers":
        treasure.mkdir()
    else:
        treasure.write_text("root's own words")
    (state / name).symlink_to(treasure)
    with pytest.raises(StateDirRefused, match="link"):
        _open_and_close(state)
    assert treasure.is_dir() or treasure.read_text() == "root's own words"


def test_no_file_of_ours_is_readable_for_others_at_any_moment(place: Path, mallory: Account) -> None:
    """Environments and cookies stand in the registry and in its journal; the directory lets the account pass."""
    before = os.umask(0o022)
    try:

        async def scenario() -> None:
            async with AsyncDeck(place / "state") as deck:
                await deck.start("alice", SLEEPER, user=mallory.name, env={"PASSWORD": "sesame"})
                await deck.start("bound", SLEEPER, lifetime="bound")
                state = place / "state"
                assert (state / "deck.db-wal").stat().st_size > 0
                for path in sorted(state.iterdir()):
                    if path.is_file():
                        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
                        assert mallory.run("cat", path, expect=None).returncode != 0, path.name
                await deck.stop_all()

        asyncio.run(scenario())
    finally:
        os.umask(before)


def test_a_registry_that_was_readable_is_closed_at_open(place: Path, mallory: Account) -> None:
    """One that an earlier version left open to others, with its journal."""
    state = place / "state"
    person = Person(state)
    try:
        person.types("up", "--detach", "--no-http")
        person.kills(person.owner())
        for name in ("deck.db", "deck.db-wal", "deck.db-shm"):
            (state / name).chmod(0o644)
        person.types("up", "--detach", "--no-http")
        for name in ("deck.db", "deck.db-wal", "deck.db-shm"):
            assert stat.S_IMODE((state / name).stat().st_mode) == 0o600, name
    finally:
        person.leaves()


def test_workers_keep_the_umask_of_the_person_who_typed_up(place: Path, mallory: Account) -> None:
    """The daemon's own umask is 077; that is not for its workers, neither before nor after a reload."""
    person = Person(place / "state")
    try:
        person.types("up", "--detach", "--no-http", umask=0o027)
        person.types("start", "alice", "--", *SLEEPER)
        person.types("reload")
        person.types("start", "bob", "--", *SLEEPER)
        seen = person.seen()
        assert "Umask:\t0077" in Path(f"/proc/{seen['owner_pid']}/status").read_text()
        for worker in seen["workers"]:
            assert "Umask:\t0027" in Path(f"/proc/{worker['pid']}/status").read_text(), worker["name"]
    finally:
        person.leaves()


def test_the_daemon_imports_nothing_from_where_it_was_typed(place: Path, mallory: Account) -> None:
    """A module in a directory that others write, with a name that we import, is not ours: neither at a start in the
    background nor at a reload, whichever way the first daemon was started.
    """
    trap, sprung = place / "open", place / "sprung"
    trap.mkdir()
    os.chown(trap, mallory.uid, mallory.gid)
    for name in ("msgspec", "psutil", "json", "litestar", "sqlite3"):
        (trap / f"{name}.py").write_text(f"open({str(sprung)!r}, 'a').write('x')\nraise ImportError('sprung')\n")
    person = Person(place / "state")
    try:
        person.types("up", "--detach", "--no-http", cwd=trap)
        person.types("reload", cwd=trap)
        seen = person.seen()
        assert seen["supervised"]
        assert not sprung.exists()
        person.kills(seen["owner_pid"])
        # As a module, without -P: this first program has the trap on its path by the person's own choice, so it is
        # started elsewhere and its daemon is reloaded from there.
        words = [sys.executable, "-m", "everdeck.cli", "--state", str(person.state), "up", "--detach", "--no-http"]
        for entry in trap.iterdir():
            entry.rename(place / entry.name)
        subprocess.run(words, cwd=trap, env=person.env, check=True, capture_output=True, timeout=60)
        for entry in place.glob("*.py"):
            entry.rename(trap / entry.name)
        person.types("reload", cwd=place)
        assert not sprung.exists()
    finally:
        person.leaves()


def _nested(folder: Path) -> None:
    """Deeper than the stack of an interpreter and the usual limit of descriptors."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("a", dir_fd=fd)
        below = os.open("a", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def test_directories_without_end_are_removed_and_keep_no_owner_from_starting(tmp_path: Path) -> None:
    """Nested ones of a removal that an earlier owner began; linked and closed ones of a worker that is removed now."""
    state, treasure = tmp_path / "state", tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").touch()

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("alice", ["true"], restart=Restart("never"))
        _nested(state / "workers/removing~bob~0")
        async with AsyncDeck(state) as deck:
            (state / "workers/alice/data/link").symlink_to(treasure)
            (state / "workers/alice/data/closed/in").mkdir(parents=True)
            (state / "workers/alice/data/closed/in").chmod(0)
            (state / "workers/alice/data/closed").chmod(0o500)
            await deck.remove("alice")

    asyncio.run(scenario())
    assert list((state / "workers").iterdir()) == []
    assert [path.name for path in treasure.iterdir()] == ["gold"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="os.fwalk needs no stack there")
def test_directories_without_end_are_not_given_to_another_account(
    place: Path, mallory: Account, victim: Account
) -> None:
    """Its files follow a worker to its new account; where they cannot be followed, the start is refused in words."""
    home = place / "state/workers/alice"
    _nested(home / "data")
    os.chown(home / "data", mallory.uid, mallory.gid)
    try:
        with pytest.raises(SpecError, match="too deep"):
            rights.furnish(WorkerSpec(("true",), user=victim.name), home, place / "state")
        assert (home / "data").stat().st_uid == mallory.uid
    finally:
        disk.remove_tree(home)
