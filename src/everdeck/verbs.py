"""The contract that every deck keeps: its verbs, what they answer, and which errors they may raise.

There is one contract and several decks that keep it: the owner of a state directory, a member that asks the owner,
somebody's daemon over HTTP, a namespace of a cluster. :class:`Verbs` is that contract as a type, and ``tests/contract``
holds every deck to it. A deck that cannot keep a verb raises :class:`everdeck.errors.Unsupported` with the reason, and
:meth:`Verbs.abilities` says so beforehand.

Every verb may raise :class:`DeckClosed` after closing, :class:`NameRefused` for a name that no worker can have, and
:class:`RegistryUnavailable` when the disk is full or read-only; the docstrings name the other errors of each. A deck
that is reached over a wire may also raise :class:`ClientError` when nobody answers. Whichever way an error travels,
it arrives as the class it was raised as, with the same fields.

A verb that acts is carried to its end once it has begun, though its caller may be cancelled, die or hang up.

:class:`Caller` is who asks. The ends of wires set it for the time of one request (:func:`asked_by`), and whoever
records what a request caused reads it (:func:`current_caller`). A caller that may ask again because it got no answer
gives the request an id (:func:`current_request`): a verb that was done under it is answered, not repeated.
"""

import builtins
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from os import PathLike
from pathlib import PurePath
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from everdeck.errors import SpecError
from everdeck.messages import FeedStatus, Letter, LetterVerb, MessageStream, Which
from everdeck.model import Event, Hold, Layer, ProcessInfo, WorkerName, WorkerSpec, WorkerStatus, worker_name

Name: TypeAlias = str | int
"""A worker's name as people type it: a user id may be a number."""

Run: TypeAlias = Sequence[str | PurePath] | WorkerSpec | None
"""What to run: a command, a whole spec, or None for the worker as it is known."""

Workers: TypeAlias = Mapping[str, Run] | Mapping[int, Run] | Mapping[str | int, Run]
"""What :meth:`Verbs.start_many` takes; spelled out, because a mapping's type is strict about its keys."""

Started: TypeAlias = Callable[[str, WorkerStatus | Exception], None]
"""Hears of each worker of :meth:`Verbs.start_many` or :meth:`Verbs.restart_many` as it is started or refused."""

Stopped: TypeAlias = Callable[[WorkerStatus], None]
"""Hears of each worker of :meth:`Verbs.stop_many` that is gone."""

Kind: TypeAlias = Literal["owner", "member", "remote", "cluster"]

RESTARTS_AT_ONCE: Final = 16
"""How many workers of many may be down at the same time while they are restarted, unless somebody says otherwise."""
MOST_AT_ONCE: Final = 256


def checked_parallel(given: object) -> int:
    """How many may be down at the same time, or :class:`SpecError`."""
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= MOST_AT_ONCE:
        raise SpecError("parallel", given, f"a number from 1 to {MOST_AT_ONCE}")
    return given


