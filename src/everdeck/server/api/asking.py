"""What every resource of the API needs: who asks, for which worker, and what may go wrong."""

import contextlib
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeAlias

from litestar import Request
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import PathParameter, QueryParameter
from litestar.response import Stream

from everdeck.errors import NameRefused, UnknownWorker
from everdeck.model import WorkerStatus
from everdeck.server.entrance import pass_of
from everdeck.server.problems import MEDIA_TYPE, Problem
from everdeck.server.services import Services

Asked: TypeAlias = Request[Any, Any, Any]
Name: TypeAlias = Annotated[str, PathParameter(description="The worker's name.")]
Names: TypeAlias = Annotated[str, QueryParameter(description="Separated by commas, at most 500.", max_length=70_000)]


def told(*statuses: HTTPStatus) -> dict[int, ResponseSpec]:
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


READS: Final = told()
READS_ONE: Final = told(HTTPStatus.NOT_FOUND)
ACTS: Final = told(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def services_of(request: Asked) -> Services:
    """What the daemon has, with a deck that holds every verb to what this caller may do."""
    services: Services = request.app.state.services
    return services.seen_by(pass_of(request))


async def statuses_of(services: Services, names: str) -> list[WorkerStatus]:
    """Those of the named workers that exist; a page that shows thirty of ten thousand asks for thirty."""
    found = []
    for name in dict.fromkeys(names.split(",")):
        with contextlib.suppress(UnknownWorker, NameRefused):
            found.append(await services.deck.status(name))
    return found


def stream_of(chunks: Any) -> Stream:
    """Server-sent events, which nobody between us and the reader shall keep back."""
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return Stream(chunks, media_type="text/event-stream", headers=headers)
