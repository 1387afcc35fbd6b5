"""The cron and webhook satellites: ticks and requests that are stored before anything else happens."""

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import json
import os
import re
import signal
import sqlite3
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import httpx
import pytest

from everdeck import AsyncDeck, EverdeckError, MessageError, Restart, Satellite, SpecError, WorkerSpec
from everdeck.crashpoints import CRASH_AT_ENV
from everdeck.feed.records import Position
from everdeck.model import EventKind
from everdeck.satellites import CronOptions
from everdeck.satellites import webhook as webhook_module
from everdeck.satellites.base import Context
from everdeck.satellites.bridge import feed_status
from everdeck.satellites.cron import Cron
from everdeck.satellites.targets import signature
from everdeck.satellites.webhook import refusal
from everdeck.testing.satellites import NAME, Victim, kill_trial
from everdeck.testing.telegram import TelegramServer
from support.sat_clock import FastClock, needs_gcc
from support.sat_trial import patience, size, tell
from support.waiting import eventually

Run = Callable[[Callable[[], Awaitable[Any]]], Any]
AGAIN = Restart("always", max_crashes=1000, backoff_seconds=0.05)
POINTS = sorted(set(re.findall(r'crash_point\("([^"]+)"\)', Path(webhook_module.__file__).read_text())))


# --- cron -------------------------------------------------------------------------------------------------------


def ticks(expression: str, tz: str, missed: str, since: datetime, now: datetime) -> list[tuple[str, int]]:
    """What a clock that was away from ``since`` until ``now`` delivers."""
    context = Context("tick", Path(), None, clock=now.timestamp)
    kind = Cron(CronOptions(expression, tz, missed), context)  # type: ignore[arg-type]

    async def fetch() -> list[tuple[str, int]]:
        try:
            async with asyncio.timeout(0.2):
                arrived = await kind.fetch(Position(since.isoformat(), 0))
        except TimeoutError:
            return []
        assert arrived is not None
        return [(message.text, message.raw["missed"]) for message in arrived.messages]

    return asyncio.run(fetch())


def test_missed_ticks_come_once_all_or_not_at_all() -> None:
    """Three hours away: one tick that stands for the others, each of them, or none."""
    since, now = datetime(2026, 5, 1, 8, 30, tzinfo=UTC), datetime(2026, 5, 1, 11, 30, tzinfo=UTC)

    assert ticks("0 * * * *", "UTC", "once", since, now) == [("2026-05-01T11:00:00+00:00", 2)]
    assert [text for text, _ in ticks("0 * * * *", "UTC", "all", since, now)] == [
        f"2026-05-01T{hour:02}:00:00+00:00" for hour in (9, 10, 11)
    ]
    assert ticks("0 * * * *", "UTC", "skip", since, now) == []


def test_both_changes_of_the_clock_fire_once() -> None:
    """``30 2`` does not exist on the spring night and exists twice on the autumn night: once each."""
    berlin = ZoneInfo("Europe/Berlin")
    for day in (datetime(2026, 3, 29, tzinfo=berlin), datetime(2026, 10, 25, tzinfo=berlin)):
        found = ticks("30 2 * * *", "Europe/Berlin", "all", day, day.replace(hour=12))
        assert len(found) == 1, found


def test_a_wrong_expression_or_zone_is_refused_before_anything_is_written() -> None:
    """The field is named."""
    for expression, tz, field in (("61 * * * *", "UTC", "expression"), ("* * * * *", "Europe/Atlantis", "tz")):
        with pytest.raises(SpecError) as refused:
            Satellite.cron(expression, tz=tz)
        assert refused.value.field == field


def test_a_tick_reaches_the_host_and_cannot_be_answered(state: Path, run: Run) -> None:
    """The tick is a message like any other; a second satellite runs a command for it."""

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            out = state / "ran"
            job = ["sh", "-c", f"cat > {out}.new && mv {out}.new {out}"]
            await deck.start("job", Satellite.cron("* * * * *", to=job))
            await deck.start("tick", Satellite.cron("* * * * *", missed="all"))
            await eventually(lambda: _connected(deck, "tick"))
            await eventually(lambda: _connected(deck, "job"))
            for name in ("tick", "job"):
                _turn_back(state / "workers" / name / "data" / "feed.db")
                await deck.restart(name)
            async with deck.messages("tick") as messages, await anext(messages) as message:
                assert message.channel == "cron"
                assert datetime.fromisoformat(message.text).second == 0
                with pytest.raises(MessageError, match="cannot send"):
                    await message.reply("thanks")
            with pytest.raises(SpecError):
                await deck.send("tick", to="x", text="hello")
            await eventually(out.exists, "the command ran")
            assert json.loads(out.read_text())["channel"] == "cron"

    run(scenario)


