"""``/api/v1``: every verb of the deck over HTTP.

Handlers are thin: they read what was asked, call one verb of the deck and give back its value. Errors of the tree
become problem documents in one place (:mod:`everdeck.server.problems`). Verbs are idempotent as the deck's are: a stop
of a stopped worker is its status.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
from collections import Counter
from datetime import UTC, datetime
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import quote

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, PathParameter, QueryParameter
from litestar.response import Stream
from msgspec import UNSET

from everdeck import __version__
from everdeck.access import Role
from everdeck.config import spec_from_template
from everdeck.errors import EverdeckError, NameRefused, SpecError, UnknownWorker
from everdeck.logs import files as logfiles
from everdeck.logs import keeper as deck_logs
from everdeck.logs import reader as logreader
from everdeck.model import Event, EventKind, Secret, State, WorkerSpec, WorkerStatus, worker_name
from everdeck.server import applying, metrics
from everdeck.server.documents import (
    AdoptRequest,
    Applied,
    ApplyRequest,
    Bulk,
    BulkResult,
    BulkResults,
    DeckView,
    DownAnswer,
    HealthAnswer,
    LayerView,
    LogLines,
    NewWorker,
    ProcessView,
    ReloadAnswer,
    Series,
    SpecView,
    TemplateView,
    WorkerDetail,
    WorkerPage,
)
from everdeck.server.entrance import grant_of, pass_of
from everdeck.server.problems import MEDIA_TYPE, Problem, problem_of
from everdeck.server.services import Services
from everdeck.statedir import StateDir

Asked: TypeAlias = Request[Any, Any, Any]
Name: TypeAlias = Annotated[str, PathParameter(description="The worker's name.")]

Names: TypeAlias = Annotated[str, QueryParameter(description="Separated by commas, at most 500.", max_length=70_000)]

MOST_PER_PAGE: Final = 5000
MOST_LOG_LINES: Final = 10_000
MOST_EVENTS: Final = 5000
MOST_AT_ONCE: Final = 16


class SortKey(StrEnum):
    """What a list of workers may be sorted by."""

    NAME = "name"
    STATE = "state"
    UPTIME = "uptime"
    CPU = "cpu"
    RSS = "rss"
    RESTARTS = "restarts"


class Order(StrEnum):
    """Which end comes first."""

    ASC = "asc"
    DESC = "desc"


class Verb(StrEnum):
    """What can be done to one worker by name."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"
    RESET = "reset"


def _told(*statuses: HTTPStatus) -> dict[int, ResponseSpec]:
    """The problem documents an operation may answer with, for the OpenAPI document."""
    always = (
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.SERVICE_UNAVAILABLE,
    )
    return {
        int(status): ResponseSpec(
            data_container=Problem, media_type=MEDIA_TYPE, description=status.phrase, generate_examples=False
        )
        for status in (*always, *statuses)
    }


