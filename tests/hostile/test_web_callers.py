"""What a caller of the API may not do, may not see, and cannot hide: roles, labels, accounts, and the audit."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from everdeck.clock import Clock
from everdeck.model import EventKind
from everdeck.registry import Registry
from everdeck.registry import store as registry_store
from support.cli_daemon import PATIENCE_SECONDS, Person
from support.waiting import until
from support.web_served import Served, served_at

SLEEP = {"command": ["sleep", "1000"]}
NOBODY = 65534


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A daemon with two workers of two teams."""
    with served_at(tmp_path_factory.mktemp("callers") / "state") as served:
        with served.client() as api:
            for name, team in (("alice", "a"), ("bob", "b")):
                spec = SLEEP | {"labels": {"team": team}}
                api.post("/api/v1/workers", json={"name": name, "spec": spec}).raise_for_status()
        yield served


def token(served: Served, name: str, *options: str) -> httpx.Client:
    """A client with a new token."""
    return served.client(served.person.types("token", "create", name, *options).stdout.strip())


def test_a_reader_reads_and_an_operator_runs_nothing_new(served: Served) -> None:
    """Every verb is refused that the role does not include, and nothing happens."""
    with token(served, "reader") as reader, token(served, "operator", "--role", "operate") as operator:
        for client in (reader, operator):
            assert client.get("/api/v1/workers").json()["total"] == 2
            for method, path, body in (
                ("POST", "/api/v1/workers", {"name": "mine", "spec": SLEEP}),
                ("DELETE", "/api/v1/workers/alice", None),
                ("POST", "/api/v1/workers/x/adopt", {"pid": os.getpid()}),
                ("POST", "/api/v1/apply", {"workers": {}}),
                ("POST", "/api/v1/reload", None),
                ("POST", "/api/v1/down", None),
                ("POST", "/api/v1/bulk", {"verb": "remove", "names": "all"}),
            ):
                refused = client.request(method, path, json=body)
                assert refused.status_code == 403, (path, refused.text)
                assert refused.json()["type"] == "urn:everdeck:access-denied"
        for verb in ("start", "stop", "restart", "reset"):
            assert reader.post(f"/api/v1/workers/alice/{verb}").status_code == 403
            assert reader.post("/api/v1/bulk", json={"verb": verb, "names": "all"}).status_code == 403
        assert operator.post("/api/v1/workers/alice/restart").status_code == 200
        assert reader.get("/api/v1/workers").json()["total"] == 2


def test_workers_without_its_label_do_not_exist_for_a_token(served: Served) -> None:
    """Not in lists, events, metrics or samples, not by name, and their names cannot be taken."""
    with token(served, "team-a", "--role", "admin", "--label", "team=a") as mine:
        names = [worker["name"] for worker in mine.get("/api/v1/workers").json()["workers"]]
        assert names == ["alice"]
        for path in (
            "/api/v1/events?last=1000",
            "/metrics",
            "/api/v1/samples?names=alice,bob",
            "/api/v1/lastlines?names=alice,bob",
        ):
            assert "bob" not in mine.get(path).text, path
        for method, path in (
            ("GET", "/api/v1/workers/bob"),
            ("GET", "/api/v1/workers/bob/logs"),
            ("GET", "/api/v1/workers/bob/detail"),
            ("POST", "/api/v1/workers/bob/stop"),
            ("DELETE", "/api/v1/workers/bob"),
        ):
            assert mine.request(method, path).status_code == 404, path
        assert "bob" not in mine.get("/api/v1/workers/bo").text.replace("'bo'", "")
        taken = mine.post("/api/v1/workers?replace=1", json={"name": "bob", "spec": SLEEP | {"labels": {"team": "a"}}})
        assert taken.status_code == 403
        unlabelled = mine.post("/api/v1/workers", json={"name": "carol", "spec": SLEEP})
        assert unlabelled.status_code == 403
        assert mine.post("/api/v1/apply", json={"workers": {}}).status_code == 403
        stopped = mine.post("/api/v1/bulk", json={"verb": "restart", "names": "all"}).json()["results"]
        assert [result["name"] for result in stopped] == ["alice"]
    assert served.person.worker("bob")["state"] == "running"


def test_a_removal_asked_for_again_by_a_token_with_labels_is_answered_as_before(served: Served) -> None:
    """The worker is gone, so nothing tells its labels any more; the key does. Another key, or name, is unknown."""
    with token(served, "team-a-removes", "--role", "admin", "--label", "team=a") as mine:
        spec = SLEEP | {"labels": {"team": "a"}}
        mine.post("/api/v1/workers", json={"name": "brief", "spec": spec}).raise_for_status()
        answers = [
            mine.delete(f"/api/v1/workers/{name}", headers={"Idempotency-Key": key}).status_code
            for name, key in (("brief", "one"), ("brief", "one"), ("brief", "two"), ("bob", "one"))
        ]
    assert answers[0] == answers[1] < 300
    assert answers[2:] == [404, 404]
    assert served.person.worker("bob")["state"] == "running"


