"""What a satellite of each kind costs: latency, throughput, memory, and wake-ups while nothing happens.

    python bench/satellites.py [--messages 2000] [--idle 60] [KIND …]

Real servers on loopback: our own Bot API server, Dovecot and OpenSMTPD from Debian, hoodiecrow-imap from npm for IDLE
without Dovecot's own half second, HTTP. Latency is from the moment the other side has a message to the moment this
program holds it, one at a time. Throughput is a backlog until the last one is finished (smtp: until the last one is
accepted). A wake-up is a voluntary context switch of any thread of the satellite. As root, on a machine with nothing
else to do.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import httpx

from everdeck import AsyncDeck, Satellite, WorkerSpec
from everdeck.testing.telegram import TelegramServer
from support.sat_gmail import GmailLike
from support.sat_mail import Dovecot, Smtpd, a_mail

NAME = "measured"


@dataclass
class Account:
    """One account: the satellite, how a message gets to it, and how many it has sent."""

    spec: WorkerSpec
    deliver: Callable[[int], object] | None = None
    sent: Callable[[], int] | None = None


@contextlib.asynccontextmanager
async def telegram() -> AsyncIterator[Account]:
    with TelegramServer() as server:
        spec = Satellite.telegram(server.token, base_url=server.url, first_run="take")
        yield Account(spec, lambda number: server.say(str(number), chat_id=number + 1))


@contextlib.asynccontextmanager
async def gmail() -> AsyncIterator[Account]:
    with Dovecot() as server:
        place = {"host": "127.0.0.1", "port": server.port, "tls": "off", "first_run": "take"}
        spec = Satellite.gmail(server.user, password=server.password, **place)
        yield Account(spec, lambda number: server.deliver(a_mail(str(number))))


@contextlib.asynccontextmanager
async def gmail_idle() -> AsyncIterator[Account]:
    """A server that tells those who IDLE at once."""
    with GmailLike() as server:
        place = {"host": "127.0.0.1", "port": server.port, "tls": "off", "first_run": "take", "after": "keep"}
        spec = Satellite.gmail(server.user, password=server.password, **place)
        yield Account(spec, lambda number: server.deliver(a_mail(str(number)), number + 1))


@contextlib.asynccontextmanager
async def smtp() -> AsyncIterator[Account]:
    with Smtpd() as server:
        spec = Satellite.smtp("127.0.0.1", port=server.port, tls="off", sender="bob@example.org")
        yield Account(spec, sent=lambda: len(server.taken()))


@contextlib.asynccontextmanager
async def cron() -> AsyncIterator[Account]:
    yield Account(Satellite.cron("0 3 * * *"))


@contextlib.asynccontextmanager
async def webhook() -> AsyncIterator[Account]:
    yield Account(Satellite.webhook("/hook"), lambda number: number)


KINDS = {"telegram": telegram, "gmail": gmail, "gmail-idle": gmail_idle, "smtp": smtp, "cron": cron, "webhook": webhook}


async def measure(kind: str, messages: int, idle_seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="everdeck-bench-") as place:
        async with KINDS[kind]() as account, AsyncDeck(place) as deck:
            await deck.start(NAME, account.spec)
            await wait(lambda: connected(deck))
            facts = []
            if account.deliver is not None:
                deliver = account.deliver
                if kind == "webhook":
                    deliver = await poster(deck)
                spent = await latency(deck, deliver)
                facts.append(f"latency p50 {spent[len(spent) // 2]:.1f} ms, p95 {spent[int(len(spent) * 0.95)]:.1f} ms")
                facts.append(f"{await throughput(deck, deliver, messages):,.0f} messages/s in")
            if account.sent is not None:
                facts.append(f"{await sending(deck, account.sent, messages):,.0f} messages/s out")
            pid = (await deck.status(NAME)).pid
            facts.append(f"{pss_kb(pid) / 1024:.1f} MB PSS")
            await asyncio.sleep(20)  # kept connections are let go
            before = switches(pid)
            await asyncio.sleep(idle_seconds)
            facts.append(f"{(switches(pid) - before) / idle_seconds * 60:.0f} wake-ups/min")
            print(f"{kind:11} {'; '.join(facts)}", flush=True)


async def latency(deck: AsyncDeck, deliver: Callable[[int], object], count: int = 40) -> list[float]:
    """Milliseconds, sorted; each message comes when the last one is done and the satellite waits again."""
    spent = []
    async with deck.messages(NAME) as messages:
        for number in range(count + 1):
            began = time.perf_counter()
            await asyncio.to_thread(deliver, number)
            async with await anext(messages):
                spent.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(0.3)
    return sorted(spent[1:])


async def throughput(deck: AsyncDeck, deliver: Callable[[int], object], count: int) -> float:
    began = time.perf_counter()
    delivering = asyncio.to_thread(lambda: [deliver(number) for number in range(1000, 1000 + count)])
    task = asyncio.ensure_future(delivering)
    async with deck.messages(NAME) as messages:
        for _ in range(count):
            async with await anext(messages):
                pass
    spent = time.perf_counter() - began
    await task
    return count / spent


async def sending(deck: AsyncDeck, sent: Callable[[], int], count: int) -> float:
    began, before = time.perf_counter(), sent()
    for number in range(count):
        await deck.send(NAME, to=f"user-{number}@example.org", text=str(number))
    await wait(lambda: nothing_to_send(deck))
    spent = time.perf_counter() - began
    while sent() < before + count:  # noqa: ASYNC110 - the server's own delivery, which tells nobody
        await asyncio.sleep(0.05)
    return count / spent


async def poster(deck: AsyncDeck) -> Callable[[int], object]:
    port = (await deck.status(NAME)).port
    client = httpx.Client()
    return lambda number: client.post(f"http://127.0.0.1:{port}/hook", json={"n": number}).raise_for_status()


async def wait(fact: Callable[[], object]) -> None:
    deadline = time.monotonic() + 600
    while not await fact():  # type: ignore[misc]
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.02)


async def connected(deck: AsyncDeck) -> bool:
    return (await deck.feed(NAME)).connection == "connected"


async def nothing_to_send(deck: AsyncDeck) -> bool:
    return (await deck.feed(NAME)).to_send == 0


def switches(pid: int | None) -> int:
    """Voluntary context switches of all threads so far."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total


def pss_kb(pid: int | None) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", choices=[*KINDS, []], help=", ".join(KINDS))
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--idle", type=float, default=60.0, metavar="SECONDS")
    options = parser.parse_args()
    for kind in options.kinds or KINDS:
        asyncio.run(measure(kind, options.messages, options.idle))


if __name__ == "__main__":
    main()
