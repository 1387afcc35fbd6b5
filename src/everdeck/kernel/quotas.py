"""How many bytes a directory may hold: project quotas, where the file system has them in use.

A project is a number that files carry and that new files inherit from their directory; the file system counts what the
files of a number take and refuses more than its limit with EDQUOT. ext4 has it with the features ``quota,project`` and
the mount option ``prjquota``, XFS with ``prjquota``; counting without enforcing exists, and is no limit. Setting one
needs CAP_SYS_ADMIN.

Whoever owns a file may give it another number, so a limit binds only who cannot ask for that: see the calls that
:mod:`everdeck.kernel.sandbox` refuses.

See ioctl_fssetxattr(2), quotactl(2) ``quotactl_fd`` (Linux 5.14), linux/quota.h, linux/dqblk_xfs.h.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from everdeck.errors import KernelError

_GET_ATTRIBUTES, _SET_ATTRIBUTES = 0x801C581F, 0x401C5820
_ATTRIBUTES: Final = struct.Struct("=5I8s")  # xflags, extsize, nextents, projid, cowextsize
_INHERIT: Final = 0x200
_QUOTACTL_FD: Final = 443
_OF_PROJECTS: Final = 2
_GET, _SET, _GET_STATE = 0x800007, 0x800008, 0x5805
_LIMITS: Final = struct.Struct("=8QI4x")  # hard, soft, space, inodes hard, soft, used, two times, what is valid
_HARD_AND_SOFT: Final = 1
_BLOCK: Final = 1024
_STATE_BYTES: Final = 128
_STATE_FLAGS: Final = struct.Struct("=bxH")
_ENFORCED: Final = 1 << 5
_OURS: Final = 0x80000000
"""Numbers that people choose are small: ours have the highest bit."""
_TRIES: Final = 1000


def why_not(folder: Path) -> str | None:
    """Why no limit can be set for what is below this directory; None if one can."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as err:
        return f"{folder}: {err.strerror}"
    try:
        _attributes(fd)
        state = _quotactl(fd, _GET_STATE, 0, bytes(_STATE_BYTES))
        if not _STATE_FLAGS.unpack_from(state)[1] & _ENFORCED:
            return "the file system counts projects and does not limit them; mount it with prjquota"
        _limits(fd, 0)
    except OSError as err:
        match err.errno:
            case errno.ENOSYS if _knows_quotactl_fd() is False:
                return "it needs quotactl_fd (Linux 5.14)"
            case errno.EPERM | errno.EACCES:
                return "only root may set project quotas"
            case _:
                return "the file system has no project quotas in use; ext4 and XFS have them with the option prjquota"
    finally:
        os.close(fd)
    return None


def limit(folders: Iterable[Path], most_bytes: int, project: int | None = None) -> int:
    """Let what is in these directories take so many bytes together; the number of their project, for :func:`unlimit`.

    ``project`` is the number they had before.
    """
    chosen = project
    for folder in folders:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if chosen is None:
                chosen = _free_project(fd)
            if chosen != project or _attributes(fd)[3] != chosen:
                _mark_all(fd, chosen)
            _set_limit(fd, chosen, most_bytes)
        except OSError as err:
            raise KernelError(f"{folder}: no project quota: {err.strerror} (errno {err.errno})") from err
        finally:
            os.close(fd)
    assert chosen is not None  # noqa: S101 - there is at least one directory
    return chosen


def unlimit(folder: Path, project: int) -> None:
    """Let the project take what it likes: nobody has a limit by it any more."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _set_limit(fd, project, 0)
        finally:
            os.close(fd)


def used(folder: Path, project: int) -> int:
    """How many bytes the files of the project take."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _limits(fd, project)[2]
    finally:
        os.close(fd)


def _free_project(fd: int) -> int:
    """A number without a limit, by the directory's own: no two directories have the same at the same time."""
    first = os.fstat(fd).st_ino
    for step in range(_TRIES):
        project = _OURS | ((first + step) & (_OURS - 1))
        try:
            hard, _, space, *_ = _limits(fd, project)
        except OSError as err:
            if err.errno != errno.ENOENT:  # XFS: nothing is known of it
                raise
            return project
        if not hard and not space:
            return project
    raise OSError(errno.EUSERS, "no free project number")


def _mark_all(fd: int, project: int) -> None:
    """The directory and what is in it. Links and second names stay: they may be anybody's files."""
    _mark(fd, project, directory=True)
    for _, folders, files, below_fd in os.fwalk(".", dir_fd=fd, follow_symlinks=False):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                one = os.open(name, flags, dir_fd=below_fd)
                try:
                    facts = os.fstat(one)
                    directory = stat.S_ISDIR(facts.st_mode)
                    if directory or (stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1):
                        _mark(one, project, directory=directory)
                finally:
                    os.close(one)


def _mark(fd: int, project: int, *, directory: bool) -> None:
    flags, extent, extents, _, cow, rest = _ATTRIBUTES.unpack(_ioctl(fd, _GET_ATTRIBUTES, bytes(_ATTRIBUTES.size)))
    _ioctl(
        fd,
        _SET_ATTRIBUTES,
        _ATTRIBUTES.pack(flags | (_INHERIT if directory else 0), extent, extents, project, cow, rest),
    )


def _attributes(fd: int) -> tuple[int, ...]:
    return _ATTRIBUTES.unpack(_ioctl(fd, _GET_ATTRIBUTES, bytes(_ATTRIBUTES.size)))[:5]


def _ioctl(fd: int, request: int, given: bytes) -> bytes:
    return fcntl.ioctl(fd, request, given)


def _limits(fd: int, project: int) -> tuple[int, ...]:
    return _LIMITS.unpack(_quotactl(fd, _GET, project, bytes(_LIMITS.size)))


def _set_limit(fd: int, project: int, most_bytes: int) -> None:
    blocks = -(-most_bytes // _BLOCK)
    _quotactl(fd, _SET, project, _LIMITS.pack(blocks, 0, 0, 0, 0, 0, 0, 0, _HARD_AND_SOFT))


def _quotactl(fd: int, command: int, project: int, given: bytes) -> bytes:
    buffer = ctypes.create_string_buffer(given, len(given))
    libc = ctypes.CDLL(None, use_errno=True)
    answer = libc.syscall(
        _QUOTACTL_FD, fd, ctypes.c_uint(command << 8 | _OF_PROJECTS), ctypes.c_uint(project), ctypes.byref(buffer)
    )
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return buffer.raw


def _knows_quotactl_fd() -> bool:
    """An unknown call and a file system without quotas both answer ENOSYS; a descriptor that is none does not."""
    try:
        _quotactl(-1, _GET, 0, bytes(_LIMITS.size))
    except OSError as err:
        return err.errno != errno.ENOSYS
    return True
