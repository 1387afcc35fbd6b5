"""python-telegram-bot over the durable inbox: nothing lost, and everything else as the library has it."""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("telegram.ext")

from telegram import Update
from telegram.ext import (
    Application,
    ApplicationHandlerStop,
    BaseUpdateProcessor,
    CallbackQueryHandler,
    CommandHandler,
    ConversationHandler,
    Defaults,
    MessageHandler,
    PicklePersistence,
    filters,
)

from everdeck.errors import PollerConflict, SpecError
from everdeck.feed import Inbox, PollerLock, Retry
from everdeck.feed.ptb import current_item, durable_application
from everdeck.testing.telegram import TelegramServer, text_update
from support.waiting import until

AT_ONCE = Retry(seconds=0.001)
BROKEN = {"message": {"message_id": 1, "date": "yesterday", "chat": 5}}


class Apps:
    """Applications of one test, and what their handlers saw."""

    def __init__(self, server: TelegramServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.path = directory / "bot.db"
        self.events: list[dict[str, Any]] = []
        self.seen: list[Any] = []
        self._more = asyncio.Event()

    def builder(self) -> Any:
        """A builder whose bot talks to the server."""
        return Application.builder().token(self.server.token).base_url(self.server.base_url)

    def app(self, builder: Any = None, **options: Any) -> Any:
        """A durable application, with a test's impatience."""
        given = {"first_run": "take", "retry": AT_ONCE, "on_event": self.heard} | options
        return durable_application(builder or self.builder(), self.path, **given)

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
    async def polling(self, app: Any, **options: Any) -> AsyncIterator[None]:
        """What run_polling does, inside the block."""
        async with app:
            await app.updater.start_polling(**options)
            await app.start()
            try:
                yield
            finally:
                await app.updater.stop()
                await app.stop()

    async def dead(self) -> list[Any]:
        """The dead letters on disk."""
        async with Inbox(self.path) as inbox:
            return inbox.dead_letters()

    def payloads(self) -> list[bytes]:
        """What is on disk, byte for byte."""
        with sqlite3.connect(self.path) as db:
            found = [payload for (payload,) in db.execute("SELECT payload FROM everdeck_item ORDER BY seq")]
        db.close()
        return found

    def waiting(self) -> int:
        """How many items are on disk and not finished."""
        with sqlite3.connect(self.path) as db:
            (count,) = db.execute("SELECT count(*) FROM everdeck_item WHERE died_at IS NULL").fetchone()
        db.close()
        return int(count)


@pytest.fixture
def apps(telegram_server: TelegramServer, tmp_path: Path) -> Apps:
    """A server and a place for the inbox."""
    return Apps(telegram_server, tmp_path)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="telegram")


def text_of(update: Any) -> str:
    """The text of a message update."""
    return str(update.effective_message.text)


@pytest.mark.parametrize("concurrent", [False, 64])
def test_handlers_run_and_the_rest_is_confirmed(apps: Apps, concurrent: int) -> None:
    """Every update is handled once, confirmed to Telegram, and leaves nothing behind."""

    async def scenario() -> None:
        async def on_message(update: Update, _context: Any) -> None:
            item = current_item()
            assert item is not None
            assert item.id == update.update_id
            await update.effective_message.reply_text("thanks")  # type: ignore[union-attr]
            apps.saw((update.update_id, text_of(update)))

        app = apps.app(apps.builder().concurrent_updates(concurrent))
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        assert app.concurrent_updates == (concurrent or 1)
        ids = [apps.server.say(str(number), chat_id=number) for number in range(1, 121)]
        async with apps.polling(app):
            await apps.until(lambda: len(apps.seen) == 120)
        assert sorted(apps.seen) == [(update_id, str(number)) for number, update_id in enumerate(ids, 1)]
        assert len(apps.server.sent()) == 120
        assert apps.waiting() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(("concurrent", "together"), [(1, 1), (64, 4)])
