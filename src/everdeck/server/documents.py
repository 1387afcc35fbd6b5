"""The shapes that only the HTTP API has: pages of workers, details, plans, bodies of requests.

Everything else it sends are the values of :mod:`everdeck.model` themselves, so the OpenAPI document describes one
set of types.
"""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from everdeck.faults import Fault
from everdeck.model import Hold, Secret, State, WorkerSpec, WorkerStatus
from everdeck.server.problems import Problem
from everdeck.specforms import optional_fields, view_fields
from everdeck.verbs import MOST_AT_ONCE, RESTARTS_AT_ONCE

NAME_RULE = Meta(
    description="1-128 characters of A-Z a-z 0-9 . _ - @ : +, but not '.' or '..'",
    examples=["alice"],
)


class WorkerPage(msgspec.Struct, frozen=True):
    """Some of the workers; ``next`` is the cursor of the following page."""

    supervised: bool
    owner_pid: int | None
    total: int
    counts: dict[State, int]
    workers: list[WorkerStatus]
    next: str | None = None


_OWN_FIELDS: Final = optional_fields(
    parts=True,
    secrets=Annotated[dict[str, str | Secret], Meta(description="Secrets with their values.")],
    satellite=Annotated[str | dict[str, Any], Meta(description="Its kind, or kind and options, as in a file.")],
)
# The fields of a spec that a request may give beside a template, and a spec as it is shown: both made from WorkerSpec.
_OwnFields: Any = msgspec.defstruct(
    "_OwnFields",
    [
        ("name", Annotated[str, NAME_RULE]),
        ("spec", WorkerSpec | UnsetType, UNSET),
        ("template", str | UnsetType, UNSET),
        *_OWN_FIELDS,
    ],
    frozen=True,
    forbid_unknown_fields=True,
)
_Shown: Any = msgspec.defstruct(
    "_Shown",
    view_fields(env={"env_keys": list[str]}, secrets={"secret_names": list[str]}),
    frozen=True,
)


class NewWorker(_OwnFields):  # type: ignore[misc]  # made above
    """A worker to start: by a whole ``spec``, or by a ``template`` and what is special about this one."""


class SpecView(_Shown):  # type: ignore[misc]  # made above
    """A spec as it may be shown: names of environment variables and secrets, never their values."""

    @classmethod
    def of(cls, spec: WorkerSpec) -> "SpecView":
        """The view of a spec."""
        shown = {name: getattr(spec, name) for name in spec.__struct_fields__ if name not in {"env", "secrets"}}
        return cls(**shown, env_keys=sorted(spec.env), secret_names=sorted(spec.secrets))


class LayerView(msgspec.Struct, frozen=True):
    """One of the four layers that keep a worker from being lost or doubled."""

    layer: str
    holds: bool
    strength: str
    why: str


class ProcessView(msgspec.Struct, frozen=True):
    """One process of a worker's tree."""

    pid: int
    ppid: int
    name: str
    command: str
    state: str
    rss_bytes: int | None


class WorkerDetail(msgspec.Struct, frozen=True):
    """Everything about one worker."""

    status: WorkerStatus
    spec: SpecView
    layers: list[LayerView]
    tree: list[ProcessView]
    crash_times: list[datetime]
    holds: list[Hold]


class Bulk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One verb for many workers."""

    verb: Literal["start", "stop", "restart", "reset", "remove"]
    names: list[str] | Literal["all"]
    parallel: Annotated[
        int, Meta(ge=1, le=MOST_AT_ONCE, description="How many are restarted or reset at the same time.")
    ] = RESTARTS_AT_ONCE


class BulkResult(msgspec.Struct, frozen=True):
    """What became of one worker."""

    name: str
    ok: bool
    status: WorkerStatus | None = None
    problem: Problem | None = None


class BulkResults(msgspec.Struct, frozen=True):
    """What became of each worker, in the order they were named."""

    results: list[BulkResult]


class LogLines(msgspec.Struct, frozen=True):
    """Lines of a worker's log, oldest first, safe to print."""

    lines: list[str]


class NamedLine(msgspec.Struct, frozen=True):
    """One line, safe to print, and whose it is."""

    worker: str
    text: str


class NamedLines(msgspec.Struct, frozen=True):
    """Lines of several logs, those of one worker after those of another."""

    lines: list[NamedLine]


class DeckView(msgspec.Struct, frozen=True):
    """The deck as a whole."""

    supervised: bool
    owner_pid: int
    deck_id: str
    version: str
    state_dir: str
    started_at: datetime
    counts: dict[State, int]
    last_event_id: int
    now: datetime
    # Where the page is served; None with --no-http.
    page: str | None
    # Where a command that a person types here most likely finds its files.
    directory: str


class TemplateView(msgspec.Struct, frozen=True):
    """A template, as written in everdeck.toml."""

    name: str
    spec: dict[str, Any]


class Series(msgspec.Struct, frozen=True):
    """Samples of one worker: seconds since the epoch, percent of one core, bytes."""

    at: list[float]
    cpu: list[float | None]
    rss: list[int | None]


_Adopting: Any = msgspec.defstruct(
    "_Adopting",
    [("pid", int), *(field for field in _OWN_FIELDS if field[0] != "command")],
    frozen=True,
    forbid_unknown_fields=True,
)


class AdoptRequest(_Adopting):  # type: ignore[misc]  # made above
    """A process that somebody else started, to be taken over, with any fields of a spec but its command."""


class StartMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers to start together; null for one that is known already."""

    workers: dict[str, WorkerSpec | None]
    replace: bool = False


class StopMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers to stop together."""

    names: list[str] | Literal["all"]


class RestartMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers to restart, and how many of them may be down at the same time."""

    names: list[str] | Literal["all"]
    parallel: Annotated[int, Meta(ge=1, le=MOST_AT_ONCE)] = RESTARTS_AT_ONCE


class ManyTold(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one worker (``name``), or in the last line what became of all: ``done`` or ``fault``."""

    name: str | None = None
    status: WorkerStatus | None = None
    fault: Fault | None = None
    done: list[WorkerStatus] | None = None


class ApplyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole configuration: what there should be, and whether to do it or only to say what would be done."""

    workers: dict[str, WorkerSpec]
    templates: dict[str, dict[str, Any]] = {}
    file: str | None = None
    dry_run: bool = False


class Change(msgspec.Struct, frozen=True):
    """One line of a plan."""

    name: str
    action: Literal["add", "change", "remove", "unchanged"]
    fields: tuple[str, ...] = ()


class Applied(msgspec.Struct, frozen=True):
    """The plan, and what became of each change if it was carried out."""

    plan: list[Change]
    results: list[BulkResult]
    dry_run: bool


class HealthAnswer(msgspec.Struct, frozen=True):
    """Two facts: the daemon is up, and the workers are supervised."""

    up: bool
    supervised: bool


class DownAnswer(msgspec.Struct, frozen=True):
    """The daemon leaves now; this many workers run on without it."""

    owner_pid: int
    left_running: int


class ReloadAnswer(msgspec.Struct, frozen=True):
    """The daemon goes on under this pid with the new code."""

    owner_pid: int
    version: str
