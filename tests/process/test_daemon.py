"""The daemon: how it begins, leaves, is replaced, is killed, and how little it costs."""

import contextlib
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everdeck.cli import main, ps
from everdeck.client import Daemon
from everdeck.errors import ClientError, EverdeckError, NoOwner, UnknownWorker
from support.cli_daemon import EVERDECK, PATIENCE_SECONDS, Person, pidfd_of, processes_of, unix_socket
from support.waiting import until

SLEEPER = ("--", "sleep", "1000")


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    """A deck that nobody owns yet; everything it starts is ended."""
    person = Person(tmp_path / "state")
    try:
        yield person
    finally:
        person.leaves()


@contextlib.contextmanager
def foreground(person: Person, *words: str, **env: str) -> Iterator["subprocess.Popen[str]"]:
    """``everdeck up`` in the foreground, with its output on pipes."""
    command = [str(EVERDECK), "up", "--state", str(person.state), *words]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=person.env | env)
    try:
        yield daemon
    finally:
        daemon.kill()
        daemon.communicate()


def lines_until(stream: Any, text: str) -> list[str]:
    """Lines of a daemon's output up to one that contains the text."""
    lines = []
    for line in stream:
        lines.append(line.rstrip("\n"))
        if text in line:
            return lines
    raise AssertionError(f"{text!r} was not said: {lines}")


# --- beginning and leaving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_leaving_stops_bound_leaves_adoptable_and_says_which(person: Person, number: int) -> None:
    """Exit code 0; the bound one is gone with its tree, the other runs on and is adopted by the next owner."""
    with foreground(person, "--no-http") as daemon:
        lines_until(daemon.stderr, "supervising")
        person.types("start", "bound", "--bound", *SLEEPER)
        person.types("start", "free", *SLEEPER)
        pids = {worker["name"]: worker["pid"] for worker in person.seen()["workers"]}
        daemon.send_signal(number)
        _, said = daemon.communicate(timeout=PATIENCE_SECONDS)
        assert daemon.returncode == 0
    assert f"stopping 1 bound: bound (pid {pids['bound']})" in said
    assert f"left running 1 adoptable: free (pid {pids['free']})" in said
    assert not Path(f"/proc/{pids['bound']}").exists()
    assert Path(f"/proc/{pids['free']}").exists()
    assert not (person.state / "deck.sock").exists()
    assert not (person.state / "http.sock").exists()
    person.up()
    assert person.worker("free")["pid"] == pids["free"]
    assert person.worker("bound")["state"] == "running"


def test_a_second_daemon_is_refused(person: Person) -> None:
    """One daemon per deck, said with its pid; in the background too."""
    owner = person.up()
    for words in (("--no-http",), ("--detach", "--no-http")):
        refused = person.types("up", *words, expect=1)
        assert f"a daemon (pid {owner}) already serves" in refused.stderr
    assert person.owner() == owner


def test_a_port_that_is_taken_is_told_and_nothing_stays(person: Person) -> None:
    """Exit code 1 and no daemon left behind."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        refused = person.types("up", "--detach", "--listen", address, expect=1)
    assert f"cannot listen on {address}" in refused.stderr
    assert processes_of(person.state) == []


def test_the_usual_port_may_be_another_decks(person: Person) -> None:
    """Nobody asked for that port, so any other will do; the link shows which."""
    with socket.socket() as other:
        # Whoever has the port, this test or another on the machine, it is taken.
        with contextlib.suppress(OSError):
            other.bind(("127.0.0.1", 8787))
            other.listen()
        shown = person.types("up", "--detach").stdout
    link = re.search(r"http://127\.0\.0\.1:(\d+)/", shown)
    assert link is not None
    assert int(link.group(1)) != 8787


def test_a_hung_owner_does_not_hang_the_verb_that_shows_it(
    person: Person, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stopped daemon does not answer; `ps` says so and shows what the registry and the kernel know."""
    monkeypatch.setattr(ps, "ANSWER_SECONDS", 0.5)
    owner = person.up()
    person.types("start", "alice", *SLEEPER)
    with pidfd_of(owner) as pidfd:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        try:
            assert main(["--state", str(person.state), "ps", "--json"]) == 0
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    shown = capsys.readouterr()
    assert "did not answer" in shown.err
    assert [worker["state"] for worker in json.loads(shown.out)["workers"]] == ["running"]


