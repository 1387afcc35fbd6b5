"""Who still runs in a directory that a test made, and how to end it.

A process belongs to a directory when its worker directory (``EVERDECK_DIR`` beside ``EVERDECK_COOKIE``), its working
directory, or the command line of a Everdeck process says so. That finds workers, daemons, guardians and what they
forked, also when their parent is gone. Signals go through a pidfd that was opened before the process was looked at
again, so a reused pid is never signalled.
"""

import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Found:
    """A process under a directory, with the command it shows."""

    pid: int
    command: str


def processes_under(directory: Path) -> list[Found]:
    """The living processes that belong to ``directory``; never this process or one that started it."""
    ours = set(_line_of_descent(os.getpid()))
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [found for pid in pids if pid not in ours if (found := _look(pid, str(directory))) is not None]


def own_children() -> set[str]:
    """The children of this process, zombies included; compare before and after, for the test run may have its own."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def leaves(process: Found, seconds: float) -> bool:
    """Whether the process ends by itself within this time."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], seconds)[0])
    finally:
        os.close(pidfd)


def end_all_under(directory: Path, seconds: float = 20) -> list[Found]:
    """End everything that belongs to ``directory``, looking again until nothing is left; what had to be ended."""
    ended: list[Found] = []
    while found := processes_under(directory):
        for process in found:
            _kill(process, directory)
        for process in found:
            assert leaves(process, seconds), f"{process} is alive after SIGKILL"
        ended += found
    return ended


def _line_of_descent(pid: int) -> Iterator[int]:
    while pid > 0:
        yield pid
        stat = (Path("/proc") / str(pid) / "stat").read_text(errors="replace")
        pid = int(stat.rpartition(")")[2].split()[1])


def _look(pid: int, directory: str) -> Found | None:
    root = Path("/proc") / str(pid)
    try:
        environment = (root / "environ").read_bytes().split(b"\0")
        command = (root / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        cwd = (root / "cwd").readlink()
    except OSError:  # it left while we looked, is a zombie, or is not ours to read
        return None
    under = directory.encode() + b"/"
    by_cookie = any(line.startswith(b"EVERDECK_COOKIE=") for line in environment) and any(
        line.startswith(b"EVERDECK_DIR=" + under) for line in environment
    )
    by_place = cwd.is_relative_to(directory) or ("everdeck" in command and directory in command)
    return Found(pid, command or "(no command line)") if by_cookie or by_place else None


def _kill(process: Found, directory: Path) -> None:
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if _look(process.pid, str(directory)) is not None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
