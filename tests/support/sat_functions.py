"""Functions that satellites of the tests import: ``to="sat_functions:echo"``."""

import asyncio
from typing import Any


async def echo(message: Any) -> None:
    """Answer what was said."""
    await message.reply(f"re: {message.text}")


def plain(message: Any) -> str:
    """The same without a loop: what is returned is the reply."""
    return f"re: {message.text}"


async def book(message: Any) -> None:
    """Effectively once: the write, the reply and the end of the message in one commit."""
    async with message.transaction() as db:
        db.execute("CREATE TABLE IF NOT EXISTS booked (text TEXT)")
        db.execute("INSERT INTO booked VALUES (?)", (message.text,))
        await message.reply(f"re: {message.text}")


async def fail(message: Any) -> None:
    """Never succeeds."""
    await asyncio.sleep(0)
    raise ValueError(f"no {message.text}")
