"""Rotation under a writer: every byte is in exactly one place, on every kind of filesystem."""

import fcntl
import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everdeck.logs import files as logfiles
from everdeck.logs import ledger as logledger
from everdeck.logs import reader as logreader
from everdeck.model import Log
from support.logs_places import FILESYSTEMS, METHODS, directory_on
from support.logs_rotation import Rotations
from support.logs_writer import numbered

SMALL = Log(max_bytes=20_000, keep=1000, compress=False)
NOW = 1_800_000_000.0


@pytest.fixture(params=FILESYSTEMS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A log directory on each filesystem, and the filesystem's name."""
    with directory_on(request.param, tmp_path) as directory:
        yield request.param, directory / "log"


def append(log_dir: Path, data: bytes) -> None:
    """Write as a worker does."""
    fd, _ = logfiles.open_for_worker(log_dir, split_stderr=False)
    os.write(fd, data)
    os.close(fd)


def whole(log_dir: Path) -> bytes:
    """The log as our reader sees it."""
    return b"".join(logreader.raw(log_dir))


def by_hand(log_dir: Path) -> bytes:
    """The log as somebody sees it who knows only the file names: archives in order, then ``current``."""
    found = b""
    for archive in logledger.archives(log_dir):
        data = (log_dir / archive.name).read_bytes()
        found += gzip.decompress(data) if archive.compressed else data
    return found + (log_dir / "current").read_bytes().lstrip(b"\0")


def leftovers(log_dir: Path) -> set[str]:
    """Files that only an unfinished rotation has."""
    return {entry.name for entry in log_dir.iterdir() if entry.name.endswith(".part") or entry.name == "busy"}


def test_a_worker_gets_one_appending_descriptor_for_both_streams(tmp_path: Path) -> None:
    """Both streams are one file, appended to, closed on exec, readable by its owner only."""
    out, err = logfiles.open_for_worker(tmp_path / "a" / "log", split_stderr=False)
    try:
        assert out == err
        assert fcntl.fcntl(out, fcntl.F_GETFL) & os.O_APPEND
        assert fcntl.fcntl(out, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert stat.S_IMODE(os.fstat(out).st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "a" / "log").stat().st_mode) == 0o700
    finally:
        os.close(out)


def test_stderr_can_have_its_own_log(tmp_path: Path) -> None:
    """With split_stderr the second stream is a log of its own, in a directory below."""
    out, err = logfiles.open_for_worker(tmp_path / "log", split_stderr=True)
    try:
        os.write(out, b"said\n")
        os.write(err, b"complained\n")
    finally:
        os.close(out)
        os.close(err)
    assert logreader.tail(tmp_path / "log", 5) == ["said"]
    assert logreader.tail(tmp_path / "log" / "stderr", 5) == ["complained"]


def test_a_mark_is_a_line_of_its_own(tmp_path: Path) -> None:
    """A line the worker left unfinished is ended before ours begins."""
    append(tmp_path, b"half a line")
    logfiles.mark(tmp_path, "exited code=1\npid=7")
    half, ours = logreader.tail(tmp_path, 5)
    assert half == "half a line"
    assert ours.startswith("--- everdeck 2")
    assert ours.endswith("Z exited code=1 pid=7 ---")


def test_rotation_keeps_every_byte(place: tuple[str, Path]) -> None:
    """Archives in order and then current are what was written, and the expected method was used."""
    filesystem, log_dir = place
    written = b""
    for turn in range(10):
        data = numbered(turn * 450, 450)
        append(log_dir, data)
        written += data
        rotation = logfiles.rotate_if_due(log_dir, SMALL, NOW + turn)
        assert rotation is not None
        assert rotation.method == METHODS[filesystem]
        assert whole(log_dir) == written
        assert by_hand(log_dir) == written
        assert not leftovers(log_dir)
    assert logfiles.rotate_if_due(log_dir, SMALL, NOW) is None
    assert logfiles.waiting_bytes(log_dir) < SMALL.max_bytes


def test_rotation_frees_the_space(place: tuple[str, Path]) -> None:
    """Whatever the method, the bytes that went into an archive no longer take room in current."""
    _, log_dir = place
    append(log_dir, numbered(0, 10_000))
    logfiles.rotate_if_due(log_dir, SMALL, NOW)
    assert (log_dir / "current").stat().st_blocks * 512 <= SMALL.max_bytes + 8192


def test_an_archive_is_named_by_time_and_position(tmp_path: Path) -> None:
    """The name tells when it was made and where its first byte stands in all that was written."""
    append(tmp_path, numbered(0, 450))
    rotation = logfiles.rotate_if_due(tmp_path, SMALL, NOW)
    assert rotation is not None
    assert rotation.archives == (
        "20270115T080000Z-000000000000000000.log",
        "20270115T080000Z-000000000000016384.log",
    )


def test_keep_bounds_the_archives(place: tuple[str, Path]) -> None:
    """Only the newest archives stay, and what is left is the end of what was written."""
    _, log_dir = place
    written = b""
    for turn in range(12):
        data = numbered(turn * 210, 210)
        append(log_dir, data)
        written += data
        logfiles.rotate_if_due(log_dir, Log(max_bytes=20_000, keep=3, compress=False), NOW + turn)
    assert len(logledger.archives(log_dir)) == 3
    assert written.endswith(whole(log_dir))
    assert len(whole(log_dir)) >= 3 * 16_384


def test_what_keep_cannot_hold_is_not_copied_first(place: tuple[str, Path]) -> None:
    """A backlog larger than all archives together is let go at once, and the newest part of it is kept."""
    filesystem, log_dir = place
    written = numbered(0, 20_000)
    append(log_dir, written)
    rotation = logfiles.rotate_if_due(log_dir, Log(max_bytes=20_000, keep=2, compress=False), NOW)
    assert rotation is not None
    if filesystem != "ramfs":
        assert 1 <= len(rotation.archives) <= 2
        assert rotation.skipped_bytes > 1_900_000
    assert written.endswith(whole(log_dir))
    assert len(whole(log_dir)) >= 2 * 16_384


def test_keep_nothing(place: tuple[str, Path]) -> None:
    """keep=0 bounds current and makes no archives."""
    _, log_dir = place
    written = numbered(0, 1000)
    append(log_dir, written)
    rotation = logfiles.rotate_if_due(log_dir, Log(max_bytes=20_000, keep=0), NOW)
    assert rotation is not None
    assert rotation.archives == ()
    assert written.endswith(whole(log_dir))
    assert len(whole(log_dir)) < 20_000
    append(log_dir, b"more\n")
    assert logreader.tail(log_dir, 1) == ["more"]


def test_age_rotates_what_is_whole_blocks(tmp_path: Path) -> None:
    """An old log is rotated below its size; less than a block stays where it is."""
    policy = Log(max_bytes=1_000_000, max_age_seconds=60, compress=False)
    append(tmp_path, numbered(0, 100))
    logfiles.note(tmp_path, [(NOW, 0)])
    assert logfiles.rotate_if_due(tmp_path, policy, NOW + 59) is None
    rotation = logfiles.rotate_if_due(tmp_path, policy, NOW + 60)
    assert rotation is not None
    assert rotation.archived_bytes == 8192
    assert by_hand(tmp_path) == numbered(0, 100)
    assert logfiles.rotate_if_due(tmp_path, policy, NOW + 61) is None
    assert logfiles.rotate_if_due(tmp_path, policy, NOW + 200) is None
    assert by_hand(tmp_path) == numbered(0, 100)


def test_compression_keeps_every_byte(place: tuple[str, Path]) -> None:
    """Compressed archives are ordinary gzip files, and our reader reads them in place."""
    _, log_dir = place
    written = numbered(0, 60_000)
    append(log_dir, written)
    logfiles.rotate_if_due(log_dir, Log(max_bytes=2_500_000, keep=10), NOW)
    assert (log_dir / "busy").exists()
    for _ in logfiles.compressing(log_dir):
        assert whole(log_dir) == written
    assert all(archive.compressed for archive in logledger.archives(log_dir))
    assert whole(log_dir) == written
    assert by_hand(log_dir) == written
    assert not leftovers(log_dir)


def test_an_archive_somebody_else_compressed_is_read(tmp_path: Path) -> None:
    """A gzip file without our lengths is read from its beginning."""
    written = numbered(0, 450)
    append(tmp_path, written)
    logfiles.rotate_if_due(tmp_path, SMALL, NOW)
    for archive in logledger.archives(tmp_path):
        plain = tmp_path / archive.name
        (tmp_path / f"{archive.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    assert whole(tmp_path) == written


def test_a_log_emptied_by_hand_starts_anew(place: tuple[str, Path]) -> None:
    """After `: > current` only what was in it is gone; what comes then is read and rotated as usual."""
    _, log_dir = place
    append(log_dir, numbered(0, 450))
    logfiles.rotate_if_due(log_dir, SMALL, NOW)
    archived = b"".join((log_dir / archive.name).read_bytes() for archive in logledger.archives(log_dir))
    os.truncate(log_dir / "current", 0)
    append(log_dir, b"anew\n")
    assert whole(log_dir) == archived + b"anew\n"
    logfiles.rotate_if_due(log_dir, SMALL, NOW)
    append(log_dir, numbered(0, 1000))
    logfiles.rotate_if_due(log_dir, SMALL, NOW + 1)
    assert whole(log_dir) == archived + b"anew\n" + numbered(0, 1000)


def test_only_one_rotates(tmp_path: Path) -> None:
    """While somebody holds the directory's lock, nobody else touches the log."""
    append(tmp_path, numbered(0, 450))
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert logfiles.rotate_if_due(tmp_path, SMALL, NOW) is None
        fcntl.flock(other, fcntl.LOCK_UN)
        assert logfiles.rotate_if_due(tmp_path, SMALL, NOW) is not None
    finally:
        os.close(other)


def test_a_missing_log_is_no_error(tmp_path: Path) -> None:
    """There is nothing to rotate, recover or read where no worker ever wrote."""
    nowhere = tmp_path / "nowhere"
    assert logfiles.rotate_if_due(nowhere, SMALL, NOW) is None
    logfiles.recover(nowhere)
    logfiles.mark(nowhere, "started")
    assert logfiles.waiting_bytes(nowhere) == 0
    assert logreader.tail(nowhere, 5) == []
    assert not nowhere.exists()


def test_a_device_or_pipe_in_place_of_the_log_is_left_alone(tmp_path: Path) -> None:
    """A log replaced by a FIFO neither blocks nor breaks us."""
    os.mkfifo(tmp_path / "current")
    assert logfiles.rotate_if_due(tmp_path, SMALL, NOW) is None


def test_a_torn_ledger_entry_is_the_one_before(tmp_path: Path) -> None:
    """An entry that was cut off while written does not count; the other slot does."""
    append(tmp_path, numbered(0, 450))
    logfiles.rotate_if_due(tmp_path, SMALL, NOW)
    ledger = logledger.load(tmp_path)
    data = bytearray((tmp_path / "ledger").read_bytes())
    at = (ledger.number % 2) * 512
    data[at + 40 : at + 60] = b"?" * 20
    (tmp_path / "ledger").write_bytes(data)
    assert logledger.load(tmp_path).number == ledger.number - 1


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "compressed"])
@pytest.mark.parametrize("damage", ["deleted", "overwritten"])
def test_a_lost_ledger_is_made_again_from_the_archives(place: tuple[str, Path], damage: str, compress: bool) -> None:
    """Names and lengths of the archives say where everything is, except in the middle of a rotation."""
    _, log_dir = place
    written = numbered(0, 1000)
    append(log_dir, written)
    logfiles.rotate_if_due(log_dir, SMALL, NOW)
    if compress:
        for _ in logfiles.compressing(log_dir):
            pass
    if damage == "deleted":
        (log_dir / "ledger").unlink()
    else:
        (log_dir / "ledger").write_bytes(b"?" * 1024)
    assert whole(log_dir) == written
    append(log_dir, numbered(1000, 1000))
    written += numbered(1000, 1000)
    assert whole(log_dir) == written
    assert logfiles.rotate_if_due(log_dir, SMALL, NOW) is not None
    assert whole(log_dir) == written
    assert by_hand(log_dir) == written


