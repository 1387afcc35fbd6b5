"""What a driver is asked to run: the same workers for every manager."""

from dataclasses import dataclass, field
from pathlib import Path

from bench.places import STAMP


@dataclass(frozen=True, slots=True)
class Worker:
    """One named process: the stamp program with the one argument that says where and how to report."""

    name: str
    order: str

    @property
    def command(self) -> list[str]:
        """The worker's argv."""
        return [str(STAMP), self.order]


@dataclass(frozen=True, slots=True)
class Plan:
    """A set of workers, where the manager may write, and the policies that some measurements need."""

    directory: Path
    workers: list[Worker]
    grace_seconds: float = 5
    log_bytes: int = 10_000_000
    log_keep: int = 10
    keeps_logs: bool = False
    options: dict[str, str] = field(default_factory=dict)


def plan_for(directory: Path, board: Path, count: int, mode: str = "plain", grace_seconds: float = 5) -> Plan:
    """``count`` workers of one mode, named w0, w1, …"""
    workers = [Worker(f"w{slot}", f"{board}:{slot}:{mode}") for slot in range(count)]
    return Plan(directory=directory, workers=workers, grace_seconds=grace_seconds)
