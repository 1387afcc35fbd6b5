"""uvicorn's HTTP protocol on sockets of ours, without uvicorn's clock.

``uvicorn.Server`` wakes up ten times a second to refresh a ``Date`` header. An idle deck should sleep until the
kernel has something to say, so only uvicorn's protocol class is used, on listeners of the deck's own event loop:
a Unix socket and, if wanted, TCP. The ``Date`` header is added when an answer is sent.

This file also owns what a connection may cost: a peer on the Unix socket is asked for by SO_PEERCRED (unix(7)), a
peer that opens a connection and says nothing is let go after a while, and one that stops reading a stream is cut off
instead of being waited for (its transport is aborted: a close would first wait for the unread bytes to leave).
"""

import asyncio
import contextlib
import os
import socket
import ssl
import stat
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from pathlib import Path
from typing import Any, Final, TypeAlias

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from everdeck.errors import DeckError
from everdeck.statedir import SOCKET

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

FIRST_REQUEST_SECONDS: Final = 30.0
STALLED_READER_SECONDS: Final = 30.0
SOCKET_NAME: Final = SOCKET
KEEP_ALIVE_SECONDS: Final = 15
MOST_TCP_CONNECTIONS: Final = 4096
_UCRED: Final = struct.Struct("3i")


class Connection:
    """What a request may know about the connection it came by: ``scope["state"]["connection"]``."""

    __slots__ = ("transport", "trusted")

    def __init__(self, *, trusted: bool) -> None:
        self.trusted = trusted
        self.transport: asyncio.Transport | None = None

    def abort(self) -> None:
        """Cut the connection now, unread bytes and all."""
        if self.transport is not None:
            self.transport.abort()


class HttpFront:
    """All listeners of one deck, and the connections that came in by them."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._state = ServerState()
        self._state.default_headers = []
        self._servers: dict[str, asyncio.Server] = {}
        self._bound: dict[Path, tuple[int, int]] = {}

    async def listen_unix(self, state_dir: Path, carried_fd: int | None = None) -> None:
        """Serve ``deck.sock``. Call only as the owner of the deck: a socket file of a dead owner is replaced."""
        config = self._config()
        listener = _unix_listener(state_dir) if carried_fd is None else socket.socket(fileno=carried_fd)
        facts = (state_dir / SOCKET_NAME).stat()
        self._bound[state_dir / SOCKET_NAME] = (facts.st_dev, facts.st_ino)
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(
            lambda: self._protocol(config, trusted=True), sock=_own(listener), backlog=1024
        )
        self._servers["unix"] = server

    async def listen_tcp(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, carried_fd: int | None = None
    ) -> tuple[str, int]:
        """Serve the page and the API on TCP; returns the address that was bound."""
        config = self._config(limit_concurrency=MOST_TCP_CONNECTIONS)
        loop = asyncio.get_running_loop()
        try:
            listener = _tcp_listener(host, port) if carried_fd is None else socket.socket(fileno=carried_fd)
        except OSError as error:
            raise DeckError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        server = await loop.create_server(
            lambda: self._protocol(config, trusted=False), sock=_own(listener), ssl=tls, backlog=1024
        )
        self._servers["tcp"] = server
        bound = listener.getsockname()
        return bound[0], bound[1]

    async def handover(self) -> dict[str, int]:
        """Leave the sockets listening for the program that replaces this one; returns their descriptors.

        Connections that come in meanwhile wait in the kernel's queue. Answers being written are finished first.
        """
        carried = {}
        for kind, server in self._servers.items():
            carried[kind] = os.dup(server.sockets[0].fileno())
            os.set_inheritable(carried[kind], True)  # noqa: FBT003 - the standard library's signature
        self._bound.clear()
        await self.close()
        return carried

    async def close(self, *, drain_seconds: float = 2.0) -> None:
        """Stop accepting, let answers that are being written finish, then cut what is left."""
        for server in self._servers.values():
            server.close()
        for path, identity in self._bound.items():
            # Only the file that was bound here: a later owner may have put its own in this place.
            with contextlib.suppress(OSError):
                facts = os.lstat(path)
                if (facts.st_dev, facts.st_ino) == identity:
                    path.unlink()
        for protocol in list(self._state.connections):
            protocol.shutdown()
        waiting = [task for task in self._state.tasks if not task.done()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=drain_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for protocol in list(self._state.connections):
            if isinstance(protocol, _Protocol) and protocol.transport is not None:
                protocol.transport.abort()

    @property
    def connections(self) -> int:
        """How many peers are connected now."""
        return len(self._state.connections)

    def _config(self, limit_concurrency: int | None = None) -> Config:
        config = Config(
            _dated(self._app),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http=_Protocol,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=limit_concurrency,
        )
        config.load()
        return config

    def _protocol(self, config: Config, *, trusted: bool) -> "_Protocol":
        return _Protocol(config, self._state, {"connection": Connection(trusted=trusted)})


class _Protocol(H11Protocol):
    """uvicorn's protocol with a look at the peer and a deadline for the first request."""

    _first_request: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        connection: Connection = self.app_state["connection"]
        connection.transport = transport
        if connection.trusted and not _peer_is_ours(transport):
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        self._first_request = self.loop.call_later(FIRST_REQUEST_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._cancel_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        if self.flow is not None:
            super().connection_lost(exc)

    def _cancel_deadline(self) -> None:
        if self._first_request is not None:
            self._first_request.cancel()
            self._first_request = None


def _peer_is_ours(transport: asyncio.Transport) -> bool:
    """Whether the peer runs as us or as root; the file's mode says the same, and this does not depend on it."""
    peer = transport.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    return uid in {0, os.geteuid()}


def _unix_listener(state_dir: Path) -> socket.socket:
    """A socket bound at STATE/deck.sock, mode 0600 from its first moment.

    An AF_UNIX address holds 107 bytes, so a deep state directory is reached through its descriptor in /proc.
    It is bound under another name, closed to others, and then renamed: there is no moment at which the name
    exists and refuses, and none at which somebody else may connect.
    """
    directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    fresh = f".{SOCKET_NAME}.{os.getpid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=directory)
        before = os.umask(0o177)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{fresh}")
        finally:
            os.umask(before)
        listener.listen(1024)
        with contextlib.suppress(FileNotFoundError):
            there = os.stat(SOCKET_NAME, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(there.st_mode):
                raise DeckError(f"{state_dir / SOCKET_NAME} is a directory")
        os.rename(fresh, SOCKET_NAME, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as error:
        listener.close()
        raise DeckError(f"cannot listen on {state_dir / SOCKET_NAME}: {error.strerror}") from error
    finally:
        os.close(directory)
    return listener


def _tcp_listener(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _own(listener: socket.socket) -> socket.socket:
    """As a listener must be in this process, wherever it came from: not inherited by workers, not blocking."""
    listener.set_inheritable(False)
    listener.setblocking(False)  # noqa: FBT003 - as above
    return listener


def _dated(app: AsgiApp) -> AsgiApp:
    """The same application with a ``Date`` on every answer and a deadline on every write."""

    async def dated(scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"]["connection"]

        async def send_dated(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                date = (b"date", formatdate(usegmt=True).encode("ascii"))
                message = {**message, "headers": [date, *message.get("headers", ())]}
            try:
                async with asyncio.timeout(STALLED_READER_SECONDS):
                    await send(message)
            except TimeoutError:
                connection.abort()
                raise StalledReader from None

        with contextlib.suppress(StalledReader):
            await app(scope, receive, send_dated)

    return dated


class StalledReader(Exception):
    """A peer did not read for so long that its connection was cut."""
