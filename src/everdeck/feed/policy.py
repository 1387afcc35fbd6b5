"""How a feed treats what it was given: how many attempts, how many at once, how long it waits. Written once.

``consume``, ``durable`` and ``durable_application`` take the fields as options of the same names and make one policy of
them; everything below is handed that policy.
"""

from dataclasses import dataclass, field

from everdeck.errors import SpecError
from everdeck.feed.records import Delivery


@dataclass(frozen=True, slots=True)
class Retry:
    """How long to wait before a handler that raised is tried again: doubling, between half and all of it."""

    seconds: float = 1.0
    cap_seconds: float = 60.0

    def delay(self, attempt: int, chance: float) -> float:
        """The wait after this many attempts; ``chance`` is between 0 and 1."""
        full = min(self.cap_seconds, self.seconds * 2.0 ** min(attempt - 1, 30))
        return full * (0.5 + chance / 2)


@dataclass(frozen=True, slots=True)
class FeedPolicy:
    """Validated when it is made: a refused value is named before anything is opened."""

    max_attempts: int = 3
    concurrency: int = 32
    delivery: Delivery = "at-least-once"
    retry: Retry = field(default_factory=Retry)
    # With the half second for a cancelled handler less than the 5 s that a deck gives by default: being killed while
    # waiting would cost an attempt.
    grace_seconds: float = 4.0

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_attempts"):
            given = getattr(self, name)
            if type(given) is not int or given < 1:
                raise SpecError(name, given, "a whole number, at least 1")
        if self.delivery not in {"at-least-once", "at-most-once"}:
            raise SpecError("delivery", self.delivery, "at-least-once | at-most-once")

    @property
    def finishes_early(self) -> bool:
        """Whether an item is finished before its handler runs (at most once)."""
        return self.delivery == "at-most-once"


DEFAULT = FeedPolicy()
# A message of ours waits for somebody else's server, which may be down for long; it blocks only its own key.
OUTBOX = FeedPolicy(max_attempts=8, concurrency=8)
