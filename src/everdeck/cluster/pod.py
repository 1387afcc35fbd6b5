"""The deck of one worker, inside its pod: started by the fence, on the worker's own volume.

It is the same deck as on one box, with one worker in it, so restart policy, backoff, breaker, health, the log and its
archives, secrets and satellites are the same code. The worker is bound to it, and it is bound to the fence. What
happens is reported to the fence, which writes it into the worker's Lease; the log is repeated on the pod's output, so
that ``kubectl logs`` shows it too.

Whoever asks for more (logs, messages, a reset) comes through ``python -m everdeck.cluster.door``, which joins its
standard input and output to this deck's socket.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from everdeck import AsyncDeck
from everdeck.cluster.fence import DEADLINE_FD_ENV, REPORT_FD_ENV, Deadline, say
from everdeck.cluster.volume import GIVEN, RESTART, SECRET_PREFIX, SPEC_FILE, STATE, VOLUME
from everdeck.errors import EverdeckError, UnknownWorker
from everdeck.faults import Fault, fault_of
from everdeck.logs.keeper import bundles
from everdeck.logs.reader import Follower, LogView
from everdeck.model import Event, Limits, Secret, State, WorkerName, WorkerSpec, WorkerStatus, worker_name
from everdeck.satellites import FEED
from everdeck.statedir import StateDir

START: Final = os.environ.get("EVERDECK_START", "")
_DONE: Final = VOLUME / "restarted"  # the id of the newest restart that was done
MOST_TOLD: Final = 50
MEASURED_SECONDS: Final = 10.0
"""How often processor and memory are told, though nothing happens."""


def spec_given(command: list[str], given: Path = GIVEN) -> WorkerSpec:
    """The spec as the deck of the namespace wrote it into the worker's Secret, for this side of the fence."""
    path = given / SPEC_FILE
    fields: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {"command": command}
    secrets = fields.get("secrets", {})
    for name, secret in secrets.items():
        file = given / f"{SECRET_PREFIX}{name}"
        if file.exists():
            secrets[name] = {**secret, "value": file.read_text()}
    spec = msgspec.convert(fields, WorkerSpec)
    limits = spec.limits
    return WorkerSpec.of(
        spec,
        lifetime="bound",
        secrets={name: Secret(one.value, env=one.env) for name, one in spec.secrets.items()},
        # Memory, processor and account are the pod's own, set by the kubelet.
        limits=Limits(open_files=limits.open_files, nice=limits.nice),
        user=None,
        group=None,
    )


class _Reports:
    """Tells the fence how the worker is: the status, and the newest events with their ids in this deck."""

    def __init__(self, deck: AsyncDeck, name: WorkerName, channel: socket.socket) -> None:
        self._deck = deck
        self._name = name
        self._channel = channel
        self._news = asyncio.Event()
        self.fault: Fault | None = None
        """Why the worker could not be started, if it could not."""

    def heard(self, _event: Event) -> None:
        self._news.set()

    async def tell_for_ever(self) -> None:
        while True:
            await self.tell()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MEASURED_SECONDS):
                    await self._news.wait()
            self._news.clear()

    async def tell(self) -> None:
        try:
            status = await self._deck.status(self._name)
        except UnknownWorker:
            if self.fault is None:
                return
            status = WorkerStatus(self._name, State.STOPPED)
        last = await self._deck.last_event_id()
        events = await self._deck.events(after=max(0, last - MOST_TOLD), worker=self._name)
        told = {
            "status": status,
            "deck": self._deck.deck_id,
            "start": START,
            "fault": self.fault,
            "events": [_short(event) for event in events],
        }
        packet = msgspec.json.encode(told)
        with contextlib.suppress(OSError):  # the fence is gone, and so are we in a moment
            self._channel.send(packet)


def _short(event: Event) -> dict[str, Any]:
    detail = event.detail if len(msgspec.json.encode(event.detail)) < 1000 else {"shortened": True}  # noqa: PLR2004 - fifty of them fit into an annotation
    return {"id": event.id, "at": event.at, "kind": event.kind, "detail": detail}


def _end_of(log_dir: Path) -> int:
    with LogView(log_dir) as view:
        return view.end()


async def _mirror(log_dir: Path, position: int) -> None:
    """The worker's log on the pod's output, from a position on. A reader that does not read holds up nobody else."""
    loop = asyncio.get_running_loop()
    with Follower() as follower:
        follower.add("", log_dir, position=position)
        async with contextlib.aclosing(bundles(follower)) as found:
            async for lines in found:
                await loop.run_in_executor(None, _print, [line.text for line in lines])


def _print(lines: list[str]) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


async def _start(deck: AsyncDeck, name: WorkerName, spec: WorkerSpec) -> None:
    """A restart is told and counted as one, once; but what was written into the Secret meanwhile counts from now on.

    A pod that the cluster puts elsewhere, and a deck that the fence starts again, have the id of a start that was done.
    """
    if not START.startswith(RESTART) or (_DONE.exists() and _DONE.read_text() == START):
        await deck.start(name, spec, replace=True)
        return
    same = False
    with contextlib.suppress(UnknownWorker):  # a volume that was made anew
        same = await deck.whole_spec(name) == spec
    await (deck.restart(name) if same else deck.start(name, spec, replace=True))
    _DONE.write_text(START)


def _forget_readers(name: WorkerName, spec: WorkerSpec) -> None:
    """Whoever read from a satellite on this volume in another pod is gone: what it held is handed out now.

    On another machine its boot id would tell; on the same one only its lease, a minute later.
    """
    if spec.satellite is not None and (StateDir(STATE).worker(name).data / FEED).exists():
        from everdeck.deck.feeds import feed_of  # noqa: PLC0415 - most pods have no feed, and all of them must start soon
        from everdeck.satellites import bridge  # noqa: PLC0415 - as above

        with contextlib.suppress(EverdeckError), bridge.opened(feed_of(STATE, name, spec)) as claims:
            claims.forget_unseen()


async def live(command: list[str]) -> int:
    """Run the worker until the fence says that it is over."""
    name = worker_name(os.environ["EVERDECK_WORKER_NAME"])
    deadline = Deadline(int(os.environ.pop(DEADLINE_FD_ENV)))
    channel = socket.socket(fileno=int(os.environ.pop(REPORT_FD_ENV)))
    channel.setblocking(False)  # noqa: FBT003 - the call's own form
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    spec = spec_given(command)
    if deadline.passed:
        # The fence was stopped between taking the Lease and starting us: somebody else may hold it by now.
        say("the Lease is over; nothing is started")
        return 1
    async with AsyncDeck(STATE, join=False) as deck:
        reports = _Reports(deck, name, channel)
        deck.on_event(reports.heard)
        log_dir = StateDir(STATE).worker(name).log
        begins = _end_of(log_dir)  # before the start: its first lines are on the pod's output too
        await asyncio.to_thread(_forget_readers, name, spec)
        try:
            await _start(deck, name, spec)
        except EverdeckError as error:
            say(f"the worker cannot be started: {error}")
            reports.fault = fault_of(error)
        tasks = [loop.create_task(reports.tell_for_ever()), loop.create_task(_mirror(log_dir, begins))]
        await leave.wait()
        await deck.stop(name)
        await reports.tell()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return 0


def main(arguments: list[str]) -> int:
    """``python -m everdeck.cluster.pod -- COMMAND …``; started by the fence."""
    return asyncio.run(live(arguments[1:] if arguments[:1] == ["--"] else arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
