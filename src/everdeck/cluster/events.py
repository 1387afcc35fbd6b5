"""The deck's events as objects of the cluster: ConfigMaps of some hundred events each, the newest one growing.

Ids grow by one, without gaps, as on one box. An append reads the newest ConfigMap and writes it back; the API server
refuses if somebody else wrote meanwhile, and then it is read again. A full one is never written again: whoever comes
next makes its successor, and the API server lets only one do so. So any number of processes append, and each event has
one id.

What happens in a pod is first told in the worker's Lease, with ids of the pod's own deck. It is transferred from there
by whoever sees it (the operator, any open deck), once: the same ConfigMap remembers how far each pod's deck was read,
and changes in the same write.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from everdeck.cluster.api import Api, Conflict
from everdeck.cluster.fence import STATUS_ANNOTATION
from everdeck.cluster.objects import MANAGED, WORKER_LABEL, Manifest
from everdeck.errors import ClientError
from everdeck.model import Event, EventKind

LABEL: Final = "everdeck.dev/events"
_PREFIX: Final = "everdeck-events-"
MOST_PER_OBJECT: Final = 200
MOST_OBJECTS: Final = 50
MOST_READ: Final = 2000
"""Of so many decks is it known how far they were read: a hundred kilobytes, in an object that holds a megabyte."""
_AGAIN_SECONDS: Final = 1.0


class Told(msgspec.Struct, frozen=True):
    """An event as a pod's deck tells it: its id there, and what happened."""

    id: int
    at: datetime
    kind: EventKind
    detail: dict[str, Any] = {}


class _Segment(msgspec.Struct):
    """One ConfigMap: its number, its events, and how far each pod's deck was read when it was written."""

    number: int
    events: list[Event]
    read: dict[str, int]
    first: int = 1
    version: str | None = None

    @property
    def name(self) -> str:
        return f"{_PREFIX}{self.number:06d}"

    @property
    def full(self) -> bool:
        return len(self.events) >= MOST_PER_OBJECT


