"""The owner dies, its successor dies on the way, and a third process takes over; and many processes at once.

Every crash point of opening is also one of taking over, because taking over is opening. The points are read from the
source.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from everdeck import Deck, State
from everdeck.crashpoints import CRASH_AT_ENV
from support.repo_processes import end_all_under
from support.waiting import until

ROOT = Path(__file__).parents[2]
OPENING = ROOT / "src" / "everdeck" / "deck"
POINTS = sorted(
    {
        point
        for path in OPENING.rglob("*.py")
        for point in re.findall(r'crash_point\("((?:open|takeover)\.[^"]+)"\)', path.read_text())
    }
)
MEMBER = (
    "import sys, signal; from everdeck import Deck; deck = Deck(sys.argv[1]); print('up', flush=True); signal.pause()"
)


def member(state: Path, **env: str) -> "subprocess.Popen[str]":
    """A process that has the deck open until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(state)], stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_there_are_points_in_opening() -> None:
    """A search that finds nothing would make every test below pass."""
    assert len(POINTS) >= 6


@pytest.mark.parametrize("point", POINTS)
def test_a_successor_that_dies_is_succeeded(point: str, tmp_path: Path) -> None:
    """Whoever asks in the meantime is answered by the third owner, and its restart happened once."""
    state = tmp_path / "state"
    processes = []
    try:
        owner = member(state)
        processes.append(owner)
        # A member tries for the lock when it opens, so it comes to this first point twice.
        visit = ":2" if point == "takeover.begin" else ""
        successor = member(state, **{CRASH_AT_ENV: point + visit})
        processes.append(successor)
        with Deck(state) as witness:
            pids = {one.name: one.pid for one in witness.start_many({f"w{n}": ["sleep", "1000"] for n in range(5)})}
            begin = witness.last_event_id()
            owner.kill()
            after = witness.restart("w0")
            if successor.poll() is None:
                # The witness was quicker; the successor has its turn when the witness is asked to leave.
                assert after.pid != pids["w0"]
                witness.close()
                assert successor.wait(60) == -9 or point == "takeover.begin"
            else:
                assert successor.wait(60) == -9, f"{point} was not reached"
        with Deck(state) as last:
            until(lambda: {one.state for one in last.list()} == {State.RUNNING})
            now = {one.name: one.pid for one in last.list()}
            assert {name: now[name] for name in pids if name != "w0"} == {
                name: pid for name, pid in pids.items() if name != "w0"
            }
            restarted = [event for event in last.events(begin) if event.kind == "restarted"]
            assert len(restarted) == 1
            last.stop_all()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        end_all_under(tmp_path)


VERB_POINTS = sorted(
    {
        point
        for path in OPENING.rglob("*.py")
        for point in re.findall(r'crash_point\("((?:start|stop|restart|reset|remove)\.[^"]+)"\)', path.read_text())
    }
    # A failing program, a bound worker and secrets are other stories: tests/crash/test_deck_crash_points.py.
    - {"start.failed", "start.bound", "start.guarded", "start.secrets-settled"}
)


@pytest.mark.parametrize("point", VERB_POINTS)
def test_a_verb_whose_owner_dies_in_it_is_done_once(point: str, tmp_path: Path) -> None:
    """A member asks for one verb after the other; the owner dies at the point; every outcome is told exactly once."""
    state = tmp_path / "state"
    owner = member(state, **{CRASH_AT_ENV: point})
    try:
        with Deck(state) as asking:
            first = asking.start("w", ["sleep", "1000"])
            second = asking.restart("w")
            assert second.pid != first.pid
            assert asking.reset("w").pid == second.pid
            assert asking.stop("w").state is State.STOPPED
            assert asking.start("w").state is State.RUNNING
            asking.remove("w")
            assert owner.wait(60) == -9, f"{point} was not reached"
            kinds = [event.kind.value for event in asking.events(worker="w")]
            removed = [event for event in asking.events(worker="w") if event.detail.get("removed")]
            # A process that was spawned and not recorded is found by the next owner, which tells that it adopted it.
            unrecorded = point == "start.spawned"
            assert kinds[0] == ("adopted" if unrecorded else "started"), kinds
            assert kinds.count("started") == (1 if unrecorded else 2), kinds
            assert (kinds.count("restarted"), kinds.count("reset")) == (1, 1), kinds
            assert len(removed) == 1
            assert asking.list() == []
    finally:
        owner.kill()
        owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()
        end_all_under(tmp_path)


def test_many_processes_use_one_deck_while_its_owner_is_killed(tmp_path: Path) -> None:
    """A short run of scripts/failover.py: nothing lost, nothing twice, no error that a verb may not raise."""
    seconds = os.environ.get("EVERDECK_FAILOVER_SECONDS", "6")
    command = [sys.executable, str(ROOT / "scripts" / "failover.py"), "--seconds", seconds, "--processes", "3"]
    done = subprocess.run(
        [*command, "--workers", "15", "--state", str(tmp_path / "state")], capture_output=True, text=True, check=False
    )
    try:
        found = json.loads(done.stdout)
        assert found["problems"] == []
        assert found["owners_killed"] >= 2
        assert found["verbs"] > 50
        assert found["most_copies"] <= 1
    finally:
        end_all_under(tmp_path)