def _turn_back(path: Path) -> None:
    """As if the last tick had been ten minutes ago."""
    with sqlite3.connect(path) as db:
        cursor = json.dumps(datetime.fromtimestamp(time.time() - 600, UTC).isoformat())
        db.execute("UPDATE everdeck_stream SET cursor = ?", (cursor,))
    db.close()


# --- webhook ----------------------------------------------------------------------------------------------------


def hook(state: Path, **fields: Any) -> WorkerSpec:
    """A listener at /hook."""
    return Satellite.webhook("/hook", restart=AGAIN, **fields)


def test_a_request_is_stored_before_it_is_answered_and_recognised_when_it_comes_again(state: Path, run: Run) -> None:
    """200 means that it is in the inbox; the same delivery id twice is one message; wrong signatures are refused."""

    async def scenario() -> None:
        async with AsyncDeck(state) as deck, httpx.AsyncClient() as client:
            await deck.start("hook", hook(state, secret="shh", preset="github"))
            url = await _url(deck)
            body = b'{"action": "opened"}'
            headers = {
                "x-github-delivery": "d-1",
                "x-hub-signature-256": f"sha256={hmac.new(b'shh', body, hashlib.sha256).hexdigest()}",
            }
            for _ in range(2):
                answer = await client.post(url, content=body, headers=headers)
                assert (answer.status_code, answer.json()) == (200, {"id": "d-1"})
            refused = await client.post(url, content=body + b" ", headers=headers)
            assert refused.status_code == 401
            large = await client.post(url, content=b"x" * 2_000_000, headers=headers)
            assert large.status_code == 413
            assert (await client.get(url)).status_code == 405
            feed = await deck.feed("hook")
            assert (feed.waiting, feed.done) == (1, 0)
            async with deck.messages("hook") as messages, await anext(messages) as message:
                assert message.raw["body"] == {"action": "opened"}
                assert message.id == "d-1"
            await eventually(lambda: _done(deck, 1))

    run(scenario)


def test_telegrams_webhook_mode_checks_the_secret_token(state: Path, bot: TelegramServer, run: Run) -> None:
    """The update becomes the same message as by polling, files and replies included; the header is compared."""
    update = {"update_id": 7, "message": {"chat": {"id": 5}, "from": {"id": 6}, "date": 1, "text": "hi"}}
    bot.send_file("b.txt", b"content")
    (with_file,) = httpx.get(f"{bot.url}/bot{bot.token}/getUpdates").json()["result"]

    async def scenario() -> None:
        async with AsyncDeck(state) as deck, httpx.AsyncClient() as client:
            options = {"path": "/hook", "preset": "telegram", "base_url": bot.url}
            secrets = {"SECRET": "shh", "TOKEN": bot.token}
            await deck.start("hook", Satellite.of("webhook", options, secrets=secrets, restart=AGAIN))
            url = await _url(deck)
            assert (await client.post(url, json=update)).status_code == 401
            secret = {"x-telegram-bot-api-secret-token": "shh"}
            assert (await client.post(url, json={"no": 1}, headers=secret)).status_code == 400
            assert (await client.post(url, json=update, headers=secret)).status_code == 200
            bot.fail("getFile", 502, "Bad Gateway")
            assert (await client.post(url, json=with_file, headers=secret)).status_code == 503
            assert (await client.post(url, json=with_file, headers=secret)).status_code == 200
            async with deck.messages("hook") as messages:
                async with await anext(messages) as message:
                    assert (message.channel, message.conversation, message.text) == ("telegram", "5", "hi")
                    await message.reply("hello")
                async with await anext(messages) as message:
                    assert Path(message.attachments[0].path).read_bytes() == b"content"
            await eventually(
                lambda: [call.params["text"] for call in bot.calls("sendMessage")] == ["hello"], "the reply"
            )

    run(scenario)


@pytest.mark.parametrize("point", POINTS)
def test_a_listener_killed_at_any_point_loses_nothing_that_it_answered(state: Path, run: Run, point: str) -> None:
    """The sender comes again until it hears 200, and each delivery is one message."""

    async def scenario() -> None:
        async with AsyncDeck(state) as deck, httpx.AsyncClient() as client:
            await deck.start("hook", hook(state, env={CRASH_AT_ENV: f"{point}:3"}))
            url = await _url(deck)
            for number in range(6):
                await _post(client, url, f"n-{number}")
            texts = []
            async with deck.messages("hook") as messages:
                for _ in range(6):
                    async with await anext(messages) as message:
                        texts.append(message.id)
            assert sorted(texts) == [f"n-{number}" for number in range(6)]
            assert any(event.kind is EventKind.CRASHED for event in await deck.events(worker="hook"))
            assert (await deck.feed("hook")).waiting == 0

    run(scenario)


