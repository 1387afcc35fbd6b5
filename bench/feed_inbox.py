"""How fast is the inbox alone, and does its memory stay flat?

One process stores batches of 100, takes and finishes them, with durable batches, as a bot would; no handlers. Prints
items per second and the resident memory on the way, and the size of the file at the end.

    python bench/feed_inbox.py [ITEMS] [--json]
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from everdeck.feed import Dispatcher, FeedPolicy, Inbox, Record

BATCH = 100
KEYS = 1000
PAYLOAD = b'{"update_id":%d,"message":{"chat":{"id":%d},"text":"' + b"x" * 200 + b'"}}'


def resident_kb() -> int:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


async def run(path: Path, items: int) -> dict[str, object]:
    memory: list[int] = []
    async with Inbox(path) as inbox:
        stream = inbox.stream("bench")
        await stream.begin()
        dispatcher = Dispatcher(stream, FeedPolicy(concurrency=4 * BATCH))
        await dispatcher.open()
        started, worked = time.monotonic(), time.process_time()
        for first in range(1, items + 1, BATCH):
            ids = range(first, first + BATCH)
            await stream.store(
                [Record(n, PAYLOAD % (n, n % KEYS), key=str(n % KEYS)) for n in ids], ids.stop, asked=first
            )
            taken = 0
            while taken < BATCH:
                got = await dispatcher.take(BATCH)
                taken += len(got)
                for item in got[:-1]:
                    item.settle_as_done()
                await got[-1].done()
            if (first - 1) % (items // 10) == 0:
                memory.append(resident_kb())
        seconds, cpu_seconds = time.monotonic() - started, time.process_time() - worked
        await dispatcher.stop()
        counts = stream.counts()
    memory.append(resident_kb())
    size = sum(file.stat().st_size for file in path.parent.iterdir())
    return {
        "items": counts.done,
        "items_per_second": round(counts.done / seconds),
        "items_per_cpu_second": round(counts.done / cpu_seconds),
        "resident_kb": memory,
        "grown_kb_after_the_first_tenth": memory[-1] - memory[1],
        "file_bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("items", nargs="?", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = asyncio.run(run(Path(directory) / "bench.db", given.items))
    if given.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
