"""A daemon with thousands of workers whose state changes all the time, for tests and measurements of the page.

Run as a program: ``python dash_crowd.py STATE PORT WORKERS``. The records are written into the registry before the deck
is opened (a start of 2,000 real processes would measure fork, not the page); everything from there on is the real
deck, the real API and the real stream. Each byte on stdin grants one second of events; ``ready TOKEN`` on stdout says
that it serves, ``second`` that a granted second is over.
"""

import asyncio
import itertools
import sys
from datetime import UTC, datetime
from pathlib import Path

from everdeck.deck import AsyncDeck
from everdeck.model import Cookie, EventKind, State, WorkerName, WorkerSpec
from everdeck.registry.store import Registry, WorkerRecord, encoded_spec
from everdeck.server.app import create_app
from everdeck.server.auth import Door
from everdeck.server.services import Services
from everdeck.server.serving import HttpFront
from everdeck.server.tokens import token_of

EVENTS_PER_SECOND = 50
CHANGES = (EventKind.STARTED, EventKind.CRASHED, EventKind.RESTARTED, EventKind.STOPPING, EventKind.STOPPED)


def write_records(state_dir: Path, count: int) -> None:
    """The registry of a deck with so many stopped workers."""
    state_dir.mkdir(mode=0o700, parents=True)
    registry = Registry.open(state_dir / "deck.db")
    try:
        with registry.transaction():
            for number in range(count):
                template = ("telegram", "gmail", "cron")[number % 3]
                spec = WorkerSpec(("/bin/true",), labels={"template": template})
                name = WorkerName(f"user-{number:04d}")
                registry.save(
                    WorkerRecord(name, encoded_spec(spec), "stopped", State.STOPPED, Cookie(f"{number:032x}"))
                )
    finally:
        registry.close()


async def serve(state_dir: Path, port: int, count: int) -> None:
    """Serve the deck and let it change while seconds are granted on stdin."""
    async with AsyncDeck(state_dir) as deck:
        token, _ = token_of(deck.state_dir)
        services = Services(deck, datetime.now(UTC), Door(deck.state_dir))
        front = HttpFront(create_app(services))
        await front.listen_tcp("127.0.0.1", port, None, None)
        try:
            print(f"ready {token}", flush=True)
            await _change(deck, count)
        finally:
            services.close()
            await front.close()


async def _change(deck: AsyncDeck, count: int) -> None:
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    numbers = itertools.count()
    while await stdin.read(1):
        begun = loop.time()
        for tick in range(EVENTS_PER_SECOND):
            number = next(numbers)
            kind = CHANGES[number % len(CHANGES)]
            detail = {"pid": 1000 + number} if kind in {EventKind.STARTED, EventKind.RESTARTED} else {}
            await deck.record_event(f"user-{number * 7 % count:04d}", kind, detail)
            await asyncio.sleep(max(0.0, begun + (tick + 1) / EVENTS_PER_SECOND - loop.time()))
        print("second", flush=True)


if __name__ == "__main__":
    directory, on_port, how_many = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if not directory.exists():
        write_records(directory, how_many)
    asyncio.run(serve(directory, on_port, how_many))
