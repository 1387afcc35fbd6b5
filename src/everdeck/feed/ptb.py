"""python-telegram-bot without losing updates: ``durable_application(builder, "bot.db")``, then ``app.run_polling()``.

python-telegram-bot confirms a batch to Telegram as soon as it is in a queue in memory, so whatever is queued when the
process ends is lost. Here the updater's ``get_updates`` is answered from a durable inbox, with no more updates than the
application can begin, and an update is finished only when its handlers are. The seams, all of them public but the two
that are marked below:

* a subclass of the application (``builder.application_class``) hands in a wrapping update processor, keeps track of
  the tasks of ``block=False`` handlers, and waits for work in ``stop()``;
* a subclass of ``Updater`` opens the inbox in ``start_polling`` and polls with a *tap*: the bot, but for one method;
* an error handler, the first of all, notices errors that nobody else handles: the library only logs those;
* for a webhook the updater's queue is ours: what is put there is stored before Telegram hears 200;
* with ``outbox=True`` a rate limiter of ours (the library's hook for that) takes what handlers send.

Works with python-telegram-bot 21.0 and later (tested with 21.0 and 22.8).
"""

import asyncio
import io
import logging
import pickle
import sys
from datetime import timedelta
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

import msgspec
from telegram import TelegramObject, Update
from telegram.error import BadRequest, ChatMigrated, Conflict, Forbidden, RetryAfter, TelegramError, TimedOut
from telegram.ext import (
    Application,
    ApplicationBuilder,
    BasePersistence,
    BaseRateLimiter,
    BaseUpdateProcessor,
    ConversationHandler,
    ExtBot,
    PersistenceInput,
    PicklePersistence,
    SimpleUpdateProcessor,
    Updater,
)
from telegram.ext._picklepersistence import _BotPickler, _BotUnpickler
from telegram.request import RequestData
from telegram.request._requestparameter import RequestParameter

from everdeck.errors import FeedError, SpecError
from everdeck.feed import last_words
from everdeck.feed.botapi import (
    MOST_AT_ONCE,
    Asked,
    Canceller,
    Handout,
    JustRead,
    Order,
    Polling,
    current_item,
    forgive,
    settled,
)
from everdeck.feed.dispatcher import Item, Listener
from everdeck.feed.inbox import KEEP_DAYS, Inbox
from everdeck.feed.memory import Memory, is_key, take_over
from everdeck.feed.outbox import Message, Outbox, delivery_of
from everdeck.feed.pace import TELEGRAM
from everdeck.feed.policy import DEFAULT, FeedPolicy, OnError, Retry, RetryOn, permanent
from everdeck.feed.records import Delivery, FirstRun
from everdeck.feed.store import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

__all__ = ["Persistence", "current_item", "durable_application"]

# The name that Application.process_update gives to the task of a handler with block=False. Tasks that users start
# themselves are theirs: one that runs for ever must not keep its update from being finished.
_NON_BLOCKING: Final = ":process_update_non_blocking:"
# What waits in the library's queue has not begun: a stop hands it back, a crash is not held against it.
# More than Telegram gives at once: then all of an answer is taken in one go.
AHEAD: Final = 128

log = logging.getLogger("everdeck.feed")
_current: Final = last_words.current
permanent(BadRequest, ChatMigrated, Forbidden)  # a group that has moved is a 400 with a class of its own


