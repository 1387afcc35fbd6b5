"""aiogram over the durable inbox: nothing lost, and everything else as aiogram has it."""

import asyncio
import inspect
import logging
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("aiogram")

from aiogram import BaseMiddleware, Bot, Dispatcher
from aiogram.client.session.aiohttp import AiohttpSession
from aiogram.client.telegram import TelegramAPIServer
from aiogram.filters import Command
from aiogram.fsm.context import FSMContext
from aiogram.fsm.state import State, StatesGroup
from aiogram.methods import SendMessage
from aiogram.types import CallbackQuery, ErrorEvent, Message, Update

from everdeck.errors import PollerConflict, SpecError
from everdeck.feed import Inbox, Item, PollerLock, Retry
from everdeck.feed.aiogram import current_item, durable
from everdeck.testing.telegram import TelegramServer, new_token, text_update

AT_ONCE = Retry(seconds=0.001)
BROKEN = {"message": {"message_id": "not a number", "chat": 5}}


class Bots:
    """Dispatchers and bots of one test, and what their handlers saw."""

    def __init__(self, server: TelegramServer, directory: Path) -> None:
        self.server = server
        self.path = directory / "bot.db"
        self.events: list[dict[str, Any]] = []
        self.seen: list[Any] = []
        self._more = asyncio.Event()

    def bot(self, token: str | None = None) -> Bot:
        """A bot that talks to the server."""
        session = AiohttpSession(api=TelegramAPIServer.from_base(self.server.url))
        return Bot(token or self.server.token, session=session)

    def durable(self, dp: Dispatcher, bot: Bot, **options: Any) -> None:
        """Make it durable, with a test's impatience."""
        given = {"first_run": "take", "retry": AT_ONCE, "on_event": self.heard} | options
        durable(dp, bot, self.path, **given)

    def heard(self, event: dict[str, Any]) -> None:
        """An event of the feed."""
        self.events.append(event)
        self._more.set()

    def saw(self, thing: Any) -> None:
        """A handler did its work."""
        self.seen.append(thing)
        self._more.set()

    async def until(self, fact: Callable[[], bool]) -> None:
        """Wait until something seen or heard makes it true."""
        async with asyncio.timeout(30):
            while not fact():
                self._more.clear()
                await self._more.wait()

    @asynccontextmanager
    async def polling(self, dp: Dispatcher, *bots: Bot, **options: Any) -> AsyncIterator[None]:
        """Poll inside the block, stop at its end."""
        begun = asyncio.Event()
        dp.startup.register(begun.set)
        task = asyncio.create_task(dp.start_polling(*bots, handle_signals=False, **options))
        try:
            await asyncio.wait({task, waiting := asyncio.create_task(begun.wait())}, return_when="FIRST_COMPLETED")
            waiting.cancel()
            if task.done():
                await task
            yield
        finally:
            if not task.done():
                await dp.stop_polling()
            await task

    async def dead(self) -> list[Any]:
        """The dead letters on disk."""
        async with Inbox(self.path) as inbox:
            return inbox.dead_letters()

    def waiting(self) -> int:
        """How many items are on disk and not finished."""
        with sqlite3.connect(self.path) as db:
            (count,) = db.execute("SELECT count(*) FROM everdeck_item WHERE died_at IS NULL").fetchone()
        db.close()
        return int(count)


@pytest.fixture
def bots(telegram_server: TelegramServer, tmp_path: Path) -> Bots:
    """A server and a place for the inbox."""
    return Bots(telegram_server, tmp_path)


