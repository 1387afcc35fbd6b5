"""The registry: one SQLite file in WAL mode, written by the owner alone, read by anybody.

A commit survives the death of the process at any instruction (it is in the kernel's page cache). It survives a power
cut once :meth:`Registry.sync` has returned: ``synchronous = NORMAL`` leaves out the fsync of each commit, and one sync
of the write-ahead log makes all commits before it durable, which is what ``FULL`` would do for each of them. Who gives
an answer syncs first; any number of answers share one sync. Who syncs, in a thread of its own, also moves the log into
the database now and then (:meth:`Registry.checkpoint`): a commit that did so would wait for the disk in the loop.

A small file beside it keeps some room: a full disk must not keep us from noting that the worker that fills it was
stopped. :meth:`Registry.make_room` gives it up; it is made again when there is room.

Event ids are never used twice, though the last commits may be taken back by a power cut: they are given out of blocks
that were reserved, synced, in a file of their own beside the registry. The first owner after a boot begins a new block,
and so does one that finds the registry lost; the next owner of the same boot goes on without a gap.

Statements live in ``queries.sql``, the schema is the sum of ``migrations/*.sql`` and its version is SQLite's
``user_version``. A file of a newer version is refused and left untouched. A file that is not a sound database is
set aside under a name that tells so, and the deck begins a new one.
"""

import contextlib
import errno
import logging
import os
import sqlite3
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

import msgspec

from everdeck import disk
from everdeck.errors import RegistryError, RegistryTooNew, RegistryUnavailable, SpecError
from everdeck.model import Cookie, Event, EventKind, Exit, Identity, Restart, State, WorkerName, WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Desired: TypeAlias = Literal["running", "stopped"]

Telling: TypeAlias = tuple[str | None, EventKind, dict[str, Any]]
"""An event that is yet to be noted: whose, of which kind, and its detail."""

_log: Final = logging.getLogger("everdeck.registry")

EVENTS_KEPT: Final = 100_000
ASKED_EVENTS_KEPT: Final = 20_000
"""Of those that tell what somebody asked for, also where they are older than the others that are kept."""
MOST_BYTES: Final = 128_000_000
_PRUNE_EVERY: Final = 1_000
_IDS_IN_A_BLOCK: Final = 10_000
_CHECKPOINT_EVERY: Final = 1_000  # writes; a write is about a page
_LONGEST_LOG_PAGES: Final = 4_000  # 16 MB: a commit does it by itself if nobody else did
_IDS_SUFFIX: Final = "-ids"
_RESERVE_SUFFIX: Final = "-reserve"
_RESERVE_BYTES: Final = 1 << 18  # some dozens of commits
_ROOM_FOR_RESERVE: Final = 16 * _RESERVE_BYTES  # on a disk with less free than this, others need it more
_BUSY_SECONDS: Final = 5.0
# Another program's write holds up the owner's loop, and with it everybody's supervision, for at most so long; and once
# it took that long, for no time at all until it is over.
_OWNER_BUSY_SECONDS: Final = 0.2
_WRITE_ANEW_BUSY_SECONDS: Final = 0.5

_decode_spec: Final = msgspec.json.Decoder(WorkerSpec).decode
_decode_command: Final = msgspec.json.Decoder(tuple[str, ...]).decode
_decode_exit: Final = msgspec.json.Decoder(Exit).decode
_decode_times: Final = msgspec.json.Decoder(tuple[float, ...]).decode
_decode_detail: Final = msgspec.json.Decoder(dict[str, Any]).decode
_encode: Final = msgspec.json.Encoder().encode


