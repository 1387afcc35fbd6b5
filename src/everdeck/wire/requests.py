"""Each verb of the contract as a value that travels: what it asks, what it answers, and whom it calls.

A verb that acts carries a request id beside it (:class:`everdeck.wire.frames.Ask`), and ``deed`` names the event that
says that it was done: an owner that finds that event recorded for the id answers, and does not act again.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from functools import cache
from typing import Any, ClassVar, Generic, Protocol, TypeVar, Union

import msgspec

from everdeck.faults import Fault, error_of, fault_of
from everdeck.model import Event, EventKind, Layer, ProcessInfo, WorkerSpec, WorkerStatus
from everdeck.verbs import RESTARTS_AT_ONCE, Abilities, Inspection, Member, Verbs

T = TypeVar("T")


class Served(Verbs, Protocol):
    """What an owner answers beside the contract."""

    async def record_event(self, worker: str | None, kind: EventKind, detail: dict[str, Any]) -> Event:
        """Add an event of somebody else's."""

    def wakes(self) -> AsyncIterator[int]:
        """The id of the newest event, whenever it has changed since the last look."""


class Verb(msgspec.Struct, Generic[T], frozen=True, tag_field="verb", omit_defaults=True):
    """One question. ``answers`` is the type of its answer, ``items`` that of its progress or of its stream."""

    answers: ClassVar[Any] = None
    items: ClassVar[Any] = None
    deed: ClassVar[EventKind | None] = None

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[T]:
        """Ask the deck; ``tell`` hears of progress."""
        raise NotImplementedError


class Stream(Verb[T], frozen=True):
    """A question with many answers."""

    def open(self, deck: Served) -> AsyncIterator[T]:
        """The answers, one by one."""
        raise NotImplementedError


# --- verbs that act ---------------------------------------------------------------------------------------------


