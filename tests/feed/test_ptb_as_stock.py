"""Adding durable_application() changes nothing that an author can see: python-telegram-bot beside itself."""

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("telegram.ext")

from telegram import Update
from telegram.error import BadRequest, ChatMigrated, Forbidden, NetworkError, TelegramError
from telegram.ext import (
    Application,
    CallbackQueryHandler,
    ContextTypes,
    ConversationHandler,
    MessageHandler,
    PicklePersistence,
    filters,
)

from everdeck.errors import FeedError, SpecError
from everdeck.feed import dispatcher
from everdeck.feed.ptb import Persistence, current_item, durable_application
from everdeck.testing.telegram import TelegramServer, new_token, text_update
from feed.test_ptb import AT_ONCE, Apps
from support.tg_lives import life_of
from support.waiting import until, until_in

KINDS = pytest.mark.parametrize("kind", ["stock", "durable"])


@pytest.fixture
def apps(telegram_server: TelegramServer, tmp_path: Path) -> Apps:
    """A server and a place for the inbox."""
    return Apps(telegram_server, tmp_path)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="telegram")


def made(apps: Apps, kind: str, builder: Any = None, **options: Any) -> Any:
    """An application, stock or durable with its defaults."""
    builder = builder or apps.builder()
    if kind == "stock":
        return builder.build()
    return durable_application(builder, apps.path, on_event=apps.heard, **{"retry": AT_ONCE} | options)


@KINDS
def test_a_poll_interval_does_not_slow_the_handling(apps: Apps, kind: str) -> None:
    """It is a time between two questions to Telegram: twenty updates of one answer are handled at once."""

    async def scenario() -> None:
        app = made(apps, kind)

        async def on_message(update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            apps.saw(update.update_id)

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        for number in range(20):
            apps.server.say(str(number), chat_id=number + 1)
        async with apps.polling(app, poll_interval=3.0):
            async with asyncio.timeout(40):  # by one at a time it would be a minute
                await apps.until(lambda: len(apps.seen) == 20)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["sys.exit", "KeyboardInterrupt", "os.execv"])
def test_a_handler_that_ends_the_program_does_it_once(apps: Apps, tmp_path: Path, how: str) -> None:
    """As with the stock library: the next start does not run it again."""
    apps.server.say("end")
    for expected in (["end"], ["end", "later"]):
        with life_of(_end_by, how, apps.server.base_url, apps.server.token, str(tmp_path)) as life:
            life.join(60)
            assert life.exitcode is not None
        assert (tmp_path / "journal").read_text().split() == expected
        apps.server.say("later")


