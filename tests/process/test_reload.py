"""Replacing the running daemon: who is asking meanwhile is answered, and what cannot succeed does not begin."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck.clock import Clock
from everdeck.kernel import unixsocket
from everdeck.server import fitness
from everdeck.wire.client import WireClient
from everdeck.wire.frames import Cutter, Welcome, decode_answered
from support.cli_daemon import EVERDECK, PATIENCE_SECONDS, Person
from support.web_served import Served, served_at

RELOADS = int(os.environ.get("EVERDECK_TEST_RELOADS", "3"))
CLIENTS = 4


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A daemon on TCP."""
    with served_at(tmp_path / "state") as served:
        yield served


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    """Somebody with a deck that has no daemon yet."""
    person = Person(tmp_path / "state")
    try:
        yield person
    finally:
        person.leaves()


@contextlib.contextmanager
def asking(served: Served, failures: list[str], counts: list[int]) -> Iterator[None]:
    """Some threads that ask again and again, each time over a new connection."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_SECONDS)
            try:
                connection.request("GET", "/healthz")
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    failures.append(f"status {answer.status}")
            except OSError as error:
                failures.append(repr(error))
            finally:
                connection.close()
            counts.append(1)

    threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_reload_resets_no_connection(served: Served) -> None:
    """Fresh connections all the time, through several reloads: each is answered."""
    failures: list[str] = []
    counts: list[int] = []
    with asking(served, failures, counts):
        for _ in range(RELOADS):
            served.person.types("reload")
    assert len(counts) > RELOADS
    assert failures == []


def test_a_connection_without_a_request_outlives_a_reload(served: Served) -> None:
    """One that has never spoken, and one that was kept after an answer, are both answered by the next image."""
    request = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n".encode()
    with served.socket() as silent, served.socket() as kept:
        answered(kept, request)
        served.person.types("reload")
        for connection in (silent, kept):
            answered(connection, request)


def answered(connection: socket.socket, request: bytes) -> None:
    """Ask, and read the whole answer."""
    connection.sendall(request)
    answer = b""
    while not answer.endswith(b"}"):
        block = connection.recv(4096)
        assert block, answer
        answer += block
    assert answer.startswith(b"HTTP/1.1 200")


def test_whoever_connects_to_the_deck_while_the_next_image_loads_is_answered(tmp_path: Path, person: Person) -> None:
    """Its socket is never refused: the question waits in the kernel's queue, however long the image takes."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    hold = f"import os\nif 'EVERDECK_HANDED_OVER' in os.environ: open({str(gate)!r}).read()\n"
    (tmp_path / "sitecustomize.py").write_text(hold)
    person.env["PYTHONPATH"] = str(tmp_path)
    first = person.up()
    reload = subprocess.Popen([str(EVERDECK), "--state", str(person.state), "reload"], env=person.env)
    with gate.open("w"):  # returns when the next image has come to its gate
        waiting = unixsocket.connect(person.state, "deck.sock", PATIENCE_SECONDS)
    with waiting:
        (welcome,) = Cutter(1 << 20).feed(waiting.recv(65536))
        told = decode_answered(welcome)
    assert isinstance(told, Welcome)
    assert told.owner_pid == first
    assert reload.wait(PATIENCE_SECONDS) == 0


def test_a_socket_that_was_removed_is_there_again_after_a_reload(person: Person) -> None:
    """What is handed on is of use only under its name."""
    person.up()
    (person.state / "deck.sock").unlink()
    person.types("reload")
    with WireClient(person.state) as client:
        client.connect()


def test_a_request_under_way_is_finished_first(served: Served) -> None:
    """Half a request at the moment of the reload: its other half comes, and it is answered."""
    head = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n".encode()
    with served.socket() as half:
        half.sendall(head[:20])
        reloading = threading.Thread(target=served.person.types, args=("reload",))
        reloading.start()
        half.sendall(head[20:])
        assert half.recv(4096).startswith(b"HTTP/1.1 200")
        reloading.join()


def test_a_reload_that_cannot_succeed_does_not_begin(served: Served) -> None:
    """The registry cannot be written: it is refused with the reason, and everybody is supervised as before."""
    person = served.person
    person.types("start", "bound", "--bound", "--", "sleep", "1000")
    owner, worker = person.owner(), person.worker("bound")["pid"]
    with unwritable(person.state / "deck.db"):
        refused = person.types("reload", expect=1)
        assert "not taken" in refused.stderr
        assert person.owner() == owner
        assert person.worker("bound")["pid"] == worker
    person.types("reload")
    assert person.worker("bound")["pid"] == worker


def test_a_configuration_that_became_wrong_is_found_before_the_reload(tmp_path: Path) -> None:
    """The next image is started as it will be, with its file; a mistake in it keeps the running one."""
    config = tmp_path / "everdeck.toml"
    config.write_text('[worker.alice]\ncommand = ["sleep", "1000"]\n')
    with served_at(tmp_path / "state", config=config) as served:
        pid = served.person.worker("alice")["pid"]
        config.write_text('[worker.alice]\ncommand = ["sleep", "1000"]\n[server]\nnonsense = 1\n')
        refused = served.person.types("reload", expect=1)
        assert "nonsense" in refused.stderr
        assert served.person.worker("alice")["pid"] == pid


def test_a_module_that_hides_one_of_ours_is_found_before_the_reload(tmp_path: Path, person: Person) -> None:
    """No file of the running code has changed, and the next image would not start all the same."""
    person.env["PYTHONPATH"] = str(tmp_path)
    owner = person.up()
    (tmp_path / "uvicorn.py").write_text("raise RuntimeError('this is not the one')\n")
    assert "this is not the one" in person.types("reload", expect=1).stderr
    assert person.owner() == owner


def test_code_is_the_same_until_a_file_or_a_folder_of_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever times somebody gives to a file, the kernel knows when it was changed; a stepped clock proves nothing."""
    code, wall, boot = tmp_path / "code.py", Clock().wall(), Clock().boottime()
    code.touch()
    monkeypatch.setattr(fitness, "_made_of", lambda: [str(tmp_path), str(code)])
    monkeypatch.setattr(fitness, "_STARTED", (wall + 60, boot + 60))
    assert fitness.is_same_code()
    monkeypatch.setattr(fitness, "_STARTED", (wall + 60, boot))
    assert not fitness.is_same_code()
    monkeypatch.setattr(fitness, "_STARTED", (wall, boot))
    os.utime(code, (0, 0))
    assert not fitness.is_same_code()
    monkeypatch.setattr(fitness, "_STARTED", (wall + 60, boot + 60))
    code.unlink()
    assert not fitness.is_same_code()


def test_the_running_code_is_known_down_to_its_folders() -> None:
    """Files of every module, data of the package, and the folders in which a module could come to hide another."""
    made_of = set(fitness._made_of())
    assert {fitness.__file__, str(Path(fitness.__file__).parent), sys.executable} <= made_of
    assert any(name.endswith(".sql") for name in made_of)
    assert {place for place in sys.path if Path(place).exists()} <= made_of


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """A file that nobody may write, root included: a read-only bind mount over itself, in our mount namespace."""
    done = subprocess.run(["mount", "--bind", path, path], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs to mount: {done.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True, capture_output=True)
        yield
    finally:
        subprocess.run(["umount", path], check=True)
