"""Ending trees from the loop: a stop that was asked for, leftovers of a dead leader, orphans of an earlier owner.

The kernel layer decides who is signalled when (:class:`everdeck.kernel.escalation.Escalation`); here it is driven by
readiness and deadlines of the loop, and its outcomes are recorded in the batches in which they come, so a stop of
five hundred workers is a handful of commits.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from everdeck.crashpoints import crash_point
from everdeck.deck.parts import RETRY_SECONDS, Change, Parts
from everdeck.deck.worker import Held, Worker
from everdeck.details import ExitTold, Survivor
from everdeck.errors import StopFailed
from everdeck.kernel import exits
from everdeck.kernel import identity as ids
from everdeck.kernel.escalation import KILL_PATIENCE_SECONDS, Escalation, Outcome, Subject
from everdeck.logs import files as logfiles
from everdeck.model import EventKind, Exit, State, UnknownExit, WorkerSpec
from everdeck.registry.store import Desired, WorkerRecord

_FOR_EVER_SECONDS: Final = 1e9
_TOGETHER_SECONDS: Final = 0.02
_AT_ONCE: Final = 1000  # trees that are looked for in one pass and signalled in one turn of the loop


class Ending:
    """Stops workers and proves their trees gone."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def stop(
        self,
        workers: Sequence[Worker],
        *,
        wanted: Desired = "stopped",
        progress: Callable[[Worker], None] | None = None,
        kill_patience_seconds: float = KILL_PATIENCE_SECONDS,
    ) -> None:
        """Stop workers whose turn the caller has: intent, signals, proof, record; then ``wanted`` is what is wanted."""
        failures = await self.stop_each(
            workers, wanted=wanted, progress=progress, kill_patience_seconds=kill_patience_seconds
        )
        for failure in failures.values():
            raise failure

    async def stop_each(
        self,
        workers: Sequence[Worker],
        *,
        wanted: Desired = "stopped",
        progress: Callable[[Worker], None] | None = None,
        kill_patience_seconds: float = KILL_PATIENCE_SECONDS,
    ) -> dict[str, StopFailed]:
        """As :meth:`stop`; returns whom it could not stop, and why."""
        told = progress or (lambda _: None)
        groups = [workers[first : first + _AT_ONCE] for first in range(0, len(workers), _AT_ONCE)]
        if len(groups) == 1:
            return await self._stop_group(workers, wanted, told, kill_patience_seconds)
        # All at the same time; between one group and the next the loop hears everybody else.
        each = [self._stop_group(group, wanted, told, kill_patience_seconds) for group in groups]
        failures: dict[str, StopFailed] = {}
        for answer in await asyncio.gather(*each, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            failures |= answer
        return failures

    async def _stop_group(
        self,
        workers: Sequence[Worker],
        wanted: Desired,
        told: Callable[[Worker], None],
        kill_patience_seconds: float,
    ) -> dict[str, StopFailed]:
        to_end = self._record_intent(workers, wanted)
        crash_point("stop.intent-recorded")
        for worker in workers:
            if worker.name not in to_end:
                told(worker)
        failures: dict[str, StopFailed] = {}
        changes: list[Change] = []
        over: list[Worker] = []

        def gone(outcomes: dict[str, Outcome]) -> None:
            crash_point("stop.tree-gone")
            at = logfiles.time_of_mark()
            for name, outcome in outcomes.items():
                over.append(to_end[name])
                if outcome.gone:
                    changes.append(self.stopped(to_end[name], outcome, at))
                else:
                    failures[name] = stop_failed(name, outcome)

        def record() -> None:
            self._parts.note(changes)
            for worker, _, _ in changes:
                self.set_aside(worker).let_go()
            for worker in over:
                told(worker)
            changes.clear()
            over.clear()
            crash_point("stop.recorded")

        try:
            subjects = [self.subject(worker) for worker in to_end.values()]
            await self.end_trees(subjects, gone, record, kill_patience_seconds=kill_patience_seconds)
        finally:
            if over:
                record()
            self._listen_again(to_end.values())
        return failures

    def _listen_again(self, workers: Iterable[Worker]) -> None:
        """A stop was not finished: who still lives is heard of when it ends, who is dead is looked at again."""
        parts = self._parts
        for worker in workers:
            if worker.pidfd is None or parts.closing:
                continue
            if ids.is_alive(worker.pidfd):
                parts.watch.ended(worker.pidfd, worker.died)
            else:
                worker.cancel_timer()
                worker.timer = parts.loop.call_later(RETRY_SECONDS, worker.died)

    def _record_intent(self, workers: Sequence[Worker], wanted: Desired) -> dict[str, Worker]:
        """Note what is wanted, all in one commit; returns those that have a tree to end."""
        to_end: dict[str, Worker] = {}
        changes: list[Change] = []
        for worker in workers:
            worker.cancel_timer()
            record = worker.record
            if worker.has_process or record.phase.is_live:
                to_end[worker.name] = worker
                # A stop that is tried again is the same stop.
                told = [] if record.phase is State.STOPPING else [(EventKind.STOPPING, {"pid": pid_of(record)})]
                changes.append((worker, replace(record, desired=wanted, phase=State.STOPPING), told))
            else:
                waiting = record.phase in {State.BACKOFF, State.FAILED}
                phase = State.STOPPED if waiting else record.phase
                told = [(EventKind.STOPPED, {"pid": None})] if waiting else []
                resting = replace(record, desired=wanted, phase=phase, backoff_until=None)
                if told or resting != record:  # else it is noted already, and nobody waits for a disk
                    changes.append((worker, resting, told))
        # Signals need no disk: a worker that fills it must be stoppable, so a refusal is noted later.
        self._parts.note(changes)
        return to_end

    def subject(self, worker: Worker) -> Subject:
        """The worker as something to be ended, with what we hold of it."""
        stop = worker.record.spec.stop
        if worker.pidfd is not None:
            self._parts.watch.forget(worker.pidfd)
        if worker.proxy_lock_fd is not None:
            os.close(worker.proxy_lock_fd)
            worker.proxy_lock_fd = None
        # Layer 3 switched off (in tests): ask, and wait for as long as it takes.
        grace = stop.grace_seconds if "L3" in self._parts.layers else _FOR_EVER_SECONDS
        return Subject(worker.tree(), worker.pidfd, stop.signal_number, grace)

    def stopped(self, worker: Worker, outcome: Outcome, at: str | None = None) -> Change:
        """The tree is proven gone: what there is to note. Its log is told here, with ``at`` as the time if known."""
        parts, record = self._parts, worker.record
        ended_as = record.exit
        if worker.pidfd is not None:
            # Nobody of its session or group is left, so its number need not stay reserved: it is reaped by the way.
            seen = exits.reap_child(worker.pidfd) if worker.is_child else exits.told_by_pidfd(worker.pidfd)
            worker.is_child = False
            ended_as = seen or UnknownExit()
        stopped = replace(record, phase=State.STOPPED, exit=ended_as, identity=None, cgroup=None, streak=0)
        told = None if ended_as is None else exit_detail(ended_as)
        parts.logs.unwatch(record.name)  # before its last line, which would be heard as news
        logfiles.mark(parts.engine.log_text(record.name), f"stopped pid={pid_of(record)} {ended_as}", at=at)
        if record.cgroup is not None:
            parts.gatherer.remove(record.cgroup)
        return worker, stopped, [*killed(outcome), (EventKind.STOPPED, {"pid": pid_of(record), "exit": told})]

    def let_go(self, worker: Worker) -> None:
        """Its process is gone: let go of what we held for it."""
        self._parts.logs.unwatch(worker.record.name)
        self.set_aside(worker).let_go()

    def set_aside(self, worker: Worker) -> Held:
        """The same for one that is replaced now: its log goes on, and what was held may be let go of afterwards."""
        parts, name = self._parts, worker.record.name
        if worker.pidfd is not None:
            parts.watch.forget(worker.pidfd)
        parts.guardian.unbind(name)
        parts.health.unwatch(name)
        parts.memory.unwatch(name)
        return worker.set_aside()

    async def end_trees(
        self,
        subjects: Sequence[Subject],
        on_outcomes: Callable[[dict[str, Outcome]], None] | None = None,
        record: Callable[[], None] | None = None,
        *,
        kill_patience_seconds: float = KILL_PATIENCE_SECONDS,
    ) -> dict[str, Outcome]:
        """Drive one escalation from the loop; outcomes are told in the batches in which they come.

        ``record`` is called for all that came within a moment, so that trees that end together share a commit.
        """
        if not subjects:
            return {}
        loop = self._parts.loop
        told: set[str] = set()
        record_at: float | None = None
        with Escalation(subjects, kill_patience_seconds=kill_patience_seconds) as escalation:
            stirred = asyncio.Event()
            loop.add_reader(escalation.fileno(), stirred.set)
            try:
                escalation.begin()
                crash_point("stop.signalled")
                while True:
                    new = {name: outcome for name, outcome in escalation.outcomes.items() if name not in told}
                    if new:
                        told.update(new)
                        if on_outcomes is not None:
                            on_outcomes(new)
                        record_at = record_at or loop.time() + _TOGETHER_SECONDS
                    if record_at is not None and (escalation.done or record_at <= loop.time()):
                        record_at = None
                        if record is not None:
                            record()
                    if escalation.done:
                        return escalation.outcomes
                    deadlines = (escalation.next_deadline(), record_at)
                    await _stirred(stirred, min((one for one in deadlines if one is not None), default=None))
                    escalation.advance()
            finally:
                loop.remove_reader(escalation.fileno())


async def _stirred(stirred: asyncio.Event, deadline: float | None) -> None:
    # The escalation reads time.monotonic(), which is also asyncio's clock.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await stirred.wait()
    stirred.clear()


def stop_failed(name: str, outcome: Outcome) -> StopFailed:
    """The error for a tree that survived SIGKILL, or whose lock a stranger holds."""
    if outcome.strangers:
        holders = "; ".join(f"pid {one.pid} ({one.command[:80]})" for one in outcome.strangers)
        return StopFailed(name, (), f"its lock is held by {holders}, not part of it and not signalled")
    survivors = tuple(one.pid for one in outcome.survivors)
    return StopFailed(name, survivors, "; ".join(one.command[:80] for one in outcome.survivors) or "its lock is held")


def killed(outcome: Outcome) -> list[tuple[EventKind, dict[str, Any]]]:
    """The event that tells who needed SIGKILL, if anybody did."""
    if not outcome.killed:
        return []
    survivors: list[Survivor] = [{"pid": one.pid, "command": one.command[:200]} for one in outcome.killed]
    return [(EventKind.KILLED, {"survivors": survivors})]


def out_of_memory(spec: WorkerSpec, kills: int) -> str:
    """What happened to a tree at its memory limit, in words."""
    most = spec.limits.memory_bytes
    limit = "" if most is None else f" at its limit of {most} bytes"
    whom = "a process" if kills == 1 else f"{kills} processes"
    return f"out of memory{limit}: the kernel killed {whom} of it"


def pid_of(record: WorkerRecord) -> int | None:
    """The leader's pid, if there is one."""
    return record.identity.pid if record.identity is not None else None


def exit_detail(ended_as: Exit) -> ExitTold:
    """An exit as it stands in events."""
    detail: ExitTold = msgspec.to_builtins(ended_as)
    return detail
