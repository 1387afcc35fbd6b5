"""Health through the whole deck: real workers that speak, fall silent, and outlive their owner."""

import asyncio
import os
import pwd
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck.deck import AsyncDeck
from everdeck.kernel.notify import address_for
from everdeck.model import Event, EventKind, Health, Restart
from support.child_owner import Owner
from support.child_program import SOURCE
from support.waiting import eventually

PATIENCE_SECONDS = 30.0
QUICK = Restart("on-failure", backoff_seconds=0.01, backoff_cap_seconds=0.01, max_crashes=50)
ENV = {"PYTHONPATH": SOURCE}

SPEAKER = """
import os, signal, sys, time
from everdeck.child import emit, notify
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGUSR1, lambda *_: notify(STATUS="heard again"))
signal.signal(signal.SIGUSR2, lambda *_: emit({"dead": 1}))
notify("READY=1", STATUS="up")
while True:
    signal.pause()
"""


@pytest.fixture(autouse=True)
def _short_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The notify socket of a deck in a temporary directory gets a runtime directory of its own."""
    with tempfile.TemporaryDirectory(prefix="everdeck-test-", dir="/tmp") as directory:
        Path(directory).chmod(0o711)
        monkeypatch.setenv("EVERDECK_RUNTIME_DIR", directory)
        yield


async def event_of(deck: AsyncDeck, kind: EventKind, worker: str, *, after: int = 0) -> Event:
    """The next event of that kind; fails loudly when none comes."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for event in deck.follow(after=after):
            if event.kind is kind and event.worker == worker:
                return event
    raise AssertionError


async def status_text(deck: AsyncDeck, name: str, text: str) -> None:
    """Wait until the worker's own words are these."""

    async def same() -> bool:
        return (await deck.status(name)).status_text == text

    await eventually(same, text)


def test_a_worker_is_starting_until_it_says_ready(tmp_path: Path) -> None:
    """READY=1 is an event and a state; STATUS is shown; the summary is healthy."""

    async def scenario() -> None:
        async with AsyncDeck(tmp_path / "state") as deck:
            began = await deck.start("alice", [sys.executable, "-c", SPEAKER], env=ENV, health=Health(notify=True))
            assert (began.state, began.health) == ("starting", "starting")
            (glanced,) = await deck.glance()
            assert glanced.pid == began.pid
            await event_of(deck, EventKind.READY, "alice")
            await status_text(deck, "alice", "up")
            for now in (await deck.status("alice"), *await deck.glance()):
                assert (now.state, now.health, now.status_text) == ("running", "healthy", "up")
            await deck.stop("alice")

    asyncio.run(scenario())


def test_a_hung_worker_is_unhealthy_and_replaced(tmp_path: Path) -> None:
    """It says ready and then nothing: the watchdog takes it for hung, and its policy starts another."""

    async def scenario() -> None:
        async with AsyncDeck(tmp_path / "state") as deck:
            health = Health(notify=True, watchdog_seconds=0.3)
            first = await deck.start("alice", [sys.executable, "-c", SPEAKER], env=ENV, health=health, restart=QUICK)
            ill = await event_of(deck, EventKind.UNHEALTHY, "alice")
            assert ill.detail["reason"] == "no watchdog ping for 0.3 s"
            await event_of(deck, EventKind.RESTARTED, "alice", after=ill.id)
            assert (await deck.status("alice")).pid != first.pid
            await deck.stop("alice")

    asyncio.run(scenario())


def test_a_start_that_never_gets_ready_is_replaced(tmp_path: Path) -> None:
    """A worker that does not say ready in time is unhealthy, and restarted by its policy."""

    async def scenario() -> None:
        async with AsyncDeck(tmp_path / "state") as deck:
            health = Health(notify=True, start_timeout_seconds=0.2)
            await deck.start("alice", ["sleep", "60"], health=health, restart=QUICK)
            ill = await event_of(deck, EventKind.UNHEALTHY, "alice")
            assert ill.detail["reason"] == "not ready after 0.2 s"
            await event_of(deck, EventKind.RESTARTED, "alice", after=ill.id)
            await deck.stop("alice")

    asyncio.run(scenario())