def test_concurrent_updates_keep_their_meaning(apps: Apps, concurrent: int, together: int) -> None:
    """Without it one handler runs at a time; with it chats run together, and with order="chat" each stays in order."""

    async def scenario() -> None:
        running, most = 0, 0

        async def on_message(update: Update, _context: Any) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
            apps.saw((update.effective_chat.id, text_of(update)))  # type: ignore[union-attr]

        app = apps.app(apps.builder().concurrent_updates(concurrent), order="chat")
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        for number in range(16):
            apps.server.say(str(number), chat_id=number % 4 + 1)
        async with apps.polling(app):
            await apps.until(lambda: len(apps.seen) == 16)
        for chat in range(1, 5):
            texts = [int(text) for chat_id, text in apps.seen if chat_id == chat]
            assert texts == sorted(texts)
        assert most == together

    asyncio.run(scenario())


def test_non_blocking_handlers_let_others_pass_and_are_finished_later(apps: Apps) -> None:
    """block=False: the same chat goes on meanwhile, and the update is finished only when its handler is."""

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def in_background(update: Update, _context: Any) -> None:
            apps.saw(("begin", text_of(update), current_item() is not None))
            await go_on.wait()
            apps.saw(("end", text_of(update)))

        async def on_message(update: Update, _context: Any) -> None:
            apps.saw(text_of(update))

        app = apps.app()
        app.add_handler(CommandHandler("slow", in_background, block=False))
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.say("/slow")
        apps.server.say("quick")
        async with apps.polling(app):
            await apps.until(lambda: "quick" in apps.seen)
            assert ("end", "/slow") not in apps.seen
            await asyncio.to_thread(until, lambda: apps.waiting() == 1)
            go_on.set()
            await apps.until(lambda: ("end", "/slow") in apps.seen)
        assert apps.seen[0] == ("begin", "/slow", True)
        assert apps.waiting() == 0

    asyncio.run(scenario())


def test_defaults_with_block_false(apps: Apps) -> None:
    """Defaults(block=False) makes every handler such a one."""

    async def scenario() -> None:
        async def on_message(update: Update, _context: Any) -> None:
            if text_of(update) == "bad":
                raise RuntimeError("in the background")
            apps.saw(text_of(update))

        app = apps.app(apps.builder().defaults(Defaults(block=False)), max_attempts=2)
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.say("bad")
        apps.server.say("good")
        async with apps.polling(app):
            await apps.until(lambda: any(event["what"] == "dead-letter" for event in apps.events))
            await apps.until(lambda: bool(apps.seen))
        (letter,) = await apps.dead()
        assert letter.error == "RuntimeError: in the background"
        assert letter.attempts == 2

    asyncio.run(scenario())


def test_an_unreadable_update_is_set_aside(apps: Apps) -> None:
    """One update that cannot be parsed neither stops the ten around it nor makes the poll spin."""

    async def scenario() -> None:
        async def on_message(update: Update, _context: Any) -> None:
            apps.saw(text_of(update))

        app = apps.app()
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        good = [text_update(str(number), chat_id=number) for number in range(1, 11)]
        apps.server.push(*good[:5], BROKEN, *good[5:])
        async with apps.polling(app):
            await apps.until(lambda: len(apps.seen) == 10)
            await apps.until(lambda: any(event["what"] == "dead-letter" for event in apps.events))
        (letter,) = await apps.dead()
        assert b"yesterday" in letter.payload
        assert len(apps.server.polls()) < 10

    asyncio.run(scenario())


def test_a_raising_handler_is_tried_again_and_then_set_aside(apps: Apps) -> None:
    """Nobody handles the error: three attempts, then a dead letter, and the chat goes on."""

    async def scenario() -> None:
        async def on_message(update: Update, _context: Any) -> None:
            item = current_item()
            assert item is not None
            apps.saw((text_of(update), item.attempt))
            if text_of(update) == "bad":
                raise RuntimeError("not today")

        app = apps.app()
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.say("bad")
        apps.server.say("good")
        async with apps.polling(app):
            await apps.until(lambda: ("good", 1) in apps.seen)
        assert apps.seen == [("bad", 1), ("bad", 2), ("bad", 3), ("good", 1)]
        (letter,) = await apps.dead()
        assert letter.error == "RuntimeError: not today"

    asyncio.run(scenario())


