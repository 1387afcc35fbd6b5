"""The feed's file: one SQLite database, one writer at a time, two strengths of commit.

Everything the feed must remember is in this file, and this is the only module of the feed that opens it.

SQLite in WAL mode has one writer. Within a process the writers queue up on an asyncio lock, because a handler's
transaction stays open while the handler awaits, and a second connection that waits for it inside SQLite would
block the very loop it waits for. Between processes SQLite's own lock decides; other processes (the dead-letter
commands) write for milliseconds.

The event loop never waits for SQLite: whatever may wait for a lock or a disk (begin, commit, whole writes) runs in a
thread of the file's own. A lock that somebody else holds is waited for there, for less than a second; then it is
``InboxUnavailable`` and whoever wrote tries again. Statements inside a transaction that is already begun wait for
nobody, so a handler's own run in its loop. A statement gives the interpreter's lock away, and gets it back from a busy
loop only after 5 ms, so what is written for every update is one statement for the whole batch, commit included: an
insert into a view, whose trigger does the rest (``sql/at_once.sql``).

A *durable* commit is synced before it returns: it is used where something leaves the house because of it (a reply).
A batch is committed, worked on, and synced (:meth:`Store.sync`) before upstream is asked at the new position. Every
other commit survives the death of the process but may be undone by a power cut, which can only lead to work being done
again, never to work being lost: the rows themselves were synced when they arrived. The sync is ours: a commit with
``synchronous = NORMAL`` and then a sync of the WAL is what ``FULL`` does (sqlite.org/pragma.html#pragma_synchronous),
and the sync needs no transaction, no lock and no statement.
"""

import asyncio
import ctypes
import os
import secrets
import sqlite3
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

from everdeck import disk
from everdeck.crashpoints import crash_point
from everdeck.errors import EverdeckError, FeedError, InboxUnavailable, PollerConflict
from everdeck.feed import last_words
from everdeck.feed.bell import Bell
from everdeck.feed.blame import Cause, Charge, charges_after
from everdeck.feed.ledger import LastRun, Ledger
from everdeck.kernel import flock

Clock = Callable[[], float]
_Answer = TypeVar("_Answer")
SCHEMA_VERSION: Final = 2
OLDEST_SQLITE: Final = (3, 38, 0)  # the operator ->>; STRICT tables came with 3.37, RETURNING with 3.35
BUSY_SECONDS: Final = 0.8  # of the file's thread, in which nobody may wait for long
PATIENT_SECONDS: Final = 10.0  # of a program that has nothing else to do
READ_BUSY_SECONDS: Final = 0.1
READER_CACHE_KIB: Final = 256
WRITER_CACHE_KIB: Final = 512
LAST_WORDS_LENGTH: Final = 1500
WAL_BYTES_KEPT: Final = 16_000_000
VACUUM_PAGES: Final = 256
FREE_PAGES_WORTH_IT: Final = 1024


def wall_clock() -> float:
    """Seconds since 1970. Only differences of days and retry times are taken from it, never an order."""
    return datetime.now(UTC).timestamp()


def _queries() -> dict[str, str]:
    found: dict[str, str] = {}
    for part in files("everdeck.feed").joinpath("sql/queries.sql").read_text("utf-8").split("-- name: ")[1:]:
        name, _, statement = part.partition("\n")
        found[name.strip()] = statement.strip().rstrip(";")
    return found


SQL: Final = _queries()


