"""The HTTP API of a running daemon: every path, under friends, fuzzers and crowds."""

import asyncio
import contextlib
import json
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from everdeck.client import Daemon
from support.cli_daemon import PATIENCE_SECONDS, Person, raw_request, unix_socket
from support.waiting import until

SLEEP = {"command": ["sleep", "1000"]}


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """One daemon for the whole file; tests clean up their workers."""
    home = tmp_path_factory.mktemp("api")
    person = Person(home / "state")
    try:
        person.up("--listen", "127.0.0.1:0")
        yield person
    finally:
        person.leaves()


@pytest.fixture
def api(person: Person) -> Iterator[httpx.Client]:
    """The API over the Unix socket; afterwards no worker is left."""
    transport = httpx.HTTPTransport(uds=str(person.state / "http.sock"))
    headers = {"Accept": "application/json"}
    with httpx.Client(transport=transport, base_url="http://deck", headers=headers, timeout=PATIENCE_SECONDS) as client:
        try:
            yield client
        finally:
            client.post("/api/v1/bulk", json={"verb": "remove", "names": "all"}).raise_for_status()


def start(api: httpx.Client, name: str, **spec: Any) -> dict[str, Any]:
    """Start a sleeping worker."""
    answer = api.post("/api/v1/workers", json={"name": name, "spec": SLEEP | spec})
    assert answer.status_code == 201, answer.text
    status: dict[str, Any] = answer.json()
    return status


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The problem document of a refusal."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    told: dict[str, Any] = answer.json()
    assert told["status"] == status
    assert told["title"]
    return told


# --- workers ----------------------------------------------------------------------------------------------------


def test_a_worker_is_made_changed_and_removed(api: httpx.Client) -> None:
    """201 new, 200 known with the same spec, 409 with another, 200 replaced, 204 removed, 404 gone."""
    first = start(api, "alice")
    same = api.post("/api/v1/workers", json={"name": "alice", "spec": SLEEP})
    assert (same.status_code, same.json()["pid"]) == (200, first["pid"])
    other = {"name": "alice", "spec": {"command": ["sleep", "2000"]}}
    told = problem(api.post("/api/v1/workers", json=other), 409)
    assert told["type"] == "urn:everdeck:spec-changed"
    assert told["fields"] == ["command"]
    replaced = api.post("/api/v1/workers?replace=1", json=other)
    assert replaced.status_code == 200
    assert replaced.json()["pid"] != first["pid"]
    for verb, state in (("stop", "stopped"), ("stop", "stopped"), ("start", "running"), ("restart", "running")):
        assert api.post(f"/api/v1/workers/alice/{verb}").json()["state"] == state
    assert api.post("/api/v1/workers/alice/reset").json()["state"] == "running"
    assert api.get("/api/v1/workers/alice").json()["state"] == "running"
    assert api.delete("/api/v1/workers/alice").status_code == 204
    told = problem(api.get("/api/v1/workers/alice"), 404)
    assert told["type"] == "urn:everdeck:unknown-worker"


def test_detail_shows_names_of_secrets_and_never_values(api: httpx.Client) -> None:
    """Status, spec, layers and tree; environment and secrets by name only."""
    start(api, "alice", env={"PUBLIC_THING": "visible-value"}, secrets={"TOKEN": {"value": "hunter2"}})
    answer = api.get("/api/v1/workers/alice/detail")
    detail = answer.json()
    assert detail["spec"]["env_keys"] == ["PUBLIC_THING"]
    assert detail["spec"]["secret_names"] == ["TOKEN"]
    assert [layer["layer"] for layer in detail["layers"]] == ["L1", "L2", "L3", "L4"]
    assert detail["tree"][0]["pid"] == detail["status"]["pid"]
    assert "hunter2" not in answer.text
    assert "visible-value" not in answer.text


