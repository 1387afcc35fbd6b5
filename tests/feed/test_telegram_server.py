"""The Bot API server for tests answers as Telegram's does, the unkind answers included."""

import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from everdeck.testing.telegram import TelegramServer, text_update, updates_of_file
from everdeck.testing.updatequeue import KEEP_SECONDS, MAX_PENDING, QUIET_SECONDS, UpdateQueue


class Clock:
    """Seconds a test moves by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time now."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock that stands still."""
    return Clock()


def queue_of(clock: Clock, count: int, first_id: int | None = None, max_pending: int = MAX_PENDING) -> UpdateQueue:
    """A queue with this many updates."""
    queue = UpdateQueue(clock, random.Random(1), max_pending=max_pending)
    if first_id is not None:
        queue.start_epoch(first_id)
    for number in range(count):
        queue.push({"message": {"text": str(number)}})
    return queue


def ids(queue: UpdateQueue, offset: int, limit: int = 100) -> list[int]:
    """The ids one getUpdates hands out."""
    return [event.update_id for event in queue.get(offset, limit)]


class TestQueue:
    """What an offset means."""

    def test_positive_offset_forgets_what_is_below(self, clock: Clock) -> None:
        """Ids below the offset are gone for good, the rest is handed out again and again."""
        queue = queue_of(clock, 5, first_id=500)
        assert ids(queue, 0) == [500, 501, 502, 503, 504]
        assert ids(queue, 503) == [503, 504]
        assert ids(queue, 0) == [503, 504]
        assert ids(queue, 501) == [503, 504]
        assert queue.confirmed == [500, 501, 502]

    def test_negative_offset_keeps_the_last_and_returns_them(self, clock: Clock) -> None:
        """-2 deletes all but the last two; nothing needs to be confirmed for that."""
        queue = queue_of(clock, 5, first_id=500)
        assert ids(queue, -2) == [503, 504]
        assert queue.confirmed == [500, 501, 502]
        assert ids(queue, -10) == [503, 504]

    def test_at_most_limit_and_nothing_past_the_first_unconfirmed(self, clock: Clock) -> None:
        """Without confirming, the same first hundred come back: a pure low watermark stalls."""
        queue = queue_of(clock, 250, first_id=1)
        assert ids(queue, 0) == list(range(1, 101)) == ids(queue, 0)

    def test_ids_start_at_random(self, clock: Clock) -> None:
        """The first id is neither 1 nor small."""
        assert queue_of(clock, 1).head > 2 * MAX_PENDING

    def test_ids_start_again_after_a_quiet_week(self, clock: Clock) -> None:
        """A week without an update ends the epoch; the new ids may be smaller."""
        queue = queue_of(clock, 1, first_id=1_900_000_000)
        assert ids(queue, 1_900_000_001) == []
        clock.now += QUIET_SECONDS
        update_id = queue.push({})
        assert update_id is not None
        assert update_id < 1_000_000_000
        assert ids(queue, 1_900_000_001) == [update_id], "an absurd offset is ignored"

    def test_offset_just_past_the_tail_deletes_silently(self, clock: Clock) -> None:
        """Tail < offset <= tail + 10 is believed: what is below is gone, now and later."""
        queue = queue_of(clock, 3, first_id=100)
        assert queue.tail == 103
        assert ids(queue, 113) == []
        assert queue.confirmed == [100, 101, 102]
        queue.push({})
        assert ids(queue, 113) == []
        assert queue.confirmed[-1] == 103

    def test_offset_far_past_the_tail_is_ignored(self, clock: Clock) -> None:
        """Eleven past the tail the answer starts at the head and nothing is forgotten."""
        queue = queue_of(clock, 3, first_id=100)
        assert ids(queue, 114) == [100, 101, 102]
        assert queue.confirmed == []

    def test_updates_live_a_day(self, clock: Clock) -> None:
        """After 24 hours an update is given up without a word."""
        queue = queue_of(clock, 2, first_id=100)
        clock.now += KEEP_SECONDS / 2
        queue.push({})
        clock.now += KEEP_SECONDS / 2 + 1
        assert ids(queue, 0) == [102]
        assert queue.expired == [100, 101]

    def test_new_updates_are_refused_when_full(self, clock: Clock) -> None:
        """The queue keeps the old and drops the new."""
        queue = queue_of(clock, 12, first_id=1, max_pending=10)
        assert queue.pending() == list(range(1, 11))
        assert queue.refused == 2

    def test_given_ids_leave_gaps_and_never_go_back(self, clock: Clock) -> None:
        """A raw update may carry its id, above the tail only."""
        queue = queue_of(clock, 1, first_id=100)
        assert queue.push({"update_id": 150}) == 150
        assert queue.push({}) == 151
        with pytest.raises(ValueError, match="start_epoch"):
            queue.push({"update_id": 120})

    def test_an_answer_holds_four_megabytes(self, clock: Clock) -> None:
        """Large updates come in smaller batches."""
        queue = UpdateQueue(clock, random.Random(1))
        for _ in range(20):
            queue.push({"message": {"text": "x" * 400_000}})
        assert len(queue.get(0, 100)) == 10