def test_a_worker_keeps_being_heard_after_its_owner_was_killed(tmp_path: Path) -> None:
    """The socket survives the owner: adopted, still healthy, and what it says next is heard by the next owner."""
    state = tmp_path / "state"
    with Owner(env={"EVERDECK_RUNTIME_DIR": os.environ["EVERDECK_RUNTIME_DIR"]}) as owner:
        owner.do("open", state)
        owner.do("start", state, "alice", [sys.executable, "-c", SPEAKER], env=ENV, health={"notify": True})
        while owner.do("status", state, "alice")["health"] != "healthy":
            pass
        owner.kill()

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            adopted = await deck.status("alice")
            assert (adopted.adopted, adopted.state, adopted.health) == (True, "running", "healthy")
            assert adopted.pid is not None
            os.kill(adopted.pid, signal.SIGUSR1)
            await status_text(deck, "alice", "heard again")
            await deck.stop("alice")

    asyncio.run(scenario())


@pytest.mark.parametrize("health", [None, Health(notify=True)], ids=["without health", "with health"])
def test_a_workers_own_event_is_recorded_once(tmp_path: Path, health: Health | None) -> None:
    """What a worker emits is one event of the deck, whether or not its health is watched."""

    async def scenario() -> None:
        async with AsyncDeck(tmp_path / "state") as deck:
            await deck.start("alice", [sys.executable, "-c", SPEAKER], env=ENV, health=health)
            await event_of(deck, EventKind.READY, "alice")
            pid = (await deck.status("alice")).pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR2)
            told = await event_of(deck, EventKind.FEED, "alice")
            assert told.detail == {"dead": 1}
            os.kill(pid, signal.SIGUSR1)  # whatever came with the event has come before this word is heard
            await status_text(deck, "alice", "heard again")
            assert [event.kind for event in await deck.events(worker="alice")].count(EventKind.FEED) == 1
            await deck.stop("alice")

    asyncio.run(scenario())


def test_one_worker_cannot_speak_for_another(tmp_path: Path) -> None:
    """Two workers share the socket; what bob says is bob's, and a process outside says nothing for anybody."""

    async def scenario() -> None:
        async with AsyncDeck(tmp_path / "state") as deck:
            await deck.start("alice", ["sleep", "60"], health=Health(notify=True))
            await deck.start("bob", [sys.executable, "-c", SPEAKER], env=ENV, health=Health(notify=True))
            await event_of(deck, EventKind.READY, "bob")
            stranger = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                "from everdeck.child import notify; assert notify('READY=1', STATUS='I am alice')",
                env=ENV | {"NOTIFY_SOCKET": address_for(deck.state_dir), "EVERDECK_WORKER": "alice"},
            )
            assert await stranger.wait() == 0
            bob = await deck.status("bob")
            assert bob.pid is not None
            os.kill(bob.pid, signal.SIGUSR1)
            await status_text(deck, "bob", "heard again")
            alice = await deck.status("alice")
            assert (alice.state, alice.status_text) == ("starting", None)
            await deck.stop_all()

    asyncio.run(scenario())


def test_a_deep_state_directory(tmp_path: Path) -> None:
    """More than 200 bytes of path, and the worker is heard."""
    deep = tmp_path.joinpath(*["d" * 60] * 4)

    async def scenario() -> None:
        async with AsyncDeck(deep) as deck:
            await deck.start("alice", [sys.executable, "-c", SPEAKER], env=ENV, health=Health(notify=True))
            await event_of(deck, EventKind.READY, "alice")
            await deck.stop("alice")

    asyncio.run(scenario())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start workers as another user")
def test_a_worker_of_another_user_is_heard() -> None:
    """It cannot read the state directory, but it can speak."""
    try:
        pwd.getpwnam("nobody")
    except KeyError:
        pytest.skip("there is no user called nobody")
    if shutil.which("systemd-notify") is None:
        pytest.skip("systemd-notify is not installed")
    with tempfile.TemporaryDirectory(prefix="everdeck-test-", dir="/tmp") as directory:
        Path(directory).chmod(0o711)

        async def scenario() -> None:
            async with AsyncDeck(Path(directory) / "state") as deck:
                command = ["sh", "-c", "systemd-notify --ready; exec sleep 60"]
                await deck.start("alice", command, user="nobody", health=Health(notify=True))
                await event_of(deck, EventKind.READY, "alice")
                await deck.stop("alice")

        asyncio.run(scenario())