def test_lists_are_filtered_sorted_and_paged(api: httpx.Client) -> None:
    """Every page together is the whole, in order, without a double."""
    for number in range(7):
        start(api, f"user{number}", labels={"team": "red" if number % 2 else "blue"})
    api.post("/api/v1/workers/user3/stop")
    everything = api.get("/api/v1/workers").json()
    assert everything["total"] == 7
    assert everything["counts"] == {"running": 6, "stopped": 1}
    assert everything["next"] is None
    for order in ("asc", "desc"):
        for sort in ("name", "state", "uptime", "cpu", "rss", "restarts"):
            names: list[str] = []
            cursor: str | None = None
            while True:
                query = {"sort": sort, "order": order, "limit": "3"} | ({"cursor": cursor} if cursor else {})
                page = api.get("/api/v1/workers", params=query).json()
                names += [worker["name"] for worker in page["workers"]]
                cursor = page["next"]
                if cursor is None:
                    break
            if sort not in {"cpu", "rss"}:
                assert sorted(names) == [f"user{n}" for n in range(7)], (sort, order)
            if sort == "name":
                assert names == sorted(names, reverse=order == "desc")
    assert [w["name"] for w in api.get("/api/v1/workers?state=stopped").json()["workers"]] == ["user3"]
    assert api.get("/api/v1/workers?label=team=blue").json()["total"] == 4
    assert api.get("/api/v1/workers?label=team").json()["total"] == 7
    assert api.get("/api/v1/workers?q=USER5").json()["total"] == 1
    assert api.get("/api/v1/workers?names=user1,user2,nobody").json()["total"] == 2
    problem(api.get("/api/v1/workers?cursor=nonsense"), 422)
    problem(api.get("/api/v1/workers?state=nonsense"), 400)


def test_an_unchanged_list_is_not_sent_again(api: httpx.Client) -> None:
    """The ETag stays while only uptime and usage move, and changes with a state."""
    start(api, "alice")
    first = api.get("/api/v1/workers")
    again = api.get("/api/v1/workers", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""
    api.post("/api/v1/workers/alice/stop")
    changed = api.get("/api/v1/workers", headers={"If-None-Match": first.headers["etag"]})
    assert changed.status_code == 200


def test_many_at_once_each_with_its_own_result(api: httpx.Client) -> None:
    """One unknown name does not keep the others from theirs."""
    for name in ("a", "b"):
        start(api, name)
    answer = api.post("/api/v1/bulk", json={"verb": "stop", "names": ["a", "nobody", "b", "../etc"]}).json()
    assert [(result["name"], result["ok"]) for result in answer["results"]] == [
        ("a", True),
        ("nobody", False),
        ("b", True),
        ("../etc", False),
    ]
    assert answer["results"][0]["status"]["state"] == "stopped"
    assert answer["results"][1]["problem"]["status"] == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "a/b", "spec": SLEEP}, "name"),
        ({"name": "alice", "spec": {"command": []}}, "command"),
        ({"name": "alice", "spec": SLEEP | {"restart": {"max_crashes": -1}}}, "restart.max_crashes"),
        ({"name": "alice", "spec": SLEEP | {"env": {"A=B": "x"}}}, "env['A=B']"),
        ({"name": "alice", "template": "nope"}, "template"),
        ({"name": "alice"}, "command"),
        ({"name": "alice", "spec": {"command": ["/no/such/program"]}}, "command"),
        ({"name": "alice", "spec": SLEEP, "command": ["x"]}, "spec"),
    ],
)
def test_a_refusal_names_the_field(api: httpx.Client, body: dict[str, Any], field: str) -> None:
    """422 with the model's own name of the field, and nothing was written."""
    assert problem(api.post("/api/v1/workers", json=body), 422)["field"] == field
    if field != "command" or "spec" not in body:
        assert api.get("/api/v1/workers").json()["total"] == 0


# --- logs and events --------------------------------------------------------------------------------------------


