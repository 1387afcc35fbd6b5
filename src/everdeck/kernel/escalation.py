"""Ask, wait for the fact, then insist: SIGTERM and SIGCONT, the grace, SIGKILL, proof.

An :class:`Escalation` ends any number of trees at once, each with its own signal and grace, all of them in one
wait: its descriptor is readable when one of the awaited processes ended. Whoever drives it (the guardian with
:meth:`Escalation.run`, the deck from its loop) waits for that descriptor or the next deadline and calls
:meth:`Escalation.advance`. A tree is done only when it is proven gone (:func:`containment.is_gone`).

A stopped process acts on SIGTERM only once continued (POSIX, "Signal Concepts"), so SIGCONT follows.
Children that were forked while we signalled are found by looking again, until a look finds nobody.

Of a tree that is contained in its cgroup the leader's group is asked first, all groups in one tight loop. Most programs
end at that, and then one look into the cgroup is the proof. Only of those that have not ended a moment later it is seen
who is outside the group, or stopped: they are asked, and continued, too.
"""

import contextlib
import os
import select
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from time import monotonic
from typing import Final, Self

from everdeck.errors import KernelError, ProcessGone, ResourceExhausted
from everdeck.kernel import containment
from everdeck.kernel import identity as ids
from everdeck.kernel.containment import Tree

KILL_PATIENCE_SECONDS: Final = 10.0
"""How long after SIGKILL a tree may take to be gone before we report survivors (a process in D state)."""

# Somebody holds the lock whom /proc does not show (another pid namespace): there is no descriptor to wait for,
# so this is the one place that has to look again by time.
_UNSEEN_HOLDER_SECONDS: Final = 0.05
_LONGEST_LOOK_SECONDS: Final = (
    2.0  # a look is a pass over /proc; a descriptor left in an unread socket may stay for ever
)
# In which a program has ended that does not handle its signal: alone, and for each one that is ended with it.
_MOMENT_SECONDS: Final = 0.02
_MOMENT_OF_EACH_SECONDS: Final = 0.0003
_LONGEST_MOMENT_SECONDS: Final = 0.1
# Who has ended is told once, so nobody need be taken out of the epoll for it: it forgets a descriptor that is closed.
_ONCE: Final = select.EPOLLIN | select.EPOLLONESHOT


