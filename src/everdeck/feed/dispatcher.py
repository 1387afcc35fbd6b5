"""From the inbox to the handlers: noted before they begin, finished when they are.

An item is noted in the ledger before its handler runs, so a handler that takes the process with it is known to the
next start. Its row leaves the file only after the handler has finished, so what was in flight when the process died
comes again. Who was in flight at a death is suspected as far as ``blame`` says, and runs in slots of its own: fresh
work never waits for suspects. After ``max_attempts`` the item is a dead letter and the rest flows on.

One task, the committer, writes all outcomes. While the file's thread commits more outcomes gather, so the busier the
inbox, the larger the groups. An outcome is safe from the death of the process as soon as it is in the ledger, so
neither the slot nor the next of its key waits for the commit: duplicates after a crash are what was in flight.

What happens to every item between two handlers is little, and the rest is done for many at once: code that runs once
per handler finds the processor's caches full of the handler, and costs four times as much as in a loop of its own. So
an item that is done is only noted (:meth:`Item.settle_as_done`), and leaves with all that finish in the same turn of
the loop.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from everdeck.crashpoints import crash_point
from everdeck.errors import FeedClosed, FeedError, InboxUnavailable
from everdeck.feed.blame import WATCHED_AT_ONCE, Charge, Suspicion, deaths_that_convict
from everdeck.feed.handling import Listener as Listener  # noqa: PLC0414 - also found here by those who dispatch
from everdeck.feed.handling import is_news, retry_after_of, tell
from everdeck.feed.inbox import Inbox, Leaving, Row, Stream
from everdeck.feed.lanes import LaneKey, Lanes
from everdeck.feed.ledger import DONE, RUNNING, SLOTS, End, Ledger, Witness, unnamed
from everdeck.feed.policy import DEFAULT, FeedPolicy
from everdeck.feed.records import RecordId
from everdeck.feed.store import SQL, Transaction, numbers

if TYPE_CHECKING:
    from collections import Counter

DISK_RETRY_SECONDS: Final = 1.0
ERROR_TEXT_LENGTH: Final = 2000
LONG_TRANSACTION_SECONDS: Final = 1.0
# How long a suspect keeps the others waiting, and when a handler no longer counts as one of those at work.
TRIAL_SECONDS: Final = 5.0
LONG_RUN_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 1.0
# How long outcomes gather that are safe in the ledger and that nobody waits for.
GATHER_SECONDS: Final = 0.05
# Outcomes in the ledger that are not committed yet; above it nothing more is handed out.
LEDGER_RESERVE: Final = 64

log = logging.getLogger("everdeck.feed")


class _Outcome(Enum):
    DONE = "done"
    RETRY = "retry"
    DEAD = "dead"
    HANDED_BACK = "handed back"


# For every item: until Python 3.12 the name of a member is a call, a third of a microsecond each time.
_DONE, _RETRY, _DEAD, _HANDED_BACK = _Outcome
_NO_CHANGES: "Final[dict[tuple[Rememberer, str], Change]]" = {}


class Rememberer(Protocol):
    """Who remembers values between updates: :class:`everdeck.feed.memory.Memory`."""

    kind: str

    def written(self, change: "Change") -> None:
        """It is committed."""

    def undo(self, change: "Change") -> None:
        """It will never be."""


class Change(msgspec.Struct, eq=False):
    """A value that is remembered, or forgotten (None). Of two of one key the one with the higher number is newer."""

    by: Rememberer
    key: str
    value: bytes | None
    number: int
    superseded: bool = False  # a newer one is in the file

    def write(self, connection: Any) -> None:
        """Alone, inside a transaction."""
        if self.superseded:
            return
        if self.value is None:
            connection.execute(SQL["memory_drop"], (self.by.kind, self.key))
        else:
            connection.execute(SQL["memory_set"], (self.by.kind, self.key, self.value))


class Item(msgspec.Struct, eq=False):
    """One delivered thing, being worked on. Give it exactly one outcome: done, failed, set aside or handed back.

    ``attempt`` counts from 1 and includes this one. Until it has an outcome no other item of its key starts.
    """

    _dispatcher: "Dispatcher"
    lane: LaneKey
    seq: int
    id: RecordId
    key: str | None
    payload: bytes
    attempt: int
    stored_at: float
    # Its row is finished, by ``transaction()`` or because delivery is at-most-once.
    acked: bool
    # Its place in the ledger (0: none), and what its handler is awaited under: ``await item.witness(work)``.
    slot: int
    witness: Witness
    # Its outcome, and whether that is committed or will never be.
    outcome: _Outcome | None = None
    error: str | None = None
    due_in: float = 0.0
    _over: bool = False
    _failure: Exception | None = None
    _waiters: "list[asyncio.Future[None]] | None" = None  # nearly always nobody waits
    begun_at: float | None = None
    told_minutes: int = 0
    deeds: list[Callable[[Any], None]] | None = None
    changes: dict[tuple[Rememberer, str], Change] | None = None
    _acking: bool = False
    sends: "Counter[str] | None" = None

    def __repr__(self) -> str:
        return f"<Item {self.id!r} of {self.stream!r}, key {self.key!r}, attempt {self.attempt}>"

    @property
    def stream(self) -> str:
        """The name of the stream it came by."""
        return self._dispatcher.stream.name

    @property
    def ledger(self) -> Ledger:
        """Where it is noted that it is being worked on."""
        return self._dispatcher.ledger

    @property
    def value(self) -> Any:
        """The payload as JSON."""
        return msgspec.json.decode(self.payload)

    @property
    def settled(self) -> bool:
        """It has an outcome (which may still be on its way to the disk)."""
        return self.outcome is not None

    @property
    def takes_changes(self) -> bool:
        """What is changed now leaves with its ack: that has neither happened nor begun."""
        return self.outcome is None and not self.acked and not self._acking

    def is_in(self, inbox: Inbox) -> bool:
        """Is it a row of this inbox's file?"""
        return self._dispatcher.stream.inbox.store is inbox.store

    def begin(self) -> None:
        """Its handler is about to run: from now on a death of the process may be its doing."""
        if self.begun_at is None and self.outcome is None:
            self.begun_at = monotonic()
            dispatcher = self._dispatcher
            if self.slot:
                dispatcher.words[self.slot] = self.seq << 3 | RUNNING
            if dispatcher.patience is None:
                dispatcher.be_patient()

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

    def with_ack(self, deed: Callable[[Any], None]) -> None:
        """Write ``deed(connection)`` in the commit that finishes this item."""
        self.deeds = [*(self.deeds or ()), deed]

    def change(self, change: Change) -> Change | None:
        """Write this in the commit that finishes this item, instead of what it has changed there before (the answer).

        It is undone if this attempt does not finish the item.
        """
        if self.changes is None:
            self.changes = {}
        place = (change.by, change.key)
        earlier = self.changes.get(place)
        self.changes[place] = change
        return earlier

    def acked_now(self) -> None:
        """The commit that finishes it has happened."""
        changes, self.deeds, self.changes = self.changes, None, None
        for change in (changes or _NO_CHANGES).values():
            change.by.written(change)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """The handler's own writes and the ack in one commit: after a crash both are there or neither.

        Keep it short: it holds the inbox's only write lock, so do the slow things before or after. What the body raises
        undoes its writes. Once per item.
        """
        if self.acked and not self._dispatcher.finishes_early:
            raise FeedError(f"{self!r}: its transaction is already committed")
        if self.settled:
            raise FeedError(f"{self!r}: already finished")

        def committed() -> None:
            crash_point("feed.transaction.committed")
            self.acked_now()
            handle.committed()
            if not self.acked:
                self.acked = True
                self._dispatcher.stream.left(waiting=0, done=1)

        try:
            async with self._dispatcher.stream.inbox.store.transaction(then=committed) as connection:
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
                if not self.acked:
                    connection.execute(SQL["item_done"], (self.seq,))
                    connection.execute(SQL["stream_done"], (1, self._dispatcher.stream.number))
                    self.write_deeds(connection)
                    self._acking = True
                    crash_point("feed.transaction.acked")
        finally:
            self._acking = False

    def release(self) -> None:
        """Let the next of its key start and give its slot free, while the work on this one goes on in the background.

        The outcome is still due, and counts as before; only the order is given up.
        """
        self._dispatcher.step_aside(self)

    def settle_as_done(self) -> None:
        """As :meth:`done`, for those who do not wait for the commit; a crash until then finishes it all the same."""
        if self.outcome is not None:
            return
        dispatcher = self._dispatcher
        if self.acked or self.deeds is not None or self not in dispatcher.in_flight:
            dispatcher.settle(self, _DONE, None, 0.0)
        else:
            if self.changes is None:
                dispatcher.words[self.slot] = self.seq << 3 | DONE
            else:  # it is finished only by the commit that has them
                dispatcher.hurry()
            self.outcome = _DONE
            dispatcher.finished.append(self)
            if len(dispatcher.finished) == 1:
                asyncio.get_running_loop().call_soon(dispatcher.let_finished_go)

    def settle_as_handed_back(self) -> None:
        """As :meth:`hand_back`, for those who cannot wait for the commit."""
        if self.outcome is None:
            self._dispatcher.settle(self, _HANDED_BACK, None, 0.0)

    def settle_as_hung(self) -> None:
        """It went on although it was cancelled: a failed attempt."""
        if self.outcome is None:
            last = self.attempt >= self._dispatcher.policy.max_attempts
            outcome = _Outcome.DEAD if last else _Outcome.RETRY
            self._dispatcher.settle(self, outcome, "it did not end when it was cancelled", 0.0)

    def write_deeds(self, connection: Any) -> None:
        """What was promised to :meth:`with_ack` and :meth:`change`."""
        for deed in self.deeds or ():
            deed(connection)
        for change in (self.changes or _NO_CHANGES).values():
            change.write(connection)

    async def _settle(self, outcome: _Outcome, error: str | None = None, due_in: float = 0.0) -> None:
        self._dispatcher.stream.inbox.store.refuse_inside()
        if self.outcome is None:
            self._dispatcher.settle(self, outcome, error, due_in)
        if not self._over:
            # Each who waits has a future of its own: giving up takes nothing back.
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters = [*(self._waiters or ()), waiter]
            self._dispatcher.hurry()
            await waiter
        elif self._failure is not None:
            raise self._failure

    def end(self, failure: Exception | None = None) -> None:
        """Its outcome is committed, or will never be."""
        self._over, self._failure = True, failure
        for waiter in self._waiters or ():
            if waiter.done():
                continue
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure)


