"""A worker that writes who it is and when, ten times a second, to storage that all nodes see; and the checker of it.

Nodes of the test cluster are namespaces of one kernel, so CLOCK_BOOTTIME is one clock for all of them, and two copies
that ran at the same time are seen as such without any doubt about clocks.
"""

import os
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from support.cluster_machines import figure, until

PROGRAM = """
import os, time
out = open(os.path.join(os.environ["EVERDECK_DIR"], "data", "beats"), "ab", buffering=0)
who = os.environ["EVERDECK_COOKIE"]
while True:
    out.write(f"{time.clock_gettime(time.CLOCK_BOOTTIME):.4f} {who}\\n".encode())
    time.sleep(0.1)
"""
COMMAND = ["python3", "-c", PROGRAM]
TRIALS = int(os.environ.get("TRIALS", "1"))
"""How often power cuts and partitions are tried."""
BACK_WITHIN_SECONDS = 30.0


class Stretch(NamedTuple):
    """One copy's life, from its first beat to its last."""

    who: str
    first: float
    last: float


def beats_file(volume: Path, worker: str, state: str = "deck") -> Path:
    """Where the worker writes, on this machine: in the state directory on its volume."""
    return volume / state / "workers" / worker / "data" / "beats"


class Beats:
    """The file of beats, read on from where it was last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._found: dict[str, Stretch] = {}

    def stretches(self) -> list[Stretch]:
        """Every copy that ever ran, by its first beat. A line that was cut by a kill is left out."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._at += len(whole)
            for line in whole.decode().splitlines():
                at, _, who = line.partition(" ")
                if not who:
                    continue
                before = self._found.get(who)
                self._found[who] = Stretch(who, before.first if before else float(at), float(at))
        return sorted(self._found.values(), key=lambda one: one.first)

    @property
    def lives(self) -> int:
        """How many copies ever ran."""
        return len(self.stretches())

    @property
    def newest(self) -> Stretch:
        """The copy that began last."""
        return self.stretches()[-1]

    def next_life(self, lives: int, seconds: float = 150) -> Stretch:
        """The first copy after so many others."""
        until(lambda: self.lives > lives, f"copy {lives + 1}", seconds)
        return self.stretches()[lives]

    def settled(self) -> list[Stretch]:
        """Every life, when the newest one has beaten for a while."""
        newest = self.newest
        until(lambda: self.newest.last > newest.last + 2, "the newest copy goes on")
        return self.stretches()


def now() -> float:
    """On the clock of the beats."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def overlaps(lives: list[Stretch]) -> list[tuple[Stretch, Stretch]]:
    """Copies that lived at the same time."""
    return [(one, other) for one, other in pairwise(lives) if other.first <= one.last]


def all_back_soon(harm: str, times: list[float]) -> None:
    """None took longer than half a minute."""
    least, usual, most = min(times), median(times), max(times)
    figure(f"{harm}: {len(times)} times back after {least:.1f} to {most:.1f} s, median {usual:.1f}")
    assert most < BACK_WITHIN_SECONDS
