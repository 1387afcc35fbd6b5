"""CPU and memory of workers on disk: a day by the minute and a month by the quarter of an hour, and never more.

One file per worker in ``STATE/samples``, with a slot for every minute of a day and for every quarter of an hour of a
month. Where a slot lies follows from its time, so nothing points anywhere, nothing is ever moved, and a file is 52 kB
at most whatever happens. A slot holds its own time: what an earlier round left is recognised by it. The daemon
writes a slot when its time is over, and the unfinished ones when it leaves; killed, it loses the last minute.
"""

import contextlib
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

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


class _Open:
    """A slot whose time is not over yet."""

    __slots__ = ("begins", "count", "cpu", "rss")

    def __init__(self, begins: int) -> None:
        self.begins = begins
        self.count = 0
        self.cpu = 0.0
        self.rss = 0

    def add(self, cpu: float | None, rss: int | None) -> None:
        self.count += 1
        self.cpu += cpu or 0.0
        self.rss = max(self.rss, rss or 0)


class History:
    """What was used, for as long as it is worth knowing. Writes are few and small; they belong into a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[tuple[str, _Ring], _Open] = {}

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

    def unfinished(self) -> list[tuple[str, _Ring, _Open]]:
        """The slots that are not over; for the daemon that leaves."""
        return [(name, ring, slot) for (name, ring), slot in self._open.items()]

    def keep_only(self, names: set[str]) -> None:
        """Forget workers that are gone."""
        for key in [key for key in self._open if key[0] not in names]:
            del self._open[key]
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._folder):
                if entry.name not in names:
                    os.unlink(entry.path)  # noqa: PTH108 - a DirEntry's own path

    def read(self, name: str, since: float, now: float) -> list[Point]:
        """What is known from ``since`` on, oldest first: minutes where there are some, quarters of an hour before."""
        try:
            fd = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return []
        try:
            content = os.pread(fd, FILE_BYTES, 0)
        finally:
            os.close(fd)
        minutes = _points(content, MINUTES, since, now)
        before = minutes[0].at if minutes else math.inf
        return [point for point in _points(content, QUARTERS, since, now) if point.at < before] + minutes


def _points(content: bytes, ring: _Ring, since: float, now: float) -> list[Point]:
    part = content[ring.offset : ring.offset + ring.slots * _SLOT.size]
    oldest = max(since, now - ring.step * ring.slots)
    found = [
        Point(float(begins), round(cpu, 2), kib << 10)
        for begins, cpu, kib in _SLOT.iter_unpack(part[: len(part) // _SLOT.size * _SLOT.size])
        if begins and oldest <= begins <= now and begins % ring.step == 0
    ]
    return sorted(found)