def test_an_archive_the_ledger_lost_sight_of_counts(place: tuple[str, Path]) -> None:
    """After a power failure the ledger may be older than the newest archive's name; no byte is read twice."""
    filesystem, log_dir = place
    if filesystem == "ramfs":
        pytest.skip("nothing on a ramfs survives a power failure")
    first, second = numbered(0, 210), numbered(210, 210)
    append(log_dir, first)
    logfiles.rotate_if_due(log_dir, SMALL, NOW)
    ledger = (log_dir / "ledger").read_bytes()
    before = logledger.load(log_dir)
    append(log_dir, second)
    copied = (log_dir / "current").read_bytes()[before.head - before.base :][:16_384]
    (log_dir / logledger.archive_name("20270115T080001Z", before.head)).write_bytes(copied)
    (log_dir / "ledger").write_bytes(ledger)
    (log_dir / "busy").touch()
    logfiles.recover(log_dir)
    assert whole(log_dir) == by_hand(log_dir) == first + second


@pytest.mark.parametrize("since", ["nothing", "a mark", "more than was lost"])
@pytest.mark.parametrize("kept", [0, 5_000, 16_000, 20_000])
@pytest.mark.parametrize("entry", ["lost", "there", "never made"])
@pytest.mark.parametrize("punched", [0, 4_096])
def test_a_power_cut_in_a_rotation_shows_no_line_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, kept: int, since: str, punched: int
) -> None:
    """The archive was synced and the file was not: of what is archived the disk has a part, or holes, or all."""
    log_dir, first = tmp_path / "log", entry == "never made"
    if not first:
        append(log_dir, numbered(0, 300))
        assert logfiles.rotate_if_due(log_dir, SMALL, NOW) is not None
    with Rotations() as rotations:
        ledger = (log_dir / "ledger").read_bytes() if not first else b" " * 1024
        current = (log_dir / "current").read_bytes() if not first else b""
        archived_from = len(whole(log_dir)) - len(current) if not first else 0
        lines = numbered(10_000, 240)
        append(log_dir, lines)
        current += lines
        assert rotations.run(log_dir, SMALL.max_bytes, SMALL.keep, "log.named") == -9
    archive = log_dir / logledger.archives(log_dir)[-1].name
    archived = archive.read_bytes()
    assert current.startswith(archived)
    if entry != "there":
        (log_dir / "ledger").write_bytes(ledger)
    kept = min(kept, len(current))
    front = bytes(min(punched, kept)) + current[min(punched, kept) : kept]
    monkeypatch.setattr(logledger, "boot_id", lambda: "another")
    (log_dir / "current").write_bytes(front)
    new = {"nothing": b"", "a mark": b"--- new ---\n", "more than was lost": b"--- new ---\n" * 4000}[since]
    append(log_dir, new)

    logfiles.recover(log_dir)

    there = b"".join((log_dir / one.name).read_bytes() for one in logledger.archives(log_dir))
    assert len(there) == archived_from + len(archived)
    assert whole(log_dir) == there + current[len(archived) : kept] + new
    rotated = logfiles.rotate_if_due(log_dir, Log(max_bytes=4096, keep=1000, compress=False), NOW + 10)
    assert rotated is not None or len(new) < 4096
    assert whole(log_dir) == there + current[len(archived) : kept] + new