class WorkerRecord(msgspec.Struct, frozen=True):
    """One worker as noted down. Change it with :func:`msgspec.structs.replace` and save it."""

    name: WorkerName
    spec_json: bytes
    desired: Desired
    phase: State
    cookie: Cookie
    identity: Identity | None = None
    cgroup: str | None = None
    proxy_lock: bool = False
    started_at: float | None = None
    port: int | None = None
    exit: Exit | None = None
    restarts: int = 0
    crashes: int = 0
    streak: int = 0
    crash_times: tuple[float, ...] = ()
    backoff_until: float | None = None
    timers_boot_id: str | None = None
    adopted: bool = False
    ready: bool = False
    unready: int = 0
    reason: str | None = None
    status_text: str | None = None
    damage: str | None = None  # why the row itself could not be read; never stored

    @property
    def spec(self) -> WorkerSpec:
        """What to run, decoded; kept encoded because thousands of workers wait for years between two looks.

        Of a spec that cannot be read (see :attr:`broken`), what can be: enough to stop the worker and to show it.
        """
        return _decoded_spec(self.spec_json)[0]

    @property
    def broken(self) -> str | None:
        """Why this worker cannot be started from its record; None for a sound one."""
        return self.damage or _decoded_spec(self.spec_json)[1]


def _decoded_spec(spec_json: bytes) -> tuple[WorkerSpec, str | None]:
    # Decoding validates again (33-50 µs); one start or stop asks several times. Bounded, so memory stays flat.
    known = _decoded.get(spec_json)
    if known is not None:
        return known
    spec = _like_the_last(spec_json)
    if spec is not None:
        return _remembered(spec_json, (spec, None))
    try:
        spec = _decode_spec(spec_json)
    except (msgspec.MsgspecError, SpecError, ValueError) as err:
        return _remembered(spec_json, (_salvaged_spec(spec_json), str(err)))
    _keep_likeness(spec_json, spec)
    return _remembered(spec_json, (spec, None))


def _like_the_last(spec_json: bytes) -> WorkerSpec | None:
    """The spec, if all that follows its command is as in the one that was decoded last; only the command is read."""
    rest, last = _decoded_last
    if last is None or not spec_json.startswith(_BEFORE_COMMAND) or not spec_json.endswith(rest):
        return None
    try:
        command = _decode_command(spec_json[len(_BEFORE_COMMAND) : -len(rest)])
        return _of_its_own(last, command)
    except (msgspec.MsgspecError, SpecError, ValueError):  # more than a command, or none that may be: read it whole
        return None


def _keep_likeness(spec_json: bytes, spec: WorkerSpec) -> None:
    global _decoded_last  # noqa: PLW0603 - a memory of one
    head = _BEFORE_COMMAND + _encode(spec.command)
    if spec.satellite is None and spec_json.startswith(head):  # what a satellite has may lie deeper than one mapping
        _decoded_last = spec_json[len(head) :], _of_its_own(spec, spec.command)


def _of_its_own(spec: WorkerSpec, command: tuple[str, ...]) -> WorkerSpec:
    """The same for another command; whoever has one of the two can change its mappings."""
    other = spec.with_command(command)
    for field in _MAPPINGS:
        msgspec.structs.force_setattr(other, field, dict(getattr(spec, field)))
    return other