def test_a_broken_file_is_refused_before_anything_is_touched(person: Person, tmp_path: Path) -> None:
    """Line, key and suggestion; no state directory appears."""
    file = tmp_path / "broken.toml"
    file.write_text('[worker.alice]\ncomand = ["sleep"]\n')
    refused = person.types("up", file, "--no-http", expect=1)
    assert "line 2: worker.alice.comand" in refused.stderr
    assert not person.state.exists()


def test_the_file_is_applied_and_its_server_table_heard(person: Person, tmp_path: Path) -> None:
    """Workers start, [server] sets the address, and what a later file leaves out is removed."""
    file = tmp_path / "everdeck.toml"
    worker = '[worker.{}]\ncommand = ["sleep", "1000"]\n'
    file.write_text('[server]\nlisten = "127.0.0.1:0"\n' + worker.format("a") + worker.format("b"))
    shown = person.types("up", file, "--detach").stdout
    assert "http://127.0.0.1:" in shown
    assert [worker["state"] for worker in person.seen()["workers"]] == ["running", "running"]
    person.kills(person.owner(), signal.SIGTERM)
    file.write_text('[server]\nhttp = false\n[worker.a]\ncommand = ["sleep", "1000"]\n')
    assert "http" not in person.types("up", "--detach", cwd=tmp_path).stdout
    assert [worker["name"] for worker in person.seen()["workers"]] == ["a"]


def test_logs_for_machines_are_json_lines(person: Person) -> None:
    """Every line parses; events carry their fields."""
    with foreground(person, "--no-http", "--log-format", "json") as daemon:
        assert daemon.stderr is not None
        json.loads(daemon.stderr.readline())
        person.types("start", "alice", *SLEEPER)
        events = [json.loads(line).get("event") for line in lines_until(daemon.stderr, "alice")]
        assert events[-1]["kind"] == "started"
        assert events[-1]["worker"] == "alice"


def test_the_link_is_shown_on_a_terminal_and_nowhere_else(person: Person) -> None:
    """Where somebody looks it is printed once; a pipe, a file and a journal keep what is printed, and get none."""
    terminal, ours = os.openpty()
    command = [str(EVERDECK), "up", "--state", str(person.state), "--listen", "127.0.0.1:0"]
    daemon = subprocess.Popen(command, stdout=ours, stderr=subprocess.DEVNULL, env=person.env)
    os.close(ours)
    try:
        with os.fdopen(terminal, "rb", buffering=0) as screen:
            shown = screen.readline().decode()
        daemon.terminate()
        assert daemon.wait(PATIENCE_SECONDS) == 0
    finally:
        daemon.kill()
        daemon.wait()
    token = (person.state / "token").read_text().strip()
    assert re.search(r"http://127\.0\.0\.1:\d+/login#token=(\S+)", shown).group(1) == token  # type: ignore[union-attr]
    (person.state / "token").unlink()
    with foreground(person, "--listen", "127.0.0.1:0") as piped:
        said = lines_until(piped.stderr, "the token for the login is in")
        piped.terminate()
        assert piped.stdout is not None
        assert piped.stderr is not None
        said += [*piped.stdout.readlines(), *piped.stderr.readlines()]
    fresh = (person.state / "token").read_text().strip()
    assert fresh != token
    assert fresh not in "".join(said)


