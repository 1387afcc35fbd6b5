"""The daemon with thousands of workers: what a page, ``ps``, ``/metrics`` and a reload cost, and the API in a crowd.

``python -m bench.crowd [--workers 5000] [--only ps reload …]``; at real-time priority on a busy machine: ``chrt -f 1``.

A real daemon is started, gets its workers in one go, and is asked as people ask it: by its command line in a process
of its own and over HTTP. Each figure stands beside its goal: the median of some rounds, with the CPU time of both
sides, which another load on the machine changes little. The API's latencies are those of an open loop: a request
counts from the moment at which it was due, whether or not the one before was answered.
"""

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.cgroups import remove_cgroups
from everdeck import Deck

SLEEPER = ["sleep", "100000"]
STREAMS = 200
REQUESTS_PER_SECOND = 100
RESTARTS_PER_SECOND = 2
CONNECTIONS = 25


@dataclass
class Daemon:
    """A running daemon, and how to ask it."""

    state: Path
    pid: int
    port: int
    token: str
    workers: int
    rows: list[tuple[str, str, str, bool | None]] = field(default_factory=list)

    def cli(self, *words: str) -> None:
        """One command as typed; what it prints goes to a file, as into a pager."""
        with tempfile.TemporaryFile() as printed:
            subprocess.run(
                [sys.executable, "-m", "everdeck.cli", "--state", str(self.state), *words],
                stdout=printed,
                check=True,
            )

    def get(self, path: str) -> bytes:
        """The body of one answer, over a connection of its own."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers={"authorization": f"Bearer {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - an address of this machine
            body: bytes = answer.read()
        return body

    def cpu_seconds(self) -> float:
        """What the daemon has used so far."""
        used = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            used += int((task / "schedstat").read_text().split()[0])  # in ns; /proc/PID/stat has ticks of 10 ms
        return used / 1e9

    def memory(self) -> dict[str, float]:
        """Its own memory in MB: proportional and resident."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        sizes = {line.split()[0]: int(line.split()[1]) / 1000 for line in lines[1:]}
        return {"pss": sizes["Pss:"], "rss": sizes["Rss:"]}

    def tell(self, work: str, measured: str, goal: str = "", *, met: bool | None = None) -> None:
        """One line of the table."""
        self.rows.append((work, measured, goal, met))
        verdict = "" if met is None else "yes" if met else "NO"
        print(f"| {work} | {measured} | {goal} | {verdict} |", flush=True)

    def timed(self, work: str, act: Callable[[], object], rounds: int, goal: float) -> None:
        """The median of some rounds beside its goal in seconds, with the CPU time that both sides used."""
        seconds, ours, theirs = [], [], []
        for _ in range(rounds):
            own, daemon, began = _used_here(), self.cpu_seconds(), time.perf_counter()
            act()
            seconds.append(time.perf_counter() - began)
            ours.append(_used_here() - own)
            theirs.append(self.cpu_seconds() - daemon)
        middle = statistics.median(seconds)
        self.tell(
            work,
            f"{_told(middle)} ({_told(min(seconds))} to {_told(max(seconds))}; "
            f"cpu: client {_told(statistics.median(ours))}, daemon {_told(statistics.median(theirs))})",
            f"≤ {_told(goal)}",
            met=middle <= goal,
        )


@contextmanager
def daemon_with(workers: int) -> Iterator[Daemon]:
    """A daemon that has just got its workers; everything is gone afterwards."""
    place = Path(tempfile.mkdtemp(prefix="everdeck-crowd-"))
    state, port = place / "state", _free_port()
    words = [sys.executable, "-m", "everdeck.cli", "--state", str(state), "up", "--listen", f"127.0.0.1:{port}"]
    log = (place / "daemon.log").open("wb")
    process = subprocess.Popen(words, cwd=place, stdout=log, stderr=log)
    try:
        wait_for(lambda: (state / "deck.sock").exists() and (state / "token").exists(), process)
        token = (state / "token").read_text().strip()
        daemon = Daemon(state, process.pid, port, token, workers)
        wait_for(lambda: _answers(daemon), process)
        began = time.perf_counter()
        with Deck(state) as deck:
            deck.start_many({name_of(number): SLEEPER for number in range(workers)})
            daemon.tell(f"start of {workers:,} through the daemon", _told(time.perf_counter() - began))
            try:
                yield daemon
            finally:
                began = time.perf_counter()
                deck.stop_all()
                daemon.tell("stop of all, each tree proven gone", _told(time.perf_counter() - began))
    finally:
        process.terminate()
        process.wait(60)
        remove_cgroups(state)
        shutil.rmtree(place)


def name_of(number: int) -> str:
    """A worker's name, in the order of numbers."""
    return f"user-{number:05d}"


