"""The decks that keep the contract, one after the other: each test of this folder runs on every one of them."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from everdeck import AsyncDeck
from everdeck.verbs import Verbs
from support.cluster_machines import IN_THE_NETWORK, Cluster, fresh_namespace
from support.repo_processes import end_all_under
from support.web_served import served_at

OWNER = (
    "from everdeck import Deck; import sys, signal; deck = Deck(sys.argv[1]); print('up', flush=True); signal.pause()"
)


@contextlib.asynccontextmanager
async def as_owner(state: Path) -> AsyncIterator[Verbs]:
    """This process owns the deck."""
    async with AsyncDeck(state, durability="process") as deck:
        assert (await deck.abilities()).kind == "owner"
        yield deck


@contextlib.asynccontextmanager
async def as_member(state: Path) -> AsyncIterator[Verbs]:
    """Another process owns the deck, and this one asks it."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(state)], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"up\n"
            async with AsyncDeck(state) as deck:
                assert (await deck.abilities()).kind == "member"
                yield deck
        finally:
            owner.kill()


@contextlib.asynccontextmanager
async def as_remote(state: Path) -> AsyncIterator[Verbs]:
    """A daemon owns the deck and serves HTTP, and this process knows its address and a token."""
    with served_at(state) as daemon:
        async with AsyncDeck(daemon.base, token=daemon.token) as deck:
            assert (await deck.abilities()).kind == "remote"
            yield deck


@contextlib.asynccontextmanager
async def as_cluster(_state: Path) -> AsyncIterator[Verbs]:
    """A namespace of a real cluster is the deck."""
    with fresh_namespace(Cluster()) as name:
        async with AsyncDeck(f"kubernetes:{name}") as deck:
            assert (await deck.abilities()).kind == "cluster"
            yield deck


OpenDeck = Callable[[Path], AbstractAsyncContextManager[Verbs]]
DECKS: dict[str, OpenDeck] = {"owner": as_owner, "member": as_member, "remote": as_remote}
if IN_THE_NETWORK:  # `make test-kubernetes`
    DECKS["cluster"] = as_cluster
ONE_BOX_ONLY = {
    "test_adopt_takes_over_a_stranger": "a cluster takes over no process of this machine",
    "test_adopting_nobody": "a cluster takes over no process of this machine",
    "test_a_lock_that_somebody_else_holds": "the lock of a worker on a cluster is its Lease",
}


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.timeout(1000)] if name == "cluster" else []) for name in DECKS]
)
def opened(request: pytest.FixtureRequest) -> OpenDeck:
    """How to open the deck under test at a state directory."""
    if request.param == "cluster" and request.node.originalname in ONE_BOX_ONLY:
        pytest.skip(ONE_BOX_ONLY[request.node.originalname])
    return DECKS[request.param]


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory whose workers are all ended afterwards."""
    yield tmp_path / "state"
    end_all_under(tmp_path)


@pytest.fixture
def on_deck(opened: OpenDeck, state: Path) -> Callable[[Callable[[Verbs], object]], None]:
    """Run a scenario, a coroutine function of one deck, on the deck under test."""

    def run(scenario: Callable[[Verbs], object]) -> None:
        async def whole() -> None:
            async with opened(state) as deck, asyncio.timeout(90 if opened is not as_cluster else 900):
                await scenario(deck)  # type: ignore[misc]

        asyncio.run(whole())

    return run
