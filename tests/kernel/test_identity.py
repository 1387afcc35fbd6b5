"""Who a process is: the kernel's own words, for any name, and never a stranger."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everdeck.errors import KernelError, ProcessGone
from everdeck.kernel import containment, escalation, exits
from everdeck.kernel import identity as ids
from everdeck.kernel.identity import Answer
from everdeck.model import Identity
from support.kernel_trees import Nursery, wait_readable

NS_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


@settings(suppress_health_check=[HealthCheck.too_slow])  # a machine that is emulated draws them slowly
@given(
    pid=st.integers(1, 2**22),
    comm=st.binary(max_size=64).filter(lambda name: b"\0" not in name),
    state=st.sampled_from("RSDZTtXxKWPI"),
    numbers=st.lists(st.integers(-(2**31), 2**63), min_size=49, max_size=49),
)
def test_stat_is_read_for_any_process_name(pid: int, comm: bytes, state: str, numbers: list[int]) -> None:
    """Spaces, parentheses, newlines and bytes that are no text in the name do not shift the fields."""
    raw = b"%d (%s) %s " % (pid, comm, state.encode()) + " ".join(map(str, numbers)).encode() + b"\n"

    stat = ids.parse_stat(raw)

    assert (stat.pid, stat.state, stat.ppid, stat.pgrp, stat.session) == (pid, state, *numbers[:3])
    assert stat.start_ticks == numbers[18]
    assert stat.dead == (state in "ZXx")


@given(st.binary(max_size=200))
def test_what_is_no_stat_line_is_refused(raw: bytes) -> None:
    """Anything else is an error of its own, never a wrong identity."""
    try:
        stat = ids.parse_stat(raw)
    except (ValueError, IndexError):
        return
    assert isinstance(stat.start_ticks, int)


@pytest.mark.parametrize("name", ["a b", "x) R 1 1 1", "((", "new\nline", "ümläut"])
def test_a_real_process_with_a_strange_name_is_recognised(nursery: Nursery, tmp_path: Path, name: str) -> None:
    """The kernel's name of a process is its file's name, whatever is in it."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    program = tmp_path / name
    shutil.copy(sleep, program)

    one = nursery.start([str(program), "100"])

    assert ids.read_stat(one.pid).session == one.pid
    assert one.tree.identity is not None
    assert ids.answer(one.tree.identity) is Answer.SAME


def test_the_three_answers(nursery: Nursery) -> None:
    """Same for the living, different for the dead, for zombies, for other boots and other start times."""
    one = nursery.start(["sleep", "100"])
    identity = one.tree.identity
    assert identity is not None
    assert ids.answer(identity) is Answer.SAME
    for other in (
        Identity("another boot", identity.pid, identity.start_ticks, identity.pidfd_inode),
        Identity(identity.boot_id, identity.pid, identity.start_ticks + 1, identity.pidfd_inode),
        Identity(identity.boot_id, identity.pid, identity.start_ticks, (identity.pidfd_inode or 0) + 1),
    ):
        if other.pidfd_inode != identity.pidfd_inode and not ids.has_pidfd_inodes():
            continue
        assert ids.answer(other) is Answer.DIFFERENT

    if ids.has_pidfd_inodes():
        by_inode = Identity(identity.boot_id, identity.pid, identity.start_ticks + 1, identity.pidfd_inode)
        os.close(ids.open_verified(by_inode, by_inode=True))
        stranger = Identity(identity.boot_id, identity.pid, identity.start_ticks, (identity.pidfd_inode or 0) + 1)
        with pytest.raises(ProcessGone):
            ids.open_verified(stranger, by_inode=True)
    without = Identity(identity.boot_id, identity.pid, identity.start_ticks + 1, None)
    with pytest.raises(ProcessGone):
        ids.open_verified(without, by_inode=True)

    ids.send_signal(one.pidfd, signal.SIGKILL)
    wait_readable(one.pidfd)

    assert ids.read_stat(one.pid).state == "Z", "nobody has reaped it, so it is a zombie"
    assert ids.answer(identity) is Answer.DIFFERENT
    exits.reap_child(one.pidfd)
    assert ids.answer(identity) is Answer.DIFFERENT


