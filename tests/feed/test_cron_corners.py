"""Cron at its corners: a clock that was ahead, very many missed ticks, slow handlers, six fields."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from everdeck.errors import SpecError
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


def test_ticks_coalesce_while_the_handler_runs() -> None:
    """Whoever asks again after a long handler gets one tick for all that passed."""
    values, _ = fetched((NOW - timedelta(minutes=7)).isoformat(), missed="once")
    assert [value["missed"] for value in values] == [6]


@pytest.mark.parametrize("expression", ["* * * * * *", "0 0 * * * *", "* * * *", ""])
def test_five_fields_are_five(expression: str) -> None:
    """A sixth would be seconds for some and a weekday for others."""
    with pytest.raises(SpecError, match="five fields"):
        cron(expression)
