"""Drivers of libraries: the library runs in a host process that takes orders over a pipe (``hosts/protocol.py``)."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, ClassVar

from bench.drivers.driver import Driver, Span
from bench.places import REPO
from bench.plan import Plan


class Hosted(Driver):
    """A library inside its host."""

    host: ClassVar[str]

    @classmethod
    def python(cls) -> Path:
        """The interpreter that has the library."""
        return Path(sys.executable)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._pipes: list[IO[str]] = []

    def up(self) -> None:
        """Start the host and open the library with the plan."""
        self._hang_up()
        self.plan.directory.mkdir(parents=True, exist_ok=True)
        to_host, from_harness = os.pipe(), os.pipe()
        environment = {**os.environ, "BENCH_HOST_FDS": f"{to_host[0]},{from_harness[1]}", **self.plan.options}
        with (self.plan.directory / "manager.log").open("ab") as log:
            host = subprocess.Popen(
                [self.python(), "-m", f"bench.hosts.{self.host}"],
                cwd=REPO,
                pass_fds=(to_host[0], from_harness[1]),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        os.close(to_host[0])
        os.close(from_harness[1])
        self.started.append(host)
        self._requests = os.fdopen(to_host[1], "w", buffering=1)
        self._answers = os.fdopen(from_harness[0])
        self._pipes = [self._requests, self._answers]
        self.opened = self.ask(
            "up",
            directory=str(self.plan.directory),
            grace_seconds=self.plan.grace_seconds,
            log_bytes=self.plan.log_bytes,
            log_keep=self.plan.log_keep,
            workers=[(worker.name, worker.command) for worker in self.plan.workers],
        )

    def start(self) -> Span:
        """Start every worker, timed by the host."""
        return _span(self.ask("start"))

    def stop(self) -> Span:
        """Stop every worker, timed by the host."""
        return _span(self.ask("stop"))

    def down(self) -> None:
        """End the host."""
        self._hang_up()
        super().down()

    def reopen(self) -> Span:
        """A new host opens the library; the host's own start is not timed."""
        self.up()
        return _span(self.opened)

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """One request and its answer."""
        self._requests.write(json.dumps({"verb": verb, **fields}) + "\n")
        line = self._answers.readline()
        if not line:
            tail = (self.plan.directory / "manager.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the {self.name} host ended during {verb!r}:\n{tail}")
        result: dict[str, Any] = json.loads(line)
        return result

    def _hang_up(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # the host was killed with a request half read
                pipe.close()
        self._pipes = []


def _span(answered: dict[str, Any]) -> Span:
    return Span(answered["begin_ns"], answered["end_ns"])
