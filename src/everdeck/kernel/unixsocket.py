"""Sockets in a directory: bound under their name in one step, reached however deep the directory is.

An AF_UNIX address holds 107 bytes (unix(7)), so a deep directory is reached through its descriptor:
``/proc/self/fd/N/NAME``. Who is at the other end is the kernel's word (SO_PEERCRED, SO_PEERGROUPS).
"""

import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import Final, NamedTuple

from everdeck.errors import DeckError

_UCRED: Final = struct.Struct("3i")
_SO_PEERGROUPS: Final = 59  # asm-generic/socket.h, since Linux 4.13; Python has no name for it
BACKLOG: Final = 1024


class Peer(NamedTuple):
    """Who connected, as it was at that moment."""

    pid: int
    uid: int
    gids: frozenset[int] = frozenset()

    @property
    def is_ours(self) -> bool:
        """Does it run as us, or as root? The file's mode says the same, and this does not depend on it."""
        return self.uid in {0, os.geteuid()}


def listen(directory: Path, name: str) -> socket.socket:
    """A socket that listens at DIRECTORY/NAME, mode 0600 from its first moment; one of a dead process is replaced.

    It is bound under another name, closed to others, and then renamed: there is no moment at which the name
    exists and refuses, and none at which somebody else may connect.
    """
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise DeckError(f"cannot listen on {directory / name}: {error.strerror}") from error
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    fresh = f".{name}.{os.getpid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=folder)
        # The file gets the mode of the socket's own inode, less the umask (unix_bind in the kernel), so it is closed to
        # others from its first moment, and the host's umask is left alone.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(f"/proc/self/fd/{folder}/{fresh}")
        listener.listen(BACKLOG)
        os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        listener.close()
        raise DeckError(f"cannot listen on {directory / name}: {error.strerror}") from error
    finally:
        os.close(folder)
    return listener


def connect(directory: Path, name: str, timeout_seconds: float | None = None) -> socket.socket:
    """A connection to whoever listens at DIRECTORY/NAME; raises what :func:`os.open` and ``connect`` raise."""
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_seconds)
        connection.connect(f"/proc/self/fd/{folder}/{name}")
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


def peer_of(connection: socket.socket) -> Peer:
    """Who is at the other end."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    groups = {gid}
    with contextlib.suppress(OSError):
        # 1024 bytes are the most that Python asks for: 256 groups. Whoever is in more is known by the first one only.
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)
        groups.update(value for (value,) in struct.iter_unpack("I", raw))
    return Peer(pid, uid, frozenset(groups))


def open_to_others(directory: Path, name: str) -> None:
    """Others may reach the socket; who of them is let in is asked of the kernel. The directory cannot be listed."""
    (directory / name).chmod(0o666)
    directory.chmod(directory.stat().st_mode & 0o777 | 0o011)


def unlink_if_ours(path: Path, bound: os.stat_result) -> None:
    """Remove the file that was bound here: a later owner may have put its own in this place."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(path), bound):
            path.unlink()
