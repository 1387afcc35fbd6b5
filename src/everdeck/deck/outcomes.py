"""What follows a spawn, whichever way it was made: whom we started is identified, recorded and tended, or ended.

A start is an order (:class:`Launch`) on its way. :mod:`starting` makes it step by step, :mod:`firsts` in one call for
several; both leave what came of it here.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from everdeck.crashpoints import crash_point
from everdeck.deck.ending import Ending
from everdeck.deck.engine import Launched, Ready
from everdeck.deck.parts import Parts
from everdeck.deck.worker import Worker
from everdeck.errors import EverdeckError, LimitUnavailable, RegistryError
from everdeck.kernel import controllers, exits
from everdeck.kernel.containment import Tree
from everdeck.kernel.escalation import Subject
from everdeck.logs import files as logfiles
from everdeck.logs.keeper import Armed
from everdeck.model import EventKind, Exited, Identity, Killed, State, UnknownExit, WorkerSpec
from everdeck.registry import Telling, WorkerRecord

_log: Final = logging.getLogger("everdeck.deck")


@dataclass(frozen=True, slots=True)
class End:
    """How a worker's last process ended, where the next one is started at once: one commit tells of both.

    With ``same_cgroup`` that commit may come after the spawn: the record of the last process names the cgroup in which
    the next one is born, and the note beside its lock says which start that is, so an owner that dies in between leaves
    nobody whom the next one does not find.
    """

    events: Sequence[tuple[EventKind, dict[str, Any]]]
    mark: str
    """For its log, before the mark of the start."""
    same_cgroup: bool
    """Nobody was killed through its cgroup, and nothing was counted there: it serves the next one too."""


@dataclass(eq=False, slots=True)
class Launch:
    """One worker to start, and how its start went."""

    worker: Worker
    kind: EventKind
    spec: WorkerSpec
    before: WorkerRecord
    """What the record said when the start began; a start that fails goes back to it."""
    detail: dict[str, Any] = field(default_factory=dict)
    end: End | None = None
    """Not recorded yet; none afterwards."""
    end_mark: str | None = None
    same_cgroup: bool = False
    homeless: bool = False
    """Is its home yet to be made, with everything else in one call?"""
    is_noted: bool = False
    """Is its intent in the registry?"""
    armed: Armed | None = None
    """The watch of its log, if its start armed one."""
    ready: Ready | None = None
    launched: Launched | None = None
    exec_over: Callable[[], None] | None = None
    """Its program is being exec'ed: this waits for it, and raises if it is refused and nobody was launched."""
    identity: Identity | None = None
    failure: BaseException | None = None


