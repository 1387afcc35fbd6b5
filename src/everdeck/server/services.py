"""What the handlers of one daemon share: the deck and the few objects that live beside it."""

import asyncio
import copy
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from everdeck.deck import AsyncDeck
from everdeck.guarded import Guarded
from everdeck.server.auth import Door, Pass
from everdeck.server.samples import Sampler
from everdeck.server.sse import EventFan, LogStreams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from everdeck.messages import Message


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
