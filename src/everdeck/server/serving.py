"""uvicorn's HTTP protocol on sockets of ours, without uvicorn's clock.

``uvicorn.Server`` wakes up ten times a second to refresh a ``Date`` header. An idle deck should sleep until the
kernel has something to say, so only uvicorn's protocol class is used, on listeners of the deck's own event loop:
a Unix socket and, if wanted, TCP. The ``Date`` header is added when an answer is sent.

This file also owns what a connection may cost:

- a peer on the Unix socket is asked for by SO_PEERCRED and SO_PEERGROUPS (unix(7)) and turned away before a word;
- a request's head and its body have a deadline each, from their first byte on, so that bytes that trickle in do not
  count as life; a peer that stops reading an answer is cut off instead of being waited for (its transport is aborted: a
  close would first wait for the unread bytes to leave);
- connections share what is left of the descriptors when the workers have theirs. Beyond that, and beyond a number per
  address, the one that has been silent longest makes room for the new one: whoever opens a thousand connections and
  says nothing takes places only from itself.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import h11
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from everdeck.access import Grant, LocalPeople
from everdeck.errors import DeckError
from everdeck.kernel import unixsocket
from everdeck.statedir import HTTP_SOCKET
from everdeck.verbs import Caller
from everdeck.wire.listening import serve_unix
from everdeck.wire.places import Places

if TYPE_CHECKING:
    import ssl

# Parts of uvicorn take it from the root, which is put off (see everdeck.server.later).
vars(uvicorn)["Config"] = Config

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

HEAD_SECONDS: Final = 20.0
BODY_SECONDS: Final = 30.0
STALLED_READER_SECONDS: Final = 30.0
KEEP_ALIVE_SECONDS: Final = 15
ACCEPTED_PER_TURN: Final = 64
BACKLOG: Final = 1024
FRESH_TLS_SECONDS: Final = 1.0  # at a reload: how long a peer may take from its handshake to its first request
GOODBYE_SECONDS: Final = 0.25


def _cannot(_: bytes) -> bool:
    return False


class Connection:
    """What a request may know about the connection it came by: ``scope["state"]["connection"]``.

    ``grant`` and ``caller`` are those of an account of this machine; over TCP both are found out per request.
    ``straight`` sends a part of a streamed answer, if it can leave at once.
    """

    __slots__ = ("caller", "grant", "last", "local", "straight", "transport")

    def __init__(self, *, local: bool) -> None:
        self.local = local
        self.straight: Callable[[bytes], bool] = _cannot
        self.grant: Grant | None = None
        self.caller: Caller | None = None
        self.transport: asyncio.Transport | None = None
        self.last = False  # the answer under way is the last one on it

    def abort(self) -> None:
        """Cut the connection now, unread bytes and all."""
        if self.transport is not None:
            self.transport.abort()


class HttpFront:
    """All listeners of one deck, and the connections that came in by them."""

    def __init__(self, app: AsgiApp, people: LocalPeople | None = None) -> None:
        self._app = app
        self._people = people or LocalPeople()
        self._places = Places()
        self._state = ServerState()
        self._state.default_headers = []
        self._servers: dict[str, asyncio.Server] = {}
        self._bound: dict[Path, os.stat_result] = {}

    async def listen_unix(
        self,
        state_dir: Path,
        carried_fd: int | None = None,
        connected: Iterable[int] = (),
        *,
        lent: bool = False,
    ) -> None:
        """Serve ``http.sock``; refuses if another daemon of this deck does, replaces what a dead one left.

        ``carried_fd`` and ``connected`` are the listener and the connections of the image before; a listener that is
        ``lent`` is systemd's, and so are its file and its rights.
        """
        config = self._config()
        path = state_dir / HTTP_SOCKET
        if carried_fd is None:
            _refuse_second(state_dir)
            listener = unixsocket.listen(state_dir, HTTP_SOCKET)
        else:
            listener = socket.socket(fileno=carried_fd)
        if self._people and not lent:
            unixsocket.open_to_others(state_dir, HTTP_SOCKET)
        if not lent:
            self._bound[path] = os.lstat(path)
        server = await serve_unix(lambda: self._protocol(config, local=True), _own(listener), backlog=ACCEPTED_PER_TURN)
        # asyncio takes one number for both: the kernel's queue, and how many it accepts before it looks at them.
        listener.listen(BACKLOG)
        self._servers["unix"] = server
        await self._go_on_with(connected, config, local=True)

    async def listen_tcp(
        self,
        host: str,
        port: int,
        tls: "ssl.SSLContext | None" = None,
        carried_fd: int | None = None,
        connected: Iterable[int] = (),
    ) -> tuple[str, int]:
        """Serve the page and the API on TCP; returns the address that was bound."""
        config = self._config()
        loop = asyncio.get_running_loop()
        try:
            listener = _tcp_listener(host, port) if carried_fd is None else socket.socket(fileno=carried_fd)
        except OSError as error:
            raise DeckError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        server = await loop.create_server(
            lambda: self._protocol(config, local=False), sock=_own(listener), ssl=tls, backlog=ACCEPTED_PER_TURN
        )
        listener.listen(BACKLOG)
        self._servers["tcp"] = server
        await self._go_on_with(connected, config, local=False)
        bound = listener.getsockname()
        return bound[0], bound[1]

    async def handover(self, *, drain_seconds: float = 2.0) -> dict[str, Any]:
        """Stop serving for the program that replaces this one; returns the descriptors it goes on with.

        Nothing that was accepted is lost: answers under way are finished, and connections without a request are passed
        on as they are, with whatever they send meanwhile in the kernel's buffer. New ones wait in the kernel's queue.
        TLS cannot be passed on, because its keys are in this process: a connection that has not asked yet may do so for
        a moment, each answer says that it is the last one, and who was idle is told goodbye. Only what cannot be
        finished in time is cut.
        """
        carried: dict[str, Any] = {"unix_connected": [], "tcp_connected": []}
        for kind, server in self._servers.items():
            carried[kind] = os.dup(server.sockets[0].fileno())
            os.set_inheritable(carried[kind], True)  # noqa: FBT003 - the standard library's signature
            # Not closed yet: asyncio drops connections that it has accepted and not looked at when their server closes.
            asyncio.get_running_loop().remove_reader(server.sockets[0].fileno())
        self._bound.clear()
        began = asyncio.get_running_loop().time()
        deadline = began + drain_seconds
        while True:
            connections = [one for one in self._state.connections if isinstance(one, _Protocol)]
            for protocol in connections:
                protocol.say_last()
                if (descriptor := protocol.passed_on()) is not None:
                    local = self._is_local(protocol)
                    carried["unix_connected" if local else "tcp_connected"].append(descriptor)
            under_way: set[asyncio.Future[Any]] = {*self._state.tasks, *_being_accepted()}
            now = asyncio.get_running_loop().time()
            fresh = now < began + FRESH_TLS_SECONDS and any(one.has_never_asked() for one in connections)
            busy = any(one.is_speaking() or one.is_writing() for one in connections)
            if not under_way and not busy and not fresh:
                break
            left = deadline - now
            if left <= 0:
                break
            # Somebody may be in the middle of a request, which only the clock ends.
            await asyncio.wait(under_way or {_never()}, timeout=min(left, 0.05), return_when=asyncio.FIRST_COMPLETED)
        await self.close(drain_seconds=0.0, goodbye_seconds=GOODBYE_SECONDS)
        return carried

    async def _go_on_with(self, descriptors: Iterable[int], config: Config, *, local: bool) -> None:
        loop = asyncio.get_running_loop()
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                connection = _own(socket.socket(fileno=descriptor))
                await loop.connect_accepted_socket(lambda: self._protocol(config, local=local), connection)

    @staticmethod
    def _is_local(protocol: "_Protocol") -> bool:
        connection: Connection = protocol.app_state["connection"]
        return connection.local

    async def close(self, *, drain_seconds: float = 2.0, goodbye_seconds: float = 0.0) -> None:
        """Stop accepting, let answers that are being written finish, then cut what is left.

        ``goodbye_seconds`` is how long peers over TLS may take to hear that their connection ends.
        """
        for server in self._servers.values():
            server.close()
        for path, bound in self._bound.items():
            unixsocket.unlink_if_ours(path, bound)
        for protocol in list(self._state.connections):
            protocol.shutdown()
        waiting = [task for task in self._state.tasks if not task.done()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=drain_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + goodbye_seconds
        while loop.time() < deadline and any(_is_tls(one) for one in self._state.connections):
            await asyncio.wait({_never()}, timeout=0.01)  # asyncio tells nobody when the last word was sent
        for protocol in list(self._state.connections):
            if isinstance(protocol, _Protocol) and protocol.transport is not None:
                protocol.transport.abort()

    @property
    def connections(self) -> int:
        """How many peers are connected now."""
        return len(self._state.connections)

    def _config(self) -> Config:
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
        )
        config.load()
        return config

    def _protocol(self, config: Config, *, local: bool) -> "_Protocol":
        connection = Connection(local=local)
        return _Protocol(config, self._state, {"connection": connection}, self._places, self._people)


class _Protocol(H11Protocol):
    """uvicorn's protocol with a look at the peer, deadlines for what it sends, and a place of its own."""

    def __init__(
        self, config: Config, state: ServerState, app_state: dict[str, Any], places: Places, people: LocalPeople
    ) -> None:
        super().__init__(config, state, app_state)
        self._places = places
        self._people = people
        self._peer = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_for: type[Any] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        connection: Connection = self.app_state["connection"]
        connection.transport = transport
        connection.straight = self._straight
        if connection.local:
            peer = unixsocket.peer_of(transport.get_extra_info("socket"))
            connection.grant = self._people.grant_of(peer.uid, peer.gids, os.geteuid())
            connection.caller = Caller(uid=peer.uid, pid=peer.pid)
            if connection.grant is None:
                self.transport = transport
                transport.abort()
                return
            self._peer = f"uid {peer.uid}"
        else:
            self._peer = str((transport.get_extra_info("peername") or ("",))[0])
        super().connection_made(transport)
        if self._places.arrived(self, self._peer, self.loop.time()):
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        self.app_state["connection"].straight = _cannot
        if self.flow is not None:
            self._places.left(self)
            super().connection_lost(exc)

    def is_speaking(self) -> bool:
        """Is it in the middle of sending a request?"""
        theirs = self.conn.their_state
        return bool(theirs is h11.SEND_BODY or (theirs is h11.IDLE and self.conn.trailing_data[0]))

    def is_writing(self) -> bool:
        """Is a part of an answer still on its way out?"""
        return not self.transport.is_closing() and self.transport.get_write_buffer_size() > 0

    def say_last(self) -> None:
        """Over TLS, whose connections end with this image: the next answer is the last one, and says so."""
        if self.scheme == "https":
            self.app_state["connection"].last = True

    def has_never_asked(self) -> bool:
        """Is it a connection over TLS whose peer had no time for a request yet?"""
        return self.scheme == "https" and self.cycle is None and not self.transport.is_closing()

    def passed_on(self) -> int | None:
        """A descriptor of this connection for the next image, if it has no request under way; it reads no more here."""
        idle = self.cycle is None or self.cycle.response_complete
        if self.scheme == "https" or not idle or self.is_speaking() or self.transport.is_closing():
            return None
        if self.conn.their_state is not h11.IDLE or self.is_writing():
            return None
        descriptor = os.dup(self.transport.get_extra_info("socket").fileno())
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - as above
        # Ours is closed without a word: the other descriptor keeps the connection (close(2)).
        self.transport.abort()
        return descriptor

    def cut(self) -> None:
        """Make room."""
        self.transport.abort()

    def _straight(self, part: bytes) -> bool:
        """Send a part of the streamed answer under way past everything that an answer goes through otherwise.

        Only where it is a chunk (RFC 9112, 7.1) and leaves at once; False: it was not sent.
        """
        if self.conn.our_state is not h11.SEND_BODY or self.conn.their_http_version != b"1.1":
            return False
        if self.scope["method"] != "GET" or self.transport.is_closing() or self.is_writing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def _watch(self) -> None:
        """Arm the deadline of what the peer has to send next; a byte more of the same does not move it."""
        theirs = self.conn.their_state
        awaited = theirs if theirs in {h11.IDLE, h11.SEND_BODY} else None
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and (awaited is None or self.cycle.response_started):
            self._places.busy(self)
            awaited = None
        else:
            self._places.silent(self, self._peer, self.loop.time())
        # Between two requests uvicorn's own timer for idle connections runs, until a byte of the next one comes.
        if awaited is h11.IDLE and self.cycle is not None and not self.conn.trailing_data[0]:
            awaited = None
        if awaited is not self._waits_for:
            self._forget_deadline()
            self._waits_for = awaited
            if awaited is not None:
                seconds = HEAD_SECONDS if awaited is h11.IDLE else BODY_SECONDS
                self._deadline = self.loop.call_later(seconds, self.cut)

    def _forget_deadline(self) -> None:
        self._waits_for = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connection_of(request: Any) -> Connection:
    """The connection that a request came by."""
    found: Connection = request.scope["state"]["connection"]
    return found


def _being_accepted() -> set[asyncio.Task[Any]]:
    """Connections that were accepted and have no protocol yet: asyncio makes a task of each, and tells nobody."""
    return {
        task
        for task in asyncio.all_tasks()
        if getattr(task.get_coro(), "__name__", "") in {"_accept_connection2", "connect_accepted_socket"}
    }


def _is_tls(protocol: object) -> bool:
    return isinstance(protocol, _Protocol) and protocol.scheme == "https"


def _never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


def _refuse_second(state_dir: Path) -> None:
    """Two daemons beside one deck would take each other's callers."""
    with contextlib.suppress(OSError), unixsocket.connect(state_dir, HTTP_SOCKET) as there:
        pid = unixsocket.peer_of(there).pid
        raise DeckError(f"a daemon (pid {pid}) already serves {state_dir}; talk to it, or end it first")


def _tcp_listener(host: str, port: int) -> socket.socket:
    # As bytes: for text Python loads the tables of international names, also when there is nothing to look up in them.
    name = host.encode("ascii") if host.isascii() else host
    family, kind, protocol, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
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
                last = [(b"connection", b"close")] if connection.last else []
                message = {**message, "headers": [date, *last, *message.get("headers", ())]}
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
