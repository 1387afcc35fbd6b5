"""Where a test may kill us.

Between two steps that a crash may separate stands ``crash_point("verb.step")``. In production it is one
comparison with ``None``. When the environment variable ``EVERDECK_CRASH_AT`` names the point, the process
ends itself there with SIGKILL, which is what power loss of the process looks like to everybody else:
no handler runs, no buffer is flushed.

``EVERDECK_CRASH_AT=start.spawned`` dies at the first visit, ``start.spawned:3`` at the third. The tests find
every point by reading the source, so a new point is tested without being named anywhere else.
"""

import os
import signal
from typing import Final

CRASH_AT_ENV: Final = "EVERDECK_CRASH_AT"


def _armed() -> tuple[str | None, int]:
    name, _, visit = os.environ.get(CRASH_AT_ENV, "").partition(":")
    return (name or None), int(visit or 1)


_name, _visits_left = _armed()


def visits_left(name: str) -> int:
    """How many visits of this point end us, for one that stands where Python does not come by; 0: it is not armed."""
    return _visits_left if name == _name else 0


def visited(name: str, times: int) -> None:
    """As many visits were survived there."""
    global _visits_left  # noqa: PLW0603 - as below
    if name == _name:
        _visits_left -= times


def crash_point(name: str) -> None:
    """End this process with SIGKILL if a test asked for it at this point; otherwise do nothing."""
    global _visits_left  # noqa: PLW0603 - one counter per process is the meaning of "the third visit"
    if _name is None or name != _name:
        return
    _visits_left -= 1
    if _visits_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)  # noqa: TID251 - our own pid cannot be a stranger's
        signal.pause()