def _remembered(spec_json: bytes, told: tuple[WorkerSpec, str | None]) -> tuple[WorkerSpec, str | None]:
    if len(_decoded) >= _MOST_DECODED:
        for oldest in tuple(islice(_decoded, _MOST_DECODED // 2)):  # those of the group that is being started stay
            del _decoded[oldest]
    _decoded[spec_json] = told
    return told


_MOST_DECODED: Final = 256
_decoded: Final[dict[bytes, tuple[WorkerSpec, str | None]]] = {}


def _salvaged_spec(spec_json: bytes) -> WorkerSpec:
    """Each field that can still be read, the others as if not given; it is never run."""
    try:
        given = msgspec.json.decode(spec_json)
    except (msgspec.MsgspecError, ValueError):
        given = {}
    fields = {}
    for field in msgspec.structs.fields(WorkerSpec):
        if isinstance(given, dict) and field.name in given:
            with contextlib.suppress(msgspec.MsgspecError, SpecError, ValueError):
                fields[field.name] = msgspec.convert(given[field.name], field.type)
    try:
        return WorkerSpec(**{"command": _UNREADABLE, **fields, "restart": Restart("never")})
    except (msgspec.MsgspecError, SpecError, ValueError):
        return WorkerSpec(_UNREADABLE, restart=Restart("never"))


_UNREADABLE: Final = ("(unreadable)",)


_BEFORE_COMMAND: Final = b'{"command":'
_MAPPINGS: Final = ("env", "secrets", "labels")
_decoded_last: tuple[bytes, WorkerSpec | None] = (b"", None)
"""What followed its command, and the spec, which is nobody else's."""

_FIELDS: Final = WorkerSpec.__struct_fields__[1:]  # all but the command, which is always said
_USUAL: Final = msgspec.structs.astuple(WorkerSpec(_UNREADABLE))[1:]
_SATELLITE: Final = _FIELDS.index("satellite")
_said: tuple[tuple[Any, ...], bytes] = (_USUAL, b"{}")


def encoded_spec(spec: WorkerSpec) -> bytes:
    """The spec as it is stored: without the values of its secrets, and without what is as usual.

    Of 0.8 kilobytes 0.2 are left, in the owner's memory, in the note, and in a row, which with all of it needs a page
    of its own (sqlite.org/fileformat2.html, "Cell Payload Overflow Pages"). So a default is part of what is stored:
    whoever changes one writes the old one out, in a migration.
    """
    stored = spec.without_secret_values()
    command, *others = msgspec.structs.astuple(stored)
    spec_json = _BEFORE_COMMAND + _encode(command) + _encoded_others(tuple(others))
    _remembered(spec_json, (stored, None))  # whoever records it asks for it again at once
    return spec_json


def _encoded_others(values: tuple[Any, ...]) -> bytes:
    """All but the command, which goes before it. A thousand specs of one deck differ by their commands alone."""
    global _said  # noqa: PLW0603 - a memory of one
    if _said[0] != values:
        fields = zip(_FIELDS, values, _USUAL, strict=True)
        said = _encode({field: value for field, value, usual in fields if value != usual})
        if values[_SATELLITE] is None:
            # Dictionaries are copied: whoever has the spec can change them. What a satellite has may lie deeper.
            _said = tuple([dict(value) if type(value) is dict else value for value in values]), said
    else:
        said = _said[1]
    return b"}" if said == b"{}" else b"," + said[1:]


class Registry:
    """The open registry. Not for several threads at once."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.set_aside: Path | None = None
        self.is_new = False
        self.connection = connection
        self.in_transaction = False
        self.writes = 0
        """How often something was written: what a sync covers is known by comparing with the number before it."""
        self.on_write: Callable[[], None] | None = None
        self._since_pruning = 0
        self._checkpointed = 0
        self._ids_reserved = 0
        self._wal_fd = -1
        self._doubtful = False  # was a sync refused, so that what it covered may not be on the disk?
        self._waits = True

    @classmethod
    def open(cls, path: Path, boot_id: str = "") -> Self:
        """Open or make the registry, bring its schema up to date, set a corrupt file aside.

        ``boot_id`` names this boot of the machine: in another one the last events may be lost, and their ids are not
        given anew.
        """
        _make_room_if_full(path)
        try:
            registry = cls._open(path)
        except _Corrupt as err:
            aside = _set_aside(path)
            registry = cls._open(path)
            registry.set_aside = aside
            registry.corruption = str(err)
        try:
            with _translated(path):
                registry.begin(boot_id)
                registry.wait_for_others(waits=True)
        except BaseException:
            registry.close()
            raise
        return registry

    corruption: str | None = None

    @classmethod
    def _open(cls, path: Path) -> Self:
        with _translated(path):
            _make_private(path)
            connection = _connect(path)
        try:
            with _translated(path):
                _refuse_newer(connection, path)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute(f"PRAGMA wal_autocheckpoint = {_LONGEST_LOG_PAGES}")
                # A quarter of a megabyte holds the tables' upper pages; the default of two is memory per deck for
                # rows that are read once, at open.
                connection.execute("PRAGMA cache_size = -256")
                _migrate(connection, path)
                _check(connection)
        except BaseException:
            connection.close()
            raise
        return cls(path, connection)

    def begin(self, boot_id: str) -> None:
        """Go on with the event ids where nobody can have seen one, and hold the log of commits for syncing."""
        reserved = _ids_reserved(self.path)
        last = self.last_event_id()
        self.is_new = last == 0 and self.meta("deck_id") is None
        if self.meta("boot_id") != boot_id and reserved > last:
            self.connection.execute(_sql("go_on_after_event"), {"id": reserved})
        self._ids_reserved = reserved
        self.set_meta("boot_id", boot_id)
        self._wal_fd = os.open(f"{self.path}-wal", os.O_RDWR | os.O_CLOEXEC)

    def keep_reserve(self) -> bool:
        """Set some room aside for when the disk is full; whether there is one now."""
        path = f"{self.path}{_RESERVE_SUFFIX}"
        try:
            room = os.statvfs(self.path.parent)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if os.fstat(fd).st_size >= _RESERVE_BYTES:
                    return True
                if room.f_bavail * room.f_frsize < _ROOM_FOR_RESERVE:
                    return False
                os.posix_fallocate(fd, 0, _RESERVE_BYTES)
            finally:
                os.close(fd)
        except OSError:  # no room, no quota, read-only: it is tried again
            return False
        return True

    def make_room(self) -> bool:
        """Give up the reserve, because the disk is full; whether there was one."""
        path = f"{self.path}{_RESERVE_SUFFIX}"
        try:
            had = os.stat(path).st_size > 0  # noqa: PTH116 - beside the other raw calls
            os.truncate(path, 0)
        except OSError:
            return False
        return had

    def close(self) -> None:
        """Let go of the file."""
        if self._wal_fd >= 0:
            os.close(self._wal_fd)
            self._wal_fd = -1
        self.connection.close()

    def _wrote(self) -> None:
        self.writes += 1
        if self.on_write is not None:
            self.on_write()

    def sync(self) -> None:
        """Wait until the disk has every commit that was made before; may be called from another thread.

        A checkpoint syncs what it moves by itself, so the write-ahead log is all there is to wait for. Once that was
        refused, another sync of it proves nothing: the kernel tells of pages that it could not write once, and takes
        them for written from then on (fsync(2); "PostgreSQL's fsync() surprise", LWN, 2018). They are still in memory,
        so everything is moved to the database first, which writes it anew.
        """
        with _translated(self.path):
            if self._doubtful:
                self._write_anew()
                self._doubtful = False
            try:
                disk.sync(self._wal_fd)
            except OSError:
                self._doubtful = True
                raise

    def _write_anew(self) -> None:
        """Move every commit from the write-ahead log to the database, and begin the log anew.

        By a connection of its own, because this is not the owner's thread: who writes meanwhile is refused.
        """
        connection = _connect(self.path, "rw", _WRITE_ANEW_BUSY_SECONDS)
        try:
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            connection.close()
        if busy:
            raise RegistryUnavailable(f"{self.path}: a sync failed, and somebody reads what has to be written anew")

    def is_checkpoint_due(self) -> bool:
        """Is the write-ahead log long enough?"""
        return self.writes - self._checkpointed >= _CHECKPOINT_EVERY

    def checkpoint(self) -> None:
        """Move what is in the write-ahead log into the database; may be called from another thread.

        By a connection of its own, and as far as it can without making a writer wait (``PASSIVE``). What is left is
        moved the next time.
        """
        self._checkpointed = self.writes
        with _translated(self.path), contextlib.closing(_connect(self.path, "rw")) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def wait_for_others(self, *, waits: bool) -> None:
        """Whether a write waits a moment for another program that is writing; if not, it is refused at once."""
        self._waits = waits
        self.connection.execute(f"PRAGMA busy_timeout = {_OWNER_BUSY_SECONDS * 1000 if waits else 0:.0f}")

    def write(self, statement: str, bindings: "Sequence[Any] | Mapping[str, Any]" = ()) -> sqlite3.Cursor:
        """Carry out one statement that writes."""
        try:
            cursor = self.connection.execute(statement, bindings)
        except sqlite3.OperationalError as err:
            if _is_busy(err) and self._waits:
                self.wait_for_others(waits=False)
            raise
        if not self._waits:
            self.wait_for_others(waits=True)
        return cursor

    def transaction(self) -> "_Transaction":
        """All that is written inside is there together, or not at all; inside another one, a part of it."""
        return _Transaction(self)

    def meta(self, key: str) -> str | None:
        """One fact about the deck itself."""
        with _translated(self.path):
            row = self.connection.execute(_sql("get_meta"), {"key": key}).fetchone()
        return None if row is None else row[0]

    def set_meta(self, key: str, value: str) -> None:
        """Note one fact about the deck itself."""
        self._wrote()
        with _translated(self.path):
            self.write(_sql("set_meta"), {"key": key, "value": value})

    def records(self) -> list[WorkerRecord]:
        """Every worker that is noted down."""
        with _translated(self.path):
            return [_record_or_damage(row) for row in self.connection.execute(_sql("all_workers"))]

    def save(self, record: WorkerRecord) -> None:
        """Note a worker down as it is in ``record``."""
        self._wrote()
        with _translated(self.path):
            self.write(_sql("save_worker"), _row(record))

    def save_all(self, records: "Iterable[WorkerRecord]") -> None:
        """The same for many, in the transaction that is open now."""
        self._wrote()
        with _translated(self.path):
            self.connection.executemany(_sql("save_worker"), map(_row, records))

    def save_started(self, records: "Sequence[WorkerRecord]") -> None:
        """Note that these run, in the transaction that is open now; their intents are noted already."""
        self._wrote()
        with _translated(self.path):
            noted = self.connection.executemany(_sql("save_started"), map(_started_row, records)).rowcount
        if noted != len(records):  # somebody else wrote into our registry: nothing of them may be missing
            self.save_all(records)

    def delete(self, name: WorkerName) -> None:
        """Forget a worker; its events stay."""
        self._wrote()
        with _translated(self.path):
            self.write(_sql("delete_worker"), {"name": name})

    def append_event(self, at: float, worker: str | None, kind: EventKind, detail: dict[str, Any]) -> Event:
        """Note down what happened; the id is the next one. Old events are forgotten beyond the number we keep."""
        self._wrote()
        with _translated(self.path):
            event_id = self.write(_sql("append_event"), _event_row(at, (worker, kind, detail))).lastrowid or 0
            self._appended(at, event_id, 1)
        return Event(event_id, datetime.fromtimestamp(at, UTC), worker, kind, detail)

    def append_events(self, at: float, told: "Sequence[Telling]") -> range:
        """The same for many, in the transaction that is open now: their ids, which follow each other."""
        if not told:
            return range(0)
        self._wrote()
        with _translated(self.path):
            if len(told) == 1:
                last = self.connection.execute(_sql("append_event"), _event_row(at, told[0])).lastrowid or 0
            else:
                self.connection.executemany(_sql("append_event"), [_event_row(at, one) for one in told])
                last = int(self.connection.execute(_sql("id_of_event_appended")).fetchone()[0])
            self._appended(at, last, len(told))
        return range(last - len(told) + 1, last + 1)

    def _appended(self, at: float, last: int, count: int) -> None:
        if last > self._ids_reserved:  # in the open transaction, so before anybody can read the id
            self._reserve_ids(last + _IDS_IN_A_BLOCK)
        self._since_pruning += count
        if self._since_pruning >= _PRUNE_EVERY:
            self._since_pruning = 0
            self.connection.execute(_sql("forget_events_up_to"), {"id": last - EVENTS_KEPT})
            self.connection.execute(_sql("forget_asked_events"), {"id": last - EVENTS_KEPT, "kept": ASKED_EVENTS_KEPT})
            self._keep_within_bytes(at)

    def _keep_within_bytes(self, at: float) -> None:
        """Workers' own events must not fill the disk, nor push out what happened to others: theirs go first."""
        pages, size, free = (
            self.connection.execute(f"PRAGMA {word}").fetchone()[0]
            for word in ("page_count", "page_size", "freelist_count")
        )
        if (pages - free) * size > MOST_BYTES:
            dropped = self.connection.execute(_sql("forget_oldest_feed_events")).rowcount
            _log.warning(
                "the registry is larger than %d bytes: the oldest %d feed events were dropped", MOST_BYTES, dropped
            )
            if dropped > 1:  # else there is nothing but the last word about it
                told = {"what": "oldest-events-dropped", "count": dropped, "most_bytes": MOST_BYTES}
                self.append_event(at, None, EventKind.FEED, told)

    def _reserve_ids(self, up_to: int) -> None:
        disk.replace_file(_ids_path(self.path), f"{up_to}\n".encode())
        self._ids_reserved = up_to

    def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> list[Event]:
        """What happened after an id, oldest first."""
        name = "events_after" if worker is None else "events_of_worker_after"
        bindings = {"after": after, "limit": -1 if limit is None else limit, "worker": worker}
        if worker is None:
            del bindings["worker"]
        with _translated(self.path):
            return [_event(row) for row in self.connection.execute(_sql(name), bindings)]

    def last_event_id(self) -> int:
        """The id of the newest event, 0 if nothing ever happened."""
        with _translated(self.path):
            return int(self.connection.execute(_sql("last_event_id")).fetchone()[0])

    # --- requests -----------------------------------------------------------------------------------------------

    def note_request(self, request: str, worker: str, event_id: int | None, at: float) -> None:
        """A request was begun (None) or done for this worker, in the transaction that tells of it."""
        with _translated(self.path):
            self.connection.execute(_sql("note_request"), (request, worker, event_id, at))

    def requests_done(self, request: str) -> frozenset[str]:
        """The workers for which this request was carried out."""
        with _translated(self.path):
            return frozenset(row[0] for row in self.connection.execute(_sql("requests_done"), {"id": request}))

    def requests_begun(self) -> dict[str, str]:
        """Workers with the request that was begun for them and not finished."""
        with _translated(self.path):
            return dict(self.connection.execute(_sql("requests_begun")).fetchall())

    def forget_requests_begun(self) -> None:
        """What was begun is settled: its worker was recovered."""
        with _translated(self.path):
            self.connection.execute(_sql("forget_requests_begun"))

    def forget_requests(self, before: float) -> None:
        """Nobody asks again for what is as old as that."""
        with _translated(self.path):
            self.connection.execute(_sql("forget_requests"), {"before": before})


def _make_room_if_full(path: Path) -> None:
    """Whoever opens the deck has to write; on a full disk the reserve is for that, or nobody could take it over."""
    with contextlib.suppress(OSError):  # there is no reserve: what is refused will say why
        room = os.statvfs(path.parent)
        if room.f_bavail * room.f_frsize < _RESERVE_BYTES:
            os.truncate(f"{path}{_RESERVE_SUFFIX}", 0)


def read_only(path: Path) -> Registry:
    """The registry as somebody reads it who does not own the deck; writes nothing, refuses a newer schema."""
    if not path.exists():
        raise RegistryError(f"{path}: there is no registry here")
    with _translated(path):
        connection = _connect(path, "ro")
    try:
        with _translated(path):
            _refuse_newer(connection, path)
    except _Corrupt as err:
        connection.close()
        raise RegistryError(f"{path}: {err}; the next owner sets it aside and finds its workers again") from err
    except BaseException:
        connection.close()
        raise
    return Registry(path, connection)


def check_writable(path: Path) -> None:
    """Write to a registry that somebody else owns, really, and change nothing; raises why it cannot be done."""
    with _translated(path):
        connection = _connect(path, "rw")
        try:
            _refuse_newer(connection, path)
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_sql("set_meta"), {"key": "write_checked", "value": os.urandom(8).hex()})
            connection.execute("COMMIT")
        finally:
            connection.close()


def _ids_path(path: Path) -> Path:
    return path.with_name(path.name + _IDS_SUFFIX)


def _ids_reserved(path: Path) -> int:
    """Up to where ids may have been given out; 0 in a deck that has given none."""
    try:
        return int(_ids_path(path).read_bytes())
    except (FileNotFoundError, ValueError):
        return 0


class _Corrupt(RegistryError):
    """The file is not a sound database."""


def _connect(path: Path, mode: str = "rwc", busy_seconds: float = _BUSY_SECONDS) -> sqlite3.Connection:
    # As a URI: '?' and '#' in a path are quoted by as_uri.
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=busy_seconds,
        check_same_thread=False,
        cached_statements=64,
    )


