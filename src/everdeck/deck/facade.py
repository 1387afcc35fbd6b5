"""The deck for threads and plain scripts: the same verbs, one line each, over a loop in a thread of its own.

It installs no signal handler, waits for no process but its own workers, and changes neither the host's SIGCHLD nor
its working directory. Any thread may call any verb.
"""

import asyncio
import builtins
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Self, TypeVar

from everdeck.clock import Clock
from everdeck.deck.deck import AsyncDeck
from everdeck.deck.durability import DurabilityMode
from everdeck.deck.owner import ALL_LAYERS
from everdeck.errors import DeckClosed
from everdeck.kernel import descriptors
from everdeck.messages import FeedStatus, Letter, LetterVerb, MessageStream, Which
from everdeck.model import Event, Layer, LogRoom, ProcessInfo, WorkerSpec, WorkerStatus
from everdeck.verbs import RESTARTS_AT_ONCE, Abilities, Inspection, Member, Workers

_Answer = TypeVar("_Answer")


class Deck:
    """All workers of one place. Opening recovers; leaving stops the bound workers only."""

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        join: bool = True,
        token: str | None = None,
        clock: Clock | None = None,
        layers: Iterable[str] = ALL_LAYERS,
        durability: DurabilityMode = "power",
        log_room: LogRoom | None = None,
        auto_uids: str | None = None,
    ) -> None:
        self._deck = AsyncDeck(
            where,
            join=join,
            token=token,
            clock=clock,
            layers=layers,
            durability=durability,
            log_room=log_room,
            auto_uids=auto_uids,
        )
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = asyncio.new_event_loop()
        self._submitting = threading.Lock()  # so that nothing is handed to a loop that will not run any more
        self._thread = self._running(self._loop)
        try:
            self._call(self._deck.open())
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def state_dir(self) -> Path:
        """Where everything is kept."""
        return self._deck.state_dir

    @property
    def deck_id(self) -> str:
        """The random name of this deck, made when it was first opened."""
        return self._deck.deck_id

    @property
    def owner_pid(self) -> int:
        """The pid that owns the deck."""
        return self._deck.owner_pid

    def start(
        self,
        name: str | int,
        command: Sequence[str | PurePath] | WorkerSpec | None = None,
        *,
        replace: bool = False,
        **fields: Any,
    ) -> WorkerStatus:
        """As :meth:`AsyncDeck.start`."""
        return self._call(self._deck.start(name, command, replace=replace, **fields))

    def start_many(
        self,
        workers: Workers,
        *,
        replace: bool = False,
        progress: Callable[[str, WorkerStatus | Exception], None] | None = None,
        **fields: Any,
    ) -> builtins.list[WorkerStatus]:
        """As :meth:`AsyncDeck.start_many`."""
        return self._call(self._deck.start_many(workers, replace=replace, progress=progress, **fields))

    def stop(self, name: str | int) -> WorkerStatus:
        """As :meth:`AsyncDeck.stop`."""
        return self._call(self._deck.stop(name))

    def stop_many(
        self, names: Iterable[str | int], progress: Callable[[WorkerStatus], None] | None = None
    ) -> builtins.list[WorkerStatus]:
        """As :meth:`AsyncDeck.stop_many`."""
        return self._call(self._deck.stop_many(names, progress))

    def stop_all(self) -> builtins.list[WorkerStatus]:
        """As :meth:`AsyncDeck.stop_all`."""
        return self._call(self._deck.stop_all())

    def restart(self, name: str | int) -> WorkerStatus:
        """As :meth:`AsyncDeck.restart`."""
        return self._call(self._deck.restart(name))

    def restart_many(
        self,
        names: Iterable[str | int],
        *,
        parallel: int = RESTARTS_AT_ONCE,
        progress: Callable[[str, WorkerStatus | Exception], None] | None = None,
    ) -> builtins.list[WorkerStatus]:
        """As :meth:`AsyncDeck.restart_many`."""
        return self._call(self._deck.restart_many(names, parallel=parallel, progress=progress))

    def reset(self, name: str | int) -> WorkerStatus:
        """As :meth:`AsyncDeck.reset`."""
        return self._call(self._deck.reset(name))

    def remove(self, name: str | int, *, data: bool = False) -> None:
        """As :meth:`AsyncDeck.remove`."""
        self._call(self._deck.remove(name, data=data))

    def status(self, name: str | int) -> WorkerStatus:
        """As :meth:`AsyncDeck.status`."""
        return self._call(self._deck.status(name))

    def list(self) -> builtins.list[WorkerStatus]:
        """As :meth:`AsyncDeck.list`."""
        return self._call(self._deck.list())

    def spec(self, name: str | int) -> WorkerSpec:
        """As :meth:`AsyncDeck.spec`."""
        return self._call(self._deck.spec(name))

    def messages(self, name: str | int | None = None) -> MessageStream:
        """As :meth:`AsyncDeck.messages`; ``for`` and ``async for`` both work."""
        return self._call(self._read_messages(name))

    async def _read_messages(self, name: str | int | None) -> MessageStream:
        await self._deck.last_event_id()  # in a forked copy, a first verb
        return self._deck.messages(name, run=self._call)

    def send(
        self,
        name: str | int,
        *,
        to: str | int,
        text: str = "",
        subject: str | None = None,
        attachments: Sequence[str | os.PathLike[str]] = (),
        **options: Any,
    ) -> int:
        """As :meth:`AsyncDeck.send`."""
        return self._call(self._deck.send(name, to=to, text=text, subject=subject, attachments=attachments, **options))

    def feed(self, name: str | int) -> FeedStatus:
        """As :meth:`AsyncDeck.feed`."""
        return self._call(self._deck.feed(name))

    def letters(
        self, name: str | int, *, which: Which = "dead", number: str | None = None, limit: int = 100
    ) -> builtins.list[Letter]:
        """As :meth:`AsyncDeck.letters`."""
        return self._call(self._deck.letters(name, which=which, number=number, limit=limit))

    def decide(self, name: str | int, verb: LetterVerb, number: str) -> bool:
        """As :meth:`AsyncDeck.decide`."""
        return self._call(self._deck.decide(name, verb, number))

    def inspect(self, name: str | int) -> Inspection:
        """As :meth:`AsyncDeck.inspect`."""
        return self._call(self._deck.inspect(name))

    def logs(
        self,
        name: str | int,
        lines: int | None = 20,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        grep: str | None = None,
    ) -> builtins.list[str]:
        """As :meth:`AsyncDeck.logs`."""
        return self._call(self._deck.logs(name, lines, since=since, until=until, grep=grep))

    def follow_logs(self, name: str | int, lines: int = 0, *, grep: str | None = None) -> Iterator[str]:
        """As :meth:`AsyncDeck.follow_logs`: ``for line in deck.follow_logs("alice"): …``."""
        return self._each(lambda: self._deck.follow_logs(name, lines, grep=grep))

    def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> builtins.list[Event]:
        """As :meth:`AsyncDeck.events`."""
        return self._call(self._deck.events(after, limit, worker))

    def last_event_id(self) -> int:
        """As :meth:`AsyncDeck.last_event_id`."""
        return self._call(self._deck.last_event_id())

    def follow(self, after: int | None = None) -> Iterator[Event]:
        """As :meth:`AsyncDeck.follow`: ``for event in deck.follow(): …``."""
        return self._each(lambda: self._deck.follow(after))

    def on_event(self, callback: Callable[[Event], Any]) -> Callable[[], None]:
        """As :meth:`AsyncDeck.on_event`."""
        return self._call(self._listen(callback))

    async def _listen(self, callback: Callable[[Event], Any]) -> Callable[[], None]:
        await self._deck.last_event_id()  # in a forked copy, a first verb
        return self._deck.on_event(callback)

    def reconcile(self) -> None:
        """As :meth:`AsyncDeck.reconcile`."""
        self._call(self._deck.reconcile())

    def adopt(self, name: str | int, pid: int, **fields: Any) -> WorkerStatus:
        """As :meth:`AsyncDeck.adopt`."""
        return self._call(self._deck.adopt(name, pid, **fields))

    def tree(self, name: str | int) -> builtins.list[ProcessInfo]:
        """As :meth:`AsyncDeck.tree`."""
        return self._call(self._deck.tree(name))

    def layers(self, name: str | int) -> builtins.list[Layer]:
        """As :meth:`AsyncDeck.layers`."""
        return self._call(self._deck.layers(name))

    def abilities(self) -> Abilities:
        """As :meth:`AsyncDeck.abilities`."""
        return self._call(self._deck.abilities())

    def members(self) -> builtins.list[Member]:
        """As :meth:`AsyncDeck.members`."""
        return self._call(self._deck.members())

    def close(self) -> None:
        """As :meth:`AsyncDeck.close`; harmless when it is closed already, or in a forked copy."""
        if self._loop is None or os.getpid() != self._pid:
            return
        try:
            self._call(self._deck.close())
        finally:
            self._end_loop()

    def _call(self, verb: Coroutine[Any, Any, _Answer]) -> _Answer:
        if os.getpid() != self._pid:
            self._begin_in_fork()
        if threading.current_thread() is self._thread:
            verb.close()
            raise DeckClosed("a verb of Deck cannot be called from inside its own loop; use AsyncDeck there")
        with self._submitting:
            loop = self._loop
            if loop is None:
                verb.close()
                raise DeckClosed(f"the deck {self._deck.where} is closed; open it again with Deck(...)")
            answer = asyncio.run_coroutine_threadsafe(verb, loop)
        try:
            return answer.result()
        except concurrent.futures.CancelledError:
            raise DeckClosed(f"the deck {self._deck.where} was closed by another thread meanwhile") from None

    def _each(self, follow: Callable[[], AsyncIterator[_Answer]]) -> Iterator[_Answer]:
        """What a stream brings, one after another, in the caller's thread; leaving the loop ends the stream."""

        async def first() -> tuple[AsyncIterator[_Answer], builtins.list[_Answer]]:
            await self._deck.last_event_id()  # in a forked copy, a first verb
            stream = follow()
            return stream, await following(stream)

        async def following(stream: AsyncIterator[_Answer]) -> builtins.list[_Answer]:
            async for item in stream:
                return [item]
            return []

        stream, items = self._call(first())
        try:
            while items:
                yield from items
                items = self._call(following(stream))
        finally:
            with contextlib.suppress(DeckClosed):
                self._call(_ended(stream))

    def _begin_in_fork(self) -> None:
        """In a forked copy, at its first verb: a loop of its own, in which the deck becomes a member."""
        with _forks.beginning:
            if os.getpid() == self._pid:
                return  # another thread of the copy was first
            # Kept for ever: a loop that is collected is closed, and would take readers out of the epoll that it
            # shares with the parent's.
            _forks.kept.append((self._loop, self._thread))
            self._submitting = threading.Lock()
            if self._loop is not None:
                self._loop = asyncio.new_event_loop()
                self._thread = self._running(self._loop)
            self._pid = os.getpid()

    def _running(self, loop: asyncio.AbstractEventLoop) -> threading.Thread:
        descriptors.grow(descriptors.MANY)  # while we may be the only thread: later it takes its time
        thread = threading.Thread(target=self._run_loop, args=(loop,), name="everdeck-deck", daemon=True)
        thread.start()
        return thread

    @staticmethod
    def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
        """The thread's whole life. It also closes the loop: the caller's thread may have a running loop of its own."""
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(_end_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    def _end_loop(self) -> None:
        with self._submitting:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()


class _Forks:
    """What a forked copy keeps of its parent's decks, and the lock under which it begins its own."""

    def __init__(self) -> None:
        self.kept: builtins.list[Any] = []
        self.beginning = threading.Lock()

    def in_child(self) -> None:
        """The lock may have been held by a thread that the copy does not have."""
        self.beginning = threading.Lock()


_forks = _Forks()
os.register_at_fork(after_in_child=_forks.in_child)


def open(where: str | os.PathLike[str], *, token: str | None = None, join: bool = True) -> Deck:  # noqa: A001 - said as everdeck.open
    """The deck at a directory of this machine, in a namespace of a cluster (``kubernetes:NAME``) or behind a URL."""
    return Deck(where, join=join, token=token)


async def _ended(stream: AsyncIterator[Any]) -> None:
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()


async def _end_tasks() -> None:
    """Whoever still waits in another thread is told, instead of waiting for ever."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
