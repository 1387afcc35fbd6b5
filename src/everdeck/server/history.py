"""CPU and memory of workers on disk: a day by the minute and a month by the quarter of an hour, and never more.

One file per worker in ``STATE/samples``, with a slot for every minute of a day and for every quarter of an hour of a
month. Where a slot lies follows from its time, so nothing points anywhere, nothing is ever moved, and a file is 52 kB
at most whatever happens. A slot holds its own time: what an earlier round left is recognised by it. The daemon
writes a slot when its time is over. When it leaves it puts the unfinished ones of all workers into one file,
``unfinished~``, and the next one goes on with them: a reload does not write a file per worker, and a slot in which it
happens counts both sides of it. Killed, a daemon loses the slots that were not over.
"""

import contextlib
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from everdeck import disk

# When the slot began, in seconds since the epoch; the mean of the cpu, in percent of a core; the most memory, in KiB.
_SLOT: Final = struct.Struct("<IfI")


class Point(NamedTuple):
    """What was used at a time."""

    at: float
    cpu: float | None
    rss: int | None


class _Ring(NamedTuple):
    """Slots of one width, and where they lie in the file."""

    step: int
    slots: int
    offset: int


MINUTES: Final = _Ring(60, 1440, 0)
QUARTERS: Final = _Ring(900, 2880, MINUTES.slots * _SLOT.size)
FILE_BYTES: Final = QUARTERS.offset + QUARTERS.slots * _SLOT.size
_RINGS: Final = {ring.step: ring for ring in (MINUTES, QUARTERS)}
_UNFINISHED: Final = "unfinished~"  # no worker's name has a tilde


class _Open:
    """A slot whose time is not over yet."""

    __slots__ = ("begins", "count", "cpu", "rss")

    def __init__(self, begins: int, count: int = 0, cpu: float = 0.0, rss: int = 0) -> None:
        self.begins = begins
        self.count = count
        self.cpu = cpu
        self.rss = rss

    def add(self, cpu: float | None, rss: int | None) -> None:
        self.count += 1
        self.cpu += cpu or 0.0
        self.rss = max(self.rss, rss or 0)


_left: Final = msgspec.json.Decoder(list[tuple[str, int, int, int, float, int]]).decode


class History:
    """What was used, for as long as it is worth knowing. Writes are few and small; they belong into a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[tuple[str, _Ring], _Open] = {}
        self._recalled = False

    def add(self, name: str, point: Point) -> list[tuple[str, _Ring, _Open]]:
        """Take a sample; returns the slots that are over now, for :meth:`write`."""
        over = []
        for ring in (MINUTES, QUARTERS):
            begins = int(point.at) // ring.step * ring.step
            slot = self._open.get((name, ring))
            if slot is None or slot.begins != begins:
                if slot is not None:
                    over.append((name, ring, slot))
                slot = self._open[name, ring] = _Open(begins)
            slot.add(point.cpu, point.rss)
        return over

    def write(self, slots: Iterable[tuple[str, _Ring, _Open]]) -> None:
        """Put slots on disk; raises OSError."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for name, ring, slot in slots:
            fd = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                place = ring.offset + slot.begins // ring.step % ring.slots * _SLOT.size
                os.pwrite(fd, _SLOT.pack(slot.begins, slot.cpu / slot.count, min(slot.rss >> 10, 2**32 - 1)), place)
            finally:
                os.close(fd)

    def leave(self) -> None:
        """Put the slots that are not over where the next daemon finds them; raises OSError."""
        if not self._open:
            return  # also if what the last one left was never asked for: it is still there
        self._folder.mkdir(mode=0o700, exist_ok=True)
        left = [
            (name, ring.step, slot.begins, slot.count, slot.cpu, slot.rss) for (name, ring), slot in self._open.items()
        ]
        disk.replace_file(self._folder / _UNFINISHED, msgspec.json.encode(left), synced=False)

    def recall(self) -> None:
        """Go on with the slots that the last daemon left, once; what cannot be read is left out."""
        if self._recalled:
            return
        self._recalled = True
        path = self._folder / _UNFINISHED
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            left = _left(path.read_bytes())
            path.unlink()  # whatever becomes of these slots from here on, it is newer
            for name, step, begins, count, cpu, rss in left:
                if step in _RINGS and count > 0:
                    self._open[name, _RINGS[step]] = _Open(begins, count, cpu, rss)

    def keep_only(self, names: set[str]) -> None:
        """Forget workers that are gone."""
        for key in [key for key in self._open if key[0] not in names]:
            del self._open[key]
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._folder):
                if entry.name not in names and "~" not in entry.name:
                    os.unlink(entry.path)  # noqa: PTH108 - a DirEntry's own path

    def read(self, name: str, since: float, now: float) -> list[Point]:
        """What is known from ``since`` on, oldest first: minutes where there are some, quarters of an hour before."""
        content = b""
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                content = os.pread(fd, FILE_BYTES, 0)
            finally:
                os.close(fd)
        minutes = self._points(name, content, MINUTES, since, now)
        before = minutes[0].at if minutes else math.inf
        return [point for point in self._points(name, content, QUARTERS, since, now) if point.at < before] + minutes

    def _points(self, name: str, content: bytes, ring: _Ring, since: float, now: float) -> list[Point]:
        part = content[ring.offset : ring.offset + ring.slots * _SLOT.size]
        oldest = max(since, now - ring.step * ring.slots)
        found = {
            begins: Point(float(begins), round(cpu, 2), kib << 10)
            for begins, cpu, kib in _SLOT.iter_unpack(part[: len(part) // _SLOT.size * _SLOT.size])
            if begins and oldest <= begins <= now and begins % ring.step == 0
        }
        slot = self._open.get((name, ring))
        if slot is not None and oldest <= slot.begins <= now:
            found[slot.begins] = Point(float(slot.begins), round(slot.cpu / slot.count, 2), slot.rss)
        return sorted(found.values())
