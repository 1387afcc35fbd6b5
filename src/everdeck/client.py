"""Ask a daemon what only a daemon has: its configuration, a reload, its end. HTTP, with the standard library alone.

The verbs of a deck are not here: the command line asks them at ``deck.sock`` (:mod:`everdeck.wire.client`), a program
opens a deck. A command must start in a few tens of milliseconds, so nothing is loaded before it is needed.

An AF_UNIX address holds 107 bytes. A deeper state directory is reached through /proc/self/fd/N/http.sock of the opened
directory, so its length does not matter. A socket file nobody listens on means that no owner runs (:class:`NoOwner`);
an owner that vanishes in the middle of an answer is a :class:`ClientError` that says so: what it had done is in the
registry.
"""

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import SplitResult, urlencode, urlsplit

from everdeck.errors import ClientError, NoOwner, OwnerRefused
from everdeck.statedir import HTTP_SOCKET, StateDir

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = ["Daemon", "Refusal"]

# How long an owner that has the deck's lock may take to serve its socket: it recovers the deck first.
PATIENCE_SECONDS: Final = 3.0


class Refusal(OwnerRefused):
    """The owner said no; carries its problem document."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        self.problem = dict(problem)
        self.status = int(problem.get("status", 0))
        self.kind = str(problem.get("type", "about:blank")).removeprefix("urn:everdeck:")
        super().__init__(str(problem.get("detail") or problem.get("title") or "the owner refused"))


class Daemon:
    """What only a daemon can be asked, beside the verbs of the contract: its configuration, a reload, its end.

    It is reached at ``http.sock`` of a state directory, or at a URL with a token. Errors arrive as they were raised.

    >>> with Daemon("state") as daemon:
    ...     print(daemon.deck()["owner_pid"])
    """

    def __init__(
        self, where: str | os.PathLike[str], token: str | None = None, timeout_seconds: float | None = None
    ) -> None:
        self._where = os.fspath(where)
        self._url = urlsplit(self._where) if self._where.startswith(("http://", "https://")) else None
        self._token = token if self._url is not None else None
        self._timeout_seconds = timeout_seconds
        self._connection: HTTPConnection | None = None

    @classmethod
    def of(cls, options: "Namespace", timeout_seconds: float | None = None) -> Self:
        """The daemon that ``--state`` names."""
        remote = options.where.startswith(("http://", "https://"))
        return cls(options.where if remote else options.state, os.environ.get("EVERDECK_TOKEN"), timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Reach it now, without asking it anything; raises :class:`NoOwner` if there is none."""
        self._connected()

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- what it is asked ---------------------------------------------------------------------------------------

    def deck(self) -> dict[str, Any]:
        """Who owns it, since when, with which version, and where its page is."""
        found: dict[str, Any] = self.document("GET", "/api/v1/deck")
        return found

    def apply(self, configuration: Mapping[str, Any]) -> dict[str, Any]:
        """The plan, and unless it is a dry run what became of it."""
        done: dict[str, Any] = self.document("POST", "/api/v1/apply", configuration)
        return done

    def reload(self) -> None:
        """Let it continue with the code that is installed now; raises if that is not fit."""
        self.document("POST", "/api/v1/reload")

    def leave(self) -> dict[str, Any]:
        """End it; tells how many workers run on."""
        left: dict[str, Any] = self.document("POST", "/api/v1/down")
        return left

    def start_from_template(self, name: str, template: str, own: Mapping[str, Any], *, replace: bool) -> dict[str, Any]:
        """Start a worker from a template of the applied configuration, with these fields laid over it."""
        body = {"name": name, "template": template, **own}
        status: dict[str, Any] = self.document("POST", "/api/v1/workers", body, replace=int(replace))
        return status

    # --- asking -------------------------------------------------------------------------------------------------

    def document(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """The answer of one request as plain JSON values; None when there is no content."""
        raw = self.request(method, path, body, **query)
        return json.loads(raw) if raw else None

    def request(self, method: str, path: str, body: Any = None, **query: Any) -> bytes:
        """The answer of one request as bytes; an error of the tree is raised as what it is, another as a refusal."""
        response = self._send(method, path, body, query)
        try:
            raw = response.read()
        except (OSError, HTTPException) as error:
            self.close()
            raise self._lost(error) from error
        if response.status >= 400:  # noqa: PLR2004 - where HTTP's refusals begin
            raise _refusal(_problem(response, raw))
        return raw

    def _send(self, method: str, path: str, body: Any, query: Mapping[str, Any]) -> HTTPResponse:
        given = {key: value for key, value in query.items() if value is not None}
        target = f"{path}?{urlencode(given)}" if given else path
        payload = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json"}
        if payload is not None:
            headers["Content-Type"] = "application/json"
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        kept = self._connection
        connection = self._connected()
        fresh = connection is not kept
        try:
            connection.request(method, target, payload, headers)
            return connection.getresponse()
        except (OSError, HTTPException) as error:
            self.close()
            # A connection that was kept may have been closed by the owner between two requests: nothing was sent then.
            if not fresh and isinstance(error, ConnectionError | HTTPException) and method == "GET":
                return self._send(method, path, body, query)
            raise self._lost(error) from error

    def _connected(self) -> HTTPConnection:
        if self._connection is not None and _was_closed(self._connection):
            self.close()  # while we did something else: the owner keeps a silent connection for a while only
        if self._connection is None:
            self._connection = self._at_url(self._url) if self._url is not None else self._in_directory()
        return self._connection

    def _at_url(self, url: SplitResult) -> HTTPConnection:
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=self._timeout_seconds)
        try:
            connection.connect()
        except OSError as error:
            raise NoOwner(f"nobody answers at {self._where}: {error}") from error
        return connection

    def _in_directory(self) -> HTTPConnection:
        connection = _UnixConnection(Path(self._where), self._timeout_seconds)
        try:
            connection.connect()
        except NoOwner:
            if not _is_owned(Path(self._where)):
                raise
            _connect_later(connection, Path(self._where))
        return connection

    def _lost(self, error: Exception) -> ClientError:
        if isinstance(error, TimeoutError):
            return ClientError(f"the owner of {self._where} did not answer within {self._timeout_seconds:g} s")
        return ClientError(
            f"the owner of {self._where} went away before it answered; "
            f"what it had done is recorded: look with `everdeck ps`, and start it with `everdeck up`"
        )


