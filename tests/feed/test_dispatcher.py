"""From the inbox to the handlers: attempts, outcomes, crashes, dead letters."""

import asyncio
import os
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from everdeck.errors import FeedClosed, FeedError, InboxUnavailable, SpecError
from everdeck.feed import Dispatcher, FeedPolicy, Inbox, Record, Retry, Stream, bell
from everdeck.feed import dispatcher as dispatcher_module
from everdeck.feed.ledger import End
from everdeck.kernel import inotify

AT_ONCE = Retry(seconds=0.0, cap_seconds=0.0)


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[tuple[Stream, Dispatcher, list[dict[str, Any]]]]:
    """A dispatcher over an inbox, and what it tells."""
    told: list[dict[str, Any]] = []
    async with Inbox(path) as inbox:
        stream = inbox.stream("s")
        await stream.begin()
        dispatcher = Dispatcher(stream, FeedPolicy(**{"retry": AT_ONCE} | options), on_event=told.append)
        await dispatcher.open()
        try:
            yield stream, dispatcher, told
        finally:
            await dispatcher.stop(0)


async def fill(stream: Stream, *keys: str | None) -> None:
    """One item per key, with ids from 0."""
    await stream.store([Record(n, b'{"n":%d}' % n, key) for n, key in enumerate(keys)], len(keys))


async def take(dispatcher: Dispatcher, most: int | None = None) -> list[Any]:
    """Take, with a deadline that fails loudly."""
    return await asyncio.wait_for(dispatcher.take(most), 20)


def rows(path: Path) -> list[tuple[Any, ...]]:
    """(id, state, attempts, crashes) of every row, by another connection."""
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT id, state, attempts, crashes FROM everdeck_item ORDER BY seq").fetchall()
    connection.close()
    return found


def test_the_row_leaves_only_with_the_outcome(tmp_path: Path) -> None:
    """What is in flight is noted in the ledger, and is in the file until it is done."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await fill(stream, "a")
            (item,) = await take(dispatcher)
            assert rows(tmp_path / "bot.db") == [(0, 0, 0, 0)]
            assert (item.id, item.key, item.value, item.attempt, item.stream) == (0, "a", {"n": 0}, 1, "s")
            assert str(stream.counts()) == "0 done, 1 in flight, 0 dead"
            await item.done()
            assert rows(tmp_path / "bot.db") == []
            await item.done()  # saying it twice is harmless
            assert str(stream.counts()) == "1 done, 0 in flight, 0 dead"

    asyncio.run(scenario())


@pytest.mark.parametrize("done", [(0, 1, 2), (0, 2)])
def test_what_is_done_leaves_with_the_next_batch(
    tmp_path: Path, done: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One commit for both, whether the numbers follow each other or not, and none of its own afterwards."""

    async def scenario() -> None:
        monkeypatch.setattr(dispatcher_module, "GATHER_SECONDS", 3600.0)
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await fill(stream, None, None, None)
            items = await take(dispatcher)
            for number in done:
                items[number].settle_as_done()
            assert len(rows(tmp_path / "bot.db")) == 3, "done is noted, and nobody waits for a commit"
            await stream.store([Record(3, b"{}")], 4)
            left = [number for number in range(4) if number not in done]
            assert [found[0] for found in rows(tmp_path / "bot.db")] == left
            counts = stream.counts()
            assert (counts.done, counts.waiting, counts.in_flight) == (len(done), 1, 3 - len(done))
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("s")
            await stream.begin()
            assert stream.counts().done == len(done), "the file says so too"

    asyncio.run(scenario())


def test_what_is_done_stays_behind_when_a_batch_is_refused(tmp_path: Path) -> None:
    """A batch with a known id is refused whole, and written without that one; the outcomes come by themselves."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await fill(stream, None, None)
            items = await take(dispatcher)
            for item in items:
                item.settle_as_done()
            stored = await stream.store([Record(1, b'{"n":1}'), Record(2, b"{}")], 3)
            assert (stored.new, stored.duplicates) == (1, 1)
            await items[0].done()  # now it is committed
            assert [found[0] for found in rows(tmp_path / "bot.db")] == [2]
            assert stream.counts().done == 2

    asyncio.run(scenario())


def test_what_is_done_is_committed_though_its_batch_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk refuses the batch that they have boarded: they are written when it is back."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await fill(stream, None)
            (item,) = await take(dispatcher)
            item.settle_as_done()
            with monkeypatch.context() as patch:
                patch.setitem(dispatcher_module.SQL, "batch_add_plain", "INSERT INTO nowhere VALUES (1)")
                with pytest.raises(sqlite3.OperationalError):
                    await stream.store([Record(1, b"{}")], 2)
            await item.done()
            assert rows(tmp_path / "bot.db") == []

    asyncio.run(scenario())


def test_in_order_per_key_side_by_side_across_keys(tmp_path: Path) -> None:
    """One of each key at a time, up to the concurrency; the next of a key after the commit of the one before."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db", concurrency=3) as (stream, dispatcher, _):
            await fill(stream, "a", "a", "b", "c", "d")
            first = await take(dispatcher)
            assert [item.id for item in first] == [0, 2, 3]
            more = asyncio.ensure_future(dispatcher.take())
            await first[1].done()
            second = await asyncio.wait_for(more, 20)
            assert [item.id for item in second] == [4]
            await first[0].done()
            assert [item.id for item in await take(dispatcher)] == [1]

    asyncio.run(scenario())


