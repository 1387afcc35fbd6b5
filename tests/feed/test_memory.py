"""What is remembered between updates is committed with the ack of the update that changed it, or not at all."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from everdeck.errors import SpecError
from everdeck.feed import Dispatcher, Inbox, Item, Record
from everdeck.feed.memory import AT_HAND_BYTES, Memory


@asynccontextmanager
async def at_work(path: Path, records: int) -> AsyncIterator[tuple[Memory, list[Item]]]:
    """A memory, and items whose handlers run."""
    async with Inbox(path) as inbox:
        stream = inbox.stream("s")
        await stream.begin()
        dispatcher = Dispatcher(stream)
        await dispatcher.open()
        await stream.store([Record(number, b"{}") for number in range(records)])
        memory = Memory("kind")
        await memory.live_in(inbox)
        yield memory, await dispatcher.take() if records else []
        await dispatcher.stop()
        memory.leave()


def remembered(path: Path) -> dict[str, bytes]:
    """What the file says, by another connection."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT key, value FROM everdeck_memory WHERE kind = 'kind'").fetchall()
    connection.close()
    return dict(rows)


def test_what_many_have_changed_is_there_when_they_are_done(tmp_path: Path) -> None:
    """Of one value the last change counts; odd keys and values of all sizes come back as they were."""
    path = tmp_path / "bot.db"
    odd = {"": b"", "'\"\\ \n": b"1", "größe 🂡": b"\0" * 100_000, "form (1, 'a')": b"\xff"}

    async def scenario() -> None:
        async with at_work(path, 4) as (memory, items):
            await memory.set("gone", b"soon")
            for item, (key, value) in zip(items, odd.items(), strict=True):
                await memory.set(key, value, item)
                await memory.set("last", key.encode(), item)
            await memory.set("gone", None, items[0])
            assert remembered(path) == {"gone": b"soon"}
            await asyncio.gather(*(item.done() for item in items))
            expected = {**odd, "last": b"form (1, 'a')"}
            assert remembered(path) == expected
            assert {key: memory.get(key) for key in expected} == expected
            assert memory.get("gone") is None
        async with at_work(path, 0) as (memory, _):
            assert dict(memory.all()) == expected

    asyncio.run(scenario())


def test_an_empty_value_is_a_value(tmp_path: Path) -> None:
    """Also where nothing else is written beside it."""

    async def scenario() -> None:
        async with at_work(tmp_path / "bot.db", 2) as (memory, (first, second)):
            await memory.set("empty", b"", first)
            await first.done()
            assert remembered(tmp_path / "bot.db") == {"empty": b""}
            await memory.set("empty", None, second)
            await second.done()
            assert remembered(tmp_path / "bot.db") == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("key", ["a\0b", "half of \ud83c"])
def test_what_cannot_be_a_key_is_refused_where_it_is_set(tmp_path: Path, key: str) -> None:
    """The commit is everybody's."""

    async def scenario() -> None:
        async with at_work(tmp_path / "bot.db", 1) as (memory, (item,)):
            with pytest.raises(SpecError, match="NUL"):
                await memory.set(key, b"1", item)
            with pytest.raises(SpecError, match="NUL"):
                await memory.set(key, b"1")
            await memory.set("other", b"1", item)
            await item.done()
            assert remembered(tmp_path / "bot.db") == {"other": b"1"}

    asyncio.run(scenario())


@pytest.mark.parametrize("together", [True, False], ids=["in one commit", "one after the other"])
def test_what_was_set_last_stands_whoever_is_done_first(tmp_path: Path, together: bool) -> None:
    """As in any storage: a handler that goes on for long after it has set a state does not set it back at its end."""
    path = tmp_path / "bot.db"

    async def scenario() -> None:
        async with at_work(path, 3) as (memory, (slow, quick, third)):
            await memory.set("state", b"old", slow)
            await memory.set("gone", b"old", slow)
            await memory.set("twice", b"1", slow)
            await memory.set("state", b"new", quick)
            await memory.set("gone", None, quick)
            await memory.set("twice", b"2", quick)
            await memory.set("twice", b"3", slow)
            quick.settle_as_done()
            if not together:
                await quick.done()
            slow.settle_as_done()
            await asyncio.gather(quick.done(), slow.done())
            assert remembered(path) == {"state": b"new", "twice": b"3"}
            assert [memory.get(key) for key in ("state", "gone", "twice")] == [b"new", None, b"3"]
            await memory.set("state", b"newest", third)
            await memory.set("state", b"at once")
            await third.done()
            assert remembered(path)["state"] == memory.get("state") == b"at once"

    asyncio.run(scenario())


