"""The registry is deleted or older than the workers, or their directories are gone: whoever runs is found."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from everdeck import Deck, Restart, State
from everdeck.kernel.containment import cookie_of
from support.deck_owner import owner
from support.waiting import until

FOREVER = ["sleep", "1000"]

# As setproctitle does (redis, gunicorn, postgres): the memory that held the environment is used for something else.
FORGET = """
import ctypes, signal
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = int(fields[47]), int(fields[48])
ctypes.memset(start, 0, end - start)
print("forgot", flush=True)
signal.pause()
"""
FORGETFUL = [sys.executable, "-c", FORGET]


def lose_registry(state: Path) -> None:
    """As a person does who "cleans up"."""
    for file in state.glob("deck.db*"):
        file.unlink()


def test_programs_that_overwrote_their_environment_are_found_by_their_lock(tmp_path: Path) -> None:
    """No cookie shows any more; the lock is held, and the note beside it says what was started."""
    state = tmp_path / "state"
    with owner(state) as manager:
        fields = {"env": {"COLOUR": "green"}, "secrets": {"T": "s3cret"}, "restart": {"max_crashes": 77}}
        pid = manager.ask("start", "forgetful", FORGETFUL, **fields)["pid"]
        until(lambda: cookie_of(pid) is None, "its environment is gone")
        manager.kill()
    lose_registry(state)
    with Deck(state) as deck:
        assert deck.status("forgetful").pid == pid
        spec = deck.spec("forgetful")
        assert (spec.command, spec.env, spec.restart.max_crashes) == (tuple(FORGETFUL), {"COLOUR": "green"}, 77)
        assert deck.start("forgetful", spec).pid == pid, "the same start is still the same start"
        assert deck.restart("forgetful").pid != pid
        deck.stop_all()


def test_a_deleted_registry_loses_no_spec(tmp_path: Path) -> None:
    """Who runs is adopted, also without its lock; who was stopped is known and stays stopped."""
    state = tmp_path / "state"
    closes = [
        sys.executable,
        "-c",
        "import os, signal; os.closerange(3, 1000); print('closed', flush=True); signal.pause()",
    ]
    with owner(state) as manager:
        running = manager.ask("start", "running", FOREVER, restart={"max_crashes": 9})["pid"]
        unlocked = manager.ask("start", "unlocked", closes)["pid"]
        until(lambda: manager.ask("logs", "unlocked")[-1:] == ["closed"], "it dropped its lock")
        manager.ask("start", "resting", FOREVER, env={"A": "b"})
        manager.ask("stop", "resting")
        manager.kill()
    lose_registry(state)
    with Deck(state) as deck:
        shown = {status.name: status.pid for status in deck.list()}
        assert shown == {"running": running, "unlocked": unlocked, "resting": None}
        assert deck.status("resting").state is State.STOPPED
        assert deck.spec("running").restart.max_crashes == 9
        assert deck.start("resting").state is State.RUNNING
        assert deck.spec("resting").env == {"A": "b"}
        deck.stop_all()


@pytest.mark.parametrize("backup_said", ["stopped", "running"])
def test_an_older_registry_never_says_stopped_while_the_lock_is_held(tmp_path: Path, backup_said: str) -> None:
    """Restored from a backup of before the last start: the lock is right, and the process is adopted."""
    state, backup = tmp_path / "state", tmp_path / "backup"
    with owner(state) as manager:
        manager.ask("start", "w", FOREVER)
        if backup_said == "stopped":
            manager.ask("stop", "w")
        manager.kill()
    backup.mkdir()
    for file in state.glob("deck.db*"):
        shutil.copy(file, backup / file.name)
    with owner(state) as manager:
        manager.ask("restart", "w")
        pid = manager.ask("start", "w", [*FOREVER, "1"], replace=True)["pid"]
        manager.kill()
    for file in state.glob("deck.db*"):
        if not file.name.endswith("-ids"):
            file.unlink()
    for file in backup.iterdir():
        if not file.name.endswith("-ids"):
            shutil.copy(file, state / file.name)
    with Deck(state) as deck:
        shown = deck.status("w")
        assert (shown.pid, shown.state) == (pid, State.RUNNING)
        assert deck.spec("w").command == (*FOREVER, "1")
        changed = [event for event in deck.events() if event.kind == "owner-changed"][-1]
        assert changed.detail["found_by_lock"] == ["w"]
        deck.stop_all()


@pytest.mark.parametrize("lost", [".", "data"])
def test_a_record_without_a_directory_gets_one_again_and_it_is_said(lost: str, tmp_path: Path) -> None:
    """As a power cut or somebody's rm leaves it, whole or in part."""
    state = tmp_path / "state"
    with owner(state) as manager:
        pid = manager.ask("start", "ghost", FOREVER)["pid"]
        manager.kill()
    os.kill(pid, signal.SIGKILL)
    shutil.rmtree(state / "workers" / "ghost" / lost)
    with Deck(state) as deck:
        until(lambda: deck.status("ghost").state is State.RUNNING, "it runs in a directory of its own again")
        assert (state / "workers" / "ghost" / "data").is_dir()
        changed = [event for event in deck.events() if event.kind == "owner-changed"][-1]
        assert changed.detail["homes_made_again"] == ["ghost"]
        deck.stop_all()


def test_a_stranger_who_takes_a_lock_is_not_taken_for_a_worker(tmp_path: Path) -> None:
    """He took it himself, so it was not handed down to him: nobody is adopted or ended."""
    import fcntl

    state = tmp_path / "state"
    with Deck(state) as deck:
        deck.start("w", FOREVER, restart=Restart("never"))
        deck.stop("w")
    lose_registry(state)
    with (state / "workers" / "w" / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with Deck(state) as deck:
            assert all(status.pid != os.getpid() for status in deck.list())
