"""The part of an owner that keeps logs, as a program that can be killed.

``python logs_owner.py LOG_DIR MAX_BYTES KEEP COMPRESS COUNT`` watches LOG_DIR (or, with COUNT, that many directories
below it), prints ``ready``, then one JSON line per rotation, and leaves when its stdin ends.
"""

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

from everdeck.logs.keeper import LogKeeper
from everdeck.model import Log


async def main() -> None:
    """Keep logs until stdin ends."""
    place, max_bytes, keep, compress, count = sys.argv[1:]
    policy = Log(max_bytes=int(max_bytes), keep=int(keep), compress=compress == "compress")
    gone = asyncio.Event()

    def tell(name: str, detail: dict[str, Any]) -> None:
        print(json.dumps({"name": name, **detail}), flush=True)

    keeper = LogKeeper(tell, compress_after_seconds=0)
    keeper.open()
    if int(count):
        for number in range(int(count)):
            keeper.watch(f"w{number}", Path(place) / f"w{number}", policy)
    else:
        keeper.watch("w", Path(place), policy)
    print("ready", flush=True)
    asyncio.get_running_loop().add_reader(0, gone.set)
    await gone.wait()
    keeper.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
