"""supervisor: one program section per worker, driven over its XML-RPC socket (faster than ``supervisorctl``)."""

import http.client
import socket
import time
import xmlrpc.client
from pathlib import Path

from bench.drivers.driver import Driver, Span, installed, wait_until
from bench.places import PEERS

_HEAD = """[unix_http_server]
file={dir}/s.sock
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[supervisord]
nodaemon=true
logfile={dir}/supervisord.log
pidfile={dir}/supervisord.pid
minfds={fds}
"""
_PROGRAM = """[program:{name}]
command={command}
autostart=false
autorestart=true
startsecs=0
stopasgroup=true
killasgroup=true
stopwaitsecs={grace:.0f}
redirect_stderr=true
stdout_logfile={dir}/{name}.log
stdout_logfile_maxbytes={log_bytes}
stdout_logfile_backups={log_keep}
"""


class Supervisor(Driver):
    """supervisord in the foreground, with its strongest stop options."""

    name = "supervisor"
    about = (
        "one `[program]` per worker, `startsecs=0`, `stopasgroup`, `killasgroup`; `startAllProcesses` over its socket"
    )
    most = 1000
    keeps_logs = True

    @classmethod
    def missing(cls) -> str | None:
        """Whether its environment is there."""
        return installed("supervisor", "bin/supervisord")

    def up(self) -> None:
        """Write the configuration and wait until the socket answers."""
        directory = self.plan.directory
        directory.mkdir(parents=True, exist_ok=True)
        fields = {"dir": directory, "grace": self.plan.grace_seconds, "log_bytes": self.plan.log_bytes}
        programs = [
            _PROGRAM.format(name=worker.name, command=" ".join(worker.command), log_keep=self.plan.log_keep, **fields)
            for worker in self.plan.workers
        ]
        head = _HEAD.format(dir=directory, fds=4 * len(programs) + 1024)
        (directory / "supervisord.conf").write_text(head + "".join(programs))
        (directory / "s.sock").unlink(missing_ok=True)
        self.launch([PEERS / "supervisor/bin/supervisord", "-c", directory / "supervisord.conf"])
        wait_until((directory / "s.sock").exists, "supervisord's socket", 60)

    def start(self) -> Span:
        """All at once, without its one-second look at each."""
        return self._call("startAllProcesses", wait=False)

    def stop(self) -> Span:
        """All, and wait."""
        return self._call("stopAllProcesses", wait=True)

    def log_files(self, name: str) -> list[Path]:
        """Its own rotation: .1 is the newest of the old ones."""
        live = self.plan.directory / f"{name}.log"
        old = sorted(self.plan.directory.glob(f"{name}.log.*"), key=lambda path: -int(path.suffix[1:]))
        return [*old, live]

    def _call(self, method: str, *, wait: bool) -> Span:
        begin_ns = time.monotonic_ns()
        proxy = xmlrpc.client.ServerProxy("http://supervisor", transport=_UnixTransport(self.plan.directory / "s.sock"))
        getattr(proxy.supervisor, method)(wait)
        return Span(begin_ns, time.monotonic_ns())


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: object) -> http.client.HTTPConnection:
        del host
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.connect(str(self._path))
        return connection
