"""The pump and the readers meet only in the inbox: order, sharing, death at any instruction, frozen readers."""

import asyncio
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from everdeck.crashpoints import CRASH_AT_ENV
from everdeck.errors import InboxUnavailable, MessageError, MessageLost
from everdeck.feed import Inbox, Record
from everdeck.feed import claims as claims_module
from everdeck.feed.claims import Claim, Claims, Other, Put
from everdeck.messages import Incoming, decoded_outgoing, encoded
from everdeck.satellites import bridge
from everdeck.satellites.bridge import Messages, Reader, decide, feed_status, letters, send
from support.waiting import until

READER = Path(__file__).parents[1] / "support" / "sat_reader.py"
POINTS = sorted(set(re.findall(r'crash_point\("([^"]+)"\)', Path(claims_module.__file__).read_text())))
Run = Callable[[Callable[[], Awaitable[Any]]], Any]


def stored(path: Path, *texts: str) -> None:
    """What a pump would have stored: ``chat/text`` each."""

    async def fill() -> None:
        async with Inbox(path) as inbox:
            stream = inbox.stream("test:1")
            await stream.begin()
            await stream.store(
                [
                    Record(text, encoded(Incoming(id=text, channel="test", conversation=text[0], text=text)), text[0])
                    for text in texts
                ]
            )

    path.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(fill())


def promised(path: Path) -> list[str]:
    """The texts in the outbox, in order."""
    with Claims(path) as claims:
        return [decoded_outgoing(row[8]).text for row in claims.outbox()]


@contextmanager
def reading(path: Path, what: str, **env: str) -> Iterator["subprocess.Popen[str]"]:
    """A host in a process of its own."""
    command = [sys.executable, str(READER), str(path), what]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PATH": "/usr/bin:/bin", **env})
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def said(process: "subprocess.Popen[str]") -> str:
    """The next line that it says."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_message_and_its_replies_are_one_transaction(state: Path, run: Run) -> None:
    """Before the end of the message no reply is promised, afterwards all are, and it is done."""
    stored(state / "feed.db", "a1")

    async def scenario() -> None:
        with Reader() as reader:
            reader.add("bob", state / "feed.db")
            message = await reader.get()
            async with message:
                await message.reply("one")
                message.reply("two")
                assert promised(state / "feed.db") == []
            assert promised(state / "feed.db") == ["one", "two"]

    run(scenario)
    status = feed_status(state / "feed.db", "bob")
    assert (status.done, status.waiting, status.in_flight, status.to_send) == (1, 0, 0, 2)


def test_two_readers_share_the_work_in_order_per_conversation(state: Path, run: Run) -> None:
    """While a1 is handled nobody gets a2; b1 goes to the other reader; a2 comes when a1 is done."""
    stored(state / "feed.db", "a1", "a2", "b1", "b2")

    async def scenario() -> None:
        with Reader() as one, Reader() as two:
            one.add("bob", state / "feed.db")
            two.add("bob", state / "feed.db")
            first = await one.get()
            second = await two.get()
            assert (first.text, second.text) == ("a1", "b1")
            waiting = asyncio.ensure_future(two.get())
            async with first:
                pass
            assert (await waiting).text == "a2"

    run(scenario)


def test_a_reader_that_dies_leaves_its_message_for_the_next(state: Path, run: Run) -> None:
    """A waiting reader gets it at once: the kernel tells it of the death."""
    stored(state / "feed.db", "a1")

    async def scenario() -> None:
        with reading(state / "feed.db", "stop-after-claim") as other, Reader() as reader:
            assert await asyncio.to_thread(said, other) == "took a1 1"
            reader.add("bob", state / "feed.db")
            waiting = asyncio.ensure_future(reader.get())
            done, _ = await asyncio.wait({waiting}, timeout=0.3)
            assert not done, "it is the other reader's"
            other.send_signal(signal.SIGKILL)
            message = await waiting
            assert (message.text, message.attempt) == ("a1", 2)
            async with message:
                pass

    run(scenario)


def test_a_frozen_reader_loses_its_message_and_commits_nothing(state: Path) -> None:
    """Its lease has run out, another reader has finished: the first one finds out when it wants to commit."""
    stored(state / "feed.db", "a1")
    with Claims(state / "feed.db") as frozen, Claims(state / "feed.db") as other:
        (claim,) = frozen.take()
        assert other.take() == []
        with sqlite3.connect(state / "feed.db") as raw:
            raw.execute("UPDATE everdeck_reader SET lease_until = 0")
        raw.close()

        (again,) = other.take()
        other.finish(again, [Put("a", b"{}")])
        with pytest.raises(MessageLost):
            frozen.finish(claim, [Put("a", b"{}")])

    assert feed_status(state / "feed.db", "bob").to_send == 1


def test_what_raises_is_tried_again_and_set_aside_in_the_end(state: Path) -> None:
    """Three attempts; then it is a dead letter that can be retried, and the next of its conversation flows."""
    stored(state / "feed.db", "a1", "a2")
    with Claims(state / "feed.db") as claims:
        for attempt in (1, 2, 3):
            (claim,) = claims.take()
            assert claim.attempt == attempt
            assert claims.fail(claim, "ValueError: no", retry_after=0) is (attempt == 3)
        (following,) = claims.take()
        assert b'"a2"' in following.payload
        claims.finish(following)

    (dead,) = letters(state / "feed.db")
    assert (dead.id, dead.state, dead.error, dead.attempts) == ("a1", "dead", "ValueError: no", 3)
    assert decide(state / "feed.db", "retry", dead.number)
    with Claims(state / "feed.db") as claims:
        (claim,) = claims.take()
        assert claim.attempt == 1
        claims.finish(claim)
    assert not decide(state / "feed.db", "drop", dead.number)


def test_what_becomes_due_right_after_a_look_is_due(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that looks a moment too early must not wait for ever: nobody rings when a retry becomes due."""
    stored(state / "feed.db", "a1")
    with Claims(state / "feed.db") as claims:
        (claim,) = claims.take()
        claims.fail(claim, "ValueError: no", retry_after=5)
        assert claims.take() == []
        later = claims_module.wall_clock() + 6
        monkeypatch.setattr(claims_module, "wall_clock", lambda: later)
        assert claims.next_due() == 0
        (claim,) = claims.take()
        assert claim.attempt == 2