def test_a_full_disk_loses_no_byte(tmp_path: Path) -> None:
    """Where an archive does not fit, the log stays whole, and it is rotated once there is room."""
    with directory_on("tmpfs", tmp_path, "size=500k") as directory:
        log_dir = directory / "log"
        written = numbered(0, 2400)
        append(log_dir, written)
        filler = directory / "filler"
        filler.write_bytes(b"x" * 220_000)
        policy = Log(max_bytes=200_000, keep=5, compress=False)
        with pytest.raises(OSError, match="No space left"):
            logfiles.rotate_if_due(log_dir, policy, NOW)
        logfiles.mark(log_dir, "still fine")
        assert whole(log_dir).startswith(written)
        filler.unlink()
        written = whole(log_dir)
        assert logfiles.rotate_if_due(log_dir, policy, NOW) is not None
        assert whole(log_dir) == written
        assert not leftovers(log_dir)


def test_a_full_disk_gives_up_the_oldest_archive_first(tmp_path: Path) -> None:
    """The archive that would be pruned after the rotation makes room for it when there is none."""
    with directory_on("tmpfs", tmp_path, "size=400k") as directory:
        log_dir = directory / "log"
        policy = Log(max_bytes=100_000, keep=2, compress=False)
        written = b""
        for turn in range(8):
            data = numbered(turn * 1010, 1010)
            append(log_dir, data)
            written += data
            assert logfiles.rotate_if_due(log_dir, policy, NOW + turn) is not None
            assert written.endswith(whole(log_dir))


