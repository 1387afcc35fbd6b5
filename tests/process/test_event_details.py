"""The events of a real deck hold what everdeck.details says, kind by kind."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import msgspec

from everdeck import AsyncDeck, Event, EventKind, Health, Log, Restart, Stop
from everdeck.details import DETAILS
from support.waiting import eventually

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(1000)"
READY_ONCE = """
import os, socket, time
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
    line.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"].replace("@", chr(0), 1))
time.sleep(1000)
"""
WITHOUT_BACKOFF = Restart("on-failure", max_crashes=1, backoff_seconds=0)
# Of a guardian, of a lock that a stranger took, of a bound worker whose owner was killed: other files make them.
RARER = {EventKind.ORPHAN_REAPED, EventKind.LOCK_CONFLICT}


def test_every_detail_has_the_keys_of_its_kind_and_no_other(tmp_path: Path) -> None:
    """A life with a bit of everything, and each of its events compared with its type."""

    async def scenario() -> list[Event]:
        async with AsyncDeck(tmp_path / "state") as deck:
            await deck.start("alice", ["sleep", "1000"])
            await deck.restart("alice")
            await deck.start("leaves", ["true"], restart=Restart("never"))
            await deck.start("crashes", ["false"], restart=WITHOUT_BACKOFF)
            await eventually(lambda: is_there(deck, EventKind.FAILED, "crashes"), "the breaker")
            await deck.reset("crashes")
            await deck.start("deaf", [sys.executable, "-c", DEAF], stop=Stop(grace_seconds=0.1))
            await eventually(lambda: said(deck, "deaf", "deaf"), "deaf")
            await deck.stop("deaf")
            await deck.start(
                "silent", [sys.executable, "-c", READY_ONCE], health=Health(notify=True, watchdog_seconds=1)
            )
            await eventually(lambda: is_there(deck, EventKind.UNHEALTHY, "silent"), "its silence")
            await deck.remove("silent")
            await deck.start("wordy", ["sh", "-c", "seq 100000; sleep 1000"], log=Log(max_bytes=4096))
            await eventually(lambda: is_there(deck, EventKind.LOG_ROTATED, "wordy"), "a rotation")
            stranger = await asyncio.to_thread(subprocess.Popen, ["sleep", "1000"], start_new_session=True)
            try:
                await deck.adopt("stranger", stranger.pid)
                await deck.stop("stranger")
            finally:
                stranger.kill()
                stranger.wait()
        async with AsyncDeck(tmp_path / "state") as deck:
            await deck.stop_all()
            return await deck.events()

    events = asyncio.run(scenario())

    seen = set()
    for event in events:
        kind = DETAILS[event.kind]
        msgspec.convert(event.detail, kind)
        assert event.detail.keys() <= get_type_hints(kind).keys(), event
        seen.add(event.kind)
    assert set(DETAILS) - seen <= RARER


async def is_there(deck: AsyncDeck, kind: EventKind, worker: str) -> bool:
    """Has it happened?"""
    return any(event.kind is kind for event in await deck.events(worker=worker))


async def said(deck: AsyncDeck, worker: str, text: str) -> bool:
    """Did the worker print this line?"""
    return text in await deck.logs(worker)
