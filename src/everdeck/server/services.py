"""What the handlers of one daemon share: the deck and the few objects that live beside it."""

import asyncio
import copy
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from everdeck.deck import AsyncDeck
from everdeck.guarded import Guarded
from everdeck.server.auth import Door, Pass
from everdeck.server.samples import Sampler
from everdeck.server.sse import EventFan, LogStreams
from everdeck.verbs import request_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from everdeck.messages import Message


_Answer = TypeVar("_Answer")
_KEPT: Final = 10_000


class Answers:
    """What was answered to requests under an id, for acts that no registry notes; in memory, the last ten thousand.

    Asked for again while it runs, an act is joined; afterwards its answer is given again. A refusal is not kept: it
    changed nothing. A daemon that ended meanwhile has forgotten: the message is then in hand no more, and that is told.
    """

    def __init__(self) -> None:
        self._acts: dict[str, asyncio.Task[Any]] = {}

    async def once(self, what: str, act: "Callable[[], Coroutine[Any, Any, _Answer]]") -> "_Answer":
        """Carry it out, or answer as before; ``what`` tells apart what one request may do."""
        request = request_id(what.encode())
        if request is None:
            return await act()
        task: asyncio.Task[_Answer] | None = self._acts.get(request)
        if task is None:
            task = self._acts[request] = asyncio.get_running_loop().create_task(act())
            task.add_done_callback(lambda done: self._done(request, done))
        return await asyncio.shield(task)

    def _done(self, request: str, task: "asyncio.Task[Any]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._acts.pop(request, None)
        while len(self._acts) > _KEPT:
            self._acts.pop(next(iter(self._acts)))


class Services:
    """Made once per daemon, after the deck was opened."""

    def __init__(
        self, deck: AsyncDeck, started_at: datetime, door: Door | None = None, sample_seconds: float | None = None
    ) -> None:
        self.deck = deck
        self.started_at = started_at
        self.door = door
        self.fan = EventFan(deck)
        self.log_streams = LogStreams()
        self.sampler = Sampler(deck, sample_seconds)
        self.tells_of: Callable[[str | None], Awaitable[bool]] | None = None
        self.connections: Callable[[], int] = lambda: 0
        self.reload_wanted = asyncio.Event()
        self.leave_wanted = asyncio.Event()
        self.page: str | None = None
        self.apply_lock = asyncio.Lock()
        self.held: dict[str, Message] = {}
        self.held_listeners: set[asyncio.Event] = set()
        self.answers = Answers()
        self.closing = asyncio.Event()
        self.preflight: Callable[[], asyncio.Future[str | None]] | None = None

    def seen_by(self, visitor: Pass) -> Self:
        """The same for one request: its deck holds every verb to what the visitor may do."""
        mine = copy.copy(self)
        guarded: Any = Guarded(self.deck, visitor.grant)  # it keeps the deck's contract, verb by verb
        mine.deck = guarded
        mine.tells_of = guarded.tells_of if visitor.grant.labels else None
        return mine

    def close(self) -> None:
        """End streams and sampling, so that connections can be closed."""
        self.closing.set()
        self.fan.close()
        self.log_streams.close()
        self.sampler.close()
