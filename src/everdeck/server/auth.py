"""Who may talk to the deck over TCP.

The Unix socket is guarded by the kernel (mode 0600 in a 0700 directory, SO_PEERCRED); its requests pass. On TCP:

- the ``Host`` must be one we are known by, or a page of a stranger's name that resolves to 127.0.0.1 could read us
  (DNS rebinding), and an ``Origin`` must be our own;
- everything but the page's own files, ``/healthz`` and the login needs the token, as ``Authorization: Bearer`` or
  as the session cookie the login gave; the token is compared in constant time;
- a request that changes something and is authorised by a cookie must repeat the CSRF cookie in a header, which
  another site's page can make a browser send but cannot read.

The session cookie is made from the token by HMAC and holds no token: it survives a restart of the daemon without any
table of sessions, and writing a new token ends every session. Guesses at the login are limited per address.
"""

import base64
import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from litestar.datastructures import Cookie

from everdeck.errors import StateDirRefused
from everdeck.server.problems import MEDIA_TYPE, problem
from everdeck.server.serving import AsgiApp, Connection, Receive, Scope, Send
from everdeck.statedir import StateDir

SESSION_COOKIE: Final = "everdeck_session"
CSRF_COOKIE: Final = "everdeck_csrf"
CSRF_HEADER: Final = "x-everdeck-csrf"
SESSION_SECONDS: Final = 30 * 24 * 3600
GUESSES: Final = 10
GUESS_WINDOW_SECONDS: Final = 60.0

_OPEN_PATHS: Final = frozenset({"/", "/healthz", "/openapi.json", "/login", "/api/v1/login", "/favicon.ico"})
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def token_of(state_dir: Path) -> tuple[str, bool]:
    """The deck's token and whether it was made just now. The file is 0600, and is refused if others may read it."""
    path = StateDir(state_dir).token
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if (made := _make_token(state_dir)) is not None:
                return made, True
            continue
        except OSError as error:
            raise StateDirRefused(f"{path}: {error.strerror}") from error
        with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
                raise StateDirRefused(f"{path} may be read by others; chmod 600 it, or delete it to get a new token")
            token = file.read().strip()
        if len(token) < 32:  # noqa: PLR2004 - 32 characters of base64 are 192 bits
            raise StateDirRefused(f"{path} holds no token (32 characters or more); delete it to get a new one")
        return token, False


def _make_token(state_dir: Path) -> str | None:
    """A new token, linked into place whole; None when another process was first."""
    token = secrets.token_urlsafe(32)
    path = StateDir(state_dir).token
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, token.encode("ascii") + b"\n")
        os.fsync(descriptor)
        os.link(fresh, path)
    except FileExistsError:
        return None
    finally:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
    return token


class Keys:
    """Everything that is made from the token: its check, sessions and CSRF values."""

    def __init__(self, token: str) -> None:
        self._token = token.encode("utf-8")

    def is_token(self, given: str) -> bool:
        """Whether this is the token; takes the same time whatever is given."""
        return hmac.compare_digest(_digest(given.encode("utf-8", "replace")), _digest(self._token))

    def session(self, now: float) -> str:
        """A new session's cookie value: when it began, something random, and our seal over both."""
        begun = f"{int(now)}.{secrets.token_urlsafe(12)}"
        return f"{begun}.{self._seal('session', begun)}"

    def is_session(self, value: str, now: float) -> bool:
        """Whether we gave out this session and it is not too old."""
        begun, _, seal = value.rpartition(".")
        expected = self._seal("session", begun)
        genuine = hmac.compare_digest(_digest(seal.encode("utf-8", "replace")), _digest(expected.encode("ascii")))
        second, _, _ = begun.partition(".")
        return genuine and second.isascii() and second.isdigit() and 0 <= now - int(second) <= SESSION_SECONDS

    def csrf(self, session: str) -> str:
        """The value that a changing request of this session must repeat in its header."""
        return self._seal("csrf", session)

    def is_csrf(self, value: str, session: str) -> bool:
        """Whether the header belongs to this session."""
        expected = self.csrf(session).encode("ascii")
        return hmac.compare_digest(_digest(value.encode("utf-8", "replace")), _digest(expected))

    def _seal(self, purpose: str, text: str) -> str:
        message = f"{purpose}:{text}".encode("utf-8", "replace")
        sealed = hmac.new(self._token, message, hashlib.sha256).digest()
        return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode("ascii")


