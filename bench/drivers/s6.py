"""s6: one service directory per worker below one ``s6-svscan``."""

import os
import time
from pathlib import Path

from bench.drivers.driver import Driver, Span, installed, wait_until
from bench.places import PEERS

_ROOT = PEERS / "s6"


def s6_environment() -> dict[str, str]:
    """Its programs call each other by name and share libraries from where the package was unpacked."""
    libraries = [str(path) for path in (_ROOT / "usr/lib").glob("*-linux-*")] + [str(_ROOT / "usr/lib")]
    return {
        "PATH": f"{_ROOT / 'usr/bin'}:{_ROOT / 'bin'}:{os.environ.get('PATH', '')}",
        "LD_LIBRARY_PATH": ":".join(libraries),
    }


class S6(Driver):
    """s6-svscan with one s6-supervise per worker."""

    name = "s6"
    about = (
        "a service directory per worker, `run` is `#!/bin/sh` and `exec`; "
        "`s6-svscanctl -a` to start, `d` into each control fifo (as `s6-svc -d`) to stop"
    )
    helpers = True
    keeps_logs = True

    @classmethod
    def missing(cls) -> str | None:
        """Whether the package was unpacked."""
        return installed("s6", "usr/bin/s6-svscan")

    def up(self) -> None:
        """Write the service directories and start the scanner on an empty directory."""
        self._scan = self.plan.directory / "scan"
        self._scan.mkdir(parents=True, exist_ok=True)
        programs = self.plan.directory / "bin"  # where the scanner finds s6-supervise, see install.py
        if not programs.is_symlink():
            programs.symlink_to(_ROOT / "usr/bin")
        for worker in self.plan.workers:
            service = self.plan.directory / "services" / worker.name
            service.mkdir(parents=True, exist_ok=True)
            write_run(service, worker.command)
            if self.plan.keeps_logs:
                write_logger(service, f"s6-log n{self.plan.log_keep} s{self.plan.log_bytes} {service}/kept")
            (service / "timeout-kill").write_text(f"{self.plan.grace_seconds * 1000:.0f}\n")
        self.launch(["s6-svscan", "-c", str(len(self.plan.workers) + 100), self._scan], s6_environment())
        wait_until((self._scan / ".s6-svscan" / "control").exists, "s6-svscan's fifo")

    def start(self) -> Span:
        """Link the services in and have them scanned."""
        for worker in self.plan.workers:
            link = self._scan / worker.name
            if not link.is_symlink():
                link.symlink_to(self.plan.directory / "services" / worker.name)
        return self.run(["s6-svscanctl", "-a", self._scan], s6_environment())

    def stop(self) -> Span:
        """Order each service down as ``s6-svc -d`` does: one letter into its fifo, without a process per service."""
        begin_ns = time.monotonic_ns()
        for worker in self.plan.workers:
            fifo = os.open(self._scan / worker.name / "supervise" / "control", os.O_WRONLY | os.O_NONBLOCK)
            os.write(fifo, b"d")
            os.close(fifo)
        return Span(begin_ns, time.monotonic_ns())

    def log_files(self, name: str) -> list[Path]:
        """What s6-log keeps: archives named by their time, and the current file."""
        return kept_by_logger(self.plan.directory / "services" / name / "kept")


def write_logger(service: Path, command: str) -> None:
    """A logger process beside the worker, fed through a pipe that the supervisor holds."""
    log = service / "log"
    log.mkdir(exist_ok=True)
    (log / "run").write_text(f"#!/bin/sh\nexec {command}\n")
    (log / "run").chmod(0o755)


def kept_by_logger(directory: Path) -> list[Path]:
    """Archives begin with ``@`` and a time that sorts."""
    return [*sorted(directory.glob("@*")), directory / "current"]


def write_run(service: Path, command: list[str]) -> None:
    """A ``run`` file as the manuals write it: a shell that becomes the worker.

    With the worker itself as the file's interpreter a start takes about 0.8 ms instead; nobody's services look so.
    """
    run = service / "run"
    run.write_text(f"#!/bin/sh\nexec {' '.join(command)}\n")
    run.chmod(0o755)
