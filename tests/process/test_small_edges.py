"""Small edges, each seen once: a profile without pidfds, nested bodies, pipes that wait, forgotten stops."""

import contextlib
import difflib
import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from everdeck import Deck, State, UnknownWorker
from everdeck.errors import StateDirRefused
from support.cli_daemon import EVERDECK, Person
from support.waiting import until

FOREVER = ["sleep", "1000"]

# A seccomp filter that answers pidfd_open (434) with EPERM, as container profiles from before 2020 do.
WITHOUT_PIDFDS = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
code = b"".join(struct.pack("<HBBI", *one) for one in (
    (0x20, 0, 0, 0), (0x15, 0, 1, 434), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000)))
kept = ctypes.create_string_buffer(code)
program = Program(4, ctypes.cast(kept, ctypes.c_void_p))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
"""


def test_where_pidfds_are_forbidden_nothing_is_started(tmp_path: Path) -> None:
    """Refused before anything runs or is written, with the way out; doctor says it in words."""
    code = WITHOUT_PIDFDS + (
        "from everdeck import Deck\n"
        "from everdeck.errors import NotPermitted\n"
        "try:\n"
        f"    Deck({str(tmp_path / 'state')!r})\n"
        "except NotPermitted as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "pidfd_open is refused here (EPERM)" in done.stdout, done.stderr
    assert "seccomp" in done.stdout
    assert not (tmp_path / "state" / "deck.db").exists()
    doctor = WITHOUT_PIDFDS + (
        f"import os\nos.execv({str(EVERDECK)!r}, ['everdeck', '--state', {str(tmp_path / 'state')!r}, 'doctor'])\n"
    )
    told = subprocess.run([sys.executable, "-c", doctor], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in told.stderr
    assert "pidfd_open is refused here" in told.stdout + told.stderr


def test_near_names_are_looked_for_only_when_somebody_reads_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among thousands of names the search takes 50 ms of the loop."""
    looked = []
    search = difflib.get_close_matches

    def counted(*arguments: object, **options: object) -> list[str]:
        looked.append(arguments)
        return search(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    with Deck(tmp_path / "state") as deck:
        deck.start("alice", FOREVER)
        with pytest.raises(UnknownWorker) as refused:
            deck.status("alcie")
        assert not looked
        assert refused.value.suggestions == ("alice",)
        assert "did you mean 'alice'" in str(refused.value)
        assert len(looked) == 1
        deck.stop_all()


def test_a_body_that_is_nested_too_deeply_is_a_bad_request(tmp_path: Path) -> None:
    """Ten thousand brackets are the sender's mistake."""
    person = Person(tmp_path / "state")
    pid = person.up()
    try:
        body = '{"name": "deep", "command": ' + "[" * 50_000 + "]" * 50_000 + "}"
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(tmp_path / "state" / "http.sock"))
        connection.request("POST", "/api/v1/workers", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 400, answer.read()
        assert b"nested too deeply" in answer.read()
        connection.close()
    finally:
        person.kills(pid)


def test_events_reach_a_pipe_at_once(tmp_path: Path) -> None:
    """``everdeck events -f | …`` shows what is there, though nothing new happens for hours."""
    person = Person(tmp_path / "state")
    person.env.pop("PYTHONUNBUFFERED", None)
    pid = person.up()
    command = [str(EVERDECK), "--state", str(person.state), "events", "-f", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=person.env, text=True) as following:
        try:
            assert following.stdout is not None
            assert '"owner-changed"' in following.stdout.readline()
        finally:
            following.kill()
            person.kills(pid)


def test_a_worker_stopped_by_hand_stays_stopped_when_the_daemon_starts_again(tmp_path: Path) -> None:
    """``up FILE`` reads its file again after each start of the daemon; a stop is not taken back by that."""
    file = tmp_path / "everdeck.toml"
    file.write_text('[worker.a]\ncommand = ["sleep", "1000"]\n[worker.b]\ncommand = ["sleep", "1000"]\n')
    person = Person(tmp_path / "state")
    pid = person.up(str(file), "--no-http")
    try:
        until(lambda: person.worker("b")["state"] == "running", "both run")
        person.types("stop", "a")
        person.kills(pid)
        pid = person.up(str(file), "--no-http")
        assert person.worker("a")["state"] == State.STOPPED
        assert person.worker("b")["state"] == State.RUNNING
        person.types("apply", str(file))
        assert person.worker("a")["state"] == State.RUNNING, "who types apply means it"
        person.types("stop", "--all")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("put", "what"), [(os.mkfifo, "a pipe"), (os.mkdir, "a directory")])
def test_something_else_in_place_of_a_log_fails_its_own_worker(
    tmp_path: Path, put: Callable[[Path], None], what: str
) -> None:
    """Opening a pipe would wait for a reader for ever; nobody waits, and only this worker cannot be started."""
    current = tmp_path / "state" / "workers" / "odd" / "log" / "current"
    with Deck(tmp_path / "state") as deck:
        deck.start("odd", FOREVER)
        deck.stop("odd")
        current.unlink()
        put(current)
        with pytest.raises(StateDirRefused, match="log/current"):
            deck.start("odd", FOREVER)
        assert deck.logs("odd") == []
        said = subprocess.run(
            [sys.executable, "-m", "everdeck.cli", "--state", str(deck.state_dir), "logs", "odd"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (said.returncode, said.stdout) == (1, "")
        assert f"is {what}, not a log" in said.stderr
        assert deck.start("fine", FOREVER).state is State.RUNNING
    with Deck(tmp_path / "state") as deck:
        assert {status.name: status.state for status in deck.list()} == {"fine": "running", "odd": "stopped"}
        current.rmdir() if current.is_dir() else current.unlink()
        assert deck.start("odd", FOREVER).state is State.RUNNING
        deck.stop_all()
