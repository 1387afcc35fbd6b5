"""SIGKILL at every crash point of the deck, then an ordinary start: everything is as it should be.

The points are read from the source, so a new one is tested without being named here. For each: an owner leaves work
behind and is killed; a second owner uses every verb and dies at the point; a third one simply opens the deck.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everdeck import Deck
from everdeck.crashpoints import CRASH_AT_ENV
from everdeck.deck.peek import peek
from everdeck.kernel import spawn
from everdeck.kernel.identity import command_line
from everdeck.model import State, WorkerStatus
from everdeck.registry import read_only
from support import deck_scenario
from support.repo_processes import end_all_under

SOURCE = Path(deck_scenario.__file__).parents[2] / "src" / "everdeck"
SCENARIO = deck_scenario.__file__


def crash_points() -> list[str]:
    """Every crash point in the deck and what it writes with; those of a hand-over have a test of their own."""
    found = set()
    for path in [
        SOURCE / "disk.py",
        SOURCE / "kernel" / "credentials.py",
        *(SOURCE / "deck").rglob("*.py"),
        *(SOURCE / "registry").rglob("*.py"),
    ]:
        found |= set(re.findall(r'crash_point\("([^"]+)"\)', path.read_text()))
    return sorted(point for point in found if not point.startswith("handover."))


def test_there_are_crash_points() -> None:
    """A search that finds nothing would make every test below pass."""
    assert len(crash_points()) >= 20


@contextmanager
def running(*command: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this test, ended whatever happens."""
    with subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("point", crash_points())
def test_a_crash_at_this_point_is_an_ordinary_start(point: str, tmp_path: Path) -> None:
    """Desired state reached, every worker exactly once, no event lost, no stranger signalled."""
    state = tmp_path / "state"
    mark = str(100_000 + os.getpid() % 50_000 + (abs(hash(point)) % 1000) * 0.001)
    script = (sys.executable, SCENARIO)
    strange = subprocess.Popen(["sleep", mark, "77"])
    foreign = subprocess.Popen(["sleep", mark, "88"], start_new_session=True)
    try:
        with running(*script, "before", str(state), mark, "0") as first:
            assert first.stdout is not None
            assert first.stdout.readline() == "ready\n", first.stderr and first.stderr.read()
            _kill_leader(state, "kids")
            first.kill()
        with running(*script, "verbs", str(state), mark, str(foreign.pid), **{CRASH_AT_ENV: point}) as second:
            said, errors = second.communicate(timeout=100)
        assert second.returncode == -signal.SIGKILL, f"{point} was not reached: {errors[-2000:]}"
        seen = [tuple(line.split()[1:]) for line in said.splitlines() if line.startswith("event")]

        with Deck(state) as deck:
            _check(deck, state, mark, seen)
            assert strange.poll() is None, "a stranger that merely looks like a worker was signalled"
            if foreign.poll() is not None:
                assert deck.status("taken").state is not State.RUNNING
        with Deck(state) as again:
            _check(again, state, mark, seen)
            again.stop_all()
            alive = _processes(mark)
            # What an adoption took over before the crash is a worker like any other and was stopped with them.
            assert set(alive) <= {strange.pid, foreign.pid}, alive
            assert strange.pid in alive
    finally:
        for process in (strange, foreign):
            process.kill()
            process.wait()
        end_all_under(tmp_path)


@pytest.mark.parametrize("visit", [1, deck_scenario.GROUP])
@pytest.mark.parametrize(
    "point",
    [point for point in crash_points() if point.startswith("start.")],
)
def test_a_crash_in_the_middle_of_a_group_is_an_ordinary_start(point: str, visit: int, tmp_path: Path) -> None:
    """Of workers that are started together, each is there exactly once afterwards, or none of them was begun."""
    state = tmp_path / "state"
    mark = str(200_000 + os.getpid() % 50_000 + (abs(hash((point, visit))) % 1000) * 0.001)
    once = point not in {"start.secrets-settled", "start.secret-written", "start.locked", "start.spawned"}
    if visit > 1 and once:
        visit = {"start.bound": 2, "start.guarded": 2}.get(point, 1)
    try:
        with running(
            sys.executable, SCENARIO, "many", str(state), mark, "0", **{CRASH_AT_ENV: f"{point}:{visit}"}
        ) as owner:
            said, errors = owner.communicate(timeout=100)
        assert owner.returncode == -signal.SIGKILL, f"{point} was not reached: {errors[-2000:]}"
        seen = [tuple(line.split()[1:]) for line in said.splitlines() if line.startswith("event")]
        group = {f"group-{number}" for number in range(deck_scenario.GROUP)}
        for _ in range(2):
            with Deck(state) as deck:
                _check(deck, state, mark, seen)
                begun = {status.name for status in deck.list() if status.state is State.RUNNING}
                assert begun & group in (set(), group)
                assert begun & group == (set() if point in {"start.begin", "start.secret-written"} else group)
        with Deck(state) as deck:
            deck.stop_all()
            assert _processes(mark) == []
    finally:
        end_all_under(tmp_path)


