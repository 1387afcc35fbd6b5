"""The verbs about messages, for the decks whose state directory is on this machine: its owner and its members.

They act on the satellite's own file (:mod:`everdeck.satellites.bridge`), so they need nobody in between: a member reads
as fast as the owner, and a message that was promised is on disk though the owner is restarting.
"""

import asyncio
import builtins
from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from everdeck.errors import SpecError
from everdeck.messages import FeedStatus, Letter, LetterVerb, MessageStream, Which, encoded, outgoing
from everdeck.model import Event, EventKind, WorkerSpec, WorkerStatus, worker_name
from everdeck.verbs import Name, request_id

if TYPE_CHECKING:
    from pathlib import Path

    from everdeck.satellites.bridge import Feed, Reader


class MessageVerbs:
    """Mixed into the decks that have a state directory here."""

    if TYPE_CHECKING:  # what the deck has of its own
        state_dir: Path

        async def spec(self, name: Name) -> WorkerSpec:
            """See :class:`everdeck.verbs.Verbs`."""

        async def list(self) -> builtins.list[WorkerStatus]:
            """See :class:`everdeck.verbs.Verbs`."""

        def on_event(self, callback: Callable[[Event], Any]) -> Callable[[], None]:
            """See :class:`everdeck.verbs.Verbs`."""

    def messages(self, name: Name | None = None, *, run: Callable[[Any], Any] | None = None) -> MessageStream:
        """As :meth:`Verbs.messages`, from the satellites' files."""
        from everdeck.satellites.bridge import Messages  # noqa: PLC0415 - only decks with satellites load them

        key = None if name is None else worker_name(name)
        return Messages(lambda reader: self._find_inboxes(key, reader), run)

    async def send(
        self,
        name: Name,
        *,
        to: str | int,
        text: str = "",
        subject: str | None = None,
        attachments: Sequence[str | PathLike[str]] = (),
        **options: Any,
    ) -> int:
        """As :meth:`Verbs.send`."""
        from everdeck.satellites import bridge, kind_of  # noqa: PLC0415 - as above

        message = outgoing(to, text, subject=subject, attachments=attachments, **options)
        spec = await self.spec(name)
        if spec.satellite is None or not kind_of(spec.satellite.kind).sends:
            raise SpecError("name", name, "a satellite that can send: telegram, gmail or smtp")
        request = request_id(encoded(message))
        return await asyncio.to_thread(bridge.send, self._feed(str(name), spec), message, request)

    async def feed(self, name: Name) -> FeedStatus:
        """As :meth:`Verbs.feed`."""
        from everdeck.satellites import bridge  # noqa: PLC0415 - as above

        found = self._feed(str(name), await self._satellite(name))
        return await asyncio.to_thread(bridge.feed_status, found, str(name))

    async def letters(
        self, name: Name, *, which: Which = "dead", number: str | None = None, limit: int = 100
    ) -> builtins.list[Letter]:
        """As :meth:`Verbs.letters`."""
        from everdeck.satellites import bridge  # noqa: PLC0415 - as above

        found = self._feed(str(name), await self._satellite(name))
        return await asyncio.to_thread(lambda: bridge.letters(found, which=which, number=number, limit=limit))

    async def decide(self, name: Name, verb: LetterVerb, number: str) -> bool:
        """As :meth:`Verbs.decide`."""
        from everdeck.satellites import bridge  # noqa: PLC0415 - as above

        found = self._feed(str(name), await self._satellite(name))
        return await asyncio.to_thread(bridge.decide, found, verb, number)

    # --- helpers, in the order they are called ------------------------------------------------------------------

    def _feed(self, name: str, spec: WorkerSpec) -> "Feed":
        from everdeck.deck.feeds import feed_of  # noqa: PLC0415 - as above

        return feed_of(self.state_dir, name, spec)

    async def _satellite(self, name: Name) -> WorkerSpec:
        spec = await self.spec(name)
        if spec.satellite is None:
            raise SpecError("name", name, "a satellite; this worker runs a command of its own")
        return spec

    async def _find_inboxes(self, name: str | None, reader: "Reader") -> Callable[[], None]:
        """Let the reader know of the inboxes there are; the answer ends the telling of later ones."""
        if name is not None:
            refuse_unread(name, await self.spec(name))

        async def look(worker: str) -> None:
            if is_read(spec := await self.spec(worker)):
                reader.add(worker, self._feed(worker, spec))

        async def heard(event: Event) -> None:
            if name is not None and event.worker != name:
                return
            if event.kind is EventKind.STARTED and event.worker is not None:
                await look(event.worker)
            elif event.detail.get("removed") and event.worker is not None:
                reader.remove(event.worker)

        leave = self.on_event(heard)
        bound = [status.name for status in await self.list() if status.lifetime == "bound"] if name is None else [name]
        for worker in bound:
            await look(worker)
        return leave


def refuse_unread(name: str, spec: WorkerSpec) -> None:
    """Raise if nobody can read this worker's messages, and say why."""
    if not is_read(spec):
        to = spec.satellite.to if spec.satellite is not None else None
        why = f"its messages go to {to!r}" if to else "it brings no messages"
        raise SpecError("name", name, f"a satellite without to=...; {why}")


def is_read(spec: WorkerSpec) -> bool:
    """Are its messages for ``deck.messages``?"""
    from everdeck.satellites import kind_of  # noqa: PLC0415 - as above

    return spec.satellite is not None and spec.satellite.to is None and kind_of(spec.satellite.kind).receives
