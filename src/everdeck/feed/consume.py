"""From a source to a handler, with nothing lost on the way.

:func:`consume` is the whole feed in one call; :class:`Feed` is the same without the handlers, for libraries that have
their own (see ``everdeck.feed.aiogram`` and ``everdeck.feed.ptb``).

A *pump* asks the source, stores what came and asks again: only a stored position is ever sent upstream. The dispatcher
hands out what is stored. They meet only in the inbox, so a slow handler does not stop the pump (until the backlog is
full) and a dead upstream does not stop the handlers.

Stopping is a courtesy, never needed for correctness: handlers in flight get the grace to finish, the others are
cancelled and their items handed back without counting the attempt.
"""

import asyncio
import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from everdeck.crashpoints import crash_point
from everdeck.errors import FeedClosed, InboxUnavailable, SourceError, SpecError
from everdeck.feed import last_words
from everdeck.feed.cursors import FileCursor
from everdeck.feed.dispatcher import LONG_RUN_SECONDS, Dispatcher, Item
from everdeck.feed.handling import KeyOf, Listener, call, keyed, retry_after_of
from everdeck.feed.inbox import Inbox, Stream
from everdeck.feed.one_by_one import SOURCE_RETRY, OneByOne
from everdeck.feed.policy import DEFAULT, FeedPolicy, OnError, Retry, RetryOn
from everdeck.feed.records import Batch, Counts, Cursor, Delivery, FirstRun, Source, Start
from everdeck.feed.reporting import Reporter, StreamReport
from everdeck.feed.sources.polled import as_source

Handler: TypeAlias = Callable[[Any], Awaitable[object] | object]

# Counted against the same 5 s of the deck as FeedPolicy.grace_seconds.
CANCEL_SECONDS: Final = 0.5

log = logging.getLogger("everdeck.feed")


async def consume(
    source: Source | Callable[..., Any],
    handler: Handler,
    *,
    inbox: Inbox | None = None,
    cursor: FileCursor | None = None,
    key: KeyOf | None = None,
    concurrency: int = DEFAULT.concurrency,
    first_run: FirstRun = "take",
    delivery: Delivery = DEFAULT.delivery,
    max_attempts: int = DEFAULT.max_attempts,
    retry: Retry | None = None,
    grace_seconds: float = DEFAULT.grace_seconds,
    handler_timeout: float | None = DEFAULT.handler_timeout,
    on_error: OnError = DEFAULT.on_error,
    retry_on: RetryOn | None = DEFAULT.retry_on,
    on_event: Listener | None = None,
    report: bool = True,
    signals: bool = True,
    stop: asyncio.Event | None = None,
) -> None:
    """Run ``handler(item)`` for everything the source delivers, until stopped or the source is exhausted.

    Give ``inbox`` (durable, concurrent) or ``cursor`` (a number in a text file, one at a time, in order). A handler
    that raises is tried again with backoff and set aside after ``max_attempts``; so is an item that takes the process
    with it. One that runs for longer than ``handler_timeout`` seconds is cancelled, and that is a failed attempt.
    ``retry_on`` says which errors are worth another attempt; ``on_error="log"`` makes none of them.
    ``key(value)`` names what must stay in order (a chat); None lets everything run side by side.

    It ends when cancelled, when ``stop`` is set, on SIGTERM (in the main thread, unless the program has its own handler
    or ``signals=False``) and when the source says that nothing will come again and all of it is done.
    """
    if (inbox is None) == (cursor is None):
        raise SpecError("inbox", inbox, "either inbox=Inbox(...) or cursor=FileCursor(...)")
    policy = FeedPolicy(
        max_attempts,
        concurrency,
        delivery,
        retry or DEFAULT.retry,
        grace_seconds,
        handler_timeout,
        on_error,
        retry_on,
    )
    stop = stop or asyncio.Event()
    with _sigterm_sets(stop) if signals else contextlib.nullcontext():
        if cursor is not None:
            one_by_one = OneByOne(
                as_source(source),
                handler,
                cursor,
                key=key,
                first_run=first_run,
                policy=policy,
                on_event=on_event,
                report=report,
            )
            await _run_until(stop, one_by_one, grace_seconds)
        if inbox is None:
            return
        handlers = _Handlers(handler)
        feed = Feed(
            source,
            inbox=inbox,
            key=key,
            first_run=first_run,
            policy=policy,
            on_event=on_event,
            on_timeout=handlers.too_late,
            report=report,
        )
        await _work_until(stop, feed, handlers)


