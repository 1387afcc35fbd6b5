"""Wait until something is true of a directory, woken by changes in it."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from everdeck.kernel import inotify

DEADLINE_SECONDS = 90
_DELETE = 0x00000200
_ANY_CHANGE = inotify.MODIFY | inotify.CREATE | inotify.MOVED_TO | _DELETE


async def until(true_of_it: Callable[[], bool], directory: Path) -> None:
    """Return when ``true_of_it()``, which is asked again after every change in ``directory``."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    fd = inotify.open_inotify()
    watch = inotify.add_watch(fd, str(directory), _ANY_CHANGE)
    loop.add_reader(fd, changed.set)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not true_of_it():
                await changed.wait()
                changed.clear()
                assert all(heard.watch == watch for heard in inotify.heard(fd))
    finally:
        loop.remove_reader(fd)
        os.close(fd)
