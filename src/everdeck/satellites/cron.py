"""The kind ``cron``: each tick of a cron expression is a message.

The ticks are those of :mod:`everdeck.feed.sources.cron`: instants in a time zone, so a night on which the clock is set
back fires ``30 2 * * *`` once, and a stepped clock or a suspended machine is noticed within a minute. Its text is the
scheduled time; ``raw["missed"]`` says for how many missed ticks it stands.
"""

from datetime import datetime

import msgspec

from everdeck.feed.records import Position
from everdeck.feed.sources.cron import Cron as Ticks
from everdeck.messages import Incoming
from everdeck.satellites import CronOptions
from everdeck.satellites.base import Arrived, Context, Kind


class Cron(Kind[CronOptions]):
    """One clock."""

    def __init__(self, options: CronOptions, context: Context) -> None:
        super().__init__(options, context)
        self._ticks = Ticks(
            options.expression,
            missed="catch-up" if options.missed == "all" else options.missed,
            tz=options.tz,
            name=f"cron:{options.expression} ({options.tz})",
            clock=context.clock,
        )
        self.name = self._ticks.name

    async def open(self) -> None:
        """See :class:`Kind`."""
        self.context.connected(account=f"{self.options.expression} ({self.options.tz})")

    async def fetch(self, position: Position) -> Arrived | None:
        """See :class:`Kind`."""
        batch = await self._ticks.fetch(position)
        if batch is None:
            return None
        return Arrived([_tick(record.payload) for record in batch.records], cursor=batch.cursor)


def _tick(payload: bytes) -> Incoming:
    value = msgspec.json.decode(payload)
    scheduled = str(value["scheduled"])
    return Incoming(
        id=scheduled,
        channel="cron",
        conversation="cron",  # one after another
        text=scheduled,
        at=datetime.fromisoformat(scheduled),
        raw=value,
    )
