"""What both Telegram adapters share: where updates come from, who works on which, and how polling ends.

The library (aiogram, python-telegram-bot) keeps its loop, its handlers and its meaning of concurrency; only its
``getUpdates`` is answered from the inbox. Behind it the feed asks Telegram with the library's own client. What the
library was given is remembered until the handler is done:

* *given*: taken from the inbox, the handler has not begun. A stop hands it back; a crash is none of its doing.
* *running*: the handler has begun. A stop waits for it up to the grace, then cancels it and hands it back. One that
  goes on although it was cancelled, at a stop or after ``handler_timeout``, has failed.

Every update leaves exactly once. Losing track of one would keep its chat waiting until the next start, so an adapter
brackets a handler with :meth:`Polling.begin` and :meth:`Polling.end` whatever happens in between.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from everdeck.errors import FeedClosed, PollerConflict, SourceError, SpecError
from everdeck.feed import last_words
from everdeck.feed.consume import Feed
from everdeck.feed.dispatcher import LONG_RUN_SECONDS, Item, Listener
from everdeck.feed.inbox import KEEP_DAYS, Inbox
from everdeck.feed.policy import FeedPolicy
from everdeck.feed.poller_lock import PollerLock, local_suspects
from everdeck.feed.records import Batch, FirstRun, Position, Record

Order: TypeAlias = Literal["none", "chat", "user"] | Callable[[dict[str, Any]], object]
GetUpdates: TypeAlias = Callable[[int, int, int], Awaitable[Any]]
_Update = TypeVar("_Update")

# Below the five seconds that a deck, Docker's ten or systemd's ninety leave between SIGTERM and SIGKILL.
CANCEL_SECONDS: Final = 1.0
MOST_AT_ONCE: Final = 100
READ_AT_MOST: Final = 256
UPDATES_A_BREATH: Final = 64
# How many more objects there may be before the garbage collector looks: as Python has it (700, and 2,000 since 3.13),
# and while bots poll.
USUAL_GARBAGE: Final = 2_000
GARBAGE: Final = 20_000
# The library shows a spinning clock, or a bill, until these are answered: they wait for nothing.
OUT_OF_LINE: Final = frozenset({"callback_query", "inline_query", "shipping_query", "pre_checkout_query"})
# Handlers that let others pass are not limited by the library; this bounds memory, and what comes again after a crash.
MAX_BACKGROUND: Final = 1000

log = logging.getLogger("everdeck.feed")
_encode: Final = msgspec.json.Encoder().encode


def current_item() -> Item | None:
    """The item whose handler is running here, also inside tasks it started; None elsewhere."""
    item = last_words.current.get()
    return item if isinstance(item, Item) else None


def chat_of(update: dict[str, Any]) -> str | None:
    """The key that orders updates: the chat, else the person, else nothing (polls, unknown kinds)."""
    try:
        return str(update["message"]["chat"]["id"])  # nearly always
    except (KeyError, TypeError):
        content: dict[str, Any] = {}
    for part in update.values():  # the only other one is a number, update_id
        if isinstance(part, dict):
            content = part
            break
    chat = content.get("chat")
    if isinstance(chat, dict) and "id" in chat:
        return str(chat["id"])
    # A button press has its chat inside the message and its person outside: the chat wins.
    for holder, who in (
        (content.get("message"), "chat"),
        (content, "voter_chat"),
        (content, "from"),
        (content, "user"),
    ):
        found = holder.get(who) if isinstance(holder, dict) else None
        if isinstance(found, dict) and "id" in found:
            return str(found["id"])
    return None


def user_of(update: dict[str, Any]) -> str | None:
    """The person who did it, else the chat."""
    for part in update.values():
        for who in ("from", "user") if isinstance(part, dict) else ():
            found = part.get(who)
            if isinstance(found, dict) and "id" in found:
                return str(found["id"])
    return chat_of(update)


def key_of(update: dict[str, Any], order: Order, *, one_at_a_time: bool = False) -> str | None:
    """What this update waits behind: nothing, the others of its chat or person, or what the user's function says.

    Where one runs at a time nothing is gained by going out of line, and a button would overtake earlier messages.
    """
    if order == "none" or (not one_at_a_time and not OUT_OF_LINE.isdisjoint(update)):
        return None
    if order == "chat":
        return chat_of(update)
    if order == "user":
        return user_of(update)
    try:
        found = order(update) if callable(order) else None
    except Exception as err:  # noqa: BLE001 - the user's function on data from outside
        log.warning("update %s: order= raised %s: %s", update.get("update_id"), type(err).__name__, err)
        return None
    return None if found is None else str(found)


@dataclass(slots=True)
class Asked:
    """What the library asks ``getUpdates`` with.

    Short polling becomes a wait of one second: the library waits for the inbox, and Telegram punishes who spins.
    """

    timeout: float | None = 10
    allowed_updates: list[str] | None = None

    @property
    def timeout_seconds(self) -> int:
        """Whole seconds, at least one."""
        return max(1, int(self.timeout or 0))


class Canceller(Enum):
    """Whose doing it is that a handler ended with CancelledError."""

    NOBODY = "it awaited something that was cancelled"
    TIMEOUT = "it ran for longer than handler_timeout"
    STOP = "the bot is stopping"
    AUTHOR = "the program has cancelled the handler's task, as one does to debounce"


class Handout(msgspec.Struct, eq=False):
    """One update in the library's hands."""

    item: Item
    update: object
    state: Literal["given", "running", "background", "returned"] = "given"
    task: "asyncio.Future[Any] | None" = None
    tasks: "tuple[asyncio.Future[Any], ...]" = ()
    error: BaseException | None = None
    cancelled: bool = False
    late: bool = False
    slow: bool = False