def test_failures_are_retried_then_set_aside_and_the_rest_flows_on(tmp_path: Path) -> None:
    """Three attempts in order, then a dead letter with an event; the next of the key follows."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, told):
            await fill(stream, "a", "a")
            for attempt in (1, 2, 3):
                (item,) = await take(dispatcher)
                assert (item.id, item.attempt) == (0, attempt)
                await item.failed(ValueError("no"))
            (item,) = await take(dispatcher)
            assert item.id == 1
            await item.done()
            (letter,) = stream.inbox.dead_letters()
            assert (letter.id, letter.key, letter.attempts, letter.error) == (0, "a", 3, "ValueError: no")
            assert letter.payload == b'{"n":0}'
            assert [(event["what"], event["id"]) for event in told] == [("dead-letter", 0)]
            assert str(stream.counts()) == "1 done, 0 in flight, 1 dead"

    asyncio.run(scenario())


def test_a_retry_waits_and_other_keys_do_not(tmp_path: Path) -> None:
    """The backoff of one chat is nobody else's, also after a restart."""

    async def scenario() -> None:
        slow = Retry(seconds=3600, cap_seconds=3600)
        async with opened(tmp_path / "bot.db", retry=slow) as (stream, dispatcher, _):
            await fill(stream, "a", "a", "b")
            first, other = await take(dispatcher)
            await first.failed("not now")
            await other.done()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(dispatcher.take(), 0.2)
        async with opened(tmp_path / "bot.db", retry=slow) as (_, dispatcher, _):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(dispatcher.take(), 0.2)
        async with opened(tmp_path / "bot.db") as (_, dispatcher, _):  # a smaller cap bounds an old wait
            (item,) = await take(dispatcher)
            assert (item.id, item.attempt) == (0, 2)

    asyncio.run(scenario())


