"""From the inbox to the handlers: attempts first, acks last, both in group commits.

An item is handed out only after its attempt is on disk, so a handler that takes the process with it is counted. Its
row leaves the file only after the handler has finished, so what was in flight when the process died comes again.
After ``max_attempts`` the item is a dead letter and the rest flows on.

One task, the committer, writes everything: the outcomes that came in and the attempts that are about to start share
one transaction. While it waits for its turn more outcomes gather, so the busier the inbox, the larger the groups.
A slot is free again only when the outcome is committed; hence duplicates after a crash are at most ``concurrency``.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import msgspec

from everdeck.crashpoints import crash_point
from everdeck.errors import FeedClosed, FeedError, InboxUnavailable
from everdeck.feed.handling import Listener as Listener  # noqa: PLC0414 - also found here by those who dispatch
from everdeck.feed.handling import retry_after_of, tell
from everdeck.feed.inbox import Stream
from everdeck.feed.lanes import LaneKey, Lanes
from everdeck.feed.policy import DEFAULT, FeedPolicy
from everdeck.feed.records import RecordId
from everdeck.feed.store import SQL, Transaction

DISK_RETRY_SECONDS: Final = 1.0
ERROR_TEXT_LENGTH: Final = 2000
LONG_TRANSACTION_SECONDS: Final = 1.0

log = logging.getLogger("everdeck.feed")


class _Outcome(Enum):
    DONE = "done"
    RETRY = "retry"
    DEAD = "dead"
    HANDED_BACK = "handed back"


class Item:
    """One delivered thing, being worked on. Give it exactly one outcome: done, failed, set aside or handed back.

    ``attempt`` counts from 1 and includes this one. Until the outcome is committed no other item of its key starts.
    """

    __slots__ = ("_acked", "_dispatcher", "_settled", "attempt", "id", "key", "lane", "payload", "seq", "stored_at")

    def __init__(
        self,
        dispatcher: "Dispatcher",
        lane: LaneKey,
        seq: int,
        row: tuple[RecordId, str | None, bytes, int, float],
    ) -> None:
        self.seq = seq
        self.id, self.key, self.payload, self.attempt, self.stored_at = row
        self._dispatcher = dispatcher
        self.lane = lane
        self._acked = dispatcher.finishes_early
        self._settled: _Settlement | None = None

    def __repr__(self) -> str:
        return f"<Item {self.id!r} of {self.stream!r}, key {self.key!r}, attempt {self.attempt}>"

    @property
    def stream(self) -> str:
        """The name of the stream it came by."""
        return self._dispatcher.stream.name

    @property
    def value(self) -> Any:
        """The payload as JSON."""
        return msgspec.json.decode(self.payload)

    @property
    def settled(self) -> bool:
        """It has an outcome (which may still be on its way to the disk)."""
        return self._settled is not None

    @property
    def acked(self) -> bool:
        """Its row is finished, by ``transaction()`` or because delivery is at-most-once."""
        return self._acked

    async def done(self) -> None:
        """The handler has finished; returns when that is committed."""
        await self._settle(_Outcome.DONE)

    async def failed(self, error: BaseException | str) -> None:
        """The handler raised: try again later, or set aside after the last attempt."""
        await self._dispatcher.failed(self, error)

    async def set_aside(self, reason: BaseException | str) -> None:
        """Trying again is pointless (it cannot be parsed): a dead letter now."""
        await self._dispatcher.failed(self, reason, for_good=True)

    async def hand_back(self) -> None:
        """Nobody will finish it in this run; the attempt is not counted."""
        await self._settle(_Outcome.HANDED_BACK)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """The handler's own writes and the ack in one commit: after a crash both are there or neither.

        Keep it short: it holds the inbox's only write lock, so do the slow things before or after. What the body raises
        undoes its writes. Once per item.
        """
        if self._acked and not self._dispatcher.finishes_early:
            raise FeedError(f"{self!r}: its transaction is already committed")
        if self.settled:
            raise FeedError(f"{self!r}: already finished")
        async with self._dispatcher.stream.inbox.store.transaction() as connection:
            handle = Transaction(connection)
            began = asyncio.get_running_loop().time()
            try:
                yield handle
            finally:
                handle.end()
                held = asyncio.get_running_loop().time() - began
                if held > LONG_TRANSACTION_SECONDS:
                    log.warning("%r: its transaction was open for %.1f s, and every ack waited for it", self, held)
            crash_point("feed.transaction.body_done")
            if not self._acked:
                connection.execute(SQL["item_done"], (self.seq,))
                connection.execute(SQL["stream_done"], (1, self._dispatcher.stream.number))
                crash_point("feed.transaction.acked")
        crash_point("feed.transaction.committed")
        handle.committed()
        if not self._acked:
            self._acked = True
            self._dispatcher.stream.left(waiting=0, done=1)

    def release(self) -> None:
        """Let the next of its key start and give its slot free, while the work on this one goes on in the background.

        The outcome is still due, and counts as before; only the order is given up.
        """
        self._dispatcher.step_aside(self)

    def settle_as_done(self) -> None:
        """As :meth:`done`, for those who do not wait for the commit; until then it would come again."""
        if self._settled is None:
            self._settled = self._dispatcher.settle(self, _Outcome.DONE, None, 0.0)

    def settle_as_handed_back(self) -> None:
        """As :meth:`hand_back`, for those who cannot wait for the commit."""
        if self._settled is None:
            self._settled = self._dispatcher.settle(self, _Outcome.HANDED_BACK, None, 0.0)

    async def _settle(self, outcome: _Outcome, error: str | None = None, due_in: float = 0.0) -> None:
        self._dispatcher.stream.inbox.store.refuse_inside()
        if self._settled is None:
            self._settled = self._dispatcher.settle(self, outcome, error, due_in)
        await self._settled.committed()


@dataclass(slots=True)
class _Settlement:
    """An outcome on its way to the disk."""

    item: Item
    outcome: _Outcome
    error: str | None
    due_in: float
    _over: bool = False
    _failure: Exception | None = None
    _waiters: "list[asyncio.Future[None]]" = field(default_factory=list)

    async def committed(self) -> None:
        """Wait for the commit. Each who waits has a future of its own: giving up takes nothing back."""
        if not self._over:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        elif self._failure is not None:
            raise self._failure

    def end(self, failure: Exception | None = None) -> None:
        """It is committed, or will never be."""
        self._over, self._failure = True, failure
        for waiter in self._waiters:
            if waiter.done():
                continue
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure)


@dataclass(slots=True)
class _Want:
    most: int
    given: "asyncio.Future[list[Item]]"


class Dispatcher:
    """Hands out the items of one stream and takes their outcomes.

    ``take`` gives items in order per key, from as many keys at once as the policy's ``concurrency`` allows, in turns.
    ``on_event`` hears what a person should know (``dead-letter``, ``crashed``, ``raised-after-commit``,
    ``inbox-unavailable``).
    """

    def __init__(
        self,
        stream: Stream,
        policy: FeedPolicy = DEFAULT,
        *,
        on_event: Listener | None = None,
    ) -> None:
        self.stream = stream
        self.policy = policy
        self.finishes_early = policy.finishes_early
        self._on_event = on_event
        self._lanes = Lanes()
        self._in_flight: set[Item] = set()
        self._background: set[Item] = set()
        self._settlements: list[_Settlement] = []
        self._wants: list[_Want] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._committer: asyncio.Task[None] | None = None
        self._revived = False
        self._told_of_disk = False
        self._stop_hearing: Callable[[], None] = _nothing

    # --- the life of it ---

    async def open(self) -> None:
        """Take up what an earlier run left: what was in flight crashed, and may be set aside for it."""
        if self._committer is not None:
            raise FeedError(f"the dispatcher of stream {self.stream.name!r} is already open")
        self._lanes, self._closing, self._revived = Lanes(), False, False
        self._in_flight.clear()
        self._background.clear()
        self._wake = await self.stream.listen()
        store, number = self.stream.inbox.store, self.stream.number
        async with store.transaction() as connection:
            running = connection.execute(SQL["items_running"], (number,)).fetchall()
            dead: list[Any] = []
            if len(running) == 1 and running[0][1] >= self.policy.max_attempts:
                # It was alone, so it was the one.
                ((seq, attempts),) = running
                error = f"the process died during attempt {attempts}"
                dead = connection.execute(SQL["item_crashed_out"], (store.clock(), error, seq)).fetchall()
            crash_point("feed.recover.blamed")
            most = self.policy.max_attempts - (len(running) > 1)
            connection.execute(SQL["items_interrupted"], (most, number))
            crash_point("feed.recover.counted")
        crash_point("feed.recover.committed")
        self.stream.recount(number)
        now, wall = self._now(), store.clock()
        for seq, key, due_at, attempts, crashes in store.each("items_waiting", number):
            lane = self._lanes.add(seq, key)
            if due_at > wall:
                # A stepped wall clock must not park an item for days.
                self._lanes.delay(lane, now + min(due_at - wall, self.policy.retry.cap_seconds))
            if crashes and attempts >= self.policy.max_attempts - 1:
                self._lanes.suspect(seq)
        self._stop_hearing = store.bell.listen(self._hear_bell)
        if running:
            self.tell("crashed", in_flight=len(running))
        for seq, record_id, key, attempts, error in dead:
            self.tell("dead-letter", number=seq, id=record_id, key=key, attempts=attempts, error=error)
        self._committer = asyncio.get_running_loop().create_task(self._commit_forever(), name="feed committer")

    async def take(self, most: int | None = None) -> list[Item]:
        """Wait for work and start on it: up to ``most`` items, their attempts committed.

        Raises FeedClosed as soon as the dispatcher is closing.
        """
        self._check()
        want = _Want(most or self.policy.concurrency, asyncio.get_running_loop().create_future())
        self._wants.append(want)
        self._wake.set()
        try:
            return await want.given
        except asyncio.CancelledError:
            if want in self._wants:
                self._wants.remove(want)
            elif want.given.done() and not want.given.cancelled() and want.given.exception() is None:
                # Handed out in the same moment: nobody will work on them, so they go back uncounted.
                for item in want.given.result():
                    item.settle_as_handed_back()
            raise

    async def drained(self) -> None:
        """Wait until nothing waits and nothing is in flight."""
        while self.stream.waiting or self._in_flight or self._background:
            self._idle.clear()
            await self._idle.wait()

    async def stop(self, grace_seconds: float = 10.0) -> int:
        """Hand out nothing more, wait for what is in flight, hand back the rest; how many were handed back."""
        self._closing = True
        for want in self._wants:
            if not want.given.done():
                want.given.set_exception(FeedClosed("the feed is closing"))
        self._wants.clear()
        try:
            async with asyncio.timeout(grace_seconds):
                while self._in_flight or self._background:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            pass
        left = [item for item in self._in_flight | self._background if not item.settled]
        for item in left:
            item.settle_as_handed_back()
        self._stop_hearing()
        committer, self._committer = self._committer, None
        if committer is not None:
            committer.cancel()
            await asyncio.gather(committer, return_exceptions=True)
            if self._settlements:
                await self._commit()
        self.stream.stop_listening()
        return len(left)

    # --- outcomes ---

    async def failed(self, item: Item, error: BaseException | str, *, for_good: bool = False) -> None:
        """Decide what a failure means for this item."""
        text = _text(error)
        if isinstance(error, InboxUnavailable) and not item.acked:
            # The disk's fault, not the item's: it costs no attempt.
            self._tell_of_disk(error)
            await item._settle(_Outcome.HANDED_BACK, None, DISK_RETRY_SECONDS)  # noqa: SLF001 - as below
        elif item.acked and not self.finishes_early:
            self.tell("raised-after-commit", id=item.id, key=item.key, error=text)
            await item.done()
        elif for_good or self.finishes_early or item.attempt >= self.policy.max_attempts:
            await item._settle(_Outcome.DEAD, text)  # noqa: SLF001 - an item and its dispatcher are one thing
        else:
            asked = None if isinstance(error, str) else retry_after_of(error)  # a 429 while answering
            delay = self.policy.retry.delay(item.attempt, random.random()) if asked is None else asked  # noqa: S311 - jitter
            await item._settle(_Outcome.RETRY, text, delay)  # noqa: SLF001 - as above

    def step_aside(self, item: Item) -> None:
        """See :meth:`Item.release`."""
        if item in self._in_flight and not item.settled:
            self._in_flight.discard(item)
            self._background.add(item)
            item.lane = self._lanes.step_aside(item.seq, item.lane)
            self._wake.set()

    def settle(self, item: Item, outcome: _Outcome, error: str | None, due_in: float) -> _Settlement:
        """Put an outcome into the next group commit."""
        if outcome is _Outcome.HANDED_BACK and self.finishes_early:
            # It may have begun, so it must not run again; a person can still see it and decide.
            outcome, error = _Outcome.DEAD, "cut off while in flight; at most once, so it is not tried again"
        settlement = _Settlement(item, outcome, error, due_in)
        if item in self._in_flight or item in self._background:
            self._settlements.append(settlement)
            self._wake.set()
        else:
            settlement.end(FeedClosed(f"{item!r}: the feed was closed; it comes again"))
        return settlement

    # --- the committer ---

    async def _commit_forever(self) -> None:
        while True:
            await self._something_to_do()
            try:
                await self._commit()
                self._told_of_disk = False
            except InboxUnavailable as err:
                # Nothing is lost: outcomes stay in memory, rows on disk. The disk decides how long this lasts.
                self._tell_of_disk(err)
                await asyncio.sleep(DISK_RETRY_SECONDS)  # noqa: TID251 - a disk tells nobody when it has room again
            except Exception as err:
                log.exception("stream %r: the committer failed; what is in flight comes again", self.stream.name)
                self._fail(err)
                raise

    def _tell_of_disk(self, err: InboxUnavailable) -> None:
        if not self._told_of_disk:
            self._told_of_disk = True
            self.tell("inbox-unavailable", error=str(err))

    def _fail(self, err: Exception) -> None:
        """An invariant is broken: nothing more is handed out or acked, and everybody who waits is told."""
        self._closing = True
        failure = FeedError(f"the feed's committer failed: {type(err).__name__}: {err}")
        for settlement in self._settlements:
            settlement.end(failure)
        for want in self._wants:
            if not want.given.done():
                want.given.set_exception(failure)
        self._wants.clear()

    async def _something_to_do(self) -> None:
        while True:
            self._wake.clear()
            self._take_arrivals()
            if self._settlements or (self._wants and self._free_slots() and self._lanes.may_pick(self._now())):
                return
            due = self._lanes.next_due()
            can_serve = bool(self._wants) and self._free_slots() > 0
            await self._pause(max(0.0, due - self._now()) if due is not None and can_serve else None)

    async def _pause(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _hear_bell(self) -> None:
        self._revived = True
        self._wake.set()

    def _take_arrivals(self) -> None:
        for seq, key in self.stream.arrivals():
            self._lanes.add(seq, key)
        if self._revived:
            # Somebody asked for a dead letter to be tried again.
            self._revived = False
            known = self._lanes.seqs() | {item.seq for item in self._in_flight | self._background}
            for seq, key, *_ in self.stream.inbox.store.each("items_waiting", self.stream.number):
                if seq not in known:
                    self._lanes.revive(seq, key)
                    self.stream.left(waiting=-1, done=0)

    async def _commit(self) -> None:
        settlements: list[_Settlement] = []
        picked: list[tuple[int, LaneKey]] = []
        try:
            async with self.stream.inbox.store.transaction() as connection:
                # Only now, with the writer's turn in hand: what gathered while we waited belongs to this group.
                settlements, self._settlements = self._settlements, []
                self._write_outcomes(connection, settlements)
                crash_point("feed.commit.outcomes_written")
                wanted = sum(want.most for want in self._wants)
                leaving = sum(settlement.item in self._in_flight for settlement in settlements)
                picked = self._lanes.pick(min(wanted, self._free_slots() + leaving), self._now())
                items = self._write_attempts(connection, picked)
                crash_point("feed.commit.attempts_written")
        except BaseException:
            self._settlements[:0] = settlements
            for seq, lane in reversed(picked):
                self._lanes.put_back(seq, lane)
            raise
        crash_point("feed.commit.committed")
        for settlement in settlements:
            self._leave(settlement)
        self._hand_out(items, picked)
        if not self._in_flight and not self._background:
            self._idle.set()

    def _write_outcomes(self, connection: Any, settlements: Sequence[_Settlement]) -> None:
        done = [one.item.seq for one in settlements if one.outcome is _Outcome.DONE and not one.item.acked]
        if done:
            connection.execute(SQL["items_done"], (_numbers(done),))
            connection.execute(SQL["stream_done"], (len(done), self.stream.number))
        for settlement in settlements:
            if settlement.outcome is not _Outcome.DONE:
                self._write_unfinished(connection, settlement)

    def _write_unfinished(self, connection: Any, settlement: _Settlement) -> None:
        item, now = settlement.item, self.stream.inbox.store.clock()
        match settlement.outcome:
            case _Outcome.RETRY:
                connection.execute(SQL["item_retry"], (now + settlement.due_in, settlement.error, item.seq))
            case _Outcome.HANDED_BACK:
                connection.execute(SQL["item_hand_back"], (now + settlement.due_in, item.seq))
            case _Outcome.DEAD if self.finishes_early:
                row = (item.seq, self.stream.number, item.id, item.key, item.payload, item.stored_at)
                connection.execute(SQL["item_add_dead"], (*row, item.attempt, settlement.error, now))
                connection.execute(SQL["stream_done"], (-1, self.stream.number))
            case _Outcome.DEAD:
                connection.execute(SQL["item_dead"], (settlement.error, now, item.seq))

    def _write_attempts(self, connection: Any, picked: Sequence[tuple[int, LaneKey]]) -> list[Item]:
        if not picked:
            return []
        numbers = _numbers(seq for seq, _ in picked)
        rows = {row[0]: row[1:] for row in connection.execute(SQL["items_take"], (numbers,))}
        items = [Item(self, lane, seq, rows[seq]) for seq, lane in picked if seq in rows]
        if self.finishes_early:
            connection.execute(SQL["items_done"], (numbers,))
            connection.execute(SQL["stream_done"], (len(items), self.stream.number))
        else:
            connection.execute(SQL["items_taken"], (numbers,))
        return items

    def _leave(self, settlement: _Settlement) -> None:
        item = settlement.item
        self._in_flight.discard(item)
        self._background.discard(item)
        match settlement.outcome:
            case _Outcome.DONE:
                self._lanes.release(item.lane)
                self.stream.left(waiting=0, done=0 if item.acked else 1)
            case _Outcome.DEAD:
                self._lanes.release(item.lane)
                if self.finishes_early:
                    self.stream.left(waiting=0, done=-1)
                self.tell(
                    "dead-letter",
                    number=item.seq,
                    id=item.id,
                    key=item.key,
                    attempts=item.attempt,
                    error=settlement.error,
                )
            case _Outcome.RETRY:
                self._lanes.put_back(item.seq, item.lane, self._now() + settlement.due_in)
                self.stream.left(waiting=-1, done=0)
            case _Outcome.HANDED_BACK if item.acked:  # by its own transaction
                self._lanes.release(item.lane)
            case _Outcome.HANDED_BACK:
                due = self._now() + settlement.due_in if settlement.due_in else None
                self._lanes.put_back(item.seq, item.lane, due)
                self.stream.left(waiting=-1, done=0)
        settlement.end()

    def _hand_out(self, items: list[Item], picked: Sequence[tuple[int, LaneKey]]) -> None:
        if len(items) < len(picked):
            taken = {item.seq for item in items}
            for seq, lane in picked:
                if seq not in taken:  # its row is gone: somebody else removed it
                    self._lanes.release(lane)
        self._in_flight.update(items)
        self.stream.left(waiting=len(picked), done=len(items) if self.finishes_early else 0)
        waiting = iter(items)
        left = len(items)
        while left and self._wants:
            want = self._wants.pop(0)
            if want.given.cancelled():
                continue
            share = [next(waiting) for _ in range(min(want.most, left))]
            left -= len(share)
            want.given.set_result(share)
        for item in waiting:  # those who wanted it were cancelled meanwhile
            item.settle_as_handed_back()

    # --- small facts ---

    def _free_slots(self) -> int:
        return self.policy.concurrency - len(self._in_flight)

    def _check(self) -> None:
        if self._closing or self._committer is None:
            raise FeedClosed(f"the feed of stream {self.stream.name!r} is closing")

    def tell(self, what: str, **facts: Any) -> None:
        """Let the log and the listener know."""
        tell(self._on_event, self.stream.name, what, facts)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _numbers(seqs: Iterable[int]) -> str:
    """As json_each reads them: one statement for a group costs a third of one statement for each."""
    return f"[{','.join(map(str, seqs))}]"


def _nothing() -> None:
    pass


def _text(error: BaseException | str) -> str:
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return text[:ERROR_TEXT_LENGTH]
