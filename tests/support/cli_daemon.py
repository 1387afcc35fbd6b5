"""The installed command, driven as a person drives it, and a deck that leaves nothing behind.

``Person`` types ``everdeck …`` with one state directory. Whatever a test starts in there is ended when the test ends,
by pid and through pidfds: the daemon, its guardian and every process that carries the directory in its environment.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.waiting import until as until  # noqa: PLC0414 - also found here by those who drive the command

EVERDECK = Path(sys.executable).parent / "everdeck"
PATIENCE_SECONDS = 60.0


class Person:
    """Somebody at a terminal, working on one deck."""

    def __init__(self, state: Path, **env: str) -> None:
        self.state = state
        self.env = {key: value for key, value in os.environ.items() if not key.startswith("EVERDECK_")} | env
        self.env.pop("NOTIFY_SOCKET", None)

    def types(
        self, *words: str | Path | int, expect: int | None = 0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run one command and look at its exit code."""
        command = [str(EVERDECK), "--state", str(self.state), *map(str, words)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.env, timeout=PATIENCE_SECONDS, check=False, **options
        )
        if expect is not None:
            assert done.returncode == expect, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def up(self, *words: str) -> int:
        """Start the daemon in the background; returns its pid."""
        self.types("up", "--detach", *(words or ("--no-http",)))
        return self.owner()

    def seen(self) -> dict[str, Any]:
        """What ``ps --json`` says."""
        found: dict[str, Any] = json.loads(self.types("ps", "--json").stdout)
        return found

    def worker(self, name: str) -> dict[str, Any]:
        """One worker of ``ps --json``."""
        return next(worker for worker in self.seen()["workers"] if worker["name"] == name)

    def owner(self) -> int:
        """The pid of the deck's owner."""
        owner = self.seen()["owner_pid"]
        assert owner is not None
        return int(owner)

    def kills(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Signal a process of this deck and wait until it is gone."""
        with pidfd_of(pid) as pidfd:
            signal.pidfd_send_signal(pidfd, number)
            assert select.select([pidfd], [], [], PATIENCE_SECONDS)[0], f"pid {pid} did not end"

    def leaves(self) -> None:
        """End everything of this deck. Repeated until nothing is found: what dies may have started something."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while pids := processes_of(self.state):
            assert time.monotonic() < deadline, f"still alive: {pids}"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    self.kills(pid)


@contextlib.contextmanager
def pidfd_of(pid: int) -> Iterator[int]:
    """A pidfd, closed at the end."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def processes_of(state: Path) -> list[int]:
    """Every live process that belongs to the deck: by its command line or by its environment."""
    place = os.fsencode(str(state))
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = Path(entry.path, "cmdline").read_bytes()
            environment = Path(entry.path, "environ").read_bytes()
            dead = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()[0] in {b"Z", b"X"}
        except OSError:
            continue
        is_everdeck = b"everdeck" in words and place in words
        if not dead and (is_everdeck or b"EVERDECK_DIR=" + place in environment):
            found.append(int(entry.name))
    return found


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def unix_socket(state: Path) -> socket.socket:
    """A raw connection to the deck's owner."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_SECONDS)
    directory = os.open(state, os.O_PATH)
    try:
        connection.connect(f"/proc/self/fd/{directory}/http.sock")
    finally:
        os.close(directory)
    return connection


def raw_request(connection: socket.socket, head: str, body: bytes = b"") -> bytes:
    """Send bytes as they are and read until the peer closes."""
    connection.sendall(head.replace("\n", "\r\n").encode() + body)
    answer = b""
    while block := connection.recv(65536):
        answer += block
    return answer