def durable_application(
    builder: Any,
    path: str | PathLike[str],
    *,
    first_run: FirstRun = "take",
    max_attempts: int = DEFAULT.max_attempts,
    retry: Retry | None = None,
    retry_on: RetryOn | None = DEFAULT.retry_on,
    on_error: OnError = DEFAULT.on_error,
    handler_timeout: float | None = DEFAULT.handler_timeout,
    grace_seconds: float | None = None,
    order: Order | None = None,
    delivery: Delivery = DEFAULT.delivery,
    persist_before_ack: bool = True,
    outbox: bool | Delivery = False,
    keep_days: float = KEEP_DAYS,
    on_event: Listener | None = None,
) -> "Application[Any, Any, Any, Any, Any, Any]":
    """Build the application so that it loses nothing, by polling or by webhook; instead of ``builder.build()``.

    ``path`` is the inbox (SQLite). ``first_run`` says what happens to updates that were waiting before the inbox
    existed: ``"take"`` or ``"skip"`` them. ``concurrent_updates`` of the builder keeps its meaning: without it one
    handler runs at a time, with it updates run together; then ``order="chat"`` or ``"user"`` runs those of one chat or
    person one after another, and a function of the raw update says what else must wait for each other. A handler that
    raises while the application has no error handler of the user's is tried ``max_attempts`` times, with the waits of
    ``retry``, unless ``retry_on`` or a 400 or 403 says that it is pointless; then the update is a dead letter.
    ``on_error="log"`` logs it and goes on, as the library does. A stop waits for running handlers, as the library does,
    or ``grace_seconds``.

    With ``persist_before_ack`` the persistence is written before an update is finished instead of every 60 seconds, so
    a conversation is never behind its updates; ``builder.persistence(Persistence())`` writes it in the same commit.
    ``outbox=True`` makes what handlers send durable: not sent twice when an attempt is repeated, and within Telegram's
    limits; with ``"at-most-once"`` not even what was on the wire at a crash. Handlers reach ``item.transaction()`` by
    ``current_item()``.
    """
    if isinstance(builder, Application):
        raise FeedError("durable_application() takes the builder, before build(): the application is already built")
    if not isinstance(builder, ApplicationBuilder):
        raise SpecError("builder", type(builder).__name__, "an ApplicationBuilder: durable_application(builder, path)")
    if not isinstance(path, str | PathLike):
        raise SpecError("path", path, "the path of the inbox: durable_application(builder, path)")
    given = builder._application_class  # noqa: SLF001 - the builder has no getter; a DefaultValue unless the user set it
    base = given if isinstance(given, type) else Application
    builder.application_class(_durable_class(base), builder._application_kwargs)  # noqa: SLF001 - as above
    limiter = None
    if outbox:
        users = builder._rate_limiter  # noqa: SLF001 - as above
        limiter = OutboxLimiter(users if isinstance(users, BaseRateLimiter) else None, delivery_of(outbox))
        builder.rate_limiter(limiter)
    app: Any = builder.build()
    if type(app.updater) is not Updater:
        raise TypeError(f"durable_application polls with an updater of its own, so it cannot use {app.updater!r}")
    at_once: int = app.concurrent_updates
    policy = FeedPolicy(
        max_attempts,
        at_once + AHEAD,
        delivery,
        retry or DEFAULT.retry,
        DEFAULT.grace_seconds if grace_seconds is None else grace_seconds,
        handler_timeout,
        on_error,
        retry_on,
    )
    durable = Durable(
        app,
        persist_before_ack=persist_before_ack,
        path=path,
        first_run=first_run,
        policy=policy,
        # One at a time: an update that waits for a retry holds back its own chat, and no other.
        order=order if order is not None else "chat" if at_once == 1 else "none",
        keep_days=keep_days,
        on_event=on_event,
        one_at_a_time=at_once == 1,
    )
    durable.polling.grace_seconds = grace_seconds
    if limiter is not None:
        limiter.serve(durable)
    app.updater = DurableUpdater(durable, app.update_queue)
    app.update_processor.durable = app.durable = durable
    app.add_error_handler(durable.note_error, block=True)
    return app  # type: ignore[no-any-return]  # the builder is generic in six ways and Any in all of them here


