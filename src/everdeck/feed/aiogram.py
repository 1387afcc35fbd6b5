"""aiogram without losing updates: ``durable(dp, bot, "bot.db")``, and ``dp.start_polling(bot)`` stays as it is.

aiogram confirms an update to Telegram when it has begun to handle it, and drops what is running when it stops. Here its
``getUpdates`` is answered from a durable inbox, and the update is finished only when its handler is. Four public hooks
do it; nothing of aiogram is replaced but one method of the one dispatcher:

* a request middleware of the bot's session answers ``GetUpdates`` from the inbox while polling runs;
* an outer middleware of updates, outside of aiogram's own, sees how each handler ended;
* the first startup callback takes the poller's lock, the first shutdown callback waits for handlers *before* storages
  and sessions are closed;
* ``dp.stop_polling`` finishes the update whose handler called it: delivered again, it would stop the bot again.

Works with aiogram 3.13 and later (tested with 3.13.0 and 3.31.0).
"""

import logging
from os import PathLike
from typing import Any, Final

from aiogram import Bot, Dispatcher
from aiogram.dispatcher.event.bases import UNHANDLED, CancelHandler, SkipHandler
from aiogram.exceptions import TelegramConflictError
from aiogram.methods import GetUpdates, Response, TelegramMethod
from aiogram.types import Update

from everdeck.feed.botapi import Asked, Order, Polling, current_item, settled, working_on
from everdeck.feed.dispatcher import Item, Listener
from everdeck.feed.policy import DEFAULT, FeedPolicy, Retry
from everdeck.feed.records import Delivery, FirstRun

__all__ = ["Durable", "current_item", "durable"]

# aiogram sets no limit of its own; this one bounds memory, and what comes again after a crash.
CONCURRENCY: Final = 256
AT_ONCE: Final = 64

log = logging.getLogger("everdeck.feed")


def durable(
    dp: Dispatcher,
    bot: Bot,
    path: str | PathLike[str],
    *,
    first_run: FirstRun = "skip",
    concurrency: int = CONCURRENCY,
    max_attempts: int = DEFAULT.max_attempts,
    retry: Retry | None = None,
    grace_seconds: float = DEFAULT.grace_seconds,
    order: Order = "chat",
    delivery: Delivery = DEFAULT.delivery,
    on_event: Listener | None = None,
) -> "Durable":
    """Let this bot's polling with this dispatcher lose nothing. Call it once, before ``dp.start_polling(bot)``.

    ``path`` is the inbox (SQLite; several bots may share it). ``first_run`` says what happens to updates that were
    waiting before the inbox existed: ``"skip"`` or ``"take"`` them. ``order="chat"`` runs the updates of one chat one
    after another; ``"none"`` lets them run together, as aiogram alone does. A handler that raises, and whose error no
    error handler takes, is tried ``max_attempts`` times,
    with the waits of ``retry``; then the update is a dead letter.

    Handlers may ask for ``item: Item`` and use ``item.transaction()``.
    """
    return Durable(
        dp,
        bot,
        path,
        first_run=first_run,
        policy=FeedPolicy(max_attempts, concurrency, delivery, retry or DEFAULT.retry, grace_seconds),
        order=order,
        on_event=on_event,
    )


class RawGetUpdates(GetUpdates):
    """``getUpdates`` whose answer is not parsed, so that one unreadable update does not hide the others."""

    __returning__ = list[Any]


# aiogram names this type anew for every answer; pydantic builds it anew each time unless somebody keeps it.
_RAW_ANSWER: Final = Response[list[Any]]


