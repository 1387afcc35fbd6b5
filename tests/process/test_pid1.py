"""The daemon as PID 1, as in a container: whose end is everybody's, and to whom orphans are given."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli_daemon import PATIENCE_SECONDS
from support.hung_mount import hung_mount
from support.waiting import until

# Leaves an orphan behind that ends at once: a zombie until PID 1 reaps it.
ORPHAN = "(sleep 0.2 &) ; exec sleep 1000"
# Takes its time, and writes down that it was asked politely.
POLITE = "trap 'echo asked > asked; exit 0' TERM; while :; do sleep 0.1; done"


class Container:
    """``everdeck up`` as PID 1 of a pid namespace of its own."""

    def __init__(self, home: Path) -> None:
        self.state = home / "state"
        self.log = home / "log"
        command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command += [sys.executable, "-m", "everdeck.cli", "--state", str(self.state), "up", "--no-http"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=home)
        until(self._is_up, "the daemon did not come up")

    def types(self, *words: str, code: int = 0) -> str:
        """A command, from outside of the namespace: the socket is a file."""
        command = [sys.executable, "-m", "everdeck.cli", "--state", str(self.state), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout

    def inside(self) -> list[tuple[int, str]]:
        """Pid inside and state of every process in the namespace."""
        daemon = self.daemon()
        wanted = Path(f"/proc/{daemon}/ns/pid").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "ns" / "pid").readlink() == wanted:
                    facts = dict(
                        line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line
                    )
                    found.append((int(facts["NSpid"].split()[-1]), facts["State"][0]))
        return found

    def daemon(self) -> int:
        """The daemon's pid outside."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "supervising" in self.log.read_text()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    """One that is gone afterwards."""
    with _contained(tmp_path) as container:
        yield container


@contextlib.contextmanager
def _contained(tmp_path: Path) -> Iterator[Container]:
    """One that is gone afterwards with everything in it: when PID 1 dies, the kernel kills the rest."""
    if os.getuid() != 0:
        pytest.skip("needs root for a pid namespace with its own /proc")
    container = Container(tmp_path)
    try:
        yield container
    finally:
        if container.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(container.daemon(), signal.SIGKILL)
            container.process.wait(PATIENCE_SECONDS)


def test_it_says_that_its_end_is_everybodys(container: Container) -> None:
    """Before anybody wonders."""
    until(lambda: "this is PID 1: SIGTERM stops every worker" in container.log.read_text())


def test_sigterm_stops_adoptable_workers_politely_and_they_come_back(container: Container, tmp_path: Path) -> None:
    """Each is asked by SIGTERM; the exit code says that all went; the next container starts them again."""
    container.types("start", "alice", "--cwd", str(tmp_path), "--", "sh", "-c", POLITE)
    os.kill(container.daemon(), signal.SIGTERM)
    assert container.process.wait(PATIENCE_SECONDS) == 0
    assert (tmp_path / "asked").read_text() == "asked\n"
    again = Container(tmp_path)
    try:
        (alice,) = json.loads(again.types("ps", "--json"))["workers"]
        assert alice["state"] == "running"
    finally:
        os.kill(again.daemon(), signal.SIGTERM)
        again.process.wait(PATIENCE_SECONDS)


def test_the_exit_code_is_1_when_somebody_could_not_be_stopped(tmp_path: Path) -> None:
    """A worker that survives SIGKILL, because what it waits for never answers, is told of and in the exit code."""

    def asks() -> bool:
        return any("request_wait_answer" in _waits_in(entry) for entry in _running(asked))

    asked = f"{tmp_path}/hung/x"
    with hung_mount(tmp_path / "hung") as server, _contained(tmp_path) as container:
        container.types("start", "stuck", "--grace", "0.1", "--", "cat", asked)
        until(asks, "nobody waits for the hung mount")
        os.kill(container.daemon(), signal.SIGTERM)
        until(lambda: "could not be stopped: stuck" in container.log.read_text(), "it was not told")
        server.kill()  # PID 1 has left; the kernel waits for everybody else in there
        assert container.process.wait(PATIENCE_SECONDS) == 1


def _running(argument: str) -> Iterator[Path]:
    """The processes that were given this argument."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and argument.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                yield entry


def _waits_in(process: Path) -> str:
    with contextlib.suppress(OSError):
        return (process / "wchan").read_text()
    return ""


def test_orphans_are_reaped_also_after_a_reload(container: Container) -> None:
    """No zombie stays, and the worker that made it runs on."""

    def zombies() -> list[int]:
        return [pid for pid, state in container.inside() if state == "Z"]

    container.types("start", "before", "--", "sh", "-c", ORPHAN)
    until(lambda: len(container.inside()) >= 2 and not zombies(), f"zombies: {zombies()}")
    container.types("reload")
    container.types("start", "after", "--", "sh", "-c", ORPHAN)
    until(lambda: len(container.inside()) >= 3 and not zombies(), f"zombies after a reload: {zombies()}")
    states = {one["name"]: one["state"] for one in json.loads(container.types("ps", "--json"))["workers"]}
    assert states == {"before": "running", "after": "running"}