class Api:
    """A client as small as can be."""

    def __init__(self, server: TelegramServer) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=30, trust_env=False)

    def __call__(self, method: str, token: str | None = None, **params: Any) -> dict[str, Any]:
        """Call a method and return the decoded answer."""
        answer = self.http.post(f"/bot{token or self.server.token}/{method}", data=params)
        decoded: dict[str, Any] = answer.json()
        assert decoded["ok"] is (answer.status_code == 200)
        return decoded

    def update_ids(self, **params: Any) -> list[int]:
        """The ids of one getUpdates."""
        return [update["update_id"] for update in self("getUpdates", **params)["result"]]


@pytest.fixture
def api(telegram_server: TelegramServer) -> Any:
    """A client of the server."""
    client = Api(telegram_server)
    yield client
    client.http.close()


class TestPolling:
    """getUpdates over HTTP."""

    def test_get_me_is_per_token(self, api: Api) -> None:
        """The id is the token's first half."""
        assert api("getMe")["result"]["id"] == api.server.bot_id
        assert api("getme", token="77:abc")["result"]["id"] == 77
        assert api("getMe", token="not-a-token")["error_code"] == 404

    def test_a_revoked_token_and_its_successor(self, api: Api) -> None:
        """Two tokens of one bot share one queue; a revoked one is unauthorized."""
        update_id = api.server.say("hello")
        api.server.revoke(api.server.token)
        assert api("getUpdates")["error_code"] == 401
        successor = f"{api.server.bot_id}:new"
        assert [update["update_id"] for update in api("getUpdates", token=successor)["result"]] == [update_id]

    def test_waiting_poll_is_answered_by_a_push(self, api: Api) -> None:
        """A long poll ends as soon as something is there, and a burst is one answer."""
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(api.update_ids, timeout=30)
            api.server.wait_for(lambda server: bool(server.polls()))
            pushed = api.server.push(*(text_update(str(number)) for number in range(3)))
            assert answer.result(20) == pushed

    def test_poll_times_out_empty(self, api: Api) -> None:
        """Nothing came: an empty list, not an error."""
        assert api.update_ids(timeout=1) == []

    def test_the_older_waiting_poll_gets_the_409(self, api: Api) -> None:
        """The newer poll goes on waiting and gets the update."""
        with ThreadPoolExecutor(2) as pool:
            older = pool.submit(api, "getUpdates", timeout=30, offset=1)
            api.server.wait_for(lambda server: len(server.polls()) == 1)
            newer = pool.submit(api.update_ids, timeout=30, offset=2)
            conflict = older.result(20)
            assert conflict["error_code"] == 409
            assert "terminated by other getUpdates request" in conflict["description"]
            pushed = api.server.say("hello")
            assert newer.result(20) == [pushed]

    def test_with_a_backlog_two_pollers_both_get_everything(self, api: Api) -> None:
        """Nobody waits, so no 409 protects a backlog."""
        api.server.push(*(text_update(str(number)) for number in range(50)))
        first, second = api.update_ids(offset=0), api.update_ids(offset=1)
        assert first == second == api.server.pending()
        assert {poll.status for poll in api.server.polls()} == {200}

    def test_same_offset_again_at_once_gets_one(self, api: Api) -> None:
        """Within 0.5 s the limit is forced to 1 and within 3 s the timeout to 3."""
        api.server.push(*(text_update(str(number)) for number in range(5)))
        assert len(api.update_ids(offset=0)) == 5
        assert len(api.update_ids(offset=0)) == 1
        assert api.server.polls()[-1].timeout == 3

    def test_webhook_and_get_updates_exclude_each_other(self, api: Api) -> None:
        """Setting a webhook ends the waiting poll; later polls are refused until it is deleted."""
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(api, "getUpdates", timeout=30)
            api.server.wait_for(lambda server: bool(server.polls()))
            api("setWebhook", url="https://example.org/hook")
            assert "terminated by setWebhook" in waiting.result(20)["description"]
        assert "while webhook is active" in api("getUpdates")["description"]
        api.server.say("hello")
        assert api("getWebhookInfo")["result"]["pending_update_count"] == 1
        api("deleteWebhook", drop_pending_updates="true")
        assert api.server.pending() == []

    def test_second_conflict_is_answered_late(self) -> None:
        """A client that ignores the first 409 is slowed down."""
        with TelegramServer(conflict_pause_seconds=0.3) as server:
            api = Api(server)
            api("setWebhook", url="https://example.org/hook")
            api("getUpdates")
            before = server._now()
            api("getUpdates")
            assert server._now() - before >= 0.3
            api.http.close()

    def test_allowed_updates_filters_when_queueing(self, api: Api) -> None:
        """A kind not asked for is never queued, and asking later does not bring it back."""
        reaction = {"message_reaction": {"chat": {"id": 1, "type": "private"}}}
        assert api.server.push(reaction) == []
        api("getUpdates", allowed_updates='["message_reaction"]')
        assert len(api.server.push(reaction, text_update("no"))) == 1
        api("getUpdates", allowed_updates="[]")
        assert len(api.server.push(reaction, text_update("yes"))) == 1

    def test_epochs_and_time(self, api: Api) -> None:
        """A test can let a day pass, and start ids again."""
        old = api.server.say("old")
        api.server.advance(KEEP_SECONDS + 1)
        assert api.server.pending() == []
        assert api.server.expired() == [old]
        api.server.start_epoch(5)
        assert api.server.say("new") == 5