def read_sse(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """(name, data, id) of each server-sent event."""
    name, data, number = "message", "", None
    for line in response.iter_lines():
        if not line:
            yield name, json.loads(data), number
            name, data, number = "message", "", None
        elif line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            data += line[6:]
        elif line.startswith("id: "):
            number = line[4:]


def test_logs_as_lines_as_a_stream_and_as_a_file(api: httpx.Client) -> None:
    """The last lines, every new line, and the whole byte for byte."""
    script = "echo one; echo two; exec sleep 1000"
    start(api, "alice", command=["sh", "-c", script])
    until(lambda: "two" in api.get("/api/v1/workers/alice/logs").json()["lines"])
    assert api.get("/api/v1/workers/alice/logs?grep=^one$").json()["lines"] == ["one"]
    problem(api.get("/api/v1/workers/alice/logs?grep=["), 422)
    problem(api.get("/api/v1/workers/alice/logs?grep=[&follow=1"), 422)
    problem(api.get("/api/v1/workers/nobody/logs"), 404)
    download = api.get("/api/v1/workers/alice/logs/download")
    assert b"one\ntwo\n" in download.content
    assert "attachment" in download.headers["content-disposition"]
    start(api, "bob", command=["sleep", "1000"])
    assert api.get("/api/v1/lastlines?names=alice,bob,nobody").json() == {"alice": "two", "bob": None}
    with api.stream("GET", "/api/v1/workers/alice/logs?follow=1&lines=10") as stream:
        seen: list[str] = []
        for name, data, _ in read_sse(stream):
            if name == "lines":
                seen += data["texts"]
            elif name == "line":
                seen.append(data["text"])
            if seen.count("two") == 1:
                restarting = threading.Thread(target=_restart, args=(_state(api), "alice"))
                restarting.start()
                seen.append("restarting")
                seen.append("two")
            if seen.count("two") == 3:
                break
    restarting.join(PATIENCE_SECONDS)
    assert seen.count("one") == 2


def _restart(state: Path, name: str) -> None:
    with Daemon(state) as daemon:
        daemon.document("POST", f"/api/v1/workers/{name}/restart")


def _state(api: httpx.Client) -> Path:
    return Path(api.get("/api/v1/deck").json()["state_dir"])


def test_events_resume_where_a_reader_left(api: httpx.Client) -> None:
    """`Last-Event-ID` gives exactly what was missed; the list and the stream tell the same."""
    began = api.get("/api/v1/deck").json()["last_event_id"]
    start(api, "alice")
    api.post("/api/v1/workers/alice/stop")
    listed = api.get(f"/api/v1/events?after={began}", headers={"Accept": "application/json"}).json()
    assert [event["kind"] for event in listed] == ["started", "stopping", "stopped"]
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(began)}
    with api.stream("GET", "/api/v1/events", headers=headers) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        found = []
        for name, data, number in read_sse(stream):
            if name == "message":
                assert str(data["id"]) == number
                found.append(data)
            if len(found) == 3:
                break
    assert found == listed
    # Asked for without saying what is accepted, it is the stream that the design promises.
    with api.stream("GET", f"/api/v1/events?after={began}", headers={"Accept": "*/*"}) as stream:
        assert next(data for name, data, _ in read_sse(stream) if name == "message") == listed[0]
    newest = api.get(f"/api/v1/events?last=2&worker=alice&before={listed[2]['id']}").json()
    assert [event["kind"] for event in newest] == ["started", "stopping"]
    kinds = api.get(f"/api/v1/events?after={began}&kind=started,stopped").json()
    assert [event["kind"] for event in kinds] == ["started", "stopped"]
    problem(api.get("/api/v1/events?kind=nonsense"), 422)


# --- the deck ---------------------------------------------------------------------------------------------------


def test_health_tells_up_and_supervised_apart(api: httpx.Client) -> None:
    """Two facts, two fields."""
    assert api.get("/healthz").json() == {"up": True, "supervised": True}


