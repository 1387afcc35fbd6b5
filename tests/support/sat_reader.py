"""A host in a process of its own: ``python sat_reader.py INBOX [stop-after-claim | echo | raise]``.

``stop-after-claim`` takes one message, says so, and does nothing more. ``echo`` answers everything. ``raise`` fails.
"""

import asyncio
import sys
from pathlib import Path

from everdeck.satellites.bridge import Reader


async def main(path: Path, what: str) -> None:
    """Read from one inbox."""
    with Reader() as reader:
        reader.add("bob", path)
        while True:
            message = await reader.get()
            print(f"took {message.id} {message.attempt}", flush=True)
            if what == "stop-after-claim":
                await asyncio.Event().wait()
            async with message:
                if what == "raise":
                    raise ValueError("no")
                await message.reply(f"re: {message.text}")
            print(f"done {message.id}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
