"""The owner of a state directory: the verbs on its workers, inside an event loop.

Opening a deck is recovering a deck; there is no other way to start, and no clean shutdown that anything relies on.
Every verb records its intent, acts, and records the outcome; between the steps stand the crash points. The kernel
is asked, never remembered: what the registry says about a process is believed only after its identity was compared.

Verbs on one worker take turns; verbs on different workers do not wait for each other. Nothing polls: deaths come from
pidfds, restarts from one timer per waiting worker, and a deck whose workers just run does not wake up.

How a verb acts is told in the modules beside this one: :mod:`starting`, :mod:`ending`, :mod:`healing`, :mod:`hearing`,
:mod:`recovery`. What people type is :class:`everdeck.deck.deck.AsyncDeck`.
"""

import asyncio
import builtins
import contextlib
import logging
import os
import socket
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec
from msgspec.structs import replace

from everdeck import __version__
from everdeck.access import LocalPeople
from everdeck.clock import Clock
from everdeck.crashpoints import crash_point
from everdeck.deck import rights
from everdeck.deck.deeds import Deeds
from everdeck.deck.durability import Durability, DurabilityMode
from everdeck.deck.ending import Ending
from everdeck.deck.engine import Engine
from everdeck.deck.events import EventStream
from everdeck.deck.gather import Gatherer
from everdeck.deck.guardian_link import GuardianLink
from everdeck.deck.healing import Healing
from everdeck.deck.health import HealthKeeper
from everdeck.deck.hearing import Hearing
from everdeck.deck.home import DeckHome, Inherited
from everdeck.deck.idle_readers import idle_readers
from everdeck.deck.memory import MemoryWatch
from everdeck.deck.messages import MessageVerbs
from everdeck.deck.observe import (
    OLDER_SECONDS,
    RECENT_SECONDS,
    Glance,
    crash_times,
    layers_of,
    measure,
    measured_status,
    status_of,
    was_measured,
)
from everdeck.deck.outcomes import Launch
from everdeck.deck.parts import Parts
from everdeck.deck.recovery import Recovery
from everdeck.deck.starting import Starting, laid_out
from everdeck.deck.watch import DeathWatch
from everdeck.deck.worker import Worker
from everdeck.errors import (
    DeckClosed,
    EverdeckError,
    LockConflict,
    RecordBroken,
    RegistryError,
    SpecChanged,
    UnknownWorker,
    WorkerFailed,
)
from everdeck.kernel import containment, flock, unixsocket
from everdeck.kernel import identity as ids
from everdeck.kernel.escalation import KILL_PATIENCE_SECONDS
from everdeck.kernel.notify import NotifySocket
from everdeck.kernel.usage import describe
from everdeck.logs import keeper as deck_logs
from everdeck.logs import room as logroom
from everdeck.model import (
    Event,
    EventKind,
    Layer,
    LogRoom,
    ProcessInfo,
    State,
    WorkerName,
    WorkerSpec,
    WorkerStatus,
    worker_name,
)
from everdeck.registry import Registry, WorkerRecord
from everdeck.registry.store import encoded_spec
from everdeck.statedir import SOCKET
from everdeck.verbs import (
    RESTARTS_AT_ONCE,
    Abilities,
    Inspection,
    Member,
    Workers,
    checked_parallel,
    spec_of,
    specs_of,
    still_asked,
)
from everdeck.wire import handover
from everdeck.wire.frames import VERSION, Welcome
from everdeck.wire.handover import Given
from everdeck.wire.requests import Verb
from everdeck.wire.server import WireServer

_log: Final = logging.getLogger("everdeck.deck")

_Answer = TypeVar("_Answer")

_SLICE: Final = 100  # workers that are measured before others get their turn
_MEASURE_PATIENCE_SECONDS: Final = 0.05
_GROUP: Final = 64  # starts that share the commit of their intents
# A container's runtime gives ten seconds as a rule: with the usual grace of five we must have said who is left by then.
_CONTAINER_KILL_PATIENCE_SECONDS: Final = 3.0

ALL_LAYERS: Final = frozenset({"L1", "L2", "L3", "L4"})
"""The four layers of a bound worker; tests switch some off to show that each holds alone."""


