"""SIGKILL at every step of a polite hand-over, on either side: somebody owns the deck then, and nobody runs twice.

Three processes have the deck open: the owner, the heir (the oldest member) and a witness. The owner leaves, and
it or the heir dies at the point; the witness goes on using the deck. Bound workers end with a dead owner, as bound
means, and come back; adoptable ones never notice.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everdeck import Deck, State
from everdeck.crashpoints import CRASH_AT_ENV
from everdeck.kernel.containment import cookie_scan
from support.repo_processes import end_all_under
from support.waiting import until

SOURCE = Path(__file__).parents[2] / "src" / "everdeck"
MEMBER = (
    "import sys; from everdeck import Deck\n"
    "deck = Deck(sys.argv[1]); print('up', flush=True); sys.stdin.read(); deck.close(); print('left', flush=True)"
)
POINTS = sorted(
    point
    for path in SOURCE.rglob("*.py")
    for point in re.findall(r'crash_point\("(handover\.[^"]+)"\)', path.read_text())
)
OWNERS = {"handover.offered", "handover.given", "handover.let-go"}


@contextmanager
def member(state: Path, point: str | None = None) -> Iterator["subprocess.Popen[str]"]:
    """A process that has the deck open until its input ends; killed in the end."""
    env = {**os.environ, **({} if point is None else {CRASH_AT_ENV: point})}
    with subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(state)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def test_there_are_points_on_both_sides() -> None:
    """A search that finds nothing would make every test below pass."""
    assert set(POINTS) >= OWNERS
    assert len(POINTS) >= 6


def _pids_with_cookies(state: Path) -> list[int]:
    return sorted(pid for pids in cookie_scan().values() if _is_ours(pids, state) for pid in pids)


@pytest.mark.parametrize("point", POINTS)
def test_a_death_in_a_hand_over_leaves_an_owner_and_every_worker_once(point: str, tmp_path: Path) -> None:
    """The witness, or the heir, owns the deck; every worker runs exactly once; adoptable ones as before."""
    state = tmp_path / "state"
    try:
        owner_dies = point in OWNERS
        with (
            member(state, point if owner_dies else None) as owner,
            member(state, None if owner_dies else point) as heir,
            Deck(state) as witness,
        ):
            until(lambda: len(witness.members()) == 3)
            witness.start_many({f"b{number}": ["sleep", "1000"] for number in range(5)}, lifetime="bound")
            adoptable = {
                one.name: one.pid
                for one in witness.start_many({f"a{number}": ["sleep", "1000"] for number in range(5)})
            }
            assert owner.stdin is not None
            owner.stdin.close()
            died = owner if owner_dies else heir
            assert died.wait(60) == -9, f"{point} was not reached"
            until(lambda: {one.state for one in witness.list()} == {State.RUNNING} and len(witness.list()) == 10)
            statuses = {one.name: one for one in witness.list()}
            assert {name: statuses[name].pid for name in adoptable} == adoptable
            running = sorted(one.pid for one in statuses.values() if one.pid is not None)
            # Until the kernel has put its arguments into its memory, one that has just been executed shows no cookie.
            until(lambda: _pids_with_cookies(state) == running, "every worker runs once")
            assert witness.restart("a0").pid != adoptable["a0"]
            witness.stop_all()
    finally:
        end_all_under(tmp_path)


def test_a_polite_hand_over_is_not_noticed_by_bound_workers(tmp_path: Path) -> None:
    """Ten owners in a row leave; the bound workers keep their pids, their lifelines and their guardian."""
    state = tmp_path / "state"
    rounds = int(os.environ.get("EVERDECK_HANDOVERS", "10"))
    try:
        with Deck(state) as first:
            workers = {f"b{number}": ["sleep", "1000"] for number in range(50)}
            pids = {one.name: one.pid for one in first.start_many(workers, lifetime="bound")}
            before = first.last_event_id()
            holder = first
            for _ in range(rounds):
                successor = Deck(state)
                holder.close()
                holder = successor
                until(lambda: holder.abilities().kind == "owner", "the next one owns it")  # noqa: B023 - asked at once
                assert {one.name: one.pid for one in holder.list()} == pids
                assert holder.layers("b0")[0].strength == "lifeline and guardian"
            kinds = {event.kind.value for event in holder.events(before)}
            assert kinds == {"owner-changed", "adopted"}
            holder.stop_all()
            holder.close()
    finally:
        end_all_under(tmp_path)


def _is_ours(pids: list[int], state: Path) -> bool:
    def home(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
        except OSError:
            return ""

    return any(str(state) in home(pid) for pid in pids)
