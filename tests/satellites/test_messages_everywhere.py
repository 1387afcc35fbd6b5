"""Messages over HTTP: a plain program, any other language, a claim that was lost; tests/contract has every deck."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from everdeck import AsyncDeck, Deck, MessageLost, Satellite
from everdeck.access import Grant, Role
from everdeck.errors import AccessDenied
from everdeck.guarded import Guarded
from everdeck.testing.telegram import TelegramServer
from support.waiting import eventually
from support.web_served import Served, served_at

Run = Callable[[Callable[[], Awaitable[Any]]], Any]


def answers(bot: TelegramServer) -> list[str]:
    """The texts that the bot has sent."""
    return [call.params["text"] for call in bot.calls("sendMessage")]


def test_a_plain_program_reads_over_http_too(state: Path, bot: TelegramServer) -> None:
    """``for message in deck.messages()`` with a URL."""
    bot.say("hello")
    with served_at(state) as daemon, Deck(daemon.base, token=daemon.token) as deck:
        deck.start("bob", Satellite.telegram(bot.token, base_url=bot.url, first_run="take"))
        with deck.messages("bob") as messages, next(messages) as message:
            message.reply(f"re: {message.text}")
        asyncio.run(eventually(lambda: answers(bot) == ["re: hello"], "the answer"))


def test_any_language_can_read_ack_reply_and_send(state: Path, bot: TelegramServer, run: Run) -> None:
    """The stream as bytes: a claim per message; what is not finished comes again when the stream ends."""
    content = bytes(range(256)) * 5000
    bot.send_file('../über "x".bin', content, caption="hello", chat_id=7)

    async def scenario(daemon: Served) -> None:
        headers = {"authorization": f"Bearer {daemon.token}"}
        async with httpx.AsyncClient(base_url=daemon.base, headers=headers, timeout=60) as client:
            spec = Satellite.telegram(bot.token, base_url=bot.url, first_run="take")
            body = {
                "name": "bob",
                "satellite": {"kind": "telegram", "options": spec.satellite.options},  # type: ignore[union-attr]
                "secrets": {"TOKEN": bot.token},
            }
            made = await client.post("/api/v1/workers", json=body)
            assert made.status_code == 201, made.text
            async with client.stream("GET", "/api/v1/messages", params={"worker": "bob"}) as stream:
                first = await _handed(stream.aiter_lines())
                assert (first["message"]["text"], first["message"]["attempt"]) == ("hello", 1)
            # The reader went away without a word.
            async with client.stream("GET", "/api/v1/messages") as stream:
                lines = stream.aiter_lines()  # kept: a generator that is forgotten closes its stream
                again = await _handed(lines)
                assert (again["message"]["text"], again["message"]["attempt"]) == ("hello", 1)
                late = await client.post(f"/api/v1/messages/{first['claim']}/ack", json={})
                assert (late.status_code, late.json()["type"]) == (409, "urn:everdeck:message-lost")
                claim = again["claim"]
                file = await client.get(f"/api/v1/messages/{claim}/attachments/0")
                assert (file.status_code, file.content == content) == (200, True)
                missing = await client.get(f"/api/v1/messages/{claim}/attachments/1")
                assert (missing.status_code, "has 1 attachments" in missing.json()["detail"]) == (404, True)
                assert (await client.post(f"/api/v1/messages/{claim}/reply", json={"text": "one"})).status_code == 200
                assert answers(bot) == []
                file = {"text": "x", "options": {"attachments": ["/etc/hostname"]}}
                for path, body in (("ack", {"replies": [file]}), ("reply", file)):
                    refused = await client.post(f"/api/v1/messages/{claim}/{path}", json=body)
                    assert (refused.status_code, refused.json()["field"]) == (422, "options.attachments")
                refused = await client.post("/api/v1/workers/bob/send", json={"to": 9, **file})
                assert refused.status_code == 422
                done = await client.post(f"/api/v1/messages/{claim}/ack", json={"replies": [{"text": "two"}]})
                assert done.json() == {"done": True}
            sent = await client.post("/api/v1/workers/bob/send", json={"to": 9, "text": "three"})
            assert sent.status_code == 202
            await eventually(lambda: sorted(answers(bot)) == ["one", "three", "two"], "all were sent")
            assert answers(bot).index("one") < answers(bot).index("two")
            feed = (await client.get("/api/v1/workers/bob/feed")).json()
            assert feed["status"]["done"] == 1
            schema = (await client.get("/openapi.json")).text
            assert all(f"/api/v1/messages/{{claim}}/{verb}" in schema for verb in ("ack", "reply", "fail", "release"))
            kinds = {kind["name"] for kind in (await client.get("/api/v1/satellites")).json()}
            assert {"telegram", "gmail", "smtp", "cron", "webhook"} <= kinds
            shown = (await client.get("/api/v1/workers/bob/detail")).text
            assert bot.token.partition(":")[2] not in shown

    with served_at(state) as daemon:
        run(lambda: scenario(daemon))


def test_a_claim_that_was_lost_says_so(state: Path, bot: TelegramServer, run: Run) -> None:
    """The daemon was restarted while the message was in hand: finishing it is refused, and it comes again."""
    bot.say("hello")

    async def scenario(daemon: Served) -> None:
        async with AsyncDeck(daemon.base, token=daemon.token) as deck:
            await deck.start("bob", Satellite.telegram(bot.token, base_url=bot.url, first_run="take"))
            messages = deck.messages("bob")
            message = await anext(messages)
            await messages.aclose()
            with pytest.raises(MessageLost):
                await message.done()
            async with deck.messages("bob") as again, await anext(again) as second:
                assert second.id == message.id

    with served_at(state) as daemon:
        run(lambda: scenario(daemon))


def test_a_reader_of_one_satellite_goes_on_when_that_is_made_anew(state: Path, bot: TelegramServer) -> None:
    """Removed and started again it has a new inbox; who waits for its messages waits there too."""
    with Deck(state) as deck, deck.messages("bob") as messages:
        for text in ("first", "second"):
            deck.start("bob", Satellite.telegram(bot.token, base_url=bot.url, first_run="take"))
            bot.say(text)
            with next(messages) as message:
                assert message.text == text
            deck.stop("bob")
            deck.remove("bob")


def test_files_are_sent_for_admins_only(state: Path, run: Run) -> None:
    """A satellite reads them with its own rights, so whoever may only operate would read what they cannot."""

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("out", Satellite.smtp("127.0.0.1", port=9, tls="off", sender="bob@example.org"))
            operator, admin = (Guarded(deck, Grant("somebody", role)) for role in (Role.OPERATE, Role.ADMIN))
            words = {"to": "alice@example.org", "text": "look"}
            assert await operator.send("out", **words) == 1
            with pytest.raises(AccessDenied):
                await operator.send("out", **words, attachments=["/etc/hostname"])
            assert await admin.send("out", **words, attachments=["/etc/hostname"]) == 2

    run(scenario)


def _refuse(text: str) -> None:
    if text == "bad":
        raise ValueError("no")


async def _handed(lines: AsyncIterator[str]) -> dict[str, Any]:
    """The next message of a stream, as any language would read it."""
    name = ""
    async for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: ") and name == "message":
            found: dict[str, Any] = json.loads(line.removeprefix("data: "))
            return found
    raise AssertionError("the stream ended")


async def _dead(deck: AsyncDeck) -> bool:
    return (await deck.feed("bob")).dead == 1
