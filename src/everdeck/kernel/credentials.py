"""A worker's secrets on disk: one file each, in a directory that is the owner's alone.

A worker of another account may read its secrets and change nothing about them: neither the files nor what lies beside
them. So there is no link, pipe or second name here that a worker could have put in the owner's way; and because a
directory may come from a time when that was not so, everything is opened from the directory's own descriptor, follows
no link, waits for nobody (a FIFO), and must be a plain file with one name.

The right to read is an entry in the file's access list (acl(5)), as systemd gives it to ``$CREDENTIALS_DIRECTORY``:
ownership would let the worker change the file, and a group may have other members. A file system without access lists
leaves only ownership; the directory is the owner's all the same.

A worker that gets another spec gets its new values first, beside the old ones (:func:`keep` with an ``occasion``), and
they take their place when the new spec is recorded (:func:`settle`): whoever is killed in between leaves the old spec
with the old values, or the new one with the new.

See openat(2) O_NOFOLLOW, xattr(7), linux/posix_acl_xattr.h.
"""

import contextlib
import errno
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from everdeck import disk
from everdeck.crashpoints import crash_point

_ACL: Final = "system.posix_acl_access"
_ACL_ENTRY: Final = struct.Struct("<HHI")
_NOBODY_NAMED: Final = 0xFFFFFFFF
_NO_LISTS: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def keep(folder: Path, values: Mapping[str, str | None], reader: int | None, occasion: str | None = None) -> None:
    """Put every value into place in one step each, readable for this account too; None leaves a value as it is.

    With an ``occasion`` new values only lie ready, until they are settled for it.
    """
    with _opened(folder) as folder_fd:
        _let_read(folder_fd, reader, directory=True)
        for name, value in values.items():
            if value is not None:
                _write(folder_fd, name if occasion is None else _lying_ready(name, occasion), value.encode(), reader)
            else:
                with contextlib.suppress(FileNotFoundError):  # the start that needs it says so
                    fd = _open_file(folder_fd, name)
                    try:
                        _let_read(fd, reader, directory=False)
                    finally:
                        os.close(fd)


def occasion_of(spec_json: bytes) -> str:
    """What values that come with this spec lie ready for: the spec as it is stored, which does not hold them."""
    return f"{zlib.crc32(spec_json):08x}"


def read(folder: Path, name: str) -> bytes:
    """The value of one secret. What is no plain file of one name is refused with an OSError, like a missing one."""
    with _opened(folder) as folder_fd:
        return _read(folder_fd, name)


def names(folder: Path) -> set[str]:
    """The secrets that are kept there."""
    try:
        with _opened(folder) as folder_fd:
            return {name for name in os.listdir(folder_fd) if not _is_temporary(name)}  # noqa: PTH208 - of a descriptor
    except OSError:
        return set()


def settle(folder: Path, wanted: Iterable[str], occasion: str) -> None:
    """Put what lies ready for this occasion into place, and remove everything but the wanted secrets.

    What lies ready for another one was never recorded. What cannot be removed now is removed with the next start.
    """
    with _opened(folder) as folder_fd:
        lying = set(os.listdir(folder_fd))  # noqa: PTH208 - of a descriptor
        ready = {_lying_ready(name, occasion): name for name in wanted}
        found = lying & ready.keys()
        for beside in found:
            os.rename(beside, ready[beside], src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            crash_point("replace.secret-settled")
        if found:
            disk.sync(folder_fd)  # a worker that is stopped again and not started has them too after a power cut
        for stale in lying - found - set(wanted):
            with contextlib.suppress(OSError):
                _remove(folder_fd, stale)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(folder, flags)
    try:
        former = os.fstat(fd).st_uid
        if former != os.geteuid():
            _take_back(fd, former)
        yield fd
    finally:
        os.close(fd)


def _take_back(folder_fd: int, former: int) -> None:
    """The directory was another account's, as earlier versions made it: whatever lies there may be a trap.

    Plain files of that account are its secrets; they are written anew, because it may hold the old ones open.
    """
    os.fchown(folder_fd, os.geteuid(), os.getegid())
    os.fchmod(folder_fd, 0o700)
    for name in os.listdir(folder_fd):
        value: bytes | None = None
        with contextlib.suppress(OSError):
            value = _read(folder_fd, name, owner=former)
        if value is None or _is_temporary(name):
            _remove(folder_fd, name)
        else:
            _write(folder_fd, name, value, former)


def _write(folder_fd: int, name: str, value: bytes, reader: int | None) -> None:
    def let_read(fd: int) -> None:
        _let_read(fd, reader, directory=False)

    disk.replace_file(name, value, dir_fd=folder_fd, prepare=let_read)
    crash_point("start.secret-written")


def _read(folder_fd: int, name: str, owner: int | None = None) -> bytes:
    fd = _open_file(folder_fd, name, owner)
    with os.fdopen(fd, "rb") as file:
        return file.read()


def _open_file(folder_fd: int, name: str, owner: int | None = None) -> int:
    # O_NONBLOCK: an open of a FIFO would wait for somebody at its other end.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1 or (owner is not None and facts.st_uid != owner):
        os.close(fd)
        raise OSError(errno.ELOOP, "not a plain file of its own", name)
    return fd


def _let_read(fd: int, reader: int | None, *, directory: bool) -> None:
    """Only the owner, and this account for reading; by the descriptor, so it means the file that we opened."""
    ours, theirs = (7, 5) if directory else (6, 4)
    if reader is None or reader == os.geteuid():
        with contextlib.suppress(OSError):
            os.removexattr(fd, _ACL)
        os.fchmod(fd, 0o700 if directory else 0o600)
        return
    entries = ((1, ours, _NOBODY_NAMED), (2, theirs, reader), (4, 0, _NOBODY_NAMED), (16, theirs, _NOBODY_NAMED))
    packed = b"".join(_ACL_ENTRY.pack(*entry) for entry in (*entries, (32, 0, _NOBODY_NAMED)))
    try:
        os.setxattr(fd, _ACL, struct.pack("<I", 2) + packed)
    except OSError as err:
        if err.errno not in _NO_LISTS:
            raise
        if directory:
            os.fchmod(fd, 0o711)
        else:
            os.fchown(fd, reader, -1)
            os.fchmod(fd, 0o400)


def _remove(folder_fd: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder_fd)
    except IsADirectoryError:
        import shutil  # noqa: PLC0415 - with every format of archives; few workers have secrets to forget

        shutil.rmtree(name, dir_fd=folder_fd, ignore_errors=True)


def _lying_ready(name: str, occasion: str) -> str:
    return f".{name}.{occasion}.new"


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".new")
