"""When to look again who owns a deck, told by the kernel: nobody asks by the clock.

A member that finds ``deck.lock`` held and nobody listening has met an owner on its way in or out. Three facts end that:
the owner listens (``deck.sock`` is renamed into the directory), it lets go of the lock (and then touches it, see
:meth:`everdeck.deck.home.DeckHome.close`), or it dies (its pid stands in the lock, and a pidfd tells). The first two
come from one inotify watch of the directory. See inotify(7), pidfd_open(2).
"""

import asyncio
import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from everdeck.kernel import identity, inotify
from everdeck.statedir import StateDir

# A holder of another pid namespace cannot be watched, and one that has just taken the lock has not said yet who it is.
_UNWATCHED_SECONDS: Final = 1.0
_UNNAMED_SECONDS: Final = 0.001


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
        """Hear no more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def changed(self) -> None:
        """Return when it is worth to look again."""
        holder = self._holder()
        if holder is None or self._fd is None:
            if holder is not None:
                os.close(holder)
            await asyncio.sleep(_UNNAMED_SECONDS)  # noqa: TID251 - see above: nothing tells
            return
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        watched = (self._fd, holder)
        for fd in watched:
            loop.add_reader(fd, told.set)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), _UNWATCHED_SECONDS)
        finally:
            for fd in watched:
                loop.remove_reader(fd)
            os.close(holder)
        for _ in inotify.heard(self._fd):
            pass

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
