"""The telegram satellite against a Bot API server: in, out, order, faults in words, death at any point."""

import asyncio
import contextlib
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from everdeck import AsyncDeck, Deck, Restart, Satellite, Secret, SpecError, WorkerSpec
from everdeck.crashpoints import CRASH_AT_ENV
from everdeck.model import EventKind
from everdeck.satellites import process as process_module
from everdeck.satellites import targets as targets_module
from everdeck.testing.satellites import NAME, Victim, kill_trial
from everdeck.testing.telegram import TelegramServer
from support.sat_trial import patience, size, tell
from support.waiting import eventually

Run = Callable[[Callable[[], Awaitable[Any]]], Any]
SUPPORT = Path(__file__).parents[1] / "support"
POINTS = sorted(
    {
        point
        for module in (process_module, targets_module)
        for point in re.findall(r'crash_point\("([^"]+)"\)', Path(str(module.__file__)).read_text())
    }
)


def spec_of(bot: TelegramServer, **fields: Any) -> WorkerSpec:
    """A satellite for this server that takes what is there."""
    fields = {"first_run": "take", "restart": Restart("always", max_crashes=1000, backoff_seconds=0.05), **fields}
    return Satellite.telegram(Secret(bot.token), base_url=bot.url, **fields)


def answers(bot: TelegramServer) -> list[str]:
    """The texts that the bot has sent."""
    return [call.params["text"] for call in bot.calls("sendMessage")]


def test_the_host_answers_what_comes_in(state: Path, bot: TelegramServer, run: Run) -> None:
    """A message has every field that was promised; the reply arrives; the deck knows the account and the numbers."""
    bot.say("hello", chat_id=42, user_id=7)

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("bob", spec_of(bot))
            async with deck.messages("bob") as messages:
                message = await anext(messages)
                async with message:
                    assert (message.worker, message.channel, message.text) == ("bob", "telegram", "hello")
                    assert (message.conversation, message.sender, message.attempt) == ("42", "7", 1)
                    assert message.raw["message"]["chat"]["id"] == 42
                    assert message.attachments == ()
                    await message.reply("you said hello")
            await deck.send("bob", to=9, text="good morning")
            await eventually(lambda: len(answers(bot)) == 2, "both were sent")
            calls = {call.params["chat_id"]: call.params["text"] for call in bot.calls("sendMessage")}
            assert calls == {42: "you said hello", 9: "good morning"}
            await eventually(lambda: _is_idle(deck, "bob"), "nothing is left to send")
            await eventually(lambda: _connected(deck, "bob"), "it is connected")
            feed = await deck.feed("bob")
            assert (feed.kind, feed.connection, feed.done) == ("telegram", "connected", 1)
            assert feed.account == f"@test_{bot.bot_id}_bot"
            assert feed.last_contact_at is not None
            assert (await deck.status("bob")).lifetime == "bound"

    run(scenario)


def test_a_plain_program_reads_all_satellites_also_those_started_later(state: Path, bot: TelegramServer) -> None:
    """``for message in deck.messages()``: one loop for every account of the deck."""
    bot.say("one")
    with TelegramServer() as second, Deck(state) as deck:
        deck.start("bob", spec_of(bot))
        with deck.messages() as messages:
            with next(iter(messages)) as message:
                assert (message.worker, message.text) == ("bob", "one")
            second.say("two")
            deck.start("alice", spec_of(second))
            with next(iter(messages)) as message:
                assert (message.worker, message.text) == ("alice", "two")


@pytest.mark.parametrize("function", ["echo", "plain"])
def test_a_function_in_the_satellite_answers(state: Path, bot: TelegramServer, run: Run, function: str) -> None:
    """``to="module:function"``: the module is found where the program that wrote the spec found it."""
    bot.say("hello")

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            spec = spec_of(bot, to=f"sat_functions:{function}", env={"PYTHONPATH": str(SUPPORT)})
            await deck.start("bob", spec)
            await eventually(lambda: answers(bot) == ["re: hello"], "the function's answer")
            with pytest.raises(SpecError, match="sat_functions"):
                await anext(deck.messages("bob"))

    run(scenario)


