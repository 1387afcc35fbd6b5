"""Moves started workers into their cgroups, off the path of a start.

Moving a process into a cgroup makes the kernel wait for a grace period of RCU: 8-15 ms for a lone move, 75 µs each
when moves follow each other (seen on 6.18). So one thread does all moves, in order, and tells the loop in batches.
Until a worker is inside, its tree is known by cookie and lock; the sweep after the move catches what it forked
meanwhile.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tidelock.kernel import containment
from tidelock.kernel.containment import Tree


@dataclass(frozen=True, slots=True)
class Gathered:
    """One tree is inside its cgroup."""

    tree: Tree
    cgroup: Path


class Gatherer:
    """One thread, started with the first worker to move."""

    def __init__(self, on_gathered: Callable[[list[Gathered]], None], loop: asyncio.AbstractEventLoop) -> None:
        self._on_gathered = on_gathered
        self._loop = loop
        self._orders: queue.SimpleQueue[tuple[Tree, Path] | Path | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def gather(self, tree: Tree, cgroup: Path) -> None:
        """Move the tree into the cgroup soon."""
        self._order((tree, cgroup))

    def remove(self, cgroup: Path) -> None:
        """Remove an empty cgroup soon, in order with the moves."""
        self._order(cgroup)

    def close(self) -> None:
        """Do what was ordered, then end."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
            self._thread = None

    def _order(self, order: tuple[Tree, Path] | Path) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tidelock-gather", daemon=True)
            self._thread.start()
        self._orders.put(order)

    def _run(self) -> None:
        done: list[Gathered] = []
        while True:
            if done and self._orders.empty():
                self._tell(done)
                done = []
            order = self._orders.get()
            match order:
                case None:
                    return
                case Path():
                    containment.remove_cgroup(order)
                case tree, cgroup:
                    if containment.make_cgroup(cgroup) and containment.gather_into_cgroup(tree, cgroup):
                        done.append(Gathered(tree, cgroup))

    def _tell(self, done: list[Gathered]) -> None:
        # The loop may have been closed by a host that did not close its deck; the move itself has happened.
        try:
            self._loop.call_soon_threadsafe(self._on_gathered, done)
        except RuntimeError:
            return