_READS: Final = _told()
_READS_ONE: Final = _told(HTTPStatus.NOT_FOUND)
_ACTS: Final = _told(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


# --- workers ----------------------------------------------------------------------------------------------------


@get("/api/v1/workers", responses=_READS, summary="List workers", tags=["workers"])
async def list_workers(
    request: Asked,
    q: Annotated[str | None, QueryParameter(description="Part of the name, in any case.")] = None,
    wanted: Annotated[State | None, QueryParameter(name="state", description="Only this state.")] = None,
    label: Annotated[str | None, QueryParameter(description="`key` or `key=value`.")] = None,
    names: Annotated[str | None, QueryParameter(description="Only these, separated by commas.")] = None,
    sort: FromQuery[SortKey] = SortKey.NAME,
    order: FromQuery[Order] = Order.ASC,
    limit: Annotated[int | None, QueryParameter(ge=1, le=MOST_PER_PAGE)] = None,
    cursor: Annotated[str | None, QueryParameter(description="`next` of the page before.")] = None,
) -> Response[WorkerPage | None]:
    """All workers, or a page of them. The weak ETag changes with everything but uptime, cpu and memory."""
    services = _services(request)
    everyone = await services.deck.list() if names is None else await _statuses(services, names)
    chosen = [status for status in everyone if _is_chosen(status, q, label)]
    counts = Counter(status.state for status in chosen)
    if wanted is not None:
        chosen = [status for status in chosen if status.state is wanted]
    total = len(chosen)
    chosen.sort(key=lambda status: _sort_key(status, sort), reverse=order is Order.DESC)
    if cursor is not None:
        chosen = _beyond(chosen, _cursor_key(cursor), sort, order)
    following = None
    if limit is not None and len(chosen) > limit:
        chosen = chosen[:limit]
        following = _cursor(_sort_key(chosen[-1], sort))
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


@post("/api/v1/workers", responses=_ACTS, summary="Start a new worker", tags=["workers"])
async def create_worker(
    request: Asked,
    data: JSONBody[NewWorker],
    replace: Annotated[bool, QueryParameter(description="Stop it first if it runs with another spec.")] = False,
) -> Response[WorkerStatus]:
    """201 for a new worker, 200 for one that was known with the same spec, 409 for one with another."""
    services = _services(request)
    name = worker_name(data.name)
    known = await _statuses(services, name)
    spec = await asyncio.to_thread(_spec_of, data, services)
    status = await services.deck.start(name, spec, replace=replace)
    made = HTTPStatus.OK if known else HTTPStatus.CREATED
    return Response(status, status_code=made, headers={"location": f"/api/v1/workers/{quote(name)}"})


@get("/api/v1/workers/{name:str}", responses=_READS_ONE, summary="One worker", tags=["workers"])
async def show_worker(request: Asked, name: Name) -> WorkerStatus:
    """Its status."""
    return await _services(request).deck.status(worker_name(name))


@delete(
    "/api/v1/workers/{name:str}", responses=_ACTS, status_code=204, summary="Stop and forget a worker", tags=["workers"]
)
async def remove_worker(request: Asked, name: Name) -> None:
    """It is stopped first; then its record, its log and its data are gone."""
    await _services(request).deck.remove(worker_name(name))


@get("/api/v1/workers/{name:str}/detail", responses=_READS_ONE, summary="Everything about one worker", tags=["workers"])
async def show_detail(request: Asked, name: Name) -> WorkerDetail:
    """Its status, spec, layers, process tree and when it crashed."""
    deck = _services(request).deck
    name = worker_name(name)
    status = await deck.status(name)
    spec = await deck.spec(name)
    layers = [
        LayerView(str(layer.layer), bool(layer.holds), str(layer.strength), str(layer.why))
        for layer in await deck.layers(name)
    ]
    tree = [
        ProcessView(info.pid, info.ppid, info.name, info.command, info.state, info.rss_bytes)
        for info in await deck.tree(name)
    ]
    crashes = [datetime.fromtimestamp(second, UTC) for second in await deck.crash_times(name)]
    return WorkerDetail(status, SpecView.of(spec), layers, tree, crashes)


@post(
    "/api/v1/workers/{name:str}/{verb:str}",
    responses=_ACTS,
    status_code=200,
    summary="Start, stop, restart or reset a worker",
    tags=["workers"],
)
async def act_on_worker(request: Asked, name: Name, verb: FromPath[Verb]) -> WorkerStatus:
    """Returns when it is done: a stop when the whole tree is gone."""
    return await _acted(_services(request), verb, worker_name(name))


@post(
    "/api/v1/workers/{name:str}/adopt",
    responses=_ACTS,
    status_code=200,
    summary="Take over a running process",
    tags=["workers"],
)
async def adopt_worker(request: Asked, name: Name, data: JSONBody[AdoptRequest]) -> WorkerStatus:
    """The process goes on undisturbed; its command line becomes the spec it is restarted from."""
    fields: dict[str, Any] = {"lifetime": data.lifetime}
    if data.env:
        fields["env"] = data.env
    return await _services(request).deck.adopt(worker_name(name), data.pid, **fields)


@post("/api/v1/bulk", responses=_ACTS, status_code=200, summary="One verb for many workers", tags=["workers"])
async def act_on_many(request: Asked, data: JSONBody[Bulk]) -> BulkResults:
    """Each worker has its own result; one that fails does not keep the others from theirs."""
    services = _services(request)
    grant_of(request).require(Role.ADMIN if data.verb == "remove" else Role.OPERATE, data.verb)
    names: list[str]
    if isinstance(data.names, str):
        names = [status.name for status in await services.deck.list()]
    else:
        names = list(dict.fromkeys(data.names))
    if data.verb == "start":
        return BulkResults(await _started_together(services, names))
    if data.verb in {"stop", "remove"}:
        await _stopped_together(services, names)
    gate = asyncio.Semaphore(MOST_AT_ONCE)

    async def one(name: str) -> BulkResult:
        async with gate:
            try:
                checked = worker_name(name)
                if data.verb == "remove":
                    await services.deck.remove(checked)
                    return BulkResult(name, ok=True)
                return BulkResult(name, ok=True, status=await _acted(services, Verb(data.verb), checked))
            except EverdeckError as error:
                return BulkResult(name, ok=False, problem=problem_of(error))

    return BulkResults(list(await asyncio.gather(*(one(name) for name in names))))


# --- logs and events --------------------------------------------------------------------------------------------


@get(
    "/api/v1/workers/{name:str}/logs",
    responses={
        **_READS_ONE,
        200: ResponseSpec(data_container=LogLines, description="Lines, or a stream of them", generate_examples=False),
    },
    summary="A worker's log",
    tags=["logs"],
)
async def show_logs(
    request: Asked,
    name: Name,
    lines: Annotated[int, QueryParameter(ge=0, le=MOST_LOG_LINES)] = 100,
    since: Annotated[str | None, QueryParameter(description="`10m`, `2h`, `2026-11-15T20:40`")] = None,
    until: FromQuery[str | None] = None,
    grep: Annotated[str | None, QueryParameter(description="A regular expression.", max_length=500)] = None,
    follow: Annotated[bool, QueryParameter(description="Stream as server-sent events.")] = False,
) -> Response[Any]:
    """The last lines; with `follow=1` a stream of `line` and `lines` events that begins with them."""
    services = _services(request)
    log_dir = await _log_dir(services, name)
    if follow:
        services.log_streams.claim()
        if grep is not None:
            _refuse_bad_pattern(log_dir, grep)
        return _stream(services.log_streams.stream(name, log_dir, lines, grep, pass_of(request).holds))
    found = await deck_logs.read(
        log_dir,
        lines=lines,
        since=None if since is None else logreader.moment(since),
        until=None if until is None else logreader.moment(until),
        grep=grep,
    )
    return Response(LogLines(list(found)), headers={"cache-control": "no-store"})


@get(
    "/api/v1/workers/{name:str}/logs/download",
    responses=_READS_ONE,
    media_type="text/plain",
    summary="A worker's whole log",
    tags=["logs"],
)
async def download_logs(request: Asked, name: Name) -> Stream:
    """Byte for byte, oldest first, archives included."""
    log_dir = await _log_dir(_services(request), name)
    headers = {
        "content-disposition": f'attachment; filename="{name.replace(":", "_")}.log"',
        "cache-control": "no-store",
    }
    return Stream(_in_threads(log_dir), media_type="text/plain; charset=utf-8", headers=headers)


@get("/api/v1/lastlines", responses=_READS, summary="The last line of several logs", tags=["logs"])
async def show_last_lines(request: Asked, names: Names) -> dict[str, str | None]:
    """The last line that each wrote and that is not empty, cut at 300 characters; null where there is none."""
    services = _services(request)
    asked = [status.name for status in await _statuses(services, names)][:500]

    def read() -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for name in asked:
            last = logreader.tail(_log_dir_of(services, name), lines=5, colour=True)
            own = (line for line in reversed(last) if line.strip() and not line.startswith(logfiles.MARK))
            found[name] = next((line[:300] for line in own), None)
        return found

    return await asyncio.to_thread(read)


@get(
    "/api/v1/events",
    responses={
        **_READS,
        200: ResponseSpec(data_container=list[Event], description="Events, or a stream", generate_examples=False),
    },
    summary="What happened",
    tags=["events"],
)
async def list_events(
    request: Asked,
    after: Annotated[int | None, QueryParameter(ge=0, le=2**63 - 1)] = None,
    before: Annotated[int | None, QueryParameter(ge=0, le=2**63 - 1)] = None,
    last: Annotated[int | None, QueryParameter(ge=1, le=MOST_EVENTS, description="The newest so many.")] = None,
    limit: Annotated[int | None, QueryParameter(ge=1, le=MOST_EVENTS, description="1000 if not given.")] = None,
    worker: FromQuery[str | None] = None,
    kind: Annotated[str | None, QueryParameter(description="One or several kinds, separated by commas.")] = None,
    last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID", required=False)] = None,
) -> Response[Any]:
    """A stream that resumes at `Last-Event-ID`; with `Accept: application/json`, or limited, a list, oldest first."""
    services = _services(request)
    kinds = _kinds(kind)
    if worker is not None:
        worker = worker_name(worker)
    accepted = request.headers.get("accept", "")
    limited = limit is not None or last is not None or before is not None
    if "text/event-stream" in accepted or not ("application/json" in accepted or limited):
        resumed = int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdigit() else after
        visitor = pass_of(request)
        return _stream(services.fan.stream(resumed, worker, kinds, visitor.holds, services.tells_of))
    found = await _events(services, after or 0, before, last, limit or 1000, worker, kinds)
    return Response(found, headers={"cache-control": "no-store"})


# --- the deck ---------------------------------------------------------------------------------------------------


@get("/api/v1/deck", responses=_READS, summary="The deck as a whole", tags=["deck"])
async def show_deck(request: Asked) -> DeckView:
    """Who owns it, since when, and how many workers are in which state."""
    services = _services(request)
    deck = services.deck
    return DeckView(
        supervised=True,
        owner_pid=deck.owner_pid,
        deck_id=deck.deck_id,
        version=__version__,
        state_dir=str(deck.state_dir),
        started_at=services.started_at,
        counts=dict(Counter(status.state for status in await deck.list())),
        last_event_id=await deck.last_event_id(),
        now=datetime.now(UTC),
        page=services.page,
        directory=await asyncio.to_thread(applying.directory, deck.state_dir),
    )


@get("/api/v1/templates", responses=_READS, summary="Templates of the last configuration", tags=["deck"])
async def list_templates(request: Asked) -> list[TemplateView]:
    """As written in the file; values of secrets are not in there."""
    memory = await asyncio.to_thread(applying.remembered, _services(request).deck.state_dir)
    return [TemplateView(name, _shown(table)) for name, table in sorted(memory.templates.items())]


@post("/api/v1/apply", responses=_ACTS, status_code=200, summary="Make the deck as a configuration says", tags=["deck"])
async def apply_configuration(request: Asked, data: JSONBody[ApplyRequest]) -> Applied:
    """A plan of what is added, changed, removed and left alone, and the result of each unless it is a dry run."""
    services = _services(request)
    grant_of(request).require(Role.ADMIN, "apply", whole_deck=True)
    async with services.apply_lock:
        return await applying.apply(services.deck, data)


@post("/api/v1/reconcile", responses=_ACTS, status_code=204, summary="Compare with the kernel now", tags=["deck"])
async def reconcile(request: Asked) -> None:
    """Normally not needed: the deck wakes up by itself when something happens."""
    await _services(request).deck.reconcile()


@post("/api/v1/reload", responses=_ACTS, status_code=202, summary="Continue with the installed code", tags=["deck"])
async def reload_daemon(request: Asked) -> ReloadAnswer:
    """The new code is tried out first; if that fails nothing is replaced and the answer says why."""
    services = _services(request)
    grant_of(request).require(Role.ADMIN, "reload", whole_deck=True)
    if services.preflight is None:
        raise HTTPException(status_code=HTTPStatus.CONFLICT, detail="this owner is not the daemon; it cannot reload")
    refused = await services.preflight()
    if refused is not None:
        raise HTTPException(status_code=HTTPStatus.CONFLICT, detail=f"the new code was not taken: {refused}")
    services.reload_wanted.set()
    return ReloadAnswer(services.deck.owner_pid, __version__)


@post("/api/v1/down", responses=_ACTS, status_code=202, summary="End the daemon", tags=["deck"])
async def leave(request: Asked) -> DownAnswer:
    """Bound workers are stopped; adoptable ones run on until the next daemon takes them over."""
    services = _services(request)
    grant_of(request).require(Role.ADMIN, "down", whole_deck=True)
    if services.preflight is None:
        raise HTTPException(status_code=HTTPStatus.CONFLICT, detail="this owner is not the daemon; end its program")
    statuses = await services.deck.list()
    left = sum(status.state.is_live and status.lifetime == "adoptable" for status in statuses)
    services.leave_wanted.set()
    return DownAnswer(services.deck.owner_pid, left)


@get("/api/v1/samples", responses=_READS, summary="The last hour of cpu and memory", tags=["deck"])
async def show_samples(
    request: Asked,
    names: Names,
    since: Annotated[float, QueryParameter(description="Only newer points, in seconds since the epoch.")] = 0.0,
    points: Annotated[int | None, QueryParameter(ge=1, le=3600)] = None,
) -> dict[str, Series]:
    """Asking counts as watching for fifteen seconds."""
    services = _services(request)
    return services.sampler.watch([status.name for status in await _statuses(services, names)][:500], since, points)


@get("/metrics", responses=_READS, media_type="text/plain", summary="Prometheus metrics", tags=["deck"])
async def show_metrics(request: Asked) -> Response[bytes]:
    """Per worker and for the deck."""
    services = _services(request)
    statuses = await services.deck.list()
    last = await services.deck.last_event_id()
    body, media_type = await asyncio.to_thread(metrics.exposition, statuses, last, services.connections())
    return Response(body, media_type=media_type)


@get("/healthz", summary="Up, and supervised", tags=["deck"], responses=_READS)
async def show_health(request: Asked) -> HealthAnswer:
    """Whether somebody answers, and whether the registry can be read, which supervision needs."""
    services: Services = request.app.state.services  # open to everybody, so there is nobody to be guarded from
    try:
        await services.deck.last_event_id()
    except EverdeckError:
        return HealthAnswer(up=True, supervised=False)
    return HealthAnswer(up=True, supervised=True)


HANDLERS: Final[list[HTTPRouteHandler]] = [
    list_workers,
    create_worker,
    show_worker,
    remove_worker,
    show_detail,
    act_on_worker,
    adopt_worker,
    act_on_many,
    show_logs,
    download_logs,
    show_last_lines,
    list_events,
    show_deck,
    list_templates,
    apply_configuration,
    reconcile,
    reload_daemon,
    leave,
    show_samples,
    show_metrics,
    show_health,
]


# --- below: in the order it is called ---------------------------------------------------------------------------


def _services(request: Asked) -> Services:
    services: Services = request.app.state.services
    return services.seen_by(pass_of(request))


async def _statuses(services: Services, names: str) -> list[WorkerStatus]:
    """Those of the named workers that exist; a page that shows thirty of ten thousand asks for thirty."""
    found = []
    for name in dict.fromkeys(names.split(",")):
        with contextlib.suppress(UnknownWorker, NameRefused):
            found.append(await services.deck.status(name))
    return found


def _is_chosen(status: WorkerStatus, q: str | None, label: str | None) -> bool:
    if q is not None and q.casefold() not in status.name.casefold():
        return False
    if label is None:
        return True
    key, wants_value, value = label.partition("=")
    return key in status.labels and (not wants_value or status.labels[key] == value)


def _sort_key(status: WorkerStatus, sort: SortKey) -> tuple[float | str, str]:
    match sort:
        case SortKey.NAME:
            return "", status.name
        case SortKey.STATE:
            return status.state.value, status.name
        case SortKey.UPTIME:
            # The start, not the uptime: a key that moves between two pages would show a worker twice.
            return -status.started_at.timestamp() if status.started_at else 0.0, status.name
        case SortKey.CPU:
            return status.cpu_percent or 0.0, status.name
        case SortKey.RSS:
            return float(status.rss_bytes or 0), status.name
        case SortKey.RESTARTS:
            return float(status.restarts), status.name


def _cursor(key: tuple[float | str, str]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).decode("ascii")


def _cursor_key(cursor: str) -> tuple[float | str, str]:
    try:
        raw = base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True)
        return msgspec.json.decode(raw, type=tuple[float | str, str])
    except (UnicodeEncodeError, binascii.Error, msgspec.MsgspecError, UnicodeDecodeError):
        raise SpecError("cursor", cursor, "the `next` of a page before") from None


