"""``[notify]``: somebody elsewhere is told, by a real HTTP server on loopback."""

import base64
import hashlib
import hmac
import json
import select
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from everdeck.config import parse
from everdeck.errors import ConfigRefused
from everdeck.testing.telegram import TelegramServer
from support.cli_daemon import PATIENCE_SECONDS, Person, pidfd_of, until

KEY = "a key that both sides know"


class Receiver:
    """Takes what is posted; answers with the next of ``answers``, then with 204."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append(({key.lower(): value for key, value in self.headers.items()}, body))
                self.send_response(receiver.answers.pop(0) if receiver.answers else 204)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Quietly."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def documents(self) -> list[dict[str, Any]]:
        """What was posted, each checked for its signature."""
        for headers, body in self.got:
            signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
            digest = hmac.digest(KEY.encode(), signed, hashlib.sha256)
            assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
        return [json.loads(body) for _, body in self.got]

    def close(self) -> None:
        """Hang up."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A server that is up."""
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.close()


@pytest.fixture
def person(tmp_path: Path, receiver: Receiver) -> Iterator[Person]:
    """A daemon that tells the receiver, and that nobody has to wait long for."""
    (tmp_path / "hook.key").write_text(f"{KEY}\n")
    (tmp_path / "everdeck.toml").write_text(
        f'[notify]\nurl = "{receiver.url}"\nsecret = "hook.key"\nquiet_seconds = 0.5\n'
    )
    person = Person(tmp_path / "state")
    try:
        person.types("up", tmp_path / "everdeck.toml", "--detach", "--no-http")
        yield person
    finally:
        person.leaves()


def _fails(person: Person, *names: str) -> None:
    for name in names:
        person.types("start", name, "--max-crashes", "0", "--", "sh", "-c", "exit 3")


def _told(receiver: Receiver) -> list[str]:
    return [event["worker"] for document in receiver.documents() for event in document["events"]]


def test_a_failed_worker_is_told_once_and_signed(person: Person, receiver: Receiver) -> None:
    """A sentence for people, the event for programs; what was not asked for is not told."""
    person.types("start", "well", "--", "sleep", "1000")
    _fails(person, "alice")
    until(lambda: receiver.got)
    document = receiver.documents()[0]
    assert document["text"].startswith("alice failed")
    assert document["count"] == 1
    assert [(event["worker"], event["kind"]) for event in document["events"]] == [("alice", "failed")]
    assert json.loads((person.state / "notified.json").read_bytes())["event_id"] >= 0


def test_a_storm_is_one_message(tmp_path: Path, receiver: Receiver) -> None:
    """Many workers of one file fail together; the receiver hears it once, with all of their names."""
    names = [f"user-{number}" for number in range(12)]
    tables = "".join(f'[worker.{name}]\ncommand = ["false"]\nrestart = {{max_crashes = 0}}\n' for name in names)
    file = tmp_path / "everdeck.toml"
    (tmp_path / "hook.key").write_text(KEY)
    file.write_text(f'[notify]\nurl = "{receiver.url}"\nsecret = "hook.key"\nquiet_seconds = 5\n{tables}')
    person = Person(tmp_path / "state")
    try:
        # The deck is known before anybody is told: the first daemon begins with now.
        person.up()
        person.types("down")
        (person.state / "notified.json").write_text('{"event_id": 0}')
        person.types("up", file, "--detach", "--no-http")
        until(lambda: receiver.got)
        document = receiver.documents()[0]
        assert document["count"] == 12
        assert {event["worker"] for event in document["events"]} == set(names)
        assert "12 failed: user-" in document["text"]
        assert "and 7 more" in document["text"]
        assert len(receiver.got) == 1
    finally:
        person.leaves()


def test_what_was_not_taken_is_tried_again_under_the_same_id(person: Person, receiver: Receiver) -> None:
    """Two refusals and a redirect that leads nowhere, then a yes."""
    receiver.answers += [500, 302, 429]
    _fails(person, "alice")
    until(lambda: len(receiver.got) == 4)
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert "not notified" in (person.state / "daemon.log").read_text()
    until(lambda: json.loads((person.state / "notified.json").read_bytes())["event_id"] > 0)


def test_the_next_daemon_tells_what_this_one_could_not(person: Person, receiver: Receiver, tmp_path: Path) -> None:
    """Kill -9 while the receiver refuses; what happened before and while nobody told is told by the next."""
    receiver.answers += [503] * 1000
    _fails(person, "alice")
    until(lambda: receiver.got)
    person.kills(person.owner())
    receiver.answers.clear()
    receiver.got.clear()
    person.types("up", tmp_path / "everdeck.toml", "--detach", "--no-http")
    _fails(person, "bob")
    until(lambda: {"alice", "bob"} <= set(_told(receiver)))


def test_killed_after_it_told_and_before_it_noted_that_it_tells_again(
    person: Person, receiver: Receiver, tmp_path: Path
) -> None:
    """At least once, and the receiver knows it by its id."""
    person.types("down")
    crashing = Person(person.state, EVERDECK_CRASH_AT="notify.told")
    crashing.types("up", tmp_path / "everdeck.toml", "--detach", "--no-http")
    with pidfd_of(person.owner()) as owner:
        _fails(person, "alice")
        assert select.select([owner], [], [], PATIENCE_SECONDS)[0], "it was not killed at the point"
    assert len(receiver.got) == 1
    person.types("up", tmp_path / "everdeck.toml", "--detach", "--no-http")
    until(lambda: len(receiver.got) == 2)
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1


def test_through_a_satellite(tmp_path: Path) -> None:
    """The same sentence, as a message of a bot; the Bot API is a real server on loopback."""
    with TelegramServer() as bot:
        (tmp_path / "bot.token").write_text(bot.token)
        file = tmp_path / "everdeck.toml"
        file.write_text(
            f"""
            [notify]
            satellite = "ops"
            to = "4711"
            quiet_seconds = 0.5
            [worker.ops]
            satellite = {{kind = "telegram", base_url = "{bot.url}"}}
            secrets = {{TOKEN = "bot.token"}}
            """
        )
        person = Person(tmp_path / "state")
        try:
            person.types("up", file, "--detach", "--no-http")
            _fails(person, "alice")
            until(lambda: any("alice failed" in call.params["text"] for call in bot.calls("sendMessage")))
        finally:
            person.leaves()


def test_a_table_that_tells_nobody_is_refused() -> None:
    """Every problem with its key."""
    text = '[notify]\nurl = "ftp://x"\nsatellite = "s"\nevents = ["faild"]\nsecret = "nowhere.key"\n'
    with pytest.raises(ConfigRefused) as refused:
        parse(text, Path("everdeck.toml"))
    told = "\n".join(refused.value.problems)
    for part in ("accepted: a url, or a satellite", "http://", "did you mean 'failed'?", "notify.secret"):
        assert part in told
