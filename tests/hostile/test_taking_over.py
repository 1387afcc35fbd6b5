"""Whoever is taken over stays who it is: its account is read from the process; what it says of itself is a claim."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everdeck import AsyncDeck
from everdeck.errors import EverdeckError
from support.cli_daemon import until
from support.deck_owner import owner
from support.hostile_accounts import Account

SLEEPER = ["sleep", "1000"]


def _uid_of(pid: int | None) -> str:
    return next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Uid:"))


@contextmanager
def _running_as(account: Account | None, **env: str) -> Iterator[int]:
    """A sleeper of this account with this environment, in a session of its own; its pid."""
    who = {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": []}
    process = subprocess.Popen(SLEEPER, env={"PATH": os.environ["PATH"], **env}, cwd="/", start_new_session=True, **who)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_an_adopted_process_is_started_again_as_its_own_account(place: Path, mallory: Account) -> None:
    """Its command line is its own choice; as root it would be anybody's way to root."""

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            with _running_as(mallory) as pid:
                await deck.adopt("alice", pid)
                assert (await deck.spec("alice")).user == str(mallory.uid)
                status = await deck.restart("alice")
                assert status.pid != pid
                assert _uid_of(status.pid).split()[1:5] == [str(mallory.uid)] * 4
                await deck.stop("alice")

    asyncio.run(scenario())


def test_an_account_that_is_not_known_is_refused(place: Path, mallory: Account) -> None:
    """A uid without an entry: nobody says which groups it has, so it is not taken over."""
    nobody = Account("nobody-there", 64_321, 64_321)

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            with _running_as(nobody) as pid:
                with pytest.raises(EverdeckError, match="64321"):
                    await deck.adopt("alice", pid)
                assert await deck.list() == []

    asyncio.run(scenario())


def _lose_the_registry(state: Path) -> None:
    (state / "deck.db").write_bytes(b"this is not a database, though it is long enough to look at" * 100)
    for journal in ("deck.db-wal", "deck.db-shm"):
        (state / journal).unlink(missing_ok=True)


def test_after_a_lost_registry_everybody_comes_back_as_who_he_was(place: Path, mallory: Account) -> None:
    """Found by its lock, and started again as its account."""
    state = place / "state"
    with owner(state) as manager:
        pid = manager.ask("start", "alice", SLEEPER, user=mallory.name)["pid"]
        manager.kill()
    _lose_the_registry(state)

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            assert (await deck.status("alice")).pid == pid
            status = await deck.restart("alice")
            assert _uid_of(status.pid).split()[1:5] == [str(mallory.uid)] * 4
            await deck.stop("alice")

    asyncio.run(scenario())


@pytest.mark.parametrize("claimed", ["alice", "ghost"])
def test_a_stranger_with_our_variables_is_no_worker(place: Path, mallory: Account, claimed: str) -> None:
    """Anybody can set a variable: of a worker of another account, or of one that never was."""
    state = place / "state"
    with owner(state) as manager:
        manager.ask("start", "alice", SLEEPER)
        manager.ask("stop", "alice")
        manager.kill()
    _lose_the_registry(state)
    home = str(state / "workers" / claimed)
    variables = {"EVERDECK_COOKIE": "f" * 32, "EVERDECK_WORKER": claimed, "EVERDECK_DIR": home}
    with _running_as(mallory, **variables) as pid:

        async def scenario() -> None:
            async with AsyncDeck(state) as deck:
                assert [status.pid for status in await deck.list() if status.pid == pid] == []
                await deck.stop_all()

        asyncio.run(scenario())
        assert Path(f"/proc/{pid}").exists()


def test_a_claim_of_the_owners_own_account_needs_the_cookie(tmp_path: Path) -> None:
    """A sandboxed worker is of that account too: with another's name it would be started again without the sandbox."""
    state = tmp_path / "state"
    with owner(state) as manager:
        manager.ask("start", "alice", SLEEPER)
        manager.ask("stop", "alice")
        manager.kill()
    _lose_the_registry(state)
    home = str(state / "workers/alice")
    with _running_as(None, EVERDECK_COOKIE="f" * 32, EVERDECK_WORKER="alice", EVERDECK_DIR=home) as pid:

        async def scenario() -> None:
            async with AsyncDeck(state) as deck:
                assert [status.pid for status in await deck.list()] == [None]
                assert (await deck.spec("alice")).command == tuple(SLEEPER)

        asyncio.run(scenario())
        assert Path(f"/proc/{pid}").exists()


def test_a_sandboxed_worker_keeps_its_sandbox_though_it_hides_whose_it_is(tmp_path: Path) -> None:
    """Without the registry it is known by its lock; what it may do is the owner's word, not its own environment's."""
    state = tmp_path / "state"
    forget = "exec env EVERDECK_COOKIE=ffffffffffffffffffffffffffffffff sleep 1000"
    with owner(state) as manager:
        pid = manager.ask("start", "alice", ["sh", "-c", forget], sandbox="basic")["pid"]
        manager.kill()
    until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"), "it did not change its environment")
    _lose_the_registry(state)

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            assert (await deck.status("alice")).pid == pid
            assert (await deck.spec("alice")).sandbox.level == "basic"
            await deck.stop("alice")

    asyncio.run(scenario())
