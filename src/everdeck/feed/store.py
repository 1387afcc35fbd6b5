"""The feed's file: one SQLite database, one writer at a time, two strengths of commit.

Everything the feed must remember is in this file, and this is the only module of the feed that opens it.

SQLite in WAL mode has one writer. Within a process the writers queue up on an asyncio lock, because a handler's
transaction stays open while the handler awaits, and a second connection that waits for it inside SQLite would
block the very loop it waits for. Between processes SQLite's own lock decides; other processes (the dead-letter
commands) write for milliseconds.

A *durable* commit is synced before it returns: it is used where upstream will forget something because of it (a
batch) or where something leaves the house because of it (a reply). Every other commit survives the death of the
process but may be undone by a power cut, which can only lead to work being done again, never to work being lost:
the rows themselves were synced when they arrived. See sqlite.org/pragma.html#pragma_synchronous.
"""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from everdeck.errors import EverdeckError, FeedError, InboxUnavailable, PollerConflict
from everdeck.feed.bell import Bell
from everdeck.kernel import flock

Clock = Callable[[], float]
SCHEMA_VERSION: Final = 1
OLDEST_SQLITE: Final = (3, 37, 0)  # STRICT tables; RETURNING came with 3.35
BUSY_SECONDS: Final = 10.0
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
        self._connection = _connect(path, create=create)
        self._last_seq: int = self.read("last_seq")[0][0]

    # --- who may use it ---

    def claim(self) -> None:
        """Be the one process that works from this file; the kernel drops the claim however we die."""
        if self._lock_fd is not None:
            return
        lock = self._lock_path
        try:
            self._lock_fd = flock.take(lock)
        except EverdeckError as err:
            raise InboxUnavailable(f"{lock}: {err}") from err
        if self._lock_fd is None:
            holders = flock.holders(lock)
            who = f"pid {holders[0]} ({_command_of(holders[0])})" if holders else "another process"
            raise PollerConflict(f"{self.path} is being worked from by {who}; one process per inbox file")

    def close(self) -> None:
        """Let go of the file once its last user in this process has."""
        self._users -= 1
        if self._users > 0:
            return
        _OPEN.pop(_identity(self.path), None)
        self._connection.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    # --- reading ---

    def read(self, query: str, *parameters: Any) -> list[Any]:
        """The rows of a named query, as they are committed (or as the open transaction sees them)."""
        with _translated(self.path):
            return self._connection.execute(SQL[query], parameters).fetchall()

    def each(self, query: str, *parameters: Any) -> Iterator[Any]:
        """The rows of a named query, one by one."""
        with _translated(self.path):
            yield from self._connection.execute(SQL[query], parameters)

    # --- writing ---

    def next_seqs(self, count: int) -> range:
        """Numbers for rows to come, growing over the life of the file. Only inside a transaction."""
        first = self._last_seq + 1
        self._last_seq += count
        return range(first, first + count)

    @asynccontextmanager
    async def transaction(self, *, durable: bool = False) -> AsyncIterator[sqlite3.Connection]:
        """All or nothing of what the body writes, after everybody who came earlier."""
        self.refuse_inside()
        async with self._turn:
            self._writer = asyncio.current_task()
            try:
                with _translated(self.path):
                    # A change of the mode is refused inside a transaction, so it comes first.
                    self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                    self._connection.execute("BEGIN IMMEDIATE")
                try:
                    with _translated(self.path):
                        yield self._connection
                        self._still_open()
                        self._connection.execute("COMMIT")
                except BaseException:
                    # SQLite rolls back by itself on some errors (a full disk), and says so here.
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            finally:
                self._writer = None

    def _still_open(self) -> None:
        if not self._connection.in_transaction:
            raise FeedError("the handler ended its transaction itself (COMMIT or ROLLBACK)")

    async def give_back_pages(self) -> None:
        """Return some free pages to the file system, a little at a time, when there are many."""
        async with self._turn:
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
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        return int(version)


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


def _connect(path: Path, *, create: bool) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise InboxUnavailable(f"SQLite {sqlite3.sqlite_version} is too old for the feed: 3.37 or newer is needed")
    with _translated(path):
        # An existing file keeps its mode; a new one holds other people's messages.
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600))
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        with _translated(path):
            if not create:
                _refuse_foreign(path, connection)
            # Only an empty file can still choose this; in a user's older file free pages are merely reused.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
            _migrate(path, connection)
    except BaseException:
        connection.close()
        raise
    return connection


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
