"""The keeper of health against real servers, real commands and real time: what it asks, and what it tells."""

import asyncio
import contextlib
import http.server
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everdeck.deck.health import HealthKeeper
from everdeck.kernel import identity as ids
from everdeck.model import Health

PATIENCE_SECONDS = 60
ENV = {"PATH": os.environ["PATH"], "EVERDECK_COOKIE": "test"}


class Told:
    """What the keeper told, in order, awaitable."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.keeper = HealthKeeper(
            self._note("ready"),
            self._note("unhealthy"),
            self._note("healthy"),
            self._note("status"),
            self._note("event"),
        )

    def _note(self, kind: str) -> Callable[..., None]:
        return lambda *facts: self.queue.put_nowait((kind, *facts))

    async def next(self) -> tuple[Any, ...]:
        """The next thing told; fails loudly when nothing is."""
        async with asyncio.timeout(30):
            return await self.queue.get()

    def watch(self, name: str, health: Health, *, already_ready: bool = False, port: int | None = None) -> None:
        """Watch, with a worker's environment and directory."""
        self.keeper.watch(name, health, port=port, env=ENV, cwd="/", already_ready=already_ready)


@contextlib.asynccontextmanager
async def keeping() -> AsyncIterator[Told]:
    """A keeper that is open, and closed with nothing left behind."""
    told = Told()
    told.keeper.open()
    try:
        yield told
    finally:
        await told.keeper.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left


def run(scenario: Callable[[Told], Awaitable[None]]) -> None:
    """Run a scenario in a loop of its own; descriptors are counted before and after."""

    async def whole() -> None:
        async with keeping() as told:
            await scenario(told)

    before = _descriptors()
    asyncio.run(whole())
    assert _descriptors() <= before


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers with the status that the test wants now."""

    status = 200

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(type(self).status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Say nothing."""


@pytest.fixture
def web() -> Iterator[tuple[type[Answers], int]]:
    """A real web server on loopback, and its port."""

    class Mine(Answers):
        pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Mine, server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def test_http_ready_ill_and_well_again(web: tuple[type[Answers], int]) -> None:
    """200 makes it ready, three times 500 in a row unhealthy, 204 well again; ``$PORT`` is the worker's port."""
    answers, port = web

    async def scenario(told: Told) -> None:
        health = Health(http="http://127.0.0.1:$PORT/healthz?deep=1", interval_seconds=0.02, failures=3)
        told.watch("alice", health, port=port)
        assert told.keeper.summary("alice") == "starting"
        assert await told.next() == ("ready", "alice")
        answers.status = 500
        kind, name, reason = await told.next()
        assert (kind, name) == ("unhealthy", "alice")
        assert reason == f"3 failed checks in a row: HTTP 500 from http://127.0.0.1:{port}/healthz?deep=1"
        assert told.keeper.summary("alice") == "unhealthy"
        answers.status = 204
        assert await told.next() == ("healthy", "alice")
        assert told.keeper.summary("alice") == "healthy"

    run(scenario)


