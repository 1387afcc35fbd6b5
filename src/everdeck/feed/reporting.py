"""What a feed tells its deck: that it is ready, that it lives, how far it is, and what was set aside.

In a worker the deck listens on ``$NOTIFY_SOCKET``. ``READY=1`` is said when the inbox is open and recovered,
``WATCHDOG=1`` comes from the event loop, so a handler that blocks the loop stops it and the worker is restarted;
``STATUS=`` is the one line that people see ("1,204 done, 3 in flight, 0 dead"). An event of the feed travels as
``X_EVERDECK_EVENT={json}`` and appears in the deck's stream as kind ``feed``: the *message* is parked, not the worker.

Nobody listening is not an error: while the owner restarts there is nobody. Dead letters that nobody has heard of are
told again until somebody has. Payloads are never told.
"""

import asyncio
import contextlib
import os
from typing import Any, Final, Protocol

from everdeck.child import NOTIFY_SOCKET_ENV, emit, notify, watchdog_pings
from everdeck.errors import FeedError
from everdeck.feed.inbox import Stream
from everdeck.feed.store import SQL

STATUS_SECONDS: Final = 1.0
TELL_AGAIN_SECONDS: Final = 30.0


class Reported(Protocol):
    """What is reported on: a stream of an inbox, or a feed without a database."""

    @property
    def activity(self) -> asyncio.Event:
        """Set when the status may have changed."""

    def status(self) -> str:
        """The one line that people see."""

    async def tell_untold(self) -> bool:
        """Tell what is kept until it was heard; has all of it been?"""

    def is_told_later(self, event: dict[str, Any]) -> bool:
        """Is it one of those?"""


class Troubled(Protocol):
    """What may be in trouble: a feed whose source fails."""

    trouble: str | None


class Reporter:
    """Reports on one feed while it is open. Without a deck it does nothing; while nothing happens it sleeps."""

    def __init__(self, subject: Reported) -> None:
        self._subject = subject
        self._tasks: list[asyncio.Task[None]] = []
        self._said = ""

    async def open(self) -> None:
        """Say that we are ready and go on reporting.

        What the last run died of is told, and noted as told, before any handler may end this one: else it would be told
        anew by each start.
        """
        if not os.environ.get(NOTIFY_SOCKET_ENV):
            return
        with contextlib.suppress(FeedError):
            await self._subject.tell_untold()
        loop = asyncio.get_running_loop()
        self._say_status("READY=1")
        self._tasks = [
            loop.create_task(watchdog_pings(ready=True), name="feed watchdog"),
            loop.create_task(self._report_forever(), name="feed status"),
        ]

    async def close(self) -> None:
        """Say the last numbers and stop."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()
            with contextlib.suppress(FeedError):
                await self._subject.tell_untold()
                self._say_status()

    def event(self, event: dict[str, Any]) -> None:
        """Tell the deck what happened."""
        if self._tasks and not self._subject.is_told_later(event):
            emit(event)

    async def _report_forever(self) -> None:
        while True:
            activity = self._subject.activity
            activity.clear()
            heard = False
            try:
                heard = await self._subject.tell_untold() and self._say_status()
            except FeedError as err:
                notify(STATUS=f"inbox unavailable: {err}")
            await asyncio.sleep(STATUS_SECONDS)  # noqa: TID251 - no more than one status per second
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if heard else TELL_AGAIN_SECONDS):
                    await activity.wait()

    def _say_status(self, *lines: str) -> bool:
        status = self._subject.status()
        if lines or status != self._said:
            if not notify(*lines, STATUS=status):
                return False
            self._said = status
        return True


class StreamReport:
    """A stream, as it is reported on. Dead letters are told from the file, until somebody has heard of them."""

    def __init__(self, stream: Stream, troubled: Troubled | None = None) -> None:
        self._stream = stream
        self._troubled = troubled

    @property
    def activity(self) -> asyncio.Event:
        """See :class:`Reported`."""
        return self._stream.activity

    def status(self) -> str:
        """As in "1,204 done, 3 in flight, 0 dead"; what is wrong comes first."""
        trouble = None if self._troubled is None else self._troubled.trouble
        return str(self._stream.counts()) if trouble is None else f"{trouble} ({self._stream.counts()})"

    def is_told_later(self, event: dict[str, Any]) -> bool:
        """See :class:`Reported`."""
        return bool(event["what"] == "dead-letter")

    async def tell_untold(self) -> bool:
        """See :class:`Reported`."""
        store = self._stream.inbox.store
        untold = store.read("items_untold", self._stream.number)
        told = []
        for number, record_id, key, attempts, crashes, error in untold:
            facts = {"number": number, "id": record_id, "key": key, "attempts": attempts, "error": error}
            if crashes:
                facts["crashes"] = crashes  # the deck holds them against the message, not against the worker
            if not emit({"feed": self._stream.name, "what": "dead-letter", **facts}):
                break
            told.append((number,))
        if told:
            async with store.transaction() as connection:
                connection.executemany(SQL["item_told"], told)
        return len(told) == len(untold)
