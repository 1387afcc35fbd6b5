"""aiogram without losing updates: ``durable(dp, bot, "bot.db")``, and ``dp.start_polling(bot)`` stays as it is.

aiogram confirms an update to Telegram when it has begun to handle it, and drops what is running when it stops. Here its
``getUpdates`` is answered from a durable inbox, and the update is finished only when its handler is. The hooks:

* a request middleware of the bot's session answers ``GetUpdates`` from the inbox while polling runs, and with
  ``outbox=True`` takes what handlers send;
* an outer middleware of updates, outside of aiogram's own, sees how each handler ended;
* the first startup callback takes the poller's lock, the first shutdown callback waits for handlers *before* storages
  and sessions are closed;
* ``dp.stop_polling`` finishes the update whose handler called it: delivered again, it would stop the bot again;
* ``BaseRequestHandler.handle``, for dispatchers that are durable: aiogram answers 200 to a webhook before it has begun;
  and its ``register``, to refuse at the start what would not be durable.

Works with aiogram 3.13 and later (tested with 3.13.0 and 3.31.0).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from os import PathLike
from typing import Any, Final
from weakref import WeakKeyDictionary

import aiogram.methods
import msgspec
from aiogram import Bot, Dispatcher
from aiogram.dispatcher.event.bases import UNHANDLED, CancelHandler, SkipHandler
from aiogram.exceptions import (
    TelegramBadRequest,
    TelegramConflictError,
    TelegramForbiddenError,
    TelegramMigrateToChat,
    TelegramNotFound,
)
from aiogram.fsm.state import State
from aiogram.fsm.storage.base import BaseStorage, DefaultKeyBuilder, StateType, StorageKey
from aiogram.methods import DeleteWebhook, GetUpdates, Response, SetWebhook, TelegramMethod
from aiogram.types import Update
from aiogram.webhook.aiohttp_server import BaseRequestHandler, TokenBasedRequestHandler
from aiohttp import web
from pydantic import TypeAdapter

from everdeck.errors import FeedError, SpecError
from everdeck.feed import last_words
from everdeck.feed.botapi import Asked, Canceller, Handout, Order, Polling, current_item, forgive, settled
from everdeck.feed.dispatcher import Item, Listener
from everdeck.feed.inbox import KEEP_DAYS
from everdeck.feed.memory import Memory
from everdeck.feed.outbox import Message, Outbox, delivery_of
from everdeck.feed.pace import TELEGRAM
from everdeck.feed.policy import DEFAULT, FeedPolicy, OnError, Retry, RetryOn, permanent
from everdeck.feed.records import Delivery, FirstRun
from everdeck.feed.store import Transaction

__all__ = ["Durable", "InboxStorage", "current_item", "durable"]

# aiogram sets no limit of its own; this one bounds memory, and what comes again after a crash. A handler that has run
# for a few seconds no longer counts, so no number of slow ones silences the bot.
CONCURRENCY: Final = 256
SLOT_SECONDS: Final = 5.0
AT_ONCE: Final = 100

log = logging.getLogger("everdeck.feed")
_durables: "WeakKeyDictionary[Dispatcher, list[Durable]]" = WeakKeyDictionary()
# A group that has moved is a 400 too, with a class of its own.
permanent(TelegramBadRequest, TelegramForbiddenError, TelegramMigrateToChat, TelegramNotFound)


def durable(
    dp: Dispatcher,
    bot: Bot,
    path: str | PathLike[str],
    *,
    first_run: FirstRun = "take",
    concurrency: int = CONCURRENCY,
    max_attempts: int = DEFAULT.max_attempts,
    retry: Retry | None = None,
    retry_on: RetryOn | None = DEFAULT.retry_on,
    on_error: OnError = DEFAULT.on_error,
    handler_timeout: float | None = DEFAULT.handler_timeout,
    grace_seconds: float = DEFAULT.grace_seconds,
    order: Order = "none",
    delivery: Delivery = DEFAULT.delivery,
    storage: bool = False,
    outbox: bool | Delivery = False,
    keep_days: float = KEEP_DAYS,
    on_event: Listener | None = None,
) -> "Durable":
    """Let this bot lose nothing, by polling or by webhook. Call it once, before ``dp.start_polling(bot)``.

    ``path`` is the inbox (SQLite; several bots may share it). ``first_run`` says what happens to updates that were
    waiting before the inbox existed: ``"take"`` or ``"skip"`` them. ``order="none"`` lets updates run together, as
    aiogram
    alone does; ``"chat"`` or ``"user"`` runs those of one chat or person one after another, and a function of the raw
    update says what else must wait for each other. A handler that raises, and whose error no error handler takes, is
    tried ``max_attempts`` times, with the waits of ``retry``, unless ``retry_on`` or a 400 or 403 says that it is
    pointless; then the update is a dead letter. ``on_error="log"`` logs it and goes on, as aiogram alone does.

    ``storage=True`` keeps the states of conversations (FSM) in the inbox and commits them with the update.
    ``outbox=True`` makes what handlers send durable: not sent twice when an attempt is repeated, and within Telegram's
    limits; with ``"at-most-once"`` not even what was on the wire at a crash. Handlers may ask for ``item: Item`` and
    use ``item.transaction()``.
    """
    if isinstance(dp, Bot) or not isinstance(dp, Dispatcher):
        raise SpecError("dp", type(dp).__name__, "an aiogram Dispatcher: durable(dp, bot, path)")
    if not isinstance(bot, Bot):
        raise SpecError("bot", type(bot).__name__, "an aiogram Bot: durable(dp, bot, path)")
    if not isinstance(path, str | PathLike):
        raise SpecError("path", path, "the path of the inbox: durable(dp, bot, path)")
    if dp._running_lock.locked():  # noqa: SLF001 - there is no getter, and a late call would seem to work
        raise FeedError("durable() must be called before dp.start_polling(): the bot is already polling")
    policy = FeedPolicy(
        max_attempts, concurrency, delivery, retry or DEFAULT.retry, grace_seconds, handler_timeout, on_error, retry_on
    )
    return Durable(
        dp,
        bot,
        path,
        storage=storage,
        outbox=outbox,
        first_run=first_run,
        policy=policy,
        order=order,
        keep_days=keep_days,
        on_event=on_event,
    )


class RawGetUpdates(GetUpdates):
    """``getUpdates`` whose answer is not parsed, so that one unreadable update does not hide the others."""

    __returning__ = list[Any]


# aiogram names this type anew for every answer; pydantic builds it anew each time unless somebody keeps it.
_RAW_ANSWER: Final = Response[list[Any]]


class Durable:
    """The adapter between one dispatcher, one bot and one inbox. ``polling.feed`` is the feed while it is open."""

    def __init__(
        self,
        dp: Dispatcher,
        bot: Bot,
        path: str | PathLike[str],
        *,
        storage: bool,
        outbox: bool | Delivery,
        **options: Any,
    ) -> None:
        self._dp = dp
        self._bot = bot
        api = bot.session.api.base.partition("://")
        host = api[2].partition("/")[0]
        self.polling = Polling(
            library="aiogram",
            token=bot.token,
            path=path,
            get_updates=self._get_raw_updates,
            is_conflict=lambda error: isinstance(error, TelegramConflictError),
            server=host if ":" in host else f"{host}:{443 if api[0] == 'https' else 80}",
            slot_seconds=SLOT_SECONDS,
            **options,
        )
        self._webhook: asyncio.Task[None] | None = None
        self._handling: set[asyncio.Task[Any]] = set()
        bot.session.middleware.register(self._on_request)
        _put_first(dp.update.outer_middleware, self._on_update)
        for observer, callback in ((dp.startup, self._on_startup), (dp.shutdown, self._on_shutdown)):
            observer.register(callback)
            observer.handlers.insert(0, observer.handlers.pop())
        self._stop_polling = dp.stop_polling
        dp.stop_polling = self._on_stop_polling  # type: ignore[method-assign]
        _durables.setdefault(dp, []).append(self)
        self.outbox = _BotOutbox(bot, self.polling, delivery_of(outbox)) if outbox else None
        if storage:
            kept = dp.fsm.storage if isinstance(dp.fsm.storage, InboxStorage) else InboxStorage()
            memory = kept.memories[bot.id] = Memory("aiogram")

            async def leave() -> None:
                memory.leave()

            self.polling.on_open.append(lambda: memory.live_in(self.polling.inbox))
            self.polling.on_close.append(leave)
            dp.fsm.storage = kept

    def is_of(self, bot: Bot) -> bool:
        """Is it this bot's?"""
        return bot is self._bot

    # --- the poll ---------------------------------------------------------------------------------------------

    async def _on_request(self, make_request: Any, bot: Bot, method: TelegramMethod[Any]) -> Any:
        if bot is not self._bot:
            return await make_request(bot, method)
        if isinstance(method, DeleteWebhook | SetWebhook) and method.drop_pending_updates:
            log.warning("drop_pending_updates lets Telegram forget what came while the bot was down")
        if not self.polling.is_open:
            return await make_request(bot, method)
        if type(method) is GetUpdates:
            self.polling.asking = asyncio.current_task()
            self.polling.ask(Asked(method.timeout, method.allowed_updates))
            items = await self.polling.take(AT_ONCE, raise_trouble=True)
            return await self._parsed(items)
        if self.outbox is not None and self.outbox.takes(method):
            return await self.outbox.send(method)
        return await make_request(bot, method)

    async def _parsed(self, items: Sequence[Item]) -> list[Update]:
        context, raw = {"bot": self._bot}, self.polling.raw
        return await self.polling.give_each(items, lambda item: Update.model_validate(raw(item), context=context))

    async def _get_raw_updates(self, offset: int, timeout_seconds: int, limit: int) -> Any:
        asked = self.polling.asked
        method = RawGetUpdates(
            offset=offset or None, limit=limit, timeout=timeout_seconds, allowed_updates=asked.allowed_updates
        )
        session_timeout = self._bot.session.timeout
        request_timeout = int(session_timeout + timeout_seconds) if session_timeout else None
        return await self._bot(method, request_timeout=request_timeout)

    # --- the webhook ------------------------------------------------------------------------------------------

    async def accept(self, body: bytes) -> None:
        """What Telegram has brought: when this returns it is stored as it came, and Telegram may be answered."""
        if not self.polling.is_open:
            await self._open_for_webhook()
        await self.polling.accept(msgspec.json.decode(body), body, keep=True)

    async def _open_for_webhook(self) -> None:
        await self.polling.open()
        if self._webhook is None:
            self._webhook = asyncio.get_running_loop().create_task(self._feed_dispatcher(), name="feed webhook")

    async def _feed_dispatcher(self) -> None:
        loop = asyncio.get_running_loop()
        # What SimpleRequestHandler(dp, bot, **data) hands to handlers, also for what an earlier run has stored.
        mine = (one for one in _request_handlers.get(self._dp, ()) if getattr(one, "bot", None) is self._bot)
        data: dict[str, Any] = next((one.data for one in mine), {})
        while True:
            for update in await self._parsed(await self.polling.take(AT_ONCE)):
                # As aiogram's own polling does: errors are logged there.
                task = loop.create_task(self._dp._process_update(self._bot, update, **data))  # noqa: SLF001
                self._handling.add(task)
                task.add_done_callback(self._handling.discard)

    # --- the handler ------------------------------------------------------------------------------------------

    async def _on_update(self, handler: Any, event: Any, data: dict[str, Any]) -> Any:  # noqa: C901, PLR0912 - one row per way to end
        handout = self.polling.begin(event) if data.get("bot") is self._bot else None
        if handout is None:
            return await handler(event, data)
        if handout.state == "returned":
            return UNHANDLED
        item = handout.item
        data.setdefault("item", item)  # unless the user has something of that name; then current_item() tells
        token = last_words.current.set(item)
        try:
            response = await item.witness(handler(event, data))
            if isinstance(response, TelegramMethod):
                # aiogram would send this after us, and then a crash in between would lose the reply.
                await self._dp.silent_call_request(self._bot, response)
                response = None
        except (SkipHandler, CancelHandler):
            await settled(item.done())
            raise
        except asyncio.CancelledError as error:
            if await self._failed_by_cancellation(handout, error):
                return UNHANDLED
            raise
        except Exception as error:
            await settled(item.failed(error))
            raise
        except BaseException:
            # sys.exit() and the like: delivered again, it would end the bot again.
            item.settle_as_done()
            raise
        else:
            if handout.late:  # it ended in its own way
                await self._failed_by_cancellation(handout, None)
            else:
                # Not waited for: a crash until the commit finishes it all the same.
                item.settle_as_done()
                if self.polling.is_breath_due() and handout.task is self.polling.asking:  # aiogram handles one by one
                    await asyncio.sleep(0)  # noqa: TID251 - not a wait
            return response
        finally:
            last_words.current.reset(token)
            self.polling.end(handout)

    async def _failed_by_cancellation(self, handout: Handout, error: asyncio.CancelledError | None) -> bool:
        """Give a cancelled handler's item its outcome; whether it is a failure, and the cancellation ends here."""
        item = handout.item
        match self.polling.who_cancelled(handout, asyncio.current_task()):
            case Canceller.TIMEOUT:
                forgive(handout)
                await settled(item.failed(Canceller.TIMEOUT.value))
                return True
            case Canceller.NOBODY:
                await settled(item.failed(error or Canceller.NOBODY.value))
                return True
            case Canceller.AUTHOR:
                item.settle_as_done()
            case Canceller.STOP:
                item.settle_as_handed_back()
        return False

    # --- beginning and end ------------------------------------------------------------------------------------

    async def _on_startup(self, **data: Any) -> None:
        polled = data.get("bots")
        if polled is None:  # setup_application(): a webhook
            for one in _request_handlers.get(self._dp, ()):
                _refuse_what_is_not_durable(one)
            await self._open_for_webhook()
            return
        for bot in polled:
            if not any(one.is_of(bot) for one in _durables[self._dp]):
                raise SpecError(
                    "bot",
                    f"the bot {bot.id}",
                    "the same Bot object in durable(dp, bot, path) and in start_polling(bot): "
                    "this one is polled and is not durable",
                )
        if any(bot is self._bot for bot in polled):
            await self.polling.open()

    async def _on_shutdown(self, **_data: Any) -> None:
        webhook, self._webhook = self._webhook, None
        if webhook is not None:
            webhook.cancel()
            await asyncio.gather(webhook, return_exceptions=True)
        await self.polling.close()

    async def _on_stop_polling(self) -> None:
        item = current_item()
        if item is not None:
            await settled(item.done())
            handout = self.polling.handout_of(item)
            if handout is not None:
                self.polling.end(handout)
        await self._stop_polling()


