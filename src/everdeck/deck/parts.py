"""What one open deck holds, for the modules that act on it: the registry, the engine, the watchers, the workers.

Each of :mod:`starting`, :mod:`ending`, :mod:`healing`, :mod:`hearing` and :mod:`recovery` owns one kind of act and
finds everything it needs here; the verbs in :mod:`everdeck.deck.owner` put them together.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

from everdeck.clock import Clock
from everdeck.deck.durability import Durability
from everdeck.deck.engine import Engine
from everdeck.deck.events import EventStream
from everdeck.deck.gather import Gatherer
from everdeck.deck.guardian_link import GuardianLink
from everdeck.deck.health import HealthKeeper
from everdeck.deck.home import DeckHome
from everdeck.deck.watch import DeathWatch
from everdeck.deck.worker import Worker
from everdeck.kernel import identity as ids
from everdeck.kernel.notify import NotifySocket
from everdeck.logs.keeper import LogKeeper
from everdeck.model import EventKind, Identity
from everdeck.registry import Record, Registry

_log: Final = logging.getLogger("everdeck.deck")

RETRY_SECONDS: Final = 1.0
"""Disk full, registry locked, no descriptors left: there is nothing that tells when it is over, so look again."""


@dataclass(eq=False)
class Parts:
    """Everything that is open, and the workers."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    layers: frozenset[str]
    home: DeckHome
    registry: Registry
    durability: Durability
    events: EventStream
    watch: DeathWatch
    notify: NotifySocket
    engine: Engine
    guardian: GuardianLink
    same_ear: bool  # workers of the image before speak to the very socket that we listen to
    logs: LogKeeper = field(init=False)
    gatherer: Gatherer = field(init=False)
    health: HealthKeeper = field(init=False)
    workers: dict[str, Worker] = field(default_factory=dict)
    turns: "Turns" = field(default_factory=lambda: Turns())  # noqa: PLW0108 - the class stands below
    tasks: "Tasks" = field(init=False)
    closing: bool = False

    def __post_init__(self) -> None:
        self.tasks = Tasks(self.loop)

    def save(self, worker: Worker, record: Record, *events: tuple[EventKind, dict[str, Any]]) -> None:
        """Commit a worker's record together with the events that tell of it."""
        with self.registry.transaction():
            self.registry.save(record)
            for kind, detail in events:
                self.events.pass_on(record.name, kind, detail)
        worker.record = record
        if events:
            self.events.wake()

    def uptime(self, record: Record, now: float) -> float:
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
        task = self._loop.create_task(work)
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
