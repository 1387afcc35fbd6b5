"""Moves started workers into their cgroups, off the path of a start.

Moving a process into a cgroup makes the kernel wait for a grace period of RCU: 8-15 ms for a lone move, 75 µs each
when moves follow each other (seen on 6.18). So one thread does all moves, in order, and tells the loop in batches.
Until a worker is inside, its tree is known by cookie and lock; the sweep after the move catches what it forked
meanwhile.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from everdeck.errors import KernelError
from everdeck.kernel import containment
from everdeck.kernel.containment import Tree

_log: Final = logging.getLogger("everdeck.deck")

_QUIET_SECONDS: Final = 0.05
_LONGEST_WAIT_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Gathered:
    """One tree is inside its cgroup."""

    tree: Tree
    cgroup: Path


class Gatherer:
    """One thread, started with the first batch.

    Orders are handed to it when no new one has come for a moment, because its system calls would take the
    interpreter's lock away from the starts that go on meanwhile: +600-1,000 µs per start when it ran beside them.
    """

    def __init__(self, on_gathered: Callable[[list[Gathered]], None], loop: asyncio.AbstractEventLoop) -> None:
        self._on_gathered = on_gathered
        self._loop = loop
        self._waiting: list[Task] = []
        self._timer: asyncio.TimerHandle | None = None
        self._first_at = self._last_at = 0.0
        self._batches: queue.SimpleQueue[list[Task] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def gather(self, tree: Tree, born_outside: str) -> None:
        """Move the tree soon into the cgroup of one that was not born in this one."""
        self._order((tree, born_outside))

    def remove(self, cgroup: Path | str) -> None:
        """Remove an empty cgroup soon, in order with the moves."""
        self._order(cgroup)

    def close(self, home: Path | None) -> None:
        """Do what was ordered, end, and remove every directory of the deck that is empty."""
        if self._timer is not None:
            self._hand_over()
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join()
            self._thread = None
        if home is not None:
            containment.remove_cgroups(home)

    def _order(self, order: "Task") -> None:
        self._last_at = self._loop.time()
        self._waiting.append(order)
        if self._timer is None:
            self._first_at = self._last_at
            self._timer = self._loop.call_later(_QUIET_SECONDS, self._look)

    def _look(self) -> None:
        """One timer for all orders of a batch: when it is due it sees whether there was a newer one."""
        quiet_at = min(self._last_at + _QUIET_SECONDS, self._first_at + _LONGEST_WAIT_SECONDS)
        if quiet_at > self._loop.time():
            self._timer = self._loop.call_at(quiet_at, self._look)
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="everdeck-gather", daemon=True)
            self._thread.start()
        batch, self._waiting = self._waiting, []
        self._batches.put(batch)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            moves = [(one[0], containment.joined_later(one[1])) for one in batch if isinstance(one, tuple)]
            try:
                done = [Gathered(tree, cgroup) for tree, cgroup in containment.gather_into_cgroups(moves)]
            except (KernelError, OSError) as err:  # out of descriptors: their trees stay known by cookie and lock
                _log.warning("%d workers could not be moved into their cgroups: %s", len(moves), err)
                continue
            # After all moves: a directory that somebody moved into is busy and stays.
            for order in batch:
                if not isinstance(order, tuple):
                    containment.remove_cgroup(order)
            if done:
                self._tell(done)

    def _tell(self, done: list[Gathered]) -> None:
        # The loop may have been closed by a host that did not close its deck; the move itself has happened.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_gathered, done)


Task: TypeAlias = tuple[Tree, str] | Path | str
