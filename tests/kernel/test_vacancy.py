"""An owner on its way in or out: what tells of it, and how soon its lock is free."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from everdeck.client import Daemon
from everdeck.errors import NoOwner
from everdeck.kernel import descriptors, flock, unixsocket
from everdeck.kernel.vacancy import Vacancy
from everdeck.statedir import SOCKET, StateDir
from everdeck.wire.client import WireClient
from support.waiting import until

HOLDER = """
import fcntl, os, signal, sys
from pathlib import Path
from everdeck.deck.home import DeckHome
from everdeck.kernel import inotify
home = DeckHome(Path(sys.argv[1]))
home.open()
inotify.add_watch(inotify.open_inotify(), sys.argv[1], inotify.MODIFY)
end = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 100)
os.close(1)
os.write(end, b"r")
signal.pause()
"""
SECONDS = 60


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory that nobody owns."""
    place = tmp_path / "state"
    place.mkdir(mode=0o700)
    return place


def owner_of(state: Path) -> "subprocess.Popen[bytes]":
    """A process that has the deck's lock, and something the kernel lets go of slowly."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(state)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1) == b"r"
    return process


def test_the_lock_of_a_killed_owner_is_free_before_anything_else_of_it_ends(state: Path) -> None:
    """Whoever hears a connection end finds the lock free, though an inotify descriptor takes the kernel its time."""
    with owner_of(state) as owner:
        assert owner.stdout is not None
        owner.send_signal(signal.SIGKILL)
        assert owner.stdout.read() == b""

        lock = flock.take(StateDir(state).lock)

    assert lock is not None
    os.close(lock)


def test_a_raised_descriptor_is_the_same_open_file(state: Path) -> None:
    """The lock goes with it, and the old number is free."""
    lock = flock.take(StateDir(state).lock)
    assert lock is not None

    high = descriptors.raised(lock)

    assert high >= descriptors.HIGH
    assert descriptors.raised(high) == high
    assert flock.is_held(StateDir(state).lock)
    os.close(high)
    assert not flock.is_held(StateDir(state).lock)


def listens(state: Path, _: "subprocess.Popen[bytes]") -> None:
    """An owner's socket is renamed into the directory."""
    unixsocket.listen(state, SOCKET).close()


def lets_go(state: Path, _: "subprocess.Popen[bytes]") -> None:
    """The lock is touched, as by who let go of it."""
    os.utime(StateDir(state).lock)


def dies(_: Path, owner: "subprocess.Popen[bytes]") -> None:
    """The holder is killed."""
    owner.kill()


@pytest.mark.parametrize("act", [listens, lets_go, dies])
def test_each_fact_is_told(state: Path, act: Callable[[Path, "subprocess.Popen[bytes]"], None]) -> None:
    """Its socket is there, it let go of the lock, or it died: something becomes readable, and nothing did before."""
    with owner_of(state) as owner, closing(Vacancy(state)) as vacancy:
        try:
            with vacancy.facts() as facts:
                assert len(facts.descriptors) == 2
                assert select.select(facts.descriptors, [], [], 0)[0] == []

                act(state, owner)

                assert select.select(facts.descriptors, [], [], SECONDS)[0] != []
        finally:
            owner.kill()


@pytest.mark.parametrize("client", [WireClient, Daemon])
def test_a_command_that_meets_a_dying_owner_hears_of_its_end(state: Path, client: type[WireClient | Daemon]) -> None:
    """The lock is held and nobody listens: it waits, and when the holder is dead it says that there is no owner."""
    with owner_of(state) as owner, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(client(state).connect)
        try:
            until(lambda: asked.done() or watches(os.getpid(), state), "it waits for a fact")
        finally:
            owner.kill()
        with pytest.raises(NoOwner):
            asked.result(SECONDS)


def watches(pid: int, place: Path) -> bool:
    """Does a process have an inotify watch of this directory?"""
    inode = f"ino:{place.stat().st_ino:x} "
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(OSError):  # closed meanwhile
            if inode in info.read_text():
                return True
    return False
