"""Owners for the crash tests: one leaves work behind, one uses every verb, one starts a group, one replaces a worker.

Run as ``python deck_scenario.py before|verbs|many|replaced STATE MARK STRANGER_PID``. ``MARK`` makes the command
lines of one test unique, so that copies can be counted in /proc by command. What the owner has seen of the event stream
is printed, so that the test can check that nothing of it was lost.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from everdeck import AsyncDeck, Restart, Stop, WorkerSpec
from everdeck.clock import Clock
from everdeck.errors import SpawnFailed
from everdeck.model import Event, State

DEADLINE_SECONDS = 60


def sleeper(mark: str, name: str) -> list[str]:
    """A worker that is found by its command line: its second argument names it, sleep adds both up."""
    return ["sleep", mark, str(1000 + sum(map(ord, name)))]


def say(*words: object) -> None:
    """One line to the test, at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def until_event(deck: AsyncDeck, fact: Callable[[Event], bool]) -> None:
    """Wait for an event that makes the fact true."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        async for event in deck.follow(after=0):
            if fact(event):
                return


async def before(state: str, mark: str, _stranger: int) -> None:
    """Leave behind: a running worker, a bound one, one whose leader is dead and whose child lives, one at rest."""
    deck = AsyncDeck(state)
    await deck.open()
    await deck.start("keep", sleeper(mark, "keep"), secrets={"TOKEN": "s3cret"})
    await deck.start("sat", sleeper(mark, "sat"), lifetime="bound", stop=Stop(grace_seconds=2))
    await deck.start(
        "kids",
        ["sh", "-c", f"setsid {' '.join(sleeper(mark, 'kids'))} & exec {' '.join(sleeper(mark, 'kids'))}"],
        restart=Restart(backoff_seconds=0),
    )
    await deck.start("rest", sleeper(mark, "rest"))
    await deck.stop("rest")
    say("ready")
    await asyncio.Event().wait()


async def verbs(state: str, mark: str, stranger: int) -> None:
    """Use every verb once, on workers that an earlier owner left and on new ones."""
    async with AsyncDeck(state) as deck:
        listener = asyncio.ensure_future(_repeat(deck))
        await deck.start("alpha", sleeper(mark, "alpha"), secrets={"KEY": "v"}, port=True)
        await deck.start("beta", sleeper(mark, "beta"), lifetime="bound", stop=Stop(grace_seconds=2))
        await deck.start("crashy", ["sh", "-c", "exit 3"], restart=Restart(max_crashes=1, backoff_seconds=0))
        await until_event(deck, lambda event: event.worker == "crashy" and event.kind == "failed")
        await deck.restart("keep")
        await deck.stop("alpha")
        await deck.reset("crashy")
        await deck.adopt("taken", stranger)
        await deck.start("alpha", sleeper(mark, "alpha-2"), secrets={"OTHER": "w"}, replace=True)
        with contextlib.suppress(SpawnFailed):
            await deck.start("broken", ["/no/such/program"])
        await deck.remove("rest")
        await deck.reconcile()
        await deck.stop_many(["keep", "beta"])
        listener.cancel()
    say("done")


GROUP = 5


async def many(state: str, mark: str, _stranger: int) -> None:
    """Start a group of workers, one of which cannot be executed; every second one is bound."""
    async with AsyncDeck(state) as deck:
        listener = asyncio.ensure_future(_repeat(deck))
        group = {
            f"group-{number}": WorkerSpec(sleeper(mark, f"group-{number}"), lifetime=("adoptable", "bound")[number % 2])
            for number in range(GROUP)
        }
        with contextlib.suppress(ExceptionGroup):
            await deck.start_many({**group, "broken": ["/no/such/program"]}, secrets={"KEY": "v"})
        listener.cancel()
        say("done")
        await asyncio.Event().wait()


class _MinuteAhead(Clock):
    """By this clock a worker has run for a minute as soon as it runs, so it is replaced as one that ran well."""

    def boottime(self) -> float:
        return super().boottime() + 60


async def replaced(state: str, mark: str, _stranger: int) -> None:
    """Kill a worker that is started again at once, in the cgroup of the one before where there are cgroups."""
    async with AsyncDeck(state, clock=_MinuteAhead()) as deck:
        listener = asyncio.ensure_future(_repeat(deck))
        first = await deck.start("again", sleeper(mark, "again"), restart=Restart(backoff_seconds=0))
        assert first.pid is not None
        say("containment", first.containment)
        os.kill(first.pid, signal.SIGKILL)  # the worker of this test, alive until now
        await until_event(deck, lambda event: event.kind == "restarted")
        listener.cancel()
        say("done")


async def new_secrets(state: str, mark: str, _stranger: int) -> None:
    """Give a worker another command and other secrets: one with a new value, one new, one gone."""
    async with AsyncDeck(state) as deck:
        await deck.start("bank", sleeper(mark, "old"), secrets={"KEPT": "old", "GONE": "old"})
        say("started")
        await deck.start("bank", sleeper(mark, "new"), secrets={"KEPT": "new", "MORE": "new"}, replace=True)
        say("done")


PLAIN = 40
"""More than one call of the C side starts."""


async def plain(state: str, mark: str, _stranger: int) -> None:
    """Start new workers that ask for nothing special, which the C side does in two calls."""
    async with AsyncDeck(state) as deck:
        listener = asyncio.ensure_future(_repeat(deck))
        await deck.start_many({f"plain-{number}": sleeper(mark, f"plain-{number}") for number in range(PLAIN)})
        listener.cancel()
        say("done")
        await asyncio.Event().wait()


async def _repeat(deck: AsyncDeck) -> None:
    async for event in deck.follow(after=0):
        say("event", event.id, event.worker, event.kind.value)


def wanted_alive(state: State) -> bool:
    """Does a worker in this state have a process?"""
    return state in {State.RUNNING, State.STARTING, State.UNHEALTHY}


if __name__ == "__main__":
    roles = (before, verbs, many, plain, replaced, new_secrets)
    role = {role.__name__: role for role in roles}[sys.argv[1]]
    asyncio.run(role(sys.argv[2], sys.argv[3], int(sys.argv[4])))
    sys.stdout.flush()
    assert Path(sys.argv[2]).exists()
