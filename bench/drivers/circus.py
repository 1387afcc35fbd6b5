"""circus: one watcher per worker, driven over its own client."""

import time
from pathlib import Path

from bench.drivers.driver import Span, installed
from bench.drivers.hosted import Hosted
from bench.places import PEERS

_HEAD = """[circus]
endpoint = ipc://{dir}/c.sock
pubsub_endpoint = ipc://{dir}/p.sock
statsd = false
warmup_delay = 0
"""
_WATCHER = """[watcher:{name}]
cmd = {program}
args = {order}
numprocesses = 1
autostart = false
warmup_delay = 0
graceful_timeout = {grace}
stop_children = true
max_retry = -1
stdout_stream.class = FileStream
stdout_stream.filename = {dir}/{name}.log
stdout_stream.max_bytes = {log_bytes}
stdout_stream.backup_count = {log_keep}
"""


class Circus(Hosted):
    """circusd, with its client held open in a host so that no command start is timed."""

    name = "circus"
    about = "one `[watcher]` per worker, `warmup_delay = 0`, `stop_children`; `start` and `stop` by its own client"
    host = "circus_host"
    most = 1000
    keeps_logs = True

    @classmethod
    def missing(cls) -> str | None:
        """Whether its environment is there."""
        return installed("circus", "bin/circusd")

    @classmethod
    def python(cls) -> Path:
        """Its own environment's interpreter."""
        return PEERS / "circus" / "bin" / "python"

    def up(self) -> None:
        """Write the configuration, start circusd, and wait until it answers its client."""
        directory = self.plan.directory
        directory.mkdir(parents=True, exist_ok=True)
        watchers = [
            _WATCHER.format(
                name=worker.name,
                program=worker.command[0],
                order=worker.order,
                grace=self.plan.grace_seconds,
                dir=directory,
                log_bytes=self.plan.log_bytes,
                log_keep=self.plan.log_keep,
            )
            for worker in self.plan.workers
        ]
        (directory / "circus.ini").write_text(_HEAD.format(dir=directory) + "".join(watchers))
        self._daemon = self.launch([PEERS / "circus/bin/circusd", directory / "circus.ini"])
        super().up()

    def roots(self) -> list[int]:
        """The daemon; the client's host is the harness's."""
        return [self._daemon.pid] if self._daemon.poll() is None else []

    def again(self) -> Span:
        """As every peer; the old client's host is let go first."""
        begin_ns = time.monotonic_ns()
        self.up()
        self.start()
        return Span(begin_ns, time.monotonic_ns())

    def kill_manager(self) -> None:
        """Only the daemon: the client is not part of the manager."""
        self._daemon.kill()
        self._daemon.wait()

    def log_files(self, name: str) -> list[Path]:
        """Its own rotation: .1 is the newest of the old ones."""
        live = self.plan.directory / f"{name}.log"
        old = sorted(self.plan.directory.glob(f"{name}.log.*"), key=lambda path: -int(path.suffix[1:]))
        return [*old, live]
