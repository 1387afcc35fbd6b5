"""When what was recorded is on the disk: before an answer, or within a second.

``power``: an answer means that it survives a power cut. What a verb recorded is synced before the verb returns; verbs
that wait at the same time share one sync, so a hundred of them cost a few. ``process``: an answer means that it
survives the death of any process, and the disk has it within a second; a power cut may take that second back. In both,
what nobody waits for (a crash, a restart, a notification) is on the disk within a second too. So is the empty home of a
new worker: what a record speaks of and the disk has lost, whoever opens the deck makes again.

A sync may take as long as the disk likes, so it is done by a thread and nobody but those who asked wait for it.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
from typing import Final, get_args

from everdeck import disk
from everdeck.errors import RegistryError, SpecError
from everdeck.model import DurabilityMode
from everdeck.registry import Registry

__all__ = ["Durability", "DurabilityMode"]

_log: Final = logging.getLogger("everdeck.deck")
_LATEST_SECONDS: Final = 0.8  # with the sync itself: within a second
_AT_ONCE: Final = 2  # what answers wait for, and something that they do not
_MANY: Final = 16  # homes of a group; each sync is a trip to the disk, and one for the whole file system is one


class Durability:
    """Syncs the registry, and the directories that its records speak of, for all who ask together."""

    def __init__(self, registry: Registry, loop: asyncio.AbstractEventLoop, mode: DurabilityMode) -> None:
        if mode not in get_args(DurabilityMode):
            raise SpecError("durability", mode, " | ".join(get_args(DurabilityMode)))
        self.mode = mode
        self._registry = registry
        self._loop = loop
        self._synced = 0
        self._paths: set[str] = set()
        self._closed = False
        self._soon: set[str] = set()
        self._soon_timer: asyncio.TimerHandle | None = None
        self._syncing_soon: asyncio.Future[None] | None = None
        self._tidying: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._syncing: asyncio.Future[None] | None = None
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        registry.on_write = self._written

    def also(self, path: str) -> None:
        """With the next sync, sync this too: a directory in which a home was made or moved."""
        self._paths.add(path)

    def soon(self, path: str) -> None:
        """Sync this within a second; no answer waits for it, because recovery makes it again."""
        self._soon.add(path)
        if self._soon_timer is None:
            self._soon_timer = self._loop.call_later(_LATEST_SECONDS, self._begin_soon)

    async def answerable(self) -> None:
        """Return when what was recorded so far may be told as an answer; raises if the disk refuses it."""
        if self.mode == "power":
            await self._settled(self._registry.writes)

    async def on_disk(self) -> bool:
        """Wait until what was recorded so far survives a power cut, in either mode; False if the disk refuses it."""
        try:
            await self._settled(self._registry.writes)
        except (RegistryError, OSError):
            return False
        return True

    async def _settled(self, writes: int) -> None:
        while self._synced < writes and not self._closed:
            if self._syncing is None:
                self._begin()
            assert self._syncing is not None  # noqa: S101 - just begun
            # Shielded: who stops waiting does not end the sync that others wait for.
            await asyncio.shield(self._syncing)

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        writes, paths = self._registry.writes, self._paths
        self._paths = set()
        # Not the executor's own future: for a moment that one is done and not yet noted here, and whoever looked just
        # then would wait for something that is over, which does not let go of the loop, and look again, for ever.
        self._syncing = told = self._loop.create_future()
        syncing = self._loop.run_in_executor(self._beside(), self._sync, paths)
        syncing.add_done_callback(lambda done: self._ended(done, told, writes, paths))

    def _beside(self) -> concurrent.futures.Executor:
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "everdeck-sync")
        return self._thread

    def _begin_soon(self) -> None:
        self._soon_timer = None
        if self._syncing_soon is None and self._soon:
            paths, self._soon = self._soon, set()
            self._syncing_soon = self._loop.run_in_executor(self._beside(), self._sync_paths, paths)
            self._syncing_soon.add_done_callback(lambda done: self._ended_soon(done, paths))

    def _ended_soon(self, done: "asyncio.Future[None]", paths: set[str]) -> None:
        self._syncing_soon = None
        left = set(self._soon)
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("directories of new workers are not on the disk yet: %s", error)
            left |= paths
        for path in left if not self._closed else ():
            self.soon(path)

    def _sync(self, paths: set[str]) -> None:
        # The paths first: a record whose directory was lost is worse than a directory that nobody recorded.
        self._sync_paths(paths)
        self._registry.sync()

    def _checkpoint(self) -> None:
        try:
            self._registry.checkpoint()
        except RegistryError as err:
            _log.warning("the log of commits is tidied up later: %s", err)

    def _sync_paths(self, paths: set[str]) -> None:
        if len(paths) > _MANY:
            disk.sync_all_of(self._registry.path.parent)
        else:
            for path in paths:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed since
                    disk.sync_path(path)

    def _ended(self, done: "asyncio.Future[None]", told: "asyncio.Future[None]", writes: int, paths: set[str]) -> None:
        self._syncing = None
        if done.cancelled():
            told.cancel()
            return
        if (error := done.exception()) is not None:
            self._paths |= paths
            _log.error("what was recorded is not on the disk yet: %s", error)
            told.set_exception(error)
            told.exception()  # it may be that nobody waits for it
        else:
            self._synced = max(self._synced, writes)
            told.set_result(None)
        if self._registry.is_checkpoint_due() and self._tidying is None and not self._closed:
            self._tidying = self._loop.run_in_executor(self._beside(), self._checkpoint)
            self._tidying.add_done_callback(self._tidied)
        if self._synced < self._registry.writes:
            self._written()

    def _tidied(self, _: "asyncio.Future[None]") -> None:
        self._tidying = None

    def _written(self) -> None:
        """Something was recorded: if nobody asks for it, the disk has it within a second all the same."""
        if self._timer is None:
            self._timer = self._loop.call_later(_LATEST_SECONDS, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._syncing is None and self._synced < self._registry.writes:
            self._begin()

    async def close(self) -> None:
        """Sync what is left; the next owner may be the one after a power cut."""
        self._registry.on_write = None
        with contextlib.suppress(RegistryError, OSError):
            await self._settled(self._registry.writes)
        self._begin_soon()
        self._closed = True
        if unfinished := [one for one in (self._syncing_soon, self._tidying) if one is not None]:
            await asyncio.wait(unfinished)
        for timer in (self._timer, self._soon_timer):
            if timer is not None:
                timer.cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