def test_a_function_that_keeps_raising_leaves_a_dead_letter(state: Path, bot: TelegramServer, run: Run) -> None:
    """The others flow on; the letter can be seen with its error, and an event tells of it."""

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("bob", spec_of(bot, to="sat_functions:fail", env={"PYTHONPATH": str(SUPPORT)}))
            bot.say("hello")
            await eventually(lambda: _dead(deck, "bob"), "a dead letter")
            (letter,) = await deck.letters("bob")
            assert letter.error == "ValueError: no hello"
            assert letter.text == "hello"
            await eventually(lambda: _told(deck, "dead-letter"), "the event")
            assert await deck.decide("bob", "drop", letter.number)
            assert await deck.letters("bob") == []

    run(scenario)


def test_a_refused_token_is_said_in_words_and_the_right_one_works(state: Path, bot: TelegramServer, run: Run) -> None:
    """The satellite stays up and says why nothing comes; a start with another token goes on."""
    bot.revoke(bot.token)
    number = bot.token.partition(":")[0]

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("bob", spec_of(bot))
            await eventually(lambda: _failing(deck, "bob"), "the refusal")
            feed = await deck.feed("bob")
            assert feed.error is not None
            assert "the server refuses the token" in feed.error
            assert bot.token not in feed.error
            assert (await deck.status("bob")).crashes == 0
            right = f"{number}:another"
            bot.say("hello", token=right)
            await deck.start("bob", Satellite.telegram(right, base_url=bot.url, first_run="take"), replace=True)
            async with deck.messages("bob") as messages, await anext(messages) as message:
                assert message.text == "hello"
            await eventually(lambda: _connected(deck, "bob"), "it is connected again")

    run(scenario)


def test_a_message_that_is_refused_for_good_is_set_aside_and_the_rest_is_sent(
    state: Path, bot: TelegramServer, run: Run
) -> None:
    """403 "bot was blocked by the user" is believed at once; a 429 is waited out."""
    bot.fail("sendMessage", 403, "Forbidden: bot was blocked by the user", chat_id=1)
    bot.fail("sendMessage", retry_after=1, chat_id=2)

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("bob", spec_of(bot))
            for chat in (1, 2, 3):
                await deck.send("bob", to=chat, text=f"to {chat}")
            await eventually(lambda: sorted(answers(bot)) == ["to 2", "to 3"], "the others were sent")
            (letter,) = await deck.letters("bob")
            assert letter.number == "out-1"
            assert letter.error is not None
            assert "blocked by the user" in letter.error

    run(scenario)


def test_files_are_fetched_before_their_message_and_sent_with_a_reply(
    state: Path, bot: TelegramServer, run: Run, tmp_path: Path
) -> None:
    """In ``data/``, byte for byte, under a safe name, though the server fails twice; too large a one is said so."""
    content = bytes(range(256)) * 8000
    bot.send_file("../../holiday.jpg", content, caption="look", chat_id=3)
    bot.send_file("film.mp4", bytes(20_000_001), chat_id=4)
    bot.fail("getFile", 502, "Bad Gateway")
    bot.drop("file")
    (tmp_path / "answer.txt").write_text("nice")

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("bob", spec_of(bot))
            async with deck.messages("bob") as messages:
                async with await anext(messages) as message:
                    (file,) = message.attachments
                    assert (message.text, file.name, file.size, file.problem) == (
                        "look",
                        "holiday.jpg",
                        2_048_000,
                        None,
                    )
                    assert file.media_type == "image/jpeg"
                    assert Path(file.path).parent == state.resolve() / "workers/bob/data/files"
                    assert Path(file.path).read_bytes() == content
                    await message.reply("thanks", attachments=[tmp_path / "answer.txt"])
                async with await anext(messages) as message:
                    (file,) = message.attachments
                    assert "larger than the 20 MB" in (file.problem or "")
            await eventually(lambda: bot.calls("sendDocument"), "the file was sent")

    run(scenario)
    (call,) = bot.calls("sendDocument")
    assert (call.params["chat_id"], call.params["document"]) == ("3", "<file answer.txt>")
    assert answers(bot) == ["thanks"]


