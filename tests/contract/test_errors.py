"""Every error arrives as the class it was raised as, with the same fields and the same words, on every deck."""

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from everdeck import (
    LockConflict,
    NameRefused,
    Restart,
    SpecChanged,
    SpecError,
    State,
    UnknownWorker,
    Verbs,
    WorkerFailed,
)
from everdeck.errors import DeckClosed, SpawnFailed

FOREVER = ["sleep", "1000"]
HOLD = (
    "import fcntl,sys,time; f=open(sys.argv[1]); fcntl.flock(f,fcntl.LOCK_EX); print('held',flush=True); time.sleep(99)"
)
OnDeck = Callable[[Callable[[Verbs], object]], None]


def test_a_name_that_no_worker_can_have(on_deck: OnDeck) -> None:
    """NameRefused, a SpecError and a ValueError, with what was given and what is accepted."""

    async def scenario(deck: Verbs) -> None:
        for verb in (deck.start("../etc", FOREVER), deck.stop("a b"), deck.status("")):
            with pytest.raises(NameRefused) as caught:
                await verb
            assert caught.value.field == "name"
            assert "1-128 characters" in caught.value.accepted
            assert isinstance(caught.value, ValueError)

    on_deck(scenario)


def test_an_invalid_field(on_deck: OnDeck) -> None:
    """SpecError names the field; nothing was started."""

    async def scenario(deck: Verbs) -> None:
        with pytest.raises(SpecError) as caught:
            await deck.start("alice", FOREVER, lifetime="eternal")
        assert (caught.value.field, caught.value.given) == ("lifetime", "eternal")
        with pytest.raises(SpecError) as caught:
            await deck.start("alice", FOREVER, colour="red")
        assert caught.value.field == "colour"
        with pytest.raises(SpecError):
            await deck.start_many({"a": FOREVER, "b": []})
        assert await deck.list() == []

    on_deck(scenario)


def test_nobody_of_that_name(on_deck: OnDeck) -> None:
    """UnknownWorker, a LookupError, suggests who might have been meant."""

    async def scenario(deck: Verbs) -> None:
        await deck.start("alice", FOREVER)
        asked = (deck.stop("alcie"), deck.status("alcie"), deck.restart("alcie"), deck.reset("alcie"))
        for verb in (*asked, deck.remove("alcie"), deck.inspect("alcie"), deck.spec("alcie"), deck.start("alcie")):
            with pytest.raises(UnknownWorker) as caught:
                await verb
            assert (caught.value.worker, caught.value.suggestions) == ("alcie", ("alice",))
            assert str(caught.value) == "no worker 'alcie' in this deck; did you mean 'alice'?"
            assert isinstance(caught.value, LookupError)
        with pytest.raises(UnknownWorker):
            await deck.logs("alcie")

    on_deck(scenario)


def test_another_spec(on_deck: OnDeck) -> None:
    """SpecChanged tells which fields differ."""

    async def scenario(deck: Verbs) -> None:
        pid = (await deck.start("alice", FOREVER)).pid
        with pytest.raises(SpecChanged) as caught:
            await deck.start("alice", ["sleep", "1001"], labels={"a": "b"})
        assert caught.value.worker == "alice"
        assert set(caught.value.fields) == {"command", "labels"}
        assert isinstance(caught.value.fields, tuple)
        assert (await deck.status("alice")).pid == pid

    on_deck(scenario)


def test_a_program_that_cannot_be_executed(on_deck: OnDeck) -> None:
    """SpawnFailed carries the program and the errno; nothing is left behind."""

    async def scenario(deck: Verbs) -> None:
        with pytest.raises(SpawnFailed) as caught:
            await deck.start("alice", ["/no/such/program"])
        assert (caught.value.program, caught.value.errno) == ("/no/such/program", errno.ENOENT)
        assert await deck.list() == []

    on_deck(scenario)


def test_refusals_of_many_come_together(on_deck: OnDeck) -> None:
    """One group with each refusal as its own class; the others run."""

    async def scenario(deck: Verbs) -> None:
        told: dict[str, object] = {}
        with pytest.raises(ExceptionGroup) as caught:
            await deck.start_many(
                {"good": FOREVER, "bad": ["/no/such/program"], "gone": None},
                progress=lambda name, answer: told.update({name: answer}),
            )
        assert {type(one) for one in caught.value.exceptions} == {SpawnFailed, UnknownWorker}
        assert "2 of 3" in str(caught.value)
        assert [status.name for status in await deck.list()] == ["good"]
        assert isinstance(told["bad"], SpawnFailed)

    on_deck(scenario)


def test_a_tripped_breaker(on_deck: OnDeck) -> None:
    """WorkerFailed until somebody resets it."""

    async def scenario(deck: Verbs) -> None:
        await deck.start("bad", ["sh", "-c", "exit 1"], restart=Restart("always", max_crashes=0))
        while (await deck.status("bad")).state is not State.FAILED:
            await asyncio.sleep(0.01)
        with pytest.raises(WorkerFailed) as caught:
            await deck.start("bad")
        assert caught.value.worker == "bad"
        assert "1 crashes" in str(caught.value)

    on_deck(scenario)


def test_a_lock_that_somebody_else_holds(on_deck: OnDeck, state: Path) -> None:
    """LockConflict names the holder; a second copy was not started."""

    async def scenario(deck: Verbs) -> None:
        await deck.start("alice", FOREVER)
        await deck.stop("alice")
        lock = state / "workers" / "alice" / "lock"
        with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE) as holder:
            try:
                assert holder.stdout is not None
                holder.stdout.readline()
                with pytest.raises(LockConflict) as caught:
                    await deck.start("alice")
                assert (caught.value.worker, caught.value.pid) == ("alice", holder.pid)
                assert "flock" in caught.value.command
            finally:
                holder.kill()

    on_deck(scenario)


def test_adopting_nobody(on_deck: OnDeck) -> None:
    """SpecError names the pid."""

    async def scenario(deck: Verbs) -> None:
        with pytest.raises(SpecError) as caught:
            await deck.adopt("x", 2**22 + 1)
        assert (caught.value.field, caught.value.given) == ("pid", 2**22 + 1)
        with pytest.raises(SpecError):
            await deck.adopt("x", os.getpid() if (await deck.abilities()).kind == "owner" else 1)

    on_deck(scenario)


def test_a_closed_deck(on_deck: OnDeck) -> None:
    """DeckClosed."""

    async def scenario(deck: Verbs) -> None:
        await deck.close()  # type: ignore[attr-defined]
        with pytest.raises(DeckClosed):
            await deck.list()

    on_deck(scenario)
