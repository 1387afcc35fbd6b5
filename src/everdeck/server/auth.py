"""Who is asking over HTTP, and are they let in.

A peer on ``http.sock`` is known by the kernel (SO_PEERCRED) before its first byte. On TCP:

- the ``Host`` must be one we are known by, or a page of a stranger's name that resolves to 127.0.0.1 could read us
  (DNS rebinding), and an ``Origin`` must be our own or that of ``public_url``;
- everything but the page's own files, ``/healthz`` and the login needs ``Authorization: Bearer``, with a token or with
  the session that a browser got for one.

There is no cookie. A cookie belongs to a host, not to a port (RFC 6265, section 8.5): a browser would send it to every
worker that serves a page on this machine, and the worker could use it. The page keeps its session in the storage of its
origin, which includes the port, and sends it as a header; so no other site can make a browser send it either.
A download is a link that a browser opens by itself, without headers: it carries a ticket that is good for that one
address, once, for a minute.
"""

import contextlib
import ipaddress
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

import msgspec

from everdeck.access import Grant
from everdeck.server.problems import MEDIA_TYPE, problem
from everdeck.server.serving import AsgiApp, Connection, Receive, Scope, Send
from everdeck.server.tokens import SESSION_PREFIX, Session, Sessions, Token, Tokens, digest_of, fresh_secret
from everdeck.verbs import Caller, asked_by

GUESSES: Final = 10
GUESS_WINDOW_SECONDS: Final = 60.0
TICKET_SECONDS: Final = 60.0
MOST_TICKETS: Final = 1000
_LONGEST_FOR: Final = 80

_OPEN_PATHS: Final = frozenset({"/", "/healthz", "/openapi.json", "/login", "/api/v1/login", "/favicon.ico"})
_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Pass(msgspec.Struct, frozen=True):
    """What somebody showed at the door and what it lets them do; ``holds`` turns false when it is revoked."""

    grant: Grant
    holds: Callable[[], bool]


class Door:
    """Knows tokens, sessions and tickets."""

    def __init__(self, state_dir: Path) -> None:
        self.tokens = Tokens(state_dir)
        self.sessions = Sessions(state_dir, self.tokens)
        self.guesses = GuessLimit()
        self._tickets: dict[str, tuple[str, Grant, float]] = {}

    def admit(self, secret: str) -> Pass | None:
        """Let in by a token or a session."""
        token = self._token(secret)
        return None if token is None else Pass(token.grant, lambda: self._token(secret) is not None)

    def login(self, secret: str) -> tuple[str, Session, Token] | None:
        """A session for a token; None if it is none of ours."""
        now = datetime.now(UTC)
        token = self.tokens.find(secret, now)
        return None if token is None else (*self.sessions.begin(token, now), token)

    def ticket(self, path: str, grant: Grant) -> str:
        """For one request of this path in the next minute."""
        now = time.monotonic()
        self._tickets = {key: kept for key, kept in self._tickets.items() if kept[2] > now}
        while len(self._tickets) >= MOST_TICKETS:
            self._tickets.pop(next(iter(self._tickets)))
        made = fresh_secret()
        self._tickets[digest_of(made)] = (path, grant, now + TICKET_SECONDS)
        return made

    def redeem(self, ticket: str, path: str) -> Grant | None:
        """What a ticket lets in; it is used up."""
        kept = self._tickets.pop(digest_of(ticket), None)
        if kept is None or kept[0] != path or kept[2] <= time.monotonic():
            return None
        return kept[1]

    def _token(self, secret: str) -> Token | None:
        now = datetime.now(UTC)
        if secret.startswith(SESSION_PREFIX):
            return self.sessions.find(secret, now)
        return self.tokens.find(secret, now)


class GuessLimit:
    """Notes wrong tokens per address. It slows down whoever guesses and never keeps out whoever knows.

    A right token is let in whatever came before it from the same address: behind a proxy, or on a machine with several
    users, the address is shared with whoever types nonsense.
    """

    _MOST_ADDRESSES: Final = 4096

    def __init__(self) -> None:
        self._failures: dict[str, list[float]] = {}

    def failed(self, address: str, now: float) -> float:
        """Note a wrong token; returns 0, or how many seconds the address should wait before it guesses again."""
        recent = [at for at in self._failures.pop(address, ()) if now - at < GUESS_WINDOW_SECONDS][-GUESSES:]
        while len(self._failures) >= self._MOST_ADDRESSES:
            self._failures.pop(next(iter(self._failures)))
        self._failures[address] = [*recent, now]
        return 0.0 if len(recent) < GUESSES else GUESS_WINDOW_SECONDS - (now - recent[0])


