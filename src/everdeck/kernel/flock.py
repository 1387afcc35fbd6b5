"""One holder at a time, by the kernel's word.

A flock(2) belongs to the open file description, not to a process: it is inherited over fork and exec, and is
released when the last copy of the descriptor closes, whichever way its holders die. So a worker that carries
the descriptor of its own lock file holds the lock for as long as any process of its tree lives.

The file is never unlinked while somebody may hold it: a lock on an unlinked inode excludes nobody.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from everdeck.errors import KernelError, ResourceExhausted, StateDirRefused

_LOOKER_SECONDS: Final = 0.0005  # a look lasts microseconds, unless its process is off the processor
_LOOKERS_PATIENCE_SECONDS: Final = 2.0  # who holds a shared lock for longer than that is no looker of ours


def take(path: Path | str) -> int | None:
    """The descriptor that holds the lock now, or None if somebody else holds it."""
    patience_ends = monotonic() + _LOOKERS_PATIENCE_SECONDS
    while True:
        fd = _open(path)
        try:
            if not _try(fd, path, fcntl.LOCK_EX):
                # Somebody may only have been looking (is_held takes a shared lock for a moment): beside a looker a
                # shared lock can be had, beside a holder it cannot.
                held = not _try(fd, path, fcntl.LOCK_SH)
                os.close(fd)
                if held or monotonic() > patience_ends:
                    return None
                sleep(_LOOKER_SECONDS)
                continue
        except KernelError:
            os.close(fd)
            raise
        # Between our open and our lock the file may have been removed with its worker; a lock on the old
        # inode would exclude nobody.
        try:
            if os.path.samestat(os.fstat(fd), os.lstat(path)):
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)


def is_held(path: Path | str) -> bool:
    """Does anybody hold the lock? A missing file is held by nobody."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as err:
        raise _translated(err, path) from err
    try:
        # A shared try would succeed beside other shared tries of ours and still fails against the holder.
        return not _try(fd, path, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def holders(path: Path | str) -> list[int]:
    """The pids that carry the lock in a descriptor, found through /proc; empty if it is free or hidden from us.

    A process that merely has the file open is not a holder: ``/proc/PID/fdinfo/FD`` shows the lock itself. Neither is
    one that only looks: :func:`is_held` has a shared lock for a moment, a holder's is exclusive ("WRITE").
    Looks at every descriptor of every process that we may look at, so ask only when it matters.
    """
    try:
        wanted = os.stat(path)  # noqa: PTH116 - compared raw
    except FileNotFoundError:
        return []
    name = os.path.realpath(path)
    own = os.getpid()
    return [pid for pid in all_pids() if pid != own and _taker(pid, name, wanted) is not None]


def is_holder(path: Path | str, pid: int) -> bool:
    """Does this one process carry the lock?"""
    try:
        return _taker(pid, os.path.realpath(path), os.stat(path)) is not None  # noqa: PTH116 - compared raw
    except FileNotFoundError:
        return False


def is_heir(path: Path | str, pid: int) -> bool:
    """Does this one process carry the lock because it was handed down by somebody who let go of it?

    That is how a worker's tree comes to its lock. Whoever took the lock himself, and what he started, is a stranger
    who keeps others out: a conflict, nobody to be signalled.
    """
    try:
        name, wanted = os.path.realpath(path), os.stat(path)  # noqa: PTH116 - compared raw
    except FileNotFoundError:
        return False
    taker = _taker(pid, name, wanted)
    return taker is not None and taker != pid and _taker(taker, name, wanted) is None


def why_not(folder: Path) -> str | None:
    """Why locks do not hold here, or None: one is taken twice, and the second time must be refused."""
    path = folder / f".tried-lock-{os.getpid()}"
    try:
        first = take(path)
        try:
            refused = is_held(path)
        finally:
            if first is not None:
                os.close(first)
            path.unlink()
    except (OSError, KernelError, StateDirRefused) as error:
        return f"locks cannot be tried in {folder}: {error}"
    return None if refused else f"{folder} grants one lock twice; is it a network share?"


def openers(paths: Iterable[Path]) -> dict[Path, list[int]]:
    """Who has each of these files open, but for us, in one pass over /proc."""
    wanted = {(facts.st_dev, facts.st_ino): path for path in paths for facts in (path.stat(),)}
    found: dict[Path, list[int]] = {path: [] for path in wanted.values()}
    for pid in all_pids() if wanted else ():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    facts = descriptor.stat()
                    path = wanted.get((facts.st_dev, facts.st_ino))
                    if path is not None and pid not in found[path]:
                        found[path].append(pid)
    return found


def all_pids() -> list[int]:
    """Every pid that /proc shows us."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208 - names are all we want


def _taker(pid: int, name: str, wanted: os.stat_result) -> int | None:
    """Who took the lock that this process carries, by the number it had then; None if it carries none."""
    # The process may end, or deny us, at any of these steps: then it is not a holder that we can see.
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names are all we want
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}") != name:  # noqa: PTH115 - one system call per descriptor
                    continue
                if not os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), wanted):  # noqa: PTH116
                    continue
                with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii", errors="replace") as info:  # noqa: PTH123
                    for line in info:
                        words = line.split()  # lock: 1: FLOCK ADVISORY WRITE TAKER ...
                        if words[:1] == ["lock:"] and words[2:5:2] == ["FLOCK", "WRITE"]:
                            return int(words[5])
    return None


def _try(fd: int, path: Path | str, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as err:
        if err.errno in {errno.EWOULDBLOCK, errno.EACCES}:  # held; some network file systems say EACCES
            return False
        raise KernelError(f"{path}: flock: {err.strerror} (errno {err.errno})") from err
    return True


def _open(path: Path | str) -> int:
    try:
        # A link would let whoever made it choose the file that is made, locked and, for deck.lock, written.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise _translated(err, path) from err


def _translated(err: OSError, path: Path | str) -> KernelError | StateDirRefused:
    if err.errno in {errno.EMFILE, errno.ENFILE}:
        return ResourceExhausted(f"{path}: {err.strerror}; raise the limit of open files (ulimit -n)")
    if err.errno == errno.ELOOP:
        return StateDirRefused(f"{path}: a link where our own file belongs; remove it")
    return StateDirRefused(f"{path}: {err.strerror} (errno {err.errno})")
