"""``/api/v1/workers/NAME/logs``: the last lines, a stream, the whole."""

import asyncio
from pathlib import Path
from typing import Annotated, Any, Final

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromQuery, HeaderParameter, QueryParameter
from litestar.response import Stream

from everdeck.errors import Unsupported
from everdeck.logs import files as logfiles
from everdeck.logs import keeper as deck_logs
from everdeck.logs import reader as logreader
from everdeck.model import worker_name
from everdeck.server.api.asking import READS, READS_ONE, Asked, Name, Names, services_of, statuses_of, stream_of
from everdeck.server.documents import LogLines, NamedLine, NamedLines
from everdeck.server.entrance import pass_of
from everdeck.server.services import Services
from everdeck.server.sse import Begin
from everdeck.statedir import StateDir

MOST_LOG_LINES: Final = 10_000
MOST_LOGS_TOGETHER: Final = 50


@get(
    "/api/v1/workers/{name:str}/logs",
    responses={
        **READS_ONE,
        200: ResponseSpec(data_container=LogLines, description="Lines, or a stream of them", generate_examples=False),
    },
    summary="A worker's log",
    tags=["logs"],
)
async def show_logs(
    request: Asked,
    name: Name,
    lines: Annotated[int, QueryParameter(ge=0, le=MOST_LOG_LINES)] = 100,
    whole: Annotated[bool, QueryParameter(description="All lines there are, however many.")] = False,
    since: Annotated[str | None, QueryParameter(description="`10m`, `2h`, `2026-11-15T20:40`")] = None,
    until: FromQuery[str | None] = None,
    grep: Annotated[str | None, QueryParameter(description="A regular expression.", max_length=500)] = None,
    follow: Annotated[bool, QueryParameter(description="Stream as server-sent events.")] = False,
    colour: Annotated[bool, QueryParameter(description="In a stream: leave colours in.")] = True,
    last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID", required=False)] = None,
) -> Response[Any]:
    """The last lines; with `follow=1` a stream of `line` and `lines` events that begins with them.

    Each event of the stream has an id; `Last-Event-ID` goes on after it.
    """
    services = services_of(request)
    begin_at = None if since is None else logreader.moment(since)
    end_at = None if until is None else logreader.moment(until)
    how_many = None if whole else lines
    if not services.deck.is_here:
        if follow:
            services.log_streams.claim()
            said = services.deck.follow_logs(worker_name(name), lines, grep=grep)
            return stream_of(services.log_streams.relayed(said, pass_of(request).holds))
        told = await services.deck.logs(worker_name(name), how_many, since=begin_at, until=end_at, grep=grep)
        return Response(LogLines(told), headers={"cache-control": "no-store"})
    log_dir = await _log_dir(services, name)
    if follow:
        services.log_streams.claim()
        if grep is not None:
            _refuse_bad_pattern(log_dir, grep)
        position = int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdigit() else None
        begin = Begin(lines, position, grep, colour=colour)
        return stream_of(services.log_streams.stream(log_dir, begin, pass_of(request).holds))
    found = await deck_logs.read(log_dir, lines=how_many, since=begin_at, until=end_at, grep=grep)
    return Response(LogLines(list(found)), headers={"cache-control": "no-store"})


@get(
    "/api/v1/logs",
    responses={
        **READS,
        200: ResponseSpec(data_container=NamedLines, description="Lines, or a stream of them", generate_examples=False),
    },
    summary="Several logs together",
    tags=["logs"],
)
async def show_several_logs(
    request: Asked,
    names: Names,
    lines: Annotated[int, QueryParameter(ge=0, le=MOST_LOG_LINES)] = 20,
    follow: Annotated[bool, QueryParameter(description="Stream as server-sent events.")] = False,
) -> Response[Any]:
    """The last lines of each; with `follow=1` a stream of `lines` events that begins with them."""
    services = services_of(request)
    found = [status.name for status in await statuses_of(services, names)][:MOST_LOGS_TOGETHER]
    if not services.deck.is_here:
        if follow:
            raise Unsupported("following several logs", f"{services.deck.deck_id} is read one log at a time")
        told = [NamedLine(name, text) for name in found for text in await services.deck.logs(name, lines)]
        return Response(NamedLines(told), headers={"cache-control": "no-store"})
    logs = {name: _log_dir_of(services, name) for name in found}
    if follow:
        services.log_streams.claim()
        return stream_of(services.log_streams.together(logs, lines, pass_of(request).holds))

    def read() -> list[NamedLine]:
        return [NamedLine(name, text) for name, log in logs.items() for text in logreader.tail(log, lines=lines)]

    return Response(NamedLines(await asyncio.to_thread(read)), headers={"cache-control": "no-store"})


@get(
    "/api/v1/workers/{name:str}/logs/download",
    responses=READS_ONE,
    media_type="text/plain",
    summary="A worker's whole log",
    tags=["logs"],
)
async def download_logs(request: Asked, name: Name) -> Stream:
    """Byte for byte, oldest first, archives included."""
    services = services_of(request)
    headers = {
        "content-disposition": f'attachment; filename="{name.replace(":", "_")}.log"',
        "cache-control": "no-store",
    }
    if not services.deck.is_here:
        text = "".join(f"{line}\n" for line in await services.deck.logs(worker_name(name), None))
        return Stream(iter([text.encode()]), media_type="text/plain; charset=utf-8", headers=headers)
    log_dir = await _log_dir(services, name)
    return Stream(_in_threads(log_dir), media_type="text/plain; charset=utf-8", headers=headers)


@get("/api/v1/lastlines", responses=READS, summary="The last line of several logs", tags=["logs"])
async def show_last_lines(request: Asked, names: Names) -> dict[str, str | None]:
    """The last line that each wrote and that is not empty, cut at 300 characters; null where there is none."""
    services = services_of(request)
    asked = [status.name for status in await statuses_of(services, names)][:500]
    if not services.deck.is_here:  # each would be a command in a pod, every few seconds
        return dict.fromkeys(asked)

    def read() -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for name in asked:
            last = logreader.tail(_log_dir_of(services, name), lines=5, colour=True)
            own = (line for line in reversed(last) if line.strip() and not line.startswith(logfiles.MARK))
            found[name] = next((line[:300] for line in own), None)
        return found

    return await asyncio.to_thread(read)


HANDLERS: Final[list[HTTPRouteHandler]] = [show_logs, show_several_logs, download_logs, show_last_lines]


async def _log_dir(services: Services, name: str) -> Path:
    checked = worker_name(name)
    await services.deck.status(checked)
    return _log_dir_of(services, checked)


def _log_dir_of(services: Services, name: str) -> Path:
    return StateDir(services.deck.state_dir).worker(name).log


def _refuse_bad_pattern(log_dir: Path, grep: str) -> None:
    for _ in logreader.read(log_dir, lines=0, grep=grep):
        break


async def _in_threads(log_dir: Path) -> Any:
    blocks = logreader.raw(log_dir)
    while (block := await asyncio.to_thread(next, blocks, None)) is not None:
        yield block