class Durable:
    """The adapter between one application and one inbox. ``polling.feed`` is the feed while polling runs."""

    def __init__(self, app: Any, *, persist_before_ack: bool, **options: Any) -> None:
        self.app = app
        scheme, _, rest = app.bot.base_url.partition("://")
        host = rest.partition("/")[0]
        self.polling = Polling(
            library="python-telegram-bot",
            token=app.bot.token,
            get_updates=self._get_raw_updates,
            is_conflict=lambda error: isinstance(error, Conflict),
            server=host if ":" in host else f"{host}:{443 if scheme == 'https' else 80}",
            **options,
        )
        self.polling.on_trouble = self._hear_trouble
        self.polling.on_slow = self._give_place_away
        self.poll_interval = 0.0
        self.error_callback: Callable[[TelegramError], None] | None = None
        self.remembers = False
        self.outbox: OutboxLimiter | None = None
        self._persist_before_ack = persist_before_ack
        self._persisting = asyncio.Lock()
        self.is_persisting = 0  # how often at the same time
        self.just_noted: object = None
        self._persist_asked = 0
        self._persist_done = 0
        self._poll_arguments: dict[str, Any] = {}
        self._finishers: set[asyncio.Task[None]] = set()
        self._just_read = JustRead[Update]()  # what came by a webhook was read there

    # --- the poll ---------------------------------------------------------------------------------------------

    async def get_updates(self, **arguments: Any) -> tuple[Update, ...]:
        """What the updater gets instead of Telegram's answer: as many updates as the application can begin."""
        if not self.polling.is_open or not self.app.updater.running:
            # The updater's last call, to confirm what it has: what is stored is confirmed by the next start.
            return ()
        timeout = arguments.pop("timeout", None)
        self._poll_arguments = {name: given for name, given in arguments.items() if name not in {"offset", "limit"}}
        allowed = self._poll_arguments.pop("allowed_updates", None)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self.polling.ask(Asked(seconds, None if allowed is None else list(allowed)), every=self.poll_interval)
        return await self.next_updates()

    async def next_updates(self) -> tuple[Update, ...]:
        """What the application can begin, and a little more."""
        limit = self.app.concurrent_updates + AHEAD
        # Half empty first: one at a time would cost as much as all of them.
        await self.polling.until_less_busy_than(self.app.concurrent_updates + AHEAD // 2)
        items = await self.polling.take(limit - self.polling.busy())
        return tuple(await self._parsed(items))

    def _hear_trouble(self, error: Exception) -> None:
        """As the library's own loop does: a timeout and a flood wait are no news, the rest is the callback's."""
        found = error.__cause__ if isinstance(error.__cause__, TelegramError) else error
        if not isinstance(found, TelegramError) or isinstance(found, RetryAfter | TimedOut):
            return
        if self.error_callback is not None:
            self.error_callback(found)
        else:
            log.error("getUpdates failed: %s", found)

    async def remember(self) -> None:
        """The application reads its persistence before it polls."""
        await self.polling.inbox.open()
        await self.app.persistence.live_in(self.polling.inbox, self.polling.bot_id)
        self.remembers = True

    async def forget(self) -> None:
        """The application is shut down."""
        self.remembers = False
        await self.app.persistence.leave()
        await self.polling.inbox.close()

    async def accept(self, body: bytes, raw: dict[str, Any], update: Update) -> None:
        """What Telegram has brought, and what the library has made of it: when this returns it is stored."""
        self._just_read.keep((body,), (update,))
        await self.polling.accept(raw, body)

    async def _parsed(self, items: "Sequence[Item]") -> list[Update]:
        return await self.polling.give_each(items, self._read_item)

    def _read_item(self, item: Item) -> Update:
        bot = self.app.bot
        update = self._just_read.take(item.payload) or Update.de_json(self.polling.raw(item), bot)
        if isinstance(bot, ExtBot) and bot.callback_data_cache is not None:
            bot.insert_callback_data(update)
        return update

    def read(self, raw: Any) -> Update:
        """An update of the library's from its JSON; raises whatever the library raises."""
        return Update.de_json(raw, self.app.bot)

    async def _get_raw_updates(self, offset: int, timeout_seconds: int, limit: int) -> Any:
        bot = self.app.bot
        data = {"offset": offset, "timeout": timeout_seconds, "allowed_updates": self.polling.asked.allowed_updates}
        if limit != MOST_AT_ONCE:
            data["limit"] = limit
        arguments = dict(self._poll_arguments)
        patience = arguments.pop("read_timeout", None)
        if not isinstance(patience, int | float):
            patience = bot._request[0].read_timeout or 0  # noqa: SLF001 - as Bot.get_updates does; there is no getter
        # Bot.get_updates parses the whole batch at once; this is the call inside of it.
        return await bot._post("getUpdates", data, read_timeout=patience + timeout_seconds, **arguments)  # noqa: SLF001

    # --- the handlers -----------------------------------------------------------------------------------------

    async def process(self, update: object, work: Any, coroutine: Any) -> None:  # noqa: C901, PLR0912, PLR0915 - one row per way to end
        """Run the handlers of one update (``work``, which is or awaits ``coroutine``) and give its item an outcome."""
        handout = self.polling.begin(update)
        if handout is None:
            await work
            return
        if handout.state == "returned":
            work.close()
            coroutine.close()
            return
        item, token = handout.item, _current.set(handout.item)
        try:
            try:
                await (work if self.polling.is_one_alone else item.witness(work))
            finally:
                _current.reset(token)
        except asyncio.CancelledError as error:
            canceller = self.polling.who_cancelled(handout, asyncio.current_task())
            handout.error = None if canceller is Canceller.AUTHOR else error
            await self._end(handout, cancelled=canceller is Canceller.STOP)
            # What the handler awaited was cancelled, or it took too long, or a stop has waited for long enough: that is
            # noted, and stops here, because without concurrency the current task is the library's loop.
            match canceller:
                case Canceller.TIMEOUT:
                    forgive(handout)
                case Canceller.STOP if handout.cancelled:
                    _uncancel()
                case Canceller.STOP | Canceller.AUTHOR:
                    raise
        except Exception as error:
            handout.error = error
            await self._end(handout)
            raise
        except BaseException:
            # sys.exit() and the like: delivered again, it would end the bot again.
            item.settle_as_done()
            self.polling.end(handout)
            raise
        else:
            if work is not coroutine:
                coroutine.close()  # a processor of the user's may have decided not to run it; that is an outcome too
            if not handout.tasks and handout.error is None and not handout.late and self._is_persisted(item):
                # As below, in fewer steps: this is nearly every update.
                item.settle_as_done()
                polling = self.polling
                polling.end(handout)
                if self.app.concurrent_updates > 1:
                    self.just_noted = update
                if polling.one_at_a_time and polling.is_breath_due():  # the next is begun by this very task
                    await asyncio.sleep(0)  # noqa: TID251 - not a wait
                return
            forgive(handout)  # it may have ended in its own way
            if all(task.done() for task in handout.tasks):
                await self._end(handout, cancelled=self._stopped(handout))
            else:
                self._go_on_in_background(handout, *handout.tasks)
        finally:
            if handout.slow:
                # It had given its place away; the library gives it back a second time.
                await self.app.update_processor._semaphore.acquire()  # noqa: SLF001 - as below

    def _give_place_away(self, handout: Handout) -> None:
        """Where several run at once, those that take very long must not silence the bot."""
        if self.app.concurrent_updates > 1 and not handout.slow:
            handout.slow = True
            self.polling.to_background(handout)
            self.app.update_processor._semaphore.release()  # noqa: SLF001 - the library has no other way

    def _go_on_in_background(self, handout: Handout, *tasks: "asyncio.Future[Any]") -> None:
        handout.tasks = tasks
        if handout.state != "background":
            self.polling.to_background(handout)
        finisher = asyncio.get_running_loop().create_task(self._end_later(handout))
        self._finishers.add(finisher)
        finisher.add_done_callback(self._finishers.discard)

    async def _end_later(self, handout: Handout) -> None:
        gathered = asyncio.gather(*handout.tasks, return_exceptions=True)
        handout.task = gathered
        try:
            await gathered
        except asyncio.CancelledError:
            await self._end(handout, cancelled=True)
            return
        await self._end(handout, cancelled=self._stopped(handout))

    def _stopped(self, handout: Handout) -> bool:
        """How its tasks in the background ended: whether by a stop; an error of theirs is noted."""
        stopped = False
        for task in handout.tasks:
            canceller = self.polling.who_cancelled(handout, task) if task.cancelled() else None
            stopped = stopped or canceller is Canceller.STOP
            if canceller is Canceller.NOBODY:
                handout.error = handout.error or asyncio.CancelledError()
            elif canceller is None and isinstance(error := task.exception(), Exception):
                handout.error = handout.error or error
        return stopped

    async def _end(self, handout: Handout, *, cancelled: bool = False) -> None:
        item, tasks = handout.item, handout.tasks
        try:
            if handout.late:
                await settled(item.failed("it ran for longer than handler_timeout"))
            elif cancelled:
                for task in tasks:
                    task.cancel()
                item.settle_as_handed_back()
            elif handout.error is not None:
                await settled(item.failed(handout.error))
            else:
                await self._persisted(item)
                # Not waited for: a crash until the commit finishes it all the same.
                item.settle_as_done()
        finally:
            self.polling.end(handout)

    def carry_on(self, queue: "asyncio.Queue[object]") -> None:
        """Carry what a webhook has brought from the inbox to the application."""

        async def carry() -> None:
            while True:
                for update in await self.next_updates():
                    await queue.put(update)

        carrying = asyncio.get_running_loop().create_task(carry(), name="feed webhook")
        self._finishers.add(carrying)
        carrying.add_done_callback(self._finishers.discard)

        async def stop() -> None:
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)
            self.polling.on_close.remove(stop)

        self.polling.on_close.append(stop)

    async def note_error(self, update: object, context: Any) -> None:
        """The first error handler: an error that no handler of the user's will see makes its update fail."""
        if any(callback != self.note_error for callback in self.app.error_handlers):
            return
        handout = self.polling.find(update) if isinstance(update, Update) else None
        if handout is not None:
            handout.error = context.error
        log.error("No error handlers are registered, logging exception.", exc_info=context.error)

    def _is_persisted(self, item: Item) -> bool:
        """Is nothing to be written, or does what has changed go with the ack?"""
        persistence = self.app.persistence
        if persistence is None:
            return True
        # While the library writes, what it has copied must not come after what is newer.
        if type(persistence) is not Persistence or not item.takes_changes or self.is_persisting:
            return False
        errors = persistence.note_changes(self.app, item)
        for error in errors or ():
            self.app.create_task(self.app.process_error(None, error))
        return errors is not None

    async def _persisted(self, item: Item) -> None:
        """Write the persistence; those who finish while it is being written share the next writing."""
        if self._is_persisted(item):
            return
        persistence = self.app.persistence
        if isinstance(persistence, Persistence):
            token = last_words.current.set(item)  # what it writes is committed with this item
            try:
                await self._update_persistence()
            finally:
                last_words.current.reset(token)
            return
        if persistence is None or not self._persist_before_ack:
            return
        self._persist_asked += 1
        mine = self._persist_asked
        async with self._persisting:
            if self._persist_done >= mine:
                return
            covers = self._persist_asked
            await self._update_persistence()
            # flush() of others may close their database; this one only writes, and with on_flush nothing else does.
            if isinstance(persistence, PicklePersistence) and persistence.on_flush:
                await persistence.flush()
            self._persist_done = covers

    async def _update_persistence(self) -> None:
        """Data that cannot be copied is for the error handlers, as what cannot be pickled is; its update is done."""
        try:
            await self.app.update_persistence()
        except Exception as error:  # noqa: BLE001 - whatever the author's objects raise
            await self.app.process_error(None, error)


