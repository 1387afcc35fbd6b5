"""Can a path be reached at all? Asked off the loop, with a deadline, because a dead mount never answers.

``execve`` and ``chdir`` on a hung file system (a dead NFS server, a FUSE program that stopped answering) put whoever
calls them into an uninterruptible sleep, and a vfork's parent waits with its child. So what a worker runs and where it
runs is looked at first by a thread that nobody waits for longer than a deadline: the worker fails, all others go on.

What comes from the system's own directories is not asked about: where those hang, nothing helps.
"""

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Sequence
from typing import Final

from everdeck.errors import SpawnFailed

DEADLINE_SECONDS = 5.0
# Who hangs where: whoever asks about the same paths again is answered at once, so a check that is repeated every few
# seconds leaves one thread behind in the kernel and not one each time.
_hanging: Final[dict[tuple[str, ...], threading.Thread]] = {}
_OF_THE_SYSTEM: Final = ("/usr/", "/bin/", "/sbin/", "/lib", "/proc/")


def to_ask_about(command: Sequence[str], cwd: str | None) -> list[str]:
    """The paths that may lie on somebody else's file system."""
    paths = [path for path in (command[0], cwd) if path is not None and "/" in path]
    return [path for path in paths if not path.startswith(_OF_THE_SYSTEM)]


async def reached(paths: Sequence[str], program: str) -> None:
    """Return when the kernel has answered about all of them, whatever it said; :class:`SpawnFailed` if it does not."""
    before = _hanging.pop(tuple(paths), None)
    if before is not None and before.is_alive():
        _hanging[tuple(paths)] = before
        raise _no_answer(paths, program)
    loop = asyncio.get_running_loop()
    answered = asyncio.Event()

    def look() -> None:
        for path in paths:
            with contextlib.suppress(OSError):  # missing or refused is an answer: the start itself will say it
                os.stat(path)  # noqa: PTH116 - one system call
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(answered.set)

    # A thread of its own, not of a pool: one that is stuck in the kernel must not keep others, or our end, waiting.
    looking = threading.Thread(target=look, name="everdeck-reach", daemon=True)
    looking.start()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await answered.wait()
    except TimeoutError:
        _hanging[tuple(paths)] = looking
        raise _no_answer(paths, program) from None


def _no_answer(paths: Sequence[str], program: str) -> SpawnFailed:
    what = f"{' or '.join(paths)} does not answer within {DEADLINE_SECONDS:g} s (a hung file system?)"
    return SpawnFailed(program, errno.ETIMEDOUT, what)
