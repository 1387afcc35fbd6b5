"""How things look in a terminal: tables, colours, durations. Loads nothing.

Colours appear only on a terminal and never when ``NO_COLOR`` is set (no-color.org).
"""

import os
import sys
from collections.abc import Iterable, Sequence
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
    """Columns as wide as their widest cell; the last one is not padded. ``colours[row][column]`` paints a cell."""
    # One question per row, not per cell: a deck may have thousands.
    cells = [header, *(row if "".join(row).isprintable() else [plain(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [*(f"{{:<{width}}}" for width in widths[:-1]), "{}"]
    whole = "  ".join(padded).format
    lines = []
    for number, row in enumerate(cells):
        paint = colours[number - 1] if number and number <= len(colours) else {}
        if paint:
            texts = [pad.format(cell) for pad, cell in zip(padded, row, strict=True)]
            texts = [
                painted(text, paint[column], colour=True) if column in paint else text
                for column, text in enumerate(texts)
            ]
            lines.append("  ".join(texts).rstrip())
        else:
            lines.append(whole(*row).rstrip())
    return "\n".join(lines)


def duration(seconds: float | None) -> str:
    """``42s``, ``12m``, ``3h07m``, ``5d02h``."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m" if minutes else f"{whole}s"


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


def note(text: str) -> None:
    """Say something to the person without disturbing what is piped on."""
    print(text, file=sys.stderr)


def suggestions(given: str, known: Iterable[str]) -> str:
    """``; did you mean 'alice'?`` or nothing."""
    from difflib import get_close_matches

    near = get_close_matches(given, list(known), n=3, cutoff=0.6)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""
