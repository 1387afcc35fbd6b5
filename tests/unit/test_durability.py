"""Who waits for the disk."""

import asyncio
from pathlib import Path

import pytest

from everdeck.deck.durability import Durability
from everdeck.registry import Registry


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