def test_handlers_run_and_the_rest_is_confirmed(bots: Bots) -> None:
    """Every update is handled once, confirmed to Telegram, and leaves nothing behind."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()

        @dp.message()
        async def on_message(message: Message, item: Item) -> None:
            assert item is current_item()
            assert item.attempt == 1
            bots.saw((item.id, message.text))
            await message.answer("thanks")

        bots.durable(dp, bot)
        ids = [bots.server.say(str(number), chat_id=number) for number in range(1, 151)]
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 150)
        assert sorted(bots.seen) == [(update_id, str(number)) for number, update_id in enumerate(ids, 1)]
        assert len(bots.server.sent()) == 150
        assert set(ids) >= set(bots.server.confirmed())
        assert bots.waiting() == 0

    asyncio.run(scenario())


def test_one_chat_is_in_order_and_a_state_machine_works(bots: Bots) -> None:
    """The second message of a chat finds the state that the first one's slow handler set."""

    class Form(StatesGroup):
        name = State()

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()
        others = asyncio.Event()

        @dp.message(Command("start"))
        async def on_start(_message: Message, state: FSMContext) -> None:
            await others.wait()
            await state.set_state(Form.name)

        @dp.message(Form.name)
        async def on_name(message: Message, state: FSMContext) -> None:
            bots.saw(f"name {message.text}")
            await state.clear()

        @dp.message()
        async def on_other(message: Message) -> None:
            bots.saw(message.text)
            others.set()

        bots.durable(dp, bot, order="chat")
        bots.server.say("/start", chat_id=1)
        bots.server.say("Ada", chat_id=1)
        bots.server.say("from another chat", chat_id=2)
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 2)
        assert bots.seen == ["from another chat", "name Ada"]

    asyncio.run(scenario())


def test_without_order_a_chat_runs_together(bots: Bots) -> None:
    """With order="none" a handler may wait for a later message of its own chat, as in aiogram alone."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()
        answered = asyncio.Event()

        @dp.message()
        async def on_message(message: Message) -> None:
            if message.text == "question":
                await answered.wait()
            answered.set()
            bots.saw(message.text)

        bots.durable(dp, bot, order="none")
        bots.server.say("question")
        bots.server.say("answer")
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 2)
        assert bots.seen == ["answer", "question"]

    asyncio.run(scenario())


def test_an_unreadable_update_is_set_aside(bots: Bots) -> None:
    """One update that aiogram cannot parse does not stop the ten around it."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        bots.durable(dp, bot)
        good = [text_update(str(number), chat_id=number) for number in range(1, 11)]
        bots.server.push(*good[:5], BROKEN, *good[5:])
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 10)
            await bots.until(lambda: any(event["what"] == "dead-letter" for event in bots.events))
        (letter,) = await bots.dead()
        assert "ValidationError" in letter.error
        assert b"not a number" in letter.payload

    asyncio.run(scenario())


def test_a_raising_handler_is_tried_again_and_then_set_aside(bots: Bots) -> None:
    """Three attempts, a dead letter, and the chat goes on."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()

        @dp.message()
        async def on_message(message: Message, item: Item) -> None:
            bots.saw((message.text, item.attempt))
            if message.text == "bad":
                raise RuntimeError("not today")

        bots.durable(dp, bot, order="chat")
        bots.server.say("bad")
        bots.server.say("good")
        async with bots.polling(dp, bot):
            await bots.until(lambda: ("good", 1) in bots.seen)
        assert bots.seen == [("bad", 1), ("bad", 2), ("bad", 3), ("good", 1)]
        (letter,) = await bots.dead()
        assert letter.error == "RuntimeError: not today"

    asyncio.run(scenario())


def test_an_error_that_is_handled_is_done(bots: Bots) -> None:
    """The user's error handler took it: no second attempt."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()

        @dp.message()
        async def on_message(message: Message) -> None:
            raise RuntimeError(message.text)

        @dp.error()
        async def on_error(event: ErrorEvent) -> None:
            bots.saw(str(event.exception))

        bots.durable(dp, bot)
        bots.server.say("one")
        bots.server.say("two")
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 2)
        assert bots.seen == ["one", "two"]
        assert bots.waiting() == 0
        assert await bots.dead() == []

    asyncio.run(scenario())


def test_middlewares_see_what_they_saw(bots: Bots) -> None:
    """Outer and inner middlewares run in their order, with the item in their data."""

    class Trace(BaseMiddleware):
        def __init__(self, name: str) -> None:
            self.name = name

        async def __call__(self, handler: Callable[..., Awaitable[Any]], event: Any, data: dict[str, Any]) -> Any:
            bots.saw((self.name, data["item"].id))
            return await handler(event, data)

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()
        dp.update.outer_middleware(Trace("registered before"))
        dp.message.middleware(Trace("inner"))

        @dp.callback_query()
        async def on_press(query: CallbackQuery) -> None:
            bots.saw(query.data)

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        bots.durable(dp, bot)
        dp.update.outer_middleware(Trace("registered after"))
        said, pressed = bots.server.say("hello"), bots.server.press("yes")
        async with bots.polling(dp, bot):
            await bots.until(lambda: "yes" in bots.seen)
        assert bots.seen == [
            ("registered before", said),
            ("registered after", said),
            ("inner", said),
            "hello",
            ("registered before", pressed),
            ("registered after", pressed),
            "yes",
        ]

    asyncio.run(scenario())


