"""Everything that happened, in order, once: to disk first, then to whoever listens.

An event is committed in the same transaction as the change it tells of. Listeners are woken afterwards and read
from the registry at their own pace, each from its own place: a slow or raising callback harms neither the deck nor
the other listeners, and cannot miss anything that is still kept.
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from everdeck.clock import Clock
from everdeck.deck.deeds import Deeds
from everdeck.details import typed
from everdeck.errors import RegistryError
from everdeck.model import Event, EventKind
from everdeck.registry import Registry, Telling, read_only
from everdeck.verbs import current_caller

_log: Final = logging.getLogger("everdeck.events")
_BATCH: Final = 500


_ASKED_FOR: Final = frozenset(
    {
        EventKind.STARTED,
        EventKind.RESTARTED,
        EventKind.STOPPING,
        EventKind.STOPPED,
        EventKind.KILLED,
        EventKind.RESET,
        EventKind.ADOPTED,
    }
)
"""What a request can cause by itself; whatever else happens to its worker later is not its doing."""
_OWN_REASONS: Final = frozenset({"policy", "recovery"})


class EventStream:
    """Appends events and lets others follow them."""

    def __init__(self, registry: Registry, clock: Clock, deeds: Deeds) -> None:
        self._registry = registry
        self._clock = clock
        self._deeds = deeds
        self._followers: set[asyncio.Event] = set()
        self._listeners: set[Listener] = set()
        self._closed = False

    @typed
    def append(self, worker: str | None, kind: EventKind, **detail: Any) -> Event:
        """Note down what happened, in the transaction that is open now; call :meth:`wake` after its commit."""
        return self.append_at(self._clock.wall(), worker, kind, with_caller(kind, detail))

    def pass_on(self, worker: str | None, kind: EventKind, detail: Mapping[str, Any]) -> Event:
        """The same for a detail that was made elsewhere, with a kind that is known only now."""
        append: Any = self.append
        event: Event = append(worker, kind, **detail)
        return event

    def append_at(self, at: float, worker: str | None, kind: EventKind, detail: dict[str, Any]) -> Event:
        """As :meth:`append`, for what happened at that time and could not be recorded then."""
        event = self._registry.append_event(at, worker, kind, detail)
        self._deeds.note(worker, kind, event.id, removed=bool(detail.get("removed")))
        return event

    def pass_on_all(self, told: Sequence[Telling]) -> None:
        """As :meth:`pass_on` for many that happened now."""
        told = [(worker, kind, with_caller(kind, detail)) for worker, kind, detail in told]
        self.append_all_at(self._clock.wall(), told)

    def append_all_at(self, at: float, told: Sequence[Telling]) -> None:
        """As :meth:`append_at` for many that happened at the same time."""
        ids = self._registry.append_events(at, told)
        if self._deeds.is_under_way:
            for event_id, (worker, kind, detail) in zip(ids, told, strict=True):
                self._deeds.note(worker, kind, event_id, removed=bool(detail.get("removed")))

    def wake(self) -> None:
        """Something was committed: everybody may look."""
        for follower in self._followers:
            follower.set()
        for listener in self._listeners:
            listener.wake()

    async def follow(self, after: int | None) -> AsyncIterator[Event]:
        """Each event after an id (None: from now on), then each new one as it happens; ends when the deck closes."""
        wakened = asyncio.Event()
        self._followers.add(wakened)
        try:
            position = self._registry.last_event_id() if after is None else after
            while not self._closed:
                wakened.clear()
                for event in self._registry.events(position, _BATCH):
                    yield event
                    position = event.id
                    wakened.set()  # look once more before waiting: there may be more than a batch
                await wakened.wait()
        finally:
            self._followers.discard(wakened)

    async def wakes(self) -> AsyncIterator[int]:
        """The id of the newest event, now and whenever there are newer ones; for those who read them elsewhere."""
        wakened = asyncio.Event()
        self._followers.add(wakened)
        try:
            while not self._closed:
                wakened.clear()
                yield self._registry.last_event_id()
                await wakened.wait()
        finally:
            self._followers.discard(wakened)

    def listen(self, callback: Callable[[Event], Any], loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        """Call back for each event from now on, outside the loop; returns what ends it."""
        listener = Listener(self._registry.path, self._registry.last_event_id(), callback, loop)
        self._listeners.add(listener)

        def unsubscribe() -> None:
            self._listeners.discard(listener)
            listener.end()

        return unsubscribe

    def close(self) -> None:
        """Let every follower and listener see what is left, then end."""
        self._closed = True
        for follower in self._followers:
            follower.set()
        for listener in self._listeners:
            listener.end()
        self._listeners.clear()


def with_caller(kind: EventKind, detail: dict[str, Any]) -> dict[str, Any]:
    """The same detail with who asked for it, if somebody did and it is not for a reason of our own."""
    caller = current_caller()
    if caller is None or kind not in _ASKED_FOR or detail.get("by") in _OWN_REASONS:
        return detail
    return {**detail, "by": msgspec.to_builtins(caller)}


class Listener:
    """One callback with a thread of its own, so that it can wait for nobody and nobody waits for it."""

    def __init__(
        self, path: Path, position: int, callback: Callable[[Event], Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._path = path
        self._position = position
        self._callback = callback
        self._loop = loop
        self._wakened = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="everdeck-events", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something new."""
        self._wakened.set()

    def end(self) -> None:
        """Deliver what is there, then end. Returns at once: a callback may be slow, or be the caller itself."""
        self._ending = True
        self._wakened.set()

    def _run(self) -> None:
        registry: Registry | None = None
        try:
            while True:
                self._wakened.wait()
                self._wakened.clear()
                ending = self._ending
                try:
                    registry = registry or read_only(self._path)
                    self._deliver(registry)
                except RegistryError:
                    _log.exception("events after %d could not be read; trying again with the next one", self._position)
                if ending:
                    return
        finally:
            if registry is not None:
                registry.close()

    def _deliver(self, registry: Registry) -> None:
        while batch := registry.events(self._position, _BATCH):
            for event in batch:
                self._position = event.id
                self._call(event)

    def _call(self, event: Event) -> None:
        try:
            result = self._callback(event)
            if inspect.iscoroutine(result):
                asyncio.run_coroutine_threadsafe(result, self._loop).result()
        except BaseException:  # noqa: BLE001 - the edge: whatever a callback raises, even SystemExit, is its own failure
            _log.exception("an on_event callback raised at event %d (%s of %s)", event.id, event.kind, event.worker)
