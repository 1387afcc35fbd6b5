"""Server-sent events: the deck's events and a worker's log as they happen.

Events are durable and numbered, so a stream needs no queue: every reader has a number, and reads on from there, out of
a ring of the newest events in memory or, if it fell behind, out of the registry. A reader that is slow costs its number
and one write buffer; a reader that came back says ``Last-Event-ID`` and misses nothing.

A reader that has read everything is handed what is new straight to its connection, the same bytes for all of them:
to wake a task for each took a tenth of a millisecond, and two hundred pages at one event kept everybody else waiting.

A ``ping`` is sent at once and every ten seconds, so that a page notices a dead connection. See the HTML standard,
"Server-sent events".
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from everdeck.deck import AsyncDeck
from everdeck.errors import DeckClosed, EverdeckError, ResourceExhausted
from everdeck.logs.keeper import bundles
from everdeck.logs.reader import Follower, Line
from everdeck.model import Event, EventKind

PING_SECONDS: Final = 10.0
RING: Final = 2048
BATCH: Final = 500
MOST_STRAIGHT_BYTES: Final = 65536  # more than that goes at the pace of its reader
# One inotify instance each, of which a user often has 128 in all (fs.inotify.max_user_instances).
MOST_LOG_STREAMS: Final = 64
READ_AGAIN_SECONDS: Final = 1.0
_PING: Final = b"event: ping\ndata: {}\n\n"
_END: Final = b"event: end\ndata: {}\n\n"
_log: Final = logging.getLogger("everdeck.server")


Straight: TypeAlias = Callable[[bytes], bool]
"""Sends a part of a streamed answer at once; False if the connection would have to keep it for later."""


class _Kept(NamedTuple):
    id: int
    worker: str | None
    kind: EventKind
    wire: bytes


class Choice(NamedTuple):
    """Which events a reader wants: of one worker, of some kinds, or all."""

    worker: str | None = None
    kinds: frozenset[EventKind] | None = None

    def of(self, batch: Sequence[_Kept]) -> bytes:
        """Those, one after the other as they are sent."""
        return b"".join(
            kept.wire
            for kept in batch
            if (self.worker is None or kept.worker == self.worker) and (self.kinds is None or kept.kind in self.kinds)
        )


class _Waiting:
    """A reader that has read everything up to its number."""

    __slots__ = ("choice", "cursor", "holds", "is_behind", "straight")

    def __init__(self, cursor: int, choice: Choice, holds: Callable[[], bool], straight: Straight) -> None:
        self.cursor = cursor
        self.choice = choice
        self.holds = holds
        self.straight = straight
        self.is_behind: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fall_behind(self) -> None:
        """Let it read by itself, or see that everything ends."""
        if not self.is_behind.done():
            self.is_behind.set_result(None)


class EventFan:
    """One reader of the deck's events that any number of streams read from.

    It is a task in the deck's own loop: what is committed there wakes it in the same turn. A callback from another
    thread would complete a future without waking the loop, and an idle loop would sleep on, up to the next ping.
    """

    def __init__(self, deck: AsyncDeck) -> None:
        self._deck = deck
        self._ring: deque[_Kept] = deque(maxlen=RING)  # what was told since somebody reads; without readers, nothing
        self._last: int | None = None
        self._readers = 0
        self._fresh: list[_Kept] = []
        self._waiting: set[_Waiting] = set()
        self._news: asyncio.Future[None] | None = None
        self._closed = False
        self._reading = asyncio.ensure_future(self._read())

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        self._reading.cancel()
        for waiting in self._waiting:
            waiting.fall_behind()
        self._wake()

    async def stream(
        self,
        after: int | None,
        choice: Choice,
        holds: Callable[[], bool],
        tells_of: Callable[[str | None], Awaitable[bool]] | None = None,
        straight: Straight | None = None,
    ) -> AsyncIterator[bytes]:
        """Events after that id (None: from now on), encoded, for as long as the reader's pass holds.

        ``tells_of`` says which workers this reader may hear of; None: of all. With ``straight`` what is new is not
        yielded here but handed to it, while it takes it.
        """
        with self._reader():
            yield _PING
            cursor = await self._deck.last_event_id() if after is None else after
            while not self._closed and holds():
                news = self._next_news()  # before the look, so that what comes during it is not slept through
                batch = await self._after(cursor)
                if batch:
                    cursor = batch[-1].id
                    if tells_of is not None:
                        batch = [kept for kept in batch if await tells_of(kept.worker)]
                    if wanted := choice.of(batch):
                        yield wanted
                    continue
                if straight is None or tells_of is not None:
                    done, _ = await asyncio.wait((news,), timeout=PING_SECONDS)
                elif news.done():
                    continue
                else:
                    waiting = _Waiting(cursor, choice, holds, straight)
                    self._waiting.add(waiting)
                    try:
                        done, _ = await asyncio.wait((waiting.is_behind,), timeout=PING_SECONDS)
                    finally:
                        self._waiting.discard(waiting)
                    cursor = waiting.cursor
                if not done:
                    yield _PING

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        """While somebody reads, what is new is kept in memory."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._ring.clear()

    async def _read(self) -> None:
        last: int | None = None
        while not self._closed:
            try:
                async for event in self._deck.follow(last):
                    last = event.id
                    self._take(event)
            except DeckClosed:
                return
            except EverdeckError as error:
                _log.warning("events could not be read: %s; trying again in %g s", error, READ_AGAIN_SECONDS)
                await asyncio.wait((self._next_news(),), timeout=READ_AGAIN_SECONDS)
            else:
                return  # the deck was closed

    def _take(self, event: Event) -> None:
        self._last = event.id
        if not self._readers:  # whoever comes finds it in the registry; a thousand in the ring are half a megabyte
            return
        if self._ring and event.id != self._ring[-1].id + 1:
            self._ring.clear()
        kept = _kept(event)
        self._ring.append(kept)
        if not self._fresh:  # what comes in the same turn is told in one go
            asyncio.get_running_loop().call_soon(self._tell)
        self._fresh.append(kept)

    def _tell(self) -> None:
        fresh, self._fresh = self._fresh, []
        told: dict[tuple[int, Choice], bytes] = {}
        for waiting in list(self._waiting):
            if waiting.cursor >= fresh[-1].id:
                continue  # it has read them in the registry
            key = (waiting.cursor, waiting.choice)
            if (wanted := told.get(key)) is None:
                wanted = told[key] = waiting.choice.of([kept for kept in fresh if kept.id > waiting.cursor])
            if self._tells(waiting, fresh, wanted):
                waiting.cursor = fresh[-1].id
            else:
                self._waiting.discard(waiting)
                waiting.fall_behind()
        self._wake()

    def _tells(self, waiting: _Waiting, fresh: list[_Kept], wanted: bytes) -> bool:
        """Hand it what is new; False if it has to read by itself."""
        # Whoever began to read before we did, or while the deck could not be read, may have missed one: it is in the
        # registry. Ids of one deck have no gaps, so what is missing shows.
        if waiting.cursor < fresh[0].id - 1 or fresh[-1].id - fresh[0].id >= len(fresh):
            return False
        if len(wanted) > MOST_STRAIGHT_BYTES:
            return False
        try:
            if not waiting.holds():
                return False
        except (EverdeckError, OSError):  # the tokens cannot be read: its own stream ends by it, and nobody else's
            return False
        return not wanted or waiting.straight(wanted)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        self._news = None

    def _next_news(self) -> asyncio.Future[None]:
        """Done as soon as there is an event more than now, or when everything ends."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    async def _after(self, cursor: int) -> list[_Kept]:
        ring = self._ring
        if self._last is not None and cursor >= self._last:
            return []
        if ring and cursor >= ring[0].id - 1:
            first = cursor + 1 - ring[0].id
            return [ring[index] for index in range(first, min(len(ring), first + BATCH))]
        return [_kept(event) for event in await self._deck.events(after=cursor, limit=BATCH)]


class Begin(NamedTuple):
    """Where a stream of a log begins (at its last lines, or after a position) and how it is shown."""

    lines: int
    position: int | None
    grep: str | None
    colour: bool


class LogStreams:
    """Followers of logs, each with its own place in the file and never more than there is inotify for."""

    def __init__(self) -> None:
        self._open: set[asyncio.Event] = set()
        self._closing = False

    def close(self) -> None:
        """End every stream."""
        self._closing = True
        for woken in self._open:
            woken.set()

    def claim(self) -> None:
        """Refuse here, before an answer has begun, when there are too many."""
        if len(self._open) >= MOST_LOG_STREAMS:
            raise ResourceExhausted(f"{MOST_LOG_STREAMS} logs are being followed over HTTP; close one first")

    async def stream(self, log_dir: Path, begin: Begin, holds: Callable[[], bool]) -> AsyncIterator[bytes]:
        """The last lines and then every new one, in bundles, for as long as the reader's pass holds.

        Each bundle has as its id the position after it, so a reader that comes back goes on there. ``end`` says that
        the log was removed and that there is nothing to come back for.
        """
        with Follower(grep=begin.grep, colour=begin.colour) as follower:
            follower.add("", log_dir, lines=begin.lines, position=begin.position)
            first = b"id: %d\n%b" % (follower.position_of(""), _PING)
            async with contextlib.aclosing(self._followed(follower, first, _lines, holds)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def relayed(self, said: AsyncIterator[str], holds: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Lines of a log that is on another machine, one event each, as its deck tells them; no position is known."""
        woken = asyncio.Event()
        self._open.add(woken)
        closing = asyncio.ensure_future(woken.wait())
        following = asyncio.ensure_future(anext(said, None))
        try:
            yield _PING
            while not self._closing and holds():
                await asyncio.wait({following, closing}, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if closing.done():
                    return
                if not following.done():
                    yield _PING
                    continue
                line = following.result()
                if line is None:
                    yield _END
                    return
                yield b"event: line\ndata: %b\n\n" % msgspec.json.encode({"text": line})
                following = asyncio.ensure_future(anext(said, None))
        finally:
            self._open.discard(woken)
            for task in (closing, following):
                task.cancel()
            await asyncio.gather(closing, following, return_exceptions=True)
            if isinstance(said, AsyncGenerator):
                await said.aclose()

    async def together(self, logs: Mapping[str, Path], lines: int, holds: Callable[[], bool]) -> AsyncIterator[bytes]:
        """The last lines of several logs and then every new one, each with its worker's name."""
        with Follower(colour=True) as follower:
            for name, log_dir in logs.items():
                follower.add(name, log_dir, lines=lines)
            async with contextlib.aclosing(self._followed(follower, _PING, _named_lines, holds)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _followed(
        self, follower: Follower, first: bytes, told: Callable[[list[Line]], bytes], holds: Callable[[], bool]
    ) -> AsyncGenerator[bytes, None]:
        """A first word at once, then what is written, and the end when no log is left."""
        woken = asyncio.Event()
        self._open.add(woken)
        try:
            yield first
            found = bundles(
                follower,
                limit=BATCH,
                idle_seconds=PING_SECONDS,
                woken=woken,
                is_over=lambda: self._closing or not holds(),
            )
            async with contextlib.aclosing(found):
                async for bundle in found:
                    yield told(bundle) if bundle else _PING
            if not follower.names:
                yield _END
        finally:
            self._open.discard(woken)


def _named_lines(lines: list[Line]) -> bytes:
    told = [{"worker": line.name, "text": line.text} for line in lines]
    return b"event: lines\ndata: %b\n\n" % msgspec.json.encode({"lines": told})


def _kept(event: Event) -> _Kept:
    wire = b"id: %d\ndata: %b\n\n" % (event.id, msgspec.json.encode(event))
    return _Kept(event.id, event.worker, event.kind, wire)


def _lines(lines: list[Line]) -> bytes:
    position = lines[-1].position
    if len(lines) == 1:
        return b"id: %d\nevent: line\ndata: %b\n\n" % (position, msgspec.json.encode({"text": lines[0].text}))
    return b"id: %d\nevent: lines\ndata: %b\n\n" % (
        position,
        msgspec.json.encode({"texts": [line.text for line in lines]}),
    )
