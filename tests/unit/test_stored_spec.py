"""What the registry and the notes keep of a spec: everything that was said, and nothing that goes without saying."""

import json

import msgspec
import pytest

from everdeck.model import (
    Cookie,
    Health,
    Limits,
    Log,
    Restart,
    Sandbox,
    SatelliteSpec,
    Secret,
    State,
    Stop,
    WorkerName,
    WorkerSpec,
)
from everdeck.registry import WorkerRecord
from everdeck.registry.store import encoded_spec

USUAL = {
    "env": {},
    "inherit_env": [],
    "secrets": {},
    "cwd": None,
    "lifetime": "adoptable",
    "restart": {
        "policy": "on-failure",
        "max_crashes": 5,
        "window_seconds": 300,
        "backoff_seconds": 1.0,
        "backoff_cap_seconds": 60.0,
        "stable_seconds": 60,
    },
    "stop": {"signal": "TERM", "grace_seconds": 5},
    "health": None,
    "limits": {
        "memory_bytes": None,
        "cpu_percent": None,
        "pids": None,
        "open_files": None,
        "nice": None,
        "oom_score_adj": None,
        "disk_bytes": None,
    },
    "sandbox": {
        "level": "off",
        "read": [],
        "write": [],
        "tcp_connect": [],
        "tcp_bind": [],
        "unix_sockets": False,
    },
    "log": {"max_bytes": 10_000_000, "max_age_seconds": None, "keep": 10, "compress": True, "split_stderr": False},
    "port": False,
    "user": None,
    "group": None,
    "umask": None,
    "labels": {},
    "satellite": None,
}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (WorkerSpec(("sleep", "1")), set()),
        (WorkerSpec(("sleep", "1"), stop=Stop(grace_seconds=5), log=Log(), limits=Limits(), env={}), set()),
        (WorkerSpec(("a",), restart=Restart("never"), umask=0, port=True), {"restart", "umask", "port"}),
        (
            WorkerSpec(("b",), env={"A": "b"}, labels={"x": "y"}, cwd="/", lifetime="bound"),
            {"env", "labels", "cwd", "lifetime"},
        ),
        (WorkerSpec(("c",), sandbox=Sandbox("strict"), health=Health(notify=True)), {"sandbox", "health"}),
        (WorkerSpec(("d",), sandbox=Sandbox("strict"), health=Health(notify=True)), {"sandbox", "health"}),
    ],
)
def test_a_stored_spec_says_what_is_not_usual(spec: WorkerSpec, said: set[str]) -> None:
    """And read again it is the same spec."""
    stored = encoded_spec(spec)

    assert set(json.loads(stored)) == {"command"} | said
    assert msgspec.json.decode(stored, type=WorkerSpec) == spec


def test_the_value_of_a_secret_is_not_stored_and_not_taken_from_another() -> None:
    """The fields of one spec may be those of the one before; its secrets are its own."""
    for name in ("A", "B"):
        stored = encoded_spec(WorkerSpec(("x",), secrets={name: Secret("hidden")}))

        assert json.loads(stored) == {"command": ["x"], "secrets": {name: {"value": None, "env": False}}}


def test_what_is_changed_inside_a_spec_is_stored_with_it() -> None:
    """A dictionary of a spec can be changed though the spec cannot: what counts is what it says when it is stored."""
    options = {"token": "a"}
    spec = WorkerSpec(("x",), env={"A": "1"}, satellite=SatelliteSpec("cron", options))
    encoded_spec(spec)

    spec.env["A"], options["token"] = "2", "b"
    stored = json.loads(encoded_spec(spec))

    assert (stored["env"], stored["satellite"]["options"]) == ({"A": "2"}, {"token": "b"})


def test_what_goes_without_saying_stays_what_it_was() -> None:
    """A stored spec leaves a default out. Who changes one has to write the old one into every row, by a migration."""
    assert json.loads(msgspec.json.encode(WorkerSpec(("x",)))) == {"command": ["x"], **USUAL}


# What follows the command is as in the one before, so of these only the command is read.
FIRST = b'{"command":["first"],"env":{"A":"1"},"labels":{"x":"y"}}'


def record_of(spec_json: bytes) -> WorkerRecord:
    """A worker with this spec."""
    return WorkerRecord(WorkerName("w"), spec_json, "stopped", State.STOPPED, Cookie("c"))


@pytest.mark.parametrize(
    "spec_json",
    [
        b'{"command":["second","with \\"quotes\\" and ]"],"env":{"A":"1"},"labels":{"x":"y"}}',
        b'{"command":["second"],"port":true,"env":{"A":"1"},"labels":{"x":"y"}}',
        b'{"command":["second"],"env":{"A":"2"},"labels":{"x":"y"}}',
        b'{"command":["second"]}',
        b'{"env":{},"command":["second"],"env":{"A":"1"},"labels":{"x":"y"}}',
    ],
)
def test_a_spec_that_is_much_like_the_last_is_read_as_it_is(spec_json: bytes) -> None:
    """It is what reading all of it gives."""
    assert record_of(FIRST).spec.command == ("first",)

    assert record_of(spec_json).spec == msgspec.json.decode(spec_json, type=WorkerSpec)


@pytest.mark.parametrize(
    "command", [b"[]", b'[""]', b'["a\\u0000b"]', b'"text"', b'["a"', b'["a"],"nothing":[1]', b"[1]", b""]
)
def test_a_spec_that_is_much_like_the_last_and_cannot_be_run_is_broken(command: bytes) -> None:
    """Nothing is taken for sound because what follows it was."""
    spec_json = b'{"command":' + command + FIRST[len(b'{"command":["first"]') :]
    assert record_of(FIRST).broken is None

    assert record_of(spec_json).broken is not None


def test_specs_that_are_much_alike_share_nothing_that_can_be_changed() -> None:
    """Whoever has one of them can change its mappings, and changes no other worker's."""
    first = record_of(FIRST.replace(b"first", b"one")).spec
    first.env["A"] = "changed"
    second = record_of(FIRST.replace(b"first", b"two")).spec
    second.labels["x"] = "changed"
    third = record_of(FIRST.replace(b"first", b"three")).spec

    assert (second.env, third.env, third.labels) == ({"A": "1"}, {"A": "1"}, {"x": "y"})
