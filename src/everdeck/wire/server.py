"""The owner's end of ``deck.sock``: every owner serves it, library or daemon.

Who connects is the kernel's word (SO_PEERCRED). The owner's account and root may do everything, and are believed when
they name somebody else as the caller: a daemon that is a member passes its own callers on. Another account is let in if
it is listed, with the role it was given; every verb of it is held to that role (:mod:`everdeck.guarded`), it is never a
member, and whom it names as the caller is not looked at.

What one connection may cost is bounded: so many questions at once, frames of so many bytes, streams that send only what
was asked for, and a peer that does not read for half a minute is cut off. How many there may be is bounded too: by the
descriptors that workers leave, and per account. What is not a frame gets an error and ends the connection; a verb that
is not known, or ill-typed, gets an error and nothing else.

A verb that acts goes on when its caller hangs up: whoever asks again with the same request id gets its answer.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final, Protocol, cast

import msgspec

from everdeck.access import OWN_GRANT, Grant, LocalPeople
from everdeck.errors import EverdeckError, SpecError
from everdeck.faults import fault_of
from everdeck.guarded import Guarded
from everdeck.kernel.unixsocket import Peer, peer_of
from everdeck.model import EventKind
from everdeck.verbs import Caller, Member, asked_by
from everdeck.wire import frames
from everdeck.wire.frames import Answer, Answered, Ask, Cancel, Cutter, FrameRefused, Hello, Item, More, Refused
from everdeck.wire.listening import serve_unix
from everdeck.wire.places import Places
from everdeck.wire.requests import Served, Stream, Verb, decode_verb

_log: Final = logging.getLogger("everdeck.wire")

MOST_AT_ONCE: Final = 256
FIRST_FRAME_SECONDS: Final = 30.0
STALLED_READER_SECONDS: Final = 30.0
FEWEST_CONNECTIONS: Final = 128
"""As many there may be even where workers have taken nearly all descriptors: every member of the deck is one."""
MANY_OF_ONE_PROCESS: Final = 16
MOST_OF_ANOTHER_ACCOUNT: Final = 64
MOST_BYTES_OF_ANOTHER_ACCOUNT: Final = 1 << 20
MOST_LINES_OF_ANOTHER_ACCOUNT: Final = 10_000
"""As over HTTP: whoever wants a whole log from outside downloads it there, or follows it."""
MOST_LOOKS_OF_ANOTHER_ACCOUNT: Final = 8
"""So many of its looks are answered at once, and the answers read, before the next: each may be a whole log."""
WHOLE_FRAME_SECONDS: Final = 30.0


class Deeds(Protocol):
    """What remembers which requests were carried out."""

    def once(
        self, request: str | None, deed: EventKind | None, act: Callable[[], Awaitable[Any]], *, removal: bool
    ) -> Awaitable[Any]:
        """Carry it out, or wait for who already does, and mark it done with the event that tells of it."""


class WireServer:
    """Everybody who is connected to one owner."""

    def __init__(
        self,
        deck: Served,
        deeds: Deeds,
        listener: socket.socket,
        welcome: frames.Welcome,
        people: LocalPeople | None = None,
    ) -> None:
        self.deck = deck
        self.people = people or LocalPeople()
        self.places = Places(FEWEST_CONNECTIONS)
        self.deeds = deeds
        self.welcome = frames.packed(welcome)
        self.listener = listener
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._looks: dict[int, asyncio.Semaphore] = {}
        self._offered: dict[str, tuple[_Connection, asyncio.Future[socket.socket | None]]] = {}
        self.draining = False

    async def open(self) -> None:
        """Begin to answer; who connected while the deck was being recovered has waited in the kernel's queue."""
        self._server = await serve_unix(lambda: _Connection(self), self.listener)

    def joined(self) -> list[Member]:
        """The members that are connected, oldest first."""
        return [one.member for one in sorted(self._connections, key=_age) if one.member is not None]

    async def drain(self) -> None:
        """Take no more questions, and wait for the verbs that are being carried out.

        Not for looks of other accounts: they last until their asker reads, and can be asked of the next owner.
        """
        self.draining = True
        waiting = [task for one in self._connections for task in one.acts - one.looks]
        if waiting:
            await asyncio.wait(waiting)

    async def close(self) -> None:
        """Hang up on everybody; a member takes that for the owner's end, as it is."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.hang_up()
        self.listener.close()

    def forget_in_fork(self) -> None:
        """In a forked copy of the owner: its copies would keep everybody waiting when the owner is gone."""
        self.listener.close()
        for connection in self._connections:
            if connection.socket is not None:
                close_copy(connection.socket)
        self._connections.clear()

    # --- handing over -------------------------------------------------------------------------------------------

    async def offer(self, member: "_Connection", word: str, patience_seconds: float) -> socket.socket | None:
        """Ask one member to fetch the deck with this word; the connection it fetches it by, or None if it does not."""
        fetched: asyncio.Future[socket.socket | None] = asyncio.get_running_loop().create_future()
        self._offered[word] = (member, fetched)
        member.send(frames.Offer(word))
        try:
            async with asyncio.timeout(patience_seconds):
                return await fetched
        except TimeoutError:
            return None
        finally:
            del self._offered[word]

    def heirs(self) -> "list[_Connection]":
        """The connections of members, oldest first."""
        return [one for one in sorted(self._connections, key=_age) if one.member is not None]

    def fetched(self, word: str, connection: "_Connection") -> bool:
        """Somebody came with a word: if it was offered, the connection is taken out of the loop for the hand-over."""
        _, waiting = self._offered.get(word, (None, None))
        if waiting is None or waiting.done():
            return False
        waiting.set_result(connection.given_away())
        return True

    def of_account(self, uid: int) -> int:
        """How many connections an account has."""
        return sum(one.peer.uid == uid for one in self._connections)

    def crowding(self) -> "_Connection | None":
        """Of the process that has the most connections, and many, the oldest that only listens: it can ask again."""
        pid, count = Counter(one.peer.pid for one in self._connections).most_common(1)[0]
        if count <= MANY_OF_ONE_PROCESS:
            return None
        listening = (one for one in self._connections if one.peer.pid == pid and one.only_listens)
        return min(listening, key=_age, default=None)

    def looks_of(self, uid: int) -> asyncio.Semaphore:
        """The turns of another account at looking."""
        return self._looks.setdefault(uid, asyncio.Semaphore(MOST_LOOKS_OF_ANOTHER_ACCOUNT))

    def begun(self, connection: "_Connection") -> None:
        """Somebody connected."""
        self._connections.add(connection)

    def ended(self, connection: "_Connection") -> None:
        """Somebody is gone."""
        self._connections.discard(connection)
        for member, waiting in self._offered.values():
            if member is connection and not waiting.done():
                waiting.set_result(None)


class _Connection(asyncio.Protocol):
    """One peer."""

    def __init__(self, server: WireServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._cutter = Cutter(frames.MOST_ASKED_BYTES)
        self._transport: asyncio.Transport | None = None
        self._deck = server.deck
        self._grant: Grant | None = None
        self._whole_frame: asyncio.TimerHandle | None = None
        self.peer = Peer(0, -1)
        self._streams: dict[int, _Stream] = {}
        self._readable = asyncio.Event()
        self._readable.set()
        self._deadline: asyncio.TimerHandle | None = None
        self.since = datetime.now(UTC)
        self.socket: socket.socket | None = None
        self.acts: set[asyncio.Task[None]] = set()
        self.looks: set[asyncio.Task[None]] = set()
        self._queued: set[asyncio.Task[None]] = set()
        self.member: Member | None = None

    # --- the transport's side -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a stream socket has no other
        self._transport = transport
        borrowed = transport.get_extra_info("socket")
        self.peer = peer_of(borrowed)
        self._grant = self._server.people.grant_of(self.peer.uid, self.peer.gids, os.geteuid())
        if self._grant is None or (
            self._is_guest and self._server.of_account(self.peer.uid) >= MOST_OF_ANOTHER_ACCOUNT
        ):
            self._grant = None
            transport.abort()
            return
        if self._is_guest:
            self._cutter = Cutter(MOST_BYTES_OF_ANOTHER_ACCOUNT)
            self._deck = cast("Served", Guarded(self._server.deck, self._grant, MOST_LINES_OF_ANOTHER_ACCOUNT))
        self.socket = borrowed
        self._server.begun(self)
        self._deadline = self._loop.call_later(FIRST_FRAME_SECONDS, transport.abort)
        if self._server.places.arrived(self, self._account, self._loop.time(), self._server.crowding):
            transport.write(self._server.welcome)

    @property
    def _is_guest(self) -> bool:
        """Is it of another account?"""
        return self._grant is not OWN_GRANT

    @property
    def only_listens(self) -> bool:
        """Has it streams, and nothing else that somebody waits for?"""
        return bool(self._streams) and not self.acts and self.member is None

    @property
    def _account(self) -> str:
        return f"uid {self.peer.uid}"

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._cutter.feed(data):
                if self._transport is None:
                    return
                self._take(body)
        except FrameRefused as refusal:
            self._refuse_all(refusal)
            return
        if self._is_guest:
            self._watch_half_frames()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the same for us either way
        self._transport = self.socket = None
        self._no_deadline()
        if self._whole_frame is not None:
            self._whole_frame.cancel()
        if self._grant is None:
            return  # it was never let in
        self._server.places.left(self)
        self._server.ended(self)
        self._readable.set()  # nobody will read what is waiting to be read
        for task in (*self._queued, *(stream.task for stream in self._streams.values())):
            task.cancel()

    def pause_writing(self) -> None:
        self._readable.clear()
        self._no_deadline()
        if self._transport is not None:
            self._transport.pause_reading()
            self._deadline = self._loop.call_later(STALLED_READER_SECONDS, self._transport.abort)

    def resume_writing(self) -> None:
        self._readable.set()
        self._no_deadline()
        self._read_on()

    def cut(self) -> None:
        """Make room for somebody else."""
        if self._transport is not None:
            self._transport.abort()

    def hang_up(self) -> None:
        """Answers that are written leave first."""
        if self._transport is not None:
            self._transport.close()

    def given_away(self) -> socket.socket:
        """The connection as a socket of its own, out of the loop."""
        assert self._transport is not None  # noqa: S101 - asked while a frame is being taken
        borrowed = self._transport.get_extra_info("socket")
        own = socket.socket(fileno=os.dup(borrowed.fileno()))
        os.set_inheritable(own.fileno(), False)  # noqa: FBT003 - the os module's order
        self._transport.pause_reading()
        self._transport.abort()
        return own

    def send(self, frame: Answered) -> None:
        """Whoever is gone gets nothing, and it is no fault."""
        if self._transport is not None:
            self._transport.write(frames.packed(frame))

    # --- what is asked ------------------------------------------------------------------------------------------

    def _take(self, body: bytes) -> None:
        try:
            frame = frames.decode_asked(body)
        except msgspec.MsgspecError as err:
            raise FrameRefused(f"not a frame of version {frames.VERSION}: {err}") from err
        self._no_deadline()
        match frame:
            case Ask():
                self._asked(frame)
            case More(number, items):
                if number in self._streams:
                    self._streams[number].allow(items)
            case Cancel(number):
                if number in self._streams:
                    self._streams[number].task.cancel()
            case Hello():
                self._met(frame)

    def _met(self, hello: Hello) -> None:
        if hello.version != frames.VERSION:
            raise FrameRefused(f"this owner speaks version {frames.VERSION}, not {hello.version}")
        if self._is_guest and (hello.member or hello.program.startswith("fetch:")):
            raise FrameRefused(
                "only the account that owns the deck may join it; ask with `everdeck`, or over http.sock"
            )
        if hello.member:
            self.member = Member(self.peer.pid, self.peer.uid, hello.program[:200], since=self.since)
            self._server.places.busy(self)  # it waits for the owner's end, and keeps its place
        elif hello.program.startswith("fetch:") and not self._server.fetched(hello.program[6:], self):
            raise FrameRefused("nothing is offered under that word")

    def _asked(self, ask: Ask) -> None:
        if ask.number in self._streams or ask.number <= 0:
            raise FrameRefused(f"question {ask.number} is being answered, or is not a number above 0")
        try:
            verb = decode_verb(ask.verb)
        except msgspec.MsgspecError as err:
            cause = err.__cause__
            refusal = cause if isinstance(cause, SpecError) else SpecError("verb", "what was asked", str(err))
            self.send(Refused(ask.number, fault_of(refusal)))
            return
        caller = Caller(uid=self.peer.uid, pid=self.peer.pid)
        if ask.caller is not None and not self._is_guest:
            caller = ask.caller
        if self._server.draining:
            return  # the next owner is asked again
        if isinstance(verb, Stream):
            stream = self._streams[ask.number] = _Stream()
            stream.task = self._loop.create_task(self._flow(ask.number, verb, stream))
            stream.task.add_done_callback(lambda task: self._flowed(ask.number, task))
        else:
            one_of_many = self._is_guest and verb.deed is None
            task = self._loop.create_task((self._answer_in_turn if one_of_many else self._answer)(ask, verb, caller))
            for tasks in (self.acts, self.looks, self._queued) if one_of_many else (self.acts,):
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        self._server.places.busy(self)
        if len(self.acts) + len(self._streams) >= MOST_AT_ONCE and self._transport is not None:
            self._transport.pause_reading()

    async def _answer_in_turn(self, ask: Ask, verb: Verb[Any], caller: Caller) -> None:
        async with self._server.looks_of(self.peer.uid):
            self._queued -= {asyncio.current_task()}
            await self._answer(ask, verb, caller)
            await self._readable.wait()

    async def _answer(self, ask: Ask, verb: Verb[Any], caller: Caller) -> None:
        number = ask.number

        def tell(item: Any) -> None:
            self.send(Item(number, frames.raw(item)))

        removal = verb.__struct_config__.tag == "remove"
        # Whoever waits for a request that is under way gets its answer: another account, only that of its own requests.
        request = f"{self._account}: {ask.request}" if self._is_guest and ask.request is not None else ask.request
        try:
            with asked_by(caller):
                answer = await self._server.deeds.once(
                    request, verb.deed, lambda: verb.call(self._deck, tell), removal=removal
                )
            self.send(Answer(number, frames.raw(answer)))
        except Exception as err:  # noqa: BLE001 - the edge: whatever it is, it is the answer
            self._send_error(number, verb, err)
        finally:
            self._idle_without(asyncio.current_task())
            self._read_on()

    async def _flow(self, number: int, verb: Stream[Any], stream: "_Stream") -> None:
        try:
            async with contextlib.aclosing(verb.open(self._deck)) as items:  # type: ignore[type-var]  # all are generators
                async for item in items:
                    await stream.room()
                    await self._readable.wait()
                    self.send(Item(number, frames.raw(item)))
            self.send(Answer(number, frames.raw(None)))
        except Exception as err:  # noqa: BLE001 - as above
            self._send_error(number, verb, err)

    def _flowed(self, number: int, task: "asyncio.Task[None]") -> None:
        """A stream ended; not in its coroutine, which never runs if it is cancelled in the turn it was asked for."""
        if task.cancelled():
            self.send(Answer(number, frames.raw(None)))
        self._streams.pop(number, None)
        self._idle_without(None)
        self._read_on()

    def _send_error(self, number: int, verb: Verb[Any], err: Exception) -> None:
        if not isinstance(err, EverdeckError | ExceptionGroup):
            _log.error("%s of %s failed", type(verb).__name__, self.peer, exc_info=err)
        self.send(Refused(number, fault_of(err)))

    def _refuse_all(self, refusal: FrameRefused) -> None:
        _log.info("pid %d on the deck's socket: %s", self.peer.pid, refusal)
        self.send(Refused(0, fault_of(refusal)))
        self.hang_up()

    def _idle_without(self, ended: "asyncio.Task[Any] | None") -> None:
        """A question was answered: if it was the last one and this is no member, the place may be somebody else's."""
        if not self._streams and not (self.acts - {ended}) and self.member is None and self._transport is not None:
            self._server.places.silent(self, self._account, self._loop.time())

    def _watch_half_frames(self) -> None:
        """Another account's frame is whole within its time; a byte more does not move that."""
        if not self._cutter.holds_a_part:
            if self._whole_frame is not None:
                self._whole_frame.cancel()
                self._whole_frame = None
        elif self._whole_frame is None:
            self._whole_frame = self._loop.call_later(WHOLE_FRAME_SECONDS, self.cut)

    def _read_on(self) -> None:
        room = len(self.acts) + len(self._streams) < MOST_AT_ONCE and self._readable.is_set()
        if room and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Stream:
    """How much one stream may still send."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None]
        self._left = frames.WINDOW
        self._more = asyncio.Event()

    def allow(self, items: int) -> None:
        """Its reader has room for so many more, and never for more than a window."""
        self._left = min(self._left + max(items, 0), frames.WINDOW)
        self._more.set()

    async def room(self) -> None:
        """Wait until one more may be sent."""
        while self._left == 0:
            self._more.clear()
            await self._more.wait()
        self._left -= 1


def close_copy(borrowed: Any) -> None:
    """In a forked copy: close the descriptor of a transport's socket, and tell neither the transport nor its loop.

    The loop's epoll is shared with the parent, so nothing may be unregistered; and the socket object must know that
    its descriptor is closed, or it would one day close somebody else's that got the number.
    """
    getattr(borrowed, "_sock", borrowed).close()


def _age(connection: _Connection) -> datetime:
    return connection.since
