"""Who waits for the disk."""

import asyncio
from pathlib import Path

import pytest

from everdeck.deck.durability import Durability
from everdeck.model import EventKind
from everdeck.registry import Registry
from support.waiting import until


@pytest.mark.timeout(60)
def test_waiting_for_a_sync_that_just_ended_lets_go_of_the_loop(tmp_path: Path) -> None:
    """Whoever looks between the end of a sync and the note of it is answered, and holds nobody else up."""

    async def scenario() -> None:
        registry = Registry.open(tmp_path / "deck.db")
        loop = asyncio.get_running_loop()
        durability = Durability(registry, loop, "power")
        try:
            for _ in range(50):
                registry.set_meta("key", "value")
                waiting = [asyncio.ensure_future(durability.answerable())]
                # One task more in every turn of the loop, so that one of them looks at just that moment.
                while not waiting[0].done():
                    waiting.append(asyncio.ensure_future(durability.answerable()))
                    await asyncio.sleep(0)
                await asyncio.gather(*waiting)
        finally:
            await durability.close()
            registry.close()

    asyncio.run(scenario())


def test_commits_are_moved_into_the_database_beside_the_loop(tmp_path: Path) -> None:
    """A commit that did it would wait for the disk; whoever syncs does it when there are enough of them."""

    async def scenario() -> None:
        path = tmp_path / "deck.db"
        registry = Registry.open(path)
        durability = Durability(registry, asyncio.get_running_loop(), "power")
        try:
            before = path.stat().st_size
            with registry.transaction():
                for _ in range(1500):
                    registry.append_event(0.0, "w", EventKind.FEED, {"text": "x" * 1500})
            assert path.stat().st_size == before
            await durability.answerable()
            moved = lambda: path.stat().st_size > before + 1500 * 1500  # noqa: E731 - one look
            await asyncio.to_thread(until, moved, "they are in the database")
        finally:
            await durability.close()
            registry.close()

    asyncio.run(scenario())