class Tap:
    """The application's bot for the updater: everything is the bot's, but ``get_updates`` is the inbox's."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._durable.app.bot, name)

    async def get_updates(self, *positional: Any, **arguments: Any) -> tuple[Update, ...]:
        """See :meth:`Durable.get_updates`; takes what ``Bot.get_updates`` takes."""
        names = ("offset", "limit", "timeout", "allowed_updates")
        return await self._durable.get_updates(**dict(zip(names, positional, strict=False)), **arguments)


class DurableUpdater(Updater):
    """An updater that opens the inbox before it polls."""

    __slots__ = ("_durable",)

    def __init__(self, durable: Durable, update_queue: "asyncio.Queue[object]") -> None:
        super().__init__(bot=Tap(durable), update_queue=update_queue)  # type: ignore[arg-type]  # a bot in all but its class
        self._durable = durable

    async def start_polling(
        self, poll_interval: float = 0.0, *positional: Any, **arguments: Any
    ) -> "asyncio.Queue[object]":
        """As in the base class; raises PollerConflict if another process polls with this token."""
        if arguments.get("drop_pending_updates"):
            log.warning("drop_pending_updates lets Telegram forget what came while the bot was down")
        durable = self._durable
        # The interval is between two questions to Telegram, and so are the errors: the library asks only the inbox.
        durable.poll_interval = poll_interval
        durable.error_callback = arguments.get("error_callback")
        await durable.polling.open()
        try:
            return await super().start_polling(0.0, *positional, **arguments)
        except BaseException:
            await durable.polling.close()
            raise

    async def start_webhook(self, *positional: Any, **arguments: Any) -> "asyncio.Queue[object]":
        """As in the base class; what comes is stored before it is answered."""
        if arguments.get("drop_pending_updates"):
            log.warning("drop_pending_updates lets Telegram forget what came while the bot was down")
        durable, queue = self._durable, self.update_queue
        await durable.polling.open()
        self.update_queue = _Doorstep(durable)  # type: ignore[assignment]  # the web server only puts
        try:
            await super().start_webhook(*positional, **arguments)
        except BaseException:
            await durable.polling.close()
            raise
        finally:
            self.update_queue = queue
        _shorten_the_way(getattr(self, "_httpd", None), durable)
        durable.carry_on(queue)
        return queue


def _shorten_the_way(httpd: Any, durable: Durable) -> None:
    """Let the web server store the body as it came, instead of what the library writes of it once it has read it.

    That halves the cost. The library's web server is private: where it looks different, all goes by the doorstep.
    """
    app = getattr(getattr(httpd, "_http_server", None), "request_callback", None)
    rules = getattr(getattr(app, "wildcard_router", None), "rules", ())
    for rule in rules:
        if getattr(rule.target, "__name__", None) == "TelegramHandler":
            rule.target = _doorway(rule.target, durable)


def _doorway(base: Any, durable: Durable) -> Any:
    class Doorway(base):  # type: ignore[misc]  # tornado is there only where there is a webhook
        async def post(self) -> None:
            self._validate_post()
            body = self.request.body
            raw = msgspec.json.decode(body)
            try:
                update = durable.read(raw)
            except Exception:  # noqa: BLE001 - the library's own way to refuse what it cannot read
                await super().post()
                return
            await durable.accept(body, raw, update)
            self.set_status(200)

    return Doorway


class _Doorstep:
    """Where the web server puts updates: returns when they are stored, and only then Telegram is answered."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    async def put(self, update: Update) -> None:
        """Store it."""
        await self._durable.polling.accept(update.to_dict())


