"""A deck goes from an owner that leaves to a member, with what must not be closed in between.

The descriptors travel by SCM_RIGHTS (unix(7)): the deck's lock, which is held by whoever has the descriptor; the
listening socket, so nobody is refused meanwhile; the ear for notifications; the guardian's line; the lifelines of bound
workers, which see no end-of-file as long as one copy is open.

Three words make it safe to die anywhere in it. The owner gives (the manifest, then the descriptors), the heir says
that it has them all (``T``), the owner lets go of everything else and says so (``G``), and only then does the heir act.
An heir that dies before ``T`` gets nothing, and the next one is asked; an owner that dies before ``G`` is a dead owner:
the heir closes what it got and tries for the lock like everybody else. Both are blocking and run in a thread.
"""

import array
import contextlib
import os
import socket
from pathlib import Path
from typing import Final

import msgspec

from everdeck.crashpoints import crash_point
from everdeck.kernel import unixsocket
from everdeck.statedir import SOCKET
from everdeck.wire import frames
from everdeck.wire.frames import Cutter, Hello, Welcome

_AT_ONCE: Final = 200
"""Descriptors per message; the kernel takes 253 (SCM_MAX_FD)."""
_TAKEN: Final = b"T"
_GO: Final = b"G"
PATIENCE_SECONDS: Final = 10.0


class Manifest(msgspec.Struct, frozen=True):
    """What the descriptors are, in their order: lock, listener, notify, the guardian's line, the lifelines."""

    guardian_pid: int | None
    lifelines: list[str]

    @property
    def count(self) -> int:
        """How many descriptors follow."""
        return 3 + (self.guardian_pid is not None) + len(self.lifelines)


class Given(msgspec.Struct, frozen=True):
    """The descriptors that are handed on."""

    lock_fd: int
    listener_fd: int
    notify_fd: int
    guardian: tuple[int, int] | None
    """The line, and the pid at its other end."""
    lifelines: dict[str, int]

    @property
    def fds(self) -> list[int]:
        """All of them, in the manifest's order."""
        guardian = [] if self.guardian is None else [self.guardian[0]]
        return [self.lock_fd, self.listener_fd, self.notify_fd, *guardian, *self.lifelines.values()]


def give(connection: socket.socket, given: Given) -> bool:
    """Send everything and wait until the heir has it; False if it has not, and then it never acts."""
    manifest = Manifest(None if given.guardian is None else given.guardian[1], list(given.lifelines))
    body = msgspec.msgpack.encode(manifest)
    fds = given.fds
    try:
        connection.settimeout(PATIENCE_SECONDS)
        connection.sendall(len(body).to_bytes(4, "big") + body)
        for begin in range(0, len(fds), _AT_ONCE):
            rights = array.array("i", fds[begin : begin + _AT_ONCE])
            connection.sendmsg([b"F"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        return connection.recv(1) == _TAKEN
    except OSError:
        return False


def let_go(connection: socket.socket) -> None:
    """Everything else is let go of: the heir may act."""
    with contextlib.suppress(OSError), connection:
        connection.sendall(_GO)


def fetch(state_dir: Path, word: str) -> Given | None:
    """As the heir: come for the deck that was offered with this word; None if it is not given after all."""
    fds: list[int] = []
    try:
        with unixsocket.connect(state_dir, SOCKET, PATIENCE_SECONDS) as connection:
            connection.sendall(frames.packed(Hello(frames.VERSION, f"fetch:{word}")))
            if not isinstance(frames.decode_answered(_body(connection)), Welcome):
                return None
            manifest = msgspec.msgpack.decode(_body(connection), type=Manifest)
            while len(fds) < manifest.count:
                fds += _received(connection)
            crash_point("handover.received")
            connection.sendall(_TAKEN)
            crash_point("handover.taken")
            connection.settimeout(None)  # it lets go of everything first, and its end is an end of this
            if connection.recv(1) == _GO:
                crash_point("handover.may-act")
                return _given(manifest, fds)
    except (OSError, EOFError, msgspec.MsgspecError):
        pass
    for fd in fds:
        os.close(fd)
    return None


def _body(connection: socket.socket) -> bytes:
    """One frame, and not a byte more: the descriptors travel with the bytes behind it."""
    length = int.from_bytes(_exactly(connection, 4), "big")
    (body,) = Cutter(frames.MOST_ANSWERED_BYTES).feed(length.to_bytes(4, "big") + _exactly(connection, length))
    return body


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _received(connection: socket.socket) -> list[int]:
    space = socket.CMSG_SPACE(_AT_ONCE * array.array("i").itemsize)
    data, ancillary, _, _ = connection.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise EOFError
    fds = array.array("i")
    for level, kind, rights in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    return list(fds)


def _given(manifest: Manifest, fds: list[int]) -> Given:
    lock_fd, listener_fd, notify_fd, *rest = fds
    guardian = None if manifest.guardian_pid is None else (rest.pop(0), manifest.guardian_pid)
    return Given(lock_fd, listener_fd, notify_fd, guardian, dict(zip(manifest.lifelines, rest, strict=True)))
