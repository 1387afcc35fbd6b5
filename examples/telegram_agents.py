"""An agent for everybody who writes to one Telegram bot: ``/start`` gives a chat a worker of its own.

Run: ``TOKEN=… python examples/telegram_agents.py``. Kill it at any moment and run it again: nobody's agent ends and
nothing that was written is lost. Each agent is a process that reaches its own directory and its own port, and no more.
"""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from aiohttp import ClientError, ClientSession

from everdeck import AsyncDeck, Message, Satellite, Secret, UnknownWorker
from everdeck.model import Sandbox

AGENT = [sys.executable, str(Path(__file__).with_name("telegram_agent.py"))]


async def answer(deck: AsyncDeck, http: ClientSession, message: Message) -> str:
    """What this chat's own agent says."""
    name = f"chat-{message.conversation}"
    if message.text == "/start":
        sandbox = Sandbox("strict", read=(AGENT[1],))
        await deck.start(name, AGENT, port=True, sandbox=sandbox, labels={"chat": message.conversation})
        return "Your agent is up. Tell it something."
    try:
        port = (await deck.status(name)).port
    except UnknownWorker:
        return "Say /start first."
    async with http.post(f"http://127.0.0.1:{port}", data=message.text) as reply:
        return await reply.text()


async def handle(deck: AsyncDeck, http: ClientSession, message: Message) -> None:
    with contextlib.suppress(ClientError):  # its agent is not there yet: the message is tried again
        async with message:
            await message.reply(await answer(deck, http, message))


async def main() -> None:
    bot = Satellite.telegram(
        Secret(os.environ["TOKEN"]), base_url=os.environ.get("BOT_API", "https://api.telegram.org")
    )
    async with AsyncDeck("agents-state") as deck, ClientSession() as http, asyncio.TaskGroup() as chats:
        await deck.start("telegram", bot)
        async for message in deck.messages("telegram"):  # in order per chat; one slow agent delays nobody else
            chats.create_task(handle(deck, http, message))


asyncio.run(main())
