"""Where messages go: a URL that is signed, retried and believed; and story 1, with exactly one poller per token."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from everdeck import AsyncDeck, Satellite
from everdeck.satellites.targets import seconds_of, signature
from everdeck.testing.telegram import TelegramServer
from support.waiting import eventually, until

Run = Callable[[Callable[[], Awaitable[Any]]], Any]


class Receiver:
    """A real HTTP server that answers as it is told and remembers what it got."""

    def __init__(self) -> None:
        self.answers: list[web.Response | bytes] = []  # bytes come in pieces
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.url = ""

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["Receiver"]:
        """On a port of its own."""
        app = web.Application()
        app.router.add_post("/hook", self._post)
        app.router.add_post("/elsewhere", self._post)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self.got.append((dict(request.headers), await request.read()))
        answer = self.answers.pop(0) if self.answers else web.json_response({"reply": "thanks"})
        if not isinstance(answer, bytes):
            return answer
        stream = web.StreamResponse()
        await stream.prepare(request)
        for start in range(0, len(answer), 10_000):
            await stream.write(answer[start : start + 10_000])
            await asyncio.sleep(0)
        return stream


def spec_of(bot: TelegramServer, to: str, **fields: Any) -> Any:
    """A satellite that posts what comes in."""
    return Satellite.telegram(bot.token, base_url=bot.url, first_run="take", to=to, **fields)


def answers(bot: TelegramServer) -> list[str]:
    """The texts that the bot has sent."""
    return [call.params["text"] for call in bot.calls("sendMessage")]


def test_a_post_is_signed_retried_and_its_answer_may_reply(state: Path, bot: TelegramServer, run: Run) -> None:
    """500, a redirect and a Retry-After are tried again with the same Idempotency-Key; 2xx finishes it."""
    bot.say("hello", chat_id=4)
    with_file = {"text": "two", "attachments": ["/etc/hostname"]}

    async def scenario() -> None:
        async with Receiver().listening() as receiver, AsyncDeck(state) as deck:
            receiver.answers = [
                web.Response(status=500),
                web.Response(status=302, headers={"location": "/elsewhere"}),
                web.Response(status=503, headers={"retry-after": "1"}),
                json.dumps({"replies": ["one", with_file], "more": "x" * 300_000}).encode(),
            ]
            await deck.start("bob", spec_of(bot, receiver.url, secrets={"TO_SECRET": "key"}))
            await eventually(lambda: answers(bot) == ["one", "two"], "both replies")
            assert len(receiver.got) == 4
            assert len({headers["idempotency-key"] for headers, _ in receiver.got}) == 1
            for headers, body in receiver.got:
                expected = signature(b"key", headers["webhook-id"], headers["webhook-timestamp"], body)
                assert headers["webhook-signature"] == expected
                assert json.loads(body)["text"] == "hello"
            assert not bot.calls("sendDocument"), "a receiver has no say over files here"
            await eventually(lambda: _counts(deck, done=1))

    run(scenario)


def test_gone_stops_the_delivery_until_the_next_start(state: Path, bot: TelegramServer, run: Run) -> None:
    """410: nothing is lost, nothing is sent any more, and the status says why."""
    bot.say("hello", chat_id=1)
    bot.say("again", chat_id=2)

    async def scenario() -> None:
        async with Receiver().listening() as receiver, AsyncDeck(state) as deck:
            receiver.answers = [web.Response(status=410) for _ in range(100)]
            await deck.start("bob", spec_of(bot, receiver.url))
            await eventually(lambda: _status_says(deck, "410 Gone"), "it is said")
            assert (await deck.feed("bob")).done == 0
            before = len(receiver.got)
            receiver.answers.clear()
            await deck.restart("bob")
            await eventually(lambda: len(answers(bot)) == 2, "both were delivered after the restart")
            assert before <= 2 * 32
            assert (state / "workers/bob/data/to.key").stat().st_mode & 0o777 == 0o600

    run(scenario)


def test_a_receiver_that_says_no_again_and_again_is_believed(state: Path, bot: TelegramServer, run: Run) -> None:
    """Five times 422: set aside; a receiver that is away is not."""
    bot.say("bad", chat_id=1)

    async def scenario() -> None:
        async with Receiver().listening() as receiver, AsyncDeck(state) as deck:
            receiver.answers = [web.Response(status=422, headers={"retry-after": "0"}) for _ in range(4)]
            receiver.answers += [web.Response(status=422) for _ in range(10)]
            await deck.start("bob", spec_of(bot, receiver.url))
            await eventually(lambda: _counts(deck, dead=1), "it is set aside")
            (letter,) = await deck.letters("bob")
            assert "answered 422" in (letter.error or "")

    run(scenario)


def test_what_retry_after_says() -> None:
    """Seconds, a date, or nonsense."""
    assert seconds_of("7") == 7.0
    assert seconds_of("soon") is None
    assert seconds_of(None) is None
    assert seconds_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


# --- story 1 ----------------------------------------------------------------------------------------------------

OWNERS = """
import asyncio, os, sys
from everdeck import AsyncDeck, Satellite
async def main(state, token, url):
    async with AsyncDeck(state) as deck:
        await deck.start("bob", Satellite.telegram(token, base_url=url, first_run="take"))
        print("up", flush=True)
        await asyncio.Event().wait()
