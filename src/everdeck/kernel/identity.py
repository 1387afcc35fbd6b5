"""Who a process is, beyond its pid.

A pid is reused once its process is reaped, so a pid read from disk may name a stranger. An identity is
(boot id, pid, start ticks) and, since Linux 6.9, the inode of its pidfd, which no other process of this boot
will ever have. Open the pidfd first and compare afterwards: from then on the pidfd cannot come to mean another
process, so a signal sent through it cannot reach a stranger.

There is no wall clock in here: start ticks count from boot, and a step of the clock disowns nobody.

See pidfd_open(2), pidfd_send_signal(2), proc_pid_stat(5) field 22.
"""

import contextlib
import errno
import os
import select
import signal
from dataclasses import dataclass
from enum import Enum
from functools import cache
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Final

from everdeck.errors import KernelError, NotPermitted, ProcessGone, ResourceExhausted
from everdeck.model import Identity

CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PIDFD_SIGNAL_PROCESS_GROUP: Final = 1 << 2
_DEAD_STATES: Final = frozenset("ZXx")


class Answer(Enum):
    """Is the process that was meant alive under its pid? Unknown is not proof of death."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of ``/proc/PID/stat`` that tell processes apart and together."""

    pid: int
    comm: str
    state: str
    ppid: int
    pgrp: int
    session: int
    start_ticks: int

    @property
    def dead(self) -> bool:
        """A zombie has ended; only its parent has not looked yet."""
        return self.state in _DEAD_STATES


@cache
def boot_id() -> str:
    """The kernel's random name of this boot.

    A container may have no ``/proc/sys``. Its pid namespace and the start of its PID 1 serve as well: processes of an
    earlier container are as gone as those of an earlier boot, and both names are another one after a boot.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123 - kernel files are read as files
            return file.read().strip()
    except OSError:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - a kernel file
        return f"pid-namespace-{namespace}-{read_stat(1).start_ticks}"


def boottime() -> float:
    """Seconds since boot, suspend included: the clock that start ticks are read from."""
    return clock_gettime(CLOCK_BOOTTIME)


def parse_stat(raw: bytes) -> Stat:
    """Read one ``/proc/PID/stat``.

    The name in the second field may hold spaces, ``)`` and newlines, so it ends at the *last* ``)``.
    """
    opening, closing = raw.find(b"("), raw.rfind(b")")
    if opening < 0 or closing < opening:
        raise ValueError(f"not a stat line: {raw[:80]!r}")
    rest = raw[closing + 1 :].split()
    return Stat(
        pid=int(raw[:opening]),
        comm=raw[opening + 1 : closing].decode("utf-8", "replace"),
        state=rest[0].decode("ascii"),
        ppid=int(rest[1]),
        pgrp=int(rest[2]),
        session=int(rest[3]),
        start_ticks=int(rest[19]),
    )


def read_stat(pid: int) -> Stat:
    """The stat line of a pid, whoever has it now; :class:`ProcessGone` if nobody has."""
    try:
        return parse_stat(read_proc(pid, "stat"))
    except ValueError as err:  # a half-torn-down process can give an empty file
        raise ProcessGone(f"pid {pid} has ended") from err


def read_proc(pid: int, name: str) -> bytes:
    """The content of ``/proc/PID/name``; raw reads, because a file object costs more than the system calls."""
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as err:
        raise _translated(err, pid, f"open /proc/{pid}/{name}") from err
    try:
        content = os.read(fd, 4096)
        if len(content) == 4096:  # noqa: PLR2004 - the buffer above
            while more := os.read(fd, 65536):
                content += more
    except OSError as err:
        raise _translated(err, pid, f"read /proc/{pid}/{name}") from err
    else:
        return content
    finally:
        os.close(fd)


def require_pidfds() -> None:
    """Refuse now, before anything runs, where the kernel or a seccomp profile does not let us hold on to a process.

    Without pidfds nothing that we start could be watched or ended for certain.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as err:
        if err.errno not in {errno.EPERM, errno.EACCES, errno.ENOSYS}:
            raise _translated(err, os.getpid(), "pidfd_open") from err
        raise NotPermitted(
            f"pidfd_open is refused here ({errno.errorcode[err.errno]}), and nothing can be supervised without it: "
            f"an old seccomp profile of a container forbids it (update the container runtime, or allow pidfd_open and "
            f"pidfd_send_signal in the profile), or the kernel is older than 5.3"
        ) from err


