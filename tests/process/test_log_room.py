"""All logs of a deck together: a budget, and a floor of free space that logs do not take."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck import Deck, Log, LogRoom
from everdeck.crashpoints import CRASH_AT_ENV
from everdeck.logs import room
from everdeck.model import EventKind
from support.mounts import mounted
from support.waiting import until

MEGABYTE = 1 << 20
# So many megabytes, slowly enough that somebody can look: 64 kB at a time, and much slower below half of the floor.
WRITER = """
import os, sys, time
for _ in range(int(sys.argv[1]) * 16):
    sys.stdout.write(("x" * 1023 + chr(10)) * 64); sys.stdout.flush()
    there = os.statvfs(".")
    time.sleep(0.002 if there.f_bavail * there.f_frsize > 9 << 20 else 0.1)
time.sleep(1000)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """40 megabytes that are nobody else's."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place = tmp_path / "small"
    place.mkdir()
    with mounted(place, ["-t", "tmpfs", "-o", "size=40m", "none"]):
        yield place


def archives(deck: Deck, name: str) -> list[str]:
    """The names of a worker's archives."""
    return sorted(path.name for path in (deck.state_dir / "workers" / name / "log").glob("*.log*"))


def test_the_oldest_archives_go_first_whoevers_they_are(tmp_path: Path) -> None:
    """Plain or compressed, of one stream or the other, and not one more than is needed."""
    made = []
    for number, place in enumerate(["a/log", "b/log", "a/log/stderr", "b/log", "a/log"]):
        folder = tmp_path / place
        folder.mkdir(parents=True, exist_ok=True)
        ending = ".gz" if number % 2 else ""
        archive = folder / f"2026111{number}T000000Z-{number:018d}.log{ending}"
        archive.write_bytes(b"x" * MEGABYTE)
        made.append(archive)
    setting = LogRoom(budget_bytes=3 * MEGABYTE, keep_free_bytes=0)
    freed = room.make_room(setting, tmp_path)
    assert [path.exists() for path in made] == [False, False, True, True, True]
    assert freed.pruned == {"a": [made[0].name], "b": [made[1].name]}
    assert f"more than {3 * MEGABYTE}" in freed.why
    assert room.make_room(setting, tmp_path).pruned == {}
    assert room.make_room(LogRoom(keep_free_bytes=1 << 60), tmp_path).short_bytes > 0, "none is left, and that is said"


def test_a_kill_between_two_archives_leaves_the_rest_for_the_next_owner(tmp_path: Path) -> None:
    """What is left is the end of the log, and the next look goes on where this one was."""
    folder = tmp_path / "a" / "log"
    folder.mkdir(parents=True)
    names = [f"2026111{number}T000000Z-{number:018d}.log" for number in range(4)]
    for name in names:
        (folder / name).write_bytes(b"x" * MEGABYTE)
    program = (
        "from pathlib import Path; from everdeck.logs import room; from everdeck.model import LogRoom; "
        f"room.make_room(LogRoom(budget_bytes={MEGABYTE}, keep_free_bytes=0), Path({str(tmp_path)!r}))"
    )
    crash = {**os.environ, CRASH_AT_ENV: "log.room-made:2"}
    assert subprocess.run([sys.executable, "-c", program], env=crash, check=False).returncode == -signal.SIGKILL
    assert sorted(path.name for path in folder.iterdir()) == names[2:]
    subprocess.run([sys.executable, "-c", program], check=True)
    assert [path.name for path in folder.iterdir()] == names[3:]


def test_logs_leave_the_floor_of_free_space_alone(small_disk: Path) -> None:
    """First the archives of somebody who stopped long ago go, then the writer's own; each time it is told why."""
    floor = 16 * MEGABYTE
    with Deck(small_disk / "state", log_room=LogRoom(keep_free_bytes=floor)) as deck:
        policy = Log(max_bytes=2 * MEGABYTE, keep=100, compress=False)
        deck.start("old", [sys.executable, "-c", WRITER, "9"], log=policy)
        until(lambda: len(archives(deck, "old")) >= 4, "the first one's archives")
        deck.stop("old")
        deck.start("new", [sys.executable, "-c", WRITER, "60"], log=policy)
        until(lambda: not archives(deck, "old"), "the oldest archives went")
        until(lambda: told(deck, "new"), "and then those of the writer itself")
        assert archives(deck, "new"), "its newest ones stay"
        deck.stop_all()
        assert "the disk has" in told(deck, "old")[0]["warning"]
        assert shutil.disk_usage(small_disk).free > floor // 2
        # A worker whose log has no archives at all is cut, because nothing else is left to go.
        deck.start("endless", [sys.executable, "-c", WRITER, "60"], log=Log(max_bytes=1 << 30))
        until(lambda: any("no archive is left" in one["warning"] for one in told(deck, "endless")), "it was cut")
        assert deck.status("endless").state == "running"
        deck.stop_all()
        said = doctor(deck.state_dir)
        assert "free space = " in said
        assert f"below {floor // MEGABYTE}.0M free" in said


def told(deck: Deck, name: str) -> list[dict[str, str]]:
    """What was said about a worker's log when room was made."""
    found = [event.detail for event in deck.events(worker=name) if event.kind is EventKind.LOG_ROTATED]
    return [detail for detail in found if "warning" in detail]


def doctor(state_dir: Path) -> str:
    """What the doctor prints."""
    command = [sys.executable, "-m", "everdeck.cli", "--state", str(state_dir), "doctor"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
