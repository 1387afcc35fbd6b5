"""The one interface behind which every manager is measured.

A driver brings a manager up with a plan (nothing runs yet), asks it to start and to stop everything, can kill it as
the out-of-memory killer would, and takes it down. It answers with the span in which the manager was busy; when the
workers really began to run is read from the board, so no driver can flatter its manager.

Processes are children of the measurement's nest: whatever a driver forgets is gone when its measurement ends.
"""

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from bench.places import PEERS
from bench.plan import Plan
from bench.processes import descendants

Kind = Literal["limit", "library", "daemon", "peer"]


@dataclass(frozen=True, slots=True)
class Span:
    """From asking to having the answer, on the monotonic clock that all processes share."""

    begin_ns: int
    end_ns: int


class Driver(ABC):
    """One manager, driven the way its users drive it."""

    name: ClassVar[str]
    kind: ClassVar[Kind] = "peer"
    about: ClassVar[str]
    """How it is started, stopped and configured here; printed on the page."""
    most: ClassVar[int] = 5000
    """More workers than this are not asked of it: a limit of its own, or minutes of waiting."""
    restarts: ClassVar[bool] = True
    """Whether it replaces a worker that was killed."""
    adopts: ClassVar[bool] = False
    """Whether a new manager takes over the old one's workers, so that opening again can be timed."""
    helpers: ClassVar[bool] = False
    """Whether it keeps a process per worker beside the worker, which the out-of-memory killer may choose as well."""

    keeps_logs: ClassVar[bool] = False
    """Whether it keeps its workers' output, so that :meth:`output` can give it back."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.started: list[subprocess.Popen[str]] = []

    @classmethod
    def missing(cls) -> str | None:
        """Why this manager cannot be measured here, or None."""
        return None

    @abstractmethod
    def up(self) -> None:
        """Bring the manager up, knowing the plan, with no worker running."""

    @abstractmethod
    def start(self) -> Span:
        """Ask it to start every worker of the plan."""

    @abstractmethod
    def stop(self) -> Span:
        """Ask it to stop every worker; returns when it says so."""

    def again(self) -> Span:
        """After a crash of the manager: bring it up and ask for the same workers, as an init system would."""
        begin_ns = time.monotonic_ns()
        self.up()
        self.start()
        return Span(begin_ns, time.monotonic_ns())

    def reopen(self) -> Span:
        """After a crash of a manager that adopts: the time until it knows its workers again."""
        raise NotImplementedError(f"{self.name} does not adopt")

    def roots(self) -> list[int]:
        """The manager's own top processes."""
        return [process.pid for process in self.started if process.poll() is None]

    def managers(self, workers: set[int]) -> set[int]:
        """All processes on the manager's side: the roots and what descends from them, less the workers."""
        return descendants(self.roots()) - workers

    def kill_manager(self) -> None:
        """SIGKILL to the manager's top processes: no handler runs, nothing is written."""
        for pid in self.roots():
            os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait()
        self.started.clear()

    def kill_with_helpers(self, workers: set[int]) -> None:
        """The same, with every helper process."""
        for pid in self.managers(workers):
            os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait()
        self.started.clear()

    def down(self) -> None:
        """End the manager; the nest ends what is left."""
        for process in self.started:
            process.kill()
            process.wait()
        self.started.clear()

    def output(self, name: str) -> bytes:
        """Everything that was kept of a worker's output, in order."""
        return b"".join(path.read_bytes() for path in self.log_files(name))

    def log_files(self, name: str) -> list[Path]:
        """The files that hold a worker's output, oldest first."""
        raise NotImplementedError(f"{self.name} keeps no log of {name}")

    # --- for the drivers --------------------------------------------------------------------------------------

    def launch(self, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Run a manager process in the plan's directory, with its own output in ``manager.log`` there."""
        self.plan.directory.mkdir(parents=True, exist_ok=True)
        with (self.plan.directory / "manager.log").open("ab") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=self.plan.directory,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def run(self, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Span:
        """Run a control command to its end."""
        begin_ns = time.monotonic_ns()
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.plan.directory,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        end_ns = time.monotonic_ns()
        with (self.plan.directory / "control.log").open("a") as log:
            log.write(f"$ {' '.join(map(str, command))[:300]}\n{done.stdout}{done.stderr}[{done.returncode}]\n")
        return Span(begin_ns, end_ns)


def wait_until(fact: Callable[[], bool], what: str, timeout_seconds: float = 30) -> None:
    """Poll for a fact that offers no descriptor to wait on; only ever called while no clock runs."""
    deadline = time.monotonic() + timeout_seconds
    while not fact():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_seconds:g} s")
        time.sleep(0.01)


def installed(peer: str, program: str) -> str | None:
    """A driver's answer to ``missing``: None when the peer's program is there."""
    path = PEERS / peer / program
    return None if path.exists() else f"{peer} is not installed ({path.relative_to(PEERS.parent)} is missing)"
