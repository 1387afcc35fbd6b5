"""The limits: what starting, replacing and ending processes costs when nothing is promised."""

import subprocess
from pathlib import Path
from typing import ClassVar

from bench.drivers.driver import Driver, Kind, Span
from bench.drivers.hosted import Hosted
from bench.places import SPAWNLOOP, STAMP


class Popen(Hosted):
    """``subprocess.Popen`` in a loop."""

    name = "popen"
    kind: ClassVar[Kind] = "limit"
    about = "`subprocess.Popen(command)` in a loop; kill loop and wait; a pidfd in a selector for replacements"
    host = "popen_host"
    keeps_logs = True

    def log_files(self, name: str) -> list[Path]:
        """Its workers inherit its output, one plain file that is never rotated; with one worker, that worker's."""
        del name
        return [self.plan.directory / "manager.log"]


class PosixSpawn(Driver):
    """``posix_spawn`` in a loop in C."""

    name = "posix_spawn"
    kind: ClassVar[Kind] = "limit"
    about = "`posix_spawn` in a C loop; kill loop and wait; SIGCHLD for replacements"

    def up(self) -> None:
        """Start the loop's program; it waits for orders."""
        self.plan.directory.mkdir(parents=True, exist_ok=True)
        orders = self.plan.directory / "orders"
        orders.write_text("".join(f"{worker.order}\n" for worker in self.plan.workers))
        self._loop = subprocess.Popen(
            [SPAWNLOOP, STAMP, orders], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.started.append(self._loop)

    def start(self) -> Span:
        """Spawn all."""
        return self._ask("start")

    def stop(self) -> Span:
        """Kill and wait for all."""
        return self._ask("stop")

    def down(self) -> None:
        """End the loop; what it started is the nest's to end."""
        super().down()
        for pipe in (self._loop.stdin, self._loop.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, verb: str) -> Span:
        assert self._loop.stdin is not None  # noqa: S101 - both pipes were asked for above
        assert self._loop.stdout is not None  # noqa: S101
        self._loop.stdin.write(f"{verb}\n")
        begin_ns, end_ns = map(int, self._loop.stdout.readline().split())
        return Span(begin_ns, end_ns)