class Dispatcher:
    """Hands out the items of one stream and takes their outcomes.

    ``take`` gives items in order per key, from as many keys at once as the policy's ``concurrency`` allows, in turns.
    ``on_event`` hears what a person should know (``dead-letter``, ``crashed``, ``running-long``,
    ``raised-after-commit``, ``inbox-unavailable``). ``on_timeout`` is told of a handler that has run for longer than
    the policy's ``handler_timeout``; whoever runs it cancels it and gives it an outcome. After ``slot_seconds`` (told
    by ``on_slow``) a handler no longer counts towards the concurrency: others must not wait for one that hangs.
    ``one_at_a_time`` says that they are worked on one after another, however many are taken: then a suspect waits until
    nobody else does.
    """

    def __init__(
        self,
        stream: Stream,
        policy: FeedPolicy = DEFAULT,
        *,
        on_event: Listener | None = None,
        on_timeout: Callable[[Item], None] | None = None,
        on_slow: Callable[[Item], None] | None = None,
        slot_seconds: float = LONG_RUN_SECONDS,
        one_at_a_time: bool = False,
    ) -> None:
        self.stream = stream
        self.policy = policy
        self.finishes_early = policy.finishes_early
        self._on_event = on_event
        self._on_timeout = on_timeout
        self._on_slow = on_slow
        self._slot_seconds = slot_seconds
        self._one_at_a_time = one_at_a_time
        self._lanes = Lanes()
        self.in_flight: dict[Item, None] = {}  # in the order they were handed out
        self._slots: set[Item] = set()
        self.finished: list[Item] = []  # done, and still in the two above
        self._settlements: list[Item] = []
        self._committing: list[Item] = []
        self._rides = 0
        self._rang_meanwhile = False
        self._last_arrived = 0
        self._found_early: set[int] = set()
        self._interrupted: set[int] = set()
        self._outcome_came = asyncio.Event()
        self._hurry = asyncio.Event()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._taking = asyncio.Lock()
        self._closing = False
        self._failure: FeedError | None = None
        self._committer: asyncio.Task[None] | None = None
        self.patience: asyncio.TimerHandle | None = None
        self._revived = False
        self._told_of_disk = False
        self._stop_hearing: Callable[[], None] = _nothing
        self.ledger: Ledger
        self.words: memoryview

    # --- the life of it ---

    async def open(self) -> None:
        """Take up what an earlier run left: what it died of is set aside."""
        if self._committer is not None:
            raise FeedError(f"the dispatcher of stream {self.stream.name!r} is already open")
        self._lanes, self._closing, self._revived, self._failure = Lanes(), False, False, None
        self.in_flight.clear()
        self._slots.clear()
        self.finished.clear()
        self._outcome_came, self._idle, self._taking = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._hurry = asyncio.Event()
        self._wake = await self.stream.listen()
        store, number = self.stream.inbox.store, self.stream.number
        self.ledger, self.words = store.ledger, store.ledger.words
        self._last_arrived = store.last_seq
        self._found_early.clear()
        limits = deaths_that_convict(self.policy.max_attempts)
        dead = await store.write(
            lambda connection: connection.execute(SQL["items_convicted"], (store.clock(), number, *limits)).fetchall()
        )
        crash_point("feed.recover.convicted")
        self.stream.recount(number)
        now, wall = self._now(), store.clock()
        in_flight = store.crashed_with(number)
        self._interrupted.clear()
        for seq, key, due_at, crashes, kills in await store.look("items_waiting", number):
            lane = self._lanes.add(seq, key)
            charge = Charge(seq, crashes, kills)
            self._lanes.suspect(seq, charge.suspicion)
            if seq in in_flight and charge.suspicion is Suspicion.FRESH:
                self._interrupted.add(seq)
            # A stepped wall clock must not park an item for days.
            wait = max(min(due_at - wall, self.policy.retry.cap_seconds), charge.quiet_seconds)
            if wait > 0:
                self._lanes.delay(lane, now + wait)
        if self._interrupted:
            self._lanes.hold_accused(now + TRIAL_SECONDS)
        self._stop_hearing = store.bell.listen(self._hear_bell)
        self.stream.rider = self
        if in_flight:
            self.tell("crashed", in_flight=len(in_flight))
        for seq, record_id, key, attempts, crashes, error in dead:
            facts = {"number": seq, "id": record_id, "key": key, "attempts": attempts, "error": error}
            self.tell("dead-letter", **facts, crashes=crashes)
        self._committer = asyncio.get_running_loop().create_task(self._commit_forever(), name="feed committer")

    async def take(self, most: int | None = None, *, begin: bool = True) -> list[Item]:
        """Wait for work: up to ``most`` items. With ``begin=False`` say ``item.begin()`` before its handler runs.

        Raises FeedClosed as soon as the dispatcher is closing.
        """
        items: list[Item] = []
        async with self._taking:
            while not items:
                self._check()
                self.let_finished_go()
                self._wake.clear()
                self._take_arrivals()
                picked = self._pick(most or self.policy.concurrency)
                if picked:
                    items = await self._taken(picked)
                else:
                    await self._something_to_take()
        if begin:
            for item in items:
                item.begin()
        return items

    async def drained(self) -> None:
        """Wait until nothing waits and nothing is in flight."""
        while self.stream.waiting or self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    def stopping(self) -> None:
        """A stop has been asked for: being killed from now on is no fault of those in flight."""
        self._closing = True
        if self._committer is not None:
            self.stream.inbox.store.ledger.note_end(End.STOPPING)
        self._wake.set()

    async def stop(self, grace_seconds: float | None = 10.0, *, cancelled: bool = False) -> int:
        """Hand out nothing more, wait for what is in flight, hand back the rest; how many were left.

        ``cancelled`` says that the handlers were cancelled before the end of the grace: what is left then has ignored
        it, and that is a failed attempt.
        """
        self.stopping()
        try:
            async with asyncio.timeout(grace_seconds):
                while self.in_flight:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            pass
        self.let_finished_go()
        left = [item for item in self.in_flight if item.outcome is None]
        for item in left:
            if cancelled and item.begun_at is not None and not item.acked:
                item.settle_as_hung()
            else:
                item.settle_as_handed_back()
        self._stop_hearing()
        if self.patience is not None:
            self.patience.cancel()
            self.patience = None
        self.stream.rider = None
        committer, self._committer = self._committer, None
        if committer is not None:
            committer.cancel()
            await asyncio.gather(committer, return_exceptions=True)
            # What has boarded a batch that is being written is heard of by then.
            if (self._settlements or self._committing) and self._failure is None:
                await self._commit()
            self.stream.inbox.store.ledger.take_back_end(End.STOPPING)
        self.stream.stop_listening()
        return len(left)

    # --- outcomes ---

    async def failed(self, item: Item, error: BaseException | str, *, for_good: bool = False) -> None:
        """Decide what a failure means for this item."""
        text = _text(error)
        asked = None if isinstance(error, str) else retry_after_of(error)  # a 429 while answering
        if isinstance(error, InboxUnavailable) and not item.acked:
            # The disk's fault, not the item's: it costs no attempt.
            self._tell_of_disk(error)
            await item._settle(_Outcome.HANDED_BACK, None, DISK_RETRY_SECONDS)  # noqa: SLF001 - as below
        elif item.acked and not self.finishes_early:
            self.tell("raised-after-commit", id=item.id, key=item.key, error=text)
            await item.done()
        elif self.policy.on_error == "log" and not for_good:
            log.error("%r: %s; it is not tried again (on_error='log')", item, text)
            await item.done()
        elif for_good or self._is_last(item, error, asked):
            await item._settle(_Outcome.DEAD, text)  # noqa: SLF001 - an item and its dispatcher are one thing
        else:
            delay = self.policy.retry.delay(item.attempt, random.random()) if asked is None else asked  # noqa: S311 - jitter
            await item._settle(_Outcome.RETRY, text, delay)  # noqa: SLF001 - as above

    def _is_last(self, item: Item, error: BaseException | str, asked: float | None) -> bool:
        if self.finishes_early or item.attempt >= self.policy.max_attempts:
            return True
        return asked is None and not self.policy.is_worth_retrying(error)

    def step_aside(self, item: Item) -> None:
        """See :meth:`Item.release`."""
        if item in self.in_flight and item.outcome is None:
            self._slots.discard(item)
            item.lane = self._lanes.step_aside(item.seq, item.lane)
            self._wake.set()

    def let_finished_go(self) -> None:
        """Those that are done leave: their slots are free, their lanes go on, the next group commit has them."""
        finished = self.finished
        if not finished:
            return
        self.finished = []
        self._slots.difference_update(finished)
        in_flight = self.in_flight
        for item in finished:
            del in_flight[item]
            if self._interrupted:
                self._no_longer_interrupted(item)
        self._lanes.finish([(item.seq, item.lane) for item in finished])
        self._settlements += finished
        self._outcome_came.set()
        self.stream.left(waiting=0, done=len(finished))
        self._slots_are_free()

    def settle(self, item: Item, outcome: _Outcome, error: str | None, due_in: float) -> None:
        """Note an outcome; the next group commit has it. The lane goes on at once."""
        if outcome is _HANDED_BACK and self.finishes_early:
            # It may have begun, so it must not run again; a person can still see it and decide.
            outcome, error = _DEAD, "cut off while in flight; at most once, so it is not tried again"
        item.outcome, item.error, item.due_in = outcome, error, due_in
        closed = item not in self.in_flight
        if closed or outcome is not _DONE:
            for change in (item.changes or _NO_CHANGES).values():
                change.by.undo(change)
        if closed:
            item.end(FeedClosed(f"{item!r}: the feed was closed; it comes again"))
            return
        if outcome is _HANDED_BACK or item.acked:
            self.ledger.forget(item.seq)
        elif outcome is _DONE and item.deeds is None and item.changes is None:
            self.ledger.finish(item.seq)  # with them it is finished only by the commit that has them
        self._leave(item)
        if outcome is _HANDED_BACK:
            item.end()  # nothing of it was ever written
        else:
            self._settlements.append(item)
            self._outcome_came.set()
            if outcome is not _DONE or item.deeds is not None or item.changes is not None:
                self._hurry.set()

    def hurry(self) -> None:
        """Somebody waits for a commit."""
        self._hurry.set()

    def _leave(self, item: Item) -> None:
        """It is no longer in flight: its slot is free and its lane goes on."""
        del self.in_flight[item]
        self._slots.discard(item)
        self._no_longer_interrupted(item)
        if item.outcome is _DONE:
            self._lanes.finish([(item.seq, item.lane)])
            self.stream.left(waiting=0, done=0 if item.acked else 1)
        else:
            self._leave_unfinished(item)
        self._slots_are_free()

    def _no_longer_interrupted(self, item: Item) -> None:
        """Those who are accused wait until the fresh ones that a death interrupted are through."""
        if self._interrupted:
            self._interrupted.discard(item.seq)
            if not self._interrupted:
                self._lanes.hold_accused(self._now())

    def _slots_are_free(self) -> None:
        self.stream.in_flight = len(self.in_flight)
        self._wake.set()
        if not self.in_flight:
            self._idle.set()

    def _leave_unfinished(self, item: Item) -> None:
        match item.outcome:
            case _Outcome.DEAD:
                self._lanes.release(item.lane)
                if self.finishes_early:
                    self.stream.left(waiting=0, done=-1)
            case _Outcome.RETRY:  # its lane goes on when the attempt is committed
                self.stream.left(waiting=-1, done=0)
            case _Outcome.HANDED_BACK if item.acked:  # by its own transaction
                self._lanes.release(item.lane)
            case _Outcome.HANDED_BACK:
                due = self._now() + item.due_in if item.due_in else None
                self._lanes.put_back(item.seq, item.lane, due)
                self.stream.left(waiting=-1, done=0)

    # --- what is handed out ---

    def _pick(self, most: int) -> list[tuple[int, LaneKey]]:
        now, slots = self._now(), self._free_slots()
        room = self.ledger.room - LEDGER_RESERVE
        # Suspects first, because they are few: at most a quarter of those at work, and none where one works at a time.
        allowed = min(WATCHED_AT_ONCE, self.policy.concurrency // 4 or self.policy.concurrency - 1)
        allowed = 0 if self._one_at_a_time else allowed - self._lanes.on_trial
        picked = self._lanes.pick_suspects(min(most, room, allowed), now)
        picked += self._lanes.pick(min(most - len(picked), slots, room), now)
        if not picked and slots > 0 and room > 0 and not self.in_flight:
            picked = self._lanes.pick_suspects(1, now)  # nobody else is there
        return picked

    async def _taken(self, picked: Sequence[tuple[int, LaneKey]]) -> list[Item]:
        rows: dict[int, Row] = {}
        finished_early = False

        def finished(_: None) -> None:
            nonlocal finished_early
            finished_early = True

        try:
            rows = {row.seq: row for row in await self.stream.rows([seq for seq, _ in picked])}
            if self.finishes_early:
                await self.stream.inbox.store.write(
                    lambda connection: self._finish_early(connection, list(rows)), then=finished
                )
        except BaseException as err:
            if finished_early:  # cancelled meanwhile: nobody will handle them, and a person must be able to see that
                for item in self._handed_out(picked, rows):
                    item.settle_as_handed_back()
                raise
            for seq, lane in reversed(picked):
                self._lanes.put_back(seq, lane)
            if isinstance(err, InboxUnavailable):
                self._tell_of_disk(err)
                await asyncio.sleep(DISK_RETRY_SECONDS)  # noqa: TID251 - a disk tells nobody when it is back
                return []
            raise
        return self._handed_out(picked, rows)

    def _handed_out(self, picked: Sequence[tuple[int, LaneKey]], rows: dict[int, Row]) -> list[Item]:
        items, early, reserve = [], self.finishes_early, self.ledger.reserve
        for seq, lane in picked:
            row = rows.get(seq)
            if row is None:  # somebody else removed it
                self._lanes.release(lane)
            else:
                place = (0, unnamed) if early else reserve(seq)
                items.append(
                    Item(self, lane, seq, row.id, row.key, row.payload, row.attempts + 1, row.stored_at, early, *place)
                )
        self.in_flight.update(dict.fromkeys(items))
        if self._lanes.on_trial:
            self._slots.update(item for item in items if not self._lanes.is_on_trial(item.lane))
        else:
            self._slots.update(items)
        self.stream.in_flight = len(self.in_flight)
        self.stream.left(waiting=len(picked), done=len(items) if self.finishes_early else 0)
        if len(items) < len(picked):
            self._idle.set()
        return items

    def _finish_early(self, connection: Any, seqs: list[int]) -> None:
        connection.execute(SQL["items_done"], (numbers(seqs),))
        connection.execute(SQL["stream_done"], (len(seqs), self.stream.number))
        crash_point("feed.take.finished_early")

    async def _something_to_take(self) -> None:
        due = self._lanes.next_due()
        try:
            async with asyncio.timeout(max(0.0, due - self._now()) if due is not None else None):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _hear_bell(self) -> None:
        self._revived = True
        # What is being committed now may be dead or done already, and somebody may want it again.
        self._rang_meanwhile = self._rang_meanwhile or bool(self._committing)
        self._wake.set()

    def _take_arrivals(self) -> None:
        arrived = self.stream.arrivals()
        if arrived:
            self._last_arrived = max(self._last_arrived, arrived[-1][0])
        if arrived and self._found_early:
            twice = self._found_early.intersection(seq for seq, _ in arrived)
            self._found_early -= twice
            for seq in twice:
                self.stream.told_twice(seq)
                self._idle.set()  # it may be done already, and have been the last
            arrived = [new for new in arrived if new[0] not in twice]
        self._lanes.add_all(arrived)
        if self._revived:
            # Somebody asked for a dead letter to be tried again.
            self._revived = False
            leaving = {item.seq for item in (*self._committing, *self._settlements)}
            known = self._lanes.seqs() | leaving | {item.seq for item in self.in_flight}
            for seq, key, *_ in self.stream.inbox.store.read("items_waiting", self.stream.number):
                if seq not in known:
                    self._lanes.revive(seq, key)
                    self.stream.left(waiting=-1, done=0)
                    if seq > self._last_arrived:  # it may be one of ours that is on disk and not told of yet
                        self._found_early.add(seq)

    # --- patience ---

    def be_patient(self) -> None:
        """From now on somebody is at work, and may take long."""
        self.patience = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_at_the_slow)

    def _look_at_the_slow(self) -> None:
        """Those that have run for long are the first in order: give their slots away, tell of them, end them."""
        self.patience = None
        self.let_finished_go()
        now = monotonic()
        for item in list(self.in_flight):
            if item.begun_at is None:
                continue
            ran = now - item.begun_at
            if ran > TRIAL_SECONDS and self._lanes.is_on_trial(item.lane):
                self._lanes.excuse(item.lane)
                self._wake.set()
            if ran > self._slot_seconds and item in self._slots:
                self._slots.discard(item)
                self._wake.set()
                if self._on_slow is not None:
                    self._on_slow(item)
            minutes = int(ran / LONG_RUN_SECONDS)
            if minutes > item.told_minutes and is_news(minutes):
                item.told_minutes = minutes
                self.tell("running-long", id=item.id, key=item.key, minutes=minutes, attempt=item.attempt)
            limit = self.policy.handler_timeout
            if limit is not None and ran > limit and self._on_timeout is not None:
                self._on_timeout(item)
        if any(item.begun_at is not None for item in self.in_flight):
            self.be_patient()

    # --- the committer ---

    async def _commit_forever(self) -> None:
        while True:
            await self._outcome_came.wait()
            rides = self._rides
            try:
                if self.ledger.room > SLOTS // 2:
                    async with asyncio.timeout(GATHER_SECONDS):
                        await self._hurry.wait()
            except TimeoutError:
                if rides != self._rides:  # what had gathered has left with a batch
                    continue
            self._hurry.clear()
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
        self._failure = FeedError(f"the feed's committer failed: {type(err).__name__}: {err}")
        self.let_finished_go()
        for item in self._settlements:
            item.end(self._failure)
        self._wake.set()

    async def _commit(self) -> None:
        group: list[Item] = []

        def gather() -> None:
            # Only now, with the writer's turn in hand: what gathered while we waited belongs to this group.
            nonlocal group
            self.let_finished_go()
            group, self._settlements = self._settlements, []
            self._committing = group

        def write(connection: Any) -> None:
            if not group:  # all of them left with a batch while we waited for our turn
                return
            if all(map(_is_plain, group)):
                self._write_done(connection, group)
            else:
                self.stream.inbox.store.whole(write_each)

        def write_each(connection: Any) -> None:
            self._write_outcomes(connection, group)
            crash_point("feed.commit.outcomes_written")

        def committed(_: None) -> None:
            nonlocal group
            of_this_group, group = group, []
            self._committing = []
            self._committed(of_this_group)

        try:
            await self.stream.inbox.store.write(write, alone=True, first=gather, then=committed)
        except BaseException:
            self._settlements[:0] = group
            self._committing = []
            raise

    def _write_done(self, connection: Any, done: Sequence[Item]) -> None:
        """One statement; nearly always they are neighbours."""
        first, last, seqs, count, changes, values = _as_written(done)
        if seqs is None and changes is None:
            connection.executemany(SQL["acks_add_plain"], ((first, last, self.stream.number),))
        else:
            leaving = (first, last, seqs, count)
            connection.executemany(SQL["acks_add"], ((*leaving, changes, values, self.stream.number),))

    def board(self) -> Leaving | None:
        """See :class:`everdeck.feed.inbox.Rider`."""
        self.let_finished_go()
        if not self._settlements or not all(map(_is_plain, self._settlements)):
            return None
        self._committing, self._settlements = self._settlements, []
        return _as_written(self._committing)

    def arrive(self) -> None:
        """As above."""
        group, self._committing = self._committing, []
        self._rides += 1
        self._committed(group)

    def stay(self) -> None:
        """As above."""
        self._settlements[:0] = self._committing
        self._committing = []

    def _committed(self, group: Sequence[Item]) -> None:
        crash_point("feed.commit.committed")
        if self._rang_meanwhile:
            self._rang_meanwhile, self._revived = False, True
        if not self._settlements:
            self._outcome_came.clear()
        self.ledger.forget_all(item.seq for item in group)
        for item in group:
            if item.outcome is _DONE:
                if item.deeds is not None or item.changes is not None:
                    item.acked_now()
                if item._waiters is None:  # noqa: SLF001 - as item.end() below, for nearly every item
                    item._over = True  # noqa: SLF001
                    continue
            elif item.outcome is _RETRY:
                self._lanes.put_back(item.seq, item.lane, self._now() + item.due_in)
            elif item.outcome is _DEAD:
                facts = {"number": item.seq, "id": item.id, "key": item.key, "attempts": item.attempt}
                self.tell("dead-letter", **facts, error=item.error)
                self.stream.activity.set()
            item.end()
        self._wake.set()

    def _write_outcomes(self, connection: Any, group: Sequence[Item]) -> None:
        done = [item for item in group if item.outcome is _DONE and not item.acked]
        if done:
            self._write_done(connection, done)
        for item in group:
            if item.outcome is not _DONE:
                self._write_unfinished(connection, item)
            for deed in item.deeds or () if item.outcome is _DONE else ():
                deed(connection)

    def _write_unfinished(self, connection: Any, item: Item) -> None:
        now = self.stream.inbox.store.clock()
        match item.outcome:
            case _Outcome.RETRY:
                row = (now + item.due_in, item.error, item.attempt, item.seq)
                connection.execute(SQL["item_retry_later"], row)
            case _Outcome.DEAD if self.finishes_early:
                early = (item.seq, self.stream.number, item.id, item.key, item.payload, item.stored_at)
                connection.execute(SQL["item_add_dead"], (*early, item.attempt, item.error, now))
                connection.execute(SQL["stream_done"], (-1, self.stream.number))
            case _Outcome.DEAD:
                connection.execute(SQL["item_set_aside"], (item.error, now, item.attempt, item.seq))

    # --- small facts ---

    def _free_slots(self) -> int:
        return self.policy.concurrency - len(self._slots)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing or self._committer is None:
            raise FeedClosed(f"the feed of stream {self.stream.name!r} is closing")

    def tell(self, what: str, **facts: Any) -> None:
        """Let the log and the listener know."""
        tell(self._on_event, self.stream.name, what, facts)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _nothing() -> None:
    pass


