"""What one open deck holds, for the modules that act on it: the registry, the engine, the watchers, the workers.

Each of :mod:`starting`, :mod:`ending`, :mod:`healing`, :mod:`hearing` and :mod:`recovery` owns one kind of act and
finds everything it needs here; the verbs in :mod:`everdeck.deck.owner` put them together.
"""

import asyncio
import contextlib
import contextvars
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import TracebackType
from typing import Any, Final, TypeAlias

from everdeck.clock import Clock
from everdeck.deck.crew import Crew, processors
from everdeck.deck.deeds import Deeds
from everdeck.deck.durability import Durability
from everdeck.deck.engine import Engine
from everdeck.deck.events import EventStream, with_caller
from everdeck.deck.gather import Gatherer
from everdeck.deck.guardian_link import GuardianLink
from everdeck.deck.health import HealthKeeper
from everdeck.deck.home import DeckHome
from everdeck.deck.memory import MemoryWatch
from everdeck.deck.watch import DeathWatch
from everdeck.deck.worker import Worker
from everdeck.errors import RegistryError, RegistryUnavailable
from everdeck.kernel import identity as ids
from everdeck.kernel.notify import NotifySocket
from everdeck.logs.keeper import LogKeeper
from everdeck.model import EventKind, Identity, WorkerName
from everdeck.registry import Registry, WorkerRecord

_log: Final = logging.getLogger("everdeck.deck")

RETRY_SECONDS: Final = 1.0
"""Disk full, registry locked, no descriptors left: there is nothing that tells when it is over, so look again."""


Change: TypeAlias = tuple[Worker, WorkerRecord, Sequence[tuple[EventKind, dict[str, Any]]]]
"""One worker's new record, and the events that tell of it."""

_RESERVE_SECONDS: Final = 60.0


@dataclass(eq=False, slots=True)
class Unborn:
    """A worker whose process may run already, while nobody knows its pid yet."""

    cgroup: str | None
    said: list[dict[str, str]] = field(default_factory=list)
    """What it said by now, which counts when it is known."""


@dataclass(eq=False)
class Parts:
    """Everything that is open, and the workers."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    layers: frozenset[str]
    home: DeckHome
    registry: Registry
    durability: Durability
    deeds: Deeds
    events: EventStream
    watch: DeathWatch
    notify: NotifySocket
    engine: Engine
    guardian: GuardianLink
    same_ear: bool  # workers of the image before speak to the very socket that we listen to
    logs: LogKeeper = field(init=False)
    gatherer: Gatherer = field(init=False)
    memory: MemoryWatch = field(init=False)
    health: HealthKeeper = field(init=False)
    crew: Crew = field(default_factory=Crew)
    midwives: Crew = field(default_factory=lambda: Crew(hands=min(2, max(1, processors() - 1))))
    """For first starts, which wait for nobody: two where the loop has a processor beside them."""
    workers: dict[str, Worker] = field(default_factory=dict)
    unborn: dict[str, Unborn] = field(default_factory=dict)
    heard_early: Callable[[str, list[dict[str, str]]], None] = field(init=False)
    turns: "Turns" = field(default_factory=lambda: Turns())  # noqa: PLW0108 - the class stands below
    tasks: "Tasks" = field(init=False)
    closing: bool = False
    _owed: list[tuple[Worker, list[tuple[float, EventKind, dict[str, Any]]]]] = field(default_factory=list)
    _owed_timer: asyncio.TimerHandle | None = None
    _owing: bool = False

    def __post_init__(self) -> None:
        self.tasks = Tasks(self.loop)
        self._keep_reserve()

    def save(self, worker: Worker, record: WorkerRecord, *events: tuple[EventKind, dict[str, Any]]) -> None:
        """Commit a worker's record together with the events that tell of it."""
        with self.registry.transaction():
            self.registry.save(record)
            for kind, detail in events:
                self.events.pass_on(record.name, kind, detail)
        worker.record = record
        if events:
            self.events.wake()

    def note(self, changes: Sequence[Change]) -> None:
        """Note what is true already, all in one commit: who was signalled or ended is, whatever the disk says.

        What the disk refuses now (full, read-only, locked) is owed: the owner's memory has it at once, and the registry
        as soon as it can be written.
        """
        if not changes:
            return
        now = self.clock.wall()
        for worker, record, events in changes:
            worker.record = record
            self._owed.append((worker, [(now, kind, with_caller(kind, detail)) for kind, detail in events]))
        self._pay()

    def _pay(self) -> None:
        self._owed_timer = None
        try:
            self._write_owed()
        except RegistryUnavailable as err:
            if not self.closing:
                if not self._owing:
                    _log.warning("what happened to %d workers cannot be recorded yet: %s", len(self._owed), err)
                    self.logs.make_room()  # if it is the disk that is full, archives of logs go before the registry
                self._owing = True
                self._owed_timer = self.loop.call_later(RETRY_SECONDS, self._pay)
            return
        if self._owing:
            self._owing = False
            _log.warning("what happened meanwhile is recorded now")
            self._keep_reserve()

    def _write_owed(self) -> None:
        try:
            self._write_owed_once()
        except RegistryUnavailable:
            if not self.registry.make_room():
                raise
            self._write_owed_once()

    def _write_owed_once(self) -> None:
        with self.registry.transaction():
            # As they are by now: later news may be in the records already.
            self.registry.save_all(one.record for one, _ in self._owed if self.workers.get(one.name) is one)
            told = ((at, (one.name, kind, detail)) for one, events in self._owed for at, kind, detail in events)
            for at, those in itertools.groupby(told, key=itemgetter(0)):
                self.events.append_all_at(at, [one for _, one in those])
        self._owed.clear()
        self.events.wake()

    def _keep_reserve(self) -> None:
        if not self.closing and not self.registry.keep_reserve():
            self.loop.call_later(_RESERVE_SECONDS, self._keep_reserve)

    def forget(self, name: WorkerName, kind: EventKind, **detail: Any) -> None:
        """Commit that a worker is no more; on a full disk from the reserve, because it is how a person makes room."""
        for attempt in (1, 2):
            try:
                with self.registry.transaction():
                    self.registry.delete(name)
                    self.events.pass_on(name, kind, detail)
            except RegistryUnavailable:
                if attempt > 1 or not self.registry.make_room():
                    raise
                self.loop.call_later(_RESERVE_SECONDS, self._keep_reserve)
            else:
                return

    def pay_all(self) -> None:
        """At the end of the deck: one last try to record what is owed."""
        if self._owed_timer is not None:
            self._owed_timer.cancel()
        if self._owed:
            with contextlib.suppress(RegistryError):
                self._write_owed()

    def uptime(self, record: WorkerRecord, now: float) -> float:
        """Seconds since the leader's start, by the clock that does not step."""
        if record.identity is None or record.identity.boot_id != ids.boot_id():
            return 0.0
        return max(0.0, now - record.identity.start_ticks / ids.CLOCK_TICKS)

    def started_at(self, identity: Identity) -> float:
        """When a process started, on the wall clock."""
        return self.clock.wall() - max(0.0, self.clock.boottime() - identity.start_ticks / ids.CLOCK_TICKS)


