"""The clocks and the dice, handed in so that tests can hold them.

Decisions use seconds since boot: they do not step. The wall clock is only for what people read.
"""

import random
import time

from everdeck.kernel.identity import boottime


class Clock:
    """The real ones."""

    def wall(self) -> float:
        """Seconds since the epoch, for people; may step."""
        return time.time()  # noqa: TID251 - this is the Clock that everybody else is handed

    def boottime(self) -> float:
        """Seconds since boot; never steps, counts suspend."""
        return boottime()

    def draw(self) -> float:
        """Uniform in [0, 1), for jitter."""
        return random.random()  # noqa: S311 - jitter is no secret
