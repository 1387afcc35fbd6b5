"""Replies that were promised are sent, once the promise is on disk.

``outbox.put(db, ...)`` writes a reply in the same transaction as the handler's own writes and its ack, so a crash
cannot separate them. The sender takes up what is committed: in order per key (a chat), side by side across keys, with
retry. That a message is about to be sent is synced before it is sent, so a power cut cannot undo a promise that was
already kept. A crash between sending and noting it sends the message again: the other side cannot tell us what it has
seen.

An error with ``retry_after`` (Telegram's 429) makes that key wait so long and costs no attempt. After ``max_attempts``
the message is a dead letter and the key flows on; after an error with a true ``permanent`` it is one at once.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from everdeck.child import emit
from everdeck.crashpoints import crash_point
from everdeck.errors import FeedError, InboxUnavailable
from everdeck.feed.dispatcher import ERROR_TEXT_LENGTH
from everdeck.feed.handling import Listener, call, retry_after_of, tell
from everdeck.feed.inbox import Inbox
from everdeck.feed.lanes import LaneKey, Lanes
from everdeck.feed.policy import OUTBOX, FeedPolicy, Retry
from everdeck.feed.store import SQL, Transaction

DISK_RETRY_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 24 * 3600.0


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
        on_event: Listener | None = None,
    ) -> None:
        self.inbox = inbox
        self.name = name
        self._policy = FeedPolicy(max_attempts, retry=retry or OUTBOX.retry)
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

    async def run(
        self, send: Callable[[Message], Awaitable[object] | object], *, concurrency: int = OUTBOX.concurrency
    ) -> None:
        """Send what was promised, until cancelled. ``send(message)`` returns when it was sent and raises otherwise."""
        if self._loaded:
            raise FeedError(f"outbox {self.name!r} is already being sent")
        await self.inbox.open()
        leave = self.inbox.store.bell.listen(self._hear_bell)
        try:
            await self._load()
            async with asyncio.TaskGroup() as group:
                while True:
                    for number, lane in await self._next(concurrency):
                        group.create_task(self._deliver(send, number, lane))
        finally:
            leave()
            self._loaded = False
            await self.inbox.close()

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
            picked = self._lanes.pick(concurrency - self._lanes.in_flight, loop.time())
            if picked:
                return picked
            due = self._lanes.next_due()
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - loop.time())):
                    await changed.wait()
            except TimeoutError:
                pass

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
        async with store.transaction(durable=True) as connection:
            row = connection.execute(SQL["outbox_sending"], (number,)).fetchone()
        if row is None:
            return None
        crash_point("feed.outbox.sending")
        message = Message(number, *row)
        try:
            await call(send, message)
        except Exception as err:  # noqa: BLE001 - the user's sender
            return await self._not_sent(message, err)
        crash_point("feed.outbox.sent")
        async with store.transaction() as connection:
            connection.execute(SQL["outbox_sent"], (number,))
        crash_point("feed.outbox.noted")
        return None

    async def _not_sent(self, message: Message, err: Exception) -> float | None:
        store = self.inbox.store
        error = f"{type(err).__name__}: {err}"[:ERROR_TEXT_LENGTH]
        asked = retry_after_of(err)
        if getattr(err, "permanent", False) or (asked is None and message.attempt >= self._policy.max_attempts):
            async with store.transaction() as connection:
                connection.execute(SQL["outbox_dead"], (error, store.clock(), message.number))
            facts = {"number": message.number, "key": message.key, "attempts": message.attempt, "error": error}
            self._tell("unsent", **facts)
            return None
        # Being asked to wait is not the message's fault, so it costs no attempt.
        delay = asked if asked is not None else self._policy.retry.delay(message.attempt, random.random())  # noqa: S311 - jitter
        async with store.transaction() as connection:
            given_back = int(asked is not None)
            connection.execute(SQL["outbox_retry"], (store.clock() + delay, error, given_back, message.number))
        return delay

    def _tell(self, what: str, **facts: object) -> None:
        tell(self._on_event, self.name, what, facts)
        emit({"feed": self.name, "what": what, **facts})


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
