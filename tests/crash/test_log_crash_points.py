"""SIGKILL at every step of a rotation: no byte is lost, none is there twice, and the next start tidies up.

The points are found in the source, so a new step is tested without being named here. The log repeats one
block over and over: then its content cannot tell whether the front was already removed, which is the hard case.
"""

import gzip
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everdeck.logs import files as logfiles
from everdeck.logs import ledger as logledger
from everdeck.logs import reader as logreader
from support.logs_places import FILESYSTEMS, directory_on
from support.logs_rotation import Rotations
from support.logs_writer import numbered

Rotate = Callable[..., int]
SOURCE = Path(logfiles.__file__).read_text()
POINTS = sorted(set(re.findall(r'crash_point\("(log\.[a-z-]+)"\)', SOURCE)))
SAME_BLOCK = b"the same line again and again, sixty-four bytes with the newline"[:63] + b"\n"
# Which steps a filesystem cannot reach: no hole where nothing can be punched, nothing removed where holes stay.
UNREACHED = {
    "ext4": set(),
    "tmpfs": {"log.stamped", "log.dropping", "log.removed", "log.settled"},
    "ramfs": {"log.punched", "log.skipped"},
}
WITH_FEW_KEPT = {"log.skipped", "log.pruned"}
IN_RECOVERY = {"log.tidied"}
KEEP_ALL, KEEP_TWO = 1000, 2
MAX_BYTES = 50_000


def reached(points: set[str]) -> list[tuple[str, str]]:
    """Each filesystem with each of the points it comes by."""
    return [(filesystem, point) for filesystem in FILESYSTEMS for point in sorted(points - UNREACHED[filesystem])]


@pytest.fixture
def log_dir(filesystem: str, tmp_path: Path) -> Iterator[Path]:
    """A log directory on the filesystem of the case."""
    with directory_on(filesystem, tmp_path) as directory:
        yield directory / "log"


@pytest.fixture(scope="module")
def rotate() -> Iterator[Rotate]:
    """Recover, rotate and compress in another process, killed at ``crash_at``; its exit status."""
    with Rotations() as rotations:

        def run(log_dir: Path, keep: int, crash_at: str = "") -> int:
            return rotations.run(log_dir, MAX_BYTES, keep, crash_at)

        yield run


def append(log_dir: Path, data: bytes) -> None:
    """Write as a worker does."""
    fd, _ = logfiles.open_for_worker(log_dir, split_stderr=False)
    os.write(fd, data)
    os.close(fd)


def by_hand(log_dir: Path) -> bytes:
    """Archives in order and then current, by file name only."""
    found = b""
    for archive in logledger.archives(log_dir):
        data = (log_dir / archive.name).read_bytes()
        found += gzip.decompress(data) if archive.compressed else data
    return found + (log_dir / "current").read_bytes().lstrip(b"\0")


@pytest.mark.parametrize("content", ["repeated", "numbered"])
@pytest.mark.parametrize(("filesystem", "point"), reached(set(POINTS) - WITH_FEW_KEPT - IN_RECOVERY))
def test_no_byte_is_lost_or_doubled(log_dir: Path, rotate: Rotate, point: str, content: str) -> None:
    """Killed there, written to meanwhile, opened again: what was written is what is read, before and after."""
    written = SAME_BLOCK * 2000 if content == "repeated" else numbered(0, 1280)
    append(log_dir, written)

    assert rotate(log_dir, KEEP_ALL, point) == -signal.SIGKILL

    assert b"".join(logreader.raw(log_dir)) == written, "a reader before recovery"
    more = SAME_BLOCK * 700 if content == "repeated" else numbered(1280, 450)
    append(log_dir, more)
    assert b"".join(logreader.raw(log_dir)) == written + more, "a reader after the worker went on"
    logfiles.recover(log_dir)
    logfiles.recover(log_dir)
    assert by_hand(log_dir) == written + more, "after recovery, by file name"
    assert rotate(log_dir, KEEP_ALL) == 0
    assert b"".join(logreader.raw(log_dir)) == written + more
    assert by_hand(log_dir) == written + more
    assert not [entry.name for entry in log_dir.iterdir() if entry.name.endswith(".part") or entry.name == "busy"]


@pytest.mark.parametrize(("filesystem", "point"), reached(WITH_FEW_KEPT))
def test_what_is_kept_is_the_end_of_what_was_written(log_dir: Path, rotate: Rotate, point: str) -> None:
    """Killed while the oldest part goes, what is left is still one unbroken end of the log."""
    written = b""
    for turn in range(4):
        data = numbered(turn * 1100, 1100)
        append(log_dir, data)
        written += data
        if point == "log.pruned" and turn < 3:
            assert rotate(log_dir, KEEP_ALL) == 0

    assert rotate(log_dir, KEEP_TWO, point) == -signal.SIGKILL

    assert written.endswith(b"".join(logreader.raw(log_dir)))
    data = numbered(4400, 300)
    append(log_dir, data)
    written += data
    assert written.endswith(b"".join(logreader.raw(log_dir)))
    assert rotate(log_dir, KEEP_TWO) == 0
    kept = b"".join(logreader.raw(log_dir))
    assert written.endswith(kept)
    assert len(kept) > MAX_BYTES
    assert written.endswith(by_hand(log_dir))


@pytest.mark.parametrize(
    "first", ["log.copied", "log.entered", "log.punched", "log.stamped", "log.removed", "log.compressed"]
)
@pytest.mark.parametrize("second", ["log.tidied", "log.punched", "log.dropping", "log.removed", "log.settled"])
@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_a_crash_during_recovery_is_recovered_too(
    log_dir: Path, rotate: Rotate, filesystem: str, first: str, second: str
) -> None:
    """Killed in a rotation and again while the next process recovers or goes on: still every byte once."""
    written = SAME_BLOCK * 2000
    append(log_dir, written)
    rotate(log_dir, KEEP_ALL, first)
    append(log_dir, SAME_BLOCK * 100)
    written += SAME_BLOCK * 100
    ended = rotate(log_dir, KEEP_ALL, second)
    if second in IN_RECOVERY and first not in UNREACHED[filesystem]:
        assert ended == -signal.SIGKILL
    assert b"".join(logreader.raw(log_dir)) == written
    assert rotate(log_dir, KEEP_ALL) == 0
    assert by_hand(log_dir) == written


def test_every_point_is_tested_somewhere() -> None:
    """The points with a test of their own exist, and there are as many as there are steps."""
    assert set(POINTS) >= WITH_FEW_KEPT | IN_RECOVERY
    assert all(unreached <= set(POINTS) for unreached in UNREACHED.values())
    assert len(POINTS) > 10