def _beyond(
    statuses: list[WorkerStatus], key: tuple[float | str, str], sort: SortKey, order: Order
) -> list[WorkerStatus]:
    try:
        if order is Order.ASC:
            return [status for status in statuses if _sort_key(status, sort) > key]
        return [status for status in statuses if _sort_key(status, sort) < key]
    except TypeError:
        raise SpecError("cursor", "one of another sort order", "the `next` of a page before") from None


def _etag(page: WorkerPage) -> str:
    moving = {"uptime_seconds", "cpu_percent", "rss_bytes"}
    fields = [field for field in WorkerStatus.__struct_fields__ if field not in moving]
    steady = [[getattr(worker, field) for field in fields] for worker in page.workers]
    facts = msgspec.json.encode((page.owner_pid, page.total, page.counts, steady, page.next))
    return f'W/"{hashlib.blake2b(facts, digest_size=12).hexdigest()}"'


def _spec_of(data: JSONBody[NewWorker], services: Services) -> WorkerSpec:
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
        templates = applying.remembered(services.deck.state_dir).templates
        if data.template not in templates:
            known = ", ".join(sorted(templates)) or "none; apply a everdeck.toml that has some"
            raise SpecError("template", data.template, f"one of the templates: {known}")
        template = templates[data.template]
        own["labels"] = {"template": data.template, **own.get("labels", {})}
    elif not own.keys() & {"command", "satellite"}:
        raise SpecError("command", "nothing", "a command, a whole spec, or a template")
    spec = spec_from_template(data.name, template, own)
    return msgspec.structs.replace(spec, secrets={**spec.secrets, **secrets})


