"""Logs kept by a living owner: rotated while they are written, also when the owner is killed meanwhile."""

import asyncio
import contextlib
import fcntl
import gzip
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everdeck.kernel import inotify
from everdeck.logs import files as logfiles
from everdeck.logs import keeper as deck_logs
from everdeck.logs import ledger as logledger
from everdeck.logs import reader as logreader
from everdeck.logs.keeper import Armed, LogKeeper
from everdeck.model import Log
from support.logs_namespace import CANNOT
from support.logs_places import directory_on
from support.logs_writer import LINE_BYTES, assert_numbered, numbered, writer_command
from support.waiting import until_in

OWNER = Path(__file__).parent.parent / "support" / "logs_owner.py"
DEADLINE_SECONDS = 90
TEN_MB = 10_000_000


class Owner:
    """One owner process."""

    def __init__(self, place: Path, max_bytes: int, keep: int, *, compress: bool = False, count: int = 0) -> None:
        options = [str(max_bytes), str(keep), "compress" if compress else "plain", str(count)]
        self.process = subprocess.Popen(
            [sys.executable, str(OWNER), str(place), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        """The next line it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    def kill(self) -> None:
        """End it without any chance to tidy up."""
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_SECONDS)

    def leave(self) -> list[dict[str, Any]]:
        """Let it close its keeper and leave; the rotations it had not been asked about."""
        rest, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        assert self.process.returncode == 0
        return [json.loads(line) for line in rest.splitlines()]


@contextmanager
def writing(log_dir: Path, build_dir: Path, count: int) -> "Iterator[subprocess.Popen[bytes]]":
    """A worker of its own that writes ``count`` numbered lines into the log."""
    fd, _ = logfiles.open_for_worker(log_dir, split_stderr=False)
    writer = subprocess.Popen(writer_command(build_dir, count), stdout=fd)
    os.close(fd)
    try:
        yield writer
    finally:
        if writer.poll() is None:
            writer.kill()
        writer.wait(DEADLINE_SECONDS)


def by_hand(log_dir: Path) -> Iterator[bytes]:
    """Archives in order and then current, by file name only."""
    for archive in logledger.archives(log_dir):
        data = (log_dir / archive.name).read_bytes()
        yield gzip.decompress(data) if archive.compressed else data
    current = log_dir / "current"
    with current.open("rb") as file:
        # On tmpfs the front is a hole: skip it as a reader would, without reading it.
        file.seek(os.lseek(file.fileno(), 0, os.SEEK_DATA))
        yield file.read()


@pytest.mark.parametrize("filesystem", ["ext4", "tmpfs"])
def test_two_hundred_megabytes_every_line_once(tmp_path: Path, filesystem: str) -> None:
    """A writer of 100-byte lines, rotated every 10 MB: each line is in exactly one place."""
    count = 200_000_000 // LINE_BYTES
    with directory_on(filesystem, tmp_path) as place:
        log_dir = place / "log"
        logfiles.mark(log_dir, "")  # no directory yet: no mark, no error
        log_dir.mkdir(parents=True)
        (log_dir / "current").touch()
        owner = Owner(log_dir, TEN_MB, 1000)
        with writing(log_dir, tmp_path, count) as writer:
            assert writer.wait(DEADLINE_SECONDS) == 0
        while logfiles.waiting_bytes(log_dir) >= TEN_MB:
            assert owner.line()
        owner.leave()
        assert 15 <= len(logledger.archives(log_dir)) <= 20
        assert_numbered(by_hand(log_dir), count)


def test_two_hundred_megabytes_on_tmpfs_with_the_owner_killed_five_times(tmp_path: Path) -> None:
    """The same while the owner is killed in the midst of its rotations (test_logs_of_a_deck.py does it on the disk)."""
    count = 200_000_000 // LINE_BYTES
    with directory_on("tmpfs", tmp_path) as place:
        log_dir = place / "log"
        os.close(logfiles.open_for_worker(log_dir, split_stderr=False)[0])
        with writing(log_dir, tmp_path, count) as writer:
            for _ in range(5):
                owner = Owner(log_dir, TEN_MB, 1000)
                assert json.loads(owner.line())["archives"]  # it rotates; the next rotation is about to begin or has
                owner.kill()
            owner = Owner(log_dir, TEN_MB, 1000)
            assert writer.wait(DEADLINE_SECONDS) == 0
        while logfiles.waiting_bytes(log_dir) >= TEN_MB:
            assert owner.line()
        owner.leave()
        assert_numbered(logreader.raw(log_dir), count)
        assert_numbered(by_hand(log_dir), count)


def test_killed_at_random_moments_while_compressing(tmp_path: Path) -> None:
    """Small archives, compressed, and an owner killed thirty times: still every line once."""
    count = 400_000
    log_dir = tmp_path / "log"
    os.close(logfiles.open_for_worker(log_dir, split_stderr=False)[0])
    with writing(log_dir, tmp_path, count) as writer:
        kills = 0
        while writer.poll() is None or kills < 8:
            owner = Owner(log_dir, 300_000, 10_000, compress=True)
            if writer.poll() is None:
                assert owner.line()
            owner.kill()
            kills += 1
    Owner(log_dir, 300_000, 10_000, compress=True).leave()
    logfiles.recover(log_dir)
    assert_numbered(by_hand(log_dir), count)


def test_following_a_log_that_rotates(tmp_path: Path) -> None:
    """Lines come from the loop's side as they are written, each once, while archives are made and compressed."""
    count = 100_000
    log_dir = tmp_path / "log"
    os.close(logfiles.open_for_worker(log_dir, split_stderr=False)[0])
    owner = Owner(log_dir, 500_000, 1000, compress=True)

    async def follow() -> None:
        seen = 0
        async with asyncio.timeout(DEADLINE_SECONDS):
            async for text in deck_logs.follow(log_dir):
                assert int(text[:12]) == seen
                seen += 1
                if seen == 1:
                    assert text + "\n" == numbered(0, 1).decode()
                if seen == count:
                    return

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            following = group.create_task(follow())
            await asyncio.sleep(0)
            fd, _ = logfiles.open_for_worker(log_dir, split_stderr=False)
            writer = await asyncio.create_subprocess_exec(*writer_command(tmp_path, count), stdout=fd)
            os.close(fd)
            assert await writer.wait() == 0
            await following

    try:
        asyncio.run(both())
    finally:
        owner.leave()


def test_silent_workers_wake_nobody(tmp_path: Path) -> None:
    """A thousand logs nobody writes to: the owner sleeps, and one write wakes it."""
    for number in range(1000):
        os.close(logfiles.open_for_worker(tmp_path / f"w{number}", split_stderr=False)[0])
    owner = Owner(tmp_path, 20_000, 5, count=1000)
    try:
        fds = list(Path(f"/proc/{owner.process.pid}/fd").iterdir())
        assert len(fds) < 20
        _wait_until_asleep(owner.process.pid)
        before = _switches(owner.process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            owner.process.wait(1.0)  # the measurement itself: a second in which nothing may happen
        assert _switches(owner.process.pid) == before
        with (tmp_path / "w500" / "current").open("ab") as log:
            log.write(numbered(0, 1000))
        told = json.loads(owner.line())
        assert told["name"] == "w500"
        assert told["method"] in ("collapse", "punch")
        assert told["bytes"] > 0
    finally:
        owner.leave()


def _switches(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)


def _wait_until_asleep(pid: int) -> None:
    """It has said ``ready`` a moment before it sleeps."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        pass


def test_a_log_written_while_nobody_watched_is_rotated_at_open(tmp_path: Path) -> None:
    """What a worker wrote between two owners counts, without a new write."""
    fd, _ = logfiles.open_for_worker(tmp_path, split_stderr=False)
    os.write(fd, numbered(0, 1000))
    os.close(fd)
    owner = Owner(tmp_path, 20_000, 100)
    assert json.loads(owner.line())["archives"]
    owner.leave()
    assert_numbered(by_hand(tmp_path), 1000)


def test_a_fast_writer_stays_near_its_cap(tmp_path: Path) -> None:
    """Megabyte writes as fast as the machine can: disk use stays bounded, and the end of the log is kept."""
    log_dir = tmp_path / "log"
    policy = Log(max_bytes=4_000_000, keep=3, compress=False)
    fd, _ = logfiles.open_for_worker(log_dir, split_stderr=False)
    owner = Owner(log_dir, policy.max_bytes, policy.keep)
    block = numbered(0, 10_000)
    highest = 0
    try:
        for _ in range(400):
            os.write(fd, block)
            highest = max(highest, _used(log_dir))
        os.write(fd, b"the end\n")
    finally:
        os.close(fd)
        while logfiles.waiting_bytes(log_dir) >= policy.max_bytes:
            assert owner.line()
        owner.leave()
    assert logreader.tail(log_dir, 1) == ["the end"]
    assert len(logledger.archives(log_dir)) <= policy.keep
    assert _used(log_dir) <= policy.max_bytes * (policy.keep + 1) + 100_000
    assert highest < 400_000_000


def _used(log_dir: Path) -> int:
    """Bytes on disk; a file that gets its name or is pruned while we look is somebody else's turn."""
    used = 0
    for entry in log_dir.iterdir():
        with contextlib.suppress(FileNotFoundError):
            used += entry.stat().st_blocks * 512
    return used


def test_rotations_are_told_of_at_most_once_a_second(tmp_path: Path) -> None:
    """A burst of rotations is one or two reports, which together name every archive's bytes."""
    reports: list[dict[str, Any]] = []

    async def burst() -> None:
        keeper = LogKeeper(lambda _name, detail: reports.append(detail))
        keeper.open()
        fd, _ = logfiles.open_for_worker(tmp_path, split_stderr=False)
        keeper.watch("a", tmp_path, Log(max_bytes=8192, keep=10_000, compress=False))
        for turn in range(5):
            os.write(fd, numbered(turn * 100, 100))
            await until_in(tmp_path, lambda: logfiles.waiting_bytes(tmp_path) < 8192)
        os.close(fd)
        keeper.close()

    asyncio.run(burst())
    assert 1 <= len(reports) <= 5
    archives = logledger.archives(tmp_path)
    assert sum(report["bytes"] for report in reports) == logledger.load(tmp_path).head
    assert len(archives) >= 5
    assert_numbered(by_hand(tmp_path), 500)


@pytest.mark.parametrize("early", [True, False], ids=["heard of before it is known", "known before it is heard of"])
def test_a_log_whose_watch_was_armed_by_its_maker_is_kept_within_its_size(tmp_path: Path, *, early: bool) -> None:
    """All that it ever writes may be written before the keeper is told whose the watch is."""

    async def once() -> None:
        keeper = LogKeeper(lambda _name, _detail: None)
        keeper.open()
        fd, _ = logfiles.open_for_worker(tmp_path, split_stderr=False)
        keeper.expect(1)
        mask = inotify.MODIFY | inotify.ONESHOT
        armed = Armed(inotify.add_watch(keeper.inotify_fd, f"{tmp_path}/current", mask), 0)
        if early:
            os.write(fd, numbered(0, 100))
            await asyncio.sleep(0.2)  # it is heard of, and nobody knows whose it is
        keeper.watch("a", tmp_path, Log(max_bytes=8192, compress=False), armed)
        keeper.expect(-1)
        if not early:
            os.write(fd, numbered(0, 100))
        os.close(fd)
        await until_in(tmp_path, lambda: bool(logledger.archives(tmp_path)))
        keeper.close()

    asyncio.run(once())
    assert_numbered(by_hand(tmp_path), 100)


def test_rotations_do_not_undo_compression(tmp_path: Path) -> None:
    """Archives that come while others are being compressed wait their turn; in the end all are compressed."""

    async def bursts() -> None:
        keeper = LogKeeper(lambda _name, _detail: None, compress_after_seconds=0)
        keeper.open()
        fd, _ = logfiles.open_for_worker(tmp_path, split_stderr=False)
        keeper.watch("a", tmp_path, Log(max_bytes=3_000_000, keep=1000))
        for turn in range(6):
            os.write(fd, numbered(turn * 32_000, 32_000))
            await until_in(tmp_path, lambda: logfiles.waiting_bytes(tmp_path) < 3_000_000)
        os.close(fd)
        await until_in(tmp_path, lambda: all(archive.compressed for archive in logledger.archives(tmp_path)))
        keeper.close()

    asyncio.run(bursts())
    assert len(logledger.archives(tmp_path)) == 6
    assert_numbered(by_hand(tmp_path), 6 * 32_000)


def test_a_young_archive_is_not_compressed_yet(tmp_path: Path) -> None:
    """Archives wait until they are old enough, because those of a fast writer are pruned before that."""

    async def once() -> None:
        keeper = LogKeeper(lambda _name, _detail: None, compress_after_seconds=0.5)
        keeper.open()
        fd, _ = logfiles.open_for_worker(tmp_path, split_stderr=False)
        os.write(fd, numbered(0, 1000))
        os.close(fd)
        keeper.watch("a", tmp_path, Log(max_bytes=20_000))
        await until_in(tmp_path, lambda: bool(logledger.archives(tmp_path)))
        made_at = (tmp_path / logledger.archives(tmp_path)[0].name).stat().st_mtime
        await until_in(tmp_path, lambda: all(archive.compressed for archive in logledger.archives(tmp_path)))
        assert time.time() - made_at >= 0.5
        keeper.close()

    asyncio.run(once())
    assert not (tmp_path / "busy").exists()


def test_what_was_rotated_while_closing_is_told_of(tmp_path: Path) -> None:
    """A keeper that is closed in the middle of a rotation finishes it and reports it."""
    told: list[str] = []

    async def once() -> None:
        keeper = LogKeeper(lambda name, _detail: told.append(name))
        keeper.open()
        fd, _ = logfiles.open_for_worker(tmp_path, split_stderr=False)
        os.write(fd, numbered(0, 100_000))
        os.close(fd)
        keeper.watch("a", tmp_path, Log(max_bytes=1_000_000, keep=1000))
        await until_in(tmp_path, (tmp_path / "busy").exists)
        keeper.close()

    asyncio.run(once())
    assert told == ["a"]
    assert_numbered(by_hand(tmp_path), 100_000)


def test_a_callback_that_raises_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rotation is done, the error is logged, the keeper goes on."""

    async def once() -> None:
        told = asyncio.Event()

        def raising(_name: str, _detail: dict[str, Any]) -> None:
            told.set()
            raise ValueError("from the callback")

        keeper = LogKeeper(raising)
        keeper.open()
        fd, _ = logfiles.open_for_worker(tmp_path, split_stderr=True)
        keeper.watch("a", tmp_path, Log(max_bytes=8192, split_stderr=True))
        os.write(fd, numbered(0, 100))
        os.close(fd)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await told.wait()
        keeper.unwatch("a")
        keeper.close()

    asyncio.run(once())
    assert "from the callback" in caplog.text


def test_a_log_locked_by_somebody_is_not_tried_all_the_time(tmp_path: Path) -> None:
    """While the lock is held a due log is looked at twice a second; it is rotated after that."""

    async def once() -> float:
        told = asyncio.Event()
        keeper = LogKeeper(lambda _name, _detail: told.set())
        keeper.open()
        fd, _ = logfiles.open_for_worker(tmp_path, split_stderr=False)
        holder = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(holder, fcntl.LOCK_EX)
        os.write(fd, numbered(0, 1000))
        os.close(fd)
        keeper.watch("a", tmp_path, Log(max_bytes=8192, keep=1000, compress=False))
        before = time.process_time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):  # the measurement itself
                await told.wait()
        spent = time.process_time() - before
        os.close(holder)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await told.wait()
        keeper.close()
        return spent

    assert asyncio.run(once()) < 0.2
    assert_numbered(by_hand(tmp_path), 1000)


def test_a_stderr_log_of_its_own_is_rotated_too(tmp_path: Path) -> None:
    """With split_stderr both streams are kept within their size."""

    async def once() -> None:
        told = asyncio.Event()
        keeper = LogKeeper(lambda _name, _detail: told.set())
        keeper.open()
        out, err = logfiles.open_for_worker(tmp_path, split_stderr=True)
        keeper.watch("a", tmp_path, Log(max_bytes=8192, split_stderr=True, compress=False))
        os.write(err, numbered(0, 100))
        async with asyncio.timeout(DEADLINE_SECONDS):
            await told.wait()
        os.close(out)
        os.close(err)
        keeper.close()

    asyncio.run(once())
    assert logledger.archives(tmp_path / "stderr")
    assert not logledger.archives(tmp_path)
    assert_numbered(by_hand(tmp_path / "stderr"), 100)


def test_an_old_log_is_rotated_when_its_time_comes(tmp_path: Path) -> None:
    """max_age_seconds needs no further write."""

    async def once() -> dict[str, Any]:
        told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        keeper = LogKeeper(lambda _name, detail: told.set_result(detail))
        keeper.open()
        fd, _ = logfiles.open_for_worker(tmp_path, split_stderr=False)
        keeper.watch("a", tmp_path, Log(max_age_seconds=0.3, compress=False))
        os.write(fd, numbered(0, 100))
        os.close(fd)
        async with asyncio.timeout(DEADLINE_SECONDS):
            detail = await told
        keeper.close()
        return detail

    assert asyncio.run(once())["bytes"] == 8192
    assert_numbered(by_hand(tmp_path), 100)


def test_times_are_noted_while_a_log_is_written(tmp_path: Path) -> None:
    """--since has something to stand on: the index names moments and positions, both growing."""

    async def once() -> None:
        keeper = LogKeeper(lambda _name, _detail: None)
        keeper.open()
        fd, _ = logfiles.open_for_worker(tmp_path, split_stderr=False)
        keeper.watch("a", tmp_path, Log())
        os.write(fd, b"first\n")
        await until_in(tmp_path, lambda: len(logreader._index(tmp_path)) == 2)
        os.close(fd)
        keeper.close()

    asyncio.run(once())
    entries = logreader._index(tmp_path)
    assert [position for _, position in entries] == [0, 6]
    assert entries[0][0] <= entries[1][0]


def test_a_watch_costs_little(tmp_path: Path) -> None:
    """Under 300 bytes for each of many silent workers, and no descriptor."""
    places = [tmp_path / f"worker-{number:05d}" / "log" for number in range(3000)]
    for place in places:
        os.close(logfiles.open_for_worker(place, split_stderr=False)[0])
    names = [f"worker-{number:05d}" for number in range(3000)]
    policy = Log()

    async def watch() -> int:
        keeper = LogKeeper(lambda _name, _detail: None)
        keeper.open()
        keeper.watch(names[0], places[0], policy)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for name, place in zip(names[1:], places[1:], strict=True):
                keeper.watch(name, place, policy)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            keeper.close()
        return (after - before) // (len(names) - 1)

    assert asyncio.run(watch()) <= 300


def test_without_inotify_logs_are_still_rotated(tmp_path: Path) -> None:
    """With no descriptor left for the user the deck's wake-ups do, and it is said once."""
    fd, _ = logfiles.open_for_worker(tmp_path, split_stderr=False)
    os.close(fd)
    program = f"""
import asyncio, logging, os, sys
from pathlib import Path
from everdeck.logs.keeper import Armed, LogKeeper
from everdeck.model import Log
logging.basicConfig()
sys.path.insert(0, sys.argv[1])
from support.logs_namespace import forbid_inotify
forbid_inotify()
async def main():
    told = asyncio.Event()
    keeper = LogKeeper(lambda name, detail: told.set())
    keeper.open()
    keeper.watch("a", Path({str(tmp_path)!r}), Log(max_bytes=8192, compress=False))
    keeper.watch("b", Path({str(tmp_path / "none")!r}), Log())
    with open({str(tmp_path / "current")!r}, "ab") as log:
        log.write(b"x" * 20_000)
    keeper.poke()
    async with asyncio.timeout(60):
        await told.wait()
    keeper.close()
    print("rotated")
asyncio.run(main())
"""
    tests = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", program, tests], capture_output=True, text=True, check=False)
    if done.returncode == CANNOT:
        pytest.skip("no user namespace of our own to set the limit in")
    assert done.stdout == "rotated\n", done.stderr
    assert done.stderr.count("inotify is used up") == 1


def test_a_full_disk_is_said_once_and_overcome(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The keeper warns, loses nothing, and rotates when it looks again and there is room."""
    with directory_on("tmpfs", tmp_path, "size=600k") as place:
        log_dir = place / "log"

        async def once() -> None:
            warned = asyncio.Event()
            caplog.handler.addFilter(lambda _record: warned.set() or True)  # type: ignore[func-returns-value]  # set() is the point
            keeper = LogKeeper(lambda _name, _detail: None)
            keeper.open()
            fd, _ = logfiles.open_for_worker(log_dir, split_stderr=False)
            (place / "filler").write_bytes(b"x" * 300_000)
            keeper.watch("a", log_dir, Log(max_bytes=200_000, compress=False))
            os.write(fd, numbered(0, 2500))
            async with asyncio.timeout(DEADLINE_SECONDS):
                await warned.wait()
            (place / "filler").unlink()
            keeper.watch("a", log_dir, Log(max_bytes=200_000, compress=False))
            await until_in(log_dir, lambda: bool(logledger.archives(log_dir)))
            os.close(fd)
            keeper.close()

        asyncio.run(once())
        assert caplog.text.count("cannot be rotated") == 1
        assert_numbered(by_hand(log_dir), 2500)
