"""One verb for many workers at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec
from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody
from litestar.response import Stream

from everdeck.access import Role
from everdeck.errors import EverdeckError, NameRefused, UnknownWorker
from everdeck.faults import fault_of
from everdeck.model import WorkerStatus, worker_name
from everdeck.server import applying
from everdeck.server.api.asking import ACTS, Asked, services_of
from everdeck.server.api.workers import WorkerVerb, acted
from everdeck.server.documents import Bulk, BulkResult, BulkResults, ManyTold, RestartMany, StartMany, StopMany
from everdeck.server.entrance import grant_of
from everdeck.server.problems import problem_of
from everdeck.server.services import Services
from everdeck.verbs import Started

# Ten thousand workers, each with its spec.
MOST_BODY_BYTES: Final = 64_000_000
_TOLD: Final = {
    **ACTS,
    200: ResponseSpec(
        data_container=ManyTold, media_type="application/x-ndjson", description="A line each", generate_examples=False
    ),
}


@post("/api/v1/bulk", responses=ACTS, status_code=200, summary="One verb for many workers", tags=["workers"])
async def act_on_many(request: Asked, data: JSONBody[Bulk]) -> BulkResults:
    """Each worker has its own result; one that fails does not keep the others from theirs."""
    services = services_of(request)
    grant_of(request).require(Role.ADMIN if data.verb == "remove" else Role.OPERATE, data.verb)
    names: list[str]
    if isinstance(data.names, str):
        names = [status.name for status in await services.deck.glance()]
    else:
        names = list(dict.fromkeys(data.names))
    if data.verb == "start":
        return BulkResults(await _started_together(services, names))
    if data.verb == "restart":
        return BulkResults(await _restarted_in_groups(services, names, data.parallel))
    stopped = await _stopped_together(services, names) if data.verb in {"stop", "remove"} else {}
    gate = asyncio.Semaphore(data.parallel)

    async def one(name: str) -> BulkResult:
        if data.verb == "stop" and name in stopped:
            return BulkResult(name, ok=True, status=stopped[name])
        async with gate:
            try:
                checked = worker_name(name)
                if data.verb == "remove":
                    await services.deck.remove(checked)
                    return BulkResult(name, ok=True)
                return BulkResult(name, ok=True, status=await acted(services, WorkerVerb(data.verb), checked))
            except EverdeckError as error:
                return BulkResult(name, ok=False, problem=problem_of(error))

    return BulkResults(list(await asyncio.gather(*(one(name) for name in names))))


@post("/api/v1/start-many", responses=_TOLD, status_code=200, request_max_body_size=MOST_BODY_BYTES, tags=["workers"])
async def start_many(request: Asked, data: JSONBody[StartMany]) -> Stream:
    """A line of JSON for each worker as it is started or refused, and one for all of them at the end.

    What is not valid is refused before anything is started, as a problem document.
    """
    named = any(spec is not None for spec in data.workers.values())
    grant_of(request).require(Role.ADMIN if named else Role.OPERATE, "start")
    deck = services_of(request).deck

    return await _told_as_it_goes(
        lambda tell: deck.start_many(data.workers, replace=data.replace, progress=_telling(tell))
    )


@post("/api/v1/restart-many", responses=_TOLD, status_code=200, request_max_body_size=MOST_BODY_BYTES, tags=["workers"])
async def restart_many(request: Asked, data: JSONBody[RestartMany]) -> Stream:
    """A line of JSON for each worker as it runs again or is refused, and one for all of them at the end.

    They are restarted in groups: at most `parallel` are down at the same time.
    """
    grant_of(request).require(Role.OPERATE, "restart")
    deck = services_of(request).deck

    async def restarted(tell: Callable[[ManyTold], None]) -> list[WorkerStatus]:
        names = [status.name for status in await deck.glance()] if isinstance(data.names, str) else data.names
        return await deck.restart_many(names, parallel=data.parallel, progress=_telling(tell))

    return await _told_as_it_goes(restarted)


@post("/api/v1/stop-many", responses=_TOLD, status_code=200, request_max_body_size=MOST_BODY_BYTES, tags=["workers"])
async def stop_many(request: Asked, data: JSONBody[StopMany]) -> Stream:
    """A line of JSON for each worker that is gone, and one for all of them at the end."""
    grant_of(request).require(Role.OPERATE, "stop")
    deck = services_of(request).deck

    async def stopped(tell: Callable[[ManyTold], None]) -> list[WorkerStatus]:
        if isinstance(data.names, str):
            return await deck.stop_all()
        return await deck.stop_many(data.names, lambda status: tell(ManyTold(name=status.name, status=status)))

    return await _told_as_it_goes(stopped)


HANDLERS: Final[list[HTTPRouteHandler]] = [act_on_many, start_many, restart_many, stop_many]


async def _told_as_it_goes(act: Callable[[Callable[[ManyTold], None]], Awaitable[list[WorkerStatus]]]) -> Stream:
    """The verb as lines of JSON. It goes on though the reader leaves; one refused at once is an ordinary error."""
    lines: asyncio.Queue[ManyTold] = asyncio.Queue()
    acting = asyncio.ensure_future(act(lines.put_nowait))
    first = asyncio.ensure_future(lines.get())
    await asyncio.wait({acting, first}, return_when=asyncio.FIRST_COMPLETED)
    if not first.done():
        first.cancel()
        acting.result()  # raises what was refused

    async def told() -> AsyncIterator[bytes]:
        if not first.cancelled():
            yield _line(await first)
        while not (acting.done() and lines.empty()):
            following = asyncio.ensure_future(lines.get())
            await asyncio.wait({acting, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                yield _line(await following)
            else:
                following.cancel()
        try:
            yield _line(ManyTold(done=acting.result()))
        except (EverdeckError, ExceptionGroup) as error:
            yield _line(ManyTold(fault=fault_of(error)))

    return Stream(told(), media_type="application/x-ndjson", headers={"cache-control": "no-store"})


def _telling(tell: Callable[[ManyTold], None]) -> Started:
    def progress(name: str, answer: WorkerStatus | Exception) -> None:
        if isinstance(answer, WorkerStatus):
            tell(ManyTold(name=name, status=answer))
        else:
            tell(ManyTold(name=name, fault=fault_of(answer)))

    return progress


def _line(told: ManyTold) -> bytes:
    return msgspec.json.encode(told) + b"\n"


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


async def _restarted_in_groups(services: Services, names: list[str], parallel: int) -> list[BulkResult]:
    """Restart all in groups that share their commits; who is not known has its own result."""
    known = {status.name for status in await services.deck.glance()}
    answers: dict[str, WorkerStatus | Exception] = {}
    for name in names:
        if name not in known:
            try:
                answers[name] = UnknownWorker.among(worker_name(name), known)
            except NameRefused as error:
                answers[name] = error
    with contextlib.suppress(ExceptionGroup):
        asked = [name for name in names if name in known]
        await services.deck.restart_many(asked, parallel=parallel, progress=answers.__setitem__)
    return [applying.result_of(name, answers[name]) for name in names]


async def _stopped_together(services: Services, names: list[str]) -> dict[str, WorkerStatus]:
    """End all trees in one pass; nobody, if one of them could not be ended: each is asked for again then, and tells."""
    known = {status.name for status in await services.deck.glance()}
    try:
        stopped = await services.deck.stop_many([name for name in names if name in known])
    except EverdeckError:
        return {}
    return {status.name: status for status in stopped}
