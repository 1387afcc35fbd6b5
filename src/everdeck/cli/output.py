"""How things look in a terminal: tables, colours, durations. Loads nothing.

Colours appear only on a terminal and never when ``NO_COLOR`` is set (no-color.org).
"""

import os
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Final, TextIO

from everdeck.wording import plain

STATE_COLOURS: Final = {
    "running": "32",
    "starting": "36",
    "stopping": "36",
    "stopped": "2",
    "exited": "2",
    "backoff": "33",
    "unhealthy": "33",
    "failed": "31",
}
_KILO: Final = 1024.0
_COLUMNS: Final = 80


def wants_colour(stream: TextIO = sys.stdout) -> bool:
    """Whether a person looks at this stream in a terminal that shows colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def state_in_colour(state: str, *, colour: bool) -> str:
    """The state, coloured for what it asks of a person."""
    return painted(state, STATE_COLOURS.get(state, "0"), colour=colour)


def painted(text: str, code: str, *, colour: bool) -> str:
    """The text in a colour, or as it is."""
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def table(header: Sequence[str], rows: Iterable[Sequence[str]], colours: Sequence[dict[int, str]] = ()) -> str:
    """Columns as wide as their widest cell; the last one is neither padded nor painted.

    ``colours[row][column]`` paints a cell.
    """
    # By columns, and one question per row whether it can be printed as it is: a deck may have thousands.
    cells = [header, *(row if "".join(row).isprintable() else [plain(cell) for cell in row] for row in rows)]
    *columns, last = zip(*cells, strict=True)
    padded = [list(map(str.ljust, column, repeat(max(map(len, column))))) for column in columns]
    for number, paint in enumerate(colours, 1):
        for column, code in paint.items():
            padded[column][number] = painted(padded[column][number], code, colour=True)
    return "\n".join(map(str.rstrip, map("  ".join, zip(*padded, last, strict=True))))


def duration(seconds: float | None) -> str:
    """``42s``, ``12m``, ``3h07m``, ``5d02h``."""
    return "-" if seconds is None else _duration(max(0, int(seconds)))


@lru_cache(4096)  # among thousands of workers few are different
def _duration(whole: int) -> str:
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m" if minutes else f"{whole}s"


@lru_cache(4096)  # as above
def size(count: float | None) -> str:
    """``12.3M``."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "K", "M", "G"):
        if value < _KILO:
            return f"{value:.0f}{unit}" if unit == "B" else f"{value:.1f}{unit}"
        value /= _KILO
    return f"{value:.1f}T"


def shortened(text: str, width: int) -> str:
    """The text in at most so many columns: its middle gives way, because names differ at both ends."""
    if len(text) <= width:
        return text
    kept = max(width - 1, 1)
    head = (kept + 1) // 2
    return f"{text[:head]}…{text[len(text) - (kept - head) :]}"


def columns() -> int:
    """How wide the terminal is: as ``shutil.get_terminal_size`` tells it, which takes 3 ms to load."""
    try:
        return int(os.environ["COLUMNS"]) or _columns_of_terminal()
    except (KeyError, ValueError):
        return _columns_of_terminal()


def _columns_of_terminal() -> int:
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns if sys.__stdout__ else _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS


def note(text: str) -> None:
    """Say something to the person without disturbing what is piped on."""
    print(text, file=sys.stderr)


def suggestions(given: str, known: Iterable[str]) -> str:
    """``; did you mean 'alice'?`` or nothing."""
    from difflib import get_close_matches

    near = get_close_matches(given, list(known), n=3, cutoff=0.6)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""
