"""Objects of the cluster as they are now, kept up to date by one watch: a look costs no request.

A watch may break off or fall behind; then everything is listed again, and what is gone meanwhile is dropped. Whoever
waits for a fact is woken by each change.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from everdeck.cluster.api import Api
from everdeck.cluster.objects import Manifest
from everdeck.errors import ClientError
from everdeck.kernel.identity import boottime

_AGAIN_SECONDS: Final = 0.5


class Mirror:
    """All objects of one kind with a label, by name; and since when each has its present version, on our clock."""

    def __init__(self, api: Api, kind: str, labels: str, changed: Callable[[], None]) -> None:
        self.objects: dict[str, Manifest] = {}
        self.since: dict[str, float] = {}
        self.current = asyncio.Event()
        self._api = api
        self._kind = kind
        self._labels = labels
        self._changed = changed

    async def keep(self) -> None:
        """For ever."""
        while True:
            with contextlib.suppress(ClientError):
                version = await self._list()
                async for change, item in self._api.watch(self._kind, version, self._labels):
                    name = item["metadata"]["name"]
                    if change == "DELETED":
                        self.objects.pop(name, None)
                        self.since.pop(name, None)
                    else:
                        self.take(item)
                    self._changed()
                continue
            self.current.clear()
            await asyncio.sleep(_AGAIN_SECONDS)  # noqa: TID251 - an API server that is away gives no event

    def take(self, item: Manifest) -> None:
        """Note an object as it was just read or written."""
        name = item["metadata"]["name"]
        before = self.objects.get(name)
        if before is None or before["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
            self.since[name] = boottime()
        self.objects[name] = item

    async def _list(self) -> str:
        items, version = await self._api.all(self._kind, self._labels)
        there = {item["metadata"]["name"] for item in items}
        for gone in set(self.objects) - there:
            del self.objects[gone], self.since[gone]
        for item in items:
            self.take(item)
        self.current.set()
        self._changed()
        return version
