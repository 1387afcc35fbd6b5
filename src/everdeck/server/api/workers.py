"""``/api/v1/workers``: the list, and one worker with its verbs."""

import asyncio
import base64
import binascii
import hashlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
from litestar import Response, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from msgspec import UNSET

from everdeck.access import Role
from everdeck.config import spec_from_template
from everdeck.errors import SpecError
from everdeck.model import Secret, State, WorkerSpec, WorkerStatus, worker_name
from everdeck.server import applying
from everdeck.server.api.asking import ACTS, READS, READS_ONE, Asked, Name, services_of, statuses_of
from everdeck.server.documents import (
    AdoptRequest,
    LayerView,
    NewWorker,
    ProcessView,
    SpecView,
    WorkerDetail,
    WorkerPage,
)
from everdeck.server.entrance import grant_of
from everdeck.server.services import Services
from everdeck.verbs import Inspection

MOST_PER_PAGE: Final = 5000


class SortKey(StrEnum):
    """What a list of workers may be sorted by."""

    NAME = "name"
    STATE = "state"
    UPTIME = "uptime"
    CPU = "cpu"
    RSS = "rss"
    RESTARTS = "restarts"


class Direction(StrEnum):
    """Which end comes first."""

    ASC = "asc"
    DESC = "desc"


