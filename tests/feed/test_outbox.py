"""Replies: promised with the ack, sent afterwards, in order per chat."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from everdeck.errors import FeedError, PerhapsSent
from everdeck.feed import Dispatcher, Inbox, Message, Outbox, Record, Retry, consume
from everdeck.feed.dispatcher import Item
from everdeck.feed.outbox import drop_unsent, retry_unsent
from everdeck.feed.pace import Limits
from feed.test_dispatcher import cancelled_in_its_commit
from support.feed_upstream import Upstream, UpstreamSource, update
from support.waiting import eventually

AT_ONCE = Retry(seconds=0.0, cap_seconds=0.0)


class SlowDown(Exception):
    """What a 429 becomes in aiogram and python-telegram-bot."""

    def __init__(self, retry_after: Any) -> None:
        super().__init__(f"retry after {retry_after}")
        self.retry_after = retry_after


@asynccontextmanager
async def sending(outbox: Outbox, send: Any) -> AsyncIterator[None]:
    """The sender at work."""
    sender = asyncio.ensure_future(outbox.run(send))
    try:
        yield
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


def test_a_reply_is_promised_with_the_ack_and_sent_afterwards(tmp_path: Path) -> None:
    """A transaction that is undone promises nothing; one that is committed is kept, by a later run if need be."""
    upstream = Upstream()
    upstream.arrive(*(update(n, chat=n % 2) for n in range(1, 7)))
    inbox = Inbox(tmp_path / "bot.db")
    outbox = Outbox(inbox)
    sent: list[tuple[str | None, int]] = []

    async def handler(item: Any) -> None:
        async with item.transaction() as db:
            outbox.put(db, {"answers": item.id}, key=item.key)
            if item.attempt == 1 and item.id == 3:
                raise ValueError

    async def send(message: Message) -> None:
        sent.append((message.key, message.value["answers"]))

    async def scenario() -> None:
        await asyncio.wait_for(consume(UpstreamSource(upstream), handler, inbox=inbox, retry=AT_ONCE), 60)
        assert sent == []
        async with inbox:
            assert outbox.waiting() == 6
            async with sending(outbox, send):
                await asyncio.wait_for(outbox.sent(), 60)
            await outbox.add({"answers": 7}, key="1")
            async with sending(outbox, send):
                await asyncio.wait_for(outbox.sent(), 60)

    asyncio.run(scenario())
    assert [number for key, number in sent if key == "1"] == [1, 3, 5, 7]
    assert [number for key, number in sent if key == "0"] == [2, 4, 6]


def test_what_is_put_while_the_sender_runs_is_sent(tmp_path: Path) -> None:
    """The commit wakes the sender."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            outbox = Outbox(inbox)
            arrived: asyncio.Queue[int] = asyncio.Queue()
            async with sending(outbox, lambda message: arrived.put_nowait(message.value)):
                for n in range(20):
                    await outbox.add(n)
                    assert await asyncio.wait_for(arrived.get(), 30) == n

    asyncio.run(scenario())


@pytest.mark.parametrize("wait", [0.05, timedelta(seconds=0.05)])
def test_429_makes_the_chat_wait_and_costs_no_attempt(tmp_path: Path, wait: Any) -> None:
    """However often we are asked to wait; another chat goes on meanwhile; the order of the chat holds."""
    sent: list[tuple[Any, int]] = []
    refusals = 10

    async def send(message: Message) -> None:
        nonlocal refusals
        if message.value == "first" and refusals:
            refusals -= 1
            raise SlowDown(wait)
        sent.append((message.value, message.attempt))

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            outbox = Outbox(inbox, max_attempts=2)
            await outbox.add("first", key="a")
            await outbox.add("second", key="a")
            await outbox.add("other", key="b")
            async with sending(outbox, send):
                await asyncio.wait_for(outbox.sent(), 60)

    asyncio.run(scenario())
    assert sent == [("other", 1), ("first", 1), ("second", 1)]


