"""Nobody is judged by what we could not hear: pauses of the owner, old sockets, and workers that are never ready."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from everdeck import Deck, Restart, State
from everdeck.clock import Clock
from everdeck.deck.attention import Attention
from everdeck.deck.health import HealthKeeper
from everdeck.errors import WorkerFailed
from everdeck.model import Health, WorkerSpec
from support.deck_owner import Owner, owner
from support.waiting import until

# As the stock client of the package sdnotify does: connected once, at the start, and every failure swallowed.
PINGER = """
import os, socket, sys, time
ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
ear.connect(os.environ["NOTIFY_SOCKET"])
def say(text):
    try:
        ear.sendall(text.encode())
    except OSError:
        pass
say("READY=1\\nSTATUS=counting")
while True:
    say("WATCHDOG=1")
    time.sleep(0.2)
"""
WATCHDOG_SECONDS = 2


def pinger() -> WorkerSpec:
    """Pings ten times as often as it must."""
    return WorkerSpec(
        (sys.executable, "-c", PINGER),
        health=Health(notify=True, watchdog_seconds=WATCHDOG_SECONDS),
        restart=Restart(backoff_seconds=0),
    )


def ill(deck: Deck) -> list[str]:
    """What was held against anybody."""
    return [event.kind for event in deck.events() if event.kind in {"unhealthy", "crashed", "killed", "restarted"}]


def test_a_pause_longer_than_the_watchdog_kills_nobody(tmp_path: Path) -> None:
    """Stopped for longer than the watchdog, as by SIGSTOP or a debugger; or with all workers, as a suspended machine.

    Two decks, one for each, share the pause.
    """
    with owner(tmp_path / "alone") as alone, owner(tmp_path / "whole") as whole:
        started = {manager: _three_pingers(manager) for manager in (alone, whole)}
        paused = [alone.pid, whole.pid, *started[whole]]
        for pid in paused:
            os.kill(pid, signal.SIGSTOP)
        try:
            asyncio.run(asyncio.sleep(2.5 * WATCHDOG_SECONDS))  # the pause itself is what is tested
        finally:
            for pid in paused:
                os.kill(pid, signal.SIGCONT)
        # One of them falls silent: who is heard again is watched again, and the others are left alone.
        for pids in started.values():
            os.kill(pids[0], signal.SIGSTOP)
        for manager, pids in started.items():
            _until_replaced(manager, pids[0])
            assert [manager.ask("status", f"w{n}")["pid"] for n in (1, 2)] == pids[1:]
            blamed = {event["worker"] for event in manager.ask("events") if event["kind"] in {"unhealthy", "crashed"}}
            assert blamed == {"w0"}
            manager.ask("stop_all")


def _until_replaced(manager: Owner, silent: int) -> None:
    until(lambda: manager.ask("status", "w0")["pid"] not in {None, silent}, "a silent worker is still replaced")


def _three_pingers(manager: Owner) -> list[int]:
    """Their pids, when all are ready."""
    fields = {"health": {"notify": True, "watchdog_seconds": WATCHDOG_SECONDS}}
    pids = [manager.ask("start", f"w{n}", list(pinger().command), **fields)["pid"] for n in range(3)]
    until(lambda: all(manager.ask("status", f"w{n}")["state"] == "running" for n in range(3)), "all are ready")
    return pids


def test_a_client_that_connected_to_the_old_owner_survives_the_new_one(tmp_path: Path) -> None:
    """Its pings reach nobody any more: it is not judged by them, and what it said before is still shown."""
    state = tmp_path / "state"
    fields = {"health": {"notify": True, "watchdog_seconds": 1}}
    with owner(state) as manager:
        pid = manager.ask("start", "old", list(pinger().command), **fields)["pid"]
        until(lambda: manager.ask("status", "old")["state"] == "running", "it is ready")
        until(lambda: _noted_status(state) == "counting", "what it said is noted for the next owner")
        manager.kill()
    with Deck(state) as deck:
        assert deck.status("old").status_text == "counting"
        fresh = deck.start("new", WorkerSpec(("sleep", "1000"), health=Health(watchdog_seconds=1)))
        # A worker of this owner that never pings shows when a watchdog's time is up.
        until(lambda: deck.status("new").pid not in {None, fresh.pid}, "the silent new worker is replaced")
        assert deck.status("old").pid == pid
        assert not [event for event in deck.events() if event.worker == "old" and event.kind == "unhealthy"]
        deck.stop_all()


def _noted_status(state: Path) -> str | None:
    from everdeck.deck.peek import peek

    return next((status.status_text for status in peek(state).workers), None)


def test_silence_begins_anew_when_the_loop_was_blocked() -> None:
    """The keeper hears what is waiting first, and a blocked loop counts as nobody listening."""

    async def scenario() -> None:
        told: list[str] = []
        silent_was_judged = asyncio.Event()
        waiting: list[str] = []

        def judged(name: str, _reason: str) -> None:
            told.append(name)
            if name == "silent":
                silent_was_judged.set()

        keeper = HealthKeeper(
            lambda name: told.append(f"ready {name}"),
            judged,
            lambda name: told.append(f"healthy {name}"),
            lambda *_: None,
            lambda *_: None,
            hear=lambda: [keeper.notified(waiting.pop(), {"WATCHDOG": "1"}) for _ in list(waiting)] and None,
        )
        keeper.open()
        for name in ("silent", "speaking"):
            health = Health(watchdog_seconds=0.8)
            keeper.watch(name, health, port=None, env={}, cwd="/", already_ready=True)
        await asyncio.sleep(0.1)
        waiting.append("speaking")
        _block_the_loop(1.5)
        await asyncio.sleep(0.3)
        assert told == [], "nobody was heard, because nobody listened"
        async with asyncio.timeout(30):
            await silent_was_judged.wait()
        await keeper.close()

    asyncio.run(scenario())


def _block_the_loop(seconds: float) -> None:
    import time

    time.sleep(seconds)


def test_a_suspended_machine_is_noticed_by_the_boot_clock() -> None:
    """The monotonic clock stands still while a machine sleeps."""

    class Suspended(Clock):
        slept = 0.0

        def boottime(self) -> float:
            return super().boottime() + self.slept

    async def scenario() -> None:
        clock = Suspended()
        attention = Attention(asyncio.get_running_loop(), clock)
        attention.begin(4)
        before = attention.look()
        clock.slept = 3600
        assert attention.look() > before
        assert attention.breaks == 1
        attention.end()

    asyncio.run(scenario())


def test_a_worker_that_is_never_ready_fails_by_number_in_a_row(tmp_path: Path) -> None:
    """However long each attempt takes; and the last answer of its check is told wherever one looks."""
    serve = (
        "import http.server,os\n"
        "class No(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(500); self.end_headers()\n"
        "    def log_message(self, *a): pass\n"
        "http.server.HTTPServer(('127.0.0.1', int(os.environ['PORT'])), No).serve_forever()\n"
    )
    spec = WorkerSpec(
        (sys.executable, "-c", serve),
        port=True,
        health=Health(http="http://127.0.0.1:$PORT/healthz", interval_seconds=0.1, start_timeout_seconds=2.5),
        # The window is shorter than one attempt, so that it can never hold two crashes.
        restart=Restart(max_crashes=1, window_seconds=0.5, backoff_seconds=0),
    )
    with Deck(tmp_path / "state") as deck:
        port = deck.start("never", spec).port
        answer = f"HTTP 500 from http://127.0.0.1:{port}/healthz"
        until(lambda: deck.status("never").health_reason == answer, "the last answer is shown while it starts")
        until(lambda: deck.status("never").state is State.FAILED, "it is given up")
        told = {event.kind: event.detail for event in deck.events(worker="never")}
        for kind in ("unhealthy", "crashed", "failed"):
            assert answer in told[kind]["reason"], kind
        assert answer in (deck.status("never").health_reason or "")
        with pytest.raises(WorkerFailed, match=r"not ready 2 times in a row.*HTTP 500"):
            deck.start("never")
        assert len([event for event in deck.events(worker="never") if event.kind == "crashed"]) == 2
    with Deck(tmp_path / "state") as deck:
        assert answer in (deck.status("never").health_reason or ""), "and to the next owner"
        deck.remove("never")
