"""The inbox: what was delivered is on disk before upstream may forget it.

A batch and the cursor behind it are one durable transaction, so there is no moment at which the cursor says
"delivered" and the records are not here. Only a stored cursor is ever sent upstream. What is stored is known by its
id for as long as upstream could deliver it again, and a record that comes again is dropped by *membership*, never
because its id is smaller than the last one: Telegram's ids start again at random after a quiet week.

The work itself is the dispatcher's; this module owns the arriving side, the dead letters and the housekeeping.
"""

from asyncio import CancelledError, Event, Future, Task, get_running_loop, timeout
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from math import inf
from os import PathLike
from pathlib import Path
from sqlite3 import IntegrityError
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self, TypeAlias

import msgspec

from everdeck.crashpoints import crash_point
from everdeck.errors import FeedClosed, SourceError, SpecError
from everdeck.feed.records import Counts, Cursor, FirstRun, Position, Record, RecordId, Start, Stored
from everdeck.feed.store import SQL, Clock, Store, Syncing, Transaction, numbers, shared, wall_clock

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import AsyncIterator
    from types import TracebackType

# Telegram holds an update for 24 hours and at most 100,000 of them: what is older cannot come again.
UPSTREAM_KEEPS_SECONDS: Final = 24 * 3600.0
REMEMBER_SECONDS: Final = 2 * UPSTREAM_KEEPS_SECONDS
REMEMBER_IDS: Final = 250_000
MAX_BACKLOG: Final = 50_000
KEEP_DAYS: Final = 30.0
# Payloads of what has just arrived are kept at hand, for most of it is worked on at once.
AT_HAND_BYTES: Final = 400_000
FORGET_AT_ONCE: Final = 5_000
STORES_BETWEEN_HOUSEKEEPING: Final = 64
# With so many at hand the handlers have something to do until a commit is synced.
ENOUGH_AT_HAND: Final = 32
# So many who bring something at the same time are waited for until they bring the next, but no longer than this.
MANY_CALLERS: Final = 8
BACK_SECONDS: Final = 0.003
# A place in an array of JSON is found by counting, so arrays are short.
MOST_PLAIN: Final = 256


