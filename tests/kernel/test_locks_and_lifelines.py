"""A lock lives as long as any holder; a lifeline ends with its owner, whichever way it dies."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from everdeck.kernel import flock, lifeline
from everdeck.kernel import identity as ids
from support.kernel_trees import Nursery, ready_among, wait_readable


def test_only_one_takes_a_lock(tmp_path: Path) -> None:
    """The second taker is told, and the lock is free again when the first lets go."""
    first = flock.take(tmp_path / "lock")
    assert first is not None
    assert flock.take(tmp_path / "lock") is None
    assert flock.is_held(tmp_path / "lock")
    os.close(first)
    assert not flock.is_held(tmp_path / "lock")
    assert not flock.is_held(tmp_path / "never-made")


def test_a_lock_whose_file_was_replaced_is_taken_anew(tmp_path: Path) -> None:
    """A lock on an unlinked inode excludes nobody, so the taker ends up on the file that is there."""
    path = tmp_path / "lock"
    old = flock.take(path)
    path.unlink()
    new = flock.take(path)
    assert old is not None
    assert new is not None
    assert os.fstat(new).st_ino == path.stat().st_ino
    os.close(old)
    os.close(new)


def test_the_lock_is_held_while_any_process_of_the_tree_lives(nursery: Nursery) -> None:
    """The leader dies; a child that inherited the descriptor still holds the lock and is found as its holder."""
    one = nursery.start(["sh", "-c", "sleep 100 & echo $! >/dev/fd/$SAY; exec sleep 100"])
    child = int(one.line())
    assert one.tree.lock_path is not None
    assert sorted(flock.holders(one.tree.lock_path)) == sorted([one.pid, child])

    ids.send_signal(one.pidfd, signal.SIGKILL)
    wait_readable(one.pidfd)

    assert flock.is_held(one.tree.lock_path)
    assert flock.holders(one.tree.lock_path) == [child]


def test_who_has_the_file_open_is_not_its_holder(nursery: Nursery, tmp_path: Path) -> None:
    """A reader of the lock file must never be ended for it."""
    one = nursery.start(["sleep", "100"])
    assert one.tree.lock_path is not None
    with one.tree.lock_path.open() as reader:
        other = subprocess.Popen(["sleep", "100"], stdin=reader)
        try:
            assert flock.holders(one.tree.lock_path) == [one.pid]
        finally:
            other.kill()
            other.wait()


def test_the_write_end_of_a_lifeline_never_reaches_a_worker(nursery: Nursery) -> None:
    """Fifty workers, each with a lifeline: closing one ends one, so no other worker holds its write end."""
    lines = []
    workers = []
    for _ in range(50):
        line = lifeline.make()
        workers.append(nursery.start(["cat"], stdin_fd=line.read_fd))
        line.give_away_read_end()
        lines.append(line)
    try:
        lines[7].close()
        wait_readable(workers[7].pidfd)
        others = [one.pidfd for index, one in enumerate(workers) if index != 7]
        assert ready_among(others, 0.2) == []
    finally:
        for line in lines:
            line.close()
    for one in workers:
        wait_readable(one.pidfd)


def test_a_lifeline_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    """SIGKILL runs no handler; the kernel closes the pipe all the same."""
    code = (
        "import os,sys,time\nfrom everdeck.kernel import lifeline\nline=lifeline.make()\n"
        "sys.stdout.write(f'{os.getpid()} {line.read_fd}\\n');sys.stdout.flush()\ntime.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, fd = owner.stdout.readline().split()
        read_end = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert select.select([read_end], [], [], 0.1)[0] == []
            owner.kill()
            wait_readable(read_end)
            assert os.read(read_end, 1) == b""
        finally:
            os.close(read_end)


def test_a_fork_of_the_owner_does_not_keep_a_lifeline_open() -> None:
    """A host that forks after opening (a pre-forking server) must not keep its workers alive past its own death."""
    line = lifeline.make()
    release_read, release_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(release_write)
        os.read(release_read, 1)
        os._exit(0)
    try:
        os.close(release_read)
        reader = os.dup(line.read_fd)
        line.close()
        wait_readable(reader)
        assert os.read(reader, 1) == b""
        os.close(reader)
    finally:
        os.close(release_write)
        os.waitpid(pid, 0)