class _SpareCollections:
    """While bots poll, the garbage collector leaves out what was there when the first of them began, and looks rarely.

    A library is 200,000 objects that never die. A full collection looks at each of them, and a bot that handles many
    updates has one every few thousand: a tenth of its time (seen with aiogram 3.31 on CPython 3.11). An update is a
    hundred objects for as long as it is worked on, so looking after every 700 finds nothing but those: another
    thirtieth. Whoever has frozen, tuned or switched off the collector himself knows better.
    """

    def __init__(self) -> None:
        self._bots = 0
        self._ours = False
        self._thresholds: tuple[int, int, int] | None = None

    def begin(self) -> None:
        """A bot begins to poll."""
        self._bots += 1
        if self._bots == 1 and gc.isenabled() and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._ours = True
            if gc.get_threshold()[0] <= USUAL_GARBAGE:
                self._thresholds = gc.get_threshold()
                gc.set_threshold(GARBAGE, *self._thresholds[1:])
            _give_back_memory()

    def end(self) -> None:
        """A bot has ended."""
        self._bots -= 1
        if not self._bots and self._ours:
            self._ours = False
            gc.unfreeze()
            if self._thresholds is not None and gc.get_threshold()[0] == GARBAGE:
                gc.set_threshold(*self._thresholds)
            self._thresholds = None


_spare_collections: Final = _SpareCollections()


def _give_back_memory() -> None:
    """What imports have used and freed is ours until somebody says that we need it no more (malloc_trim(3))."""
    with contextlib.suppress(AttributeError):  # musl has nothing to give back
        ctypes.CDLL(None).malloc_trim(0)


