"""A daemon over HTTP as a deck, beyond what tests/contract shows for every deck: streams that come back, trust, TLS."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import everdeck
from everdeck import AsyncDeck, Deck, Event, Satellite, SpecError, Stop, WorkerSpec
from everdeck.errors import AccessDenied, ClientError, DeckClosed, NoOwner, TokenRefused, UnknownWorker
from everdeck.faults import classes
from everdeck.remote import RemoteDeck
from everdeck.server.problems import status_of
from everdeck.testing.telegram import TelegramServer
from support.cli_daemon import EVERDECK, PATIENCE_SECONDS, Person, until
from support.web_served import Served, served_at

COUNTING = ["sh", "-c", "n=0; while [ -e go ]; do n=$((n+1)); echo $n; sleep 0.02; done; sleep 1000"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A daemon for the tests that let it live."""
    with served_at(tmp_path_factory.mktemp("remote") / "state") as daemon:
        yield daemon


@contextlib.asynccontextmanager
async def reached(daemon: Served) -> AsyncIterator[RemoteDeck]:
    """The daemon as a deck."""
    async with asyncio.timeout(PATIENCE_SECONDS), RemoteDeck(daemon.base, token=daemon.token) as deck:
        yield deck


def test_a_url_opens_the_same_deck_in_every_way(served: Served) -> None:
    """``everdeck.open``, ``Deck`` and ``AsyncDeck`` take a URL where they take a directory."""
    with everdeck.open(served.base, token=served.token) as deck:
        deck.start("alice", ["sleep", "1000"], env={"TZ": "UTC"}, stop=Stop(grace_seconds=1))
        assert deck.spec("alice").env == {"TZ": "UTC"}
    with Deck(served.base, token=served.token) as again:
        assert again.status("alice").state == "running"
        assert again.abilities().kind == "remote"
        again.remove("alice")

    async def scenario() -> None:
        async with AsyncDeck(served.base, token=served.token) as deck:
            assert await deck.list() == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "where", ["https://user:secret@box:8440", "http://box:8440?token=secret", "http://", "http:box", "ftp://box"]
)
def test_an_address_that_is_none_is_refused_by_name(where: str) -> None:
    """Before anything is sent; a token belongs into token=, where it is not logged."""
    with pytest.raises(SpecError) as refused:
        everdeck.open(where)
    assert refused.value.field == "where"


def test_nobody_there_and_nobody_known_are_two_errors(served: Served) -> None:
    """One asks for a daemon, the other for a token; a token without the role is a third."""
    with pytest.raises(NoOwner, match="nobody answers"):
        everdeck.open("http://127.0.0.1:1")
    with pytest.raises(TokenRefused):
        everdeck.open(served.base, token="x" * 43)
    made = json.loads(served.person.types("token", "create", "reader", "--json").stdout)["token"]
    with everdeck.open(served.base, token=made) as deck:
        deck.list()
        with pytest.raises(AccessDenied) as denied:
            deck.start("alice", ["sleep", "1000"])
        assert denied.value.caller == "reader"


def test_after_closing_every_verb_is_refused(served: Served) -> None:
    """As with a deck of this machine."""

    async def scenario() -> None:
        async with reached(served) as deck:
            pass
        with pytest.raises(DeckClosed):
            await deck.list()
        with pytest.raises(DeckClosed):
            deck.on_event(print)

    asyncio.run(scenario())


def test_events_go_on_after_the_daemon_was_killed_and_none_is_missed_or_told_twice(tmp_path: Path) -> None:
    """follow() reconnects with Last-Event-ID; so does on_event."""
    with served_at(tmp_path / "state") as daemon:

        async def scenario() -> None:
            async with reached(daemon) as deck:
                heard: list[Event] = []
                deck.on_event(heard.append)
                await deck.start("alice", ["sleep", "1000"])
                followed: list[Event] = []
                seen_first = asyncio.Event()

                async def follow() -> None:
                    async for event in deck.follow(0):
                        followed.append(event)
                        seen_first.set()
                        if event.worker == "bob":
                            return

                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(follow())
                    await seen_first.wait()
                    await asyncio.to_thread(daemon.person.kills, daemon.person.owner(), signal.SIGKILL)
                    await asyncio.to_thread(
                        daemon.person.types, "up", "--detach", "--listen", f"127.0.0.1:{daemon.port}"
                    )
                    await started_again(deck)
                assert [event.id for event in followed] == list(range(1, len(followed) + 1))
                assert "adopted" in [event.kind for event in followed]
                await asyncio.to_thread(until, lambda: any(event.worker == "bob" for event in heard))
                ids = [event.id for event in heard]
                assert ids == list(range(ids[0], ids[0] + len(ids)))

        asyncio.run(scenario())


