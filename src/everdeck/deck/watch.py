"""Hear at once that a process ended: one epoll for all pidfds, one reader in the loop.

A pidfd is readable from the moment its process ended, also while it is a zombie, and reports hang-up once it has
been reaped. Thousands of pidfds in one epoll of our own cost the event loop one registration, and no wake-up as
long as nobody ends.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Final

_BATCH: Final = 256


class DeathWatch:
    """Calls back once for each watched pidfd whose process ended."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, Callable[[], None]] = {}

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to listen in this loop."""
        self._epoll = select.epoll()
        self._loop = loop
        loop.add_reader(self._epoll.fileno(), self._ready)

    def close(self) -> None:
        """Stop listening; the pidfds stay their owners'."""
        if self._epoll is not None and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._waiting.clear()

    def close_in_fork(self) -> None:
        """In a forked copy: the epoll is shared with the parent, so only let go of the descriptor."""
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None

    def ended(self, pidfd: int, callback: Callable[[], None]) -> None:
        """Call back when the process ended (it may be a zombie)."""
        self._register(pidfd, select.EPOLLIN, callback)

    def reaped(self, pidfd: int, callback: Callable[[], None]) -> None:
        """Call back when the process has been reaped by its parent."""
        self._register(pidfd, 0, callback)  # hang-up is always reported

    def forget(self, pidfd: int) -> None:
        """Do not call back for it; harmless if nobody waits."""
        if self._waiting.pop(pidfd, None) is not None and self._epoll is not None:
            self._epoll.unregister(pidfd)

    def _register(self, pidfd: int, mask: int, callback: Callable[[], None]) -> None:
        if self._epoll is None:
            return
        self.forget(pidfd)
        self._epoll.register(pidfd, mask)
        self._waiting[pidfd] = callback

    def _ready(self) -> None:
        if self._epoll is None:
            return
        for pidfd, _ in self._epoll.poll(0, _BATCH):
            callback = self._waiting.pop(pidfd, None)
            self._epoll.unregister(pidfd)
            if callback is not None:
                callback()
