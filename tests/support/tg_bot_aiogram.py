"""An aiogram bot for tests and benchmarks: stock or durable, told by messages what to do. Run by path."""

import argparse
import asyncio
import logging

from aiogram import Bot, Dispatcher
from aiogram.client.session.aiohttp import AiohttpSession
from aiogram.client.telegram import TelegramAPIServer
from aiogram.types import Message
from tg_deeds import Journal, arguments, do_deed

given: argparse.Namespace = arguments()
journal = Journal(given.log)
dp = Dispatcher()


@dp.message()
async def on_message(message: Message, event_update: object, item: object = None) -> None:
    """Do what the text says, write it down, and reply if asked to."""
    update_id = event_update.update_id  # type: ignore[attr-defined]
    journal.begin(update_id)
    await do_deed(message.text or "", given)
    if given.transaction:
        async with item.transaction() as db:  # type: ignore[attr-defined]
            db.execute("INSERT INTO handled VALUES (?)", (update_id,))
    if given.reply:
        await message.answer(f"re: {message.text}")
    journal.end(update_id)


async def main() -> None:
    """Poll until stopped."""
    session = AiohttpSession(api=TelegramAPIServer.from_base(given.url))
    bot = Bot(given.token, session=session)
    if given.db:
        from everdeck.feed.aiogram import durable

        options = {"first_run": given.first_run, "grace_seconds": given.grace, "max_attempts": given.max_attempts}
        if given.concurrency is not None:
            options["concurrency"] = given.concurrency
        durable(dp, bot, given.db, **options)
    await dp.start_polling(bot, polling_timeout=given.polling_timeout)


if __name__ == "__main__":
    logging.basicConfig(level=given.log_level)
    asyncio.run(main())