class Feed:
    """A source and an inbox at work: what is delivered is stored, what is stored can be taken.

    ``await feed.open()``, then ``await feed.take()`` for items that get exactly one outcome each, then
    ``await feed.close()``; or ``async with``. After ``open`` the pump runs by itself; errors of the source are retried
    with backoff and told as events.
    """

    def __init__(
        self,
        source: Source | Callable[..., Any],
        *,
        inbox: Inbox,
        key: KeyOf | None = None,
        first_run: FirstRun = "take",
        policy: FeedPolicy = DEFAULT,
        on_event: Listener | None = None,
        on_timeout: Callable[[Item], None] | None = None,
        on_slow: Callable[[Item], None] | None = None,
        slot_seconds: float = LONG_RUN_SECONDS,
        one_at_a_time: bool = False,
        report: bool = True,
    ) -> None:
        self.source = as_source(source)
        self.inbox = inbox
        self.stream: Stream = inbox.stream(self.source.name)
        self.policy = policy
        self._key = key
        self._first_run = first_run
        self._on_event = on_event
        self.is_first_run = False
        self.trouble: str | None = None
        self.on_trouble: Callable[[Exception], None] | None = None
        self._ask_again = asyncio.Event()
        self._reporter = Reporter(StreamReport(self.stream, self)) if report else None
        if first_run == "skip" and not hasattr(self.source, "skip_history"):
            raise SpecError("first_run", first_run, f"take: the source {self.source.name!r} cannot skip its history")
        self._dispatcher = Dispatcher(
            self.stream,
            policy,
            on_event=self._hear,
            on_timeout=on_timeout,
            on_slow=on_slow,
            slot_seconds=slot_seconds,
            one_at_a_time=one_at_a_time,
        )
        self._pump_task: asyncio.Task[None] | None = None

    @property
    def concurrency(self) -> int:
        """How many items may be in flight."""
        return self.policy.concurrency

    async def open(self) -> Self:
        """Open the inbox, take up what an earlier run left, and start the pump."""
        await self.inbox.open()
        try:
            start = await self.stream.begin(self._first_run)
            self.is_first_run = start is not Start.RESUME
            await self._dispatcher.open()
            if self._reporter is not None:
                await self._reporter.open()
            self._pump_task = asyncio.get_running_loop().create_task(self._pump(start), name="feed pump")
        except BaseException:
            with contextlib.suppress(Exception):
                await self._dispatcher.stop(0)
            await self.inbox.close()
            raise
        return self

    async def take(self, most: int | None = None, *, begin: bool = True) -> list[Item]:
        """Wait for work: up to ``most`` items. FeedClosed once the feed is closing.

        With ``begin=False`` say ``item.begin()`` before its handler runs: from then on a death may be its doing.
        """
        return await self._dispatcher.take(most, begin=begin)

    def counts(self) -> Counts:
        """How many are done, waiting, in flight and dead."""
        return self.stream.counts()

    async def exhausted(self) -> None:
        """Wait until the source has said that nothing will come again and all of it is done."""
        if self._pump_task is None:
            raise FeedClosed(f"the feed of {self.source.name!r} is not open")
        await asyncio.shield(self._pump_task)
        await self._dispatcher.drained()

    def stopping(self) -> None:
        """A stop has been asked for: nothing more is handed out, and being killed from now on is nobody's fault."""
        self._dispatcher.stopping()

    @property
    def is_ending(self) -> bool:
        """Closed, or everything is being cancelled: asyncio.run() does that to all tasks when its function ends."""
        return self._pump_task is None or self._pump_task.cancelling() > 0

    def ask_again(self) -> None:
        """Somebody wants news: a source that failed is asked now rather than later."""
        self._ask_again.set()

    async def close(self, grace_seconds: float | None = None, *, cancelled: bool = False) -> int:
        """Stop asking, wait for what is in flight, hand back the rest; how many were left.

        ``cancelled``: see :meth:`Dispatcher.stop`.
        """
        pump, self._pump_task = self._pump_task, None
        if pump is None:
            return 0
        try:
            self._dispatcher.stopping()
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            grace = self.policy.grace_seconds if grace_seconds is None else grace_seconds
            return await self._dispatcher.stop(grace, cancelled=cancelled)
        finally:
            if self._reporter is not None:
                await self._reporter.close()
            await self.inbox.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def event(self, what: str, **facts: object) -> None:
        """Tell the listeners and the deck that something happened, such as a 409 (``poller-conflict``)."""
        self._dispatcher.tell(what, **facts)

    def _hear(self, event: dict[str, Any]) -> None:
        if self._reporter is not None:
            self._reporter.event(event)
        if self._on_event is not None:
            self._on_event(event)

    # --- the pump ---

    async def _pump(self, start: Start) -> None:
        if start is Start.SKIP:
            await self._persist(self._skip_history)
        while await self._persist(self._ask_and_store):
            pass

    async def _skip_history(self) -> bool:
        skip: Callable[[], Awaitable[Cursor]] = self.source.skip_history  # type: ignore[attr-defined]  # checked at the start
        await self.stream.skip(to=await skip())
        return True

    async def _ask_and_store(self) -> bool:
        await self.stream.room()
        await self.stream.synced()  # only what is synced may be confirmed
        if getattr(self.source, "waits_for_handlers", False):
            await self._dispatcher.drained()
        crash_point("feed.pump.asking")
        batch = await self.source.fetch(self.stream.position())
        crash_point("feed.pump.answered")
        if batch is None:
            return False
        if not isinstance(batch, Batch):
            raise SourceError(f"source {self.source.name!r} answered {type(batch).__name__}, not a Batch")
        records = batch.records if self._key is None else [keyed(record, self._key) for record in batch.records]
        # The handlers begin as soon as it is committed; upstream hears of it only when it is synced.
        stored = await self.stream.store(records, batch.cursor, asked=batch.asked, sync=self.stream.has_enough)
        if stored.restarted_ids:
            self.event("ids-restarted", asked=batch.asked, first=records[0].id)
        # A source that has an answer at once never waits for anything: let the handlers have their turn.
        await asyncio.sleep(0)  # noqa: TID251 - not a wait
        return True

    async def _persist(self, step: Callable[[], Awaitable[bool]]) -> bool:
        """Do it until it works. Nothing was stored when it fails, so the same position is asked again."""
        failures = 0
        while True:
            self._ask_again.clear()
            try:
                answer = await step()
            except InboxUnavailable as err:
                what, error = "inbox-unavailable", str(err)
                failures, wait = failures + 1, None
            except Exception as err:  # noqa: BLE001 - whatever a source raises: upstream is not under our control
                what, error = "source-failed", f"{type(err).__name__}: {err}"
                failures, wait = failures + 1, retry_after_of(err)
                if self.on_trouble is not None:
                    self.on_trouble(err)
            else:
                if failures:
                    self._in_trouble(None)
                    self.event("source-recovered", failures=failures)
                return answer
            if wait is None:
                wait = SOURCE_RETRY.delay(failures, chance=1.0)
            self._in_trouble(f"source failing: {error}" if what == "source-failed" else f"inbox unavailable: {error}")
            if failures == 1:
                self.event(what, error=error, retry_in=wait)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):  # upstream tells nobody when it is back
                    await self._ask_again.wait()

    def _in_trouble(self, trouble: str | None) -> None:
        self.trouble = trouble
        self.stream.activity.set()


