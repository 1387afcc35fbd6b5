"""What the tests of satellites share: a state directory that is quick to sync, a Bot API server, waiting for facts."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everdeck.testing.telegram import TelegramServer
from support.feed_places import quick_directory

DEADLINE_SECONDS = 60


@pytest.fixture
def state() -> Iterator[Path]:
    """A state directory in memory."""
    with quick_directory() as place:
        yield place / "state"


@pytest.fixture
def bot() -> Iterator[TelegramServer]:
    """A Bot API server of its own."""
    with TelegramServer() as server:
        yield server


@pytest.fixture
def run() -> Callable[[Callable[[], Awaitable[Any]]], Any]:
    """Run a scenario in a loop, with a deadline that never sets the pace."""

    def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
        async def within() -> Any:
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await scenario()

        return asyncio.run(within())

    return run
