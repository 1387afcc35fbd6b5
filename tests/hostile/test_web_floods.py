"""What one caller costs the others: connections, slow bytes, patterns and bombs."""

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck.server import serving
from everdeck.wire import frames, requests
from support.cli_daemon import PATIENCE_SECONDS
from support.web_served import Served, served_at

IDLE = 1100


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A daemon that may have 1,024 descriptors, with one worker that has printed a long line."""
    state = tmp_path_factory.mktemp("floods") / "state"
    with served_at(state, limit_descriptors=1024) as served:
        spec = {"command": ["sh", "-c", f"echo {'a' * 5000}b; exec sleep 1000"]}
        with served.client() as api:
            api.post("/api/v1/workers", json={"name": "alice", "spec": spec}).raise_for_status()
        yield served


def test_a_thousand_idle_connections_keep_nobody_from_working(served: Served) -> None:
    """More than there are descriptors: `ps`, a start and a restart are answered all the same."""
    with contextlib.ExitStack() as stack:
        for number in range(IDLE):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), PATIENCE_SECONDS))
            if number % 3 == 0:
                with contextlib.suppress(OSError):
                    connection.sendall(b"GET /api/v1/workers HTTP/1.1\r\nHo")
        assert [worker["name"] for worker in served.person.seen()["workers"]] == ["alice"]
        served.person.types("start", "late", "--", "sleep", "1000")
        served.person.types("restart", "alice")
        with served.client() as api:
            assert api.get("/api/v1/workers").status_code == 200
    served.person.types("rm", "late")


def test_a_caller_that_takes_every_place_at_the_decks_socket_keeps_nobody_out(served: Served) -> None:
    """Streams that never end, more than there are descriptors: the others are answered, by either door."""
    follow = frames.packed(frames.Ask(1, frames.raw(requests.Follow(0)), None))
    with contextlib.ExitStack() as stack:
        place = os.open(served.person.state, os.O_PATH)  # its name may be longer than an address
        stack.callback(os.close, place)
        for _ in range(IDLE):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            # So long it waits for its turn in the listener's queue, which a Python timeout would not do.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(PATIENCE_SECONDS), 0))
            connection.connect(f"/proc/self/fd/{place}/deck.sock")
            with contextlib.suppress(ConnectionError):  # it is cut off
                connection.sendall(follow)
        assert [worker["name"] for worker in served.person.seen()["workers"]] == ["alice"]
        served.person.types("restart", "alice")
        with served.client() as api:
            assert api.get("/api/v1/workers").status_code == 200


def test_an_expensive_pattern_takes_the_time_of_reading(served: Served) -> None:
    """One that would take Python's own matcher longer than the machine lasts."""
    with served.client() as api:
        began = time.monotonic()
        answer = api.get("/api/v1/workers/alice/logs", params={"grep": "(a+)+$", "lines": 10})
        assert answer.status_code == 200
        assert api.get("/healthz").status_code == 200
        assert time.monotonic() - began < PATIENCE_SECONDS
        for refused in ("(?=x)", r"(a)\1", "(a", "(((a{900}){900}){900})"):
            assert api.get("/api/v1/workers/alice/logs", params={"grep": refused}).status_code == 422, refused


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"name":' * 50_000, b'{"spec":{"labels":' + b'{"a":' * 20_000, b"9" * 500_000, b'"\xff\xfe"'],
    ids=["lists", "objects", "inside a field", "a number", "no text"],
)
def test_a_bomb_of_json_is_a_bad_request_without_a_traceback(served: Served, body: bytes) -> None:
    """Deep, long or not even text: 400, and the daemon's log says nothing."""
    log = served.person.state / "daemon.log"
    before = log.read_text()
    with served.client() as api:
        for path in ("/api/v1/workers", "/api/v1/bulk", "/api/v1/apply", "/api/v1/login"):
            answer = api.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, (path, answer.status_code, answer.text[:200])
            assert answer.headers["content-type"] == "application/problem+json"
    assert "Traceback" not in log.read_text()[len(before) :]


def test_escapes_of_a_request_do_not_reach_the_daemons_log(served: Served) -> None:
    """A terminal that shows the log shows text, not what a stranger sent to it."""
    with served.client() as api:
        api.get("/api/v1/workers/%1b%5d0;owned%07")
        api.post("/api/v1/workers", json={"name": "x\x1b[2J", "spec": {"command": ["\x1b]0;owned\x07"]}})
        api.post("/api/v1/workers", json={"name": "y", "spec": {"command": ["/no/such\x1b[31m\nfake line"]}})
        api.delete("/api/v1/workers/y")
    assert "\x1b" not in (served.person.state / "daemon.log").read_text()


def test_a_head_and_a_body_have_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no life: half a head, and half a body, end though they go on."""
    monkeypatch.setattr(serving, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(serving, "BODY_SECONDS", 0.5)

    async def app(scope: object, receive: object, send: object) -> None:
        while (await receive())["more_body"]:  # type: ignore[operator]
            pass

    async def trickle(port: int, head: bytes, byte: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        async with asyncio.timeout(PATIENCE_SECONDS):
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(byte)
                    await writer.drain()
                    await asyncio.wait({asyncio.ensure_future(reader.read(1))}, timeout=0.05)
        writer.close()

    async def scenario() -> None:
        front = serving.HttpFront(app)  # type: ignore[arg-type]
        _, port = await front.listen_tcp("127.0.0.1", 0)
        try:
            await trickle(port, b"GET / HTTP/1.1\r\nX: ", b"y")
            await trickle(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", b"y")
        finally:
            await front.close(drain_seconds=0.0)

    asyncio.run(scenario())