class Start(Verb[WorkerStatus], frozen=True, tag="start"):
    """Start one worker; without a spec, as it is known."""

    name: str
    spec: WorkerSpec | None = None
    replace: bool = False
    answers: ClassVar[Any] = WorkerStatus
    deed: ClassVar[EventKind | None] = EventKind.STARTED

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[WorkerStatus]:  # noqa: ARG002
        """As :meth:`Verbs.start`."""
        return deck.start(self.name, self.spec, replace=self.replace)


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one of many went."""

    name: str
    status: WorkerStatus | None = None
    fault: Fault | None = None

    @classmethod
    def of(cls, name: str, answer: WorkerStatus | Exception) -> "Told":
        """As it travels."""
        return cls(name, fault=fault_of(answer)) if isinstance(answer, Exception) else cls(name, answer)

    @property
    def answer(self) -> WorkerStatus | Exception:
        """As it was told."""
        if self.status is not None:
            return self.status
        return error_of(self.fault or Fault("OwnerRefused", "neither done nor refused"))


class StartMany(Verb[list[WorkerStatus]], frozen=True, tag="start_many"):
    """Start many."""

    workers: dict[str, WorkerSpec | None]
    replace: bool = False
    progress: bool = False
    answers: ClassVar[Any] = list[WorkerStatus]
    items: ClassVar[Any] = Told
    deed: ClassVar[EventKind | None] = EventKind.STARTED

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[list[WorkerStatus]]:
        """As :meth:`Verbs.start_many`."""
        told = (lambda name, answer: tell(Told.of(name, answer))) if self.progress else None
        return deck.start_many(self.workers, replace=self.replace, progress=told)


class StopMany(Verb[list[WorkerStatus]], frozen=True, tag="stop"):
    """Stop some."""

    names: list[str]
    progress: bool = False
    answers: ClassVar[Any] = list[WorkerStatus]
    items: ClassVar[Any] = WorkerStatus
    deed: ClassVar[EventKind | None] = EventKind.STOPPED

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[list[WorkerStatus]]:
        """As :meth:`Verbs.stop_many`."""
        return deck.stop_many(self.names, tell if self.progress else None)


class StopAll(Verb[list[WorkerStatus]], frozen=True, tag="stop_all"):
    """Stop everybody."""

    answers: ClassVar[Any] = list[WorkerStatus]
    deed: ClassVar[EventKind | None] = EventKind.STOPPED

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[list[WorkerStatus]]:  # noqa: ARG002
        """As :meth:`Verbs.stop_all`."""
        return deck.stop_all()


class Restart(Verb[WorkerStatus], frozen=True, tag="restart"):
    """Stop one and start it again."""

    name: str
    answers: ClassVar[Any] = WorkerStatus
    deed: ClassVar[EventKind | None] = EventKind.RESTARTED

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[WorkerStatus]:  # noqa: ARG002
        """As :meth:`Verbs.restart`."""
        return deck.restart(self.name)


class RestartMany(Verb[list[WorkerStatus]], frozen=True, tag="restart_many"):
    """Restart some, so many at the same time."""

    names: list[str]
    parallel: int = RESTARTS_AT_ONCE
    progress: bool = False
    answers: ClassVar[Any] = list[WorkerStatus]
    items: ClassVar[Any] = Told
    deed: ClassVar[EventKind | None] = EventKind.RESTARTED

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[list[WorkerStatus]]:
        """As :meth:`Verbs.restart_many`."""
        told = (lambda name, answer: tell(Told.of(name, answer))) if self.progress else None
        return deck.restart_many(self.names, parallel=self.parallel, progress=told)


class Reset(Verb[WorkerStatus], frozen=True, tag="reset"):
    """Forget its crashes."""

    name: str
    answers: ClassVar[Any] = WorkerStatus
    deed: ClassVar[EventKind | None] = EventKind.RESET

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[WorkerStatus]:  # noqa: ARG002
        """As :meth:`Verbs.reset`."""
        return deck.reset(self.name)


class Remove(Verb[None], frozen=True, tag="remove"):
    """Stop one and forget it."""

    name: str
    answers: ClassVar[Any] = None
    deed: ClassVar[EventKind | None] = EventKind.STOPPED

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[None]:  # noqa: ARG002
        """As :meth:`Verbs.remove`."""
        return deck.remove(self.name)


class Adopt(Verb[WorkerStatus], frozen=True, tag="adopt"):
    """Take over a process. ``fields`` are of the spec; ``given`` says which were."""

    name: str
    pid: int
    fields: dict[str, Any] = {}
    answers: ClassVar[Any] = WorkerStatus
    deed: ClassVar[EventKind | None] = EventKind.ADOPTED

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[WorkerStatus]:  # noqa: ARG002
        """As :meth:`Verbs.adopt`."""
        spec = msgspec.convert({"command": ["-"], **self.fields}, WorkerSpec)
        return deck.adopt(self.name, self.pid, **{name: getattr(spec, name) for name in self.fields})


class Reconcile(Verb[None], frozen=True, tag="reconcile"):
    """Compare everything with the kernel."""

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[None]:  # noqa: ARG002
        """As :meth:`Verbs.reconcile`."""
        return deck.reconcile()


class RecordEvent(Verb[Event], frozen=True, tag="record_event"):
    """Add an event of somebody else's."""

    worker: str | None
    kind: EventKind
    detail: dict[str, Any]
    answers: ClassVar[Any] = Event

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[Event]:  # noqa: ARG002
        """As :meth:`Served.record_event`."""
        return deck.record_event(self.worker, self.kind, self.detail)


# --- verbs that tell --------------------------------------------------------------------------------------------


class Status(Verb[WorkerStatus], frozen=True, tag="status"):
    """One worker as it is."""

    name: str
    answers: ClassVar[Any] = WorkerStatus

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[WorkerStatus]:  # noqa: ARG002
        """As :meth:`Verbs.status`."""
        return deck.status(self.name)


class List(Verb[list[WorkerStatus]], frozen=True, tag="list"):
    """Every worker as it is."""

    answers: ClassVar[Any] = list[WorkerStatus]

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[list[WorkerStatus]]:  # noqa: ARG002
        """As :meth:`Verbs.list`."""
        return deck.list()


class Inspect(Verb[Inspection], frozen=True, tag="inspect"):
    """Everything about one worker."""

    name: str
    answers: ClassVar[Any] = Inspection

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[Inspection]:  # noqa: ARG002
        """As :meth:`Verbs.inspect`."""
        return deck.inspect(self.name)


class Spec(Verb[WorkerSpec], frozen=True, tag="spec"):
    """What one worker runs."""

    name: str
    answers: ClassVar[Any] = WorkerSpec

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[WorkerSpec]:  # noqa: ARG002
        """As :meth:`Verbs.spec`."""
        return deck.spec(self.name)