# By id, the digests that are known and the epoch of each.
_Known: TypeAlias = dict[RecordId, dict[bytes | None, int]]
_New: TypeAlias = tuple[Record, int, bytes | None]  # a record that is not known yet, its epoch and its digest
_NO_DIGEST: Final = bytes(8)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An item that was set aside: ``number`` is what the commands take."""

    number: int
    stream: str
    id: RecordId
    key: str | None
    attempts: int
    crashes: int
    error: str | None
    stored_at: datetime
    died_at: datetime
    payload: bytes


class Inbox:
    """A durable inbox in one SQLite file.

    ``async with Inbox("bot.db") as inbox`` or ``await inbox.open()`` … ``await inbox.close()``; ``consume`` does it
    by itself. One process works from a file at a time (:class:`everdeck.errors.PollerConflict` otherwise); several
    streams and several ``Inbox`` objects in that process may share it. The user's own tables may live in the same
    file: that is what makes ``item.transaction()`` possible.

    ``max_backlog`` bounds what waits: above it the source is not asked (it keeps what we do not take).
    ``remember_seconds`` and ``remember_ids`` bound how long ids are known after their items are done. Dead letters that
    nobody has asked for are dropped after ``keep_days``.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        max_backlog: int = MAX_BACKLOG,
        remember_seconds: float = REMEMBER_SECONDS,
        remember_ids: int = REMEMBER_IDS,
        keep_days: float = KEEP_DAYS,
        clock: Clock = wall_clock,
    ) -> None:
        for field, given in (("max_backlog", max_backlog), ("remember_ids", remember_ids)):
            if type(given) is not int or given < 1:
                raise SpecError(field, given, "a whole number, at least 1")
        if remember_seconds < 0:
            raise SpecError("remember_seconds", remember_seconds, "a number, at least 0")
        if isinstance(keep_days, bool) or not isinstance(keep_days, int | float) or not keep_days > 0:
            raise SpecError("keep_days", keep_days, "days, more than 0 (math.inf: for ever)")
        self.path = Path(path)
        self.max_backlog = max_backlog
        self.remember_seconds = remember_seconds
        self.remember_ids = remember_ids
        self.keep_days = keep_days
        self._clock = clock
        self._store: Store | None = None
        self._opened = 0
        self._streams: dict[str, Stream] = {}
        self._stores_since_housekeeping = 0

    # --- opening ---

    async def open(self, *, work: bool = True) -> Self:
        """Open the file; with ``work=False`` only to look at it and at its dead letters, beside a working process."""
        if self._store is None:
            self._store = shared(self.path, self._clock, create=work)
        self._opened += 1
        if work:
            try:
                last = self._store.claim()
                if last is not None:
                    await self._store.recover(last)
            except BaseException:
                await self.close()
                raise
        return self

    async def close(self) -> None:
        """Let go of the file; what is in it stays. Each ``open`` needs its own ``close``."""
        self._opened = max(0, self._opened - 1)
        if self._store is not None and self._opened == 0:
            store, self._store = self._store, None
            for stream in self._streams.values():
                stream.forget()
            store.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: "type[BaseException] | None", error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        await self.close()

    @property
    def store(self) -> Store:
        """The open file; for the feed's own modules."""
        if self._store is None:
            raise FeedClosed(f"the inbox {self.path} is not open")
        return self._store

    # --- streams ---

    def stream(self, name: str) -> "Stream":
        """The stream of one upstream account, such as ``telegram:<bot id>``."""
        if name not in self._streams:
            self._streams[name] = Stream(self, name)
        return self._streams[name]

    @asynccontextmanager
    async def transaction(self) -> "AsyncIterator[Transaction]":
        """A transaction without an item: for the user's own tables (``CREATE TABLE IF NOT EXISTS …``)."""
        async with self.store.transaction(then=lambda: handle.committed()) as connection:  # noqa: PLW0108 - made inside
            handle = Transaction(connection)
            try:
                yield handle
            finally:
                handle.end()

    # --- dead letters ---

    def dead_letters(self, *, stream: str | None = None, limit: int = -1) -> list[DeadLetter]:
        """What was set aside, oldest first."""
        return [_dead_letter(row) for row in self.store.read("dead_list", stream, stream, None, None, limit)]

    def dead_letter(self, number: int) -> DeadLetter | None:
        """One of them, or None."""
        rows = self.store.read("dead_list", None, None, number, number, 1)
        return _dead_letter(rows[0]) if rows else None

    async def retry_dead_letter(self, number: int) -> bool:
        """Let it be tried again, with all its attempts; a working process notices. False if there is none."""
        async with self.store.transaction() as connection:
            revived = connection.execute(SQL["dead_retry"], (number,)).rowcount == 1
        self.store.bell.ring()
        return revived

    async def drop_dead_letter(self, number: int) -> bool:
        """Forget it for good. False if there is none."""
        async with self.store.transaction() as connection:
            return connection.execute(SQL["dead_drop"], (number,)).rowcount == 1

    # --- housekeeping ---

    async def housekeep(self) -> None:
        """Forget ids that cannot come again and dead letters that nobody asked for. Called by itself now and then."""
        await self.store.write(self._forget)
        await self.store.give_back_pages()

    def _forget(self, connection: "sqlite3.Connection") -> None:
        now = self.store.clock()
        newest = now - self.remember_seconds
        (last,) = connection.execute(SQL["last_seq"]).fetchone()
        too_many = last - self.remember_ids
        forgettable: list[int] = []
        for seq, stored_at, of_last_batch in connection.execute(SQL["seen_oldest"]):
            # Rows are in order of arrival, so the first one that is young and within the number ends the search.
            if stored_at >= newest and seq > too_many:
                break
            if not of_last_batch:
                forgettable.append(seq)
                if len(forgettable) == FORGET_AT_ONCE:
                    break
        if forgettable:
            connection.execute(SQL["seen_forget"], (numbers(forgettable),))
            crash_point("feed.housekeeping.forgotten")
        connection.execute(SQL["outbox_kept_expire"], (newest,))
        if self.keep_days != inf:
            for expired in ("dead_expire", "outbox_dead_expire"):
                connection.execute(SQL[expired], (now - self.keep_days * 86_400,))

    async def stored_once_more(self) -> None:
        """Count one stored batch, and keep house when it is time."""
        self._stores_since_housekeeping += 1
        if self._stores_since_housekeeping >= STORES_BETWEEN_HOUSEKEEPING:
            self._stores_since_housekeeping = 0
            await self.housekeep()