def test_a_message_that_kills_its_readers_is_set_aside(state: Path) -> None:
    """It was alone in each reader that died: after the third it is a dead letter."""
    stored(state / "feed.db", "a1")
    for attempt in (1, 2, 3):
        with reading(state / "feed.db", "stop-after-claim") as reader:
            assert said(reader) == f"took a1 {attempt}"
    with Claims(state / "feed.db") as claims:
        assert claims.take() == []

    (dead,) = letters(state / "feed.db")
    assert dead.error is not None
    assert "died during attempt 3" in dead.error


def test_being_told_to_leave_costs_no_attempt(state: Path, run: Run) -> None:
    """A cancelled handler hands back."""
    stored(state / "feed.db", "a1")

    async def scenario() -> None:
        with Reader() as reader:
            reader.add("bob", state / "feed.db")
            message = await reader.get()

            async def handle() -> None:
                async with message:
                    await asyncio.Event().wait()

            handling = asyncio.ensure_future(handle())
            await asyncio.sleep(0)
            handling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await handling
            assert (await reader.get()).attempt == 1

    run(scenario)


def test_an_end_that_was_begun_is_committed_though_its_task_is_cancelled(state: Path, run: Run) -> None:
    """And the reader reads on."""
    stored(state / "feed.db", "a1", "a2")

    async def scenario() -> None:
        with Reader() as reader:
            reader.add("bob", state / "feed.db")
            message = await reader.get()
            message.reply("promised")
            ending = asyncio.ensure_future(message.done())
            await asyncio.sleep(0)
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending
            async with await reader.get() as following:
                assert following.text == "a2"
        assert promised(state / "feed.db") == ["promised"]

    run(scenario)


