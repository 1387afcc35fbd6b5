"""The clocks and the dice, handed in so that tests can hold them.

Decisions use seconds since boot: they do not step. The wall clock is only for what people read.
"""

import os
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
        # Not the module random: nobody else needs it, and it takes 0.15 MB.
        return int.from_bytes(os.urandom(7), "big") / (1 << 56)
