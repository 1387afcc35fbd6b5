"""Killed at every step, the feed loses nothing.

Every crash point is found in the source. At each the program is killed with SIGKILL at the first visit, started again,
killed at the third visit, and started again until it is done. Then: nothing was lost, what was done twice is at most
what was in flight, and nothing was done twice where the ack and the writes were one commit.
"""

import multiprocessing
import re
import signal
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

import everdeck.feed
from support import feed_scenario as scenario

DEADLINE_SECONDS = 60
SOURCE = Path(everdeck.feed.__file__).parent
# A file cursor is replaced by everdeck.disk, like every file of ours.
FILES = {"replace.written", "replace.renamed"}
# The adapters' points belong to tests with those libraries, the readers' to tests/satellites.
CORE = [*SOURCE.glob("*.py"), *SOURCE.glob("sources/*.py")]
POINTS = sorted(
    {
        point
        for path in CORE
        if path.stem not in {"aiogram", "ptb", "botapi", "claims"}
        for point in re.findall(r'crash_point\("([^"]+)"\)', path.read_text())
    }
    | FILES
)


def finished(process: "multiprocessing.process.BaseProcess") -> int | None:
    """The exit code, within a deadline that fails loudly; the process is gone afterwards in any case."""
    process.start()
    process.join(DEADLINE_SECONDS)
    try:
        assert process.exitcode is not None, "the program did not end"
        return process.exitcode
    finally:
        process.kill()
        process.join()


def test_the_points_are_found() -> None:
    """Reading the source works: a known one is there, and they are many."""
    assert "feed.store.committed" in POINTS
    assert len(POINTS) > 20


@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_lost_wherever_it_is_killed(
    processes: multiprocessing.context.ForkServerContext, directory: Path, point: str
) -> None:
    """Two kills at this point (the second one if it is visited that often), then a run to the end."""
    scenario.prepare(directory)
    kills = 0
    for visit in (1, 3):
        code = finished(processes.Process(target=scenario.crash_at, args=(str(directory), point, visit)))
        assert code in {0, -signal.SIGKILL}
        kills += code != 0
        if skip_was_begun(directory):
            scenario.downtime(directory)
    assert kills >= 1, f"the program never came to {point}"
    assert finished(processes.Process(target=scenario.run, args=(str(directory),))) == 0
    check(directory, kills)


def skip_was_begun(directory: Path) -> bool:
    """Is it on disk? What came before that is history."""
    connection = sqlite3.connect(directory / "bot.db")
    try:
        found = connection.execute("SELECT 1 FROM everdeck_stream WHERE name = 'telegram:skipped'").fetchone()
    finally:
        connection.close()
    return found is not None


def check(directory: Path, kills: int) -> None:
    """Nothing lost; duplicates at most what was in flight; order per key."""
    assert scenario.noted(directory, "complete")
    with sqlite3.connect(directory / "bot.db") as connection:
        effects = [number for (number,) in connection.execute("SELECT id FROM effect")]
        dead = [number for (number,) in connection.execute("SELECT id FROM everdeck_item")]
    connection.close()

    plain = [int(line.split()[0]) for line in scenario.noted(directory, "plain")]
    assert dead == [scenario.POISON]
    assert set(plain) == set(scenario.PLAIN) - {scenario.POISON}
    assert len(plain) - len(set(plain)) <= kills * scenario.CONCURRENCY
    for chat in range(5):
        firsts = list(dict.fromkeys(number for number in plain if number % 5 == chat))
        assert firsts == sorted(firsts)

    assert sorted(effects) == list(scenario.TX)  # exactly once

    sent = [int(line.split()[0]) for line in scenario.noted(directory, "sent")]
    assert set(sent) == set(scenario.TX)
    assert len(sent) - len(set(sent)) <= kills * 2
    for chat in range(4):
        firsts = list(dict.fromkeys(number for number in sent if number % 4 == chat))
        assert firsts == sorted(firsts)

    asked = [int(line.split()[0]) for line in scenario.noted(directory, "asked")]
    assert set(asked) == set(scenario.ASKED)
    assert len(asked) - len(set(asked)) <= kills * 2  # on the wire at a kill

    skipped = Counter(int(line) for line in scenario.noted(directory, "skipped"))
    assert set(skipped) >= set(scenario.AFTER_HISTORY)

    by_file = [int(line) for line in scenario.noted(directory, "file")]
    assert set(by_file) == set(scenario.FILE) - {scenario.FILE_POISON}
    assert len(by_file) - len(set(by_file)) <= kills
    assert f'"id":{scenario.FILE_POISON}' in (directory / "offset.txt.dead").read_text()