@pytest.mark.parametrize("point", ["start.begin", "start.intent-recorded", "start.locked", "start.spawned"])
def test_a_crash_while_a_worker_is_replaced_is_an_ordinary_start(point: str, tmp_path: Path) -> None:
    """Before its record tells of it, the replacement is found by the note beside its lock, and stays what it is."""
    state = tmp_path / "state"
    mark = str(300_000 + os.getpid() % 50_000 + (abs(hash(point)) % 1000) * 0.001)
    crash_at = {CRASH_AT_ENV: f"{point}:2"}  # the first visit is the first start
    try:
        with running(sys.executable, SCENARIO, "replaced", str(state), mark, "0", **crash_at) as owner:
            said, errors = owner.communicate(timeout=100)
        assert owner.returncode == -signal.SIGKILL, f"{point} was not reached: {errors[-2000:]}"
        words = [line.split() for line in said.splitlines()]
        (containment,) = [line[1] for line in words if line[0] == "containment"]
        seen = [tuple(line[1:]) for line in words if line[0] == "event"]
        survivors = _processes(mark)
        assert len(survivors) == (point == "start.spawned")
        for _ in range(2):
            with Deck(state) as deck:
                _check(deck, state, mark, seen)
                status = deck.status("again")
                assert status.state is State.RUNNING
                if survivors:
                    assert (status.pid, status.containment) == (survivors[0], containment)
                    assert status.restarts == 1
                ends = [event for event in deck.events() if event.kind in {"exited", "crashed"}]
                assert len(ends) == 1, "that the one before has ended is told, by whichever owner"
        with Deck(state) as deck:
            deck.stop_all()
            assert _processes(mark) == []
    finally:
        end_all_under(tmp_path)


OLD_SECRETS, NEW_SECRETS = {"KEPT": "old", "GONE": "old"}, {"KEPT": "new", "MORE": "new"}


@pytest.mark.parametrize(
    ("point", "visit", "is_new"),
    [
        ("start.secret-written", 3, False),
        ("start.secret-written", 4, False),
        ("start.begin", 2, False),
        ("start.intent-recorded", 2, True),
        ("replace.secret-settled", 1, True),
        ("replace.secret-settled", 2, True),
        ("start.secrets-settled", 2, True),
        ("start.locked", 2, True),
    ],
)
def test_a_crash_in_a_replacement_leaves_the_secrets_of_what_runs(
    point: str, visit: int, is_new: bool, tmp_path: Path
) -> None:
    """The old command with the old secrets, or the new one with the new; and nothing else lies beside them."""
    state = tmp_path / "state"
    mark = str(400_000 + os.getpid() % 50_000 + (abs(hash((point, visit))) % 1000) * 0.001)
    crash_at = {CRASH_AT_ENV: f"{point}:{visit}"}
    try:
        with running(sys.executable, SCENARIO, "new_secrets", str(state), mark, "0", **crash_at) as owner:
            said, errors = owner.communicate(timeout=100)
        assert owner.returncode == -signal.SIGKILL, f"{point} was not reached: {errors[-2000:]}"
        assert said == "started\n"
        for _ in range(2):
            with Deck(state) as deck:
                assert deck.status("bank").state is State.RUNNING
                kept = {path.name: path.read_text() for path in (state / "workers/bank/secrets").iterdir()}
                assert list(deck.spec("bank").command) == deck_scenario.sleeper(mark, "new" if is_new else "old")
                assert kept == (NEW_SECRETS if is_new else OLD_SECRETS)
                assert set(deck.spec("bank").secrets) == set(kept)
        with Deck(state) as deck:
            deck.stop_all()
            assert _processes(mark) == []
    finally:
        end_all_under(tmp_path)


