"""Logs through the real owner: rotated, told of, and continued by the next owner after a SIGKILL."""

import os
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck import Deck
from everdeck.kernel import inotify
from everdeck.logs import files as logfiles
from everdeck.logs import ledger as logledger
from everdeck.logs import reader as logreader
from everdeck.registry import read_only
from support.logs_writer import assert_numbered, writer_command
from support.waiting import until

DEADLINE_SECONDS = 90
COUNT = 2_000_000
MAX_BYTES = 10_000_000
_OWNER = textwrap.dedent(
    """
    import sys
    from everdeck import Deck, Log, Restart
    state, max_bytes, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    with Deck(state) as deck:
        if command:
            deck.start("writer", command, restart=Restart("never"), log=Log(max_bytes=max_bytes, keep=10_000))
        print("open", flush=True)
        sys.stdin.read()
    """
)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory whose workers are gone afterwards."""
    place = tmp_path / "state"
    yield place
    with Deck(place) as deck:
        deck.stop_all()


def owner(state: Path, *command: str) -> "subprocess.Popen[str]":
    """A process that owns the deck."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(state), str(MAX_BYTES), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    read_until(process, "open")
    return process


def read_until(process: "subprocess.Popen[str]", wanted: str) -> None:
    """Wait until the owner has said it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(f"the owner ended without saying {wanted!r}")


def written_by_the_worker(log_dir: Path) -> Iterator[bytes]:
    """The log without our marks."""
    rest = b""
    for block in logreader.raw(log_dir):
        *lines, rest = (rest + block).split(b"\n")
        yield b"".join(line + b"\n" for line in lines if not line.startswith(b"--- everdeck "))
    assert rest == b""


def test_five_owners_killed_one_log(tmp_path: Path, state: Path) -> None:
    """A worker writes on while its owners are killed one after the other: every line once, rotated by all of them."""
    log_dir = state / "workers" / "writer" / "log"
    first = owner(state, *writer_command(tmp_path, COUNT))
    process = first
    try:
        until(lambda: is_told(state), "the first rotation is told")  # the others may be killed before they tell
        rotations = 1
        for _ in range(5):
            rotations += wait_for_a_rotation(log_dir)
            process.kill()
            process.communicate(timeout=DEADLINE_SECONDS)
            process = owner(state)
        with logreader.Follower(grep=f"^{COUNT - 1:012d} ") as follower:
            follower.add("writer", log_dir, lines=5)
            assert next(iter(follower)).name == "writer"
    finally:
        process.communicate(timeout=DEADLINE_SECONDS)
    logfiles.recover(log_dir)
    assert_numbered(written_by_the_worker(log_dir), COUNT)
    assert len(logledger.archives(log_dir)) >= rotations


def is_told(state: Path) -> bool:
    """Is there an event that tells of a rotation?"""
    registry = read_only(state / "deck.db")
    try:
        return any(event.kind == "log-rotated" for event in registry.events())
    finally:
        registry.close()


def wait_for_a_rotation(log_dir: Path) -> bool:
    """Until one more archive was made, or the writer is done: on a slow machine it may be faster than five owners."""
    before = logledger.load(log_dir).head
    deadline = time.monotonic() + DEADLINE_SECONDS
    fd = inotify.open_inotify()
    try:
        inotify.add_watch(fd, str(log_dir / "current"), inotify.MODIFY)
        while logledger.load(log_dir).head == before and not is_done(log_dir):
            assert time.monotonic() < deadline, "no rotation"
            select.select([fd], [], [], DEADLINE_SECONDS)
            list(inotify.heard(fd))
        return logledger.load(log_dir).head != before
    finally:
        os.close(fd)


def is_done(log_dir: Path) -> bool:
    """Whether the writer's last line is there."""
    return any(line.startswith(f"{COUNT - 1:012d} ") for line in logreader.tail(log_dir, 5))


def test_a_start_and_an_end_are_marked(state: Path) -> None:
    """Between the marks lies what the worker said, also what it said last."""
    with Deck(state) as deck:
        status = deck.start("a", [sys.executable, "-c", "print('hello'); print('bye', end='')"])
        with logreader.Follower(grep="ended pid=") as follower:
            follower.add("a", state / "workers" / "a" / "log", lines=10)
            assert next(iter(follower)).name == "a"
        start, hello, bye, end = deck.logs("a", lines=10)
    assert "started cookie=" in start
    assert (hello, bye) == ("hello", "bye")
    assert f"ended pid={status.pid} exit code 0" in end
