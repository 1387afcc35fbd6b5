"""What is done for many at once is what would be done for each of them."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from everdeck.errors import SpecError
from everdeck.model import Cookie, EventKind, Identity, State, WorkerName, WorkerSpec
from everdeck.registry import Registry, WorkerRecord, store
from everdeck.registry.store import encoded_spec
from everdeck.verbs import specs_of


def _record(name: str) -> WorkerRecord:
    spec = encoded_spec(WorkerSpec.of(["sleep", "1"]))
    return WorkerRecord(WorkerName(name), spec, "running", State.STARTING, Cookie(name * 32), port=1234)


def test_the_specs_of_many_are_those_of_each() -> None:
    """The fields are checked once; every command is, and nobody gets another one's."""
    fields = {"env": {"A": "b"}, "labels": {"x": "y"}, "cwd": Path("/tmp"), "sandbox": "basic"}
    spec = WorkerSpec.of(["other"], env={"C": "d"})
    many = specs_of({"a": ["one", Path("/x")], "b": ("two",), "c": spec, "d": ["three"]}, fields)

    assert many == {
        "a": WorkerSpec.of(["one", "/x"], **fields),
        "b": WorkerSpec.of(["two"], **fields),
        "c": WorkerSpec.of(spec, **fields),
        "d": WorkerSpec.of(["three"], **fields),
    }
    for refused in (["x", 7], [], "text", ["a\0b"], [""]):
        with pytest.raises(SpecError, match="command"):
            specs_of({"a": ["one"], "b": refused}, fields)  # type: ignore[dict-item]


def test_whoever_is_noted_as_started_is_noted_in_full(tmp_path: Path) -> None:
    """Also one whose intent is not in the registry any more."""
    registry = Registry.open(tmp_path / "deck.db")
    intents = [replace(_record(name), restarts=2) for name in "abc"]
    with registry.transaction():
        registry.save_all(intents[:2])
    started = [
        replace(one, phase=State.RUNNING, identity=Identity("boot", 7, 8, 9), cgroup="/x", started_at=1.5)
        for one in intents
    ]
    with registry.transaction():
        registry.save_started(started[:2])
    assert registry.records() == started[:2]

    with registry.transaction():
        registry.save_started(started)
    assert registry.records() == started
    registry.close()


def test_what_people_asked_for_is_forgotten_only_where_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads on after an id meets no gap among those that are kept, however many of them were asked for."""
    monkeypatch.setattr(store, "EVENTS_KEPT", 300)
    monkeypatch.setattr(store, "ASKED_EVENTS_KEPT", 20)
    monkeypatch.setattr(store, "_PRUNE_EVERY", 10)
    registry = Registry.open(tmp_path / "deck.db")
    for number in range(40):
        for asked in range(10):
            detail = {"by": {"uid": number}} if asked % 2 else {}
            registry.append_event(1.0, "a", EventKind.STARTED, detail)
    ids = [event.id for event in registry.events(0, 1000)]
    registry.close()

    assert ids == list(range(101, 401))


def test_events_noted_together_have_the_ids_that_are_told(tmp_path: Path) -> None:
    """They go on after those that were noted one by one, and are within the block that was reserved."""
    registry = Registry.open(tmp_path / "deck.db")
    first = registry.append_event(1.0, "a", EventKind.STARTED, {"pid": 1}).id
    with registry.transaction():
        assert registry.append_events(2.0, []) == range(0)
        ids = registry.append_events(2.0, [("b", EventKind.STARTED, {"pid": 2}), (None, EventKind.FEED, {"n": 3})])

    assert list(ids) == [first + 1, first + 2]
    told = [(event.id, event.worker, event.kind, event.detail) for event in registry.events(first)]
    assert told == [(first + 1, "b", EventKind.STARTED, {"pid": 2}), (first + 2, None, EventKind.FEED, {"n": 3})]
    registry.close()