def test_what_cannot_be_sent_is_set_aside_and_the_chat_flows_on(tmp_path: Path) -> None:
    """After max_attempts, with an event; it can be tried again or dropped."""
    told: list[dict[str, Any]] = []
    sent: list[str] = []
    healed = False

    async def send(message: Message) -> None:
        if message.value.startswith("bad") and not healed:
            raise ConnectionError("no")
        sent.append(message.value)

    async def scenario() -> None:
        nonlocal healed
        async with Inbox(tmp_path / "bot.db") as inbox:
            outbox = Outbox(inbox, max_attempts=3, retry=AT_ONCE, on_event=told.append)
            for text in ("bad", "good", "bad too"):
                await outbox.add(text, key="a")
            async with sending(outbox, send):
                await asyncio.wait_for(outbox.sent(), 60)
                assert sent == ["good"]
                first, second = outbox.dead_letters()
                assert (first.attempts, first.error, first.payload) == (3, "ConnectionError: no", b'"bad"')
                healed = True
                assert await drop_unsent(inbox, second.number)
                assert not await drop_unsent(inbox, second.number)
                assert await retry_unsent(inbox, first.number)
                await asyncio.wait_for(outbox.sent(), 60)
            assert outbox.dead_letters() == []

    asyncio.run(scenario())
    assert sent == ["good", "bad"]
    assert [event["what"] for event in told] == ["unsent", "unsent"]


def test_outboxes_of_one_file_are_apart(tmp_path: Path) -> None:
    """Mail is not sent to a chat."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            chats, mail = Outbox(inbox, "chats"), Outbox(inbox, "mail")
            await chats.add("hello")
            await mail.add("Dear")
            sent: list[str] = []
            async with sending(mail, lambda message: sent.append(message.value)):
                await asyncio.wait_for(mail.sent(), 60)
            assert sent == ["Dear"]
            assert chats.waiting() == 1

    asyncio.run(scenario())


def test_a_promise_that_may_yet_be_undone_is_not_sent(tmp_path: Path) -> None:
    """The sender starts, and looks again, while a handler's transaction is open and is then undone."""
    sent: list[str] = []

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            outbox = Outbox(inbox)
            with pytest.raises(RuntimeError):  # noqa: PT012 - the transaction is the statement
                async with inbox.transaction() as db:
                    outbox.put(db, "undone")
                    sender = asyncio.ensure_future(outbox.run(lambda message: sent.append(message.value)))
                    inbox.store.bell.ring()
                    for _ in range(20):
                        await asyncio.sleep(0)
                    raise RuntimeError
            await outbox.add("kept")
            await asyncio.wait_for(outbox.sent(), 30)
            with pytest.raises(FeedError, match="already being sent"):
                await outbox.run(sent.append)  # type: ignore[arg-type]
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    asyncio.run(scenario())
    assert sent == ["kept"]


def test_a_long_wait_that_was_asked_for_survives_a_restart(tmp_path: Path) -> None:
    """retry_after of an hour is an hour, whatever our own backoff would be."""

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            outbox = Outbox(inbox, retry=AT_ONCE)
            tried = asyncio.Event()

            def send(_message: Message) -> None:
                tried.set()
                raise SlowDown(3600)

            await outbox.add("later")
            async with sending(outbox, send):
                await asyncio.wait_for(tried.wait(), 30)
                while not inbox.store.read("outbox_waiting", outbox.name)[0][2]:  # noqa: ASYNC110 - on disk
                    await asyncio.sleep(0)
            tried.clear()
            async with sending(outbox, send):
                await asyncio.sleep(0.1)
                assert not tried.is_set()

    asyncio.run(scenario())


def test_what_can_never_be_sent_is_set_aside_at_once(tmp_path: Path) -> None:
    """A 403 is not tried eight times; the chat flows on."""
    tried: list[str] = []

    class Blocked(Exception):
        permanent = True

    async def send(message: Message) -> None:
        tried.append(message.value)
        if message.value == "blocked":
            raise Blocked

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            outbox = Outbox(inbox)
            await outbox.add("blocked", key="a")
            await outbox.add("next", key="a")
            async with sending(outbox, send):
                await asyncio.wait_for(outbox.sent(), 60)
            assert [(letter.key, letter.attempts) for letter in outbox.dead_letters()] == [("a", 1)]

    asyncio.run(scenario())
    assert tried == ["blocked", "next"]


@asynccontextmanager
async def one_in_hand(path: Path) -> AsyncIterator[tuple[Inbox, Item]]:
    """An inbox, and the only item of it, which is done at the end."""
    async with Inbox(path) as inbox:
        stream = inbox.stream("s")
        await stream.begin()
        await stream.store([Record(1, b"1", None)], 2)
        dispatcher = Dispatcher(stream)
        await dispatcher.open()
        (item,) = await dispatcher.take()
        yield inbox, item
        await item.done()
        await dispatcher.stop()