def test_old_files_go_but_not_those_of_messages_that_wait(state: Path, bot: TelegramServer, run: Run) -> None:
    """A file that is a month old goes when its message is done; a message that nobody has handled keeps its own."""
    bot.send_file("done.txt", b"1", chat_id=1)
    bot.send_file("waiting.txt", b"2", chat_id=2)

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("bob", spec_of(bot))
            async with deck.messages("bob") as messages, await anext(messages) as message:
                done = Path(message.attachments[0].path)
            await eventually(lambda: _waiting(deck, "bob", 1), "the other one waits")
            await deck.stop("bob")
            (waiting,) = {*done.parent.iterdir()} - {done}
            for file in (done, waiting):
                os.utime(file, (1, 1))
            await deck.start("bob", spec_of(bot))
            await eventually(lambda: not done.exists(), "the old one is gone")
            assert waiting.read_bytes() == b"2"

    run(scenario)


def test_what_was_there_before_the_first_start_is_left_out_and_ids_may_start_again(
    state: Path, bot: TelegramServer, run: Run
) -> None:
    """``first_run="skip"``; a quiet week; somebody else who polls is told with its process; a stop hangs up at once."""
    bot.say("history")

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("bob", spec_of(bot, first_run="skip"))
            await eventually(bot.polls, "it polls")
            async with deck.messages("bob") as messages:
                await eventually(lambda: any(poll.offset > 0 for poll in bot.polls()), "it goes on behind the history")
                bot.say("news")
                async with await anext(messages) as message:
                    assert message.text == "news"
                bot.start_epoch(5)
                bot.say("after a quiet week")
                async with await anext(messages) as message:
                    assert (message.text, message.id) == ("after a quiet week", "5")
            await eventually(lambda: any(poll.status is None for poll in bot.polls()), "it waits for news")
            await asyncio.to_thread(httpx.get, f"{bot.url}/bot{bot.token}/getUpdates?timeout=1", timeout=30)
            await eventually(lambda: _told(deck, "poller-conflict"), "the other poller is told")
            await deck.stop("bob")
            assert not [event for event in await deck.events(worker="bob") if event.kind is EventKind.KILLED]

    run(scenario)


def test_long_texts_are_sent_in_parts(state: Path, bot: TelegramServer, run: Run) -> None:
    """Nothing of a text is left out, and no part is longer than Telegram takes."""
    text = "\n".join(f"line {number} 😀" for number in range(600))

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("bob", spec_of(bot))
            await deck.send("bob", to=1, text=text)
            await eventually(lambda: "line 599" in "".join(answers(bot)), "the last part")

    run(scenario)
    assert "\n".join(answers(bot)) == text


def test_ticks_of_rate_limits_are_kept_before_the_server_says_so(state: Path, run: Run) -> None:
    """Five messages to one chat are a second apart, so the server never answers 429."""
    with TelegramServer(messages_per_second=1.0) as server:

        async def scenario() -> None:
            async with AsyncDeck(state) as deck:
                await deck.start("bob", spec_of(server))
                for number in range(4):
                    await deck.send("bob", to=1, text=str(number))
                await eventually(lambda: answers(server) == ["0", "1", "2", "3"], "all were sent, in order")

        run(scenario)


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_nothing_is_lost(state: Path, bot: TelegramServer, run: Run, point: str) -> None:
    """The satellite dies there once and is started again: every message is answered, at most one answer twice."""
    target = {"to": "sat_functions:echo"} if point.startswith("satellite.target.") else {}
    env = {"PYTHONPATH": str(SUPPORT)}
    for number in range(4):
        bot.say(f"{number}", chat_id=number + 1)

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            restart = Restart("never")
            await deck.start("bob", spec_of(bot, restart=restart, env={**env, CRASH_AT_ENV: point}, **target))
            reading = asyncio.ensure_future(_answer_all(deck)) if not target else None
            await eventually(lambda: _killed(deck, "bob"), f"it dies at {point}")
            await deck.start("bob", spec_of(bot, env=env, **target), replace=True)
            await eventually(lambda: set(answers(bot)) == {f"re: {number}" for number in range(4)}, "all answers")
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    run(scenario)
    repeated = sum(Counter(answers(bot)).values()) - 4
    assert repeated <= (1 if point == "satellite.outbox.sent" else 0)