# --- webhooks -------------------------------------------------------------------------------------------------------

_handle = BaseRequestHandler.handle
_register = BaseRequestHandler.register
_request_handlers: "WeakKeyDictionary[Dispatcher, list[BaseRequestHandler]]" = WeakKeyDictionary()


def _register_noted(self: BaseRequestHandler, app: web.Application, /, path: str, **options: Any) -> None:
    """As aiogram's own; the start looks at whose webhooks there are."""
    _request_handlers.setdefault(self.dispatcher, []).append(self)
    _register(self, app, path, **options)


def _refuse_what_is_not_durable(handler: BaseRequestHandler) -> None:
    if isinstance(handler, TokenBasedRequestHandler):
        raise SpecError(
            "handler",
            "TokenBasedRequestHandler",
            "a SimpleRequestHandler per durable bot: its bots are made when an update comes, so they are not durable",
        )
    bot = getattr(handler, "bot", None)
    if isinstance(bot, Bot) and not any(one.is_of(bot) for one in _durables.get(handler.dispatcher, ())):
        raise SpecError(
            "bot",
            f"the bot {bot.id}",
            "the same Bot object in durable(dp, bot, path) and in SimpleRequestHandler(dp, bot): "
            "this one has a webhook and is not durable",
        )


async def _handle_durably(self: BaseRequestHandler, request: web.Request) -> web.Response:
    """As aiogram's own, but for a durable bot the update is stored before Telegram hears 200."""
    bot = await self.resolve_bot(request)
    mine = next((one for one in _durables.get(self.dispatcher, ()) if one.is_of(bot)), None)
    if mine is None:
        return await _handle(self, request)
    if not self.verify_secret(request.headers.get("X-Telegram-Bot-Api-Secret-Token", ""), bot):
        return web.Response(body="Unauthorized", status=401)
    await mine.accept(await request.read())
    return web.json_response({}, dumps=bot.session.json_dumps)