# --- who asks ---------------------------------------------------------------------------------------------------


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who asked for something: uid and pid over a socket of this machine, token and address over TCP."""

    uid: int | None = None
    pid: int | None = None
    token: str | None = None
    address: str | None = None

    def __str__(self) -> str:
        if self.token is not None or self.address is not None:
            return f"token {self.token} from {self.address}"
        return f"uid {self.uid}, pid {self.pid}"


class _Asking:
    """One request: who asked, under which id, and how many still act on it."""

    __slots__ = ("caller", "held", "request")

    def __init__(self, caller: Caller | None, request: str | None) -> None:
        self.caller = caller
        self.request = request
        self.held = 1


_asking: ContextVar[_Asking | None] = ContextVar("everdeck_asking", default=None)


def current_caller() -> Caller | None:
    """Who asked for what is being done now; None if it is our own idea or the program's that holds the deck.

    What a request set going for later (a timer, a health check) runs in a copy of its context and is not what was asked
    for: once the request is over, there is no caller there any more.
    """
    asking = _asking.get()
    return asking.caller if asking is not None and asking.held > 0 else None


def current_request() -> str | None:
    """The id that the caller gave to what is being done now: the same verb under the same id is one act."""
    asking = _asking.get()
    return asking.request if asking is not None and asking.held > 0 else None


def request_id(act: bytes) -> str | None:
    """The id of one act, by its content, of all that is done for the request; None if the caller gave none."""
    given = current_request()
    if given is None:
        return None
    import hashlib  # noqa: PLC0415 - takes 3 ms to load, and a command that only looks never comes here

    return hashlib.blake2b(given.encode("utf-8", "surrogateescape") + b"\0" + act, digest_size=16).hexdigest()


@contextlib.contextmanager
def asked_by(caller: Caller | None, request: str | None = None) -> Iterator[None]:
    """Within this, and in every task started in it until the request is over, ``caller`` is who asked."""
    asking = _Asking(caller, request)
    before = _asking.set(asking)
    try:
        yield
    finally:
        asking.held -= 1
        _asking.reset(before)


def still_asked() -> Callable[[], None]:
    """A verb goes on though its caller may leave: until the returned function is called, the request is not over."""
    asking = _asking.get()
    if asking is None:
        return _nothing
    asking.held += 1

    def over() -> None:
        asking.held -= 1

    return over


def _nothing() -> None:
    """Nobody asked."""


# --- what a caller typed ----------------------------------------------------------------------------------------


def spec_of(field: str, command: Run, fields: Mapping[str, Any]) -> WorkerSpec | None:
    """The spec that was typed as a command and fields, checked; None: the worker as it is known."""
    if command is None:
        if fields:
            raise SpecError(field, None, "a command, when other fields are given")
        return None
    return WorkerSpec.of(command, **fields)


def specs_of(workers: Workers, fields: Mapping[str, Any]) -> dict[WorkerName, WorkerSpec | None]:
    """The same for all that :meth:`Verbs.start_many` was given, each name once."""
    wanted: dict[WorkerName, WorkerSpec | None] = {}
    like: WorkerSpec | None = None  # the fields are the same for all, and are checked once
    for name, command in workers.items():
        key = worker_name(name)
        if key in wanted:
            raise SpecError("workers", key, "each name once")
        if command is None or isinstance(command, WorkerSpec):
            wanted[key] = spec_of(f"workers[{key!r}]", command, fields)
        elif like is None:
            wanted[key] = like = WorkerSpec.of(command, **fields)
        else:
            wanted[key] = like.with_command(command)
    return wanted


def told_once(progress: Callable[..., None], name_of: Callable[..., str]) -> Callable[..., None]:
    """Progress that hears of each worker once, though an owner that took over tells of all of them again."""
    told: set[str] = set()

    def tell(*said: Any) -> None:
        if (name := name_of(*said)) not in told:
            told.add(name)
            progress(*said)

    return tell


# --- what verbs answer, beside the values of everdeck.model -----------------------------------------------------


class Inspection(msgspec.Struct, frozen=True):
    """Everything about one worker: as it is, what it runs, what protects it, its processes, when it crashed."""

    status: WorkerStatus
    spec: WorkerSpec
    layers: list[Layer]
    tree: list[ProcessInfo]
    crash_times: list[datetime]
    holds: list[Hold] = []


class Abilities(msgspec.Struct, frozen=True):
    """What a deck can do: which kind it is, where, and the verbs it cannot keep, each with the reason."""

    kind: Kind
    where: str
    unsupported: dict[str, str] = {}

    def can(self, verb: str) -> bool:
        """Does it keep this verb?"""
        return verb not in self.unsupported


class Member(msgspec.Struct, frozen=True):
    """One process that has the deck open."""

    pid: int
    uid: int
    program: str
    owner: bool = False
    since: datetime | None = None


# --- the contract -----------------------------------------------------------------------------------------------


class Verbs(Protocol):
    """What can be asked of any deck."""

    async def start(self, name: Name, command: Run = None, *, replace: bool = False, **fields: Any) -> WorkerStatus:
        """Start a worker; return when its program has been exec'ed and recorded.

        Without a command a known worker is started again. A running worker with the same spec is left alone.

        Raises:
            SpecError: what was asked for is not valid; nothing was written.
            LimitUnavailable: a limit was asked for that this machine cannot enforce.
            SpecChanged: it runs with another spec, and ``replace`` is false.
            UnknownWorker: no command was given and nobody of that name is known.
            WorkerFailed: its breaker has tripped.
            LockConflict: somebody else holds its lock.
            PortUnavailable: it has no free port.
            SpawnFailed: its program cannot be executed.
            ResourceExhausted: out of descriptors, processes or memory.
            StopFailed: it was to be replaced, and parts of it survived SIGKILL.
        """

    async def start_many(
        self, workers: Workers, *, replace: bool = False, progress: Started | None = None, **fields: Any
    ) -> builtins.list[WorkerStatus]:
        """Start many: what :meth:`start` promises for each, at a lower price, because they share their commits.

        ``workers`` maps names to commands or specs (None: the worker as it is known); ``fields`` are for all of them.
        Everything is checked before anything is started. A worker that cannot be started does not keep the others
        from it: ``progress`` hears of each as it is started or refused.

        Raises:
            SpecError: one of them is not valid; none was started.
            ExceptionGroup: the refusals of single workers, together; the others run.
        """

    async def stop(self, name: Name) -> WorkerStatus:
        """Stop a worker; return when its whole tree is proven gone.

        Raises:
            UnknownWorker: nobody of that name is known.
            StopFailed: parts of its tree survived SIGKILL.
        """

    async def stop_many(self, names: Iterable[Name], progress: Stopped | None = None) -> builtins.list[WorkerStatus]:
        """Stop many at once; ``progress`` hears of each one that is gone. Raises as :meth:`stop`."""

    async def stop_all(self) -> builtins.list[WorkerStatus]:
        """Stop every worker of the deck. Raises as :meth:`stop`."""

    async def restart(self, name: Name) -> WorkerStatus:
        """Stop a worker and start it again with the spec it has. Raises as :meth:`stop` and :meth:`start`."""

    async def restart_many(
        self, names: Iterable[Name], *, parallel: int = RESTARTS_AT_ONCE, progress: Started | None = None
    ) -> builtins.list[WorkerStatus]:
        """Restart many, in groups: at most ``parallel`` of them are down at the same time.

        A worker that cannot be restarted does not keep the others from it: ``progress`` hears of each as it runs again
        or is refused.

        Raises:
            UnknownWorker: nobody of one of the names is known; none was restarted.
            SpecError: ``parallel`` is not a number from 1 to 256.
            ExceptionGroup: the refusals of single workers, together; the others run.
        """

    async def reset(self, name: Name) -> WorkerStatus:
        """Forget a worker's crashes; if it should run and does not, start it now. Raises as :meth:`start`."""

    async def remove(self, name: Name, *, data: bool = False) -> None:
        """Stop a worker and remove its record, log, data and secrets. Raises as :meth:`stop`.

        A cluster keeps its volume, and with it data and log, unless ``data`` is true; one box never keeps them.
        """

    async def adopt(self, name: Name, pid: int, **fields: Any) -> WorkerStatus:
        """Take over a process that somebody else started, without stopping it.

        Raises:
            SpecError: the pid is not of a running process that can be taken over, or a field is not valid.
            SpecChanged: a worker of that name is running already.
            LockConflict: somebody else holds the worker's lock.
            NotPermitted: the process is not ours to inspect.
            Unsupported: this deck has no processes of its own.
        """

    async def reconcile(self) -> None:
        """Compare every worker with the kernel now and act on differences; rarely needed, deaths are heard at once."""

    async def status(self, name: Name) -> WorkerStatus:
        """One worker as it is now.

        Raises:
            UnknownWorker: nobody of that name is known.
        """

    async def list(self) -> builtins.list[WorkerStatus]:
        """Every worker as it is now, by name."""

    async def inspect(self, name: Name) -> Inspection:
        """Everything about one worker. Raises as :meth:`status`."""

    async def spec(self, name: Name) -> WorkerSpec:
        """What a worker runs; the values of its secrets are None. Raises as :meth:`status`."""

    async def tree(self, name: Name) -> builtins.list[ProcessInfo]:
        """Every process of a worker's tree. Raises as :meth:`status`."""

    async def layers(self, name: Name) -> builtins.list[Layer]:
        """Which of the four layers protect a worker here, and how strongly. Raises as :meth:`status`."""

    async def logs(
        self,
        name: Name,
        lines: int | None = 20,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        grep: str | None = None,
    ) -> builtins.list[str]:
        """The last lines of a worker's log (None: all of them), across rotations.

        Raises:
            UnknownWorker: nobody of that name is known.
            SpecError: ``grep`` is not a pattern.
        """

    def follow_logs(self, name: Name, lines: int = 0, *, grep: str | None = None) -> AsyncIterator[str]:
        """The last lines of a worker's log, then each new one as it is written. Raises as :meth:`logs`."""

    async def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> builtins.list[Event]:
        """What happened after an event id, oldest first; durable, so it can be replayed."""

    async def last_event_id(self) -> int:
        """The id of the newest event, 0 if nothing ever happened."""

    def follow(self, after: int | None = None) -> AsyncIterator[Event]:
        """Each event after an id (None: from now on), then each new one as it happens: in order, each once."""

    def on_event(self, callback: Callable[[Event], Any]) -> Callable[[], None]:
        """Call back for each event from now on; returns what unsubscribes.

        The callback may be slow or raise: it harms nobody else, and is told nothing twice.
        """

    def messages(self, name: Name | None = None, *, run: Callable[[Any], Any] | None = None) -> MessageStream:
        """What comes in by a satellite (None: by all of them): ``async for message in deck.messages(): …``.

        Each message is handed to one reader of all programs that read. Messages of one conversation come one after
        another, in order. A reader that dies leaves its message for the next. ``run`` is for callers that have no event
        loop: it carries out a coroutine in the deck's own.

        Raises, with the first message:
            UnknownWorker: nobody of that name is known.
            SpecError: it is no satellite, or one whose messages go elsewhere.
            Unsupported: this deck's satellites are where their messages cannot be read.
        """

    async def send(
        self,
        name: Name,
        *,
        to: str | int,
        text: str = "",
        subject: str | None = None,
        attachments: Sequence[str | PathLike[str]] = (),
        **options: Any,
    ) -> int:
        """Send a message by a satellite; returns its number once it is on disk. The satellite sends it and retries.

        Raises:
            UnknownWorker: nobody of that name is known.
            SpecError: it is no satellite that can send, or the message cannot be one.
            Unsupported: attachments are files of another machine than the satellite's; or as :meth:`messages`.
        """

    async def feed(self, name: Name) -> FeedStatus:
        """A satellite's feed: account, connection, what waits, is in flight, done, set aside, to be sent.

        Raises:
            UnknownWorker: nobody of that name is known.
            SpecError: it is no satellite.
            Unsupported: as :meth:`messages`.
        """

    async def letters(
        self, name: Name, *, which: Which = "dead", number: str | None = None, limit: int = 100
    ) -> builtins.list[Letter]:
        """What is in a satellite's feed: set aside (``dead``), ``waiting``, ``done``, or ``all`` that is not done.

        Raises as :meth:`feed`.
        """

    async def decide(self, name: Name, verb: LetterVerb, number: str) -> bool:
        """``retry`` or ``drop`` a dead letter, or ``replay`` a done message; False if there is none of that number.

        Raises as :meth:`feed`.
        """

    async def abilities(self) -> Abilities:
        """What this deck can do, and which verbs it cannot keep."""

    async def members(self) -> builtins.list[Member]:
        """Every process that has the deck open, its owner first."""


class OpenDeck(Verbs, Protocol):
    """A deck with its beginning and its end."""

    async def open(self) -> object:
        """Reach it; raises what keeps it from being reached."""

    async def close(self) -> None:
        """Let go of it."""


@runtime_checkable
class Beside(Protocol):
    """What a daemon needs of a deck beside the verbs, when the deck's files are not on its machine."""

    async def whole_spec(self, name: Name) -> WorkerSpec:
        """What a worker runs, with the values of its secrets."""

    async def applied(self) -> bytes | None:
        """What the last configuration left to be remembered; None if there was none."""

    async def remember_applied(self, memory: bytes) -> None:
        """Keep that for the next one."""

    def configure(self, told: Mapping[str, Any]) -> None:
        """What a configuration file says about this kind of deck wins over what the deck itself keeps."""
