"""What each guarantee costs at the least: a bare ``Popen`` loop that takes on one duty of a start after another.

``python bench/ladder.py [--workers 300] [--rounds 5]``

Each rung is the loop below it plus one step, written as tightly as Python allows and without any of Everdeck's code,
so the last rung is the price at which a start with all guarantees could be had; what the deck takes above it is ours.
The rungs are taken in turn, round after round, and the median of the rounds is shown.
"""

import argparse
import fcntl
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.board import Board
from bench.build import build_programs
from bench.places import RUNS
from bench.plan import Plan, Worker, plan_for

_TABLE = """
CREATE TABLE workers (name TEXT PRIMARY KEY, spec TEXT, phase TEXT, cookie TEXT, pid INT, ticks INT, inode INT);
CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, worker TEXT, kind TEXT, detail TEXT);"""
_INTENT = "INSERT OR REPLACE INTO workers VALUES (?, ?, 'starting', ?, NULL, NULL, NULL)"
_OUTCOME = "UPDATE workers SET phase = 'running', pid = ?, ticks = ?, inode = ? WHERE name = ?"
_EVENT = "INSERT INTO events (at, worker, kind, detail) VALUES (?, ?, 'started', ?)"
_GROUP = 64
_ENVIRONMENT = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": "/"}
_SPEC = '{"command":["worker","argument"],"lifetime":"adoptable","restart":{"policy":"on-failure","max_crashes":5}}'


