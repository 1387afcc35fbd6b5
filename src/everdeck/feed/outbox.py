"""Replies that were promised are sent, once the promise is on disk.

``outbox.put(db, ...)`` writes a reply in the same transaction as the handler's own writes and its ack, so a crash
cannot separate them. The sender takes up what is committed: in order per key (a chat), side by side across keys, with
retry. That a message is about to be sent is synced before it is sent, so a power cut cannot undo a promise that was
already kept. A crash between sending and noting it sends the message again: the other side cannot tell us what it has
seen.

What the other side allows is kept before it has to say so (``limits``). An error with ``retry_after`` (Telegram's 429)
makes that key wait so long, or everybody if two keys are told so at once, and costs no attempt. An error that can never
work (a 400, a 403), and any error after ``max_attempts``, makes the message a dead letter and the key flows on.

A polite stop takes nothing new and waits for what is on the wire: it sends nothing twice. After ``kill -9`` at most
what was on the wire at that moment is sent again; with ``delivery="at-most-once"`` it is set aside instead.
"""

import asyncio
import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from everdeck.child import emit
from everdeck.crashpoints import crash_point
from everdeck.errors import FeedError, InboxUnavailable, PerhapsSent, SpecError
from everdeck.feed.dispatcher import ERROR_TEXT_LENGTH, Item
from everdeck.feed.handling import Listener, answer_of, retry_after_of, tell
from everdeck.feed.inbox import Inbox
from everdeck.feed.lanes import LaneKey, Lanes
from everdeck.feed.pace import Limits, Pace
from everdeck.feed.policy import OUTBOX, FeedPolicy, Retry
from everdeck.feed.records import Delivery
from everdeck.feed.store import SQL, Transaction

DISK_RETRY_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 24 * 3600.0
_DEAD, _KEPT = 2, 3  # see schema.sql and version_2.sql


@dataclass(frozen=True, slots=True)
class Message:
    """One reply on its way. ``number`` is its number in the file, ``attempt`` counts from 1."""

    number: int
    key: str | None
    payload: bytes
    attempt: int

    @property
    def value(self) -> Any:
        """The payload as JSON."""
        return msgspec.json.decode(self.payload)


@dataclass(frozen=True, slots=True)
class UnsentMessage:
    """A reply that was set aside."""

    number: int
    outbox: str
    key: str | None
    attempts: int
    error: str | None
    put_at: datetime
    died_at: datetime
    payload: bytes


