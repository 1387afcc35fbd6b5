"""What runs in the machine whose power is cut: a deck whose verbs are asked all the time, a feed, a log that rotates.

Every answer is told to the outside at once, as a line of JSON, and kept there: the machine may
forget what it likes, the ledger does not. At each start the first line tells what is found.

    python power_workload.py LINE

With everything loaded it says so and waits for one line, which gives what a machine that is switched on has from
outside: the time, and chance. Only then is the disk mounted. ``unsynced`` is the same program with every sync taken
out: what a checker must catch. The line ``b`` is the reset of the kernel itself (sysrq).
"""

import asyncio
import contextlib
import fcntl
import gzip
import json
import mmap
import os
import random
import struct
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from everdeck import AsyncDeck, Log, Restart, disk
from everdeck.errors import EverdeckError
from everdeck.feed import Inbox, consume, poll
from everdeck.model import EventKind
from everdeck.registry import Registry

NAMES = ("ada", "bo", "cy", "di")
FOREVER = ("sleep", "1000")
FEED_SECONDS = 0.5
TALKER = "talker"
LOG_DIR = Path("state", "workers", TALKER, "log")
LOG = Log(max_bytes=16_384, keep=24)
TALK = """
import os, time
life, number = os.urandom(4).hex(), 0
while True:
    lines = [f"line {life} {number} {'x' * 80}\\n" for number in range(number + 1, number + 11)]
    os.write(1, "".join(lines).encode())
    number += 10
    time.sleep(0.1)
"""
CONTROL_SECONDS = 0.2
BLOCK = 4096
_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207


class Line:
    """The line to the outside (a port of virtio-serial)."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR)
        self._given = os.fdopen(os.dup(self._fd), "r", encoding="ascii")
        self._one_at_a_time = threading.Lock()

    def tell(self, **said: Any) -> None:
        """One line; it is outside when this returns, or on its way without us."""
        left = json.dumps(said).encode() + b"\n"
        with self._one_at_a_time:
            while left:  # the port takes 32 KiB at a time, and the last look tells more
                left = left[os.write(self._fd, left) :]

    def told(self) -> str:
        """The next line from there; while nobody is there, nothing comes."""
        while not (line := self._given.readline().strip()):
            time.sleep(0.05)
        return line


async def main(directory: Path, line: Line, after: int) -> None:
    """Tell what is there, then work until the power goes. Events up to ``after`` are known outside."""
    directory.mkdir(exist_ok=True)
    async with AsyncDeck(directory / "state") as deck:
        line.tell(what="found", **await _found(deck, directory, after))
        command = ("/opt/venv/bin/python", "-SEuc", TALK)
        await deck.start(TALKER, command, log=LOG, restart=Restart("always"))
        async with asyncio.TaskGroup() as work:  # what one of them raises is on the console, and ends the others
            work.create_task(_feed(directory, line))
            work.create_task(_events(deck, directory / LOG_DIR, line, after))
            work.create_task(_verbs(deck, line))
            work.create_task(_control(directory, line))


async def _found(deck: AsyncDeck, directory: Path, after: int) -> dict[str, Any]:
    workers = {}
    for status in await deck.list():
        if status.name == TALKER:
            continue
        secret = directory / "state" / "workers" / status.name / "secrets" / "KEY"
        spec = await deck.spec(status.name)
        workers[status.name] = {
            "runs": status.pid is not None,
            "turn": spec.env["TURN"],
            "secret": secret.read_text() if secret.exists() else None,
            "state": f"{status.state}, {status.exit}, {status.crashes} crashes",  # for whoever reads of a fault
        }
    told = [[event.id, f"{event.at} {event.worker} {event.kind}"] for event in await deck.events(after=after)]
    return {
        "workers": workers,
        "events": told,
        "booked": await _booked(directory),
        "log": await _log(deck, directory / LOG_DIR),
        "control": {kind: _controlled(directory / kind) for kind in ("page", "block")},
    }


async def _log(deck: AsyncDeck, log_dir: Path) -> dict[str, Any]:
    """What a reader is shown: runs of lines without a gap, and what is no line of the talker nor of ours."""
    with contextlib.suppress(EverdeckError):
        # The talker speaks again by now, and what no longer fits goes while the log is read. What fits must be there.
        # Where a cut has torn the end of a file, zeros fill its last block: an archive of them holds fewer lines.
        all_there = len([*log_dir.glob("*.log*")]) >= LOG.keep
        young, longer = _newest(await deck.logs(TALKER, lines=None), (LOG.keep - 1) * LOG.max_bytes)
        full = longer or all_there
        strange: dict[str, int] = {}
        runs = _runs((_line(line) for line in young), strange)
        return {"runs": runs, "strange": strange, "full": full}
    return {"runs": [], "strange": {}, "full": False}


def _newest(lines: list[str], size: int) -> tuple[list[str], bool]:
    """The last ``size`` bytes of them, and whether there were more."""
    first = len(lines)
    while first and (size := size - len(lines[first - 1]) - 1) >= 0:
        first -= 1
    return lines[first:], first > 0


def _line(line: str) -> tuple[str, int] | str:
    match line.split(" "):
        case ["line", life, number, rest] if rest == "x" * 80 and number.isdigit():
            return life, int(number)
        case _:
            return line


def _runs(numbers: Any, strange: dict[str, int]) -> list[list[Any]]:
    """``[[life, first, last], …]`` in the order in which they are found."""
    runs: list[list[Any]] = []
    for one in numbers:
        if isinstance(one, str):
            if not one.startswith("--- everdeck "):
                kind = "zeros" if "\0" in one else "torn"
                strange[kind] = strange.get(kind, 0) + 1
        elif runs and runs[-1][0] == one[0] and runs[-1][2] + 1 == one[1]:
            runs[-1][2] += 1
        else:
            runs.append([one[0], one[1], one[1]])
    return runs


async def _booked(directory: Path) -> dict[str, Any]:
    if not (directory / "feed.db").exists():
        return {"rows": 0, "runs": []}
    async with Inbox(directory / "feed.db") as inbox, inbox.transaction() as db:
        db.execute("CREATE TABLE IF NOT EXISTS booking (id INTEGER)")
        numbers = [row[0] for row in db.execute("SELECT id FROM booking ORDER BY id")]
    runs = _runs((("", number) for number in sorted({*numbers})), {})
    return {"rows": len(numbers), "runs": [run[1:] for run in runs]}


async def _verbs(deck: AsyncDeck, line: Line) -> None:
    chance = random.Random(os.urandom(8))
    turn = 0
    while True:
        name, verb = chance.choice(NAMES), chance.choice(("start", "start", "stop", "remove"))
        turn += 1
        mark = f"{os.getpid()}-{turn}-{chance.random()}"
        line.tell(what="asked", verb=verb, name=name, turn=mark)
        try:
            if verb == "start":
                env, secrets = {"TURN": mark}, {"KEY": f"secret of {mark}"}
                await deck.start(name, FOREVER, env=env, secrets=secrets, replace=True)
            elif verb == "stop":
                await deck.stop(name)
            else:
                await deck.remove(name)
        except EverdeckError as error:
            line.tell(what="refused", verb=verb, name=name, turn=mark, why=str(error))
        else:
            line.tell(what="answered", verb=verb, name=name, turn=mark)


async def _events(deck: AsyncDeck, log_dir: Path, line: Line, after: int) -> None:
    async for event in deck.follow(after=after):
        line.tell(what="event", id=event.id, said=f"{event.at} {event.worker} {event.kind}")
        if event.kind is EventKind.LOG_ROTATED and event.worker == TALKER:
            with contextlib.suppress(FileNotFoundError):  # an old event: its archive is pruned
                line.tell(what="rotated", upto=_last_rotated(log_dir / event.detail["archives"][-1]))


def _last_rotated(archive: Path) -> list[Any]:
    """The last whole line in an archive, which may be compressed by now."""
    content = archive.read_bytes() if archive.exists() else gzip.decompress(Path(f"{archive}.gz").read_bytes())
    found = _line(content.rpartition(b"\n")[0].rpartition(b"\n")[2].decode())
    return list(found) if isinstance(found, tuple) else ["", 0]


async def _control(directory: Path, line: Line) -> None:
    """What nobody syncs, in the page cache and past it in the disk's own: a cut that loses nothing shows here."""
    number = max(_controlled(directory / "page"), _controlled(directory / "block"))
    block = mmap.mmap(-1, BLOCK)  # O_DIRECT wants it aligned
    for kind in ("page", "block"):  # afterwards written in place: of a file that is made anew ext4 syncs the content
        (directory / kind).write_bytes(_control_block(number))
    os.sync()
    past_the_cache = os.open(directory / "block", os.O_WRONLY | os.O_DIRECT)
    into_it = os.open(directory / "page", os.O_WRONLY)
    while True:
        number += 1
        block[:] = _control_block(number)
        os.pwrite(into_it, block, 0)
        os.pwrite(past_the_cache, block, 0)
        line.tell(what="control", number=number)
        await asyncio.sleep(CONTROL_SECONDS)


