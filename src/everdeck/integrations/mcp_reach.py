"""The deck of a directory for somebody who only visits: its owner is asked, and nobody becomes the owner.

A member may inherit a deck (:mod:`everdeck.deck.membership`). An agent's server must not: it ends whenever an editor is
closed, and bound workers would end with it. So every question goes over ``deck.sock`` by itself, as the command line's
do. With no owner, what can be read is read from the disk, and acting raises :class:`NoOwner`.
"""

import asyncio
import builtins
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from everdeck.deck.messages import MessageVerbs
from everdeck.deck.peek import peek, peek_events, peek_spec
from everdeck.errors import NoOwner, UnknownWorker
from everdeck.logs import keeper
from everdeck.model import Event, EventKind, WorkerSpec, WorkerStatus, worker_name
from everdeck.statedir import StateDir
from everdeck.verbs import Inspection, Name, Run, current_caller
from everdeck.wire import requests
from everdeck.wire.client import WireClient
from everdeck.wire.requests import Verb

_Answer = TypeVar("_Answer")


class VisitedDeck(MessageVerbs):
    """The verbs of :class:`everdeck.verbs.Verbs` that a visitor needs."""

    def __init__(self, state_dir: Path) -> None:
        self._places = StateDir.at(state_dir)
        self.state_dir = Path(self._places.path)

    async def open(self) -> "VisitedDeck":
        """Nothing is held between questions."""
        return self

    async def close(self) -> None:
        """As :meth:`open`."""

    # --- verbs that act -----------------------------------------------------------------------------------------

    async def start(self, name: Name, command: Run = None, *, replace: bool = False, **fields: Any) -> WorkerStatus:
        """As :meth:`everdeck.verbs.Verbs.start`."""
        spec = None if command is None else WorkerSpec.of(command, **fields)
        return await self._ask(requests.Start(worker_name(name), spec, replace))

    async def stop(self, name: Name) -> WorkerStatus:
        """As :meth:`everdeck.verbs.Verbs.stop`."""
        return (await self._ask(requests.StopMany([worker_name(name)])))[0]

    async def restart(self, name: Name) -> WorkerStatus:
        """As :meth:`everdeck.verbs.Verbs.restart`."""
        return await self._ask(requests.Restart(worker_name(name)))

    async def record_event(self, worker: str | None, kind: EventKind, detail: dict[str, Any]) -> Event:
        """Add an event to the deck's stream."""
        return await self._ask(requests.RecordEvent(worker, kind, detail))

    # --- verbs that tell; without an owner, from the disk -------------------------------------------------------

    async def owner_pid(self) -> int | None:
        """Who owns the deck; None: nobody does."""
        return (await asyncio.to_thread(peek, self.state_dir)).owner_pid

    async def list(self) -> builtins.list[WorkerStatus]:
        """As :meth:`everdeck.verbs.Verbs.list`."""
        return await self._ask_or_read(requests.List(), lambda: peek(self.state_dir).workers)

    async def status(self, name: Name) -> WorkerStatus:
        """As :meth:`everdeck.verbs.Verbs.status`."""
        return await self._ask_or_read(requests.Status(worker_name(name)), lambda: self._peeked(worker_name(name)))

    async def spec(self, name: Name) -> WorkerSpec:
        """As :meth:`everdeck.verbs.Verbs.spec`."""
        key = worker_name(name)
        return await self._ask_or_read(requests.Spec(key), lambda: peek_spec(self.state_dir, key))

    async def inspect(self, name: Name) -> Inspection:
        """As :meth:`everdeck.verbs.Verbs.inspect`."""
        key = worker_name(name)
        return await self._ask_or_read(
            requests.Inspect(key), lambda: Inspection(self._peeked(key), peek_spec(self.state_dir, key), [], [], [])
        )

    async def logs(
        self,
        name: Name,
        lines: int | None = 20,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        grep: str | None = None,
    ) -> builtins.list[str]:
        """As :meth:`everdeck.verbs.Verbs.logs`, from the disk."""
        await self.spec(name)  # UnknownWorker with the names that are near
        log_dir = self._places.worker(worker_name(name)).log
        return await keeper.read(log_dir, lines=lines, since=since, until=until, grep=grep)

    async def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> builtins.list[Event]:
        """As :meth:`everdeck.verbs.Verbs.events`, from the disk."""
        return await asyncio.to_thread(peek_events, self.state_dir, after, limit, worker)

    async def last_event_id(self) -> int:
        """As :meth:`everdeck.verbs.Verbs.last_event_id`."""
        return await self._ask_or_read(
            requests.LastEventId(), lambda: max((event.id for event in peek_events(self.state_dir)), default=0)
        )

    # --- below --------------------------------------------------------------------------------------------------

    async def _ask(self, verb: Verb[_Answer]) -> _Answer:
        caller = current_caller()

        def asked() -> _Answer:
            with WireClient(self.state_dir, program="everdeck mcp", caller=caller) as owner:
                return owner.ask(verb)

        try:
            return await asyncio.to_thread(asked)
        except NoOwner as error:
            raise NoOwner(f"{error}; start it with: everdeck up --detach --state {self.state_dir}") from error

    async def _ask_or_read(self, verb: Verb[_Answer], read: Callable[[], _Answer]) -> _Answer:
        try:
            return await self._ask(verb)
        except NoOwner:
            return await asyncio.to_thread(read)

    def _peeked(self, name: str) -> WorkerStatus:
        for status in peek(self.state_dir).workers:
            if status.name == name:
                return status
        raise UnknownWorker(name)
