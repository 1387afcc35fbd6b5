"""A member's end of ``deck.sock``, inside an event loop: one connection, any number of questions at a time.

When the owner ends, every question that waits ends with :class:`LineLost`; whoever asked it asks the next owner, with
the same request id.
"""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from everdeck.errors import ClientError
from everdeck.faults import error_of
from everdeck.kernel import unixsocket
from everdeck.statedir import SOCKET
from everdeck.verbs import Caller
from everdeck.wire import frames
from everdeck.wire.frames import (
    Answer,
    Answered,
    Ask,
    Asked,
    Cancel,
    Cutter,
    Hello,
    Item,
    More,
    Offer,
    Refused,
    Welcome,
)
from everdeck.wire.requests import Stream, Verb, decoder
from everdeck.wire.server import close_copy

_Answer = TypeVar("_Answer")
_REFILL: Final = frames.WINDOW // 2


class LineLost(ClientError):
    """The owner ended, or hung up, before it answered."""


class Line(asyncio.Protocol):
    """One connection to the owner; :meth:`reach` makes it."""

    def __init__(self, offered: Callable[[str], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._cutter = Cutter(frames.MOST_ANSWERED_BYTES)
        self._transport: asyncio.Transport | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._told: dict[int, Callable[[msgspec.Raw], None]] = {}
        self._offered = offered or _nobody
        self.welcomed: asyncio.Future[Welcome] = self._loop.create_future()
        self.lost: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def reach(
        cls, state_dir: Path, program: str, *, member: bool = False, offered: Callable[[str], None] | None = None
    ) -> "Line":
        """Connect and wait to be welcomed; raises OSError if nobody listens and :class:`LineLost` if it ends first."""
        return await cls.over(unixsocket.connect(state_dir, SOCKET), program, member=member, offered=offered)

    @classmethod
    async def over(
        cls,
        connection: socket.socket,
        program: str,
        *,
        member: bool = False,
        offered: Callable[[str], None] | None = None,
    ) -> "Line":
        """The same over a socket that leads to an owner already; it is the line's from now on."""
        connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
        line = cls(offered)
        await line._loop.create_unix_connection(lambda: line, sock=connection)
        line._send(Hello(frames.VERSION, program, member))
        try:
            await asyncio.shield(line.welcomed)
        except BaseException:
            line.hang_up()
            raise
        return line

    async def ask(
        self,
        verb: Verb[_Answer],
        *,
        request: str | None = None,
        caller: Caller | None = None,
        tell: Callable[[Any], None] | None = None,
    ) -> _Answer:
        """The answer, or the error as the owner raised it."""
        number = next(self._numbers)
        answer = self._waiting[number] = self._expected()
        if tell is not None:
            item_of = decoder(verb.items).decode
            self._told[number] = lambda value: tell(item_of(value))
        self._send(Ask(number, frames.raw(verb), request, caller))
        try:
            value: _Answer = decoder(verb.answers).decode(await answer)
        finally:
            self._waiting.pop(number, None)
            self._told.pop(number, None)
        return value

    async def stream(self, verb: Stream[_Answer]) -> AsyncIterator[_Answer]:
        """Each item as it comes; the owner sends no more than there is room for here."""
        number = next(self._numbers)
        ended = self._waiting[number] = self._expected()
        items: asyncio.Queue[msgspec.Raw | None] = asyncio.Queue()
        self._told[number] = items.put_nowait
        ended.add_done_callback(lambda _: items.put_nowait(None))
        self._send(Ask(number, frames.raw(verb)))
        item_of, taken = decoder(verb.items).decode, 0
        try:
            while (item := await items.get()) is not None:
                yield item_of(item)
                taken += 1
                if taken == _REFILL:
                    self._send(More(number, taken))
                    taken = 0
            ended.result()
        finally:
            if not ended.done():
                ended.cancel()
                with contextlib.suppress(LineLost):
                    self._send(Cancel(number))
            self._waiting.pop(number, None)
            self._told.pop(number, None)

    def _expected(self) -> "asyncio.Future[msgspec.Raw]":
        """An answer to come. Who stops waiting for it need not hear that it never came."""
        answer: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return answer

    def hang_up(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def forget_in_fork(self) -> None:
        """In a forked copy: let go of the descriptor, and of nothing else, because the loop is the parent's."""
        if self._transport is not None:
            close_copy(self._transport.get_extra_info("socket"))
            self._transport = None

    def _send(self, frame: Asked) -> None:
        if self._transport is None or self._transport.is_closing():
            raise LineLost("the owner of the deck has ended")
        self._transport.write(frames.packed(frame))

    # --- the transport's side -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a stream socket has no other
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Something came."""
        try:
            for body in self._cutter.feed(data):
                self._take(frames.decode_answered(body))
        except (ClientError, msgspec.MsgspecError):  # not an owner of ours; its end is told like any other
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the same for us either way
        """It is gone: so is every answer that was waited for."""
        self._transport = None
        lost = LineLost("the owner of the deck ended before it answered")
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(lost)
        if not self.welcomed.done():
            self.welcomed.set_exception(lost)
        self.welcomed.exception()  # looked at: nobody may be waiting for it
        if not self.lost.done():
            self.lost.set_result(None)

    def _take(self, frame: Answered) -> None:
        match frame:
            case Answer(number, value):
                waiting = self._waiting.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(value)
            case Refused(number, fault):
                waiting = self._waiting.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error_of(fault))
            case Item(number, value):
                if number in self._told:
                    self._told[number](value)
            case Welcome():
                if not self.welcomed.done():
                    self.welcomed.set_result(frame)
            case Offer(word):
                self._offered(word)


def _nobody(_: str) -> None:
    """Who is not a member is offered nothing."""
