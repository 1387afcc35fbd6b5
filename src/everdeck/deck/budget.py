"""How much one speaker may say: so many at once, and so many per second after that.

Pure: the time is handed in.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """A bucket that holds ``burst`` and refills by ``per_second``; what was refused is counted until it is told."""

    burst: float
    per_second: float
    left: float = -1.0
    at: float = 0.0
    refused: int = 0

    def allows(self, now: float) -> bool:
        """Take one, if there is one."""
        if self.left < 0:
            self.left = self.burst
        else:
            self.left = min(self.burst, self.left + (now - self.at) * self.per_second)
        self.at = now
        if self.left < 1:
            self.refused += 1
            return False
        self.left -= 1
        return True

    def told(self) -> int:
        """How many were refused since it was last told."""
        refused, self.refused = self.refused, 0
        return refused
