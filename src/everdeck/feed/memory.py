"""What a bot remembers between updates, in the inbox's file and in step with it.

A conversation's state that is kept elsewhere (Redis, a pickle) is written at another moment than the ack: after a crash
the update comes again and finds the state that it has already set, and "Bob" is stored as the age. Here what a
handler writes is seen by everybody at once, as with any storage, and is committed with the ack of its update; an
attempt that fails takes it back.

One process works from a file at a time, so what was read or committed lately is still what the file says: it is kept at
hand, is not read again, and is not written again if it is the same.
"""

import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, Final, TypeAlias

from everdeck.errors import SpecError
from everdeck.feed import last_words
from everdeck.feed.dispatcher import Change, Item
from everdeck.feed.inbox import Inbox
from everdeck.feed.store import SQL

# What is kept at hand, and what an entry takes beside its value.
AT_HAND_BYTES: Final = 1_000_000
ENTRY_BYTES: Final = 250
LARGE_BYTES: Final = AT_HAND_BYTES // 4
_HALF_OF_A_PAIR: Final = re.compile("[\ud800-\udfff]")


def is_key(text: str) -> bool:
    """Can it be a key? SQLite ends a JSON text at a NUL, and half of a surrogate pair is no UTF-8."""
    return "\0" not in text and (text.isascii() or not _HALF_OF_A_PAIR.search(text))


async def take_over(inbox: Inbox, kinds: Mapping[str, str]) -> None:
    """Values of each of these kinds are of another from now on: all of them, once."""

    def rename(connection: Any) -> None:
        connection.executemany(SQL["memory_rename"], [(new, old) for old, new in kinds.items()])

    await inbox.store.write(rename)


class Memory:
    """Values of one kind by key, as bytes. ``item`` is the update that is being worked on, if there is one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._inbox: Inbox | None = None
        self._pending: dict[str, list[Change]] = {}  # what is not committed yet, the newest last
        self._number = 0
        self._early: dict[str, bytes | None] = {}
        self._at_hand: dict[str, _Kept] = {}  # what the file says, as far as it was read or written lately
        self._at_hand_bytes = 0

    async def live_in(self, inbox: Inbox) -> None:
        """The inbox is open: what was written before is written now."""
        self._inbox = inbox
        early, self._early = self._early, {}
        for key, value in early.items():
            await self.set(key, value)

    def leave(self) -> None:
        """The inbox is about to be closed."""
        self._inbox = None
        self._pending.clear()
        self._at_hand.clear()
        self._at_hand_bytes = 0

    def get(self, key: str) -> bytes | None:
        """The value, as everybody sees it now."""
        if key in self._pending:
            return self._pending[key][-1].value
        if self._inbox is None:
            return self._early.get(key)
        kept = self._at_hand.get(key, _UNKNOWN)
        if not isinstance(kept, tuple):
            return kept
        found = self._inbox.store.read("memory_get", self.kind, key)
        value: bytes | None = found[0][0] if found else None
        if kept is _UNKNOWN:
            self._keep_at_hand(key, value)
        return value

    def all(self) -> Iterator[tuple[str, bytes]]:
        """Every key and value."""
        there: dict[str, bytes | None] = {}
        if self._inbox is not None:
            there.update(self._inbox.store.read("memory_all", self.kind))
        there.update(self._early)
        there.update({key: changes[-1].value for key, changes in self._pending.items()})
        return ((key, value) for key, value in there.items() if value is not None)

    async def set(self, key: str, value: bytes | None, item: Item | None = None) -> None:
        """Remember a value, or forget it (None): with the ack of the update in work, else at once."""
        if self._inbox is None:
            self._early[key] = value
            return
        found = item or last_words.current.get()
        if isinstance(found, Item) and found.takes_changes and found.is_in(self._inbox):
            self.set_with_ack(key, value, found)
        elif not self._is_no_news(key, value):
            change = self._change(key, value)
            try:
                await self._inbox.store.write(change.write, then=lambda _: self.written(change))
            finally:
                self.undo(change)  # unless it is written

    def set_with_ack(self, key: str, value: bytes | None, item: Item) -> None:
        """Remember a value when this item is finished, which :attr:`Item.takes_changes`."""
        if not self._is_no_news(key, value):
            earlier = item.change(self._change(key, value))
            if earlier is not None:
                self.undo(earlier)

    # --- for the dispatcher ---

    def written(self, change: Change) -> None:
        """It is committed. What was set before it must not be written after it, whoever is done later."""
        pending = self._pending.get(change.key, ())
        if change not in pending:  # a newer one is in the file, or the inbox was left
            return
        place = pending.index(change)
        for older in pending[:place]:
            older.superseded = True
        del self._pending[change.key][: place + 1]
        self._forget_if_empty(change.key)
        self._keep_at_hand(change.key, change.value)

    def undo(self, change: Change) -> None:
        """It will never be. What others have set before or after it stands."""
        if change in self._pending.get(change.key, ()):
            self._pending[change.key].remove(change)
            self._forget_if_empty(change.key)

    # --- helpers ---

    def _is_no_news(self, key: str, value: bytes | None) -> bool:
        """The file says so already, and nobody is about to change that."""
        # Only what is committed is no news: what somebody else has yet to commit may be taken back.
        return key not in self._pending and key in self._at_hand and self._at_hand[key] == _as_kept(value)

    def _change(self, key: str, value: bytes | None) -> Change:
        if not is_key(key):  # not by the committer: it writes for all
            raise SpecError("key", key, "a text without NUL and without half of a surrogate pair")
        self._number += 1
        change = Change(self, key, value, self._number)
        self._pending.setdefault(key, []).append(change)
        return change

    def _forget_if_empty(self, key: str) -> None:
        if not self._pending[key]:
            del self._pending[key]

    def _keep_at_hand(self, key: str, value: bytes | None) -> None:
        """What has not been read or written for the longest time makes room."""
        at_hand = self._at_hand
        if self._inbox is None:  # it was left meanwhile
            return
        kept = _as_kept(value)
        if key in at_hand:
            self._at_hand_bytes -= _size(at_hand.pop(key))
        at_hand[key] = kept
        self._at_hand_bytes += _size(kept)
        while self._at_hand_bytes > AT_HAND_BYTES:
            self._at_hand_bytes -= _size(at_hand.pop(next(iter(at_hand))))


_Kept: TypeAlias = bytes | tuple[bytes] | None
_UNKNOWN: Final = (b"",)


def _as_kept(value: bytes | None) -> _Kept:
    """Of a large value only the digest: it would push out all others, and would be written for each update."""
    return value if value is None or len(value) <= LARGE_BYTES else (sha256(value).digest(),)


def _size(kept: _Kept) -> int:
    return ENTRY_BYTES + (0 if kept is None or isinstance(kept, tuple) else len(kept))
