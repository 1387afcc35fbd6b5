"""The guardian of a dead owner never touches the next owner, however long that one had been waiting."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.child_owner import Owner
from support.repo_processes import end_all_under

DEADLINE_SECONDS = 60

# What a next owner does when it opens and starts: the deck's lock first, then the worker's. It is older than the
# first owner's death, shows no cookie, and holds the worker's lock: all that can be said of a stray, too.
NEXT_OWNER = """
import fcntl, os, sys
locks = []
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    locks.append(fd)
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory; whatever still runs there afterwards is ended."""
    try:
        yield tmp_path / "state"
    finally:
        end_all_under(tmp_path)


def test_a_next_owner_that_is_just_starting_the_worker_is_no_stray(state: Path) -> None:
    """It holds the worker's lock without a cookie while the guardian looks for strays, and lives."""
    with Owner() as owner:
        owner.do("open", state)
        owner.do("start", state, "bot", ["sleep", "1000"], lifetime="bound", stop={"grace_seconds": 1.0})
        guardian = os.pidfd_open(owner.do("guardian", state))
        locks = [str(state / "deck.lock"), str(state / "workers" / "bot" / "lock")]
        waiting = subprocess.Popen(
            [sys.executable, "-c", NEXT_OWNER, *locks], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            owner.kill()
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == "holding\n"
            assert select.select([guardian], [], [], DEADLINE_SECONDS)[0], "the guardian does not leave"

            assert waiting.poll() is None, "the guardian ended the next owner"
            told = [json.loads(line) for line in (state / "guardian.log").read_text().splitlines()]
            assert [word["worker"] for word in told if word["gone"]] == ["bot"]
        finally:
            os.close(guardian)
            waiting.kill()
            waiting.communicate()