class _Sender:
    """The kill suite's view of a listener: a sender that comes again until it hears 200, eight requests at a time."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._pool = ThreadPoolExecutor(8)
        self._asked: list[Future[None]] = []
        self._url = ""

    def spec(self) -> WorkerSpec:
        return Satellite.webhook("/hook")

    def deliver(self, text: str, conversation: int) -> None:
        del conversation
        self._asked.append(self._pool.submit(self._post, text))
        self._asked[max(0, len(self._asked) - 8)].result(120)

    def received(self) -> list[str]:
        return []

    def _post(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(HTTPException, EverdeckError, OSError):
                if not self._url:  # the port is the worker's own at every start
                    self._url = feed_status(self._state / "workers" / NAME / "data" / "feed.db", NAME).account or ""
                connection = HTTPConnection(urlsplit(self._url).netloc, timeout=20)
                with contextlib.closing(connection):
                    connection.request("POST", "/hook", text, {"webhook-id": text})
                    if connection.getresponse().status == 200:
                        return
            time.sleep(0.02)
        raise TimeoutError(text)


@pytest.mark.parametrize("who", ["satellite", "host", "owner"])
@patience(300)
def test_kill_trial_of_a_listener(state: Path, who: Victim) -> None:
    """Nothing that was answered with 200 is lost, and a delivery that came again is one message."""
    messages, kills, deadline = size(40, 3)
    trial = kill_trial(
        _Sender(state), state, who=who, messages=messages, kills=kills, replies=False, deadline_seconds=deadline
    )
    tell("webhook", who, trial)

    assert trial.kills == kills
    assert trial.lost == []
    assert trial.handled_again <= (kills if who == "host" else 0)


@needs_gcc
def test_a_clock_that_is_set_skips_nothing_and_fires_nothing_twice(state: Path, run: Run) -> None:
    """While it runs: an hour ahead, every tick of it comes; a day back, ticks go on, though that time was before."""

    async def scenario() -> None:
        clock = FastClock(state, rate=300.0)
        async with AsyncDeck(state) as deck:
            await deck.start("tick", Satellite.cron("*/10 * * * *", missed="all", env=clock.env))
            seen: list[datetime] = []
            async with deck.messages("tick") as messages:

                async def upto(moment: float) -> None:
                    while not seen or seen[-1].timestamp() < moment - 600:
                        async with await anext(messages) as message:
                            seen.append(datetime.fromisoformat(message.text))

                await upto(clock.now())
                clock.set_by(3600)
                await upto(clock.now())
                apart = {later - earlier for earlier, later in itertools.pairwise(seen)}
                assert apart == {timedelta(minutes=10)}
                before = len(seen)
                clock.set_by(-86_400)
                async with await anext(messages) as message:
                    assert datetime.fromisoformat(message.text) < seen[0]
                assert len(set(seen)) == before >= 7

    run(scenario)


@needs_gcc
def test_ticks_of_a_pause_come_as_missed_says(state: Path, run: Run) -> None:
    """A satellite that is frozen for five days, as on a machine that sleeps, is the same process afterwards."""
    names = ("once", "all", "skip")

    async def scenario() -> None:
        clock = FastClock(state, rate=60.0)
        clock.set_by(43_200 - clock.now() % 86_400)  # noon: twelve minutes of ours are left until a tick
        async with AsyncDeck(state) as deck:
            for name in names:
                await deck.start(name, Satellite.cron("0 0 * * *", missed=name, env=clock.env))
            for name in names:
                await eventually(
                    lambda path=state / f"workers/{name}/data/feed.db": _cursor(path) is not None, "it waits"
                )
            pids = [status.pid for status in await deck.list() if status.pid is not None]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            clock.set_by(5 * 86_400)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            async with deck.messages("once") as messages, await anext(messages) as message:
                assert message.raw["missed"] == 4
            async with deck.messages("all") as messages:
                days = []
                for _ in range(5):
                    async with await anext(messages) as message:
                        days.append(datetime.fromisoformat(message.text))
            assert {later - earlier for earlier, later in itertools.pairwise(days)} == {timedelta(days=1)}
            skip = state / "workers/skip/data/feed.db"
            await eventually(lambda: "T00:00:00" in str(_cursor(skip)), "it has seen the ticks")
            assert ((await deck.feed("skip")).waiting, (await deck.feed("once")).waiting) == (0, 0)
            assert [status.pid for status in await deck.list()] == pids

    run(scenario)


def _cursor(path: Path) -> object:
    if not path.exists():
        return None
    with contextlib.closing(sqlite3.connect(path)) as db, contextlib.suppress(sqlite3.OperationalError):
        return next(iter(db.execute("SELECT cursor FROM everdeck_stream").fetchall()), (None,))[0]
    return None


class _Clock:
    """The kill suite's view of cron: a clock on which a minute lasts a fifth of a second."""

    def __init__(self, state: Path) -> None:
        self._clock = FastClock(state, rate=300.0)
        self._handled = state / "answered"
        self._last: datetime | None = None

    def spec(self) -> WorkerSpec:
        return Satellite.cron("* * * * *", missed="all", env=self._clock.env)

    def deliver(self, text: str, conversation: int) -> str:
        """Wait for the next minute: its tick is the message."""
        del text, conversation
        if self._last is None:
            _wait_for(lambda: self._handled.exists() and "\n" in self._handled.read_text())
            first = self._handled.read_text().partition("\n")[0]
            self._last = datetime.fromisoformat(first)
            return first
        self._last += timedelta(minutes=1)
        _wait_for(lambda: self._clock.now() >= self._last.timestamp())  # type: ignore[union-attr]
        return self._last.isoformat()

    def received(self) -> list[str]:
        return []


