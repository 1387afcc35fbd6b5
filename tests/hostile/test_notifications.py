"""Who is heard, and how much of it."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from everdeck import AsyncDeck, Restart
from everdeck.clock import Clock
from everdeck.deck import hearing
from everdeck.kernel import notify
from everdeck.model import EventKind
from everdeck.registry import Registry
from everdeck.registry import store as registry_store
from support.hostile_accounts import Account, open_place

FLOOD = """
import json, os, socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.connect(os.environ["NOTIFY_SOCKET"])
for n in range(int(sys.argv[1])):
    event = json.dumps({"what": "x", "n": n, "pad": "y" * int(sys.argv[2])})
    s.send(("X_EVERDECK_EVENT=" + event).encode())
s.send(b"STATUS=done")
time.sleep(1000)
"""


async def _done(deck: AsyncDeck) -> None:
    async with asyncio.timeout(120):
        while (await deck.status("alice")).status_text != "done":  # noqa: ASYNC110 - what it says is no event
            await asyncio.sleep(0.02)


def test_a_flood_of_events_is_cut_and_told() -> None:
    """The others are answered meanwhile; the registry holds what the budget allows, and says that more came."""

    async def scenario(place: Path) -> None:
        async with AsyncDeck(place / "state") as deck:
            count = hearing._EVENTS_AT_ONCE * 6
            await deck.start("alice", [sys.executable, "-c", FLOOD, str(count), "1000"])
            await _done(deck)
            await deck.restart("alice")
            await _done(deck)
            feed = [event.detail for event in await deck.events() if event.kind is EventKind.FEED]
            assert len(feed) < count
            dropped = sum(detail["count"] for detail in feed if detail["what"] == "events-dropped")
            assert dropped > 0
            await deck.stop("alice")

    with open_place() as place:
        asyncio.run(scenario(place))


def test_an_event_is_four_kilobytes_at_most() -> None:
    """A larger one is not kept; that it came is."""

    async def scenario(place: Path) -> None:
        async with AsyncDeck(place / "state") as deck:
            await deck.start("alice", [sys.executable, "-c", FLOOD, "3", "5000"])
            await _done(deck)
            feed = [event.detail["what"] for event in await deck.events() if event.kind is EventKind.FEED]
            assert feed == ["event-too-large"] * 3
            await deck.stop("alice")

    with open_place() as place:
        asyncio.run(scenario(place))


EXPLAINS = """
import os, socket, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.connect(os.environ["NOTIFY_SOCKET"])
s.send(b'X_EVERDECK_EVENT={"what": "dead-letter", "crashes": 1000000}')
time.sleep(0.3)
raise SystemExit(1)
"""


def test_a_worker_cannot_talk_its_breaker_away() -> None:
    """Every crash is explained by a message that was set aside: so many are believed, and then it rests as failed."""

    async def scenario(place: Path) -> None:
        async with AsyncDeck(place / "state") as deck:
            restart = Restart("always", max_crashes=2, backoff_seconds=0.01, backoff_cap_seconds=0.02)
            await deck.start("alice", [sys.executable, "-c", EXPLAINS], restart=restart)
            async with asyncio.timeout(100):
                async for event in deck.follow(0):
                    if event.kind is EventKind.FAILED:
                        break
            crashes = [event for event in await deck.events() if event.kind is EventKind.CRASHED]
            assert 3 <= len(crashes) <= 6

    with open_place() as place:
        asyncio.run(scenario(place))


def test_a_full_registry_drops_the_oldest_words_of_workers_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happened to others stays; the event tells how many are gone."""
    monkeypatch.setattr(registry_store, "MOST_BYTES", 1_000_000)
    registry = Registry.open(tmp_path / "deck.db")
    try:
        registry.append_event(Clock().wall(), "alice", EventKind.STARTED, {"pid": 1})
        for number in range(2100):
            registry.append_event(Clock().wall(), "loud", EventKind.FEED, {"number": number, "pad": "x" * 1000})
        kept = registry.events()
        told = [event.detail for event in kept if event.worker is None]
        assert {detail["what"] for detail in told} == {"oldest-events-dropped"}
        loud = [event.detail["number"] for event in kept if event.worker == "loud"]
        assert loud == list(range(loud[0], 2100))
        assert loud[0] > 0
        assert [event.kind for event in kept if event.worker == "alice"] == [EventKind.STARTED]
    finally:
        registry.close()


def test_a_turn_takes_a_bounded_number(tmp_path: Path) -> None:
    """The rest waits in the queue, and so does nobody else."""
    ear = notify.NotifySocket(tmp_path)
    try:
        heard = 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
            speaker.setblocking(False)
            speaker.connect(ear.address)
            sent = 0
            try:
                while sent < notify.MOST_PER_TURN * 3:
                    speaker.send(b"STATUS=x")
                    sent += 1
            except BlockingIOError:
                pass
            heard = sum(1 for _ in ear.receive())
        assert heard == min(sent, notify.MOST_PER_TURN)
    finally:
        ear.close()


def test_a_stolen_cookie_does_not_speak(place: Path, mallory: Account, victim: Account) -> None:
    """The cookie of another account's worker, in the environment of a process that is not of its tree."""

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            status = await deck.start("alice", ["sleep", "1000"], user=victim.name)
            environment = dict(
                pair.split("=", 1) for pair in _environment(status.pid).decode().split("\0") if "=" in pair
            )
            say = (
                "import os, socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM);"
                "s.connect(os.environ['NOTIFY_SOCKET']); s.send(b'STATUS=forged'); s.send(b'READY=1'); input()"
            )
            for account in (mallory, victim):  # the second has the account, and is not in the cgroup
                who = {"user": account.uid, "group": account.gid, "extra_groups": []}
                words = ("/usr/bin/python3", "-c", say)
                forger = await asyncio.create_subprocess_exec(*words, env=environment, stdin=-1, cwd="/", **who)
                await asyncio.sleep(1)
                await forger.communicate(b"\n")
            said = (await deck.status("alice")).status_text
            assert said is None
            await deck.stop("alice")

    from everdeck.kernel import containment

    if containment.cgroup_home() is None or not Path("/usr/bin/python3").exists():
        import pytest

        pytest.skip("needs a writable cgroup v2 directory and /usr/bin/python3")
    asyncio.run(scenario())


def _environment(pid: int | None) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


SAYS = """
import json, os, socket, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.connect(os.environ["NOTIFY_SOCKET"])
event = json.dumps({"what": "a\\x1b]0;owned\\x07b\\nforged: line", "deep": [{"k\\x1b": "\\x9b"}]})
s.send(("X_EVERDECK_EVENT=" + event).encode())
s.send(b"STATUS=done")
time.sleep(1000)
"""


def test_what_a_worker_says_and_is_called_acts_on_no_terminal() -> None:
    """Escapes inside JSON, and a command line with escapes and line breaks, are shown as they are written in code."""

    async def scenario(place: Path) -> None:
        async with AsyncDeck(place / "state") as deck:
            await deck.start("alice", [sys.executable, "-c", SAYS, "\x1b]0;owned\x07\nforged"])
            await _done(deck)
            feed = [event.detail for event in await deck.events() if event.kind is EventKind.FEED]
            assert feed == [{"what": "a\\x1b]0;owned\\x07b\\nforged: line", "deep": [{"k\\x1b": "\\x9b"}]}]
            (process,) = await deck.tree("alice")
            assert "\x1b" not in process.command
            assert "\n" not in process.command
            await deck.stop("alice")

    with open_place() as place:
        asyncio.run(scenario(place))
