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
    """All objects of one kind with a label, by name; and since when each is as it is, on our clock."""

    def __init__(self, api: Api, kind: str, labels: str, changed: Callable[[], None]) -> None:
        self.objects: dict[str, Manifest] = {}
        self._since: dict[str, float] = {}
        self._looked_at = 0.0
        self._deaf = True
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
                        self.drop(name)
                    else:
                        self.take(item)
                    self._changed()
                continue
            self._deaf = True
            self.current.clear()
            await asyncio.sleep(_AGAIN_SECONDS)  # noqa: TID251 - an API server that is away gives no event

    def take(self, item: Manifest) -> None:
        """Note an object as it was just read or written, unless the watch has told of a later version meanwhile."""
        name = item["metadata"]["name"]
        before = self.objects.get(name)
        if before is not None and _version(item) < _version(before):
            return
        if before is None or _version(item) != _version(before):
            self._since[name] = boottime()
        self.objects[name] = item

    def drop(self, name: str) -> None:
        """Note that it is gone."""
        if self.objects.pop(name, None) is not None:
            self._since[name] = boottime()

    def unchanged_since(self, name: str) -> float:
        """Since when it has its present version, or is gone; at the earliest since we can look again.

        While the API server is away nobody can write, so a silence that nobody could break tells nothing.
        """
        return self._since.get(name, self._looked_at)

    async def _list(self) -> str:
        items, version = await self._api.all(self._kind, self._labels)
        there = {item["metadata"]["name"] for item in items}
        if self._deaf:
            self._deaf = False
            self._looked_at = boottime()
            self._since.clear()
        for gone in set(self.objects) - there:
            self.drop(gone)
        for item in items:
            self.take(item)
        self.current.set()
        self._changed()
        return version


def _version(item: Manifest) -> int:
    """Numbers that grow with each write of the whole cluster: etcd's own, and comparable by decree since 1.35."""
    return int(item["metadata"]["resourceVersion"])