@pytest.mark.parametrize("manner", ["deaf", "drips"])
def test_http_that_does_not_answer_in_time_has_failed(manner: str) -> None:
    """A server that accepts and says nothing, or a byte at a time for ever, costs the timeout and no more."""

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while manner == "drips":
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
            await asyncio.Event().wait()

    async def scenario(told: Told) -> None:
        connections: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.add(asyncio.ensure_future(serve(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        health = Health(http=f"http://127.0.0.1:{port}", interval_seconds=0.02, timeout_seconds=0.1, failures=1)
        told.watch("alice", health, already_ready=True)
        kind, _, reason = await told.next()
        assert kind == "unhealthy"
        assert "no answer within 0.1 s" in reason or "timed out" in reason
        await told.keeper.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        server.close()
        await server.wait_closed()

    run(scenario)


@pytest.mark.parametrize("where", [{"http": "http://a..b:80/"}, {"tcp": "a..b:80"}], ids=["http", "tcp"])
def test_a_name_that_cannot_be_looked_up_is_a_failed_check(where: dict[str, str]) -> None:
    """A name that cannot even be asked about is told like one that nobody knows."""

    async def scenario(told: Told) -> None:
        told.watch("alice", Health(**where, interval_seconds=0.01, failures=1), already_ready=True)  # type: ignore[arg-type]
        kind, _, reason = await told.next()
        assert kind == "unhealthy"
        assert "a..b" in reason

    run(scenario)


def test_a_resolver_that_does_not_answer_keeps_nobody_else_waiting(
    web: tuple[type[Answers], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of one worker's check hangs, again and again: the others are asked, and threads are free for others."""
    look_up, asked, over = socket.getaddrinfo, [], threading.Event()

    def hanging(host: str, *rest: Any, **options: Any) -> Any:
        if host == "gone.test" and not options.get("flags"):
            asked.append(host)
            over.wait(PATIENCE_SECONDS)
        return look_up(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)

    async def scenario(told: Told) -> None:
        often = {"interval_seconds": 0.001, "timeout_seconds": 0.01, "failures": 40}  # more than any pool has threads
        told.watch("web", Health(http="http://gone.test:80/", **often), already_ready=True)
        told.watch("port", Health(tcp="gone.test:80", **often), already_ready=True)
        reasons = sorted([await told.next() for _ in range(2)])
        assert [(kind, name) for kind, name, _ in reasons] == [("unhealthy", "port"), ("unhealthy", "web")]
        assert all("no answer within 0.01 s" in reason for _, _, reason in reasons)
        told.watch("fine", Health(http=f"http://localhost:{web[1]}/", timeout_seconds=PATIENCE_SECONDS))
        while (said := await told.next())[1] != "fine":
            pass
        assert said == ("ready", "fine")
        assert await asyncio.to_thread(lambda: "free") == "free"
        assert asked == ["gone.test"], "one thread for one name"

    try:
        run(scenario)
    finally:
        over.set()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_tcp(host: str) -> None:
    """A port that can be connected to is well; one that cannot is not."""
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
    try:
        listener = socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family)
    except OSError:
        pytest.skip("no IPv6 loopback")

    async def scenario(told: Told) -> None:
        port = listener.getsockname()[1]
        told.watch("alice", Health(tcp=f"{host}:$PORT", interval_seconds=0.02, failures=2), port=port)
        assert await told.next() == ("ready", "alice")
        listener.close()
        kind, _, reason = await told.next()
        assert kind == "unhealthy"
        assert "2 failed checks in a row: connect" in reason

    run(scenario)


def test_command(tmp_path: Path) -> None:
    """Exit code 0 is well; anything else is not, with the code and the first words it said."""
    flag = tmp_path / "well"
    flag.touch()

    async def scenario(told: Told) -> None:
        command = ("sh", "-c", f'test -e {flag} || {{ echo "$PORT is ill"; exit 3; }}')
        told.watch("alice", Health(command=command, interval_seconds=0.02, failures=1), port=4711)
        assert await told.next() == ("ready", "alice")
        flag.unlink()
        assert await told.next() == (
            "unhealthy",
            "alice",
            "1 failed checks in a row: sh: exit code 3: 4711 is ill",
        )

    run(scenario)


@pytest.mark.parametrize("end", ["timeout", "unwatch", "timeout below 6.9"])
def test_a_command_that_hangs_is_ended_with_what_it_forked(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timeout or not, nothing of a check's process group stays behind, whatever the kernel can do."""
    if "below" in end:
        monkeypatch.setattr(ids, "has_group_signal", lambda: False)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def scenario(told: Told) -> None:
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        command = ("sh", "-c", f"exec 9>{fifo}; sleep 60 & echo in >&9; wait")
        timeout = 60 if end == "unwatch" else 0.3
        told.watch("alice", Health(command=command, timeout_seconds=timeout, failures=1, interval_seconds=0.01))
        loop = asyncio.get_running_loop()
        word = asyncio.Event()
        loop.add_reader(reader, word.set)
        async with asyncio.timeout(30):
            await word.wait()
        loop.remove_reader(reader)
        assert os.read(reader, 100).startswith(b"in")
        if end == "unwatch":
            told.keeper.unwatch("alice")
        else:
            told.keeper.notified("alice", {"READY": "1"})  # from here on failures count
            assert (await told.next())[0] == "ready"
            assert (await told.next())[0] == "unhealthy"
        await told.keeper.close()
        # End-of-file: every process that carried the pipe's write end is gone.
        os.set_blocking(reader, True)
        async with asyncio.timeout(30):
            while await asyncio.to_thread(os.read, reader, 100):
                pass
        os.close(reader)

    run(scenario)


def test_a_program_that_does_not_exist_is_a_failed_check() -> None:
    """A check that cannot be run says so, and harms nobody."""

    async def scenario(told: Told) -> None:
        told.watch(
            "alice", Health(command=("/no/such/program",), failures=1, interval_seconds=0.01), already_ready=True
        )
        assert (await told.next())[:2] == ("unhealthy", "alice")

    run(scenario)


def test_ready_by_notify_then_the_checks_begin(web: tuple[type[Answers], int]) -> None:
    """With ``notify`` the worker's own word counts; it is not asked before, however well it would answer."""
    _, port = web

    async def scenario(told: Told) -> None:
        health = Health(notify=True, http=f"http://127.0.0.1:{port}/", interval_seconds=0.01, failures=1)
        told.watch("alice", health)
        told.keeper.notified("alice", {"STATUS": "loading"})
        assert await told.next() == ("status", "alice", "loading")
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert told.keeper.summary("alice") == "starting"
        told.keeper.notified("alice", {"READY": "1", "STATUS": "up"})
        assert await told.next() == ("status", "alice", "up")
        assert await told.next() == ("ready", "alice")

    run(scenario)


def test_a_start_that_takes_too_long_is_unhealthy_unless_it_asked_for_more_time() -> None:
    """The start timeout, and EXTEND_TIMEOUT_USEC which moves it."""

    async def scenario(told: Told) -> None:
        loop = asyncio.get_running_loop()
        for name in ("hasty", "patient"):
            told.watch(name, Health(notify=True, start_timeout_seconds=0.1))
        told.keeper.notified("patient", {"EXTEND_TIMEOUT_USEC": "400000"})
        began = loop.time()
        assert await told.next() == ("unhealthy", "hasty", "not ready after 0.1 s")
        assert told.keeper.summary("patient") == "starting"
        assert (await told.next())[:2] == ("unhealthy", "patient")
        assert loop.time() - began >= 0.39

    run(scenario)


def test_the_watchdog() -> None:
    """Pings keep it well; silence is told once; the next ping makes it well again; ``trigger`` does not wait."""

    async def scenario(told: Told) -> None:
        told.watch("alice", Health(watchdog_seconds=0.2))
        assert await told.next() == ("ready", "alice")
        loop = asyncio.get_running_loop()
        until = loop.time() + 0.5
        while loop.time() < until:
            told.keeper.notified("alice", {"WATCHDOG": "1"})
            await asyncio.sleep(0.01)
        assert told.keeper.summary("alice") == "healthy"
        assert await told.next() == ("unhealthy", "alice", "no watchdog ping for 0.2 s")
        told.keeper.notified("alice", {"WATCHDOG": "1"})
        assert await told.next() == ("healthy", "alice")
        told.keeper.notified("alice", {"WATCHDOG": "trigger"})
        assert (await told.next())[0] == "unhealthy"
        told.keeper.notified("alice", {"WATCHDOG": "1"})
        assert await told.next() == ("healthy", "alice")
        told.keeper.notified("alice", {"STOPPING": "1", "WATCHDOG": "trigger"})
        assert told.queue.empty()

    run(scenario)


def test_an_adopted_worker_is_watched_from_now_on() -> None:
    """A new owner does not hear READY=1 again, and gives the watchdog its whole time."""

    async def scenario(told: Told) -> None:
        told.watch("alice", Health(notify=True, watchdog_seconds=0.1), already_ready=True)
        assert told.keeper.summary("alice") == "healthy"
        assert await told.next() == ("unhealthy", "alice", "no watchdog ping for 0.1 s")

    run(scenario)


def test_status_and_events_of_a_watched_worker_are_passed_on() -> None:
    """Its own words reach the deck: the status cut to a line's length, an event if it is a JSON object."""

    async def scenario(told: Told) -> None:
        told.watch("bob", Health(notify=True))
        told.keeper.notified("bob", {"STATUS": "x" * 1000})
        assert await told.next() == ("status", "bob", "x" * 500)
        told.keeper.notified("bob", {"X_EVERDECK_EVENT": json.dumps({"dead": 7})})
        assert await told.next() == ("event", "bob", {"dead": 7})
        for nonsense in ("", "[1]", "{", "7"):
            told.keeper.notified("bob", {"X_EVERDECK_EVENT": nonsense})
        assert told.queue.empty()

    run(scenario)


def test_a_worker_without_health_costs_nothing() -> None:
    """Nothing is scheduled for it, its words are the deck's business, and its summary is None."""

    async def scenario(told: Told) -> None:
        told.keeper.notified("bob", {"STATUS": "up", "READY": "1", "WATCHDOG": "1"})
        assert told.queue.empty()
        assert told.keeper.summary("bob") is None
        assert len(asyncio.all_tasks()) == 1
        if sys.version_info < (3, 14):
            assert not asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]

    run(scenario)
