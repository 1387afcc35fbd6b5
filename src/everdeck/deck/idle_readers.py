"""Programs that read a satellite's feed with its rights, kept for a moment after their use.

A page asks every few seconds, and an interpreter takes 30 MB and a tenth of a second to start. So one that was just
used waits for the next question of the same deck about the same satellite with the same rights: never for another
account, whatever its name is. While it waits it has nothing of the satellite open. It ends after a while, with the
satellite, with the deck, and with our process, whose end of its socket it hears.
"""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

KEEP_SECONDS: Final = 15.0
MOST_KEPT: Final = 8


class Reader(Protocol):
    """A program at rest."""

    def is_there(self) -> bool:
        """Does it still run?"""

    def end(self) -> None:
        """Now, and reaped."""

    def forget(self) -> None:
        """In a forked copy of us: it is not ours."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    reader: Reader
    rights: object
    timer: threading.Timer


class IdleReaders:
    """Who waits, by the feed it reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Path, _Waiting] = {}

    def taken(self, feed: Path, rights: object) -> Reader | None:
        """The one that waits for this, out of here; None if there is none, or one with other rights, which ends."""
        with self._lock:
            waiting = self._waiting.pop(feed, None)
        if waiting is None:
            return None
        waiting.timer.cancel()
        if waiting.rights == rights and waiting.reader.is_there():
            return waiting.reader
        waiting.reader.end()
        return None

    def keep(self, feed: Path, rights: object, reader: Reader) -> bool:
        """Let it wait here; False if there are enough."""
        timer = threading.Timer(KEEP_SECONDS, self._end, (feed, reader))
        timer.daemon = True
        with self._lock:
            if feed in self._waiting or len(self._waiting) >= MOST_KEPT:
                return False
            self._waiting[feed] = _Waiting(reader, rights, timer)
            timer.start()
        return True

    def dismiss(self, folder: Path) -> None:
        """End those whose feed is below: a worker is removed, or a deck is closed."""
        folder = folder.absolute()
        with self._lock:
            gone = [self._waiting.pop(feed) for feed in list(self._waiting) if feed.is_relative_to(folder)]
        for waiting in gone:
            waiting.timer.cancel()
            waiting.reader.end()

    def _end(self, feed: Path, reader: Reader) -> None:
        with self._lock:
            waiting = self._waiting.get(feed)
            if waiting is None or waiting.reader is not reader or waiting.timer is not threading.current_thread():
                return  # it was taken, and may be waiting anew
            del self._waiting[feed]
        reader.end()

    def forget_in_fork(self) -> None:
        """The programs are our parent's; our copies of their sockets would keep them waiting when it is gone."""
        self._lock = threading.Lock()  # it may have been held by a thread that is not here
        for waiting in self._waiting.values():
            waiting.reader.forget()
        self._waiting.clear()


idle_readers: Final = IdleReaders()
os.register_at_fork(after_in_child=idle_readers.forget_in_fork)
