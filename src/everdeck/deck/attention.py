"""Were we awake? Silence counts only while somebody listened.

An owner that was stopped (SIGSTOP), frozen with its machine, or busy for longer than a watchdog has heard nobody, and
what it did not hear proves nothing. So while somebody's silence is being measured, a small timer looks at the clock;
when it comes much later than it should, we were away, and all silence begins anew from now.

Two clocks: the monotonic one stands still while the machine is suspended, the boot clock does not.
"""

import asyncio
from typing import Final

from everdeck.clock import Clock

_LONGEST_TICK_SECONDS: Final = 1.0
_SHORTEST_TICK_SECONDS: Final = 0.05
_SLACK_SECONDS: Final = 0.25  # a loop that is merely busy is late by less


class Attention:
    """Knows since when we have been listening without a break."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._tick = _LONGEST_TICK_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = (0.0, 0.0)
        self.listening_since = 0.0
        self.breaks = 0
        """How often we were away: who waits for an answer compares before and after."""

    def begin(self, patience_seconds: float) -> None:
        """From now on look often enough to judge a silence of that many seconds."""
        tick = min(_LONGEST_TICK_SECONDS, max(_SHORTEST_TICK_SECONDS, patience_seconds / 4))
        if self._timer is None:
            self._tick = tick
            self._looked_at = self._clocks()
            self.listening_since = self._loop.time()
            self._timer = self._loop.call_later(self._tick, self._ticked)
        elif tick < self._tick:
            self._tick = tick
            self._timer.cancel()
            self._ticked()

    def look(self) -> float:
        """Since when (by the loop's clock) we have been listening without a break; asked before each judgement."""
        if self._timer is not None:
            before, self._looked_at = self._looked_at, self._clocks()
            away = max(now - then for now, then in zip(self._looked_at, before, strict=True)) - self._tick
            if away > max(_SLACK_SECONDS, self._tick):
                self.listening_since = self._loop.time()
                self.breaks += 1
        return self.listening_since

    def end(self) -> None:
        """Nobody's silence is measured any more: no timer, no wake-up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ticked(self) -> None:
        self.look()
        self._timer = self._loop.call_later(self._tick, self._ticked)

    def _clocks(self) -> tuple[float, float]:
        return self._loop.time(), self._clock.boottime()