class DurableProcessor(BaseUpdateProcessor):
    """The user's update processor, with an outcome for the item afterwards."""

    __slots__ = ("durable", "inner")

    def __init__(self, inner: BaseUpdateProcessor) -> None:
        super().__init__(inner.max_concurrent_updates)
        self.inner = inner
        self.durable: Durable | None = None

    def do_process_update(self, update: object, coroutine: Any) -> "Coroutine[Any, Any, None]":
        """Run the user's processor and settle the item."""
        if type(self.inner) is SimpleUpdateProcessor:  # it would do nothing but await it
            work = coroutine
        else:
            work = self.inner.do_process_update(update, coroutine)
        return work if self.durable is None else self.durable.process(update, work, coroutine)

    async def initialize(self) -> None:
        """As the user's."""
        await self.inner.initialize()

    async def shutdown(self) -> None:
        """As the user's."""
        await self.inner.shutdown()


def _durable_class(base: Any) -> Any:  # noqa: C901 - seven short methods
    class DurableApplication(base):  # type: ignore[misc]  # the user's class is known only now
        __slots__ = ("durable",)

        def __init__(self, *, update_processor: BaseUpdateProcessor, **arguments: Any) -> None:
            self.durable: Durable | None = None
            super().__init__(update_processor=DurableProcessor(update_processor), **arguments)

        def create_task(self, coroutine: Any, update: object | None = None, *, name: str | None = None) -> Any:
            if self.durable is None or name is None or _NON_BLOCKING not in name:
                return super().create_task(coroutine, update, name=name)
            handout = self.durable.polling.find(update)
            if handout is None:
                return super().create_task(coroutine, update, name=name)
            task = super().create_task(handout.item.witness(coroutine), update, name=name)
            handout.tasks += (task,)
            return task

        async def initialize(self) -> None:
            if self.durable is not None and isinstance(self.persistence, Persistence) and not self.durable.remembers:
                await self.durable.remember()
            await super().initialize()

        def _mark_for_persistence_update(self, **about: Any) -> None:
            # The library marks an update that ran as a task once more at its end. Its data is noted by then, and when
            # the mark is found the next handler of its chat may be halfway: that must not leave with another's ack.
            durable = self.durable
            if durable is not None and durable.just_noted is not None:
                noted, durable.just_noted = durable.just_noted, None
                if about.get("update") is noted:
                    return
            super()._mark_for_persistence_update(**about)

        async def update_persistence(self) -> None:
            durable = self.durable
            if durable is None:
                await super().update_persistence()
                return
            durable.is_persisting += 1
            try:
                await super().update_persistence()
            finally:
                durable.is_persisting -= 1

        async def stop(self) -> None:
            if self.durable is not None and self.running:
                await self.durable.polling.close()
            await super().stop()

        async def shutdown(self) -> None:
            # Ended before it was started: stop() is not called then.
            if self.durable is not None and not self.running:
                await self.durable.polling.close()
            await super().shutdown()
            if self.durable is not None and self.durable.remembers:
                await self.durable.forget()

    DurableApplication.__name__ = DurableApplication.__qualname__ = f"Durable{base.__name__}"
    return DurableApplication


