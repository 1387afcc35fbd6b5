"""Limits of a whole tree: the controllers of cgroup v2, where they can be enabled, and what they counted.

A controller is enabled in a directory for its children (``cgroup.subtree_control``), and only while no process sits in
the directory itself. systemd starts a service in exactly the directory that it delegates. So before the first limit the
owner moves itself, and whatever it started there, one level down into a leaf (:data:`OWNER`); with
``DelegateSubgroup=`` (systemd 254) it is born in that leaf.

Nothing is ever enabled while somebody sits there. ``memory`` would be refused, but ``cpu`` and ``pids`` are *threaded*
controllers: the kernel takes them and turns the directory into ``domain threaded``, after which no worker can be born
in a cgroup below it.

A directory with enabled controllers takes no process, not even from systemd: below 254 the next start of the unit fails
with 219/CGROUP. ``python -m everdeck.kernel.controllers release`` as ``ExecStopPost=`` disables them; the next owner
enables them again and writes the limits of the workers that it adopts anew.

See ``Documentation/admin-guide/cgroup-v2.rst``, "No Internal Process Constraint" and "Threads"; systemd's "Control
Group APIs and Delegation".
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from everdeck.errors import KernelError, LimitUnavailable
from everdeck.kernel import containment
from everdeck.kernel import identity as ids
from everdeck.model import Limits

OWNER: Final = containment.OWNER_LEAF
CONTROLLERS: Final = ("memory", "cpu", "pids")
_CPU_PERIOD_MICROSECONDS: Final = 100_000
_LOOKS: Final = 64


def needed(limits: Limits) -> bool:
    """Does any of these limits need a controller?"""
    return bool(_written(limits))


def apply(path: Path, limits: Limits) -> None:
    """Write memory, CPU and pids limits of a worker's cgroup, or refuse by name with :class:`LimitUnavailable`."""
    for field, controller, file, value in _written(limits):
        try:
            _enable(path.parent.parent, controller)
            _enable(path.parent, controller)
            (path / file).write_text(value, encoding="ascii")
        except OSError as err:
            why = err.args[0] if isinstance(err, _Refused) else f"{path / file}: {err.strerror}"
            raise LimitUnavailable(f"limits.{field}", getattr(limits, field), f"no such limit here: {why}") from err


def missing(home: Path, owner: int | None = None) -> dict[str, str]:
    """Which controllers an owner (we ourselves unless told) cannot have below this directory, and why."""
    without: dict[str, str] = {}
    for controller in CONTROLLERS:
        if controller in _words(home / "cgroup.subtree_control"):
            continue
        if (why := _why_not(home, controller, owner)) is not None:
            without[controller] = why
    return without


def how_to_delegate(*, root: bool, controller: str | None = None) -> str:
    """The command that gives a daemon a cgroup of its own, with what the machine has."""
    if controller is not None and not root:
        return (
            f"an administrator gives user managers the controller {controller!r} by `systemctl edit user@.service` "
            'with the lines "[Service]" and "Delegate=cpu cpuset io memory pids"; then log in again'
        )
    user = "" if root else " --user"
    return (
        f"run the daemon as a unit (everdeck export systemd{user}), "
        f"or once by hand: systemd-run{user} --scope -p Delegate=yes everdeck up"
    )


def oom_kills(cgroup: Path | str) -> int:
    """How many processes of it the kernel has killed for want of memory; 0 where nobody counts."""
    return _counted(cgroup, "oom_kill ")


