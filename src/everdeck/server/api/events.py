"""``/api/v1/events``: what happened, as a list or as a stream."""

from typing import Annotated, Any, Final

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromQuery, HeaderParameter, QueryParameter

from everdeck.errors import SpecError
from everdeck.model import Event, EventKind, worker_name
from everdeck.server.api.asking import READS, Asked, services_of, stream_of
from everdeck.server.entrance import pass_of
from everdeck.server.services import Services
from everdeck.server.serving import connection_of
from everdeck.server.sse import Choice

MOST_EVENTS: Final = 5000


@get(
    "/api/v1/events",
    responses={
        **READS,
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
    services = services_of(request)
    kinds = _kinds(kind)
    if worker is not None:
        worker = worker_name(worker)
    accepted = request.headers.get("accept", "")
    limited = limit is not None or last is not None or before is not None
    if "text/event-stream" in accepted or not ("application/json" in accepted or limited):
        resumed = int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdigit() else after
        holds, straight = pass_of(request).holds, connection_of(request).straight
        return stream_of(services.fan.stream(resumed, Choice(worker, kinds), holds, services.tells_of, straight))
    found = await _events(services, after or 0, before, last, limit or 1000, worker, kinds)
    return Response(found, headers={"cache-control": "no-store"})


HANDLERS: Final[list[HTTPRouteHandler]] = [list_events]


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
