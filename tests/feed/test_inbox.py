"""The inbox: what is stored together, what is known, what a server that forgets is told."""

import asyncio
import contextlib
import errno
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everdeck.errors import FeedClosed, FeedError, InboxUnavailable, PollerConflict, SourceError, SpecError
from everdeck.feed import Dispatcher, FeedPolicy, Inbox, Record, Retry, Start, Stream, consume
from support.feed_upstream import Upstream, UpstreamSource, batch_of, update

DAY = 24 * 3600.0


class Now:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.time = 1_700_000_000.0

    def __call__(self) -> float:
        """The time now."""
        return self.time


async def poll_once(stream: Stream, upstream: Upstream, limit: int = 10) -> list[int]:
    """One poll as an adapter does it; the ids that the server gave."""
    offset = stream.position().offset
    got = upstream.get(offset, limit)
    batch = batch_of(got, asked=offset)
    await stream.store(batch.records, batch.cursor, asked=offset)
    return [one["update_id"] for one in got]


def stored_ids(path: Path) -> list[int]:
    """What waits in the file, by another connection."""
    with sqlite3.connect(path) as connection:
        ids = [row[0] for row in connection.execute("SELECT id FROM everdeck_item ORDER BY seq")]
    connection.close()
    return ids


def test_batch_and_cursor_are_one_commit(tmp_path: Path) -> None:
    """Both are there for another process as soon as store returns, and a new run resumes there."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            assert await stream.begin() is Start.TAKE
            stored = await stream.store([Record(7, b"{}"), Record(9, b"{}")], 10)
            assert (stored.new, stored.duplicates, stored.restarted_ids) == (2, 0, False)
            assert stored_ids(tmp_path / "bot.db") == [7, 9]
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            assert await stream.begin() is Start.RESUME
            assert stream.cursor() == 10
            assert stream.counts().waiting == 2

    asyncio.run(scenario())


def test_a_failed_store_changes_nothing(tmp_path: Path) -> None:
    """Half a batch is no batch: the position in memory and on disk is the old one."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("s")
            await stream.begin()
            await stream.store([Record(1, b"{}")], 2)
            with pytest.raises(SourceError):
                await stream.store([Record(2, b"{}"), Record(3, None)], 4)  # type: ignore[arg-type]
            assert stream.cursor() == 2
            assert stored_ids(tmp_path / "bot.db") == [1]
            with pytest.raises(SourceError):
                await stream.store([{"update_id": 4}], 5)  # type: ignore[list-item]
            await stream.store([Record(2, b"{}")], 3)
            assert stored_ids(tmp_path / "bot.db") == [1, 2]

    asyncio.run(scenario())


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that this process syncs, one by one."""
    names: list[str] = []
    sync = os.fdatasync

    def noted(fd: int) -> None:
        sync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115 - a kernel file
        names.append(f"{path.name}/" if path.is_dir() else path.name)

    monkeypatch.setattr(os, "fdatasync", noted)
    return names


def test_a_batch_that_is_synced_has_its_log_on_disk(tmp_path: Path, syncs: list[str]) -> None:
    """SQLite commits it to the WAL and leaves the sync to us: once, before anybody is told, and after the commit."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            assert syncs[:2] == [f"{tmp_path.name}/", "bot.db-wal"], "the name of the log, then the log"
            syncs.clear()
            await stream.store([Record(1, b"{}")], sync=False)
            await stream.synced()
            await stream.synced()
            assert syncs == ["bot.db-wal"]
            await stream.store([Record(2, b"{}")], sync=True)
            assert syncs == ["bot.db-wal"] * 2
            async with inbox.store.transaction(durable=True) as connection:
                connection.execute("CREATE TABLE mine (id)")
                assert syncs == ["bot.db-wal"] * 2
            assert syncs == ["bot.db-wal"] * 3

    asyncio.run(scenario())