@patience(300)
@pytest.mark.parametrize("who", ["satellite", "owner"])
def test_a_transaction_books_exactly_once_though_somebody_is_killed(
    state: Path, bot: TelegramServer, who: Victim
) -> None:
    """``to=`` a function that writes in ``message.transaction()``: each message is booked once, whoever dies."""
    messages, kills, deadline = size(40, 3)
    outside = _Booked(bot, state)
    trial = kill_trial(outside, state, who=who, messages=messages, kills=kills, deadline_seconds=deadline)
    tell("telegram to a function", who, trial)

    assert trial.kills == kills
    assert Counter(outside.received()) == Counter(f"re: {text}" for text in trial.delivered)


class _Booked:
    """The kill suite's view of a function that books what it gets."""

    def __init__(self, bot: TelegramServer, state: Path) -> None:
        self._bot = bot
        self._file = state / "workers" / NAME / "data" / "feed.db"

    def spec(self) -> WorkerSpec:
        return spec_of(self._bot, to="sat_functions:book", env={"PYTHONPATH": str(SUPPORT)})

    def deliver(self, text: str, conversation: int) -> None:
        self._bot.say(text, chat_id=conversation + 1)

    def received(self) -> list[str]:
        with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(self._file)) as db:
            return [f"re: {text}" for (text,) in db.execute("SELECT text FROM booked ORDER BY rowid")]
        return []


class _Outside:
    """The kill suite's view of a bot."""

    def __init__(self, bot: TelegramServer) -> None:
        self._bot = bot

    def spec(self) -> WorkerSpec:
        return spec_of(self._bot)

    def deliver(self, text: str, conversation: int) -> None:
        self._bot.say(text, chat_id=conversation + 1)

    def received(self) -> list[str]:
        return answers(self._bot)


@patience(300)
@pytest.mark.parametrize("who", ["satellite", "host", "owner"])
def test_kill_trial(state: Path, bot: TelegramServer, who: Victim) -> None:
    """Each of the three killed three times while forty messages arrive; larger by EVERDECK_TRIAL."""
    messages, kills, deadline = size(40, 3)
    outside = _Outside(bot)
    trial = kill_trial(
        outside, state, who=who, messages=messages, kills=kills, conversations=20, deadline_seconds=deadline
    )
    tell("telegram", who, trial)

    assert trial.kills == kills
    assert trial.lost == []
    assert trial.disorder == []
    assert trial.duplicates <= trial.kills


async def _answer_all(deck: AsyncDeck) -> None:
    async with deck.messages("bob") as messages:
        async for message in messages:
            async with message:
                await message.reply(f"re: {message.text}")


async def _is_idle(deck: AsyncDeck, name: str) -> bool:
    return (await deck.feed(name)).to_send == 0


async def _dead(deck: AsyncDeck, name: str) -> bool:
    return (await deck.feed(name)).dead == 1


async def _connected(deck: AsyncDeck, name: str) -> bool:
    return (await deck.feed(name)).connection == "connected"


async def _failing(deck: AsyncDeck, name: str) -> bool:
    return (await deck.feed(name)).connection == "failing"


async def _waiting(deck: AsyncDeck, name: str, count: int) -> bool:
    return (await deck.feed(name)).waiting == count


async def _told(deck: AsyncDeck, what: str) -> bool:
    return any(event.detail.get("what") == what for event in await deck.events() if event.kind is EventKind.FEED)


async def _killed(deck: AsyncDeck, name: str) -> bool:
    return any(event.kind is EventKind.CRASHED for event in await deck.events(worker=name))
