"""pm2: an ecosystem file with one app per worker, driven by its command."""

import json
import os
import subprocess
from pathlib import Path

from bench.drivers.driver import Driver, Span, installed
from bench.places import PEERS
from bench.processes import alive

_PM2 = PEERS / "pm2" / "node_modules" / ".bin" / "pm2"


class Pm2(Driver):
    """The daemon ("God") in a home of its own, so that nobody else's pm2 is touched."""

    name = "pm2"
    about = (
        "one app per worker, `interpreter: none`, fork mode; `pm2 start FILE`, `pm2 stop all`, `save` and `resurrect`"
    )
    most = 1000
    keeps_logs = True

    @classmethod
    def missing(cls) -> str | None:
        """Whether it is there."""
        return installed("pm2", "node_modules/.bin/pm2")

    def up(self) -> None:
        """Write the apps and start the daemon."""
        self.plan.directory.mkdir(parents=True, exist_ok=True)
        apps = [
            {
                "name": worker.name,
                "script": worker.command[0],
                "args": [worker.order],
                "interpreter": "none",
                "exec_mode": "fork",
                "kill_timeout": int(self.plan.grace_seconds * 1000),
                "min_uptime": 0,
                "max_restarts": 1_000_000,
                "out_file": str(self.plan.directory / f"{worker.name}.log"),
                "error_file": str(self.plan.directory / f"{worker.name}.err"),
                "pid_file": str(self.plan.directory / f"{worker.name}.pid"),
                "autorestart": True,
            }
            for worker in self.plan.workers
        ]
        (self.plan.directory / "apps.json").write_text(json.dumps({"apps": apps}))
        self.run([_PM2, "ping"], self._home())

    def start(self) -> Span:
        """Start the file's apps, then save the list as its manual says."""
        span = self.run([_PM2, "start", "apps.json"], self._home())
        self.run([_PM2, "save"], self._home())
        return span

    def stop(self) -> Span:
        """All apps."""
        return self.run([_PM2, "stop", "all"], self._home())

    def again(self) -> Span:
        """``resurrect`` brings the saved list back."""
        return self.run([_PM2, "resurrect"], self._home())

    def roots(self) -> list[int]:
        """The daemon, by the pid file in its own home."""
        try:
            pid = int((self.plan.directory / "home" / "pm2.pid").read_text())
        except (OSError, ValueError):
            return []
        return [pid] if alive(pid) else []

    def down(self) -> None:
        """The daemon of this home and its apps."""
        subprocess.run([_PM2, "kill"], env={**os.environ, **self._home()}, capture_output=True, check=False)

    def log_files(self, name: str) -> list[Path]:
        """Without an added module it does not rotate."""
        return [self.plan.directory / f"{name}.log"]

    def _home(self) -> dict[str, str]:
        return {"PM2_HOME": str(self.plan.directory / "home"), "PM2_DISCRETE_MODE": "1"}
