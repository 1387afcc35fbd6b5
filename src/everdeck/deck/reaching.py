"""Can a path be reached at all? Asked off the loop, with a deadline, because a dead mount never answers.

``execve`` and ``chdir`` on a hung file system (a dead NFS server, a FUSE program that stopped answering) put whoever
calls them into an uninterruptible sleep, and a vfork's parent waits with its child. So what a worker runs and where it
runs is looked at first by a thread that nobody waits for longer than a deadline: the worker fails, all others go on.
It may also begin to hang between the look and the exec, so where the look finds a file system that somebody else
serves, the start itself is in such a thread too (:func:`launched`).

What comes from the system's own directories is not asked about: where those hang, nothing helps.
"""

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final, Generic, TypeVar

from everdeck import disk
from everdeck.errors import SpawnFailed

DEADLINE_SECONDS = 5.0
_Started = TypeVar("_Started")
# Who hangs where: whoever asks about the same paths again is answered at once, so a check that is repeated every few
# seconds leaves one thread behind in the kernel and not one each time.
_hanging: Final[dict[tuple[str, ...], threading.Thread]] = {}
# What answered a moment ago, and whether a disk or memory of this machine holds it: a thousand starts of one program
# ask once a second, not a thousand times. What this machine holds does not begin to hang, so it is asked about again
# only because somebody may have put a link to elsewhere in its place.
_answered: Final[dict[tuple[str, ...], tuple[float, bool]]] = {}
_FRESH_SECONDS: Final = 1.0
_NEAR_SECONDS: Final = 60.0
_MOST_REMEMBERED: Final = 1024
_OF_THE_SYSTEM: Final = ("/usr/", "/bin/", "/sbin/", "/lib", "/proc/")


def to_ask_about(command: Sequence[str], cwd: str | None) -> list[str]:
    """The paths that may lie on somebody else's file system."""
    paths = [path for path in (command[0], cwd) if path is not None and "/" in path]
    return [path for path in paths if not path.startswith(_OF_THE_SYSTEM)]


def known_near(paths: Sequence[str]) -> bool:
    """Is it known, without asking anybody now, that this machine holds all of them?"""
    at, is_near = _answered.get(tuple(paths), (0.0, False))
    return not paths or (is_near and monotonic() - at < _NEAR_SECONDS)


async def reached(paths: Sequence[str], program: str) -> bool:
    """Return when the kernel has answered about all of them, whatever it said; :class:`SpawnFailed` if it does not.

    True if all of them lie on disks or in the memory of this machine, which do not begin to hang.
    """
    asked = tuple(paths)
    if known_near(asked):
        return True
    at, _ = _answered.get(asked, (-_FRESH_SECONDS, False))
    if monotonic() - at < _FRESH_SECONDS:
        return False
    before = _hanging.pop(asked, None)
    if before is not None and before.is_alive():
        _hanging[asked] = before
        raise _no_answer(paths, program)
    loop = asyncio.get_running_loop()
    answered = asyncio.Event()
    near: list[bool] = []

    def look() -> None:
        for path in paths:
            with contextlib.suppress(OSError):  # missing or refused is an answer: the start itself will say it
                os.stat(path)  # noqa: PTH116 - one system call
            near.append(disk.is_near(path))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(answered.set)

    # A thread of its own, not of a pool: one that is stuck in the kernel must not keep others, or our end, waiting.
    looking = threading.Thread(target=look, name="everdeck-reach", daemon=True)
    looking.start()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await answered.wait()
    except TimeoutError:
        _hanging[asked] = looking
        raise _no_answer(paths, program) from None
    if len(_answered) >= _MOST_REMEMBERED:
        _answered.clear()
    _answered[asked] = monotonic(), all(near)
    return all(near)


async def launched(launch: Callable[[], _Started], undo: Callable[[_Started], None], program: str) -> _Started:
    """What ``launch`` returns, if it returns in time; what comes too late is undone, when it comes."""
    start = _Start(launch, undo)
    # A thread of its own, as above.
    threading.Thread(target=start.run, name="everdeck-start", daemon=True).start()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await asyncio.shield(start.answer)
    except BaseException as err:
        start.give_up()
        if isinstance(err, TimeoutError):
            raise _no_answer([program], program) from None
        raise


class _Start(Generic[_Started]):
    """One start in its thread, and whether somebody still waits for it; all but ``run`` is called in the loop."""

    def __init__(self, launch: Callable[[], _Started], undo: Callable[[_Started], None]) -> None:
        self._launch = launch
        self._undo = undo
        self._loop = asyncio.get_running_loop()
        self._given_up = False
        self.answer: asyncio.Future[_Started] = self._loop.create_future()

    def run(self) -> None:
        """In the thread: it may take for ever."""
        try:
            started = self._launch()
        except BaseException as err:  # noqa: BLE001 - it is the caller's
            self._tell(self._failed, err)
        else:
            if not self._tell(self._came, started):
                self._undo(started)

    def give_up(self) -> None:
        """Nobody waits any more."""
        self._given_up = True
        if self.answer.done() and not self.answer.cancelled() and self.answer.exception() is None:
            self._undo_beside(self.answer.result())  # it came in the very moment in which we gave up

    def _tell(self, what: Callable[[Any], None], value: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(what, value)
        except RuntimeError:  # the loop is closed, and with it whoever waited
            return False
        return True

    def _came(self, started: _Started) -> None:
        if self._given_up:
            self._undo_beside(started)
        else:
            self.answer.set_result(started)

    def _undo_beside(self, started: _Started) -> None:
        """Not in the loop: what runs from a file system that hangs again may take for ever to end."""
        threading.Thread(target=self._undo, args=(started,), name="everdeck-start", daemon=True).start()

    def _failed(self, error: BaseException) -> None:
        if not self._given_up:
            self.answer.set_exception(error)


def _no_answer(paths: Sequence[str], program: str) -> SpawnFailed:
    what = f"{' or '.join(paths)} does not answer within {DEADLINE_SECONDS:g} s (a hung file system?)"
    return SpawnFailed(program, errno.ETIMEDOUT, what)
