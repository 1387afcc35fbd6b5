"""Wait for a fact that nobody tells, with a deadline that fails loudly."""

import asyncio
import time
from collections.abc import Awaitable, Callable

SECONDS = 45.0
LOOK = 0.02


async def until(fact: Callable[[], object], what: str = "the fact", seconds: float = SECONDS) -> None:
    """Look until it is true."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(LOOK)


async def until_async(fact: Callable[[], Awaitable[object]], what: str = "the fact", seconds: float = SECONDS) -> None:
    """The same for a fact that has to be asked for."""
    deadline = time.monotonic() + seconds
    while not await fact():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(LOOK)
