"""How a browser gets in and out: log in for a session, ask who one is, a ticket for a download, log out."""

import time
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from litestar import Request, get, post
from litestar.exceptions import HTTPException, NotAuthorizedException, TooManyRequestsException
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody
from msgspec import Meta

from everdeck.access import Grant, Role
from everdeck.server.auth import Door, Pass

Asked: TypeAlias = Request[Any, Any, Any]


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token of the deck."""

    token: Annotated[str, Meta(max_length=512)]


class LoggedIn(msgspec.Struct, frozen=True):
    """The session to send as ``Authorization: Bearer``; it ends by itself, at log-out, or with its token."""

    session: str
    expires_at: datetime
    name: str
    role: Role
    labels: dict[str, str]


class WhoAmI(msgspec.Struct, frozen=True):
    """As whom the caller is known, and what it may do."""

    name: str
    role: Role
    labels: dict[str, str]


class TicketWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The path that a browser will open by itself."""

    path: Annotated[str, Meta(max_length=1000, pattern=r"^/api/v1/workers/[^/?#]+/logs/download$")]


class Ticket(msgspec.Struct, frozen=True):
    """To be added to that path as ``?ticket=``: once, within a minute."""

    ticket: str


@post("/api/v1/login", include_in_schema=False, status_code=200)
async def login(request: Asked, data: JSONBody[Login]) -> LoggedIn:
    """A session for a token."""
    door = _door(request)
    begun = door.login(data.token)
    if begun is None:
        address = request.client.host if request.client else "local"
        wait = int(door.guesses.failed(address, time.monotonic()))
        if wait > 0:
            raise TooManyRequestsException(
                detail="too many wrong tokens; the right one is let in at any time",
                headers={"retry-after": str(wait + 1)},
            )
        raise NotAuthorizedException(detail="this deck does not know that token")
    secret, session, token = begun
    return LoggedIn(secret, session.expires_at, token.name, token.role, token.labels)


@post("/api/v1/logout", include_in_schema=False, status_code=204)
async def logout(request: Asked) -> None:
    """End the session on the server; whoever has copied it has nothing."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        _door(request).sessions.end(given.strip())


@get("/api/v1/session", include_in_schema=False)
async def who_am_i(request: Asked) -> WhoAmI:
    """As whom the caller is known here."""
    grant = grant_of(request)
    return WhoAmI(grant.name, grant.role, grant.labels)


@post("/api/v1/ticket", include_in_schema=False, status_code=200)
async def ticket(request: Asked, data: JSONBody[TicketWanted]) -> Ticket:
    """For a download, which a browser opens without our header."""
    return Ticket(_door(request).ticket(data.path, grant_of(request)))


HANDLERS: Final[list[HTTPRouteHandler]] = [login, logout, who_am_i, ticket]


def pass_of(request: Asked) -> Pass:
    """What the caller of this request was let in by."""
    found: Pass | None = request.scope["state"].get("pass")
    if found is None:
        raise NotAuthorizedException(detail="log in first")
    return found


def grant_of(request: Asked) -> Grant:
    """What the caller of this request may do."""
    return pass_of(request).grant


def _door(request: Asked) -> Door:
    door: Door | None = request.app.state.services.door
    if door is None:
        raise HTTPException(status_code=HTTPStatus.CONFLICT, detail="this deck is not served over TCP")
    return door
