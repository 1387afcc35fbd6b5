"""The example bots, stopped and killed while their replies are on the wire.

A trial has two ends and then one life in peace; EVERDECK_ENDS=12 makes it the trial of the docs.
"""

import os
import signal
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("aiogram")
pytest.importorskip("telegram.ext")

from everdeck.testing.telegram import TelegramServer
from support.repo_examples import ROOT
from support.tg_lives import life_of, run_program

pytestmark = pytest.mark.timeout(900)
ENDS = int(os.environ.get("EVERDECK_ENDS", "2"))
MESSAGES = 12
ON_THE_WIRE = 16  # what the adapters' outboxes send at once


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("library", ["aiogram", "ptb"])
def test_replies_are_sent_once(
    telegram_server: TelegramServer, tmp_path: Path, library: str, how: signal.Signals
) -> None:
    """A polite stop sends nothing twice; kill -9 at most what was on the wire; neither leaves anybody unanswered."""
    program = ROOT / f"examples/outbox_{library}.py"
    bot = {"BOT_TOKEN": telegram_server.token, "BOT_API": telegram_server.url}
    telegram_server.delay("sendMessage", 0.05, times=10_000)
    telegram_server.say("/order tea", chat_id=1)
    wanted = {"noted"}
    for end in range(ENDS + 1):
        for person in range(MESSAGES if end < ENDS else 0):
            telegram_server.say(f"{end}.{person}", chat_id=1000 * (end + 1) + person)
            wanted.add(f"you said {end}.{person}")
        polls, sent = len(telegram_server.polls()), len(telegram_server.sent())
        # It is up, and in the middle of its replies; in the end all are there.
        enough = sent + MESSAGES // 2 if end < ENDS else 0
        with life_of(run_program, program, tmp_path, bot) as life:
            telegram_server.wait_for(lambda server, polls=polls: len(server.polls()) > polls, timeout=120)
            telegram_server.wait_for(lambda server, enough=enough: len(server.sent()) >= enough, timeout=120)
            if end == ENDS:
                telegram_server.wait_for(lambda server: wanted <= set(server.sent()), timeout=120)
            assert life.pid is not None
            os.kill(life.pid, how if end < ENDS else signal.SIGTERM)
            life.join(60)
            assert life.exitcode in {0, -signal.SIGKILL}, (tmp_path / "printed").read_text()
    repeated = sum(times - 1 for times in Counter(telegram_server.sent()).values())
    print(f"{library}, {ENDS} times {how.name}: {len(wanted)} replies, {repeated} twice")
    assert set(telegram_server.sent()) == wanted
    assert repeated <= (ENDS * ON_THE_WIRE if how is signal.SIGKILL else 0)
    with sqlite3.connect(tmp_path / "bot.db") as db:
        assert db.execute("SELECT chat, text FROM orders").fetchall() == [(1, "/order tea")]
    db.close()
