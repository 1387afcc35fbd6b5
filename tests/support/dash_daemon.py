"""A real daemon on loopback for tests of the page: ``everdeck up`` in a directory of its own, and its API.

Owns the daemon's process and, at the end, proves that none of its workers is left: ``close`` stops every worker through
the daemon (starting it once more if a test killed it) before it ends the daemon itself.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

LEAVE_SECONDS = 30.0


class Daemon:
    """``everdeck up`` on a port that stays the same over restarts."""

    def __init__(self, state_dir: Path, config: Path | None = None) -> None:
        self.state_dir = state_dir
        self.config = config
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._client: httpx.Client | None = None

    @property
    def token(self) -> str:
        """The deck's token."""
        return (self.state_dir / "token").read_text().strip()

    @property
    def login_link(self) -> str:
        """The link that ``everdeck up`` prints once."""
        return f"{self.base}/login#token={self.token}"

    @property
    def pid(self) -> int:
        """The daemon's pid."""
        assert self.process is not None
        return self.process.pid

    def up(self) -> None:
        """Start it and wait until it says that it is ready."""
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "everdeck.cli", "--state", str(self.state_dir), "up"]
        if self.config is not None:
            command.append(str(self.config))
        command += ["--listen", f"127.0.0.1:{self.port}"]
        self.state_dir.parent.mkdir(parents=True, exist_ok=True)
        with (self.state_dir.parent / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.state_dir.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
                env={**os.environ, "EVERDECK_READY_FD": str(write_fd)},
            )
        os.close(write_fd)
        with os.fdopen(read_fd) as pipe:
            said = pipe.readline()
        if not said.startswith("ready"):
            self.process.wait(LEAVE_SECONDS)
            log_text = (self.state_dir.parent / "daemon.log").read_text(errors="replace")
            raise AssertionError(f"the daemon did not come up:\n{log_text[-3000:]}")
        self._client = httpx.Client(
            base_url=f"{self.base}/api/v1",
            headers={"authorization": f"Bearer {self.token}", "accept": "application/json"},
            timeout=60,
        )

    def kill(self) -> None:
        """SIGKILL, as if by the OOM killer."""
        self._end(signal.SIGKILL)

    def leave(self) -> None:
        """SIGTERM: bound workers are stopped, adoptable ones are left running."""
        self._end(signal.SIGTERM)

    def close(self) -> None:
        """Stop every worker, then the daemon."""
        if self.process is None or self.process.poll() is not None:
            self.config = None
            self.up()
        with contextlib.suppress(httpx.HTTPError):
            self.post("/bulk", {"verb": "stop", "names": "all"})
        self.leave()

    def _end(self, number: signal.Signals) -> None:
        assert self.process is not None
        if self._client is not None:
            self._client.close()
            self._client = None
        self.process.send_signal(number)
        self.process.wait(LEAVE_SECONDS)

    # --- the API, as a test sees it ------------------------------------------------------------------------------

    def get(self, path: str, **query: Any) -> Any:
        """What the API answers."""
        return self._answered(self.client.get(path, params=query))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a verb."""
        return self._answered(self.client.post(path, json=body))

    def start(self, name: str, command: Sequence[str], **fields: Any) -> Any:
        """Start a worker."""
        return self.post("/workers", {"name": name, "spec": {"command": list(command), **fields}})

    def state(self, name: str) -> str:
        """The worker's state as the daemon says it."""
        return str(self.get(f"/workers/{name}")["state"])

    def names(self) -> set[str]:
        """All workers of the deck."""
        return {status["name"] for status in self.get("/workers")["workers"]}

    @property
    def client(self) -> httpx.Client:
        """An authorised client; only while the daemon is up."""
        assert self._client is not None, "the daemon is not up"
        return self._client

    @staticmethod
    def _answered(answer: httpx.Response) -> Any:
        assert answer.is_success, f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None


@contextlib.contextmanager
def daemon_at(state_dir: Path, config: Path | None = None) -> Iterator[Daemon]:
    """A daemon that is up, and gone afterwards with all its workers."""
    daemon = Daemon(state_dir, config)
    daemon.up()
    try:
        yield daemon
    finally:
        daemon.close()


def free_port() -> int:
    """A port of loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
