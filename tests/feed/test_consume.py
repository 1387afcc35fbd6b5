"""consume(): the whole feed in one call, in this process."""

import asyncio
import contextlib
import errno
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from everdeck.errors import FeedError, SpecError
from everdeck.feed import Batch, Feed, FileCursor, Inbox, Position, Record, Retry, consume, poll
from everdeck.feed import consume as consume_function
from support.feed_upstream import Upstream, UpstreamSource, update
from support.waiting import eventually

AT_ONCE = Retry(seconds=0.0, cap_seconds=0.0)


def chat_of(value: dict[str, Any]) -> object:
    """The key of an update."""
    return value.get("chat")


async def in_time(work: Any) -> Any:
    """With a deadline that fails loudly."""
    return await asyncio.wait_for(work, 60)


def test_everything_is_handled_in_order_per_chat(tmp_path: Path) -> None:
    """And upstream is empty at the end, with the last offset confirmed."""
    upstream = Upstream()
    upstream.arrive(*(update(n, chat=n % 7) for n in range(1, 301)))
    handled: list[tuple[int, int]] = []

    async def handler(item: Any) -> None:
        await asyncio.sleep(0)
        handled.append((item.value["chat"], item.id))

    asyncio.run(in_time(consume(UpstreamSource(upstream), handler, inbox=Inbox(tmp_path / "bot.db"), key=chat_of)))
    assert sorted(number for _, number in handled) == list(range(1, 301))
    for chat in range(7):
        mine = [number for c, number in handled if c == chat]
        assert mine == sorted(mine)
    assert upstream.queued() == []


def test_a_slow_handler_delays_only_its_own_chat(tmp_path: Path) -> None:
    """One handler that never ends among 1,000 updates: all the others are done while it runs."""
    upstream = Upstream()
    upstream.arrive(*(update(n, chat=n) for n in range(1, 1001)))
    others = 0
    enough = asyncio.Event()

    async def handler(item: Any) -> None:
        nonlocal others
        if item.id == 1:
            await asyncio.Event().wait()
        others += 1
        if others == 999:
            enough.set()

    async def scenario() -> None:
        stop = asyncio.Event()
        running = asyncio.ensure_future(
            consume(
                UpstreamSource(upstream, ends=False),
                handler,
                inbox=Inbox(tmp_path / "bot.db"),
                stop=stop,
                grace_seconds=0.05,
                concurrency=8,
            )
        )
        await in_time(enough.wait())
        stop.set()
        await in_time(running)

    asyncio.run(scenario())
    assert others == 999


def test_one_flooded_chat_does_not_starve_the_others(tmp_path: Path) -> None:
    """10,000 updates of one chat came first; another chat's single update is among the first ones handled."""
    records = [Record(n, b'{"chat":"flood"}', "flood") for n in range(10_000)] + [Record(10_000, b"{}", "other")]
    order: list[int] = []
    stop = asyncio.Event()

    class Flood:
        name = "flood"

        async def fetch(self, position: Position) -> Batch | None:
            if position.cursor is None:
                return Batch(records, cursor=10_001)
            await asyncio.Event().wait()
            return None

    async def handler(item: Any) -> None:
        order.append(item.id)
        if len(order) >= 20:
            stop.set()

    asyncio.run(in_time(consume(Flood(), handler, inbox=Inbox(tmp_path / "bot.db"), stop=stop)))
    assert 10_000 in order[:3]


def test_raising_is_retried_then_a_dead_letter(tmp_path: Path) -> None:
    """With an event, and the rest flows on."""
    upstream = Upstream()
    upstream.arrive(*(update(n, chat=1) for n in range(1, 6)))
    tried: list[int] = []
    told: list[dict[str, Any]] = []

    async def handler(item: Any) -> None:
        tried.append(item.id)
        if item.id == 2 or (item.id == 4 and item.attempt == 1):
            raise ValueError(item.id)

    asyncio.run(
        in_time(
            consume(
                UpstreamSource(upstream),
                handler,
                inbox=Inbox(tmp_path / "bot.db"),
                retry=AT_ONCE,
                on_event=told.append,
            )
        )
    )
    assert tried == [1, 2, 2, 2, 3, 4, 4, 5]
    assert [(event["what"], event["id"], event["attempts"]) for event in told] == [("dead-letter", 2, 3)]


