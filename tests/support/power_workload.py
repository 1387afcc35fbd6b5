"""What runs in the machine whose power is cut: a deck whose verbs are asked all the time, and a feed.

Every answer is told to the outside at once, as a line of JSON on the serial line, and kept there: the machine may
forget what it likes, the ledger does not. At each start the first line tells what is found. ``unsynced`` is the same
program with every sync taken out: what a checker must catch.

    python power_workload.py DIRECTORY CONSOLE [unsynced]
"""

import asyncio
import contextlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from everdeck import AsyncDeck, disk
from everdeck.errors import EverdeckError
from everdeck.feed import Inbox, consume, poll
from everdeck.registry import Registry

NAMES = ("ada", "bo", "cy", "di")
FOREVER = ("sleep", "1000")
FEED_SECONDS = 0.2


class Line:
    """The serial line to the outside."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_NOCTTY)

    def tell(self, **said: Any) -> None:
        """One line; it is outside when this returns, or on its way without us."""
        os.write(self._fd, json.dumps(said).encode() + b"\n")


async def main(directory: Path, line: Line) -> None:
    """Tell what is there, then work until the power goes."""
    directory.mkdir(exist_ok=True)
    async with AsyncDeck(directory / "state") as deck:
        line.tell(what="found", **await _found(deck, directory))
        feed = asyncio.ensure_future(_feed(directory, line))
        events = asyncio.ensure_future(_events(deck, line))
        await asyncio.gather(feed, events, _verbs(deck, line))


async def _found(deck: AsyncDeck, directory: Path) -> dict[str, Any]:
    workers = {}
    for status in await deck.list():
        secret = directory / "state" / "workers" / status.name / "secrets" / "KEY"
        spec = await deck.spec(status.name)
        workers[status.name] = {
            "runs": status.pid is not None,
            "turn": spec.env["TURN"],
            "secret": secret.read_text() if secret.exists() else None,
        }
    told = [[event.id, f"{event.at} {event.worker} {event.kind}"] for event in await deck.events()]
    return {"workers": workers, "events": told, "booked": await _booked(directory)}


async def _booked(directory: Path) -> list[int]:
    if not (directory / "feed.db").exists():
        return []
    async with Inbox(directory / "feed.db") as inbox, inbox.transaction() as db:
        db.execute("CREATE TABLE IF NOT EXISTS booking (id INTEGER)")
        return [row[0] for row in db.execute("SELECT id FROM booking ORDER BY rowid")]


async def _verbs(deck: AsyncDeck, line: Line) -> None:
    chance = random.Random(os.urandom(8))
    turn = 0
    while True:
        name, verb = chance.choice(NAMES), chance.choice(("start", "start", "stop", "remove"))
        turn += 1
        mark = f"{os.getpid()}-{turn}-{chance.random()}"
        line.tell(what="asked", verb=verb, name=name, turn=mark)
        with contextlib.suppress(EverdeckError):
            if verb == "start":
                env, secrets = {"TURN": mark}, {"KEY": f"secret of {mark}"}
                await deck.start(name, FOREVER, env=env, secrets=secrets, replace=True)
            elif verb == "stop":
                await deck.stop(name)
            else:
                await deck.remove(name)
            line.tell(what="answered", verb=verb, name=name, turn=mark)
            continue
        line.tell(what="refused", verb=verb, name=name, turn=mark)


async def _events(deck: AsyncDeck, line: Line) -> None:
    async for event in deck.follow(after=0):
        line.tell(what="event", id=event.id, said=f"{event.at} {event.worker} {event.kind}")


async def _feed(directory: Path, line: Line) -> None:
    """The other side forgets whatever is below the number that it is asked with."""

    def new(cursor: int | None) -> list[dict[str, int]]:
        first = cursor or 1
        line.tell(what="confirmed", below=first)
        return [{"id": number} for number in range(first, first + 3)]

    async with Inbox(directory / "feed.db") as inbox:
        async with inbox.transaction() as db:
            db.execute("CREATE TABLE IF NOT EXISTS booking (id INTEGER)")

        async def book(item: Any) -> None:
            async with item.transaction() as db:
                db.execute("INSERT INTO booking VALUES (?)", (item.value["id"],))

        await consume(poll(new, every=FEED_SECONDS), book, inbox=inbox)


def remove_syncs() -> None:
    """The mutant: nothing waits for the disk any more."""
    disk.sync = lambda _: None
    Registry.sync = lambda _: None  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    if "unsynced" in sys.argv[3:]:
        remove_syncs()
    asyncio.run(main(Path(sys.argv[1]), Line(sys.argv[2])))
