"""Read a worker's log: its end, a span of time, or what comes next, while it is written and rotated.

Nothing here needs the owner. A reader asks for bytes by **position** (see :mod:`everdeck.logs.ledger`), and
:class:`LogView` finds them in ``current`` or an archive. It reads, then looks whether the ledger is still the one it
read by; if a rotation came between, it reads again. So a byte is never seen twice, never as the zeros of a
punched hole, and is missing only when its archive was pruned, which the reader is told.

Memory does not grow with the log: files are read in blocks, compressed archives member by member, and a line is
held up to :data:`LINE_BYTES`.

What is handed out is safe to print: bytes that are no UTF-8 and control characters (except tab) are shown as
escapes, so a log cannot steer the terminal of the person who reads it.
"""

import bisect
import contextlib
import importlib
import os
import re
import select
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from everdeck.errors import SpecError
from everdeck.kernel import inotify
from everdeck.logs import ledger as logledger
from everdeck.logs import text as logtext
from everdeck.logs.ledger import CURRENT, INDEX, Archive, Ledger

if TYPE_CHECKING:
    import gzip

LINE_BYTES: Final = 16_384
HOLE_BYTES: Final = 512
"""As many zeros in a row as nobody writes into a log; a disk's smallest block."""
_HOLE: Final = re.compile(rb"(\0{512,})")
_BLOCK_BYTES: Final = 1 << 16
_INDEX_ENTRY: Final = struct.Struct(">dQ")
_BLOCKS_PER_TURN: Final = 64
POLL_SECONDS: Final = 0.5


class Line(NamedTuple):
    """One line, safe to print. ``position`` is where the next line begins: follow from there to go on."""

    name: str
    text: str
    position: int


# --- the end, a span of time, everything ------------------------------------------------------------------------


def tail(log_dir: Path, lines: int = 20, *, colour: bool = False) -> list[str]:
    """The last lines, oldest first; a line that is not finished yet counts."""
    return [line.text for line in _shown(log_dir, lines=lines, colour=colour)]


def read(
    log_dir: Path,
    *,
    lines: int | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    grep: str | None = None,
    colour: bool = False,
    end: int | None = None,
) -> Iterator[str]:
    """The lines of a span of time that match ``grep`` (a regular expression), of these the last ``lines``.

    ``end`` is a position to stop at, such as the one a :class:`Follower` goes on from.

    Times come from the index, which the owner writes while it looks at logs: a span may begin and end a second (for a
    slow log ten) too wide, never too narrow; where no owner was looking, wider.
    """
    for line in read_lines(log_dir, lines=lines, since=since, until=until, grep=grep, colour=colour, end=end):
        yield line.text


def read_lines(
    log_dir: Path,
    *,
    lines: int | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    grep: str | None = None,
    colour: bool = False,
    end: int | None = None,
) -> Iterator[Line]:
    """As :func:`read`, each line with its position, from which :class:`Stamps` tells its time."""
    pattern = _pattern(grep)
    yield from _shown(log_dir, lines=lines, since=since, until=until, pattern=pattern, colour=colour, end=end)


class Stamps:
    """When the lines of a log were written, as far as its index and its last change tell.

    The index says how long the log was at which time, about once a second while it grows and an owner looks (ten for a
    slow log). A line is given the first time at which it is known to have been there.
    """

    def __init__(self, log_dir: Path) -> None:
        self._entries = _index(log_dir)
        self._changed = _last_change(log_dir)

    def at(self, line: Line) -> datetime | None:
        """When a line was written; None if nothing tells."""
        found = bisect.bisect_left(self._entries, line.position, key=lambda entry: entry[1])
        second = self._entries[found][0] if found < len(self._entries) else self._changed
        return datetime.fromtimestamp(second, UTC) if second else None