class Ladder:
    """One round: a fresh directory, a registry, and the processes that were started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self.registry = sqlite3.connect(directory / "registry.db", isolation_level=None)
        self.registry.execute("PRAGMA journal_mode = WAL")
        self.registry.execute("PRAGMA synchronous = NORMAL")
        self.registry.executescript(_TABLE)
        self.pidfds: list[int] = []

    def bare(self, worker: Worker) -> subprocess.Popen[bytes]:
        """Nothing but a process."""
        return subprocess.Popen(worker.command)

    def own_session(self, worker: Worker) -> subprocess.Popen[bytes]:
        """A session, a clean environment and a directory of its own."""
        return self._popen(worker, str(self.directory), self.null, ())

    def own_files(self, worker: Worker) -> subprocess.Popen[bytes]:
        """Its home with its directories, and a log that it writes itself."""
        home, log = self._home(worker)
        child = self._popen(worker, f"{home}/data", log, ())
        os.close(log)
        return child

    def locked(self, worker: Worker) -> subprocess.Popen[bytes]:
        """A lock that its whole tree carries: never a second copy."""
        home, log = self._home(worker)
        lock = self._lock(home)
        child = self._popen(worker, f"{home}/data", log, (lock,))
        os.close(log)
        os.close(lock)
        return child

    def identified(self, worker: Worker) -> subprocess.Popen[bytes]:
        """A pidfd and an identity: never a stranger."""
        child = self.locked(worker)
        self._identity(child.pid)
        return child

    def recorded(self, worker: Worker) -> subprocess.Popen[bytes]:
        """The intent committed before the fork, the outcome and its event after it: SIGKILL at any instruction."""
        home, log = self._home(worker)
        cookie = os.urandom(16).hex()
        self.registry.execute(_INTENT, (worker.name, _SPEC, cookie))
        lock = self._lock(home)
        child = self._popen(worker, f"{home}/data", log, (lock,), {"COOKIE": cookie})
        os.close(log)
        os.close(lock)
        ticks, inode = self._identity(child.pid)
        self.registry.execute("BEGIN IMMEDIATE")
        self.registry.execute(_OUTCOME, (child.pid, ticks, inode, worker.name))
        self.registry.execute(_EVENT, (time.time(), worker.name, f'{{"pid":{child.pid}}}'))
        self.registry.execute("COMMIT")
        return child

    def recorded_together(self, workers: list[Worker]) -> list[subprocess.Popen[bytes]]:
        """The same guarantee for a group: the intents of all in one commit, then all starts, then all outcomes."""
        children: list[subprocess.Popen[bytes]] = []
        for begin in range(0, len(workers), _GROUP):
            group = workers[begin : begin + _GROUP]
            places = [(worker, *self._home(worker), os.urandom(16).hex()) for worker in group]
            self.registry.execute("BEGIN IMMEDIATE")
            for worker, _, _, cookie in places:
                self.registry.execute(_INTENT, (worker.name, _SPEC, cookie))
            self.registry.execute("COMMIT")
            fresh: list[subprocess.Popen[bytes]] = []
            for worker, home, log, cookie in places:
                lock = self._lock(home)
                fresh.append(self._popen(worker, f"{home}/data", log, (lock,), {"COOKIE": cookie}))
                os.close(log)
                os.close(lock)
            identities = [self._identity(child.pid) for child in fresh]
            self.registry.execute("BEGIN IMMEDIATE")
            for worker, child, (ticks, inode) in zip(group, fresh, identities, strict=True):
                self.registry.execute(_OUTCOME, (child.pid, ticks, inode, worker.name))
                self.registry.execute(_EVENT, (time.time(), worker.name, f'{{"pid":{child.pid}}}'))
            self.registry.execute("COMMIT")
            children += fresh
        return children

    def close(self) -> None:
        """Let go of everything."""
        for fd in (*self.pidfds, self.null):
            os.close(fd)
        self.registry.close()

    def _popen(
        self, worker: Worker, cwd: str, log: int, keep: tuple[int, ...], more: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            worker.command,
            env=_ENVIRONMENT | (more or {}),
            cwd=cwd,
            stdin=self.null,
            stdout=log,
            stderr=log,
            pass_fds=keep,
            start_new_session=True,
        )

    def _home(self, worker: Worker) -> tuple[str, int]:
        home = f"{self.directory}/{worker.name}"
        for part in ("", "/log", "/data", "/secrets"):
            os.mkdir(home + part, 0o700)  # noqa: PTH102 - as tight as it can be
        return home, os.open(f"{home}/log/current", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _lock(self, home: str) -> int:
        lock = os.open(f"{home}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock

    def _identity(self, pid: int) -> tuple[int, int]:
        pidfd = os.pidfd_open(pid)
        self.pidfds.append(pidfd)
        stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        text = os.read(stat, 1024)
        os.close(stat)
        return int(text[text.rindex(b")") + 2 :].split()[19]), os.fstat(pidfd).st_ino


Rung = Callable[[Ladder, list[Worker]], list[subprocess.Popen[bytes]]]


def _each(start: Callable[[Ladder, Worker], subprocess.Popen[bytes]]) -> Rung:
    return lambda ladder, workers: [start(ladder, worker) for worker in workers]


RUNGS: list[tuple[str, Rung]] = [
    ("a bare `Popen` loop", _each(Ladder.bare)),
    ("+ session, environment and directory of its own", _each(Ladder.own_session)),
    ("+ its home (four directories) and a log file it writes itself", _each(Ladder.own_files)),
    ("+ a lock that its whole tree carries", _each(Ladder.locked)),
    ("+ pidfd and identity", _each(Ladder.identified)),
    ("+ intent committed before, outcome and event after", _each(Ladder.recorded)),
    ("the same, commits shared by 64, identities read after 64", Ladder.recorded_together),
]


def climb(rung: Rung, directory: Path, count: int) -> float:
    """Microseconds per start of one rung."""
    directory.mkdir()
    ladder = Ladder(directory)
    with Board(directory / "board", 4 * count) as board:
        plan: Plan = plan_for(directory, board.path, count)
        children: list[subprocess.Popen[bytes]] = []
        begin = time.perf_counter()
        try:
            children.extend(rung(ladder, plan.workers))
            took = time.perf_counter() - begin
            board.wait_for(count, 60)
        finally:
            for child in children:
                child.kill()
            for child in children:
                child.wait()
            ladder.close()
    return took / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="What each guarantee of a start costs at the least.")
    parser.add_argument("--workers", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    count, rounds = (50, 2) if asked.quick else (asked.workers, asked.rounds)
    build_programs()
    RUNS.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="", dir=RUNS))
    took: dict[str, list[float]] = {name: [] for name, _ in RUNGS}
    try:
        for number in range(rounds):
            for step, (name, rung) in enumerate(RUNGS):
                took[name].append(climb(rung, root / f"{number}-{step}", count))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    bare = statistics.median(took[RUNGS[0][0]])
    print(f"{'one start, with everything above it':66} {'µs':>6}  {'÷ bare':>6}")
    for name, values in took.items():
        middle = statistics.median(values)
        print(f"{name:66} {middle:6.0f}  {middle / bare:6.2f}")


if __name__ == "__main__":
    main()
