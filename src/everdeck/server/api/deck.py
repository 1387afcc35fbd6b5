"""The deck as a whole: who owns it, its configuration, its samples and metrics."""

import asyncio
from collections import Counter
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, Final

from litestar import Response, get, post
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody, QueryParameter

from everdeck import __version__
from everdeck.access import Role
from everdeck.errors import EverdeckError
from everdeck.kernel import heap
from everdeck.server import applying, metrics
from everdeck.server.api.asking import ACTS, READS, Asked, Names, services_of, statuses_of
from everdeck.server.documents import (
    Applied,
    ApplyRequest,
    DeckView,
    DownAnswer,
    HealthAnswer,
    ReloadAnswer,
    Series,
    TemplateView,
)
from everdeck.server.entrance import grant_of
from everdeck.verbs import Abilities, Member

# A month, as long as anything is kept.
MOST_PAST_SECONDS: Final = 30 * 86_400.0
_MANY: Final = 100
_ANSWERED_SECONDS: Final = 0.2


@get("/api/v1/deck", responses=READS, summary="The deck as a whole", tags=["deck"])
async def show_deck(request: Asked) -> DeckView:
    """Who owns it, since when, and how many workers are in which state."""
    services = services_of(request)
    deck = services.deck
    return DeckView(
        supervised=True,
        owner_pid=deck.owner_pid,
        deck_id=deck.deck_id,
        version=__version__,
        state_dir=str(deck.state_dir),
        started_at=services.started_at,
        counts=dict(Counter([status.state for status in await deck.glance()])),
        last_event_id=await deck.last_event_id(),
        now=datetime.now(UTC),
        page=services.page,
        directory=await applying.directory(deck),
    )


@get("/api/v1/abilities", responses=READS, summary="Which verbs this deck keeps", tags=["deck"])
async def show_abilities(request: Asked) -> Abilities:
    """Those that it cannot keep are named with the reason."""
    return await services_of(request).deck.abilities()


@get("/api/v1/members", responses=READS, summary="Who has the deck open", tags=["deck"])
async def list_members(request: Asked) -> list[Member]:
    """Its owner first."""
    return await services_of(request).deck.members()


@get("/api/v1/templates", responses=READS, summary="Templates of the last configuration", tags=["deck"])
async def list_templates(request: Asked) -> list[TemplateView]:
    """As written in the file; values of secrets are not in there."""
    memory = await applying.remembered(services_of(request).deck)
    return [TemplateView(name, _shown(table)) for name, table in sorted(memory.templates.items())]


@post("/api/v1/apply", responses=ACTS, status_code=200, summary="Make the deck as a configuration says", tags=["deck"])
async def apply_configuration(request: Asked, data: JSONBody[ApplyRequest]) -> Applied:
    """A plan of what is added, changed, removed and left alone, and the result of each unless it is a dry run."""
    services = services_of(request)
    grant_of(request).require(Role.ADMIN, "apply", whole_deck=True)
    async with services.apply_lock:
        applied = await applying.apply(services.deck, data)
    if len(data.workers) >= _MANY:
        # When the answer is on its way: the request and the answer of a thousand workers are megabytes.
        asyncio.get_running_loop().call_later(_ANSWERED_SECONDS, heap.give_back)
    return applied


@post("/api/v1/reconcile", responses=ACTS, status_code=204, summary="Compare with the kernel now", tags=["deck"])
async def reconcile(request: Asked) -> None:
    """Normally not needed: the deck wakes up by itself when something happens."""
    await services_of(request).deck.reconcile()


@post("/api/v1/reload", responses=ACTS, status_code=202, summary="Continue with the installed code", tags=["deck"])
async def reload_daemon(request: Asked) -> ReloadAnswer:
    """The new code is tried out first; if that fails nothing is replaced and the answer says why."""
    services = services_of(request)
    grant_of(request).require(Role.ADMIN, "reload", whole_deck=True)
    if services.preflight is None:
        raise HTTPException(status_code=HTTPStatus.CONFLICT, detail="this owner is not the daemon; it cannot reload")
    refused = await services.preflight()
    if refused is not None:
        raise HTTPException(status_code=HTTPStatus.CONFLICT, detail=f"the new code was not taken: {refused}")
    services.reload_wanted.set()
    return ReloadAnswer(services.deck.owner_pid, __version__)


@post("/api/v1/down", responses=ACTS, status_code=202, summary="End the daemon", tags=["deck"])
async def leave(request: Asked) -> DownAnswer:
    """Bound workers are stopped; adoptable ones run on until the next daemon takes them over."""
    services = services_of(request)
    grant_of(request).require(Role.ADMIN, "down", whole_deck=True)
    if services.preflight is None:
        raise HTTPException(status_code=HTTPStatus.CONFLICT, detail="this owner is not the daemon; end its program")
    statuses = await services.deck.glance()
    left = sum(status.state.is_live and status.lifetime == "adoptable" for status in statuses)
    services.leave_wanted.set()
    return DownAnswer(services.deck.owner_pid, left)


@get("/api/v1/samples", responses=READS, summary="Cpu and memory", tags=["deck"])
async def show_samples(
    request: Asked,
    names: Names,
    since: Annotated[float, QueryParameter(description="Only newer points, in seconds since the epoch.")] = 0.0,
    points: Annotated[int | None, QueryParameter(ge=1, le=3600)] = None,
    seconds: Annotated[
        float | None, QueryParameter(gt=0, le=MOST_PAST_SECONDS, description="The last so many, from disk too.")
    ] = None,
) -> dict[str, Series]:
    """The last hour as it was sampled; with `seconds` up to a month, for at most 20 workers.

    Asking counts as watching for fifteen seconds.
    """
    services = services_of(request)
    if seconds is not None:
        chosen = [status.name for status in await statuses_of(services, names)][:20]
        return {name: await services.sampler.past(name, seconds, points or 600) for name in chosen}
    return services.sampler.watch([status.name for status in await statuses_of(services, names)][:500], since, points)


@get("/metrics", responses=READS, media_type="text/plain", summary="Prometheus metrics", tags=["deck"])
async def show_metrics(request: Asked) -> Response[bytes]:
    """Per worker and for the deck."""
    services = services_of(request)
    statuses = await services.deck.list()
    last = await services.deck.last_event_id()
    body, media_type = await asyncio.to_thread(metrics.exposition, statuses, last, services.connections())
    return Response(body, media_type=media_type)


@get("/healthz", summary="Up, and supervised", tags=["deck"], responses=READS)
async def show_health(request: Asked) -> HealthAnswer:
    """Whether somebody answers, and whether the registry can be read, which supervision needs."""
    services: Any = request.app.state.services  # open to everybody, so there is nobody to be guarded from
    try:
        await services.deck.last_event_id()
    except EverdeckError:
        return HealthAnswer(up=True, supervised=False)
    return HealthAnswer(up=True, supervised=True)


HANDLERS: Final[list[HTTPRouteHandler]] = [
    show_deck,
    show_abilities,
    list_members,
    list_templates,
    apply_configuration,
    reconcile,
    reload_daemon,
    leave,
    show_samples,
    show_metrics,
    show_health,
]


def _shown(table: dict[str, Any]) -> dict[str, Any]:
    """A template without what only we need, and with the names of its environment but not the values."""
    shown = {key: value for key, value in table.items() if not key.startswith("_")}
    if isinstance(shown.get("env"), dict):
        shown["env_keys"] = sorted(shown.pop("env"))
    if isinstance(shown.get("secrets"), dict):
        shown["secret_names"] = sorted(shown.pop("secrets"))
    return shown