def test_its_own_supervisor_is_told(person: Person, tmp_path: Path) -> None:
    """READY=1 when everything is up, RELOADING=1 and READY=1 again at a reload, STOPPING=1 at the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        address = tmp_path / "notify"
        ear.bind(str(address))
        ear.settimeout(PATIENCE_SECONDS)
        with foreground(person, "--no-http", NOTIFY_SOCKET=str(address)) as daemon:
            said = ear.recv(4096).decode()
            assert "READY=1" in said
            assert f"MAINPID={daemon.pid}" in said
            person.types("start", "alice", *SLEEPER)
            environ = Path(f"/proc/{person.worker('alice')['pid']}/environ").read_bytes()
            assert os.fsencode(address) not in environ
            person.types("reload")
            said = ear.recv(4096).decode()
            assert "RELOADING=1" in said
            assert "MONOTONIC_USEC=" in said
            assert "READY=1" in ear.recv(4096).decode()
            daemon.terminate()
            assert "STOPPING=1" in ear.recv(4096).decode()
            assert daemon.wait(PATIENCE_SECONDS) == 0


# --- reload -----------------------------------------------------------------------------------------------------


def test_reload_keeps_pid_children_exit_codes_and_streams(person: Person) -> None:
    """The program is replaced; workers stay children, an exit code is still learnt, a stream resumes without a gap."""
    owner = person.up("--listen", "127.0.0.1:0")
    person.types("start", "free", "--", "sh", "-c", "trap 'exit 7' USR1; while :; do sleep 0.1; done")
    person.types("start", "bound", "--bound", *SLEEPER)
    before = {worker["name"]: worker["pid"] for worker in person.seen()["workers"]}
    follower = subprocess.Popen(
        [EVERDECK, "--state", person.state, "events", "-f", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=person.env,
    )
    try:
        assert follower.stdout is not None
        seen = [json.loads(follower.stdout.readline())]
        assert str(owner) in person.types("reload").stdout
        assert person.owner() == owner
        assert {worker["name"]: worker["pid"] for worker in person.seen()["workers"]} == before
        for pid in before.values():
            assert int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == owner
        with pidfd_of(before["free"]) as pidfd:
            signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
        while seen[-1]["kind"] != "crashed":
            seen.append(json.loads(follower.stdout.readline()))
        assert seen[-1]["detail"]["exit"] == {"kind": "exited", "code": 7}
        ids = [event["id"] for event in seen]
        assert ids == list(range(ids[0], ids[0] + len(ids)))
    finally:
        follower.kill()
        follower.communicate()


def test_a_reload_to_broken_code_changes_nothing(person: Person, tmp_path: Path) -> None:
    """The new code is tried out first; what was wrong is told, and the old program goes on."""
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    person.env["PYTHONPATH"] = str(shadow)
    owner = person.up()
    person.types("start", "alice", *SLEEPER)
    with Daemon(person.state) as daemon:
        started_at = daemon.document("GET", "/api/v1/deck")["started_at"]
    (shadow / "h11.py").write_text("raise ImportError('this h11 is broken')\n")
    refused = person.types("reload", expect=1)
    assert "this h11 is broken" in refused.stderr
    (shadow / "h11.py").unlink()
    with Daemon(person.state) as daemon:
        deck = daemon.document("GET", "/api/v1/deck")
    assert (deck["owner_pid"], deck["started_at"]) == (owner, started_at)
    assert person.worker("alice")["state"] == "running"


def test_nobody_is_turned_away_while_the_program_is_replaced(person: Person) -> None:
    """Connections that come in during a reload wait in the kernel's queue and are answered."""
    person.up()
    stop, refused, answered = threading.Event(), [], []

    def ask() -> None:
        while not stop.is_set():
            try:
                with Daemon(person.state, timeout_seconds=PATIENCE_SECONDS) as daemon:
                    answered.append(daemon.document("GET", "/api/v1/deck")["owner_pid"])
            except NoOwner as error:
                refused.append(str(error))
            except ClientError:
                pass  # it was being answered when the program ended; that is said and tried again

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        person.types("reload")
    finally:
        stop.set()
        asking.join(PATIENCE_SECONDS)
    assert refused == []
    assert len(set(answered)) == 1


# --- killed -----------------------------------------------------------------------------------------------------