class Tree(Verb[list[ProcessInfo]], frozen=True, tag="tree"):
    """One worker's processes."""

    name: str
    answers: ClassVar[Any] = list[ProcessInfo]

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[list[ProcessInfo]]:  # noqa: ARG002
        """As :meth:`Verbs.tree`."""
        return deck.tree(self.name)


class Layers(Verb[list[Layer]], frozen=True, tag="layers"):
    """What protects one worker."""

    name: str
    answers: ClassVar[Any] = list[Layer]

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[list[Layer]]:  # noqa: ARG002
        """As :meth:`Verbs.layers`."""
        return deck.layers(self.name)


class Logs(Verb[list[str]], frozen=True, tag="logs"):
    """The last lines of one worker's log."""

    name: str
    lines: int | None = 20
    since: datetime | None = None
    until: datetime | None = None
    grep: str | None = None
    answers: ClassVar[Any] = list[str]

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[list[str]]:  # noqa: ARG002
        """As :meth:`Verbs.logs`."""
        return deck.logs(self.name, self.lines, since=self.since, until=self.until, grep=self.grep)


class Events(Verb[list[Event]], frozen=True, tag="events"):
    """What happened."""

    after: int = 0
    limit: int | None = None
    worker: str | None = None
    answers: ClassVar[Any] = list[Event]

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[list[Event]]:  # noqa: ARG002
        """As :meth:`Verbs.events`."""
        return deck.events(self.after, self.limit, self.worker)


class LastEventId(Verb[int], frozen=True, tag="last_event_id"):
    """Where the stream ends now."""

    answers: ClassVar[Any] = int

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[int]:  # noqa: ARG002
        """As :meth:`Verbs.last_event_id`."""
        return deck.last_event_id()


class AskAbilities(Verb[Abilities], frozen=True, tag="abilities"):
    """What this deck can do."""

    answers: ClassVar[Any] = Abilities

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[Abilities]:  # noqa: ARG002
        """As :meth:`Verbs.abilities`."""
        return deck.abilities()


class Members(Verb[list[Member]], frozen=True, tag="members"):
    """Who has the deck open."""

    answers: ClassVar[Any] = list[Member]

    def call(self, deck: Served, tell: Callable[[Any], None]) -> Awaitable[list[Member]]:  # noqa: ARG002
        """As :meth:`Verbs.members`."""
        return deck.members()


# --- streams ----------------------------------------------------------------------------------------------------


class Follow(Stream[Event], frozen=True, tag="follow"):
    """Events as they happen."""

    after: int | None = None
    items: ClassVar[Any] = Event

    def open(self, deck: Served) -> AsyncIterator[Event]:
        """As :meth:`Verbs.follow`."""
        return deck.follow(self.after)


class FollowLogs(Stream[str], frozen=True, tag="follow_logs"):
    """A worker's log as it is written."""

    name: str
    lines: int = 0
    grep: str | None = None
    items: ClassVar[Any] = str

    def open(self, deck: Served) -> AsyncIterator[str]:
        """As :meth:`Verbs.follow_logs`."""
        return deck.follow_logs(self.name, self.lines, grep=self.grep)


class Wakes(Stream[int], frozen=True, tag="wakes"):
    """For a member that reads events from the disk: when there is something to read."""

    items: ClassVar[Any] = int

    def open(self, deck: Served) -> AsyncIterator[int]:
        """As :meth:`Served.wakes`."""
        return deck.wakes()


ALL = (
    *(Start, StartMany, StopMany, StopAll, Restart, RestartMany, Reset, Remove, Adopt, Reconcile, RecordEvent),
    *(Status, List, Inspect, Spec, Tree, Layers, Logs, Events, LastEventId, AskAbilities, Members),
    *(Follow, FollowLogs, Wakes),
)


def decode_verb(asked: msgspec.Raw) -> "Verb[Any]":
    """What was asked, of whatever kind."""
    verb: Verb[Any] = _verbs().decode(asked)
    return verb


@cache
def _verbs() -> "msgspec.msgpack.Decoder[Any]":
    """Made when the first verb comes: it looks at every field of every verb, and who asks needs none of that."""
    return msgspec.msgpack.Decoder(Union[ALL])  # noqa: UP007 - made from the tuple above


@cache
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """What decodes an answer or an item of this type."""
    return msgspec.msgpack.Decoder(kind)