class Outcomes:
    """Records and tends those that were started; brings those to rest that were not."""

    def __init__(self, parts: Parts, ending: Ending) -> None:
        self._parts = parts
        self._ending = ending

    async def settle(self, spawned: Sequence[Launch]) -> None:
        """Identify and record those that were spawned, in one commit, and tend them; end those where that fails."""
        launched: list[Launch] = []
        for order in spawned:
            if order.failure is None and order.launched is not None and order.identity is None:
                try:
                    order.identity = self._parts.engine.identify(order.launched)
                except BaseException as err:  # noqa: BLE001 - told through the order
                    order.failure = err
            if order.failure is None:
                launched.append(order)
            else:  # it cannot be identified, or we were interrupted right after its spawn
                await self._abandon([order], order.failure)
        if not launched:
            return
        try:
            self._record(launched)
        except BaseException as err:  # noqa: BLE001 - told through the orders
            await self._abandon(launched, err)
            return
        crash_point("start.recorded")
        for order in launched:
            if order.spec.lifetime == "bound":
                self.bind(order.worker, order.spec)
                crash_point("start.bound")
            self.tend(order.worker, order.spec, fresh=True, armed=order.armed)

    def _record(self, launched: Sequence[Launch]) -> None:
        """Commit whom we started, together with the events that tell of it."""
        parts = self._parts
        now = parts.clock.wall()
        running: list[WorkerRecord] = []
        told: list[Telling] = []
        for order in launched:
            assert order.identity is not None  # noqa: S101 - the caller chose those
            record = order.worker.record
            record = replace(
                record,
                phase=State.RUNNING,
                identity=order.identity,
                cgroup=_born_in(order.launched),
                started_at=now,
            )
            told += told_end(order)
            told.append((record.name, order.kind, {"pid": order.identity.pid, **order.detail}))
            running.append(record)
        with parts.registry.transaction():
            if all(order.is_noted for order in launched):
                parts.registry.save_started(running)
            else:
                parts.registry.save_all(running)
            parts.events.pass_on_all(told)
            for order in launched:
                _wait_for_exec(order)
        for order, record in zip(launched, running, strict=True):
            assert order.launched is not None  # noqa: S101
            order.end = None
            order.worker.started(record, order.launched.pidfd, order.launched.lifeline)
        parts.events.wake()

    def tend(self, worker: Worker, spec: WorkerSpec, *, fresh: bool, armed: Armed | None = None) -> None:
        """From now on: hear of its death, keep its log, ask for its health, contain it."""
        parts = self._parts
        if worker.pidfd is None:
            return
        name = worker.record.name
        parts.watch.ended(worker.pidfd, worker.died)
        if fresh:
            parts.logs.watch(name, parts.engine.log_text(name), spec.log, armed)
        else:  # one of many: whoever waits for the deck does not wait for this
            parts.logs.watch_soon(name, parts.engine.log_text(name), spec.log)
        if spec.health is not None:
            worker.awaits_ready = not worker.record.ready
            parts.health.watch(
                name,
                spec.health,
                port=worker.record.port,
                env=spec.env,
                cwd=spec.cwd or f"{parts.engine.home(name)}/data",
                already_ready=worker.record.ready,
                heard_by_another=not fresh and not parts.same_ear,
                born=lambda: parts.engine.born_beside(
                    worker.record.name, spec, worker.record.cgroup, worker.record.port
                ),
            )
        if worker.record.cgroup is not None and controllers.needed(spec.limits):
            self._keep_limits(worker, worker.record.cgroup, spec, fresh=fresh)
        if worker.record.cgroup is None:
            cgroup = parts.engine.cgroup_text(name)
            if cgroup is not None:
                parts.gatherer.gather(worker.tree(), cgroup)

    def _keep_limits(self, worker: Worker, cgroup: str, spec: WorkerSpec, *, fresh: bool) -> None:
        """Between two daemons of a systemd unit the controllers may have been disabled, and the limits with them."""
        if not fresh:
            try:
                controllers.apply(Path(cgroup), spec.limits)
            except LimitUnavailable as err:
                _log.warning("worker %r was adopted, and its limits do not hold any more: %s", worker.name, err)
                worker.record = replace(worker.record, reason=f"its limits do not hold any more: {err}")
        if spec.limits.memory_bytes is not None:
            self._parts.memory.watch(worker.name, cgroup)

    def bind(self, worker: Worker, spec: WorkerSpec) -> None:
        """Let the guardian know whom to end when we die."""
        self._parts.guardian.bind(worker.tree(), spec.stop.signal_number, spec.stop.grace_seconds)

    async def _abandon(self, orders: Sequence[Launch], failure: BaseException) -> None:
        """They run but could not be recorded: end them, or the next owner would find workers that nobody noted."""
        subjects = []
        for order in orders:
            order.failure = failure
            with contextlib.suppress(EverdeckError):  # then there is nobody to end
                _wait_for_exec(order)
            if order.launched is not None:
                worker = order.worker
                tree = Tree(worker.name, worker.record.cookie, worker.lock_path, order.identity)
                subjects.append(Subject(tree, order.launched.pidfd, signal.SIGKILL, 0))
        try:
            await self._ending.end_trees(subjects)
        finally:
            for order in orders:
                if order.launched is not None:
                    exits.reap_child(order.launched.pidfd)
                    os.close(order.launched.pidfd)
                    if order.launched.lifeline is not None:
                        order.launched.lifeline.close()
                    order.launched = None
                self.back_to_rest(order)

    def back_to_rest(self, order: Launch) -> None:
        """Note that nothing runs. The record keeps what it said before, with nobody alive in it."""
        self.mark_end(order)
        if order.spec.lifetime == "bound":
            self._parts.guardian.unbind(order.worker.name)
        before = order.before
        phase = State.STOPPED if before.phase.is_live else before.phase
        resting = replace(before, phase=phase, identity=None, cgroup=None)
        order.worker.record = resting
        if order.end is not None:
            self._parts.note([(order.worker, resting, order.end.events)])
            order.end = None
        else:
            with contextlib.suppress(RegistryError):
                self._parts.registry.save(resting)
        crash_point("start.failed")

    def mark_end(self, order: Launch) -> None:
        """Its log is told of the end before without the start that should have followed."""
        if order.end_mark is not None:
            logfiles.mark(self._parts.engine.log_text(order.worker.record.name), order.end_mark)
            order.end_mark = None


def _wait_for_exec(order: Launch) -> None:
    """Nobody is recorded, or ended, who may yet turn out to be refused."""
    if order.exec_over is not None:
        exec_over, order.exec_over = order.exec_over, None
        exec_over()


def told_end(order: Launch) -> list[Telling]:
    """What is to be told of the end that led to this start, if it is not recorded yet."""
    if order.end is None:
        return []
    return [(order.worker.name, kind, detail) for kind, detail in order.end.events]


def last_end(worker: Worker, before: WorkerRecord) -> str | None:
    """What a worker is told of its last end: who caused it decides whether its feed blames a message for it."""
    if worker.ended_ill:
        worker.ended_ill = False
        return "hung"
    match before.exit:
        case _ if before.phase in {State.STOPPED, State.STOPPING, State.RUNNING, State.STARTING}:
            return "ordered"
        case Killed():
            return f"killed {before.exit.signal}"
        case Exited():
            return f"exited {before.exit.code}"
        case UnknownExit():
            return "unknown"
        case None:
            return None


def _born_in(launched: Launched | None) -> str | None:
    return None if launched is None else launched.cgroup
