"""Dead processes that nobody waits for, when we are the one to whom the kernel gives them.

A process whose parent died becomes a child of PID 1 of its pid namespace, and stays a zombie until that reaps it
(pid_namespaces(7)). In a container PID 1 may be us. Our own children are known by the pidfds that we hold for them and
are reaped, with their exit codes, by whoever started them; everything else that is dead and stays dead is reaped here.

See proc_pid_stat(5) for the state, proc_pid_fdinfo(5) for the pid of a pidfd.
"""

import contextlib
import os
from pathlib import Path

from everdeck.errors import KernelError
from everdeck.kernel import identity as ids


def dead_strangers() -> set[int]:
    """Zombies among our children for whom we hold no pidfd."""
    own = _held_by_pidfd()
    found = set()
    for pid in _children():
        if pid not in own:
            with contextlib.suppress(KernelError):
                if ids.read_stat(pid).state == "Z":
                    found.add(pid)
    return found


def reap(pid: int) -> None:
    """Let it go; nothing if somebody else has."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def _children() -> list[int]:
    """Our children, by every thread of ours; without CONFIG_PROC_CHILDREN, by looking at everybody."""
    found = []
    try:
        for task in Path("/proc/self/task").iterdir():
            found += [int(word) for word in (task / "children").read_text(encoding="ascii").split()]
    except FileNotFoundError:
        for entry in os.listdir("/proc"):  # noqa: PTH208 - names are all we want
            if entry.isdigit():
                with contextlib.suppress(KernelError):
                    if ids.read_stat(int(entry)).ppid == os.getpid():
                        found.append(int(entry))
    return found


def _held_by_pidfd() -> set[int]:
    own = set()
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as above
        with contextlib.suppress(OSError, ValueError):
            if "pidfd" in os.readlink(f"/proc/self/fd/{entry}"):  # noqa: PTH115 - one system call per descriptor
                for line in Path(f"/proc/self/fdinfo/{entry}").read_text(encoding="ascii").splitlines():
                    if line.startswith("Pid:"):
                        own.add(int(line.removeprefix("Pid:")))
    return own
