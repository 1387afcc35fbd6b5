"""Hear that a file was written to, without asking again and again.

An inotify descriptor is one fd for any number of files: it becomes readable when one of them changes, and costs
nothing while all are silent. With ``IN_ONESHOT`` the kernel removes a watch after its first event, so a writer
of a million lines wakes us once until we arm the watch again.

Two limits belong to the user, not to the process: the number of descriptors (``max_user_instances``) and of
watches (``max_user_watches``). Running out of either is an ordinary answer here (:class:`Exhausted`), because
the caller has another way to look, just a lazier one.

Python's standard library has no inotify; these are the three calls by ctypes. See inotify(7).
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

MODIFY: Final = 0x00000002
ATTRIB: Final = 0x00000004
MOVED_TO: Final = 0x00000080
CREATE: Final = 0x00000100
DELETE_SELF: Final = 0x00000400
MOVE_SELF: Final = 0x00000800
OVERFLOW: Final = 0x00004000
IGNORED: Final = 0x00008000
ONESHOT: Final = 0x80000000

_HEADER: Final = struct.Struct("iIII")
_READ_BYTES: Final = 1 << 16
_EXHAUSTED: Final = (errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSYS)

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.inotify_init1.argtypes = [ctypes.c_int]
_libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]
_libc.inotify_rm_watch.argtypes = [ctypes.c_int, ctypes.c_int]


class Exhausted(OSError):
    """The user's inotify descriptors or watches are used up."""


class Heard(NamedTuple):
    """One event: which watch, what happened."""

    watch: int
    mask: int


def open_inotify() -> int:
    """A new inotify descriptor, non-blocking and closed on exec."""
    fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise _translated("inotify_init1")
    return fd


def add_watch(fd: int, path: str, mask: int) -> int:
    """Watch ``path``; the number returned names the watch in later events."""
    watch: int = _libc.inotify_add_watch(fd, os.fsencode(path), mask)
    if watch < 0:
        raise _translated(path)
    return watch


def remove_watch(fd: int, watch: int) -> None:
    """Forget a watch; one that the kernel has already removed is no error."""
    _libc.inotify_rm_watch(fd, watch)


def heard(fd: int) -> Iterator[Heard]:
    """What has happened since the last call, without waiting."""
    try:
        data = os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return
    offset = 0
    while offset < len(data):
        watch, mask, _cookie, length = _HEADER.unpack_from(data, offset)
        offset += _HEADER.size + length
        yield Heard(watch, mask)


def _translated(what: str) -> OSError:
    number = ctypes.get_errno()
    kind = Exhausted if number in _EXHAUSTED else OSError
    return kind(number, os.strerror(number), what)
