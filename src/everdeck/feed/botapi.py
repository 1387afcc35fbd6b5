"""What both Telegram adapters share: where updates come from, who works on which, and how polling ends.

The library (aiogram, python-telegram-bot) keeps its loop, its handlers and its meaning of concurrency; only its
``getUpdates`` is answered from the inbox. Behind it the feed asks Telegram with the library's own client. What the
library was given is remembered until the handler is done:

* *given*: taken from the inbox, the handler has not begun. A stop hands it back, uncounted.
* *running*: the handler has begun. A stop waits for it up to the grace, then cancels it and hands it back.

Every update leaves exactly once. Losing track of one would keep its chat waiting until the next start, so an adapter
brackets a handler with :meth:`Polling.begin` and :meth:`Polling.end` whatever happens in between.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Final, Literal, TypeAlias

import msgspec

from everdeck.errors import FeedClosed, PollerConflict, SourceError, SpecError
from everdeck.feed.consume import Feed
from everdeck.feed.dispatcher import Item, Listener
from everdeck.feed.inbox import Inbox
from everdeck.feed.policy import FeedPolicy
from everdeck.feed.poller_lock import PollerLock, local_suspects
from everdeck.feed.records import Batch, FirstRun, Position, Record

Order: TypeAlias = Literal["chat", "none"]
GetUpdates: TypeAlias = Callable[[int, int], Awaitable[Any]]

# Below the five seconds that a deck, Docker's ten or systemd's ninety leave between SIGTERM and SIGKILL.
CANCEL_SECONDS: Final = 1.0
# Handlers that let others pass are not limited by the library; this bounds memory, and what comes again after a crash.
MAX_BACKGROUND: Final = 1000

log = logging.getLogger("everdeck.feed")
_current: ContextVar[Item | None] = ContextVar("everdeck_item", default=None)


def current_item() -> Item | None:
    """The item whose handler is running here, also inside tasks it started; None elsewhere."""
    return _current.get()


class working_on:  # noqa: N801 - used like a function; a class because it runs for every update and this is 5 µs less
    """Make ``item`` the current one inside a ``with`` block."""

    __slots__ = ("_item", "_token")

    def __init__(self, item: Item) -> None:
        self._item = item

    def __enter__(self) -> None:
        self._token = _current.set(self._item)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def chat_of(update: dict[str, Any]) -> str | None:
    """The key that orders updates: the chat, else the person, else nothing (polls, unknown kinds)."""
    content = next((part for kind, part in update.items() if kind != "update_id" and isinstance(part, dict)), {})
    # A button press has its chat inside the message and its person outside: the chat wins.
    for holder, who in (
        (content, "chat"),
        (content.get("message"), "chat"),
        (content, "voter_chat"),
        (content, "from"),
        (content, "user"),
    ):
        found = holder.get(who) if isinstance(holder, dict) else None
        if isinstance(found, dict) and "id" in found:
            return str(found["id"])
    return None


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


@dataclass(eq=False, slots=True)
class Handout:
    """One update in the library's hands."""

    item: Item
    update: object
    state: Literal["given", "running", "background", "returned"] = "given"
    task: "asyncio.Future[Any] | None" = None
    tasks: "list[asyncio.Future[Any]]" = field(default_factory=list)
    error: BaseException | None = None
    cancelled: bool = False


class TelegramSource:
    """A feed source over the raw ``getUpdates`` of a library's client.

    ``is_conflict`` knows the library's error for a 409.
    """

    def __init__(self, bot_id: int, get_updates: GetUpdates, is_conflict: Callable[[Exception], bool]) -> None:
        self.name = f"telegram:{bot_id}"
        self.asked = Asked()
        self.order: Order = "chat"
        self.on_conflict: Callable[[Exception], Awaitable[None]] | None = None
        self._get_updates = get_updates
        self._is_conflict = is_conflict
        self._may_ask = asyncio.Event()

    def ask(self, asked: Asked) -> None:
        """The library has begun to poll, with these parameters; before that Telegram is not asked."""
        self.asked = asked
        self._may_ask.set()

    async def fetch(self, position: Position) -> Batch:
        """The next batch, waiting for it as long as the library would."""
        raw = await self._call(position.offset, self.asked.timeout_seconds)
        records = [self._record(update) for update in raw]
        cursor = records[-1].cursor_after if records else None
        return Batch(records, cursor=cursor, asked=position.offset)

    async def skip_history(self) -> int | None:
        """Let Telegram forget all but the last update, and say where the new begins."""
        raw = await self._call(-1, 0)
        return int(self._record(raw[-1]).cursor_after) if raw else None

    async def _call(self, offset: int, timeout_seconds: int) -> list[Any]:
        await self._may_ask.wait()
        try:
            raw = await self._get_updates(offset, timeout_seconds)
        except Exception as error:
            if not self._is_conflict(error):
                raise
            if self.on_conflict is not None:
                await self.on_conflict(error)
            raise PollerConflict(str(error)) from error
        if not isinstance(raw, list | tuple):
            raise SourceError(f"{self.name}: getUpdates answered with {type(raw).__name__}, not with a list")
        return list(raw)

    def _record(self, update: Any) -> Record:
        update_id = update.get("update_id") if isinstance(update, dict) else None
        if type(update_id) is not int:
            raise SourceError(f"{self.name}: an update without an id: {str(update)[:200]}")
        key = chat_of(update) if self.order == "chat" else None
        return Record(update_id, msgspec.json.encode(update), key)