async def started_again(deck: RemoteDeck) -> None:
    """The first verb that the new daemon takes; a connection of the old one may be in the pool."""
    while True:
        with contextlib.suppress(ClientError):
            await deck.start("bob", ["sleep", "1000"])
            return


def test_a_log_is_followed_across_connections_line_by_line(tmp_path: Path) -> None:
    """Each line of the stream has a position; a new daemon goes on there."""
    with served_at(tmp_path / "state") as daemon:
        data = daemon.person.state / "workers" / "alice" / "data"

        async def scenario() -> None:
            async with reached(daemon) as deck:
                await deck.start("alice", ["sleep", "1000"])
                await deck.stop("alice")
                (data / "go").touch()
                await deck.start("alice", WorkerSpec(COUNTING, stop=Stop(grace_seconds=0)), replace=True)
                numbers: list[int] = []
                killed = False
                async for line in deck.follow_logs("alice", 10_000):
                    if not line.isdigit():
                        continue
                    numbers.append(int(line))
                    if len(numbers) > 5 and not killed:
                        killed = True
                        await asyncio.to_thread(daemon.person.kills, daemon.person.owner(), signal.SIGKILL)
                        await asyncio.to_thread(
                            daemon.person.types, "up", "--detach", "--listen", f"127.0.0.1:{daemon.port}"
                        )
                        before = len(numbers)
                    if killed and len(numbers) > before + 50:
                        break
                assert numbers == list(range(1, len(numbers) + 1))
                (data / "go").unlink()

        asyncio.run(scenario())


def test_following_a_log_ends_when_the_worker_is_removed(served: Served) -> None:
    """And of a worker that nobody knows it does not begin."""

    async def scenario() -> None:
        async with reached(served) as deck:
            await deck.start("alice", ["sh", "-c", "echo hello; sleep 1000"], stop=Stop(grace_seconds=0))
            lines: list[str] = []
            async for line in deck.follow_logs("alice", 10):
                lines.append(line)
                if line == "hello":
                    await deck.remove("alice")
            assert "hello" in lines
            with pytest.raises(UnknownWorker):
                async for _ in deck.follow_logs("alice"):
                    pass

    asyncio.run(scenario())