def _end_by(how: str, base_url: str, token: str, directory: str) -> None:
    """A bot that ends itself when it is told "end", and anyhow with the second message."""
    logging.disable(logging.CRITICAL)

    async def on_message(update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
        text = update.effective_message.text  # type: ignore[union-attr]
        with (Path(directory) / "journal").open("a") as journal:
            journal.write(f"{text}\n")
        if text == "end" and how == "os.execv":
            os.execv("/bin/true", ["true"])  # noqa: S606 - a bot that restarts itself
        if text == "end" and how == "KeyboardInterrupt":
            raise KeyboardInterrupt
        sys.exit()

    builder = Application.builder().token(token).base_url(base_url)
    app = durable_application(builder, Path(directory) / "bot.db")
    app.add_handler(MessageHandler(filters.TEXT, on_message))
    app.run_polling()


@KINDS
def test_concurrent_updates_of_one_chat_run_together(apps: Apps, kind: str) -> None:
    """An album arrives as one, and the button that cancels a job is heard while the job runs."""

    async def scenario() -> None:
        app, together, cancelled = (
            made(apps, kind, apps.builder().concurrent_updates(8)),
            asyncio.Barrier(5),
            asyncio.Event(),
        )

        async def on_message(_update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            async with asyncio.timeout(30):
                await together.wait()
                await cancelled.wait()
            apps.saw("part")

        async def on_button(_update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            cancelled.set()

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        app.add_handler(CallbackQueryHandler(on_button))
        for number in range(5):
            apps.server.say(str(number), chat_id=7)
        async with apps.polling(app):
            apps.server.press("cancel", chat_id=7)
            await apps.until(lambda: apps.seen == ["part"] * 5)

    asyncio.run(scenario())


@KINDS
def test_one_at_a_time_is_in_the_order_of_arrival(apps: Apps, kind: str) -> None:
    """Also between the messages of a chat and its buttons."""

    async def scenario() -> None:
        app = made(apps, kind)

        async def on_update(update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            query = update.callback_query
            apps.saw(query.data if query else update.effective_message.text)  # type: ignore[union-attr]

        app.add_handler(MessageHandler(filters.TEXT, on_update))
        app.add_handler(CallbackQueryHandler(on_update))
        for text in ("one", "two", "three"):
            apps.server.say(text, chat_id=7)
        apps.server.press("go", chat_id=7)
        async with apps.polling(app):
            await apps.until(lambda: len(apps.seen) == 4)
        assert apps.seen == ["one", "two", "three", "go"]

    asyncio.run(scenario())


@KINDS
def test_dropping_what_is_pending_is_warned_about(apps: Apps, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """It does what it does in the library, and the log says what that means."""

    async def scenario() -> None:
        app = made(apps, kind)

        async def on_message(update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            apps.saw(update.effective_message.text)  # type: ignore[union-attr]

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.say("old")
        async with apps.polling(app, drop_pending_updates=True):
            apps.server.say("new")
            await apps.until(lambda: apps.seen == ["new"])

    with caplog.at_level(logging.WARNING, logger="everdeck.feed"):
        asyncio.run(scenario())
    assert any("drop_pending_updates" in record.message for record in caplog.records) == (kind == "durable")


@KINDS
def test_the_first_poll_has_the_timeout(apps: Apps, kind: str) -> None:
    """The one that was given to start_polling, not a default of ours."""

    async def scenario() -> None:
        async with apps.polling(made(apps, kind), timeout=3):
            await asyncio.to_thread(apps.server.wait_for, lambda server: any(poll.timeout for poll in server.polls()))
        assert next(poll.timeout for poll in apps.server.polls() if poll.timeout) == 3

    asyncio.run(scenario())


def test_a_webhook_is_stored_before_it_is_answered(apps: Apps) -> None:
    """When Telegram hears 200 the update is in the file; it comes once though Telegram brings it twice."""
    pytest.importorskip("tornado", reason="run_webhook needs python-telegram-bot[webhooks]")

    async def scenario() -> None:
        app, go_on = made(apps, "durable"), asyncio.Event()

        async def on_message(update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            await go_on.wait()
            item = current_item()
            apps.saw((update.effective_message.text, item.attempt if item else None))  # type: ignore[union-attr]

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        update = text_update("hello") | {"update_id": 77, "of_tomorrow": {"a": [1]}}
        async with app:
            await app.updater.start_webhook(
                "127.0.0.1", port, "hook", webhook_url="https://a.example", secret_token="s"
            )
            await app.start()
            try:
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                    assert (await client.post("/hook", json=update)).status_code == 403
                    for _ in range(2):
                        secret = {"X-Telegram-Bot-Api-Secret-Token": "s"}
                        answer = await client.post("/hook", json=update, headers=secret)
                        assert answer.status_code == 200
                        assert apps.waiting() == 1
                        assert apps.payloads() == [answer.request.content]  # as it came
                    unreadable = await client.post("/hook", json={"update_id": 78, "message": 1}, headers=secret)
                    assert unreadable.status_code == 400  # as stock does: Telegram brings it again
                    assert gc.get_freeze_count() > 0
                go_on.set()
                await apps.until(lambda: bool(apps.seen))
            finally:
                await app.updater.stop()
                await app.stop()
        assert apps.seen == [("hello", 1)]
        assert apps.waiting() == 0
        assert gc.get_freeze_count() == 0  # a bot that has ended leaves the collector as it was

    asyncio.run(scenario())


def test_a_webhook_s_update_survives_kill_9(apps: Apps, tmp_path: Path) -> None:
    """run_webhook, killed while the handler runs, handles in its next life what it has answered with 200."""
    pytest.importorskip("tornado", reason="run_webhook needs python-telegram-bot[webhooks]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = tmp_path / "bot.py"
    program.write_text(
        f"""
import asyncio, sys
from telegram.ext import Application, MessageHandler, filters
from everdeck.feed.ptb import durable_application

async def on_message(update, context):
    print(update.effective_message.text, flush=True)
    if sys.argv[1] == "first":
        await asyncio.Event().wait()

builder = Application.builder().token({apps.server.token!r}).base_url({apps.server.base_url!r})
app = durable_application(builder, "bot.db")
app.add_handler(MessageHandler(filters.TEXT, on_message))
app.run_webhook(listen="127.0.0.1", port={port}, url_path="hook", webhook_url="https://a.example/hook")
"""
    )

    def life(name: str) -> "subprocess.Popen[str]":
        return subprocess.Popen([sys.executable, str(program), name], cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    with life("first") as bot:
        assert bot.stdout is not None
        update = text_update("hello") | {"update_id": 77}
        until(lambda: _posted(f"http://127.0.0.1:{port}/hook", update))
        assert bot.stdout.readline() == "hello\n"
        bot.kill()
    with life("second") as bot:
        assert bot.stdout is not None
        assert bot.stdout.readline() == "hello\n"
        bot.terminate()
        assert bot.wait(60) == 0
    assert apps.waiting() == 0


def _posted(url: str, update: dict[str, Any]) -> bool:
    try:
        return httpx.post(url, json=update, timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@KINDS
def test_the_error_callback_is_called(apps: Apps, kind: str) -> None:
    """With the library's own error, and the bot goes on."""

    async def scenario() -> None:
        app = made(apps, kind)

        async def on_message(_update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            apps.saw("hello")

        def on_error(error: TelegramError) -> None:
            apps.saw(type(error).__name__)

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.fail("getUpdates", 500)
        apps.server.say("hello")
        async with apps.polling(app, error_callback=on_error):
            await apps.until(lambda: len(apps.seen) == 2)
        assert apps.seen == ["NetworkError", "hello"]

    asyncio.run(scenario())


@KINDS
def test_a_stop_waits_for_a_long_handler(apps: Apps, kind: str) -> None:
    """Six seconds are not cut at four."""

    async def scenario() -> None:
        app = made(apps, kind)

        async def on_message(_update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            apps.saw("begun")
            await asyncio.sleep(6)
            apps.saw("ended")

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.say("go")
        async with apps.polling(app):
            await apps.until(lambda: apps.seen == ["begun"])
        assert apps.seen == ["begun", "ended"]

    asyncio.run(scenario())


def test_a_handler_that_takes_too_long_is_a_failed_attempt(apps: Apps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one runs at a time: the library's loop goes on with the next."""
    monkeypatch.setattr(dispatcher, "LOOK_SECONDS", 0.02)

    async def scenario() -> None:
        app = made(apps, "durable", handler_timeout=0.2, max_attempts=2, order="none")

        async def on_message(update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            item = current_item()
            assert item is not None
            text = update.effective_message.text if update.effective_message else None
            apps.saw((text, item.attempt))
            if text == "hang":
                await asyncio.Event().wait()

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.say("hang")
        apps.server.say("next")
        async with apps.polling(app):
            await apps.until(lambda: any(event["what"] == "dead-letter" for event in apps.events))
        assert sorted(apps.seen) == [("hang", 1), ("hang", 2), ("next", 1)]

    asyncio.run(scenario())


def test_what_telegram_will_never_do_is_not_tried_again(apps: Apps) -> None:
    """A 400, a 403, and the 400 about a group that has moved, which has a class of its own; a 500 is tried again."""
    errors = {
        "bad": BadRequest("Chat not found"),
        "blocked": Forbidden("Forbidden: bot was blocked by the user"),
        "moved": ChatMigrated(-1001),
        "broken": NetworkError("Bad Gateway"),
    }

    async def scenario() -> None:
        app = made(apps, "durable", max_attempts=2)

        async def on_message(update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            text = str(update.effective_message.text) if update.effective_message else ""
            apps.saw(text)
            raise errors[text]

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        for number, text in enumerate(errors):
            apps.server.say(text, chat_id=number + 1)
        async with apps.polling(app):
            await apps.until(lambda: sum(event["what"] == "dead-letter" for event in apps.events) == len(errors))
        assert sorted(apps.seen) == ["bad", "blocked", "broken", "broken", "moved"]

    asyncio.run(scenario())


@KINDS
@pytest.mark.parametrize("block", [True, False])
def test_a_handler_that_the_author_cancels_is_over(apps: Apps, kind: str, block: bool) -> None:
    """As one does to debounce: each message of a chat cancels the handler of the one before, and the last one acts."""

    async def scenario() -> None:
        app, enough = made(apps, kind, apps.builder().concurrent_updates(True)), asyncio.Event()
        pending: list[asyncio.Task[Any] | None] = []

        async def on_message(update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            for task in pending[-1:]:
                if task is not None:
                    task.cancel()
            pending.append(asyncio.current_task())
            text = update.effective_message.text if update.effective_message else None
            apps.saw(text)
            await enough.wait()
            apps.saw(f"acts on {text}")

        app.add_handler(MessageHandler(filters.TEXT, on_message, block=block))
        for number in range(3):
            apps.server.say(str(number), chat_id=7)
        async with apps.polling(app):
            await apps.until(lambda: len(apps.seen) >= 3)
            enough.set()
            await apps.until(lambda: len(apps.seen) >= 4)
        assert apps.seen == ["0", "1", "2", "acts on 2"]
        if kind == "durable":
            assert apps.payloads() == []

    asyncio.run(scenario())


def test_a_timeout_that_the_handler_swallows_leaves_the_library_s_loop_alone(
    apps: Apps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one runs at a time the handler's task is the library's loop: what is cancelled later is told apart."""
    monkeypatch.setattr(dispatcher, "LOOK_SECONDS", 0.02)

    async def scenario() -> None:
        app = made(apps, "durable", handler_timeout=0.2, max_attempts=1, order="none")

        async def on_message(update: Update, _context: ContextTypes.DEFAULT_TYPE) -> None:
            text = update.effective_message.text if update.effective_message else None
            apps.saw(text)
            if text == "hang":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            if text == "await":
                task = asyncio.get_running_loop().create_task(asyncio.Event().wait())
                task.cancel()
                await task

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        for text in ("hang", "await", "next"):
            apps.server.say(text)
        async with apps.polling(app):
            await apps.until(lambda: "next" in apps.seen)
        assert apps.seen == ["hang", "await", "next"]
        told = [letter.error for letter in await apps.dead()]
        assert told == ["it ran for longer than handler_timeout", "CancelledError: "]

    asyncio.run(scenario())


def test_what_cannot_be_durable_is_refused_at_once(apps: Apps) -> None:
    """A built application, and swapped arguments."""
    with pytest.raises(FeedError, match="already built"):
        durable_application(apps.builder().build(), apps.path)
    with pytest.raises(SpecError, match="an ApplicationBuilder"):
        durable_application(apps.path, apps.builder())


def test_the_persistence_is_committed_with_the_update(apps: Apps) -> None:
    """A conversation goes on in the next life, and an attempt that failed has left nothing in it."""

    def built() -> Any:
        builder = apps.builder().persistence(Persistence())
        app = made(apps, "durable", builder)

        async def on_start(_update: Update, context: ContextTypes.DEFAULT_TYPE) -> int:
            context.user_data["asked"] = "name"  # type: ignore[index]
            apps.saw("start")
            return 1

        async def on_name(update: Update, context: ContextTypes.DEFAULT_TYPE) -> int:
            apps.saw((update.effective_message.text, context.user_data["asked"]))  # type: ignore[union-attr, index]
            return ConversationHandler.END

        app.add_handler(
            ConversationHandler(
                [MessageHandler(filters.Regex("^begin$"), on_start)],
                {1: [MessageHandler(filters.TEXT, on_name)]},
                [],
                name="form",
                persistent=True,
            )
        )
        return app

    async def life(text: str, seen: int) -> None:
        apps._more = asyncio.Event()  # of this loop
        app = built()
        apps.server.say(text)
        async with apps.polling(app):
            await apps.until(lambda: len(apps.seen) == seen)

    asyncio.run(life("begin", 1))
    asyncio.run(life("Bob", 2))
    assert apps.seen == ["start", ("Bob", "name")]


# Of the library's, which made them before the copy failed.
@pytest.mark.filterwarnings("ignore:coroutine 'PicklePersistence:RuntimeWarning")
@pytest.mark.parametrize("kind", ["inbox", "pickle"])
@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("what", ["cannot be copied", "cannot be pickled"])
def test_data_that_cannot_be_kept_is_told_and_holds_up_nobody(apps: Apps, kind: str, at_once: int, what: str) -> None:
    """Its update is done, as with the library; and data of others is kept."""
    thing = {"cannot be copied": threading.Lock(), "cannot be pickled": lambda: None}[what]

    async def life(texts: list[str]) -> dict[int, Any]:
        kept = Persistence() if kind == "inbox" else PicklePersistence(apps.directory / "data")
        app = made(apps, "durable", apps.builder().persistence(kept).concurrent_updates(at_once))
        errors, seen = len(apps.events), len(apps.seen)

        async def on_message(update: Update, context: Any) -> None:
            text = update.effective_message.text  # type: ignore[union-attr]
            context.user_data["kept"] = thing if text == "bad" else text
            apps.saw(text)

        async def on_error(_update: object, context: Any) -> None:
            apps.heard({"what": type(context.error)})

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        app.add_error_handler(on_error)
        for user, text in enumerate(texts, 1):
            apps.server.say(text, chat_id=user)
        async with apps.polling(app):
            found = {user: data for user, data in app.user_data.items() if data}
            await apps.until(lambda: len(apps.seen) == seen + len(texts))
            if "bad" in texts:
                await apps.until(lambda: len(apps.events) > errors)
                app.drop_user_data(texts.index("bad") + 1)
        assert apps.waiting() == 0
        return found

    assert asyncio.run(life(["one", "bad", "three"])) == {}
    assert sorted(apps.seen) == ["bad", "one", "three"]
    assert not any(event["what"] == "dead-letter" for event in apps.events)
    apps._more = asyncio.Event()
    found = asyncio.run(life([]))
    if kind == "inbox":
        assert found == {1: {"kept": "one"}, 3: {"kept": "three"}}


def test_data_of_an_update_that_its_handler_has_finished_is_written_too(apps: Apps) -> None:
    """There is no ack any more that it could go with."""

    async def scenario(app: Any) -> None:
        async def on_message(_update: Update, context: Any) -> None:
            await current_item().done()  # type: ignore[union-attr]
            context.user_data["name"] = "Bob"
            apps.saw("done")

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        async with apps.polling(app):
            await apps.until(lambda: apps.seen == ["done"])

    apps.server.say("/start")
    asyncio.run(scenario(made(apps, "durable", apps.builder().persistence(Persistence()))))
    later = made(apps, "durable", apps.builder().persistence(Persistence()))

    async def look() -> None:
        async with apps.polling(later):
            assert dict(later.user_data) == {1: {"name": "Bob"}}

    asyncio.run(look())


def test_data_of_a_handler_that_is_halfway_does_not_leave_with_the_ack_of_another(apps: Apps) -> None:
    """A crash runs it again, and it must find what it has found before."""

    async def scenario() -> None:
        builder = apps.builder().persistence(Persistence()).concurrent_updates(8)
        app, go_on = made(apps, "durable", builder, order="chat"), asyncio.Event()

        async def on_message(update: Update, context: Any) -> None:
            context.chat_data["count"] = context.chat_data.get("count", 0) + 1
            apps.saw(update.effective_message.text)  # type: ignore[union-attr]
            if update.effective_message.text == "halfway":  # type: ignore[union-attr]
                await go_on.wait()

        def counts() -> dict[str, Any]:
            with sqlite3.connect(apps.path) as db:
                rows = db.execute("SELECT key, value FROM everdeck_memory WHERE kind LIKE '%:chat'").fetchall()
            db.close()
            return {key: pickle.loads(value)["count"] for key, value in rows}  # noqa: S301 - our own

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        async with apps.polling(app):
            try:
                for number, (chat, text) in enumerate([(1, "first"), (1, "halfway"), (2, "another")], 1):
                    apps.server.say(text, chat_id=chat)
                    await apps.until(lambda expected=number: len(apps.seen) == expected)  # type: ignore[misc]
                await until_in(apps.directory, lambda: "2" in counts())
                assert counts() == {"1": 1, "2": 1}
            finally:
                go_on.set()
        assert counts() == {"1": 2, "2": 1}

    asyncio.run(scenario())


def test_bots_in_one_file_remember_apart(apps: Apps) -> None:
    """What an earlier version has written without saying whose it is belongs to the first bot that opens the file."""
    tokens = {"first": apps.server.token, "second": new_token()}

    def built(name: str) -> Any:
        builder = Application.builder().token(tokens[name]).base_url(apps.server.base_url)
        app = durable_application(builder.persistence(Persistence()), apps.path)

        async def on_message(update: Update, context: Any) -> int:
            for data in (context.user_data, context.chat_data, context.bot_data):
                data["of"] = name
            apps.saw(update.effective_message.text)  # type: ignore[union-attr]
            return {"first": 1, "second": 2}[name]

        handler = MessageHandler(filters.TEXT, on_message)
        app.add_handler(ConversationHandler([handler], {1: [], 2: []}, [], name="form", persistent=True))
        return app

    def remembered(app: Any) -> Any:
        states = app._conversation_handler_conversations["form"].data
        return [dict(data) for data in (app.user_data, app.chat_data, app.bot_data, states) if data]

    def all_of(name: str, state: int) -> Any:
        return [{7: {"of": name}}, {7: {"of": name}}, {"of": name}, {(7, 7): state}]

    async def both(text: str) -> None:
        first, second = built("first"), built("second")
        async with apps.polling(first), apps.polling(second):
            for name, token in tokens.items():
                apps.server.say(f"{text} {name}", chat_id=7, token=token)
            await apps.until(lambda: {f"{text} {name}" for name in tokens} <= set(apps.seen))

    async def look(name: str) -> Any:
        async with apps.polling(app := built(name)):
            return remembered(app)

    def as_formerly() -> None:
        """An earlier version has written all of it, for the first bot."""
        with sqlite3.connect(apps.path) as db:
            db.execute(
                "DELETE FROM everdeck_memory WHERE kind LIKE ?", (f"ptb:{tokens['second'].partition(':')[0]}:%",)
            )
            db.execute("UPDATE everdeck_memory SET kind = 'ptb' || substr(kind, instr(substr(kind, 5), ':') + 4)")
            kinds = {kind for (kind,) in db.execute("SELECT kind FROM everdeck_memory")}
            assert kinds == {"ptb:user", "ptb:chat", "ptb:bot", "ptb:conversation"}
        db.close()

    asyncio.run(both("hello"))
    assert asyncio.run(look("second")) == all_of("second", 2)
    assert asyncio.run(look("first")) == all_of("first", 1)
    as_formerly()
    assert asyncio.run(look("first")) == all_of("first", 1)
    assert asyncio.run(look("second")) == []
    assert asyncio.run(look("first")) == all_of("first", 1)


def test_the_next_life_finds_what_it_would_find_in_a_pickle(apps: Apps) -> None:
    """Data of chats, users and the bot, objects of the library in it, what was dropped, and a conversation."""

    async def life(kind: str, texts: list[str]) -> list[Any]:
        stock = PicklePersistence(apps.directory / "pickle")
        persistence = stock if kind == "stock" else Persistence()
        app = made(apps, kind, apps.builder().persistence(persistence))

        async def on_note(update: Update, context: Any) -> int:
            context.chat_data.setdefault("texts", []).append(update.effective_message.text)  # type: ignore[union-attr]
            context.user_data["who"] = update.effective_user
            context.bot_data["last"] = update.effective_message.text  # type: ignore[union-attr]
            apps.saw("note")
            return 1

        async def on_forget(update: Update, context: Any) -> int:
            context.application.drop_user_data(update.effective_user.id)  # type: ignore[union-attr]
            apps.saw("forget")
            return ConversationHandler.END

        async def on_slow(_update: Update, _context: Any) -> int:
            apps.saw("slow")
            return 2

        app.add_handler(
            ConversationHandler(
                [MessageHandler(filters.Regex("^note"), on_note)],
                {
                    1: [
                        MessageHandler(filters.Regex("^forget"), on_forget),
                        MessageHandler(filters.Regex("^slow"), on_slow, block=False),
                    ]
                },
                [],
                name="it's \u00fcber",
                persistent=True,
            )
        )
        apps._more, before = asyncio.Event(), len(apps.seen)
        for chat, text in enumerate(texts, 1):
            for part in text.split():
                apps.server.say(part, chat_id=chat)
        async with apps.polling(app):
            found = [
                dict(app.chat_data),
                {user: {name: known.id for name, known in data.items()} for user, data in app.user_data.items()},
                {known.get_bot() is app.bot for data in app.user_data.values() for known in data.values()},
                dict(app.bot_data),
                await persistence.get_conversations("it's \u00fcber"),
            ]
            await apps.until(lambda: len(apps.seen) == before + sum(len(text.split()) for text in texts))
        return found

    found = {}
    for kind in ("stock", "durable"):
        asyncio.run(life(kind, ["note1", "note2 forget", "note3 slow"]))
        found[kind] = asyncio.run(life(kind, []))
    assert found["durable"] == found["stock"]
    chats, users, its_own, bot, states = found["durable"]
    assert chats[2] == {"texts": ["note2"]}
    assert users[1] == {"who": 1}
    assert its_own == {True}
    assert bot == {"last": "note3"}
    assert states == {(1, 1): 1, (3, 3): 2}


def test_with_the_outbox_a_repeated_handler_sends_nothing_twice(apps: Apps) -> None:
    """Three attempts, one message; and each attempt has Telegram's own answer."""

    async def scenario() -> None:
        app = made(apps, "durable", outbox=True)

        async def on_message(update: Update, context: ContextTypes.DEFAULT_TYPE) -> None:
            item = current_item()
            assert item is not None
            assert update.effective_chat is not None
            sent = await context.bot.send_message(update.effective_chat.id, "one moment")
            apps.saw(sent.message_id)
            if item.attempt < 3:
                raise RuntimeError("not yet")

        app.add_handler(MessageHandler(filters.TEXT, on_message))
        apps.server.say("go")
        async with apps.polling(app):
            await apps.until(lambda: len(apps.seen) == 3)
        assert len(set(apps.seen)) == 1
        assert apps.server.sent() == ["one moment"]

    asyncio.run(scenario())


def test_the_builder_stays_a_builder(apps: Apps) -> None:
    """The application is the library's own, and what the builder was given is kept."""
    app = made(apps, "durable", apps.builder().concurrent_updates(4))
    assert isinstance(app, Application)
    assert app.concurrent_updates == 4