def test_a_listener_that_raises_harms_nobody(tmp_path: Path) -> None:
    """Events are told, not obeyed."""
    upstream = Upstream()
    upstream.arrive(update(1), update(2))
    handled: list[int] = []

    async def handler(item: Any) -> None:
        if item.id == 1:
            raise ValueError
        handled.append(item.id)

    def listener(_event: object) -> None:
        raise RuntimeError

    inbox = Inbox(tmp_path / "bot.db")
    asyncio.run(in_time(consume(UpstreamSource(upstream), handler, inbox=inbox, max_attempts=1, on_event=listener)))
    assert handled == [2]


def test_a_plain_function_is_a_handler_and_a_source(tmp_path: Path) -> None:
    """consume(fn, handler): the function is polled."""
    handled: list[int] = []
    stop = asyncio.Event()

    def numbers(cursor: int | None) -> list[dict[str, int]]:
        first = cursor or 1
        return [{"id": n} for n in range(first, min(first + 3, 8))]

    def handler(item: Any) -> None:
        handled.append(item.value["id"])
        if item.value["id"] == 7:
            stop.set()

    asyncio.run(
        in_time(consume(poll(numbers, every=0), handler, inbox=Inbox(tmp_path / "bot.db"), concurrency=1, stop=stop))
    )
    assert handled == [1, 2, 3, 4, 5, 6, 7]


def test_a_handler_that_somebody_else_cancels_has_failed(tmp_path: Path) -> None:
    """Only what our own stop cancels is handed back; this one would be handed out again without end."""
    upstream = Upstream()
    upstream.arrive(update(1))
    attempts: list[int] = []

    async def cancelled(item: Any) -> None:
        attempts.append(item.attempt)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    asyncio.run(in_time(consume(UpstreamSource(upstream), cancelled, inbox=Inbox(tmp_path / "bot.db"), retry=AT_ONCE)))
    assert attempts == [1, 2, 3]


def test_a_handler_that_swallows_its_timeout_has_failed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """handler_timeout is a limit, however the handler takes it."""
    monkeypatch.setattr("everdeck.feed.dispatcher.LOOK_SECONDS", 0.02)
    upstream = Upstream()
    upstream.arrive(update(1))
    attempts: list[int] = []

    async def deaf(item: Any) -> None:
        attempts.append(item.attempt)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    options: dict[str, Any] = {"retry": AT_ONCE, "handler_timeout": 0.05, "max_attempts": 2}
    asyncio.run(in_time(consume(UpstreamSource(upstream), deaf, inbox=Inbox(tmp_path / "bot.db"), **options)))
    assert attempts == [1, 2]


def test_cancelling_hands_back_what_is_in_flight(tmp_path: Path) -> None:
    """Handlers get the grace; what does not finish in it comes again with its first attempt."""
    upstream = Upstream()
    upstream.arrive(*(update(n, chat=n) for n in range(1, 5)))
    started = asyncio.Event()
    finished: list[int] = []
    attempts: list[tuple[int, int]] = []

    async def stuck(item: Any) -> None:
        if item.id % 2:
            started.set()
            await asyncio.Event().wait()
        finished.append(item.id)

    async def later(item: Any) -> None:
        attempts.append((item.id, item.attempt))

    async def scenario() -> None:
        source = UpstreamSource(upstream, ends=False)
        running = asyncio.ensure_future(consume(source, stuck, inbox=Inbox(tmp_path / "bot.db"), grace_seconds=0.2))
        await in_time(started.wait())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await in_time(running)
        await in_time(consume(UpstreamSource(upstream), later, inbox=Inbox(tmp_path / "bot.db")))

    asyncio.run(scenario())
    assert sorted(finished) == [2, 4]
    assert sorted(attempts) == [(1, 1), (3, 1)]