class _UnixConnection(HTTPConnection):
    def __init__(self, state_dir: Path, timeout_seconds: float | None) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._state_dir = state_dir

    def connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self.timeout)
        try:
            directory = os.open(self._state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                connection.connect(f"/proc/self/fd/{directory}/{HTTP_SOCKET}")
            finally:
                os.close(directory)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            connection.close()
            raise NoOwner(f"no owner is running for {self._state_dir}") from error
        except OSError as error:
            connection.close()
            raise ClientError(f"cannot reach the owner of {self._state_dir}: {error.strerror}") from error
        self.sock = connection


def _was_closed(connection: HTTPConnection) -> bool:
    """Has the other side hung up on a connection on which nothing was asked? Then there is its end to be read."""
    if connection.sock is None:
        return True
    look = select.poll()
    look.register(connection.sock, select.POLLIN)
    return bool(look.poll(0))


def _connect_later(connection: _UnixConnection, state_dir: Path) -> None:
    """Somebody owns the deck and does not serve this socket: wait until it does, within reason."""
    from everdeck.kernel.vacancy import Vacancy  # noqa: PLC0415 - needed only while an owner comes or goes

    deadline = time.monotonic() + PATIENCE_SECONDS
    with contextlib.closing(Vacancy(state_dir)) as vacancy:
        while True:
            try:
                return connection.connect()
            except NoOwner:
                if (left := deadline - time.monotonic()) <= 0 or not _is_owned(state_dir):
                    raise
            vacancy.wait(left)


def _is_owned(state_dir: Path) -> bool:
    from everdeck.kernel import flock  # noqa: PLC0415 - needed only when nobody answers

    lock = StateDir(state_dir).lock
    return lock.exists() and flock.is_held(lock)


def _refusal(problem: Mapping[str, Any]) -> Exception:
    if "fault" not in problem:
        return Refusal(problem)
    import msgspec  # noqa: PLC0415 - needed only now

    from everdeck.faults import Fault, error_of  # noqa: PLC0415 - as above

    return error_of(msgspec.convert(problem["fault"], Fault))


def _problem(response: HTTPResponse, raw: bytes) -> Mapping[str, Any]:
    try:
        told = json.loads(raw)
    except ValueError:
        told = None
    if isinstance(told, dict):
        return told
    return {"status": response.status, "title": response.reason, "detail": raw.decode("utf-8", "replace")[:500]}
