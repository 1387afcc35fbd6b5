"""Adding durable() changes nothing that a bot's author can see, except that nothing is lost: aiogram beside aiogram."""

import asyncio
import inspect
import logging
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("aiogram")

from aiogram import Bot, Dispatcher
from aiogram.client.session.aiohttp import AiohttpSession
from aiogram.client.telegram import TelegramAPIServer
from aiogram.exceptions import TelegramForbiddenError
from aiogram.filters import Command
from aiogram.fsm.context import FSMContext
from aiogram.fsm.state import State, StatesGroup
from aiogram.types import CallbackQuery, Message
from aiogram.utils.backoff import BackoffConfig
from aiogram.webhook.aiohttp_server import SimpleRequestHandler, TokenBasedRequestHandler, setup_application
from aiohttp import web

from everdeck.errors import FeedError, SpecError
from everdeck.feed import Inbox, Item, dispatcher
from everdeck.feed.aiogram import durable
from everdeck.testing.telegram import TelegramServer, new_token, text_update
from feed.test_aiogram import AT_ONCE, Bots
from support.tg_lives import life_of

KINDS = pytest.mark.parametrize("kind", ["stock", "durable"])


@pytest.fixture
def bots(telegram_server: TelegramServer, tmp_path: Path) -> Bots:
    """A server and a place for the inbox."""
    return Bots(telegram_server, tmp_path)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="aiogram")


def made(bots: Bots, dp: Dispatcher, kind: str, **options: Any) -> Bot:
    """A bot, stock or durable with its defaults."""
    bot = bots.bot()
    if kind == "durable":
        durable(dp, bot, bots.path, on_event=bots.heard, **{"retry": AT_ONCE} | options)
    return bot


@KINDS
def test_an_album_arrives_together_and_a_button_is_heard_during_a_job(bots: Bots, kind: str) -> None:
    """Five updates of one chat run side by side, and so does the button that cancels a job of the same chat."""

    async def scenario() -> None:
        dp, together, cancelled = Dispatcher(), asyncio.Barrier(5), asyncio.Event()

        @dp.message(Command("job"))
        async def on_job(_message: Message) -> None:
            await cancelled.wait()
            bots.saw("job cancelled")

        @dp.callback_query()
        async def on_button(_query: CallbackQuery) -> None:
            cancelled.set()

        @dp.message()
        async def on_part(_message: Message) -> None:
            async with asyncio.timeout(30):
                await together.wait()
            bots.saw("part")

        bot = made(bots, dp, kind)
        bots.server.say("/job", chat_id=7)
        for number in range(5):
            bots.server.say(f"part {number}", chat_id=7)
        async with bots.polling(dp, bot):
            await bots.until(lambda: bots.seen.count("part") == 5)
            bots.server.press("cancel", chat_id=7)
            await bots.until(lambda: "job cancelled" in bots.seen)

    asyncio.run(scenario())


def test_queries_are_out_of_line_in_every_order(bots: Bots) -> None:
    """With order="chat" a message waits for the one before it, and a button does not."""

    async def scenario() -> None:
        dp, pressed = Dispatcher(), asyncio.Event()

        @dp.message()
        async def on_message(message: Message) -> None:
            if message.text == "first":
                await pressed.wait()
            bots.saw(message.text)

        @dp.callback_query()
        async def on_button(_query: CallbackQuery) -> None:
            bots.saw("button")
            pressed.set()

        bot = made(bots, dp, "durable", order="chat")
        bots.server.say("first", chat_id=7)
        bots.server.say("second", chat_id=7)
        bots.server.press("go", chat_id=7)
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 3)
        assert bots.seen == ["button", "first", "second"]

    asyncio.run(scenario())