class TestFaults:
    """What can be made to go wrong."""

    def test_retry_after(self, api: Api) -> None:
        """429 carries retry_after, once."""
        api.server.fail("sendMessage", retry_after=7)
        answer = api("sendMessage", chat_id=1, text="a")
        assert (answer["error_code"], answer["parameters"]["retry_after"]) == (429, 7)
        assert api("sendMessage", chat_id=1, text="a")["ok"]
        assert api.server.sent() == ["a"]

    def test_a_fault_for_one_chat(self, api: Api) -> None:
        """Others are served."""
        api.server.fail("sendMessage", 403, "Forbidden: bot was blocked by the user", chat_id=2, times=9)
        assert api("sendMessage", chat_id=1, text="a")["ok"]
        assert api("sendMessage", chat_id=2, text="a")["error_code"] == 403

    @pytest.mark.parametrize(("after", "delivered"), [(False, []), (True, ["a"])])
    def test_dropped_connections(self, api: Api, after: bool, delivered: list[str]) -> None:
        """Before the work nothing happened; after it the message is out and the client cannot know."""
        api.server.drop("sendMessage", after=after)
        with pytest.raises(httpx.RemoteProtocolError):
            api("sendMessage", chat_id=1, text="a")
        assert api.server.sent() == delivered

    def test_garbage(self, api: Api) -> None:
        """A proxy's error page."""
        api.server.garbage("getMe")
        with pytest.raises(ValueError, match="Expecting"):
            api("getMe")

    def test_outage_keeps_the_queue(self, api: Api) -> None:
        """Down and up again: same port, same updates."""
        update_id = api.server.say("hello")
        with api.server.down(), pytest.raises(httpx.ConnectError):
            api("getMe")
        assert api.update_ids() == [update_id]

    def test_messages_per_second(self) -> None:
        """A chat is not flooded."""
        with TelegramServer(messages_per_second=1) as server:
            api = Api(server)
            assert api("sendMessage", chat_id=1, text="a")["ok"]
            assert api("sendMessage", chat_id=1, text="b")["parameters"]["retry_after"] == 1
            assert api("sendMessage", chat_id=2, text="c")["ok"]
            api.http.close()


