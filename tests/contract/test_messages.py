"""The verbs about messages, on every kind of deck: the same program reads, answers, sends and decides."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from everdeck import Satellite, SpecError, UnknownWorker, Verbs
from everdeck.testing.telegram import TelegramServer
from support.cluster_machines import SERVER_ADDRESS
from support.waiting import eventually

OnDeck = Callable[[Callable[[Verbs], object]], None]


@pytest.fixture
def bot() -> Iterator[TelegramServer]:
    """A Bot API server of its own."""
    with TelegramServer(host=SERVER_ADDRESS) as server:
        yield server


def test_messages_are_read_answered_sent_and_decided_about(on_deck: OnDeck, bot: TelegramServer) -> None:
    """One is answered, one keeps failing and is set aside, and first words go out."""
    bot.say("hello", chat_id=1)
    bot.say("bad", chat_id=2)

    async def scenario(deck: Verbs) -> None:
        await deck.start("bob", Satellite.telegram(bot.token, base_url=bot.url, first_run="take"))
        seen: list[str] = []
        async with deck.messages() as messages:
            while "hello" not in seen or seen.count("bad") < 3:
                message = await anext(messages)
                seen.append(message.text)
                with contextlib.suppress(ValueError):
                    async with message:
                        _refuse(message.text)
                        await message.reply(f"re: {message.text}")
        number = await deck.send("bob", to=9, text="first words")
        assert isinstance(number, int)
        await eventually(lambda: sorted(answers(bot)) == ["first words", "re: hello"], "both were sent")

        async def set_aside() -> bool:
            return (await deck.feed("bob")).dead == 1

        await eventually(set_aside, "the other is set aside")
        status = await deck.feed("bob")
        assert (status.worker, status.kind, status.done, status.connection) == ("bob", "telegram", 1, "connected")
        (letter,) = await deck.letters("bob")
        assert (letter.text, letter.error, letter.attempts) == ("bad", "ValueError: no", 3)
        (done,) = await deck.letters("bob", which="done")
        assert (await deck.letters("bob", which="all", number=letter.number)) == [letter]
        assert await deck.decide("bob", "drop", letter.number) is True
        assert await deck.decide("bob", "retry", letter.number) is False
        assert await deck.decide("bob", "replay", done.number) is True
        async with deck.messages("bob") as again, await anext(again) as message:
            assert message.text == "hello"

    on_deck(scenario)


def test_who_is_no_satellite_has_no_messages(on_deck: OnDeck) -> None:
    """UnknownWorker and SpecError, as of any other verb; a message that cannot be one is refused by its field."""

    async def scenario(deck: Verbs) -> None:
        await deck.start("plain", ["sleep", "1000"])
        for name, kind in (("nobody", UnknownWorker), ("plain", SpecError)):
            for verb in (deck.send(name, to=1, text="hi"), deck.feed(name), deck.letters(name)):
                with pytest.raises(kind):
                    await verb
            with pytest.raises(kind):
                await deck.decide(name, "retry", "1")
            with pytest.raises(kind):
                await anext(deck.messages(name))
        with pytest.raises(SpecError) as caught:
            await deck.feed("plain")
        assert (caught.value.field, caught.value.given) == ("name", "plain")
        with pytest.raises(SpecError) as caught:
            await deck.send("plain", to="", text="hi")
        assert caught.value.field == "to"

    on_deck(scenario)


def answers(bot: TelegramServer) -> list[str]:
    """The texts that the bot has sent."""
    return [call.params["text"] for call in bot.calls("sendMessage")]


def _refuse(text: str) -> None:
    if text == "bad":
        raise ValueError("no")
