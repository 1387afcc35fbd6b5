"""The verbs of a member: what the owner must do is asked of the owner, what the disk tells is read from the disk.

Events and logs are read here, so a member that reads much costs its owner nothing; that there is something to read is
told by the owner (:meth:`Membership.on_wake`), so nobody polls. A stream goes on from where it was when the owner
changes, also when this process becomes the owner.
"""

import asyncio
import builtins
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from everdeck.deck.events import Listener
from everdeck.deck.membership import Membership
from everdeck.deck.messages import MessageVerbs
from everdeck.errors import DeckClosed
from everdeck.logs import keeper as deck_logs
from everdeck.model import Event, EventKind, Layer, ProcessInfo, WorkerSpec, WorkerStatus, worker_name
from everdeck.registry import Registry, read_only
from everdeck.statedir import StateDir
from everdeck.verbs import (
    RESTARTS_AT_ONCE,
    Abilities,
    Inspection,
    Member,
    Name,
    Run,
    Started,
    Stopped,
    Workers,
    checked_parallel,
    request_id,
    spec_of,
    specs_of,
    told_once,
)
from everdeck.wire import requests as ask
from everdeck.wire.frames import raw

_BATCH: Final = 500


class MemberDeck(MessageVerbs):
    """The deck as a member has it."""

    def __init__(self, membership: Membership) -> None:
        self.state_dir = membership.state_dir
        self._membership = membership
        self._places = StateDir(membership.state_dir)

    # --- verbs that act -----------------------------------------------------------------------------------------

    async def start(self, name: Name, command: Run = None, *, replace: bool = False, **fields: Any) -> WorkerStatus:
        """As :meth:`Verbs.start`; what is not valid is refused here already."""
        spec = spec_of("command", command, fields)
        return await self._membership.ask(ask.Start(worker_name(name), spec, replace))

    async def start_many(
        self, workers: Workers, *, replace: bool = False, progress: Started | None = None, **fields: Any
    ) -> builtins.list[WorkerStatus]:
        """As :meth:`Verbs.start_many`."""
        wanted: dict[str, WorkerSpec | None] = dict(specs_of(workers, fields).items())
        return await self._membership.ask(ask.StartMany(wanted, replace, progress is not None), _each_once(progress))

    async def stop(self, name: Name) -> WorkerStatus:
        """As :meth:`Verbs.stop`."""
        return (await self.stop_many([name]))[0]

    async def stop_many(self, names: Iterable[Name], progress: Stopped | None = None) -> builtins.list[WorkerStatus]:
        """As :meth:`Verbs.stop_many`."""
        many = ask.StopMany([worker_name(name) for name in names], progress is not None)
        tell = None if progress is None else told_once(progress, lambda status: status.name)
        return await self._membership.ask(many, tell)

    async def stop_all(self) -> builtins.list[WorkerStatus]:
        """As :meth:`Verbs.stop_all`."""
        return await self._membership.ask(ask.StopAll())

    async def restart(self, name: Name) -> WorkerStatus:
        """As :meth:`Verbs.restart`."""
        return await self._membership.ask(ask.Restart(worker_name(name)))

    async def restart_many(
        self, names: Iterable[Name], *, parallel: int = RESTARTS_AT_ONCE, progress: Started | None = None
    ) -> builtins.list[WorkerStatus]:
        """As :meth:`Verbs.restart_many`."""
        keys: builtins.list[str] = [worker_name(name) for name in names]
        many = ask.RestartMany(keys, checked_parallel(parallel), progress is not None)
        return await self._membership.ask(many, _each_once(progress))

    async def reset(self, name: Name) -> WorkerStatus:
        """As :meth:`Verbs.reset`."""
        return await self._membership.ask(ask.Reset(worker_name(name)))

    async def remove(self, name: Name, *, data: bool = False) -> None:  # noqa: ARG002 - here data always goes
        """As :meth:`Verbs.remove`."""
        await self._membership.ask(ask.Remove(worker_name(name)))

    async def was_removed(self, name: Name) -> bool:
        """Did the request that is being carried out remove this worker before, by whoever owned the deck then?"""
        key = worker_name(name)
        request = request_id(raw(ask.Remove(key)))
        return request is not None and await asyncio.to_thread(self._was_done, request, key)

    async def adopt(self, name: Name, pid: int, **fields: Any) -> WorkerStatus:
        """As :meth:`Verbs.adopt`."""
        given = WorkerSpec.of(("-",), **{key: value for key, value in fields.items() if key != "command"})
        plain = {key: msgspec.to_builtins(getattr(given, key)) for key in fields if key != "command"}
        if "command" in fields:
            plain["command"] = list(WorkerSpec.of(fields["command"]).command)
        return await self._membership.ask(ask.Adopt(worker_name(name), pid, plain))

    async def reconcile(self) -> None:
        """As :meth:`Verbs.reconcile`."""
        await self._membership.ask(ask.Reconcile())

    async def record_event(self, worker: str | None, kind: EventKind, detail: dict[str, Any]) -> Event:
        """Add an event of somebody else's to the stream."""
        return await self._membership.ask(ask.RecordEvent(worker, kind, detail))

    # --- verbs that tell ----------------------------------------------------------------------------------------

    async def status(self, name: Name) -> WorkerStatus:
        """As :meth:`Verbs.status`."""
        return await self._membership.ask(ask.Status(worker_name(name)))

    async def list(self) -> builtins.list[WorkerStatus]:
        """As :meth:`Verbs.list`."""
        return await self._membership.ask(ask.List())

    async def inspect(self, name: Name) -> Inspection:
        """As :meth:`Verbs.inspect`."""
        return await self._membership.ask(ask.Inspect(worker_name(name)))

    async def spec(self, name: Name) -> WorkerSpec:
        """As :meth:`Verbs.spec`."""
        return await self._membership.ask(ask.Spec(worker_name(name)))

    async def tree(self, name: Name) -> builtins.list[ProcessInfo]:
        """As :meth:`Verbs.tree`."""
        return await self._membership.ask(ask.Tree(worker_name(name)))

    async def layers(self, name: Name) -> builtins.list[Layer]:
        """As :meth:`Verbs.layers`."""
        return await self._membership.ask(ask.Layers(worker_name(name)))

    async def logs(
        self,
        name: Name,
        lines: int | None = 20,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        grep: str | None = None,
    ) -> builtins.list[str]:
        """As :meth:`Verbs.logs`, from the disk."""
        return await deck_logs.read(await self._log_dir(name), lines=lines, since=since, until=until, grep=grep)

    async def follow_logs(self, name: Name, lines: int = 0, *, grep: str | None = None) -> AsyncIterator[str]:
        """As :meth:`Verbs.follow_logs`, from the disk."""
        async for line in deck_logs.follow(await self._log_dir(name), lines=lines, grep=grep):
            yield line

    async def _log_dir(self, name: Name) -> Path:
        key = worker_name(name)
        place = self._places.worker(key).log
        if not place.is_dir():
            await self.status(key)  # the owner says who is not known, and who might have been meant
        return place

    async def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> builtins.list[Event]:
        """As :meth:`Verbs.events`, from the disk."""
        with _reading(self._registry()) as registry:
            return registry.events(after, limit, worker)

    async def last_event_id(self) -> int:
        """As :meth:`Verbs.last_event_id`, from the disk."""
        with _reading(self._registry()) as registry:
            return registry.last_event_id()

    async def follow(self, after: int | None = None) -> AsyncIterator[Event]:
        """As :meth:`Verbs.follow`: read from the disk, woken by the owner of the moment."""
        with _reading(self._registry()) as registry:
            wakened = asyncio.Event()
            end = self._membership.on_wake(wakened.set)
            try:
                position = registry.last_event_id() if after is None else after
                while not self._membership.is_closed:
                    wakened.clear()
                    for event in registry.events(position, _BATCH):
                        yield event
                        position = event.id
                        wakened.set()  # look once more before waiting: there may be more than a batch
                    await wakened.wait()
            finally:
                end()

    def on_event(self, callback: Callable[[Event], Any]) -> Callable[[], None]:
        """As :meth:`Verbs.on_event`."""
        with _reading(self._registry()) as registry:
            position = registry.last_event_id()
        listener = Listener(self._places.registry, position, callback, asyncio.get_running_loop())
        end = self._membership.on_wake(listener.wake)

        def unsubscribe() -> None:
            end()
            listener.end()

        return unsubscribe

    async def abilities(self) -> Abilities:
        """A member keeps every verb."""
        return Abilities("member", str(self._membership.state_dir))

    async def members(self) -> builtins.list[Member]:
        """As :meth:`Verbs.members`."""
        return await self._membership.ask(ask.Members())

    def _was_done(self, request: str, worker: str) -> bool:
        with _reading(self._registry()) as registry:
            return worker in registry.requests_done(request)

    def _registry(self) -> Registry:
        if self._membership.is_closed:
            raise DeckClosed(f"the deck {self._membership.state_dir} is closed; open it first")
        return read_only(self._places.registry)


class _reading:  # noqa: N801 - reads as what it does, in a with statement
    """A look at the registry, closed afterwards."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __enter__(self) -> Registry:
        return self._registry

    def __exit__(self, *_: object) -> None:
        self._registry.close()


def _each_once(progress: Started | None) -> Callable[[ask.Told], None] | None:
    if progress is None:
        return None
    tell = told_once(progress, lambda name, _answer: name)
    return lambda one: tell(one.name, one.answer)


if TYPE_CHECKING:  # mypy proves that a member keeps the contract
    from everdeck.verbs import Verbs

    def _keeps_the_contract(member: MemberDeck) -> Verbs:
        return member
