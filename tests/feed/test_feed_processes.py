"""The feed in processes that die: killed from outside, or by their own handlers."""

import contextlib
import multiprocessing
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.feed_bots import CONCURRENCY, POISON, keep_working, meet_many_poisons, meet_poison
from support.feed_scenario import noted
from support.feed_upstream import Upstream, update
from support.waiting import until

DEADLINE_SECONDS = 60
UPDATES = 300


@contextlib.contextmanager
def running(process: Any) -> Iterator[Any]:
    """A process that is gone afterwards in any case."""
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("mode", ["inbox", "tx", "file"])
def test_kill_9_again_and_again_loses_nothing(
    processes: multiprocessing.context.ForkServerContext, directory: Path, mode: str
) -> None:
    """Five kills in the middle of the work, with a burst at the start and more coming in between."""
    upstream = Upstream(directory / "upstream.json")
    upstream.arrive(*(update(n, chat=n % 50) for n in range(1, 201)))
    rounds = (30, 70, 120, 170, 220)
    for round_number, enough in enumerate(rounds):
        with running(processes.Process(target=keep_working, args=(str(directory), mode))) as bot:
            until(lambda: len(effects_of(directory, mode)) >= enough, process=bot)  # noqa: B023 - called at once
            os.kill(bot.pid, signal.SIGKILL)
            bot.join()
        upstream.arrive(*(update(n, chat=n % 50) for n in range(201 + 20 * round_number, 221 + 20 * round_number)))
    with running(processes.Process(target=keep_working, args=(str(directory), mode))) as bot:
        until(lambda: len(set(effects_of(directory, mode))) == UPDATES, process=bot)
        os.kill(bot.pid, signal.SIGTERM)
        bot.join(DEADLINE_SECONDS)
        assert bot.exitcode == 0
    effects = Counter(effects_of(directory, mode))
    assert set(effects) == set(range(1, UPDATES + 1))
    in_flight = {"inbox": CONCURRENCY, "tx": 0, "file": 1}[mode]
    assert effects.total() - UPDATES <= in_flight * len(rounds)
    if mode != "file":
        connection = sqlite3.connect(directory / "bot.db")
        assert connection.execute("SELECT count(*) FROM everdeck_item").fetchone() == (0,)
        connection.close()


def effects_of(directory: Path, mode: str) -> list[int]:
    """What was done: lines in a file, or rows beside the inbox."""
    if mode != "tx":
        return [int(line) for line in noted(directory, "effects")]
    connection = sqlite3.connect(directory / "bot.db", timeout=30)
    try:
        return [number for (number,) in connection.execute("SELECT id FROM effect")]
    except sqlite3.OperationalError:  # not made yet
        return []
    finally:
        connection.close()


def test_sigterm_with_slow_handlers_loses_nothing(
    processes: multiprocessing.context.ForkServerContext, directory: Path
) -> None:
    """What is in flight finishes, nothing is done twice, the rest waits for the next run."""
    upstream = Upstream(directory / "upstream.json")
    for stops in range(1, 4):
        # A part for each life: on a busy machine the one before may have done more than it was watched for.
        upstream.arrive(*(update(n) for n in range(100 * stops - 99, 100 * stops + 1)))
        done = len(noted(directory, "effects"))
        with running(processes.Process(target=keep_working, args=(str(directory), "inbox"))) as bot:
            until(lambda: len(noted(directory, "effects")) > done, process=bot)  # noqa: B023 - called at once
            os.kill(bot.pid, signal.SIGTERM)
            bot.join(DEADLINE_SECONDS)
            assert bot.exitcode == 0
        assert noted(directory, "stopped") == ["gracefully"] * stops
    with running(processes.Process(target=keep_working, args=(str(directory), "inbox"))) as bot:
        until(lambda: len(noted(directory, "effects")) >= UPDATES, process=bot)
    assert Counter(int(line) for line in noted(directory, "effects")) == Counter(range(1, UPDATES + 1))


@pytest.mark.parametrize(("kind", "cursor"), [("exit", "inbox"), ("segfault", "inbox"), ("exit", "file")])
def test_poison_is_set_aside_after_three_deaths(
    processes: multiprocessing.context.ForkServerContext, directory: Path, kind: str, cursor: str
) -> None:
    """Three deaths, one dead letter, everything else done. (A handler that hangs: see test_in_a_deck.py.)"""
    upstream = Upstream(directory / "upstream.json")
    upstream.arrive(*(update(n) for n in range(1, 41)))
    codes = []
    while len(codes) < 5 and codes[-1:] != [0]:
        with running(processes.Process(target=meet_poison, args=(str(directory), kind, cursor))) as bot:
            bot.join(DEADLINE_SECONDS)
            codes.append(bot.exitcode)
    assert codes == [3 if kind == "exit" else -signal.SIGSEGV] * 3 + [0]
    assert noted(directory, "poisoned") == ["1", "2", "3"]
    assert {int(line) for line in noted(directory, "effects")} == set(range(1, 41)) - {POISON}
    if cursor == "inbox":
        connection = sqlite3.connect(directory / "bot.db")
        dead = connection.execute("SELECT id, state, attempts, crashes FROM everdeck_item").fetchall()
        connection.close()
        assert dead == [(POISON, 2, 3, 3)]
    else:
        assert f'"id":{POISON}' in (directory / "offset.txt.dead").read_text()


def test_many_poisons_side_by_side_pay_and_nobody_else(
    processes: multiprocessing.context.ForkServerContext, directory: Path
) -> None:
    """Six of them beside one that takes long: three deaths each, of SIGSEGV, SIGABRT and os._exit.

    The long one is interrupted by the first death of each. After that it finishes before they are tried again.
    """
    poisons = range(2, 8)
    Upstream(directory / "upstream.json").arrive(*(update(n) for n in range(1, 8)))
    codes: list[int] = []
    while len(codes) <= 3 * len(poisons) and codes[-1:] != [0]:
        with running(processes.Process(target=meet_many_poisons, args=(str(directory), len(poisons)))) as bot:
            bot.join(DEADLINE_SECONDS)
            codes.append(bot.exitcode)
    assert Counter(codes) == {-signal.SIGSEGV: 6, -signal.SIGABRT: 6, 3: 6, 0: 1}
    begun = Counter(map(int, noted(directory, "begun")))
    assert begun == {1: len(poisons) + 1} | dict.fromkeys(poisons, 3)
    assert noted(directory, "effects") == ["1"]
    connection = sqlite3.connect(directory / "bot.db")
    dead = connection.execute("SELECT id, state, crashes FROM everdeck_item ORDER BY id").fetchall()
    connection.close()
    assert dead == [(poison, 2, 3) for poison in poisons]
