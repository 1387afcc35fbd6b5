"""What a source hands over and what it is asked with: the feed's values.

A *source* is asked for a *batch* at a *position* and answers with *records*. It never learns whether a record was
handled: it is asked again at the position that was stored, and that is how upstream hears of it.

This module decides nothing and touches nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

RecordId: TypeAlias = int | str
Cursor: TypeAlias = int | str | None
FirstRun: TypeAlias = Literal["take", "skip"]
Delivery: TypeAlias = Literal["at-least-once", "at-most-once"]


class Record(msgspec.Struct, frozen=True, gc=False):
    """One thing that was delivered.

    ``id`` tells it from every other record of its stream; ``payload`` is kept byte for byte. Records of one ``key``
    are handled in the order they came, one at a time; None means that order does not matter for this one.
    """

    id: RecordId
    payload: bytes
    key: str | None = None

    @property
    def cursor_after(self) -> int | str:
        """Where to ask next once this record is stored: the next number, or the id itself if it is a text."""
        return self.id + 1 if isinstance(self.id, int) else self.id


@dataclass(frozen=True, slots=True)
class Batch:
    """One answer of a source.

    ``cursor`` is where to ask next; None leaves it where it is. ``asked`` is the offset that was sent upstream, for
    sources whose ids may start again at random (Telegram's do): it turns on the rules of :meth:`Stream.store`.
    """

    records: Sequence[Record]
    cursor: Cursor = None
    asked: int | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """Where to ask: ``cursor`` is what was stored, ``offset`` what is safe to send to a server that forgets.

    ``offset`` is the cursor until one answer has confirmed it, and 0 afterwards (see docs/design/feed.md).
    """

    cursor: Cursor
    offset: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a batch: rows added, records known before, and whether the ids had started again."""

    new: int
    duplicates: int
    restarted_ids: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """A stream in numbers. ``done`` counts over all runs; ``waiting`` includes items that wait for a retry."""

    done: int
    waiting: int
    in_flight: int
    dead: int

    def __str__(self) -> str:
        return f"{self.done:,} done, {self.in_flight:,} in flight, {self.dead:,} dead"


class Start(StrEnum):
    """How a stream begins.

    RESUME: a position is stored. TAKE: nothing is stored, or an earlier skip was cut short and must not run over
    what may have come since. SKIP: skip the history now; that this was begun is already on disk.
    """

    RESUME = "resume"
    TAKE = "take"
    SKIP = "skip"


@runtime_checkable
class Source(Protocol):
    """Anything that can be asked for what is new.

    ``name`` names the stream and keys its cursor, so it must stay the same for the same upstream account
    (``telegram:<bot id>``, never the token). ``fetch`` may wait for news and may be cancelled at any time; what it
    has returned and we have not stored must come again when it is asked at the same position. None means that
    nothing will ever come again.

    A source that can skip its history also has ``async def skip_history(self) -> Cursor``. One with a true
    ``waits_for_handlers`` is asked only when everything it has given is done.
    """

    name: str

    async def fetch(self, position: Position) -> Batch | None:
        """What is new at this position."""
        ...