def _is_plain(item: Item) -> bool:
    """Is it only to be removed, and what it has changed to be remembered?"""
    return item.outcome is _DONE and item.deeds is None and not item.acked


def _as_written(done: Sequence[Item]) -> Leaving:
    """The first and the last of neighbours; or an empty range and all of them; how many; and what they have changed.

    Of many changes of one value only the newest is written, whoever is done first.
    """
    seqs = [item.seq for item in done]
    first, last, count = min(seqs), max(seqs), len(seqs)
    newest: dict[str, dict[str, Change]] = {}
    for item in done:
        if item.changes is None:
            continue
        for change in item.changes.values():
            if not change.superseded:
                of_kind = newest.setdefault(change.by.kind, {})
                if change.number >= of_kind.setdefault(change.key, change).number:
                    of_kind[change.key] = change
    changes, values = _as_remembered(newest) if newest else (None, b"")
    if last - first + 1 == count:
        return first, last, None, count, changes, values
    return 1, 0, numbers(seqs), count, changes, values


def _as_remembered(newest: dict[str, dict[str, Change]]) -> tuple[str, bytes]:
    """As at_once.sql takes it: where each value begins in the blob, and its length."""
    places: dict[str, dict[str, int | None]] = {}
    values, begin = [b"\0"], 2  # to SQLite a part of an empty blob is NULL, so it never is
    for kind, by_key in newest.items():
        of_kind = places[kind] = {}
        for key, change in by_key.items():
            value = change.value
            if value is None:
                of_kind[key] = None
            else:
                of_kind[key] = begin << 31 | len(value)
                begin += len(value)
                values.append(value)
    return msgspec.json.encode(places).decode(), b"".join(values)


def _text(error: BaseException | str) -> str:
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return text[:ERROR_TEXT_LENGTH]