BaseRequestHandler.register = _register_noted  # type: ignore[method-assign]
BaseRequestHandler.handle = _handle_durably  # type: ignore[method-assign]
BaseRequestHandler.__call__ = _handle_durably  # type: ignore[method-assign]


# --- conversations --------------------------------------------------------------------------------------------------


class InboxStorage(BaseStorage):
    """States and data of conversations in the file of their bot's inbox, committed with the update that changed them.

    A bot without a memory of its own (only the other one was given ``storage=True``) uses the first one.
    """

    def __init__(self) -> None:
        self.memories: dict[int, Memory] = {}
        self._keys = DefaultKeyBuilder(with_bot_id=True, with_business_connection_id=True, with_destiny=True)

    async def set_state(self, key: StorageKey, state: StateType = None) -> None:
        """As in the base class."""
        name = state.state if isinstance(state, State) else state
        await self._memory(key).set(self._keys.build(key, "state"), None if name is None else name.encode())

    async def get_state(self, key: StorageKey) -> str | None:
        """As in the base class."""
        found = self._memory(key).get(self._keys.build(key, "state"))
        return None if found is None else found.decode()

    async def set_data(self, key: StorageKey, data: Mapping[str, Any]) -> None:
        """As in the base class; the data must be JSON."""
        await self._memory(key).set(self._keys.build(key, "data"), msgspec.json.encode(dict(data)) if data else None)

    async def get_data(self, key: StorageKey) -> dict[str, Any]:
        """As in the base class."""
        found = self._memory(key).get(self._keys.build(key, "data"))
        return {} if found is None else msgspec.json.decode(found)

    async def close(self) -> None:
        """The inboxes are about to be closed."""
        for memory in self.memories.values():
            memory.leave()

    def _memory(self, key: StorageKey) -> Memory:
        return self.memories.get(key.bot_id) or next(iter(self.memories.values()))


