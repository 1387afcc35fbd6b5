"""What a worker says is heard, and only as that worker: real senders, the kernel's word on who they are."""

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from everdeck.kernel import containment
from everdeck.kernel import identity as ids
from everdeck.kernel.containment import Tree
from everdeck.kernel.notify import NotifySocket, address_for, parsed, speaker, tells_pidfds

if TYPE_CHECKING:
    from everdeck.model import Cookie

SOURCE = str(Path(__file__).parents[2] / "src")
SAY = "import sys; from everdeck.child import notify; assert notify('READY=1'); sys.stdin.read()"


class Workers:
    """Processes that stand for workers, as the deck would know them."""

    def __init__(self, ear: NotifySocket, tmp_path: Path) -> None:
        self.ear = ear
        self.tmp_path = tmp_path
        self.by_leader: dict[int, Tree] = {}
        self.by_cookie: dict[Cookie, Tree] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.cgroups: list[Path] = []

    def start(self, name: str, command: list[str], *, cgroup: Path | None = None) -> subprocess.Popen[bytes]:
        """A worker, known by its identity and cookie, and moved into its cgroup if it has one."""
        cookie = containment.new_cookie()
        process = self.run(command, {"EVERDECK_COOKIE": cookie})
        if cgroup is not None:
            assert containment.make_cgroup(cgroup)
            self.cgroups.append(cgroup)
            assert containment.enter_cgroup(cgroup, process.pid)
        pidfd = ids.open_pidfd(process.pid)
        tree = Tree(name, cookie, self.tmp_path / "lock", ids.identity_of(pidfd, process.pid), cgroup)
        os.close(pidfd)
        self.by_leader[process.pid] = self.by_cookie[cookie] = tree
        return process

    def run(self, command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """A process that is no worker of its own."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": SOURCE, "NOTIFY_SOCKET": self.ear.address, **(env or {})},
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def heard(self) -> list[tuple[str | None, dict[str, str]]]:
        """Wait until something is said, and say who said it."""
        assert select.select([self.ear], [], [], 30)[0], "nobody spoke"
        return [(speaker(said, self.by_leader, self.by_cookie), said.fields) for said in self.ear.receive()]

    def end(self) -> None:
        """End every process of the test."""
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for path in self.cgroups:
            containment.kill_cgroup(path)
            path.rmdir()


@pytest.fixture
def ear() -> Iterator[NotifySocket]:
    """A deck's ear, in a directory that other users can pass through, as a state directory with such workers is."""
    with tempfile.TemporaryDirectory(prefix="everdeck-test-", dir="/tmp") as directory:
        Path(directory).chmod(0o711)
        listening = NotifySocket(Path(directory))
        yield listening
        listening.close()


@pytest.fixture
def workers(ear: NotifySocket, tmp_path: Path) -> Iterator[Workers]:
    """Workers that end with the test."""
    started = Workers(ear, tmp_path)
    yield started
    started.end()


def test_each_worker_is_heard_as_itself(workers: Workers) -> None:
    """Two workers say the same; the kernel's credentials tell them apart."""
    heard = []
    for name in ("alice", "bob"):
        workers.start(name, [sys.executable, "-c", SAY])
        heard += workers.heard()
    assert heard == [("alice", {"READY": "1"}), ("bob", {"READY": "1"})]


def test_a_stranger_is_nobody(workers: Workers) -> None:
    """A process that can reach the socket but is no worker speaks for nobody."""
    workers.start("alice", ["sleep", "60"])
    workers.run([sys.executable, "-c", SAY])
    assert workers.heard() == [(None, {"READY": "1"})]


@pytest.mark.parametrize(
    "through",
    [
        pytest.param('{python} -c "{say}"', id="a child"),
        pytest.param('setsid {python} -c "{say}"', id="a child in another session"),
        pytest.param('env -u EVERDECK_COOKIE {python} -c "{say}"', id="a child without the cookie"),
    ],
)
def test_a_helper_speaks_for_its_worker(workers: Workers, through: str) -> None:
    """Whatever the worker forked may speak for it: found by the cookie, or by its ancestors."""
    workers.start("bob", ["sleep", "60"])
    command = through.format(python=sys.executable, say=SAY)
    workers.start("alice", ["sh", "-c", f"{command}; exit"])
    assert workers.heard() == [("alice", {"READY": "1"})]


@pytest.mark.skipif(shutil.which("systemd-notify") is None, reason="systemd-notify is not installed")
@pytest.mark.parametrize("user", [None, "nobody"])
def test_systemd_notify_is_heard(workers: Workers, user: str | None) -> None:
    """The short-lived program of shell scripts waits for us (BARRIER=1), and is let go once it was heard."""
    say = "systemd-notify --ready --status='up and well'"
    if user is not None:
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("becoming another user needs root and setpriv")
        say = f"setpriv --reuid=nobody --clear-groups {say}"
    process = workers.start("alice", ["sh", "-c", f"{say}; exec sleep 60"])
    heard = workers.heard()
    while not any("BARRIER" in fields for _, fields in heard):
        heard += workers.heard()
    assert heard[0] == ("alice", {"READY": "1", "STATUS": "up and well"})
    assert process.poll() is None


def test_a_sender_that_is_gone_is_known_by_its_cgroup(workers: Workers, tmp_path: Path) -> None:
    """A helper said it and died before anybody looked: since Linux 6.15 its pidfd remembers the cgroup."""
    home = containment.cgroup_home()
    if home is None:
        pytest.skip("no writable cgroup v2 directory")
    say = "import os, sys; from everdeck.child import notify; sys.stdin.readline(); os.fork() or notify('READY=1')"
    worker = workers.start(
        "alice", [sys.executable, "-c", f"{say}; os._exit(0)"], cgroup=home / f"everdeck-test-{os.getpid()}"
    )
    assert worker.stdin is not None
    worker.stdin.write(b"go\n")
    worker.stdin.flush()
    worker.wait()
    assert select.select([workers.ear], [], [], 30)[0]
    for said in workers.ear.receive():
        assert (said.pidfd is not None) is tells_pidfds()
        if said.pidfd is None:
            pytest.skip("below Linux 6.5 a notification comes without its sender's pidfd")
        while not ids.is_readable(said.pidfd):
            assert select.select([said.pidfd], [], [], 30)[0]
        # Reaped by whoever is pid 1 or the nearest subreaper here, as soon as that one looks.
        name = speaker(said, workers.by_leader, workers.by_cookie)
        if name is None:
            pytest.skip("this kernel's pidfd does not remember the cgroup of a process that ended")
        assert name == "alice"


def test_the_address_survives_its_owner(workers: Workers) -> None:
    """A worker started under one owner is heard by the next, which takes the same place."""
    worker = workers.start(
        "alice",
        [
            sys.executable,
            "-c",
            "import sys; from everdeck.child import notify; [notify('STATUS=' + word.strip()) for word in sys.stdin]",
        ],
    )
    assert worker.stdin is not None
    worker.stdin.write(b"first\n")
    worker.stdin.flush()
    assert workers.heard() == [("alice", {"STATUS": "first"})]
    first, workers.ear = workers.ear, NotifySocket(Path(workers.ear.address).parent)
    try:
        first.close()  # too late to take the name away from the new owner
        worker.stdin.write(b"second\n")
        worker.stdin.flush()
        assert workers.heard() == [("alice", {"STATUS": "second"})]
    finally:
        workers.ear.close()
    assert not Path(workers.ear.address).exists()


def test_what_was_said_during_an_exec_in_place_is_not_lost(workers: Workers) -> None:
    """The descriptor can be carried over an exec; its queue is carried with it."""
    workers.start("alice", [sys.executable, "-c", SAY])
    assert select.select([workers.ear], [], [], 30)[0]
    after = NotifySocket.inherited(os.dup(workers.ear.fileno()), Path(workers.ear.address).parent)
    try:
        assert [said.fields for said in after.receive()] == [{"READY": "1"}]
    finally:
        after.close()


def test_a_deep_state_directory_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address holds 107 bytes; a state directory of more than 200 gets a short one, always the same."""
    assert address_for(tmp_path) == f"{tmp_path}/notify.sock"
    short = Path("/tmp") / f"everdeck-test-{os.getpid()}"
    monkeypatch.setenv("EVERDECK_RUNTIME_DIR", str(short))
    deep = tmp_path.joinpath(*["x" * 50] * 4)
    deep.mkdir(parents=True)
    try:
        assert len(os.fsencode(address_for(deep))) <= 107
        assert address_for(deep) == address_for(deep)
        listening = NotifySocket(deep)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
            mouth.sendto(b"READY=1", listening.address)
        (said,) = listening.receive()
        assert (said.pid, said.uid, said.fields) == (os.getpid(), os.getuid(), {"READY": "1"})
        listening.close()
    finally:
        shutil.rmtree(short, ignore_errors=True)


def test_a_reused_pid_is_not_taken_for_the_leader(workers: Workers) -> None:
    """A leader is known by its start time too: whoever has its pid later is a stranger."""
    process = workers.run([sys.executable, "-c", SAY])
    old = Tree(
        "alice",
        containment.new_cookie(),
        workers.tmp_path / "lock",
        ids.Identity(ids.boot_id(), process.pid, 1, None),
    )
    workers.by_leader[process.pid] = old
    assert workers.heard() == [(None, {"READY": "1"})]


def test_descriptors_that_come_along_are_closed(workers: Workers) -> None:
    """FDSTORE and other gifts are not kept; nothing leaks, and a truncated message is dropped."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        mouth.connect(workers.ear.address)
        for _ in range(3):
            socket.send_fds(mouth, [b"FDSTORE=1"], [0, 1, 2])
        mouth.send(b"X" * 100_000)
        mouth.send(b"STATUS=after")
        fields = [said.fields for said in workers.ear.receive()]
    assert fields == [{"FDSTORE": "1"}] * 3 + [{"STATUS": "after"}]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (b"", {}),
        (b"READY=1\nSTATUS=a=b\n", {"READY": "1", "STATUS": "a=b"}),
        (b"nonsense\n=x\nSTATUS=", {"STATUS": ""}),
        (b"STATUS=\x1b[31mred\x00\xff", {"STATUS": " [31mred \N{REPLACEMENT CHARACTER}"}),
        (b"STATUS=one\nSTATUS=two", {"STATUS": "two"}),
    ],
)
def test_parsing(data: bytes, fields: dict[str, str]) -> None:
    """A line per field; what is none is left out; nothing can reach a terminal as an escape sequence."""
    assert parsed(data) == fields


def test_silence_does_not_block(ear: NotifySocket) -> None:
    """Receiving from a silent socket ends at once: it never holds up the owner's loop."""
    assert list(ear.receive()) == []