def test_order_by_person_and_by_a_function(bots: Bots) -> None:
    """Twenty people of one group do not wait for each other; a function may say who does."""

    async def scenario() -> None:
        for order in ("user", lambda update: update["message"]["from"]["id"]):
            dp, both = Dispatcher(), asyncio.Barrier(2)

            @dp.message()
            async def on_message(message: Message, both: asyncio.Barrier = both) -> None:
                if message.text == "first":
                    async with asyncio.timeout(30):
                        await both.wait()
                bots.saw((message.from_user.id if message.from_user else 0, message.text))

            bots.seen.clear()
            bot = made(bots, dp, "durable", order=order)
            for person in (11, 12):
                bots.server.say("first", chat_id=-100, user_id=person)
                bots.server.say("second", chat_id=-100, user_id=person)
            async with bots.polling(dp, bot):
                await bots.until(lambda: len(bots.seen) == 4)
            for person in (11, 12):
                assert [text for who, text in bots.seen if who == person] == ["first", "second"]

    asyncio.run(scenario())


@KINDS
def test_the_first_run_takes_what_is_waiting(bots: Bots, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """As stock does, also when the file is new at each deploy; and the log says how many there were."""

    async def scenario() -> None:
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        bot = made(bots, dp, kind)
        bots.server.push(*(text_update(str(number), chat_id=number) for number in range(1, 131)))
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 130)

    with caplog.at_level(logging.INFO, logger="everdeck.feed"):
        asyncio.run(scenario())
    told = [record.message for record in caplog.records if "first run" in record.message]
    assert len(told) == (kind == "durable")
    assert all("130 updates were waiting; they are taken" in line for line in told)


def test_a_skipped_history_is_counted(bots: Bots, caplog: pytest.LogCaptureFixture) -> None:
    """first_run="skip" says how many it left."""

    async def scenario() -> None:
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        bot = made(bots, dp, "durable", first_run="skip")
        bots.server.push(*(text_update(str(number), chat_id=number) for number in range(1, 131)))
        async with bots.polling(dp, bot):
            await asyncio.to_thread(bots.server.wait_for, lambda server: not server.pending())
            bots.server.say("new")
            await bots.until(lambda: bots.seen == ["new"])

    with caplog.at_level(logging.INFO, logger="everdeck.feed"):
        asyncio.run(scenario())
    assert any("130 updates were waiting; they are left" in record.message for record in caplog.records)


def test_what_somebody_else_cancelled_is_a_failure_with_backoff(bots: Bots) -> None:
    """A handler that awaits a cancelled task is not handed back for ever: three attempts, then a dead letter."""

    async def scenario() -> None:
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message, item: Item) -> None:
            bots.saw(item.attempt)
            await message.answer("working on it")
            task = asyncio.get_running_loop().create_task(asyncio.Event().wait())
            task.cancel()
            await task

        bot = made(bots, dp, "durable")
        bots.server.say("go")
        async with bots.polling(dp, bot):
            await bots.until(lambda: any(event["what"] == "dead-letter" for event in bots.events))
        assert bots.seen == [1, 2, 3]
        assert len(bots.server.sent()) == 3

    asyncio.run(scenario())


@KINDS
def test_a_handler_that_the_author_cancels_is_over(bots: Bots, kind: str) -> None:
    """As one does to debounce: each message of a chat cancels the handler of the one before, and the last one acts."""

    async def scenario() -> None:
        dp, enough = Dispatcher(), asyncio.Event()
        pending: list[asyncio.Task[Any] | None] = []

        @dp.message()
        async def on_message(message: Message) -> None:
            for task in pending[-1:]:
                if task is not None:
                    task.cancel()
            pending.append(asyncio.current_task())
            bots.saw(message.text)
            await enough.wait()
            bots.saw(f"acts on {message.text}")

        bot = made(bots, dp, kind)
        for number in range(3):
            bots.server.say(str(number), chat_id=7)
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) >= 3)
            enough.set()
            await bots.until(lambda: len(bots.seen) >= 4)
        assert bots.seen == ["0", "1", "2", "acts on 2"]
        if kind == "durable":
            assert bots.waiting() == 0

    asyncio.run(scenario())


