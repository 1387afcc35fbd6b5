"""Real programs of many processes share one deck: gunicorn, uvicorn, multiprocessing, Celery, and a daemon beside them.

Whichever of them owns the deck, there is one owner, every process may use every verb, and no worker runs twice.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from everdeck import Deck, State
from everdeck.deck.home import owner_pid
from everdeck.deck.membership import Membership
from support.cli_daemon import Person
from support.repo_processes import end_all_under
from support.waiting import until

APP = """
import json, os
from everdeck import Deck

deck = Deck(os.environ["DECK"])

def answer(path):
    verb, _, name = path.strip("/").partition("/")
    if verb == "start":
        pid = deck.start(name, ["sleep", "1000"]).pid
    elif verb == "restart":
        pid = deck.restart(name).pid
    else:
        pid = None
    return json.dumps({"worker": os.getpid(), "kind": deck.abilities().kind, "pid": pid}).encode()

def wsgi(environ, start_response):
    body = answer(environ["PATH_INFO"])
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]

async def asgi(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    import asyncio
    body = await asyncio.to_thread(answer, scope["path"])
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with the application; everything that runs under it is ended afterwards."""
    (tmp_path / "app.py").write_text(APP)
    yield tmp_path
    end_all_under(tmp_path)


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    """Somebody at a terminal, with a deck of their own."""
    someone = Person(tmp_path / "state")
    try:
        yield someone
    finally:
        someone.leaves()


@contextmanager
def served(place: Path, *command: str, politely: bool = True) -> Iterator["subprocess.Popen[bytes]"]:
    """A server in its own group, ended whatever happens."""
    env = {**os.environ, "DECK": str(place / "state"), "PYTHONWARNINGS": "ignore"}
    log = (place / "server.log").open("wb")
    with log, subprocess.Popen(command, cwd=place, env=env, stdout=log, stderr=log, start_new_session=True) as server:
        try:
            yield server
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL) if politely else (signal.SIGKILL,):
                try:
                    os.killpg(server.pid, number)
                    server.wait(20)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue


def free_port() -> int:
    """A port that nobody has at the moment."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def asked(port: int, path: str) -> dict[str, object]:
    """One request, on a connection of its own, so that the kernel chooses the process."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


def is_up(port: int) -> bool:
    """Does somebody answer?"""
    try:
        asked(port, "/")
    except OSError:
        return False
    return True


def exercise(port: int, state: Path, processes: int) -> None:
    """Verbs from every process, the owner killed among them, and each worker once in the end."""
    until(lambda: is_up(port))
    seen: dict[object, set[object]] = {}
    deadline = time.monotonic() + 60
    while len(seen) < processes and time.monotonic() < deadline:
        for number in range(8):
            told = asked(port, f"/start/w{number}")
            seen.setdefault(told["worker"], set()).add(told["pid"])
    assert len(seen) >= 2, "the kernel let one process answer everything"
    pids = {pid for told in seen.values() for pid in told}
    assert len(pids) == 8, "each worker was started once, whoever was asked"
    before = asked(port, "/")
    owner = owner_pid(state)
    assert owner is not None
    os.kill(owner, signal.SIGKILL)
    until(lambda: owner_pid(state) not in {None, owner})
    until(lambda: is_up(port))
    told = asked(port, "/restart/w0")
    assert told["pid"] not in pids
    assert before["kind"] in {"owner", "member"}
    with Deck(state) as witness:
        assert witness.abilities().kind == "member"
        now = {one.name: one.pid for one in witness.list()}
        assert now.pop("w0") == told["pid"]
        assert set(now.values()) <= pids, "nobody but the one that was restarted has another process"
        assert {one.state for one in witness.list()} == {State.RUNNING}
        witness.stop_all()


def test_uvicorn_with_four_workers(place: Path) -> None:
    """Four spawned processes: one owns, three are members; the owner is killed, and another owns."""
    port = free_port()
    command = ("-m", "uvicorn", "app:asgi", "--workers", "4", "--port", str(port), "--log-level", "warning")
    with served(place, sys.executable, *command):
        exercise(port, place / "state", 4)


def test_gunicorn_with_preload_and_four_workers(place: Path) -> None:
    """The master opened the deck before it forked: it owns, and its copies are members from their first verb on."""
    port = free_port()
    command = ("-m", "gunicorn", "app:wsgi", "--preload", "--workers", "4", "--bind", f"127.0.0.1:{port}")
    with served(place, sys.executable, *command) as master:
        until(lambda: is_up(port))
        seen: dict[object, object] = {}
        for number in range(60):
            told = asked(port, f"/start/w{number % 8}")
            seen[told["worker"]] = told["kind"]
        assert owner_pid(place / "state") == master.pid
        assert len(seen) >= 2
        assert set(seen.values()) == {"member"}
        # A worker process that is killed is replaced by a new fork of the owner: a member like the others.
        for worker in seen:
            os.kill(int(str(worker)), signal.SIGKILL)
        until(lambda: is_up(port))
        assert asked(port, "/restart/w0")["kind"] == "member"
        with Deck(place / "state") as witness:
            assert {one.state for one in witness.list()} == {State.RUNNING}
            assert len({one.pid for one in witness.list()}) == 8
            witness.stop_all()


def _in_child(deck: Deck, state: Path, name: str, answers: "multiprocessing.Queue[object]") -> None:
    mine = deck if deck is not None else Deck(state)
    answers.put((mine.abilities().kind, mine.start(name, ["sleep", "1000"]).pid, mine.restart("shared").pid))
    mine.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_multiprocessing(place: Path, method: str) -> None:
    """Four children use the deck that their parent owns."""
    context = multiprocessing.get_context(method)
    state = place / "state"
    with Deck(state) as deck:
        deck.start("shared", ["sleep", "1000"])
        answers = context.Queue()
        given = deck if method == "fork" else None
        children = [
            context.Process(target=_in_child, args=(given, state, f"w{number}", answers)) for number in range(4)
        ]
        for child in children:
            child.start()
        told = [answers.get(timeout=60) for _ in children]
        for child in children:
            child.join(60)
        assert {kind for kind, _, _ in told} == {"member"}
        assert {one.pid for one in deck.list() if one.name != "shared"} == {pid for _, pid, _ in told}
        assert deck.status("shared").pid in {pid for _, _, pid in told}
        restarted = [event for event in deck.events(worker="shared") if event.kind == "restarted"]
        assert len(restarted) == 4
        deck.stop_all()


CELERY = """
import os
from celery import Celery
from everdeck import Deck

app = Celery("tasks", broker="filesystem://", backend="file://" + os.environ["DECK"] + "-results")
app.conf.broker_transport_options = {
    "polling_interval": 0.02,
    **{key: os.environ["DECK"] + "-queue" for key in ("data_folder_in", "data_folder_out", "control_folder")},
}
deck = Deck(os.environ["DECK"]) if os.environ.get("OPEN") else None

@app.task
def start(name):
    return [os.getpid(), deck.abilities().kind, deck.start(name, ["sleep", "1000"]).pid]
"""


def test_celery_with_four_forked_workers(place: Path) -> None:
    """The deck is opened before Celery forks its pool; every task process is a member."""
    pytest.importorskip("celery", reason="celery is in the dependency group 'test'")
    (place / "tasks.py").write_text(CELERY)
    state = place / "state"
    for folder in ("state-queue", "state-results"):
        (place / folder).mkdir()
    command = (
        "-m",
        "celery",
        "-A",
        "tasks",
        "worker",
        "--pool",
        "prefork",
        "--concurrency",
        "4",
        "--loglevel",
        "ERROR",
        # With one node there is nobody to wait for, and to look for others takes seconds.
        "--without-mingle",
        "--without-gossip",
        "--without-heartbeat",
    )
    env = {**os.environ, "DECK": str(state)}
    send = (
        "import tasks, json\n"
        "sent = [tasks.start.delay(f'w{n}') for n in range(12)]\n"
        "print(json.dumps([one.get(timeout=90, interval=0.02) for one in sent]))\n"
    )
    os.environ["OPEN"] = "1"
    try:
        with served(place, sys.executable, *command, politely=False):  # its own way to leave takes six seconds
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", send],
                cwd=place,
                env={**env, "OPEN": ""},
                capture_output=True,
                text=True,
                timeout=110,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-2000:] + (place / "server.log").read_text()[-2000:]
            told = json.loads(done.stdout)
            assert {kind for _, kind, _ in told} == {"member"}
            assert len({pid for _, _, pid in told}) == 12
            with Deck(state) as witness:
                assert {one.pid for one in witness.list()} == {pid for _, _, pid in told}
                witness.stop_all()
    finally:
        del os.environ["OPEN"]


def test_up_beside_an_embedded_owner_adds_api_and_page(person: Person) -> None:
    """The daemon is a member; it serves HTTP, and owns the deck when the program ends."""
    with Deck(person.state) as deck:
        deck.start("alice", ["sleep", "1000"])
        person.up()
        listed = json.loads(person.types("members", "--json").stdout)
        assert [(one["pid"] == os.getpid(), one["owner"]) for one in listed] == [(True, True), (False, False)]
        daemon = listed[1]["pid"]
        assert "owner" in person.types("members").stdout
        shown = json.loads(person.types("ps", "--json").stdout)
        assert shown["owner_pid"] == os.getpid()
        assert [worker["pid"] for worker in shown["workers"]] == [deck.status("alice").pid]
        person.types("start", "bob", "--", "sleep", "1000")
        assert deck.status("bob").state is State.RUNNING
        pid = deck.status("bob").pid
    until(lambda: owner_pid(person.state) == daemon)
    shown = json.loads(person.types("ps", "--json").stdout)
    assert (shown["supervised"], shown["owner_pid"]) == (True, daemon)
    assert pid in [worker["pid"] for worker in shown["workers"]]


def test_nobody_is_there(person: Person) -> None:
    """``members`` without an owner says so, with the exit code for it."""
    person.types("members", expect=3)


HOLDER = (
    "import fcntl, os, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX); "
    "lock.write(f'{os.getpid()}\\n'); lock.flush(); print('held', flush=True); sys.stdin.read(); "
    "fcntl.flock(lock, fcntl.LOCK_UN); lock.close(); os.utime(sys.argv[1]); import time; time.sleep(99)"
)


@pytest.mark.parametrize("end", ["killed", "lets go"])
def test_who_meets_an_owner_that_does_not_listen_waits_for_a_fact(
    place: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks twice, and again when the owner died or let go; not by the clock, but for once a second."""
    place.mkdir(exist_ok=True)
    state = place / "state"
    state.mkdir(mode=0o700)
    looks: list[float] = []
    look = Membership._own

    async def counted(self: Membership, handed_on: object) -> object:
        looks.append(time.monotonic())
        return await look(self, handed_on)  # type: ignore[arg-type]

    monkeypatch.setattr(Membership, "_own", counted)
    command = [sys.executable, "-c", HOLDER, str(state / "deck.lock")]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder,
        ThreadPoolExecutor(1) as thread,
    ):
        try:
            assert holder.stdin is not None
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            opening = thread.submit(Deck, state)
            until(lambda: len(looks) >= 2, "it has looked")
            time.sleep(0.6)  # a clock would have gone off meanwhile
            if end == "killed":
                holder.kill()
            else:
                holder.stdin.close()
            with opening.result(60) as deck:
                assert deck.owner_pid == os.getpid()
            assert len(looks) <= 4 + (looks[-1] - looks[0])
        finally:
            holder.kill()