def test_a_returned_method_is_sent_before_the_update_is_finished(bots: Bots) -> None:
    """`return SendMessage(...)` is part of the work; if it cannot be sent, aiogram logs it and goes on."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()

        @dp.message()
        async def on_message(message: Message) -> SendMessage:
            bots.saw(message.text)
            return SendMessage(chat_id=message.chat.id, text="returned")

        bots.durable(dp, bot)
        bots.server.say("hello")
        async with bots.polling(dp, bot):
            await bots.until(lambda: bool(bots.seen))
        assert bots.server.sent() == ["returned"]
        assert bots.waiting() == 0

    asyncio.run(scenario())


def test_stopping_waits_and_then_hands_back(bots: Bots) -> None:
    """Within the grace a handler finishes; beyond it it is cancelled before the storage closes, and comes again."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()
        release = asyncio.Event()

        @dp.message()
        async def on_message(message: Message, item: Item) -> None:
            bots.saw(("begin", message.text, item.attempt))
            try:
                await (release.wait() if message.text == "short" else asyncio.Event().wait())
            except asyncio.CancelledError:
                bots.saw("cancelled")
                raise
            bots.saw(("end", message.text))

        @dp.shutdown()
        async def on_shutdown() -> None:
            bots.saw("shutdown")

        bots.durable(dp, bot, grace_seconds=0.3, order="chat")
        bots.server.say("short", chat_id=1)
        bots.server.say("endless", chat_id=2)
        bots.server.say("waits for endless", chat_id=2)
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 2)
            release.set()
        assert bots.seen[2:] == [("end", "short"), "cancelled", "shutdown"]
        assert bots.waiting() == 2

        bots.seen.clear()
        again, bot = Dispatcher(), bots.bot()

        @again.message()
        async def on_again(message: Message, item: Item) -> None:
            bots.saw((message.text, item.attempt))

        bots.durable(again, bot)
        async with bots.polling(again, bot):
            await bots.until(lambda: len(bots.seen) == 2)
        assert bots.seen == [("endless", 1), ("waits for endless", 1)], "an interrupted attempt is not counted"

    asyncio.run(scenario())


def test_a_handler_may_stop_the_bot(bots: Bots) -> None:
    """The update that stopped the bot is finished; delivered again it would stop every start."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)
            await dp.stop_polling()

        bots.durable(dp, bot, grace_seconds=30)
        bots.server.say("/stop")
        async with asyncio.timeout(20):
            await dp.start_polling(bot, handle_signals=False)
        assert bots.seen == ["/stop"]
        assert bots.waiting() == 0

    asyncio.run(scenario())


# aiogram makes the coroutine before it waits for its semaphore, and drops it when it is cancelled there.
@pytest.mark.filterwarnings("ignore:coroutine 'Dispatcher._process_update':RuntimeWarning")
@pytest.mark.parametrize("options", [{"handle_as_tasks": False}, {"tasks_concurrency_limit": 1}])
def test_one_at_a_time_stays_one_at_a_time(bots: Bots, options: dict[str, Any]) -> None:
    """Aiogram's own limits keep their meaning, and nothing is lost when it stops in the middle."""
    if not options.keys() <= inspect.signature(Dispatcher.start_polling).parameters.keys():
        pytest.skip("this aiogram does not know the option")

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()
        running = 0
        enough = asyncio.Event()

        @dp.message()
        async def on_message(message: Message) -> None:
            nonlocal running
            running += 1
            assert running == 1
            try:
                await asyncio.sleep(0)
                if len(bots.seen) == 5:
                    enough.set()
                    await asyncio.Event().wait()
                bots.saw(message.text)
            finally:
                running -= 1

        bots.durable(dp, bot, grace_seconds=0.2)
        for number in range(1, 21):
            bots.server.say(str(number), chat_id=number)
        async with bots.polling(dp, bot, **options):
            async with asyncio.timeout(20):
                await enough.wait()
        assert bots.waiting() == 15

        again, bot = Dispatcher(), bots.bot()

        @again.message()
        async def on_again(message: Message, item: Item) -> None:
            assert item.attempt == 1
            bots.saw(message.text)

        bots.durable(again, bot)
        async with bots.polling(again, bot, **options):
            await bots.until(lambda: len(bots.seen) == 20)
        assert sorted(map(int, bots.seen)) == list(range(1, 21))

    asyncio.run(scenario())


