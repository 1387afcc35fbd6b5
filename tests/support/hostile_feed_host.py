"""A root program that reads a satellite of another account, while that account plants traps: prints what it met.

Called as ``python hostile_feed_host.py STATE ACCOUNT TREASURE``.
"""

import asyncio
import json
import os
import pwd
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from everdeck import AsyncDeck, Satellite
from everdeck.errors import EverdeckError

DEADLINE_SECONDS = 120.0


async def main(state: str, account: str, treasure: str) -> dict[str, Any]:
    """What became of a message, and of each trap."""
    told: dict[str, Any] = {}
    data = Path(state, "workers/hook/data")
    entry = pwd.getpwnam(account)

    def as_account(script: str) -> None:
        subprocess.run(
            ["sh", "-c", script], cwd=data, user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], check=True
        )

    async with asyncio.timeout(DEADLINE_SECONDS), AsyncDeck(state) as deck:
        await deck.start("hook", Satellite.webhook(path="/in", user=account))
        async with deck.messages("hook") as messages:
            wanted = asyncio.ensure_future(anext(messages))
            await asyncio.to_thread(_post, (await deck.status("hook")).port)
            message = await wanted
            told["text"] = message.text
            async with message:
                pass
            told["done"] = (await deck.feed("hook")).done
            # Shared memory that is cut while it is mapped is a SIGBUS for whoever mapped it.
            as_account("for i in 1 2 3 4 5 6 7 8 9; do : > feed.db-shm; done")
            for _ in range(3):
                try:
                    await deck.feed("hook")
                except EverdeckError:
                    break
            told["cut"] = "still here"
        await deck.feed("hook")
        kept = _readers()
        await deck.feed("hook")
        told["kept"] = [len(kept), _readers() == kept, sorted(kept.values()) == [entry.pw_uid]]
        told["owners"] = sorted({path.stat().st_uid for path in data.iterdir()})
        await deck.stop("hook")
        for trap, plant in {
            "link": f"ln -s {treasure} feed.db",
            "second name": f"ln {treasure} feed.db",
            "pipe": "mkfifo feed.db",
            "journal": f"ln -s {treasure} feed.db-wal; : > feed.db",
            "not a database": "echo this is none > feed.db",
        }.items():
            as_account("rm -f feed.db*")
            if trap == "second name":
                os.link(treasure, data / "feed.db")  # as on a machine without fs.protected_hardlinks
            else:
                as_account(plant)
            told[trap] = await _met(deck)
            (data / "feed.db").unlink()
        await _met(deck)
        told["kept after traps"] = len(_readers())
        await deck.remove("hook")
        told["kept after its end"] = len(_readers())
    return told


def _readers() -> dict[str, int]:
    """The programs that read for us, and whose rights they have."""
    found = {}
    threads = Path("/proc/self/task").iterdir()
    for pid in " ".join((thread / "children").read_text() for thread in threads).split():
        if b"everdeck.feed.far_claims" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found[pid] = Path(f"/proc/{pid}").stat().st_uid
    return found


async def _met(deck: AsyncDeck) -> str:
    try:
        return f"read: {await deck.feed('hook')}"
    except EverdeckError as err:
        return f"{type(err).__name__}: {err}"


def _post(port: int | None) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/in", data=b"hello", timeout=10) as answer:
                answer.read()
                return
        except (ConnectionError, urllib.error.URLError):
            continue  # it does not listen yet; the whole has a deadline


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
