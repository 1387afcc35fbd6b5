"""Every error of Everdeck, one class per different reaction of the caller.

::

    EverdeckError
    ├── SpecError               what was asked for is not valid; nothing was written        (also a ValueError)
    │   ├── NameRefused         the worker's name is not one we may use as a directory
    │   ├── ConfigRefused       everdeck.toml has problems, each with line, key and suggestion; nothing was changed
    │   └── LimitUnavailable    a limit was asked for that this machine cannot enforce
    ├── SpecChanged             the worker runs with another spec; pass replace=True
    ├── UnknownWorker           no worker of that name in this deck                         (also a LookupError)
    ├── WorkerFailed            its breaker has tripped; a person has to look, then reset
    ├── RecordBroken            the worker's record cannot be read; remove it, or replace it by a new start
    ├── LockConflict            somebody else holds the worker's lock; a second copy was not started
    ├── PortUnavailable         no free port could be given to the worker
    ├── Unsupported             this kind of deck cannot keep the verb; the reason says what can
    ├── StopFailed              parts of the tree survived SIGKILL (D state, or not ours to signal)
    ├── AccessDenied            the caller's role or labels do not allow it
    ├── DeckError               the deck as a whole cannot do it
    │   ├── DeckOwned           another process owns this state directory
    │   ├── DeckClosed          the deck was closed, or this is a forked copy of it
    │   └── StateDirRefused     the state directory cannot be used (permission, read-only, not a directory)
    ├── RegistryError           the note to our later selves
    │   ├── RegistryTooNew      written by a newer Everdeck; left untouched
    │   └── RegistryUnavailable disk full, read-only, locked: try again when the cause is gone
    ├── KernelError             the kernel said no
    │   ├── SpawnFailed         the program could not be executed; nothing was left behind
    │   ├── ProcessGone         the process that was meant is no more; a stranger was not touched
    │   ├── NotPermitted        the process exists and is not ours to signal
    │   └── ResourceExhausted   out of file descriptors, processes or memory
    ├── FeedError               the feed cannot go on
    │   ├── CursorUnreadable    the cursor's file holds something that is not a cursor; it was kept
    │   ├── PollerConflict      another process polls with the same token
    │   ├── InboxUnavailable    the inbox cannot be written: nothing was confirmed upstream
    │   ├── SourceError         the source answered with something that is not a batch
    │   ├── PerhapsSent         on the wire when the process died, and at most once: not sent again
    │   └── FeedClosed          the feed, its inbox or its stream is not open (any more)
    ├── MessageError            a message cannot be answered or finished here
    │   ├── MessageLost         another reader has the message now: this one was silent for too long
    │   └── SendRefused         the other side will never take it; ``retry_after`` of others says when it may
    └── ClientError             a verb sent to the owner did not come back with an answer
        ├── NoOwner             nobody owns the deck, or nobody answers at its address
        ├── TokenRefused        the daemon does not know the token, or none was shown
        └── OwnerRefused        the owner answered with an error of its own

Operating-system errors are translated once, in ``everdeck.kernel`` (processes, locks, pipes) and in the
stores (SQLite); everything above sees only this tree.
"""

import os
from collections.abc import Iterable
from functools import cached_property
from typing import Self


class EverdeckError(Exception):
    """Something in Everdeck went wrong; every error of this package is one of these."""


class SpecError(EverdeckError, ValueError):
    """A value was refused: which field, what was given, what is accepted."""

    def __init__(self, field: str, given: object, accepted: str) -> None:
        self.field = field
        self.given = given
        self.accepted = accepted
        super().__init__(f"{field}: {given!r} was given; accepted: {accepted}")


class NameRefused(SpecError):
    """The worker's name cannot be used; names are also directories, so the alphabet is closed."""


class ConfigRefused(SpecError):
    """The configuration file was not taken: every problem with its line and key. Nothing was changed."""

    def __init__(self, path: str, problems: tuple[str, ...]) -> None:
        self.path = path
        self.problems = problems
        super().__init__("configuration", path, "a file without these problems")
        self.args = ("\n".join(f"{path}: {problem}" for problem in problems),)


class LimitUnavailable(SpecError):
    """This machine cannot enforce a limit that was asked for; it is refused rather than ignored."""


class SpecChanged(EverdeckError):
    """The worker is known with another spec; nothing was changed."""

    def __init__(self, worker: str, fields: tuple[str, ...]) -> None:
        self.worker = worker
        self.fields = fields
        super().__init__(
            f"worker {worker!r} exists with another spec (different: {', '.join(fields)}); "
            f"pass replace=True to stop it and start it with the new one"
        )


class UnknownWorker(EverdeckError, LookupError):
    """No worker of that name in this deck."""

    _among: tuple[str, ...] = ()

    def __init__(self, worker: str, suggestions: tuple[str, ...] = ()) -> None:
        self.worker = worker
        self.suggestions = suggestions
        super().__init__(worker, suggestions)

    @classmethod
    def among(cls, worker: str, known: Iterable[str]) -> Self:
        """The same in a deck of these workers; the near ones are looked for only if somebody asks."""
        error = cls(worker)
        del error.suggestions
        error._among = tuple(known)
        return error

    @cached_property
    def suggestions(self) -> tuple[str, ...]:
        """Names that are near; among thousands it takes long to find them, and often nobody asks."""
        import difflib  # noqa: PLC0415 - only for a message

        return tuple(difflib.get_close_matches(self.worker, self._among, n=3))

    def __str__(self) -> str:
        if len(self.args) == 1:  # it has travelled, with its words
            return str(self.args[0])
        hint = f"; did you mean {', '.join(map(repr, self.suggestions))}?" if self.suggestions else ""
        return f"no worker {self.worker!r} in this deck{hint}"


