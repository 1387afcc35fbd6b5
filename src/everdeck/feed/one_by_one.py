"""The feed without a database: one update at a time, the cursor saved after each.

Story 2 as it is written: process first, persist second, atomically; resume from disk; dedupe by id. What was in work
when the process died comes again, so at most one update is handled twice. Nothing runs side by side, and an update
that waits for a retry holds up the ones behind it; where that hurts, the inbox is the answer.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from everdeck.crashpoints import crash_point
from everdeck.errors import FeedError, SourceError, SpecError
from everdeck.feed.cursors import FileCursor
from everdeck.feed.dispatcher import LONG_RUN_SECONDS
from everdeck.feed.handling import KeyOf, Listener, call, is_news, keyed, retry_after_of, tell
from everdeck.feed.inbox import UPSTREAM_KEEPS_SECONDS
from everdeck.feed.policy import FeedPolicy, Retry
from everdeck.feed.records import Batch, Counts, Cursor, FirstRun, Position, Record, RecordId, Source
from everdeck.feed.reporting import Reporter
from everdeck.feed.store import wall_clock

RECENT_IDS: Final = 1000
# As for the inbox's pump. A short cap: whoever writes to a bot notices ten seconds of silence, not nine polls a minute.
SOURCE_RETRY: Final = Retry(seconds=1.0, cap_seconds=10.0)

log = logging.getLogger("everdeck.feed")


class PlainItem:
    """An item of a feed without a database: what the handler gets. It has no transaction."""

    __slots__ = ("attempt", "id", "key", "payload", "stream")

    def __init__(self, stream: str, record: Record, attempt: int) -> None:
        self.stream = stream
        self.id = record.id
        self.key = record.key
        self.payload = record.payload
        self.attempt = attempt

    @property
    def value(self) -> Any:
        """The payload as JSON."""
        return msgspec.json.decode(self.payload)

    def transaction(self) -> Any:
        """Needs an inbox: the ack and the writes can be one commit only in one database."""
        raise FeedError("item.transaction() needs inbox=Inbox(...): a text file cannot commit together with a database")


class OneByOne:
    """A source, a file and a handler."""

    def __init__(
        self,
        source: Source,
        handler: Callable[[Any], Awaitable[object] | object],
        cursor: FileCursor,
        *,
        key: KeyOf | None,
        first_run: FirstRun,
        policy: FeedPolicy,
        on_event: Listener | None,
        report: bool,
    ) -> None:
        if first_run == "skip" and not hasattr(source, "skip_history"):
            raise SpecError("first_run", first_run, f"take: the source {source.name!r} cannot skip its history")
        self._source = source
        self._handler = handler
        self._cursor = cursor
        self._key = key
        self._first_run = first_run
        self._policy = policy
        self._on_event = on_event
        self._recent: OrderedDict[tuple[RecordId, bytes], None] = OrderedDict()
        self._confirmed: int | None = None
        self.stopping = False
        self.handling = False
        self.activity = asyncio.Event()
        self._done = 0
        self._dead = 0
        self._trouble: str | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._reporter = Reporter(self) if report else None

    async def run(self) -> None:
        """Ask, handle, save, until the source is exhausted or ``stopping`` is set."""
        at = self._cursor.load()
        if self._reporter is not None:
            await self._reporter.open()
        try:
            await self._run(at)
        finally:
            if self._reporter is not None:
                await self._reporter.close()

    # --- for the report ---

    def status(self) -> str:
        """The numbers of this run, for a text file remembers none; what is wrong comes first."""
        counts = str(Counts(done=self._done, waiting=0, in_flight=int(self.handling), dead=self._dead))
        return counts if self._trouble is None else f"{self._trouble} ({counts})"

    async def tell_untold(self) -> bool:
        """Nothing is kept."""
        return True

    def is_told_later(self, event: dict[str, Any]) -> bool:
        """Nothing is kept, so nothing is told later."""
        del event
        return False

    # --- the loop ---

    async def _run(self, at: int | None) -> None:
        if at is None and self._first_run == "skip":
            at = await self._skip_history()
        while True:
            batch = await self._ask(at)
            if batch is None:
                return
            if batch.records:
                self._confirmed = None
            elif batch.asked and batch.asked == at:
                self._confirmed = at
            self.handling = True
            for record in batch.records:
                at = await self._one(record)
                if self.stopping:
                    return
            self.handling = False
            at = self._end_of(batch, at)
            # Neither the source nor the handler may ever have waited; a stop must be heard all the same.
            await asyncio.sleep(0)  # noqa: TID251 - not a wait

    async def _skip_history(self) -> int | None:
        # Recorded before it is done: a crash in between must not skip what has come since.
        self._cursor.save(0)
        crash_point("feed.file.initialising")
        skip: Callable[[], Awaitable[Cursor]] = self._source.skip_history  # type: ignore[attr-defined]  # checked
        to = await skip()
        if not isinstance(to, int):
            return None
        self._cursor.save(to)
        return to

    async def _ask(self, at: int | None) -> Batch | None:
        failures = 0
        while True:
            try:
                batch = await self._source.fetch(self._position(at))
            except Exception as err:  # noqa: BLE001 - whatever a source raises: upstream is not under our control
                failures += 1
                wait = retry_after_of(err)
                wait = SOURCE_RETRY.delay(failures, chance=1.0) if wait is None else wait
                error = f"{type(err).__name__}: {err}"
                self._in_trouble(f"source failing: {error}")
                if failures == 1:
                    self._tell("source-failed", error=error, retry_in=wait)
                await asyncio.sleep(wait)  # noqa: TID251 - upstream tells nobody when it is back
            else:
                if failures:
                    self._in_trouble(None)
                    self._tell("source-recovered", failures=failures)
                return batch

    def _in_trouble(self, trouble: str | None) -> None:
        self._trouble = trouble
        self.activity.set()

    def _position(self, at: int | None) -> Position:
        age = self._cursor.age_seconds(wall_clock())
        stale = age is not None and age > UPSTREAM_KEEPS_SECONDS
        return Position(at, 0 if at is None or at == self._confirmed or stale else at)

    async def _one(self, record: Record) -> int:
        if not isinstance(record.id, int):
            raise SourceError(f"a FileCursor holds one whole number; the id {record.id!r} is not one: use an Inbox")
        mark = (record.id, hashlib.blake2b(record.payload, digest_size=8).digest())
        after = record.id + 1
        if mark not in self._recent:
            if self._policy.finishes_early:
                self._cursor.save(after)
            await self._handle(record if self._key is None else keyed(record, self._key))
            crash_point("feed.file.handled")
            self._recent[mark] = None
            if len(self._recent) > RECENT_IDS:
                self._recent.popitem(last=False)
        self._cursor.save(after)
        crash_point("feed.file.saved")
        self.activity.set()
        self._cursor.forget_attempts()
        return after

    async def _handle(self, record: Record) -> None:
        """Run its handler until it is done or set aside."""
        attempts = self._cursor.attempts_of(record.id)
        error = f"the process died during attempt {attempts}"
        while attempts < self._policy.max_attempts:
            attempts += 1
            self._cursor.note_attempt(record.id, attempts)
            crash_point("feed.file.attempt_noted")
            failure = await self._attempt(PlainItem(self._source.name, record, attempts))
            if failure is None:
                self._done += 1
                return
            error = failure if isinstance(failure, str) else f"{type(failure).__name__}: {failure}"
            asked = None if isinstance(failure, str) else retry_after_of(failure)
            if self._policy.finishes_early or (asked is None and not self._policy.is_worth_retrying(failure)):
                break
            if attempts < self._policy.max_attempts:
                wait = self._policy.retry.delay(attempts, chance=1.0) if asked is None else asked
                await asyncio.sleep(wait)  # noqa: TID251 - a backoff is time
        self._dead += 1
        facts = {"id": record.id, "key": record.key, "attempts": attempts, "error": error}
        self._cursor.set_aside({**facts, "payload": record.payload.decode("utf-8", errors="replace")})
        crash_point("feed.file.set_aside")
        self._tell("dead-letter", **facts)

    async def _attempt(self, item: PlainItem) -> BaseException | str | None:
        """Run the handler once: None if it is done, else what failed."""
        failure: BaseException | str
        limit = asyncio.timeout(self._policy.handler_timeout)
        self._be_patient(item)
        try:
            async with limit:
                await call(self._handler, item)
        except asyncio.CancelledError as err:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self._cursor.note_attempt(item.id, item.attempt - 1)  # a stop has waited for long enough: not its fault
                raise
            failure = err  # it awaited something that somebody else cancelled
        except (SystemExit, KeyboardInterrupt):
            # It asked for the end of the program, and would ask again each time it is delivered.
            self._cursor.save(int(item.id) + 1)
            raise
        except Exception as err:  # noqa: BLE001 - the user's handler
            failure = "it ran for longer than handler_timeout" if limit.expired() else err
        else:
            return None
        finally:
            if self._patience is not None:
                self._patience.cancel()
        if self._policy.on_error == "log":
            log.error("%s: update %s: %r; it is not tried again (on_error='log')", item.stream, item.id, failure)
            return None
        return failure

    def _be_patient(self, item: PlainItem, minutes: int = 0) -> None:
        """Look at it every minute while it runs, and tell of it now and then."""
        if is_news(minutes):
            self._tell("running-long", id=item.id, key=item.key, minutes=minutes, attempt=item.attempt)
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(LONG_RUN_SECONDS, self._be_patient, item, minutes + 1)

    def _end_of(self, batch: Batch, at: int | None) -> int | None:
        if isinstance(batch.cursor, int) and batch.cursor != at:
            self._cursor.save(batch.cursor)
            return batch.cursor
        return at

    def _tell(self, what: str, **facts: object) -> None:
        tell(self._hear, self._source.name, what, facts)

    def _hear(self, event: dict[str, Any]) -> None:
        if self._reporter is not None:
            self._reporter.event(event)
        if self._on_event is not None:
            self._on_event(event)