def test_two_bots_of_one_dispatcher_share_a_file(bots: Bots) -> None:
    """Each has its own stream; stopping stops both."""

    async def scenario() -> None:
        another = new_token()
        dp, one, two = Dispatcher(), bots.bot(), bots.bot(another)

        @dp.message()
        async def on_message(message: Message, bot: Bot, item: Item) -> None:
            bots.saw((bot.id, item.stream, message.text))

        bots.durable(dp, one)
        bots.durable(dp, two)
        bots.server.say("to the first")
        bots.server.say("to the second", token=another)
        async with bots.polling(dp, one, two):
            await bots.until(lambda: len(bots.seen) == 2)
        assert {(f"telegram:{bot.id}", text) for bot, text in ((one, "to the first"), (two, "to the second"))} == {
            (stream, text) for _, stream, text in bots.seen
        }

    asyncio.run(scenario())


@pytest.mark.parametrize(("first_run", "expected"), [("skip", ["new"]), ("take", ["old", "new"])])
def test_the_first_run(bots: Bots, first_run: str, expected: list[str]) -> None:
    """History is skipped or taken, as was said; at the second start nothing is skipped."""

    async def scenario() -> None:
        bots.server.say("old")
        for text in ("new", "newer"):
            dp, bot = Dispatcher(), bots.bot()

            @dp.message()
            async def on_message(message: Message) -> None:
                bots.saw(message.text)

            bots.durable(dp, bot, first_run=first_run)
            if text == "newer":
                bots.server.say("while it was down")
            async with bots.polling(dp, bot):
                polls = len(bots.server.polls())
                await asyncio.to_thread(bots.server.wait_for, lambda server, polls=polls: len(server.polls()) > polls)
                await asyncio.to_thread(
                    bots.server.wait_for, lambda server: server.polls()[-1].offset >= 0 and not server.pending()
                )
                bots.server.say(text)
                await bots.until(lambda text=text: text in bots.seen)
        assert bots.seen == [*expected, "while it was down", "newer"]

    asyncio.run(scenario())


def test_ids_that_start_again(bots: Bots) -> None:
    """After a quiet week ids are random again, also smaller ones: nothing is dropped as old."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        bots.durable(dp, bot)
        bots.server.start_epoch(1_500_000_000)
        bots.server.say("before")
        async with bots.polling(dp, bot, polling_timeout=1):
            await bots.until(lambda: bots.seen == ["before"])
            bots.server.start_epoch(1_000)
            bots.server.say("after")
            await bots.until(lambda: bots.seen == ["before", "after"])

    asyncio.run(scenario())


def test_trouble_upstream(bots: Bots) -> None:
    """Errors, floods and garbage delay updates and lose none."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        bots.durable(dp, bot)
        bots.server.fail("getUpdates", retry_after=1)
        bots.server.say("hello")
        async with bots.polling(dp, bot):
            await bots.until(lambda: bots.seen == ["hello"])
        assert "source-failed" in {event["what"] for event in bots.events}

    asyncio.run(scenario())


def test_a_conflict_names_the_local_suspects(bots: Bots) -> None:
    """Somebody else polls with our token: an event says so, with the processes here that carry it."""
    program = "import sys; sys.stdin.read()"
    suspect = subprocess.Popen([sys.executable, "-c", program, bots.server.token], stdin=subprocess.PIPE)

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()
        bots.durable(dp, bot)

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        async with bots.polling(dp, bot), httpx.AsyncClient(trust_env=False, timeout=30) as stranger:
            await asyncio.to_thread(bots.server.wait_for, lambda server: bool(server.polls()))
            call = f"{bots.server.url}/bot{bots.server.token}/getUpdates?timeout=1&offset=5"
            await stranger.get(call)
            await bots.until(lambda: any(event["what"] == "poller-conflict" for event in bots.events))
            event = next(event for event in bots.events if event["what"] == "poller-conflict")
            assert event["bot"] == bots.server.bot_id
            (named,) = [one for one in event["suspects"] if one["pid"] == suspect.pid]
            assert bots.server.token not in named["command"]
            bots.server.say("still here")
            await bots.until(lambda: bots.seen == ["still here"])

    try:
        asyncio.run(scenario())
    finally:
        suspect.kill()
        suspect.communicate()


