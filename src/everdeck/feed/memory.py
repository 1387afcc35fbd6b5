"""What a bot remembers between updates, in the inbox's file and in step with it.

A conversation's state that is kept elsewhere (Redis, a pickle) is written at another moment than the ack: after a crash
the update comes again and finds the state that it has already set, and "Bob" is stored as the age. Here what a
handler writes is seen by everybody at once, as with any storage, and is committed with the ack of its update; an
attempt that fails takes it back.

One process works from a file at a time, so what was read or committed lately is still what the file says: it is kept at
hand, is not read again, and is not written again if it is the same.
"""

from collections.abc import Iterator
from typing import Final

from everdeck.feed import last_words
from everdeck.feed.dispatcher import Change, Item
from everdeck.feed.inbox import Inbox

# What is kept at hand, and what an entry takes beside its value.
AT_HAND_BYTES: Final = 1_000_000
ENTRY_BYTES: Final = 250


class Memory:
    """Values of one kind by key, as bytes. ``item`` is the update that is being worked on, if there is one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._inbox: Inbox | None = None
        self._newer: dict[str, tuple[bytes | None, int]] = {}  # what is not committed yet, with how many writes wait
        self._early: dict[str, bytes | None] = {}
        self._at_hand: dict[str, bytes | None] = {}  # what the file says, as far as it was read or written lately
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
        self._newer.clear()
        self._at_hand.clear()
        self._at_hand_bytes = 0

    def get(self, key: str) -> bytes | None:
        """The value, as everybody sees it now."""
        if key in self._newer:
            return self._newer[key][0]
        if self._inbox is None:
            return self._early.get(key)
        if key in self._at_hand:
            return self._at_hand[key]
        found = self._inbox.store.read("memory_get", self.kind, key)
        value: bytes | None = found[0][0] if found else None
        self._keep_at_hand(key, value)
        return value

    def all(self) -> Iterator[tuple[str, bytes]]:
        """Every key and value."""
        there: dict[str, bytes | None] = {}
        if self._inbox is not None:
            there.update(self._inbox.store.read("memory_all", self.kind))
        there.update(self._early)
        there.update({key: value for key, (value, _) in self._newer.items()})
        return ((key, value) for key, value in there.items() if value is not None)

    async def set(self, key: str, value: bytes | None, item: Item | None = None) -> None:
        """Remember a value, or forget it (None): with the ack of the update in work, else at once."""
        if self._inbox is None:
            self._early[key] = value
            return
        found = item or last_words.current.get()
        if isinstance(found, Item) and not found.settled and not found.acked:
            self.set_with_ack(key, value, found)
            return
        self._newer[key] = (value, self._newer.get(key, (None, 0))[1] + 1)
        change = Change(self, key, value, None)
        try:
            await self._inbox.store.write(change.write, then=lambda _: self._keep_at_hand(key, value))
        finally:
            self._wrote(key)

    def set_with_ack(self, key: str, value: bytes | None, item: Item) -> None:
        """Remember a value when this item is finished; it has no outcome yet and is not acked."""
        before = self._newer.get(key)
        if before is None:
            # Only what is committed is no news: what somebody else has yet to commit may be taken back.
            if key in self._at_hand and self._at_hand[key] == value:
                return
            self._newer[key] = (value, 1)
        else:
            self._newer[key] = (value, before[1] + 1)
        item.change(Change(self, key, value, before))

    # --- for the dispatcher ---

    def written(self, change: Change) -> None:
        """It is committed."""
        self._keep_at_hand(change.key, change.value)
        self._wrote(change.key)

    def undo(self, change: Change) -> None:
        """It will never be."""
        now, writes = self._newer.get(change.key, (None, 0))
        if writes <= 1:
            self._newer.pop(change.key, None)
        elif change.before is not None and now == change.value:
            self._newer[change.key] = (change.before[0], writes - 1)
        else:  # somebody else has written after us: his word stands
            self._newer[change.key] = (now, writes - 1)

    # --- helpers ---

    def _wrote(self, key: str) -> None:
        value, writes = self._newer.get(key, (None, 0))
        if writes > 1:
            self._newer[key] = (value, writes - 1)
        else:
            self._newer.pop(key, None)

    def _keep_at_hand(self, key: str, value: bytes | None) -> None:
        """What has not been read or written for the longest time makes room."""
        at_hand = self._at_hand
        if self._inbox is None:  # it was left meanwhile
            return
        if key in at_hand:
            self._at_hand_bytes -= ENTRY_BYTES + len(at_hand.pop(key) or b"")
        at_hand[key] = value
        self._at_hand_bytes += ENTRY_BYTES + len(value or b"")
        while self._at_hand_bytes > AT_HAND_BYTES:
            oldest = next(iter(at_hand))
            self._at_hand_bytes -= ENTRY_BYTES + len(at_hand.pop(oldest) or b"")
