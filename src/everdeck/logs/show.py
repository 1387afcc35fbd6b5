"""What ``everdeck logs`` prints: the lines of one log as they are, of several with their names in front.

It works with or without an owner, because it only reads files. Each name has its own colour, as a rule always the
same one, so that the eye can follow one worker among many.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TextIO

from everdeck.logs.ledger import CURRENT, STDERR
from everdeck.logs.reader import Follower, Line, Stamps, read_lines

# Bright and dark alternate; black and white are left out, because one of them is the background.
_COLOURS: Final = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
_WIDEST_NAME: Final = 24


def show(
    logs: Mapping[str, Path],
    out: TextIO,
    *,
    lines: int | None = 20,
    follow: bool = False,
    since: datetime | None = None,
    until: datetime | None = None,
    grep: str | None = None,
    colour: bool | None = None,
    times: bool = False,
    as_json: bool = False,
) -> None:
    """Print the last ``lines`` of each log (None: all), then, if ``follow``, what comes until we are interrupted.

    A worker whose stderr is kept apart has two logs, and both are shown: ``NAME`` and ``NAME/stderr``. ``times`` puts
    the time before each line that does not begin with one of its own; ``as_json`` prints an object per line.
    """
    logs = _with_stderr(logs)
    coloured = not as_json and (_wants_colour(out) if colour is None else colour)
    heads = _heads(list(logs), colour=coloured)

    def printed(name: str, line: Line, at: datetime | None) -> str:
        if as_json:
            stamp = None if at is None else at.isoformat(timespec="seconds")
            return json.dumps({"worker": name, "at": stamp, "line": line.text}, ensure_ascii=False) + "\n"
        return f"{heads[name]}{_time(line.text, at, colour=coloured) if times else ''}{line.text}\n"

    with Follower(grep=grep, colour=coloured) as follower:
        for name, log_dir in logs.items():
            plain = not times and not as_json
            if follow and plain and since is None and until is None and lines is not None and grep is None:
                follower.add(name, log_dir, lines=lines)
                continue
            end = None
            if follow:
                # First, so that what is written while we print the past is neither missed nor printed twice.
                follower.add(name, log_dir)
                end = follower.position_of(name)
            stamps = Stamps(log_dir)
            past = read_lines(log_dir, lines=lines, since=since, until=until, grep=grep, colour=coloured, end=end)
            out.writelines(printed(name, line, stamps.at(line)) for line in past)
        out.flush()
        if not follow:
            return
        for found in follower.bundles():
            now = datetime.now(UTC)
            out.writelines(printed(line.name, line, now) for line in found)
            out.flush()


# What programs begin a line with: 2026-11-16T07:00:00, [16/Nov/2026:07…, 07:00:00, Nov 16 07:00:00, a Unix second.
_OWN_TIME: Final = re.compile(
    r"(?:--- everdeck |(?:\x1b\[[0-9;:]*m)*\W{0,2}(?:\d{4}[-/.]\d\d[-/.]\d\d|\d\d/[A-Z][a-z]{2}/\d{4}|\d\d:\d\d:\d\d"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d|1\d{9}\b|\w+[ :]+\d{4}-\d\d-\d\d))"
)


def _time(text: str, at: datetime | None, *, colour: bool) -> str:
    """The time before a line that has none of its own."""
    if _OWN_TIME.match(text):
        return ""
    stamp = "-------------------" if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return f"\x1b[2m{stamp}\x1b[0m " if colour else f"{stamp} "


def _with_stderr(logs: Mapping[str, Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name, log_dir in logs.items():
        found[name] = log_dir
        if (log_dir / STDERR / CURRENT).exists():
            found[f"{name}/{STDERR}"] = log_dir / STDERR
    return found


def _wants_colour(out: TextIO) -> bool:
    return out.isatty() and not os.environ.get("NO_COLOR")


def _heads(names: list[str], *, colour: bool) -> dict[str, str]:
    if len(names) < 2:  # noqa: PLR2004 - one log needs no name
        return dict.fromkeys(names, "")
    width = min(_WIDEST_NAME, max(map(len, names)))
    if not colour:
        return {name: f"{name.ljust(width)} | " for name in names}
    colours = _colours(names)
    return {name: f"\x1b[{colours[name]}m{name.ljust(width)}\x1b[0m | " for name in names}


def _colours(names: list[str]) -> dict[str, int]:
    """A name's own colour; where two shown together share it, the second takes the next free one."""
    chosen: dict[str, int] = {}
    for name in names:
        wanted = zlib.crc32(name.encode())
        in_order = [_COLOURS[(wanted + step) % len(_COLOURS)] for step in range(len(_COLOURS))]
        taken = set(list(chosen.values())[-len(_COLOURS) + 1 :])
        chosen[name] = next(code for code in in_order if code not in taken)
    return chosen
