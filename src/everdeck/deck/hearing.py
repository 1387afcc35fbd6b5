"""What the deck hears from workers and its own parts: notifications, health, cgroups, rotated logs.

Nobody waits for these. What cannot be recorded at the moment is true all the same, and said in the log.
"""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from everdeck.child import EVENT_FIELD, WORKER_ENV
from everdeck.deck.budget import Budget
from everdeck.deck.ending import out_of_memory, pid_of
from everdeck.deck.gather import Gathered
from everdeck.deck.healing import Healing
from everdeck.deck.parts import Parts, Unborn
from everdeck.deck.starting import Starting
from everdeck.deck.worker import Worker
from everdeck.errors import KernelError, RegistryError
from everdeck.kernel import identity as ids
from everdeck.kernel.containment import Tree, environment_of
from everdeck.kernel.identity import printable
from everdeck.kernel.notify import Notification, speaker
from everdeck.model import Cookie, EventKind, State
from everdeck.registry import WorkerRecord

_log: Final = logging.getLogger("everdeck.deck")
_LONGEST_STATUS: Final = 500
_STATUS_SECONDS: Final = 1.0
_EVENT_BYTES: Final = 4096
_EVENTS_AT_ONCE: Final = 500  # a feed that works off a backlog reports in bursts
_EVENTS_PER_SECOND: Final = 50.0
_SAID_EARLY: Final = 16  # in the milliseconds until its birth is recorded
_STRANGERS_AT_ONCE: Final = 20
_STRANGERS_PER_SECOND: Final = 5.0


