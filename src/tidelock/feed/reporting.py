"""What a feed tells its deck: that it is ready, that it lives, how far it is, and what was set aside.

In a worker the deck listens on ``$NOTIFY_SOCKET``. ``READY=1`` is said when the inbox is open and recovered,
``WATCHDOG=1`` comes from the event loop, so a handler that blocks the loop stops it and the worker is restarted;
``STATUS=`` is the one line that people see ("1,204 done, 3 in flight, 0 dead"). An event of the feed travels as
``X_TIDELOCK_EVENT={json}`` and appears in the deck's stream as kind ``feed``: the *message* is parked, not the worker.

Nobody listening is not an error: while the owner restarts there is nobody. Dead letters that nobody has heard of are
told again until somebody has. Payloads are never told.
"""

import asyncio
import os
from typing import Final

from tidelock.child import NOTIFY_SOCKET_ENV, emit, notify, watchdog_pings
from tidelock.errors import FeedError
from tidelock.feed.inbox import Stream
from tidelock.feed.store import SQL

STATUS_SECONDS: Final = 1.0


class Reporter:
    """Reports one stream while it is open. Without a deck it does nothing."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._tasks: list[asyncio.Task[None]] = []
        self._said = ""

    def open(self) -> None:
        """Say that we are ready and go on reporting."""
        if not os.environ.get(NOTIFY_SOCKET_ENV):
            return
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
            self._said = ""
            self._say_status()

    def event(self, event: dict[str, object]) -> None:
        """Tell the deck what happened. Dead letters are told from the file instead, so none is missed."""
        if self._tasks and event["what"] != "dead-letter":
            emit(event)

    async def _report_forever(self) -> None:
        while True:
            try:
                await self._tell_dead_letters()
                self._say_status()
            except FeedError as err:
                notify(STATUS=f"inbox unavailable: {err}")
            await asyncio.sleep(STATUS_SECONDS)  # noqa: TID251 - a status is due by the clock, there is no fact to wait for

    def _say_status(self, *lines: str) -> None:
        status = str(self._stream.counts())
        # Said again only when it changed: an idle feed wakes nobody.
        if (lines or status != self._said) and notify(*lines, STATUS=status):
            self._said = status

    async def _tell_dead_letters(self) -> None:
        store = self._stream.inbox.store
        told = []
        for number, record_id, key, attempts, error in store.read("items_untold", self._stream.number):
            facts = {"number": number, "id": record_id, "key": key, "attempts": attempts, "error": error}
            if not emit({"feed": self._stream.name, "what": "dead-letter", **facts}):
                break
            told.append((number,))
        if told:
            async with store.transaction() as connection:
                connection.executemany(SQL["item_told"], told)
