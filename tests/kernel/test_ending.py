"""Ending whole trees: the polite, the deaf, the stopped, the escaped and the ever-forking."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from everdeck.errors import ProcessGone
from everdeck.kernel import containment, escalation, exits, flock
from everdeck.kernel import identity as ids
from everdeck.model import Containment, Exited, Killed, UnknownExit
from support.kernel_trees import Nursery, Started, wait_readable

POLITE = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
os.write(int(os.environ["SAY"]), b"ready\\n")
while True:
    signal.pause()
"""

ESCAPES = {
    "child": "sleep 300 & echo $! >/dev/fd/$SAY; exec sleep 300",
    "setsid": "setsid sleep 300 & echo $! >/dev/fd/$SAY; exec sleep 300",
    "daemon": "sh -c 'setsid sh -c \"echo \\$\\$ >/dev/fd/$SAY; exec sleep 300\" & exit 0'; exec sleep 300",
    "cleared-environment": "setsid env -i sleep 300 & echo $! >/dev/fd/$SAY; exec sleep 300",
}


def _gone(one: Started, pid: int) -> None:
    with contextlib.suppress(ProcessGone):  # a zombie, which its parent reaps at this moment
        assert ids.read_stat(pid).dead


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("strength", ["cgroup", "cookie"])
def test_stop_ends_what_tried_to_get_away(
    nursery: Nursery, request: pytest.FixtureRequest, escape: str, strength: str
) -> None:
    """A child, a child in a session of its own, a daemon, one that cleared its environment: all gone, and proven."""
    cgroup = request.getfixturevalue("cgroup_dir") / "w" if strength == "cgroup" else None
    one = nursery.start(["sh", "-c", ESCAPES[escape]], cgroup=cgroup)
    escaped = int(one.line())
    assert one.tree.strength is Containment(strength)

    outcome = escalation.stop_trees([one.subject()])[one.tree.name]

    assert outcome.gone
    assert outcome.killed == (), "everybody left when asked"
    _gone(one, escaped)
    assert one.tree.lock_path is not None
    assert not flock.is_held(one.tree.lock_path)


def test_one_that_closed_every_descriptor_and_left_is_still_found(nursery: Nursery) -> None:
    """Programs like sudo drop the lock; the cookie remains."""
    code = (
        "import os,sys\nsay=int(os.environ['SAY'])\n"
        "if os.fork(): os.wait(); import time; time.sleep(300)\n"
        "os.setsid()\nif os.fork(): os._exit(0)\n"
        "os.write(say, b'%d\\n' % os.getpid())\nos.closerange(0, 4096)\nimport time\ntime.sleep(300)"
    )
    one = nursery.start([sys.executable, "-c", code])
    escaped = int(one.line())
    ids.send_signal(one.pidfd, signal.SIGKILL)
    wait_readable(one.pidfd)
    assert one.tree.lock_path is not None
    for _ in range(1000):
        if not flock.is_held(one.tree.lock_path):
            break
        os.sched_yield()  # it closes its descriptors right after it spoke

    assert not containment.is_gone(one.tree)
    assert containment.members([one.tree])[one.tree.cookie] == [escaped]
    assert escalation.stop_trees([one.subject()])[one.tree.name].gone
    _gone(one, escaped)


def test_a_deaf_worker_is_killed_after_its_grace(nursery: Nursery) -> None:
    """SIGTERM is ignored by parent and child; SIGKILL is not, and who needed it is told."""
    one = nursery.start(["sh", "-c", "trap '' TERM; sleep 300 & echo $! >/dev/fd/$SAY; wait"])
    child = int(one.line())
    begun = time.monotonic()

    outcome = escalation.stop_trees([one.subject(grace_seconds=0.5)])[one.tree.name]

    assert outcome.gone
    assert {survivor.pid for survivor in outcome.killed} == {one.pid, child}
    assert any("sleep 300" in survivor.command for survivor in outcome.killed)
    assert time.monotonic() - begun >= 0.5


@pytest.mark.parametrize("strength", ["cgroup", "cookie"])
def test_a_stopped_worker_leaves_when_asked(nursery: Nursery, request: pytest.FixtureRequest, strength: str) -> None:
    """A stopped process acts on SIGTERM only once continued, so it is."""
    cgroup = request.getfixturevalue("cgroup_dir") / "w" if strength == "cgroup" else None
    one = nursery.start([sys.executable, "-I", "-S", "-c", POLITE], cgroup=cgroup)
    assert one.line() == "ready"
    ids.send_signal(one.pidfd, signal.SIGSTOP)
    os.waitid(os.P_PIDFD, one.pidfd, os.WSTOPPED)

    outcome = escalation.stop_trees([one.subject(grace_seconds=20)])[one.tree.name]

    assert outcome.gone
    assert outcome.killed == ()
    assert exits.peek_child(one.pidfd) == Exited(7)


COUNTING = """
import os, signal
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.signal(signal.SIGCONT, lambda *_: asked and os._exit(len(asked)))
os.write(int(os.environ["SAY"]), b"ready\\n")
while True:
    signal.pause()
"""


def test_one_that_takes_its_time_is_asked_once(nursery: Nursery, cgroup_dir: Path) -> None:
    """Who has not ended a moment later is looked at and continued; a second SIGTERM would mean "at once" to many."""
    one = nursery.start([sys.executable, "-I", "-S", "-c", COUNTING], cgroup=cgroup_dir / "w")
    assert one.line() == "ready"

    outcome = escalation.stop_trees([one.subject(grace_seconds=20)])[one.tree.name]

    assert outcome.gone
    assert outcome.killed == ()
    assert exits.peek_child(one.pidfd) == Exited(1)


