"""Hears that the kernel killed a process of a worker for want of memory, while the worker itself lives on.

The kernel picks one process of a cgroup that is at its limit, often not the leader: a pool loses one of its children
and goes on, and nothing would tell. ``memory.events`` counts such kills, and the file changes with the count, so one
inotify descriptor is enough for all workers and costs nothing while memory lasts.

See ``Documentation/admin-guide/cgroup-v2.rst``, ``memory.events``.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable

from everdeck.kernel import controllers, inotify


class MemoryWatch:
    """Watches the cgroups of workers that have a memory limit."""

    def __init__(self, on_kill: Callable[[str, int], None], loop: asyncio.AbstractEventLoop) -> None:
        self._on_kill = on_kill
        self._loop = loop
        self._fd: int | None = None
        self._cgroups: dict[str, tuple[str, int, int]] = {}  # by worker: its cgroup, the watch, kills that were told

    def watch(self, name: str, cgroup: str, *, told: int = 0) -> None:
        """From now on tell of kills beyond ``told``; those that nobody has seen are told at once."""
        self.unwatch(name)
        try:
            if self._fd is None:
                self._fd = inotify.open_inotify()
                self._loop.add_reader(self._fd, self._heard)
            number = inotify.add_watch(self._fd, f"{cgroup}/memory.events", inotify.MODIFY)
        except OSError:  # nobody counts there, or no watch is left: the end of the worker still tells
            return
        self._cgroups[name] = (cgroup, number, told)
        self._look(name)

    def unwatch(self, name: str) -> None:
        """It ended, or is about to be watched anew."""
        known = self._cgroups.pop(name, None)
        if known is not None and self._fd is not None:
            inotify.remove_watch(self._fd, known[1])

    def close(self) -> None:
        """Let go of the descriptor."""
        self._cgroups.clear()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None

    def _heard(self) -> None:
        assert self._fd is not None  # noqa: S101 - it is what was heard
        changed = {one.watch for one in inotify.heard(self._fd)}
        for name, (_, number, _) in list(self._cgroups.items()):
            if number in changed:
                self._look(name)

    def _look(self, name: str) -> None:
        cgroup, number, told = self._cgroups[name]
        kills = controllers.oom_kills(cgroup)
        if kills > told:
            self._cgroups[name] = (cgroup, number, kills)
            self._on_kill(name, kills)