class GuessLimit:
    """At most ``GUESSES`` failed logins per address and window; addresses are forgotten as the window moves on."""

    _MOST_ADDRESSES: Final = 4096

    def __init__(self) -> None:
        self._failures: dict[str, list[float]] = {}

    def seconds_to_wait(self, address: str, now: float) -> float:
        """0 if another try is allowed, else how long until it is."""
        recent = [at for at in self._failures.get(address, ()) if now - at < GUESS_WINDOW_SECONDS]
        if recent:
            self._failures[address] = recent
        else:
            self._failures.pop(address, None)
        return 0.0 if len(recent) < GUESSES else GUESS_WINDOW_SECONDS - (now - recent[-GUESSES])

    def failed(self, address: str, now: float) -> None:
        """Note a wrong token."""
        if len(self._failures) >= self._MOST_ADDRESSES:
            self._failures.pop(next(iter(self._failures)))
        self._failures.setdefault(address, []).append(now)


class Guard:
    """The ASGI layer in front of the application that lets in or turns away."""

    def __init__(self, app: AsgiApp, keys: Keys | None, hosts: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._keys = keys
        self._hosts = _LOOPBACK_NAMES | {host.lower() for host in hosts}
        # Listening on every address, we cannot list them; a literal address cannot be rebound to another by DNS.
        self._any_address = bool(self._hosts & _WILDCARDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        connection: Connection = scope["state"]["connection"]
        if not connection.trusted:
            refusal = self._refusal(scope)
            if refusal is not None:
                status, detail = refusal
                await _refuse(send, status, detail)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[HTTPStatus, str] | None:
        headers = _headers(scope)
        if self._keys is None:
            return HTTPStatus.FORBIDDEN, "this deck is not served over TCP"
        if not self._is_own_host(_host_of(headers.get("host", ""))):
            return HTTPStatus.FORBIDDEN, "this deck is not known by that host name; add it to hosts in [server]"
        origin = headers.get("origin")
        if origin is not None and not self._is_own_origin(origin, headers["host"], scope["scheme"]):
            return HTTPStatus.FORBIDDEN, "requests from another site's page are refused"
        path: str = scope["path"]
        if path in _OPEN_PATHS or path.startswith("/static/"):
            return None
        if headers.get("sec-fetch-site") == "cross-site":
            return HTTPStatus.FORBIDDEN, "requests from another site's page are refused"
        return self._unauthorised(scope["method"], headers)

    def _unauthorised(self, method: str, headers: Mapping[str, str]) -> tuple[HTTPStatus, str] | None:
        assert self._keys is not None  # noqa: S101 - _refusal has answered for decks without keys
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            if self._keys.is_token(given.strip()):
                return None
            return HTTPStatus.UNAUTHORIZED, "the token is not this deck's"
        session = _cookies(headers).get(SESSION_COOKIE)
        if session is None or not self._keys.is_session(session, time.time()):  # noqa: TID251 - sessions outlive processes, so their age is wall-clock time
            return HTTPStatus.UNAUTHORIZED, "log in with the deck's token, or send it as Authorization: Bearer"
        if method not in _READING and not self._keys.is_csrf(headers.get(CSRF_HEADER, ""), session):
            return HTTPStatus.FORBIDDEN, f"a changing request by cookie needs the header {CSRF_HEADER}"
        return None

    def _is_own_host(self, host: str) -> bool:
        return host in self._hosts or (self._any_address and _is_address(host))

    def _is_own_origin(self, origin: str, host: str, scheme: str) -> bool:
        with contextlib.suppress(ValueError):
            parts = urlsplit(origin)
            return parts.scheme == scheme and parts.netloc.lower() == host.lower()
        return False


def login_cookies(keys: Keys, now: float, *, tls: bool) -> list[Cookie]:
    """The cookies of a successful login."""
    session = keys.session(now)
    # The page must read the CSRF value to repeat it, so that one cookie is not HttpOnly; alone it opens nothing.
    return [
        _cookie(SESSION_COOKIE, session, SESSION_SECONDS, tls=tls, hidden=True),
        _cookie(CSRF_COOKIE, keys.csrf(session), SESSION_SECONDS, tls=tls, hidden=False),
    ]


def logout_cookies() -> list[Cookie]:
    """The cookies that make a browser forget us."""
    return [_cookie(name, "", 0, tls=False, hidden=True) for name in (SESSION_COOKIE, CSRF_COOKIE)]


def _cookie(name: str, value: str, seconds: int, *, tls: bool, hidden: bool) -> Cookie:
    return Cookie(
        key=name,
        value=value,
        max_age=seconds,
        secure=tls or None,
        httponly=hidden or None,
        samesite="Strict",  # type: ignore[arg-type]  # written as browsers' documentation writes it
    )


def _digest(value: bytes) -> bytes:
    # Equal lengths for compare_digest, which would otherwise tell the length of what was expected.
    return hashlib.sha256(value).digest()


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


def _cookies(headers: Mapping[str, str]) -> dict[str, str]:
    with contextlib.suppress(CookieError):
        return {name: morsel.value for name, morsel in SimpleCookie(headers.get("cookie", "")).items()}
    return {}


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