def _wait_for(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@needs_gcc
@pytest.mark.parametrize("who", ["satellite", "host", "owner"])
@patience(300)
def test_kill_trial_of_a_clock(state: Path, who: Victim) -> None:
    """Every minute has its tick, though whoever counts, whoever reads or whoever owns is killed."""
    messages, kills, deadline = size(10, 2)
    trial = kill_trial(
        _Clock(state), state, who=who, messages=messages, kills=kills, replies=False, deadline_seconds=deadline
    )
    tell("cron", who, trial)

    assert trial.kills == kills
    assert trial.lost == []
    assert trial.handled_again <= (kills if who == "host" else 0)


@pytest.mark.parametrize("preset", ["github", "stripe", "slack", "telegram", None])
def test_signatures_are_those_of_the_senders_documentation(preset: str | None) -> None:
    """A right one passes; a wrong one, a missing one and an old one are refused in words."""
    secret, body, now = b"key", b'{"id": "evt_1"}', 1_700_000_000.0
    moment = str(int(now))
    digest = {
        "github": hmac.new(secret, body, hashlib.sha256).hexdigest(),
        "stripe": hmac.new(secret, f"{moment}.".encode() + body, hashlib.sha256).hexdigest(),
        "slack": hmac.new(secret, f"v0:{moment}:".encode() + body, hashlib.sha256).hexdigest(),
    }
    right = {
        "github": {"x-hub-signature-256": f"sha256={digest['github']}"},
        "stripe": {"stripe-signature": f"t={moment},v1={digest['stripe']},v0=old"},
        "slack": {"x-slack-request-timestamp": moment, "x-slack-signature": f"v0={digest['slack']}"},
        "telegram": {"x-telegram-bot-api-secret-token": "key"},
        None: {
            "webhook-id": "m1",
            "webhook-timestamp": moment,
            "webhook-signature": f"v1,bad {signature(secret, 'm1', moment, body)}",
        },
    }[preset]

    assert refusal(preset, secret, right, body, now) is None
    assert refusal(preset, secret, {}, body, now) is not None
    if preset != "telegram":
        assert refusal(preset, secret, right, body + b" ", now) is not None
        assert refusal(preset, b"other", right, body, now) is not None
    if preset in {"stripe", "slack", None}:
        assert refusal(preset, secret, right, body, now + 3600) is not None
    assert refusal(preset, b"", {}, body, now) is None


async def _post(client: httpx.AsyncClient, url: str, name: str) -> None:
    """As a sender does: until it hears 200."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await client.post(url, json={"n": name}, headers={"webhook-id": name})).status_code == 200:
                return
        await asyncio.sleep(0.02)


async def _url(deck: AsyncDeck) -> str:
    await eventually(lambda: _connected(deck, "hook"), "it listens")
    port = (await deck.status("hook")).port
    return f"http://127.0.0.1:{port}/hook"


async def _connected(deck: AsyncDeck, name: str) -> bool:
    return (await deck.feed(name)).connection == "connected"


async def _done(deck: AsyncDeck, count: int) -> bool:
    return (await deck.feed("hook")).done == count