class Durable:
    """The adapter between one dispatcher, one bot and one inbox. ``polling.feed`` is the feed while polling runs."""

    def __init__(self, dp: Dispatcher, bot: Bot, path: str | PathLike[str], **options: Any) -> None:
        self._dp = dp
        self._bot = bot
        self.polling = Polling(
            token=bot.token,
            path=path,
            get_updates=self._get_raw_updates,
            is_conflict=lambda error: isinstance(error, TelegramConflictError),
            **options,
        )
        bot.session.middleware.register(self._on_request)
        _put_first(dp.update.outer_middleware, self._on_update)
        for observer, callback in ((dp.startup, self._on_startup), (dp.shutdown, self._on_shutdown)):
            observer.register(callback)
            observer.handlers.insert(0, observer.handlers.pop())
        self._stop_polling = dp.stop_polling
        dp.stop_polling = self._on_stop_polling  # type: ignore[method-assign]

    # --- the poll ---------------------------------------------------------------------------------------------

    async def _on_request(self, make_request: Any, bot: Bot, method: TelegramMethod[Any]) -> Any:
        if type(method) is not GetUpdates or bot is not self._bot or not self.polling.is_open:
            return await make_request(bot, method)
        self.polling.ask(Asked(method.timeout, method.allowed_updates))
        # Whoever comes for more while the last one is unfinished runs them as tasks and may have several at once. With
        # handle_as_tasks=False he comes only when it is done, and gets one: the others would wait with an attempt
        # already counted.
        items = await self.polling.take(AT_ONCE if self.polling.busy() else 1)
        return [update for item in items if (update := await self._parsed(item)) is not None]

    async def _parsed(self, item: Item) -> Update | None:
        try:
            update = Update.model_validate(item.value, context={"bot": self._bot})
        except Exception as error:
            log.exception("update %s cannot be read by this aiogram; it is set aside", item.id)
            await settled(item.set_aside(error))
            return None
        self.polling.give(update, item)
        return update

    async def _get_raw_updates(self, offset: int, timeout_seconds: int) -> Any:
        asked = self.polling.asked
        method = RawGetUpdates(
            offset=offset or None, limit=100, timeout=timeout_seconds, allowed_updates=asked.allowed_updates
        )
        session_timeout = self._bot.session.timeout
        request_timeout = int(session_timeout + timeout_seconds) if session_timeout else None
        return await self._bot(method, request_timeout=request_timeout)

    # --- the handler ------------------------------------------------------------------------------------------

    async def _on_update(self, handler: Any, event: Any, data: dict[str, Any]) -> Any:
        handout = self.polling.begin(event) if data.get("bot") is self._bot else None
        if handout is None:
            return await handler(event, data)
        if handout.state == "returned":
            return UNHANDLED
        item = handout.item
        data.setdefault("item", item)  # unless the user has something of that name; then current_item() tells
        try:
            with working_on(item):
                response = await handler(event, data)
                if isinstance(response, TelegramMethod):
                    # aiogram would send this after us, and then a crash in between would lose the reply.
                    await self._dp.silent_call_request(self._bot, response)
                    response = None
        except (SkipHandler, CancelHandler):
            await settled(item.done())
            raise
        except Exception as error:
            await settled(item.failed(error))
            raise
        except BaseException:
            await settled(item.hand_back())
            raise
        else:
            # Not waited for: its slot and its chat are free only when it is committed, and a stop commits it.
            item.settle_as_done()
            return response
        finally:
            self.polling.end(handout)

    # --- beginning and end ------------------------------------------------------------------------------------

    async def _on_startup(self, **data: Any) -> None:
        if any(bot is self._bot for bot in data.get("bots") or ()):
            await self.polling.open()

    async def _on_shutdown(self, **_data: Any) -> None:
        await self.polling.close()

    async def _on_stop_polling(self) -> None:
        item = current_item()
        if item is not None:
            await settled(item.done())
            handout = self.polling.handout_of(item)
            if handout is not None:
                self.polling.end(handout)
        await self._stop_polling()


def _put_first(middlewares: Any, middleware: Any) -> None:
    """Register a middleware outside of those that are there, by the manager's public methods."""
    others = list(middlewares)
    for other in others:
        middlewares.unregister(other)
    for one in (middleware, *others):
        middlewares.register(one)
