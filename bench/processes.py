"""What the kernel says about processes of this run: who descends from whom, memory, CPU time, context switches.

Everything here reads ``/proc`` and is called only while no clock runs.
"""

import os
import select
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def descendants(roots: Iterable[int]) -> set[int]:
    """The given processes and everything below them that is alive."""
    children: dict[int, list[int]] = {}
    for item in Path("/proc").iterdir():
        if item.name.isdigit() and (stat := _stat(int(item.name))) is not None and stat[0] != "Z":
            children.setdefault(int(stat[1]), []).append(int(item.name))
    found: set[int] = set()
    waiting = [pid for pid in roots if alive(pid)]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, []))
    return found


def alive(pid: int) -> bool:
    """Whether a process of that pid runs; a zombie does not."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def runs_order(pid: int, order: str) -> bool:
    """Whether that pid is alive and still is the worker with this order (its argument or its $STAMP)."""
    if not alive(pid):
        return False
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
        return order.encode() in arguments or order.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a set of processes: their fair share of all pages, and what only they hold."""

    pss: int
    private: int


def memory_of(pids: Iterable[int]) -> Memory:
    """The sum over some processes (``smaps_rollup``, kernel 4.14)."""
    pss = private = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        for line in text.splitlines():
            field, _, rest = line.partition(":")
            if field == "Pss":
                pss += int(rest.split()[0]) * 1024
            elif field in {"Private_Clean", "Private_Dirty"}:
                private += int(rest.split()[0]) * 1024
    return Memory(pss, private)


@dataclass(frozen=True, slots=True)
class Activity:
    """What a set of processes did so far: times it was switched in, and CPU time."""

    switches: int
    cpu_seconds: float

    def since(self, earlier: "Activity") -> "Activity":
        """The difference of two looks."""
        return Activity(self.switches - earlier.switches, self.cpu_seconds - earlier.cpu_seconds)


def activity_of(pids: Iterable[int]) -> Activity:
    """The sum over all threads of some processes."""
    switches, nanoseconds = 0, 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                status = (task / "status").read_text()
                nanoseconds += int((task / "schedstat").read_text().split()[0])
            except OSError:
                continue
            for line in status.splitlines():
                if "ctxt_switches" in line:
                    switches += int(line.split()[1])
    return Activity(switches, nanoseconds / 1e9)


class Watch:
    """Pidfds of some processes, opened before the clock starts: waiting for their end costs no look into /proc."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._epoll = select.epoll()
        self._open: set[int] = set()
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            self._open.add(fd)
            self._epoll.register(fd, select.EPOLLIN)

    @property
    def left(self) -> int:
        """How many still run, as far as was waited for."""
        return len(self._open)

    def wait(self, timeout_seconds: float) -> int:
        """Wait until all have ended; the monotonic time in ns at which the last end was seen."""
        deadline = time.monotonic() + timeout_seconds
        while self._open and (left := deadline - time.monotonic()) > 0:
            for fd, _ in self._epoll.poll(left, maxevents=1024):
                self._epoll.unregister(fd)
                self._open.discard(fd)
                os.close(fd)
        return time.monotonic_ns()

    def close(self) -> None:
        """Give the descriptors back."""
        for fd in self._open:
            os.close(fd)
        self._open.clear()
        self._epoll.close()


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rfind(")") + 2 :].split()
