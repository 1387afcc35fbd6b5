"""Workers that daemonise at once and shed everything that could tell whose they are: `stop` ends them all the same."""

import os
import secrets
import sys
from pathlib import Path

import pytest

from everdeck import Deck
from everdeck.kernel import containment, native
from everdeck.kernel import identity as ids
from support.waiting import until

SECONDS = 600  # in a machine that is emulated, sixty interpreters take their time
TOGETHER = int(os.environ.get("EVERDECK_DAEMONISERS", "20"))
DAEMON = """
import os, sys
if os.fork():
    os.execlp("sleep", "sleep", "1000")
os.setsid()
if os.fork():
    os._exit(0)
os.closerange(0, 4096)
os.execve("/bin/sleep", ["sleep", sys.argv[1]], {})
"""


def _daemons(mark: str) -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and _is_daemon(int(one.name), mark)]


def _is_daemon(pid: int, mark: str) -> bool:
    return ids.command_line(pid) == f"sleep {mark}"


def test_daemons_without_descriptors_and_environment_end_with_their_worker(tmp_path: Path) -> None:
    """Born in its cgroup a worker has no moment in which it could get away, however many start together."""
    if containment.cgroup_home() is None:
        pytest.skip("no writable cgroup v2 directory: then the strength is told as `cookie`")
    if not native.available():
        pytest.skip("without the C side a plain worker joins its cgroup after its birth: told as `cookie` too")
    mark = f"1000.{secrets.randbelow(10**9)}"
    command = [sys.executable, "-SEc", DAEMON, mark]
    with Deck(tmp_path / "state", durability="process") as deck:
        try:
            started = deck.start_many({f"w{number}": command for number in range(TOGETHER)})
            assert {one.containment for one in started} == {"cgroup"}
            until(lambda: len(_daemons(mark)) == TOGETHER, "they all daemonise", SECONDS, pause_seconds=0.1)
        finally:
            deck.stop_all()
    assert _daemons(mark) == []