def test_an_error_that_is_handled_is_done(apps: Apps) -> None:
    """The user's error handler took it: no second attempt; ApplicationHandlerStop still stops later groups."""

    async def scenario() -> None:
        async def on_message(update: Update, _context: Any) -> None:
            raise RuntimeError(text_of(update))

        async def later_group(_update: Update, _context: Any) -> None:
            apps.saw("later group")

        async def on_error(_update: object, context: Any) -> None:
            apps.saw(str(context.error))
            if str(context.error) == "two":
                raise ApplicationHandlerStop

        app = apps.app()
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        app.add_handler(MessageHandler(filters.TEXT, later_group), group=1)
        app.add_error_handler(on_error)
        apps.server.say("one")
        apps.server.say("two")
        async with apps.polling(app):
            await apps.until(lambda: "two" in apps.seen)
        assert apps.seen == ["one", "later group", "two"]
        assert apps.waiting() == 0
        assert await apps.dead() == []

    asyncio.run(scenario())


def test_conversation_and_persistence_are_never_behind(apps: Apps) -> None:
    """When an update is finished its conversation state is on disk, not up to 60 seconds later."""
    file = apps.directory / "persistence"

    def builder() -> Any:
        return apps.builder().persistence(PicklePersistence(file, on_flush=True))

    def conversation() -> Any:
        async def begin(_update: Update, context: Any) -> int:
            context.user_data["steps"] = 1
            return 1

        async def name(update: Update, context: Any) -> int:
            apps.saw((text_of(update), context.user_data["steps"]))
            return ConversationHandler.END

        return ConversationHandler(
            entry_points=[CommandHandler("start", begin)],
            states={1: [MessageHandler(filters.TEXT & ~filters.COMMAND, name)]},
            fallbacks=[],
            name="form",
            persistent=True,
        )

    async def crash_after_start() -> None:
        app = apps.app(builder())
        app.add_handler(conversation())
        apps.server.say("/start")
        async with app:
            await app.updater.start_polling()
            await app.start()
            await asyncio.to_thread(until, lambda: file.exists() and apps.path.exists() and apps.waiting() == 0)
            # What a crash would find: everything as of now, without the writing that stop() does.
            crashed = file.read_bytes()
            await app.updater.stop()
            await app.stop()
        file.write_bytes(crashed)

    async def go_on() -> None:
        app = apps.app(builder())
        app.add_handler(conversation())
        apps.server.say("Ada")
        async with apps.polling(app):
            await apps.until(lambda: bool(apps.seen))
        assert apps.seen == [("Ada", 1)]

    asyncio.run(crash_after_start())
    asyncio.run(go_on())


@pytest.mark.parametrize("concurrent", [1, 8])
def test_stopping_waits_and_then_hands_back(apps: Apps, concurrent: int) -> None:
    """Within the grace handlers finish; beyond it they are cancelled, and their updates come again, uncounted."""

    async def scenario() -> None:
        cancelled = asyncio.Event()

        async def on_message(update: Update, _context: Any) -> None:
            apps.saw(text_of(update))
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        app = apps.app(apps.builder().concurrent_updates(concurrent), grace_seconds=0.2, order="chat")
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.say("endless", chat_id=1)
        apps.server.say("waits", chat_id=1)
        async with apps.polling(app):
            await apps.until(lambda: apps.seen == ["endless"])
        assert cancelled.is_set()
        assert apps.waiting() == 2
        apps.seen.clear()

        async def on_again(update: Update, _context: Any) -> None:
            item = current_item()
            assert item is not None
            apps.saw((text_of(update), item.attempt))

        again = apps.app()
        again.add_handler(MessageHandler(filters.TEXT, on_again))
        async with apps.polling(again):
            await apps.until(lambda: len(apps.seen) == 2)
        assert apps.seen == [("endless", 1), ("waits", 1)]

    asyncio.run(scenario())