# --- persistence ----------------------------------------------------------------------------------------------------


class Persistence(BasePersistence[Any, Any, Any]):
    """The library's persistence in the inbox's file: one row per user, chat and conversation, committed with the
    update.

    ``builder.persistence(Persistence())``; only with ``durable_application``.
    """

    def __init__(self, store_data: PersistenceInput | None = None) -> None:
        super().__init__(store_data=store_data, update_interval=60)
        self._memories = {what: Memory(f"ptb:{what}") for what in ("user", "chat", "bot", "callback", "conversation")}

    def note_changes(self, app: Any, item: Item) -> list[Exception] | None:
        """Let what ``app.update_persistence()`` would write be committed with this item; None: it has to do that.

        The library makes a copy of everything and a task for each part of it, which costs more than an update. What is
        pickled at once needs neither. The answer is why parts of it cannot be pickled, which are left out, as by the
        library. It does all of it where its private notes look different.
        """
        try:
            chats, users, conversations = _notes_of(app)
        except AttributeError:
            return None
        kinds, errors = self.store_data, list[Exception]()
        if kinds.bot_data:
            self._note("bot", "bot", app.bot_data, item, errors)
        if kinds.callback_data and app.bot.callback_data_cache is not None:
            self._note("callback", "callback", app.bot.callback_data_cache.persistence_data, item, errors)
        if kinds.chat_data:
            self._note_each("chat", chats, app.chat_data, item, errors)
        if kinds.user_data:
            self._note_each("user", users, app.user_data, item, errors)
        for name, states in conversations.items():
            for key, noted in states.pop_accessed_write_items():
                state = noted
                if isinstance(noted, _PendingState):
                    if not noted.done():
                        states.mark_as_accessed(key)
                    cut_off = not noted.done() or noted.task.cancelled()
                    state = noted.old_state if cut_off else noted.resolve()
                data = None if state is None or state is states.DELETED else (name, key, state)
                self._note("conversation", _conversation(name, key), data, item, errors)
        return errors

    def _note_each(
        self, kind: str, noted: "tuple[set[int], set[int]]", data: Any, item: Item, errors: list[Exception]
    ) -> None:
        touched, gone = noted
        for one in touched:
            if one not in gone:
                self._note(kind, str(one), data[one], item, errors)
        for one in gone:
            self._memories[kind].set_with_ack(str(one), None, item)
        touched.clear()
        gone.clear()

    def _note(self, kind: str, key: str, data: Any, item: Item, errors: list[Exception]) -> None:
        try:
            value = None if kind == "conversation" and data is None else self._written(data)
        except Exception as err:  # noqa: BLE001 - whatever the author's objects raise
            errors.append(err)
        else:
            self._memories[kind].set_with_ack(key, value, item)

    async def live_in(self, inbox: Inbox, bot_id: int) -> None:
        """The inbox is open. What was written when the rows did not say whose they are is taken over."""
        await take_over(inbox, {f"ptb:{what}": f"ptb:{bot_id}:{what}" for what in self._memories})
        for what, memory in self._memories.items():
            memory.kind = f"ptb:{bot_id}:{what}"
            await memory.live_in(inbox)

    async def leave(self) -> None:
        """The inbox is about to be closed."""
        for memory in self._memories.values():
            memory.leave()

    async def get_user_data(self) -> dict[int, Any]:
        """As in the base class."""
        return {int(key): self._read(value) for key, value in self._memories["user"].all()}

    async def get_chat_data(self) -> dict[int, Any]:
        """As in the base class."""
        return {int(key): self._read(value) for key, value in self._memories["chat"].all()}

    async def get_bot_data(self) -> Any:
        """As in the base class."""
        found = self._memories["bot"].get("bot")
        return {} if found is None else self._read(found)

    async def get_callback_data(self) -> Any:
        """As in the base class."""
        found = self._memories["callback"].get("callback")
        return None if found is None else self._read(found)

    async def get_conversations(self, name: str) -> dict[Any, Any]:
        """As in the base class."""
        rows = (self._read(value) for _, value in self._memories["conversation"].all())
        return {key: state for conversation, key, state in rows if conversation == name}

    async def update_user_data(self, user_id: int, data: Any) -> None:
        """As in the base class."""
        await self._memories["user"].set(str(user_id), self._written(data))

    async def update_chat_data(self, chat_id: int, data: Any) -> None:
        """As in the base class."""
        await self._memories["chat"].set(str(chat_id), self._written(data))

    async def update_bot_data(self, data: Any) -> None:
        """As in the base class."""
        await self._memories["bot"].set("bot", self._written(data))

    async def update_callback_data(self, data: Any) -> None:
        """As in the base class."""
        await self._memories["callback"].set("callback", self._written(data))

    async def update_conversation(self, name: str, key: Any, new_state: object | None) -> None:
        """As in the base class."""
        value = None if new_state is None else self._written((name, key, new_state))
        await self._memories["conversation"].set(_conversation(name, key), value)

    async def drop_user_data(self, user_id: int) -> None:
        """As in the base class."""
        await self._memories["user"].set(str(user_id), None)

    async def drop_chat_data(self, chat_id: int) -> None:
        """As in the base class."""
        await self._memories["chat"].set(str(chat_id), None)

    async def refresh_user_data(self, user_id: int, user_data: Any) -> None:
        """Nobody else writes to it."""

    async def refresh_chat_data(self, chat_id: int, chat_data: Any) -> None:
        """Nobody else writes to it."""

    async def refresh_bot_data(self, bot_data: Any) -> None:
        """Nobody else writes to it."""

    async def flush(self) -> None:
        """Everything is written when it is changed."""

    def _written(self, data: Any) -> bytes:
        if not data and type(data) is dict:  # nearly all of what the library wants written, because it was looked at
            return _EMPTY
        file = io.BytesIO()
        try:
            _PlainPickler(file, pickle.HIGHEST_PROTOCOL).dump(data)
        except _OfTheLibraryError:
            file = io.BytesIO()
        else:
            return file.getvalue()
        # As PicklePersistence does: a bot inside the data becomes a name for it.
        _BotPickler(self.bot, file, protocol=pickle.HIGHEST_PROTOCOL).dump(data)
        return file.getvalue()

    def _read(self, value: bytes) -> Any:
        return _BotUnpickler(self.bot, io.BytesIO(value)).load()


