"""What the test bots do when a message tells them to, and how they write it down.

Imported by the bots, which are run by path, so this folder is first on their path.
"""

import argparse
import asyncio
import ctypes
import os
import sqlite3


class Journal:
    """An append-only file: ``begin ID`` and ``end ID``, one write each, so that a killed bot leaves whole lines."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def begin(self, update_id: int) -> None:
        """A handler has begun."""
        os.write(self._fd, b"begin %d\n" % update_id)

    def end(self, update_id: int) -> None:
        """A handler has done its work."""
        os.write(self._fd, b"end %d\n" % update_id)


async def do_deed(text: str, given: argparse.Namespace) -> None:
    """Sleep a moment, or do the terrible thing that the text names."""
    deed, _, argument = text.partition(" ")
    match deed:
        case "slow":
            await asyncio.sleep(float(argument))
        case "raise":
            raise RuntimeError("as the message asked")
        case "exit":
            os._exit(3)
        case "segv":
            ctypes.string_at(0)
        case "loop":
            while True:
                pass
        case _:
            await asyncio.sleep(given.sleep_ms / 1000)


def arguments() -> argparse.Namespace:
    """The command line of both bots; without ``--db`` they are stock."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--db")
    parser.add_argument("--first-run", default="take")
    parser.add_argument("--sleep-ms", type=float, default=50)
    parser.add_argument("--grace", type=float, default=4.0)
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--max-attempts", type=int, default=3)
    parser.add_argument("--polling-timeout", type=int, default=10)
    parser.add_argument("--transaction", action="store_true")
    parser.add_argument("--reply", action="store_true")
    parser.add_argument("--non-blocking", action="store_true")
    parser.add_argument("--persistence")
    parser.add_argument("--log-level", default="WARNING")
    given = parser.parse_args()
    if given.transaction:
        with sqlite3.connect(given.db) as db:
            db.execute("CREATE TABLE IF NOT EXISTS handled (update_id INTEGER)")
        db.close()
    return given