class Polling:
    """One bot's polling from open to close, for an adapter."""

    def __init__(
        self,
        *,
        token: str,
        path: str | PathLike[str],
        get_updates: GetUpdates,
        is_conflict: Callable[[Exception], bool],
        first_run: FirstRun,
        policy: FeedPolicy,
        order: Order,
        on_event: Listener | None,
    ) -> None:
        for name, given, accepted in (("first_run", first_run, ("skip", "take")), ("order", order, ("chat", "none"))):
            if given not in accepted:
                raise SpecError(name, given, " | ".join(accepted))
        self.token = token
        self.bot_id = _bot_id(token)
        self.path = path
        self.policy = policy
        self._get_updates = get_updates
        self._is_conflict = is_conflict
        self._order: Order = order
        self._feed_options: dict[str, Any] = {
            "first_run": first_run,
            "policy": policy,
            "on_event": on_event,
        }
        self._source: TelegramSource | None = None
        self._feed: Feed | None = None
        self._lock: PollerLock | None = None
        self._closing = False
        self._handouts: dict[int, Handout] = {}
        self._busy = 0
        self._changed = asyncio.Event()

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
            source = TelegramSource(self.bot_id, self._get_updates, self._is_conflict)
            source.order = self._order
            source.on_conflict = self._report_conflict
            feed = Feed(source, inbox=Inbox(self.path), **self._feed_options)
            await feed.open()
        except BaseException:
            lock.release()
            raise
        self._source, self._feed, self._lock, self._closing = source, feed, lock, False
        self._changed = asyncio.Event()  # a new one: each start may have an event loop of its own

    @property
    def asked(self) -> Asked:
        """What the library asks with."""
        return self._source.asked if self._source is not None else Asked()

    def ask(self, asked: Asked) -> None:
        """Let the feed ask Telegram, with the library's own parameters."""
        if self._source is not None:
            self._source.ask(asked)

    async def close(self) -> None:
        """Hand back what has not begun, wait for what has, then let go. Nothing is lost, whatever happens here."""
        feed, lock = self._feed, self._lock
        if feed is None or self._closing:
            return
        self._closing = True
        try:
            for handout in [one for one in self._handouts.values() if one.state == "given"]:
                handout.state = "returned"
                self._busy -= 1
                await settled(handout.item.hand_back())
            if not await self._all_ended(self.policy.grace_seconds):
                for handout in self._running():
                    handout.cancelled = True
                    if handout.task is not None:
                        handout.task.cancel()
                await self._all_ended(CANCEL_SECONDS)
        finally:
            try:
                await feed.close(grace_seconds=0)
            finally:
                self._feed = self._source = self._lock = None
                # What was returned may still lie in a queue of the library's, and must not run when it comes out.
                self._handouts = {key: one for key, one in self._handouts.items() if one.state == "returned"}
                self._busy = 0
                if lock is not None:
                    lock.release()

    # --- what the library is given ----------------------------------------------------------------------------

    async def take(self, most: int | None) -> list[Item]:
        """The next items. Once polling ends nobody gets any more: waits to be cancelled."""
        try:
            return await self.feed.take(most)
        except FeedClosed as error:
            if self._feed is not None and not self._closing:
                # Both libraries would catch an ordinary error here and ask again for ever.
                raise SystemExit(f"the feed of bot {self.bot_id} cannot go on: {error}") from error
            await asyncio.get_running_loop().create_future()
            raise

    def give(self, update: object, item: Item) -> None:
        """Remember that the library has this update."""
        self._handouts[id(update)] = Handout(item, update)
        self._busy += 1

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
        handout = self.find(update)
        if handout is None or handout.state in {"running", "background"}:
            return None
        if handout.state == "returned":
            self.end(handout)
            return handout
        handout.state = "running"
        handout.task = asyncio.current_task()
        return handout

    def to_background(self, handout: Handout) -> None:
        """The rest of the work goes on, and no longer holds back its chat nor others."""
        handout.state = "background"
        self._busy -= 1
        handout.item.release()
        self._changed.set()

    def end(self, handout: Handout) -> None:
        """The item has its outcome."""
        if self._handouts.pop(id(handout.update), None) is not None and handout.state in {"given", "running"}:
            self._busy -= 1
        self._changed.set()

    def handout_of(self, item: Item) -> Handout | None:
        """The handout of an item, if the library still has it."""
        return next((one for one in self._handouts.values() if one.item is item), None)

    def busy(self) -> int:
        """How many updates the library has that it has not finished, those in the background not counted."""
        return self._busy

    async def until_less_busy_than(self, most: int) -> None:
        """Wait until the library can begin another one, and the background has room for it."""
        while self.busy() >= most or len(self._handouts) >= most + MAX_BACKGROUND:
            self._changed.clear()
            await self._changed.wait()

    # --- helpers ----------------------------------------------------------------------------------------------

    def _running(self) -> list[Handout]:
        return [one for one in self._handouts.values() if one.state in {"running", "background"}]

    async def _all_ended(self, seconds: float) -> bool:
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
        suspects = [msgspec.to_builtins(suspect) for suspect in await asyncio.to_thread(local_suspects, self.token)]
        self.feed.event("poller-conflict", bot=self.bot_id, error=str(error), suspects=suspects)


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
