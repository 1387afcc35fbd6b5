"""How a process ended, whether or not it was our child.

Our own children wait for us as zombies: ``waitid(P_PIDFD)`` reads their status, with ``WNOWAIT`` without
reaping them, so that their pid, session and group numbers stay reserved until their tree is gone.

A process that was adopted is reaped by somebody else. Since Linux 6.15 its pidfd still tells the status
afterwards (``PIDFD_GET_INFO`` with ``PIDFD_INFO_EXIT``), if the pidfd was open before; the pidfd reports
hang-up once that has happened. Anything else is :class:`everdeck.model.UnknownExit`: a value of its own, never
mistaken for success or failure.
"""

import os
from functools import cache

from everdeck.kernel import identity as ids
from everdeck.kernel import pidfd_info
from everdeck.model import Exit, Exited, Killed, UnknownExit


def peek_child(pidfd: int) -> Exit | None:
    """How our child ended, leaving it a zombie; None while it lives; unknown if it was not our child."""
    return _waited(pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def reap_child(pidfd: int) -> Exit | None:
    """How our child ended, releasing its pid; None while it lives; unknown if somebody else reaped it."""
    return _waited(pidfd, os.WEXITED | os.WNOHANG)


def is_our_child(pidfd: int) -> bool:
    """May we wait for it? False for adopted processes and for children that somebody else reaped."""
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def told_by_pidfd(pidfd: int) -> Exit:
    """How a reaped process ended, as its pidfd remembers (6.15); unknown if the kernel does not say."""
    known = pidfd_info.ask(pidfd, pidfd_info.EXIT)
    if known is None or not known.told & pidfd_info.EXIT:
        return UnknownExit()
    return from_wait_status(known.wait_status)


@cache
def pidfds_tell() -> bool:
    """Does this kernel tell through a pidfd how somebody else's child ended (6.15)?"""
    version = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdigit())
    return version >= (6, 15)


def try_pidfd() -> bool:
    """The same, tried with a child that ends at once: what doctor tells is seen, not read from a version."""
    pid = os.posix_spawn("/proc/self/exe", ["python3", "-SEsc", ""], {})
    pidfd = ids.open_pidfd(pid)
    try:
        os.waitpid(pid, 0)
        return not isinstance(told_by_pidfd(pidfd), UnknownExit)
    finally:
        os.close(pidfd)


def from_wait_status(status: int) -> Exit:
    """The value for a status as wait(2) packs it."""
    code = os.waitstatus_to_exitcode(status)
    return Killed(-code) if code < 0 else Exited(code)


def _waited(pidfd: int, options: int) -> Exit | None:
    try:
        result = os.waitid(os.P_PIDFD, pidfd, options)
    except ChildProcessError:
        # Not our child, or the host ignores SIGCHLD and the kernel reaped it: the pidfd may still know.
        return told_by_pidfd(pidfd)
    if result is None:
        return None
    return Exited(result.si_status) if result.si_code == os.CLD_EXITED else Killed(result.si_status)
