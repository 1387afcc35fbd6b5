"""How fast a durable bot is beside a stock one, in every mode of both libraries, and how much memory a backlog takes.

    python bench/feed/throughput.py [--quick] [--turns 3] [--only MODE …] [--steady] [--skip speed|latency|memory …]

The handlers do nothing, so all that is measured is the library and the feed. Stock and durable take turns against the
same server, which runs in a process of its own; each turn's pair is compared by itself, by the clock and by the bot's
CPU time, and the median of the ratios counts: a busy machine is busy for both. The share of a core that the server used
beside the stock bot is printed too: near 1 it would be the server's speed that is compared. Wanted: at least 0.8 of
stock, a p50 latency of at most 3 ms more, and less than 200 MB at a backlog of 60,000.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from everdeck.testing.telegram import new_token, text_update

BOT = Path(__file__).with_name("noop_bot.py")
CONNECTIONS = 40  # as many as Telegram opens to a webhook unless told otherwise
BACKLOG = 60_000
MOST_BYTES = 200_000_000
MOST_MORE_MS = 3.0
PATIENCE = 300.0


@dataclass(frozen=True)
class Mode:
    """A library as people run it, and how many updates fill some seconds of it."""

    library: str
    name: str
    options: tuple[str, ...] = ()
    durable_options: tuple[str, ...] = ()
    count: int = 20_000
    chats: int = 1_000
    goal: float | None = 0.8
    webhook: bool = False


MODES = (
    Mode("ptb", "polling, one at a time"),
    Mode("ptb", "concurrent_updates(256)", ("--at-once", "256")),
    Mode("ptb", 'concurrent_updates(256), order="chat"', ("--at-once", "256"), ("--order", "chat")),
    Mode("ptb", "webhook", ("--webhook",), count=8_000, webhook=True),
    Mode("ptb", "polling, persistence (stock: a pickle each 60 s)", ("--states",), count=8_000, goal=None),
    Mode("aiogram", "polling"),
    Mode("aiogram", 'polling, order="chat"', (), ("--order", "chat")),
    Mode("aiogram", "handle_as_tasks=False", ("--one-by-one",)),
    Mode("aiogram", "tasks_concurrency_limit=64", ("--at-once", "64")),
    Mode("aiogram", "webhook", ("--webhook",), count=8_000, webhook=True),
    Mode("aiogram", "polling, a state per update (stock: in memory)", ("--states",), count=8_000, goal=None),
)
PLAIN = (MODES[0], MODES[5])


@dataclass(frozen=True)
class Speed:
    """One run: updates per second, microseconds of the bot's CPU per update, and the server's share of a core."""

    per_second: float
    cpu_us: float
    server_share: float


class Server:
    """The Telegram of these bots, in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "everdeck.testing.telegram", "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.url = _line_of(self._process).split()[2]
        self._times = psutil.Process(self._process.pid).cpu_times

    def push(self, token: str, updates: list[dict[str, Any]]) -> None:
        """Queue updates."""
        for begin in range(0, len(updates), 10_000):
            body = json.dumps(updates[begin : begin + 10_000]).encode()
            self._ask(f"/control/updates?token={token}", body)

    def pending(self, token: str) -> int:
        """How many updates wait there."""
        return len(self._ask(f"/control/bots/{token.partition(':')[0]}")["pending"])

    def cpu_seconds(self) -> float:
        """What it has used so far."""
        times = self._times()
        return float(times.user + times.system)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        asked = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})  # noqa: S310 - ours
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:  # noqa: S310 - as above
            return json.load(answer)


