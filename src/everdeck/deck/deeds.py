"""A verb that is asked for twice is done once.

Whoever asks over a wire gives each verb that acts a request id, and asks again with the same id when the owner died
before it answered. The id is committed in the same transaction as the event that says the verb was done, so the next
owner knows: done, then it answers; not done, then nothing of it happened that shows, and it is carried out now. The
verbs with two visible halves are ``restart`` and ``remove``; an id is noted with the first half, and the owner that
recovers a worker between the halves finishes the verb, under the id, instead of acting on its own account.

Ids are kept for an hour.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from everdeck.clock import Clock
from everdeck.model import EventKind
from everdeck.registry import Registry

KEPT_SECONDS: Final = 3600.0
_PRUNE_EVERY: Final = 1_000


@dataclass(frozen=True, slots=True)
class _Deed:
    """What is being carried out in this context, and for whom it was already."""

    request: str
    kind: EventKind
    removal: bool
    done: frozenset[str]


_deed: ContextVar[_Deed | None] = ContextVar("everdeck_deed", default=None)


class Deeds:
    """The requests of one deck."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._since_pruning = 0
        self._begun = registry.requests_begun()
        registry.forget_requests(clock.wall() - KEPT_SECONDS)

    async def once(
        self,
        request: str | None,
        deed: EventKind | None,
        act: Callable[[], Awaitable[Any]],
        *,
        removal: bool = False,
    ) -> Any:
        """Carry it out, or wait for who already does, and mark it done with the event that tells of it."""
        if request is None or deed is None:
            return await act()
        task = self._running.get(request)
        if task is None:
            loop = asyncio.get_running_loop()
            task = self._running[request] = loop.create_task(self._carried_out(request, deed, act, removal=removal))
            task.add_done_callback(lambda _: self._running.pop(request, None))
        return await asyncio.shield(task)

    async def _carried_out(
        self, request: str, deed: EventKind, act: Callable[[], Awaitable[Any]], *, removal: bool
    ) -> Any:
        _deed.set(_Deed(request, deed, removal, self._registry.requests_done(request)))
        return await act()

    @property
    def is_under_way(self) -> bool:
        """Is a request being carried out whose id has to be noted?"""
        return _deed.get() is not None

    def is_done(self, worker: str) -> bool:
        """Was what is being carried out done for this worker before, by whoever owned the deck then?"""
        deed = _deed.get()
        return deed is not None and worker in deed.done

    def note(self, worker: str | None, kind: EventKind, event_id: int, *, removed: bool) -> None:
        """An event is being committed: if it says that the request was done, or half done, the id goes with it."""
        deed = _deed.get()
        if deed is None or worker is None:
            return
        half = kind is EventKind.STOPPING and deed.kind is EventKind.RESTARTED
        if not half and (kind is not deed.kind or removed is not deed.removal):
            return
        now = self._clock.wall()
        self._registry.note_request(deed.request, worker, None if half else event_id, now)
        self._since_pruning += 1
        if self._since_pruning >= _PRUNE_EVERY:
            self._since_pruning = 0
            self._registry.forget_requests(now - KEPT_SECONDS)

    def settled(self) -> None:
        """Every worker was recovered: what was begun and not finished shows nowhere, and may be asked for again."""
        if self._begun:
            self._begun.clear()
            self._registry.forget_requests_begun()

    def begin(self, worker: str) -> None:
        """The next step shows, and an owner that recovers behind it finishes the verb: note under which id."""
        deed = _deed.get()
        if deed is not None:
            self._registry.note_request(deed.request, worker, None, self._clock.wall())

    @contextlib.contextmanager
    def resumed_removal(self, worker: str) -> Iterator[None]:
        """Within this a removal that was begun is finished, under the id that it was asked for with."""
        request = self._begun.pop(worker, None)
        before = _deed.set(None if request is None else _Deed(request, EventKind.STOPPED, True, frozenset()))  # noqa: FBT003
        try:
            yield
        finally:
            _deed.reset(before)

    @contextlib.contextmanager
    def resumed(self, worker: str, otherwise: EventKind) -> Iterator[EventKind]:
        """Within this a worker is started by recovery: as the second half of a restart, if one was begun for it."""
        request = self._begun.pop(worker, None)
        if request is None:
            yield otherwise
            return
        before = _deed.set(_Deed(request, EventKind.RESTARTED, removal=False, done=frozenset()))
        try:
            yield EventKind.RESTARTED
        finally:
            _deed.reset(before)