def test_sigterm_stops_gracefully(tmp_path: Path) -> None:
    """The handler in flight finishes; consume returns; the program's own SIGTERM handling is as before."""
    upstream = Upstream()
    upstream.arrive(update(1))
    finished: list[int] = []

    async def handler(item: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        finished.append(item.id)

    asyncio.run(in_time(consume(UpstreamSource(upstream, ends=False), handler, inbox=Inbox(tmp_path / "bot.db"))))
    assert finished == [1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_swallows_its_cancellation_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    """It is left behind; its item comes again, and the attempt counts: at the third stop it is a dead letter."""
    upstream = Upstream()
    upstream.arrive(update(1))
    started, release = asyncio.Event(), asyncio.Event()

    async def deaf(_item: Any) -> None:
        started.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    async def scenario() -> None:
        stop = asyncio.Event()
        source = UpstreamSource(upstream, ends=False)
        running = asyncio.ensure_future(
            consume(source, deaf, inbox=Inbox(tmp_path / "bot.db"), grace_seconds=0.1, stop=stop)
        )
        await in_time(started.wait())
        before = time.monotonic()
        stop.set()
        await in_time(running)
        assert time.monotonic() - before < 10
        release.set()
        async with Inbox(tmp_path / "bot.db") as inbox:
            stream = inbox.stream("telegram:1")
            await stream.begin()
            assert stream.counts().waiting == 1
            async with inbox.transaction() as db:
                assert db.execute("SELECT attempts FROM everdeck_item").fetchall() == [(1,)]

    asyncio.run(scenario())


def test_two_feeds_of_one_program_both_hear_sigterm(tmp_path: Path) -> None:
    """The first one listens for all of them."""

    async def scenario() -> None:
        both = asyncio.Barrier(3)

        async def handler(_item: Any) -> None:
            await both.wait()

        async def feed(name: str) -> None:
            source = poll(lambda: [{"id": 1}], name=name, every=0.01)
            await consume(source, handler, inbox=Inbox(tmp_path / f"{name}.db"))

        running = [asyncio.ensure_future(feed(name)) for name in ("one", "other")]
        await in_time(both.wait())  # both are at work
        os.kill(os.getpid(), signal.SIGTERM)
        await in_time(asyncio.gather(*running))

    asyncio.run(scenario())


def test_a_source_that_blocks_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    """A plain function that waits for an hour runs in a thread that nobody waits for."""
    program = f"""
import asyncio, time
from everdeck.feed import Inbox, consume, poll

def ask():
    print("asked", flush=True)
    time.sleep(3600)

asyncio.run(consume(poll(ask), print, inbox=Inbox({str(tmp_path / "bot.db")!r})))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "asked\n"
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_locked_file_never_blocks_the_loop(tmp_path: Path) -> None:
    """Somebody else holds SQLite's lock: the loop ticks on, and everything is stored and done when he lets go."""
    path, handled = tmp_path / "bot.db", []
    stop, told = asyncio.Event(), asyncio.Event()

    async def scenario() -> None:
        feed = asyncio.ensure_future(
            consume(
                poll(lambda: [{"id": len(handled) + 1}], every=0.01),
                lambda item: handled.append(item.id),
                inbox=Inbox(path),
                on_event=lambda event: told.set() if event["what"] == "inbox-unavailable" else None,
                stop=stop,
            )
        )
        await eventually(lambda: handled)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        await in_time(told.wait())  # its wait for the lock is over, and the next one begins
        for _ in range(300):  # of 0.8 s each if the loop waited too
            await asyncio.sleep(0.005)
        known = len(handled)
        other.execute("COMMIT")
        other.close()
        await eventually(lambda: len(handled) >= known + 3)
        stop.set()
        await feed

    asyncio.run(in_time(scenario()))


def test_a_source_that_fails_is_asked_again_at_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an event for the first failure in a row; retry_after is obeyed; a wrong answer is a failure too."""
    monkeypatch.setattr(consume_function.__globals__["SOURCE_RETRY"].__class__, "delay", lambda *_a, **_k: 0.0)
    told: list[dict[str, Any]] = []
    positions: list[object] = []

    class SlowDown(Exception):
        retry_after = 0

    class Failing:
        name = "failing"

        async def fetch(self, position: Position) -> Any:
            positions.append(position.cursor)
            match len(positions):
                case 1:
                    return Batch([Record(1, b"{}")], cursor=2)
                case 2:
                    raise ConnectionError("down")
                case 3:
                    raise SlowDown
                case 4:
                    return ["not a batch"]
                case 5:
                    return Batch([Record(2, b"{}")], cursor=3)
            return None

    handled: list[int] = []
    inbox = Inbox(tmp_path / "bot.db")
    asyncio.run(in_time(consume(Failing(), lambda item: handled.append(item.id), inbox=inbox, on_event=told.append)))
    assert positions == [None, 2, 2, 2, 2, 3]
    assert handled == [1, 2]
    assert [event["what"] for event in told] == ["source-failed", "source-recovered"]


def test_ids_that_start_again_are_told(tmp_path: Path) -> None:
    """The user learns of the new epoch; the messages are handled."""
    upstream = Upstream()
    upstream.arrive(update(500), update(501))
    told: list[dict[str, Any]] = []
    handled: list[int] = []

    async def scenario() -> None:
        for numbers in ((), (20, 21)):
            upstream.arrive(*(update(n) for n in numbers))
            await in_time(
                consume(
                    UpstreamSource(upstream),
                    lambda item: handled.append(item.id),
                    inbox=Inbox(tmp_path / "bot.db"),
                    on_event=told.append,
                )
            )

    asyncio.run(scenario())
    assert sorted(handled) == [20, 21, 500, 501]
    assert [event["what"] for event in told] == ["ids-restarted"]


def test_an_adapter_takes_items_itself(tmp_path: Path) -> None:
    """Feed: the pump and the dispatcher without our handlers."""
    upstream = Upstream()
    upstream.arrive(update(1, chat=1), update(2, chat=1), update(3, chat=2))

    async def scenario() -> None:
        handled = []
        async with Feed(
            UpstreamSource(upstream, ends=False), inbox=Inbox(tmp_path / "bot.db"), first_run="take"
        ) as feed:
            while len(handled) < 3:
                for item in await in_time(feed.take()):
                    handled.append(item.id)
                    await item.done()
        assert sorted(handled) == [1, 2, 3]

    asyncio.run(scenario())


def test_what_is_asked_for_wrongly_is_refused(tmp_path: Path) -> None:
    """By name, before anything is opened."""

    async def handler(_item: Any) -> None: ...

    source = poll(list, name="nothing")
    inbox = Inbox(tmp_path / "bot.db")
    for options in ({}, {"inbox": inbox, "cursor": FileCursor(tmp_path / "c")}):
        with pytest.raises(SpecError, match="inbox"):
            asyncio.run(consume(source, handler, **options))
    with pytest.raises(SpecError, match="skip its history"):
        asyncio.run(consume(source, handler, inbox=inbox, first_run="skip"))
    with pytest.raises(SpecError, match="skip its history"):
        asyncio.run(consume(source, handler, cursor=FileCursor(tmp_path / "c"), first_run="skip"))
    with pytest.raises(SpecError, match="source"):
        asyncio.run(consume(17, handler, inbox=inbox))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# --- without a database ---


def test_the_file_cursor_is_saved_after_each_update(tmp_path: Path) -> None:
    """Process first, persist second: in the handler the file still names this update; afterwards the next."""
    upstream = Upstream()
    upstream.arrive(*(update(n, chat=1) for n in range(10, 15)))
    path = tmp_path / "offset.txt"
    path.write_text("12\n")  # taken over from somebody's own script
    seen: list[tuple[int, str]] = []

    async def handler(item: Any) -> None:
        seen.append((item.id, path.read_text()))
        with pytest.raises(FeedError, match="inbox"):
            item.transaction()

    asyncio.run(in_time(consume(UpstreamSource(upstream), handler, cursor=FileCursor(path), key=chat_of)))
    assert seen == [(12, "12\n"), (13, "13\n"), (14, "14\n")]
    assert path.read_text() == "15\n"
    assert [file.name for file in tmp_path.iterdir()] == ["offset.txt"]


def test_the_file_cursor_sets_aside_what_keeps_failing(tmp_path: Path) -> None:
    """The dead letter is on disk before the cursor moves past it."""
    upstream = Upstream()
    upstream.arrive(update(1), update(2))
    tried: list[tuple[int, int]] = []

    def handler(item: Any) -> None:
        tried.append((item.id, item.attempt))
        if item.id == 1:
            raise ValueError("no")

    cursor = FileCursor(tmp_path / "offset.txt")
    asyncio.run(in_time(consume(UpstreamSource(upstream), handler, cursor=cursor, retry=AT_ONCE)))
    assert tried == [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert '"id":1' in (tmp_path / "offset.txt.dead").read_text()
    assert cursor.load() == 3


def test_the_file_cursor_counts_the_attempts_of_dead_processes(tmp_path: Path) -> None:
    """An update that took the process with it twice has one attempt left."""
    upstream = Upstream()
    upstream.arrive(update(1), update(2))
    cursor = FileCursor(tmp_path / "offset.txt")
    cursor.note_attempt(1, 3)
    tried: list[int] = []
    asyncio.run(in_time(consume(UpstreamSource(upstream), lambda item: tried.append(item.id), cursor=cursor)))
    assert tried == [2]
    assert "died during attempt 3" in (tmp_path / "offset.txt.dead").read_text()


def test_the_file_cursor_survives_ids_that_start_again(tmp_path: Path) -> None:
    """A lower id is work like any other, and the file follows it down."""
    upstream = Upstream()
    upstream.arrive(update(900))
    handled: list[int] = []

    async def scenario() -> None:
        for numbers in ((), (20, 21)):
            upstream.arrive(*(update(n) for n in numbers))
            cursor = FileCursor(tmp_path / "c")
            await in_time(consume(UpstreamSource(upstream), lambda item: handled.append(item.id), cursor=cursor))

    asyncio.run(scenario())
    assert handled == [900, 20, 21]
    assert FileCursor(tmp_path / "c").load() == 22


def test_the_file_cursor_stops_gracefully(tmp_path: Path) -> None:
    """The handler in work finishes and is saved; the rest stays upstream."""
    upstream = Upstream()
    upstream.arrive(*(update(n) for n in range(1, 6)))
    stop = asyncio.Event()
    handled: list[int] = []

    async def handler(item: Any) -> None:
        stop.set()
        await asyncio.sleep(0.02)
        handled.append(item.id)

    asyncio.run(in_time(consume(UpstreamSource(upstream), handler, cursor=FileCursor(tmp_path / "c"), stop=stop)))
    assert handled == [1]
    assert FileCursor(tmp_path / "c").load() == 2
    assert upstream.queued() == [1, 2, 3, 4, 5]


def test_the_file_cursor_can_skip_the_history(tmp_path: Path) -> None:
    """Recorded first, so a second run never skips again."""
    upstream = Upstream()
    upstream.arrive(update(1), update(2))
    handled: list[int] = []

    async def scenario() -> None:
        for _ in range(2):
            await in_time(
                consume(
                    UpstreamSource(upstream),
                    lambda item: handled.append(item.id),
                    cursor=FileCursor(tmp_path / "c"),
                    first_run="skip",
                )
            )
            upstream.arrive(update(3))

    asyncio.run(scenario())
    assert handled == [3]
    assert upstream.asked().count(-1) == 1


@pytest.mark.parametrize(
    ("options", "tried", "dead"),
    [
        ({"handler_timeout": 0.05}, [1, 2, 3], "handler_timeout"),
        ({"retry_on": OSError}, [1], "ValueError"),
        ({"on_error": "log"}, [1], None),
        ({}, [1, 2, 3], "CancelledError"),
    ],
)
def test_the_file_cursor_knows_the_same_policies(
    tmp_path: Path, options: dict[str, Any], tried: list[int], dead: str | None
) -> None:
    """A time limit, what is worth a retry, log and go on, and a cancellation that is not ours: as with an inbox."""
    upstream = Upstream()
    upstream.arrive(update(1), update(2))
    attempts: list[int] = []

    async def handler(item: Any) -> None:
        if item.id == 1:
            attempts.append(item.attempt)
            if "handler_timeout" in options:
                await asyncio.Event().wait()
            elif options:
                raise ValueError("no")
            other = asyncio.ensure_future(asyncio.Event().wait())
            other.cancel()
            await other

    cursor = FileCursor(tmp_path / "c")
    asyncio.run(in_time(consume(UpstreamSource(upstream), handler, cursor=cursor, retry=AT_ONCE, **options)))
    assert attempts == tried
    assert cursor.load() == 3
    letters = tmp_path / "c.dead"
    assert (dead or "") in (letters.read_text() if letters.exists() else "")
    assert letters.exists() == (dead is not None)


def test_the_file_cursor_s_end_is_held_against_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop that cuts a handler off, a death that the deck ordered, and sys.exit(): the attempt does not count."""
    upstream = Upstream()
    upstream.arrive(update(1), update(2))
    cursor, stop = FileCursor(tmp_path / "c"), asyncio.Event()

    async def hang(_item: Any) -> None:
        stop.set()
        await asyncio.Event().wait()

    asyncio.run(in_time(consume(UpstreamSource(upstream), hang, cursor=cursor, stop=stop, grace_seconds=0.01)))
    assert cursor.attempts_of(1) == 0
    cursor.note_attempt(1, 3)
    monkeypatch.setenv("EVERDECK_LAST_END", "ordered")
    monkeypatch.setenv("EVERDECK_COOKIE", "f" * 32)
    assert cursor.attempts_of(1) == 2

    def leave(_item: Any) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        asyncio.run(in_time(consume(UpstreamSource(upstream), leave, cursor=cursor)))
    assert cursor.load() == 2


def test_the_file_cursor_s_source_fails_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are told."""
    monkeypatch.setattr("everdeck.feed.one_by_one.SOURCE_RETRY", AT_ONCE)
    answers: list[Any] = [OSError("no network"), OSError("no network"), [{"id": 1}]]
    events: list[dict[str, Any]] = []
    stop = asyncio.Event()

    def ask() -> Any:
        answer = answers.pop(0) if answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer

    asyncio.run(
        in_time(
            consume(
                poll(ask, every=0),
                lambda _item: stop.set(),
                cursor=FileCursor(tmp_path / "c"),
                on_event=events.append,
                stop=stop,
            )
        )
    )
    assert [(event["what"], event.get("failures")) for event in events] == [
        ("source-failed", None),
        ("source-recovered", 2),
    ]


def test_what_could_not_be_synced_is_not_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is handled, but upstream is not asked behind it before the disk has it: a power cut would lose it."""
    asked: list[int] = []
    sync = os.fdatasync
    broken = True

    def may_fail(fd: int) -> None:
        if broken and asked:
            raise OSError(errno.EIO, "Input/output error")
        sync(fd)

    class Source:
        name = "telegram:1"

        async def fetch(self, position: Position) -> Batch | None:
            asked.append(position.offset)
            return Batch([Record(1, b"{}")], cursor=2, asked=position.offset) if len(asked) == 1 else None

    async def scenario() -> None:
        nonlocal broken
        monkeypatch.setattr(os, "fdatasync", may_fail)
        told = asyncio.Event()

        def hear(event: dict[str, Any]) -> None:
            if event["what"] == "inbox-unavailable":
                told.set()

        feed = Feed(Source(), inbox=Inbox(tmp_path / "bot.db"), on_event=hear, report=False)
        async with feed:
            (item,) = await in_time(feed.take())
            item.settle_as_done()
            await in_time(told.wait())
            assert asked == [0]
            broken = False
            feed.ask_again()
            await in_time(feed.exhausted())
        assert asked == [0, 2]

    asyncio.run(scenario())