def test_a_mark_on_a_full_disk_is_lost_without_a_word(tmp_path: Path) -> None:
    """The worker matters more than our line about it."""
    with directory_on("tmpfs", tmp_path, "size=64k") as directory:
        log_dir = directory / "log"
        append(log_dir, b"first\n")
        with pytest.raises(OSError, match="No space"):
            (directory / "filler").write_bytes(b"x" * 100_000)
        for _ in range(100):
            logfiles.mark(log_dir, "x" * 100)
        assert logreader.tail(log_dir, 1000)[0] == "first"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(1, 30_000)),
            st.tuples(st.just("rotate"), st.integers(4096, 40_000)),
            st.tuples(st.just("compress"), st.just(0)),
        ),
        max_size=14,
    ),
    seed=st.integers(0, 2**32),
)
def test_any_order_of_writing_rotating_and_compressing_keeps_every_byte(
    tmp_path: Path, steps: list[tuple[str, int]], seed: int
) -> None:
    """Whatever happens in whatever order, the reader sees what was written."""
    log_dir = tmp_path / f"{zlib.crc32(repr((steps, seed)).encode())}" / "log"
    written = b""
    noise = bytes((seed * 7 + number * number) % 251 for number in range(30_000))
    for step, size in steps:
        if step == "write":
            append(log_dir, noise[:size])
            written += noise[:size]
        elif step == "rotate":
            logfiles.rotate_if_due(log_dir, Log(max_bytes=size, keep=100_000, compress=False), NOW)
        elif log_dir.exists():
            for _ in logfiles.compressing(log_dir):
                pass
        assert whole(log_dir) == written