class Stream:
    """One upstream account in an inbox: its cursor, its epoch, its backlog.

    The numbers in memory follow the file: they change only after the commit that changed the row. ``activity`` is set
    by everything that changes a number that people see.
    """

    def __init__(self, inbox: Inbox, name: str) -> None:
        self.inbox = inbox
        self.name = name
        self._row: _Row | None = None
        self._is_new = False
        self._done = 0
        self._waiting = 0
        self.activity = Event()
        self._arrived = Event()
        self._has_room = Event()
        self._new: list[tuple[int, str | None]] = []
        self._at_hand: dict[int, Row] = {}
        self._at_hand_bytes = 0
        self._unsynced = False
        self._syncing: Syncing | None = None
        self.rider: Rider | None = None
        self._brought: list[tuple[Record, Future[None]]] = []
        self._door: Task[None] | None = None
        self._callers = 0
        self._all_back = Event()
        self._listening = False
        self.in_flight = 0

    # --- where to ask ---

    async def begin(self, first_run: FirstRun = "take") -> Start:
        """Say how to start; the first time with ``"skip"``, that the skip was begun is on disk before it is said."""
        if first_run not in {"take", "skip"}:
            raise SpecError("first_run", first_run, "take | skip")
        row = await self._loaded("initialising" if first_run == "skip" else "live")
        if self._is_new:
            self._is_new = False
            return Start.SKIP if first_run == "skip" else Start.TAKE
        # A skip that was cut short may have reached upstream, and what is there now may be real work: take it.
        return Start.RESUME if row.cursor is not None else Start.TAKE

    async def skip(self, to: Cursor) -> None:
        """The history was skipped; ``to`` is where the new begins, or None if there was no history."""
        crash_point("feed.skip.answered")
        after = replace(self._known(), cursor=to, confirmed=False)
        async with self.inbox.store.transaction(durable=True) as connection:
            _write(connection, after)
        crash_point("feed.skip.recorded")
        self._row = after

    def cursor(self) -> Cursor:
        """Where the next batch begins, as it is stored."""
        return self._known().cursor

    def position(self) -> Position:
        """Where to ask now.

        A server that forgets everything below the offset must not be sent one that has already done its work: if the
        ids have started again just below it, ``tail < offset <= tail + 10`` deletes what we never saw. So an offset is
        sent until one answer has confirmed it, and never once upstream has forgotten by itself.
        """
        row = self._known()
        if not isinstance(row.cursor, int) or row.confirmed:
            return Position(row.cursor, 0)
        if row.stored_at and self.inbox.store.clock() - row.stored_at > UPSTREAM_KEEPS_SECONDS:
            return Position(row.cursor, 0)
        return Position(row.cursor, row.cursor)

    # --- storing ---

    async def store(
        self, records: Sequence[Record], cursor: Cursor = None, *, asked: int | None = None, sync: bool = True
    ) -> Stored:
        """Store a batch and its cursor: one durable transaction, or nothing (``InboxUnavailable``).

        Upstream may be asked at the new position as soon as this returns; with ``sync=False``, where the sync only
        begins, after :meth:`synced`, and the work on it may begin before. With ``asked`` (the offset that the batch was
        asked with) an id below what upstream has forgotten, or a known id with another payload, means that the ids
        started again: a new epoch begins and the record is kept. Call it for an empty answer too: it confirms
        ``asked``.
        """
        before = row = self._known()
        if asked:
            row = replace(row, floor=max(row.floor, asked), confirmed=row.confirmed or row.cursor == asked)
        if records:
            # Whatever it is, upstream still has it: there is something to confirm.
            row = replace(row, confirmed=False)
        elif cursor in {None, row.cursor}:
            if row != before:
                async with self.inbox.store.transaction() as connection:
                    _write(connection, row)
                self._row = row
            return Stored(0, 0, restarted_ids=False)
        crash_point("feed.store.begun")
        written = await self._write(row, records, cursor, by_digest=asked is not None, sync=sync)
        if sync:  # and with it everything that was committed before
            crash_point("feed.store.synced")
            self._unsynced = False
        await self.inbox.stored_once_more()
        restarted = written.row.epoch > row.epoch
        return Stored(len(written.fresh), len(records) - len(written.fresh), restarted)

    async def add(self, record: Record) -> None:
        """Store one record that was brought to us: when this returns it survives a power cut.

        Those that come while a commit is under way share the next one.
        """
        loop = get_running_loop()
        stored: Future[None] = loop.create_future()
        self._brought.append((record, stored))
        if len(self._brought) >= self._callers:
            self._all_back.set()
        if self._door is None or self._door.done():
            self._door = loop.create_task(self._store_what_is_brought(), name="feed door")
        await stored

    async def _store_what_is_brought(self) -> None:
        while self._brought:
            brought, self._brought = self._brought, []
            failure: Exception | None = None
            try:
                # The handlers begin as soon as it is committed, and while it is synced, unless they have enough.
                await self.store([record for record, _ in brought], sync=self.has_enough)
                await self.synced()
            except (Exception, CancelledError) as err:  # noqa: BLE001 - theirs who wait
                failure = err if isinstance(err, Exception) else FeedClosed(f"stream {self.name!r} was closed")
            for _, stored in brought:
                if not stored.done():
                    _tell(stored, failure)
            await self._until_they_are_back(len(brought) + len(self._brought))

    async def _until_they_are_back(self, callers: int) -> None:
        """Whoever is answered brings the next one at once, and a commit for all of them costs little more than for one.

        Without this they fall into two halves for ever, of which one is written while the other is on its way.
        """
        if callers < MANY_CALLERS:
            return
        self._callers = callers
        self._all_back.clear()
        with suppress(TimeoutError, CancelledError):  # whoever has brought something meanwhile waits for the loop above
            async with timeout(BACK_SECONDS):
                await self._all_back.wait()

    def _stored(self, written: "_Written") -> None:
        crash_point("feed.store.committed")
        self._row = written.row
        self._unsynced = True
        self._waiting += len(written.fresh)
        if self._listening:
            self._remember(written)
        self._arrived.set()
        self.activity.set()

    async def _write(
        self, row: "_Row", records: Sequence[Record], cursor: Cursor, *, by_digest: bool, sync: bool
    ) -> "_Written":
        """Nearly always none of the ids is known, and then a batch is one statement.

        What is done by then leaves with it: two commits cost twice as much as one.
        """
        written: _Written
        statement: str
        parameters: tuple[object, ...]
        aboard: Rider | None = None

        def as_new() -> None:
            nonlocal written, statement, parameters, aboard
            if _is_plain(records, row, by_digest=by_digest):
                statement = SQL["batch_add_plain"]
                written, batch = self._plain_batch(row, records, cursor, by_digest=by_digest)
                done = None if self.rider is None else self.rider.board()
                aboard = None if done is None else self.rider
                parameters = (*batch, *(done or _NONE_DONE))
            else:
                statement = SQL["batch_add"]
                written, batch = self._batch(row, records, cursor, {}, by_digest=by_digest)
                parameters = (1, *batch)

        def write(connection: "sqlite3.Connection") -> "_Written":
            connection.executemany(statement, (parameters,))
            return written

        def stored(written: "_Written") -> None:
            nonlocal aboard
            self._stored(written)
            if aboard is not None:
                aboard.arrive()
                aboard = None

        store, sync_soon = self.inbox.store, None if sync else self._sync_begun
        try:
            return await store.write(write, durable=sync, alone=True, first=as_new, then=stored, sync_soon=sync_soon)
        except BaseException as err:
            if aboard is not None:
                aboard.stay()
            if not isinstance(err, IntegrityError):
                raise
        unknown = partial(self._write_the_unknown, row=row, records=records, cursor=cursor, by_digest=by_digest)
        return await store.write(unknown, durable=sync, then=self._stored, sync_soon=sync_soon)

    def _write_the_unknown(
        self,
        connection: "sqlite3.Connection",
        *,
        row: "_Row",
        records: Sequence[Record],
        cursor: Cursor,
        by_digest: bool,
    ) -> "_Written":
        """Of a batch that was refused because some of it is known, the rest."""
        known: _Known = {}
        ids = _json([record.id for record in records])
        for known_id, known_epoch, known_digest in connection.execute(SQL["seen"], (row.id, ids)):
            known.setdefault(known_id, {})[known_digest] = known_epoch
        written, parameters = self._batch(row, records, cursor, known, by_digest=by_digest)
        connection.execute(SQL["batch_add"], (0, *parameters))
        return written

    def _sync_begun(self, syncing: Syncing) -> None:
        self._syncing = syncing

    def _plain_batch(
        self, row: "_Row", records: Sequence[Record], cursor: Cursor, *, by_digest: bool
    ) -> "tuple[_Written, tuple[object, ...]]":
        """As :meth:`_batch`, of records of which each is new as far as it can be told here."""
        store = self.inbox.store
        seqs, now = store.next_seqs(len(records)), store.clock()
        confirmed = row.confirmed and cursor in {None, row.cursor}
        row = _Row(row.id, row.cursor if cursor is None else cursor, confirmed, row.floor, row.epoch, now)
        payloads = [record.payload for record in records]
        keys = [record.key for record in records]
        digests = b"".join([_digest(payload) for payload in payloads]) if by_digest else b""
        written = _Written(row, seqs, records)
        return written, (
            seqs.start,
            row.id,
            now,
            _json([record.id for record in records]),
            _json(keys) if any(key is not None for key in keys) else None,
            numbers(accumulate(map(len, payloads), initial=1)),
            b"".join(payloads),
            digests,
            _cursor_text(row.cursor),
            row.confirmed,
            row.floor,
            row.epoch,
        )

    def _batch(
        self, row: "_Row", records: Sequence[Record], cursor: Cursor, known: "_Known", *, by_digest: bool
    ) -> "tuple[_Written, tuple[object, ...]]":
        """What is written of these records, and how the statement takes it. Only in the writer's turn."""
        store = self.inbox.store
        fresh, epoch = self._sorted_out(records, row, known, by_digest=by_digest)
        seqs, now = store.next_seqs(len(fresh)), store.clock()
        if epoch > row.epoch:
            row = replace(row, epoch=epoch, floor=0, confirmed=False)
        if cursor is not None and cursor != row.cursor:
            row = replace(row, cursor=cursor, confirmed=False)
        row = replace(row, stored_at=now)
        rows, begin = [], 1
        for seq, (record, of_epoch, digest) in zip(seqs, fresh, strict=True):
            length = len(record.payload)
            rows.append((seq, record.id, record.key, of_epoch, begin, length, digest is not None))
            begin += length
        payloads = b"".join([record.payload for record, _, _ in fresh])
        digests = b"".join([digest or _NO_DIGEST for _, _, digest in fresh])
        of_stream = (_cursor_text(row.cursor), row.confirmed, row.floor, row.epoch, seqs.start if fresh else None)
        written = _Written(row, seqs, [record for record, _, _ in fresh])
        return written, (row.id, now, _json(rows), payloads, digests, *of_stream)

    def _remember(self, written: "_Written") -> None:
        """What arrived, for the dispatcher; its payloads too, as far as there is room for them."""
        stored_at, new, at_hand, size = written.row.stored_at, self._new, self._at_hand, self._at_hand_bytes
        for seq, record in zip(written.seqs, written.fresh, strict=True):
            key = record.key
            new.append((seq, key))
            if size < AT_HAND_BYTES:
                payload = record.payload
                at_hand[seq] = Row(seq, record.id, key, payload, 0, stored_at, 0)
                size += len(payload)
        self._at_hand_bytes = size

    @property
    def has_enough(self) -> bool:
        """Do the handlers have work for longer than a sync takes? Then a batch is committed and synced in one step.

        Otherwise it is committed first, so that nobody waits for the disk, and synced afterwards.
        """
        return self._waiting + self.in_flight >= ENOUGH_AT_HAND

    async def synced(self) -> None:
        """Wait until everything that was stored survives a power cut: from then on upstream may forget it."""
        if self._unsynced:
            syncing, self._syncing = self._syncing, None
            await (self.inbox.store.sync() if syncing is None else self.inbox.store.until(syncing))
            crash_point("feed.store.synced")
            self._unsynced = False

    async def rows(self, seqs: Sequence[int]) -> "list[Row]":
        """The items of these numbers, as far as they still wait; for the dispatcher."""
        found = [row for seq in seqs if (row := self._at_hand.pop(seq, None)) is not None]
        self._at_hand_bytes -= sum(len(row.payload) for row in found)
        if len(found) < len(seqs):
            known = {row.seq for row in found}
            ((elsewhere,),) = await self.inbox.store.look(
                "items_take", numbers(seq for seq in seqs if seq not in known)
            )
            found += [
                Row(seq, record_id, key, bytes.fromhex(payload), attempts, stored_at, charges)
                for seq, record_id, key, payload, attempts, stored_at, charges in msgspec.json.decode(elsewhere)
            ]
        return found

    async def room(self) -> None:
        """Back-pressure: wait while the backlog is full."""
        while self._waiting >= self.inbox.max_backlog:
            self._has_room.clear()
            await self._has_room.wait()

    def counts(self) -> Counts:
        """The stream in numbers."""
        ((dead,),) = self.inbox.store.read("dead_count", self._known().id)
        return Counts(done=self._done, waiting=self._waiting, in_flight=self.in_flight, dead=dead)

    # --- for the dispatcher ---

    @property
    def number(self) -> int:
        """The stream's number in the file."""
        return self._known().id

    async def listen(self) -> Event:
        """From now on remember what arrives for :meth:`arrivals`; the event is set when something did."""
        row = await self._loaded("live")
        self.recount(row.id)
        self.stop_listening()
        self._listening = True
        return self._arrived

    def stop_listening(self) -> None:
        """Nobody will ask for arrivals any more; they stay in the file."""
        self._listening = False
        self._new.clear()
        self._at_hand.clear()
        self._at_hand_bytes = self.in_flight = 0

    def forget(self) -> None:
        """The file is closed; when it is open again, what was known may have changed."""
        self._row = self._door = self._syncing = None
        self.stop_listening()
        # An event belongs to the loop that has waited for it, and the next opening may be in another loop.
        self.activity, self._arrived, self._has_room, self._all_back = Event(), Event(), Event(), Event()

    def arrivals(self) -> list[tuple[int, str | None]]:
        """The numbers and keys that arrived since the last call."""
        arrived, self._new = self._new, []
        return arrived

    def told_twice(self, seq: int) -> None:
        """This arrival was found in the file before it was told of, and counted then."""
        if (row := self._at_hand.pop(seq, None)) is not None:
            self._at_hand_bytes -= len(row.payload)
        self.left(waiting=1, done=0)

    def pending_arrivals(self) -> list[tuple[int, str | None]]:
        """What the next :meth:`arrivals` will give."""
        return self._new

    @property
    def waiting(self) -> int:
        """How many items wait, those that wait for a retry included."""
        return self._waiting

    def recount(self, number: int) -> None:
        """Count what waits, from the file: at the start, and when another process has written to it."""
        (self._waiting,) = self.inbox.store.read("waiting_count", number)[0]

    def left(self, *, waiting: int, done: int) -> None:
        """Items left the backlog (or came back to it, if negative) and were finished."""
        self._waiting -= waiting
        self._done += done
        self.activity.set()
        if self._waiting < self.inbox.max_backlog:
            self._has_room.set()

    # --- helpers, in the order they are called ---

    async def _loaded(self, phase_if_new: str) -> "_Row":
        if self._row is not None:
            return self._row
        store = self.inbox.store
        found = store.read("stream", self.name)
        if not found:
            async with store.transaction(durable=True) as connection:
                connection.execute(SQL["stream_add"], (self.name, phase_if_new))
            crash_point("feed.begin.recorded")
            self._is_new = True
            found = store.read("stream", self.name)
        number, cursor, confirmed, floor, epoch, stored_at, done = found[0]
        known: Cursor = None if cursor is None else msgspec.json.decode(cursor)
        self._row = _Row(number, known, bool(confirmed), floor, epoch, stored_at)
        self._done = done
        self.recount(number)
        return self._row

    def _known(self) -> "_Row":
        if self._row is None:
            raise FeedClosed(f"stream {self.name!r}: call begin() first")
        return self._row

    def _sorted_out(
        self, records: Sequence[Record], row: "_Row", known: "_Known", *, by_digest: bool
    ) -> tuple[list["_New"], int]:
        """The records that are new, and the epoch after them."""
        fresh: list[_New] = []
        epoch, floor = row.epoch, row.floor
        for record in records:
            if not isinstance(record, Record) or not isinstance(record.id, int | str):
                raise SourceError(f"stream {self.name!r}: a batch is Records whose ids are whole numbers or texts")
            if not isinstance(record.payload, bytes):
                raise SourceError(f"stream {self.name!r}: the payload of a Record is bytes")
            twins = known.setdefault(record.id, {})
            digest = _digest(record.payload) if by_digest else None
            if digest in twins or (twins and not by_digest):
                continue
            below = by_digest and isinstance(record.id, int) and record.id < floor
            if below or epoch in twins.values():
                epoch, floor = epoch + 1, 0
            twins[digest] = epoch
            fresh.append((record, epoch, digest))
        return fresh, epoch


