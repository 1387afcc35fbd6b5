"""workerdeck: the library whose idea Everdeck shares."""

from pathlib import Path

from bench.drivers.driver import installed
from bench.drivers.hosted import Hosted
from bench.places import PEERS


class WorkerDeck(Hosted):
    """``WorkerManager`` with ``auto_restart``, reconciled every second."""

    name = "workerdeck"
    about = "`WorkerManager(auto_restart=True)`, `reconcile()` every second, `start` and `stop` per user"
    host = "workerdeck_host"
    most = 1000
    keeps_logs = True
    adopts = True

    @classmethod
    def missing(cls) -> str | None:
        """Whether its environment is there."""
        return installed("workerdeck", "bin/python")

    @classmethod
    def python(cls) -> Path:
        """Its own environment's interpreter."""
        return PEERS / "workerdeck" / "bin" / "python"

    def log_files(self, name: str) -> list[Path]:
        """One file per user; it is never rotated."""
        return [self.plan.directory / "state" / f"user_{name.removeprefix('w')}" / "worker.log"]