class Guard:
    """The ASGI layer in front of the application that lets in or turns away."""

    def __init__(
        self, app: AsgiApp, door: Door | None, hosts: frozenset[str] = frozenset(), public_url: str | None = None
    ) -> None:
        self._app = app
        self._door = door
        self._public = None if public_url is None else urlsplit(public_url)
        named = {host.lower() for host in hosts}
        if self._public is not None and self._public.hostname:
            named.add(self._public.hostname)
        self._hosts = _LOOPBACK_NAMES | named
        # Listening on every address, we cannot list them; a literal address cannot be rebound to another by DNS.
        self._any_address = bool(self._hosts & _WILDCARDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        connection: Connection = scope["state"]["connection"]
        headers = _headers(scope)
        if connection.grant is not None:
            scope["state"]["pass"] = Pass(connection.grant, lambda: True)
            caller = connection.caller
        else:
            refusal = self._refusal(scope, headers)
            if isinstance(refusal, tuple):
                await _refuse(send, *refusal)
                return
            scope["state"]["pass"] = refusal
            name = None if refusal is None else _named(refusal.grant.name, headers.get("everdeck-for"))
            caller = Caller(token=name, address=self._address(scope, headers))
        scope["state"]["caller"] = caller
        with asked_by(caller, _request_id(scope, headers, caller)):
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> "tuple[HTTPStatus, str] | Pass | None":
        """Why not, or what lets the caller in; None: the path is open to everybody."""
        if self._door is None:
            return HTTPStatus.FORBIDDEN, "this deck is not served over TCP"
        if not self._is_own_host(_host_of(headers.get("host", ""))):
            return HTTPStatus.FORBIDDEN, "this deck is not known by that host name; add it to hosts in [server]"
        origin = headers.get("origin")
        if origin is not None and not self._is_own_origin(origin, headers["host"], scope["scheme"]):
            return (
                HTTPStatus.FORBIDDEN,
                "requests from another site's page are refused; behind a proxy, set public_url in [server]",
            )
        path: str = scope["path"]
        if path in _OPEN_PATHS or path.startswith("/static/"):
            return None
        if headers.get("sec-fetch-site") == "cross-site":
            return HTTPStatus.FORBIDDEN, "requests from another site's page are refused"
        return self._shown(self._door, scope, headers)

    def _shown(self, door: Door, scope: Scope, headers: Mapping[str, str]) -> tuple[HTTPStatus, str] | Pass:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            passed = door.admit(given.strip())
            if passed is not None:
                return passed
            return HTTPStatus.UNAUTHORIZED, "this token or session is not known here (any more)"
        tickets = parse_qs(scope["query_string"].decode("latin-1")).get("ticket", ())
        if tickets and (grant := door.redeem(tickets[0], scope["path"])) is not None:
            return Pass(grant, lambda: True)
        return HTTPStatus.UNAUTHORIZED, "log in with a token of this deck, or send it as Authorization: Bearer"

    def _is_own_host(self, host: str) -> bool:
        return host in self._hosts or (self._any_address and _is_address(host))

    def _is_own_origin(self, origin: str, host: str, scheme: str) -> bool:
        with contextlib.suppress(ValueError):
            parts = urlsplit(origin)
            if self._public is not None and _origin(parts.scheme, parts.netloc) == _origin(
                self._public.scheme, self._public.netloc
            ):
                return True
            return parts.scheme == scheme and parts.netloc.lower() == host.lower()
        return False

    def _address(self, scope: Scope, headers: Mapping[str, str]) -> str | None:
        """Where the caller is, and by which proxy it came. Only for people: nothing is decided by it."""
        peer = scope["client"][0] if scope.get("client") else None
        if self._public is None or peer not in _LOOPBACK_NAMES or "x-forwarded-for" not in headers:
            return peer
        claimed = headers["x-forwarded-for"].rpartition(",")[2].strip()
        return f"{claimed} via {peer}" if _is_address(claimed) else peer


def _origin(scheme: str, netloc: str) -> str:
    default = {"http": ":80", "https": ":443"}.get(scheme, "")
    return f"{scheme}://{netloc.lower().removesuffix(default)}"


def _named(token: str, asked_for: str | None) -> str:
    """The token's name and, if its bearer asks for somebody else, for whom; only the first is proven."""
    if not asked_for or not asked_for.isprintable():
        return token
    return f"{token} for {asked_for[:_LONGEST_FOR]}"


def _request_id(scope: Scope, headers: Mapping[str, str], caller: Caller | None) -> str | None:
    """What a caller that may have to ask again calls its request; another caller's of that name is another one."""
    key = headers.get("idempotency-key")
    if not key or caller is None or scope["type"] != "http" or scope["method"] in {"GET", "HEAD"}:
        return None
    return f"{caller.token or caller.uid}: {key}"


def _headers(scope: Scope) -> dict[str, str]:
    return {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}


def _host_of(header: str) -> str:
    """The name in a ``Host`` header, without port and brackets; empty if it is not one."""
    with contextlib.suppress(ValueError):
        return (urlsplit(f"//{header}").hostname or "").lower()
    return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _refuse(send: Send, status: HTTPStatus, detail: str) -> None:
    body = msgspec.json.encode(problem(status, detail))
    headers = [
        (b"content-type", MEDIA_TYPE.encode("ascii")),
        (b"content-length", str(len(body)).encode("ascii")),
        (b"cache-control", b"no-store"),
    ]
    if status is HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b'Bearer realm="everdeck"'))
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body})
