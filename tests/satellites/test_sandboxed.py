"""Satellites under a strict sandbox: they work, with their own ports and nothing more."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from everdeck import AsyncDeck, LimitUnavailable, Satellite
from everdeck.model import EventKind, Sandbox
from everdeck.testing.telegram import TelegramServer
from support.sat_mail import Dovecot, Smtpd, a_mail, needs_dovecot, needs_smtpd
from support.waiting import eventually

Run = Callable[[Callable[[], Awaitable[Any]]], Any]
STRICT = Sandbox("strict")


@needs_dovecot
@needs_smtpd
def test_every_kind_works_in_a_strict_sandbox_with_the_ports_of_its_account(
    state: Path, bot: TelegramServer, run: Run
) -> None:
    """The spec lists the ports of the account and no other; each polls, stores, listens and sends under it."""
    bot.say("hello")

    async def scenario(imap: Dovecot, smtp: Smtpd) -> None:
        imap.deliver(a_mail("hello"))
        place = {"host": "127.0.0.1", "port": imap.port, "tls": "off", "first_run": "take"}
        out = {"smtp_host": "127.0.0.1", "smtp_port": smtp.port, "smtp_tls": "off"}
        specs = {
            "tg": Satellite.telegram(bot.token, base_url=bot.url, first_run="take", sandbox=STRICT),
            "mail": Satellite.gmail(imap.user, password=imap.password, sandbox=STRICT, **place, **out),
            "out": Satellite.smtp("127.0.0.1", port=smtp.port, tls="off", sender="b@example.org", sandbox=STRICT),
            "tick": Satellite.cron("0 3 * * *", sandbox=STRICT),
            "hook": Satellite.webhook("/hook", sandbox=STRICT),
        }
        allowed = {name: spec.sandbox.tcp_connect for name, spec in specs.items()}
        mail = tuple(sorted((imap.port, smtp.port)))
        assert allowed == {"tg": (bot.port,), "mail": mail, "out": (smtp.port,), "tick": (), "hook": ()}
        async with AsyncDeck(state) as deck:
            for name, spec in specs.items():
                try:
                    await deck.start(name, spec)
                except LimitUnavailable as err:
                    pytest.skip(f"this machine has no strict sandbox: {err}")
            await deck.send("out", to="carol@example.org", text="from the outbox")
            async with deck.messages() as messages:
                for _ in range(2):
                    async with await anext(messages) as message:
                        await message.reply(f"re: {message.text.strip()} by {message.channel}")
            for name in specs:
                await eventually(lambda name=name: _connected(deck, name), f"{name} is connected")
            await eventually(lambda: [call.params["text"] for call in bot.calls("sendMessage")], "the answer")
            await eventually(lambda: len(smtp.taken()) == 2, "both mails")
            await deck.stop_all()
            assert not [event for event in await deck.events() if event.kind is EventKind.KILLED], (
                "told to leave, they do"
            )

    with Dovecot() as imap, Smtpd() as smtp:
        run(lambda: scenario(imap, smtp))


async def _connected(deck: AsyncDeck, name: str) -> bool:
    return (await deck.feed(name)).connection == "connected"


def test_a_webhook_listens_on_its_own_port_in_a_strict_sandbox(state: Path, run: Run) -> None:
    """The port is the worker's, so nobody lists it; what comes in is read here with the satellite's rights."""

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            try:
                status = await deck.start("hook", Satellite.webhook(path="/in", sandbox=Sandbox("strict")))
            except LimitUnavailable as err:
                pytest.skip(f"this machine has no strict sandbox: {err}")
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{status.port}") as client:
                await eventually(lambda: _accepted(client), "the webhook listens")
            async with deck.messages("hook") as messages, await anext(messages) as message:
                assert message.text == "hello"

    run(scenario)


async def _accepted(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.post("/in", content=b"hello")).is_success
    except httpx.TransportError:
        return False