def test_what_cannot_be_parsed_is_set_aside_at_once(tmp_path: Path) -> None:
    """No retry where it is pointless."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, told):
            await fill(stream, None)
            (item,) = await take(dispatcher)
            await item.set_aside("not an update")
            assert [letter.error for letter in stream.inbox.dead_letters()] == ["not an update"]
            assert told[0]["attempts"] == 1

    asyncio.run(scenario())


async def crash(path: Path, end: End = End.BY_ITSELF, **options: Any) -> list[Any]:
    """Take everything and die without an outcome: file and ledger stay as a killed process leaves them."""
    async with Inbox(path) as inbox:
        stream = inbox.stream("s")
        await stream.begin()
        dispatcher = Dispatcher(stream, FeedPolicy(**{"retry": AT_ONCE} | options))
        await dispatcher.open()
        taken = await take(dispatcher)
        inbox.store.ledger.note_end(end)
        await die(dispatcher)
        return [item.id for item in taken]


async def die(dispatcher: Dispatcher) -> None:
    """End the dispatcher as a death does: nothing more is written."""
    assert dispatcher._committer is not None
    dispatcher._committer.cancel()
    await asyncio.gather(dispatcher._committer, return_exceptions=True)


UNKNOWN = End(0)


async def take_ids(dispatcher: Dispatcher) -> list[Any]:
    """Take, and say what was taken."""
    return [item.id for item in await take(dispatcher)]


@pytest.mark.parametrize("max_attempts", [1, 2, 3, 5])
def test_each_killer_is_found_and_nobody_else(tmp_path: Path, max_attempts: int) -> None:
    """Two killers among ten, and one that merely raises: three dead letters, and every other item is handled once."""
    path = tmp_path / "bot.db"
    killers = {3, 6}
    handled: list[int] = []
    deaths_of: Counter[int] = Counter()

    async def run() -> bool:
        """Until a killer is met, as a process that dies there."""
        async with Inbox(path) as inbox:
            stream = inbox.stream("s")
            await stream.begin()
            dispatcher = Dispatcher(stream, FeedPolicy(max_attempts, concurrency=4, retry=AT_ONCE))
            await dispatcher.open()
            while stream.waiting:
                taken = await take(dispatcher)
                if killers & {item.id for item in taken}:
                    deaths_of.update(killers & {item.id for item in taken})
                    inbox.store.ledger.note_end(End.BY_ITSELF)
                    await die(dispatcher)
                    return True
                for item in taken:
                    if item.id == 8:
                        await item.failed("no")
                    else:
                        handled.append(item.id)
                        await item.done()
            await dispatcher.stop()
            return False

    async def scenario() -> None:
        async with opened(path) as (stream, _, _):
            await fill(stream, *(f"key {n}" for n in range(10)))
        while await run():
            pass
        async with opened(path) as (stream, _, _):
            assert {letter.id for letter in stream.inbox.dead_letters()} == killers | {8}

    asyncio.run(scenario())
    assert sorted(handled) == [0, 1, 2, 4, 5, 7, 9]
    assert max(deaths_of.values()) <= max(3, max_attempts) + 1  # one more for who met another suspect


def test_kills_from_outside_are_held_against_nobody(tmp_path: Path) -> None:
    """In flight at deaths that nobody explains: not set aside, and each trial waits for a longer time of quiet."""

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path) as (stream, _, _):
            await fill(stream, "a", "b")
        for _ in range(4):
            assert await crash(path, UNKNOWN) == [0, 1]  # watched ones run side by side
        assert await crash(path, UNKNOWN) == [0]  # then alone
        async with opened(path) as (stream, dispatcher, told):
            assert stream.inbox.dead_letters() == []
            assert [event["what"] for event in told] == ["crashed"]
            (other,) = await take(dispatcher)
            assert other.id == 1
            await other.done()
            with pytest.raises(TimeoutError):  # two seconds of quiet first
                await asyncio.wait_for(dispatcher.take(), 0.2)
            assert await take_ids(dispatcher) == [0]

    asyncio.run(scenario())


def test_fresh_work_never_waits_for_suspects(tmp_path: Path) -> None:
    """Sixty suspects that take for ever: what arrives afterwards is handed out at once, and they come one by one."""

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path) as (stream, _, _):
            await fill(stream, *(f"old {n}" for n in range(60)))
        assert len(await crash(path, concurrency=64)) == 60
        async with opened(path, concurrency=8) as (stream, dispatcher, _):
            suspects = await take(dispatcher, 100)
            assert len(suspects) == 1
            await stream.store([Record(1000 + n, b"{}", f"new {n}") for n in range(20)], 2000)
            for n in range(20):
                (item,) = await take(dispatcher, 1)
                assert item.id == 1000 + n
                await item.done()

    asyncio.run(scenario())


def test_a_suspect_that_takes_long_gives_its_slot_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs does not keep the others from their trial."""
    monkeypatch.setattr(dispatcher_module, "TRIAL_SECONDS", 0.05)
    monkeypatch.setattr(dispatcher_module, "LOOK_SECONDS", 0.02)

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path) as (stream, _, _):
            await fill(stream, "a", "b", "c")
        assert await crash(path) == [0, 1, 2]
        async with opened(path) as (_, dispatcher, _):
            assert [[item.id for item in await take(dispatcher)] for _ in range(3)] == [[0], [1], [2]]

    asyncio.run(scenario())


def test_a_death_by_order_counts_for_nobody(tmp_path: Path) -> None:
    """Killed while it was stopping, ten times over: still the first attempt, and not suspected."""

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path) as (stream, _, _):
            await fill(stream, "a", "b")
        for _ in range(10):
            assert await crash(path, End.STOPPING) == [0, 1]
        assert rows(path) == [(0, 0, 0, 0), (1, 0, 0, 0)]

    asyncio.run(scenario())


def test_who_is_known_to_have_done_it_pays_alone(tmp_path: Path) -> None:
    """os._exit in a handler names its item: those beside it are not even suspected."""

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path) as (stream, _, _):
            await fill(stream, "a", "b")
        for _ in range(3):
            async with Inbox(path) as inbox:
                stream = inbox.stream("s")
                await stream.begin()
                dispatcher = Dispatcher(stream, FeedPolicy(retry=AT_ONCE))
                await dispatcher.open()
                taken = [*await take(dispatcher), *([] if stream.waiting == 0 else await take(dispatcher))]
                inbox.store.ledger.note_end(End.BY_ITSELF)
                inbox.store.ledger.blame(next(item.seq for item in taken if item.key == "b"))
                await die(dispatcher)
        async with opened(path) as (stream, dispatcher, told):
            assert [(letter.key, letter.crashes) for letter in stream.inbox.dead_letters()] == [("b", 3)]
            assert {event["what"]: event.get("crashes") for event in told} == {"crashed": None, "dead-letter": 3}
            (item,) = await take(dispatcher)
            assert (item.key, item.attempt) == ("a", 1)

    asyncio.run(scenario())


