"""Prints a stopped worker's log from its volume, as one JSON list; run in a pod that has nothing but the volume.

``python -m everdeck.cluster.read '{"name": …, "lines": …, "since": …, "until": …, "grep": …}'``
"""

import sys
from datetime import datetime

import msgspec

from everdeck.cluster.pod import STATE
from everdeck.logs import reader
from everdeck.model import worker_name
from everdeck.statedir import StateDir


class Wish(msgspec.Struct, frozen=True):
    """Which lines of whose log."""

    name: str
    lines: int | None = 20
    since: datetime | None = None
    until: datetime | None = None
    grep: str | None = None


def main(arguments: list[str]) -> int:
    """Print and leave."""
    wish = msgspec.json.decode(arguments[0], type=Wish)
    place = StateDir(STATE).worker(worker_name(wish.name)).log
    found = reader.read(place, lines=wish.lines, since=wish.since, until=wish.until, grep=wish.grep)
    sys.stdout.buffer.write(msgspec.json.encode(list(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
