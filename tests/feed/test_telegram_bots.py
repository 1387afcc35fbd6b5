"""Whole bots in their own processes: killed, terminated, poisoned and doubled, and nothing is lost."""

import functools
import importlib.util
import os
import random
import signal
import sqlite3
from pathlib import Path

import pytest

from everdeck import Deck, Health, Restart, State, Stop
from everdeck.testing.telegram import TelegramServer, text_update
from support.tg_bots import LIBRARIES, BotProcess

IN_FLIGHT = 16
CONCURRENCY = ("--concurrency", str(IN_FLIGHT))

# Those that need no program of their own: an import of aiogram alone takes five seconds of CPU.
Bot = functools.partial(BotProcess, forked=True)

# A bot takes seconds to start, and on a busy machine many times as long.
pytestmark = pytest.mark.timeout(600)


def need(library: str) -> None:
    """Skip without the library. It is not imported here: that alone takes seconds."""
    if importlib.util.find_spec({"aiogram": "aiogram", "ptb": "telegram"}[library]) is None:
        pytest.skip(f"needs {library}")


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    """Each library in turn, if it is installed."""
    need(request.param)
    return str(request.param)


def backlog(server: TelegramServer, count: int) -> list[int]:
    """So many updates from as many chats."""
    return server.push(*(text_update("work", chat_id=number) for number in range(1, count + 1)))


def rows(database: Path, query: str) -> list[tuple[object, ...]]:
    """What the database says."""
    with sqlite3.connect(database) as db:
        found = db.execute(query).fetchall()
    db.close()
    return found


def test_three_lives(library: str, telegram_server: TelegramServer, tmp_path: Path) -> None:
    """Terminated in the middle, killed in the middle, then left to finish: 0 lost, few twice, none after SIGTERM."""
    ids = backlog(telegram_server, 300)
    with Bot(library, telegram_server, tmp_path, *CONCURRENCY) as bot:
        bot.wait_for(lambda handled: len(handled.ended) >= 50)
        assert bot.terminate(60) == 0
        polite = bot.journal()
        assert polite.began == polite.ended, "within the grace every handler that had begun has finished"
        assert polite.duplicates() == 0

        bot.start()
        bot.wait_for(lambda handled: len(handled.ended) >= 120)
        bot.kill()
        ids += backlog(telegram_server, 20)

        bot.start()
        bot.wait_for(lambda handled: not handled.lost(ids))
        assert bot.terminate(60) == 0
        handled = bot.journal()
        assert handled.duplicates() <= IN_FLIGHT
        assert sum(handled.began.values()) - len(ids) <= IN_FLIGHT
    assert rows(tmp_path / "bot.db", "SELECT * FROM everdeck_item") == []


def test_killed_again_and_again_with_transactions(telegram_server: TelegramServer, tmp_path: Path) -> None:
    """With item.transaction() every update has its effect exactly once, wherever the kills fall.

    The bench does the same with aiogram, which takes seconds to start.
    """
    need("ptb")
    ids = backlog(telegram_server, 300)
    chance = random.Random(7)
    with Bot("ptb", telegram_server, tmp_path, *CONCURRENCY, "--transaction", "--sleep-ms", "20") as bot:
        for _ in range(3):
            already = len(bot.journal().ended)
            wanted = already + chance.randrange(20, 80)
            bot.wait_for(lambda handled, wanted=wanted: len(handled.ended) >= wanted)
            bot.kill()
            bot.start()
        bot.wait_for(lambda _handled: len(rows(tmp_path / "bot.db", "SELECT * FROM handled")) >= len(ids))
        assert bot.terminate(60) == 0
    effects = [update_id for (update_id,) in rows(tmp_path / "bot.db", "SELECT update_id FROM handled")]
    assert sorted(effects) == ids  # type: ignore[type-var]


def test_slow_handlers_and_sigterm(telegram_server: TelegramServer, tmp_path: Path) -> None:
    """Handlers that outlive the grace are handed back, uncounted, and the process leaves in time."""
    need("ptb")
    ids = telegram_server.push(*(text_update("slow 30", chat_id=number) for number in range(1, 9)))
    with Bot("ptb", telegram_server, tmp_path, *CONCURRENCY, "--grace", "0.5") as bot:
        bot.wait_for(lambda handled: len(handled.began) == 8)
        assert bot.terminate(60) == 0
        assert rows(tmp_path / "bot.db", "SELECT state, attempts FROM everdeck_item") == [(0, 0)] * len(ids)
        assert len(telegram_server.confirmed()) + len(telegram_server.pending()) == 8