def raw(log_dir: Path) -> Iterator[bytes]:
    """The whole log as it was written, oldest byte first, in blocks."""
    with LogView(log_dir) as view:
        position, end = view.start(), view.end()
        while position < end:
            position, block = view.read(position, min(_BLOCK_BYTES, end - position))
            if not block:
                return
            yield block
            position += len(block)


def moment(text: str, now: datetime | None = None, *, field: str = "since") -> datetime:
    """A point in time as people type it: ``10m`` (ago), ``20:40`` (today, local time), or an ISO date and time."""
    now = now or datetime.now().astimezone()
    units = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip()):
        return now - timedelta(seconds=float(match[1]) * units[match[2]])
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text.strip()):
            hour, minute, *rest = (int(part) for part in text.split(":"))
            return now.replace(hour=hour, minute=minute, second=rest[0] if rest else 0, microsecond=0)
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise SpecError(field, text, "10m, 2h, 1d, 20:40, 2026-11-15 or 2026-11-15T20:40:00Z") from None
    return at if at.tzinfo else at.astimezone()


# --- what comes next --------------------------------------------------------------------------------------------


class Follower:
    """New lines of any number of logs, as they are written: one inotify descriptor, none per log, no polling.

    Where the user's inotify limits are used up, :attr:`fileno` is -1 and :meth:`wait` looks twice a second.
    """

    def __init__(self, *, grep: str | None = None, colour: bool = False) -> None:
        self._pattern = _pattern(grep)
        self._colour = colour
        self._logs: dict[str, _Followed] = {}
        self._by_watch: dict[int, _Followed] = {}
        self._unread: dict[str, None] = {}  # names in the order in which they became readable
        try:
            self._fd = inotify.open_inotify()
        except inotify.Exhausted:
            self._fd = -1

    def add(self, name: str, log_dir: Path, *, lines: int = 0, position: int | None = None) -> None:
        """Follow ``log_dir`` from ``position``, or from its last ``lines``, or from its end. It need not exist yet."""
        with LogView(log_dir) as view:
            end = view.end()
            if position is None:
                # An unfinished last line is not counted: it comes, whole, when it is finished.
                position = _line_start(view, end, lines)
        followed = _Followed(name, log_dir, position)
        self._logs[name] = followed
        self._watch(followed)
        self._unread[name] = None

    def remove(self, name: str) -> None:
        """Stop following one log."""
        followed = self._logs.pop(name, None)
        self._unread.pop(name, None)
        if followed is not None and self._by_watch.pop(followed.watch, None) is not None:
            inotify.remove_watch(self._fd, followed.watch)

    def position_of(self, name: str) -> int:
        """The position up to which a log was read."""
        return self._logs[name].cutter.position

    @property
    def unread(self) -> bool:
        """Whether :meth:`ready` has more to say right now."""
        return bool(self._unread)

    @property
    def names(self) -> list[str]:
        """The logs that are followed now."""
        return list(self._logs)

    def fileno(self) -> int:
        """Readable when a log has changed; -1 where inotify is used up."""
        return self._fd

    def ready(self, limit: int = 1000) -> list[Line]:
        """The lines that are there, at most ``limit``, without waiting. Call again while it returns ``limit``."""
        self._hear()
        found: list[Line] = []
        for name in list(self._unread):
            if len(found) >= limit:
                break
            followed = self._logs[name]
            if followed.read(found, limit - len(found), self._pattern, colour=self._colour):
                del self._unread[name]
                if followed.gone:
                    self.remove(name)
        return found

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until something may have been written."""
        if self._unread or not self._logs:
            return True
        if self._fd < 0:
            select.select([], [], [], min(POLL_SECONDS, timeout_seconds or POLL_SECONDS))
            return True
        poller = select.poll()  # not select(): that knows only descriptors below 1024
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(None if timeout_seconds is None else timeout_seconds * 1000))

    def bundles(self) -> Iterator[list[Line]]:
        """What is found, as it comes, until none of the logs is left; waits in between."""
        while self._logs:
            lines = self.ready()
            if lines:
                yield lines
            else:
                self.wait()

    def __iter__(self) -> Iterator[Line]:
        for lines in self.bundles():
            yield from lines

    def close(self) -> None:
        """Let go of everything."""
        self._logs.clear()
        self._by_watch.clear()
        self._unread.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _watch(self, followed: "_Followed") -> None:
        if self._fd < 0:
            return
        mask = inotify.MODIFY | inotify.ATTRIB | inotify.DELETE_SELF | inotify.MOVE_SELF
        try:
            followed.watch = inotify.add_watch(self._fd, f"{followed.log_dir}/{CURRENT}", mask)
        except FileNotFoundError:
            try:
                followed.watch = inotify.add_watch(
                    self._fd, str(followed.log_dir), inotify.CREATE | inotify.MOVED_TO | inotify.DELETE_SELF
                )
            except FileNotFoundError:
                followed.gone = True
                return
            # It may have been created between the two calls; then no event tells.
            if (followed.log_dir / CURRENT).exists():
                inotify.remove_watch(self._fd, followed.watch)
                self._watch(followed)
                return
        except inotify.Exhausted:
            # No watch left for this one: give up on all, and look twice a second instead.
            os.close(self._fd)
            self._fd = -1
            return
        self._by_watch[followed.watch] = followed

    def _hear(self) -> None:
        if self._fd < 0:
            self._unread.update(dict.fromkeys(self._logs))
            return
        for watch, mask in inotify.heard(self._fd):
            if mask & inotify.OVERFLOW:
                self._unread.update(dict.fromkeys(self._logs))
                continue
            followed = self._by_watch.get(watch)
            if followed is None:
                continue
            self._unread[followed.name] = None
            if mask & ~inotify.MODIFY:
                self._renamed(followed)
            if self._fd < 0:
                return

    def _renamed(self, followed: "_Followed") -> None:
        """The file came into being, lost its name, or was replaced: watch what has the name now."""
        before = followed.watch
        self._by_watch.pop(before, None)
        self._watch(followed)
        if followed.watch != before and self._fd >= 0:
            inotify.remove_watch(self._fd, before)


class _Followed:
    """One log that is followed, and how far it was read."""

    __slots__ = ("cutter", "gone", "log_dir", "name", "watch")

    def __init__(self, name: str, log_dir: Path, position: int) -> None:
        self.name = name
        self.log_dir = log_dir
        self.watch = -1
        self.gone = False
        self.cutter = _LineCutter(position)

    def read(self, found: list[Line], limit: int, pattern: re.Pattern[str] | None, *, colour: bool) -> bool:
        """Put new lines into ``found``, at least until ``limit`` is reached; whether the end of the log was reached."""
        cutter = self.cutter
        enough = len(found) + limit
        with LogView(self.log_dir) as view:
            for _ in range(_BLOCKS_PER_TURN):  # also when nothing matches, others get their turn
                if len(found) >= enough:
                    break
                position, block = view.read(cutter.position, _BLOCK_BYTES)
                if not block:
                    end = view.end()
                    if end >= cutter.position:
                        return True
                    # Shorter than before: emptied by hand, or a new log of the same name. Begin at its beginning.
                    self.cutter = cutter = _LineCutter(view.start_of_current())
                    continue
                cuts = cutter.feed(position, block)
                found += [cut.line(self.name, colour=colour) for cut in cuts if _matches(cut, pattern)]
        return False


# --- bytes by position ------------------------------------------------------------------------------------------


class LogView:
    """The bytes of one log by their position, wherever they are just now."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._current = -1
        self._archives: list[Archive] = []
        self._listed_at = -1
        self._rebuilt: Ledger | None = None
        self._open: _OpenArchive | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._current >= 0:
            os.close(self._current)
            self._current = -1
        self._close_archive()

    def start(self) -> int:
        """The oldest position that is kept."""
        ledger = self._ledger()
        listed = self._list(ledger, again=True)
        return listed[0].start if listed else self.start_of_current()

    def start_of_current(self) -> int:
        """The first position that is in no archive."""
        return self._ledger().head

    def end(self) -> int:
        """The position after the last byte."""
        while True:
            ledger = self._ledger()
            fd = self._current_fd()
            if fd < 0:
                return ledger.head
            size = os.fstat(fd).st_size
            base = logledger.base_in(fd, ledger, size, self._log_dir)
            # The size belongs to this base only if nothing was removed in between.
            if self._ledger() == ledger and logledger.base_in(fd, ledger, size, self._log_dir) == base:
                return base + size

    def read(self, position: int, size: int) -> tuple[int, bytes]:
        """Up to ``size`` bytes from ``position``, and where they really begin: later, if older ones are gone.

        No bytes means the end of the log.
        """
        while True:
            ledger = self._ledger()
            if position >= ledger.head:
                data = self._read_current(ledger, position, size)
                if data is not None:
                    return position, data
                continue
            listed = self._list(ledger)
            after = bisect.bisect_right(listed, position, key=lambda archive: archive.start)
            limit = listed[after].start if after < len(listed) else ledger.head
            if after == 0:
                position = limit
                continue
            archive = listed[after - 1]
            try:
                data = self._opened(archive).read(position - archive.start, min(size, limit - position))
            except FileNotFoundError:  # pruned, compressed or given its name since it was listed
                self._list(ledger, again=True)
                continue
            if data:
                return position, data
            position = limit

    def span(self, start: int, end: int) -> tuple[int, bytes]:
        """The bytes from ``start`` to ``end``, and where they begin if the first of them are gone."""
        found = bytearray()
        began = position = start
        while position < end:
            at, block = self.read(position, end - position)
            if at != position:
                began = at
                found.clear()
            if not block or at >= end:
                break
            found += block
            position = at + len(block)
        return min(began, end), bytes(found[: end - min(began, end)])

    def _read_current(self, ledger: Ledger, position: int, size: int) -> bytes | None:
        """The bytes, or None when a rotation came between and it has to be tried again."""
        fd = self._current_fd()
        if fd < 0:
            return b""
        length = os.fstat(fd).st_size
        base = logledger.base_in(fd, ledger, length, self._log_dir)
        data = os.pread(fd, size, position - base) if position - base < length else b""
        if self._ledger() != ledger or logledger.base_in(fd, ledger, length, self._log_dir) != base:
            return None
        return data

    def _ledger(self) -> Ledger:
        ledger = logledger.load(self._log_dir)
        if ledger.number == 0:
            if self._rebuilt is None:
                self._rebuilt = self._if_lost()
            return self._rebuilt
        if ledger.how != "truncate" or (fd := self._current_fd()) < 0 or logledger.is_stamped(fd, ledger):
            return ledger
        # Emptied, and the last look before that may have put more into the archive than the ledger knows yet.
        try:
            end = logledger.start_of(ledger.newest) + (self._log_dir / ledger.newest).stat().st_size
        except (FileNotFoundError, ValueError):
            end = 0
        end = max(end, ledger.head)
        return ledger._replace(base=end, head=end, dropping=0)

    def _if_lost(self) -> Ledger:
        """What a log without a ledger is: one that was never rotated, or one whose ledger was lost."""
        try:
            return logledger.rebuilt(self._log_dir)
        except (FileNotFoundError, NotADirectoryError):
            return Ledger()

    def _current_fd(self) -> int:
        if self._current < 0:
            # What is no plain file (a directory, a pipe, a link that somebody put there) is no log: nothing to read.
            with contextlib.suppress(OSError):
                self._current = logledger.open_regular(f"{self._log_dir}/{CURRENT}", os.O_RDONLY)
        return self._current

    def _list(self, ledger: Ledger, *, again: bool = False) -> list[Archive]:
        if again or self._listed_at != ledger.number:
            try:
                found = logledger.archives(self._log_dir, ledger.newest)
            except (FileNotFoundError, NotADirectoryError):
                found = []
            # One that the ledger does not know yet (or is being copied) is still in `current`.
            self._archives = [archive for archive in found if archive.start < ledger.head]
            self._listed_at = ledger.number
        return self._archives

    def _opened(self, archive: Archive) -> "_OpenArchive":
        if self._open is None or self._open.name != archive.name:
            self._close_archive()
            path = self._log_dir / archive.name
            self._open = _CompressedArchive(path) if archive.compressed else _PlainArchive(path)
        return self._open

    def _close_archive(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


class _PlainArchive:
    """An archive as it was copied."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._fd = logledger.open_regular(str(path), os.O_RDONLY)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def close(self) -> None:
        os.close(self._fd)


class _Member(NamedTuple):
    start: int
    plain_bytes: int
    offset: int
    packed_bytes: int


class _CompressedArchive:
    """A gzip file made of members that say how long they are, so that only the one needed is unpacked.

    A gzip file of somebody else (recompressed by hand) is read too, from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = path.open("rb")
        self._foreign: gzip.GzipFile | None = None
        self._unpacked: tuple[_Member, bytes] | None = None
        try:
            self._members = self._walk()
        except BaseException:
            self._file.close()
            raise
        if not self._members:
            self._foreign = logledger.plain(self._file)

    def read(self, offset: int, size: int) -> bytes:
        if self._foreign is not None:
            self._foreign.seek(offset)
            return self._foreign.read(size)
        for member in self._members:
            if member.start <= offset < member.start + member.plain_bytes:
                data = self._unpack(member)
                return data[offset - member.start : offset - member.start + size]
        return b""

    def close(self) -> None:
        if self._foreign is not None:
            self._foreign.close()
        self._file.close()

    def _walk(self) -> list[_Member]:
        members: list[_Member] = []
        start = offset = 0
        for packed, plain in logledger.members(self._file.fileno()):
            members.append(_Member(start, plain, offset, packed))
            start += plain
            offset += packed
        return members

    def _unpack(self, member: _Member) -> bytes:
        if self._unpacked is None or self._unpacked[0] != member:
            body = os.pread(self._file.fileno(), member.packed_bytes, member.offset)
            self._unpacked = member, zlib.decompress(body, wbits=zlib.MAX_WBITS | 16)
        return self._unpacked[1]


_OpenArchive = _PlainArchive | _CompressedArchive


# --- bytes to lines ---------------------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """A line as bytes: where the next one begins, and how it was shortened."""

    content: bytes
    position: int
    shortened: bool = False
    notice: bool = False

    def line(self, name: str, *, colour: bool) -> Line:
        text = logtext.shown(self.content, colour=colour)
        if self.shortened:
            text += f" … [line cut at {LINE_BYTES} bytes]"
        return Line(name, text, self.position)


class _LineCutter:
    """Cuts blocks into lines, holding no more than :data:`LINE_BYTES` of an unfinished one."""

    __slots__ = ("_hole_bytes", "_pending", "_swallowing", "position")

    def __init__(self, position: int) -> None:
        self.position = position
        self._hole_bytes = 0
        self._pending = b""
        self._swallowing = False

    def feed(self, position: int, block: bytes) -> Iterator[_Cut]:
        if position != self.position:
            lost = position - self.position
            self._pending, self._swallowing = b"", False
            self.position = position
            yield _Cut(
                f"--- everdeck {lost} bytes were pruned before they were read ---".encode(), position, notice=True
            )
        for piece in _HOLE.split(block) if self._hole_bytes or b"\0" in block else (block,):
            yield from self._piece(piece)

    def _piece(self, piece: bytes) -> Iterator[_Cut]:
        """Zeros that no writer wrote are where a power cut took the bytes and left the length: a gap, not a line."""
        zeros = len(piece) - len(piece.lstrip(b"\0")) if self._hole_bytes or len(piece) >= HOLE_BYTES else 0
        if zeros >= HOLE_BYTES or self._hole_bytes:
            if self._pending:
                yield _Cut(self._pending, self.position)
            self._pending, self._swallowing = b"", False
            self._hole_bytes += zeros
            self.position += zeros
            piece = piece[zeros:]
        if self._hole_bytes and piece:
            told = f"--- everdeck {self._hole_bytes} bytes were lost, as by a power cut ---".encode()
            self._hole_bytes = 0
            yield _Cut(told, self.position, notice=True)
        if piece:
            yield from self._lines(piece)

    def _lines(self, block: bytes) -> Iterator[_Cut]:
        at = self.position
        self.position += len(block)
        *lines, rest = block.split(b"\n")
        for line in lines:
            at += len(line) + 1
            if self._swallowing:
                self._swallowing = False
                continue
            content = self._pending + line if self._pending else line
            self._pending = b""
            yield _Cut(content[:LINE_BYTES], at, shortened=len(content) > LINE_BYTES)
        if self._swallowing:
            return
        self._pending += rest
        if len(self._pending) > LINE_BYTES:
            # Shown as soon as it is too long: a writer without newlines is seen, and nothing piles up.
            yield _Cut(self._pending[:LINE_BYTES], self.position, shortened=True)
            self._pending, self._swallowing = b"", True

    def rest(self) -> Iterator[_Cut]:
        """The line that was not finished."""
        if self._hole_bytes and not self._pending:
            told = f"--- everdeck {self._hole_bytes} bytes were lost, as by a power cut ---".encode()
            self._hole_bytes = 0
            yield _Cut(told, self.position, notice=True)
        if self._pending:
            yield _Cut(self._pending, self.position)


def _shown(
    log_dir: Path,
    *,
    lines: int | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    pattern: re.Pattern[str] | None = None,
    colour: bool = False,
    end: int | None = None,
) -> Iterator[Line]:
    with LogView(log_dir) as view:
        end = stop = view.end() if end is None else min(end, view.end())
        begin = view.start()
        if since is not None or until is not None:
            begin, stop = _within(view, log_dir, begin, end, since, until)
        if lines is not None and pattern is None:
            begin = max(begin, _tail_start(view, stop, lines))
        found: Iterator[Line] = (
            cut.line("", colour=colour) for cut in _cuts(view, begin, stop, end) if _matches(cut, pattern)
        )
        if lines is not None:
            found = iter(deque(found, maxlen=lines))
        yield from found


def _cuts(view: LogView, begin: int, stop: int, end: int) -> Iterator[_Cut]:
    """The lines that begin in [begin, stop), where the log ends at ``end``."""
    cutter = _LineCutter(begin)
    starts_at = begin
    while cutter.position < end:
        position, block = view.read(cutter.position, min(_BLOCK_BYTES, end - cutter.position))
        if not block:
            break
        for cut in cutter.feed(position, block):
            if starts_at >= stop:
                return
            starts_at = cut.position
            yield cut
    if starts_at < stop:
        yield from cutter.rest()


def _within(
    view: LogView, log_dir: Path, begin: int, end: int, since: datetime | None, until: datetime | None
) -> tuple[int, int]:
    """The positions between two times, widened to where we know the time, and to the beginning of a line."""
    entries = _index(log_dir)
    stop = end
    if since is not None:
        moment_of = since.timestamp()
        if _last_change(log_dir) + 1 < moment_of:
            return end, end
        known = next((position for at, position in reversed(entries) if at <= moment_of), begin)
        begin = max(begin, min(known, end))
        begin = _line_start(view, begin, 0)
    if until is not None:
        moment_of = until.timestamp()
        first = _first_start(view, end) if begin == 0 else None
        if first is not None and moment_of + 1 < first:
            return begin, begin
        stop = min(end, next((position for at, position in entries if at >= moment_of), end))
    return begin, stop


def _last_change(log_dir: Path) -> float:
    """When something was last written; for ever ago if there is no log."""
    try:
        return (log_dir / CURRENT).stat().st_mtime
    except OSError:
        return 0.0


def _first_start(view: LogView, end: int) -> float | None:
    """When the log was begun: the time of the first start, if its mark is the first within the first lines.

    Only for a log that still has its beginning. In any other, lines of hours may stand before the first mark.
    """
    _, block = view.read(0, min(_BLOCK_BYTES, end))
    found = re.search(rb"^--- everdeck (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (\S+)", block, re.MULTILINE)
    return None if found is None or found[2] != b"started" else datetime.fromisoformat(found[1].decode()).timestamp()


def _index(log_dir: Path) -> list[tuple[float, int]]:
    try:
        with open(logledger.open_regular(f"{log_dir}/{INDEX}", os.O_RDONLY), "rb") as index:  # noqa: PTH123
            data = index.read()
    except OSError:
        return []
    return list(_INDEX_ENTRY.iter_unpack(data[: len(data) // _INDEX_ENTRY.size * _INDEX_ENTRY.size]))


def _tail_start(view: LogView, end: int, lines: int) -> int:
    """Where the last ``lines`` lines before ``end`` begin; one that is not finished counts."""
    if lines <= 0:
        return end
    _, last = view.span(end - 1, end) if end else (0, b"")
    return _after_newline(view, end, lines + (last == b"\n"), view.start())


def _line_start(view: LogView, end: int, lines: int) -> int:
    """Where the line at ``end`` begins, or the one ``lines`` whole lines before it."""
    start = view.start()
    if lines:
        return _after_newline(view, end, lines + 1, start)
    # A line longer than we would show is not searched for its beginning.
    reach = max(start, end - 2 * LINE_BYTES)
    found = _after_newline(view, end, 1, reach)
    return end if found == reach > start else found


def _after_newline(view: LogView, end: int, count: int, start: int) -> int:
    """The position after the ``count``-th newline counted back from ``end``, or ``start``."""
    position = end
    while position > start:
        wanted = max(start, position - _BLOCK_BYTES)
        began, block = view.span(wanted, position)
        there = block.count(b"\n")
        if there >= count:
            at = len(block)
            for _ in range(count):
                at = block.rfind(b"\n", 0, at)
            return began + at + 1
        count -= there
        if began > wanted:
            return began
        position = began
    return start


def _matches(cut: _Cut, pattern: re.Pattern[str] | None) -> bool:
    return pattern is None or cut.notice or pattern.search(logtext.shown(cut.content)) is not None


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    """What the lines are compared with, in linear time where RE2 is installed (the server brings it).

    A pattern such as ``(a+)+$`` takes Python's ``re`` longer than a lifetime, holding the interpreter's lock: somebody
    who may only read logs would freeze the supervision of every worker. RE2 has no look-around and no back-references;
    there they are refused rather than tried.
    """
    if grep is None:
        return None
    engine, options, refusals = _engine()
    try:
        found: re.Pattern[str] = engine.compile(grep, options)
    except refusals as err:
        why = err.args[0].decode("utf-8", "replace") if isinstance(err.args[0], bytes) else str(err)
        raise SpecError("grep", grep, f"a regular expression ({why})") from None
    return found


@cache
def _engine() -> tuple[Any, Any, tuple[type[Exception], ...]]:
    """The matcher, its options, and what it raises for a text that is no pattern."""
    try:
        re2 = importlib.import_module("re2")
    except ModuleNotFoundError:
        return re, 0, (re.error, RecursionError, OverflowError)
    quiet = re2.Options()
    quiet.log_errors = False
    return re2, quiet, (re2.error, UnicodeEncodeError)