class WorkerFailed(EverdeckError):
    """The worker crashed too often; it waits for a person."""

    def __init__(self, worker: str, why: str) -> None:
        self.worker = worker
        self.why = why
        super().__init__(f"worker {worker!r} has failed ({why}); look at its log, then reset it to start it again")


class RecordBroken(EverdeckError):
    """One worker's record cannot be read, so it cannot be started from it; the others are not concerned."""

    def __init__(self, worker: str, why: str) -> None:
        self.worker = worker
        self.why = why
        super().__init__(
            f"worker {worker!r}: its record cannot be read ({why}); "
            f"remove it, or start it with a command and replace=True"
        )


class LockConflict(EverdeckError):
    """The worker's lock is held by a process that is not ours to adopt; a second copy was not started."""

    def __init__(self, worker: str, pid: int | None, command: str) -> None:
        self.worker = worker
        self.pid = pid
        self.command = command
        holder = f"pid {pid} ({command})" if pid is not None else "a process that could not be found"
        super().__init__(f"worker {worker!r}: its lock is held by {holder}; a second copy was not started")


class PortUnavailable(EverdeckError):
    """No free port could be given to the worker, or its recorded port is taken by somebody else."""


class StopFailed(EverdeckError):
    """Parts of a worker's tree are alive after SIGKILL: in an uninterruptible call, or not ours to signal."""

    def __init__(self, worker: str, survivors: tuple[int, ...], why: str) -> None:
        self.worker = worker
        self.survivors = survivors
        self.why = why
        alive = f"still alive after SIGKILL: {survivors}: " if survivors else "not proven gone: "
        super().__init__(f"worker {worker!r}: {alive}{why}")


class Unsupported(EverdeckError):
    """This kind of deck cannot keep the verb; ``abilities`` says so beforehand."""

    def __init__(self, verb: str, reason: str) -> None:
        self.verb = verb
        self.reason = reason
        super().__init__(f"{verb} is not possible here: {reason}")


class AccessDenied(EverdeckError):
    """The caller is known and may not do this: it needs a higher role, or other labels."""

    def __init__(self, caller: str, what: str, needed: str) -> None:
        self.caller = caller
        self.what = what
        self.needed = needed
        super().__init__(f"{what} is not allowed for {caller!r}: it needs {needed}")


class DeckError(EverdeckError):
    """The deck as a whole cannot do what was asked."""


class DeckOwned(DeckError):
    """Another process owns this state directory."""

    def __init__(self, state_dir: str, pid: int | None) -> None:
        self.state_dir = state_dir
        self.pid = pid
        owner = f"pid {pid}" if pid is not None else "another process"
        super().__init__(f"the deck {state_dir} is owned by {owner}")


class DeckClosed(DeckError):
    """The deck is closed, or this process is a fork of the one that opened it."""


class StateDirRefused(DeckError):
    """The state directory cannot be used; the message says which path and why."""


class RegistryError(EverdeckError):
    """The registry cannot be read or written."""


class RegistryTooNew(RegistryError):
    """The registry was written by a newer Everdeck; it was left untouched."""


class RegistryUnavailable(RegistryError):
    """Disk full, read-only or locked. Running workers are untouched; try again when the cause is gone."""


class KernelError(EverdeckError):
    """The kernel refused something."""


class SpawnFailed(KernelError):
    """The program could not be executed; nothing was left behind."""

    def __init__(self, program: str, errno: int, what: str = "exec") -> None:
        self.program = program
        self.errno = errno
        self.what = what
        super().__init__(f"cannot start {program!r}: {what}: {os.strerror(errno)} (errno {errno})")


class ProcessGone(KernelError):
    """The process that was meant is no more. Whoever has its pid now is a stranger and was not touched."""


class NotPermitted(KernelError):
    """The process exists, and we may not signal or inspect it."""


class ResourceExhausted(KernelError):
    """Out of file descriptors, processes or memory; the message says which limit and how to raise it."""


class FeedError(EverdeckError):
    """The feed cannot go on."""


class CursorUnreadable(FeedError):
    """The cursor's file holds something that is not a cursor. It was kept; it is never taken for zero."""


class PollerConflict(FeedError):
    """Another process polls with the same token."""


class InboxUnavailable(FeedError):
    """The inbox cannot be written (disk full, read-only, locked): nothing was confirmed upstream."""


class SourceError(FeedError):
    """The source answered with something that is not a batch."""


class PerhapsSent(FeedError):
    """A message was on the wire when the process died, and was promised at most once: it is not sent again."""

    permanent = True


class FeedClosed(FeedError):
    """The feed, its inbox or its stream is not open, or is closing: nothing more is taken."""


class ClientError(EverdeckError):
    """A verb that was sent to the owner did not come back with an answer."""


class NoOwner(ClientError):
    """Nobody owns the deck, so nobody can act on it."""


class TokenRefused(ClientError):
    """The daemon lets nobody in without a token, and does not know this one (any more)."""


class OwnerRefused(ClientError):
    """The owner answered with an error of its own."""


class MessageError(EverdeckError):
    """A message cannot be answered or finished here."""


class MessageLost(MessageError):
    """Another reader has the message now: this one was silent for longer than its lease. Nothing was committed."""


class SendRefused(MessageError):
    """The other side will never take this message (an unknown chat, a refused address): it is set aside at once."""

    permanent = True
