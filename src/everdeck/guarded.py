"""A deck as one caller may use it: every verb held to a grant.

Both doors, HTTP and the sockets, put this between a caller and the deck, so what a role may do is decided in one place.
What is not listed here is refused: a verb that is added to the contract is closed until somebody has thought about it.

With a label selector the other workers do not exist: they are not listed, their events are not told, and naming one is
an :class:`UnknownWorker` as for any name that nobody has, without suggestions that would give names away.
"""

import builtins
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

from msgspec.structs import replace as changed

from everdeck.access import Grant, Role
from everdeck.errors import AccessDenied, UnknownWorker
from everdeck.messages import MessageStream
from everdeck.model import Event, WorkerSpec, WorkerStatus, worker_name
from everdeck.verbs import RESTARTS_AT_ONCE, Inspection, Name, Run, Started, Stopped, Verbs, Workers

_FACTS: Final = frozenset(
    {"state_dir", "is_here", "deck_id", "owner_pid", "abilities", "members", "last_event_id", "applied"}
)
"""What everybody who is let in may know about the deck itself."""

_BATCH: Final = 1000

_ON_ONE: Final[Mapping[str, Role]] = {
    "status": Role.READ,
    "tree": Role.READ,
    "layers": Role.READ,
    "crash_times": Role.READ,
    "stop": Role.OPERATE,
    "restart": Role.OPERATE,
    "reset": Role.OPERATE,
    "feed": Role.READ,
    "letters": Role.OPERATE,
    "decide": Role.OPERATE,
    "whole_spec": Role.ADMIN,
}
"""Coroutines whose first argument is the worker they are about."""