@pytest.mark.parametrize(("delivery", "sent_in_all"), [("at-least-once", 2), ("at-most-once", 1)])
def test_what_was_on_the_wire_at_a_crash_is_a_choice(tmp_path: Path, delivery: Any, sent_in_all: int) -> None:
    """Sent again, or set aside; and a handler that asks for it again learns that nobody knows."""
    sent: list[str] = []

    async def scenario() -> None:
        async with one_in_hand(tmp_path / "bot.db") as (inbox, item):
            outbox = Outbox(inbox, delivery=delivery)
            on_the_wire = asyncio.Event()

            async def die(message: Message) -> None:
                sent.append(message.value)
                on_the_wire.set()
                await asyncio.Event().wait()

            asking = asyncio.ensure_future(outbox.send("hello", item=item))
            running = asyncio.ensure_future(outbox.run(die))
            await asyncio.wait_for(on_the_wire.wait(), 30)
            # As a kill would leave it: what it does when it is cancelled in good order is not wanted here.
            again = Outbox(inbox, delivery=delivery)
            item.sends = None
            async with sending(again, lambda message: sent.append(message.value)):
                if delivery == "at-most-once":
                    await eventually(again.dead_letters)
                    with pytest.raises(PerhapsSent):
                        await again.send("hello", item=item)
                else:
                    await asyncio.wait_for(again.send("hello", item=item), 30)
            for task in (asking, running):
                task.cancel()
            await asyncio.gather(asking, running, return_exceptions=True)

    asyncio.run(scenario())
    assert sent == ["hello"] * sent_in_all


def test_a_promise_that_is_cancelled_in_its_commit_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that ran out of time there is run again: its message is found, and must be on its way."""
    sent: list[str] = []

    async def scenario() -> None:
        async with one_in_hand(tmp_path / "bot.db") as (inbox, item):
            outbox = Outbox(inbox)
            async with sending(outbox, lambda message: sent.append(message.value)):
                await eventually(lambda: outbox._loaded)
                await cancelled_in_its_commit(outbox.send("hello", item=item), inbox.store, monkeypatch)
                item.sends = None
                await asyncio.wait_for(outbox.send("hello", item=item), 60)

    asyncio.run(scenario())
    assert sent == ["hello"]


def test_whoever_asks_while_a_message_is_set_aside_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first who waited has given up; the second comes between the commit and the news of it."""

    async def scenario() -> None:
        async with one_in_hand(tmp_path / "bot.db") as (inbox, item):
            outbox = Outbox(inbox, max_attempts=1)
            wired, refuse = asyncio.Event(), asyncio.Event()

            async def send(_message: Message) -> None:
                wired.set()
                await refuse.wait()
                raise RuntimeError("no")

            async with sending(outbox, send):
                first = asyncio.ensure_future(outbox.send("hello", item=item))
                await asyncio.wait_for(wired.wait(), 60)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                with _held_write(inbox.store, monkeypatch) as writing:
                    refuse.set()
                    assert await asyncio.to_thread(writing.wait, 60)
                    item.sends = None
                    second = asyncio.ensure_future(outbox.send("hello", item=item))
                    await asyncio.sleep(0)
                with pytest.raises(RuntimeError, match="no"):
                    await asyncio.wait_for(second, 60)

    asyncio.run(scenario())


@contextmanager
def _held_write(store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The next write does not begin before the end of the block; the answer is set when it is about to."""
    writing, may_go = threading.Event(), threading.Event()
    whole = store.whole

    def held(*arguments: Any) -> Any:
        writing.set()
        assert may_go.wait(60)
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(store, "whole", held)
        try:
            yield writing
        finally:
            may_go.set()


def test_the_limits_hold_while_it_sends(tmp_path: Path) -> None:
    """In all, per chat, per group; a chat that has to wait holds up no other."""
    times: list[tuple[str | None, float]] = []
    limits = Limits(per_second=50, per_key_per_second=10, per_group_per_minute=2)

    async def scenario() -> None:
        async with Inbox(tmp_path / "bot.db") as inbox:
            outbox = Outbox(inbox, limits=limits)
            for number in range(3):
                for key in ("1", "2", "3", "-100"):
                    await outbox.add(number, key=key)

            def send(message: Message) -> None:
                times.append((message.key, asyncio.get_running_loop().time()))

            async with sending(outbox, send):
                await eventually(lambda: len(times) == 11)
                assert outbox.waiting() == 1  # the group's third waits for its minute

    asyncio.run(scenario())
    for key in ("1", "2", "3"):
        own = [at for one, at in times if one == key]
        assert all(later - earlier > 0.05 for earlier, later in pairwise(own))
    assert times[-1][1] - times[0][1] > 0.15  # eleven at fifty a second
    assert [key for key, _ in times].count("-100") == 2