class Owner(MessageVerbs):
    """All workers of one state directory, in the one process that holds its lock. Made by :meth:`open`."""

    def __init__(
        self,
        home: DeckHome,
        parts: Parts,
        deck_id: str,
        listener: socket.socket,
        people: LocalPeople | None = None,
        log_room: LogRoom | None = None,
    ) -> None:
        self.state_dir = home.state_dir
        self.deck_id = deck_id
        self.owner_pid = os.getpid()
        self._home = home
        self._parts_open: Parts | None = parts
        self._closing: asyncio.Task[None] | None = None
        self._verbs: set[asyncio.Task[Any]] = set()
        self._measured = asyncio.Event()  # set while nobody is being measured
        self._measurements = 0
        # What was told last, and the facts it was made from: thousands are asked about more often than they change.
        self._used: tuple[tuple[int, int], dict[str, tuple[float, int]]] | None = None
        self._glance = Glance()
        self._measured.set()
        self._bound = os.lstat(home.socket_path)
        welcome = Welcome(VERSION, self.owner_pid, deck_id, __version__)
        self._server = WireServer(self, parts.deeds, listener, welcome, people)
        self._ending = Ending(parts)
        self._starting = Starting(parts, self._ending)
        self._healing = Healing(parts, self._ending, self._starting)
        self._recovery = Recovery(parts, self._ending, self._starting, self._healing)
        self._hearing = hearing = Hearing(parts, self._starting, self._healing)
        parts.heard_early = hearing.heard_early
        parts.logs = deck_logs.LogKeeper(hearing.log_rotated, room=log_room, workers_dir=home.workers_dir)
        parts.gatherer = Gatherer(hearing.gathered, parts.loop)
        parts.memory = MemoryWatch(hearing.lacked_memory, parts.loop)
        parts.health = HealthKeeper(
            hearing.became_ready,
            hearing.became_unhealthy,
            hearing.became_healthy,
            hearing.said_status,
            hearing.said_event,
            hear=hearing.heard,
            clock=parts.clock,
        )

    # --- opening and closing ------------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls,
        state_dir: Path,
        *,
        clock: Clock | None = None,
        layers: frozenset[str] = ALL_LAYERS,
        durability: DurabilityMode = "power",
        handed_on: Given | None = None,
        name_owner: bool = True,
        people: LocalPeople | None = None,
        log_room: LogRoom | None = None,
    ) -> Self:
        """Own the state directory and recover everything in it, or :class:`DeckOwned`; ``people`` may ask it too."""
        ids.require_pidfds()
        home = DeckHome(state_dir)
        inherited = home.open(None if handed_on is None else _inherited(handed_on), name_owner=name_owner)
        listener: socket.socket | None = None
        try:
            crash_point("open.locked")
            # Before anything else: who connects from now on waits in the kernel's queue until the deck is recovered.
            listener = _listener(state_dir, inherited.listener_fd)
            crash_point("open.listening")
            registry = Registry.open(home.registry_path, ids.boot_id())
            deck_id = registry.meta("deck_id") or uuid.uuid4().hex[:16]
            registry.set_meta(logroom.NOTED, msgspec.json.encode(log_room or LogRoom()).decode())
            parts = _open_parts(home, registry, inherited, clock or Clock(), layers, durability, deck_id)
            if people:
                unixsocket.open_to_others(state_dir, SOCKET)
        except BaseException:
            if listener is not None:
                listener.close()
            home.close()
            raise
        owner = cls(home, parts, deck_id, listener, people, log_room)
        await owner._recover(parts, inherited)
        return owner

    async def _recover(self, parts: Parts, inherited: Inherited) -> None:
        parts.health.open()
        parts.logs.open()
        parts.loop.add_reader(parts.notify.fileno(), self._hearing.heard)
        _open_owners.add(self)
        try:
            if inherited.guardian is not None:
                parts.guardian.inherit(inherited.guardian)
            await self._recovery.recover(self.owner_pid, inherited)
            parts.guardian.settle()
            await self._server.open()
        except BaseException:
            self._parts_open = None
            await self._let_go(parts)
            raise

    async def close(self, *, everybody: bool = False) -> None:
        """Stop the bound workers, leave the adoptable ones running, and let go of the directory.

        ``everybody`` stops the adoptable ones too, for an owner whose end is theirs anyway (PID 1 of a container); all
        stay wanted. Verbs that are being carried out are finished first; whoever calls one from now on is refused.
        """
        if self._parts_open is None or os.getpid() != self.owner_pid:
            return
        if self._closing is None:
            self._closing = self._parts_open.loop.create_task(self._close(self._parts_open, everybody=everybody))
        await asyncio.shield(self._closing)

    async def _close(self, parts: Parts, *, everybody: bool) -> None:
        await self._server.drain()
        parts.closing = True
        await parts.tasks.end()
        try:
            async with parts.turns.of_all(list(parts.workers)):
                if not everybody and await self._hand_over(parts):
                    return
                workers = [parts.workers[name] for name in sorted(parts.workers)]
                bound = [
                    one for one in workers if one.has_process and (everybody or one.record.spec.lifetime == "bound")
                ]
                if bound:  # they stay wanted: the next owner starts them again, as after a crash
                    patience = _CONTAINER_KILL_PATIENCE_SECONDS if everybody else KILL_PATIENCE_SECONDS
                    await self._ending.stop(bound, wanted="running", kill_patience_seconds=patience)
        except (EverdeckError, OSError):
            _log.exception("closing: some bound workers could not be stopped; the next owner ends them")
        await asyncio.to_thread(idle_readers.dismiss, self._home.workers_dir)
        self._parts_open = None
        self._closing = None
        await self._let_go(parts)

    async def _hand_over(self, parts: Parts) -> bool:
        """Give the deck to a member, oldest first, so that bound workers do not notice; False if there is none."""
        for heir in self._server.heirs():
            connection = await self._server.offer(heir, os.urandom(16).hex(), handover.PATIENCE_SECONDS)
            if connection is None:
                continue
            crash_point("handover.offered")
            lifelines = {one.name: one.lifeline.write_fd for one in parts.workers.values() if one.lifeline is not None}
            given = Given(
                self._home.lock_fd,
                self._server.listener.fileno(),
                parts.notify.fileno(),
                parts.guardian.lent(),
                lifelines,
            )
            if await asyncio.to_thread(handover.give, connection, given):
                crash_point("handover.given")
                self._parts_open = None
                self._closing = None
                await self._let_go(parts, given_away=True)
                crash_point("handover.let-go")
                handover.let_go(connection)
                return True
            connection.close()
        return False

    async def _let_go(self, parts: Parts, *, given_away: bool = False) -> None:
        """Close everything; workers that are left are the next owner's."""
        parts.closing = True
        _open_owners.discard(self)
        if not given_away:
            unixsocket.unlink_if_ours(self._home.socket_path, self._bound)
        await self._server.close()
        for worker in parts.workers.values():
            worker.cancel_timer()
        await parts.tasks.end()
        await parts.health.close()
        parts.logs.close()
        parts.memory.close()
        if given_away:
            parts.guardian.give_away()
        else:
            await parts.guardian.close()
        parts.crew.close()
        parts.midwives.close()
        parts.gatherer.close(parts.engine.cgroup_home)
        parts.loop.remove_reader(parts.notify.fileno())
        if given_away:
            parts.notify.give_away()
        else:
            parts.notify.close()
        parts.events.close()
        parts.engine.close()
        parts.pay_all()
        await parts.durability.close()
        parts.registry.close()
        parts.watch.close()
        for worker in parts.workers.values():
            worker.let_go()
        if given_away:
            self._home.give_away()
        else:
            self._home.close()

    def forget_in_fork(self) -> None:
        """In a forked copy of the owner: let go of everything whose copy would speak for the owner."""
        parts, self._parts_open = self._parts_open, None
        if parts is not None:
            parts.watch.close_in_fork()
        self._server.forget_in_fork()
        self._home.close_in_fork()

    def prepare_reexec(self) -> dict[str, str]:
        """Make what must survive an exec in place inheritable; returns the environment that tells the next image.

        The caller calls :func:`os.execve` at once. Same pid, so children stay children; the deck's lock, the lifelines
        of bound workers, the ear for notifications, the guardian's line and the socket at which others connect are
        carried over as descriptors.
        """
        parts = self._parts()
        lifelines = {one.name: one.lifeline.write_fd for one in parts.workers.values() if one.lifeline is not None}
        listener_fd = self._server.listener.fileno()
        return self._home.hand_over(lifelines, parts.notify.fileno(), listener_fd, parts.guardian.hand_over())

    async def carry_out(self, verb: Verb[_Answer], request: str | None, tell: Callable[[Any], None]) -> _Answer:
        """A verb that this process asked of an owner before it was the owner itself."""
        removal = verb.__struct_config__.tag == "remove"
        answer: _Answer = await self._parts().deeds.once(
            request, verb.deed, lambda: verb.call(self, tell), removal=removal
        )
        return answer

    # --- verbs that act -----------------------------------------------------------------------------------------

    async def start(
        self,
        name: str | int,
        command: Sequence[str | PurePath] | WorkerSpec | None = None,
        *,
        replace: bool = False,
        **fields: Any,
    ) -> WorkerStatus:
        """Start a worker; return when its program has been exec'ed and recorded.

        Without a command a known worker is started again. A running worker with the same spec is left alone; with
        another spec :class:`SpecChanged` is raised unless ``replace`` is true.
        """
        key = worker_name(name)
        spec = self._fit(spec_of("command", command, fields))
        parts = self._parts()
        verb = self._start(key, spec, may_replace=replace)
        # A start that has nobody to stop first is over in one go: there is nothing in it to be interrupted.
        if key in parts.workers:
            return await self._to_its_end(verb)
        status = await verb
        await parts.durability.answerable()
        return status

    async def _start(self, key: WorkerName, spec: WorkerSpec | None, *, may_replace: bool) -> WorkerStatus:
        answer = (await self._start_group({key: spec}, may_replace=may_replace))[key]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def start_many(
        self,
        workers: Workers,
        *,
        replace: bool = False,
        progress: Callable[[str, WorkerStatus | Exception], None] | None = None,
        **fields: Any,
    ) -> builtins.list[WorkerStatus]:
        """Start many: what :meth:`start` promises for each, at a lower price, because they share their commits.

        ``workers`` maps names to commands or specs (None: the worker as it is known); ``fields`` are for all of them.
        Everything is checked before anything is started. A worker that cannot be started does not
        keep the others from it: ``progress`` hears of each as it is started or refused, and in the end the refusals
        are raised together as an :class:`ExceptionGroup`.
        """
        wanted = {name: self._fit(spec) for name, spec in specs_of(workers, fields).items()}
        return await self._to_its_end(self._start_many(wanted, progress, may_replace=replace))

    async def _start_many(
        self,
        wanted: Mapping[WorkerName, WorkerSpec | None],
        progress: Callable[[str, WorkerStatus | Exception], None] | None,
        *,
        may_replace: bool,
    ) -> builtins.list[WorkerStatus]:
        answers: dict[WorkerName, WorkerStatus | BaseException] = {}
        gate = asyncio.Semaphore(_GROUP)

        async def tell(told: dict[WorkerName, WorkerStatus | BaseException], before: asyncio.Task[None] | None) -> None:
            await self._parts().durability.answerable()
            if before is not None:  # in order, also where one sync of the disk lets several groups go
                await asyncio.wait([before])
            for name, answer in told.items():
                answers[name] = answer
                if progress is not None and isinstance(answer, WorkerStatus | Exception):
                    progress(name, answer)

        async def start(group: Mapping[WorkerName, WorkerSpec | None]) -> None:
            async with gate:
                told = await self._start_group(group, may_replace=may_replace)
                # The disk may take its time: the next group is started meanwhile.
                before = telling[-1] if telling else None
                telling.append(self._parts().loop.create_task(tell(told, before)))

        telling: builtins.list[asyncio.Task[None]] = []
        slow: builtins.list[WorkerName] = []
        group: dict[WorkerName, WorkerSpec | None] = {}
        begun: builtins.list[asyncio.Task[None]] = []
        try:
            for name, spec in wanted.items():
                if len(group) == _GROUP:
                    await self._begin_group(begun, start, group)
                    group = {}
                if self._starts_at_once(name):
                    group[name] = spec
                else:  # started separately so that it does not delay the others
                    slow.append(name)
            await self._begin_group(begun, start, group)
            await asyncio.gather(*begun)
            await asyncio.gather(*(start({name: wanted[name]}) for name in slow))
        finally:
            await asyncio.gather(*begun)
            await asyncio.gather(*telling)
        return _all_started({name: answers[name] for name in wanted})

    async def _begin_group(
        self,
        begun: builtins.list[asyncio.Task[None]],
        start: Callable[[Mapping[WorkerName, WorkerSpec | None]], Coroutine[Any, Any, None]],
        group: Mapping[WorkerName, WorkerSpec | None],
    ) -> None:
        """Begin a group; return when those before it are over, or all, so that events come in the order asked for.

        Where the C side makes the births, one group is made ready while the one before is born.
        """
        parts = self._parts()
        by_calls = all(spec is not None and parts.engine.starts_in_one(spec) for spec in group.values())
        if not by_calls:
            await asyncio.gather(*begun)
        begun.append(parts.loop.create_task(start(group)))
        await asyncio.gather(*(begun[:-1] if by_calls else begun))
        del begun[:-1]

    def _starts_at_once(self, name: WorkerName) -> bool:
        """Is nobody acting on it, and is there nobody to stop first?"""
        parts = self._parts()
        worker = parts.workers.get(name)
        return parts.turns.is_free(name) and (worker is None or not worker.has_process)

    async def _start_group(
        self, wanted: Mapping[WorkerName, WorkerSpec | None], *, may_replace: bool
    ) -> dict[WorkerName, WorkerStatus | BaseException]:
        """Start some workers with one commit before and one after; each has its own answer."""
        parts = self._parts()
        async with parts.turns.of_all(wanted):
            self._parts()
            new: builtins.list[Worker] = []
            try:
                answers, orders = await self._made_ready(wanted, new, may_replace=may_replace)
                await self._starting.launch_all(orders)
            finally:
                # Nothing was there before, so nothing is there afterwards.
                for worker in new:
                    if not worker.has_process:
                        self._undo_new(parts, worker)
            for order in orders:
                answers[order.worker.record.name] = order.failure or self._status(order.worker, fresh=True)
                if order.failure is not None and order.worker not in new:
                    self._recovery.wait_again(order.worker)
            return {name: answers[name] for name in wanted}

    async def stop(self, name: str | int) -> WorkerStatus:
        """Stop a worker; return when its whole tree is proven gone."""
        return (await self.stop_many([name]))[0]

    async def stop_many(
        self, names: Iterable[str | int], progress: Callable[[WorkerStatus], None] | None = None
    ) -> builtins.list[WorkerStatus]:
        """Stop many at once; ``progress`` hears of each one that is gone."""
        keys = [worker_name(name) for name in names]
        for key in keys:
            self._known(key)
        return await self._to_its_end(self._stop_many(keys, progress))

    async def _stop_many(
        self, keys: Sequence[WorkerName], progress: Callable[[WorkerStatus], None] | None
    ) -> builtins.list[WorkerStatus]:
        parts = self._parts()
        async with parts.turns.of_all(keys):
            workers = {key: self._known(key) for key in keys}
            told = None if progress is None else lambda worker: progress(self._status(worker))
            to_stop = [worker for key, worker in workers.items() if not parts.deeds.is_done(key)]
            await self._ending.stop(to_stop, progress=told)
            return [self._status(workers[key]) for key in keys]

    async def stop_all(self) -> builtins.list[WorkerStatus]:
        """Stop every worker of the deck."""
        return await self.stop_many(list(self._parts().workers))

    async def restart(self, name: str | int) -> WorkerStatus:
        """Stop a worker and start it again with the spec it has."""
        key = worker_name(name)
        self._known(key)
        return await self._to_its_end(self._restart(key))

    async def _restart(self, key: WorkerName) -> WorkerStatus:
        parts = self._parts()
        async with parts.turns.of(key):
            worker = self._known(key)
            if parts.deeds.is_done(key):
                return self._status(worker)
            if (refusal := _waits_for_a_person(worker.record)) is not None:
                raise refusal
            await self._ending.stop([worker], wanted="running")
            crash_point("restart.stopped")
            before = worker.record
            try:
                await self._starting.launch(worker, EventKind.RESTARTED, by="request")
            except (RecordBroken, LockConflict):
                raise
            except EverdeckError as err:
                # It ran, and it should: what keeps it from starting may be over in a moment (a deploy, a full table of
                # processes), so it is tried again as after a crash, and the caller hears why it does not run yet.
                self._healing.could_not_run(worker, before, err)
                raise
            return self._status(worker)

    async def restart_many(
        self,
        names: Iterable[str | int],
        *,
        parallel: int = RESTARTS_AT_ONCE,
        progress: Callable[[str, WorkerStatus | Exception], None] | None = None,
    ) -> builtins.list[WorkerStatus]:
        """Restart many, in groups that share their commits: at most ``parallel`` are down at the same time."""
        keys = list(dict.fromkeys(worker_name(name) for name in names))
        for key in keys:
            self._known(key)
        return await self._to_its_end(self._restart_many(keys, checked_parallel(parallel), progress))

    async def _restart_many(
        self,
        keys: Sequence[WorkerName],
        parallel: int,
        progress: Callable[[str, WorkerStatus | Exception], None] | None,
    ) -> builtins.list[WorkerStatus]:
        answers: dict[WorkerName, WorkerStatus | BaseException] = {}
        for first in range(0, len(keys), parallel):
            told = await self._restart_group(keys[first : first + parallel])
            await self._parts().durability.answerable()
            for name, answer in told.items():
                answers[name] = answer
                if progress is not None and isinstance(answer, WorkerStatus | Exception):
                    progress(name, answer)
        return _all_started({key: answers[key] for key in keys}, "restarted")

    async def _restart_group(self, keys: Sequence[WorkerName]) -> dict[WorkerName, WorkerStatus | BaseException]:
        """Stop some workers together and start them together; each has its own answer."""
        parts = self._parts()
        answers: dict[WorkerName, WorkerStatus | BaseException] = {}
        async with parts.turns.of_all(keys):
            self._parts()
            workers: builtins.list[Worker] = []
            for key in keys:
                worker = parts.workers.get(key)
                if worker is None:  # removed since it was asked for
                    answers[key] = self._unknown(key)
                elif parts.deeds.is_done(key):
                    answers[key] = self._status(worker)
                elif (refusal := _waits_for_a_person(worker.record)) is not None:
                    answers[key] = refusal
                else:
                    workers.append(worker)
            unstopped = await self._ending.stop_each(workers, wanted="running")
            crash_point("restart.stopped")
            orders = [
                Launch(one, EventKind.RESTARTED, one.record.spec, one.record, {"by": "request"})
                for one in workers
                if one.name not in unstopped
            ]
            await self._starting.launch_all(orders)
            for order in orders:
                if isinstance(order.failure, EverdeckError) and not isinstance(
                    order.failure, RecordBroken | LockConflict
                ):
                    self._healing.could_not_run(order.worker, order.before, order.failure)
                answers[order.worker.record.name] = order.failure or self._status(order.worker, fresh=True)
            return {key: unstopped.get(key) or answers[key] for key in keys}

    async def reset(self, name: str | int) -> WorkerStatus:
        """Forget a worker's crashes; if it should run and does not, start it now."""
        key = worker_name(name)
        self._known(key)
        return await self._to_its_end(self._reset(key))

    async def _reset(self, key: WorkerName) -> WorkerStatus:
        parts = self._parts()
        async with parts.turns.of(key):
            worker = self._known(key)
            if parts.deeds.is_done(key):
                return self._status(worker)
            worker.cancel_timer()
            waiting = worker.record.phase in {State.FAILED, State.BACKOFF}
            phase = State.STOPPED if waiting else worker.record.phase
            cleared = replace(
                worker.record,
                phase=phase,
                crashes=0,
                streak=0,
                crash_times=(),
                backoff_until=None,
                timers_boot_id=None,
                unready=0,
                reason=None,
            )
            parts.save(worker, cleared, (EventKind.RESET, {}))
            crash_point("reset.recorded")
            if waiting and cleared.desired == "running":
                await self._starting.launch(worker, EventKind.STARTED, by="reset")
            return self._status(worker)

    async def remove(self, name: str | int, *, data: bool = False) -> None:  # noqa: ARG002 - here data always goes
        """Stop a worker and remove its record, log, data and secrets."""
        key = worker_name(name)
        if self._parts().deeds.is_done(key):
            return
        self._known(key)
        await self._to_its_end(self._remove(key))

    async def was_removed(self, name: str | int) -> bool:
        """Did the request that is being carried out remove this worker before?"""
        return self._parts().deeds.is_done(worker_name(name))

    async def _remove(self, key: WorkerName) -> None:
        parts = self._parts()
        async with parts.turns.of(key):
            worker = self._known(key)
            await self._ending.stop([worker])
            crash_point("remove.stopped")
            parts.deeds.begin(key)
            aside = self._home.set_aside(key)
            parts.durability.also(str(self._home.workers_dir))
            crash_point("remove.set-aside")
            parts.forget(key, EventKind.STOPPED, removed=True)
            del parts.workers[key]
            parts.events.wake()
            crash_point("remove.recorded")
            cgroup = parts.engine.cgroup_path(key)
            if cgroup is not None:
                parts.gatherer.remove(cgroup)
                parts.gatherer.remove(containment.joined_later(cgroup))
            await asyncio.to_thread(idle_readers.dismiss, self._home.workers_dir / key)
            # Not before the disk knows that it was removed: a record that comes back needs its secrets.
            if aside is not None and await parts.durability.on_disk():
                crash_point("remove.on-disk")
                await asyncio.to_thread(self._home.clear, aside)

    async def adopt(self, name: str | int, pid: int, **fields: Any) -> WorkerStatus:
        """Take over a process that somebody else started, without stopping it.

        Its command line, working directory and the given fields become its spec, so that it can be started again.
        It carries no lock of ours, so the owner holds the lock for it.
        """
        key = worker_name(name)
        return await self._to_its_end(self._adopt(key, pid, fields))

    async def _adopt(self, key: WorkerName, pid: int, fields: dict[str, Any]) -> WorkerStatus:
        parts = self._parts()
        async with parts.turns.of(key):
            known = parts.workers.get(key)
            if parts.deeds.is_done(key):
                return self._status(self._known(key))
            if known is not None and known.has_process:
                raise SpecChanged(key, ("pid",))
            await laid_out(pid)
            worker = self._starting.adopt_stranger(key, pid, fields)
            worker.on_death = self._healing.died
            parts.workers[key] = worker
            self._starting.tend(worker, worker.record.spec, fresh=True)
            return self._status(worker)

    async def reconcile(self) -> None:
        """Compare every worker with the kernel now and act on differences; rarely needed, deaths are heard at once."""
        parts = self._parts()
        for name in list(parts.workers):
            async with parts.turns.of(name):
                worker = parts.workers.get(name)
                if worker is None:
                    continue
                if worker.pidfd is not None:
                    await self._healing.reaped(worker)
                    await self._healing.ended(worker)
                elif worker.timer is None:
                    await self._recovery.bring_up(worker)

    # --- verbs that tell ----------------------------------------------------------------------------------------

    async def status(self, name: str | int) -> WorkerStatus:
        """One worker as it is now."""
        key = worker_name(name)
        self._parts()
        return self._status(self._known(key))

    async def list(self) -> builtins.list[WorkerStatus]:
        """Every worker as it is now, by name; cpu and memory as they were within the last second.

        Where measuring thousands takes longer than a person likes to wait, as they were within the last minute.
        """
        asked = self._parts().clock.boottime()
        older_seconds = RECENT_SECONDS
        if (measured := self._measure_all()) is not None and not await self._measured_soon(measured):
            older_seconds = OLDER_SECONDS
        parts = self._parts()
        workers, clock, now = parts.workers, parts.clock, parts.clock.boottime()
        recent_seconds = now - asked + older_seconds  # as it was when we were asked, however long the others took
        seen = self._glance.at(workers, parts.health, clock)
        return [measured_status(workers[one.name], one, clock, now, recent_seconds) for one in seen]

    async def _measured_soon(self, measured: asyncio.Event) -> bool:
        """Wait until all are measured; False if that takes long and there are older measurements of all."""
        parts = self._parts()
        now = parts.clock.boottime()
        running = (one for one in parts.workers.values() if one.pidfd is not None)
        older = all(was_measured(one, now, OLDER_SECONDS - _MEASURE_PATIENCE_SECONDS) for one in running)
        try:
            async with asyncio.timeout(_MEASURE_PATIENCE_SECONDS if older else None):
                await measured.wait()
        except TimeoutError:
            return False
        return True

    async def glance(self) -> builtins.list[WorkerStatus]:
        """Every worker, by name, without uptime, cpu and memory: next to nothing while nothing changed."""
        parts = self._parts()
        return self._glance.at(parts.workers, parts.health, parts.clock)

    async def usage(self) -> Mapping[str, tuple[float, int]]:
        """Percent of a core and bytes of everybody who runs, as they were a moment ago: to find the largest.

        What is older than a second is measured anew behind the answer; who was never measured is waited for.
        """
        parts = self._parts()
        measured = self._measure_all()
        if measured is not None and any(one.used is None for one in parts.workers.values() if one.pidfd is not None):
            await measured.wait()
        facts = (Worker.changes, self._measurements)
        if self._used is None or self._used[0] != facts:
            used = {name: one.used[1:] for name, one in parts.workers.items() if one.used is not None}
            self._used = (facts, used)
        return self._used[1]

    def _measure_all(self) -> asyncio.Event | None:
        """Measure whoever was not measured of late, beside everything else; None if there is nobody."""
        if self._measured.is_set():
            parts = self._parts()
            now = parts.clock.boottime()
            workers = parts.workers.values()
            stale = [one for one in workers if one.pidfd is not None and not was_measured(one, now, RECENT_SECONDS)]
            if not stale:
                return None
            self._measured.clear()
            parts.tasks.start(self._measure(stale, parts.clock))
        return self._measured

    async def _measure(self, workers: builtins.list[Worker], clock: Clock) -> None:
        """In slices: reading /proc for thousands takes a tenth of a second, in which nobody else would be heard."""
        try:
            for number, worker in enumerate(workers, 1):
                if worker.pidfd is not None:
                    measure(worker, clock.boottime())
                if number % _SLICE == 0:
                    await asyncio.sleep(0)  # noqa: TID251 - no wait: others get their turn
        finally:
            self._measurements += 1
            self._measured.set()

    async def spec(self, name: str | int) -> WorkerSpec:
        """What a worker runs; the values of its secrets are None."""
        self._parts()
        return self._known(worker_name(name)).record.spec

    async def crash_times(self, name: str | int) -> builtins.list[float]:
        """When a worker crashed within its window, as seconds since the epoch."""
        return crash_times(self._known(worker_name(name)).record, self._parts().clock)

    async def inspect(self, name: str | int) -> Inspection:
        """Everything about one worker."""
        crashes = [datetime.fromtimestamp(at, UTC) for at in await self.crash_times(name)]
        status, spec = await self.status(name), await self.spec(name)
        held = rights.holds(spec, status.containment)
        return Inspection(status, spec, await self.layers(name), await self.tree(name), crashes, held)

    async def logs(
        self,
        name: str | int,
        lines: int | None = 20,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        grep: str | None = None,
    ) -> builtins.list[str]:
        """The last lines of a worker's log, across rotations."""
        return await deck_logs.read(self.log_dir(name), lines=lines, since=since, until=until, grep=grep)

    def follow_logs(self, name: str | int, lines: int = 0, *, grep: str | None = None) -> AsyncIterator[str]:
        """The last lines of a worker's log, then each new one as it is written."""
        return deck_logs.follow(self.log_dir(name), lines=lines, grep=grep)

    def log_dir(self, name: str | int) -> Path:
        """Where a worker's log files are."""
        key = worker_name(name)
        parts = self._parts()
        self._known(key)
        return parts.engine.log_dir(key)

    async def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> builtins.list[Event]:
        """What happened after an event id, oldest first; durable, so it can be replayed."""
        return self._parts().registry.events(after, limit, worker)

    async def last_event_id(self) -> int:
        """The id of the newest event."""
        return self._parts().registry.last_event_id()

    def follow(self, after: int | None = None) -> AsyncIterator[Event]:
        """Each event after an id (None: from now on), then each new one as it happens."""
        return self._parts().events.follow(after)

    def on_event(self, callback: Callable[[Event], Any]) -> Callable[[], None]:
        """Call back for each event from now on; returns what unsubscribes.

        The callback runs in a thread of its own (a coroutine function in the deck's loop), in order, outside the
        deck's way: it may be slow or raise, and is told nothing twice.
        """
        parts = self._parts()
        return parts.events.listen(callback, parts.loop)

    async def record_event(self, worker: str | None, kind: EventKind, detail: dict[str, Any]) -> Event:
        """Add an event of somebody else's to the stream, for example a feed's."""
        parts = self._parts()
        with parts.registry.transaction():
            event = parts.events.pass_on(worker, kind, detail)
        parts.events.wake()
        await parts.durability.answerable()
        return event

    async def tree(self, name: str | int) -> builtins.list[ProcessInfo]:
        """Every process of a worker's tree."""
        self._parts()
        worker = self._known(worker_name(name))
        if not worker.has_process or worker.record.identity is None:
            return []
        pids = set(containment.members([worker.tree()])[worker.record.cookie]) | {worker.record.identity.pid}
        return describe(pids)

    async def layers(self, name: str | int) -> builtins.list[Layer]:
        """Which of the four layers protect a worker here, and how strongly."""
        parts = self._parts()
        worker = self._known(worker_name(name))
        bound = worker.record.spec.lifetime == "bound"
        return layers_of(worker, bound, guardian_pid=parts.guardian.pid, layers=parts.layers)

    async def abilities(self) -> Abilities:
        """An owner keeps every verb."""
        return Abilities("owner", str(self.state_dir))

    async def members(self) -> builtins.list[Member]:
        """Who has the deck open: this process, which owns it, and the members."""
        self._parts()
        own = Member(self.owner_pid, os.getuid(), ids.command_line(self.owner_pid), owner=True)
        return [own, *self._server.joined()]

    def wakes(self) -> AsyncIterator[int]:
        """The id of the newest event, whenever it has changed: for members, which read events from the disk."""
        return self._parts().events.wakes()

    # --- starting, as a verb ------------------------------------------------------------------------------------

    def _fit(self, spec: WorkerSpec | None) -> WorkerSpec | None:
        """What is to run, refused before anything is written if it cannot be had here; None: the worker as known."""
        if spec is None:
            return None
        if spec.satellite is not None:
            from everdeck.satellites import completed  # noqa: PLC0415 - only decks with satellites load them

            spec = completed(spec)
        self._parts().engine.check(spec)
        return spec

    async def _made_ready(
        self, wanted: Mapping[WorkerName, WorkerSpec | None], new: builtins.list[Worker], *, may_replace: bool
    ) -> tuple[dict[WorkerName, WorkerStatus | BaseException], builtins.list[Launch]]:
        """Answers for those that need no start or can have none, orders for the others; who is replaced is stopped."""
        parts = self._parts()
        answers: dict[WorkerName, WorkerStatus | BaseException] = {}
        orders = []
        for name, spec in wanted.items():
            try:
                worker = parts.workers.get(name)
                if parts.deeds.is_done(name):
                    answers[name] = self._status(self._known(name))
                    continue
                changed: tuple[str, ...] = ()
                if worker is not None:
                    changed = () if spec is None else self._changed_fields(worker.record, spec)
                    answer = self._answer_at_once(worker, changed, may_replace=may_replace)
                    if answer is not None:
                        answers[name] = answer
                        continue
                    if worker.has_process:
                        await self._ending.stop([worker], wanted="running")
                orders.append(self._order(name, spec, changed, new))
            except Exception as err:  # noqa: BLE001 - its own, whatever it is: the others are started
                answers[name] = err
        return answers, orders

    def _answer_at_once(
        self, worker: Worker, changed: tuple[str, ...], *, may_replace: bool
    ) -> WorkerStatus | EverdeckError | None:
        """What there is to say to a start that starts nothing; None if it starts something."""
        record = worker.record
        if worker.has_process:
            if not changed and record.desired == "running":
                return self._status(worker)
            if changed and not may_replace:
                return SpecChanged(record.name, changed)
        elif not changed and not may_replace:
            return _waits_for_a_person(record)
        return None

    def _order(
        self, name: WorkerName, spec: WorkerSpec | None, changed: tuple[str, ...], new: builtins.list[Worker]
    ) -> Launch:
        parts = self._parts()
        worker = parts.workers.get(name)
        if worker is None:
            if spec is None:
                raise self._unknown(name)
            record = WorkerRecord(name, encoded_spec(spec), "running", State.STOPPED, containment.new_cookie())
            parts.workers[name] = worker = Worker(record, parts.engine.workers_dir)
            worker.on_death = self._healing.died
            new.append(worker)
            homeless = parts.engine.starts_in_one(spec)
            special = not homeless and parts.engine.prepare(name, spec)
            folder = str(self._home.workers_dir)
            sync = parts.durability.also if special else parts.durability.soon
            sync(folder)
            sync(f"{folder}/{name}")
            return Launch(worker, EventKind.STARTED, spec, record, homeless=homeless)
        worker.cancel_timer()
        if spec is None or not changed:
            return Launch(worker, EventKind.STARTED, worker.record.spec, worker.record)
        spec_json = encoded_spec(spec)
        parts.engine.prepare(name, spec, replacing_by=spec_json)
        # A new spec is a new attempt: what the old one did does not count against it.
        worker.record = replace(
            worker.record,
            spec_json=spec_json,
            crashes=0,
            streak=0,
            crash_times=(),
            backoff_until=None,
            damage=None,
            unready=0,
            reason=None,
        )
        return Launch(worker, EventKind.STARTED, spec, worker.record)

    def _undo_new(self, parts: Parts, worker: Worker) -> None:
        worker.cancel_timer()
        del parts.workers[worker.name]
        with contextlib.suppress(RegistryError):
            parts.registry.delete(worker.record.name)
        if not flock.is_held(worker.lock_path):
            with contextlib.suppress(EverdeckError):
                parts.engine.clear(worker.record.name)

    def _changed_fields(self, record: WorkerRecord, spec: WorkerSpec) -> tuple[str, ...]:
        if record.broken is not None:
            return ("command",)  # what it was cannot be compared: only a replacement is a start
        stored, wanted = record.spec, spec.without_secret_values()
        changed = [field for field in WorkerSpec.__struct_fields__ if getattr(stored, field) != getattr(wanted, field)]
        if "secrets" not in changed and not self._parts().engine.same_secrets(record.name, spec):
            changed.append("secrets")
        return tuple(changed)

    async def _to_its_end(self, verb: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Carry a verb out though its caller may stop waiting: half a stop is a worker that nobody insists on."""
        parts = self._parts()
        task = parts.loop.create_task(verb)
        self._verbs.add(task)
        task.add_done_callback(self._verbs.discard)
        over = still_asked()
        task.add_done_callback(lambda _: over())
        answer = await asyncio.shield(task)
        await parts.durability.answerable()
        return answer

    # --- small things -------------------------------------------------------------------------------------------

    def _parts(self) -> Parts:
        """What is open; refuses in a forked copy and after closing."""
        if os.getpid() != self.owner_pid:
            raise DeckClosed(
                f"the deck {self.state_dir} was opened by pid {self.owner_pid}; this process is a fork of it: "
                f"open a deck of its own here, or ask the owner"
            )
        if self._parts_open is None or self._parts_open.closing:
            raise DeckClosed(f"the deck {self.state_dir} is closed; open it first")
        return self._parts_open

    def _status(self, worker: Worker, *, fresh: bool = False) -> WorkerStatus:
        parts = self._parts_open or self._parts()  # a verb that began before the deck began to close is answered
        health, reason = parts.health.summary(worker.name), parts.health.reason(worker.name)
        return status_of(worker, parts.clock, health, reason, fresh=fresh)

    def _known(self, name: str) -> Worker:
        worker = self._parts().workers.get(name)
        if worker is None:
            raise self._unknown(name)
        return worker

    def _unknown(self, name: str) -> UnknownWorker:
        return UnknownWorker.among(name, self._parts().workers)


def _listener(state_dir: Path, inherited_fd: int | None) -> socket.socket:
    """The socket of the owner before us, with whoever waits there; or our own, also if somebody removed its name."""
    if inherited_fd is None:
        return unixsocket.listen(state_dir, SOCKET)
    inherited = socket.socket(fileno=inherited_fd)
    if (state_dir / SOCKET).is_socket():
        return inherited
    inherited.close()
    return unixsocket.listen(state_dir, SOCKET)


def _why_failed(record: WorkerRecord) -> str:
    crashes = len(record.crash_times)
    why = (
        f"not ready {record.unready} times in a row" if record.unready > crashes else f"{crashes} crashes in its window"
    )
    return why if record.reason is None else f"{why}: {record.reason}"


def _all_started(
    answers: Mapping[WorkerName, WorkerStatus | BaseException], done: str = "started"
) -> list[WorkerStatus]:
    """The statuses, or what was refused, together."""
    refused: list[Exception] = []
    for name, answer in answers.items():
        if isinstance(answer, Exception):
            answer.add_note(f"while {done.removesuffix('ed')}ing worker {name!r}")
            refused.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
    if refused:
        raise ExceptionGroup(f"{len(refused)} of {len(answers)} workers could not be {done}", refused)
    return [answer for answer in answers.values() if isinstance(answer, WorkerStatus)]


def _inherited(given: Given) -> Inherited:
    """What the owner before handed on, as an exec in place would have carried it over."""
    guardian = None if given.guardian is None else {"channel_fd": given.guardian[0], "pid": given.guardian[1]}
    return Inherited(given.lock_fd, given.notify_fd, given.lifelines, guardian, given.listener_fd)


def _open_parts(
    home: DeckHome,
    registry: Registry,
    inherited: Inherited,
    clock: Clock,
    layers: frozenset[str],
    durability: DurabilityMode,
    deck_id: str,
) -> Parts:
    """Everything an owner holds; whatever fails, nothing stays open."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as undo:
        undo.callback(registry.close)
        synced = Durability(registry, loop, durability)
        synced.also(str(home.state_dir))  # the registry's files may be new in it
        deeds = Deeds(registry, clock)
        registry.set_meta("deck_id", deck_id)
        crash_point("open.registry")
        notify = (
            NotifySocket(home.state_dir)
            if inherited.notify_fd is None
            else NotifySocket.inherited(inherited.notify_fd, home.state_dir)
        )
        undo.callback(notify.close)
        cgroup_home = containment.cgroup_home()
        engine = Engine(
            home.workers_dir,
            cgroup_home=None if cgroup_home is None else cgroup_home / f"everdeck-{deck_id}",
            notify_socket=notify.address,
            with_lifeline="L1" in layers,
            with_lock="L2" in layers,
        )
        undo.callback(engine.close)
        watch = DeathWatch()
        watch.open(loop)
        undo.pop_all()
    return Parts(
        loop=loop,
        clock=clock,
        layers=layers,
        home=home,
        registry=registry,
        durability=synced,
        deeds=deeds,
        events=EventStream(registry, clock, deeds),
        watch=watch,
        notify=notify,
        engine=engine,
        guardian=GuardianLink(watch, enabled="L1" in layers),
        same_ear=inherited.notify_fd is not None,
    )


_open_owners: "weakref.WeakSet[Owner]" = weakref.WeakSet()


def _forget_owners_in_forked_child() -> None:
    for owner in list(_open_owners):
        owner.forget_in_fork()


os.register_at_fork(after_in_child=_forget_owners_in_forked_child)

if TYPE_CHECKING:  # mypy proves that the owner keeps the contract
    from everdeck.wire.requests import Served

    def _keeps_the_contract(owner: Owner) -> Served:
        return owner


def _waits_for_a_person(record: WorkerRecord) -> WorkerFailed | None:
    """Why it is neither started nor restarted: its breaker has tripped, and only a reset closes it."""
    if record.phase is not State.FAILED:
        return None
    return WorkerFailed(record.name, _why_failed(record))
