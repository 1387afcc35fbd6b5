"""What a bot remembers between updates, in the inbox's file and in step with it.

A conversation's state that is kept elsewhere (Redis, a pickle) is written at another moment than the ack: after a crash
the update comes again and finds the state that it has already set, and "Bob" is stored as the age. Here what a
handler writes is seen by everybody at once, as with any storage, and is committed with the ack of its update; an
attempt that fails takes it back.
"""

from collections.abc import Iterator

from everdeck.feed import last_words
from everdeck.feed.dispatcher import Item
from everdeck.feed.inbox import Inbox
from everdeck.feed.store import SQL


class Memory:
    """Values of one kind by key, as bytes. ``item`` is the update that is being worked on, if there is one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._inbox: Inbox | None = None
        self._newer: dict[str, tuple[bytes | None, int]] = {}  # what is not committed yet, with how many writes wait
        self._early: dict[str, bytes | None] = {}

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

    def get(self, key: str) -> bytes | None:
        """The value, as everybody sees it now."""
        if key in self._newer:
            return self._newer[key][0]
        if self._inbox is None:
            return self._early.get(key)
        found = self._inbox.store.read("memory_get", self.kind, key)
        return found[0][0] if found else None

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
        before = self.get(key)
        self._newer[key] = (value, self._newer.get(key, (None, 0))[1] + 1)
        if isinstance(found, Item) and not found.settled and not found.acked:
            found.with_ack(
                lambda connection: self._write(connection, key, value),
                undo=lambda: self._undo(key, value, before),
                after=lambda: self._written(key),
            )
        else:
            try:
                await self._inbox.store.write(lambda connection: self._write(connection, key, value))
            finally:
                self._written(key)

    def _write(self, connection: object, key: str, value: bytes | None) -> None:
        execute = connection.execute  # type: ignore[attr-defined]  # only the store may name SQLite
        if value is None:
            execute(SQL["memory_drop"], (self.kind, key))
        else:
            execute(SQL["memory_set"], (self.kind, key, value))

    def _written(self, key: str) -> None:
        value, writes = self._newer.get(key, (None, 0))
        if writes > 1:
            self._newer[key] = (value, writes - 1)
        else:
            self._newer.pop(key, None)

    def _undo(self, key: str, value: bytes | None, before: bytes | None) -> None:
        now, writes = self._newer.get(key, (None, 0))
        if writes <= 1:
            self._newer.pop(key, None)
        else:  # somebody else has written too: his word stands unless he wrote before us
            self._newer[key] = (before if now == value else now, writes - 1)
