"""What a feed tells its deck, over the notify socket."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everdeck.feed import FileCursor, Inbox, consume
from support.feed_upstream import Upstream, UpstreamSource, update


@pytest.fixture
def deck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket to listen on, named in the environment as a deck does it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


def heard(deck: socket.socket) -> list[str]:
    """Every line so far."""
    lines: list[str] = []
    while True:
        try:
            lines += deck.recv(65536).decode().split("\n")
        except BlockingIOError:
            return lines


def events(lines: list[str]) -> list[dict[str, Any]]:
    """The feed's events among them."""
    return [json.loads(line.partition("=")[2]) for line in lines if line.startswith("X_EVERDECK_EVENT=")]


async def run(tmp_path: Path, upstream: Upstream, handler: Any, until: Any) -> None:
    """consume() until a fact holds."""
    stop = asyncio.Event()
    source = UpstreamSource(upstream, ends=False)
    running = asyncio.ensure_future(
        consume(source, handler, inbox=Inbox(tmp_path / "bot.db"), max_attempts=1, stop=stop)
    )
    async with asyncio.timeout(60):
        while not until():  # noqa: ASYNC110 - the fact comes by a socket, or from the other side of consume()
            await asyncio.sleep(0.02)
        stop.set()
        await running


def failing(item: Any) -> None:
    """Handles odd ids only."""
    if item.id % 2 == 0:
        raise ValueError("even")


def test_ready_watchdog_status_and_dead_letters(
    deck: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """READY with the first status, pings from the loop, the status in people's words, the dead letter as an event."""
    monkeypatch.setenv("WATCHDOG_USEC", "50000")
    upstream = Upstream()
    upstream.arrive(update(1, chat=5, text="private"), update(2, chat=5, text="private"))
    lines: list[str] = []

    def told() -> bool:
        lines.extend(heard(deck))
        return bool(events(lines)) and lines.count("WATCHDOG=1") >= 3

    asyncio.run(run(tmp_path, upstream, failing, told))
    lines += heard(deck)
    assert lines[0] == "READY=1"
    assert lines[1] == "STATUS=0 done, 0 in flight, 0 dead"
    assert [line for line in lines if line.startswith("STATUS=")][-1] == "STATUS=1 done, 0 in flight, 1 dead"
    (event,) = events(lines)
    assert event == {
        "feed": "telegram:1",
        "what": "dead-letter",
        "number": 2,
        "id": 2,
        "key": "5",
        "attempts": 1,
        "error": "ValueError: even",
    }
    assert "private" not in "".join(lines)


def test_a_dead_letter_that_nobody_heard_of_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The owner may have been away when it happened: told once it listens, and only once."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    upstream = Upstream()
    upstream.arrive(update(2))
    tried: list[int] = []

    def handler(item: Any) -> None:
        tried.append(item.id)
        failing(item)

    asyncio.run(run(tmp_path, upstream, handler, lambda: tried))
    deck: socket.socket = request.getfixturevalue("deck")
    lines: list[str] = []
    for _ in range(2):
        upstream.arrive(update(3 + 2 * len(tried)))
        before = len(tried)
        asyncio.run(run(tmp_path, upstream, handler, lambda: len(tried) > before))  # noqa: B023 - called at once
        lines += heard(deck)
    assert [event["id"] for event in events(lines)] == [2]


def test_a_feed_without_a_database_reports_too(deck: socket.socket, tmp_path: Path) -> None:
    """READY, the numbers of this run, and the dead letter."""
    upstream = Upstream()
    upstream.arrive(update(1), update(2))
    cursor = FileCursor(tmp_path / "offset.txt")
    asyncio.run(asyncio.wait_for(consume(UpstreamSource(upstream), failing, cursor=cursor, max_attempts=1), 60))
    lines = heard(deck)
    assert lines[0] == "READY=1"
    assert [line for line in lines if line.startswith("STATUS=")][-1] == "STATUS=1 done, 0 in flight, 1 dead"
    assert [event["what"] for event in events(lines)] == ["dead-letter"]


def test_without_a_deck_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed outside a worker is quiet and works."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    upstream = Upstream()
    upstream.arrive(update(1))
    handled: list[int] = []
    inbox = Inbox(tmp_path / "bot.db")
    asyncio.run(
        asyncio.wait_for(consume(UpstreamSource(upstream), lambda item: handled.append(item.id), inbox=inbox), 60)
    )
    assert handled == [1]
