"""The same with python-telegram-bot: replies are sent once, however often a handler is run, and within the limits.

    BOT_TOKEN=… python outbox_ptb.py

Stop it, kill it, start it again: every message is answered. A polite stop sends nothing twice; ``kill -9`` at most
what was on the wire at that moment (``outbox="at-most-once"``: not even that).
"""

import asyncio
import os

from telegram import Update
from telegram.ext import Application, CommandHandler, ContextTypes, MessageHandler, filters

from everdeck.feed import Inbox
from everdeck.feed.ptb import current_item, durable_application


async def order(update: Update, context: ContextTypes.DEFAULT_TYPE) -> None:
    """The order, its receipt and "this update is done" are one commit."""
    chat = update.effective_chat.id
    async with current_item().transaction() as db:
        db.execute("INSERT INTO orders (chat, text) VALUES (?, ?)", (chat, update.message.text))
        context.application.durable.outbox.put(db, "sendMessage", chat_id=chat, text="noted")


async def echo(update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
    """Nothing in it knows of the outbox: each answer is written down before it is sent."""
    await asyncio.sleep(0.05)  # your work
    await update.message.reply_text(f"you said {update.message.text}")


async def make_table(_app: Application) -> None:
    """Before the first update."""
    async with Inbox("bot.db") as inbox, inbox.transaction() as db:
        db.execute("CREATE TABLE IF NOT EXISTS orders (chat INTEGER, text TEXT)")


if __name__ == "__main__":
    builder = Application.builder().token(os.environ["BOT_TOKEN"]).concurrent_updates(32).post_init(make_table)
    builder.base_url(os.environ.get("BOT_API", "https://api.telegram.org") + "/bot")
    app = durable_application(builder, "bot.db", outbox=True)
    app.add_handler(CommandHandler("order", order))
    app.add_handler(MessageHandler(filters.TEXT, echo))
    app.run_polling()