class WorkerVerb(StrEnum):
    """What can be done to one worker by name."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"
    RESET = "reset"


@get("/api/v1/workers", responses=READS, summary="List workers", tags=["workers"])
async def list_workers(
    request: Asked,
    q: Annotated[str | None, QueryParameter(description="Part of the name, in any case.")] = None,
    wanted: Annotated[State | None, QueryParameter(name="state", description="Only this state.")] = None,
    label: Annotated[str | None, QueryParameter(description="`key` or `key=value`.")] = None,
    names: Annotated[str | None, QueryParameter(description="Only these, separated by commas.")] = None,
    sort: FromQuery[SortKey] = SortKey.NAME,
    order: FromQuery[Direction] = Direction.ASC,
    limit: Annotated[int | None, QueryParameter(ge=1, le=MOST_PER_PAGE)] = None,
    cursor: Annotated[str | None, QueryParameter(description="`next` of the page before.")] = None,
) -> Response[WorkerPage | None]:
    """All workers, or a page of them. The weak ETag changes with everything but uptime, cpu and memory."""
    services = services_of(request)
    # Only those on the page are measured. Where that decides who is on it, what was measured a moment ago does.
    measured = names is not None or limit is None
    used = await services.deck.usage() if not measured and sort in {SortKey.CPU, SortKey.RSS} else None
    if names is not None:
        everyone = await statuses_of(services, names)
    else:
        everyone = await (services.deck.list() if measured else services.deck.glance())
    chosen = everyone
    if q is not None or label is not None:
        chosen = [status for status in everyone if _is_chosen(status, q, label)]
    counts = Counter([status.state for status in chosen])
    if wanted is not None:
        chosen = [status for status in chosen if status.state is wanted]
    total = len(chosen)
    if sort is not SortKey.NAME or names is not None:  # a list of everybody is by name already
        _sort(chosen, sort, order, used)
    elif order is Direction.DESC:
        chosen.reverse()
    if cursor is not None:
        chosen = _beyond(chosen, _cursor_key(cursor), order, lambda status: _sort_key(status, sort, used))
    following = None
    if limit is not None and len(chosen) > limit:
        chosen = chosen[:limit]
        following = _cursor(_sort_key(chosen[-1], sort, used))
    if not measured:
        chosen = await statuses_of(services, ",".join(status.name for status in chosen)) if chosen else []
    page = WorkerPage(
        supervised=True,
        owner_pid=services.deck.owner_pid,
        total=total,
        counts=dict(counts),
        workers=chosen,
        next=following,
    )
    etag = _etag(page)
    headers = {"etag": etag, "cache-control": "no-cache"}
    if etag in request.headers.get("if-none-match", ""):
        return Response(None, status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(page, headers=headers)


@post("/api/v1/workers", responses=ACTS, summary="Start a new worker", tags=["workers"])
async def create_worker(
    request: Asked,
    data: JSONBody[NewWorker],
    replace: Annotated[bool, QueryParameter(description="Stop it first if it runs with another spec.")] = False,
) -> Response[WorkerStatus]:
    """201 for a new worker, 200 for one that was known with the same spec, 409 for one with another."""
    services = services_of(request)
    name = worker_name(data.name)
    known = await statuses_of(services, name)
    templates = (await applying.remembered(services.deck)).templates if isinstance(data.template, str) else {}
    spec = await asyncio.to_thread(_spec_of, data, templates)
    status = await services.deck.start(name, spec, replace=replace)
    made = HTTPStatus.OK if known else HTTPStatus.CREATED
    return Response(status, status_code=made, headers={"location": f"/api/v1/workers/{quote(name)}"})


@get("/api/v1/workers/{name:str}", responses=READS_ONE, summary="One worker", tags=["workers"])
async def show_worker(request: Asked, name: Name) -> WorkerStatus:
    """Its status."""
    return await services_of(request).deck.status(worker_name(name))


@delete(
    "/api/v1/workers/{name:str}", responses=ACTS, status_code=204, summary="Stop and forget a worker", tags=["workers"]
)
async def remove_worker(
    request: Asked,
    name: Name,
    data: Annotated[
        bool, QueryParameter(description="On Kubernetes: its volume too. On one box it always goes.")
    ] = False,
) -> None:
    """It is stopped first; then its record, its log and its data are gone."""
    await services_of(request).deck.remove(worker_name(name), data=data)


@get("/api/v1/workers/{name:str}/detail", responses=READS_ONE, summary="Everything about one worker", tags=["workers"])
async def show_detail(request: Asked, name: Name) -> WorkerDetail:
    """Its status, spec, layers, process tree and when it crashed."""
    found = await services_of(request).deck.inspect(worker_name(name))
    layers = [
        LayerView(str(layer.layer), bool(layer.holds), str(layer.strength), str(layer.why)) for layer in found.layers
    ]
    tree = [
        ProcessView(info.pid, info.ppid, info.name, info.command, info.state, info.rss_bytes) for info in found.tree
    ]
    return WorkerDetail(found.status, SpecView.of(found.spec), layers, tree, found.crash_times, found.holds)


@get("/api/v1/workers/{name:str}/spec", responses=READS_ONE, summary="What a worker runs", tags=["workers"])
async def show_spec(request: Asked, name: Name) -> WorkerSpec:
    """Whole, with the values of its environment, so it takes the role operate; values of secrets are null."""
    grant_of(request).require(Role.OPERATE, "the values of its environment")
    return await services_of(request).deck.spec(worker_name(name))


@get("/api/v1/workers/{name:str}/inspect", responses=READS_ONE, summary="A worker, whole", tags=["workers"])
async def inspect_worker(request: Asked, name: Name) -> Inspection:
    """As `detail`, with the whole spec; it takes the role operate."""
    grant_of(request).require(Role.OPERATE, "the values of its environment")
    return await services_of(request).deck.inspect(worker_name(name))


@post(
    "/api/v1/workers/{name:str}/{verb:str}",
    responses=ACTS,
    status_code=200,
    summary="Start, stop, restart or reset a worker",
    tags=["workers"],
)
async def act_on_worker(request: Asked, name: Name, verb: FromPath[WorkerVerb]) -> WorkerStatus:
    """Returns when it is done: a stop when the whole tree is gone."""
    return await acted(services_of(request), verb, worker_name(name))


@post(
    "/api/v1/workers/{name:str}/adopt",
    responses=ACTS,
    status_code=200,
    summary="Take over a running process",
    tags=["workers"],
)
async def adopt_worker(request: Asked, name: Name, data: JSONBody[AdoptRequest]) -> WorkerStatus:
    """The process goes on undisturbed; its command line becomes the spec it is restarted from."""
    said = {key: value for key, value in msgspec.to_builtins(data).items() if key in WorkerSpec.__struct_fields__}
    spec = spec_from_template(name, {}, {**said, "command": ["its own"]})
    fields = {key: getattr(spec, key) for key in said}
    return await services_of(request).deck.adopt(worker_name(name), data.pid, **fields)


HANDLERS: Final[list[HTTPRouteHandler]] = [
    list_workers,
    create_worker,
    show_worker,
    remove_worker,
    show_detail,
    show_spec,
    inspect_worker,
    act_on_worker,
    adopt_worker,
]


def _is_chosen(status: WorkerStatus, q: str | None, label: str | None) -> bool:
    if q is not None and q.casefold() not in status.name.casefold():
        return False
    if label is None:
        return True
    key, wants_value, value = label.partition("=")
    return key in status.labels and (not wants_value or status.labels[key] == value)


def _sort_key(
    status: WorkerStatus, sort: SortKey, used: Mapping[str, tuple[float, int]] | None = None
) -> tuple[float | str, str]:
    match sort:
        case SortKey.NAME:
            return "", status.name
        case SortKey.STATE:
            return status.state.value, status.name
        case SortKey.UPTIME:
            # The start, not the uptime: a key that moves between two pages would show a worker twice.
            return -status.started_at.timestamp() if status.started_at else 0.0, status.name
        case SortKey.CPU:
            return (status.cpu_percent if used is None else used.get(status.name, (0.0, 0))[0]) or 0.0, status.name
        case SortKey.RSS:
            return float((status.rss_bytes if used is None else used.get(status.name, (0.0, 0))[1]) or 0), status.name
        case SortKey.RESTARTS:
            return float(status.restarts), status.name


def _sort(
    chosen: list[WorkerStatus], sort: SortKey, order: Direction, used: Mapping[str, tuple[float, int]] | None
) -> None:
    """By :func:`_sort_key`; by what thousands use in a cheaper way, because a page asks often."""
    backwards = order is Direction.DESC
    if used is None:
        chosen.sort(key=lambda status: _sort_key(status, sort), reverse=backwards)
        return
    # They are by name already, and a sort leaves equal ones in the order in which it found them.
    if backwards:
        chosen.reverse()
    which, nobody = (0 if sort is SortKey.CPU else 1), (0.0, 0)
    chosen.sort(key=lambda status: used.get(status.name, nobody)[which], reverse=backwards)


def _cursor(key: tuple[float | str, str]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).decode("ascii")


def _cursor_key(cursor: str) -> tuple[float | str, str]:
    try:
        raw = base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True)
        return msgspec.json.decode(raw, type=tuple[float | str, str])
    except (UnicodeEncodeError, binascii.Error, msgspec.MsgspecError, UnicodeDecodeError):
        raise SpecError("cursor", cursor, "the `next` of a page before") from None


def _beyond(
    statuses: list[WorkerStatus],
    key: tuple[float | str, str],
    order: Direction,
    key_of: Callable[[WorkerStatus], tuple[float | str, str]],
) -> list[WorkerStatus]:
    """Those behind the cursor; they are sorted, so a few looks find where it stands."""
    try:
        if order is Direction.ASC:
            return statuses[bisect_right(statuses, key, key=key_of) :]
        before = bisect_left(statuses[::-1], key, key=key_of)
        return statuses[len(statuses) - before :]
    except TypeError:
        raise SpecError("cursor", "one of another sort order", "the `next` of a page before") from None


def _etag(page: WorkerPage) -> str:
    moving = {"uptime_seconds", "cpu_percent", "rss_bytes"}
    fields = [field for field in WorkerStatus.__struct_fields__ if field not in moving]
    steady = [[getattr(worker, field) for field in fields] for worker in page.workers]
    facts = msgspec.json.encode((page.owner_pid, page.total, page.counts, steady, page.next))
    return f'W/"{hashlib.blake2b(facts, digest_size=12).hexdigest()}"'


def _spec_of(data: JSONBody[NewWorker], templates: Mapping[str, dict[str, Any]]) -> WorkerSpec:
    """The spec a request asks for; reads the template's secret files, so it runs in a thread."""
    own = {key: value for key, value in msgspec.to_builtins(data).items() if key in WorkerSpec.__struct_fields__}
    given = own.pop("secrets", {}).items()
    secrets = {key: Secret(value) if isinstance(value, str) else Secret(**value) for key, value in given}
    if isinstance(data.spec, WorkerSpec):
        if data.template is not UNSET or own or secrets:
            raise SpecError("spec", "together with other fields", "either a whole spec, or a template and own fields")
        return data.spec
    template: dict[str, Any] = {}
    if isinstance(data.template, str):
        if data.template not in templates:
            known = ", ".join(sorted(templates)) or "none; apply a everdeck.toml that has some"
            raise SpecError("template", data.template, f"one of the templates: {known}")
        template = templates[data.template]
        own["labels"] = {"template": data.template, **own.get("labels", {})}
    elif not own.keys() & {"command", "satellite"}:
        raise SpecError("command", "nothing", "a command, a whole spec, or a template")
    spec = spec_from_template(data.name, template, own)
    return msgspec.structs.replace(spec, secrets={**spec.secrets, **secrets})


async def acted(services: Services, verb: WorkerVerb, name: str) -> WorkerStatus:
    """The verb, done."""
    deck = services.deck
    match verb:
        case WorkerVerb.START:
            return await deck.start(name)
        case WorkerVerb.STOP:
            return await deck.stop(name)
        case WorkerVerb.RESTART:
            return await deck.restart(name)
        case WorkerVerb.RESET:
            return await deck.reset(name)