def test_metrics_are_read_by_the_standard_parser(api: httpx.Client) -> None:
    """Per worker and for the deck, with exit codes."""
    from prometheus_client.parser import text_string_to_metric_families

    start(api, "alice")
    start(api, "bob", command=["sh", "-c", "exit 7"], restart={"policy": "never"})
    until(lambda: api.get("/api/v1/workers/bob").json()["exit"])
    answer = api.get("/metrics")
    found = {
        (sample.name, sample.labels.get("worker")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert found["everdeck_worker_up", "alice"] == 1
    assert found["everdeck_worker_up", "bob"] == 0
    assert found["everdeck_worker_exit_code", "bob"] == 7
    assert found["everdeck_worker_restarts_total", "alice"] == 0
    assert found["everdeck_worker_resident_memory_bytes", "alice"] > 0
    assert found["everdeck_deck_supervised", None] == 1


def test_samples_are_taken_while_somebody_watches(api: httpx.Client) -> None:
    """Asking is watching; the points are of the same length and newer than `since`."""
    start(api, "alice")

    def sampled() -> Any:
        found = api.get("/api/v1/samples?names=alice,nobody").json()["alice"]
        return any(found["rss"]) and found  # the first look may come before the program has a page of its own

    series = until(sampled)
    assert len(series["at"]) == len(series["cpu"]) == len(series["rss"])
    later = api.get("/api/v1/samples", params={"names": "alice", "since": series["at"][-1], "points": 1}).json()
    assert all(at > series["at"][-1] for at in later["alice"]["at"])


def test_templates_are_shown_without_values(api: httpx.Client) -> None:
    """Names of variables and secrets only; a worker made from one carries its name as a label."""
    templates = {"bot": {"command": ["sleep", "1000"], "env": {"KEY": "value-of-key"}}}
    api.post("/api/v1/apply", json={"workers": {}, "templates": templates}).raise_for_status()
    shown = api.get("/api/v1/templates")
    assert shown.json() == [{"name": "bot", "spec": {"command": ["sleep", "1000"], "env_keys": ["KEY"]}}]
    made = api.post("/api/v1/workers", json={"name": "alice", "template": "bot", "env": {"X": "1"}})
    assert made.status_code == 201
    assert made.json()["labels"] == {"template": "bot"}


def test_the_document_describes_the_api(api: httpx.Client) -> None:
    """OpenAPI 3.1 with every path of the design."""
    document = api.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path in ("/api/v1/workers", "/api/v1/workers/{name}", "/api/v1/workers/{name}/logs", "/api/v1/events"):
        assert path in document["paths"]
    assert "WorkerStatus" in json.dumps(document)


def test_unknown_paths_and_methods_are_problems_too(api: httpx.Client) -> None:
    """404 and 405 in the same form."""
    problem(api.get("/api/v1/nonsense"), 404)
    problem(api.put("/api/v1/workers"), 405)
    problem(api.post("/api/v1/workers", content=b"{not json", headers={"content-type": "application/json"}), 400)


# --- the worst ones ---------------------------------------------------------------------------------------------


def test_a_body_of_100_mb_is_refused_and_costs_nothing(api: httpx.Client, person: Person) -> None:
    """413 before it is read, whether its length is said or not; the daemon's memory stays."""
    before = _rss(person.owner())
    with unix_socket(person.state) as connection:
        head = "POST /api/v1/workers HTTP/1.1\nHost: x\nContent-Type: application/json\nContent-Length: 104857600\n\n"
        connection.sendall(head.replace("\n", "\r\n").encode())
        assert b" 413 " in connection.recv(65536).split(b"\r\n")[0]

    def blocks() -> Iterator[bytes]:
        for _ in range(1600):
            yield b"x" * 65536

    with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        answer = api.post("/api/v1/workers", content=blocks(), headers={"content-type": "application/json"})
        problem(answer, 413)
    assert api.get("/healthz").json()["supervised"] is True
    assert _rss(person.owner()) - before < 30_000_000


def test_a_client_that_never_reads_is_bounded(api: httpx.Client, person: Person) -> None:
    """It asks for the stream and for long answers and reads nothing; the deck goes on and does not grow with it."""
    start(api, "alice")
    before = _rss(person.owner())
    deaf = []
    try:
        for _ in range(20):
            connection = unix_socket(person.state)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = "GET /api/v1/events?after=0 HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n"
            connection.sendall(head.encode())
            deaf.append(connection)
        for _ in range(40):
            api.post("/api/v1/workers/alice/restart").raise_for_status()
        assert api.get("/api/v1/workers/alice").json()["state"] == "running"
        assert _rss(person.owner()) - before < 30_000_000
    finally:
        for connection in deaf:
            connection.close()


@pytest.mark.timeout(300)
def test_a_thousand_readers_of_events(api: httpx.Client, person: Person) -> None:
    """Every one of them gets every event, and a verb is still answered meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("too few file descriptors for a thousand clients")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    count = 1000
    began = api.get("/api/v1/deck").json()["last_event_id"]

    async def reader(ready: asyncio.Semaphore) -> list[int]:
        stream, writer = await asyncio.open_unix_connection(str(person.state / "http.sock"))
        try:
            head = f"GET /api/v1/events HTTP/1.1\nHost: x\nAccept: text/event-stream\nLast-Event-ID: {began}\n\n"
            writer.write(head.replace("\n", "\r\n").encode())
            while await stream.readline() != b"event: ping\r\n" and not stream.at_eof():
                if b"event: ping" in (await stream.readline()):
                    break
            ready.release()
            ids: list[int] = []
            while len(ids) < 3:
                line = await stream.readline()
                assert line, "the stream ended"
                if line.startswith(b"id: "):
                    ids.append(int(line[4:]))
            return ids
        finally:
            writer.close()

    async def crowd() -> list[list[int]]:
        ready = asyncio.Semaphore(0)
        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
            tasks = [group.create_task(reader(ready)) for _ in range(count)]
            for _ in range(count):
                await ready.acquire()
            await asyncio.to_thread(start, api, "alice")
            await asyncio.to_thread(lambda: api.post("/api/v1/workers/alice/stop").raise_for_status())
        return [task.result() for task in tasks]

    found = asyncio.run(crowd())
    expected = [began + 1, began + 2, began + 3]
    assert found == [expected] * count
    until(lambda: _connections(person) < 10, "the daemon keeps connections of readers that left")


@pytest.mark.parametrize(
    "head",
    [
        "GET /api/v1/workers/%00 HTTP/1.1\nHost: x\nConnection: close\n\n",
        "GET /api/v1/workers/%2e%2e%2f%2e%2e HTTP/1.1\nHost: x\nConnection: close\n\n",
        "GET /api/v1/workers/%ff%fe HTTP/1.1\nHost: x\nConnection: close\n\n",
        f"GET /api/v1/workers/{'a' * 9000} HTTP/1.1\nHost: x\nConnection: close\n\n",
        "DELETE /api/v1/workers/%C3%BC HTTP/1.1\nHost: x\nConnection: close\n\n",
        "GET /api/v1/workers HTTP/1.1\nConnection: close\n\n",
        "NONSENSE\n\n",
        "GET / HTTP/9.9\nHost: x\nConnection: close\n\n",
        f"GET / HTTP/1.1\nHost: x\nConnection: close\nX-Long: {'a' * 100_000}\n\n",
        "POST /api/v1/bulk HTTP/1.1\nHost: x\nContent-Length: -5\n\n",
        "POST /api/v1/bulk HTTP/1.1\nHost: x\nTransfer-Encoding: chunked\nConnection: close\n\nzz\n",
        "GET /api/v1/events?after=99999999999999999999 HTTP/1.1\nHost: x\nConnection: close\n\n",
        "GET /api/v1/events HTTP/1.1\nHost: x\nAccept: application/json\nLast-Event-ID: \xb2\nConnection: close\n\n",
        "GET /static/..%2f..%2fauth.py HTTP/1.1\nHost: x\nConnection: close\n\n",
    ],
)
def test_crooked_requests_get_a_clear_refusal(api: httpx.Client, person: Person, head: str) -> None:
    """Always a 4xx (or an honest 200), never a 5xx, and the daemon answers the next one."""
    with unix_socket(person.state) as connection:
        answer = raw_request(connection, head)
    status = int(answer.split(b" ", 2)[1])
    assert 200 <= status < 500, answer[:300]
    assert api.get("/healthz").status_code == 200


def test_a_peer_that_hangs_up_in_the_middle(api: httpx.Client, person: Person) -> None:
    """Half a request, half an answer: nothing is left behind."""
    for _ in range(50):
        with unix_socket(person.state) as connection:
            connection.sendall(b"POST /api/v1/workers HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        with unix_socket(person.state) as connection:
            connection.sendall(b"GET /api/v1/events?after=0 HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
            select.select([connection], [], [], PATIENCE_SECONDS)
    until(lambda: _connections(person) < 10, "connections of peers that left are kept")
    assert api.get("/healthz").status_code == 200


def _rss(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _connections(person: Person) -> int:
    """Connections as the daemon counts them."""
    with Daemon(person.state) as daemon:
        metrics = daemon.request("GET", "/metrics").decode()
    line = next(line for line in metrics.splitlines() if line.startswith("everdeck_deck_connections "))
    return int(float(line.split()[1]))


def test_samples_survive_the_daemon(tmp_path: Path) -> None:
    """What was measured before a restart is shown after it."""
    person = Person(tmp_path / "state")
    try:
        person.types("up", "--detach", "--listen", "127.0.0.1:0", "--sample-seconds", "0.1")
        person.types("start", "alice", "--", "sleep", "1000")

        def samples() -> list[float]:
            page = json.loads(person.types("login", "--json").stdout)["page"]
            token = (person.state / "token").read_text().strip()
            query = {"names": "alice", "seconds": "3600"}
            answer = httpx.get(f"{page}api/v1/samples", params=query, headers={"authorization": f"Bearer {token}"})
            found: list[float] = answer.raise_for_status().json()["alice"]["at"]
            return found

        until(lambda: len(samples()) > 2)
        person.types("down")
        stopped = time.time()
        person.types("up", "--detach", "--listen", "127.0.0.1:0")
        assert [at for at in samples() if at < stopped]
        person.types("rm", "alice")
    finally:
        person.leaves()
