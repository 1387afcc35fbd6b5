"""The queue of updates of one bot, with the rules of Telegram's own server.

This file owns what ``offset`` means. It promises the answers that tdlib/telegram-bot-api gives, the unkind ones
included: a positive offset forgets for good, a stale one may silently delete, ids start again at random.
It performs no I/O and takes its clock and its randomness from the caller, so a day can pass in a test.

The rules were read from ``Client.cpp`` and ``TQueue.cpp`` of that server, not from its documentation.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import msgspec

MAX_PENDING: Final = 100_000
KEEP_SECONDS: Final = 86_400.0
QUIET_SECONDS: Final = 7 * 86_400.0
MAX_ID: Final = 2_000_000_000
MAX_UPDATE_BYTES: Final = 65_536 * 8
MAX_ANSWER_BYTES: Final = 1 << 22
FUTURE_SLACK: Final = 10

_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class QueuedUpdate:
    """One update as it will be handed out: its id, its JSON, and when the server gives it up."""

    update_id: int
    json: bytes
    expires_at: float


class UpdateQueue:
    """Pending updates of one bot.

    ``clock`` gives seconds that only grow. ``confirmed``, ``expired`` and ``refused`` remember, in order, which ids
    were forgotten because a poll's offset passed them, which were given up after a day, and how many did not fit.
    """

    def __init__(self, clock: Callable[[], float], random: Random, *, max_pending: int = MAX_PENDING) -> None:
        self._clock = clock
        self._random = random
        self._max_pending = max_pending
        self._events: deque[QueuedUpdate] = deque()
        self._tail = 0
        self._last_push: float | None = None
        self.confirmed: list[int] = []
        self.expired: list[int] = []
        self.refused = 0

    @property
    def tail(self) -> int:
        """The id the next update will get; 0 while the queue has never held one."""
        return self._tail

    @property
    def head(self) -> int:
        """The id of the first pending update, or the tail when there is none."""
        return self._events[0].update_id if self._events else self._tail

    def pending(self) -> list[int]:
        """The ids not yet forgotten, in order."""
        self._give_up_old()
        return [event.update_id for event in self._events]

    def push(self, update: dict[str, Any]) -> int | None:
        """Queue an update and say its id, or None when the queue is full.

        An ``update_id`` inside the update leaves a gap; it may not lie below the tail. Without one the next id is
        taken, which is a random one for the first update ever and after a quiet week.
        """
        now = self._clock()
        self._give_up_old()
        if self._last_push is not None and now - self._last_push >= QUIET_SECONDS:
            self.start_epoch()
        if len(self._events) >= self._max_pending:
            self.refused += 1
            return None
        update_id = update.get("update_id", self._tail or self._random_start())
        if not isinstance(update_id, int) or update_id < self._tail or not 0 < update_id < MAX_ID:
            raise ValueError(f"update_id {update_id!r} is not in {self._tail}..{MAX_ID - 1}; call start_epoch() first")
        json = _encode({"update_id": update_id} | {key: value for key, value in update.items() if key != "update_id"})
        if len(json) > MAX_UPDATE_BYTES:
            self.refused += 1
            return None
        self._events.append(QueuedUpdate(update_id, json, now + KEEP_SECONDS))
        self._tail = update_id + 1
        self._last_push = now
        return update_id

    def start_epoch(self, first_id: int | None = None) -> None:
        """Forget all ids, as the server does after a quiet week: the next update starts at random, or at first_id."""
        self.expired.extend(event.update_id for event in self._events)
        self._events.clear()
        self._tail = first_id if first_id is not None else self._random_start()
        self._last_push = None

    def get(self, offset: int, limit: int) -> list[QueuedUpdate]:
        """Forget what the offset confirms and hand out what comes next, as ``getUpdates`` does."""
        self._give_up_old()
        if offset < 0:
            while len(self._events) > -offset:
                self.confirmed.append(self._events.popleft().update_id)
        if offset <= 0:
            offset = self.head
        # An offset that is absurd in either direction is ignored: the answer starts at the head and nothing is
        # forgotten. Up to ten past the tail it is believed, and whatever lies below it is gone.
        if self._tail - 2 * self._max_pending <= offset <= self._tail + FUTURE_SLACK:
            while self._events and self._events[0].update_id < offset:
                self.confirmed.append(self._events.popleft().update_id)
        answer: list[QueuedUpdate] = []
        room = MAX_ANSWER_BYTES
        for event in self._events:
            room -= 50 + len(event.json)
            if len(answer) == limit or room <= 0:
                break
            answer.append(event)
        return answer

    def clear(self) -> None:
        """Forget everything pending, as ``drop_pending_updates`` does."""
        self.confirmed.extend(event.update_id for event in self._events)
        self._events.clear()

    def _give_up_old(self) -> None:
        now = self._clock()
        while self._events and self._events[0].expires_at < now:
            self.expired.append(self._events.popleft().update_id)

    def _random_start(self) -> int:
        return self._random.randrange(2 * MAX_PENDING + 1, MAX_ID // 2)
