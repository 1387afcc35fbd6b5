"""What the detail of an event holds, kind by kind.

``Event.detail`` is a mapping, in Python as in JSON; these types say which keys it has. Whoever appends an event is held
to them by mypy (:class:`Append`), and a test holds the events of real decks and the table in
docs/reference/events-and-states.md to them. A key is added here first.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NotRequired, Protocol, TypedDict, Unpack, cast, overload

from everdeck.model import Event, EventKind


class Told(TypedDict):
    """What any event may tell: at whose request, or for which reason of our own, it happened."""

    by: NotRequired[str | dict[str, Any]]


class ExitTold(TypedDict):
    """How a process ended, as :data:`everdeck.model.Exit` is written."""

    kind: Literal["exited", "killed", "unknown"]
    code: NotRequired[int]
    signal: NotRequired[int]
    oom: NotRequired[bool]


class Survivor(TypedDict):
    """A process that outlived the polite signal."""

    pid: int
    command: str


class Started(Told):
    """``started`` and ``restarted``."""

    pid: int


class Ready(Told):
    """``ready``: it said so, or it recovered."""

    pid: NotRequired[int | None]
    recovered: NotRequired[bool]


class Adopted(Told):
    """``adopted``; the command of a process that somebody else had started."""

    pid: int | None
    command: NotRequired[str]


class Stopping(Told):
    """``stopping``; ``reason`` and ``survivors`` when SIGKILL was not enough: they sit in a call that never returns."""

    pid: int | None
    reason: NotRequired[str]
    survivors: NotRequired[list[Survivor]]


class Stopped(Told):
    """``stopped``; ``removed`` with the worker itself."""

    pid: NotRequired[int | None]
    exit: NotRequired[ExitTold | None]
    removed: NotRequired[bool]


class Ended(Told):
    """``exited`` and ``crashed``; ``error`` when it could not be executed, ``left_behind`` by one that daemonised."""

    pid: int | None
    exit: NotRequired[ExitTold]
    uptime_seconds: NotRequired[float]
    delay_seconds: NotRequired[float]
    reason: NotRequired[str]
    error: NotRequired[str]
    why_unknown: NotRequired[str]
    oom_kills: NotRequired[int]
    left_behind: NotRequired[list[str]]


class Failed(Told):
    """``failed``."""

    crashes: int
    reason: NotRequired[str]
    error: NotRequired[str]


class Reset(Told):
    """``reset``."""


class Unhealthy(Told):
    """``unhealthy``."""

    reason: str
    pid: int | None


class Killed(Told):
    """``killed``; ``at`` when the guardian did it and nobody could note it at once; ``oom_kills`` by the kernel."""

    survivors: list[Survivor]
    at: NotRequired[float]
    reason: NotRequired[str]
    oom_kills: NotRequired[int]


class OrphanReaped(Told):
    """``orphan-reaped``."""

    pid: int | None
    why: str


class Conflict(Told):
    """``lock-conflict``."""

    pid: int | None
    command: str
    why: NotRequired[str]


class LogRotated(Told):
    """``log-rotated``."""

    archives: list[str]
    bytes: int
    method: NotRequired[str]
    pruned: list[str]
    skipped_bytes: NotRequired[int]
    warning: NotRequired[str]


class OwnerChanged(Told):
    """``owner-changed``; ``set_aside`` when the registry was not sound, and whom the kernel knew better than it."""

    pid: int
    previous_pid: int | None
    set_aside: NotRequired[str]
    found_by_lock: NotRequired[list[str]]
    homes_made_again: NotRequired[list[str]]
    why: NotRequired[str | None]


DETAILS: Final[Mapping[EventKind, Any]] = {
    EventKind.STARTED: Started,
    EventKind.READY: Ready,
    EventKind.ADOPTED: Adopted,
    EventKind.STOPPING: Stopping,
    EventKind.STOPPED: Stopped,
    EventKind.EXITED: Ended,
    EventKind.CRASHED: Ended,
    EventKind.RESTARTED: Started,
    EventKind.FAILED: Failed,
    EventKind.RESET: Reset,
    EventKind.UNHEALTHY: Unhealthy,
    EventKind.KILLED: Killed,
    EventKind.ORPHAN_REAPED: OrphanReaped,
    EventKind.LOCK_CONFLICT: Conflict,
    EventKind.LOG_ROTATED: LogRotated,
    EventKind.OWNER_CHANGED: OwnerChanged,
}
"""The keys of each kind. ``feed`` is not in here: what it tells is the worker's own word."""


class Append(Protocol):
    """Notes down what happened, with the detail that belongs to the kind."""

    @overload
    def __call__(
        self, worker: str, kind: Literal[EventKind.STARTED, EventKind.RESTARTED], /, **detail: Unpack[Started]
    ) -> Event: ...
    @overload
    def __call__(self, worker: str, kind: Literal[EventKind.READY], /, **detail: Unpack[Ready]) -> Event: ...
    @overload
    def __call__(self, worker: str, kind: Literal[EventKind.ADOPTED], /, **detail: Unpack[Adopted]) -> Event: ...
    @overload
    def __call__(self, worker: str, kind: Literal[EventKind.STOPPING], /, **detail: Unpack[Stopping]) -> Event: ...
    @overload
    def __call__(self, worker: str, kind: Literal[EventKind.STOPPED], /, **detail: Unpack[Stopped]) -> Event: ...
    @overload
    def __call__(
        self, worker: str, kind: Literal[EventKind.EXITED, EventKind.CRASHED], /, **detail: Unpack[Ended]
    ) -> Event: ...
    @overload
    def __call__(self, worker: str, kind: Literal[EventKind.FAILED], /, **detail: Unpack[Failed]) -> Event: ...
    @overload
    def __call__(self, worker: str, kind: Literal[EventKind.RESET], /, **detail: Unpack[Reset]) -> Event: ...
    @overload
    def __call__(self, worker: str, kind: Literal[EventKind.UNHEALTHY], /, **detail: Unpack[Unhealthy]) -> Event: ...
    @overload
    def __call__(self, worker: str, kind: Literal[EventKind.KILLED], /, **detail: Unpack[Killed]) -> Event: ...
    @overload
    def __call__(
        self, worker: str, kind: Literal[EventKind.ORPHAN_REAPED], /, **detail: Unpack[OrphanReaped]
    ) -> Event: ...
    @overload
    def __call__(self, worker: str, kind: Literal[EventKind.LOCK_CONFLICT], /, **detail: Unpack[Conflict]) -> Event: ...
    @overload
    def __call__(self, worker: str, kind: Literal[EventKind.LOG_ROTATED], /, **detail: Unpack[LogRotated]) -> Event: ...
    @overload
    def __call__(
        self, worker: None, kind: Literal[EventKind.OWNER_CHANGED], /, **detail: Unpack[OwnerChanged]
    ) -> Event: ...
    @overload
    def __call__(self, worker: str, kind: Literal[EventKind.FEED], /, **detail: Any) -> Event: ...


class AppendMethod(Protocol):
    """:class:`Append` as a method of whoever keeps events."""

    def __get__(self, keeper: Any, kind: type | None = None, /) -> Append: ...


def typed(append: Callable[..., Event]) -> AppendMethod:
    """The same method, with its callers held to the details of each kind."""
    return cast("AppendMethod", append)
