"""How many connections a socket of ours may have, and who makes room for the next one.

Connections share what is left of the descriptors when the workers have theirs. Beyond that, and beyond a number per
address or account, the one that has been silent longest makes room for the new one: whoever opens a thousand
connections and says nothing takes places only from itself.
"""

import os
import resource
from collections.abc import Callable
from typing import Final, Protocol

MOST_CONNECTIONS: Final = 4096
FEWEST_CONNECTIONS: Final = 16
MOST_SILENT_PER_PEER: Final = 128
SPEAK_SECONDS: Final = 2.0
RESERVED_DESCRIPTORS: Final = 256
_COUNT_SECONDS: Final = 1.0


class Guest(Protocol):
    """One connection that has a place."""

    def cut(self) -> None:
        """Make room, now."""


class Places:
    """How many connections there may be, and who makes room for a new one."""

    def __init__(self, fewest: int = FEWEST_CONNECTIONS) -> None:
        # Whose, and since when, in the order in which they fell silent; without those that have a request under way.
        self._silent: dict[Guest, tuple[str, float]] = {}
        self._silent_of: dict[str, int] = {}
        self._all = 0
        self._fewest = self._most = fewest
        self._counted_at = float("-inf")

    def arrived(self, guest: Guest, peer: str, now: float, crowding: Callable[[], Guest | None] | None = None) -> bool:
        """A new connection; False if there is no room for it because everybody else has a request under way.

        ``crowding`` is asked who should make room all the same.
        """
        self._all += 1
        self.silent(guest, peer, now)
        leaving: Guest | None = None
        if self._all > self._room(now):
            leaving = next(iter(self._silent))
            if leaving is guest and crowding is not None:
                leaving = crowding() or guest
        elif self._silent_of[peer] > MOST_SILENT_PER_PEER:
            oldest, since = next((one, since) for one, (whose, since) in self._silent.items() if whose == peer)
            # A crowd that has just come may be about to speak.
            leaving = oldest if now - since > SPEAK_SECONDS else None
        if leaving is not None:
            self.busy(leaving)
            leaving.cut()
        return leaving is not guest

    def left(self, guest: Guest) -> None:
        """The connection is gone."""
        self._all -= 1
        self.busy(guest)

    def silent(self, guest: Guest, peer: str, now: float) -> None:
        """It has no whole request under way."""
        if guest not in self._silent:
            self._silent[guest] = (peer, now)
            self._silent_of[peer] = self._silent_of.get(peer, 0) + 1

    def busy(self, guest: Guest) -> None:
        """It has one, or is going."""
        peer, _ = self._silent.pop(guest, (None, 0.0))
        if peer is not None:
            self._silent_of[peer] -= 1
            if not self._silent_of[peer]:
                del self._silent_of[peer]

    def _room(self, now: float) -> int:
        """What the limit on descriptors leaves when the workers have theirs, half as many again, and a reserve."""
        if now - self._counted_at > _COUNT_SECONDS:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            elsewhere = max(0, len(os.listdir("/proc/self/fd")) - self._all)  # noqa: PTH208 - names are all we want
            left = limit - elsewhere - elsewhere // 2 - RESERVED_DESCRIPTORS
            self._most = max(self._fewest, min(MOST_CONNECTIONS, left))
            self._counted_at = now
        return self._most
