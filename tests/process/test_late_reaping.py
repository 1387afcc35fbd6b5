"""How an adopted worker ended is known only once its parent has reaped it, and parents may take their time."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from everdeck import Deck, Exited, Restart, State
from everdeck.kernel import exits
from everdeck.kernel.identity import read_stat
from support.waiting import until

# Like PID 1 of some containers: its child has long ended when it looks. It reaps when it is told to.
LATE_PARENT = """
import subprocess, sys
child = subprocess.Popen(["sh", "-c", "read line; exit 7"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.readline()
child.stdin.close()
sys.stdin.readline()
child.wait()
print("reaped", flush=True)
"""
NEVER = Restart(policy="never")


@dataclass
class LateParent:
    """A parent that does what it is told, and not before."""

    process: "subprocess.Popen[str]"
    child: int

    def says(self, word: str) -> None:
        """Go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def ends_its_child(self) -> None:
        """The child has ended and is a zombie."""
        self.says("end")
        until(lambda: read_stat(self.child).state == "Z", "the child has ended")


@pytest.fixture
def parent() -> Iterator[LateParent]:
    """A parent with a child that is somebody else's to us."""
    if not exits.pidfds_tell():
        pytest.skip("this kernel does not tell how somebody else's child ended (Linux 6.15 does)")
    command = [sys.executable, "-c", LATE_PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield LateParent(process, int(process.stdout.readline()))
        finally:
            with contextlib.suppress(OSError):
                process.communicate()


def test_the_exit_of_an_adopted_worker_is_known_though_it_is_reaped_late(parent: LateParent, tmp_path: Path) -> None:
    """Nothing is decided while the kernel may still tell; two seconds later it does."""
    with Deck(tmp_path / "state") as deck:
        deck.adopt("late", parent.child, restart=NEVER)
        parent.ends_its_child()
        ended = time.monotonic()
        until(lambda: time.monotonic() > ended + 2, "its parent takes its time")
        assert deck.status("late").exit is None, "not unknown: it is not over yet"
        parent.says("reap")
        until(lambda: deck.status("late").exit is not None, "it is told how it ended")
        assert deck.status("late").exit == Exited(7)
        assert deck.status("late").state is State.EXITED


def test_a_stop_does_not_wait_for_whoever_reaps_late(parent: LateParent, tmp_path: Path) -> None:
    """The worker has ended and nobody reaped it: a stop is over before its parent has looked."""
    with Deck(tmp_path / "state") as deck:
        deck.adopt("late", parent.child, restart=NEVER)
        parent.ends_its_child()
        assert deck.stop("late").state in {State.STOPPED, State.EXITED}
        assert read_stat(parent.child).state == "Z", "it is still not reaped"