ENDS_ITSELF = """
import asyncio, os, sys
from everdeck.feed import Dispatcher, FeedPolicy, Inbox, Retry, last_words

async def main():
    async with Inbox(sys.argv[1]) as guilty, Inbox(sys.argv[2]) as innocent:
        items = []
        for inbox in (guilty, innocent):
            stream = inbox.stream("s")
            await stream.begin()
            dispatcher = Dispatcher(stream, FeedPolicy(retry=Retry(seconds=0.0, cap_seconds=0.0)))
            await dispatcher.open()
            items += await asyncio.wait_for(dispatcher.take(), 20)
        last_words.current.set(items[0])
        os._exit(7)

asyncio.run(main())
"""


def test_an_exit_is_blamed_on_nobody_of_another_inbox(tmp_path: Path) -> None:
    """Two inboxes of one process have items of the same number: only the one whose handler called pays."""

    async def scenario() -> None:
        paths = tmp_path / "guilty.db", tmp_path / "innocent.db"
        for path in paths:
            async with opened(path) as (stream, _, _):
                await fill(stream, "a")
        for _ in range(3):
            ended = await asyncio.create_subprocess_exec(sys.executable, "-c", ENDS_ITSELF, *paths)
            assert await asyncio.wait_for(ended.wait(), 60) == 7
        for path, crashes in zip(paths, ([3], []), strict=True):
            async with opened(path) as (stream, _, _):
                assert [letter.crashes for letter in stream.inbox.dead_letters()] == crashes

    asyncio.run(scenario())


def test_what_was_finished_but_not_committed_does_not_come_again(tmp_path: Path) -> None:
    """A crash between the end of a handler and the commit of it repeats nothing."""

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path) as (stream, _, _):
            await fill(stream, "a", "b", "c")
        async with Inbox(path) as inbox:
            stream = inbox.stream("s")
            await stream.begin()
            dispatcher = Dispatcher(stream)
            await dispatcher.open()
            first, second, _ = await take(dispatcher)
            first.settle_as_done()
            second.settle_as_done()
            await die(dispatcher)
        assert len(rows(path)) == 3
        async with opened(path) as (stream, dispatcher, _):
            assert [item.id for item in await take(dispatcher)] == [2]
            assert stream.counts().done == 2

    asyncio.run(scenario())


def test_a_ledger_of_another_file_means_nothing(tmp_path: Path) -> None:
    """The database was deleted and made anew; its numbers begin again, and nothing of the old notes applies."""

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path) as (stream, dispatcher, _):
            await fill(stream, "a")
            (item,) = await take(dispatcher)
            await die(dispatcher)
            item.settle_as_done()
        for leftover in tmp_path.glob("bot.db*"):
            if leftover.suffix != ".lock":
                leftover.unlink()
        async with opened(path) as (stream, dispatcher, told):
            await fill(stream, "a")
            assert [item.seq for item in await take(dispatcher)] == [item.seq]
            assert told == []

    asyncio.run(scenario())


def test_dead_letters_are_tried_again_or_dropped(tmp_path: Path) -> None:
    """A retry from here or from another process is noticed by a dispatcher at work."""

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path, max_attempts=1) as (stream, dispatcher, _):
            await fill(stream, "a", "b", "c")
            for item in await take(dispatcher):
                await item.failed("no")
            first, second, third = (letter.number for letter in stream.inbox.dead_letters())
            assert await stream.inbox.drop_dead_letter(third)
            assert not await stream.inbox.drop_dead_letter(third)
            assert await stream.inbox.retry_dead_letter(first)
            (item,) = await take(dispatcher)
            assert (item.key, item.attempt) == ("a", 1)
            other = sqlite3.connect(path)
            other.execute("UPDATE everdeck_item SET state = 0, attempts = 0 WHERE seq = ?", (second,))
            other.commit()
            other.close()
            os.utime(tmp_path / "bot.db.lock")  # how the commands ring
            (item,) = await take(dispatcher)
            assert item.key == "b"
            assert stream.inbox.dead_letters() == []

    asyncio.run(scenario())