def test_a_batch_whose_sync_fails_is_stored_and_not_told_to_be_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the file, so it is handled; whoever brought it hears of the failure and may bring it again."""

    def broken(fd: int) -> None:
        del fd
        raise OSError(errno.EIO, "Input/output error")

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", broken)
                with pytest.raises(InboxUnavailable, match="not synced"):
                    await stream.add(Record(1, b"{}"))
            assert stream.waiting == 1
            await stream.add(Record(1, b"{}"))
            assert stream.waiting == 1
            assert stored_ids(tmp_path / "bot.db") == [1]

    asyncio.run(scenario())


def test_after_a_refused_sync_everything_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of what it could not write once, so the next sync of the log would prove nothing."""
    sync = os.fdatasync

    def broken(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("-wal"):  # noqa: PTH115 - a kernel file
            raise OSError(errno.EIO, "Input/output error")
        sync(fd)

    def without_log() -> list[int]:
        alone = tmp_path / "alone.db"
        alone.write_bytes((tmp_path / "bot.db").read_bytes())
        return stored_ids(alone)

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            await stream.add(Record(1, b"{}"))
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", broken)
                await stream.store([Record(2, b"{}")], sync=False)
                with pytest.raises(InboxUnavailable, match="not synced"):
                    await stream.synced()
            await stream.synced()
            assert without_log() == [1, 2]
            await stream.store([Record(3, b"{}")], sync=False)
            await stream.synced()
            assert without_log() == [1, 2], "and the log is enough again"

    asyncio.run(scenario())


def test_a_batch_is_committed_and_synced_by_one_call_of_the_thread(tmp_path: Path, syncs: list[str]) -> None:
    """Each call of the file's thread costs two switches of threads, and there is one of these per batch."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            hops: list[object] = []
            in_thread = inbox.store._in_thread

            async def counted(call: Any, *arguments: Any, **options: Any) -> Any:
                hops.append(call)
                return await in_thread(call, *arguments, **options)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(inbox.store, "_in_thread", counted)
                syncs.clear()
                await stream.add(Record(1, b"{}"))
                assert (len(hops), len(syncs)) == (1, 1), "nobody has anything else to do"
                await stream.store([Record(number, b"{}") for number in range(2, 50)])
                await stream.add(Record(50, b"{}"))
                await stream.synced()
                assert (len(hops), len(syncs)) == (3, 3), "the handlers have enough to do"
            assert stored_ids(tmp_path / "bot.db") == list(range(1, 51))

    asyncio.run(scenario())


def test_a_handler_that_has_nothing_else_to_do_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is told of when it is committed; whoever confirms it upstream waits for the sync that follows."""
    disk_is_back = threading.Event()
    sync = os.fdatasync

    def slow(fd: int) -> None:
        assert disk_is_back.wait(60)
        sync(fd)

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            monkeypatch.setattr(os, "fdatasync", slow)
            await stream.store([Record(1, b"{}")], sync=False)
            assert stored_ids(tmp_path / "bot.db") == [1]
            synced = asyncio.ensure_future(stream.synced())
            given_up = asyncio.ensure_future(asyncio.wait_for(asyncio.shield(synced), 0.05))
            with pytest.raises(TimeoutError):
                await given_up
            disk_is_back.set()
            await synced

    asyncio.run(scenario())


def test_what_is_brought_meanwhile_shares_a_commit(tmp_path: Path) -> None:
    """Those that come while another writes are stored together, each hears of it, and a failure is everybody's."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            await stream.add(Record(1, b"{}"))
            before = inbox.store.read("stream", "telegram:1")
            async with asyncio.TaskGroup() as group, inbox.transaction():  # nobody else can write
                brought = [group.create_task(stream.add(Record(number, b"{}"))) for number in (2, 3, 4, 3)]
                await asyncio.sleep(0)
                assert not any(one.done() for one in brought)
                assert inbox.store.read("stream", "telegram:1") == before
            assert stored_ids(tmp_path / "bot.db") == [1, 2, 3, 4]
            with sqlite3.connect(tmp_path / "bot.db") as connection:
                times = [at for (at,) in connection.execute("SELECT stored_at FROM everdeck_item ORDER BY seq")]
            connection.close()
            assert len(set(times[1:])) == 1
            failed = await asyncio.gather(
                *(stream.add(Record(number, "no bytes")) for number in (5, 6)),  # type: ignore[arg-type]
                return_exceptions=True,
            )
            assert [type(one) for one in failed] == [SourceError, SourceError]
            await stream.add(Record(7, b"{}"))
        assert stored_ids(tmp_path / "bot.db") == [1, 2, 3, 4, 7]

    asyncio.run(scenario())


def test_those_who_are_answered_bring_the_next_into_one_commit(tmp_path: Path, syncs: list[str]) -> None:
    """As Telegram's connections do. Two halves, of which one is written while the other comes, become one whole."""
    callers, each = 16, 5

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            syncs.clear()

            async def caller(number: int) -> None:
                for turn in range(each):
                    await stream.add(Record(number * each + turn, b"{}"))

            async with asyncio.TaskGroup() as group:
                for number in range(callers // 2):
                    group.create_task(caller(number))
                while not syncs:  # noqa: ASYNC110 - the file's thread has them
                    await asyncio.sleep(0)
                for number in range(callers // 2, callers):
                    group.create_task(caller(number))
            assert len(syncs) <= each + 1, "at first the halves, then all of them together"
        assert len(stored_ids(tmp_path / "bot.db")) == callers * each

    asyncio.run(scenario())


def test_known_ids_are_dropped_by_membership(tmp_path: Path) -> None:
    """A batch that comes again adds nothing; an id in a gap below the last one is new."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("s")
            await stream.begin()
            batch = [Record(n, b"%d" % n) for n in (1, 2, 5)]
            await stream.store(batch, 6)
            again = await stream.store([*batch, Record(3, b"3")], 6)
            assert (again.new, again.duplicates) == (1, 3)
            texts = await stream.store([Record("a", b"a"), Record("a", b"a"), Record("b", b"b")], "b")
            assert (texts.new, texts.duplicates) == (2, 1)
            assert stored_ids(tmp_path / "bot.db") == [1, 2, 5, 3, "a", "b"]

    asyncio.run(scenario())


def test_streams_have_their_own_cursor_and_ids(tmp_path: Path) -> None:
    """Two bots in one file know nothing of each other; a bot is known by its id, so a new token changes nothing."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            one, two = inbox.stream("telegram:1"), inbox.stream("telegram:2")
            await one.begin()
            await two.begin()
            await one.store([Record(5, b"{}")], 6)
            assert (await two.store([Record(5, b"{}")], 6)).new == 1
            assert two.cursor() == 6
            await two.store([Record(50, b"{}")], 51)
            assert one.cursor() == 6

    asyncio.run(scenario())


def test_ids_that_start_again_are_a_new_epoch(tmp_path: Path) -> None:
    """After a quiet week the ids come back lower: nothing is dropped, and what repeats is still known."""

    async def scenario() -> None:
        upstream = Upstream()
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            upstream.arrive(*(update(n) for n in range(9000, 9005)))
            await poll_once(stream, upstream)
            await poll_once(stream, upstream)  # empty: confirms 9005
            assert upstream.queued() == []
            upstream.arrive(*(update(n, text=f"new {n}") for n in range(100, 105)))
            assert await poll_once(stream, upstream) == [100, 101, 102, 103, 104]
            assert stream.cursor() == 105
            assert await poll_once(stream, upstream) == []
            assert stored_ids(tmp_path / "bot.db") == [*range(9000, 9005), *range(100, 105)]

    asyncio.run(scenario())


def test_the_same_ids_in_a_new_epoch_are_new(tmp_path: Path) -> None:
    """The worst case: the new ids are exactly those that we know. Their content tells them apart."""

    async def scenario() -> None:
        upstream = Upstream()
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            for epoch in range(3):
                upstream.arrive(*(update(n, text=f"epoch {epoch}") for n in range(50, 55)))
                assert await poll_once(stream, upstream) == [50, 51, 52, 53, 54]
                assert await poll_once(stream, upstream) == []
            assert stream.counts().waiting == 15

    asyncio.run(scenario())


@pytest.mark.parametrize("below", range(1, 12))
def test_the_offset_just_beyond_the_tail_deletes_nothing(tmp_path: Path, below: int) -> None:
    """``tail < offset <= tail + 10`` makes a server delete what we never saw: a confirmed offset is not sent again."""

    async def scenario() -> None:
        upstream = Upstream()
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            upstream.arrive(*(update(n) for n in range(1000, 1010)))
            await poll_once(stream, upstream)
            await poll_once(stream, upstream)  # empty: 1010 is confirmed
            assert stream.position().offset == 0
        async with Inbox(tmp_path / "bot.db") as inbox:  # also after a restart
            stream = inbox.stream("telegram:1")
            await stream.begin()
            tail = 1010 - below
            upstream.arrive(*(update(n, text="after the week") for n in range(tail - 2, tail + 1)))
            assert len(await poll_once(stream, upstream)) == 3
            assert stream.counts().waiting == 13

    asyncio.run(scenario())


def test_an_unconfirmed_offset_is_sent_until_it_is_too_old(tmp_path: Path) -> None:
    """After a day upstream has forgotten by itself, so the offset is no longer needed and may be dangerous."""

    async def scenario() -> None:
        now = Now()
        async with Inbox(tmp_path / "bot.db", clock=now) as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            assert stream.position().offset == 0
            await stream.store([Record(5, b"{}")], 6, asked=0)
            now.time += DAY - 1
            assert stream.position().offset == 6
            now.time += 2
            assert stream.position().offset == 0
            assert stream.cursor() == 6

    asyncio.run(scenario())


def test_an_answer_without_news_confirms_only_what_was_asked(tmp_path: Path) -> None:
    """An empty answer to a poll from the head says nothing about our offset."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            await stream.store([Record(5, b"{}")], 6, asked=0)
            await stream.store([], None, asked=0)
            assert stream.position().offset == 6
            await stream.store([], None, asked=6)
            assert stream.position().offset == 0

    asyncio.run(scenario())


def test_what_comes_again_is_confirmed_again(tmp_path: Path) -> None:
    """A server that still has what we know must be told once more, or it would hand it out forever."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            await stream.store([Record(5, b"{}")], 6, asked=0)
            await stream.store([], None, asked=6)
            again = await stream.store([Record(5, b"{}")], 6, asked=0)
            assert (again.new, again.duplicates) == (0, 1)
            assert stream.position().offset == 6

    asyncio.run(scenario())


def test_where_there_is_no_directory_there_is_no_inbox(tmp_path: Path) -> None:
    """The error names the path; nothing is made up."""
    with pytest.raises(InboxUnavailable, match="nowhere"):
        asyncio.run(Inbox(tmp_path / "nowhere" / "bot.db").open())


def test_first_run_skip_is_recorded_before_it_is_done(tmp_path: Path) -> None:
    """A skip that was cut short never runs again: what came meanwhile is real work."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            assert await inbox.stream("s").begin("skip") is Start.SKIP
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("s")
            assert await stream.begin("skip") is Start.TAKE
            assert stream.position().offset == 0
        async with Inbox(tmp_path / "other.db") as inbox:
            stream = inbox.stream("s")
            assert await stream.begin("skip") is Start.SKIP
            await stream.skip(to=77)
            assert stream.position().offset == 77
        async with Inbox(tmp_path / "other.db") as inbox:
            stream = inbox.stream("s")
            assert await stream.begin("skip") is Start.RESUME
            assert stream.position().offset == 77
            with pytest.raises(SpecError, match=r"take \| skip"):
                await stream.begin("maybe")  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_skip_leaves_the_history_and_takes_what_follows(tmp_path: Path) -> None:
    """The last old update is confirmed away with the rest."""

    async def scenario() -> None:
        upstream = Upstream()
        upstream.arrive(*(update(n) for n in range(1, 6)))
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            assert await stream.begin("skip") is Start.SKIP
            await stream.skip(to=await UpstreamSource(upstream).skip_history())
            upstream.arrive(update(6), update(7))
            assert await poll_once(stream, upstream) == [6, 7]
            assert upstream.asked() == [-1, 6]

    asyncio.run(scenario())


def test_the_backlog_is_bounded(tmp_path: Path) -> None:
    """Above the bound the source is not asked until something is done."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db", max_backlog=5) as inbox:
            stream = inbox.stream("s")
            await stream.begin()
            dispatcher = Dispatcher(stream, FeedPolicy(concurrency=2))
            await dispatcher.open()
            await stream.store([Record(n, b"{}") for n in range(6)], 6)
            waiting = asyncio.ensure_future(stream.room())
            items = await dispatcher.take(1)
            assert not waiting.done()
            items += await dispatcher.take(1)
            await asyncio.wait_for(waiting, 60)
            for item in items:
                await item.done()
            await dispatcher.stop()

    asyncio.run(scenario())


def test_old_ids_are_forgotten_and_pages_given_back(tmp_path: Path) -> None:
    """By age and by number, never those of the last batch; the file shrinks after a flood."""

    async def scenario() -> None:
        now = Now()
        async with Inbox(tmp_path / "bot.db", remember_ids=500, clock=now) as inbox:
            stream = inbox.stream("s")
            await stream.begin()
            dispatcher = Dispatcher(stream, FeedPolicy(concurrency=1000))
            await dispatcher.open()
            for first in range(0, 10_000, 1000):
                await stream.store([Record(n, b"x" * 1000) for n in range(first, first + 1000)], first + 1000)
            full = (tmp_path / "bot.db").stat().st_size + (tmp_path / "bot.db-wal").stat().st_size
            for _ in range(10):
                items = await dispatcher.take(1000)
                for item in items[1:]:
                    item.settle_as_done()
                await items[0].done()
            for _ in range(60):
                await inbox.housekeep()
            known = inbox.store.read("seen_oldest")
            assert len(known) == 1000  # the last batch, though it is more than is to be remembered
            assert (await stream.store([Record(9_999, b"x")], 10_000)).duplicates == 1
            await dispatcher.stop()
        assert (tmp_path / "bot.db").stat().st_size < full / 3

    asyncio.run(scenario())


def test_age_makes_ids_forgotten(tmp_path: Path) -> None:
    """After two days upstream cannot deliver it again, so the id is free for another epoch."""

    async def scenario() -> None:
        now = Now()
        async with Inbox(tmp_path / "bot.db", clock=now) as inbox:
            stream = inbox.stream("s")
            await stream.begin()
            await stream.store([Record(1, b"{}")], 2)
            now.time += 3 * DAY
            await stream.store([Record(2, b"{}")], 3)
            await inbox.housekeep()
            assert [row[0] for row in inbox.store.read("seen_oldest")] == [2]

    asyncio.run(scenario())


def test_one_process_works_from_a_file(tmp_path: Path) -> None:
    """A second process is refused and told who has it; looking at it is allowed, and so is a second object here."""
    script = (
        "import asyncio, sys\nfrom everdeck.feed import Inbox\n"
        "async def main():\n    await Inbox(sys.argv[1]).open()\n    print('open', flush=True)\n    sys.stdin.read()\n"
        "asyncio.run(main())\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "bot.db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "open\n"

        async def refused() -> None:
            with pytest.raises(PollerConflict, match=f"pid {other.pid}"):
                await Inbox(tmp_path / "bot.db").open()
            looking = Inbox(tmp_path / "bot.db")
            await looking.open(work=False)
            assert looking.dead_letters() == []
            await looking.close()

        asyncio.run(refused())
    finally:
        other.communicate()

    async def shared() -> None:
        async with Inbox(tmp_path / "bot.db") as one, Inbox(tmp_path / "." / "bot.db") as two:
            assert one.store is two.store

    asyncio.run(shared())


def test_a_closed_inbox_says_so(tmp_path: Path) -> None:
    """Nothing is opened behind the caller's back."""
    with pytest.raises(FeedClosed):
        _ = Inbox(tmp_path / "bot.db").store
    assert not list(tmp_path.iterdir())


def test_a_newer_or_foreign_file_is_left_untouched(tmp_path: Path) -> None:
    """What we cannot read is not ours to change."""
    (tmp_path / "text").write_text("this is not a database, and long enough to be looked at" * 50)

    async def opened(path: Path) -> None:
        async with Inbox(path):
            pass

    with pytest.raises(InboxUnavailable, match="not a database"):
        asyncio.run(opened(tmp_path / "text"))
    assert (tmp_path / "text").read_text().startswith("this is not")
    asyncio.run(opened(tmp_path / "bot.db"))
    with sqlite3.connect(tmp_path / "bot.db") as connection:
        connection.execute("UPDATE everdeck_feed_version SET version = 99")
    connection.close()
    with pytest.raises(InboxUnavailable, match="newer"):
        asyncio.run(opened(tmp_path / "bot.db"))


def test_the_users_own_tables_live_in_the_same_file(tmp_path: Path) -> None:
    """A file that the user's program made before is used as it is."""
    with sqlite3.connect(tmp_path / "bot.db") as connection:
        connection.execute("CREATE TABLE notes (text TEXT)")
    connection.close()

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            async with inbox.transaction() as db:
                db.execute("INSERT INTO notes VALUES (?)", ("kept",))
            with pytest.raises(FeedError, match="transaction is over"):
                db.execute("SELECT 1")
            with pytest.raises(sqlite3.OperationalError, match="no such table"):  # noqa: PT012 - the transaction is the statement
                async with inbox.transaction() as db:
                    db.execute("INSERT INTO notes VALUES ('lost')")
                    db.execute("INSERT INTO nowhere VALUES (1)")
            with pytest.raises(FeedError, match="ended its transaction itself"):
                async with inbox.transaction() as db:
                    db.execute("COMMIT")
            async with inbox.transaction() as db:
                with pytest.raises(FeedError, match="open in this task"):
                    await inbox.stream("s").begin()
                assert db.execute("SELECT text FROM notes").fetchall() == [("kept",)]

    asyncio.run(scenario())


# --- a full disk ---


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB, which is a little more than SQLite needs for a write-ahead log."""
    place = tmp_path / "tiny"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_confirms_nothing(tiny_disk: Path) -> None:
    """A batch that cannot be stored is not confirmed upstream, and is stored when there is room again."""

    async def scenario() -> None:
        upstream = Upstream()
        upstream.arrive(*(update(n, text="x" * 2000) for n in range(1, 11)))
        async with Inbox(tiny_disk / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            await poll_once(stream, upstream, limit=2)
            ballast = tiny_disk / "ballast"
            with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:  # noqa: PT012
                while True:
                    file.write(b"x" * 4096)
            with pytest.raises(InboxUnavailable, match=r"full|I/O"):
                await poll_once(stream, upstream)
            assert stream.position().offset == 3
            assert upstream.queued() == [*range(3, 11)]
            with pytest.raises(InboxUnavailable):
                await poll_once(stream, upstream)
            ballast.unlink()
            assert await poll_once(stream, upstream) == [*range(3, 11)]
            assert stream.counts().waiting == 10

    asyncio.run(scenario())


def test_a_feed_outlives_a_full_disk(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up in the middle of the work and is freed later: it is told, nothing is lost or set aside."""
    monkeypatch.setattr(Retry, "delay", lambda *_arguments, **_options: 0.05)
    upstream = Upstream()
    upstream.arrive(*(update(n, text="x" * 2000) for n in range(1, 101)))
    ballast = tiny_disk / "ballast"
    handled: list[int] = []
    told: list[str] = []

    async def handler(item: Any) -> None:
        if item.id == 30 and not ballast.exists() and not told:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
        handled.append(item.id)

    def hear(event: dict[str, Any]) -> None:
        told.append(event["what"])
        if len(told) == 1:
            asyncio.get_running_loop().call_later(0.5, ballast.unlink)

    source = UpstreamSource(upstream, limit=20)
    inbox = Inbox(tiny_disk / "bot.db", max_backlog=20)
    asyncio.run(asyncio.wait_for(consume(source, handler, inbox=inbox, on_event=hear, concurrency=4), 100))
    assert set(handled) == set(range(1, 101))
    assert len(handled) - 100 <= 4
    # Whoever polled just then could not store what it got: that the source goes on is told too.
    assert told[0] == "inbox-unavailable"
    assert set(told) <= {"inbox-unavailable", "source-recovered"}


def test_dead_letters_expire(tmp_path: Path) -> None:
    """After keep_days they are dropped by the housekeeping, those of the outbox too; younger ones stay."""
    now = Now()

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db", keep_days=2, clock=now) as inbox:
            stream = inbox.stream("s")
            await stream.begin()
            await stream.store([Record(1, b"{}"), Record(2, b"{}")], 3)
            dispatcher = Dispatcher(stream)
            await dispatcher.open()
            first, second = await dispatcher.take()
            await first.set_aside("no")
            async with inbox.transaction() as db:
                row = ("o", b"", 0, 2, now())
                db.execute(
                    "INSERT INTO everdeck_outbox (outbox, payload, put_at, state, died_at) VALUES (?, ?, ?, ?, ?)", row
                )
            now.time += DAY
            await second.set_aside("no")
            now.time += 1.5 * DAY
            await inbox.housekeep()
            assert [letter.id for letter in inbox.dead_letters()] == [2]
            assert inbox.store.read("outbox_dead_list", None, None, None, None, -1) == []
            await dispatcher.stop()

    asyncio.run(scenario())
    with pytest.raises(SpecError, match="keep_days"):
        Inbox(tmp_path / "bot.db", keep_days=0)