def test_a_batch_goes_on_though_its_caller_leaves(served: Served) -> None:
    """A verb that acts is carried to its end once it has begun."""

    async def scenario() -> None:
        async with reached(served) as deck:
            begun = asyncio.Event()
            many = {f"w{n}": ["sleep", "1000"] for n in range(60)}
            starting = asyncio.ensure_future(
                deck.start_many(many, progress=lambda _name, _answer: begun.set(), stop=Stop(grace_seconds=0))
            )
            await begun.wait()
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            while sum(status.state == "running" for status in await deck.list()) < len(many):
                pass
            assert len(await deck.stop_all()) == len(many)
            for name in many:
                await deck.remove(name)

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def losing_answers(daemon: Served, answers: int) -> AsyncIterator[str]:
    """The address of a proxy that carries every request and loses the first answers to what is not a GET."""
    left = answers
    carrying: set[asyncio.Task[object] | None] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        carrying.add(asyncio.current_task())
        there, to_daemon = await asyncio.open_connection("127.0.0.1", daemon.port)
        with contextlib.closing(writer), contextlib.closing(to_daemon):
            head = (await reader.readuntil(b"\r\n\r\n")).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            to_daemon.write(head + await reader.readexactly(int(length[1]) if length else 0))
            if lost := not head.startswith(b"GET") and left > 0:
                left -= 1
            with contextlib.suppress(ConnectionError):  # whoever reads a stream leaves when it has read enough
                while chunk := await there.read(1 << 16):
                    if not lost:
                        writer.write(chunk)
                        await writer.drain()

    async with await asyncio.start_server(carry, "127.0.0.1", 0) as proxy:
        try:
            yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        finally:
            tasks = [task for task in carrying if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def test_a_verb_whose_answer_is_lost_is_asked_again_and_done_once(served: Served) -> None:
    """Twice lost on the way, each of them: one event each, and the caller only waited longer."""

    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            for verb, kind in (
                (lambda deck: deck.start("lost", ["sleep", "1000"]), "started"),
                (lambda deck: deck.restart("lost"), "restarted"),
                (lambda deck: deck.reset("lost"), "reset"),
                (lambda deck: deck.stop("lost"), "stopped"),
                (lambda deck: deck.start_many({"lost": None}), "started"),
                (lambda deck: deck.stop_all(), "stopped"),
                (lambda deck: deck.remove("lost"), "stopped"),
            ):
                async with losing_answers(served, 2) as where, RemoteDeck(where, token=served.token) as deck:
                    begin = await deck.last_event_id()
                    await verb(deck)
                    kinds = [event.kind for event in await deck.events(begin, worker="lost")]
                    assert kinds.count(kind) == 1

    asyncio.run(scenario())


def test_a_message_whose_end_is_lost_on_the_way_ends_once(served: Served) -> None:
    """Finished, failed, decided about: asked again under the same key, it is answered as before."""

    async def scenario(bot: TelegramServer) -> None:
        async with reached(served) as deck:
            await deck.start("bot", Satellite.telegram(bot.token, base_url=bot.url, first_run="take"))
            for failing in (True, False):
                async with (
                    losing_answers(served, 2) as where,
                    RemoteDeck(where, token=served.token) as far,
                    far.messages("bot") as messages,
                ):
                    with contextlib.suppress(ZeroDivisionError):
                        async with await anext(messages) as message:
                            assert (message.text, message.attempt) == ("hello", 1 if failing else 2)
                            await message.reply(str(1 // (not failing)))
            (done,) = await deck.letters("bot", which="done")
            async with losing_answers(served, 2) as where, RemoteDeck(where, token=served.token) as far:
                assert await far.decide("bot", "replay", done.number) is True
            async with deck.messages("bot") as messages, await anext(messages) as message:
                assert message.text == "hello"
            assert (await deck.feed("bot")).dead == 0
            await deck.remove("bot")

    with TelegramServer() as bot:
        bot.say("hello")
        asyncio.run(scenario(bot))


def test_a_key_is_kept_with_what_was_done_under_it(tmp_path: Path) -> None:
    """The daemon was killed before the caller asked again: the next one answers, and does not restart once more."""
    with served_at(tmp_path / "state") as daemon, daemon.client() as client:
        client.post("/api/v1/workers", json={"name": "alice", "command": ["sleep", "1000"]}).raise_for_status()
        key = {"Idempotency-Key": "deploy 7"}
        first = client.post("/api/v1/workers/alice/restart", headers=key).json()
        os.kill(json.loads(client.get("/api/v1/deck").text)["owner_pid"], signal.SIGKILL)
        daemon.person.types("up", "--detach", "--listen", f"127.0.0.1:{daemon.port}")
        with daemon.client() as again:
            assert again.post("/api/v1/workers/alice/restart", headers=key).json()["pid"] == first["pid"]
            other = again.post("/api/v1/workers/alice/restart", headers={"Idempotency-Key": "deploy 8"}).json()
            assert other["pid"] != first["pid"]
            events = again.get("/api/v1/events", params={"worker": "alice"}, headers={"Accept": "application/json"})
            assert [event["kind"] for event in events.json()].count("restarted") == 2


def test_the_command_line_takes_a_url_for_a_directory(served: Served, tmp_path: Path) -> None:
    """With the token of $EVERDECK_TOKEN; verbs that need files of this machine say so; exit codes are the same."""
    afar = Person(tmp_path / "nothing", EVERDECK_STATE=served.base, EVERDECK_TOKEN=served.token)

    def types(*words: str, expect: int = 0) -> str:
        command = [str(EVERDECK), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env=afar.env, cwd=tmp_path, timeout=60, check=False
        )
        assert done.returncode == expect, done.stderr
        return done.stdout + done.stderr

    assert types("start", "alice", "--grace", "0", "--", "sh", "-c", "echo hello; sleep 1000").startswith(
        "alice running"
    )
    seen = json.loads(types("ps", "--json"))
    assert (seen["supervised"], [worker["name"] for worker in seen["workers"]]) == (True, ["alice"])
    until(lambda: "hello" in types("logs", "alice"))
    assert "sh -c" in types("inspect", "alice")
    assert "started" in types("events")
    assert "did you mean 'alice'" in types("stop", "alcie", expect=1)
    file = tmp_path / "everdeck.toml"
    file.write_text('[worker.bob]\ncommand = ["sleep", "1000"]\n')
    assert "+ bob" in types("apply", str(file))
    assert types("rm", "alice", "bob", "--yes") == "alice removed\nbob removed\n"
    assert "needs a directory" in types("doctor", expect=2)
    afar.env["EVERDECK_TOKEN"] = "x" * 43
    assert "not known" in types("ps", expect=1)
    afar.env["EVERDECK_STATE"] = "http://127.0.0.1:1"
    assert "nobody answers" in types("ps", expect=3)


def test_every_error_of_the_tree_has_a_status_of_its_own_choice() -> None:
    """500 is for bugs: a class without an entry would be told as one."""
    assert not [name for name, kind in classes().items() if name != "EverdeckError" and status_of(kind) == 500]
