"""How a feed treats what it was given: how many attempts, how many at once, how long it waits. Written once.

``consume``, ``durable`` and ``durable_application`` take the fields as options of the same names and make one policy of
them; everything below is handed that policy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from everdeck.errors import SpecError
from everdeck.feed.records import Delivery

OnError: TypeAlias = Literal["retry", "log"]
RetryOn: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]


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
    # No handler that people wait for takes an hour; one that hangs must not keep its place for ever.
    handler_timeout: float | None = 3600.0
    on_error: OnError = "retry"
    retry_on: RetryOn | None = None  # None: everything but what can never work

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_attempts"):
            given = getattr(self, name)
            if type(given) is not int or given < 1:
                raise SpecError(name, given, "a whole number, at least 1")
        if self.delivery not in {"at-least-once", "at-most-once"}:
            raise SpecError("delivery", self.delivery, "at-least-once | at-most-once")
        if self.on_error not in {"retry", "log"}:
            raise SpecError("on_error", self.on_error, "retry | log")
        seconds = self.handler_timeout
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0):
            raise SpecError("handler_timeout", seconds, "seconds, more than 0, or None for no limit")
        if self.retry_on is not None and not callable(self.retry_on) and not _are_errors(self.retry_on):
            raise SpecError(
                "retry_on", self.retry_on, "an exception class, several of them, or a function of the error"
            )

    def is_worth_retrying(self, error: BaseException | str) -> bool:
        """Could another attempt end differently?

        An error says so itself by ``retry_after`` (a 429), or that it cannot by being of a class that somebody has
        called permanent (a 400 or 403 of Telegram: see :func:`permanent`), or by a true ``permanent`` of its own.
        """
        if isinstance(error, str):
            return True
        if getattr(error, "permanent", False) is True:
            return False
        if self.retry_on is None:
            return not isinstance(error, tuple(_PERMANENT))
        if isinstance(self.retry_on, tuple | type):
            return isinstance(error, self.retry_on)
        return bool(self.retry_on(error))

    @property
    def finishes_early(self) -> bool:
        """Whether an item is finished before its handler runs (at most once)."""
        return self.delivery == "at-most-once"


_PERMANENT: set[type[BaseException]] = set()


def permanent(*errors: type[BaseException]) -> None:
    """Errors of these classes are never worth another attempt; an adapter knows those of its library."""
    _PERMANENT.update(errors)


def _are_errors(given: object) -> bool:
    return isinstance(given, tuple) and all(isinstance(one, type) and issubclass(one, BaseException) for one in given)


DEFAULT = FeedPolicy()
# A message of ours waits for somebody else's server, which may be down for long; it blocks only its own key.
OUTBOX = FeedPolicy(max_attempts=8, concurrency=8)
# What a satellite sends waits for about a day, and is then a dead letter.
SENDING = replace(OUTBOX, max_attempts=300, retry=Retry(1.0, 300.0))
