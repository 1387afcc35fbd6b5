"""When a lease may be used, and when it may be taken. Decides only; the clocks are the caller's.

A lease protects against two copies only if the holder stops counting on it before anybody else may begin to. Both sides
measure with a clock of their own that neither steps nor stands still (CLOCK_BOOTTIME), and never compare times of two
machines:

* the holder counts from the moment *before* it sent the renewal that succeeded, and must be gone within the duration;
* a successor counts from the moment *after* it first saw the lease in its present version, and waits for the duration
  and a margin.

The holder's moment lies before the successor's, so there is a gap between them of at least the margin, as long as the
two clocks run at about the same speed.
"""

from dataclasses import dataclass
from typing import Final

DURATION_SECONDS: Final = 8.0
MARGIN_SECONDS: Final = 2.0
RENEW_SECONDS: Final = 2.0
"""How often the holder renews: three attempts may fail before anything must be ended."""
LONG_HELD_SECONDS: Final = 60.0
LONGEST_REST_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Terms:
    """How long things may take. ``polite`` and ``kill`` are counted as ``duration`` is: from the last good renewal."""

    duration: float = DURATION_SECONDS
    margin: float = MARGIN_SECONDS
    renew: float = RENEW_SECONDS

    @property
    def request(self) -> float:
        """The longest that one request may take: a second one still fits before the polite end."""
        return self.renew

    @property
    def polite(self) -> float:
        """When the program is asked to end, unrenewed."""
        return self.duration * 0.5

    @property
    def kill(self) -> float:
        """When everything is killed, unrenewed. What is left of the duration is for the kernel to do it."""
        return self.duration * 0.8


@dataclass(frozen=True, slots=True)
class Seen:
    """A lease as it was read: who holds it, for how long, and the version that changes with every renewal."""

    holder: str
    duration: float
    version: str


@dataclass(frozen=True, slots=True)
class Watched:
    """A lease of somebody else, and since when it has not changed, on our clock."""

    seen: Seen
    since: float


def watched(before: Watched | None, seen: Seen, now: float) -> Watched:
    """Go on counting if it is the version that we have been looking at; else begin anew."""
    if before is not None and before.seen == seen:
        return before
    return Watched(seen, now)


def may_take_at(watch: Watched, us: str, terms: Terms) -> float:
    """When we may take the lease, on the clock of ``watch``; in the past means now.

    Nobody's lease, or our own of an earlier start in the same pod, is free at once: the kubelet starts a container
    only when the one before it is gone.
    """
    if watch.seen.holder in {"", us}:
        return watch.since
    # The holder may have had other terms than we have: the longer ones count.
    return watch.since + max(watch.seen.duration, terms.duration) + terms.margin


def rest_after(losses: int, chance: float) -> float:
    """How long a holder waits that lost its lease so often in a row, each time after a short while.

    The first time not at all. Where a hundred programs lose their leases because their machine is too busy, to start
    them all again at once would keep it so; ``chance`` (0 to 1) spreads them.
    """
    if losses < 2:  # noqa: PLR2004 - the second time is the first that repeats
        return 0.0
    return float(min(LONGEST_REST_SECONDS, 2.0 ** min(losses - 1, 10)) * (0.5 + chance / 2))
