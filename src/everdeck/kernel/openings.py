"""The system's own files and folders that every strict sandbox names, kept open from one start to the next.

A Landlock rule names a file by a descriptor, and to open and close eighty of them takes longer than to make their
rules. So those directly in ``/``, ``/etc`` and ``/dev`` are kept open (``O_PATH``), under high numbers, as rules that
are ready to be added. They are about eighty descriptors, and only where the limit leaves room for high numbers.

A name comes to mean another file by a change of its directory, which the times of the directory tell, or by a mount,
which ``/proc/self/mountinfo`` tells who polls it (proc_pid_mounts(5)). After either, everything is opened anew. Times
have the grain of a clock's tick, so a directory that has just changed is not relied on: for a moment everything is
opened by name at each start. So are links always, because what they mean may change elsewhere.
"""

import contextlib
import os
import select
import stat
import struct
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

from everdeck.kernel.descriptors import HIGH, raised

Named: TypeAlias = tuple[int, tuple[str, ...]]
"""Rights, and the paths that have them; a path that is a file has those of them that files can have."""

RULE: Final = struct.Struct("=Qi")
"""A ``struct landlock_path_beneath_attr``: rights and a descriptor."""

_FOLDERS: Final = ("/", "/etc", "/dev")
_AT_REST_SECONDS: Final = 2.0
_FLAGS: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Openings:
    """Rules that are ready to be added, and what is to be opened by name beside them.

    Whoever adds the rules keeps this meanwhile: the descriptors are closed when nobody has it any more, so that no
    thread adds a rule whose descriptor has come to mean another file.
    """

    __slots__ = ("_fds", "_folders", "_mounts_fd", "_names", "_of_a_file", "_pid", "by_name", "rules")

    def __init__(self, names: Sequence[Named], of_a_file: int) -> None:
        self.rules = b""
        self.by_name = tuple(names)
        self._names = names
        self._of_a_file = of_a_file
        self._pid = os.getpid()
        self._fds: list[int] = []
        self._folders = _times()
        self._mounts_fd = -1
        if self._folders is not None and not _at_rest(self._folders):
            self._folders = None  # it serves this start only
        if self._folders is None:
            return
        try:
            self._mounts_fd = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
            self._fds.append(self._mounts_fd)
            self._open()
        except OSError:  # no /proc, or no room: all of them are opened by name
            self.rules, self.by_name = b"", tuple(names)
            self._folders = None
            self._close()

    def __del__(self) -> None:
        self._close()

    def serve(self, names: Sequence[Named]) -> bool:
        """Do these names still mean what is open?"""
        return (
            self._folders is not None
            and self._names == names
            and self._pid == os.getpid()  # a fork shares what is told of mounts, and only one of the two hears it
            and _times() == self._folders
            and not self._mounted_since()
        )

    def _open(self) -> None:
        self._mounts_fd = self._fds[0] = _kept(self._mounts_fd)
        rules: list[bytes] = []
        folders: list[str] = []
        for access, paths in self._names:
            for path in paths:
                if _folder_of(path) in _FOLDERS and (opened := self._opened(path)) is not None:
                    fd, mode = opened
                    folders += [path] if stat.S_ISDIR(mode) else []
                    rules.append(RULE.pack(access if stat.S_ISDIR(mode) else access & self._of_a_file, fd))
        self.by_name = tuple(
            (access, tuple(path for path in paths if not self._is_known(path, folders)))
            for access, paths in self._names
        )
        self.rules = b"".join(rules)

    def _opened(self, path: str) -> tuple[int, int] | None:
        """A descriptor and the kind of file; None for what is not there, and for a link."""
        try:
            fd = os.open(path, _FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._fds.append(fd)
        mode = os.fstat(fd).st_mode
        if stat.S_ISLNK(mode):
            os.close(self._fds.pop())
            return None
        self._fds[-1] = _kept(fd)
        return self._fds[-1], mode

    def _is_known(self, path: str, folders: Sequence[str]) -> bool:
        """Is there a rule for it, or nothing that a rule could be for?

        A link is known if it leads straight into one of ``folders``: ``/bin``, for example, to ``/usr/bin``.
        """
        folder = _folder_of(path)
        if folder not in _FOLDERS:
            return False
        try:
            target = os.path.normpath(os.path.join(folder, os.readlink(path)))  # noqa: PTH115, PTH118 - texts
        except OSError:  # no link, or nothing
            return True
        return any(_is_below(target, one) and _is_below(os.path.realpath(path), one) for one in folders)

    def _mounted_since(self) -> bool:
        mounts = select.poll()
        mounts.register(self._mounts_fd, select.POLLPRI)
        return bool(mounts.poll(0))

    def _close(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


_Times: TypeAlias = tuple[tuple[int, int, int, int], ...]


def _times() -> _Times | None:
    try:
        facts = [os.stat(folder) for folder in _FOLDERS]  # noqa: PTH116 - on the way of every strict start
    except OSError:
        return None
    return tuple((one.st_dev, one.st_ino, one.st_mtime_ns, one.st_ctime_ns) for one in facts)


def _at_rest(folders: _Times) -> bool:
    """Would the next change of them show in their times?"""
    newest = max(max(changed, touched) for _, _, changed, touched in folders)
    return time.time() - newest / 1e9 > _AT_REST_SECONDS


def _kept(fd: int) -> int:
    high = raised(fd)
    if high < HIGH:
        raise OSError
    return high


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")
