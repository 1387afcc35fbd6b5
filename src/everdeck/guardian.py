"""The small process that ends bound workers when the owner dies, whether or not they cooperate.

It runs in a session of its own, started by the owner's first bound worker, and does nothing but wait on one
descriptor: packets say who is bound, end-of-file says that the owner is dead, in whichever way it died. Then every
bound tree is stopped, all at once: SIGTERM and SIGCONT, the worker's grace, SIGKILL, proof. Then it leaves.

A new owner may open the deck while this goes on, reap the same trees and start the next copies. So nothing is
signalled here on the strength of a name that the next copy shares: the worker's lock file and its cgroup directory
may be the next copy's by now. What counts is what belongs to one start only: the leader's identity, the cookie in
the environment, and for processes that dropped the cookie, that they are older than the owner's death.

SIGKILL of the guardian alone harms nothing (the owner starts another); of guardian and owner together, the
lifeline (L1), the lock (L2) and the next open (L4) remain.

Run as ``python -m everdeck.guardian CHANNEL_FD STATE_DIR``; the directory is there to be read in ``ps``.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from everdeck.errors import KernelError
from everdeck.kernel import containment, flock
from everdeck.kernel import identity as ids
from everdeck.kernel.bound import Bind, Unbind, decode
from everdeck.kernel.containment import Tree
from everdeck.kernel.escalation import Outcome, Subject, stop_trees
from everdeck.model import Identity
from everdeck.statedir import WorkerDir

_PACKET_BYTES: Final = 1 << 18
_LOOKS: Final = 64
_VFORK_SECONDS: Final = 0.01
_STRAY_SECONDS: Final = 0.1


def main(arguments: list[str]) -> int:
    """Listen until the owner is gone, then end what it left behind."""
    # We end by ourselves soon after the owner does. A SIGTERM to everybody (the machine shuts down, a whole
    # session is ended) must not take away the one process that would insist.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _raise_descriptor_limit()
    bound = told_until_death(socket.socket(fileno=int(arguments[0])))
    if bound:
        report(end_all(bound))
    return 0


def told_until_death(channel: socket.socket) -> list[Bind]:
    """Listen to the owner until it is gone; who was bound then."""
    bound: dict[str, Bind] = {}
    with channel:
        while packet := _packet(channel):
            match decode(packet):
                case Bind() as word:
                    bound[word.tree.name] = word
                case Unbind(name):
                    bound.pop(name, None)
    return list(bound.values())


def end_all(bound: list[Bind]) -> dict[str, Outcome]:
    """Stop every tree, all together; how each ended.

    Then look again, until a look finds nobody: at starts that were on their way when the owner died (their process
    shows its cookie only once it has been exec'ed), and at processes that dropped the cookie.
    """
    died_at_ticks = int(ids.boottime() * ids.CLOCK_TICKS)
    outcomes: dict[str, Outcome] = {}
    # Those without a cookie in the worker's cgroup are found at once; those that carry its lock take a look at
    # every descriptor of the machine, so that is left for later.
    subjects = [_subject(word) for word in bound] + _strays(bound, died_at_ticks, by_lock=False)
    for _ in range(_LOOKS):
        for name, outcome in _stopped(subjects).items():
            worker = name.partition("/")[0]
            before = outcomes.get(worker, Outcome(gone=True))
            outcomes[worker] = Outcome(
                before.gone and outcome.gone, before.killed + outcome.killed, before.survivors + outcome.survivors
            )
        alive = containment.cookie_scan(word.tree.cookie for word in bound)
        subjects = [_subject(word) for word in bound if alive[word.tree.cookie]]
        subjects += _strays(bound, died_at_ticks, by_lock=True)
        if not subjects and not any(_is_being_started(word) for word in bound):
            break
    return outcomes


def report(outcomes: dict[str, Outcome]) -> None:
    """Say how each tree ended, a JSON line each: the next owner and people read it in ``STATE/guardian.log``."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    for name, outcome in outcomes.items():
        line = {
            "at": now,
            "worker": name,
            "gone": outcome.gone,
            "killed": [{"pid": survivor.pid, "command": survivor.command} for survivor in outcome.killed],
            "survivors": [{"pid": survivor.pid, "command": survivor.command} for survivor in outcome.survivors],
        }
        with contextlib.suppress(OSError):  # a full disk is no reason to leave a worker alive
            os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


def _packet(channel: socket.socket) -> bytes:
    try:
        return channel.recv(_PACKET_BYTES)
    except ConnectionResetError:  # the owner died with words of ours unread; we never say any, but the rule exists
        return b""


def _subject(word: Bind) -> Subject:
    """The tree by what belongs to this start only."""
    tree = word.tree
    by_start = Tree(tree.name, tree.cookie, lock_path=None, identity=tree.identity, cgroup=None)
    return Subject(by_start, None, word.signal_number, word.grace_seconds)


def _stopped(subjects: list[Subject]) -> dict[str, Outcome]:
    """End them together; if the kernel refuses that (no descriptors left), one after the other."""
    try:
        return stop_trees(subjects)
    except KernelError as err:
        sys.stderr.write(f"ending {len(subjects)} trees together: {err}; going on one by one\n")
    outcomes: dict[str, Outcome] = {}
    for subject in subjects:
        try:
            outcomes |= stop_trees([subject])
        except KernelError as err:
            sys.stderr.write(f"{subject.tree.name}: {err}\n")
            outcomes[subject.tree.name] = Outcome(gone=False)
    return outcomes


def _is_being_started(word: Bind) -> bool:
    """Was the owner killed between vfork and exec? Then somebody holds the lock who shows no cookie yet."""
    tree = word.tree
    if tree.identity is not None or tree.lock_path is None or not flock.is_held(tree.lock_path):
        return False
    if all(containment.cookie_of(pid) is not None for pid in flock.holders(tree.lock_path)):
        return False  # the next copy, of a new owner
    select.select([], [], [], _VFORK_SECONDS)  # exec gives no sign; it comes within microseconds
    return True


def _strays(bound: list[Bind], died_at_ticks: int, *, by_lock: bool) -> list[Subject]:
    """Processes of the trees that have no cookie, each by its own identity."""
    found = []
    for word in bound:
        tree = word.tree
        pids: set[int] = set()
        if tree.cgroup is not None:
            nobody = containment.new_cookie()  # so that the members of the cgroup are all that is found
            pids.update(containment.members([Tree(tree.name, nobody, None, None, tree.cgroup)])[nobody])
        if by_lock and not pids and tree.lock_path is not None and flock.is_held(tree.lock_path):
            # A descriptor can be passed to anybody: only who fits the worker in everything else is of its tree.
            pids.update(pid for pid in _carriers(tree.lock_path) if containment.is_ours_by_lock(tree, pid))
        for pid in sorted(pids):
            with contextlib.suppress(KernelError):
                identity = _older_without_cookie(pid, died_at_ticks)
                if identity is not None:
                    lone = Tree(f"{tree.name}/{pid}", containment.new_cookie(), None, identity)
                    found.append(Subject(lone, None, word.signal_number, word.grace_seconds))
    if not found:
        return found
    # On a busy machine we may hear of the owner's death only when a new owner has started the next copy, which then
    # looks older than that death. On its way to its program it shows no cookie yet; a stray never will.
    select.select([], [], [], _STRAY_SECONDS)
    return [one for one in found if containment.cookie_of(_pid_of(one)) is None]


def _pid_of(subject: Subject) -> int:
    assert subject.tree.identity is not None  # noqa: S101 - a lone tree is known by its identity
    return subject.tree.identity.pid


def _carriers(lock_path: Path | str) -> list[int]:
    """Who carries the worker's lock, but not the deck's next owner.

    An owner holds the lock of a worker that it is just starting, for a moment and without a cookie; it may have
    waited for the deck since long before the first owner died. It is told from a stray by the deck's own lock, which it
    took before, and by the second look: it lets go of the worker's lock, a stray never does.
    """
    carriers = flock.holders(lock_path)
    owners = flock.holders(WorkerDir(Path(lock_path).parent).deck.lock) if carriers else []
    return [pid for pid in carriers if pid not in owners and flock.is_holder(lock_path, pid)]


def _older_without_cookie(pid: int, died_at_ticks: int) -> Identity | None:
    """Its identity, if it is older than the owner's death and belongs to no start by cookie."""
    pidfd = ids.open_pidfd(pid)
    try:
        identity = ids.identity_of(pidfd, pid)
        # Between vfork and exec a new copy shows no cookie of its own yet; it is younger than the owner's death.
        if identity.start_ticks >= died_at_ticks or containment.cookie_of(pid) is not None:
            return None
        return identity if ids.is_alive(pidfd) else None
    finally:
        os.close(pidfd)


def _raise_descriptor_limit() -> None:
    """One pidfd for each process that is awaited: take what we may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
