"""honcho: a Procfile with one line per worker."""

import contextlib
import signal
import subprocess
import time

from bench.drivers.driver import Driver, Span, installed
from bench.places import PEERS


class Honcho(Driver):
    """``honcho start``; it has no control channel, so stopping everything is ending it."""

    name = "honcho"
    about = "a Procfile line per worker; `honcho start`; SIGTERM to stop (its grace is fixed at 5 s); replaces nothing"
    most = 100
    restarts = False

    @classmethod
    def missing(cls) -> str | None:
        """Whether its environment is there."""
        return installed("honcho", "bin/honcho")

    def up(self) -> None:
        """Write the Procfile."""
        self.plan.directory.mkdir(parents=True, exist_ok=True)
        lines = [f"{worker.name}: exec {' '.join(worker.command)}\n" for worker in self.plan.workers]
        (self.plan.directory / "Procfile").write_text("".join(lines))

    def start(self) -> Span:
        """Launch it."""
        begin_ns = time.monotonic_ns()
        self.launch([PEERS / "honcho/bin/honcho", "start"])
        return Span(begin_ns, time.monotonic_ns())

    def stop(self) -> Span:
        """Ask it to leave, and wait for it."""
        begin_ns = time.monotonic_ns()
        for process in self.started:
            process.send_signal(signal.SIGTERM)
        # It waits for the end of its workers' output, which a surviving child keeps open without end.
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        return Span(begin_ns, time.monotonic_ns())
