"""How a worker ended and what an event tells, in words: the same in the command line, the daemon's log and the page.

The page has its own copy of these rules (``core/format.js``), because a browser renders thousands of events without
asking; ``tests/support/wordings.py`` is the table that both are held to.
"""

import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final

# Said without their key: the value is a sentence of its own.
_SENTENCES: Final = frozenset({"error", "message", "text", "reason", "why", "status_text"})
_SPANS: Final = {"uptime_seconds": "after", "delay_seconds": "next start in"}
_MOST_NAMED: Final = 5


def plain(text: str) -> str:
    """One line without anything that a terminal obeys: what workers and strangers chose is shown, not carried out.

    Control characters (C0, C1, DEL), line breaks, and marks that turn the direction of text are written as escapes.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def ending(exit_value: Mapping[str, Any] | None) -> str:
    """How a worker ended; empty if it did not."""
    match exit_value:
        case {"kind": "exited", "code": code}:
            return f"exit code {code}"
        case {"kind": "killed", "signal": number}:
            why = " (out of memory)" if (exit_value or {}).get("oom") else ""
            try:
                return f"killed by {signal.Signals(number).name}{why}"
            except ValueError:
                return f"killed by signal {number}{why}"
        case {"kind": "unknown"}:
            return "ended unseen"
        case _:
            return ""


def detail(told: Mapping[str, Any]) -> str:
    """What an event tells, in one line; what is empty is left out."""
    return ", ".join(words for key, value in told.items() if (words := _entry(key, value)))


def _entry(key: str, value: Any) -> str:
    name = key.replace("_", " ")
    if value is None or value is False or value in ("", [], (), {}):
        return ""
    if value is True:
        return name
    if isinstance(value, Mapping):
        return ending(value) or f"{name} {_inner(value)}"
    if isinstance(value, (list, tuple)):
        return f"{name} {_several(value)}"
    if isinstance(value, (int, float)) and key.endswith("_seconds"):
        return f"{_SPANS.get(key, name.removesuffix(' seconds'))} {_number(value)} s"
    return str(value) if key in _SENTENCES else f"{name} {value}"


def _inner(value: Mapping[str, Any]) -> str:
    if value.keys() == {"pid", "command"}:
        return f"{value['pid']} ({value['command']})"
    return ", ".join(words for key, entry in value.items() if (words := _entry(key, entry)))


def _several(values: Sequence[Any]) -> str:
    shown = ", ".join(_inner(value) if isinstance(value, Mapping) else str(value) for value in values[:_MOST_NAMED])
    more = len(values) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