# --- the handlers -----------------------------------------------------------------------------------------------


async def _work_until(stop: asyncio.Event, feed: Feed, handlers: "_Handlers") -> None:
    await feed.open()
    loop = asyncio.get_running_loop()
    ends = [
        loop.create_task(stop.wait()),
        loop.create_task(feed.exhausted()),
        loop.create_task(handlers.serve(feed), name="feed handlers"),
    ]
    try:
        # Serving ends before the feed only by a failure that is not a handler's own: that ends everything.
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            if task.done():
                task.result()
    finally:
        feed.stopping()
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        await _leave(feed, handlers)


async def _leave(feed: Feed, handlers: "_Handlers") -> None:
    """Finish or hand back, within the grace: nothing new starts, then the handlers are cancelled, then we let go."""
    grace = feed.policy.grace_seconds
    closing = asyncio.get_running_loop().create_task(feed.close(grace + CANCEL_SECONDS, cancelled=True))
    try:
        await asyncio.wait({closing}, timeout=grace)
    finally:
        await handlers.cancel(CANCEL_SECONDS)
        left = await closing
        if left:
            log.warning("%r: %d handlers ignored their cancellation", feed.source.name, left)


class _Handlers:
    """The user's handler at work, one task per item."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._tasks: dict[Item, asyncio.Task[None]] = {}
        self._late: set[Item] = set()
        self._serving: asyncio.Task[Any] | None = None
        self._failure: BaseException | None = None

    async def serve(self, feed: Feed) -> None:
        """Take and start, until the feed closes."""
        loop = asyncio.get_running_loop()
        self._serving = asyncio.current_task()
        try:
            while True:
                for item in await feed.take():
                    task = loop.create_task(self._handle(item))
                    self._tasks[item] = task
                    task.add_done_callback(functools.partial(self._ended, item))
        except FeedClosed:
            return
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise

    @property
    def _is_ending(self) -> bool:
        return self._serving is None or self._serving.done() or self._serving.cancelling() > 0

    def too_late(self, item: Item) -> None:
        """It has run for longer than it may."""
        task = self._tasks.get(item)
        if task is not None and item not in self._late:
            self._late.add(item)
            task.cancel()

    async def cancel(self, seconds: float) -> None:
        """Cancel those that still run, and give them a moment."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)

    def _ended(self, item: Item, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(item, None)
        self._late.discard(item)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            if self._serving is not None:
                self._serving.cancel()

    async def _handle(self, item: Item) -> None:
        token = last_words.current.set(item)
        try:
            crash_point("feed.handler.starting")
            await item.witness(call(self._handler, item))
            crash_point("feed.handler.returned")
        except asyncio.CancelledError as err:
            task = asyncio.current_task()
            if item in self._late:
                await _noted(item.failed("it ran for longer than handler_timeout"))
            elif task is not None and task.cancelling() and self._is_ending:
                item.settle_as_handed_back()
                raise
            else:  # somebody else has cancelled it, or something that it awaited: a failure like any other
                await _noted(item.failed(err))
        except (SystemExit, KeyboardInterrupt):
            # It asked for the end of the program, and would ask again each time it is delivered.
            item.settle_as_done()
            raise
        except Exception as err:  # noqa: BLE001 - the user's handler
            await _noted(item.failed(err))
        else:
            if item in self._late:  # it ended in its own way
                await _noted(item.failed("it ran for longer than handler_timeout"))
            else:
                item.settle_as_done()
        finally:
            last_words.current.reset(token)


async def _noted(outcome: Awaitable[None]) -> None:
    """An outcome that came after the feed was closed: it comes again, which is as good."""
    with contextlib.suppress(FeedClosed):
        await outcome


async def _run_until(stop: asyncio.Event, work: OneByOne, grace_seconds: float) -> None:
    """Run until it ends by itself; after ``stop`` the handler in work has the grace, then it is cancelled."""
    loop = asyncio.get_running_loop()
    running, stopped = loop.create_task(work.run()), loop.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        work.stopping = True
        if work.handling and not running.done():
            await asyncio.wait({running}, timeout=grace_seconds)
        running.cancel()
        await asyncio.wait({running, stopped}, timeout=CANCEL_SECONDS)
    if running.done() and not running.cancelled():
        running.result()


# Every consume() of a loop hears SIGTERM: the first one listens, for all of them.
_LISTENING: Final[dict[asyncio.AbstractEventLoop, list[asyncio.Event]]] = {}


@contextlib.contextmanager
def _sigterm_sets(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM asks politely, unless the program has a handler of its own (or everdeck.child has put one there)."""
    loop = asyncio.get_running_loop()
    others = _LISTENING.get(loop)
    if others is None:
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        others = _LISTENING[loop] = []
        loop.add_signal_handler(signal.SIGTERM, _stop_all, others)
    others.append(stop)
    try:
        yield
    finally:
        others.remove(stop)
        if not others:
            del _LISTENING[loop]
            loop.remove_signal_handler(signal.SIGTERM)


def _stop_all(stops: list[asyncio.Event]) -> None:
    for stop in stops:
        stop.set()