_PendingState: Final = sys.modules[ConversationHandler.__module__].PendingState  # of a handler with block=False
_EMPTY: Final = pickle.dumps({}, pickle.HIGHEST_PROTOCOL)


class _OfTheLibraryError(Exception):
    """An object of the library's, which it pickles in its own way."""


class _PlainPickler(pickle.Pickler):
    """Writes what the library's own would, as long as nothing of the library's is in it: that asks about each object.

    This one is asked only about objects of classes (:meth:`pickle.Pickler.reducer_override`).
    """

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, TelegramObject):
            raise _OfTheLibraryError
        return NotImplemented


def _notes_of(app: Any) -> "tuple[tuple[set[int], set[int]], tuple[set[int], set[int]], dict[str, Any]]":
    """The library's private notes: which chats and users were touched and are gone, and the conversations."""
    return (
        (app._chat_ids_to_be_updated_in_persistence, app._chat_ids_to_be_deleted_in_persistence),  # noqa: SLF001
        (app._user_ids_to_be_updated_in_persistence, app._user_ids_to_be_deleted_in_persistence),  # noqa: SLF001
        app._conversation_handler_conversations,  # noqa: SLF001
    )


def _conversation(name: str, key: Any) -> str:
    text = f"{name} {key!r}"
    return text if is_key(text) else ascii(text)