def open_pidfd(pid: int) -> int:
    """A pidfd for whoever has this pid now. Compare before you trust it."""
    try:
        return os.pidfd_open(pid)
    except OSError as err:
        raise _translated(err, pid, "pidfd_open") from err


def identity_of(pidfd: int, pid: int) -> Identity:
    """The identity of the process behind ``pidfd``; raises :class:`ProcessGone` if it has been reaped.

    The pidfd was opened first. If the process had been reaped and its pid taken by a stranger between the
    opening and the reading of stat, the pidfd would be readable: so look at the pidfd once more afterwards.
    """
    stat = read_stat(pid)
    if is_readable(pidfd) and not stat.dead:
        raise ProcessGone(f"pid {pid} was taken by another process")
    return Identity(boot_id(), pid, stat.start_ticks, pidfd_inode(pidfd))


def answer(identity: Identity) -> Answer:
    """Is that process alive? A zombie has ended, so it counts as different."""
    try:
        os.close(open_verified(identity))
    except ProcessGone:
        return Answer.DIFFERENT
    except KernelError:
        return Answer.UNKNOWN
    return Answer.SAME


def open_verified(identity: Identity, *, by_inode: bool = False) -> int:
    """A pidfd that is proven to mean ``identity``, alive when it was compared.

    Whoever has the identity from the living owner may do with the inode, where there is one, and save the kernel the
    work of a stat line, which is most of what a comparison costs.
    Raises :class:`ProcessGone` when it ended (a zombie too) or its pid belongs to a stranger, and
    :class:`NotPermitted` when the kernel does not let us compare: then we know nothing and signal nobody.
    """
    if identity.boot_id != boot_id():
        raise ProcessGone(f"pid {identity.pid} lived before this boot")
    pidfd = open_pidfd(identity.pid)
    try:
        _verify(identity, pidfd, by_inode=by_inode)
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


def is_same(identity: Identity, pidfd: int) -> bool:
    """Does the pidfd, opened for the identity's pid, mean that very process, alive or a zombie?

    Ticks are hundredths of a second: a pid that is reused within one tick differs only by its inode.
    """
    inode = pidfd_inode(pidfd)
    if identity.boot_id != boot_id() or (identity.pidfd_inode is not None and identity.pidfd_inode != inode):
        return False
    try:
        return read_stat(identity.pid).start_ticks == identity.start_ticks
    except KernelError:
        return False


def _verify(identity: Identity, pidfd: int, *, by_inode: bool) -> None:
    inode = pidfd_inode(pidfd)
    if identity.pidfd_inode is not None and inode is not None and identity.pidfd_inode != inode:
        raise ProcessGone(f"pid {identity.pid} belongs to another process now")
    if is_readable(pidfd):
        raise ProcessGone(f"pid {identity.pid} has ended")
    if by_inode and identity.pidfd_inode is not None and inode is not None:
        return
    try:
        stat = read_stat(identity.pid)
    except ProcessGone:
        if is_readable(pidfd):
            raise
        # Alive by its pidfd, invisible in /proc: mounted with hidepid, or of another pid namespace.
        raise NotPermitted(f"pid {identity.pid} is hidden from us in /proc") from None
    if stat.start_ticks != identity.start_ticks:
        raise ProcessGone(f"pid {identity.pid} belongs to another process now")
    if stat.dead:
        raise ProcessGone(f"pid {identity.pid} is a zombie")


def is_readable(pidfd: int, seconds: float = 0) -> bool:
    """Has the process behind the pidfd ended, or does it in that time? Also true for a zombie."""
    poller = select.poll()  # not select(): that knows only descriptors below 1024
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def is_alive(pidfd: int) -> bool:
    """The opposite of :func:`is_readable`, for reading aloud."""
    return not is_readable(pidfd)


