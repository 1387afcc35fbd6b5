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
    log = {"runs": [], "strange": {}, "full": False}
    return {"workers": workers, "events": [], "booked": {"rows": 2, "runs": [[1, 2]]}, "log": log, "control": {}}


def _log(*runs: list[Any], strange: dict[str, int] | None = None, full: bool = False) -> dict[str, Any]:
    return {**_found(), "log": {"runs": runs, "strange": strange or {}, "full": full}}


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
    ledger.hear({"what": "event", "id": 7, "said": "cy started"})
    assert "event 7" in ledger.faults(_found())[0], "also where it is only told, and gone when somebody looks"


def test_lost_and_doubled_messages_are_found() -> None:
    """A poll below what was confirmed asks for what the other side has forgotten."""
    ledger = _told({"what": "confirmed", "below": 10})
    assert ledger.lost_messages(10) == []
    assert "3 confirmed" in ledger.lost_messages(7)[0]
    assert "booked twice" in ledger.faults({**_found(), "booked": {"rows": 3, "runs": [[1, 2]]}})[0]
    ledger.hear({"what": "booked", "id": 3})
    assert ledger.unbooked(5) == {1, 2, 4}


@pytest.mark.parametrize(
    "found",
    [
        _log(),
        _log(["a", 1, 8]),
        _log(["a", 1, 4], ["a", 6, 20]),
        _log(["a", 1, 12], ["a", 10, 20]),
        _log(["a", 2, 20]),
        _log(["a", 1, 20], strange={"zeros": 1}),
        _log(["b", 1, 20], full=False),
    ],
    ids=["gone", "rotated-line-gone", "gap", "twice", "front-gone", "zeros", "another-life"],
)
def test_a_log_that_lost_what_was_rotated_is_found(found: dict[str, Any]) -> None:
    """The end of a log may be lost with the power; a line that was rotated may not, nor may one be shown twice."""
    ledger = _told({"what": "rotated", "upto": ["a", 9]})
    for sound in (_log(["a", 1, 9]), _log(["a", 1, 30], ["b", 1, 2], strange={"torn": 1})):
        assert ledger.faults(sound) == []
    assert ledger.faults(_log(["b", 5, 20], full=True)) == [], "as many younger lines as the log keeps"
    assert ledger.faults(found)


def test_the_oldest_lines_of_a_full_log_may_go() -> None:
    """Their archives are pruned; the others stay."""
    ledger = _told({"what": "rotated", "upto": ["a", 9]}, {"what": "rotated", "upto": ["b", 5]})
    assert ledger.faults(_log(["b", 3, 7], full=True)) == []
    assert ledger.faults(_log(["b", 3, 4], full=True))


def test_lines_of_the_life_that_speaks_are_promised_when_they_are_rotated() -> None:
    """What was read of a dead life was read from the disk; what is read of the living one may be only in memory."""
    ledger = Ledger()
    ledger.begin_again(_log(["a", 1, 9], ["b", 1, 5]))
    assert ledger.faults(_log(["a", 1, 9])) == []
    assert ledger.faults(_log(["a", 1, 8], ["b", 1, 5]))
    ledger.hear({"what": "rotated", "upto": ["b", 4]})
    assert ledger.faults(_log(["a", 1, 9], ["b", 1, 3]))
