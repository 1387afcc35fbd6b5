"""One poller per token, by the kernel's word.

Telegram answers two pollers of one token with 409 only while both wait; with a backlog both get everything. So before
polling we take a flock(2) named by a hash of the token in this user's runtime directory. It is dropped however we die,
and it says nothing about the token: not its name, not its content.

A 409 that comes all the same is somebody the lock cannot see: another user, another machine, a program that does not
use Everdeck. :func:`local_suspects` looks for the ones on this machine.
"""

import contextlib
import hashlib
import os
import socket
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias

import msgspec

from everdeck.child import Singleton
from everdeck.errors import PollerConflict

if TYPE_CHECKING:
    import psutil

_NAME_LENGTH: Final = 32
_COMMAND_LENGTH: Final = 200
By: TypeAlias = Literal["lock", "command", "environment", "connection"]


class Suspect(msgspec.Struct, frozen=True):
    """A process on this machine that may be polling with the token, and what points to it."""

    pid: int
    command: str
    by: By = "command"


class PollerLock:
    """Be the only poller of this token among this user's processes.

    ``with PollerLock(token): …`` or ``acquire`` … ``release``. The error (PollerConflict) names the holder.
    """

    def __init__(self, token: str) -> None:
        self._name = _name_of(token)
        self._held: Singleton | None = None

    def acquire(self) -> Self:
        """Take the lock, or say who has it."""
        if self._held is None:
            self._held = Singleton.take(self._name)
        if self._held is None:
            pid = Singleton.holder(self._name)
            who = "another process" if pid is None else f"pid {pid} ({_command(pid, hide='')})"
            raise PollerConflict(f"this token is already polled by {who}; stop it first, two pollers lose messages")
        _HELD.add(self)
        return self

    def release(self) -> None:
        """Let the next one poll."""
        if self._held is not None:
            self._held.release()
            self._held = None
        _HELD.discard(self)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def local_suspects(token: str, server: str | None = None) -> list[Suspect]:
    """Processes on this machine, beside this one, that may be polling with the token; how each was found is told.

    By the lock of this token; by the token in a command line or environment; and, with ``server`` (``host:port`` of the
    API), by an open connection to it: a token may come from a file. Looks only where this user may look. The token is
    cut out of what is shown.
    """
    import psutil  # noqa: PLC0415 - 3 MB that only a bot in trouble pays

    me = psutil.Process()
    own = {me.pid, *(parent.pid for parent in me.parents())}
    holder = Singleton.holder(_name_of(token))
    addresses = _addresses(server)
    found: list[Suspect] = []
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        by = _evidence(process, token, addresses, holder)
        if by is not None:
            found.append(Suspect(process.pid, _command(process.pid, hide=token), by))
    # Who merely talks to the same server may be another bot: named only if nobody is more suspicious.
    sure = [suspect for suspect in found if suspect.by != "connection"]
    return sure or found


def _evidence(process: "psutil.Process", token: str, addresses: set[tuple[str, int]], holder: int | None) -> By | None:
    import psutil  # noqa: PLC0415 - as above

    if process.pid == holder:
        return "lock"
    with contextlib.suppress(psutil.Error, OSError):
        if any(token in argument for argument in process.cmdline()):
            return "command"
        if any(token in value for value in process.environ().values()):
            return "environment"
    with contextlib.suppress(psutil.Error, OSError):
        if addresses and any(
            connection.raddr and (connection.raddr.ip, connection.raddr.port) in addresses
            for connection in process.net_connections("inet")
        ):
            return "connection"
    return None


def _addresses(server: str | None) -> set[tuple[str, int]]:
    host, _, port = (server or "").rpartition(":")
    if not host or not port.isdigit():
        return set()
    try:
        return {(str(info[4][0]), int(port)) for info in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def _name_of(token: str) -> str:
    # A slow hash is not needed: a bot token has more than 200 random bits, it cannot be guessed from this.
    return f"poller-{hashlib.sha256(token.encode()).hexdigest()[:_NAME_LENGTH]}"


def _after_fork() -> None:
    for lock in list(_HELD):
        lock.release()


# A forked child (ProcessPoolExecutor) would keep the lock of a parent that was killed.
_HELD: Final[weakref.WeakSet[PollerLock]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)


def _command(pid: int, hide: str) -> str:
    import psutil  # noqa: PLC0415 - as above

    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return "gone, or hidden from us"
    return (command.replace(hide, "<token>") if hide else command)[:_COMMAND_LENGTH]
