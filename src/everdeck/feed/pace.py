"""How fast one may send, so that nobody has to say "429". Pure.

Telegram lets a bot send about 30 messages a second in all, one a second to one chat, and twenty a minute to one group
(core.telegram.org/bots/faq#my-bot-is-hitting-limits-how-do-i-avoid-this). A message that would be too much waits here.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """Messages per second in all and per key, and per minute for keys that are groups; None: no limit."""

    per_second: float | None = None
    per_key_per_second: float | None = None
    per_group_per_minute: int | None = None

    def is_group(self, key: str) -> bool:
        """Telegram's groups and channels have negative numbers or public names."""
        return key.startswith(("-", "@"))


# A little below what is allowed: what we send evenly arrives unevenly.
TELEGRAM: Final = Limits(per_second=29.0, per_key_per_second=0.98, per_group_per_minute=20)
_MINUTE: Final = 61.0


@dataclass(slots=True)
class Pace:
    """When the next message may go. Times are given in."""

    limits: Limits
    _next: float = 0.0
    _next_of: dict[str, float] = field(default_factory=dict)
    _minute_of: dict[str, deque[float]] = field(default_factory=dict)
    _paused_until: float = 0.0
    _refused: dict[str, float] = field(default_factory=dict)

    def wait_of(self, key: str | None, now: float) -> float:
        """How long a message with this key must still wait, apart from the limit of all."""
        if key is None:
            return 0.0
        wait = self._next_of.get(key, 0.0) - now
        most = self.limits.per_group_per_minute
        if most is not None and self.limits.is_group(key):
            sent = self._minute_of.get(key)
            if sent is not None and len(sent) >= most:
                wait = max(wait, sent[-most] + _MINUTE - now)
        return max(0.0, wait)

    def wait_of_all(self, now: float) -> float:
        """How long any message must wait."""
        return max(0.0, self._next - now, self._paused_until - now)

    def sent(self, key: str | None, now: float) -> None:
        """One goes out now."""
        if self.limits.per_second is not None:
            self._next = max(self._next, now) + 1 / self.limits.per_second
        if key is None:
            return
        if self.limits.per_key_per_second is not None:
            self._next_of[key] = now + 1 / self.limits.per_key_per_second
            if len(self._next_of) > 10_000:  # noqa: PLR2004 - forget the chats of long ago
                self._next_of = {one: at for one, at in self._next_of.items() if at > now}
        most = self.limits.per_group_per_minute
        if most is not None and self.limits.is_group(key):
            times = self._minute_of.setdefault(key, deque(maxlen=most))
            times.append(now)
            if len(self._minute_of) > 10_000:  # noqa: PLR2004 - as above
                self._minute_of = {one: at for one, at in self._minute_of.items() if at[-1] > now - _MINUTE}

    def refused(self, key: str | None, seconds: float, now: float) -> None:
        """The other side asked us to wait. It means that chat; if it says so of a second one, it means all."""
        others = any(until > now + 1 and one != key for one, until in self._refused.items())
        if key is None or others:
            self._paused_until = max(self._paused_until, now + seconds)
        if key is not None:
            self._refused = {one: until for one, until in self._refused.items() if until > now}
            self._refused[key] = now + seconds
            self._next_of[key] = max(self._next_of.get(key, 0.0), now + seconds)
