"""One poller per token, by the kernel's word.

Telegram answers two pollers of one token with 409 only while both wait; with a backlog both get everything. So before
polling we take a flock(2) named by a hash of the token in this user's runtime directory. It is dropped however we die,
and it says nothing about the token: not its name, not its content.

A 409 that comes all the same is somebody the lock cannot see: another user, another machine, a program that does not
use Everdeck. :func:`local_suspects` looks for the ones on this machine.
"""

import hashlib
from types import TracebackType
from typing import Final, Self

import msgspec
import psutil

from everdeck.child import Singleton
from everdeck.errors import PollerConflict

_NAME_LENGTH: Final = 32
_COMMAND_LENGTH: Final = 200


class Suspect(msgspec.Struct, frozen=True):
    """A process on this machine that may be polling with the token."""

    pid: int
    command: str


class PollerLock:
    """Be the only poller of this token among this user's processes.

    ``with PollerLock(token): …`` or ``acquire`` … ``release``. The error (PollerConflict) names the holder.
    """

    def __init__(self, token: str) -> None:
        # A slow hash is not needed: a bot token has more than 200 random bits, it cannot be guessed from this.
        self._name = f"poller-{hashlib.sha256(token.encode()).hexdigest()[:_NAME_LENGTH]}"
        self._held: Singleton | None = None

    def acquire(self) -> Self:
        """Take the lock, or say who has it."""
        if self._held is None:
            self._held = Singleton.take(self._name)
        if self._held is None:
            pid = Singleton.holder(self._name)
            who = "another process" if pid is None else f"pid {pid} ({_command(pid, hide='')})"
            raise PollerConflict(f"this token is already polled by {who}; stop it first, two pollers lose messages")
        return self

    def release(self) -> None:
        """Let the next one poll."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def local_suspects(token: str) -> list[Suspect]:
    """Processes on this machine, beside this one, that carry the token in their command line or environment.

    Looks only where this user may look. The token is cut out of what is shown.
    """
    own = {psutil.Process().pid, *(parent.pid for parent in psutil.Process().parents())}
    found: list[Suspect] = []
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        try:
            carries = any(token in argument for argument in process.cmdline())
            carries = carries or any(token in value for value in process.environ().values())
        except (psutil.Error, OSError):
            continue
        if carries:
            found.append(Suspect(process.pid, _command(process.pid, hide=token)))
    return found


def _command(pid: int, hide: str) -> str:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return "gone, or hidden from us"
    return (command.replace(hide, "<token>") if hide else command)[:_COMMAND_LENGTH]
