"""Time as a source: each tick of a cron expression is a record.

The cursor is the last tick that was delivered, so ticks that fell into a time when nobody ran are known, and ``missed``
says what becomes of them: ``"catch-up"`` delivers each, ``"once"`` only the latest, ``"skip"`` none. A tick is an
instant: on the night the clock is set back ``30 2 * * *`` fires once (cronsim, https://github.com/cuu508/cronsim).

A handler that takes longer than the time between two ticks does not find a queue of them: unless each is to be caught
up, the next tick is asked for when it has ended, and stands for those that passed meanwhile.

The wait looks at the wall clock at least once a minute, so a stepped clock or a suspended machine is noticed.
"""

import asyncio
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final, Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from cronsim import CronSim, CronSimError

from everdeck.errors import SourceError, SpecError
from everdeck.feed.records import Batch, Position, Record
from everdeck.feed.store import Clock, wall_clock

log = logging.getLogger("everdeck.feed")
Missed: TypeAlias = Literal["catch-up", "once", "skip"]

FIELDS: Final = 5
ON_TIME_SECONDS: Final = 60.0
LOOK_AGAIN_SECONDS: Final = 60.0
TICKS_AT_ONCE: Final = 500
MOST_COUNTED: Final = 1_000_000  # two years of minutes


def cron(
    expression: str,
    *,
    missed: Missed = "once",
    tz: str | tzinfo = UTC,
    name: str | None = None,
    clock: Clock = wall_clock,
) -> "Cron":
    """A source of ticks. The handler's ``item.value`` is ``{"scheduled": ISO time, "missed": how many it stands for}``.

    A tick that is delivered within a minute is on time. Ticks run one after another. ``name`` keys the cursor; by
    default it is made of the expression and the zone.
    """
    return Cron(expression, missed=missed, tz=tz, name=name, clock=clock)


class Cron:
    """See :func:`cron`."""

    def __init__(self, expression: str, *, missed: Missed, tz: str | tzinfo, name: str | None, clock: Clock) -> None:
        if missed not in {"catch-up", "once", "skip"}:
            raise SpecError("missed", missed, "catch-up | once | skip")
        try:
            self._zone = ZoneInfo(tz) if isinstance(tz, str) else tz
        except (ZoneInfoNotFoundError, ValueError) as err:
            raise SpecError("tz", tz, "the name of a time zone, such as Europe/Berlin") from err
        self._expression = expression
        self._missed = missed
        self.waits_for_handlers = missed != "catch-up"
        self._clock = clock
        if len(expression.split()) != FIELDS:
            # cronsim takes a sixth field for seconds; whoever counts them the other way round would be surprised.
            raise SpecError("expression", expression, "five fields of cron: minute hour day month weekday")
        try:
            self._ticks_after(self._now())
        except CronSimError as err:
            raise SpecError("expression", expression, f"five fields of cron ({err})") from err
        self.name = name or f"cron:{expression} ({self._zone})"

    async def fetch(self, position: Position) -> Batch | None:
        """The ticks that are due; waits for the next one. None if there will never be one."""
        if position.cursor is None:
            # Recorded before the first tick is waited for, so that one missed from now on is known to be missed.
            return Batch([], cursor=self._now().isoformat())
        last = self._instant(position.cursor)
        while True:
            if last > self._now() + timedelta(seconds=ON_TIME_SECONDS):
                # The clock was ahead when it was written, or was set back while we waited; waiting for that time again
                # would skip everything until then.
                when = last.isoformat()
                log.warning("%s: the last tick (%s) is in the future; ticks count from now on", self.name, when)
                return Batch([], cursor=self._now().isoformat())
            due, missed = self._due(last)
            if due:
                return self._batch(due, missed)
            upcoming = next(self._ticks_after(last), None)
            if upcoming is None:
                return None
            wait = (upcoming - self._now()).total_seconds()
            await asyncio.sleep(min(max(wait, 0.01), LOOK_AGAIN_SECONDS))  # noqa: TID251 - a tick is time itself

    def _due(self, last: datetime) -> tuple[list[datetime], int]:
        """The ticks since ``last``, some at a time, and how many there were; unless each is to be caught up, only the
        latest one is given, whatever came before it.
        """
        now = self._now()
        due: list[datetime] = []
        count = 0
        for tick in self._ticks_after(last):
            if tick > now:
                break
            count += 1
            if self._missed == "catch-up":
                due.append(tick)
                if len(due) == TICKS_AT_ONCE:
                    break
            elif count >= MOST_COUNTED:
                break
            else:
                due = [tick]
        if count >= MOST_COUNTED:
            due = [self._latest(now)]
        return due, count

    def _latest(self, now: datetime) -> datetime:
        # From a little later, because an iteration backwards leaves out the instant that it starts from.
        backwards: Iterator[datetime] = CronSim(self._expression, now + timedelta(minutes=1), reverse=True)
        return next(tick for tick in backwards if tick <= now)

    def _batch(self, due: list[datetime], count: int) -> Batch:
        cursor = due[-1].isoformat()
        if self._missed == "catch-up":
            return Batch([self._record(tick, 1) for tick in due], cursor=cursor)
        on_time = self._now() - due[-1] <= timedelta(seconds=ON_TIME_SECONDS)
        if self._missed == "skip" and not on_time:
            return Batch([], cursor=cursor)
        return Batch([self._record(due[-1], count if self._missed == "once" else 1)], cursor=cursor)

    def _record(self, tick: datetime, stands_for: int) -> Record:
        at = tick.isoformat()
        return Record(at, msgspec.json.encode({"scheduled": at, "missed": stands_for - 1}), key=self.name)

    def _ticks_after(self, instant: datetime) -> Iterator[datetime]:
        ticks: Iterator[datetime] = CronSim(self._expression, instant.astimezone(self._zone))
        return ticks

    def _instant(self, cursor: object) -> datetime:
        try:
            return datetime.fromisoformat(str(cursor))
        except ValueError as err:
            raise SourceError(f"{self.name}: the cursor {cursor!r} is not a time") from err

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), self._zone)