class EventLog:
    """Append, read and follow."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._appending = asyncio.Lock()
        self._newest: _Segment | None = None

    async def append(self, worker: str | None, kind: EventKind, **detail: Any) -> Event:
        """One event of our own."""

        def one(segment: _Segment) -> list[Event]:
            return [Event(_next_id(segment), datetime.now(UTC), worker, kind, detail)]

        return (await self._append(one))[0]

    async def transfer(self, worker: str, deck_id: str, told: Sequence[Told]) -> list[Event]:
        """The events of a pod's deck that are not here yet."""
        if not told:
            return []

        def new(segment: _Segment) -> list[Event]:
            read = segment.read.get(deck_id, 0)
            fresh = [one for one in told if one.id > read]
            if fresh:
                segment.read.pop(deck_id, None)  # so that the one that was read longest ago comes first
                segment.read[deck_id] = fresh[-1].id
            first = _next_id(segment)
            return [Event(first + n, one.at, worker, one.kind, one.detail) for n, one in enumerate(fresh)]

        if self._newest is not None and told[-1].id <= self._newest.read.get(deck_id, 0):
            return []  # seen by us already; no need to ask
        return await self._append(new)

    async def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> list[Event]:
        """Oldest first."""
        found = [
            event
            for segment in await self._segments()
            for event in segment.events
            if event.id > after and (worker is None or event.worker == worker)
        ]
        return found if limit is None else found[:limit]

    async def last_id(self) -> int:
        """The newest event's id."""
        segments = await self._segments()
        return _next_id(segments[-1]) - 1 if segments else 0

    async def follow(self, after: int | None) -> AsyncIterator[Event]:
        """Each event after an id, then each new one: in order, each once, over broken watches."""
        at = await self.last_id() if after is None else after
        while True:
            objects, version = await self._list()
            for segment in _sorted(objects):
                for event in segment.events:
                    if event.id > at:
                        at = event.id
                        yield event
            try:
                async for kind, changed in self._api.watch("ConfigMap", version, LABEL):
                    if kind == "DELETED":
                        continue
                    for event in _segment(changed).events:
                        if event.id > at:
                            at = event.id
                            yield event
            except ClientError:
                await asyncio.sleep(_AGAIN_SECONDS)  # noqa: TID251 - an API server that is away gives no event

    # --- segments -------------------------------------------------------------------------------------------------

    async def _append(self, make: Callable[[_Segment], list[Event]]) -> list[Event]:
        async with self._appending:
            while True:
                newest = self._newest or await self._read_newest()
                segment = await self._following(newest) if newest.full else newest
                made = make(segment)
                if not made:
                    self._newest = newest  # what others have written is known now, and not asked for again
                    return []
                segment.events.extend(made)
                self._newest = None  # until it is written: what is in hand is not what is there
                with contextlib.suppress(Conflict):
                    self._newest = await self._write(segment)
                    return made

    async def _write(self, segment: _Segment) -> _Segment:
        manifest = _manifest(segment, self._api.namespace)
        first_time = segment.version is None
        done = await (self._api.create(manifest) if first_time else self._api.replace(manifest))
        segment.version = done["metadata"]["resourceVersion"]
        if first_time:
            with contextlib.suppress(ClientError):  # it is written; the next one's writer tries again
                await self._prune()
        return segment

    async def _following(self, full: _Segment) -> _Segment:
        """The one that goes on from it. How far a deck was read is kept; of workers that are gone, the newest only."""
        read = dict(full.read)
        if len(read) > MOST_READ:
            leases, _ = await self._api.all("Lease", WORKER_LABEL)
            there = {_deck_told_in(lease) for lease in leases}
            for deck_id in [one for one in read if one not in there][: len(read) - MOST_READ]:
                del read[deck_id]
        return _Segment(full.number + 1, [], read, _next_id(full))

    async def _prune(self) -> None:
        objects, _ = await self._list()
        for old in sorted(one["metadata"]["name"] for one in objects)[:-MOST_OBJECTS]:
            await self._api.delete("ConfigMap", old)

    async def _read_newest(self) -> _Segment:
        segments = await self._segments()
        return segments[-1] if segments else _Segment(1, [], {})

    async def _segments(self) -> list[_Segment]:
        objects, _ = await self._list()
        return _sorted(objects)

    async def _list(self) -> tuple[list[Manifest], str]:
        return await self._api.all("ConfigMap", LABEL)


def _sorted(objects: Sequence[Manifest]) -> list[_Segment]:
    return sorted((_segment(one) for one in objects), key=lambda segment: segment.number)


def _segment(manifest: Manifest) -> _Segment:
    data = manifest.get("data") or {}
    return _Segment(
        int(manifest["metadata"]["name"].removeprefix(_PREFIX)),
        [msgspec.json.decode(line, type=Event) for line in data.get("events", "").splitlines()],
        msgspec.json.decode(data.get("read", "{}"), type=dict[str, int]),
        int(data.get("first", "1")),
        manifest["metadata"]["resourceVersion"],
    )


def _deck_told_in(lease: Manifest) -> str | None:
    told = (lease["metadata"].get("annotations") or {}).get(STATUS_ANNOTATION)
    return None if told is None else str(msgspec.json.decode(told).get("deck"))


def _next_id(segment: _Segment) -> int:
    return segment.events[-1].id + 1 if segment.events else segment.first


def _manifest(segment: _Segment, namespace: str) -> Manifest:
    metadata: Manifest = {"name": segment.name, "namespace": namespace, "labels": {**MANAGED, LABEL: "true"}}
    if segment.version is not None:
        metadata["resourceVersion"] = segment.version
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {
            "first": str(segment.first),
            "read": msgspec.json.encode(segment.read).decode(),
            "events": "".join(f"{msgspec.json.encode(event).decode()}\n" for event in segment.events),
        },
    }