class Bot:
    """One bot in its own process: what it says, line by line."""

    def __init__(self, mode: Mode, server: Server, token: str, directory: Path, *options: str, durable: bool) -> None:
        command = [sys.executable, str(BOT), mode.library, "--url", server.url, "--token", token, *mode.options]
        if durable:
            command += ["--db", str(directory / "bot.db"), *mode.durable_options]
        command += ["--pickle", str(directory / "pickle"), "--port", str(free_port()), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def says(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """The next line."""
        return dict(json.loads(_line_of(self._process, seconds)))

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def _line_of(process: "subprocess.Popen[bytes]", seconds: float = PATIENCE) -> str:
    """The next line that it prints. Read byte by byte: what comes after it stays in the pipe."""
    stream: Any = process.stdout
    ready, _, _ = select.select([stream], [], [], seconds)
    line = b""
    while ready and not line.endswith(b"\n"):
        added = os.read(stream.fileno(), 1)
        if not added:
            break
        line += added
    if not line:
        raise TimeoutError(f"the program says nothing (exit code {process.poll()})")
    return line.decode()


@contextlib.contextmanager
def running(mode: Mode, server: Server, token: str, *options: str, durable: bool) -> Iterator[Bot]:
    """A bot, until the block ends."""
    with tempfile.TemporaryDirectory() as directory:
        bot = Bot(mode, server, token, Path(directory), *options, durable=durable)
        try:
            yield bot
        finally:
            bot.close()


# --- speed ------------------------------------------------------------------------------------------------------------


def speed_of(mode: Mode, server: Server, *, durable: bool) -> Speed:
    """One run: from the first handler to the last."""
    token, count = new_token(), mode.count
    updates = [text_update("work", chat_id=1 + number % mode.chats) for number in range(count)]
    if not mode.webhook:
        server.push(token, updates)
    with running(mode, server, token, "--count", str(count), durable=durable) as bot:
        if mode.webhook:
            asyncio.run(post(bot.says()["port"], updates))
        bot.says()
        before, began = server.cpu_seconds(), time.monotonic()
        told = bot.says()
        # A webhook is not served by the server.
        share = 0.0 if mode.webhook else (server.cpu_seconds() - before) / (time.monotonic() - began)
        return Speed(told["count"] / told["seconds"], told["cpu"] / told["count"] * 1e6, share)


async def post(port: int, updates: list[dict[str, Any]]) -> None:
    """Bring these updates to a webhook, as Telegram does: each connection waits for the answer before the next."""
    left = iter([json.dumps({"update_id": number} | update).encode() for number, update in enumerate(updates, 1)])
    head = "POST /hook HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"

    async def connection() -> None:
        reader, writer = await patient_connection(port)
        for body in left:
            writer.write(head.format(len(body)).encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in answer.partition(b"\r\n")[0]:
                raise RuntimeError(answer.decode())
            length = int(answer.lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(connection())


async def patient_connection(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection, as soon as somebody listens there."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# --- latency ----------------------------------------------------------------------------------------------------------


def latency_of(mode: Mode, server: Server, messages: int, *, durable: bool) -> float:
    """From a message to an idle bot until its handler begins: the median, in seconds."""
    token = new_token()
    with running(mode, server, token, "--latency", durable=durable) as bot:
        waits = []
        for _ in range(messages + 5):  # the first ones meet a bot that has not warmed up
            server.push(token, [text_update(str(time.time_ns()), chat_id=random.randrange(1, 100))])
            told = bot.says()
            waits.append(told["seconds"] if "seconds" in told else bot.says()["seconds"])
            time.sleep(random.uniform(0.03, 0.06))
    return statistics.median(waits[5:])


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Resident bytes: at the first message, the most at the backlog, the most until all were handled."""

    first: int
    backlog: int
    handled: int


def sizes_of(mode: Mode, server: Server, chats: int, *, durable: bool) -> Sizes:
    """One run over a backlog. Its handlers wait until the bot has taken what it can, then all of it is handled."""
    token = new_token()
    server.push(token, [text_update("first", chat_id=1)])
    count = str(BACKLOG + 1)
    with running(mode, server, token, "--hold", "--count", count, durable=durable) as bot:
        bot.says()
        first = resident(bot.pid)
        server.push(token, [text_update("work", chat_id=1 + number % chats) for number in range(BACKLOG)])
        left = [server.pending(token)]

        def has_taken_what_it_wants() -> bool:
            time.sleep(1.0)
            left.append(server.pending(token))
            return left[-1] < BACKLOG and left[-1] == left[-2]

        backlog = most_resident(bot.pid, until=has_taken_what_it_wants)
        os.kill(bot.pid, signal.SIGUSR1)
        handled = most_resident(bot.pid, until=lambda: is_told(bot))
        return Sizes(first, backlog, handled)


def resident(pid: int) -> int:
    """Of a process, its bytes in memory."""
    return int(psutil.Process(pid).memory_info().rss)


def most_resident(pid: int, *, until: Any) -> int:
    """The most that was seen until that holds; its end is looked at too."""
    most, deadline = 0, time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        most = max(most, resident(pid))
        if until():
            return max(most, resident(pid))
    raise TimeoutError("still not quiet")


def is_told(bot: Bot) -> bool:
    """Has it said that all were handled?"""
    try:
        return "count" in bot.says(0.02)
    except TimeoutError:
        return False


# --- the tables -------------------------------------------------------------------------------------------------------


def speeds(server: Server, modes: list[Mode], turns: int) -> bool:
    """Print the first table; was something wanted not reached?"""
    missed = False
    print("| library | mode | stock, updates/s | durable | durable / stock (lowest turn) ", end="")
    print("| CPU per update, stock and durable | the same by CPU | server's share of a core |")
    print("|---|---|---|---|---|---|---|---|")
    for mode in modes:
        pairs = [(speed_of(mode, server, durable=False), speed_of(mode, server, durable=True)) for _ in range(turns)]
        clock = [ours.per_second / stock.per_second for stock, ours in pairs]
        cpu = [stock.cpu_us / ours.cpu_us for stock, ours in pairs]
        stock, ours = ([pair[which] for pair in pairs] for which in (0, 1))
        missed |= mode.goal is not None and statistics.median(clock) < mode.goal
        cells = [
            mode.library,
            mode.name,
            *(f"{statistics.median(one.per_second for one in some):,.0f}" for some in (stock, ours)),
            f"{statistics.median(clock):.2f} ({min(clock):.2f})",
            " and ".join(f"{statistics.median(one.cpu_us for one in some):.0f} µs" for some in (stock, ours)),
            f"{statistics.median(cpu):.2f}",
            "–" if mode.webhook else f"{statistics.median(one.server_share for one in stock):.2f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
    return missed


def latencies(server: Server, modes: list[Mode], turns: int, messages: int) -> bool:
    """Print the second table."""
    missed = False
    print("\n| library | p50 from message to handler, stock | durable | more |\n|---|---|---|---|")
    for mode in modes:
        pairs = [
            tuple(1000 * latency_of(mode, server, messages, durable=durable) for durable in (False, True))
            for _ in range(turns)
        ]
        stock, ours = (statistics.median(pair[which] for pair in pairs) for which in (0, 1))
        more = statistics.median(ours - stock for stock, ours in pairs)
        missed |= more > MOST_MORE_MS
        print(f"| {mode.library} | {stock:.1f} ms | {ours:.1f} ms | {more:+.1f} ms |", flush=True)
    return missed


def memories(server: Server, modes: list[Mode]) -> bool:
    """Print the third table."""
    missed = False
    print(f"\n| library | chats | bot | first message | {BACKLOG:,} waiting | all handled |\n|---|---|---|---|---|---|")
    for mode in modes:
        for chats in (100, BACKLOG):
            for durable in (False, True):
                sizes = sizes_of(mode, server, chats, durable=durable)
                missed |= durable and max(sizes.backlog, sizes.handled) >= MOST_BYTES
                seen = " | ".join(f"{size / 1e6:,.0f} MB" for size in (sizes.first, sizes.backlog, sizes.handled))
                print(f"| {mode.library} | {chats:,} | {'durable' if durable else 'stock'} | {seen} |", flush=True)
    return missed


def main() -> int:
    """Print the tables; 1 if something wanted was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn each, numbers are rough")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], help="modes whose library and name contain one of these")
    parser.add_argument("--skip", nargs="+", default=[], choices=["speed", "latency", "memory"])
    parser.add_argument("--steady", action="store_true", help="real-time priority for all, on a machine that is shared")
    given = parser.parse_args()
    if given.steady:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    turns = 1 if given.quick else given.turns

    def chosen(modes: tuple[Mode, ...]) -> list[Mode]:
        return [one for one in modes if not given.only or any(a in f"{one.library} {one.name}" for a in given.only)]

    server, missed = Server(), False
    try:
        if "speed" not in given.skip:
            missed |= speeds(server, chosen(MODES), turns)
        if "latency" not in given.skip:
            missed |= latencies(server, chosen(PLAIN), turns, 20 if given.quick else 100)
        if "memory" not in given.skip:
            missed |= memories(server, chosen(PLAIN))
    finally:
        server.close()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
