"""Disk full, read-only, locked, corrupt, too new: the verb fails clearly, workers are untouched, and it works again."""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck import Deck, EverdeckError, Restart, State
from everdeck.deck.peek import peek
from everdeck.errors import RegistryTooNew, RegistryUnavailable, StateDirRefused
from everdeck.registry import Registry
from everdeck.registry.store import _OWNER_BUSY_SECONDS
from support.deck_owner import owner
from support.waiting import until

FOREVER = ["sleep", "1000"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB; needs root to mount one."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr!r}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_fails_the_verb_and_harms_nobody(small_disk: Path) -> None:
    """Start says that the disk is full; the running worker runs on; with space again everything works."""
    state = small_disk / "state"
    with Deck(state) as deck:
        first = deck.start("first", FOREVER)
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        with pytest.raises(EverdeckError, match=r"disk is full|No space"):
            _start_until_refused(deck)
        assert deck.status("first").pid == first.pid
        filler.unlink()
        assert deck.start("later", FOREVER).state is State.RUNNING
        alive = {status.name for status in deck.list() if status.state is State.RUNNING}
        assert {"first", "later"} <= alive
        deck.stop_all()
    assert not [s for s in peek(state).workers if s.pid is not None]


def _start_until_refused(deck: Deck) -> None:
    """Until the journal itself needs a page that is not there."""
    for number in range(300):
        deck.start(f"w{number}", FOREVER)


def test_a_locked_registry_fails_the_verb_until_it_is_free(tmp_path: Path) -> None:
    """Somebody holds the database: verbs say so, and the owner's loop does not wait for it; afterwards they work."""
    with Deck(tmp_path / "state") as deck:
        first = deck.start("first", FOREVER, restart=Restart(backoff_seconds=0))
        blocker = sqlite3.connect(tmp_path / "state" / "deck.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        for _ in range(25):
            with pytest.raises(RegistryUnavailable, match="locked"):
                deck.start("second", FOREVER)
        # Once it waits a moment for whoever writes; a wait each time would freeze everybody.
        assert time.monotonic() - began < 25 * _OWNER_BUSY_SECONDS
        # A death that cannot be recorded yet is dealt with as soon as it can.
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        blocker.execute("COMMIT")
        blocker.close()
        until(lambda: deck.status("first").pid not in {None, first.pid}, "it is restarted when the registry is free")
        assert deck.start("second", FOREVER).state is State.RUNNING
        deck.stop_all()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A file in the way, or no permission: the path and the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirRefused, match="file"):
        Deck(tmp_path / "file")
    with pytest.raises(StateDirRefused, match="file"):
        Deck(tmp_path / "file" / "below")


def test_a_newer_registry_is_refused_and_left_untouched(tmp_path: Path) -> None:
    """Going back to an older Everdeck must not damage what the newer one wrote."""
    state = tmp_path / "state"
    with Deck(state):
        pass
    with sqlite3.connect(state / "deck.db") as database:
        database.execute("PRAGMA user_version = 999")
    database.close()
    before = (state / "deck.db").read_bytes()
    with pytest.raises(RegistryTooNew, match="999"):
        Deck(state)
    assert (state / "deck.db").read_bytes() == before
    with pytest.raises(RegistryTooNew):
        peek(state)


def test_a_corrupt_registry_is_set_aside_and_live_workers_are_found_again(tmp_path: Path) -> None:
    """The note is lost, the workers are not: found by lock and cookie, with the same pids, and stoppable."""
    state = tmp_path / "state"
    with owner(state) as manager:
        pids = {
            "alice": manager.ask("start", "alice", FOREVER, env={"COLOUR": "green"}, secrets={"T": "s3cret"})["pid"]
        }
        pids["bob"] = manager.ask("start", "bob", FOREVER)["pid"]
        manager.ask("start", "gone", FOREVER)
        manager.ask("stop", "gone")
        manager.kill()
    (state / "deck.db").write_bytes(b"this is not a database, though it is long enough to look at" * 100)
    for journal in ("deck.db-wal", "deck.db-shm"):
        (state / journal).unlink(missing_ok=True)

    with Deck(state) as deck:
        assert {status.name: status.pid for status in deck.list()} == {**pids, "gone": None}
        assert deck.status("gone").state is State.STOPPED, "what it was is known from its note; nobody starts it"
        assert (state / "deck.db.corrupt-1").exists()
        assert deck.events()[0].detail["set_aside"] == "deck.db.corrupt-1"
        assert (state / "workers" / "gone" / "data").exists(), "nobody's data is thrown away"
        # The same start is still the same start: nothing of what it was started with is lost.
        assert deck.start("alice", FOREVER, env={"COLOUR": "green"}, secrets={"T": "s3cret"}).pid == pids["alice"]
        assert deck.start("bob", FOREVER).pid == pids["bob"]
        deck.stop_all()
    assert all(not Path(f"/proc/{pid}").exists() or _dead(pid) for pid in pids.values())


def _dead(pid: int) -> bool:
    from everdeck.kernel.identity import read_stat

    return read_stat(pid).dead


def test_the_schema_is_the_sum_of_its_migrations(tmp_path: Path) -> None:
    """A fresh registry and one that was migrated step by step are the same."""
    registry = Registry.open(tmp_path / "fresh.db")
    registry.close()
    stepwise = sqlite3.connect(tmp_path / "stepwise.db")
    folder = Path(__file__).parents[2] / "src" / "everdeck" / "registry" / "migrations"
    for script in sorted(folder.glob("*.sql")):
        stepwise.executescript(script.read_text())
    fresh = sqlite3.connect(tmp_path / "fresh.db")
    query = "SELECT type, name, sql FROM sqlite_master ORDER BY name"
    assert fresh.execute(query).fetchall() == stepwise.execute(query).fetchall()
    assert fresh.execute("PRAGMA user_version").fetchone()[0] == len(list(folder.glob("*.sql")))
    fresh.close()
    stepwise.close()


def test_registries_of_earlier_releases_are_opened(tmp_path: Path) -> None:
    """Each release leaves a registry file here; today's code opens every one of them."""
    kept = sorted((Path(__file__).parents[1] / "support" / "registries").glob("*.db"))
    assert kept, "the first release's registry is kept"
    for path in kept:
        shutil.copy(path, tmp_path / "deck.db")
        registry = Registry.open(tmp_path / "deck.db")
        try:
            assert {record.name for record in registry.records()} == {"alice", "bob"}
            assert registry.events()
        finally:
            registry.close()
        for file in tmp_path.glob("deck.db*"):
            file.unlink()