class Transaction:
    """The database inside a transaction that somebody else opens, commits and rolls back.

    It offers ``execute`` and ``executemany`` and no way to end the transaction early: the commit is where the
    handler's writes and its ack become one.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection: sqlite3.Connection | None = connection
        self._after: list[Callable[[], None]] = []

    def execute(self, statement: str, parameters: Any = ()) -> sqlite3.Cursor:
        """Run one statement; the answer is the cursor with its rows."""
        return self._open().execute(statement, parameters)

    def executemany(self, statement: str, parameters: Iterable[Any]) -> sqlite3.Cursor:
        """Run one statement for each of the parameters."""
        return self._open().executemany(statement, parameters)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise FeedError("the transaction is over: use the handle only inside its async with")
        return self._connection

    def after_commit(self, act: Callable[[], None]) -> None:
        """Call this once the commit has happened, and never if it does not."""
        self._after.append(act)

    def end(self) -> None:
        """Make every later use an error."""
        self._connection = None

    def committed(self) -> None:
        """Call what was waiting for the commit."""
        for act in self._after:
            act()


class Store:
    """One open feed file. Objects of the same file in one process share it (:func:`shared`)."""

    def __init__(self, path: Path, clock: Clock, *, create: bool) -> None:
        self.path = path
        self.clock = clock
        self.bell = Bell(self._lock_path, self._version)
        self._users = 0
        self._turn = asyncio.Lock()
        self._writer: asyncio.Task[Any] | None = None
        self._lock_fd: int | None = None
        self._ledger: Ledger | None = None
        self._connection = _connect(path, create=create, busy_seconds=BUSY_SECONDS)
        self._wal_fd: int | None = None
        self._doubtful = False  # a sync was refused
        try:
            self._syncs_itself = _prepare(path, self._connection)
            # Readers of the loop and of the thread, apart: a connection serves one call at a time.
            self._reader, self._looker = (_reader(path) for _ in range(2))
        except BaseException:
            self._connection.close()
            raise
        # Three: neither a look nor a write waits for a sync; writes queue up before they come here.
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="feed file")
        self._wake: _WakeUpCall | None = None
        self._recovered: dict[int, frozenset[int]] = {}
        self._last_seq: int = self.read("last_seq")[0][0]
        self._file_id: int = int(self.read("file_id")[0][0])

    # --- who may use it ---

    def claim(self) -> LastRun | None:
        """Be the one process that works from this file; the kernel drops the claim however we die.

        The answer is what the last process was doing when it ended; None if the claim was ours already.
        """
        if self._lock_fd is not None:
            return None
        lock = self._lock_path
        try:
            self._lock_fd = flock.take(lock)
        except EverdeckError as err:
            raise InboxUnavailable(f"{lock}: {err}") from err
        if self._lock_fd is None:
            holders = flock.holders(lock)
            who = f"pid {holders[0]} ({_command_of(holders[0])})" if holders else "another process"
            raise PollerConflict(f"{self.path} is being worked from by {who}; one process per inbox file")
        _CLAIMED.add(self)
        try:
            with _translated(lock):
                self._ledger = Ledger(self._lock_fd, self._file_id)
        except BaseException:
            self._let_go()
            raise
        return self._ledger.last_run

    async def recover(self, last: LastRun) -> None:
        """Finish what the last process had finished, and hold its death against those who may answer for it."""
        cause = last_words.cause_of(last)
        self._recovered = await self.write(lambda connection: _recovered(connection, last, cause), durable=True)
        crash_point("feed.recover.committed")
        self.start_over()

    def crashed_with(self, stream: int) -> frozenset[int]:
        """Which items of this stream were in flight when the last process died; told once."""
        return self._recovered.pop(stream, frozenset())

    @property
    def ledger(self) -> Ledger:
        """What this process works on; only after :meth:`claim`."""
        if self._ledger is None:
            raise FeedError(f"{self.path}: opened to look at it, not to work from it")
        return self._ledger

    def start_over(self) -> None:
        """What the last process left has been dealt with: note our own work from now on."""
        if self._lock_fd is not None:
            self.ledger.start_over(self._file_id, cookie=last_words.own_cookie(), oom_kills=last_words.oom_kills())
            last_words.listen(self._lock_fd, self.ledger)

    def close(self) -> None:
        """Let go of the file once its last user in this process has."""
        self._users -= 1
        if self._users > 0:
            return
        _OPEN.pop(_identity(self.path), None)
        self._threads.shutdown()
        if self._wake is not None:
            self._wake.close()
            self._wake = None
        self._reader.close()
        self._looker.close()
        self._connection.close()
        if self._wal_fd is not None:
            os.close(self._wal_fd)
            self._wal_fd = None
        self._let_go()

    def _let_go(self) -> None:
        _CLAIMED.discard(self)
        fd, self._lock_fd = self._lock_fd, None
        ledger, self._ledger = self._ledger, None
        if fd is not None:
            last_words.stop_listening(fd)
            if ledger is not None:
                ledger.close()
            os.close(fd)

    def forked(self) -> None:
        """We are a copy of the process that has the claim: it must be free when that one ends."""
        fd, self._lock_fd = self._lock_fd, None
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()  # a mapping keeps the open file, and so its lock, as a descriptor does (flock(2), mmap(2))
        if fd is not None:
            os.close(fd)

    # --- reading ---

    def read(self, query: str, *parameters: Any) -> list[Any]:
        """The rows of a named query, as they are committed. Readers wait for no writer (WAL)."""
        with _translated(self.path):
            return self._reader.execute(SQL[query], parameters).fetchall()

    async def look(self, query: str, *parameters: Any) -> list[Any]:
        """The same in the file's thread, for queries that may take a while."""
        return await self._in_thread(self._look, query, parameters)

    def _look(self, query: str, parameters: tuple[Any, ...]) -> list[Any]:
        with _translated(self.path):
            return self._looker.execute(SQL[query], parameters).fetchall()

    # --- writing ---

    @property
    def last_seq(self) -> int:
        """The newest number that this process knows of."""
        return self._last_seq

    def next_seqs(self, count: int) -> range:
        """Numbers for rows to come, growing over the life of the file. Only inside a transaction."""
        first = self._last_seq + 1
        self._last_seq += count
        return range(first, first + count)

    async def write(
        self,
        work: Callable[[sqlite3.Connection], _Answer],
        *,
        durable: bool = False,
        alone: bool = False,
        first: Callable[[], None] | None = None,
        then: Callable[[_Answer], None] | None = None,
        sync_soon: Callable[["Syncing"], None] | None = None,
    ) -> _Answer:
        """All or nothing of what ``work(connection)`` writes, in the file's thread; the answer is its answer.

        With ``alone`` the work is one statement, which is a transaction by itself, or calls :meth:`whole`.
        ``first()`` is called in the loop, once it is our turn; ``then(answer)`` as soon as the loop knows that it is
        committed, also when whoever waits was cancelled meanwhile: what is in the file must be known in memory.
        With ``sync_soon`` the thread goes on to sync it, for which nobody waits here; it is told what to wait for.
        """
        self.refuse_inside()

        def do() -> tuple[_Answer, InboxUnavailable | None]:
            if alone:
                with _translated(self.path):
                    answer = work(self._connection)
            else:
                answer = self.whole(work)
            return answer, self._synced() if durable else None

        def done(outcome: tuple[_Answer, InboxUnavailable | None]) -> None:
            if sync_soon is not None:
                sync_soon(syncing)
            if then is not None:
                then(outcome[0])

        async with self._turn:
            if first is not None:
                first()
            syncing: Syncing = asyncio.get_running_loop().create_future()
            goes_on = None if sync_soon is None else (self._synced, syncing)
            answer, not_synced = await self._in_thread(do, then=done, goes_on=goes_on)
        if not_synced is not None:
            raise not_synced
        return answer

    async def until(self, syncing: "Syncing") -> None:
        """Wait for a sync that is under way. One that was given up by somebody who waited is made again."""
        try:
            not_synced = await asyncio.shield(syncing)
        except asyncio.CancelledError:
            if not syncing.cancelled():
                raise
            await self.sync()
            return
        if not_synced is not None:
            raise not_synced

    async def sync(self) -> None:
        """Everything that was committed so far survives a power cut."""
        not_synced = await self._in_thread(self._synced)
        if not_synced is not None:
            raise not_synced

    @asynccontextmanager
    async def transaction(
        self, *, durable: bool = False, then: Callable[[], None] | None = None
    ) -> AsyncIterator[sqlite3.Connection]:
        """All or nothing of what the body writes, after everybody who came earlier. ``then``: as in :meth:`write`."""
        self.refuse_inside()
        async with self._turn:
            self._writer = asyncio.current_task()
            try:
                try:
                    await self._in_thread(self._begin)
                    with _translated(self.path):
                        yield self._connection
                        self._still_open()
                    await self._in_thread(self._commit, then=None if then is None else lambda _: then())
                    if durable:
                        await self.sync()
                except BaseException:
                    # SQLite rolls back by itself on some errors (a full disk), and says so here.
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            finally:
                self._writer = None

    def whole(self, work: Callable[[sqlite3.Connection], _Answer]) -> _Answer:
        """A transaction around the work; only in the file's thread and in the writer's turn."""
        self._begin()
        try:
            with _translated(self.path):
                answer = work(self._connection)
            self._commit()
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        return answer

    def _begin(self) -> None:
        with _translated(self.path):
            self._connection.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        with _translated(self.path):
            self._connection.execute("COMMIT")

    def _synced(self) -> InboxUnavailable | None:
        """Sync what is committed; the answer is what went wrong. It is committed all the same.

        Once that was refused, another sync proves nothing: the kernel tells of pages that it could not write once. They
        are still in memory, so all of them are moved to the database first, which writes them anew.
        """
        if self._syncs_itself:
            return None
        try:
            with _translated(self.path):
                if self._doubtful:
                    _write_anew(self.path)
                if self._wal_fd is None:
                    # Kept, for the same reason; SQLite has no lock on this file that closing ours could drop. It is
                    # made anew for each first user of the file, so its name has to be on the disk as well.
                    self._wal_fd = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
                    disk.sync_directory(self.path.parent)
                disk.sync(self._wal_fd)
        except (OSError, FeedError) as err:
            self._doubtful = True
            why = f"{err.strerror} (errno {err.errno})" if isinstance(err, OSError) else str(err)
            return InboxUnavailable(f"{self.path}: {why}; committed, but not synced")
        self._doubtful = False
        return None

    async def _in_thread(
        self,
        call: Callable[..., _Answer],
        *arguments: Any,
        then: Callable[[_Answer], None] | None = None,
        goes_on: "tuple[Callable[[], InboxUnavailable | None], Syncing] | None" = None,
    ) -> _Answer:
        """Run it in the file's thread. Once begun it is waited for, also by those who are cancelled meanwhile.

        What it ``goes_on`` with, unless it failed, is not waited for: the answer is given to the future.
        """
        job = _Job(self._wake_up_call(), call, arguments, goes_on)
        self._threads.submit(job.run)
        try:
            await job.over()
        except asyncio.CancelledError:
            while not job.is_over:
                with suppress(asyncio.CancelledError):
                    await job.over()
            # A failure is heard by nobody else.
            if job.error is None and then is not None:
                then(job.answer)
            raise
        if job.error is not None:
            try:
                raise job.error
            finally:
                del job  # the error has this frame in its traceback, and would have itself
        if then is not None:
            then(job.answer)
        return job.answer

    def _wake_up_call(self) -> "_WakeUpCall":
        """Of the running loop: each opening may have another one."""
        loop, wake = asyncio.get_running_loop(), self._wake
        if wake is None or wake.loop is not loop:
            if wake is not None:
                wake.leave()
            wake = self._wake = _WakeUpCall(loop)
        return wake

    def _still_open(self) -> None:
        if not self._connection.in_transaction:
            raise FeedError("the handler ended its transaction itself (COMMIT or ROLLBACK)")

    async def give_back_pages(self) -> None:
        """Return some free pages to the file system, a little at a time, when there are many."""
        async with self._turn:
            await self._in_thread(self._vacuum)

    def _vacuum(self) -> None:
        with _translated(self.path):
            (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
            if free > FREE_PAGES_WORTH_IT:
                # The pragma frees one page per step, and execute() steps a statement without columns only
                # once; executescript() steps to the end. No transaction is open that it could commit.
                self._connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")

    def refuse_inside(self) -> None:
        """Waiting for a commit inside a transaction of one's own would wait forever."""
        if self._writer is not None and self._writer is asyncio.current_task():
            raise FeedError("a transaction is open in this task; finish it first")

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.lock")

    def _version(self) -> int:
        # Changes with our own writes too; a ring too many only makes somebody look.
        (version,) = self._reader.execute("PRAGMA data_version").fetchone()
        return int(version)


Syncing: TypeAlias = "asyncio.Future[InboxUnavailable | None]"
"""A sync that is under way; what came of it is an answer, so that nobody has to ask."""


class _WakeUpCall:
    """``loop.call_soon_threadsafe`` that keeps the interpreter's lock.

    Whoever gives that lock away gets it back from a busy loop only after 5 ms and two switches of threads, and a send
    to the loop's socket gives it away on both sides. Writing to an eventfd takes a microsecond and never waits
    (eventfd(2), EFD_NONBLOCK), so it is done with the lock in hand (``ctypes.PyDLL``).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not before the last thread that may call has let go of us: the number would be somebody else's by then.
        self._close = weakref.finalize(self, os.close, self._fd)
        self._count = ctypes.c_uint64()
        loop.add_reader(self._fd, self._answer)

    def soon(self, act: Callable[[], None]) -> None:
        """In a thread: have it called by the loop."""
        self._calls.append(act)
        _libc.write(self._fd, _ONE, 8)

    def leave(self) -> None:
        """The loop listens no more; whoever still calls is not heard."""
        if not self.loop.is_closed():
            self.loop.remove_reader(self._fd)

    def close(self) -> None:
        """Nobody will call any more."""
        self.leave()
        self._close()

    def _answer(self) -> None:
        _libc.read(self._fd, ctypes.byref(self._count), 8)
        while self._calls:
            self._calls.popleft()()


_libc: Final = ctypes.PyDLL(None)
_libc.write.argtypes = _libc.read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_ONE: Final = ctypes.byref(ctypes.c_uint64(1))


class _Job(Generic[_Answer]):
    """A call for the file's thread, and what came of it.

    As ``run_in_executor`` and ``shield`` together, with a third of their futures: every batch and every group of
    outcomes is one.
    """

    def __init__(
        self,
        wake: "_WakeUpCall",
        call: Callable[..., _Answer],
        arguments: tuple[Any, ...],
        goes_on: "tuple[Callable[[], InboxUnavailable | None], Syncing] | None" = None,
    ) -> None:
        self._wake = wake
        self._call = call
        self._arguments = arguments
        self._goes_on = goes_on
        self._waiter: asyncio.Future[None] | None = None
        self.is_over = False
        self.error: BaseException | None = None
        self.answer: _Answer

    def run(self) -> None:
        """In the thread."""
        try:
            self.answer = self._call(*self._arguments)
        except BaseException as err:  # noqa: BLE001 - it is raised to who waits
            self.error = err
        self._wake.soon(self.end)
        if self._goes_on is not None and self.error is None:
            call, future = self._goes_on
            self._wake.soon(partial(_give, future, call()))

    async def over(self) -> None:
        """Wait for it, in the loop."""
        if not self.is_over:
            self._waiter = self._wake.loop.create_future()
            await self._waiter

    def end(self) -> None:
        """In the loop."""
        self.is_over = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _give(future: "asyncio.Future[_Answer]", answer: _Answer) -> None:
    if not future.done():
        future.set_result(answer)


def _recovered(connection: sqlite3.Connection, last: LastRun, cause: Cause) -> dict[int, frozenset[int]]:
    """Which items of each stream were running."""
    finished = connection.execute(SQL["items_finished"], (numbers(last.done),)).fetchall()
    for (stream,) in finished:
        connection.execute(SQL["stream_done"], (1, stream))
    crash_point("feed.recover.finished")
    rows = connection.execute(SQL["items_charged"], (numbers(last.running),)).fetchall()
    charges = {seq: Charge(seq, crashes, kills) for seq, _, crashes, kills in rows}
    error = last.last_words.partition("\n\n")[0].strip()[:LAST_WORDS_LENGTH] or None
    for charge in charges_after(cause, charges.values(), last.guilty):
        connection.execute(SQL["item_charge"], (charge.crashes, charge.kills, error, charge.seq))
    crash_point("feed.recover.charged")
    in_flight: dict[int, frozenset[int]] = {}
    for seq, stream, *_ in rows if cause is not Cause.ORDERED else ():
        in_flight[stream] = in_flight.get(stream, frozenset()) | {seq}
    return in_flight


def numbers(seqs: Iterable[int]) -> str:
    """As json_each reads them: one statement for a group costs a third of one statement for each."""
    return f"[{','.join(map(str, seqs))}]"


# A forked child (ProcessPoolExecutor) would keep the claim of a parent that was killed.
_CLAIMED: Final[weakref.WeakSet[Store]] = weakref.WeakSet()


def _after_fork() -> None:
    last_words.forked()
    for store in list(_CLAIMED):
        store.forked()


os.register_at_fork(after_in_child=_after_fork)

_OPEN: Final[dict[str, Store]] = {}


def shared(path: Path, clock: Clock, *, create: bool = True) -> Store:
    """The store of this file in this process, opened if it is not yet; without ``create`` it must be one."""
    identity = _identity(path)
    store = _OPEN.get(identity)
    if store is None:
        store = _OPEN[identity] = Store(path, clock, create=create)
    store._users += 1  # noqa: SLF001 - the count belongs to the store, and only this function may raise it
    return store


def _identity(path: Path) -> str:
    return f"{os.getpid()}:{os.path.realpath(path)}"


def _connect(path: Path, *, create: bool, busy_seconds: float = PATIENT_SECONDS) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise InboxUnavailable(f"SQLite {sqlite3.sqlite_version} is too old for the feed: 3.38 or newer is needed")
    with _translated(path):
        # An existing file keeps its mode; a new one holds other people's messages.
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600))
        connection = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    try:
        with _translated(path):
            if not create:
                _refuse_foreign(path, connection)
            # Only an empty file can still choose this; in a user's older file free pages are merely reused.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
            # Both ends of a queue are few pages, however long it is.
            connection.execute(f"PRAGMA cache_size = -{WRITER_CACHE_KIB}")
            _migrate(path, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(path: Path, connection: sqlite3.Connection) -> bool:
    """Make it the writer's connection; whether SQLite syncs each commit itself, for want of a WAL."""
    with _translated(path):
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        syncs_itself = str(mode) != "wal"
        connection.execute(f"PRAGMA synchronous = {'FULL' if syncs_itself else 'NORMAL'}")
        for statement in _statements(files("everdeck.feed").joinpath("sql/at_once.sql").read_text("utf-8")):
            connection.execute(statement)
    return syncs_itself


def _write_anew(path: Path) -> None:
    """Move every commit from the write-ahead log to the database, by a connection of its own: it may be any thread."""
    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise InboxUnavailable(f"{path}: a sync failed, and somebody reads what has to be written anew")


def _reader(path: Path) -> sqlite3.Connection:
    with _translated(path):
        reader = sqlite3.connect(path, timeout=READ_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    # What it reads it reads once: pages kept by each reader are memory for nothing.
    reader.execute(f"PRAGMA cache_size = -{READER_CACHE_KIB}")
    return reader


def _refuse_foreign(path: Path, connection: sqlite3.Connection) -> None:
    if not _is_ours(connection):
        raise InboxUnavailable(f"{path} is not an inbox; it was left untouched")


def _is_ours(connection: sqlite3.Connection) -> bool:
    found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'everdeck_feed_version'").fetchone()
    return found is not None


def _migrate(path: Path, connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not _is_ours(connection):
            for statement in _statements(files("everdeck.feed").joinpath("sql/schema.sql").read_text("utf-8")):
                connection.execute(statement)
        (version,) = connection.execute(SQL["version"]).fetchone()
        if version > SCHEMA_VERSION:
            raise InboxUnavailable(f"{path} was written by a newer Everdeck (feed version {version}); left untouched")
        for newer in range(version + 1, SCHEMA_VERSION + 1):
            for statement in _statements(
                files("everdeck.feed").joinpath(f"sql/version_{newer}.sql").read_text("utf-8")
            ):
                connection.execute(statement)
        if not connection.execute(SQL["file_id"]).fetchone():
            connection.execute(SQL["file_id_set"], (secrets.randbits(60),))
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _statements(script: str) -> Iterator[str]:
    # executescript() would commit what is open; our own script has no semicolon inside a statement's text.
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line.partition("--")[0] + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.OperationalError, sqlite3.DatabaseError) as err:
        if _callers_fault(err):
            raise
        name = getattr(err, "sqlite_errorname", None) or type(err).__name__
        raise InboxUnavailable(f"{path}: {err} ({name}); nothing was stored") from err
    except OSError as err:
        if str(err.filename) != str(path):
            raise
        raise InboxUnavailable(f"{path}: {err.strerror} (errno {err.errno})") from err


def _callers_fault(err: sqlite3.Error) -> bool:
    """A wrong statement or a broken constraint in a handler's transaction is the handler's own error."""
    code = getattr(err, "sqlite_errorcode", None)
    environment = {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
    }
    return code is None or (code & 0xFF) not in environment


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "its command is hidden from us"