@dataclass(frozen=True, slots=True)
class _Row:
    """A stream as it is in the file; the columns are explained in schema.sql."""

    id: int
    cursor: Cursor
    confirmed: bool
    floor: int
    epoch: int
    stored_at: float


class Row(msgspec.Struct, frozen=True, gc=False):
    """An item as it waits; ``charges`` counts the deaths that are held against it."""

    seq: int
    id: RecordId
    key: str | None
    payload: bytes
    attempts: int
    stored_at: float
    charges: int


# What is done and leaves the file: the first and the last of numbers that follow each other, or all of them as a JSON
# array; how many they are; and what they want to be remembered, as JSON and a blob of values (at_once.sql).
Leaving: TypeAlias = tuple[int, int, str | None, int, str | None, bytes]


class Rider(Protocol):
    """Who has outcomes that may be written together with a batch; all of it in the writer's turn."""

    def board(self) -> Leaving | None:
        """What is done, if nothing else has to be written of it.

        Then exactly one of the next two is called.
        """

    def arrive(self) -> None:
        """It is committed."""

    def stay(self) -> None:
        """It is not."""


# See at_once.sql: an empty range, no list, nothing to remember.
_NONE_DONE: Final[Leaving] = (1, 0, None, 0, None, b"")


class _Written(NamedTuple):
    """A batch that is in the file: the stream afterwards, and the records that were new, with their numbers."""

    row: _Row
    seqs: range
    fresh: Sequence[Record]


