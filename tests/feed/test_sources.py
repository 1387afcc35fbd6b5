"""Sources: any polled function, and time itself."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from everdeck.errors import SourceError, SpecError
from everdeck.feed import Batch, Inbox, Position, Record, consume, poll
from everdeck.feed.sources.cron import cron
from everdeck.feed.sources.polled import Polled

START = Position(None, 0)


async def fetch(source: Any, cursor: Any = None) -> Batch:
    """One answer, with a deadline."""
    got = await asyncio.wait_for(source.fetch(Position(cursor, 0)), 30)
    assert isinstance(got, Batch)
    return got


def test_a_function_is_asked_with_the_cursor_if_it_takes_one() -> None:
    """Plain functions, coroutine functions, functions without an argument, callable objects."""
    asked: list[Any] = []

    def plain(cursor: Any) -> list[dict[str, Any]]:
        asked.append(cursor)
        return [{"id": 3}, {"id": 2}]

    async def coroutine(cursor: Any = None) -> list[dict[str, Any]]:
        asked.append(cursor)
        return [{"update_id": 9, "id": 1}]

    class Callable:
        async def __call__(self) -> list[dict[str, Any]]:
            return [{"id": "x"}]

    async def scenario() -> None:
        batch = await fetch(poll(plain), 7)
        assert ([record.id for record in batch.records], batch.cursor) == ([3, 2], 4)
        assert batch.records[0].payload == b'{"id":3}'
        assert (await fetch(poll(coroutine), 8)).cursor == 10
        assert (await fetch(poll(Callable()))).cursor == "x"
        assert (await fetch(poll(lambda: None))).records == []
        assert (await fetch(poll(lambda: [4, 8]))).cursor == 9
        assert (await fetch(poll(lambda: [Record(5, b"raw", "k")]))).cursor == 6
        assert asked == [7, 8]

    asyncio.run(scenario())


def test_ids_and_keys_can_be_computed() -> None:
    """For values that have no id field."""

    async def scenario() -> None:
        batch = await fetch(poll(lambda: ["a b", "c d"], id=lambda text: text[0], key=lambda text: text[2]))
        assert [(record.id, record.key) for record in batch.records] == [("a", "b"), ("c", "d")]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        5,
        {"id": 1},
        "text",
        [{"no": "id"}],
        [1.5],
        [True],
        [{"id": None}],
        [{"id": 1.5}],
        [{"id": True}],
        [{"id": object()}],
    ],
)
def test_what_is_not_a_batch_is_said_to_be_none(answer: Any) -> None:
    """The error names the source."""
    with pytest.raises(SourceError, match="shop"):
        asyncio.run(fetch(poll(lambda: answer, name="shop")))


@pytest.mark.parametrize("every", [-1, float("nan"), float("inf"), "5", True])
def test_the_interval_is_a_number(every: Any) -> None:
    """And at least 0."""
    with pytest.raises(SpecError, match="every"):
        poll(list, every=every)


def test_every_is_kept_between_calls() -> None:
    """The first call comes at once, the second after the interval."""

    def nothing() -> list[Any]:
        return []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        source = poll(nothing, every=0.2)
        before = loop.time()
        await fetch(source)
        first = loop.time() - before
        await fetch(source)
        assert first < 0.2
        assert loop.time() - before >= 0.2

    asyncio.run(scenario())


def test_a_function_that_ignores_the_cursor_is_handled_once(tmp_path: Path) -> None:
    """What is known is dropped by its id."""
    calls = 0
    handled: list[int] = []
    stop = asyncio.Event()

    async def everything() -> list[dict[str, int]]:
        nonlocal calls
        calls += 1
        if calls == 5:
            stop.set()
        return [{"id": n} for n in range(calls)]

    inbox = Inbox(tmp_path / "bot.db")
    source = poll(everything, every=0.01, name="everything")
    asyncio.run(asyncio.wait_for(consume(source, lambda item: handled.append(item.id), inbox=inbox, stop=stop), 60))
    assert handled == sorted(set(handled))


def test_the_name_is_made_of_the_function() -> None:
    """So a restart finds its cursor again."""
    assert isinstance(poll(fetch), Polled)
    assert poll(fetch).name.endswith("test_sources.fetch")


# --- cron ---


class Now:
    """A wall clock that a test sets."""

    def __init__(self, *when: int) -> None:
        self.time = datetime(*when, tzinfo=UTC).timestamp()  # type: ignore[arg-type, misc]

    def __call__(self) -> float:
        """The time now."""
        return self.time


def scheduled(batch: Batch) -> list[str]:
    """The ids of the ticks: their times."""
    return [str(record.id) for record in batch.records]


def test_the_first_run_begins_now() -> None:
    """The beginning is recorded before the first tick is waited for."""
    source = cron("0 * * * *", clock=Now(2024, 5, 1, 10, 30))
    batch = asyncio.run(fetch(source))
    assert (batch.records, batch.cursor) == ([], "2024-05-01T10:30:00+00:00")


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("catch-up", ["2024-05-01T11:00:00+00:00", "2024-05-01T12:00:00+00:00", "2024-05-01T13:00:00+00:00"]),
        ("once", ["2024-05-01T13:00:00+00:00"]),
        ("skip", []),
    ],
)
def test_missed_ticks(missed: Any, expected: list[str]) -> None:
    """Three hours nobody ran: each, the latest, or none; the cursor is behind them in every case."""
    source = cron("0 * * * *", missed=missed, clock=Now(2024, 5, 1, 13, 30))
    batch = asyncio.run(fetch(source, "2024-05-01T10:30:00+00:00"))
    assert scheduled(batch) == expected
    assert batch.cursor == "2024-05-01T13:00:00+00:00"
    if missed == "once":
        assert batch.records[0].payload == b'{"scheduled":"2024-05-01T13:00:00+00:00","missed":2}'


def test_a_tick_on_time_is_not_missed() -> None:
    """Within a minute it is on time, whatever the choice."""
    source = cron("0 * * * *", missed="skip", clock=Now(2024, 5, 1, 13, 0, 30))
    assert scheduled(asyncio.run(fetch(source, "2024-05-01T12:30:00+00:00"))) == ["2024-05-01T13:00:00+00:00"]


def test_the_next_tick_is_waited_for() -> None:
    """It comes when the clock has reached it, not before."""

    async def scenario() -> None:
        now = Now(2024, 5, 1, 12, 59)
        now.time += 59.9
        source = cron("0 * * * *", clock=now)
        waiting = asyncio.ensure_future(fetch(source, "2024-05-01T12:30:00+00:00"))
        await asyncio.sleep(0)
        assert not waiting.done()
        now.time += 0.2
        assert scheduled(await waiting) == ["2024-05-01T13:00:00+00:00"]

    asyncio.run(scenario())


def test_the_night_the_clock_is_set_back_fires_once() -> None:
    """02:30 comes twice on that night; the tick does not."""
    source = cron("30 2 * * *", missed="catch-up", tz="Europe/Berlin", clock=Now(2024, 10, 28, 12))
    batch = asyncio.run(fetch(source, "2024-10-26T12:00:00+00:00"))
    assert [one[:16] for one in scheduled(batch)] == ["2024-10-27T02:30", "2024-10-28T02:30"]


def test_a_year_of_minutes_is_caught_up_in_parts() -> None:
    """A batch stays small; the next one goes on behind it."""
    source = cron("* * * * *", missed="catch-up", clock=Now(2024, 5, 1))
    first = asyncio.run(fetch(source, "2023-05-01T00:00:00+00:00"))
    second = asyncio.run(fetch(source, first.cursor))
    assert len(first.records) == len(second.records) == 500
    assert scheduled(second)[0] > scheduled(first)[-1]


@pytest.mark.parametrize(("missed", "ticks"), [("once", 1), ("skip", 0)])
def test_a_year_of_minutes_is_passed_at_once(missed: Any, ticks: int) -> None:
    """Not every minute of it is looked at: the event loop has other things to do."""
    source = cron("* * * * *", missed=missed, clock=Now(2024, 5, 1, 12, 0, 0) if ticks else Now(2024, 5, 1))
    if missed == "skip":
        source = cron("0 0 1 * *", missed=missed, clock=Now(2024, 5, 20))
    batch = asyncio.run(fetch(source, "2003-05-01T00:00:00+00:00"))
    assert len(batch.records) == ticks
    assert batch.cursor == ("2024-05-01T12:00:00+00:00" if ticks else "2024-05-01T00:00:00+00:00")


@pytest.mark.parametrize(
    "options", [{"expression": "99 * * * *"}, {"expression": "x"}, {"missed": "maybe"}, {"tz": "Middle/Earth"}]
)
def test_what_is_no_schedule_is_refused(options: dict[str, Any]) -> None:
    """By name, before anything waits."""
    with pytest.raises(SpecError, match=next(iter(options))):
        cron(**{"expression": "* * * * *"} | options)


def test_a_tick_reaches_its_handler_once(tmp_path: Path) -> None:
    """Over the inbox: two runs, each tick handled once."""
    now = Now(2024, 5, 1, 10, 30)
    handled: list[str] = []

    async def run() -> None:
        stop = asyncio.Event()

        async def handler(item: Any) -> None:
            handled.append(item.value["scheduled"][11:16])
            stop.set()

        source = cron("0 * * * *", missed="catch-up", clock=now, name="hourly")
        running = asyncio.ensure_future(consume(source, handler, inbox=Inbox(tmp_path / "cron.db"), stop=stop))
        now.time += 3600
        await asyncio.wait_for(running, 60)

    async def first_cursor() -> None:
        async with Inbox(tmp_path / "cron.db") as inbox:
            stream = inbox.stream("hourly")
            await stream.begin()
            await stream.store([], "2024-05-01T10:30:00+00:00")

    asyncio.run(first_cursor())
    asyncio.run(run())
    asyncio.run(run())
    assert handled == ["11:00", "12:00"]
