"""How fast, relative to what the machine can do at all, and how flat.

The absolute numbers are in ``bench/feed_inbox.py``; here the same work is compared with SQLite itself, so that a slow
or busy machine changes both sides.
"""

import asyncio
import gc
import sqlite3
import time
import tracemalloc
from pathlib import Path

from everdeck.feed import Dispatcher, FeedPolicy, Inbox, Record

BATCH = 100


async def through(path: Path, items: int) -> float:
    """Store, take and finish; the seconds it took."""
    async with Inbox(path) as inbox:
        stream = inbox.stream("s")
        await stream.begin()
        dispatcher = Dispatcher(stream, FeedPolicy(concurrency=BATCH))
        await dispatcher.open()
        started = time.process_time()
        for first in range(0, items, BATCH):
            await stream.store([Record(n, b"x" * 200, str(n % 50)) for n in range(first, first + BATCH)], first + BATCH)
            taken = 0
            while taken < BATCH:
                got = await dispatcher.take()
                taken += len(got)
                for item in got[1:]:
                    item.settle_as_done()
                await got[0].done()
        seconds = time.process_time() - started
        assert stream.counts().done == items
        await dispatcher.stop()
    return seconds


def bare_sqlite(path: Path, items: int) -> float:
    """The least that any durable queue in SQLite does: insert in batches, update one by one, delete one by one."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE item (seq INTEGER PRIMARY KEY, key TEXT, payload BLOB, state INTEGER)")
    started = time.process_time()
    for first in range(0, items, BATCH):
        numbers = range(first, first + BATCH)
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO item VALUES (?, ?, ?, 0)", [(n, str(n % 50), b"x" * 200) for n in numbers])
        connection.execute("COMMIT")
        connection.execute("BEGIN IMMEDIATE")
        for n in numbers:
            connection.execute("UPDATE item SET state = 1 WHERE seq = ? RETURNING payload", (n,)).fetchone()
        connection.execute("COMMIT")
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("DELETE FROM item WHERE seq = ?", [(n,) for n in numbers])
        connection.execute("COMMIT")
    seconds = time.process_time() - started
    connection.close()
    return seconds


def test_the_inbox_costs_a_few_times_bare_sqlite(tmp_path: Path) -> None:
    """Order, fairness, dedupe and attempts cost less than eight times the bare statements; it is about three."""
    bare = min(bare_sqlite(tmp_path / f"bare{n}.db", 2000) for n in range(3))
    ours = min(asyncio.run(through(tmp_path / f"ours{n}.db", 2000)) for n in range(3))
    assert ours < 8 * bare


def test_memory_stays_flat(tmp_path: Path) -> None:
    """After the first items, three thousand more leave nothing behind in memory."""

    async def scenario() -> tuple[int, int]:
        await through(tmp_path / "bot.db", 200)
        gc.collect()
        tracemalloc.start()
        try:
            await through(tmp_path / "second.db", 500)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            await through(tmp_path / "third.db", 3000)
            gc.collect()
            return before, tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    before, after = asyncio.run(scenario())
    assert after - before < 100_000