def test_at_most_once_finishes_before_the_handler(tmp_path: Path) -> None:
    """A stated choice: a crash loses what was in flight; what raises is a dead letter at once."""

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path, delivery="at-most-once") as (stream, dispatcher, _):
            await fill(stream, "a", "b")
            first, second = await take(dispatcher)
            assert rows(path) == []
            await first.failed("no")
            await second.done()
            assert [letter.id for letter in stream.inbox.dead_letters()] == [0]
            assert str(stream.counts()) == "1 done, 0 in flight, 1 dead"
        async with opened(path, delivery="at-most-once") as (stream, dispatcher, _):
            await stream.store([Record(8, b"{}")], 9)
            (item,) = await take(dispatcher)
            await item.hand_back()
            assert [letter.id for letter in stream.inbox.dead_letters()] == [0, 8]
            assert "cut off" in str(stream.inbox.dead_letters()[1].error)
            await stream.store([Record(9, b"{}")], 10)
        assert await crash(path, delivery="at-most-once") == [9]
        async with opened(path) as (_, dispatcher, _):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(dispatcher.take(), 0.2)

    asyncio.run(scenario())


def test_a_transaction_commits_the_writes_and_the_ack_together(tmp_path: Path) -> None:
    """Both or neither; nothing is retried after it, and it happens once."""

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path) as (stream, dispatcher, told):
            async with stream.inbox.transaction() as db:
                db.execute("CREATE TABLE effect (id INTEGER)")
            await fill(stream, "a", "b")
            first, second = await take(dispatcher)
            with pytest.raises(RuntimeError):  # noqa: PT012 - the transaction is the statement
                async with first.transaction() as db:
                    db.execute("INSERT INTO effect VALUES (?)", (first.id,))
                    raise RuntimeError
            assert rows(path) == [(0, 0, 0, 0), (1, 0, 0, 0)]
            async with first.transaction() as db:
                db.execute("INSERT INTO effect VALUES (?)", (first.id,))
                assert rows(path) == [(0, 0, 0, 0), (1, 0, 0, 0)]
            assert rows(path) == [(1, 0, 0, 0)]
            with pytest.raises(FeedError, match="already committed"):
                async with first.transaction():
                    pass
            await first.failed(ValueError("after the commit"))
            assert [event["what"] for event in told] == ["raised-after-commit"]
            await second.done()
            assert str(stream.counts()) == "2 done, 0 in flight, 0 dead"
            async with stream.inbox.transaction() as db:
                assert db.execute("SELECT id FROM effect").fetchall() == [(0,)]

    asyncio.run(scenario())


def test_a_transaction_that_waits_holds_up_nobody_forever(tmp_path: Path) -> None:
    """Others queue for the write lock without blocking the loop the holder needs."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await fill(stream, "a", "b")
            first, second = await take(dispatcher)
            go_on = asyncio.Event()

            async def slow() -> None:
                async with first.transaction():
                    await go_on.wait()

            task = asyncio.ensure_future(slow())
            await asyncio.sleep(0)
            done = asyncio.ensure_future(second.done())
            stored = asyncio.ensure_future(stream.store([Record(10, b"{}")], 11))
            await asyncio.sleep(0)
            assert not done.done()
            go_on.set()
            await asyncio.wait_for(asyncio.gather(task, done, stored), 20)
            await first.done()

    asyncio.run(scenario())


def test_stop_waits_for_the_grace_and_hands_back_the_rest(tmp_path: Path) -> None:
    """What finishes in time is done; the rest comes again, and its attempt does not count."""

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path) as (stream, dispatcher, _):
            await fill(stream, "a", "b")
            first, second = await take(dispatcher)
            waiting = asyncio.ensure_future(dispatcher.take())
            await asyncio.sleep(0)
            stopping = asyncio.ensure_future(dispatcher.stop(0.3))
            await asyncio.sleep(0)
            await first.done()
            assert await asyncio.wait_for(stopping, 20) == 1
            with pytest.raises(FeedClosed):
                await waiting
            with pytest.raises(FeedClosed):
                await dispatcher.take()
            assert second.settled
            assert rows(path) == [(1, 0, 0, 0)]

    asyncio.run(scenario())


def test_a_cancelled_take_hands_nothing_to_nobody(tmp_path: Path) -> None:
    """Items that were on their way to somebody who left are taken by the next one, with the first attempt."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            for n in range(50):
                waiting = asyncio.ensure_future(dispatcher.take())
                await asyncio.sleep(0)
                storing = asyncio.ensure_future(stream.store([Record(n, b"{}")], n + 1))
                for _ in range(n % 7):
                    await asyncio.sleep(0)
                waiting.cancel()
                try:
                    items = await waiting
                except asyncio.CancelledError:
                    await storing
                    items = await take(dispatcher)
                await storing
                assert [(item.id, item.attempt) for item in items] == [(n, 1)]
                await items[0].done()

    asyncio.run(scenario())


