"""A worker's log files: opened for it, marked, and rotated under it without losing a byte.

The worker appends to ``log/current`` itself (``O_APPEND``), so no process of ours carries its output: our death
neither loses a byte nor breaks its pipe. Rotation therefore works on a file that somebody else keeps writing to.
It copies the front of the file into an archive, up to a block boundary, and then takes the front away:

* ``FALLOC_FL_COLLAPSE_RANGE`` (ext4, xfs) removes the blocks and moves the rest down. An append goes to
  whatever the end of the file is, decided under the inode's lock, so the writer notices nothing.
* Elsewhere (tmpfs, btrfs) the front is punched out: the space is free, the file keeps its length, readers skip.
* Where neither exists the file is emptied after a last look, which puts latecomers into the same archive. What is
  written in the microseconds between that look and the truncation is lost; the caller is told which method was used
  so that it can say so.

The promise: archives in order, followed by what is in ``current`` from ``head`` on, are byte for byte what was written.
It holds after SIGKILL at any instruction; :mod:`everdeck.logs.ledger` says why. Every step that a crash may
separate from the next has a ``crash_point``.

Only the deck's owner rotates; an flock on the directory keeps a second rotator out all the same.
See fallocate(2), copy_file_range(2).
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from everdeck import disk
from everdeck.crashpoints import crash_point
from everdeck.logs import ledger as logledger
from everdeck.logs.ledger import BUSY, CURRENT, INDEX, PART, STDERR, Ledger
from everdeck.logs.reader import tail
from everdeck.model import Log

__all__ = [
    "MARK",
    "Method",
    "Rotation",
    "compressing",
    "mark",
    "note",
    "open_for_worker",
    "recover",
    "rotate_if_due",
    "tail",
    "waiting_bytes",
]

MARK: Final = "--- everdeck "
"""How a line of ours in a worker's log begins."""

_COLLAPSE_RANGE: Final = 0x08
_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_COPY_BYTES: Final = 1 << 22
_MEMBER_BYTES: Final = 1 << 20
_GZIP_LEVEL: Final = 4
_INDEX_TRIM_BYTES: Final = 1 << 16
_INDEX_ENTRY: Final = struct.Struct(">dQ")

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Method(StrEnum):
    """How the front of a file is taken away, best first."""

    COLLAPSE = "collapse"
    PUNCH = "punch"
    TRUNCATE = "truncate"


@dataclass(frozen=True, slots=True)
class Rotation:
    """What one rotation did. ``skipped_bytes`` got no archive, because ``keep`` would have pruned it at once."""

    archives: tuple[str, ...]
    archived_bytes: int
    skipped_bytes: int
    pruned: tuple[str, ...]
    method: Method


def open_for_worker(log_dir: Path | str, *, split_stderr: bool) -> tuple[int, int]:
    """The worker's stdout and stderr (one and the same unless split), appending; the directory is made if missing."""
    out = _open_appending(log_dir)
    if not split_stderr:
        return out, out
    try:
        return out, _open_appending(f"{log_dir}/{STDERR}")
    except BaseException:
        os.close(out)
        raise