def _counted(cgroup: Path | str, key: str) -> int:
    if not _counts_memory(os.path.dirname(cgroup)):  # noqa: PTH120 - raw calls: asked at every end
        return 0
    try:
        fd = os.open(f"{cgroup}/memory.events", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        for line in os.read(fd, 4096).decode("ascii").splitlines():
            if line.startswith(key):
                return int(line[len(key) :])
    except (OSError, ValueError):
        return 0
    finally:
        os.close(fd)
    return 0


@cache
def _counts_memory(parent: str) -> bool:
    """Does the kernel count the memory of each cgroup in this one? Only :func:`_enable` changes that."""
    return "memory" in _words(Path(parent, "cgroup.subtree_control"))


def release(top: Path) -> None:
    """Disable all controllers in a directory and below it, the deepest first: a parent's cannot go before a child's."""
    for directory, _, _ in os.walk(top, topdown=False):
        file = Path(directory, "cgroup.subtree_control")
        for controller in _words(file):
            with contextlib.suppress(OSError):
                file.write_text(f"-{controller}", encoding="ascii")
    _counts_memory.cache_clear()


# --- enabling ---------------------------------------------------------------------------------------------------


class _Refused(OSError):
    """Why a controller cannot be enabled, in words."""


def _enable(directory: Path, controller: str) -> None:
    if controller in _words(directory / "cgroup.subtree_control"):
        return
    if (why := _why_not(directory, controller)) is not None:
        raise _Refused(why)
    _make_room(directory)
    if _is_inner(directory) and containment.pids_in(directory):
        raise _Refused(f"processes that are not ours have come into {directory}")
    (directory / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")
    _counts_memory.cache_clear()


def _why_not(directory: Path, controller: str, owner: int | None = None) -> str | None:
    root = os.geteuid() == 0
    if controller not in _words(directory / "cgroup.controllers"):
        lacks = f"the cgroup v2 controller {controller!r} is not available in {directory}"
        managed = Path("/run/systemd/system").is_dir()
        return f"{lacks}; {how_to_delegate(root=root, controller=controller)}" if managed else lacks
    if not _is_inner(directory):
        return None
    strangers = [pid for pid in containment.pids_in(directory) or () if not _is_ours(pid, owner)]
    if strangers:
        who = ", ".join(f"pid {pid} ({ids.command_line(pid)[:40]})" for pid in strangers[:3])
        return (
            f"{directory} holds processes that are not the deck's ({who}), and the kernel limits only what is in a "
            f"cgroup of its own; {how_to_delegate(root=root)}"
        )
    return None


def _make_room(directory: Path) -> None:
    """Move ourselves and what we started out of the directory, into the leaf."""
    if not _is_inner(directory):
        return
    leaf = directory / OWNER
    for _ in range(_LOOKS):
        here = containment.pids_in(directory)
        if not here or not containment.make_cgroup(leaf):
            return
        for pid in here:
            if _is_ours(pid):
                containment.enter_cgroup(leaf, pid)


def _is_ours(pid: int, owner: int | None = None) -> bool:
    """Is it the owner (we ourselves unless told), or does it descend from it? Only these are moved."""
    own = owner or os.getpid()
    with contextlib.suppress(KernelError):
        while pid > 1:
            if pid == own:
                return True
            pid = ids.read_stat(pid).ppid
    return pid == own


def _is_inner(directory: Path) -> bool:
    """Does the rule against inner processes hold here? The root of the machine's hierarchy is exempt."""
    return (directory / "cgroup.type").exists()


def _words(file: Path) -> Sequence[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:
        return ()


def _written(limits: Limits) -> list[tuple[str, str, str, str]]:
    """What is written where: field, controller, file, value."""
    wanted: list[tuple[str, str, str, str]] = []
    if limits.memory_bytes is not None:
        wanted.append(("memory_bytes", "memory", "memory.max", str(limits.memory_bytes)))
    if limits.cpu_percent is not None:
        quota = max(1000, int(limits.cpu_percent / 100 * _CPU_PERIOD_MICROSECONDS))
        wanted.append(("cpu_percent", "cpu", "cpu.max", f"{quota} {_CPU_PERIOD_MICROSECONDS}"))
    if limits.pids is not None:
        wanted.append(("pids", "pids", "pids.max", str(limits.pids)))
    return wanted


if __name__ == "__main__":  # ExecStopPost= of the exported unit
    if sys.argv[1:] != ["release"]:
        sys.exit("usage: python -m everdeck.kernel.controllers release")
    own = containment.own_cgroup()
    if own is not None:
        # systemd runs what comes before and after a service in a group beside its main process.
        release(own.parent if own.name in {".control", OWNER} else own)