@pytest.mark.parametrize(
    ("point", "visit"),
    [
        ("start.intent-recorded", 1),
        ("start.locked", 1),
        ("start.locked", deck_scenario.PLAIN - 1),
        ("start.spawned", 1),
        ("start.spawned", deck_scenario.PLAIN - 1),
        ("start.recorded", 1),
        ("start.recorded", 2),
    ],
)
def test_a_crash_while_one_call_starts_many_is_an_ordinary_start(point: str, visit: int, tmp_path: Path) -> None:
    """Some have no home yet, some a process that nobody recorded: each is there exactly once afterwards."""
    if not spawn.starts_first():
        pytest.skip("there is neither the C side nor a C library that could do it here")
    state = tmp_path / "state"
    mark = str(300_000 + os.getpid() % 50_000 + (abs(hash((point, visit))) % 1000) * 0.001)
    try:
        with running(
            sys.executable, SCENARIO, "plain", str(state), mark, "0", **{CRASH_AT_ENV: f"{point}:{visit}"}
        ) as owner:
            said, errors = owner.communicate(timeout=100)
        assert owner.returncode == -signal.SIGKILL, f"{point} was not reached: {errors[-2000:]}"
        seen = [tuple(line.split()[1:]) for line in said.splitlines() if line.startswith("event")]
        for _ in range(2):
            with Deck(state) as deck:
                _check(deck, state, mark, seen)
                begun = {status.name for status in deck.list() if status.state is State.RUNNING}
                assert begun == {f"plain-{number}" for number in range(deck_scenario.PLAIN)}
        with Deck(state) as deck:
            deck.stop_all()
            assert _processes(mark) == []
    finally:
        end_all_under(tmp_path)


def _check(deck: Deck, state: Path, mark: str, seen: list[tuple[str, ...]]) -> None:
    leaders = {status.name: status for status in deck.list()}
    registry = read_only(state / "deck.db")
    records = {record.name: record for record in registry.records()}
    registry.close()
    assert set(leaders) == set(records)
    # A worker that just started may still be a shell on its way to its program; a copy too many is wrong at once.
    deadline = time.monotonic() + 30
    while (short := _too_few(_copies(state, mark), leaders)) and time.monotonic() < deadline:
        os.sched_yield()
    assert not short, (short, leaders)
    for name, status in leaders.items():
        if records[name].desired == "running" and name not in {"crashy", "taken", "broken"}:
            assert status.state is State.RUNNING, status
    assert set(_copies(state, mark)) <= set(leaders), "somebody runs who is in no record"
    events = deck.events()
    assert [event.id for event in events] == list(range(1, len(events) + 1)), "ids grow by one, without gaps"
    told = {(str(event.id), str(event.worker), event.kind.value) for event in events}
    assert set(seen) <= told, "an event that somebody saw is still there"
    assert peek(state).supervised


def _too_few(copies: Counter[str], leaders: dict[str, WorkerStatus]) -> dict[str, int]:
    """How many processes are missing, by worker; one too many fails here and now."""
    short = {}
    for name, status in leaders.items():
        per_life = 2 if name == "kids" else 0 if name in {"taken", "crashy", "broken"} else 1
        expected = per_life if status.state is State.RUNNING else 0
        assert copies[name] <= expected, (name, status, copies)
        if copies[name] < expected:
            short[name] = expected - copies[name]
    return short


def _copies(state: Path, mark: str) -> Counter[str]:
    return Counter(name for pid in _processes(mark) if (name := _worker_of(pid, state)) is not None)


def _kill_leader(state: Path, name: str) -> None:
    """End the leader and leave its child, as a crash of the program would; the owner is killed right after."""
    pid = next(status.pid for status in peek(state).workers if status.name == name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def _processes(mark: str) -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and command_line(int(entry.name)).startswith(f"sleep {mark} ")
    ]


def _worker_of(pid: int, state: Path) -> str | None:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    pairs = dict(pair.split(b"=", 1) for pair in environ if b"=" in pair)
    if not pairs.get(b"EVERDECK_DIR", b"").decode().startswith(str(state)):
        return None
    return pairs[b"EVERDECK_WORKER"].decode()
