"""Messages of a namespace's satellites, for a program anywhere: each satellite's desk is in its pod.

A program that reads has one command open in the pod of each satellite (:mod:`everdeck.cluster.desk`). When a pod goes,
for whichever reason, the messages that were in hand go back to the inbox on its volume, and the next pod's desk hands
them out again: what was not finished comes again, what was finished does not.
"""

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Final, Protocol

import msgspec

from everdeck.cluster.api import Api
from everdeck.cluster.forms import Answer, Decide, Ended, Handed, Kept, Letters
from everdeck.cluster.inside import output_of, spoken_with
from everdeck.cluster.objects import pod_name
from everdeck.cluster.observe import Objects
from everdeck.deck.messages import is_read, refuse_unread
from everdeck.errors import ClientError, DeckClosed, SpecError, Unsupported
from everdeck.faults import error_of
from everdeck.messages import (
    FarHold,
    FeedStatus,
    Letter,
    LetterVerb,
    Message,
    MessageStream,
    Outgoing,
    Which,
    failure_of,
    is_leaving,
    outgoing,
)
from everdeck.model import WorkerName, worker_name
from everdeck.satellites import kind_of
from everdeck.verbs import Name

DESK: Final = ("python3", "-P", "-m", "everdeck.cluster.desk")
_AGAIN_SECONDS: Final = 1.0
_NO_FILES: Final = "files of this machine are not in the satellite's pod"


class Namespace(Protocol):
    """What the post needs of the deck."""

    @property
    def api(self) -> Api:
        """The cluster."""

    def known(self, name: WorkerName) -> Objects:
        """One worker's objects; raises UnknownWorker."""

    def everybody(self) -> list[Objects]:
        """Everybody's."""

    async def changed(self) -> None:
        """Wait for any change."""


class Post:
    """The verbs about messages."""

    def __init__(self, deck: Namespace) -> None:
        self._deck = deck
        self._streams: weakref.WeakSet[ClusterMessages] = weakref.WeakSet()

    async def close(self) -> None:
        """End every stream: what was not finished goes back to its inbox."""
        for stream in list(self._streams):
            await stream.end()

    def messages(self, name: Name | None, run: Callable[[Any], Any] | None) -> "ClusterMessages":
        """What comes in by a satellite, or by all of them."""
        stream = ClusterMessages(self._deck, None if name is None else worker_name(name), run)
        self._streams.add(stream)
        return stream

    async def send(self, name: Name, message: Outgoing) -> int:
        """It is on the satellite's volume when this returns."""
        satellite = self._deck.known(worker_name(name)).spec.satellite
        if satellite is None or not kind_of(satellite.kind).sends:
            raise SpecError("name", name, "a satellite that can send: telegram, gmail or smtp")
        number = (await self._ask(name, "send", message)).number
        assert number is not None  # noqa: S101 - the answer to a send
        return number

    async def feed(self, name: Name) -> FeedStatus:
        """Its numbers and words."""
        feed = (await self._ask(name, "feed", None)).feed
        assert feed is not None  # noqa: S101 - the answer to this question
        return feed

    async def letters(self, name: Name, which: Which, number: str | None, limit: int) -> list[Letter]:
        """What is in it."""
        return (await self._ask(name, "letters", Letters(which, number, limit))).letters

    async def decide(self, name: Name, verb: LetterVerb, number: str) -> bool:
        """Retry, drop or replay."""
        return (await self._ask(name, "decide", Decide(verb, number))).done

    async def _ask(self, name: Name, verb: str, arguments: msgspec.Struct | None) -> Answer:
        key = worker_name(name)
        known = self._deck.known(key)
        if known.spec.satellite is None:
            raise SpecError("name", name, "a satellite; this worker runs a command of its own")
        if not known.lives:
            raise ClientError(f"{key} is stopped, and its feed is on its volume: start it, then ask again")
        words = (*DESK, key, verb, msgspec.json.encode(arguments).decode())
        answer = msgspec.json.decode(await output_of(self._deck.api, pod_name(key), words), type=Answer)
        if answer.fault is not None:
            raise error_of(answer.fault)
        return answer