# --- the outbox -----------------------------------------------------------------------------------------------------

_SENDING: Final = ("send", "forward", "copy")
_NOT_A_MESSAGE: Final = frozenset({"sendChatAction"})


class _Call(msgspec.Struct):
    """A request as it goes over the wire: the method's class, and its fields as texts."""

    method: str
    fields: dict[str, str]


class _BotOutbox:
    """What handlers send, by the inbox's outbox."""

    def __init__(self, bot: Bot, polling: Polling, delivery: Delivery) -> None:
        self._bot = bot
        self._polling = polling
        self._outbox = Outbox(polling.inbox, f"telegram:{bot.id}", limits=TELEGRAM, delivery=delivery)
        self._running: asyncio.Task[None] | None = None
        polling.on_open.append(self._open)
        polling.on_close.append(self._close)

    def takes(self, method: TelegramMethod[Any]) -> bool:
        """Is it a message, sent by a handler, that can be written down? A file that is uploaded cannot."""
        name = method.__api_method__
        if current_item() is None or isinstance(method, _Stored) or name in _NOT_A_MESSAGE:
            return False
        return name.startswith(_SENDING) and not self._written(method)[1]

    async def send(self, method: TelegramMethod[Any]) -> Any:
        """Send it once, however often the handler is run; the answer is Telegram's."""
        answer = await self._outbox.send(self.payload(method), key=_chat(method), item=current_item())
        return _adapter(type(method)).validate_json(answer or b"null", context={"bot": self._bot})

    def put(self, db: Transaction, method: TelegramMethod[Any]) -> int:
        """Promise a message in a transaction; it is sent after the commit."""
        return self._outbox.put(db, self.payload(method), key=_chat(method))

    def payload(self, method: TelegramMethod[Any]) -> bytes:
        """The request as it is written down."""
        fields, files = self._written(method)
        if files:
            raise SpecError(
                "method", type(method).__name__, "a message without uploaded files (use a file_id or a URL)"
            )
        return msgspec.json.encode(_Call(type(method).__name__, fields))

    def _written(self, method: TelegramMethod[Any]) -> tuple[dict[str, str], dict[str, Any]]:
        files: dict[str, Any] = {}
        prepare = self._bot.session.prepare_value
        dumped = method.model_dump(warnings=False).items()
        fields = {name: prepare(value, bot=self._bot, files=files) for name, value in dumped}
        return {name: str(value) for name, value in fields.items() if value}, files

    async def _deliver(self, message: Message) -> bytes:
        call = msgspec.json.decode(message.payload, type=_Call)
        answer = await self._bot(_stored_class(call.method)(**call.fields))
        return _adapter(getattr(aiogram.methods, call.method)).dump_json(answer, exclude_none=True, by_alias=True)

    async def _open(self) -> None:
        running = self._outbox.run(self._deliver, concurrency=16)
        self._running = asyncio.get_running_loop().create_task(running, name="feed outbox")

    async def _close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class _Stored(TelegramMethod[Any]):
    """A method whose fields are texts, as they were written down."""

    __returning__ = Any
    __api_method__ = ""


@cache
def _stored_class(name: str) -> type[_Stored]:
    original = getattr(aiogram.methods, name)
    facts = {
        "__returning__": original.__returning__,
        "__api_method__": original.__api_method__,
        "__module__": __name__,
    }
    return type(f"Stored{name}", (_Stored,), facts)


@cache
def _adapter(method: type[TelegramMethod[Any]]) -> TypeAdapter[Any]:
    return TypeAdapter(method.__returning__)


def _chat(method: TelegramMethod[Any]) -> str | None:
    chat = getattr(method, "chat_id", None)
    return None if chat is None else str(chat)


def _put_first(middlewares: Any, middleware: Any) -> None:
    """Register a middleware outside of those that are there, by the manager's public methods."""
    others = list(middlewares)
    for other in others:
        middlewares.unregister(other)
    for one in (middleware, *others):
        middlewares.register(one)