def _make_private(path: Path) -> None:
    """0600 before SQLite opens it: the journal beside it gets the mode that the file has at that moment."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    os.close(os.open(path, flags | os.O_CREAT, 0o600))
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(f"{path}{suffix}", flags)
            try:
                os.fchmod(fd, 0o600)
            finally:
                os.close(fd)


def _refuse_newer(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    newest = len(_migrations())
    if version > newest:
        raise RegistryTooNew(
            f"{path}: written by a newer Everdeck (schema {version}, this one knows {newest}); "
            f"it was left untouched: run the newer Everdeck"
        )


def _check(connection: sqlite3.Connection) -> None:
    problem = connection.execute("PRAGMA quick_check('workers')").fetchone()[0]
    if problem != "ok":
        raise _Corrupt(problem)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    scripts = _migrations()
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == len(scripts):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        for number, script in enumerate(scripts[version:], start=version + 1):
            for statement in _statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
        connection.execute("COMMIT")
    except sqlite3.OperationalError as err:
        connection.execute("ROLLBACK")
        if "already exists" in str(err):
            raise _Corrupt(f"tables without a version in {path.name}") from err
        raise


def _statements(script: str) -> list[str]:
    statements, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements


@cache
def _migrations() -> tuple[str, ...]:
    scripts = sorted(Path(__file__).with_name("migrations").glob("*.sql"))
    return tuple(script.read_text(encoding="utf-8") for script in scripts)


@cache
def _sql(name: str) -> str:
    return _queries()[name]


@cache
def _queries() -> dict[str, str]:
    # Not importlib.resources: it loads what makes temporary files, and with it half a megabyte.
    text = Path(__file__).with_name("queries.sql").read_text(encoding="utf-8")
    queries: dict[str, str] = {}
    for part in text.split("-- name: ")[1:]:
        name, _, body = part.partition("\n")
        queries[name.strip()] = body.strip().rstrip(";")
    return queries


def _record_or_damage(row: tuple[Any, ...]) -> WorkerRecord:
    """One row; one that cannot be read keeps nobody else from being recovered."""
    try:
        return _record(row)
    except (msgspec.MsgspecError, TypeError, ValueError) as err:
        return _salvaged_record(row, str(err))


def _salvaged_record(row: tuple[Any, ...], damage: str) -> WorkerRecord:
    """Who it is and what was wanted, as far as it can be read: the kernel is asked about the rest."""
    name, spec, desired, phase, cookie, boot_id, pid, start_ticks, pidfd_inode, cgroup = row[:10]
    known = isinstance(boot_id, str) and isinstance(pid, int) and isinstance(start_ticks, int)
    return WorkerRecord(
        name=WorkerName(str(name)),
        spec_json=spec if isinstance(spec, bytes) else str(spec).encode(),
        desired="stopped" if desired == "stopped" else "running",
        phase=State(phase) if phase in State.__members__.values() else State.RUNNING,
        cookie=Cookie(str(cookie)),
        identity=Identity(boot_id, pid, start_ticks, pidfd_inode if isinstance(pidfd_inode, int) else None)
        if known
        else None,
        cgroup=cgroup if isinstance(cgroup, str) else None,
        damage=damage,
    )


def _record(row: tuple[Any, ...]) -> WorkerRecord:
    (
        name,
        spec,
        desired,
        phase,
        cookie,
        boot_id,
        pid,
        start_ticks,
        pidfd_inode,
        cgroup,
        proxy,
        started_at,
        port,
        end,
    ) = row[:14]
    (restarts, crashes, streak, crash_times, backoff_until, timers_boot_id, adopted, ready) = row[14:22]
    (unready, reason, status_text) = row[22:]
    known = boot_id is not None and pid is not None and start_ticks is not None
    return WorkerRecord(
        name=WorkerName(name),
        spec_json=spec,
        desired=desired,
        phase=State(phase),
        cookie=Cookie(cookie),
        identity=Identity(boot_id, pid, start_ticks, pidfd_inode) if known else None,
        cgroup=cgroup,
        proxy_lock=bool(proxy),
        started_at=started_at,
        port=port,
        exit=None if end is None else _decode_exit(end),
        restarts=restarts,
        crashes=crashes,
        streak=streak,
        crash_times=_decode_times(crash_times) if crash_times != "[]" else (),
        backoff_until=backoff_until,
        timers_boot_id=timers_boot_id,
        adopted=bool(adopted),
        ready=bool(ready),
        unready=unready,
        reason=reason,
        status_text=status_text,
    )


_NO_TIMES: Final = b"[]"


def _row(record: WorkerRecord) -> tuple[Any, ...]:
    """A worker in the order of the columns of ``save_worker``."""
    identity = record.identity
    return (
        record.name,
        record.spec_json,
        record.desired,
        record.phase.value,
        record.cookie,
        identity.boot_id if identity else None,
        identity.pid if identity else None,
        identity.start_ticks if identity else None,
        identity.pidfd_inode if identity else None,
        record.cgroup,
        record.proxy_lock,
        record.started_at,
        record.port,
        None if record.exit is None else _encode(record.exit),
        record.restarts,
        record.crashes,
        record.streak,
        _encode(record.crash_times) if record.crash_times else _NO_TIMES,
        record.backoff_until,
        record.timers_boot_id,
        record.adopted,
        record.ready,
        record.unready,
        record.reason,
        record.status_text,
    )


def _started_row(record: WorkerRecord) -> tuple[Any, ...]:
    """What a start changes, in the order of ``save_started``."""
    identity = record.identity
    assert identity is not None  # noqa: S101 - it runs
    return (
        record.phase.value,
        identity.boot_id,
        identity.pid,
        identity.start_ticks,
        identity.pidfd_inode,
        record.cgroup,
        record.started_at,
        record.name,
    )


def _event_row(at: float, told: Telling) -> tuple[Any, ...]:
    worker, kind, detail = told
    # "asked" is who asked; a text there is a reason of our own.
    return at, worker, kind.value, _encode(detail), isinstance(detail.get("by"), dict)


def _event(row: tuple[Any, ...]) -> Event:
    event_id, at, worker, kind, detail = row
    return Event(event_id, datetime.fromtimestamp(at, UTC), worker, EventKind(kind), _decode_detail(detail))


def _set_aside(path: Path) -> Path:
    """Rename a file that is not a sound database, with its journal, to the first free name that tells so."""
    for number in range(1, 10_000):
        aside = path.with_name(f"{path.name}.corrupt-{number}")
        if not aside.exists():
            break
    else:
        raise RegistryError(f"{path}: not a sound database, and there are too many files beside it to set it aside")
    os.replace(path, aside)  # noqa: PTH105 - beside the other raw calls
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")  # noqa: PTH105
    return aside


class _Transaction:
    """Written out as a class: a generator's context costs twice as much, and every start passes here."""

    __slots__ = ("_outermost", "_registry")

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._outermost = False

    def __enter__(self) -> None:
        registry = self._registry
        if registry.in_transaction:
            return
        with _translated(registry.path):
            registry.write("BEGIN IMMEDIATE")
        registry.in_transaction = self._outermost = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._outermost:
            return
        registry = self._registry
        registry.in_transaction = False
        if error is not None:
            self._roll_back()
            return
        try:
            with _translated(registry.path):
                registry.connection.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._registry.connection.execute("ROLLBACK")


class _translated:  # noqa: N801 - reads as what it does, in a with statement
    """SQLite's errors, translated once."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, sqlite3.DatabaseError):
            raise _registry_error(error, self._path) from error
        if isinstance(error, OSError):
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}:
                raise RegistryUnavailable(f"{self._path}: {error.strerror}") from error
            raise RegistryError(f"{self._path}: {error.strerror}") from error


def _is_busy(err: sqlite3.DatabaseError) -> bool:
    return getattr(err, "sqlite_errorcode", 0) & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def _registry_error(err: sqlite3.DatabaseError, path: Path) -> RegistryError:
    code = getattr(err, "sqlite_errorcode", None)
    match None if code is None else code & 0xFF:
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return _Corrupt(str(err))
        case sqlite3.SQLITE_FULL:
            return RegistryUnavailable(f"{path}: the disk is full ({err}); free some space and try again")
        case sqlite3.SQLITE_READONLY:
            return RegistryUnavailable(f"{path}: read-only ({err}); make the state directory writable")
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return RegistryUnavailable(f"{path}: locked by another program ({err}); try again")
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return RegistryUnavailable(f"{path}: {err}; check space, permissions and the disk")
        case _:
            return RegistryError(f"{path}: {err}")
