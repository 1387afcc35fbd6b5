"""Talk to the owner of a deck over ``STATE/http.sock``: HTTP on a Unix socket, as small and as fast as it can be.

The command line is made of this. It must start in a few tens of milliseconds, so only the standard library is loaded
here; the values of :mod:`everdeck.model` are loaded when a typed answer is asked for.

An AF_UNIX address holds 107 bytes. A deeper state directory is reached through /proc/self/fd/N/http.sock of the opened
directory, so its length does not matter. A socket file nobody listens on means that no owner runs (:class:`NoOwner`);
an owner that vanishes in the middle of an answer is a :class:`ClientError` that says so: what it had done is in the
registry.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias
from urllib.parse import quote, urlencode, urlsplit

from everdeck.errors import ClientError, NoOwner, OwnerRefused
from everdeck.statedir import HTTP_SOCKET, StateDir

if TYPE_CHECKING:
    from argparse import Namespace

    from everdeck.model import Event, WorkerSpec, WorkerStatus

    # Inside the class below, `list` is a verb.
    Events: TypeAlias = list[Event]
Lines: TypeAlias = list[str]

__all__ = ["Client", "Daemon", "Refusal"]

# How long an owner that has the deck's lock may take to serve its socket: it recovers the deck first.
PATIENCE_SECONDS: Final = 3.0
_LOOK_AGAIN_SECONDS: Final = 0.05


class Refusal(OwnerRefused):
    """The owner said no; carries its problem document."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        self.problem = dict(problem)
        self.status = int(problem.get("status", 0))
        self.kind = str(problem.get("type", "about:blank")).removeprefix("urn:everdeck:")
        super().__init__(str(problem.get("detail") or problem.get("title") or "the owner refused"))


