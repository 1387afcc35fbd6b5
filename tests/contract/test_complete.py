"""The contract itself: what is in it, the synchronous facade keeps, and this folder tries on every deck."""

import inspect
import re
import sys
from pathlib import Path

import pytest

from everdeck import AsyncDeck, Deck
from everdeck.verbs import Verbs

VERBS = sorted(name for name in vars(Verbs) if not name.startswith("_"))
TRIED = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_tried_on_every_deck(verb: str) -> None:
    """A verb that is added to the contract is added to this suite."""
    assert re.search(rf"\bdeck\.{verb}\(", TRIED)


@pytest.mark.parametrize("verb", VERBS)
def test_both_facades_take_what_the_contract_takes(verb: str) -> None:
    """The same parameters, by name, kind and default; the synchronous one needs nobody to run coroutines for it."""
    wanted = inspect.signature(getattr(Verbs, verb)).parameters
    shown = {name: (one.kind, one.default) for name, one in wanted.items()}

    for facade in (AsyncDeck, Deck):
        found = inspect.signature(getattr(facade, verb)).parameters
        told = {name: (one.kind, one.default) for name, one in found.items()}
        assert told == {name: one for name, one in shown.items() if facade is AsyncDeck or name != "run"}


def test_a_plain_program_follows_events_and_logs(tmp_path: Path) -> None:
    """``for event in deck.follow()`` and ``for line in deck.follow_logs(...)``; leaving the loop ends the stream."""
    with Deck(tmp_path / "state", durability="process") as deck:
        begin = deck.last_event_id()
        deck.start("talker", [sys.executable, "-c", "print('one'); print('two')"])
        kinds = []
        for event in deck.follow(begin):
            kinds.append(event.kind)
            if len(kinds) == 2:
                break
        lines = []
        for line in deck.follow_logs("talker", 10, grep="one|two"):
            lines.append(line)
            if len(lines) == 2:
                break
        assert (kinds, lines) == (["started", "exited"], ["one", "two"])
        deck.remove("talker")
