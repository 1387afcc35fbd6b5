"""Satellites in pods: nothing that came in is lost when a node goes, and one of them polls at a time."""

import contextlib
import threading
import time
from collections import Counter
from itertools import groupby

import pytest

from everdeck import Deck, Satellite, Secret
from everdeck.errors import ClientError, DeckClosed
from everdeck.testing.telegram import TelegramServer
from support.cluster_machines import SERVER_ADDRESS, Cluster, figure, until

UPDATES = 300
CHATS = 50  # one chat is answered once a second
PAIR = "b"


class _Program:
    """Reads the deck's messages and answers each, in a thread of its own."""

    def __init__(self, deck: Deck) -> None:
        self.handled: Counter[str] = Counter()
        self._messages = deck.messages()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(DeckClosed):  # the end of the test
            self._answer()

    def _answer(self) -> None:
        for message in self._messages:
            try:
                with message:
                    message.reply(f"re: {message.text}")
            except ClientError:
                continue  # its pod went away before the end was on disk: it comes again
            self.handled[message.text] += 1


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("harm", ["power-off", "partition"])
def test_no_update_is_lost_when_a_node_goes(deck: Deck, cluster: Cluster, namespace: str, harm: str) -> None:
    """300 updates before, during and after: all handled, all answered, by one poller at a time."""
    with TelegramServer(host=SERVER_ADDRESS) as bot:
        deck.start("tg", Satellite.telegram(Secret(bot.token), base_url=bot.url, first_run="take"))
        program = _Program(deck)
        for number in range(100):
            bot.say(f"m{number}", chat_id=1 + number % CHATS)
        until(lambda: len(program.handled) >= 50, "half of the first hundred")

        cluster.do(harm, cluster.node_of(namespace, "tg"))
        cut_at = time.monotonic()
        for number in range(100, 200):
            bot.say(f"m{number}", chat_id=1 + number % CHATS)
        until(lambda: len({poll.peer.rpartition(":")[0] for poll in bot.polls()}) > 1, "the next pod polls")
        for number in range(200, UPDATES):
            bot.say(f"m{number}", chat_id=1 + number % CHATS)
        until(lambda: len(program.handled) == UPDATES, "every update was handled", 180)
        handled_after = time.monotonic() - cut_at
        until(lambda: len(set(bot.sent())) == UPDATES, "every answer was sent", 180)

        pollers = [poll.peer.rpartition(":")[0] for poll in bot.polls()]
        assert len(list(groupby(pollers))) == len(set(pollers)) == 2, "two polled at the same time"
        twice = sum(count - 1 for count in program.handled.values())
        figure(f"telegram, {harm}: 0 of {UPDATES} lost, {twice} twice, all after {handled_after:.0f} s")

        feed = deck.feed("tg")
        assert (feed.kind, feed.waiting, feed.dead) == ("telegram", 0, 0)
        deck.send("tg", to=99, text="good morning")
        until(lambda: bot.sent(99), "the first words were sent")