class ClusterMessages(MessageStream):
    """``async for message in deck.messages()``, out of the desks of every satellite's pod."""

    def __init__(self, deck: Namespace, worker: WorkerName | None, run: Callable[[Any], Any] | None) -> None:
        super().__init__(run)
        self._deck = deck
        self._worker = worker
        self._arrived: asyncio.Queue[tuple[_Line, Handed]] = asyncio.Queue()
        self._tending: asyncio.Task[None] | None = None
        self._reading: dict[WorkerName, asyncio.Task[None]] = {}

    async def begin(self) -> None:
        """Refuse a worker that nobody can read from."""
        if self._worker is not None:
            refuse_unread(self._worker, self._deck.known(self._worker).spec)

    async def __anext__(self) -> Message:
        return await (self._next() if self._run is None else asyncio.to_thread(self._run, self._next()))

    def _next_now(self, run: Callable[[Any], Any]) -> Message:
        message: Message = run(self._next())
        return message

    async def _next(self) -> Message:
        if self._tending is None:
            await self.begin()
            self._tending = asyncio.ensure_future(self._tend())
        getting = asyncio.ensure_future(self._arrived.get())
        try:
            while True:
                await asyncio.wait({getting, self._tending}, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    if not self._tending.cancelled():
                        self._tending.result()
                    raise DeckClosed("the messages are closed")
                line, handed = getting.result()
                if not line.over:  # else it went back to the inbox with its desk, and comes again
                    handed.message.__dict__["_hold"] = _Hold(line, handed.claim, self._run)
                    return handed.message
                getting = asyncio.ensure_future(self._arrived.get())
        finally:
            getting.cancel()

    async def _tend(self) -> None:
        """Read from every satellite that is there to be read from."""
        while True:
            for objects in self._deck.everybody():
                name = objects.name
                wanted = name == self._worker if self._worker is not None else is_read(objects.spec)
                if wanted and name not in self._reading:
                    self._reading[name] = asyncio.ensure_future(self._read(name))
            for name in [name for name, task in self._reading.items() if task.done()]:
                del self._reading[name]
            await self._deck.changed()

    async def _read(self, name: WorkerName) -> None:
        """One satellite's messages, over every pod that it will ever have."""
        while name in {objects.name for objects in self._deck.everybody()}:
            if not self._deck.known(name).lives:
                await self._deck.changed()
                continue
            with contextlib.suppress(ClientError):
                async with spoken_with(self._deck.api, pod_name(name), (*DESK, name)) as (lines, say):
                    line = _Line(say)
                    try:
                        async for text in lines:
                            match msgspec.json.decode(text, type=Handed | Kept):
                                case Handed() as handed:
                                    await self._arrived.put((line, handed))
                                case Kept() as kept:
                                    line.kept(kept)
                    finally:
                        line.lost()
            await asyncio.sleep(_AGAIN_SECONDS)  # noqa: TID251 - a pod that is on its way out tells nobody when

    async def end(self) -> None:
        """Take nothing more; in the deck's own loop."""
        tasks = [*self._reading.values(), *([self._tending] if self._tending else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._reading.clear()

    async def aclose(self) -> None:
        """Take nothing more; what was not finished is handed back."""
        await (self.end() if self._run is None else asyncio.to_thread(self._run, self.end()))

    def close(self) -> None:
        """The same for programs without an event loop."""
        if self._run is not None:
            self._run(self.end())


class _Line:
    """One conversation with a desk."""

    def __init__(self, say: Callable[[bytes], Any]) -> None:
        self.over = False
        self._say = say
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def end(self, ended: Ended) -> None:
        """Tell how a message ended; return when that is on disk."""
        lost = ClientError("the satellite's pod went away before this was on disk; the message may come again")
        if self.over:
            raise lost
        kept = self._waiting[ended.claim] = asyncio.get_running_loop().create_future()
        try:
            await self._say(msgspec.json.encode(ended) + b"\n")
        except (OSError, RuntimeError) as error:
            raise lost from error
        await kept

    def kept(self, kept: Kept) -> None:
        waiting = self._waiting.pop(kept.claim, None)
        if waiting is not None and not waiting.done():
            if kept.fault is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(error_of(kept.fault))

    def lost(self) -> None:
        self.over = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    ClientError("the satellite's pod went away before this was on disk; the message may come again")
                )


class _Hold(FarHold):
    """A claim at a desk; see :class:`everdeck.messages.Hold`."""

    no_files = _NO_FILES

    def __init__(self, line: _Line, claim: int, run: Callable[[Any], Any] | None) -> None:
        super().__init__(run)
        self._line = line
        self._claim = claim

    async def _end(self, error: BaseException | None) -> None:
        if error is None:
            ended = Ended(self._claim, self._replies)
        elif is_leaving(error):
            ended = Ended(self._claim, released=True)
        else:
            ended = Ended(self._claim, error=failure_of(error))
        await self._line.end(ended)


def to_send(
    to: str | int, text: str, subject: str | None, attachments: Sequence[str | PathLike[str]], options: dict[str, Any]
) -> Outgoing:
    """A message of a caller outside of the pod."""
    if attachments:
        raise Unsupported("attachments", _NO_FILES)
    return outgoing(to, text, subject=subject, **options)
