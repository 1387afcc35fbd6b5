"""Prints a worker's log from its volume; run in its pod, or in a pod that has nothing but the volume.

``python -m everdeck.cluster.read WISH``, the wish as JSON. ``list`` prints one JSON list. ``rest`` and ``follow`` print
one JSON value per line, each with the position after it, so that whoever reads can go on there in the next pod; the
first one has no text and tells where it begins. ``follow`` waits for more until its input ends.
"""

import os
import select
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Literal

import msgspec

from everdeck.cluster.volume import STATE
from everdeck.logs import reader
from everdeck.model import worker_name
from everdeck.statedir import StateDir

_STDIN = 0


class Wish(msgspec.Struct, frozen=True):
    """Which lines of whose log, and how."""

    name: str
    lines: int | None = 20
    since: datetime | None = None
    until: datetime | None = None
    grep: str | None = None
    mode: Literal["list", "rest", "follow"] = "list"
    position: int | None = None


class Told(msgspec.Struct, frozen=True):
    """A line, and the position after it."""

    position: int
    text: str | None = None


def main(arguments: list[str]) -> int:
    """Print and leave."""
    wish = msgspec.json.decode(arguments[0], type=Wish)
    place = StateDir(STATE).worker(worker_name(wish.name)).log
    if wish.mode == "list":
        found = reader.read(place, lines=wish.lines, since=wish.since, until=wish.until, grep=wish.grep)
        sys.stdout.buffer.write(msgspec.json.encode(list(found)))
        return 0
    with reader.Follower(grep=wish.grep) as follower:
        follower.add("", place, lines=wish.lines or 0, position=wish.position)
        _print([Told(follower.position_of(""))])
        while follower.names:
            lines = follower.ready()
            _print(Told(line.position, line.text) for line in lines)
            if follower.unread:
                continue
            if wish.mode == "rest" or not _waited(follower):
                break
    return 0


def _waited(follower: reader.Follower) -> bool:
    """Until something may have been written; False when nobody listens any more."""
    listening = [_STDIN] + ([follower.fileno()] if follower.fileno() >= 0 else [])
    ready, _, _ = select.select(listening, [], [], None if follower.fileno() >= 0 else reader.POLL_SECONDS)
    return _STDIN not in ready or bool(os.read(_STDIN, 1))


def _print(told: Iterable[Told]) -> None:
    sys.stdout.buffer.write(b"".join(msgspec.json.encode(one) + b"\n" for one in told))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