def test_two_pollers_with_a_backlog(telegram_server: TelegramServer, tmp_path: Path) -> None:
    """No 409 comes while nobody waits; the lock refuses the second one before it asks."""
    need("ptb")
    ids = backlog(telegram_server, 200)
    (tmp_path / "second").mkdir()
    with Bot("ptb", telegram_server, tmp_path, *CONCURRENCY) as bot:
        bot.wait_for(lambda handled: bool(handled.ended))
        with Bot("ptb", telegram_server, tmp_path / "second") as second:
            assert second.running.wait(60) != 0
            assert "PollerConflict" in second.errors_path.read_text()
            assert f"pid {bot.running.pid}" in second.errors_path.read_text()
            assert not second.journal().began
        handled = bot.wait_for(lambda handled: not handled.lost(ids))
        assert handled.duplicates() == 0


def test_a_crash_while_skipping_history_skips_nothing_new(telegram_server: TelegramServer, tmp_path: Path) -> None:
    """Killed right after offset=-1 went out: the next start takes what came meanwhile instead of skipping again."""
    need("ptb")
    telegram_server.say("history")
    crashing = os.environ | {"EVERDECK_CRASH_AT": "feed.skip.answered"}
    with BotProcess("ptb", telegram_server, tmp_path, "--first-run", "skip", env=crashing) as bot:
        assert bot.running.wait(60) == -9
        new = [telegram_server.say(str(number)) for number in range(5)]
        bot.env = None
        bot.start()
        bot.wait_for(lambda handled: not handled.lost(new))


def test_poison_is_set_aside(library: str, telegram_server: TelegramServer, tmp_path: Path) -> None:
    """Messages that end the process become dead letters after three deaths of their own; all others are served."""
    poison = {"exit": 3, "segv": -signal.SIGSEGV}
    for number, text in enumerate(poison):
        telegram_server.push(*(text_update("work", chat_id=10 * number + chat) for chat in range(1, 4)))
        telegram_server.say(text, chat_id=1000 + number)
    good = telegram_server.push(*(text_update("work", chat_id=chat) for chat in range(1, 40)))
    dead = "SELECT payload ->> '$.message.text', crashes FROM everdeck_item WHERE state = 2"
    ends: list[int] = []
    with Bot(library, telegram_server, tmp_path, *CONCURRENCY) as bot:
        while len(ends) < 3 * len(poison):
            ends.append(bot.running.wait(120))
            bot.start()
        good.append(telegram_server.say("work", chat_id=2000))  # to the one that lives on
        bot.wait_for(lambda handled: not handled.lost(good))
        assert bot.terminate(60) == 0
    assert sorted(ends) == sorted(3 * list(poison.values()))
    assert dict(rows(tmp_path / "bot.db", dead)) == dict.fromkeys(poison, 3)  # type: ignore[arg-type]


def test_a_handler_that_hangs_the_loop_is_set_aside_and_the_worker_goes_on(
    telegram_server: TelegramServer, tmp_path: Path
) -> None:
    """The deck ends a bot whose loop stands still; the third time the message is a dead letter, and told of."""
    need("ptb")
    good = telegram_server.push(*(text_update("work", chat_id=chat) for chat in range(1, 10)))
    telegram_server.say("loop", chat_id=1000)
    good += telegram_server.push(*(text_update("work", chat_id=chat) for chat in range(1, 40)))
    bot = BotProcess("ptb", telegram_server, tmp_path, *CONCURRENCY)
    with Deck(tmp_path / "state") as deck:
        try:
            deck.start(
                "bot",
                bot.command,
                inherit_env=["PYTHONPATH"],
                cwd=str(tmp_path),
                restart=Restart("always", max_crashes=50, backoff_seconds=0.05, backoff_cap_seconds=0.1),
                stop=Stop(grace_seconds=0.5),
                health=Health(notify=True, watchdog_seconds=3),
            )
            bot.wait_for(lambda handled: not handled.lost(good), until_exit=False)
            bot.wait_for(lambda _: len(_told(deck)) == 1, until_exit=False)
            assert deck.status("bot").state is State.RUNNING
        finally:
            deck.stop("bot")
    dead = "SELECT payload ->> '$.message.text' FROM everdeck_item WHERE state = 2"
    assert rows(tmp_path / "bot.db", dead) == [("loop",)]


def _told(deck: Deck) -> set[str]:
    """The dead letters that the deck has heard of."""
    facts = [event.detail for event in deck.events() if event.kind == "feed"]
    return {str(fact["id"]) for fact in facts if fact.get("what") == "dead-letter"}