def test_stopping_in_the_background_too(apps: Apps) -> None:
    """A block=False handler that outlives the grace is cancelled and handed back."""

    async def scenario() -> None:
        async def on_message(update: Update, _context: Any) -> None:
            apps.saw(text_of(update))
            await asyncio.Event().wait()

        app = apps.app(grace_seconds=0.2)
        app.add_handler(MessageHandler(filters.TEXT, on_message, block=False))
        apps.server.say("endless")
        async with apps.polling(app):
            await apps.until(lambda: bool(apps.seen))
        assert apps.waiting() == 1

    asyncio.run(scenario())


def test_the_same_application_can_start_again(apps: Apps) -> None:
    """Stop and start of one application: the inbox is opened again."""

    async def scenario() -> None:
        async def on_message(update: Update, _context: Any) -> None:
            apps.saw(text_of(update))

        app = apps.app()
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        for text in ("one", "two"):
            apps.server.say(text)
            async with apps.polling(app):
                await apps.until(lambda text=text: text in apps.seen)
        assert apps.seen == ["one", "two"]

    asyncio.run(scenario())


def test_arbitrary_callback_data_and_buttons(apps: Apps) -> None:
    """Updates pass the bot's callback data cache as they would without us."""
    pytest.importorskip("cachetools", reason="python-telegram-bot's callback-data extra")

    async def scenario() -> None:
        async def on_press(update: Update, _context: Any) -> None:
            apps.saw(type(update.callback_query.data).__name__)  # type: ignore[union-attr]

        app = apps.app(apps.builder().arbitrary_callback_data(True))
        app.add_handler(CallbackQueryHandler(on_press))
        apps.server.press("not from the cache")
        async with apps.polling(app):
            await apps.until(lambda: bool(apps.seen))
        assert apps.seen == ["InvalidCallbackData"]

    asyncio.run(scenario())


def test_a_processor_that_drops_an_update_has_decided(apps: Apps) -> None:
    """A custom update processor may run an update or not; either way it is finished."""

    class Picky(BaseUpdateProcessor):
        async def do_process_update(self, update: object, coroutine: Any) -> None:
            if text_of(update) != "drop me":
                await coroutine

        async def initialize(self) -> None:
            apps.saw("initialized")

        async def shutdown(self) -> None:
            apps.saw("shut down")

    async def scenario() -> None:
        async def on_message(update: Update, _context: Any) -> None:
            apps.saw(text_of(update))

        app = apps.app(apps.builder().concurrent_updates(Picky(2)))
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.say("drop me")
        apps.server.say("keep me")
        async with apps.polling(app):
            await apps.until(lambda: "keep me" in apps.seen)
        assert apps.seen == ["initialized", "keep me", "shut down"]
        assert apps.waiting() == 0

    asyncio.run(scenario())