# --- the outbox -----------------------------------------------------------------------------------------------------

_SENDING: Final = ("send", "forward", "copy")
_NOT_A_MESSAGE: Final = frozenset({"sendChatAction"})


class _Call(msgspec.Struct):
    """A request as it goes over the wire: the method, and its fields as texts."""

    method: str
    fields: dict[str, str]


class OutboxLimiter(BaseRateLimiter[Any]):
    """The library's hook around every request: messages of handlers go by the inbox's outbox."""

    def __init__(self, users: "BaseRateLimiter[Any] | None", delivery: Delivery) -> None:
        self._users = users
        self._delivery: Delivery = delivery
        self._durable: Durable | None = None
        self._outbox: Outbox | None = None
        self._running: asyncio.Task[None] | None = None

    def serve(self, durable: Durable) -> None:
        """Be the outbox of this application."""
        polling = durable.polling
        self._durable = durable
        self._outbox = Outbox(polling.inbox, f"telegram:{polling.bot_id}", limits=TELEGRAM, delivery=self._delivery)
        durable.outbox = self
        polling.on_open.append(self._open)
        polling.on_close.append(self._close)

    async def initialize(self) -> None:
        """As the user's."""
        if self._users is not None:
            await self._users.initialize()

    async def shutdown(self) -> None:
        """As the user's."""
        if self._users is not None:
            await self._users.shutdown()

    async def process_request(
        self,
        callback: Any,
        args: Any,
        kwargs: dict[str, Any],
        endpoint: str,
        data: dict[str, Any],
        rate_limit_args: Any,
    ) -> Any:
        """Send it once, however often the handler is run; the answer is Telegram's."""
        item = current_item()
        is_message = endpoint.startswith(_SENDING) and endpoint not in _NOT_A_MESSAGE
        if item is not None and is_message and self._outbox is not None and self._running is not None:
            payload = _written(endpoint, data)
            if payload is not None:
                answer = await self._outbox.send(payload, key=_chat(data), item=item)
                return msgspec.json.decode(answer or b"null")
        if self._users is not None:
            return await self._users.process_request(callback, args, kwargs, endpoint, data, rate_limit_args)
        return await callback(*args, **kwargs)

    def put(self, db: Transaction, method: str, **fields: Any) -> int:
        """Promise a message in a transaction; it is sent after the commit: ``put(db, "sendMessage", chat_id=…, …)``."""
        if self._outbox is None:
            raise FeedError("this outbox serves no application yet")
        payload = _written(method, fields)
        if payload is None:
            raise SpecError("method", method, "a message without uploaded files (use a file_id or a URL)")
        return self._outbox.put(db, payload, key=_chat(fields))

    async def _deliver(self, message: Message) -> bytes:
        call = msgspec.json.decode(message.payload, type=_Call)
        return msgspec.json.encode(await self._app().bot._post(call.method, dict(call.fields)))  # noqa: SLF001

    def _app(self) -> Any:
        if self._durable is None:
            raise FeedError("this outbox serves no application yet")
        return self._durable.app

    async def _open(self) -> None:
        if self._outbox is None:
            return
        running = self._outbox.run(self._deliver, concurrency=16)
        self._running = asyncio.get_running_loop().create_task(running, name="feed outbox")

    async def _close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def _written(method: str, fields: dict[str, Any]) -> bytes | None:
    """A request as it is written down; None if it uploads a file, which cannot be."""
    wire = RequestData([RequestParameter.from_input(key, value) for key, value in fields.items()])
    return None if wire.contains_files else msgspec.json.encode(_Call(method, wire.json_parameters))


def _chat(fields: dict[str, Any]) -> str | None:
    chat = fields.get("chat_id")
    return None if chat is None else str(chat)


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
