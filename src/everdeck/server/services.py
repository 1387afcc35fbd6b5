"""What the handlers of one daemon share: the deck and the few objects that live beside it."""

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING

from everdeck.deck import AsyncDeck
from everdeck.server.auth import GuessLimit, Keys
from everdeck.server.samples import Sampler
from everdeck.server.sse import EventFan, LogStreams

if TYPE_CHECKING:
    from collections.abc import Callable


class Services:
    """Made once per daemon, after the deck was opened."""

    def __init__(
        self, deck: AsyncDeck, started_at: datetime, keys: Keys | None = None, sample_seconds: float | None = None
    ) -> None:
        self.deck = deck
        self.started_at = started_at
        self.keys = keys
        self.guesses = GuessLimit()
        self.fan = EventFan(deck)
        self.log_streams = LogStreams()
        self.sampler = Sampler(deck, sample_seconds)
        self.connections: Callable[[], int] = lambda: 0
        self.reload_wanted = asyncio.Event()
        self.leave_wanted = asyncio.Event()
        self.page: str | None = None
        self.apply_lock = asyncio.Lock()
        self.preflight: Callable[[], asyncio.Future[str | None]] | None = None

    def close(self) -> None:
        """End streams and sampling, so that connections can be closed."""
        self.fan.close()
        self.log_streams.close()
        self.sampler.close()