def send_signal(pidfd: int, number: int) -> bool:
    """Signal the one process behind the pidfd; False if it had ended already."""
    return _send(pidfd, number, 0)


def send_group_signal(pidfd: int, number: int) -> bool:
    """Signal the process group that the process behind the pidfd leads, though the leader may be dead.

    The pidfd holds the kernel's own ``struct pid``, so the number cannot have been taken by another group.
    Needs Linux 6.9; below that, ``NotImplementedError``: the caller has a verified member to fall back on.
    """
    if not has_group_signal():
        raise NotImplementedError("PIDFD_SIGNAL_PROCESS_GROUP needs Linux 6.9")
    return _send(pidfd, number, _PIDFD_SIGNAL_PROCESS_GROUP)


@cache
def has_group_signal() -> bool:
    """Does this kernel know PIDFD_SIGNAL_PROCESS_GROUP (6.9)? Asked with signal 0, which reaches nobody."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(pidfd, 0, None, _PIDFD_SIGNAL_PROCESS_GROUP)
    except OSError as err:
        # We may not lead a group (ESRCH); an unknown flag is EINVAL.
        return err.errno != errno.EINVAL
    finally:
        os.close(pidfd)
    return True


@cache
def has_pidfd_inodes() -> bool:
    """Does each process have a pidfd inode of its own (6.9)? Before, all anonymous files share one inode."""
    pidfd = os.pidfd_open(os.getpid())
    other = select.epoll()
    try:
        return os.fstat(pidfd).st_ino != os.fstat(other.fileno()).st_ino
    finally:
        os.close(pidfd)
        other.close()


def pidfd_inode(pidfd: int) -> int | None:
    """The process's number that is never used again in this boot, where the kernel has one."""
    return os.fstat(pidfd).st_ino if has_pidfd_inodes() else None


def accounts_of(pid: int) -> set[int]:
    """The real, effective and saved user ids of a process: one for an ordinary one, more for a setuid program."""
    for line in read_proc(pid, "status").splitlines():
        if line.startswith(b"Uid:"):
            return {int(word) for word in line.split()[1:4]}
    raise ProcessGone(f"pid {pid} has ended")


def printable(text: str) -> str:
    """The text without anything that a terminal or a log would act on; letters of every script stay."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def command_line(pid: int) -> str:
    """What the process calls itself, for people; empty if it cannot be read.

    It may call itself anything: what would move a cursor or begin a line is shown as it is written in code.
    """
    with contextlib.suppress(KernelError):
        words = read_proc(pid, "cmdline").rstrip(b"\0").split(b"\0")
        text = " ".join(word.decode("utf-8", "replace") for word in words)
        return printable(text or f"[{read_stat(pid).comm}]")
    return ""


def _send(pidfd: int, number: int, flags: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, number, None, flags)
    except OSError as err:
        if err.errno == errno.ESRCH:  # it ended, or its group is empty: what the signal was for has happened
            return False
        raise _translated(err, None, f"signal {number}") from err
    return True


def _translated(err: OSError, pid: int | None, what: str) -> KernelError:
    who = f"pid {pid}" if pid is not None else "the process"
    match err.errno:
        case errno.ESRCH | errno.ENOENT:  # reaped; or its /proc directory went away while we read
            return ProcessGone(f"{who} has ended")
        case errno.EINVAL if what == "pidfd_open":  # a thread id or an impossible pid: nobody's process
            return ProcessGone(f"{who} is not a process")
        case errno.EPERM | errno.EACCES:  # another user's process, or hidepid
            return NotPermitted(f"{who}: {what} refused: {errno.errorcode[err.errno]}")
        case errno.EMFILE | errno.ENFILE | errno.ENOMEM:
            return ResourceExhausted(f"{who}: {what}: {err.strerror}; raise the limit of open files (ulimit -n)")
        case _:
            return KernelError(f"{who}: {what}: {err.strerror} (errno {err.errno})")
