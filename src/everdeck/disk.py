"""What it takes for a file to be there after a power cut, whole.

A file that is written in place may come back empty, or with a hole where its content was: the new size reaches the disk
before the bytes do. So whatever we replace is written beside its name, synced, renamed over it, and the directory is
synced: before the rename there is the old file, after it the new one, and never half of either.

See fsync(2), rename(2), and "Ensuring data reaches disk" (LWN, 2011).
"""

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from everdeck.crashpoints import crash_point

# The answers of a file without a disk behind it (a pipe, some network and FUSE file systems): nothing to wait for.
_HAS_NO_DISK: Final = (errno.EINVAL, errno.ENOSYS, errno.EROFS)
# statfs(2): ext2 to ext4, XFS, Btrfs, F2FS, ZFS, bcachefs, squashfs, tmpfs, ramfs, overlayfs.
_NEAR: Final = frozenset(
    (0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0xCA451A4E, 0x73717368, 0x01021994, 0x858458F6, 0x794C7630)
)
_libc: Final = ctypes.CDLL(None, use_errno=True)


def replace_file(
    path: Path | str,
    content: bytes,
    *,
    mode: int = 0o600,
    synced: bool = True,
    dir_fd: int | None = None,
    prepare: Callable[[int], None] | None = None,
) -> None:
    """Give ``path`` this content in one step that survives a power cut; every file that we replace passes here.

    With ``synced`` false it survives the death of any process, and the caller syncs it later (:func:`sync_path`).
    ``dir_fd`` is the opened directory of ``path``, which is then only a name: nobody can put another in its place.
    ``prepare`` is given the new file before it has its name, for rights that ``mode`` cannot say.
    """
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.new")  # noqa: PTH118 - relative to dir_fd
    fd = _made_anew(beside, mode, dir_fd)
    try:
        try:
            _write_all(fd, content)
            if mode & 0o077:  # what is for others too must not depend on our umask
                os.fchmod(fd, mode)
            if prepare is not None:
                prepare(fd)
            if synced:
                sync(fd)
        finally:
            os.close(fd)
        crash_point("replace.written")
        os.rename(beside, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(beside, dir_fd=dir_fd)
        raise
    crash_point("replace.renamed")
    if synced:
        sync_directory(folder or ".") if dir_fd is None else sync(dir_fd)


def _made_anew(path: str, mode: int, dir_fd: int | None) -> int:
    # O_EXCL follows no link, so a name that somebody planted is refused and not written through.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode, dir_fd=dir_fd)
    except FileExistsError:  # of somebody who was killed; the same name, so it is never collected
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path, dir_fd=dir_fd)
        return os.open(path, flags, mode, dir_fd=dir_fd)


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def sync_all_of(path: Path | str) -> None:
    """Wait until everything that was written to the file system of this path is on its disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0 and (number := ctypes.get_errno()) not in _HAS_NO_DISK:
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def is_near(path: str) -> bool:
    """Does a disk or the memory of this machine hold it, and not somebody else who serves it?"""
    told = ctypes.create_string_buffer(256)  # struct statfs begins with the type, a word
    if _libc.statfs(os.fsencode(path), told) != 0:
        return False
    return int.from_bytes(told.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) in _NEAR


def sync_directory(path: Path | str) -> None:
    """Wait until the names in a directory are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


def sync_path(path: Path | str) -> None:
    """Wait until the content of a file, or the names in a directory, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


def sync(fd: int) -> None:
    """Wait until the disk has the content, where the file has a disk."""
    try:
        os.fdatasync(fd)
    except OSError as err:
        if err.errno not in _HAS_NO_DISK:
            raise
