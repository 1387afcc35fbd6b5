"""Programs that a test kills, or that kill themselves: one consume() each, with effects that outlive the process."""

import asyncio
import ctypes
import logging
import os
from pathlib import Path
from typing import Any

from everdeck.feed import FileCursor, Inbox, Retry, consume
from support.feed_scenario import note, noted
from support.feed_upstream import Upstream, UpstreamSource

SLOW_SECONDS = 0.004
CONCURRENCY = 16
POISON = 5


def keep_working(directory: str, mode: str) -> None:
    """Handle everything, a little slowly, and go on waiting for more."""
    logging.disable(logging.CRITICAL)
    here = Path(directory)
    inbox = Inbox(here / "bot.db")

    async def at_least_once(item: Any) -> None:
        await asyncio.sleep(SLOW_SECONDS)
        note(here, "effects", str(item.id))

    async def effectively_once(item: Any) -> None:
        await asyncio.sleep(SLOW_SECONDS)
        async with item.transaction() as db:
            db.execute("INSERT INTO effect VALUES (?)", (item.id,))

    async def run() -> None:
        source = UpstreamSource(Upstream(here / "upstream.json"), ends=False, limit=100)
        if mode == "file":
            await consume(source, at_least_once, cursor=FileCursor(here / "offset.txt"))
            return
        async with inbox:
            async with inbox.transaction() as db:
                db.execute("CREATE TABLE IF NOT EXISTS effect (id INTEGER)")
            handler = effectively_once if mode == "tx" else at_least_once
            await consume(source, handler, inbox=inbox, concurrency=CONCURRENCY, grace_seconds=5)
        note(here, "stopped", "gracefully")

    asyncio.run(run())


def meet_poison(directory: str, kind: str, cursor: str) -> None:
    """Handle everything; one update ends the process."""
    logging.disable(logging.CRITICAL)
    here = Path(directory)

    async def handler(item: Any) -> None:
        await asyncio.sleep(SLOW_SECONDS)
        if item.id == POISON:
            note(here, "poisoned", str(item.attempt))
            if kind == "exit":
                os._exit(3)
            ctypes.string_at(0)
        note(here, "effects", str(item.id))

    source = UpstreamSource(Upstream(here / "upstream.json"), limit=100)
    retry = Retry(seconds=0.0, cap_seconds=0.0)
    if cursor == "file":
        asyncio.run(consume(source, handler, cursor=FileCursor(here / "offset.txt"), retry=retry))
    else:
        asyncio.run(consume(source, handler, inbox=Inbox(here / "bot.db"), retry=retry, concurrency=CONCURRENCY))


def meet_many_poisons(directory: str, count: int) -> None:
    """One update takes until each of the others has begun once; those end the process, in three ways."""
    logging.disable(logging.CRITICAL)
    here = Path(directory)
    endings = (lambda: ctypes.string_at(0), lambda: ctypes.CDLL(None).abort(), lambda: os._exit(3))

    async def handler(item: Any) -> None:
        note(here, "begun", str(item.id))
        if item.id == 1:
            await (asyncio.sleep(0) if len(set(noted(here, "begun"))) == count + 1 else asyncio.Event().wait())
            note(here, "effects", str(item.id))
        else:
            endings[item.id % 3]()

    source = UpstreamSource(Upstream(here / "upstream.json"), limit=100)
    asyncio.run(consume(source, handler, inbox=Inbox(here / "bot.db"), concurrency=CONCURRENCY))