def test_waiting_for_an_ack_inside_a_transaction_is_refused(tmp_path: Path) -> None:
    """It would wait forever; other tasks may wait, they only come later."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await fill(stream, "a")
            (item,) = await take(dispatcher)
            async with item.transaction():
                with pytest.raises(FeedError, match="transaction is open"):
                    await item.done()
            await item.done()

    asyncio.run(scenario())


def test_a_full_disk_in_a_handler_costs_no_attempt(tmp_path: Path) -> None:
    """It is not the item's fault: it comes again a little later, however often."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db", max_attempts=1) as (stream, dispatcher, told):
            await fill(stream, "a")
            for _ in range(2):
                (item,) = await take(dispatcher)
                assert item.attempt == 1
                await item.failed(InboxUnavailable("full"))
            (item,) = await take(dispatcher)
            await item.done()
            assert {event["what"] for event in told} == {"inbox-unavailable"}

    asyncio.run(scenario())


def test_without_inotify_a_retry_is_noticed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's inotify descriptors may be used up; then SQLite is asked now and then."""

    def exhausted() -> int:
        raise inotify.Exhausted(24, "too many")

    monkeypatch.setattr(inotify, "open_inotify", exhausted)
    monkeypatch.setattr(bell, "ASK_SECONDS", 0.05)

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path, max_attempts=1) as (stream, dispatcher, _):
            await fill(stream, "a")
            (item,) = await take(dispatcher)
            await item.failed("no")
            other = sqlite3.connect(path)
            other.execute("UPDATE everdeck_item SET state = 0, attempts = 0")
            other.commit()
            other.close()
            (item,) = await take(dispatcher)
            await item.done()

    asyncio.run(scenario())


def test_a_bell_during_a_commit_brings_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being written as done still waits in the file; it was handled all the same."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await fill(stream, "a")
            (item,) = await take(dispatcher)
            with _held_write(dispatcher, monkeypatch) as writing:
                done = asyncio.ensure_future(item.done())
                await asyncio.to_thread(writing.wait, 20)
                stream.inbox.store.bell.ring()
                again = asyncio.ensure_future(dispatcher.take())
                for _ in range(20):
                    await asyncio.sleep(0)
            await done
            await stream.store([Record(7, b"{}", "b")], 8)
            (item,) = await asyncio.wait_for(again, 20)
            assert item.key == "b"
            await item.done()

    asyncio.run(scenario())


def test_a_retry_that_is_asked_for_while_it_is_set_aside_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bell may ring after the letter is on disk and before the program knows."""

    async def scenario() -> None:
        path = tmp_path / "bot.db"
        async with opened(path, max_attempts=1) as (stream, dispatcher, _):
            await fill(stream, "a")
            (item,) = await take(dispatcher)
            again = asyncio.ensure_future(dispatcher.take())

            def asked() -> None:
                with sqlite3.connect(path) as other:
                    other.execute("UPDATE everdeck_item SET state = 0, attempts = 0")
                other.close()

            with _rung_before_told(stream, dispatcher, monkeypatch, asked):
                await item.failed("no")
            (item,) = await asyncio.wait_for(again, 20)
            await item.done()

    asyncio.run(scenario())


def test_an_arrival_that_is_found_before_it_is_told_is_handled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bell between the commit of a batch and the news of it: the item is there twice, and is one."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            first = asyncio.ensure_future(dispatcher.take())
            with _rung_before_told(stream, dispatcher, monkeypatch):
                await stream.store([Record(1, b"{}", "a")], 2, sync=False)
            (item,) = await asyncio.wait_for(first, 20)
            second = asyncio.ensure_future(dispatcher.take())
            await item.done()
            await stream.store([Record(2, b"{}", "a")], 3)
            (item,) = await asyncio.wait_for(second, 20)
            assert item.id == 2
            await item.done()
            assert stream.waiting == 0

    asyncio.run(scenario())


@contextmanager
def _rung_before_told(
    stream: Stream,
    dispatcher: Dispatcher,
    monkeypatch: pytest.MonkeyPatch,
    first: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """A bell is heard, and listened to, between each commit and the news of it; ``first`` is what it tells of."""
    store, loop = stream.inbox.store, asyncio.get_running_loop()
    write = store.write

    async def then_rung(work: Callable[[Any], Any], **options: Any) -> Any:
        def rung(connection: Any) -> Any:
            answer = work(connection) if options.get("alone") else store.whole(work)
            first()
            # Not by ring(): its echo from the file system would come at any later time.
            loop.call_soon_threadsafe(dispatcher._hear_bell)
            asyncio.run_coroutine_threadsafe(_taken_note(dispatcher), loop).result(60)
            return answer

        return await write(rung, **{**options, "alone": True})

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", then_rung)
        yield


def test_whoever_waits_for_the_end_hears_of_an_arrival_that_was_told_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found before it was told of and is done when the news of it is read: that it is the last is heard."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            first = asyncio.ensure_future(dispatcher.take())
            with _rung_before_told(stream, dispatcher, monkeypatch):
                await stream.store([Record(1, b"{}")], 2, sync=False)
            (item,) = await asyncio.wait_for(first, 60)
            drained = asyncio.ensure_future(dispatcher.drained())
            await item.done()
            assert not drained.done()
            taking = asyncio.ensure_future(dispatcher.take())
            await asyncio.wait_for(drained, 60)
            taking.cancel()

    asyncio.run(scenario())


def test_whoever_waits_for_the_end_hears_that_somebody_else_removed_the_last(tmp_path: Path) -> None:
    """The row of the only waiting item is gone when its turn comes: nothing is left, and that is heard."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await stream.store([Record(1, b"{}")], 2)
            stream._at_hand.clear()
            async with stream.inbox.transaction() as db:
                db.execute("DELETE FROM everdeck_item")
            drained = asyncio.ensure_future(dispatcher.drained())
            await asyncio.sleep(0)
            assert not drained.done()
            taking = asyncio.ensure_future(dispatcher.take())
            await asyncio.wait_for(drained, 60)
            taking.cancel()

    asyncio.run(scenario())


