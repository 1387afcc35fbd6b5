"""Cron at its corners: a clock that was ahead, very many missed ticks, slow handlers, six fields."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everdeck.errors import SpecError
from everdeck.feed import Inbox, consume
from everdeck.feed.records import Position
from everdeck.feed.sources.cron import cron

NOW = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)


def fetched(cursor: str, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    """The values of one answer, and its cursor."""
    source = cron("* * * * *", clock=NOW.timestamp, **options)
    batch = asyncio.run(asyncio.wait_for(source.fetch(Position(cursor, 0)), 20))
    assert batch is not None
    return [msgspec.json.decode(record.payload) for record in batch.records], batch.cursor


def test_a_cursor_from_the_future_is_clamped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """The clock was a year ahead once: ticks go on now, not next year."""
    values, cursor = fetched((NOW + timedelta(days=365)).isoformat())
    assert values == []
    assert datetime.fromisoformat(cursor) == NOW
    assert "in the future" in caplog.text


def test_thousands_of_missed_ticks_are_counted_right() -> None:
    """Ten days of minutes: one tick that says how many it stands for."""
    values, _ = fetched((NOW - timedelta(days=10)).isoformat(), missed="once")
    assert values == [{"scheduled": "2026-03-01T12:00:00+00:00", "missed": 10 * 24 * 60 - 1}]


@pytest.mark.parametrize(("missed", "expected"), [("once", [0, 3]), ("catch-up", [0, 0, 0, 0, 0])])
def test_ticks_coalesce_while_the_handler_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missed: Any, expected: list[int]
) -> None:
    """A handler of four minutes is followed by one tick for all of them, unless each is to be caught up."""
    monkeypatch.setattr("everdeck.feed.sources.cron.LOOK_AGAIN_SECONDS", 0.01)
    now = NOW
    stop, values = asyncio.Event(), []

    async def handler(item: Any) -> None:
        nonlocal now
        values.append(item.value["missed"])
        for _ in range(4 if len(values) == 1 else 0):
            now += timedelta(minutes=1)
            await asyncio.sleep(0.1)  # ten looks at the clock, by whoever looks
        if len(values) == len(expected):
            stop.set()

    async def scenario() -> None:
        source = cron("* * * * *", missed=missed, clock=lambda: now.timestamp())  # noqa: PLW0108 - it moves
        inbox = Inbox(tmp_path / "cron.db")
        async with inbox:
            await inbox.stream(source.name).begin()
            await inbox.stream(source.name).store([], (NOW - timedelta(seconds=31)).isoformat())
        await asyncio.wait_for(consume(source, handler, inbox=inbox, stop=stop), 30)

    asyncio.run(scenario())
    assert values == expected


@pytest.mark.parametrize("expression", ["* * * * * *", "0 0 * * * *", "* * * *", ""])
def test_five_fields_are_five(expression: str) -> None:
    """A sixth would be seconds for some and a weekday for others."""
    with pytest.raises(SpecError, match="five fields"):
        cron(expression)
