"""The fixture ``telegram_server``, found by pytest through the ``pytest11`` entry point.

It imports the server only when a test asks for it, so that having Everdeck installed costs a test run nothing.
"""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from everdeck.testing.telegram import TelegramServer


@pytest.fixture
def telegram_server() -> "Iterator[TelegramServer]":
    """A Bot API server on a free loopback port, closed after the test."""
    from everdeck.testing.telegram import TelegramServer  # noqa: PLC0415 - see the module's text

    with TelegramServer() as server:
        yield server