def _is_plain(records: Sequence[Record], row: _Row, *, by_digest: bool) -> bool:
    """Are these as batches nearly always are? What is wrong with others is found by those who look at each of them."""
    if row.epoch or not 0 < len(records) <= MOST_PLAIN or set(map(type, records)) != {Record}:
        return False
    ids: list[Any] = [record.id for record in records]
    kinds = set(map(type, ids))
    if {type(record.payload) for record in records} != {bytes} or len(set(ids)) < len(ids):
        return False
    return kinds == {str} or (kinds == {int} and (not by_digest or min(ids) >= row.floor))


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=8).digest()


def _tell(waiter: "Future[None]", failure: Exception | None) -> None:
    if failure is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(failure)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _cursor_text(cursor: Cursor) -> str | None:
    return None if cursor is None else _json(cursor)


def _write(connection: "sqlite3.Connection", row: _Row) -> None:
    connection.execute(
        SQL["stream_advance"],
        (_cursor_text(row.cursor), row.confirmed, row.floor, row.epoch, row.stored_at, row.id),
    )


def _dead_letter(row: tuple[int, str, RecordId, str | None, int, int, str | None, float, float, bytes]) -> DeadLetter:
    number, stream, record_id, key, attempts, crashes, error, stored_at, died_at, payload = row
    return DeadLetter(
        number=number,
        stream=stream,
        id=record_id,
        key=key,
        attempts=attempts,
        crashes=crashes,
        error=error,
        stored_at=datetime.fromtimestamp(stored_at, UTC),
        died_at=datetime.fromtimestamp(died_at, UTC),
        payload=payload,
    )
