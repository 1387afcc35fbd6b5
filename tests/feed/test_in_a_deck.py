"""A feed as a worker of a deck: what people see, and that a bad message parks the message, not the worker."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck import Deck, Health, Restart, Stop
from support.waiting import until

DEADLINE_SECONDS = 60

BOT = """
import asyncio, sys
from everdeck.feed import Inbox, Retry, consume, poll


def numbers():
    return [{"id": n} for n in range(1, 21)]


async def handle(item):
    if item.id == 3:
        if sys.argv[1] == "hangs":
            while True:
                pass
        raise ValueError("three")


asyncio.run(consume(poll(numbers, every=3600, name="numbers"), handle, inbox=Inbox("bot.db"), retry=Retry(0, 0)))
"""


@pytest.fixture
def deck(tmp_path: Path) -> Iterator[Deck]:
    """An open deck; its workers are stopped at the end."""
    with Deck(tmp_path / "state") as opened:
        try:
            yield opened
        finally:
            opened.stop_all()


@pytest.mark.parametrize("way", ["raises", "hangs"])
def test_the_message_is_parked_not_the_worker(deck: Deck, tmp_path: Path, way: str) -> None:
    """Ready, a status in people's words, the dead letter in the deck's stream, and the worker runs on.

    A handler that never lets go stops the watchdog's pings: the deck restarts the worker, and after the third time
    the message is set aside; the breaker does not trip.
    """
    (tmp_path / "bot.py").write_text(BOT)
    deck.start(
        "alice",
        [sys.executable, str(tmp_path / "bot.py"), way],
        health=Health(notify=True, watchdog_seconds=2),
        stop=Stop(grace_seconds=0.2),
        restart=Restart("on-failure", max_crashes=5, backoff_seconds=0.05, backoff_cap_seconds=0.1),
    )
    until(
        lambda: any(event.kind == "feed" and event.detail["what"] == "dead-letter" for event in deck.events()), "told"
    )
    until(lambda: deck.status("alice").status_text == "19 done, 0 in flight, 1 dead", "status")
    status = deck.status("alice")
    assert status.state == "running"
    assert status.restarts == (3 if way == "hangs" else 0)
    letters = [event.detail for event in deck.events() if event.detail.get("what") == "dead-letter"]
    assert [(letter["feed"], letter["id"], letter["attempts"]) for letter in letters] == [("numbers", 3, 3)]
    assert any(event.kind == "ready" for event in deck.events())


POISONED = """
import asyncio, ctypes
from everdeck.feed import Inbox, consume, poll


def messages():
    return [{"id": n, "chat": 7, "text": "segv" if n in (2, 4) else "hello"} for n in range(1, 7)]


def handle(item):
    if item.value["text"] == "segv":
        ctypes.string_at(0)


source = poll(messages, every=3600, name="messages")
asyncio.run(consume(source, handle, inbox=Inbox("bot.db"), key=lambda value: value["chat"]))
"""


def test_two_messages_of_one_chat_that_kill_the_process(deck: Deck, tmp_path: Path) -> None:
    """With the breaker as it comes: two dead letters, the rest of the chat handled, and a running bot."""
    (tmp_path / "bot.py").write_text(POISONED)
    quick = Restart(backoff_seconds=0.05, backoff_cap_seconds=0.1)  # more than five crashes in five minutes is too much
    deck.start("alice", [sys.executable, str(tmp_path / "bot.py")], health=Health(notify=True), restart=quick)
    until(lambda: deck.status("alice").status_text == "4 done, 0 in flight, 2 dead", "status")
    status = deck.status("alice")
    assert (status.state, status.restarts) == ("running", 6)
    letters = [event.detail for event in deck.events() if event.detail.get("what") == "dead-letter"]
    assert [letter["id"] for letter in letters] == [2, 4]
    assert all("Segmentation fault" in letter["error"] for letter in letters)