@dataclass(frozen=True, slots=True)
class Subject:
    """One tree to be ended, and how. ``leader_pidfd`` stays the caller's; None opens a verified one."""

    tree: Tree
    leader_pidfd: int | None = None
    signal_number: int = signal.SIGTERM
    grace_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process that was still there when the grace was over."""

    pid: int
    command: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one tree ended: proven gone or not, who needed SIGKILL, who survived even that."""

    gone: bool
    killed: tuple[Survivor, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    strangers: tuple[Survivor, ...] = ()
    """Who holds the tree's lock without being of the tree; they were not signalled."""


class _Phase(Enum):
    ASKED = auto()
    KILLED = auto()


@dataclass(slots=True)
class _Course:
    """One subject on its way."""

    subject: Subject
    leader_pidfd: int | None
    owns_leader_pidfd: bool
    phase: _Phase
    deadline: float
    awaited: dict[int, int] = field(default_factory=dict)  # pidfd -> pid
    leader_ended: bool = False
    killed: tuple[Survivor, ...] = ()
    look_again_at: float | None = None
    look_seconds: float = _UNSEEN_HOLDER_SECONDS


class Escalation:
    """Ends many trees together. Use as a context manager, or call :meth:`close`."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        *,
        now: Callable[[], float] = monotonic,
        kill_patience_seconds: float = KILL_PATIENCE_SECONDS,
    ) -> None:
        self._now = now
        self._kill_patience_seconds = kill_patience_seconds
        try:
            self._epoll = select.epoll()
        except OSError as err:
            raise ResourceExhausted(f"no epoll to wait with: {err.strerror}; raise the limit of open files") from err
        self._courses: dict[str, _Course] = {}
        self._by_pidfd: dict[int, _Course] = {}
        self.outcomes: dict[str, Outcome] = {}
        self._subjects = list(subjects)
        self._half_asked: dict[str, _Course] = {}  # their groups were signalled, nobody else was
        self._ask_rest_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Readable when a process that we wait for ended."""
        return self._epoll.fileno()

    @property
    def done(self) -> bool:
        """Has every subject an outcome?"""
        return not self._courses

    def next_deadline(self) -> float | None:
        """When :meth:`advance` must be called though nothing ended, on the clock that was handed in."""
        times = [course.deadline for course in self._courses.values()]
        times += [course.look_again_at for course in self._courses.values() if course.look_again_at is not None]
        times += [] if self._ask_rest_at is None else [self._ask_rest_at]
        return min(times, default=None)

    def begin(self) -> None:
        """Send the first signals and note whom we wait for."""
        now = self._now()
        others: list[_Course] = []
        for subject in self._subjects:
            leader, owned = _leader(subject)
            name = subject.tree.name
            course = _Course(subject, leader, owned, _Phase.ASKED, now + subject.grace_seconds)
            self._courses[name] = course
            if leader is None or not subject.tree.is_contained or not self._ask_group(course, leader):
                others.append(course)
        if self._half_asked:
            moment_seconds = _MOMENT_SECONDS + len(self._half_asked) * _MOMENT_OF_EACH_SECONDS
            self._ask_rest_at = now + min(moment_seconds, _LONGEST_MOMENT_SECONDS)
        if others:
            found = containment.members([course.subject.tree for course in others])
            for course in others:
                pids = found[course.subject.tree.cookie]
                if course.leader_pidfd is not None or pids:
                    self._send(course, pids, course.subject.signal_number, signal.SIGCONT)
                self._await(course, pids)
            self._settle([course for course in others if not course.awaited])
        self._escalate_overdue()

    def _ask_group(self, course: _Course, leader_pidfd: int) -> bool:
        """Signal the leader's group and wait for the leader; False if it takes more than that."""
        identity = course.subject.tree.identity
        if identity is None or not ids.has_group_signal():
            return False
        with contextlib.suppress(KernelError):
            if not ids.send_group_signal(leader_pidfd, course.subject.signal_number):
                return False
        # Also if it has ended by now: then it is readable at once.
        self._epoll.register(leader_pidfd, _ONCE)
        course.awaited[leader_pidfd] = identity.pid
        self._by_pidfd[leader_pidfd] = course
        self._half_asked[course.subject.tree.name] = course
        return True

    def _ask_rest(self) -> None:
        """A moment is over: of trees whose leaders have not ended, ask whoever is outside the group, continue all."""
        half_asked, self._half_asked = self._half_asked.values(), {}
        self._ask_rest_at = None
        rest = [course for course in half_asked if course.awaited and course.phase is _Phase.ASKED]
        found = containment.members([course.subject.tree for course in rest])
        for course in rest:
            pids = found[course.subject.tree.cookie]
            # Not twice to the group: to many programs a second signal means "at once, whatever you are doing".
            self._send(course, pids, course.subject.signal_number, signal.SIGCONT, to_group=(signal.SIGCONT,))
            self._await(course, pids)

    def advance(self) -> None:
        """Take note of who ended, prove trees gone, and kill what is over its grace."""
        touched: dict[str, _Course] = {}
        for pidfd, _ in self._epoll.poll(0, max(1, len(self._by_pidfd))):
            course = self._by_pidfd[pidfd]
            course.leader_ended |= pidfd == course.leader_pidfd
            self._forget(course, pidfd)
            touched[course.subject.tree.name] = course
        now = self._now()
        if self._ask_rest_at is not None and self._ask_rest_at <= now:
            self._ask_rest()
        due = {
            name: course
            for name, course in self._courses.items()
            if course.look_again_at is not None and course.look_again_at <= now
        }
        unattended = {name: course for name, course in touched.items() if not course.awaited}
        self._settle(list((unattended | due).values()))
        self._escalate_overdue()

    def run(self) -> dict[str, Outcome]:
        """Drive it here until every subject has an outcome."""
        self.begin()
        poller = select.poll()  # not select(): that knows only descriptors below 1024
        poller.register(self._epoll.fileno(), select.POLLIN)
        while not self.done:
            deadline = self.next_deadline()
            poller.poll(None if deadline is None else max(0.0, deadline - self._now()) * 1000)
            self.advance()
        return self.outcomes

    def close(self) -> None:
        """Let go of every descriptor of ours."""
        for course in list(self._courses.values()):
            self._drop(course)
        self._courses.clear()
        self._epoll.close()

    def _settle(self, courses: Sequence[_Course]) -> None:
        """Look again at trees of which nobody awaited is left: proven gone, or somebody new to end."""
        if not courses:
            return
        found = containment.members([course.subject.tree for course in courses])
        for course in courses:
            tree = course.subject.tree
            pids = found[tree.cookie]
            course.look_again_at = None
            if not pids and course.leader_ended and tree.is_contained:
                self._finish(course, Outcome(gone=True, killed=course.killed))
                continue
            self._await(course, pids)
            if course.awaited or course.look_again_at is not None:
                number = signal.SIGKILL if course.phase is _Phase.KILLED else course.subject.signal_number
                self._send(course, pids, number, signal.SIGCONT)
            elif containment.is_gone(tree, (), leader_ended=course.leader_pidfd is not None):  # else it were awaited
                self._finish(course, Outcome(gone=True, killed=course.killed))
            elif strangers := containment.strangers_with_lock(tree):
                # They are not signalled, and there is nothing that they would leave for: say who they are.
                holders = tuple(Survivor(pid, ids.command_line(pid)) for pid in strangers)
                self._finish(course, Outcome(gone=False, killed=course.killed, strangers=holders))
            else:
                course.look_again_at = self._now() + course.look_seconds
                course.look_seconds = min(2 * course.look_seconds, _LONGEST_LOOK_SECONDS)

    def _escalate_overdue(self) -> None:
        now = self._now()
        overdue = [course for course in self._courses.values() if course.deadline <= now]
        if not overdue:
            return
        found = containment.members([course.subject.tree for course in overdue])
        for course in overdue:
            pids = found[course.subject.tree.cookie]
            survivors = tuple(Survivor(pid, ids.command_line(pid)) for pid in pids)
            if course.phase is _Phase.KILLED:
                if not pids and containment.is_gone(course.subject.tree, ()):
                    self._finish(course, Outcome(gone=True, killed=course.killed))
                else:
                    self._finish(course, Outcome(gone=False, killed=course.killed, survivors=survivors))
                continue
            course.phase = _Phase.KILLED
            course.deadline = now + self._kill_patience_seconds
            course.killed = survivors
            self._send(course, pids, signal.SIGKILL)
            self._await(course, pids)
        self._settle([course for course in overdue if course.subject.tree.name in self._courses and not course.awaited])

    def _send(self, course: _Course, pids: Sequence[int], *numbers: int, to_group: Sequence[int] | None = None) -> None:
        # EPERM: a member changed its user (a setuid program). The others are signalled; the proof will tell.
        with contextlib.suppress(KernelError):
            containment.signal_tree(course.subject.tree, course.leader_pidfd, pids, *numbers, to_group=to_group)

    def _await(self, course: _Course, pids: Sequence[int]) -> None:
        """Wait for the leader and for each member that is alive now."""
        known = set(course.awaited.values())
        tree = course.subject.tree
        leader_pid = tree.identity.pid if tree.identity is not None else None
        leader_is_known = course.leader_ended or leader_pid in known
        if course.leader_pidfd is not None and leader_pid is not None and not leader_is_known:
            # The caller's own descriptor: one may sit in several epolls, and a copy of each would need as many again.
            self._add(course, course.leader_pidfd, leader_pid)
        for pid in pids:
            if pid == leader_pid and course.leader_pidfd is not None:
                continue
            if pid not in known:
                try:
                    self._add(course, ids.open_pidfd(pid), pid)
                except ProcessGone:
                    continue
                except ResourceExhausted:  # no descriptor to wait with: it is signalled all the same, and looked for
                    course.look_again_at = self._now() + _UNSEEN_HOLDER_SECONDS

    def _add(self, course: _Course, pidfd: int, pid: int) -> None:
        if ids.is_readable(pidfd):
            course.leader_ended |= pidfd == course.leader_pidfd
            self._close(course, pidfd)
            return
        self._epoll.register(pidfd, _ONCE)
        course.awaited[pidfd] = pid
        self._by_pidfd[pidfd] = course

    def _forget(self, course: _Course, pidfd: int) -> None:
        del course.awaited[pidfd], self._by_pidfd[pidfd]
        self._close(course, pidfd)

    def _close(self, course: _Course, pidfd: int) -> None:
        if pidfd != course.leader_pidfd:
            os.close(pidfd)

    def _drop(self, course: _Course) -> None:
        for pidfd in list(course.awaited):
            self._epoll.unregister(pidfd)
            self._forget(course, pidfd)
        if course.owns_leader_pidfd and course.leader_pidfd is not None:
            os.close(course.leader_pidfd)

    def _finish(self, course: _Course, outcome: Outcome) -> None:
        self._drop(course)
        name = course.subject.tree.name
        del self._courses[name]
        self._half_asked.pop(name, None)
        self.outcomes[name] = outcome


def stop_trees(subjects: Sequence[Subject]) -> dict[str, Outcome]:
    """End all of them in one go and return how each ended, by the tree's name."""
    with Escalation(subjects) as escalation:
        return escalation.run()


def _leader(subject: Subject) -> tuple[int | None, bool]:
    """The leader's pidfd and whether it is ours to close; None if it is dead or cannot be verified."""
    if subject.leader_pidfd is not None or subject.tree.identity is None:
        return subject.leader_pidfd, False
    try:
        return ids.open_verified(subject.tree.identity), True
    except KernelError:
        return None, False