def test_a_second_poller_is_refused(bots: Bots) -> None:
    """With a backlog no 409 would come, so the lock refuses before anything is asked."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()
        bots.durable(dp, bot)
        bots.server.say("hello")
        with PollerLock(bots.server.token), pytest.raises(PollerConflict):
            await dp.start_polling(bot, handle_signals=False)
        await bot.session.close()
        assert bots.server.polls() == []

    asyncio.run(scenario())


def test_updates_that_come_another_way_pass(bots: Bots) -> None:
    """A test feeds the dispatcher directly. A bot that is polled and not durable is refused at the start."""

    async def scenario() -> None:
        dp, bot, other = Dispatcher(), bots.bot(), bots.bot(new_token())

        @dp.message()
        async def on_message(message: Message, item: Item | None = None) -> None:
            bots.saw((message.text, item is None))

        bots.durable(dp, bot)
        await dp.feed_update(bot, Update.model_validate(text_update("fed") | {"update_id": 1}, context={"bot": bot}))
        for same in (other, bots.bot()):  # another bot, and another object of the same bot
            with pytest.raises(SpecError, match="not durable"):
                await dp.start_polling(same, handle_signals=False)
            await same.session.close()
        await bot.session.close()
        assert bots.seen == [("fed", True)]
        assert not bots.path.exists()

    asyncio.run(scenario())


def test_an_update_that_is_fed_again_by_its_handler(bots: Bots) -> None:
    """Dispatching a changed copy is a part of the work; the update is finished when the outer handler is."""

    async def scenario() -> None:
        dp, bot = Dispatcher(), bots.bot()

        @dp.message(Command("alias"))
        async def on_alias(message: Message, event_update: Update, item: Item) -> None:
            copy = message.model_copy(update={"text": "real", "entities": None})
            await dp.feed_update(bot, event_update.model_copy(update={"message": copy}))
            assert not item.settled
            bots.saw(("outer", item.settled))

        @dp.message()
        async def on_message(message: Message) -> None:
            bots.saw(message.text)

        bots.durable(dp, bot)
        bots.server.say("/alias")
        async with bots.polling(dp, bot):
            await bots.until(lambda: len(bots.seen) == 2)
        assert bots.seen == ["real", ("outer", False)]
        assert bots.waiting() == 0

    asyncio.run(scenario())


def test_effectively_once(bots: Bots) -> None:
    """The handler's own writes and the ack are one commit; a later error does not undo them, nor repeat them."""

    async def scenario() -> None:
        async with Inbox(bots.path) as inbox, inbox.transaction() as db:
            db.execute("CREATE TABLE orders (text TEXT)")
        dp, bot = Dispatcher(), bots.bot()

        @dp.message()
        async def on_message(message: Message, item: Item) -> None:
            async with item.transaction() as db:
                db.execute("INSERT INTO orders VALUES (?)", (message.text,))
            bots.saw(message.text)
            raise RuntimeError("after the commit")

        bots.durable(dp, bot)
        bots.server.say("one")
        async with bots.polling(dp, bot):
            await bots.until(lambda: any(event["what"] == "raised-after-commit" for event in bots.events))
        assert bots.seen == ["one"]
        with sqlite3.connect(bots.path) as db:
            assert db.execute("SELECT text FROM orders").fetchall() == [("one",)]
        db.close()

    asyncio.run(scenario())


def test_options_are_checked_when_given(bots: Bots) -> None:
    """A wrong word is refused by name, before anything runs."""

    async def scenario() -> None:
        with pytest.raises(SpecError, match="first_run"):
            durable(Dispatcher(), bots.bot(), bots.path, first_run="perhaps")  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="order"):
            durable(Dispatcher(), bots.bot(), bots.path, order="perhaps")  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="an aiogram Dispatcher"):
            durable(bots.bot(), Dispatcher(), bots.path)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="an aiogram Bot"):
            durable(Dispatcher(), bots.path, bots.bot())  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="handler_timeout"):
            durable(Dispatcher(), bots.bot(), bots.path, handler_timeout=0)

    asyncio.run(scenario())


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="aiogram")