def test_what_is_set_while_the_ack_is_being_committed_is_written_after_it(tmp_path: Path) -> None:
    """By a task that the handler has started: it is too late for that commit, and there is no other ack."""
    path = tmp_path / "bot.db"

    async def scenario() -> None:
        async with at_work(path, 1) as (memory, (item,)):

            async def helper() -> None:
                await memory.set("late", b"1", item)

            async with asyncio.TaskGroup() as group, item.transaction():
                await memory.set("early", b"1", item)
                group.create_task(helper())
            await item.done()
            assert remembered(path) == {"early": b"1", "late": b"1"}

    asyncio.run(scenario())


def test_an_attempt_that_fails_takes_back_what_it_has_changed(tmp_path: Path) -> None:
    """And nothing that others have written before or after it."""
    path = tmp_path / "bot.db"

    async def scenario() -> None:
        async with at_work(path, 3) as (memory, (first, second, third)):
            await memory.set("mine", b"before")
            await memory.set("mine", b"after", first)
            await memory.set("ours", b"1", second)
            await memory.set("ours", b"2", first)
            await memory.set("theirs", b"1", first)
            await memory.set("theirs", b"2", third)
            assert memory.get("mine") == b"after"
            await first.failed("not yet")
            assert (memory.get("mine"), memory.get("ours"), memory.get("theirs")) == (b"before", b"1", b"2")
            await asyncio.gather(second.done(), third.done())
            assert remembered(path) == {"mine": b"before", "ours": b"1", "theirs": b"2"}

    asyncio.run(scenario())


def test_what_is_the_same_is_not_written_again(tmp_path: Path) -> None:
    """A library writes whatever was looked at; but what is not committed yet may still be taken back."""
    path = tmp_path / "bot.db"

    async def scenario() -> None:
        async with at_work(path, 4) as (memory, (first, second, third, fourth)):
            await memory.set("key", b"value", first)
            await memory.set("key", b"value", second)
            assert second.changes is not None
            await first.failed("not yet")
            await second.done()
            assert remembered(path) == {"key": b"value"}
            await memory.set("key", b"value", third)
            assert third.changes is None
            await memory.set("key", None, third)
            await third.done()
            await memory.set("key", b"value", fourth)
            await fourth.done()
            assert remembered(path) == {"key": b"value"}

    asyncio.run(scenario())


def test_what_is_kept_at_hand_is_bounded(tmp_path: Path) -> None:
    """The rest is read from the file."""

    async def scenario() -> None:
        async with at_work(tmp_path / "bot.db", 1) as (memory, (item,)):
            for number in range(20):
                await memory.set(str(number), bytes([number]) * (AT_HAND_BYTES // 10), item)
            await item.done()
            assert 0 < sum(map(len, filter(None, memory._at_hand.values()))) <= AT_HAND_BYTES
            assert [(memory.get(str(number)) or b"")[:1] for number in range(20)] == [
                bytes([number]) for number in range(20)
            ]

    asyncio.run(scenario())


def test_a_large_value_that_is_the_same_is_not_written_again_and_pushes_nothing_out(tmp_path: Path) -> None:
    """A library that writes all data of the bot for each update would write megabytes for each."""
    large = b"x" * (2 * AT_HAND_BYTES)

    async def scenario() -> None:
        async with at_work(tmp_path / "bot.db", 3) as (memory, (first, second, third)):
            await memory.set("small", b"1", first)
            await memory.set("large", large, first)
            await first.done()
            await memory.set("small", b"1", second)
            await memory.set("large", large, second)
            assert second.changes is None
            await memory.set("large", large + b"y", third)
            await third.done()
            assert remembered(tmp_path / "bot.db") == {"small": b"1", "large": large + b"y"}
            assert memory.get("large") == large + b"y"

    asyncio.run(scenario())
