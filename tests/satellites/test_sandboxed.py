"""A satellite under a strict sandbox: it works, with its own ports and nothing more."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from everdeck import AsyncDeck, LimitUnavailable, Satellite
from everdeck.model import Sandbox
from everdeck.testing.telegram import TelegramServer
from support.sat_waiting import until

Run = Callable[[Callable[[], Awaitable[Any]]], Any]


def test_a_strict_sandbox_has_the_account_s_port_and_no_other(state: Path, bot: TelegramServer, run: Run) -> None:
    """The spec lists the one port; the satellite polls, stores and sends under it."""
    bot.say("hello")
    spec = Satellite.telegram(bot.token, base_url=bot.url, first_run="take", sandbox=Sandbox("strict"))
    assert spec.sandbox.tcp_connect == (bot.port,)

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            try:
                await deck.start("bob", spec)
            except LimitUnavailable as err:
                pytest.skip(f"this machine has no strict sandbox: {err}")
            async with deck.messages("bob") as messages, await anext(messages) as message:
                await message.reply(f"re: {message.text}")
            await until(
                lambda: [call.params["text"] for call in bot.calls("sendMessage")] == ["re: hello"], "the answer"
            )

    run(scenario)