def test_one_outside_the_group_is_asked_while_its_leader_waits_for_it(nursery: Nursery, cgroup_dir: Path) -> None:
    """A leader that ends only after a child in a session of its own is not waited for in vain."""
    code = (
        "trap : TERM; setsid sleep 300 & echo $! >/dev/fd/$SAY; while kill -0 $! 2>/dev/null; do wait $!; done; exit 3"
    )
    one = nursery.start(["sh", "-c", code], cgroup=cgroup_dir / "w")
    child = int(one.line())

    outcome = escalation.stop_trees([one.subject(grace_seconds=20)])[one.tree.name]

    assert outcome.gone
    assert outcome.killed == ()
    assert exits.peek_child(one.pidfd) == Exited(3)
    _gone(one, child)


def test_many_deaf_trees_share_one_grace(nursery: Nursery) -> None:
    """Twenty workers that ignore SIGTERM are gone after one grace, not after twenty."""
    deaf = [
        nursery.start(["sh", "-c", "trap '' TERM; echo ready >/dev/fd/$SAY; while :; do sleep 300; done"])
        for _ in range(20)
    ]
    for one in deaf:
        assert one.line() == "ready"
    begun = time.monotonic()

    outcomes = escalation.stop_trees([one.subject(grace_seconds=1) for one in deaf])

    assert all(outcome.gone and outcome.killed for outcome in outcomes.values())
    assert time.monotonic() - begun < 19, "one grace for all, plus the work"


BOMBERS = int(os.environ.get("EVERDECK_BOMBERS", "200"))  # fewer where a fork is emulated: they fork all the time
BOMB = """
import os, sys, time
say = int(os.environ["SAY"])
if len(sys.argv) > 1:
    os.setsid()
for _ in range(BOMBERS):
    if os.fork() == 0:
        if len(sys.argv) > 1:
            os.setsid()
        while True:
            # Each one keeps replacing itself: whoever is counted now is gone a moment later.
            if os.fork():
                os._exit(0)
            time.sleep(0.3)
os.write(say, b"ready\\n")
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(300)
"""


@pytest.mark.parametrize("strength", ["cgroup", "cookie"])
def test_a_fork_bomb_is_ended_while_it_keeps_forking(
    nursery: Nursery, request: pytest.FixtureRequest, tmp_path: Path, strength: str
) -> None:
    """Processes, two hundred unless told, that fork while they are being killed: none is left."""
    cgroup = request.getfixturevalue("cgroup_dir") / "w" if strength == "cgroup" else None
    program = tmp_path / "bomb.py"
    program.write_text(BOMB.replace("BOMBERS", str(BOMBERS)))
    one = nursery.start([sys.executable, "-I", "-S", str(program)], cgroup=cgroup)
    assert one.line() == "ready"

    outcome = escalation.stop_trees([one.subject(grace_seconds=0.2)])[one.tree.name]

    assert outcome.gone
    assert containment.is_gone(one.tree)


def test_a_tree_that_is_gone_already_is_done_at_once(nursery: Nursery) -> None:
    """Stopping twice harms nobody."""
    one = nursery.start(["true"])
    wait_readable(one.pidfd)

    assert escalation.stop_trees([one.subject()])[one.tree.name].gone
    assert escalation.stop_trees([one.subject()])[one.tree.name].gone


def test_how_our_child_ended_can_be_read_without_reaping(nursery: Nursery) -> None:
    """The zombie keeps pid, session and group numbers reserved until its tree is gone."""
    one = nursery.start(["sh", "-c", "exit 42"])
    wait_readable(one.pidfd)

    assert exits.peek_child(one.pidfd) == Exited(42)
    assert exits.peek_child(one.pidfd) == Exited(42)
    assert ids.read_stat(one.pid).dead
    assert exits.reap_child(one.pidfd) == Exited(42)
    assert isinstance(exits.reap_child(one.pidfd), Exited | UnknownExit)


PARENT = """
import os, signal
say = int(os.environ["SAY"])
pid = os.fork()
if pid == 0:
    signal.pause()
os.write(say, b"%d\\n" % pid)
os.waitpid(pid, 0)
os.write(say, b"reaped\\n")
signal.pause()
"""


def test_how_somebody_elses_child_ended(nursery: Nursery) -> None:
    """An adopted process is reaped by its own parent; its pidfd tells the status where the kernel can, else unknown."""
    one = nursery.start([sys.executable, "-I", "-S", "-c", PARENT])
    pidfd = ids.open_pidfd(int(one.line()))
    try:
        assert not exits.is_our_child(pidfd)
        assert exits.told_by_pidfd(pidfd) == UnknownExit(), "alive: nothing to tell"
        ids.send_signal(pidfd, signal.SIGTERM)
        assert one.line() == "reaped"
        assert exits.told_by_pidfd(pidfd) in {Killed(signal.SIGTERM), UnknownExit()}
        if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 15):
            assert exits.told_by_pidfd(pidfd) == Killed(signal.SIGTERM)
    finally:
        os.close(pidfd)


def test_what_a_leader_left_behind_is_signalled_by_its_old_pidfd(nursery: Nursery) -> None:
    """The leader is dead and reaped; its pidfd still names its group, so no number has to be trusted."""
    if not ids.has_group_signal():
        pytest.skip("PIDFD_SIGNAL_PROCESS_GROUP needs Linux 6.9")
    one = nursery.start(["sh", "-c", "sleep 300 & echo $! >/dev/fd/$SAY; exec sleep 300"])
    child = ids.open_pidfd(int(one.line()))
    try:
        ids.send_signal(one.pidfd, signal.SIGKILL)
        wait_readable(one.pidfd)
        exits.reap_child(one.pidfd)
        assert ids.is_alive(child)

        assert ids.send_group_signal(one.pidfd, signal.SIGKILL)

        wait_readable(child)
    finally:
        os.close(child)
