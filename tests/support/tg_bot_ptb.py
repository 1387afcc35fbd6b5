"""A python-telegram-bot bot for tests and benchmarks: stock or durable, told by messages what to do. Run by path."""

import argparse
import logging
from typing import Any

from telegram import Update
from telegram.ext import Application, MessageHandler, PicklePersistence, filters
from tg_deeds import Journal, arguments, do_deed

given: argparse.Namespace = arguments()
journal = Journal(given.log)


async def on_message(update: Update, context: Any) -> None:
    """Do what the text says, write it down, and reply if asked to."""
    assert update.effective_message is not None
    text = update.effective_message.text or ""
    journal.begin(update.update_id)
    await do_deed(text, given)
    if given.persistence:
        context.chat_data["count"] = context.chat_data.get("count", 0) + 1
    if given.transaction:
        from everdeck.feed.ptb import current_item

        item = current_item()
        assert item is not None
        async with item.transaction() as db:
            db.execute("INSERT INTO handled VALUES (?)", (update.update_id,))
    if given.reply:
        await update.effective_message.reply_text(f"re: {text}")
    journal.end(update.update_id)


def main() -> None:
    """Poll until stopped."""
    builder = Application.builder().token(given.token).base_url(f"{given.url}/bot")
    if given.concurrency is not None:
        builder = builder.concurrent_updates(given.concurrency)
    if given.persistence:
        builder = builder.persistence(PicklePersistence(given.persistence))
    if given.db:
        from everdeck.feed.ptb import durable_application

        options = {"first_run": given.first_run, "grace_seconds": given.grace, "max_attempts": given.max_attempts}
        app = durable_application(builder, given.db, **options)
    else:
        app = builder.build()
    app.add_handler(MessageHandler(filters.TEXT, on_message, block=not given.non_blocking))
    app.run_polling(timeout=given.polling_timeout)


if __name__ == "__main__":
    logging.basicConfig(level=given.log_level)
    main()