for _ in sys.stdin:  # one owner after the other; only loading the modules is done once for all
    owner = os.fork()
    if owner == 0:
        asyncio.run(main(*sys.argv[1:]))
    print(owner, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(owner, 0)[1]), flush=True)
"""


@pytest.mark.timeout(240)
def test_thirteen_owners_are_killed_and_there_is_one_poller_at_every_moment(state: Path) -> None:
    """Story 1, seen by the server: each owner is killed -9 and the next one started at once."""
    with TelegramServer(conflict_pause_seconds=0.0) as bot:
        words = [sys.executable, "-c", OWNERS, str(state), bot.token, bot.url]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owners:
            assert owners.stdin is not None
            assert owners.stdout is not None
            for number in range(13):
                # The last one may poll once more before it is ended: this one's satellite has a connection of its own.
                before = {poll.peer for poll in bot.polls()}
                owners.stdin.write("next\n")
                owners.stdin.flush()
                told = {owners.stdout.readline().strip() for _ in range(2)}  # its pid and its word, in either order
                owner = int((told - {"up"}).pop())
                try:
                    assert "up" in told
                    until(lambda before=before: {poll.peer for poll in bot.polls()} - before)  # type: ignore[misc]
                    bot.say(f"message {number}", chat_id=number + 1)
                finally:
                    os.kill(owner, signal.SIGKILL)
                assert owners.stdout.readline() == "-9\n"
            # Whoever has stopped polling never polls again: each connection's polls are one run in the server's list.
            runs = [peer for peer, _ in itertools.groupby(poll.peer for poll in bot.polls())]
            assert len(runs) == len(set(runs)) == 13, runs
            owners.stdin.close()
        pid_file = state / "workers/bob/lock"
        from everdeck.kernel import flock

        until(lambda: not flock.is_held(pid_file))
        assert flock.holders(pid_file) == []


async def _counts(deck: AsyncDeck, **wanted: int) -> bool:
    feed = await deck.feed("bob")
    return all(getattr(feed, name) == count for name, count in wanted.items())


async def _status_says(deck: AsyncDeck, words: str) -> bool:
    return words in ((await deck.status("bob")).status_text or "")


def test_a_message_is_in_the_program_within_milliseconds(state: Path, bot: TelegramServer, run: Run) -> None:
    """From the server's queue to ``deck.messages``: half of them within 50 ms on an idle machine, told here.

    Tests run beside others, so the quickest tenth is what must be quick; the benchmark has the rest.
    """

    async def scenario() -> list[float]:
        spent = []
        async with AsyncDeck(state) as deck:
            await deck.start("bob", Satellite.telegram(bot.token, base_url=bot.url, first_run="take"))
            async with deck.messages("bob") as messages:
                for number in range(40):
                    await eventually(lambda: any(poll.status is None for poll in bot.polls()), "it waits for news")
                    began = time.perf_counter()
                    bot.say(str(number), chat_id=number + 1)
                    async with await anext(messages):
                        spent.append(time.perf_counter() - began)
        return sorted(spent)

    spent = run(scenario)
    print(f"p50 {spent[20] * 1000:.1f} ms, p95 {spent[38] * 1000:.1f} ms")
    busy = max(1.0, os.getloadavg()[0])
    assert spent[4] < 0.050 * busy