async def _acted(services: Services, verb: Verb, name: str) -> WorkerStatus:
    deck = services.deck
    match verb:
        case Verb.START:
            return await deck.start(name)
        case Verb.STOP:
            return await deck.stop(name)
        case Verb.RESTART:
            return await deck.restart(name)
        case Verb.RESET:
            return await deck.reset(name)


async def _started_together(services: Services, names: list[str]) -> list[BulkResult]:
    """Start all in groups that share their commits."""
    answers: dict[str, WorkerStatus | Exception] = {}
    checked: list[str] = []
    for name in names:
        try:
            checked.append(worker_name(name))
        except NameRefused as error:
            answers[name] = error
    with contextlib.suppress(ExceptionGroup):
        await services.deck.start_many(dict.fromkeys(checked), progress=answers.__setitem__)
    return [applying.result_of(name, answers[name]) for name in names]


async def _stopped_together(services: Services, names: list[str]) -> None:
    """End all trees in one pass; each worker is asked for again afterwards, which then costs nothing or tells why."""
    known = {status.name for status in await services.deck.list()}
    with contextlib.suppress(EverdeckError):
        await services.deck.stop_many([name for name in names if name in known])


async def _log_dir(services: Services, name: str) -> Path:
    checked = worker_name(name)
    await services.deck.status(checked)
    return _log_dir_of(services, checked)