def test_a_revoked_token_opens_nothing_and_its_stream_ends(served: Served) -> None:
    """From the next request on; whoever is following is let go at the next word."""
    with token(served, "gone") as client:
        session = client.post("/api/v1/login", json={"token": client.headers["authorization"][7:]}).json()["session"]
        with client.stream("GET", "/api/v1/events", headers={"Accept": "text/event-stream"}) as stream:
            words = stream.iter_bytes()
            next(words)
            served.person.types("token", "revoke", "gone")
            with served.client() as admin:
                admin.post("/api/v1/workers/alice/restart").raise_for_status()
            told = b"".join(words)
        assert b"alice" not in told
        assert client.get("/api/v1/workers").status_code == 401
        again = client.get("/api/v1/workers", headers={"Authorization": f"Bearer {session}"})
        assert again.status_code == 401


def test_every_event_that_was_asked_for_says_by_whom(served: Served) -> None:
    """Token and address over TCP, uid and pid over a socket; what happens by itself has no caller."""
    with token(served, "named", "--role", "operate") as client:
        client.post("/api/v1/workers/alice/restart").raise_for_status()
        last = client.get("/api/v1/events?last=1&worker=alice").json()[0]
        assert last["kind"] == "restarted"
        assert last["detail"]["by"] == {"token": "named", "address": "127.0.0.1"}
        pid = client.get("/api/v1/workers/alice").json()["pid"]
        served.person.kills(pid)
        crashed = until(lambda: client.get("/api/v1/events?last=1&worker=alice&kind=crashed").json())
        assert "by" not in crashed[0]["detail"]
    served.person.types("restart", "bob")
    with served.client() as api:
        (last,) = api.get("/api/v1/events?last=1&worker=bob").json()
    assert last["detail"]["by"]["uid"] == os.getuid()
    assert last["detail"]["by"]["pid"] > 0


def test_a_loud_worker_cannot_push_the_audit_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that somebody asked for have a bound of their own; the others go, oldest first."""
    monkeypatch.setattr(registry_store, "EVENTS_KEPT", 2000)
    monkeypatch.setattr(registry_store, "ASKED_EVENTS_KEPT", 50)
    registry = Registry.open(tmp_path / "deck.db")
    try:
        for number in range(100):
            by = {"token": "ci", "address": f"192.0.2.{number}"}
            registry.append_event(Clock().wall(), "alice", EventKind.RESTARTED, {"pid": 1, "by": by})
        for number in range(5000):
            registry.append_event(Clock().wall(), "loud", EventKind.FEED, {"number": number})
        kept = registry.events()
        assert len([event for event in kept if event.worker == "loud"]) <= 2000 + 1000
        assert len([event for event in kept if event.worker == "alice"]) == 50
        assert kept[0].detail["by"]["address"] == "192.0.2.50"
    finally:
        registry.close()


def test_accounts_of_this_machine_are_let_in_by_name_and_role(tmp_path: Path) -> None:
    """An account that is listed gets its role; any other is cut off before a word."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    config = tmp_path / "everdeck.toml"
    config.write_text(
        f'[server]\nhttp = false\nusers = {{ {NOBODY} = "read" }}\n[worker.alice]\ncommand = ["sleep", "1000"]\n'
    )
    person = Person(tmp_path / "state")
    try:
        person.types("up", str(config), "--detach", "--no-http")
        reader = _as(NOBODY, person.state)
        assert reader["GET /api/v1/workers"] == 200
        assert reader["POST /api/v1/workers/alice/stop"] == 403
        stranger = _as(NOBODY - 1, person.state)
        assert set(stranger.values()) == {0}
    finally:
        person.leaves()


def _as(uid: int, state: Path) -> dict[str, int]:
    """The statuses that an account gets over http.sock; 0 when it is cut off."""
    script = (
        "import json, os, socket, sys\n"
        # The way to the state directory is pytest's and closed; its own modes are what is tried.
        "place = os.open(sys.argv[2], os.O_PATH)\n"
        "os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))\n"
        "found = {}\n"
        "for asked in ('GET /api/v1/workers', 'POST /api/v1/workers/alice/stop'):\n"
        "    s = socket.socket(socket.AF_UNIX); s.settimeout(60)\n"
        "    s.connect(f'/proc/self/fd/{place}/http.sock')\n"
        "    try:\n"
        "        s.sendall(asked.encode() + b' HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n')\n"
        "        got = s.recv(100)\n"
        "    except OSError:\n"
        "        got = b''\n"
        "    found[asked] = int(got.split()[1]) if got else 0\n"
        "print(json.dumps(found))\n"
    )
    command = [sys.executable, "-c", script, str(uid), str(state)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found
