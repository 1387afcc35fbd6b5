"""What a connection may cost: peers that stop reading, peers that say nothing, and a front that closes."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from everdeck.errors import DeckError
from everdeck.kernel import unixsocket
from everdeck.server import serving
from everdeck.statedir import HTTP_SOCKET
from support.cli_daemon import PATIENCE_SECONDS, unix_socket


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """An application that streams for ever."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await asyncio.sleep(0)


async def short(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers at once."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def becomes(front: serving.HttpFront, connections: int) -> None:
    """Wait until the front has so many connections."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while front.connections != connections:  # noqa: ASYNC110 - the front has no event for a count
            await asyncio.sleep(0.01)


REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_reader_that_stops_reading_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffer fills, the deadline passes, its connection is gone; the memory it held with it."""
    monkeypatch.setattr(serving, "STALLED_READER_SECONDS", 0.3)

    async def scenario() -> None:
        front = serving.HttpFront(endless)
        await front.listen_unix(tmp_path)
        try:
            with unix_socket(tmp_path) as deaf:
                deaf.sendall(REQUEST)
                await becomes(front, 1)
                await becomes(front, 0)
        finally:
            await front.close()

    asyncio.run(scenario())


def test_a_peer_that_says_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a request, and one with half a request, end at the deadline."""
    monkeypatch.setattr(serving, "HEAD_SECONDS", 0.3)

    async def scenario() -> None:
        front = serving.HttpFront(short)
        await front.listen_unix(tmp_path)
        try:
            with unix_socket(tmp_path), unix_socket(tmp_path) as half:
                half.sendall(REQUEST[:10])
                await becomes(front, 2)
                await becomes(front, 0)
        finally:
            await front.close()

    asyncio.run(scenario())


def test_closing_ends_streams_and_takes_the_socket_away(tmp_path: Path) -> None:
    """Nothing is left: no connection, no file, no descriptor."""
    before = len(list(Path("/proc/self/fd").iterdir()))

    async def scenario() -> None:
        front = serving.HttpFront(endless)
        await front.listen_unix(tmp_path)
        assert (tmp_path / HTTP_SOCKET).stat().st_mode & 0o777 == 0o600
        with unix_socket(tmp_path) as reader:
            reader.sendall(REQUEST)
            await becomes(front, 1)
            await front.close(drain_seconds=0.1)
            await becomes(front, 0)
        assert not (tmp_path / HTTP_SOCKET).exists()

    asyncio.run(scenario())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_socket_file_of_a_dead_daemon_is_replaced_and_a_later_ones_is_left(tmp_path: Path) -> None:
    """A living daemon is not replaced; a dead one's name is taken over; closing removes only what was bound here."""

    async def scenario() -> None:
        first, second = serving.HttpFront(short), serving.HttpFront(short)
        unixsocket.listen(tmp_path, HTTP_SOCKET).close()
        await first.listen_unix(tmp_path)
        with pytest.raises(DeckError, match=f"pid {os.getpid()}"):
            await second.listen_unix(tmp_path)
        (tmp_path / HTTP_SOCKET).unlink()
        await second.listen_unix(tmp_path)
        await first.close()
        assert (tmp_path / HTTP_SOCKET).exists()
        with unix_socket(tmp_path) as connection:
            connection.sendall(REQUEST)
            answer = await asyncio.to_thread(connection.recv, 4096)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"date: " in answer
        await second.close()
        assert not (tmp_path / HTTP_SOCKET).exists()

    asyncio.run(scenario())
