"""Room on the disk for everybody's logs: a budget for all of them together, and a floor of free space.

Each worker's log has its own bound (:class:`everdeck.model.Log`); here the sum is kept. When it is above the budget, or
the file system has less free than the floor, the oldest archives go, whoever's they are, until both hold again. So the
last bytes of a disk are the registry's and the programs' own, and not those of logs.

Archives in a log directory may be removed at any time, oldest first: readers count with it, and the ledger names only
the newest one. Whoever follows calls :func:`make_room` in a thread; it is one look at every directory.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from everdeck.crashpoints import crash_point
from everdeck.logs import ledger as logledger
from everdeck.logs.ledger import CURRENT, STDERR
from everdeck.model import LogRoom
from everdeck.statedir import LOG

NOTED: Final = "log_room"
"""Under this name the registry has the owner's setting, for those who look at the deck from outside."""
_MOST_FLOOR_BYTES: Final = 1 << 30
_FLOOR_SHARE: Final = 20
"""Without a floor of its own a deck keeps a twentieth of its file system free, at most a gibibyte."""


@dataclass(slots=True)
class Freed:
    """What went, by worker, why, and how many bytes are still too many when no archive is left."""

    pruned: dict[str, list[str]] = field(default_factory=dict)
    why: str = ""
    short_bytes: int = 0


class Space(NamedTuple):
    """One file system: what is free for us, and what should stay so."""

    free_bytes: int
    floor_bytes: int

    @property
    def short_bytes(self) -> int:
        """How much less is free than should be."""
        return max(0, self.floor_bytes - self.free_bytes)


def space(room: LogRoom, place: Path | str) -> Space:
    """The file system under ``place``."""
    facts = os.statvfs(place)
    size = facts.f_blocks * facts.f_frsize
    floor = min(size // _FLOOR_SHARE, _MOST_FLOOR_BYTES) if room.keep_free_bytes is None else room.keep_free_bytes
    return Space(facts.f_bavail * facts.f_frsize, min(floor, size))


def make_room(room: LogRoom, workers_dir: Path) -> Freed:
    """Remove the oldest archives until the budget and the floor hold, or none is left."""
    freed = Freed()
    found = sorted(_archives(workers_dir), key=lambda one: (one.archive.name, one.worker))
    used = used_bytes(workers_dir) if room.budget_bytes is not None else 0
    for one in found:
        over, why = _too_much(room, workers_dir, used)
        if over <= 0:
            break
        freed.why = why
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{one.log_dir}/{one.archive.name}")  # noqa: PTH108 - beside the other raw calls
        crash_point("log.room-made")
        freed.pruned.setdefault(one.worker, []).append(one.archive.name)
        used -= one.size
    freed.short_bytes, why = _too_much(room, workers_dir, used)
    freed.why = freed.why or why
    return freed


def used_bytes(workers_dir: Path) -> int:
    """What all logs of the deck take on the disk: archives and what is in none yet."""
    used = sum(one.size for one in _archives(workers_dir))
    for _, log_dir in _log_dirs(workers_dir):
        with contextlib.suppress(OSError):
            used += os.lstat(f"{log_dir}/{CURRENT}").st_blocks * 512
    return used


class _Found(NamedTuple):
    worker: str
    log_dir: str
    archive: logledger.Archive
    size: int


def _too_much(room: LogRoom, workers_dir: Path, used: int) -> tuple[int, str]:
    """By how many bytes the logs are too large now, and the reason in words."""
    disk = space(room, workers_dir)
    if disk.short_bytes:
        return disk.short_bytes, f"the disk has {disk.free_bytes} bytes free, less than {disk.floor_bytes}"
    if room.budget_bytes is not None and used > room.budget_bytes:
        return used - room.budget_bytes, f"all logs take {used} bytes, more than {room.budget_bytes}"
    return 0, ""


def _archives(workers_dir: Path) -> Iterator[_Found]:
    for worker, log_dir in _log_dirs(workers_dir):
        with contextlib.suppress(OSError):
            for archive in logledger.archives(log_dir):
                facts = os.lstat(f"{log_dir}/{archive.name}")
                yield _Found(worker, log_dir, archive, facts.st_blocks * 512)


def _log_dirs(workers_dir: Path) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError):
        for worker in os.listdir(workers_dir):  # noqa: PTH208 - ten thousand of them, and a Path costs more than the call
            for log_dir in (f"{workers_dir}/{worker}/{LOG}", f"{workers_dir}/{worker}/{LOG}/{STDERR}"):
                if os.path.isdir(log_dir):  # noqa: PTH112 - as above
                    yield worker, log_dir
