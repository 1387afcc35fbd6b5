"""A worker that writes who it is and when, ten times a second, to storage that all nodes see; and the checker of it.

Nodes of the test cluster are namespaces of one kernel, so CLOCK_BOOTTIME is one clock for all of them, and two copies
that ran at the same time are seen as such without any doubt about clocks.
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

PROGRAM = """
import os, time
out = open(os.path.join(os.environ["EVERDECK_DIR"], "data", "beats"), "ab", buffering=0)
who = os.environ["EVERDECK_COOKIE"]
while True:
    out.write(f"{time.clock_gettime(time.CLOCK_BOOTTIME):.4f} {who}\\n".encode())
    time.sleep(0.1)
"""
COMMAND = ["python3", "-c", PROGRAM]


class Stretch(NamedTuple):
    """One copy's life, from its first beat to its last."""

    who: str
    first: float
    last: float


def beats_file(volume: Path, worker: str) -> Path:
    """Where the worker writes, on this machine."""
    return volume / "deck" / "workers" / worker / "data" / "beats"


def stretches(beats: Path) -> list[Stretch]:
    """Every copy that ever ran, by its first beat. A line that was cut by a kill is left out."""
    found: dict[str, Stretch] = {}
    for line in beats.read_text().splitlines() if beats.exists() else ():
        at, _, who = line.partition(" ")
        if not who:
            continue
        before = found.get(who)
        found[who] = Stretch(who, before.first if before else float(at), float(at))
    return sorted(found.values(), key=lambda one: one.first)


def overlaps(lives: list[Stretch]) -> list[tuple[Stretch, Stretch]]:
    """Copies that lived at the same time."""
    return [(one, other) for one, other in pairwise(lives) if other.first <= one.last]