class Client:
    """One deck's owner, as seen from another process.

    >>> with Client("state") as client:
    ...     client.start("alice", ["python3", "bot.py"])
    ...     print(client.status("alice").state)
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        timeout_seconds: float | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._state_dir = Path(state_dir)
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._connection: HTTPConnection | None = None
        self._own_headers: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Reach the owner now, without asking it anything; raises :class:`NoOwner` if there is none."""
        self._connected()

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- verbs, typed -------------------------------------------------------------------------------------------

    def list(self) -> "list[WorkerStatus]":
        """All workers."""
        from everdeck.model import WorkerStatus  # noqa: PLC0415 - loaded only where a typed answer is wanted

        found: list[WorkerStatus] = _typed(self.document("GET", "/api/v1/workers")["workers"], list[WorkerStatus])
        return found

    def status(self, name: str) -> "WorkerStatus":
        """One worker."""
        return self._status("GET", _worker(name))

    def start(
        self,
        name: str,
        command: "Sequence[str] | WorkerSpec | None" = None,
        *,
        replace: bool = False,
        **fields: Any,
    ) -> "WorkerStatus":
        """Start a new worker, or one that is known already (without a command)."""
        if command is None and not fields:
            return self._status("POST", _worker(name, "start"))
        from everdeck.model import WorkerSpec  # noqa: PLC0415 - as above

        spec = WorkerSpec.of(command if command is not None else (), **fields)
        return self._status("POST", "/api/v1/workers", {"name": name, "spec": _plain(spec)}, replace=int(replace))

    def stop(self, name: str) -> "WorkerStatus":
        """Stop it; returns when its whole tree is gone."""
        return self._status("POST", _worker(name, "stop"))

    def restart(self, name: str) -> "WorkerStatus":
        """Stop it and start it again."""
        return self._status("POST", _worker(name, "restart"))

    def reset(self, name: str) -> "WorkerStatus":
        """Forget its crashes and let it try again."""
        return self._status("POST", _worker(name, "reset"))

    def remove(self, name: str) -> None:
        """Stop it and forget it, its log and its data."""
        self.request("DELETE", _worker(name))

    def adopt(self, name: str, pid: int, env: Mapping[str, str] | None = None) -> "WorkerStatus":
        """Take over a process that somebody else started."""
        return self._status("POST", _worker(name, "adopt"), {"pid": pid, "env": dict(env or {})})

    def logs(self, name: str, lines: int = 20) -> Lines:
        """The last lines of its log."""
        answer: dict[str, Lines] = self.document("GET", _worker(name, "logs"), lines=lines)
        return answer["lines"]

    def events(self, after: int = 0, limit: int = 1000, worker: str | None = None) -> "Events":
        """Events after that id, oldest first."""
        from everdeck.model import Event  # noqa: PLC0415 - as above

        raw = self.document("GET", "/api/v1/events", after=after, limit=limit, worker=worker)
        found: Events = _typed(raw, Sequence[Event])
        return found

    # --- the same, plain ----------------------------------------------------------------------------------------

    def document(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """The answer of one request as plain JSON values; None when there is no content."""
        raw = self.request(method, path, body, **query)
        return json.loads(raw) if raw else None

    def request(self, method: str, path: str, body: Any = None, **query: Any) -> bytes:
        """The answer of one request as bytes; a problem document becomes a :class:`Refusal`."""
        response = self._send(method, path, body, query, {})
        try:
            raw = response.read()
        except TimeoutError as error:
            self.close()
            raise ClientError(_silent(self._state_dir, self._timeout_seconds)) from error
        except (OSError, HTTPException) as error:
            self.close()
            raise ClientError(_vanished(self._state_dir)) from error
        if response.status >= 400:  # noqa: PLR2004 - where HTTP's refusals begin
            raise Refusal(_problem(response, raw))
        return raw

    def follow_events(self, after: int | None = None, **query: Any) -> Iterator[bytes]:
        """Each event as the bytes of its JSON, as they happen; ends with :class:`ClientError` when the owner goes."""
        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = str(after)
        response = self._send("GET", "/api/v1/events", None, query, headers)
        if response.status >= 400:  # noqa: PLR2004 - as above
            raise Refusal(_problem(response, response.read()))
        try:
            yield from _event_data(response)
        except (OSError, HTTPException) as error:
            raise ClientError(_vanished(self._state_dir)) from error
        finally:
            self.close()
        raise ClientError(_vanished(self._state_dir))

    def _status(self, method: str, path: str, body: Any = None, **query: Any) -> "WorkerStatus":
        from everdeck.model import WorkerStatus  # noqa: PLC0415 - as above

        status: WorkerStatus = _typed(self.document(method, path, body, **query), WorkerStatus)
        return status

    def _send(
        self, method: str, path: str, body: Any, query: Mapping[str, Any], headers: Mapping[str, str]
    ) -> HTTPResponse:
        given = {key: value for key, value in query.items() if value is not None}
        target = f"{path}?{urlencode(given)}" if given else path
        payload = None if body is None else json.dumps(body).encode()
        own = {"Accept": "application/json"}
        if payload is not None:
            own["Content-Type"] = "application/json"
        fresh = self._connection is None
        connection = self._connected()
        try:
            connection.request(method, target, payload, {**own, **self._own_headers, **headers})
            return connection.getresponse()
        except TimeoutError as error:
            self.close()
            raise ClientError(_silent(self._state_dir, self._timeout_seconds)) from error
        except (OSError, HTTPException) as error:
            self.close()
            # A connection that was kept may have been closed by the owner between two verbs: nothing was sent then.
            if not fresh and isinstance(error, ConnectionError | HTTPException) and method == "GET":
                return self._send(method, path, body, query, headers)
            raise ClientError(_vanished(self._state_dir)) from error

    def _connected(self) -> HTTPConnection:
        if self._connection is None:
            connection = _UnixConnection(self._state_dir, self._timeout_seconds)
            deadline = time.monotonic() + self._patience_seconds
            while True:
                try:
                    connection.connect()
                    break
                except NoOwner:
                    if time.monotonic() >= deadline or not _is_owned(self._state_dir):
                        raise
                    time.sleep(_LOOK_AGAIN_SECONDS)  # noqa: TID251 - a socket that is not there yet gives no event
            self._connection = connection
        return self._connection


class Daemon(Client):
    """What only a daemon can be asked, beside the verbs of the contract: its configuration, a reload, its end.

    It is reached at ``http.sock`` of a state directory, or at a URL with a token. Errors arrive as they were raised.
    """

    def __init__(self, where: str, token: str | None = None, timeout_seconds: float | None = None) -> None:
        super().__init__(where, timeout_seconds)
        self._url = urlsplit(where) if where.startswith(("http://", "https://")) else None
        if self._url is not None and token:
            self._own_headers = {"Authorization": f"Bearer {token}"}

    @classmethod
    def of(cls, options: "Namespace", timeout_seconds: float | None = None) -> Self:
        """The daemon that ``--state`` names."""
        remote = options.where.startswith(("http://", "https://"))
        return cls(options.where if remote else str(options.state), os.environ.get("EVERDECK_TOKEN"), timeout_seconds)

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

    def request(self, method: str, path: str, body: Any = None, **query: Any) -> bytes:
        """As of any client, with errors of the tree raised as what they are."""
        try:
            return super().request(method, path, body, **query)
        except Refusal as refusal:
            if "fault" not in refusal.problem:
                raise
            import msgspec  # noqa: PLC0415 - needed only now

            from everdeck.faults import Fault, error_of  # noqa: PLC0415 - as above

            raise error_of(msgspec.convert(refusal.problem["fault"], Fault)) from None

    def _connected(self) -> HTTPConnection:
        if self._url is None or self._connection is not None:
            return super()._connected()
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        self._connection = kind(self._url.hostname or "", self._url.port, timeout=self._timeout_seconds)
        try:
            self._connection.connect()
        except OSError as error:
            self._connection = None
            raise NoOwner(f"nobody answers at {self._url.geturl()}: {error}") from error
        return self._connection


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


def _is_owned(state_dir: Path) -> bool:
    from everdeck.kernel import flock  # noqa: PLC0415 - needed only when nobody answers

    lock = StateDir(state_dir).lock
    return lock.exists() and flock.is_held(lock)


def _worker(name: str, verb: str = "") -> str:
    path = f"/api/v1/workers/{quote(name, safe='')}"
    return f"{path}/{verb}" if verb else path


def _typed(value: Any, kind: Any) -> Any:
    import msgspec  # noqa: PLC0415 - as above

    return msgspec.convert(value, kind, strict=False)


def _plain(spec: "WorkerSpec") -> Any:
    import msgspec  # noqa: PLC0415 - as above

    return msgspec.to_builtins(spec)


def _problem(response: HTTPResponse, raw: bytes) -> Mapping[str, Any]:
    try:
        told = json.loads(raw)
    except ValueError:
        told = None
    if isinstance(told, dict):
        return told
    return {"status": response.status, "title": response.reason, "detail": raw.decode("utf-8", "replace")[:500]}


def _vanished(state_dir: Path) -> str:
    return (
        f"the owner of {state_dir} went away before it answered; "
        f"what it had done is recorded: look with `everdeck ps`, and start it with `everdeck up`"
    )


def _silent(state_dir: Path, seconds: float | None) -> str:
    return f"the owner of {state_dir} did not answer within {seconds:g} s" if seconds else "the owner did not answer"


def _event_data(response: HTTPResponse) -> Iterator[bytes]:
    """The data of each unnamed server-sent event; pings have a name."""
    name, data = b"", b""
    while line := response.readline():
        line = line.rstrip(b"\r\n")
        if not line:
            if data and not name:
                yield data
            name, data = b"", b""
        elif line.startswith(b"data: "):
            data += line[6:]
        elif line.startswith(b"event: "):
            name = line[7:]