def _control_block(number: int) -> bytes:
    return str(number).encode().ljust(BLOCK)


def _controlled(path: Path) -> int:
    try:
        return int(path.read_bytes() or b"0")
    except (FileNotFoundError, ValueError):
        return 0


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
            line.tell(what="booked", id=item.value["id"])

        await consume(poll(new, every=FEED_SECONDS), book, inbox=inbox)


def remove_syncs() -> None:
    """The mutant: nothing waits for the disk any more."""
    disk.sync = lambda _: None
    Registry.sync = lambda _: None  # type: ignore[method-assign, assignment]


def _be_switched_on(at: float, chance: bytes) -> None:
    time.clock_settime(time.CLOCK_REALTIME, at)
    with open("/dev/urandom", "wb") as pool:  # noqa: PTH123 - a device
        fcntl.ioctl(pool, _RNDADDENTROPY, struct.pack("ii", 8 * len(chance), len(chance)) + chance)
        fcntl.ioctl(pool, _RNDRESEEDCRNG)
    # A boot id is as old as the memory that was kept: this one is of the moment that the machine was switched on.
    Path("/run/boot_id").write_text(f"{uuid.UUID(bytes=chance[:16])}\n")
    subprocess.run(["mount", "--bind", "/run/boot_id", "/proc/sys/kernel/random/boot_id"], check=True)
    subprocess.run(["mount", "-t", "ext4", "/dev/vdb", "/data"], check=True)


def _obey(line: Line) -> None:
    while True:
        if line.told() == "b":
            Path("/proc/sysrq-trigger").write_text("b")


if __name__ == "__main__":
    talk = Line(sys.argv[1])
    talk.tell(what="ready")
    given = json.loads(talk.told())
    _be_switched_on(given["at"], bytes.fromhex(given["chance"]))
    if given["unsynced"]:
        remove_syncs()
    threading.Thread(target=_obey, args=(talk,), daemon=True).start()
    asyncio.run(main(Path("/data", given["place"]), talk, given["after"]))
