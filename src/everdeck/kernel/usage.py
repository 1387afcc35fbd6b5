"""What processes use: CPU time and resident memory, read from /proc in one pass.

See proc_pid_stat(5) fields 14, 15 (utime, stime) and 24 (rss).
"""

import os
from collections.abc import Iterable
from typing import Final, NamedTuple

from everdeck.errors import KernelError
from everdeck.kernel import identity as ids
from everdeck.model import ProcessInfo

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """The sum over some processes."""

    cpu_seconds: float
    rss_bytes: int


def usage_of(pids: Iterable[int]) -> Usage:
    """CPU time and memory of those that are still there."""
    ticks, pages = 0, 0
    for pid in pids:
        try:
            fields = _fields(pid)
        except (KernelError, IndexError, ValueError):
            continue
        ticks += int(fields[11]) + int(fields[12])
        pages += int(fields[21])
    return Usage(ticks / ids.CLOCK_TICKS, pages * _PAGE_BYTES)


def describe(pids: Iterable[int]) -> list[ProcessInfo]:
    """Each process that is still there, in the order of their pids."""
    found = []
    for pid in sorted(pids):
        try:
            stat = ids.read_stat(pid)
            rss = int(_fields(pid)[21]) * _PAGE_BYTES
        except (KernelError, IndexError, ValueError):
            continue
        found.append(ProcessInfo(pid, stat.ppid, ids.printable(stat.comm), ids.command_line(pid), stat.state, rss))
    return found


def _fields(pid: int) -> list[bytes]:
    raw = ids.read_proc(pid, "stat")
    return raw[raw.rfind(b")") + 1 :].split(None, 22)  # what stands behind the memory is nobody's question