async def _taken_note(dispatcher: Dispatcher) -> None:
    """Until the one who waits for work has looked at what the bell told."""
    while dispatcher._revived:  # noqa: ASYNC110 - turns of the loop, not time
        await asyncio.sleep(0)


@contextmanager
def _held_write(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Outcomes stay unwritten until the end of the block; the answer is set when a write has come that far."""
    writing, may_go = threading.Event(), threading.Event()
    write = dispatcher._write_outcomes

    def held(*arguments: Any) -> None:
        writing.set()
        assert may_go.wait(20)
        write(*arguments)

    monkeypatch.setattr(dispatcher, "_write_outcomes", held)
    try:
        yield writing
    finally:
        may_go.set()


def test_a_broken_file_ends_the_feed_loudly(tmp_path: Path) -> None:
    """Who waits for an outcome or for work is told; nothing hangs."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await fill(stream, "a")
            (item,) = await take(dispatcher)
            waiting = asyncio.ensure_future(dispatcher.take())
            stranger = sqlite3.connect(tmp_path / "bot.db", isolation_level=None)
            stranger.execute("ALTER TABLE everdeck_item RENAME TO elsewhere")
            with pytest.raises(FeedError, match="committer failed"):
                await asyncio.wait_for(item.done(), 20)
            with pytest.raises(FeedError, match="committer failed"):
                await asyncio.wait_for(waiting, 20)
            stranger.execute("ALTER TABLE elsewhere RENAME TO everdeck_item")
            stranger.close()

    asyncio.run(scenario())


def test_a_dispatcher_can_be_opened_again(tmp_path: Path) -> None:
    """After a stop, in another event loop, with what another process did meanwhile."""
    inbox = Inbox(tmp_path / "bot.db")
    dispatcher = Dispatcher(inbox.stream("s"))
    handled: list[Any] = []

    async def run(n: int) -> None:
        async with inbox:
            await dispatcher.stream.begin()
            await dispatcher.open()
            with pytest.raises(FeedError, match="already open"):
                await dispatcher.open()
            await dispatcher.stream.store([Record(n, b"{}")], n + 1)
            for item in await take(dispatcher):
                handled.append(item.id)
                await item.done()
            await dispatcher.stop()

    for n in range(3):
        asyncio.run(run(n))
    assert handled == [0, 1, 2]


def test_background_work_frees_its_key_and_its_slot(tmp_path: Path) -> None:
    """block=False: the next of the chat starts; the outcome still decides."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db", concurrency=1) as (stream, dispatcher, _):
            await fill(stream, "a", "a")
            (first,) = await take(dispatcher)
            first.release()
            (second,) = await take(dispatcher)
            assert second.id == 1
            await first.failed("later")
            await second.done()
            (again,) = await take(dispatcher)
            assert (again.id, again.attempt) == (0, 2)
            await again.done()
            await asyncio.wait_for(dispatcher.drained(), 20)

    asyncio.run(scenario())


def test_many_keys_memory_holds_numbers_only(tmp_path: Path) -> None:
    """A backlog is numbers and keys in memory: the payloads stay in the file."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await stream.store([Record(n, b"x" * 5000, str(n % 100)) for n in range(2000)], 2000)
            (item,) = await take(dispatcher, 1)
            assert len(dispatcher._lanes) == 1999
            assert all(isinstance(seq, int) for seq in dispatcher._lanes.seqs())
            await item.done()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "options", [{"concurrency": 0}, {"concurrency": True}, {"max_attempts": 0}, {"delivery": "exactly-once"}]
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any]) -> None:
    """Before anything is written."""
    with pytest.raises(SpecError, match=next(iter(options))):
        FeedPolicy(**options)