class Tasks:
    """Background work with an owner: cancelled and awaited when the deck closes, its failures told."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it beside everything else."""
        # In a context of its own: what the deck does by itself was asked for by nobody, whoever's request began it.
        task = self._loop.create_task(work, context=contextvars.Context())
        self._running.add(task)
        task.add_done_callback(self._done)

    async def end(self) -> None:
        """Cancel what still runs and wait until it has let go."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background work on the deck failed", exc_info=error)


class Turns:
    """One verb at a time on one worker; verbs on different workers do not wait for each other.

    A lock exists only while somebody wants it: ten thousand quiet workers have none.
    """

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    def of(self, name: str) -> "_Turn":
        """``async with turns.of(name):``."""
        return _Turn(self, (name,))

    def of_all(self, names: Iterable[str]) -> "_Turn":
        """The turns of several workers, in one order everywhere, so that two callers cannot wait for each other."""
        return _Turn(self, tuple(sorted(set(names))))

    def is_free(self, name: str) -> bool:
        """Would it be had at once?"""
        return name not in self._locks

    async def take(self, name: str) -> None:
        """Wait for the turn."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        self._users[name] = self._users.get(name, 0) + 1
        try:
            await lock.acquire()
        except BaseException:
            self._leave(name)
            raise

    def give(self, name: str) -> None:
        """Let the next one."""
        self._locks[name].release()
        self._leave(name)

    def _leave(self, name: str) -> None:
        self._users[name] -= 1
        if self._users[name] == 0:
            del self._users[name], self._locks[name]


class _Turn:
    """A context manager written out: on the way of every start, the decorator's generator costs four times as much."""

    __slots__ = ("_names", "_taken", "_turns")

    def __init__(self, turns: Turns, names: tuple[str, ...]) -> None:
        self._turns = turns
        self._names = names
        self._taken: list[str] = []

    async def __aenter__(self) -> None:
        try:
            for name in self._names:
                await self._turns.take(name)
                self._taken.append(name)
        except BaseException:
            self._give_all()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_all()

    def _give_all(self) -> None:
        for name in self._taken:
            self._turns.give(name)
        self._taken.clear()