class Outbox:
    """Replies in the inbox's file. ``name`` tells several outboxes of one file apart."""

    def __init__(
        self,
        inbox: Inbox,
        name: str = "replies",
        *,
        max_attempts: int = OUTBOX.max_attempts,
        retry: Retry | None = None,
        delivery: Delivery = OUTBOX.delivery,
        limits: Limits | None = None,
        grace_seconds: float = OUTBOX.grace_seconds,
        on_event: Listener | None = None,
    ) -> None:
        self.inbox = inbox
        self.name = name
        self._policy = FeedPolicy(
            max_attempts, retry=retry or OUTBOX.retry, delivery=delivery, grace_seconds=grace_seconds
        )
        self._pace = Pace(limits or Limits())
        self._waiters: dict[int, list[asyncio.Future[bytes | None]]] = {}
        self._on_event = on_event
        self._lanes = Lanes()
        self._loaded = False
        self._revived = False
        self._sending: set[int] = set()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, db: Transaction, value: Any, *, key: str | None = None) -> int:
        """Promise a reply, inside a transaction; it is sent after the commit. The answer is its number."""
        payload = value if isinstance(value, bytes) else msgspec.json.encode(value)
        written = db.execute(SQL["outbox_put"], (self.name, key, payload, self.inbox.store.clock()))
        number = int(written.lastrowid or 0)
        db.after_commit(lambda: self._arrived(number, key))
        return number

    async def add(self, value: Any, *, key: str | None = None) -> int:
        """Promise a message in a transaction of its own."""
        async with self.inbox.transaction() as db:
            return self.put(db, value, key=key)

    async def send(self, value: Any, *, key: str | None = None, item: Item | None = None) -> bytes | None:
        """Promise a message, and wait until it is sent: the answer is what ``run``'s function returned, if bytes.

        With ``item`` it is part of the work on that item: when an attempt is repeated, the same message is not sent
        again and has the same answer. What the sender raised in the end is raised here too.
        """
        payload = value if isinstance(value, bytes) else msgspec.json.encode(value)
        mark: str | None = None
        number: int | None = None
        if item is not None:
            digest = hashlib.blake2b(payload, digest_size=12).hexdigest()
            sends = item.sends = item.sends or Counter()
            sends[digest] += 1
            mark = f"{sends[digest]}:{digest}"
            if sends.total() == 1:
                item.with_ack(lambda connection: _execute(connection, "outbox_item_done", item.seq))
            for seq, state, result in self.inbox.store.read("outbox_found", self.name, item.seq, mark):
                if state == _KEPT:
                    return bytes(result) if result is not None else None
                if state < _DEAD:
                    number = seq
                elif self._policy.finishes_early:
                    raise PerhapsSent(
                        f"message {seq} of outbox {self.name!r} was on the wire when the process died; it is not sent "
                        f"again (at most once)"
                    )
        if number is None:
            of = None if item is None else item.seq
            promised = await self.inbox.store.write(
                lambda connection: self._put_for(connection, key, payload, of, mark),
                then=lambda number: self._arrived(number, key),
            )
            crash_point("feed.outbox.promised")
            waiter = self._wait_for(promised)
        else:
            waiter = self._wait_for(number)
        return await waiter

    def _put_for(self, connection: Any, key: str | None, payload: bytes, item: int | None, mark: str | None) -> int:
        row = (self.name, key, payload, self.inbox.store.clock(), item, mark)
        return int(connection.execute(SQL["outbox_put_for"], row).lastrowid or 0)

    def _wait_for(self, number: int) -> "asyncio.Future[bytes | None]":
        waiter: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(number, []).append(waiter)
        return waiter

    async def run(
        self, send: Callable[[Message], Awaitable[object] | object], *, concurrency: int = OUTBOX.concurrency
    ) -> None:
        """Send what was promised, until cancelled. ``send(message)`` returns when it was sent and raises otherwise.

        When cancelled it takes nothing new and waits for what is on the wire, for ``grace_seconds`` at most.
        """
        if self._loaded:
            raise FeedError(f"outbox {self.name!r} is already being sent")
        await self.inbox.open()
        leave = self.inbox.store.bell.listen(self._hear_bell)
        try:
            await self._load()
            sending: set[asyncio.Task[None]] = set()
            try:
                while True:
                    for number, lane in await self._next(concurrency):
                        task = asyncio.get_running_loop().create_task(self._deliver(send, number, lane))
                        sending.add(task)
                        task.add_done_callback(sending.discard)
            finally:
                await self._off_the_wire(sending)
        finally:
            leave()
            self._loaded = False
            await self.inbox.close()

    async def _off_the_wire(self, sending: "set[asyncio.Task[None]]") -> None:
        """Wait for those that are being sent; what the other side may have got must be noted."""
        deadline = asyncio.get_running_loop().time() + self._policy.grace_seconds
        while sending and asyncio.get_running_loop().time() < deadline:
            left = deadline - asyncio.get_running_loop().time()
            # Cancelled a second time it still waits: the grace is short, and a message sent twice stays sent twice.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(list(sending), timeout=left)
        for task in list(sending):
            task.cancel()
        if sending:
            await asyncio.gather(*sending, return_exceptions=True)
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.cancel()
        self._waiters.clear()

    async def sent(self) -> None:
        """Wait until nothing is left to send (dead letters do not count)."""
        while self.waiting():
            changed = self._event()
            changed.clear()
            await changed.wait()

    def waiting(self) -> int:
        """How many replies are still to be sent."""
        return int(self.inbox.store.read("outbox_count", self.name)[0][0])

    # --- dead letters ---

    def dead_letters(self, *, limit: int = -1) -> list[UnsentMessage]:
        """What could not be sent, oldest first."""
        return unsent_messages(self.inbox, outbox=self.name, limit=limit)

    # --- the sender ---

    async def _load(self) -> None:
        store, loop = self.inbox.store, asyncio.get_running_loop()
        self._lanes = Lanes()
        if self._policy.finishes_early:
            await store.write(lambda connection: _execute(connection, "outbox_interrupted", store.clock(), self.name))
        for number, key, due_at in await self._committed():
            lane = self._lanes.add(number, key)
            if due_at > store.clock():
                # A stepped wall clock must not park a message for ever.
                self._lanes.delay(lane, loop.time() + min(due_at - store.clock(), LONGEST_WAIT_SECONDS))
        self._loaded = True

    async def _committed(self) -> list[tuple[int, str | None, float]]:
        """What is to be sent. With the writer's turn in hand, or we would see promises that may yet be undone."""
        async with self.inbox.store.transaction() as connection:
            return connection.execute(SQL["outbox_waiting"], (self.name,)).fetchall()

    def _arrived(self, number: int, key: str | None) -> None:
        if self._loaded:
            self._lanes.add(number, key)
        self._changed.set()

    async def _next(self, concurrency: int) -> list[tuple[int, LaneKey]]:
        loop = asyncio.get_running_loop()
        while True:
            changed = self._event()
            changed.clear()
            await self._look_for_revived()
            now = loop.time()
            wait = self._pace.wait_of_all(now)
            if wait <= 0:
                picked = self._within_pace(self._lanes.pick(min(1, concurrency - self._lanes.in_flight), now), now)
                if picked:
                    return picked
                if self._lanes.may_pick(now) and self._lanes.in_flight < concurrency:
                    continue  # that one has to wait; the next may go
            due = self._lanes.next_due()
            waits = [one for one in (wait or None, None if due is None else max(0.0, due - now)) if one is not None]
            try:
                async with asyncio.timeout(min(waits, default=None)):
                    await changed.wait()
            except TimeoutError:
                pass

    def _within_pace(self, picked: list[tuple[int, LaneKey]], now: float) -> list[tuple[int, LaneKey]]:
        """Those that may go out now; the others wait in their lanes."""
        going = []
        for number, lane in picked:
            key = lane if isinstance(lane, str) else None
            wait = self._pace.wait_of(key, now)
            if wait > 0:
                self._lanes.put_back(number, lane, now + wait)
            else:
                self._pace.sent(key, now)
                going.append((number, lane))
        return going

    def _event(self) -> asyncio.Event:
        """The event of this loop: one that was waited for belongs to its loop, and an outbox may outlive it."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._changed = loop, asyncio.Event()
        return self._changed

    def _hear_bell(self) -> None:
        self._revived = True
        self._changed.set()

    async def _look_for_revived(self) -> None:
        if self._revived:
            self._revived = False
            waiting = await self._committed()
            known = self._lanes.seqs() | self._sending
            for number, key, _ in waiting:
                if number not in known:
                    self._lanes.revive(number, key)

    async def _deliver(self, send: Callable[[Message], Awaitable[object] | object], number: int, lane: LaneKey) -> None:
        due: float | None = None
        self._sending.add(number)
        try:
            due = await self._try(send, number)
        except InboxUnavailable as err:
            # It stays in the file as "being sent" or as it was; either way it is sent (again) later.
            self._tell("inbox-unavailable", error=str(err))
            due = DISK_RETRY_SECONDS
        finally:
            self._sending.discard(number)
            if due is None:
                self._lanes.release(lane)
            else:
                self._lanes.put_back(number, lane, asyncio.get_running_loop().time() + due)
            self._changed.set()

    async def _try(self, send: Callable[[Message], Awaitable[object] | object], number: int) -> float | None:
        """Send one message; the answer is how long it has to wait for another try, or None if it is settled."""
        store = self.inbox.store
        row = await store.write(
            lambda connection: connection.execute(SQL["outbox_sending"], (number,)).fetchone(), durable=True
        )
        if row is None:
            return None
        crash_point("feed.outbox.sending")
        message = Message(number, *row)
        try:
            answer = await answer_of(send, message)
        except Exception as err:  # noqa: BLE001 - the user's sender
            return await self._not_sent(message, err)
        crash_point("feed.outbox.sent")
        result = answer if isinstance(answer, bytes) else None
        if self._is_of_an_item(number):
            await store.write(lambda connection: _execute(connection, "outbox_kept", result, store.clock(), number))
        else:
            await store.write(lambda connection: _execute(connection, "outbox_sent", number))
        crash_point("feed.outbox.noted")
        for waiter in self._waiters.pop(number, ()):  # only now: somebody may have come while it was written
            if not waiter.done():
                waiter.set_result(result)
        return None

    def _is_of_an_item(self, number: int) -> bool:
        return bool(self.inbox.store.read("outbox_item_of", number))

    async def _not_sent(self, message: Message, err: Exception) -> float | None:
        store, number = self.inbox.store, message.number
        error = f"{type(err).__name__}: {err}"[:ERROR_TEXT_LENGTH]
        asked = None if getattr(err, "permanent", False) else retry_after_of(err)
        if asked is None and (message.attempt >= self._policy.max_attempts or not self._policy.is_worth_retrying(err)):
            if any(not waiter.done() for waiter in self._waiters.get(number, ())):
                # Whoever waits is told, as if he had sent it himself.
                await store.write(lambda connection: _execute(connection, "outbox_sent", number))
                for waiter in self._waiters.pop(number, ()):
                    if not waiter.done():
                        waiter.set_exception(err)
                return None
            await store.write(lambda connection: _execute(connection, "outbox_dead", error, store.clock(), number))
            for waiter in self._waiters.pop(number, ()):  # somebody came while it was written
                if not waiter.done():
                    waiter.set_exception(err)
            facts = {"number": number, "key": message.key, "attempts": message.attempt, "error": error}
            self._tell("unsent", **facts)
            return None
        # Being asked to wait is not the message's fault, so it costs no attempt.
        delay = asked if asked is not None else self._policy.retry.delay(message.attempt, random.random())  # noqa: S311 - jitter
        if asked is not None:
            self._pace.refused(message.key, asked, asyncio.get_running_loop().time())
        due = (store.clock() + delay, error, int(asked is not None), number)
        await store.write(lambda connection: _execute(connection, "outbox_retry", *due))
        return delay

    def _tell(self, what: str, **facts: object) -> None:
        tell(self._on_event, self.name, what, facts)
        emit({"feed": self.name, "what": what, **facts})


def delivery_of(outbox: bool | Delivery) -> Delivery:
    """What an adapter's ``outbox=`` says."""
    if isinstance(outbox, bool):
        return OUTBOX.delivery
    if outbox not in {"at-least-once", "at-most-once"}:
        raise SpecError("outbox", outbox, "True | False | at-least-once | at-most-once")
    return outbox


