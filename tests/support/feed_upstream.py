"""A server that forgets, as Telegram's does: for tests of the feed's core, in memory or in a file.

In a file it outlives the process that polls it, so a test can kill that process and look at what upstream still has.
The rules are those of getUpdates: an offset forgets what is below it, a negative one keeps the last few, an offset
far beyond the tail is ignored, one just beyond it deletes.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec

from everdeck.feed import Batch, Position, Record

FAR_BEYOND = 10


class Upstream:
    """Queued updates. ``asked`` lists the offsets that were sent."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._memory: dict[str, Any] = {"updates": [], "asked": []}

    @property
    def _state(self) -> dict[str, Any]:
        if self.path is None:
            return self._memory
        return json.loads(self.path.read_text()) if self.path.exists() else {"updates": [], "asked": []}

    def _keep(self, state: dict[str, Any]) -> None:
        if self.path is None:
            self._memory = state
        else:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(state))
            new.replace(self.path)

    def arrive(self, *updates: dict[str, Any]) -> None:
        """New updates come in."""
        state = self._state
        state["updates"].extend(updates)
        self._keep(state)

    def queued(self) -> list[int]:
        """The ids that upstream still holds."""
        return [update["update_id"] for update in self._state["updates"]]

    def asked(self) -> list[int]:
        """Every offset that was sent."""
        return self._state["asked"]

    def get(self, offset: int, limit: int = 10) -> list[dict[str, Any]]:
        """GetUpdates without the wait."""
        state = self._state
        queued = state["updates"]
        tail = queued[-1]["update_id"] if queued else None
        if offset < 0:
            queued = queued[offset:]
        elif offset > 0 and tail is not None and offset <= tail + FAR_BEYOND:
            queued = [update for update in queued if update["update_id"] >= offset]
        state["updates"] = queued
        state["asked"].append(offset)
        self._keep(state)
        return queued[:limit]


class UpstreamSource:
    """A source over it. It ends when upstream is empty and ``ends`` is set; otherwise an empty answer is just that."""

    def __init__(self, upstream: Upstream, name: str = "telegram:1", *, ends: bool = True, limit: int = 10) -> None:
        self.name = name
        self.upstream = upstream
        self.ends = ends
        self.limit = limit

    async def fetch(self, position: Position) -> Batch | None:
        """One answer."""
        got = self.upstream.get(position.offset, self.limit)
        if not got and self.ends and position.offset == 0:
            return None
        if not got:
            await asyncio.sleep(0.01)  # the long poll
        return batch_of(got, asked=position.offset)

    async def skip_history(self) -> int | None:
        """Keep only the last one, and begin behind it."""
        got = self.upstream.get(-1)
        return got[-1]["update_id"] + 1 if got else None


def batch_of(updates: list[dict[str, Any]], *, asked: int) -> Batch:
    """The updates as a source hands them over; ``chat`` is the key."""
    records = [
        Record(update["update_id"], msgspec.json.encode(update), None if "chat" not in update else str(update["chat"]))
        for update in updates
    ]
    return Batch(records, cursor=records[-1].cursor_after if records else None, asked=asked)


def update(number: int, chat: int | None = None, text: str | None = None) -> dict[str, Any]:
    """One update."""
    made: dict[str, Any] = {"update_id": number, "text": text if text is not None else f"m{number}"}
    return made if chat is None else made | {"chat": chat}
