"""The benchmark harness itself: it sees starts and deaths, leaves nothing behind, and judges what it was given."""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
if not (REPO / "bench" / "board.py").exists():
    pytest.skip("the benchmarks are part of the repository, not of a release", allow_module_level=True)
sys.path.insert(0, str(REPO))

from bench import build, places  # noqa: E402 - the repository's root is not on the path of an installed test run
from bench.bars import judged  # noqa: E402
from bench.board import PLANTED, Board, BoardTimeout  # noqa: E402
from bench.drivers import DRIVERS  # noqa: E402
from bench.drivers.limits import Popen  # noqa: E402
from bench.measures import MEASURES, Setting  # noqa: E402
from bench.plan import plan_for  # noqa: E402
from bench.processes import Watch  # noqa: E402
from bench.runner import Choice, keys_for  # noqa: E402
from bench.store import Key, Result, Store  # noqa: E402


def test_a_run_goes_on_in_its_file_whatever_tore_its_last_line(tmp_path: Path) -> None:
    """The last result of a measurement counts; --fresh begins another file and leaves the old run."""
    key = Key("spawn", "popen", 10)
    store = Store(tmp_path)
    store.put(Result(key, {}, "2026-11-15", quick=False, failure="not installed"))
    store.put_printed("bench/ladder.py", "first")
    with store.path.open("a") as file:
        file.write('{"key": {"measure": "spa')

    resumed = Store(tmp_path)
    resumed.put(Result(key, {}, "2026-11-16", quick=False, samples=[{"spawn_ms": 1.0}]))
    resumed.put_printed("bench/ladder.py", "second")

    assert resumed.path == store.path
    assert Store(tmp_path).has(key)
    assert resumed.printed("bench/ladder.py") == "second"
    fresh = Store(tmp_path, fresh=True)
    assert (fresh.path != store.path, fresh.all()) == (True, {})


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    """The C programs, built once."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    build.build_programs()


def _nest(*command: str, lifeline: int) -> subprocess.Popen[str]:
    return subprocess.Popen([str(places.NEST), *command], stdin=lifeline, stdout=subprocess.PIPE, text=True)


def test_a_worker_stamps_and_wakes_the_harness(tmp_path: Path) -> None:
    """A started worker is on the board, with its pid, and the harness is woken without polling."""
    with Board(tmp_path / "board", 16) as board:
        before_ns = time.monotonic_ns()
        workers = [subprocess.Popen(worker.command) for worker in plan_for(tmp_path, board.path, 3).workers]
        try:
            board.wait_for(3, 30)
            assert {stamp.pid for stamp in board.stamps()} == {worker.pid for worker in workers}
            assert {stamp.slot for stamp in board.stamps()} == {0, 1, 2}
            assert all(before_ns < stamp.at_ns < time.monotonic_ns() for stamp in board.stamps())
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def test_waiting_for_more_than_come_is_an_error(tmp_path: Path) -> None:
    """A manager that starts too few is reported, not waited for without end."""
    with Board(tmp_path / "board", 16) as board, pytest.raises(BoardTimeout):
        board.wait_for(1, 0.05)


def test_a_death_is_seen_on_a_pidfd(tmp_path: Path) -> None:
    """The watch ends when the last of its processes has."""
    with Board(tmp_path / "board", 16) as board:
        worker = subprocess.Popen(plan_for(tmp_path, board.path, 1).workers[0].command)
        board.wait_for(1, 30)
        watch = Watch([worker.pid])
        watch.wait(0)
        assert watch.left == 1
        worker.kill()
        watch.wait(30)
        assert watch.left == 0
        watch.close()
        worker.wait()


def test_the_nest_ends_daemons_when_its_command_ends(tmp_path: Path) -> None:
    """A process that forked twice and left its session is gone when the measurement is over."""
    with Board(tmp_path / "board", 16) as board:
        os.mkfifo(tmp_path / "go")
        reading, lifeline = os.pipe()
        order = plan_for(tmp_path, board.path, 1, "daemon").workers[0].order
        nest = _nest("/bin/sh", "-c", f'"{places.STAMP}" "{order}" & read line < "{tmp_path}/go"', lifeline=reading)
        os.close(reading)
        board.wait_for(2, 30)
        (daemon,) = board.stamps(kind=PLANTED)
        pidfd = os.pidfd_open(daemon.pid)
        os.close(lifeline)
        assert select.select([pidfd], [], [], 30)[0]
        nest.wait(30)
        os.close(pidfd)
        assert nest.stdout is not None
        nest.stdout.close()


def test_one_sample_of_the_bare_loop(tmp_path: Path) -> None:
    """A whole measurement runs, and its numbers are there."""
    sample = MEASURES["spawn"].run(Popen, 3, Setting(tmp_path, quick=True))
    assert sample["left_after_stop"] == 0
    assert 0 < sample["running_ms"] <= sample["spawn_ms"]


def test_every_measure_names_known_drivers_and_sizes() -> None:
    """A run knows what it will measure; quick is a part of the drivers, and a name finds each file again."""
    keys = keys_for(Choice())
    assert {key.driver for key in keys} == set(DRIVERS)
    assert {key.measure for key in keys} == set(MEASURES)
    assert len(set(keys)) == len(keys)
    assert keys_for(Choice(quick=True, measures=("idle",), drivers=("popen",))) == [Key("idle", "popen", 50)]


def test_results_are_kept_and_judged(tmp_path: Path) -> None:
    """What was stored is read back, a failure is tried again, and a bar is judged by it."""
    store = Store(tmp_path / "results")
    for driver, took_ms in (("popen", 300.0), ("everdeck", 375.0)):
        key = Key("spawn", driver, 1000)
        store.put(Result(key, {}, "2026-11-15", quick=False, samples=[{"spawn_ms": took_ms}] * 3))
    failed = Key("spawn", "pm2", 1000)
    store.put(Result(failed, {}, "2026-11-15", quick=False, failure="not installed"))

    assert store.has(Key("spawn", "popen", 1000))
    assert not store.has(failed)
    first, *rest = judged({key: result for key, result in store.all().items() if result.failure is None})
    assert (first.measured, first.passed) == ("1.25 ×", True)
    assert any(bar.passed is None for bar in rest)


def test_replacements_are_judged_by_the_middle_and_by_the_worst() -> None:
    """One slow kill of a hundred is told by its own bar and moves no median."""
    quiet = {"delays_ms": [1.0] * 99 + [4.0]}
    ours = {"delays_ms": [1.4] * 99 + [9.0]}
    results = {
        key: Result(key, {}, "2026-11-17", quick=False, samples=[sample])
        for key, sample in ((Key("restart", "popen", 100), quiet), (Key("restart", "everdeck", 100), ours))
    }
    bars = {bar.wanted: (bar.measured, bar.passed) for bar in judged(results) if bar.passed is not None}
    assert bars == {
        "≤ 1.5 ×, ahead of every peer": ("1.40 ×, ahead of every peer", True),
        "≤ 2 ×": ("2.25 × (100 kills)", False),
    }


def test_the_page_is_written_from_the_stored_numbers(tmp_path: Path) -> None:
    """The report needs nothing but the JSON files."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib (dependency group bench)")
    from bench.report import write_page

    store = Store(tmp_path / "results")
    about = {"processor": "p", "cores": "2", "memory": "m", "kernel": "k", "python": "3", "filesystem": "ext4"}
    sample = {"spawn_ms": 30.0, "stop_ms": 5.0, "pss_empty": 1e6, "pss_full": 2e6}
    for driver in ("popen", "everdeck"):
        for count in (100, 1000):
            store.put(Result(Key("spawn", driver, count), about, "2026-11-15", quick=False, samples=[sample, sample]))

    write_page(store, tmp_path / "page.md", tmp_path / "img")

    page = (tmp_path / "page.md").read_text()
    assert "| **everdeck** | 0.300 [0.300–0.300] | 0.030 [0.030–0.030] | 1.00 |" in page
    assert "$" not in page.replace("$ make", "")
    assert (tmp_path / "img" / "bench-spawn.svg").read_text().startswith("<?xml")
    assert [json.loads(line)["key"]["driver"] for line in store.path.read_text().splitlines()].count("popen") == 2