def _execute(connection: Any, query: str, *parameters: Any) -> None:
    connection.execute(SQL[query], parameters)


def unsent_messages(
    inbox: Inbox, *, outbox: str | None = None, number: int | None = None, limit: int = -1
) -> list[UnsentMessage]:
    """Dead letters of the outboxes of a file."""
    rows = inbox.store.read("outbox_dead_list", outbox, outbox, number, number, limit)
    return [
        UnsentMessage(
            number=row[0],
            outbox=row[1],
            key=row[2],
            attempts=row[3],
            error=row[4],
            put_at=datetime.fromtimestamp(row[5], UTC),
            died_at=datetime.fromtimestamp(row[6], UTC),
            payload=row[7],
        )
        for row in rows
    ]


async def retry_unsent(inbox: Inbox, number: int) -> bool:
    """Let an unsent message be tried again. False if there is none."""
    async with inbox.store.transaction() as connection:
        revived = connection.execute(SQL["outbox_dead_retry"], (number,)).rowcount == 1
    inbox.store.bell.ring()
    return revived


async def drop_unsent(inbox: Inbox, number: int) -> bool:
    """Forget an unsent message for good. False if there is none."""
    async with inbox.store.transaction() as connection:
        return connection.execute(SQL["outbox_dead_drop"], (number,)).rowcount == 1
