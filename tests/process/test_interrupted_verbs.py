"""Verbs whose caller leaves, whose registry is full, whose host forks or has no descriptor left."""

import asyncio
import contextlib
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck import AsyncDeck, Deck, DeckClosed, Restart, Stop
from everdeck.model import EventKind, WorkerStatus

DEADLINE_SECONDS = 60
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(100)",
]


async def _until_event(deck: AsyncDeck, worker: str, *kinds: EventKind) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        async for event in deck.follow(0):
            if event.worker == worker and event.kind in kinds:
                return


async def _until_said(deck: AsyncDeck, worker: str, word: str) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while word not in "".join(await deck.logs(worker)):  # noqa: ASYNC110 - a log line is no event of the deck
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def _registry_locked(state: Path) -> Iterator[None]:
    """Another program writes to the registry and does not let go."""
    other = sqlite3.connect(state / "deck.db", isolation_level=None, timeout=30)
    try:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")
    finally:
        other.close()


def test_a_stop_goes_on_when_its_caller_stops_waiting(tmp_path: Path) -> None:
    """Whoever waits only half a second for a stop gets a worker that is stopped a moment later, not one half way."""

    async def story() -> None:
        async with AsyncDeck(tmp_path) as deck:
            await deck.start("deaf", DEAF, stop=Stop(grace_seconds=0.5))
            await _until_said(deck, "deaf", "deaf")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(deck.stop("deaf"), 0.1)
            await _until_event(deck, "deaf", EventKind.STOPPED)
            status = await deck.status("deaf")
            assert (status.state, status.pid) == ("stopped", None)

    asyncio.run(story())


def test_closing_in_one_thread_waits_for_the_stop_of_another(tmp_path: Path) -> None:
    """The stop comes back with its answer; whoever calls afterwards is refused; nobody waits for ever."""
    deck = Deck(tmp_path)
    answers: list[WorkerStatus] = []
    try:
        deck.start("deaf", DEAF, stop=Stop(grace_seconds=1))
        heard = threading.Event()
        deck.on_event(lambda event: heard.set() if event.kind is EventKind.STOPPING else None)
        stopper = threading.Thread(target=lambda: answers.append(deck.stop("deaf")), daemon=True)
        stopper.start()
        assert heard.wait(DEADLINE_SECONDS)
    finally:
        deck.close()
    stopper.join(DEADLINE_SECONDS)
    assert [answer.state for answer in answers] == ["stopped"]
    with pytest.raises(DeckClosed):
        deck.status("deaf")


def test_a_stop_that_could_not_be_recorded_is_no_crash(tmp_path: Path) -> None:
    """The worker ended because it was told to; when the registry can be written again, it is stopped, not restarted."""

    async def story() -> None:
        async with AsyncDeck(tmp_path) as deck:
            slow = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.5), sys.exit(3)))"
            command = [sys.executable, "-c", f"{slow}; print('up', flush=True); time.sleep(100)"]
            await deck.start("w", command, stop=Stop(grace_seconds=30), restart=Restart("always", backoff_seconds=0))
            await _until_said(deck, "w", "up")
            started = await deck.last_event_id()
            stopping = asyncio.ensure_future(deck.stop("w"))
            await _until_event(deck, "w", EventKind.STOPPING)
            with _registry_locked(tmp_path):
                assert (await stopping).state == "stopped"
            await _until_event(deck, "w", EventKind.STOPPED)
            await deck.reconcile()
            kinds = {event.kind for event in await deck.events(after=started)}
            assert kinds == {EventKind.STOPPING, EventKind.STOPPED}
            assert (await deck.status("w")).state == "stopped"

    asyncio.run(story())


def test_a_restart_by_policy_survives_a_lack_of_descriptors(tmp_path: Path) -> None:
    """The owner has no descriptor left when its worker dies: it is started again as soon as there are some."""

    async def story() -> None:
        async with AsyncDeck(tmp_path) as deck:
            first = await deck.start("w", ["sleep", "100"], restart=Restart("always", backoff_seconds=0))
            assert first.pid is not None
            hoard: list[int] = []
            try:
                with contextlib.suppress(OSError):
                    while True:
                        hoard.append(os.open(os.devnull, os.O_RDONLY))
                os.kill(first.pid, 9)
                await asyncio.sleep(0.3)  # long enough to hear of it and fail
            finally:
                for fd in hoard:
                    os.close(fd)
            await _until_event(deck, "w", EventKind.RESTARTED)
            status = await deck.status("w")
            assert status.state == "running"
            assert status.pid != first.pid
            await deck.stop("w")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        asyncio.run(story())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_fork_of_the_host_holds_no_lock_of_a_worker(tmp_path: Path) -> None:
    """The host forks a helper that lives on; a worker that was taken over can be stopped and started all the same."""
    process = subprocess.Popen(["sleep", "100"], start_new_session=True)
    helper = 0
    try:
        with Deck(tmp_path) as deck:
            deck.adopt("old", process.pid)
            ready_fd, say_fd = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12+: a threaded host that forks is what is tested
                helper = os.fork()
            if helper == 0:
                os.write(say_fd, b"x")
                signal.pause()
                os._exit(0)
            os.read(ready_fd, 1)
            os.close(ready_fd)
            os.close(say_fd)
            deck.stop("old")
            assert deck.start("old").state == "running"
            deck.stop_all()
    finally:
        process.kill()
        process.wait()
        if helper:
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)
