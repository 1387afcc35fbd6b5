"""A bot whose handlers do nothing, stock or durable, in one of its library's modes; ``throughput.py`` runs it by path.

It measures itself, so that nobody who looks on takes part: from the first handler to the last one, by the clock and by
the CPU time of the whole process. What it prints is JSON, one object per line. With ``--hold`` its handlers take four
seconds until the process hears SIGUSR1: that is how a backlog is made.
"""

# ruff: noqa: PLC0415 - a bot loads its own library and no other: its memory is measured

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from typing import Any

given = argparse.Namespace()


class Meter:
    """Counts handled updates and tells what the first, the last and every one of them cost."""

    def __init__(self) -> None:
        self.began = 0
        self.ended = 0
        self.go: asyncio.Event | None = None
        self.at = (0.0, 0.0)

    async def handle(self, text: str | None) -> None:
        """What the handler does: nothing, or wait for the signal."""
        self.began += 1
        if self.began == 1:
            self.at = time.monotonic(), time.process_time()
            say(first=self.at[0])
        if given.latency:
            say(seconds=(time.time_ns() - int(text or 0)) / 1e9)
        if given.hold:
            if self.go is None:
                self.go = asyncio.Event()
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.go.set)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(4):
                    await self.go.wait()
        self.ended += 1
        if self.ended == given.count:
            say(count=self.ended - 1, seconds=time.monotonic() - self.at[0], cpu=time.process_time() - self.at[1])


def say(**facts: Any) -> None:
    """One line for the one who started this."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def aiogram() -> None:
    """Poll, or serve a webhook, with aiogram."""
    from aiogram import Bot, Dispatcher
    from aiogram.client.session.aiohttp import AiohttpSession
    from aiogram.client.telegram import TelegramAPIServer
    from aiogram.fsm.context import FSMContext
    from aiogram.types import Message

    meter, dp = Meter(), Dispatcher()

    @dp.message()
    async def on_message(message: Message, state: FSMContext) -> None:
        await meter.handle(message.text)
        if given.states:
            await state.set_state("asked" if await state.get_state() is None else None)
        if given.reply:
            await message.answer("yes")

    async def main() -> None:
        bot = Bot(given.token, session=AiohttpSession(api=TelegramAPIServer.from_base(given.url)))
        if given.db:
            from everdeck.feed.aiogram import durable

            durable(dp, bot, given.db, order=given.order, storage=given.states, outbox=given.reply)
        if given.webhook:
            from aiogram.webhook.aiohttp_server import SimpleRequestHandler, setup_application
            from aiohttp import web

            app = web.Application()
            SimpleRequestHandler(dp, bot).register(app, path="/hook")
            setup_application(app, dp, bot=bot)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            say(port=runner.addresses[0][1])
            await asyncio.Event().wait()
        limit = {"tasks_concurrency_limit": given.at_once} if given.at_once else {}
        await dp.start_polling(bot, polling_timeout=10, handle_as_tasks=not given.one_by_one, **limit)

    asyncio.run(main())


def ptb() -> None:
    """Poll, or serve a webhook, with python-telegram-bot."""
    from telegram import Update
    from telegram.ext import Application, MessageHandler, PicklePersistence, filters

    meter = Meter()

    async def on_message(update: Update, context: Any) -> None:
        message: Any = update.effective_message
        await meter.handle(message.text)
        if given.states:
            context.chat_data["count"] = context.chat_data.get("count", 0) + 1
        if given.reply:
            await message.reply_text("yes")

    builder = Application.builder().token(given.token).base_url(f"{given.url}/bot")
    if given.at_once:
        builder = builder.concurrent_updates(given.at_once)
    if given.db:
        from everdeck.feed.ptb import Persistence, durable_application

        if given.states:
            builder = builder.persistence(Persistence())
        app = durable_application(
            builder, given.db, outbox=given.reply, **({"order": given.order} if given.order != "none" else {})
        )
    else:
        if given.states:
            builder = builder.persistence(PicklePersistence(given.pickle))
        app = builder.build()
    app.add_handler(MessageHandler(filters.ALL, on_message))
    if given.webhook:
        say(port=given.port)
        app.run_webhook("127.0.0.1", given.port, "hook", webhook_url=f"http://127.0.0.1:{given.port}/hook")
    else:
        app.run_polling(timeout=10)


def main() -> None:
    """Run until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=["aiogram", "ptb"])
    for name in ("url", "token"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("db", "pickle"):
        parser.add_argument(f"--{name}")
    for name in ("count", "at-once", "port"):
        parser.add_argument(f"--{name}", type=int, default=0)
    for name in ("webhook", "one-by-one", "states", "reply", "latency", "hold"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--order", default="none")
    parser.parse_args(namespace=given)
    logging.basicConfig(level=logging.ERROR)
    (aiogram if given.library == "aiogram" else ptb)()


if __name__ == "__main__":
    main()
