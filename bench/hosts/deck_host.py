"""Everdeck's library: an ``AsyncDeck``, or with ``$BENCH_DECK=facade`` the synchronous ``Deck``."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from bench.hosts.protocol import answer, channel, read_requests, timed
from everdeck import AsyncDeck, Deck, Log, Restart, Stop

DURABILITY: Any = os.environ.get("BENCH_DURABILITY", "power")


def fields_of(request: dict[str, Any]) -> dict[str, Any]:
    """The policies of a plan; the first restart comes without delay, everything else is the default."""
    return {
        "restart": Restart("on-failure", backoff_seconds=0),
        "stop": Stop(grace_seconds=request["grace_seconds"]),
        "log": Log(max_bytes=request["log_bytes"], keep=request["log_keep"]),
    }


async def with_async_deck(reading: int, writing: int) -> None:
    """Orders arrive on the loop's own selector, so an idle host sleeps in one epoll_wait."""
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    buffered = bytearray()

    def arrived() -> None:
        batch = read_requests(reading, buffered)
        for request in batch if batch is not None else [None]:
            requests.put_nowait(request)

    loop.add_reader(reading, arrived)
    deck: AsyncDeck | None = None
    plan: list[tuple[str, list[str]]] = []
    fields: dict[str, Any] = {}
    request = await requests.get()
    while request is not None:
        begin_ns = time.monotonic_ns()
        match request["verb"]:
            case "up":
                plan, fields = request["workers"], fields_of(request)
                begin_ns = time.monotonic_ns()
                deck = AsyncDeck(Path(request["directory"]) / "state", durability=DURABILITY)
                await deck.open()
            case "start" if deck is not None and os.environ.get("BENCH_START") == "each":
                for name, command in plan:
                    await deck.start(name, command, **fields)
            case "start" if deck is not None:
                await deck.start_many(dict(plan), **fields)
            case "stop" if deck is not None:
                await deck.stop_all()
        answer(writing, begin_ns=begin_ns, end_ns=time.monotonic_ns())
        request = await requests.get()


def with_facade(reading: int, writing: int) -> None:
    """The same verbs without a loop of our own."""
    deck: Deck | None = None
    plan: list[tuple[str, list[str]]] = []
    fields: dict[str, Any] = {}
    buffered = bytearray()
    while (requests := read_requests(reading, buffered)) is not None:
        for request in requests:
            match request["verb"]:
                case "up":
                    plan, fields = request["workers"], fields_of(request)
                    begin_ns = time.monotonic_ns()
                    deck = Deck(Path(request["directory"]) / "state")
                    answer(writing, begin_ns=begin_ns, end_ns=time.monotonic_ns())
                case "start" if deck is not None:
                    begin_ns = time.monotonic_ns()
                    for name, command in plan:
                        deck.start(name, command, **fields)
                    answer(writing, begin_ns=begin_ns, end_ns=time.monotonic_ns())
                case "stop" if deck is not None:
                    answer(writing, **timed(deck.stop_all))


def main() -> None:
    reading, writing = channel()
    if os.environ.get("BENCH_DECK") == "facade":
        with_facade(reading, writing)
    else:
        asyncio.run(with_async_deck(reading, writing))


if __name__ == "__main__":
    main()
