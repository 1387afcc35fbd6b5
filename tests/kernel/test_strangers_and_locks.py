"""Who daemonised is found, who has a reused pid or took a lock himself is a stranger."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everdeck.kernel import containment, exits, flock
from everdeck.kernel import identity as ids
from everdeck.kernel.containment import Tree
from everdeck.kernel.escalation import Subject, stop_trees
from support.kernel_trees import Nursery, wait_readable

NS_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        say = int(os.environ["SAY"])
        os.write(say, f"{os.getpid()}\\n".encode())
        os.closerange(0, 100)
        time.sleep(100)
    os._exit(0)
os.wait()
os.write(int(os.environ["SAY"]), b"forked\\n")
time.sleep(100)
"""


def test_what_daemonised_before_its_leader_was_moved_is_moved_too(nursery: Nursery, cgroup_dir: Path) -> None:
    """It has left its parent, its session and every descriptor; its cookie tells, and a stop ends it."""
    one = nursery.start([sys.executable, "-c", DAEMON])
    said = {one.line(), one.line()}
    daemon = int((said - {"forked"}).pop())
    pidfd = ids.open_pidfd(daemon)
    try:
        assert containment.gather_into_cgroups([(one.tree, cgroup_dir / "w")]) == [(one.tree, cgroup_dir / "w")]
        assert (
            daemon in containment.members([Tree("w", one.tree.cookie, None, None, cgroup_dir / "w")])[one.tree.cookie]
        )

        one.tree = Tree(one.tree.name, one.tree.cookie, one.tree.lock_path, one.tree.identity, cgroup_dir / "w")
        outcome = stop_trees([Subject(one.tree, one.pidfd, signal.SIGTERM, 5)])[one.tree.name]

        assert outcome.gone
        assert ids.is_readable(pidfd), "the daemon has ended"
    finally:
        os.close(pidfd)


@pytest.mark.skipif(
    not os.access(NS_LAST_PID, os.W_OK) or os.geteuid() != 0, reason="needs root and a writable ns_last_pid"
)
def test_a_stranger_with_a_reused_pid_is_not_moved_into_a_cgroup(nursery: Nursery, cgroup_dir: Path) -> None:
    """A late order to move a worker that has ended meanwhile: whoever has its pid now would die with the next stop."""
    stranger = None
    tree = None
    for _ in range(100):  # other programs fork on this machine too, and may take the pid first
        one = nursery.start(["sleep", "100"])
        tree = one.tree
        ids.send_signal(one.pidfd, signal.SIGKILL)
        wait_readable(one.pidfd)
        exits.reap_child(one.pidfd)
        NS_LAST_PID.write_text(str(one.pid - 1))
        candidate = subprocess.Popen(["sleep", "100"])
        if candidate.pid == one.pid:
            stranger = candidate
            break
        candidate.kill()
        candidate.wait()
    assert stranger is not None, "no freed pid could be taken in 100 attempts"
    assert tree is not None
    try:
        before = Path(f"/proc/{stranger.pid}/cgroup").read_text()
        assert containment.gather_into_cgroups([(tree, cgroup_dir / "w")]) == []
        assert Path(f"/proc/{stranger.pid}/cgroup").read_text() == before
    finally:
        stranger.kill()
        stranger.wait()


def test_a_look_at_a_lock_is_never_taken_for_a_holder(tmp_path: Path) -> None:
    """Somebody asks all the time whether the lock is held; whoever takes it gets it all the same."""
    path = tmp_path / "lock"
    path.touch()
    code = (
        "import sys; from pathlib import Path; from everdeck.kernel import flock\n"
        "print('looking', flush=True)\n"
        "while True: flock.is_held(Path(sys.argv[1]))"
    )
    looker = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert looker.stdout is not None
        assert looker.stdout.readline() == b"looking\n"
        for _ in range(3000):
            fd = flock.take(path)
            assert fd is not None, "a look was taken for a holder"
            os.close(fd)
    finally:
        looker.kill()
        looker.wait()
        assert looker.stdout is not None
        looker.stdout.close()


def test_who_took_the_lock_himself_is_a_stranger(nursery: Nursery) -> None:
    """The worker dropped its lock and somebody else took it: he keeps the tree from being proven gone, and lives."""
    closes = (
        "import os, time; say = int(os.environ['SAY']); os.write(say, b'up\\n'); os.closerange(3, 100); time.sleep(100)"
    )
    one = nursery.start([sys.executable, "-c", closes])
    assert one.tree.lock_path is not None
    assert one.line() == "up"
    took = (
        "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('got it', flush=True); time.sleep(100)"
    )
    stranger = subprocess.Popen([sys.executable, "-c", took, str(one.tree.lock_path)], stdout=subprocess.PIPE)
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"got it\n"
        assert flock.holders(one.tree.lock_path) == [stranger.pid]
        assert not flock.is_heir(one.tree.lock_path, stranger.pid)
        ids.send_signal(one.pidfd, signal.SIGKILL)
        wait_readable(one.pidfd)
        assert containment.members([one.tree])[one.tree.cookie] == []
        assert not containment.is_gone(one.tree)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
        assert stranger.stdout is not None
        stranger.stdout.close()
