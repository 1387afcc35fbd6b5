"""An aiogram bot whose replies are durable: sent once, however often a handler is run, and within Telegram's limits.

    BOT_TOKEN=… python outbox_aiogram.py

Stop it, kill it, start it again: every message is answered. A polite stop sends nothing twice; ``kill -9`` at most
what was on the wire at that moment (``outbox="at-most-once"``: not even that).
"""

import asyncio
import os
from collections.abc import Callable

from aiogram import Bot, Dispatcher
from aiogram.client.session.aiohttp import AiohttpSession
from aiogram.client.telegram import TelegramAPIServer
from aiogram.filters import Command
from aiogram.methods import SendMessage
from aiogram.types import Message

from everdeck.feed import Inbox, Item
from everdeck.feed.aiogram import durable

dp = Dispatcher()


@dp.message(Command("order"))
async def order(message: Message, item: Item, promise: Callable[..., int]) -> None:
    """The order, its receipt and "this update is done" are one commit."""
    async with item.transaction() as db:
        db.execute("INSERT INTO orders (chat, text) VALUES (?, ?)", (message.chat.id, message.text))
        promise(db, SendMessage(chat_id=message.chat.id, text="noted"))


@dp.message()
async def echo(message: Message) -> None:
    """Nothing in it knows of the outbox: each answer is written down before it is sent."""
    await asyncio.sleep(0.05)  # your work
    await message.answer(f"you said {message.text}")


async def main() -> None:
    """Poll until stopped."""
    async with Inbox("bot.db") as inbox, inbox.transaction() as db:
        db.execute("CREATE TABLE IF NOT EXISTS orders (chat INTEGER, text TEXT)")
    session = AiohttpSession(api=TelegramAPIServer.from_base(os.environ.get("BOT_API", "https://api.telegram.org")))
    bot = Bot(os.environ["BOT_TOKEN"], session=session)
    dp["promise"] = durable(dp, bot, "bot.db", outbox=True).outbox.put
    await dp.start_polling(bot)


if __name__ == "__main__":
    asyncio.run(main())
