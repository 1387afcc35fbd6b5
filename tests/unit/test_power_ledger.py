"""The checker of the power cuts can fail: each thing that a cut must not do is found."""

from typing import Any

import pytest

from support.power_ledger import Ledger


def _told(*lines: dict[str, Any]) -> Ledger:
    ledger = Ledger()
    for line in lines:
        ledger.hear(line)
    return ledger


def _found(**workers: dict[str, Any]) -> dict[str, Any]:
    return {"workers": workers, "events": [], "booked": [1, 2]}


def _worker(turn: str, *, runs: bool = True, secret: str | None = "") -> dict[str, Any]:
    return {"runs": runs, "turn": turn, "secret": f"secret of {turn}" if secret == "" else secret}


STARTED = [
    {"what": "asked", "verb": "start", "name": "ada", "turn": "1"},
    {"what": "answered", "verb": "start", "name": "ada", "turn": "1"},
]


@pytest.mark.parametrize(
    "now", [None, _worker("1", runs=False), _worker("0"), _worker("1", secret=None), _worker("1", secret="\0")]
)
def test_an_answer_that_was_taken_back_is_found(now: dict[str, Any] | None) -> None:
    """It is gone, does not run, is an older one, or its secret is empty; as it was answered it is well."""
    assert _told(*STARTED).faults(_found(ada=_worker("1"))) == []
    assert _told(*STARTED).faults(_found(**({} if now is None else {"ada": now})))


def test_a_verb_under_way_may_have_happened_or_not() -> None:
    """Nobody was told anything; but something else than either is a fault."""
    ledger = _told(*STARTED, {"what": "asked", "verb": "stop", "name": "ada", "turn": "2"})
    assert ledger.faults(_found(ada=_worker("1"))) == []
    assert ledger.faults(_found(ada=_worker("1", runs=False))) == []
    assert ledger.faults(_found(ada=_worker("9")))


def test_a_number_that_means_two_things_is_found() -> None:
    """An event that was told and is gone is no fault; another one in its place is."""
    ledger = _told({"what": "event", "id": 7, "said": "ada started"})
    assert ledger.faults(_found()) == []
    assert ledger.faults({**_found(), "events": [[7, "ada started"]]}) == []
    assert "event 7" in ledger.faults({**_found(), "events": [[7, "bo stopped"]]})[0]


def test_lost_and_doubled_messages_are_found() -> None:
    """A poll below what was confirmed asks for what the other side has forgotten."""
    ledger = _told({"what": "confirmed", "below": 10})
    assert ledger.lost_messages(10) == []
    assert "3 confirmed" in ledger.lost_messages(7)[0]
    assert "booked twice" in ledger.faults({**_found(), "booked": [1, 2, 2]})[0]
