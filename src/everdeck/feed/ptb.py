"""python-telegram-bot without losing updates: ``durable_application(builder, "bot.db")``, then ``app.run_polling()``.

python-telegram-bot confirms a batch to Telegram as soon as it is in a queue in memory, so whatever is queued when the
process ends is lost. Here the updater's ``get_updates`` is answered from a durable inbox, with no more updates than the
application can begin, and an update is finished only when its handlers are. The seams, all of them public but the two
that are marked below:

* a subclass of the application (``builder.application_class``) hands in a wrapping update processor, keeps track of
  the tasks of ``block=False`` handlers, and waits for work in ``stop()``;
* a subclass of ``Updater`` opens the inbox in ``start_polling`` and polls with a *tap*: the bot, but for one method;
* an error handler, the first of all, notices errors that nobody else handles: the library only logs those.

Works with python-telegram-bot 21.0 and later (tested with 21.0 and 22.8).
"""

import asyncio
import logging
from datetime import timedelta
from os import PathLike
from typing import Any, Final

from telegram import Update
from telegram.error import Conflict
from telegram.ext import Application, BaseUpdateProcessor, ExtBot, PicklePersistence, Updater

from everdeck.feed.botapi import Asked, Handout, Order, Polling, current_item, settled, working_on
from everdeck.feed.dispatcher import Item, Listener
from everdeck.feed.policy import DEFAULT, FeedPolicy, Retry
from everdeck.feed.records import Delivery, FirstRun

__all__ = ["current_item", "durable_application"]

# The name that Application.process_update gives to the task of a handler with block=False. Tasks that users start
# themselves are theirs: one that runs for ever must not keep its update from being finished.
_NON_BLOCKING: Final = ":process_update_non_blocking:"

log = logging.getLogger("everdeck.feed")


def durable_application(
    builder: Any,
    path: str | PathLike[str],
    *,
    first_run: FirstRun = "skip",
    max_attempts: int = DEFAULT.max_attempts,
    retry: Retry | None = None,
    grace_seconds: float = DEFAULT.grace_seconds,
    order: Order = "chat",
    delivery: Delivery = DEFAULT.delivery,
    persist_before_ack: bool = True,
    on_event: Listener | None = None,
) -> "Application[Any, Any, Any, Any, Any, Any]":
    """Build the application so that its polling loses nothing; use it instead of ``builder.build()``.

    ``path`` is the inbox (SQLite). ``first_run`` says what happens to updates that were waiting before the inbox
    existed: ``"skip"`` or ``"take"`` them. ``concurrent_updates`` of the builder keeps its meaning; with it,
    ``order="chat"`` runs the updates of one chat one after another and ``"none"`` lets them run together. A handler
    that raises while the application has no error handler of the user's is tried ``max_attempts`` times, with the waits
    of ``retry``; then the update is a dead letter. With ``persist_before_ack`` the persistence is written before an
    update is finished instead of every 60 seconds, so a conversation is never behind its updates.

    Handlers reach ``item.transaction()`` by ``current_item()``.
    """
    given = builder._application_class  # noqa: SLF001 - the builder has no getter; a DefaultValue unless the user set it
    base = given if isinstance(given, type) else Application
    builder.application_class(_durable_class(base), builder._application_kwargs)  # noqa: SLF001 - as above
    app = builder.build()
    if type(app.updater) is not Updater:
        raise TypeError(f"durable_application polls with an updater of its own, so it cannot use {app.updater!r}")
    durable = Durable(
        app,
        persist_before_ack=persist_before_ack,
        path=path,
        first_run=first_run,
        policy=FeedPolicy(max_attempts, app.concurrent_updates, delivery, retry or DEFAULT.retry, grace_seconds),
        order=order,
        on_event=on_event,
    )
    app.updater = DurableUpdater(durable, app.update_queue)
    app.update_processor.durable = app.durable = durable
    app.add_error_handler(durable.note_error, block=True)
    return app  # type: ignore[no-any-return]  # the builder is generic in six ways and Any in all of them here


