"""How another process tells the one at work that it has changed the inbox's file.

The dead-letter commands write to the file and then touch its lock file; the process at work watches that with
inotify(7), so it hears of a retry at once and wakes for nothing else. A user's inotify descriptors are few (128 by
default); without one it asks SQLite twice a minute whether anybody else has written.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from everdeck.kernel import inotify

ASK_SECONDS: Final = 30.0


class Bell:
    """Rings when the file is touched. ``version`` gives a number that changes with the writes of others."""

    def __init__(self, path: Path, version: Callable[[], int]) -> None:
        self._path = path
        self._version = version
        self._listeners: list[Callable[[], None]] = []
        self._fd: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def ring(self) -> None:
        """Tell everybody, here and elsewhere."""
        for listener in list(self._listeners):
            listener()
        with contextlib.suppress(OSError):  # nobody has ever worked from this file, or not this user
            os.utime(self._path)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` at each ring; the answer takes it back."""
        self._listeners.append(listener)
        if len(self._listeners) == 1:
            self._open()

        def leave() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
                if not self._listeners:
                    self._close()

        return leave

    def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            self._fd = inotify.open_inotify()
            inotify.add_watch(self._fd, str(self._path), inotify.ATTRIB)
        except OSError:
            self._close()
            self._loop = asyncio.get_running_loop()
            self._ask_later(self._version())
        else:
            self._loop.add_reader(self._fd, self._heard)

    def _heard(self) -> None:
        if self._fd is not None and list(inotify.heard(self._fd)):
            for listener in list(self._listeners):
                listener()

    def _ask_later(self, version: int) -> None:
        def ask() -> None:
            now = self._version()
            if now != version:
                for listener in list(self._listeners):
                    listener()
            self._ask_later(now)

        if self._loop is not None:
            self._timer = self._loop.call_later(ASK_SECONDS, ask)

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._fd is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
        self._loop = None