def test_an_identity_without_an_inode_still_compares_start_times(nursery: Nursery) -> None:
    """Below Linux 6.9 there is no inode; the start ticks alone decide then."""
    one = nursery.start(["sleep", "100"])
    identity = one.tree.identity
    assert identity is not None

    assert ids.answer(Identity(identity.boot_id, identity.pid, identity.start_ticks, None)) is Answer.SAME
    assert ids.answer(Identity(identity.boot_id, identity.pid, identity.start_ticks - 1, None)) is Answer.DIFFERENT


def test_a_pid_that_nobody_has_is_gone() -> None:
    """Impossible pids and thread ids are nobody's process."""
    with pytest.raises(ProcessGone):
        ids.open_pidfd(2**22)
    with pytest.raises(KernelError):
        ids.read_stat(2**22)


def _take_pid(wanted: int) -> subprocess.Popen[bytes] | None:
    """A stranger with exactly this pid, or None if somebody else was faster this time."""
    NS_LAST_PID.write_text(str(wanted - 1))
    stranger = subprocess.Popen(["sleep", "100"])
    if stranger.pid == wanted:
        return stranger
    stranger.kill()
    stranger.wait()
    return None


@pytest.mark.skipif(
    not os.access(NS_LAST_PID, os.W_OK) or os.geteuid() != 0, reason="needs root and a writable ns_last_pid"
)
def test_a_stranger_with_a_reused_pid_survives_everything(nursery: Nursery) -> None:
    """The pid of a dead worker is taken by a stranger: it is never taken for the worker and never signalled."""
    for _ in range(100):  # other programs fork on this machine too, and may take the pid first
        one = nursery.start(["sleep", "100"])
        identity = one.tree.identity
        assert identity is not None
        ids.send_signal(one.pidfd, signal.SIGKILL)
        wait_readable(one.pidfd)
        exits.reap_child(one.pidfd)
        if (stranger := _take_pid(identity.pid)) is not None:
            break
    assert stranger is not None, "no freed pid could be taken in 100 attempts"
    try:
        assert ids.answer(identity) is Answer.DIFFERENT
        with pytest.raises(ProcessGone):
            ids.open_verified(identity)
        assert containment.members([one.tree])[one.tree.cookie] == []
        assert containment.is_gone(one.tree)
        containment.signal_tree(one.tree, None, [identity.pid], signal.SIGKILL)
        outcomes = escalation.stop_trees([escalation.Subject(one.tree, None, signal.SIGKILL, 0)])
        assert outcomes[one.tree.name].gone
        assert not ids.send_signal(one.pidfd, signal.SIGKILL), "the old pidfd still means the old process"
        if ids.has_group_signal():
            assert not ids.send_group_signal(one.pidfd, signal.SIGKILL)
        else:
            containment.signal_tree(one.tree, one.pidfd, [identity.pid], signal.SIGKILL)
        assert stranger.poll() is None, "the stranger lives"
    finally:
        stranger.kill()
        stranger.wait()


def test_the_wall_clock_is_not_part_of_an_identity() -> None:
    """No clock but the kernel's ticks since boot is read, so a step of the clock disowns nobody."""
    source = Path(ids.__file__).read_text()
    assert "time.time" not in source
    assert "CLOCK_REALTIME" not in source


def test_importing_the_child_loads_little() -> None:
    """A worker that imports everdeck.child pays neither for asyncio nor for sqlite3 nor for the deck."""
    code = (
        "import sys, everdeck.child; "
        "sys.exit(any(m in sys.modules for m in ('asyncio', 'sqlite3', 'everdeck.deck', 'msgspec')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