class Durable:
    """The adapter between one application and one inbox. ``polling.feed`` is the feed while polling runs."""

    def __init__(self, app: Any, *, persist_before_ack: bool, **options: Any) -> None:
        self.app = app
        self.polling = Polling(
            token=app.bot.token,
            get_updates=self._get_raw_updates,
            is_conflict=lambda error: isinstance(error, Conflict),
            **options,
        )
        self._persist_before_ack = persist_before_ack
        self._persisting = asyncio.Lock()
        self._persist_asked = 0
        self._persist_done = 0
        self._poll_arguments: dict[str, Any] = {}
        self._finishers: set[asyncio.Task[None]] = set()

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
        self.polling.ask(Asked(seconds, None if allowed is None else list(allowed)))
        limit = self.app.concurrent_updates
        await self.polling.until_less_busy_than(limit)
        items = await self.polling.take(limit - self.polling.busy())
        updates = [update for item in items if (update := await self._parsed(item)) is not None]
        return tuple(updates)

    async def _parsed(self, item: Item) -> Update | None:
        bot = self.app.bot
        try:
            update = Update.de_json(item.value, bot)
            if isinstance(bot, ExtBot):
                bot.insert_callback_data(update)
        except Exception as error:
            log.exception("update %s cannot be read by this python-telegram-bot; it is set aside", item.id)
            await settled(item.set_aside(error))
            return None
        self.polling.give(update, item)
        return update

    async def _get_raw_updates(self, offset: int, timeout_seconds: int) -> Any:
        bot = self.app.bot
        data = {"offset": offset, "timeout": timeout_seconds, "allowed_updates": self.polling.asked.allowed_updates}
        arguments = dict(self._poll_arguments)
        patience = arguments.pop("read_timeout", None)
        if not isinstance(patience, int | float):
            patience = bot._request[0].read_timeout or 0  # noqa: SLF001 - as Bot.get_updates does; there is no getter
        # Bot.get_updates parses the whole batch at once; this is the call inside of it.
        return await bot._post("getUpdates", data, read_timeout=patience + timeout_seconds, **arguments)  # noqa: SLF001

    # --- the handlers -----------------------------------------------------------------------------------------

    async def process(self, update: object, work: Any, coroutine: Any) -> None:
        """Run the handlers of one update (``work``, which awaits ``coroutine``) and give its item an outcome."""
        handout = self.polling.begin(update)
        if handout is None:
            await work
            return
        if handout.state == "returned":
            work.close()
            coroutine.close()
            return
        try:
            with working_on(handout.item):
                await (work if self.app.concurrent_updates > 1 else self._alone(handout, work))
        except asyncio.CancelledError:
            await self._end(handout, cancelled=True)
            if not handout.cancelled:
                raise
            # We did it ourselves, and stop here: before 22 the library counts an update only if this returns.
            _uncancel()
        except Exception as error:
            handout.error = error
            await self._end(handout)
            raise
        else:
            coroutine.close()  # a processor of the user's may have decided not to run it; that is an outcome too
            if all(task.done() for task in handout.tasks):
                await self._end(handout)
            else:
                self.polling.to_background(handout)
                finisher = asyncio.get_running_loop().create_task(self._end_later(handout))
                self._finishers.add(finisher)
                finisher.add_done_callback(self._finishers.discard)

    @staticmethod
    async def _alone(handout: Handout, work: Any) -> None:
        """Without concurrency the current task is the library's loop: at the end of the grace only we are cancelled."""
        handout.task = asyncio.ensure_future(work)
        await handout.task

    async def _end_later(self, handout: Handout) -> None:
        handout.task = asyncio.gather(*handout.tasks, return_exceptions=True)
        try:
            await handout.task
        except asyncio.CancelledError:
            await self._end(handout, cancelled=True)
        else:
            await self._end(handout)

    async def _end(self, handout: Handout, *, cancelled: bool = False) -> None:
        item = handout.item
        try:
            if cancelled or any(task.cancelled() for task in handout.tasks):
                for task in handout.tasks:
                    task.cancel()
                await settled(item.hand_back())
            elif handout.error is not None:
                await settled(item.failed(handout.error))
            else:
                await self._persisted()
                # Not waited for: its slot and its chat are free only when it is committed, and a stop commits it.
                item.settle_as_done()
        finally:
            self.polling.end(handout)

    async def note_error(self, update: object, context: Any) -> None:
        """The first error handler: an error that no handler of the user's will see makes its update fail."""
        if any(callback != self.note_error for callback in self.app.error_handlers):
            return
        handout = self.polling.find(update) if isinstance(update, Update) else None
        if handout is not None:
            handout.error = context.error
        log.error("No error handlers are registered, logging exception.", exc_info=context.error)

    async def _persisted(self) -> None:
        """Write the persistence; those who finish while it is being written share the next writing."""
        persistence = self.app.persistence
        if persistence is None or not self._persist_before_ack:
            return
        self._persist_asked += 1
        mine = self._persist_asked
        async with self._persisting:
            if self._persist_done >= mine:
                return
            covers = self._persist_asked
            await self.app.update_persistence()
            # flush() of others may close their database; this one only writes, and with on_flush nothing else does.
            if isinstance(persistence, PicklePersistence) and persistence.on_flush:
                await persistence.flush()
            self._persist_done = covers


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

    async def start_polling(self, *positional: Any, **arguments: Any) -> "asyncio.Queue[object]":
        """As in the base class; raises PollerConflict if another process polls with this token."""
        if arguments.get("drop_pending_updates"):
            log.warning("drop_pending_updates lets Telegram forget what came while the bot was down")
        await self._durable.polling.open()
        try:
            return await super().start_polling(*positional, **arguments)
        except BaseException:
            await self._durable.polling.close()
            raise


