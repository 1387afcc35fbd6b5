"""``user="auto"``: every worker a uid of its own."""

import asyncio
import os
from pathlib import Path

import pytest

from everdeck import AsyncDeck
from everdeck.deck import rights
from everdeck.errors import SpecError
from support.hostile_accounts import Account

SLEEPER = ["sleep", "1000"]


def _uid(pid: int | None) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def test_each_worker_has_a_uid_of_its_own_for_its_life(place: Path, mallory: Account) -> None:
    """The same over restarts and owners; its files are its own; removed and made anew, it gets another."""
    first = rights._auto_uids().start

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            uids = {name: _uid((await deck.start(name, SLEEPER, user="auto")).pid) for name in ("alice", "bob")}
            assert sorted(uids.values()) == [first, first + 1]
            data = place / "state/workers/alice/data"
            assert data.stat().st_uid == uids["alice"]
            assert _uid((await deck.restart("alice")).pid) == uids["alice"]
            await deck.stop("alice")
            await deck.remove("alice")
            assert _uid((await deck.start("alice", SLEEPER, user="auto")).pid) == first + 2
        async with AsyncDeck(place / "state") as deck:
            assert _uid((await deck.restart("bob")).pid) == first + 1
            await deck.stop_all()

    asyncio.run(scenario())


def test_files_follow_a_changed_account_and_links_do_not(place: Path, mallory: Account) -> None:
    """What the account before made becomes the new one's; what it only linked to stays whose it is."""
    treasure = place / "treasure"
    treasure.write_text("root's own words")

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            await deck.start("alice", SLEEPER, user=mallory.name)
            data = place / "state/workers/alice/data"
            mallory.run("sh", "-c", f"mkdir {data}/d; echo x > {data}/d/own; ln -s {treasure} {data}/d/link")
            os.link(treasure, data / "d/second-name")  # as on a machine without fs.protected_hardlinks
            status = await deck.start("alice", SLEEPER, user="auto", replace=True)
            uid = _uid(status.pid)
            assert {path.name: path.lstat().st_uid for path in (data, data / "d", data / "d/own")} == {
                "data": uid,
                "d": uid,
                "own": uid,
            }
            assert treasure.stat().st_uid == 0
            await deck.stop("alice")

    asyncio.run(scenario())


def test_a_range_that_is_used_up_is_said(place: Path, mallory: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    """No uid is given twice while a worker has it."""
    monkeypatch.setenv("EVERDECK_AUTO_UIDS", "1900000007-1900000008")

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            for name in ("alice", "bob"):
                await deck.start(name, SLEEPER, user="auto")
            with pytest.raises(SpecError, match="all of them are in use"):
                await deck.start("carol", SLEEPER, user="auto")
            await deck.remove("alice")
            assert _uid((await deck.start("carol", SLEEPER, user="auto")).pid) == 1900000007
            await deck.stop_all()

    asyncio.run(scenario())


def test_the_range_is_the_decks_and_a_worker_keeps_its_uid(
    place: Path, mallory: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the library or the file says it; another range later changes nobody who has a uid."""
    monkeypatch.setattr(rights, "_chosen_uids", None)

    async def scenario() -> None:
        async with AsyncDeck(place / "state", auto_uids="1900100000-1900100009") as deck:
            assert _uid((await deck.start("alice", SLEEPER, user="auto")).pid) == 1900100000
        async with AsyncDeck(place / "state", auto_uids="1900200000-1900200009") as deck:
            assert _uid((await deck.restart("alice")).pid) == 1900100000
            assert _uid((await deck.start("bob", SLEEPER, user="auto")).pid) == 1900200000
            await deck.stop_all()
        with pytest.raises(SpecError, match="FIRST-LAST"):
            AsyncDeck(place / "state", auto_uids="9-1")

    asyncio.run(scenario())