def test_users_application_class_and_own_updates(apps: Apps) -> None:
    """A subclass given to the builder is kept, and updates put into the queue by hand pass."""

    class Mine(Application):  # type: ignore[type-arg]
        def __init__(self, *, colour: str, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.colour = colour

    async def scenario() -> None:
        async def on_message(update: Update, _context: Any) -> None:
            apps.saw((text_of(update), current_item() is None))

        app = apps.app(apps.builder().application_class(Mine, {"colour": "red"}))
        assert isinstance(app, Mine)
        assert app.colour == "red"
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        async with apps.polling(app):
            await app.update_queue.put(Update.de_json(text_update("by hand") | {"update_id": 1}, app.bot))
            await apps.until(lambda: bool(apps.seen))
        assert apps.seen == [("by hand", True)]

    asyncio.run(scenario())


def test_short_polling(apps: Apps) -> None:
    """timeout=0 works, and neither the library nor Telegram is made to spin."""

    async def scenario() -> None:
        async def on_message(update: Update, _context: Any) -> None:
            apps.saw(text_of(update))

        app = apps.app()
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        async with apps.polling(app, timeout=0):
            for text in ("one", "two"):
                apps.server.say(text)
                await apps.until(lambda text=text: text in apps.seen)
        assert len(apps.server.polls()) < 10

    asyncio.run(scenario())


def test_what_lies_in_the_librarys_queue_at_the_stop_does_not_run(apps: Apps) -> None:
    """It was handed back; running it all the same would do it twice."""

    async def scenario() -> None:
        hold = asyncio.Event()

        async def on_message(update: Update, _context: Any) -> None:
            apps.saw(text_of(update))
            if text_of(update) == "by hand":
                await hold.wait()

        app = apps.app(grace_seconds=0.1)
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        async with app:
            await app.updater.start_polling()
            await app.start()
            await app.update_queue.put(Update.de_json(text_update("by hand") | {"update_id": 1}, app.bot))
            await apps.until(lambda: apps.seen == ["by hand"])
            apps.server.say("queued behind it")
            await asyncio.to_thread(until, lambda: app.update_queue.qsize() == 1)
            await app.updater.stop()
            stopping = asyncio.create_task(app.stop())
            await asyncio.to_thread(until, lambda: not app.durable.polling.is_open)
            hold.set()
            await stopping
        assert apps.seen == ["by hand"]
        assert apps.waiting() == 1

    asyncio.run(scenario())


def test_effectively_once(apps: Apps) -> None:
    """The handler's own writes and the ack are one commit; a later error does not repeat them."""

    async def scenario() -> None:
        async with Inbox(apps.path) as inbox, inbox.transaction() as db:
            db.execute("CREATE TABLE orders (text TEXT)")

        async def on_message(update: Update, _context: Any) -> None:
            item = current_item()
            assert item is not None
            async with item.transaction() as db:
                db.execute("INSERT INTO orders VALUES (?)", (text_of(update),))
            raise RuntimeError("after the commit")

        app = apps.app()
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.say("one")
        async with apps.polling(app):
            await apps.until(lambda: any(event["what"] == "raised-after-commit" for event in apps.events))
        with sqlite3.connect(apps.path) as db:
            assert db.execute("SELECT text FROM orders").fetchall() == [("one",)]
        db.close()

    asyncio.run(scenario())


def test_trouble_upstream(apps: Apps) -> None:
    """A flood answer delays updates and loses none."""

    async def scenario() -> None:
        async def on_message(update: Update, _context: Any) -> None:
            apps.saw(text_of(update))

        app = apps.app()
        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.fail("getUpdates", retry_after=1)
        apps.server.say("hello")
        async with apps.polling(app):
            await apps.until(lambda: apps.seen == ["hello"])
        assert "source-failed" in {event["what"] for event in apps.events}

    asyncio.run(scenario())


def test_a_second_poller_is_refused(apps: Apps) -> None:
    """The lock refuses before anything is asked, and lets go when polling does not start."""

    async def scenario() -> None:
        app = apps.app()
        async with app:
            with PollerLock(apps.server.token), pytest.raises(PollerConflict):
                await app.updater.start_polling()
        assert apps.server.polls() == []
        apps.server.fail("deleteWebhook", 401, "Unauthorized")
        async with app:
            with pytest.raises(Exception, match="Unauthorized"):
                await app.updater.start_polling()
        with PollerLock(apps.server.token):
            pass

    asyncio.run(scenario())


def test_an_end_before_the_start(apps: Apps) -> None:
    """Polling began and the application never did (a SIGTERM in between): the lock and the file are let go."""

    async def scenario() -> None:
        app = apps.app()
        async with app:
            await app.updater.start_polling()
            await app.updater.stop()
        assert not app.durable.polling.is_open
        with PollerLock(apps.server.token):
            pass

    asyncio.run(scenario())


def test_what_is_refused(apps: Apps) -> None:
    """Wrong words and an application without our updater are refused when built."""
    with pytest.raises(SpecError, match="first_run"):
        apps.app(first_run="perhaps")
    with pytest.raises(TypeError, match="updater"):
        apps.app(apps.builder().updater(None))
