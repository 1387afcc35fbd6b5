"""runit: one service directory per worker below one ``runsvdir``."""

import time
from pathlib import Path

from bench.drivers.driver import Driver, Span, installed, wait_until
from bench.drivers.s6 import kept_by_logger, write_logger, write_run
from bench.places import PEERS

_BIN = PEERS / "runit" / "usr" / "bin"


class Runit(Driver):
    """runsvdir with one runsv per worker."""

    name = "runit"
    about = "a service directory per worker, `run` is `#!/bin/sh` and `exec`; `runsvdir`, `sv force-stop`"
    most = 1000
    helpers = True
    keeps_logs = True

    @classmethod
    def missing(cls) -> str | None:
        """Whether the package was unpacked."""
        return installed("runit", "usr/bin/runsvdir")

    def up(self) -> None:
        """Write the service directories; runsvdir itself is launched by ``start``, as it starts what it finds."""
        self._services = self.plan.directory / "services"
        for worker in self.plan.workers:
            service = self._services / worker.name
            service.mkdir(parents=True, exist_ok=True)
            write_run(service, worker.command)
            if self.plan.keeps_logs:
                (service / "kept").mkdir(exist_ok=True)
                (service / "kept" / "config").write_text(f"s{self.plan.log_bytes}\nn{self.plan.log_keep}\n")
                write_logger(service, f"{_BIN}/svlogd {service}/kept")
        # runsvdir sleeps a second when its directory changed within the current one; that is not its price.
        wait_until(lambda: time.time() > self._services.stat().st_mtime + 2, "a second to pass")

    def start(self) -> Span:
        """Launch runsvdir."""
        begin_ns = time.monotonic_ns()
        self.launch([_BIN / "runsvdir", "-P", self._services], {"PATH": f"{_BIN}:/usr/bin:/bin"})
        return Span(begin_ns, time.monotonic_ns())

    def stop(self) -> Span:
        """``sv force-stop`` waits, and kills after the grace."""
        services = [self._services / worker.name for worker in self.plan.workers]
        return self.run([_BIN / "sv", "-w", f"{self.plan.grace_seconds:.0f}", "force-stop", *services])

    def log_files(self, name: str) -> list[Path]:
        """What svlogd keeps: archives named by their time, and the current file."""
        return kept_by_logger(self._services / name / "kept")