def _log_dir_of(services: Services, name: str) -> Path:
    return StateDir(services.deck.state_dir).worker(name).log


def _refuse_bad_pattern(log_dir: Path, grep: str) -> None:
    for _ in logreader.read(log_dir, lines=0, grep=grep):
        break


def _stream(chunks: Any) -> Stream:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return Stream(chunks, media_type="text/event-stream", headers=headers)


async def _in_threads(log_dir: Path) -> Any:
    blocks = logreader.raw(log_dir)
    while (block := await asyncio.to_thread(next, blocks, None)) is not None:
        yield block


def _kinds(text: str | None) -> frozenset[EventKind] | None:
    if text is None:
        return None
    try:
        return frozenset(EventKind(part) for part in text.split(","))
    except ValueError:
        raise SpecError("kind", text, ", ".join(EventKind)) from None


async def _events(
    services: Services,
    after: int,
    before: int | None,
    last: int | None,
    limit: int,
    worker: str | None,
    kinds: frozenset[EventKind] | None,
) -> list[Event]:
    if last is not None:
        return await _newest(services, before, last, worker, kinds)
    found: list[Event] = []
    while len(found) < limit:
        batch = await services.deck.events(after=after, limit=1000, worker=worker)
        if not batch:
            break
        after = batch[-1].id
        found.extend(
            event for event in batch if (kinds is None or event.kind in kinds) and (before is None or event.id < before)
        )
        if before is not None and after >= before:
            break
    return found[:limit]


async def _newest(
    services: Services, before: int | None, last: int, worker: str | None, kinds: frozenset[EventKind] | None
) -> list[Event]:
    """The newest matching events, found by looking back in steps that grow while little matches."""
    top = await services.deck.last_event_id() + 1
    top = top if before is None else min(top, before)
    found: list[Event] = []
    step = last
    while top > 1 and len(found) < last:
        bottom = max(0, top - 1 - step)
        batch = await services.deck.events(after=bottom, limit=top - 1 - bottom, worker=worker)
        matching = [e for e in batch if bottom < e.id < top and (kinds is None or e.kind in kinds)]
        found = matching + found
        top, step = bottom + 1, min(step * 4, 20_000)
    return found[-last:]


def _shown(table: dict[str, Any]) -> dict[str, Any]:
    """A template without what only we need, and with the names of its environment but not the values."""
    shown = {key: value for key, value in table.items() if not key.startswith("_")}
    if isinstance(shown.get("env"), dict):
        shown["env_keys"] = sorted(shown.pop("env"))
    if isinstance(shown.get("secrets"), dict):
        shown["secret_names"] = sorted(shown.pop("secrets"))
    return shown
