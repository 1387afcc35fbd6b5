"""``everdeck feed dead-letters``: list, show, retry, drop."""

import asyncio
import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everdeck.cli import main
from everdeck.feed import Dispatcher, FeedPolicy, Inbox, Outbox, Record, Retry

Feed = Callable[..., str]
LETTERS = ("feed", "dead-letters")
AT_ONCE = Retry(seconds=0.0, cap_seconds=0.0)


@pytest.fixture
def feed(capsys: pytest.CaptureFixture[str]) -> Feed:
    """Types the command and gives what it prints."""

    def typed(*arguments: object, exit_code: int = 0) -> str:
        assert main(["feed", "dead-letters", *map(str, arguments)]) == exit_code
        told = capsys.readouterr()
        return told.out + told.err

    return typed


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    """A file with two dead letters and one reply that could not be sent."""

    async def fill() -> None:
        async with Inbox(tmp_path / "bot.db") as opened:
            stream = opened.stream("telegram:1")
            await stream.begin()
            dispatcher = Dispatcher(stream, FeedPolicy(max_attempts=1))
            await dispatcher.open()
            await stream.store(
                [Record(71, b'{"text":"[b]one[/b]"}', "7"), Record(72, b"\xff", "7"), Record(73, b"{}")], 74
            )
            while len(opened.dead_letters()) < 2:
                for item in await dispatcher.take():
                    if item.id == 73:
                        await item.done()
                    else:
                        await item.failed(ValueError("cannot\nbe"))
            await dispatcher.stop()
            outbox = Outbox(opened, max_attempts=1, retry=AT_ONCE)
            await outbox.add({"chat": 7}, key="7")

            def send(_message: Any) -> None:
                raise ConnectionError("offline")

            sender = asyncio.ensure_future(outbox.run(send))
            async with asyncio.timeout(30):
                await outbox.sent()
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    asyncio.run(fill())
    return tmp_path / "bot.db"


def test_list_for_people_and_for_programs(feed: Feed, inbox: Path) -> None:
    """One line each; --json is one object per line with everything."""
    table = feed("list", inbox)
    assert "ValueError: cannot be" in table
    assert len(table.splitlines()) == 4
    rows = [json.loads(line) for line in feed("list", inbox, "--json").splitlines()]
    assert [(row["number"], row["stream"], row["id"]) for row in rows] == [
        ("1", "telegram:1", 71),
        ("2", "telegram:1", 72),
        ("out-1", "replies", None),
    ]
    assert [
        json.loads(line)["id"] for line in feed("list", inbox, "--json", "--stream", "telegram:1").splitlines()
    ] == [71, 72]


def test_show_has_the_payload(feed: Feed, inbox: Path) -> None:
    """As it came; what is not text is shown as well as it can be."""
    assert '{"text":"[b]one[/b]"}' in feed("show", inbox, 1)
    assert json.loads(feed("show", inbox, "out-1", "--json"))["payload"] == '{"chat":7}'
    assert "no dead letter 9" in feed("show", inbox, 9, exit_code=1)


def test_retry_and_drop(feed: Feed, inbox: Path) -> None:
    """By number or all; a number that is not there is an error, and the others are done all the same."""
    assert "1: to be tried again" in feed("retry", inbox, 1)
    assert "no dead letter 1" in feed("retry", inbox, 1, 2, exit_code=1)
    assert feed("list", inbox, "--json").count("telegram:1") == 0
    assert json.loads(feed("drop", inbox, "out-1", "--json")) == {"number": "out-1", "done": True}
    assert "no dead letters" in feed("list", inbox)
    assert "no dead letters" in feed("drop", inbox, "--all")

    async def waiting() -> list[tuple[Any, int]]:
        async with Inbox(inbox) as opened:
            stream = opened.stream("telegram:1")
            await stream.begin()
            dispatcher = Dispatcher(stream)
            await dispatcher.open()
            taken = [(item.id, item.attempt) for item in await dispatcher.take()]
            await dispatcher.stop(0)
            return taken

    assert asyncio.run(waiting()) == [(71, 1)]  # 72 has the same key


def test_all_of_them(feed: Feed, inbox: Path) -> None:
    """--all takes the replies too."""
    assert len(feed("retry", inbox, "--all").splitlines()) == 3
    assert "no dead letters" in feed("list", inbox)


def test_used_wrongly(feed: Feed, inbox: Path, tmp_path: Path) -> None:
    """Exit code 2 and what to do instead; a file that is no inbox is an error, not a new inbox."""
    assert "give the numbers" in feed("retry", inbox, exit_code=2)
    assert "give the numbers" in feed("drop", inbox, 1, "--all", exit_code=2)
    feed("list", tmp_path / "nowhere.db", exit_code=2)
    assert not (tmp_path / "nowhere.db").exists()
    (tmp_path / "text.db").write_text("not a database, not at all " * 100)
    assert "not a database" in feed("list", tmp_path / "text.db", exit_code=1)
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = (tmp_path / "other.db").read_bytes()
    assert "not an inbox" in feed("list", tmp_path / "other.db", exit_code=1)
    assert (tmp_path / "other.db").read_bytes() == before


def test_beside_a_bot_at_work(inbox: Path) -> None:
    """The bot keeps its claim on the file; a retry reaches it within seconds."""

    async def scenario() -> None:
        async with Inbox(inbox) as opened:
            stream = opened.stream("telegram:1")
            await stream.begin()
            dispatcher = Dispatcher(stream)
            await dispatcher.open()
            taking = asyncio.ensure_future(dispatcher.take())
            command = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "everdeck.cli", *LETTERS, "retry", str(inbox), "2", stdout=asyncio.subprocess.PIPE
            )
            printed, _ = await asyncio.wait_for(command.communicate(), 60)
            assert printed == b"2: to be tried again\n"
            (item,) = await asyncio.wait_for(taking, 60)
            assert item.id == 72
            await item.done()
            await dispatcher.stop()

    asyncio.run(scenario())
