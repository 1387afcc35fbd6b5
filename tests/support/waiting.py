"""Wait for a fact that no descriptor or event tells of, with a deadline that is generous and fails loudly.

Where something does tell (an event of the deck, a change in a directory, a line on a pipe) wait for that instead:
``deck.follow``, :func:`until_in`, the child's ``ready``.
"""

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from everdeck.kernel import inotify

SECONDS = float(os.environ.get("EVERDECK_TEST_PATIENCE", "60"))  # a cluster needs more of it
_LOOK_AGAIN_SECONDS = 0.01
_DELETE = 0x00000200
_ANY_CHANGE = inotify.MODIFY | inotify.CREATE | inotify.MOVED_TO | _DELETE


def until(
    fact: Callable[[], Any],
    what: str = "the fact",
    seconds: float = SECONDS,
    *,
    process: Any = None,
    pause_seconds: float = _LOOK_AGAIN_SECONDS,
) -> Any:
    """Look until it is true and return what it answered; fails at once when ``process``, which is to do it, ended."""
    deadline = time.monotonic() + seconds
    while not (found := fact()):
        assert process is None or process.exitcode is None, f"{what}: the program ended with {process.exitcode}"
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(pause_seconds)
    return found


async def eventually(fact: Callable[[], Awaitable[Any] | Any], what: str = "the fact", seconds: float = SECONDS) -> Any:
    """The same in an event loop; the fact may have to be awaited."""
    deadline = time.monotonic() + seconds
    while True:
        found = fact()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)


async def until_in(directory: Path, fact: Callable[[], bool], seconds: float = 90.0) -> None:
    """Return when it is true; it is asked again after every change in the directory, and only then."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    fd = inotify.open_inotify()
    watch = inotify.add_watch(fd, str(directory), _ANY_CHANGE)
    loop.add_reader(fd, changed.set)
    try:
        async with asyncio.timeout(seconds):
            while not fact():
                await changed.wait()
                changed.clear()
                assert all(heard.watch == watch for heard in inotify.heard(fd))
    finally:
        loop.remove_reader(fd)
        os.close(fd)