def mark(log_dir: Path | str, *texts: str, fd: int | None = None, at: str | None = None) -> None:
    """Append a line of ours for each text, such as ``--- everdeck 2026-11-15T20:40:18.123Z started cookie=9f0c… ---``.

    A line the worker left unfinished is ended first. A full disk loses the mark and nothing else. ``fd`` is the log if
    the caller has it open for appending already, ``at`` the time if it is known.
    """
    at = at or time_of_mark()
    line = "".join([mark_text(text, at) for text in texts]).encode()
    with contextlib.suppress(OSError):
        if fd is not None:
            size = os.fstat(fd).st_size
            os.write(fd, _on_its_own(line, logledger.last_byte(log_dir, size) if size else b""))
            return
        to, size = logledger.open_measured(f"{log_dir}/{CURRENT}", os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            os.write(to, _on_its_own(line, os.pread(to, 1, size - 1) if size else b""))
        finally:
            os.close(to)


def _on_its_own(line: bytes, last: bytes) -> bytes:
    return line if last in (b"\n", b"") else b"\n" + line


def mark_text(text: str, at: str) -> str:
    """One line of ours, as :func:`mark` writes it."""
    return f"{MARK}{at} {' '.join(text.split())} ---\n"


def time_of_mark() -> str:
    """Now, as marks tell it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def recover(log_dir: Path) -> None:
    """Finish or undo what a killed rotation or compression left. One ``stat`` when there is nothing to do.

    May be left out: every rotation begins with it, and readers understand the state in between.
    """
    for stream in (str(log_dir), f"{log_dir}/{STDERR}"):
        if not os.path.exists(f"{stream}/{BUSY}"):  # noqa: PTH110 - at ten thousand workers a Path costs more
            continue
        with _Rotator.over(Path(stream)) as rotator:
            if rotator is not None:
                rotator.settle()
                rotator.rest(compress=False)


def waiting_bytes(log_dir: Path | str) -> int:
    """How many bytes of ``current`` are in no archive yet; 0 where there is no log."""
    ledger = logledger.load(log_dir)
    try:
        fd = logledger.open_regular(f"{log_dir}/{CURRENT}", os.O_RDONLY)
    except OSError:
        return 0
    try:
        size = os.fstat(fd).st_size
        return max(0, logledger.base_in(fd, ledger, size, log_dir) + size - ledger.head)
    finally:
        os.close(fd)


def rotate_if_due(log_dir: Path, policy: Log, now: float) -> Rotation | None:
    """Rotate ``log_dir`` if it is as large or as old as ``policy`` allows; ``now`` is seconds since the epoch.

    Raises OSError when the disk is full even after the oldest archive that would go anyway was removed: the
    log then stays as it is and nothing is lost.
    """
    with _Rotator.over(log_dir) as rotator:
        if rotator is None:
            return None
        rotator.settle()
        rotation = rotator.rotate(policy, now)
        rotator.rest(compress=policy.compress)
        return rotation


def note(log_dir: Path | str, entries: list[tuple[float, int]]) -> None:
    """Remember that at these times the log ended at these positions; the basis of ``--since`` and ``--until``.

    A position beyond 64 bits is not kept: whoever writes to the log may also make it as long as it likes.
    """
    with contextlib.suppress(OSError, struct.error):
        fd = logledger.open_regular(f"{log_dir}/{INDEX}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(fd, b"".join(_INDEX_ENTRY.pack(at, position) for at, position in entries))
        finally:
            os.close(fd)


def compressing(log_dir: Path, made_before: float | None = None) -> Iterator[None]:
    """Compress the plain archives of ``log_dir``, oldest first, in small steps: iterate as far as time allows.

    Each archive becomes a row of gzip members of one mebibyte, each with its own length in its header, so that
    a reader can jump to the last lines (``zcat`` reads them as one file). The plain archive goes last.
    With ``made_before`` (seconds since the epoch) younger archives are left for another time.
    """
    while True:
        ledger = logledger.load(log_dir)
        plain = [archive for archive in logledger.archives(log_dir, ledger.newest) if not archive.compressed]
        plain = [archive for archive in plain if not archive.name.endswith(PART)]
        if not plain:
            _forget(log_dir / BUSY)
            return
        oldest = log_dir / plain[0].name
        if made_before is not None and _made_at(oldest) > made_before:
            return
        yield from _compress(oldest)


def _made_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


# --- helpers of the writer's side -------------------------------------------------------------------------------


def _open_appending(log_dir: Path | str) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    path = f"{log_dir}/{CURRENT}"
    try:
        fd = logledger.open_regular(path, flags)
    except FileNotFoundError:
        Path(log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = logledger.open_regular(path, flags)
    os.set_blocking(fd, True)
    return fd


def _forget(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


# --- rotation ---------------------------------------------------------------------------------------------------


class _Rotator:
    """One log directory, locked, with what a rotation needs at hand."""

    __slots__ = ("_method", "block", "current", "dir_fd", "ledger", "ledger_fd", "log_dir", "power_was_cut")

    def __init__(self, log_dir: Path, dir_fd: int, current: int) -> None:
        self.log_dir = log_dir
        self.dir_fd = dir_fd
        self.current = current
        self.ledger = logledger.load(log_dir, dir_fd=dir_fd)
        self.power_was_cut = self.ledger.is_of_another_boot
        if self.ledger.number == 0:
            self.ledger = logledger.rebuilt(log_dir)
            if self.ledger.newest and logledger.is_blank(dir_fd):
                # A ledger without an entry, beside an archive: the power was cut in the first rotation.
                self.power_was_cut = True
                self.ledger = self.ledger.changed(base=logledger.start_of(self.ledger.newest), punched=False)
        self.ledger_fd = -1
        # Collapse and punch count in whole blocks; a page where the filesystem claims less.
        self.block = max(os.fstatvfs(current).f_bsize, 4096)
        self._method: Method | None = None

    @classmethod
    @contextlib.contextmanager
    def over(cls, log_dir: Path) -> "Iterator[_Rotator | None]":
        """The rotator of ``log_dir``, or None where there is no log or somebody else is rotating it."""
        with contextlib.ExitStack() as stack:
            try:
                dir_fd = os.open(log_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, dir_fd)
                fcntl.flock(dir_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Not O_APPEND: Linux would append even what pwrite puts elsewhere. Not blocking: it may be a FIFO.
                current = os.open(CURRENT, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=dir_fd)
                stack.callback(os.close, current)
            except (FileNotFoundError, NotADirectoryError, BlockingIOError):
                yield None
                return
            if not stat.S_ISREG(os.fstat(current).st_mode):
                yield None
                return
            with cls(log_dir, dir_fd, current) as rotator:
                yield rotator

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self.ledger_fd >= 0:
            os.close(self.ledger_fd)

    # -- the steps

    def settle(self) -> None:
        """Bring the directory to rest, wherever an earlier rotation was killed."""
        if self.ledger.dropping:
            self._resume_drop()
        if self._exists(BUSY):
            self._settle_names()
        self._notice_emptied()
        ledger = self.ledger
        if ledger.head == ledger.base:
            return
        if self.method is Method.TRUNCATE:
            if self._exists(ledger.newest):
                self._drop()
        elif self.method is Method.COLLAPSE or not ledger.punched:
            self._punch(ledger.base, ledger.head)
            self._drop()

    def rotate(self, policy: Log, now: float) -> Rotation | None:
        """Archive and remove the front of ``current`` if that is due."""
        aged = self._aged(policy, now)
        if self._waiting() < policy.max_bytes and not aged:
            return None
        self._create(BUSY)
        self._open_ledger()  # before the copy: where there is no room for the ledger, there is no point in one
        method = self.method
        piece = max(policy.max_bytes // self.block * self.block, self.block)
        names: list[str] = []
        pruned: list[str] = []
        skipped = self._skip(piece, policy.keep) if method is not Method.TRUNCATE else 0
        began = self.ledger.head
        # At most `keep` pieces before the front is removed: a writer faster than our copying must not keep us here.
        for _ in range(max(1, policy.keep)):
            waiting = self._waiting()
            due = waiting >= policy.max_bytes or (aged and not names)
            if not due or policy.keep == 0:
                break
            # The last byte stays, because a collapse may not reach the end of the file.
            length = waiting if method is Method.TRUNCATE else min(piece, (waiting - 1) // self.block * self.block)
            if length <= 0:
                break
            names.append(self._archive(length, policy.keep, now, pruned))
            pruned += self._prune(policy.keep)
            if method is not Method.TRUNCATE:
                self._punch(start := logledger.start_of(names[-1]), start + length)
        if aged and not names:
            # Less than a block: it stays for now, and its age counts from here.
            self._write(self.ledger.changed(rotated_at=now))
        archived = self.ledger.head - began
        if policy.keep == 0 and method is Method.TRUNCATE:
            skipped = self._waiting()
            self._write(self.ledger.changed(head=self.ledger.head + skipped, punched=False, rotated_at=now))
        self._drop()
        if not names and not skipped:
            return None
        self._trim_index()
        return Rotation(tuple(names), archived, skipped, tuple(pruned), method)

    def rest(self, *, compress: bool) -> None:
        """Take away the marker, unless compression still has to come back."""
        archives = logledger.archives(self.dir_fd) if compress else []
        if all(archive.compressed for archive in archives):
            self._unlink(BUSY)

    @property
    def method(self) -> Method:
        """How this filesystem lets go of the front of a file: tried on a file of our own.

        Tried at each rotation, not remembered by device number: the kernel gives the number of an unmounted
        filesystem to the next one, which may be of another kind.
        """
        if self._method is None:
            self._method = self._probe()
        return self._method

    def _waiting(self) -> int:
        size = os.fstat(self.current).st_size
        return max(0, self.ledger.base + size - self.ledger.head)

    def _aged(self, policy: Log, now: float) -> bool:
        if policy.max_age_seconds is None or self._waiting() == 0:
            return False
        since = self.ledger.rotated_at or first_noted(self.log_dir) or now
        return now - since >= policy.max_age_seconds

    def _archive(self, length: int, keep: int, now: float, pruned: list[str]) -> str:
        """Copy the next ``length`` bytes into an archive and enter it into the ledger."""
        start = self.ledger.head
        name = logledger.archive_name(datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ"), start)
        while True:
            try:
                self._copy(start, length, name + PART)
                break
            except OSError as err:
                self._unlink(name + PART)
                # The oldest archive would go at the end of this rotation anyway; now it makes the room for it.
                if err.errno not in _NO_ROOM or not (gone := self._prune(max(0, keep - 1))):
                    raise
                pruned += gone
        crash_point("log.copied")
        self._write(self.ledger.changed(head=start + length, newest=name, rotated_at=now, punched=False))
        crash_point("log.entered")
        os.rename(name + PART, name, src_dir_fd=self.dir_fd, dst_dir_fd=self.dir_fd)
        crash_point("log.named")
        return name

    def _copy(self, start: int, length: int, part: str) -> None:
        to = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=self.dir_fd)
        try:
            _copy_bytes(self.current, start - self.ledger.base, to, 0, length)
            crash_point("log.copying")
            disk.sync(to)
        finally:
            os.close(to)

    def _skip(self, piece: int, keep: int) -> int:
        """Let go of what ``keep`` archives cannot hold, without copying it first."""
        surplus = (self._waiting() - 1) // piece - keep
        if surplus <= 0:
            return 0
        start, end = self.ledger.head, self.ledger.head + surplus * piece
        self._write(self.ledger.changed(head=end, punched=False))
        crash_point("log.skipped")
        self._punch(start, end)
        return surplus * piece

    def _punch(self, start: int, end: int) -> None:
        """Free the space of archived bytes. Also before a collapse: it then has no dirty pages to write out first."""
        if end > start:
            _fallocate(self.current, _PUNCH_HOLE_KEEP_SIZE, start - self.ledger.base, end - start)
        crash_point("log.punched")

    def _drop(self) -> None:
        """Take [base, head) away from the front of the file."""
        ledger = self.ledger
        if ledger.head == ledger.base:
            return
        if self.method is Method.PUNCH:
            if not ledger.punched:
                self._write(ledger.changed(punched=True))
            return
        length = ledger.head - ledger.base
        if self.method is Method.COLLAPSE:
            length = length // self.block * self.block
        if not 0 < length <= os.fstat(self.current).st_size:
            return
        stamp = os.urandom(logledger.STAMP_BYTES).hex()
        # Stamp first, entry second, both on the disk before the blocks move: the entry says "look for the stamp".
        os.pwrite(self.current, logledger.stamp_bytes(stamp), 0)
        disk.sync(self.current)
        crash_point("log.stamped")
        self._write(ledger.changed(dropping=length, stamp=stamp, how=str(self.method)), durable=True)
        crash_point("log.dropping")
        self._remove_front()

    def _remove_front(self) -> None:
        ledger = self.ledger
        if ledger.how == Method.TRUNCATE:
            self._catch_up()
            os.ftruncate(self.current, 0)
        else:
            try:
                _fallocate(self.current, _COLLAPSE_RANGE, 0, ledger.dropping)
            except OSError as err:
                if err.errno not in _UNSUPPORTED:
                    raise
                # Refused here although it worked on the probe (reflinked, encrypted, swapped): keep the hole instead.
                self._method = Method.PUNCH
                self._punch(ledger.base, ledger.head)
                self._write(ledger.changed(dropping=0, stamp="", how="", punched=True))
                return
        crash_point("log.removed")
        # On the disk before the entry that says so: else a power cut between leaves bytes that were archived at the
        # front of the file, and a ledger by which they are new.
        disk.sync(self.current)
        self._front_removed()

    def _front_removed(self) -> None:
        ledger = self.ledger
        base = ledger.base + ledger.dropping
        if ledger.how == Method.TRUNCATE:
            # The last look may have put more into the archive than the ledger knew.
            base = max(base, self._end_of_newest(default=base))
        self._write(ledger.changed(base=base, head=max(base, ledger.head), dropping=0, stamp="", how="", punched=True))
        crash_point("log.settled")

    def _resume_drop(self) -> None:
        if not logledger.is_stamped(self.current, self.ledger):
            self._front_removed()
        elif self.ledger.how == Method.TRUNCATE and not self._exists(self.ledger.newest):
            # No archive to put into what was written since the crash: it stays in the file until the next rotation.
            self._write(self.ledger.changed(dropping=0, stamp="", how=""))
        else:
            self._remove_front()

    def _catch_up(self) -> None:
        """Copy what came in since, until there is nothing new: the truncation that follows loses the fewest bytes."""
        newest = self.ledger.newest
        if not self._exists(newest):
            return
        to = os.open(newest, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.dir_fd)
        try:
            start = logledger.start_of(newest)
            done = self.ledger.head
            for _ in range(100):
                end = self.ledger.base + os.fstat(self.current).st_size
                if end <= done:
                    break
                _copy_bytes(self.current, done - self.ledger.base, to, done - start, end - done)
                done = end
        finally:
            os.close(to)

    def _end_of_newest(self, default: int) -> int:
        newest = self.ledger.newest
        if not self._exists(newest):
            return default
        return logledger.start_of(newest) + os.stat(newest, dir_fd=self.dir_fd).st_size

    def _settle_names(self) -> None:
        entries = set(os.listdir(self.dir_fd))  # noqa: PTH208 - a Path cannot be relative to a descriptor
        for entry in entries:
            if entry.endswith(".gz" + PART) and self._is_held(entry):
                continue  # compression is under way
            if entry == self.ledger.newest + PART:
                os.rename(entry, self.ledger.newest, src_dir_fd=self.dir_fd, dst_dir_fd=self.dir_fd)
            elif entry.endswith(PART) or (entry.endswith(".log") and entry + ".gz" in entries):
                # Not in the ledger: its bytes are still in `current`. Or compressed already: the .gz got its name last.
                self._unlink(entry)
        crash_point("log.tidied")
        self._believe_archives()

    def _believe_archives(self) -> None:
        """After a power failure an archive may have its name while the ledger's entry for it was lost.

        The name was given before the front was punched, and the journal keeps that order, so the archive counts.
        (The entry is not synced at each rotation: that would make every process on the disk wait for us.)
        """
        for archive in logledger.archives(self.dir_fd):
            if archive.start == self.ledger.head and not archive.compressed:
                end = archive.start + os.stat(archive.name, dir_fd=self.dir_fd).st_size
                self._write(self.ledger.changed(head=end, newest=archive.name, punched=False))
                self.power_was_cut = True

    def _notice_emptied(self) -> None:
        """If somebody emptied the file by hand, what is in it now is new, and begins at ``head``.

        So is what was written since the power was cut, behind what the disk had kept of the bytes that are archived.
        """
        ledger = self.ledger
        archived = ledger.head - ledger.base
        if archived <= 0:
            return
        if self.power_was_cut and not ledger.punched:
            kept = logledger.archived_front(self.current, ledger, self.log_dir)
            if kept < archived:
                self._write(ledger.changed(base=ledger.head - kept))
            return
        shorter = os.fstat(self.current).st_size < archived
        if shorter or (ledger.punched and any(os.pread(self.current, min(archived, 4096), 0))):
            self._write(ledger.changed(base=ledger.head, punched=True))

    def _prune(self, keep: int) -> list[str]:
        archives = logledger.archives(self.dir_fd)
        gone = [archive.name for archive in archives[: max(0, len(archives) - keep)]]
        for name in gone:
            self._unlink(name)
            crash_point("log.pruned")
        return gone

    def _trim_index(self) -> None:
        """Forget the times of what is no longer kept."""
        path = self.log_dir / INDEX
        try:
            if path.lstat().st_size < _INDEX_TRIM_BYTES:
                return
            with open(logledger.open_regular(str(path), os.O_RDONLY), "rb") as index:  # noqa: PTH123 - a descriptor
                data = index.read()
        except OSError:
            return
        archives = logledger.archives(self.dir_fd)
        oldest = archives[0].start if archives else self.ledger.head
        data = data[: len(data) // _INDEX_ENTRY.size * _INDEX_ENTRY.size]
        entries = list(_INDEX_ENTRY.iter_unpack(data))
        first = max((at for at, entry in enumerate(entries) if entry[1] <= oldest), default=0)
        kept = entries[first:]
        if len(kept) * _INDEX_ENTRY.size > _INDEX_TRIM_BYTES * 16:
            kept = kept[::2]
        with contextlib.suppress(OSError):  # no room for it: the long one stays
            disk.replace_file(path, b"".join(_INDEX_ENTRY.pack(*entry) for entry in kept))

    def _probe(self) -> Method:
        name = "probe" + PART
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=self.dir_fd)
        try:
            os.ftruncate(fd, 2 * self.block)  # a hole: also a full disk can be asked
            for method, mode in ((Method.COLLAPSE, _COLLAPSE_RANGE), (Method.PUNCH, _PUNCH_HOLE_KEEP_SIZE)):
                try:
                    _fallocate(fd, mode, 0, self.block)
                except OSError as err:
                    if err.errno not in _UNSUPPORTED:
                        raise
                else:
                    return method
            return Method.TRUNCATE
        finally:
            os.close(fd)
            self._unlink(name)

    # -- small things

    def _write(self, ledger: Ledger, *, durable: bool = False) -> None:
        self._open_ledger()
        ledger = ledger._replace(boot=logledger.this_boot())
        logledger.write(self.ledger_fd, ledger, durable=durable)
        self.ledger = ledger

    def _open_ledger(self) -> None:
        if self.ledger_fd < 0:
            self.ledger_fd = logledger.open_ledger(self.dir_fd)

    def _exists(self, name: str) -> bool:
        if not name:
            return False
        try:
            os.stat(name, dir_fd=self.dir_fd)
        except FileNotFoundError:
            return False
        return True

    def _is_held(self, name: str) -> bool:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.dir_fd)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def _create(self, name: str) -> None:
        # Only a hint to recovery: without room for it the rotation goes on, and recovers at the next one.
        with contextlib.suppress(OSError):
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self.dir_fd))

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.dir_fd)


def first_noted(log_dir: Path) -> float | None:
    """When we first looked at this log, by its index."""
    try:
        fd = logledger.open_regular(f"{log_dir}/{INDEX}", os.O_RDONLY)
    except OSError:
        return None
    try:
        data = os.read(fd, _INDEX_ENTRY.size)
    finally:
        os.close(fd)
    return float(_INDEX_ENTRY.unpack(data)[0]) if len(data) == _INDEX_ENTRY.size else None


def _copy_bytes(source: int, offset: int, to: int, to_offset: int, length: int) -> None:
    """Copy inside the kernel where it can, through a buffer where it cannot."""
    done = 0
    in_kernel = True
    while done < length:
        want = min(_COPY_BYTES, length - done)
        if in_kernel:
            try:
                copied = os.copy_file_range(source, to, want, offset + done, to_offset + done)
            except OSError as err:
                if err.errno not in (*_UNSUPPORTED, errno.EXDEV, errno.EBADF):
                    raise
                in_kernel = False
                continue
        else:
            data = os.pread(source, want, offset + done)
            copied = os.pwrite(to, data, to_offset + done)
        if copied == 0:
            raise OSError(errno.EIO, "the log became shorter while it was copied")
        done += copied


def can_collapse(folder: Path) -> bool:
    """Can the head of a file be removed in place here? Tried on a file of our own without a name."""
    import tempfile  # noqa: PLC0415 - only doctor tries, and who writes logs need not load it

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            block = os.fstatvfs(file.fileno()).f_bsize
            file.write(b"\0" * (4 * block))
            file.flush()
            _fallocate(file.fileno(), _COLLAPSE_RANGE, 0, block)
    except OSError:
        return False
    return True


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    while _libc.fallocate(fd, mode, offset, length) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


# --- compression ------------------------------------------------------------------------------------------------


def _compress(path: Path) -> Iterator[None]:
    part = path.with_name(path.name + ".gz" + PART)
    try:
        source = path.open("rb")
    except FileNotFoundError:
        return
    with source:
        try:
            with part.open("wb") as to:
                yield from _squeeze(source, to)
        except BaseException:  # also when nobody iterates any more: half an archive is only in the way
            _forget(part)
            raise
        times = os.fstat(source.fileno())
        os.utime(part, ns=(times.st_atime_ns, times.st_mtime_ns))
    crash_point("log.compressed")
    if not path.exists():  # pruned meanwhile
        _forget(part)
        return
    part.rename(path.with_name(path.name + ".gz"))
    crash_point("log.compressed-named")
    _forget(path)
    crash_point("log.plain-removed")


def _squeeze(source: BinaryIO, to: BinaryIO) -> Iterator[None]:
    os.fchmod(to.fileno(), 0o600)
    # Held while this iterator lives: a rotation in between sees that the file is no leftover of a crash.
    fcntl.flock(to.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    while block := source.read(_MEMBER_BYTES):
        to.write(_gzip_member(block))
        yield
    to.flush()
    disk.sync(to.fileno())


def _gzip_member(block: bytes) -> bytes:
    """One gzip member (RFC 1952) whose extra field "TL" says how long it is, compressed and plain."""
    squeeze = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = squeeze.compress(block) + squeeze.flush()
    total = logledger.MEMBER_HEAD.size + len(body) + 8
    head = logledger.MEMBER_HEAD.pack(0x1F, 0x8B, 8, 4, 0, 0, 3, 12, b"TL", 8, total, len(block))
    return head + body + struct.pack("<II", zlib.crc32(block), len(block))