def test_a_timeout_where_one_runs_at_a_time_leaves_the_library_s_loop_alone(
    bots: Bots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With handle_as_tasks=False the handler's task is the poll's: what is cancelled later is told from the timeout."""
    monkeypatch.setattr(dispatcher, "LOOK_SECONDS", 0.02)

    async def scenario() -> None:
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)
            if message.text == "hang":
                await asyncio.Event().wait()
            if message.text == "await":
                task = asyncio.get_running_loop().create_task(asyncio.Event().wait())
                task.cancel()
                await task

        bot = made(bots, dp, "durable", handler_timeout=0.2, max_attempts=1)
        for text in ("hang", "await", "next"):
            bots.server.say(text)
        async with bots.polling(dp, bot, handle_as_tasks=False):
            await bots.until(lambda: "next" in bots.seen)
        assert bots.seen == ["hang", "await", "next"]

    asyncio.run(scenario())


def test_a_handler_that_takes_too_long_is_a_failed_attempt(bots: Bots, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cancelled, tried again, set aside; others are served meanwhile, and long runs are told."""
    monkeypatch.setattr(dispatcher, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(dispatcher, "LONG_RUN_SECONDS", 0.05)

    async def scenario() -> None:
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message, item: Item) -> None:
            bots.saw((message.text, item.attempt))
            if message.text == "hang":
                await asyncio.Event().wait()

        bot = made(bots, dp, "durable", handler_timeout=0.2)
        bots.server.say("hang", chat_id=1)
        bots.server.say("other", chat_id=2)
        async with bots.polling(dp, bot):
            await bots.until(lambda: any(event["what"] == "dead-letter" for event in bots.events))
        assert sorted(bots.seen) == [("hang", 1), ("hang", 2), ("hang", 3), ("other", 1)]
        (letter,) = await bots.dead()
        assert "handler_timeout" in letter.error
        assert any(event["what"] == "running-long" for event in bots.events)

    asyncio.run(scenario())


def test_hanging_chats_do_not_silence_the_bot(bots: Bots, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many hang as may run at once; after a while they no longer count, and the next one is heard."""
    monkeypatch.setattr("everdeck.feed.aiogram.SLOT_SECONDS", 0.1)
    monkeypatch.setattr(dispatcher, "LOOK_SECONDS", 0.05)

    async def scenario() -> None:
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)
            if message.text == "hang":
                await asyncio.Event().wait()

        bot = made(bots, dp, "durable", concurrency=16, grace_seconds=0.1)
        for chat in range(1, 17):
            bots.server.say("hang", chat_id=chat)
        async with bots.polling(dp, bot):
            await bots.until(lambda: bots.seen.count("hang") == 16)
            bots.server.say("hello", chat_id=99)
            await bots.until(lambda: "hello" in bots.seen)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["sys.exit", "KeyboardInterrupt", "os.execv"])
def test_a_handler_that_ends_the_program_does_it_once(bots: Bots, tmp_path: Path, how: str) -> None:
    """As with the stock library: the next start does not run it again."""
    bots.server.say("end")
    for expected in (["end"], ["end", "later"]):
        with life_of(_end_by, how, bots.server.url, bots.server.token, str(tmp_path)) as life:
            life.join(60)
            assert life.exitcode is not None
        assert (tmp_path / "journal").read_text().split() == expected
        bots.server.say("later")


def _end_by(how: str, url: str, token: str, directory: str) -> None:
    """A bot that ends itself when it is told "end", and anyhow with the second message."""
    logging.disable(logging.CRITICAL)
    dp = Dispatcher()

    @dp.message()
    async def on_message(message: Message) -> None:
        with (Path(directory) / "journal").open("a") as journal:
            journal.write(f"{message.text}\n")
        if message.text == "end":
            await message.answer("bye")
            if how == "os.execv":
                os.execv("/bin/true", ["true"])  # noqa: S606 - a bot that restarts itself
            if how == "KeyboardInterrupt":
                raise KeyboardInterrupt
        sys.exit()

    bot = Bot(token, session=AiohttpSession(api=TelegramAPIServer.from_base(url)))
    durable(dp, bot, Path(directory) / "bot.db")
    dp.run_polling(bot)


def test_blocked_by_the_user_is_not_tried_again(bots: Bots) -> None:
    """A 403 can never work; retry_on= has the last word, and on_error="log" is what stock does."""

    async def scenario(attempts: int, **options: Any) -> int:
        bots.seen.clear()
        bots._more = asyncio.Event()  # of this loop
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw("tried")
            await message.answer("hello")

        bot = made(bots, dp, "durable", **options)
        bots.server.fail("sendMessage", 403, "Forbidden: bot was blocked by the user", times=attempts)
        bots.server.say("hi")
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == attempts)
            bots.server.say("again", chat_id=2)  # a later one works: nothing of the first is left to do
            await bots.until(lambda: len(bots.seen) == attempts + 1)
        assert len(bots.seen) == attempts + 1
        return len(await bots.dead())

    assert asyncio.run(scenario(1)) == 1
    assert asyncio.run(scenario(3, retry_on=TelegramForbiddenError)) == 2
    assert asyncio.run(scenario(1, on_error="log")) == 2


def test_a_group_that_has_moved_is_not_tried_again(bots: Bots) -> None:
    """Telegram's 400 about it has a class of its own in aiogram."""
    moved = (
        '{"ok":false,"error_code":400,"description":"Bad Request: group chat was upgraded to a supergroup chat",'
        '"parameters":{"migrate_to_chat_id":-1001}}'
    )

    async def scenario() -> None:
        dp = Dispatcher()
        bot = made(bots, dp, "durable")

        @dp.message()
        async def on_message(message: Message, item: Item) -> None:
            bots.saw(item.attempt)
            bot.session.check_response(bot, message.answer("hello"), 400, moved)

        bots.server.say("hi")
        async with bots.polling(dp, bot):
            await bots.until(lambda: any(event["what"] == "dead-letter" for event in bots.events))
        assert bots.seen == [1]

    asyncio.run(scenario())


@KINDS
def test_a_failing_server_is_told_the_library_s_way(bots: Bots, kind: str) -> None:
    """backoff_config decides the waits; the feed tells of the failure and of the recovery."""

    async def scenario() -> None:
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        bot = made(bots, dp, kind)
        bots.server.fail("getUpdates", 500, times=5)
        bots.server.say("hello")
        quick = BackoffConfig(min_delay=0.01, max_delay=0.02, factor=1.1, jitter=0.001)
        async with bots.polling(dp, bot, backoff_config=quick):
            async with asyncio.timeout(20):  # by the feed's own waits it would be 25 s
                await bots.until(lambda: bots.seen == ["hello"])
            if kind == "durable":
                await bots.until(lambda: len(bots.events) == 2)
                assert [event["what"] for event in bots.events] == ["source-failed", "source-recovered"]

    asyncio.run(scenario())


def test_the_first_poll_has_the_polling_timeout(bots: Bots) -> None:
    """Not a default of ours."""

    async def scenario() -> None:
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        bot = made(bots, dp, "durable")
        async with bots.polling(dp, bot, polling_timeout=3):
            await asyncio.to_thread(bots.server.wait_for, lambda server: bool(server.polls()))
        assert bots.server.polls()[0].timeout == 3

    asyncio.run(scenario())


@KINDS
def test_the_limit_of_tasks_counts_right(bots: Bots, kind: str) -> None:
    """With tasks_concurrency_limit=3 three run at once, and never a fourth."""
    if "tasks_concurrency_limit" not in inspect.signature(Dispatcher.start_polling).parameters:
        pytest.skip("this aiogram does not know the option")

    async def scenario() -> None:
        dp, running, most = Dispatcher(), 0, 0
        three = asyncio.Event()

        @dp.message()
        async def on_message(message: Message) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 3:
                three.set()
            await three.wait()
            for _ in range(5):
                await asyncio.sleep(0.001)
            running -= 1
            bots.saw(message.text)

        bot = made(bots, dp, kind)
        for number in range(1, 31):
            bots.server.say(str(number), chat_id=number)
        async with bots.polling(dp, bot, tasks_concurrency_limit=3):
            await bots.until(lambda: len(bots.seen) == 30)
        assert most == 3

    asyncio.run(scenario())


def test_durable_after_the_start_is_refused(bots: Bots) -> None:
    """It would seem to work."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        async with bots.polling(dp, bot):
            with pytest.raises(FeedError, match="before"):
                durable(dp, bot, bots.path)

    asyncio.run(scenario())


def test_dropping_what_is_pending_is_warned_about(bots: Bots, caplog: pytest.LogCaptureFixture) -> None:
    """It is what people copy from old examples."""

    async def scenario() -> None:
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        bot = made(bots, dp, "durable")
        await bot.delete_webhook(drop_pending_updates=True)
        async with bots.polling(dp, bot):
            bots.server.say("new")
            await bots.until(lambda: bots.seen == ["new"])

    with caplog.at_level(logging.WARNING, logger="everdeck.feed"):
        asyncio.run(scenario())
    assert any("drop_pending_updates" in record.message for record in caplog.records)


@pytest.mark.parametrize("background", [True, False])
def test_a_webhook_is_stored_before_it_is_answered(bots: Bots, background: bool) -> None:
    """When Telegram hears 200 the update is in the file; it comes once though Telegram brings it twice."""

    async def scenario() -> None:
        dp, go_on = Dispatcher(), asyncio.Event()

        @dp.message()
        async def on_message(message: Message, item: Item, given: str) -> None:
            await go_on.wait()
            bots.saw((message.text, item.attempt, given))

        bot = made(bots, dp, "durable")
        app = web.Application()
        hook = SimpleRequestHandler(dp, bot, handle_in_background=background, secret_token="s", given="to handlers")
        hook.register(app, path="/hook")
        setup_application(app, dp, bot=bot)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        (address,) = runner.addresses
        update = text_update("hello") | {"update_id": 77}
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{address[1]}") as client:
                assert (await client.post("/hook", json=update)).status_code == 401
                for _ in range(2):
                    secret = {"X-Telegram-Bot-Api-Secret-Token": "s"}
                    assert (await client.post("/hook", json=update, headers=secret)).status_code == 200
                    assert bots.waiting() == 1
            go_on.set()
            await bots.until(lambda: bool(bots.seen))
        finally:
            await runner.cleanup()
        assert bots.seen == [("hello", 1, "to handlers")]
        assert bots.waiting() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("which", ["another bot", "bots by token"])
def test_a_webhook_that_would_not_be_durable_is_refused_at_the_start(bots: Bots, which: str) -> None:
    """It would be answered with 200 and lost."""

    async def scenario() -> None:
        dp = Dispatcher()
        bot = made(bots, dp, "durable")
        app = web.Application()
        if which == "another bot":
            SimpleRequestHandler(dp, bots.bot()).register(app, path="/hook")
        else:
            TokenBasedRequestHandler(dp).register(app, path="/hook/{bot_token}")
        setup_application(app, dp, bot=bot)
        runner = web.AppRunner(app)
        with pytest.raises(SpecError, match="not durable"):
            await runner.setup()
        await runner.cleanup()

    asyncio.run(scenario())


def test_conversations_are_committed_with_their_update(bots: Bots) -> None:
    """The state that an attempt set is taken back when it fails, and is there for the next update when it does not."""

    class Form(StatesGroup):
        name = State()
        age = State()

    def built() -> Dispatcher:
        dp = Dispatcher()

        @dp.message(Command("start"))
        async def on_start(_message: Message, state: FSMContext) -> None:
            await state.set_state(Form.name)
            bots.saw("start")

        @dp.message(Form.name)
        async def on_name(message: Message, state: FSMContext, item: Item) -> None:
            await state.update_data(name=message.text)
            await state.set_state(Form.age)
            if item.attempt == 1:
                raise RuntimeError("after the state was set")
            bots.saw(f"name {message.text}")

        @dp.message(Form.age)
        async def on_age(message: Message, state: FSMContext) -> None:
            bots.saw(f"{(await state.get_data())['name']} is {message.text}")
            await state.clear()

        return dp

    async def scenario() -> None:
        dp = built()
        bot = made(bots, dp, "durable", storage=True, order="chat")
        bots.server.say("/start")
        bots.server.say("Bob")
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 2)
        dp = built()  # another life
        bot = made(bots, dp, "durable", storage=True, order="chat")
        bots.server.say("42")
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 3)
        assert bots.seen == ["start", "name Bob", "Bob is 42"]

    asyncio.run(scenario())


@pytest.mark.parametrize("both", [True, False])
def test_bots_of_one_dispatcher_remember_each_in_its_own_file(bots: Bots, tmp_path: Path, both: bool) -> None:
    """A dispatcher has one storage. A bot that was not given one uses the other's, as it would in memory."""
    tokens = (bots.server.token, new_token())

    async def life(text: str, seen: int) -> None:
        dp, polled = Dispatcher(), [bots.bot(token) for token in tokens]
        for number, bot in enumerate(polled):
            durable(dp, bot, tmp_path / f"{number}.db", storage=both or number == 0)

        @dp.message()
        async def on_message(message: Message, state: FSMContext) -> None:
            bots.saw((tokens.index(message.bot.token), message.text, await state.get_state()))  # type: ignore[union-attr]
            await state.set_state(message.text)

        bots._more = asyncio.Event()  # of this loop
        for token in tokens:
            bots.server.say(text, token=token)
        async with bots.polling(dp, *polled):
            await bots.until(lambda: len(bots.seen) == seen)

    asyncio.run(life("one", 2))
    asyncio.run(life("two", 4))
    assert sorted(bots.seen[2:]) == [(0, "two", "one"), (1, "two", "one")]


def test_with_the_outbox_a_repeated_handler_sends_nothing_twice(bots: Bots) -> None:
    """Two replies and an edit, three attempts: each was sent once, and each attempt had Telegram's own answer."""

    async def scenario() -> None:
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message, item: Item) -> None:
            first = await message.answer("one moment")
            await message.answer("one moment")
            bots.saw(first.message_id)
            if item.attempt < 3:
                raise RuntimeError("not yet")
            await first.edit_text("done")

        bot = made(bots, dp, "durable", outbox=True)
        bots.server.fail("sendMessage", 500)
        bots.server.say("go")
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 3)
            await asyncio.to_thread(bots.server.wait_for, lambda server: bool(server.calls("editMessageText")))
        assert len(set(bots.seen)) == 1
        assert bots.server.sent() == ["one moment", "one moment"]

    asyncio.run(scenario())


def test_an_error_of_telegram_is_raised_in_the_handler_also_with_the_outbox(bots: Bots) -> None:
    """As stock: whoever catches a 403 goes on catching it."""

    async def scenario() -> None:
        dp = Dispatcher()

        @dp.message()
        async def on_message(message: Message) -> None:
            try:
                await message.answer("hello")
            except TelegramForbiddenError:
                bots.saw("blocked")

        bot = made(bots, dp, "durable", outbox=True)
        bots.server.fail("sendMessage", 403, "Forbidden: bot was blocked by the user")
        bots.server.say("go")
        async with bots.polling(dp, bot):
            await bots.until(lambda: bots.seen == ["blocked"])
        async with Inbox(bots.path) as inbox:
            assert inbox.dead_letters() == []

    asyncio.run(scenario())