def wait_for(fact: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    """Until that is so; a daemon that ended is an error."""
    deadline = time.monotonic() + 60
    while not fact():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the daemon did not come up: {process.poll()}")
        time.sleep(0.02)


def page(daemon: Daemon) -> None:
    """A page of fifty, in the middle and sorted by what has to be measured."""
    first = json.loads(daemon.get("/api/v1/workers?limit=50"))
    assert len(first["workers"]) == min(50, daemon.workers)  # noqa: S101 - else the figure means nothing
    daemon.timed("list page, `limit=50`", lambda: daemon.get("/api/v1/workers?limit=50"), 21, 0.02)
    after = f"/api/v1/workers?limit=50&cursor={first['next']}"
    daemon.timed("the page after it", lambda: daemon.get(after), 21, 0.02)
    daemon.timed("a page by cpu", lambda: daemon.get("/api/v1/workers?limit=50&sort=cpu&order=desc"), 21, 0.02)
    daemon.timed("a page of a search", lambda: daemon.get("/api/v1/workers?limit=50&q=-0123"), 21, 0.02)


def deck(daemon: Daemon) -> None:
    """The deck as a whole."""
    daemon.timed("`/api/v1/deck`", lambda: daemon.get("/api/v1/deck"), 21, 0.02)


def metrics(daemon: Daemon) -> None:
    """A scrape, as Prometheus does it every fifteen seconds."""
    daemon.get("/metrics")
    daemon.timed("`/metrics`", lambda: daemon.get("/metrics"), 7, 0.2)


def ps(daemon: Daemon) -> None:
    """The command, with the start of its interpreter."""
    daemon.timed("`everdeck ps`", lambda: daemon.cli("ps"), 7, 0.3)
    daemon.timed("`everdeck ps --json`", lambda: daemon.cli("ps", "--json"), 7, 0.3)


def reload(daemon: Daemon) -> None:
    """From the command to the answer of the next image."""
    daemon.timed("`everdeck reload`", lambda: daemon.cli("reload"), 3, 2.0)


def api(daemon: Daemon, seconds: float = 20.0) -> None:
    """Reads at a fixed rate beside many open streams of events, while workers are restarted."""
    before = daemon.cpu_seconds()
    latencies, heard, restarted = asyncio.run(_crowd(daemon, seconds))
    used = (daemon.cpu_seconds() - before) / seconds
    p50, p99 = (latencies[int(len(latencies) * share)] for share in (0.5, 0.99))
    daemon.tell(
        f"API, p99, {STREAMS} event streams, {REQUESTS_PER_SECOND} requests/s",
        f"{_told(p99)} (p50 {_told(p50)}, longest {_told(latencies[-1])}; {len(latencies)} requests, {restarted} "
        f"restarts, {heard} events heard by {STREAMS} streams, daemon {used:.0%} of a core)",
        "≤ 100 ms",
        met=p99 <= 0.1,
    )


def restart(daemon: Daemon) -> None:
    """All of them, as many at once as the command does by itself."""
    daemon.timed("`everdeck restart --all`", lambda: daemon.cli("restart", "--all"), 1, 60)


def memory(daemon: Daemon) -> None:
    """The daemon alone."""
    sizes = daemon.memory()
    daemon.tell("the daemon's memory", f"PSS {sizes['pss']:.1f} MB, RSS {sizes['rss']:.1f} MB")


PARTS: dict[str, Callable[[Daemon], None]] = {
    part.__name__: part for part in (memory, page, deck, metrics, ps, api, reload, restart)
}


async def _crowd(daemon: Daemon, seconds: float) -> tuple[list[float], int, int]:
    heard = 0
    latencies: list[float] = []
    loop = asyncio.get_running_loop()

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str) -> bytes:
        writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{daemon.port}\r\nauthorization: Bearer {daemon.token}\r\n"
            "content-length: 0\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 20"):
            raise SystemExit(f"{path}: {head.decode()}")
        return head

    async def read(reader: asyncio.StreamReader, head: bytes) -> None:
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))

    async def listen() -> None:
        nonlocal heard
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
        await ask(reader, writer, "GET", "/api/v1/events")
        listening.release()
        while chunk := await reader.read(65536):
            heard += chunk.count(b"\nid: ") + chunk.startswith(b"id: ")

    paths = ("/api/v1/workers?limit=50", "/api/v1/deck", "/api/v1/workers/{name}", "/api/v1/workers?limit=50&q={tail}")

    async def request(due: float, number: int) -> None:
        reader, writer = await free.get()
        name = name_of(number * 37 % daemon.workers)
        path = paths[number % len(paths)].format(name=name, tail=name[-3:])
        await read(reader, await ask(reader, writer, "GET", path))
        latencies.append(loop.time() - due)
        free.put_nowait((reader, writer))

    async def restarts() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
        done, began = 0, loop.time()
        while loop.time() < began + seconds:
            name = name_of(done % daemon.workers)
            await read(reader, await ask(reader, writer, "POST", f"/api/v1/workers/{name}/restart"))
            done += 1
            await asyncio.sleep(max(0.0, began + done / RESTARTS_PER_SECOND - loop.time()))
        return done

    listening = asyncio.Semaphore(0)
    free: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    streams = [asyncio.create_task(listen()) for _ in range(STREAMS)]
    for _ in range(STREAMS):
        await listening.acquire()
    for _ in range(CONNECTIONS):
        free.put_nowait(await asyncio.open_connection("127.0.0.1", daemon.port))
    restarting = asyncio.create_task(restarts())
    began = loop.time()
    requests = []
    for number in range(int(seconds * REQUESTS_PER_SECOND)):
        due = began + number / REQUESTS_PER_SECOND
        await asyncio.sleep(max(0.0, due - loop.time()))
        requests.append(asyncio.create_task(request(due, number)))
    await asyncio.gather(*requests)
    restarted = await restarting
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return sorted(latencies), heard, restarted


def _answers(daemon: Daemon) -> bool:
    try:
        return bool(daemon.get("/api/v1/deck"))
    except OSError:
        return False


def _free_port() -> int:
    import socket  # noqa: PLC0415 - only for this

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _used_here() -> float:
    """CPU time of this process and of the commands that it has run."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def _told(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.02 else f"{seconds * 1000:.0f} ms"


def main() -> int:
    """Run what was asked for; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=5000)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    asked = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed command is compiled once, not each time it is typed
    print(f"{asked.workers:,} workers; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| work | measured | goal | met |\n|---|---|---|---|")
    with daemon_with(asked.workers) as daemon:
        for part in asked.only:
            PARTS[part](daemon)
        memory(daemon)
    return 0 if all(met is not False for *_, met in daemon.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