def test_killed_under_a_load_of_verbs_the_registry_agrees_with_the_kernel(person: Person) -> None:
    """Clients get a true answer or a clear error; after each kill -9 and start, what should run runs exactly once."""
    draw = random.Random(6)
    unclear: list[str] = []
    acknowledged: dict[str, str | None] = {}
    stop = threading.Event()

    def hammer(seed: int) -> None:
        """One client with workers of its own, so that it knows what each last answer promised."""
        mine = random.Random(seed)
        while not stop.is_set():
            name, verb = f"w{seed}{mine.choice('ab')}", mine.choice(("start", "stop", "restart", "list", "remove"))
            before = acknowledged.get(name, "absent")
            acknowledged[name] = None if verb != "list" else before
            try:
                with Daemon(person.state, timeout_seconds=PATIENCE_SECONDS) as daemon:
                    match verb:
                        case "start":
                            spec = {"command": ["sleep", "1000"]}
                            daemon.document("POST", "/api/v1/workers", {"name": name, "spec": spec})
                        case "list":
                            daemon.document("GET", "/api/v1/workers")
                        case "remove":
                            daemon.document("DELETE", f"/api/v1/workers/{name}")
                        case _:
                            daemon.document("POST", f"/api/v1/workers/{name}/{verb}")
                promises = {"start": "running", "restart": "running", "stop": "stopped", "remove": "absent"}
                acknowledged[name] = promises.get(verb, before)
            except NoOwner:
                acknowledged[name] = before  # nobody was reached, so nothing was asked
            except UnknownWorker:
                acknowledged[name] = "absent"
            except ClientError as error:
                if "went away before it answered" not in str(error):
                    unclear.append(str(error))
            except EverdeckError:
                pass  # the verb was refused, and says why; what holds now is not known
            except Exception as error:  # noqa: BLE001 - any other class is the finding of this test
                unclear.append(repr(error))

    person.up()
    hammers = [threading.Thread(target=hammer, args=(seed,)) for seed in range(3)]
    for thread in hammers:
        thread.start()
    try:
        for _ in range(3):
            with Daemon(person.state) as daemon:
                target = _last_event(daemon) + draw.randint(5, 25)
                until(lambda: _last_event(daemon) >= target, "nothing happens")  # noqa: B023 - called at once
            person.kills(person.owner())
            person.up()
    finally:
        stop.set()
        for thread in hammers:
            thread.join(PATIENCE_SECONDS)
    assert unclear == []
    until(lambda: all(worker["state"] in {"running", "stopped"} for worker in person.seen()["workers"]))
    states = {worker["name"]: worker["state"] for worker in person.seen()["workers"]}
    broken = {
        name: (promised, states.get(name, "absent"))
        for name, promised in acknowledged.items()
        if promised is not None and states.get(name, "absent") != promised
    }
    assert broken == {}, "promised, found"
    told = {worker["name"]: worker["pid"] for worker in person.seen()["workers"] if worker["pid"]}
    assert _sleepers(person.state) == told


def _last_event(daemon: Daemon) -> int:
    return int(daemon.document("GET", "/api/v1/deck")["last_event_id"])


def _sleepers(state: Path) -> dict[str, int]:
    """The worker of each process of this deck, by /proc alone; two of one name fail."""
    found: dict[str, int] = {}
    for pid in processes_of(state):
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            name = next((word[16:].decode() for word in environ if word.startswith(b"EVERDECK_WORKER=")), None)
            if name is not None:
                assert name not in found, f"two processes of {name}: {found[name]} and {pid}"
                found[name] = pid
    return found


# --- what it costs ----------------------------------------------------------------------------------------------


def test_an_idle_daemon_sleeps_and_is_small(person: Person) -> None:
    """With workers that just run and nobody asking, no thread of it wakes up; its memory is below 45 MB."""
    owner = person.up("--listen", "127.0.0.1:0")
    for name in ("a", "b", "c"):
        person.types("start", name, *SLEEPER)
    until(lambda: _open_sockets(owner) == 0, "connections stay open")

    def sleeps_on() -> bool:
        """Whether no thread woke up for five seconds; what a start leaves to do in the background ends first."""
        before = _switches(owner)
        with pidfd_of(owner) as pidfd:
            assert select.select([pidfd], [], [], 5.0)[0] == [], "it ended"
        return _switches(owner) == before

    until(sleeps_on, "it never slept for five seconds")
    pss = sum(
        int(line.split()[1])
        for line in Path(f"/proc/{owner}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    )
    assert pss < 45_000, f"{pss} kB"


def _switches(pid: int) -> dict[str, int]:
    """Voluntary context switches of each thread: each is a wake-up that went back to sleep."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        found[task.name] = next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))
    return found


def _open_sockets(pid: int) -> int:
    """Accepted connections on the deck's socket, as the kernel lists them."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()))
    lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    # State 03 is connected; the address of an accepted connection is the listener's.
    return sum(
        1
        for f in (line.split() for line in lines)
        if f[5] == "03" and f"socket:[{f[6]}]" in inodes and "http.sock" in f[-1]
    )


def test_the_first_byte_of_a_connection_may_come_late(person: Person) -> None:
    """A connection that says nothing yet is kept for a while, and others are served meanwhile."""
    person.up()
    with unix_socket(person.state) as quiet:
        person.types("ps")
        quiet.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while block := quiet.recv(4096):
            answer += block
    assert b" 200 " in answer
