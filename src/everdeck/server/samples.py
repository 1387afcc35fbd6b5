"""CPU and memory: the last hour as it was sampled, and the last month by :mod:`everdeck.server.history`.

Reading /proc for thousands of workers is work. Those that a page asks about are sampled every two seconds until a
little after it stopped asking. All of them are sampled once a minute while a page is served, or as often as
``--sample-seconds`` says; a daemon without a page samples nothing unless told to. One timer serves everybody.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from everdeck.deck import AsyncDeck
from everdeck.errors import UnknownWorker
from everdeck.model import WorkerStatus
from everdeck.server.documents import Series
from everdeck.server.history import History, Point
from everdeck.statedir import StateDir

KEPT_SECONDS: Final = 3600.0
WATCH_SECONDS: Final = 15.0
EVERY_SECONDS: Final = 2.0
# How often everybody is sampled for the record, while a page is served.
RECORD_SECONDS: Final = 60.0
_NONE: Final = float("nan")
_log: Final = logging.getLogger("everdeck")


class _Ring:
    """One worker's samples in three flat arrays; a point costs 24 bytes."""

    __slots__ = ("at", "cpu", "rss")

    def __init__(self) -> None:
        self.at = array("d")
        self.cpu = array("d")
        self.rss = array("d")

    def add(self, at: float, cpu: float | None, rss: int | None, *, keep: bool = False) -> None:
        self.at.append(at)
        self.cpu.append(_NONE if cpu is None else cpu)
        self.rss.append(_NONE if rss is None else rss)
        if not keep and len(self.at) > 64 and self.at[len(self.at) // 4] < at - KEPT_SECONDS:  # noqa: PLR2004 - trim a quarter at a time, not each point
            cut = len(self.at) // 4
            del self.at[:cut], self.cpu[:cut], self.rss[:cut]

    def series(self, since: float, points: int | None) -> Series:
        first = next((index for index, at in enumerate(self.at) if at > since), len(self.at))
        chosen = range(first, len(self.at))
        if points is not None and len(chosen) > points:
            step = len(chosen) / points
            chosen_list = [chosen[int((number + 1) * step) - 1] for number in range(points)]
        else:
            chosen_list = list(chosen)
        return Series(
            at=[self.at[index] for index in chosen_list],
            cpu=[_or_none(self.cpu[index]) for index in chosen_list],
            rss=[None if (value := _or_none(self.rss[index])) is None else int(value) for index in chosen_list],
        )


class Sampler:
    """Takes a sample of every watched worker at each tick, while there is one to watch."""

    def __init__(self, deck: AsyncDeck, always_seconds: float | None = None) -> None:
        self._deck = deck
        self._always_seconds = always_seconds
        self._everybody_at = 0.0
        self._complained = False
        self._history = History(StateDir(Path(deck.state_dir)).samples)
        self._rings: dict[str, _Ring] = {}
        self._watched_until: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._clock: Callable[[], float] = time.monotonic
        if always_seconds is not None:
            self._arm(EVERY_SECONDS)  # not at once: a daemon that starts has better things to do

    def close(self) -> None:
        """Stop sampling."""
        self._always_seconds = None
        self._watched_until.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sampling is not None:
            self._sampling.cancel()
        with self._complaining():
            self._history.leave()

    async def past(self, name: str, seconds: float, points: int | None) -> Series:
        """The last so many seconds: from disk, and from memory where that is finer. Asking counts as watching."""
        now = time.time()  # noqa: TID251 - as below
        recent = self.watch([name], now - seconds, None)[name]
        begins = recent.at[0] if recent.at else now
        self._history.recall()
        stored = await asyncio.to_thread(self._history.read, name, now - seconds, now)
        older = [point for point in stored if point.at < begins]
        ring = _Ring()
        for point in older:
            ring.add(point.at, point.cpu, point.rss, keep=True)
        for at, cpu, rss in zip(recent.at, recent.cpu, recent.rss, strict=True):
            ring.add(at, cpu, rss, keep=True)
        return ring.series(0.0, points)

    def watch(self, names: Iterable[str], since: float, points: int | None) -> dict[str, Series]:
        """What is known of these workers; asking keeps them sampled for a while."""
        until = self._clock() + WATCH_SECONDS
        answer = {}
        for name in names:
            self._watched_until[name] = until
            answer[name] = self._rings.setdefault(name, _Ring()).series(since, points)
        soon = asyncio.get_running_loop().time() + EVERY_SECONDS
        if self._sampling is None and (self._timer is None or self._timer.when() > soon):
            if self._timer is not None:
                self._timer.cancel()
            self._arm(0.0)
        return answer

    def _arm(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock()
        self._watched_until = {name: until for name, until in self._watched_until.items() if until > now}
        if not self._watched_until and self._always_seconds is None:
            return
        self._sampling = asyncio.ensure_future(self._sample())
        self._sampling.add_done_callback(self._sampled)

    async def _sample(self) -> None:
        at = time.time()  # noqa: TID251 - the page draws these against its own wall clock
        everybody = self._always_seconds is not None and self._clock() >= self._everybody_at
        if everybody and self._always_seconds is not None:
            self._everybody_at = self._clock() + self._always_seconds * 0.9
            statuses = await self._deck.list()
            for gone in self._rings.keys() - {status.name for status in statuses}:
                del self._rings[gone]
        else:
            statuses = await self._watched()
        over = []
        self._history.recall()
        for status in statuses:
            self._rings.setdefault(status.name, _Ring()).add(at, status.cpu_percent, status.rss_bytes)
            if status.rss_bytes is not None:
                over += self._history.add(status.name, Point(at, status.cpu_percent, status.rss_bytes))
        if over:
            await asyncio.to_thread(self._written, over)
        if everybody:
            await asyncio.to_thread(self._history.keep_only, {status.name for status in statuses})

    def _written(self, slots: Sequence[Any]) -> None:
        with self._complaining():
            self._history.write(slots)

    @contextmanager
    def _complaining(self) -> Iterator[None]:
        """A disk that takes nothing costs the record of samples, and is said once."""
        try:
            yield
        except OSError as error:
            if not self._complained:
                _log.warning("cpu and memory are not kept: %s: %s", error.filename, error.strerror)
            self._complained = True

    async def _watched(self) -> list[WorkerStatus]:
        found = []
        for name in list(self._watched_until):
            try:
                found.append(await self._deck.status(name))
            except UnknownWorker:
                self._rings.pop(name, None)
                self._watched_until.pop(name, None)
        return found

    def _sampled(self, task: asyncio.Task[None]) -> None:
        self._sampling = None
        if task.cancelled() or task.exception() is not None:
            return
        watched = EVERY_SECONDS if self._watched_until else None
        waits = [wait for wait in (watched, self._always_seconds) if wait is not None]
        if waits:
            self._arm(min(waits))


def _or_none(value: float) -> float | None:
    return None if value != value else value  # noqa: PLR0124 - NaN is the one value that differs from itself