class DurableProcessor(BaseUpdateProcessor):
    """The user's update processor, with an outcome for the item afterwards."""

    __slots__ = ("durable", "inner")

    def __init__(self, inner: BaseUpdateProcessor) -> None:
        super().__init__(inner.max_concurrent_updates)
        self.inner = inner
        self.durable: Durable | None = None

    async def do_process_update(self, update: object, coroutine: Any) -> None:
        """Run the user's processor and settle the item."""
        work = self.inner.do_process_update(update, coroutine)
        if self.durable is None:
            await work
        else:
            await self.durable.process(update, work, coroutine)

    async def initialize(self) -> None:
        """As the user's."""
        await self.inner.initialize()

    async def shutdown(self) -> None:
        """As the user's."""
        await self.inner.shutdown()


def _durable_class(base: Any) -> Any:
    class DurableApplication(base):  # type: ignore[misc]  # the user's class is known only now
        __slots__ = ("durable",)

        def __init__(self, *, update_processor: BaseUpdateProcessor, **arguments: Any) -> None:
            self.durable: Durable | None = None
            super().__init__(update_processor=DurableProcessor(update_processor), **arguments)

        def create_task(self, coroutine: Any, update: object | None = None, *, name: str | None = None) -> Any:
            task = super().create_task(coroutine, update, name=name)
            if self.durable is not None and name is not None and _NON_BLOCKING in name:
                handout = self.durable.polling.find(update)
                if handout is not None:
                    handout.tasks.append(task)
            return task

        async def stop(self) -> None:
            if self.durable is not None and self.running:
                await self.durable.polling.close()
            await super().stop()

        async def shutdown(self) -> None:
            # Ended before it was started: stop() is not called then.
            if self.durable is not None and not self.running:
                await self.durable.polling.close()
            await super().shutdown()

    DurableApplication.__name__ = DurableApplication.__qualname__ = f"Durable{base.__name__}"
    return DurableApplication


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