class Guarded:
    """Keeps the contract of :class:`everdeck.verbs.Verbs` for the bearer of a grant."""

    def __init__(self, deck: Verbs, grant: Grant, most_lines: int | None = None) -> None:
        self._deck = deck
        self.grant = grant
        self._most_lines = most_lines

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)
        if verb in _FACTS:
            return getattr(self._deck, verb)
        role = _ON_ONE.get(verb)
        if role is None:
            raise AccessDenied(self.grant.name, verb, "it of nobody who comes from outside")
        act: Callable[..., Awaitable[Any]] = getattr(self._deck, verb)

        async def on_one(name: Name, *arguments: Any, **options: Any) -> Any:
            self.grant.require(role, verb)
            await self._seen(name)
            return await self._hushed(act(name, *arguments, **options))

        return on_one

    # --- one worker ---------------------------------------------------------------------------------------------

    async def spec(self, name: Name) -> WorkerSpec:
        """What it runs; values of its environment are for those who may operate it, and empty for others."""
        self.grant.require(Role.READ, "spec")
        await self._seen(name)
        return self._shown(await self._hushed(self._deck.spec(name)))

    async def inspect(self, name: Name) -> Inspection:
        """Everything about it; of its environment as :meth:`spec`."""
        self.grant.require(Role.READ, "inspect")
        await self._seen(name)
        found: Inspection = await self._hushed(self._deck.inspect(name))
        return changed(found, spec=self._shown(found.spec))

    async def start(self, name: Name, command: Run = None, *, replace: bool = False, **fields: Any) -> WorkerStatus:
        """Start a known worker (operate), or one by what it runs (admin)."""
        await self._may_start(name, command, fields)
        status: WorkerStatus = await self._hushed(self._deck.start(name, command, replace=replace, **fields))
        return status

    async def start_many(
        self, workers: Workers, *, replace: bool = False, progress: Started | None = None, **fields: Any
    ) -> builtins.list[WorkerStatus]:
        """As :meth:`start`, for many."""
        allowed: dict[Name, Run] = {}
        refused: list[Exception] = []
        for name, command in workers.items():
            try:
                await self._may_start(name, command, fields)
                allowed[name] = command
            except (UnknownWorker, AccessDenied) as error:
                refused.append(error)
                if progress is not None:
                    progress(worker_name(name), error)
        try:
            started = await self._deck.start_many(allowed, replace=replace, progress=progress, **fields)
        except ExceptionGroup as group:
            refused.extend(group.exceptions)
            started = []
        if refused:
            raise ExceptionGroup(f"{len(refused)} of {len(workers)} workers could not be started", refused)
        return started

    async def stop_many(self, names: Iterable[Name], progress: Stopped | None = None) -> builtins.list[WorkerStatus]:
        """As ``stop``, for many."""
        self.grant.require(Role.OPERATE, "stop")
        asked = list(names)
        for name in asked:
            await self._seen(name)
        stopped: builtins.list[WorkerStatus] = await self._hushed(self._deck.stop_many(asked, progress))
        return stopped

    async def restart_many(
        self, names: Iterable[Name], *, parallel: int = RESTARTS_AT_ONCE, progress: Started | None = None
    ) -> builtins.list[WorkerStatus]:
        """As ``restart``, for many."""
        self.grant.require(Role.OPERATE, "restart")
        asked = list(names)
        for name in asked:
            await self._seen(name)
        again = self._deck.restart_many(asked, parallel=parallel, progress=progress)
        restarted: builtins.list[WorkerStatus] = await self._hushed(again)
        return restarted

    async def remove(self, name: Name, *, data: bool = False) -> None:
        """Remove one (admin); asked for again under the id that it was removed with, it is answered as before."""
        self.grant.require(Role.ADMIN, "remove")
        try:
            await self._seen(name)
        except UnknownWorker:
            if not await self._deck.was_removed(name):  # type: ignore[attr-defined]  # the deck of one machine has it
                raise
            return
        await self._hushed(self._deck.remove(name, data=data))

    async def send(self, name: Name, **message: Any) -> int:
        """Promise a message (operate); with files (admin), because the satellite reads them with its own rights."""
        self.grant.require(Role.ADMIN if message.get("attachments") else Role.OPERATE, "send")
        await self._seen(name)
        number: int = await self._hushed(self._deck.send(name, **message))
        return number

    async def adopt(self, name: Name, pid: int, **fields: Any) -> WorkerStatus:
        """Take a process over: from then on it is restarted with our rights."""
        self.grant.require(Role.ADMIN, "adopt", whole_deck=True)
        return await self._deck.adopt(name, pid, **fields)

    def messages(self, name: Name | None = None) -> MessageStream:
        """What satellites bring in; whoever names one has looked at its status before."""
        self.grant.require(Role.OPERATE, "messages", whole_deck=name is None)
        return self._deck.messages(name)

    def log_dir(self, name: Name) -> Any:
        """Where its log is; whoever asks has looked at its status before."""
        self.grant.require(Role.READ, "logs")
        return self._deck.log_dir(name)  # type: ignore[attr-defined]  # the deck of one machine has it

    async def logs(self, name: Name, lines: int | None = 20, **window: Any) -> builtins.list[str]:
        """The last lines of its log, where so many are allowed: its worker chose how many there are."""
        self.grant.require(Role.READ, "logs")
        await self._seen(name)
        allowed = [count for count in (lines, self._most_lines) if count is not None]
        found: builtins.list[str] = await self._hushed(self._deck.logs(name, min(allowed, default=None), **window))
        return found

    async def follow_logs(self, name: Name, lines: int = 0, *, grep: str | None = None) -> AsyncIterator[str]:
        """Its log as it is written."""
        self.grant.require(Role.READ, "logs")
        await self._seen(name)
        async for line in self._deck.follow_logs(name, lines, grep=grep):
            yield line

    # --- the deck -----------------------------------------------------------------------------------------------

    async def stop_all(self) -> builtins.list[WorkerStatus]:
        """Every worker that exists for this caller."""
        if not self.grant.labels:
            self.grant.require(Role.OPERATE, "stop")
            return await self._deck.stop_all()
        return await self.stop_many([status.name for status in await self.list()])

    async def reconcile(self) -> None:
        """Compare with the kernel now."""
        self.grant.require(Role.OPERATE, "reconcile", whole_deck=True)
        await self._deck.reconcile()

    async def remember_applied(self, memory: bytes) -> None:
        """What a configuration brought."""
        self.grant.require(Role.ADMIN, "apply", whole_deck=True)
        await self._deck.remember_applied(memory)  # type: ignore[attr-defined]  # the deck of a daemon has it

    async def list(self) -> builtins.list[WorkerStatus]:
        """Every worker that exists for this caller."""
        self.grant.require(Role.READ, "list")
        return self._visible(await self._deck.list())

    async def glance(self) -> builtins.list[WorkerStatus]:
        """The same without what has to be measured."""
        self.grant.require(Role.READ, "list")
        return self._visible(await self._deck.glance())  # type: ignore[attr-defined]  # the deck of one machine has it

    async def usage(self) -> Mapping[str, tuple[float, int]]:
        """What everybody uses, by name; who does not exist for this caller is not in any of its lists."""
        self.grant.require(Role.READ, "list")
        used: Mapping[str, tuple[float, int]] = await self._deck.usage()  # type: ignore[attr-defined]  # as above
        return used

    async def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> builtins.list[Event]:
        """What happened to workers that exist for this caller."""
        self.grant.require(Role.READ, "events")
        if not self.grant.labels:
            return await self._deck.events(after, limit, worker)
        found: builtins.list[Event] = []
        while limit is None or len(found) < limit:
            batch = await self._deck.events(after, _BATCH, worker)
            if not batch:
                break
            after = batch[-1].id
            found += [event for event in batch if await self.tells_of(event.worker)]
        return found[:limit]

    async def follow(self, after: int | None = None) -> AsyncIterator[Event]:
        """The same as it happens."""
        self.grant.require(Role.READ, "events")
        async for event in self._deck.follow(after):
            if await self.tells_of(event.worker):
                yield event

    async def tells_of(self, worker: str | None) -> bool:
        """May this caller hear of events of that worker, or of the deck itself (None)?"""
        if not self.grant.labels:
            return True
        if worker is None:
            return False
        try:
            return self.grant.sees((await self._deck.spec(worker)).labels)
        except UnknownWorker:
            return False

    # --- below ----------------------------------------------------------------------------------------------------

    def _shown(self, spec: WorkerSpec) -> WorkerSpec:
        return spec if self.grant.role.includes(Role.OPERATE) else changed(spec, env=dict.fromkeys(spec.env, ""))

    def _visible(self, found: builtins.list[WorkerStatus]) -> builtins.list[WorkerStatus]:
        return [status for status in found if self.grant.sees(status.labels)] if self.grant.labels else found

    async def _seen(self, name: Name) -> None:
        if self.grant.labels and not await self.tells_of(worker_name(name)):
            raise UnknownWorker(worker_name(name))

    async def _hushed(self, verb: Awaitable[Any]) -> Any:
        """The answer; an unknown name is not answered with the names of workers that do not exist for the caller."""
        try:
            return await verb
        except UnknownWorker as unknown:
            if self.grant.labels and unknown.suggestions:
                raise UnknownWorker(unknown.worker) from None
            raise

    async def _may_start(self, name: Name, command: Run, fields: Mapping[str, Any]) -> None:
        if command is None and not fields:
            self.grant.require(Role.OPERATE, "start")
            await self._seen(name)
            return
        self.grant.require(Role.ADMIN, "start by a command")
        if self.grant.labels:
            await self._may_name(name, command, fields)

    async def _may_name(self, name: Name, command: Run, fields: Mapping[str, Any]) -> None:
        labels = command.labels if isinstance(command, WorkerSpec) else fields.get("labels") or {}
        wanted = ", ".join(f"{key}={value}" for key, value in self.grant.labels.items())
        if not self.grant.sees(labels):
            raise AccessDenied(self.grant.name, "start", f"the labels {wanted} on every worker it makes")
        try:
            known = await self._deck.spec(name)
        except UnknownWorker:
            return
        if not self.grant.sees(known.labels):
            raise AccessDenied(
                self.grant.name, "start", "another name; this one belongs to a worker without its labels"
            )
