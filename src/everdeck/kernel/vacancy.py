"""When to look again who owns a deck, told by the kernel: nobody asks by the clock.

Who finds ``deck.lock`` held and nobody listening has met an owner on its way in or out. Three facts end that: the owner
listens (its socket is renamed into the directory), it lets go of the lock (and then touches it, see
:meth:`everdeck.deck.home.DeckHome.close`), or it dies (its pid stands in the lock, and a pidfd tells). The first two
come from one inotify watch of the directory. See inotify(7), pidfd_open(2).
"""

import contextlib
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from everdeck.kernel import identity, inotify
from everdeck.statedir import StateDir

# A holder of another pid namespace cannot be watched, and one that has just taken the lock has not said yet who it is.
_UNWATCHED_SECONDS: Final = 1.0
_UNNAMED_SECONDS: Final = 0.001


class Facts(NamedTuple):
    """What becomes readable when it is worth to look again, and for how long to believe that nothing else tells."""

    descriptors: tuple[int, ...]
    seconds: float


class Vacancy:
    """Hears of changes from the moment it is made, so that what comes during a look is not missed."""

    def __init__(self, state_dir: Path) -> None:
        self._lock = StateDir(state_dir).lock
        self._fd: int | None = None
        with contextlib.suppress(inotify.Exhausted):
            self._fd = inotify.open_inotify()
        if self._fd is not None:
            try:
                inotify.add_watch(self._fd, str(state_dir), inotify.MOVED_TO | inotify.ATTRIB)
            except OSError:
                self.close()

    def close(self) -> None:
        """Hear no more. The kernel takes 8 ms for it, or more: a loop lets a thread do it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @contextlib.contextmanager
    def facts(self) -> Iterator[Facts]:
        """What to wait for now; on leaving, what was heard is forgotten."""
        holder = self._holder()
        seconds = _UNNAMED_SECONDS if holder is None or self._fd is None else _UNWATCHED_SECONDS
        try:
            yield Facts(tuple(fd for fd in (self._fd, holder) if fd is not None), seconds)
        finally:
            if holder is not None:
                os.close(holder)
            if self._fd is not None:
                for _ in inotify.heard(self._fd):
                    pass

    def wait(self, most_seconds: float) -> None:
        """Return when it is worth to look again, or after so long."""
        with self.facts() as facts:
            told = select.poll()  # select(2) knows no descriptor above 1,023
            for fd in facts.descriptors:
                told.register(fd, select.POLLIN)
            told.poll(max(0.0, min(most_seconds, facts.seconds)) * 1000)

    def _holder(self) -> int | None:
        """A pidfd of who noted in the lock that it holds it; None if nobody did, or it has ended."""
        try:
            pidfd = os.pidfd_open(int(self._lock.read_text(encoding="ascii")))
        except (OSError, ValueError):
            return None
        if identity.is_readable(pidfd):
            os.close(pidfd)
            return None
        return pidfd
