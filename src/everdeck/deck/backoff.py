"""How long to wait before the next start, and when to stop trying. Decides only; touches nothing.

Full jitter (a uniform draw between zero and the exponential step) spreads the restarts of many workers that
died together, for example because the database they all need went away.
"""

from everdeck.model import Restart


def next_delay(restart: Restart, streak: int, draw: float) -> float:
    """Seconds to wait before the start that follows the ``streak``-th end in a row.

    ``draw`` is uniform in [0, 1): it is handed in, so the answer is the same each time it is asked for.
    """
    if streak <= 0:
        return 0.0
    # 2 ** 64 seconds is beyond any cap; the exponent is bounded before it is a number with a million digits.
    step = min(restart.backoff_cap_seconds, restart.backoff_seconds * 2.0 ** min(streak - 1, 64))
    return step * draw


def streak_after(restart: Restart, streak: int, uptime_seconds: float) -> int:
    """Ends in a row, counting the one that just happened; a stable time before it begins a new row."""
    return 1 if uptime_seconds >= restart.stable_seconds else streak + 1


def crashes_in_window(restart: Restart, crash_times: tuple[float, ...], now: float) -> tuple[float, ...]:
    """The crash times that still count."""
    return tuple(time for time in crash_times if now - time < restart.window_seconds)


def breaker_trips(restart: Restart, crashes: int) -> bool:
    """More than ``max_crashes`` within the window: a person has to look."""
    return crashes > restart.max_crashes
