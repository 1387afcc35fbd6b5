"""The deck that a command is about, wherever it is: its owner at ``deck.sock``, or somebody's daemon at a URL.

Either way the verbs are the typed ones of :mod:`everdeck.verbs`, without an event loop, and their errors are those of
:mod:`everdeck.errors`. Over the socket nothing of asyncio is loaded: ``everdeck ps`` is typed all day.
"""

import builtins
import os
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Protocol, Self, TypeVar

from everdeck.cli import SCHEMES
from everdeck.model import Event, WorkerSpec, WorkerStatus
from everdeck.verbs import Inspection, Member, Started
from everdeck.wire import requests
from everdeck.wire.client import PATIENCE_SECONDS, WireClient

TOKEN_ENV = "EVERDECK_TOKEN"  # noqa: S105 - the name of the variable
_Answer = TypeVar("_Answer")


class Reached(Protocol):
    """What the commands ask of a deck."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def owner_pid(self) -> int | None:
        """Who owns it, on its machine; None where no single process does."""

    def list(self) -> builtins.list[WorkerStatus]:
        """As :meth:`everdeck.verbs.Verbs.list`."""

    def start(self, name: str, spec: WorkerSpec | None = None, *, replace: bool = False) -> WorkerStatus:
        """As :meth:`everdeck.verbs.Verbs.start`."""

    def stop_many(self, names: builtins.list[str], progress: Callable[[WorkerStatus], object]) -> object:
        """As :meth:`everdeck.verbs.Verbs.stop_many`."""

    def stop(self, name: str) -> WorkerStatus:
        """As :meth:`everdeck.verbs.Verbs.stop`."""

    def restart(self, name: str) -> WorkerStatus:
        """As :meth:`everdeck.verbs.Verbs.restart`."""

    def restart_many(self, names: builtins.list[str], parallel: int, progress: Started) -> object:
        """As :meth:`everdeck.verbs.Verbs.restart_many`."""

    def reset(self, name: str) -> WorkerStatus:
        """As :meth:`everdeck.verbs.Verbs.reset`."""

    def remove(self, name: str, *, data: bool = False) -> None:
        """As :meth:`everdeck.verbs.Verbs.remove`."""

    def adopt(self, name: str, pid: int, fields: dict[str, Any]) -> WorkerStatus:
        """As :meth:`everdeck.verbs.Verbs.adopt`."""

    def inspect(self, name: str) -> Inspection:
        """As :meth:`everdeck.verbs.Verbs.inspect`."""

    def events(self, after: int, limit: int, worker: str | None) -> builtins.list[Event]:
        """As :meth:`everdeck.verbs.Verbs.events`."""

    def last_event_id(self) -> int:
        """As :meth:`everdeck.verbs.Verbs.last_event_id`."""

    def follow(self, after: int) -> Iterator[Event]:
        """As :meth:`everdeck.verbs.Verbs.follow`; over the socket it ends with ClientError when the owner goes."""

    def logs(self, name: str, lines: int | None, **chosen: Any) -> builtins.list[str]:
        """As :meth:`everdeck.verbs.Verbs.logs`."""

    def follow_logs(self, name: str, lines: int, grep: str | None) -> Iterator[str]:
        """As :meth:`everdeck.verbs.Verbs.follow_logs`."""

    def members(self) -> builtins.list[Member]:
        """As :meth:`everdeck.verbs.Verbs.members`."""


def is_elsewhere(where: str) -> bool:
    """Is it not a directory of this machine?"""
    return where.startswith(SCHEMES)


def reached(
    options: Namespace, *, timeout_seconds: float | None = None, patience_seconds: float = PATIENCE_SECONDS
) -> Reached:
    """The deck that ``--state`` names; a daemon gets the token of ``$EVERDECK_TOKEN``."""
    if is_elsewhere(options.where):
        return _Elsewhere(options.where, os.environ.get(TOKEN_ENV))
    return _Here(WireClient(options.state, timeout_seconds=timeout_seconds, patience_seconds=patience_seconds))


def _drop(_value: object) -> None:
    """A callback's answer is nobody's business."""


class _Here:
    """The owner of a directory of this machine."""

    def __init__(self, client: WireClient) -> None:
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def owner_pid(self) -> int:
        return self._client.connect().owner_pid

    def list(self) -> builtins.list[WorkerStatus]:
        return self._client.ask(requests.List())

    def start(self, name: str, spec: WorkerSpec | None = None, *, replace: bool = False) -> WorkerStatus:
        return self._client.ask(requests.Start(name, spec, replace))

    def stop_many(self, names: builtins.list[str], progress: Callable[[WorkerStatus], object]) -> object:
        return self._client.ask(requests.StopMany(names, progress=True), lambda status: _drop(progress(status)))

    def stop(self, name: str) -> WorkerStatus:
        return self._client.ask(requests.StopMany([name]))[0]

    def restart(self, name: str) -> WorkerStatus:
        return self._client.ask(requests.Restart(name))

    def restart_many(self, names: builtins.list[str], parallel: int, progress: Started) -> object:
        many = requests.RestartMany(names, parallel, progress=True)
        return self._client.ask(many, lambda told: progress(told.name, told.answer))

    def reset(self, name: str) -> WorkerStatus:
        return self._client.ask(requests.Reset(name))

    def remove(self, name: str, *, data: bool = False) -> None:  # noqa: ARG002 - here its data always goes
        self._client.ask(requests.Remove(name))

    def adopt(self, name: str, pid: int, fields: dict[str, Any]) -> WorkerStatus:
        return self._client.ask(requests.Adopt(name, pid, fields))

    def inspect(self, name: str) -> Inspection:
        return self._client.ask(requests.Inspect(name))

    def events(self, after: int, limit: int, worker: str | None) -> builtins.list[Event]:
        return self._client.ask(requests.Events(after, limit, worker))

    def last_event_id(self) -> int:
        return self._client.ask(requests.LastEventId())

    def follow(self, after: int) -> Iterator[Event]:
        return self._client.stream(requests.Follow(after))

    def logs(self, name: str, lines: int | None, **chosen: Any) -> builtins.list[str]:
        return self._client.ask(requests.Logs(name, lines, **chosen))

    def follow_logs(self, name: str, lines: int, grep: str | None) -> Iterator[str]:
        return self._client.stream(requests.FollowLogs(name, lines, grep))

    def members(self) -> builtins.list[Member]:
        return self._client.ask(requests.Members())


class _Elsewhere:
    """A deck at a URL: the asynchronous one, a verb at a time."""

    def __init__(self, where: str, token: str | None) -> None:
        import asyncio

        from everdeck.deck import AsyncDeck

        self._deck = AsyncDeck(where, token=token)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._run(self._deck.open())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._deck.close())
        self._runner.close()

    def owner_pid(self) -> int | None:
        return next((member.pid for member in self.members() if member.owner), None)

    def list(self) -> builtins.list[WorkerStatus]:
        return self._run(self._deck.list())

    def start(self, name: str, spec: WorkerSpec | None = None, *, replace: bool = False) -> WorkerStatus:
        return self._run(self._deck.start(name, spec, replace=replace))

    def stop_many(self, names: builtins.list[str], progress: Callable[[WorkerStatus], object]) -> object:
        return self._run(self._deck.stop_many(names, lambda status: _drop(progress(status))))

    def stop(self, name: str) -> WorkerStatus:
        return self._run(self._deck.stop(name))

    def restart(self, name: str) -> WorkerStatus:
        return self._run(self._deck.restart(name))

    def restart_many(self, names: builtins.list[str], parallel: int, progress: Started) -> object:
        return self._run(self._deck.restart_many(names, parallel=parallel, progress=progress))

    def reset(self, name: str) -> WorkerStatus:
        return self._run(self._deck.reset(name))

    def remove(self, name: str, *, data: bool = False) -> None:
        self._run(self._deck.remove(name, data=data))

    def adopt(self, name: str, pid: int, fields: dict[str, Any]) -> WorkerStatus:
        return self._run(self._deck.adopt(name, pid, **fields))

    def inspect(self, name: str) -> Inspection:
        return self._run(self._deck.inspect(name))

    def events(self, after: int, limit: int, worker: str | None) -> builtins.list[Event]:
        return self._run(self._deck.events(after, limit, worker))

    def last_event_id(self) -> int:
        return self._run(self._deck.last_event_id())

    def follow(self, after: int) -> Iterator[Event]:
        return self._each(self._deck.follow(after))

    def logs(self, name: str, lines: int | None, **chosen: Any) -> builtins.list[str]:
        return self._run(self._deck.logs(name, lines, **chosen))

    def follow_logs(self, name: str, lines: int, grep: str | None) -> Iterator[str]:
        return self._each(self._deck.follow_logs(name, lines, grep=grep))

    def members(self) -> builtins.list[Member]:
        return self._run(self._deck.members())

    def _run(self, verb: Coroutine[Any, Any, _Answer]) -> _Answer:
        return self._runner.run(verb)

    def _each(self, stream: AsyncIterator[_Answer]) -> Iterator[_Answer]:
        async def following() -> builtins.list[_Answer]:
            async for item in stream:
                return [item]
            return []

        while items := self._run(following()):
            yield from items