class TestMethods:
    """Everything that is not getUpdates."""

    def test_sent_messages_are_recorded_and_answered(self, api: Api) -> None:
        """The answer is a message the libraries can read."""
        message = api("sendMessage", chat_id=-5, text="hi")["result"]
        assert message["chat"] == {"id": -5, "type": "supergroup", "title": "Group -5"}
        assert message["text"] == "hi"
        assert api.server.sent(-5) == ["hi"]
        assert api("sendMessage", chat_id=1, text="")["error_code"] == 400
        assert api("sendMessage", chat_id=1, text="x" * 4097)["description"] == "Bad Request: message is too long"

    def test_other_methods(self, api: Api) -> None:
        """Known verbs are answered, unknown ones are 404, and a test may teach an answer."""
        assert api("answerCallbackQuery", callback_query_id="1")["result"] is True
        assert api("frobnicate")["error_code"] == 404
        api.server.answer("getChatMember", lambda params: {"status": "member", "user": {"id": int(params["user_id"])}})
        assert api("getChatMember", user_id=3)["result"]["user"]["id"] == 3
        api.server.press("yes", chat_id=9)
        assert api("getUpdates")["result"][0]["callback_query"]["data"] == "yes"

    def test_files_of_updates(self, api: Api, tmp_path: Path) -> None:
        """JSON lines and JSON arrays are served as they are."""
        updates = [{"update_id": 10, "message": {"broken": True}}, {"update_id": 12, "unheard_of": {}}]
        lines, array = tmp_path / "lines", tmp_path / "array"
        lines.write_bytes(b"\n".join(map(msgspec.json.encode, updates)))
        array.write_bytes(msgspec.json.encode(updates))
        assert updates_of_file(lines) == updates_of_file(array) == updates
        assert api.server.push_file(lines) == [10, 12]
        assert api("getUpdates")["result"] == updates


def test_as_a_program(tmp_path: Path) -> None:
    """It runs by itself, serves a file and is controlled by HTTP."""
    file = tmp_path / "updates"
    file.write_bytes(msgspec.json.encode([text_update("one")]))
    command = [sys.executable, "-m", "everdeck.testing.telegram", "--port", "0", "--updates", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            url = program.stdout.readline().split()[2]
            http = httpx.Client(base_url=url, trust_env=False)
            pushed = http.post("/control/updates", json=text_update("two")).json()["ids"]
            http.post("/control/faults", json={"method": "getMe", "kind": "error", "times": 1})
            assert http.get("/bot4242:everdeck-testing-token/getMe").status_code == 500
            state = http.get("/control/bots/4242").json()
            assert state["pending"][-1:] == pushed
            assert len(state["pending"]) == 2
            http.close()
        finally:
            program.terminate()


def test_waiting_for_a_fact_fails_loudly(telegram_server: TelegramServer) -> None:
    """The error tells the state."""
    with pytest.raises(TimeoutError, match="0 pending"):
        telegram_server.wait_for(lambda _server: False, timeout=0.01)


def test_no_thread_is_left() -> None:
    """Closing joins the server's thread."""
    before = threading.active_count()
    with TelegramServer() as server:
        assert threading.active_count() == before + 1
        server.say("hello")
    assert threading.active_count() == before