class Hearing:
    """Takes note of what others say."""

    def __init__(self, parts: Parts, starting: Starting, healing: Healing) -> None:
        self._parts = parts
        self._starting = starting
        self._healing = healing
        self._said: dict[str, Worker] = {}
        self._events: dict[str, Budget] = {}
        self._strangers = Budget(_STRANGERS_AT_ONCE, _STRANGERS_PER_SECOND)

    # --- the notify socket --------------------------------------------------------------------------------------

    def heard(self) -> None:
        """Somebody spoke; only a process of a worker's own tree may speak for it."""
        try:
            for said in self._parts.notify.receive():
                self._hear(said)
        except KernelError as err:
            _log.warning("notifications: %s", err)

    def _speaker(self, said: Notification) -> str | None:
        """Whose process spoke: first the worker that its environment names is looked at, and only then all of them."""
        claimed = self._parts.workers.get(environment_of(said.pid).get(WORKER_ENV, ""))
        unborn = self._parts.unborn
        name = None if claimed is None else _spoken_by(said, [claimed], unborn)
        # Looking at everybody is what a stranger's flood would cost us; who names his worker is not kept waiting.
        if name is None and self._strangers.allows(self._parts.loop.time()):
            name = _spoken_by(said, self._parts.workers.values(), unborn)
            if name is None:
                _log.info("notification from pid %d (uid %d) ignored: not part of any worker", said.pid, said.uid)
        return name

    def _hear(self, said: Notification) -> None:
        name = self._speaker(said)
        if name in self._parts.unborn:
            early = self._parts.unborn[name].said
            if len(early) < _SAID_EARLY:
                early.append(said.fields)
        elif name is not None:
            self.heard_early(name, [said.fields])

    def heard_early(self, name: str, said: list[dict[str, str]]) -> None:
        """What a worker said, in order; some of it perhaps before we knew which process it is."""
        worker = self._parts.workers.get(name)
        if worker is None:
            return
        for fields in said:
            if worker.record.spec.health is not None:
                self._parts.health.notified(worker.name, fields)
            else:
                self._hear_unasked(worker, fields)

    def _hear_unasked(self, worker: Worker, fields: dict[str, str]) -> None:
        """Programs speak the protocol whether or not anybody asked: show what they say."""
        if "STATUS" in fields:
            self.said_status(worker.name, fields["STATUS"])
        if fields.get("READY") == "1" and not worker.record.ready:
            self.became_ready(worker.name)
        with contextlib.suppress(ValueError):
            detail = json.loads(fields.get(EVENT_FIELD, "null"))
            if isinstance(detail, dict):
                self.said_event(worker.name, detail)

    def said_status(self, name: str, text: str) -> None:
        """``STATUS=``: what the worker says it is doing."""
        worker = self._parts.workers.get(name)
        if worker is not None and worker.has_process:
            worker.status_text = text[:_LONGEST_STATUS]
            self._note_later(worker)

    def _note_later(self, worker: Worker) -> None:
        """For the next owner; at most once a second for all of them, however much they talk."""
        if not self._said:
            self._parts.loop.call_later(_STATUS_SECONDS, self._note_statuses)
        self._said[worker.name] = worker

    def _note_statuses(self) -> None:
        said, self._said = self._said, {}
        parts = self._parts
        if parts.closing:
            return
        changed = [
            (worker, replace(worker.record, status_text=worker.status_text))
            for worker in said.values()
            if worker.has_process and worker.record.status_text != worker.status_text
        ]
        with contextlib.suppress(RegistryError), parts.registry.transaction():
            for worker, record in changed:
                parts.registry.save(record)
                worker.record = record

    def said_event(self, name: str, detail: dict[str, Any]) -> None:
        """An event of the worker's own, for example of its feed; of a flood only so many, and how many came."""
        now, budget = self._parts.loop.time(), self._events.get(name)
        if budget is None:
            budget = self._events[name] = Budget(_EVENTS_AT_ONCE, _EVENTS_PER_SECOND)
        if not budget.allows(now):
            return
        if refused := budget.told():
            self._note_event(name, EventKind.FEED, {"what": "events-dropped", "count": refused})
        if len(json.dumps(detail)) > _EVENT_BYTES:
            self._note_event(name, EventKind.FEED, {"what": "event-too-large", "most_bytes": _EVENT_BYTES})
            return
        worker = self._parts.workers.get(name)
        if worker is not None:
            match detail:
                case {"what": "dead-letter", "crashes": int(crashes)}:
                    with contextlib.suppress(RegistryError):
                        self._healing.explained(worker, crashes)
                case {"what": "source-failed" | "inbox-unavailable", "error": str(error)}:
                    worker.trouble = error
                case {"what": "source-recovered"}:
                    worker.trouble = None
        self._note_event(name, EventKind.FEED, _printable(detail))

    # --- health -------------------------------------------------------------------------------------------------

    def became_ready(self, name: str) -> None:
        """It said READY=1, or its first check was good."""
        worker = self._parts.workers.get(name)
        if worker is not None and worker.has_process:
            worker.awaits_ready = False
            self._note(
                worker,
                replace(worker.record, ready=True, unready=0, reason=None),
                EventKind.READY,
                pid=pid_of(worker.record),
            )

    def became_healthy(self, name: str) -> None:
        """It recovered by itself."""
        worker = self._parts.workers.get(name)
        if worker is not None and worker.record.phase is State.UNHEALTHY:
            self._note(
                worker, replace(worker.record, phase=State.RUNNING, reason=None), EventKind.READY, recovered=True
            )

    def became_unhealthy(self, name: str, reason: str) -> None:
        """It hangs: note it, and let its policy decide."""
        worker = self._parts.workers.get(name)
        if worker is None or not worker.has_process or worker.record.phase is not State.RUNNING:
            return
        ill = replace(worker.record, phase=State.UNHEALTHY, reason=reason)
        self._note(worker, ill, EventKind.UNHEALTHY, reason=reason, pid=pid_of(worker.record))
        if worker.record.spec.restart.policy != "never":
            self._healing.replace_unhealthy(worker)

    # --- our own parts ------------------------------------------------------------------------------------------

    def gathered(self, done: list[Gathered]) -> None:
        """Some trees are inside their cgroups: note it, so that the next owner knows."""
        parts = self._parts
        if parts.closing:
            return
        inside: list[tuple[Worker, WorkerRecord]] = []
        try:
            with parts.registry.transaction():
                for one in done:
                    worker = parts.workers.get(one.tree.name)
                    if worker is not None and worker.has_process and worker.record.cookie == one.tree.cookie:
                        record = replace(worker.record, cgroup=str(one.cgroup))
                        parts.registry.save(record)
                        inside.append((worker, record))
        except RegistryError as err:
            _log.warning("the cgroups of %d workers could not be recorded: %s", len(done), err)
            return
        for worker, record in inside:
            worker.record = record
            if worker.lifeline is not None:
                self._starting.bind(worker, record.spec)

    def lacked_memory(self, name: str, kills: int) -> None:
        """The kernel killed a process of its tree at its memory limit; if it was the leader, its end tells it too."""
        worker = self._parts.workers.get(name)
        if worker is None or not worker.has_process:
            return
        reason = out_of_memory(worker.record.spec, kills)
        if worker.record.reason != reason and worker.pidfd is not None and ids.is_alive(worker.pidfd):
            told = {"survivors": [], "reason": reason, "oom_kills": kills}
            self._note(worker, replace(worker.record, reason=reason), EventKind.KILLED, **told)

    def log_rotated(self, name: str, detail: dict[str, Any]) -> None:
        """A log was cut; told at most once a second and worker."""
        self._note_event(name, EventKind.LOG_ROTATED, detail)

    def _note(self, worker: Worker, record: WorkerRecord, kind: EventKind, **detail: Any) -> None:
        try:
            self._parts.save(worker, record, (kind, detail))
        except RegistryError as err:
            worker.record = record
            _log.warning("worker %r is %s, which could not be recorded: %s", worker.name, kind, err)

    def _note_event(self, name: str, kind: EventKind, detail: dict[str, Any]) -> None:
        try:
            with self._parts.registry.transaction():
                self._parts.events.pass_on(name, kind, detail)
        except RegistryError as err:
            _log.warning("an event of %r (%s) could not be recorded: %s", name, kind, err)
            return
        self._parts.events.wake()


def _printable(said: Any) -> Any:
    """What a worker says reaches terminals, logs and pages: nothing in it may act there."""
    match said:
        case str():
            return printable(said)
        case dict():
            return {printable(str(key)): _printable(value) for key, value in said.items()}
        case list():
            return [_printable(value) for value in said]
        case _:
            return said


def _spoken_by(said: Notification, workers: Iterable[Worker], unborn: Mapping[str, Unborn]) -> str | None:
    """The one of these workers whose tree the sender is proven to be of.

    Of one that is just being born no leader is known, but its cookie and its cgroup are.
    """
    by_leader: dict[int, Tree] = {}
    by_cookie: dict[Cookie, Tree] = {}
    for worker in workers:
        tree = worker.tree()
        if worker.has_process and tree.identity is not None:
            by_leader[tree.identity.pid] = by_cookie[tree.cookie] = tree
        elif worker.name in unborn:
            by_cookie[tree.cookie] = dataclasses.replace(tree, cgroup=unborn[worker.name].cgroup)
    return speaker(said, by_leader, by_cookie)
