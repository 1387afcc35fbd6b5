"""Whatever is accepted can be started, listed, shown, recovered and removed; one broken record concerns nobody else."""

import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everdeck import Deck, Limits, Log, Restart, State, Stop, WorkerSpec
from everdeck.cli.ps import note
from everdeck.deck.peek import peek
from everdeck.errors import EverdeckError, RecordBroken, SpecError
from everdeck.model import Health
from support.deck_owner import owner
from support.repo_processes import end_all_under
from support.waiting import until

FOREVER = ["sleep", "1000"]

EDGES = [0, 1, 1e-9, 0.5, 60, 86_400, 3e8, 316_224_000, 1e9, 1e12, 1e18, 1e300, 2**53, 2**63, 2**64, 10**40, -1, -1e300]
numbers = st.one_of(st.sampled_from(EDGES), st.floats(allow_nan=True, allow_infinity=True), st.integers())
wholes = st.one_of(st.sampled_from([int(edge) for edge in EDGES]), st.integers())
# A moment must be enough to see it through a stop, so the grace is small or refused.
soon = st.one_of(st.sampled_from([0, 0.01, 1e12, -1]), st.floats(max_value=0.2))


def fields(kind: type, **strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Some of these fields, as a value of the kind, or None where the kind refuses them."""

    def made(values: dict[str, Any]) -> Any:
        try:
            return kind(**values)
        except SpecError:
            return None

    return st.fixed_dictionaries({}, optional=strategies).map(made)


specs = st.fixed_dictionaries(
    {
        "restart": fields(
            Restart,
            max_crashes=wholes,
            window_seconds=numbers,
            backoff_seconds=numbers,
            backoff_cap_seconds=numbers,
            stable_seconds=numbers,
        ),
        "stop": fields(Stop, grace_seconds=soon),
        "log": fields(Log, max_bytes=wholes, max_age_seconds=numbers, keep=wholes),
        "limits": fields(Limits, open_files=st.one_of(wholes, st.just(64))),
        "health": st.one_of(
            st.none(), fields(Health, watchdog_seconds=numbers, failures=wholes, start_timeout_seconds=numbers)
        ),
        "labels": st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=2),
        "env": st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=2),
        # Ends at once with an error, or stays: both ways of a record are gone through.
        "command": st.sampled_from([("sleep", "1000"), ("false",)]),
    }
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(specs)
def test_any_accepted_spec_can_be_started_listed_shown_recovered_and_removed(given_fields: dict[str, Any]) -> None:
    """Also when it crashes and waits for a time far away."""
    given_fields = {key: value for key, value in given_fields.items() if value is not None}
    try:
        spec = WorkerSpec(**given_fields)
    except SpecError:
        return
    with tempfile.TemporaryDirectory(prefix="everdeck-specs-") as folder:
        state = Path(folder) / "state"
        try:
            with Deck(state, durability="process") as deck:
                deck.start("bystander", FOREVER)
                try:
                    deck.start("any", spec)
                except EverdeckError:
                    return  # refused by this machine (a limit of open files above its own): nothing is left to show
                if spec.command == ("false",):
                    until(lambda: deck.status("any").crashes, "it crashed once")
                _see_all(deck)
            assert {status.name for status in peek(state).workers} == {"any", "bystander"}
            with Deck(state, durability="process") as deck:
                _see_all(deck)
                deck.remove("any")
                assert [status.name for status in deck.list()] == ["bystander"]
                deck.stop_all()
        finally:
            end_all_under(Path(folder))


def _see_all(deck: Deck) -> None:
    assert len(msgspec.json.decode(msgspec.json.encode(deck.list()))) == 2
    assert msgspec.json.encode(deck.spec("any"))
    assert msgspec.json.encode(deck.events())


@pytest.mark.parametrize(
    ("field", "value"),
    [("backoff_cap_seconds", 1e12), ("backoff_seconds", 1e12), ("window_seconds", 1e300), ("max_crashes", 10**30)],
)
def test_a_number_beyond_all_arithmetic_is_refused_by_name(field: str, value: float) -> None:
    """The one that bricked a deck, and its relatives."""
    with pytest.raises(SpecError, match=rf"restart\.{field}"):
        Restart(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "damage",
    [
        ("spec", b'{"command": ["sleep", "1000"], "restart": {"backoff_seconds": 1e12, "backoff_cap_seconds": 1e12}}'),
        ("spec", b"not JSON at all"),
        ("crash_times", "not a list"),
        ("exit", b'{"kind": "eaten"}'),
        ("phase", "meditating"),
    ],
)
@pytest.mark.parametrize("alive", [True, False])
def test_a_broken_record_is_shown_and_can_be_repaired_and_harms_nobody(
    tmp_path: Path, damage: tuple[str, object], alive: bool
) -> None:
    """The others are recovered; the broken one says what is wrong; `rm` and `start --replace` are the ways out."""
    state = tmp_path / "state"
    with owner(state) as manager:
        healthy = manager.ask("start", "healthy", FOREVER)["pid"]
        broken = manager.ask("start", "broken", FOREVER)["pid"]
        manager.ask("start", "worse", FOREVER)
        if not alive:
            manager.ask("stop", "broken")
            manager.ask("stop", "worse")
        manager.kill()
    column, value = damage
    with sqlite3.connect(state / "deck.db") as database:
        database.execute(f"UPDATE workers SET {column} = ? WHERE name != 'healthy'", (value,))  # noqa: S608 - ours
    database.close()

    told = {status.name: status for status in peek(state).workers}
    assert "cannot be read" in (told["broken"].status_text or "")
    assert "--replace" in note(told["broken"])
    assert "reset" not in note(told["broken"]), "the advice that does not help"
    with Deck(state) as deck:
        assert deck.status("healthy").pid == healthy
        shown = deck.status("broken")
        assert "cannot be read" in (shown.status_text or "")
        assert "--replace" in (shown.status_text or "")
        assert shown.pid == (broken if alive else None)
        assert shown.state is (State.RUNNING if alive else State.FAILED)
        with pytest.raises(RecordBroken, match="replace=True"):
            deck.restart("broken")
        assert deck.status("broken").pid is None, "it was stopped, and cannot be started from what is noted"
        assert deck.start("broken", FOREVER, replace=True).state is State.RUNNING
        assert deck.status("broken").status_text is None
        deck.remove("worse")
        assert {status.name for status in deck.list()} == {"broken", "healthy"}
        deck.stop_all()
