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
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from everdeck.crashpoints import crash_point

# The answers of a file without a disk behind it (a pipe, some network and FUSE file systems): nothing to wait for.
# Not EROFS: so ext4 answers once its disk has failed and it gave up writing. (A file system that was mounted read-only
# says that all is well.)
_HAS_NO_DISK: Final = (errno.EINVAL, errno.ENOSYS)
# statfs(2): ext2 to ext4, XFS, Btrfs, F2FS, ZFS, bcachefs, squashfs, tmpfs, ramfs, overlayfs.
_NEAR: Final = frozenset(
    (0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0xCA451A4E, 0x73717368, 0x01021994, 0x858458F6, 0x794C7630)
)
_AS_A_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
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


def remove_tree(path: Path | str) -> None:
    """Remove a directory with everything in it; raises what was refused first, after all the rest is gone.

    Others made what is in it, so links are never followed, and it may be nested more deeply than our stack, our
    descriptors and any path can follow: each directory is moved to the top before it is emptied.
    """
    refused: list[OSError] = []
    top = os.open(path, _AS_A_FOLDER)
    try:
        waiting = _emptied(top, top, refused)
        while waiting:
            name = waiting.pop()
            with _noted(refused):
                fd = os.open(name, _AS_A_FOLDER, dir_fd=top)
                try:
                    waiting += _emptied(fd, top, refused)
                finally:
                    os.close(fd)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    if refused:
        raise refused[0]
    Path(path).rmdir()


def _emptied(folder: int, top: int, refused: list[OSError]) -> list[str]:
    """Remove its files; its directories, which are below ``top`` now, by other names."""
    moved = []
    for name in os.listdir(folder):
        with _noted(refused):
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
                continue
            _open_up(name, folder)
            aside = os.urandom(16).hex()  # nobody can have put something there
            os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=top)
            moved.append(aside)
    return moved


def _open_up(name: str, folder: int) -> None:
    """A directory of ours that its maker closed to its own account."""
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        facts = os.fstat(fd)
        if ~facts.st_mode & stat.S_IRWXU and facts.st_uid == os.geteuid():
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IRWXU)  # noqa: PTH101 - the one that was looked at
    finally:
        os.close(fd)


@contextlib.contextmanager
def _noted(refused: list[OSError]) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as err:
        refused.append(err)


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