class JustRead(Generic[_Update]):
    """What was made of some bytes a moment ago, by the bytes object itself; of many, the last."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[bytes, _Update]] = {}  # the bytes too: while they live nobody else has their id

    def keep(self, payloads: Sequence[bytes], made: Sequence[_Update]) -> None:
        """These were read, and this is what they say."""
        self._made.update(zip(map(id, payloads), zip(payloads, made, strict=True), strict=True))
        while len(self._made) > READ_AT_MOST:
            del self._made[next(iter(self._made))]

    def take(self, payload: bytes) -> _Update | None:
        """What ``payload`` says, if that is still known; it is given once."""
        found = self._made.pop(id(payload), None)
        return None if found is None else found[1]


class TelegramSource:
    """A feed source over the raw ``getUpdates`` of a library's client.

    ``is_conflict`` knows the library's error for a 409. ``every`` is the least time between two questions.
    """

    def __init__(
        self,
        bot_id: int,
        get_updates: GetUpdates,
        is_conflict: Callable[[Exception], bool],
        order: Order = "none",
        *,
        one_at_a_time: bool = False,
    ) -> None:
        self.name = f"telegram:{bot_id}"
        self.asked = Asked()
        self.order: Order = order
        self.one_at_a_time = one_at_a_time
        self.every = 0.0
        self.on_conflict: Callable[[Exception], Awaitable[None]] | None = None
        self.counting = False
        self._found_waiting = 0
        self._get_updates = get_updates
        self._is_conflict = is_conflict
        self._may_ask = asyncio.Event()
        self._not_before = 0.0
        self._just_read = JustRead[dict[str, Any]]()  # nearly always what is stored is not read again

    def ask(self, asked: Asked) -> None:
        """The library has begun to poll, with these parameters; before that Telegram is not asked."""
        self.asked = asked
        self._may_ask.set()

    async def fetch(self, position: Position) -> Batch:
        """The next batch, waiting for it as long as the library would."""
        await self._may_ask.wait()
        loop = asyncio.get_running_loop()
        if self.every > 0:
            await asyncio.sleep(max(0.0, self._not_before - loop.time()))  # noqa: TID251 - an interval is time
        raw = await self._call(position.offset, self.asked.timeout_seconds, MOST_AT_ONCE)
        self._not_before = loop.time() + self.every
        records = [self.record(update) for update in raw]
        self._just_read.keep([record.payload for record in records], raw)
        if self.counting:
            self._count(len(records))
        cursor = records[-1].cursor_after if records else None
        return Batch(records, cursor=cursor, asked=position.offset)

    async def skip_history(self) -> int | None:
        """Let Telegram forget all but the last update, and say where the new begins."""
        await self._may_ask.wait()
        first = await self._call(0, 0, 1)
        raw = await self._call(-1, 0, MOST_AT_ONCE)
        left = int(self.record(raw[-1]).id) - int(self.record(first[0]).id) + 1 if raw and first else len(raw)
        log.info("%s: first run, %d updates were waiting; they are left (first_run='skip')", self.name, left)
        return int(self.record(raw[-1]).cursor_after) if raw else None

    def raw(self, payload: bytes) -> Any:
        """The update that is stored like this. What was kept a moment ago is not read again."""
        found = self._just_read.take(payload)
        return msgspec.json.decode(payload) if found is None else found

    def record(self, update: Any, payload: bytes | None = None, *, keep: bool = False) -> Record:
        """An update as it is stored: its JSON as it came, if that is at hand. ``keep``: see :meth:`raw`."""
        update_id = update.get("update_id") if isinstance(update, dict) else None
        if type(update_id) is not int:
            raise SourceError(f"{self.name}: an update without an id: {str(update)[:200]}")
        key = None if self.order == "none" else key_of(update, self.order, one_at_a_time=self.one_at_a_time)
        if payload is None:
            payload = _encode(update)
        if keep:
            self._just_read.keep((payload,), (update,))
        return Record(update_id, payload, key)

    def _count(self, came: int) -> None:
        """The history ends with the first answer that is not full."""
        self._found_waiting += came
        if came < MOST_AT_ONCE:
            self.counting = False
            log.info("%s: first run, %d updates were waiting; they are taken", self.name, self._found_waiting)

    async def _call(self, offset: int, timeout_seconds: int, limit: int) -> list[Any]:
        try:
            raw = await self._get_updates(offset, timeout_seconds, limit)
        except Exception as error:
            if not self._is_conflict(error):
                raise
            if self.on_conflict is not None:
                await self.on_conflict(error)
            raise PollerConflict(str(error)) from error
        if not isinstance(raw, list | tuple):
            raise SourceError(f"{self.name}: getUpdates answered with {type(raw).__name__}, not with a list")
        return list(raw)


class Polling:
    """One bot's polling from open to close, for an adapter."""

    def __init__(
        self,
        *,
        library: str,
        token: str,
        path: str | PathLike[str],
        get_updates: GetUpdates,
        is_conflict: Callable[[Exception], bool],
        first_run: FirstRun,
        policy: FeedPolicy,
        order: Order,
        on_event: Listener | None,
        server: str | None = None,
        slot_seconds: float = LONG_RUN_SECONDS,
        one_at_a_time: bool = False,
        keep_days: float = KEEP_DAYS,
    ) -> None:
        if first_run not in {"skip", "take"}:
            raise SpecError("first_run", first_run, "skip | take")
        if not callable(order) and order not in {"none", "chat", "user"}:
            raise SpecError("order", order, "none | chat | user | a function of the update")
        self._library = library
        self.token = token
        self.bot_id = _bot_id(token)
        self.path = path
        self.policy = policy
        self.grace_seconds: float | None = policy.grace_seconds
        self.on_trouble: Callable[[Exception], None] | None = None
        self.on_slow: Callable[[Handout], None] | None = None
        self._get_updates = get_updates
        self._is_conflict = is_conflict
        self._order: Order = order
        self.one_at_a_time = one_at_a_time
        self._feed_options: dict[str, Any] = {
            "first_run": first_run,
            "policy": policy,
            "on_event": on_event,
            "on_timeout": self.too_late,
            "on_slow": self.too_slow,
            "slot_seconds": slot_seconds,
            "one_at_a_time": one_at_a_time,
        }
        self._server = server
        self.inbox = Inbox(path, keep_days=keep_days)
        self.on_open: list[Callable[[], Awaitable[None]]] = []
        self.on_close: list[Callable[[], Awaitable[None]]] = []
        self._first_run = first_run
        self._trouble: asyncio.Future[Exception] | None = None
        self._source: TelegramSource | None = None
        self._feed: Feed | None = None
        self._lock: PollerLock | None = None
        self._closing = False
        self._handouts: dict[int, Handout] = {}
        self.asking: asyncio.Task[Any] | None = None
        self._busy = 0
        self._since_breath = 0
        self._changed = asyncio.Event()
        self._most = 0  # whoever waits for room is woken when the library has fewer than so many
        self._room = asyncio.Event()

    # --- the life of it ---------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Between open and close."""
        return self._feed is not None

    @property
    def feed(self) -> Feed:
        """The feed while it is open."""
        if self._feed is None:
            raise FeedClosed(f"the feed of bot {self.bot_id} is not open")
        return self._feed

    async def open(self) -> None:
        """Be the one poller of this token and recover the inbox. Telegram is not asked before :meth:`ask`."""
        if self._feed is not None:
            return
        lock = PollerLock(self.token)
        lock.acquire()
        try:
            source = TelegramSource(
                self.bot_id, self._get_updates, self._is_conflict, self._order, one_at_a_time=self.one_at_a_time
            )
            source.on_conflict = self._report_conflict
            feed = Feed(source, inbox=self.inbox, **self._feed_options)
            feed.on_trouble = self._hear_trouble
            await feed.open()
            source.counting = feed.is_first_run and self._first_run == "take"
        except BaseException:
            lock.release()
            raise
        _spare_collections.begin()
        self._source, self._feed, self._lock, self._closing = source, feed, lock, False
        self._changed = asyncio.Event()  # a new one: each start may have an event loop of its own
        self._room = asyncio.Event()
        for act in self.on_open:
            await act()

    @property
    def asked(self) -> Asked:
        """What the library asks with."""
        return self._source.asked if self._source is not None else Asked()

    def ask(self, asked: Asked, *, every: float = 0.0) -> None:
        """Let the feed ask Telegram, with the library's own parameters."""
        if self._source is not None and self._feed is not None:
            self._source.every = every
            self._source.ask(asked)
            self._feed.ask_again()

    async def accept(self, update: dict[str, Any], payload: bytes | None = None, *, keep: bool = False) -> None:
        """An update that Telegram has brought (a webhook): when this returns, Telegram may forget it.

        With ``keep`` :meth:`raw` need not read it again.
        """
        if self._source is None:
            raise FeedClosed(f"the feed of bot {self.bot_id} is not open")
        await self.feed.stream.add(self._source.record(update, payload, keep=keep))

    async def close(self) -> None:
        """Hand back what has not begun, wait for what has, then let go. Nothing is lost, whatever happens here."""
        feed, lock = self._feed, self._lock
        if feed is None or self._closing:
            return
        self._closing = True
        feed.stopping()
        try:
            for handout in [one for one in self._handouts.values() if one.state == "given"]:
                handout.state = "returned"
                self._busy -= 1
                handout.item.settle_as_handed_back()
            if not await self._all_ended(self.grace_seconds):
                for handout in self._running():
                    handout.cancelled = True
                    if handout.task is not None:
                        handout.task.cancel()
                await self._all_ended(CANCEL_SECONDS)
        finally:
            try:
                for act in self.on_close:
                    await act()
                await feed.close(grace_seconds=0, cancelled=True)
            finally:
                _spare_collections.end()
                self._feed = self._source = self._lock = None
                # What was returned may still lie in a queue of the library's, and must not run when it comes out.
                self._handouts = {key: one for key, one in self._handouts.items() if one.state == "returned"}
                self._busy = 0
                if lock is not None:
                    lock.release()

    # --- what the library is given ----------------------------------------------------------------------------

    async def take(self, most: int | None, *, raise_trouble: bool = False) -> list[Item]:
        """The next items. Once polling ends nobody gets any more: waits to be cancelled.

        With ``raise_trouble`` the error of a source that fails is raised to whoever waits in vain: the library has its
        own ways to log it and to wait.
        """
        try:
            if raise_trouble:
                return await self._take_or_raise(most)
            return await self.feed.take(most, begin=False)
        except FeedClosed as error:
            if self._feed is not None and not self._closing:
                # Both libraries would catch an ordinary error here and ask again for ever.
                raise SystemExit(f"the feed of bot {self.bot_id} cannot go on: {error}") from error
            await asyncio.get_running_loop().create_future()
            raise

    async def _take_or_raise(self, most: int | None) -> list[Item]:
        loop = asyncio.get_running_loop()
        trouble: asyncio.Future[Exception] = loop.create_future()
        self._trouble = trouble
        taking = loop.create_task(self.feed.take(most, begin=False))
        try:
            waited: list[asyncio.Future[Any]] = [taking, trouble]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                return taking.result()
            raise trouble.result()  # noqa: TRY301 - it is the library's
        except BaseException:
            taking.cancel()
            for item in await asyncio.gather(taking, return_exceptions=True):
                for given in item if isinstance(item, list) else ():
                    given.settle_as_handed_back()
            raise
        finally:
            self._trouble = None

    def _hear_trouble(self, error: Exception) -> None:
        if self.on_trouble is not None:
            self.on_trouble(error)
        if self._trouble is not None and not self._trouble.done():
            cause = error.__cause__
            is_ours = isinstance(error, PollerConflict) and isinstance(cause, Exception)
            self._trouble.set_result(cause if is_ours else error)  # type: ignore[arg-type]  # asked in the line above

    def raw(self, item: Item) -> Any:
        """Its update, as Telegram sent it. Once: whoever gets it may change it."""
        return item.value if self._source is None else self._source.raw(item.payload)

    def is_breath_due(self) -> bool:
        """Is it time for others to have a turn? Where handlers never wait, the pump could not get ahead of them.

        Asked after each update; if it is, whoever asked says ``await asyncio.sleep(0)``.
        """
        self._since_breath += 1
        if self._since_breath < UPDATES_A_BREATH:
            return False
        self._since_breath = 0
        return True

    async def give_each(self, items: Sequence[Item], read: Callable[[Item], _Update]) -> list[_Update]:
        """What the library gets of these items. What ``read`` raises on is set aside: it would raise again."""
        updates, handouts = [], self._handouts
        for item in items:
            if self.is_breath_due():
                await asyncio.sleep(0)  # noqa: TID251 - not a wait
            try:
                update = read(item)
            except Exception as error:
                log.exception("update %s cannot be read by this %s; it is set aside", item.id, self._library)
                await settled(item.set_aside(error))
            else:
                handouts[id(update)] = Handout(item, update)
                self._busy += 1
                updates.append(update)
        return updates

    def find(self, update: object) -> Handout | None:
        """The handout of an update; of its equal if the library has made a copy."""
        handout = self._handouts.get(id(update))
        if handout is None:
            update_id = getattr(update, "update_id", None)
            for other in self._handouts.values():
                if update_id is not None and other.item.id == update_id:
                    return other
        return handout

    def begin(self, update: object) -> Handout | None:
        """A handler is about to run.

        None: not ours, or fed again by a handler that is already running. State ``returned``: it must not run.
        """
        handout = self._handouts.get(id(update)) or self.find(update)
        if handout is None:
            return None
        if handout.state != "given":
            if handout.state != "returned":
                return None
            self.end(handout)
            return handout
        handout.state = "running"
        handout.task = asyncio.current_task()
        handout.item.begin()
        return handout

    def too_slow(self, item: Item) -> None:
        """Its handler has run for long: others must not wait for its place."""
        handout = self.handout_of(item)
        if handout is not None and self.on_slow is not None:
            self.on_slow(handout)

    def too_late(self, item: Item) -> None:
        """Its handler has run for longer than it may: cancel it, which is a failed attempt."""
        handout = self.handout_of(item)
        if handout is not None and handout.task is not None and not handout.late:
            handout.late = True
            handout.task.cancel()

    def who_cancelled(self, handout: Handout, task: "asyncio.Future[Any] | None") -> Canceller:
        """Whose doing it is that the handler, which runs in this task, was cancelled.

        Only what a stop cancels comes again. What the author's program cancels is over, as in the library alone:
        brought again, it would cancel its successor.
        """
        if handout.late:
            return Canceller.TIMEOUT
        if not isinstance(task, asyncio.Task) or not task.cancelling():
            return Canceller.NOBODY
        # Where the library handles updates in its own loop, whoever cancels that task ends the bot.
        in_loop = self.one_at_a_time or task is self.asking
        if handout.cancelled or in_loop or self._closing or self._feed is None or self._feed.is_ending:
            return Canceller.STOP
        return Canceller.AUTHOR

    def to_background(self, handout: Handout) -> None:
        """The rest of the work goes on, and no longer holds back its chat nor others."""
        handout.state = "background"
        self._busy -= 1
        handout.item.release()
        self._changed.set()
        self._room.set()

    def end(self, handout: Handout) -> None:
        """The item has its outcome."""
        if self._handouts.pop(id(handout.update), None) is not None and handout.state in {"given", "running"}:
            self._busy -= 1
        self._changed.set()
        if self._busy < self._most:
            self._room.set()

    def handout_of(self, item: Item) -> Handout | None:
        """The handout of an item, if the library still has it."""
        return next((one for one in self._handouts.values() if one.item is item), None)

    @property
    def is_one_alone(self) -> bool:
        """Is there at most one handler at work, so that nobody has to be told apart after a crash?"""
        return self.one_at_a_time and len(self._handouts) == self._busy

    def busy(self) -> int:
        """How many updates the library has that it has not finished, those in the background not counted."""
        return self._busy

    async def until_less_busy_than(self, most: int) -> None:
        """Wait until the library can begin another one, and the background has room for it."""
        while self._busy >= most or len(self._handouts) >= most + MAX_BACKGROUND:
            self._most = most
            self._room.clear()
            await self._room.wait()

    # --- helpers ----------------------------------------------------------------------------------------------

    def _running(self) -> list[Handout]:
        return [one for one in self._handouts.values() if one.state in {"running", "background"}]

    async def _all_ended(self, seconds: float | None) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self._running():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _report_conflict(self, error: Exception) -> None:
        # It reads every process's environment, which takes a while on a busy machine: not in the loop.
        suspects = [
            msgspec.to_builtins(suspect)
            for suspect in await asyncio.to_thread(local_suspects, self.token, self._server)
        ]
        self.feed.event("poller-conflict", bot=self.bot_id, error=str(error), suspects=suspects)


def forgive(handout: Handout) -> None:
    """The cancellation for taking too long is over: the task may be the library's loop, and serves others next."""
    task = asyncio.current_task()
    if handout.late and task is not None and task.cancelling():
        task.uncancel()


async def settled(outcome: Awaitable[None]) -> None:
    """Wait for an outcome to be committed. After the feed was closed it was handed back, which is as good."""
    try:
        await outcome
    except FeedClosed:
        log.debug("an outcome came after the feed was closed; the update comes again")


def _bot_id(token: str) -> int:
    head = token.partition(":")[0]
    if not head.isdigit():
        raise SpecError("token", "<hidden>", "a bot token: the bot's number, a colon, a secret")
    return int(head)