def test_a_close_that_was_begun_goes_on_though_its_task_is_cancelled(state: Path, run: Run) -> None:
    """As when a client of the daemon hangs up, with every thread of the pool busy."""
    stored(state / "feed.db", "a1")
    held = threading.Event()

    async def scenario() -> None:
        pool = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(pool)

        async def find(reader: Reader) -> Callable[[], None]:
            reader.add("bob", state / "feed.db")
            return lambda: None

        messages = Messages(find)
        assert (await anext(messages)).attempt == 1
        busy = asyncio.get_running_loop().run_in_executor(None, held.wait)
        closing = asyncio.ensure_future(messages.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        held.set()
        await busy
        with Reader() as other:
            other.add("bob", state / "feed.db")
            assert (await other.get()).attempt == 1

    run(scenario)


def test_a_wish_withdrawn_in_the_moment_of_its_message_hands_it_back(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is claimed, it can no longer be cancelled, and whoever asked does not have it yet."""
    stored(state / "feed.db", "a1")
    with Reader() as reader:

        class Hesitating(Future[Any]):
            def set_result(self, result: Any) -> None:
                reader._unwant(self)
                super().set_result(result)

        reader.add("bob", state / "feed.db")
        with monkeypatch.context() as patch:
            patch.setattr("concurrent.futures.Future", Hesitating)
            wanted = reader._want()
        wanted.result(60)
        assert reader.get_now(60).attempt == 1


def test_an_end_that_could_not_be_written_gives_the_message_back(state: Path) -> None:
    """The one reader gets it again once its disk takes it; meanwhile it is told."""
    stored(state / "feed.db", "a1")
    full = ["a1", "and when it is given back"]

    class OnAFullDisk(Claims):
        def _give_up(self, claim: Claim) -> None:
            if full:
                raise InboxUnavailable(f"disk full: {full.pop()}")
            super()._give_up(claim)

    with Reader() as reader:
        reader.add("bob", lambda: OnAFullDisk(state / "feed.db"))
        with pytest.raises(InboxUnavailable, match="disk full"), reader.get_now(60):
            pass
        with reader.get_now(60) as again:
            assert again.attempt == 1
    assert full == []
    assert feed_status(state / "feed.db", "bob").done == 1


def test_a_reader_that_dies_between_two_looks_is_seen_at_once(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lived when its message was looked at, and is gone when it is to be watched: no lease is waited for."""
    stored(state / "feed.db", "a1")
    with reading(state / "feed.db", "stop-after-claim") as other, Reader() as reader:
        assert said(other) == "took a1 1"
        with closing(sqlite3.connect(state / "feed.db")) as raw, raw:
            raw.execute("UPDATE everdeck_reader SET lease_until = 1e12")
        watch = bridge.watch_fd

        def killed_first(seen: Other) -> int | None:
            other.kill()
            other.wait()
            return watch(seen)

        monkeypatch.setattr(bridge, "watch_fd", killed_first)
        reader.add("bob", state / "feed.db")
        assert reader.get_now(90).attempt == 2


def test_an_inbox_that_is_told_of_twice_is_opened_once(state: Path) -> None:
    """While it is being opened, and while it waits to be: what is open twice would be heard by nobody."""
    stored(state / "feed.db", "a1")
    opened: list[Claims] = []
    with Reader() as reader:

        def feed() -> Claims:
            reader.add("bob", feed)
            if not opened:
                opened.append(Claims(state / "feed.db"))
                opened[0].close()
                raise InboxUnavailable("not yet")
            opened.append(Claims(state / "feed.db"))
            return opened[-1]

        reader.add("bob", feed)
        with reader.get_now(60):
            pass
        with pytest.raises(TimeoutError):
            reader.get_now(0.05)
        assert len(opened) == 2


def test_a_reader_in_a_program_with_many_files_hears_of_a_death(state: Path, run: Run) -> None:
    """select(2) knows the first 1,024 descriptors only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this machine gives a process fewer than 1,200 files")
    stored(state / "feed.db", "a1")
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        other = stack.enter_context(reading(state / "feed.db", "stop-after-claim"))
        assert said(other) == "took a1 1"
        while (fd := os.dup(0)) < 1100:
            stack.callback(os.close, fd)
        stack.callback(os.close, fd)
        reader = stack.enter_context(Reader())
        reader.add("bob", state / "feed.db")
        waiting = reader._want()
        until(lambda: any(file._watched for file in reader._files.values()), "the other reader is watched")
        other.kill()
        assert waiting.result(60).attempt == 2


def test_a_close_in_the_moment_of_a_look_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bell of a close is taken together with the one before it: the thread ends all the same."""
    take, reader, begun = os.eventfd_read, Reader(), threading.Event()

    def taken_late(fd: int) -> int:
        if not begun.is_set():
            begun.set()
            closer.start()
            until(lambda: reader._closed, "the close has begun")
            until(lambda: both_rang(fd), "the wish and the close have rung")
        return take(fd)

    def both_rang(fd: int) -> bool:
        with reader._lock, suppress(BlockingIOError):  # nobody rings meanwhile
            rung = take(fd)
            os.eventfd_write(fd, rung)
            return rung > 1
        return False

    closer = threading.Thread(target=reader.close, daemon=True)
    monkeypatch.setattr(os, "eventfd_read", taken_late)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - however a wish of a closed reader ends
        reader.get_now(60)
    closer.join(60)
    assert not closer.is_alive()


def test_a_closed_reader_writes_into_nobodys_file(state: Path) -> None:
    """The number of its descriptor is somebody else's by then."""
    read, write = os.pipe()
    with Reader() as reader:
        number = reader._wake_fd
    try:
        os.dup2(write, number)
        reader.add("bob", state / "feed.db")
        reader.remove("bob")
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 8)
    finally:
        for fd in {read, write, number}:
            os.close(fd)


def test_closing_hands_back_what_nobody_finished(state: Path) -> None:
    """The next reader need not wait for a lease."""
    stored(state / "feed.db", "a1")
    with Reader() as reader:
        reader.add("bob", state / "feed.db")
        assert reader.get_now(30).attempt == 1
    with Reader() as reader:
        reader.add("bob", state / "feed.db")
        assert reader.get_now(30).attempt == 1


def test_a_program_without_a_loop_reads_and_replies_too(state: Path) -> None:
    """``with message:`` and ``message.reply`` need no await."""
    stored(state / "feed.db", "a1")
    with Reader() as reader:
        reader.add("bob", state / "feed.db")
        with reader.get_now(30) as message:
            message.reply("plain")
        with pytest.raises(MessageError, match="finished"):
            message.reply("too late")
        with pytest.raises(TimeoutError):
            reader.get_now(0.05)

    assert promised(state / "feed.db") == ["plain"]


def test_a_done_message_can_be_handled_again(state: Path) -> None:
    """``replay`` brings it back as it was."""
    stored(state / "feed.db", "a1", "b1")
    with Claims(state / "feed.db") as claims:
        for claim in claims.take(2):
            claims.finish(claim)
    done = letters(state / "feed.db", which="done")
    assert {letter.id for letter in done} == {"a1", "b1"}

    assert decide(state / "feed.db", "replay", next(letter.number for letter in done if letter.id == "a1"))

    with Claims(state / "feed.db") as claims:
        (claim,) = claims.take(2)
        assert b'"a1"' in claim.payload


def test_words_that_are_sent_again_under_their_id_are_the_same_words(state: Path) -> None:
    """Who got no answer asks again and gets the number of the first time; another id is another message."""
    state.mkdir()
    with Claims(state / "feed.db") as claims:
        first = claims.put(Put("7", b"hello", "one"))
        assert claims.put(Put("7", b"hello", "one")) == first
        assert claims.put(Put("7", b"hello", "two")) != first
        assert claims.counts()[4] == 2


def test_first_words_are_kept_though_the_satellite_never_ran(state: Path) -> None:
    """``send`` makes the file if need be; what it returned is on disk."""
    from everdeck.messages import outgoing

    state.mkdir()
    assert send(state / "feed.db", outgoing(7, "good morning")) == 1
    assert promised(state / "feed.db") == ["good morning"]


@pytest.mark.parametrize("point", [point for point in POINTS if not point.startswith("claims.put.")])
def test_a_reader_killed_at_any_point_loses_nothing(state: Path, point: str) -> None:
    """Killed there once; the next reader answers every message, and no message is answered twice."""
    path = state / "feed.db"
    if point == "claims.free.written":  # only where somebody else died before
        stored(path, "c0")
        with reading(path, "stop-after-claim") as early:
            assert said(early) == "took c0 1"
    stored(path, "a1", "a2", "b1")
    with reading(path, "raise" if point.startswith("claims.fail.") else "echo", **{CRASH_AT_ENV: point}) as reader:
        assert reader.wait(60) == -signal.SIGKILL
    expected = {"re: a1", "re: a2", "re: b1"} | ({"re: c0"} if point == "claims.free.written" else set())
    with reading(path, "echo") as reader:
        left = feed_status(path, "bob")
        finished = 0
        while finished < left.waiting + left.in_flight:
            finished += said(reader).startswith("done")

    assert sorted(promised(path)) == sorted(expected)
    assert feed_status(path, "bob").dead == 0


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("claims.put.")])
def test_a_send_that_was_killed_is_there_or_not(state: Path, point: str) -> None:
    """Before the commit nothing is promised, after it everything is."""
    state.mkdir()
    script = f"from everdeck.satellites.bridge import send\nfrom everdeck.messages import outgoing\nfrom pathlib import Path\nsend(Path({str(state / 'feed.db')!r}), outgoing(1, 'hi'))"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", script], env={CRASH_AT_ENV: point}, check=False, timeout=60)

    assert done.returncode == -signal.SIGKILL
    assert promised(state / "feed.db") == (["hi"] if point.endswith("committed") else [])