def test_the_delay_doubles_up_to_the_cap() -> None:
    """Between half and all of it, by chance."""
    retry = Retry(seconds=1, cap_seconds=10)
    assert [retry.delay(attempt, 1.0) for attempt in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 8, 10, 10]
    assert retry.delay(3, 0.0) == 2


@contextmanager
def held_commit(store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The loop does not hear of a commit until the end of the block; the answer is set once it has happened."""
    committed, may_go = threading.Event(), threading.Event()
    in_thread = store._in_thread

    async def held(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        def and_wait(*arguments: Any) -> Any:
            answer = call(*arguments)
            committed.set()
            assert may_go.wait(60)
            return answer

        commits = call not in {store._begin, store._look, store._synced}
        return await in_thread(and_wait if commits else call, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_in_thread", held)
        try:
            yield committed
        finally:
            may_go.set()


async def cancelled_in_its_commit(work: Any, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start it, and cancel it after its commit, before it hears of that."""
    task = asyncio.ensure_future(work)
    with held_commit(store, monkeypatch) as committed:
        assert await asyncio.to_thread(committed.wait, 60)
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)


def test_a_stop_during_a_commit_counts_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committer is cancelled when its group is in the file already: it is not written again."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await fill(stream, "a")
            (item,) = await take(dispatcher)
            with held_commit(stream.inbox.store, monkeypatch) as committed:
                done = asyncio.ensure_future(item.done())
                assert await asyncio.to_thread(committed.wait, 60)
                stopping = asyncio.ensure_future(dispatcher.stop(0))
                while dispatcher._committer is not None:  # noqa: ASYNC110 - turns of the loop, not time
                    await asyncio.sleep(0)
            await asyncio.wait_for(stopping, 60)
            await asyncio.wait_for(done, 60)

    asyncio.run(scenario())
    connection = sqlite3.connect(tmp_path / "bot.db")
    assert connection.execute("SELECT done FROM everdeck_stream").fetchall() == [(1,)]
    connection.close()


def test_a_transaction_that_is_cancelled_in_its_commit_is_known_to_be_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The item is acked, and what waits for the commit (a reply) hears of it."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            await fill(stream, "a")
            (item,) = await take(dispatcher)
            heard: list[str] = []

            async def work() -> None:
                async with item.transaction() as db:
                    db.after_commit(lambda: heard.append("committed"))

            await cancelled_in_its_commit(work(), stream.inbox.store, monkeypatch)
            assert item.acked
            assert heard == ["committed"]
            item.settle_as_handed_back()
            assert (stream.counts().done, stream.waiting) == (1, 0)

    asyncio.run(scenario())


def test_a_batch_whose_storing_is_cancelled_in_its_commit_is_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a webhook's request may be: sent again it is known already, so it must have been taken."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db") as (stream, dispatcher, _):
            batch = [Record(1, b"{}")]
            await cancelled_in_its_commit(stream.store(batch, sync=False), stream.inbox.store, monkeypatch)
            assert (await stream.store(batch)).duplicates == 1
            (item,) = await take(dispatcher)
            await item.done()

    asyncio.run(scenario())


def test_at_most_once_a_take_that_is_cancelled_in_its_commit_leaves_a_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was finished before it was handled, and nobody got it: a person can see that."""

    async def scenario() -> None:
        async with opened(tmp_path / "bot.db", delivery="at-most-once") as (stream, dispatcher, _):
            await fill(stream, "a")
            await cancelled_in_its_commit(dispatcher.take(), stream.inbox.store, monkeypatch)
            await asyncio.wait_for(dispatcher.stop(0), 60)
            assert [letter.id for letter in stream.inbox.dead_letters()] == [0]
            assert stream.counts().done == 0

    asyncio.run(scenario())
