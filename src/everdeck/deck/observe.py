"""What callers are told about a worker: the record, and what the kernel says right now.

What only changes with its record or its health is put together once and kept (:func:`glance_of`): among thousands of
workers a look at all of them is then a walk over memory. Only what moves by itself is measured, for those that are
shown.
"""

from bisect import bisect_left
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, Protocol

from msgspec.structs import replace

from everdeck.clock import Clock
from everdeck.deck.worker import Worker
from everdeck.kernel import containment
from everdeck.kernel import identity as ids
from everdeck.kernel.usage import Usage, usage_of
from everdeck.model import BROKEN, Containment, Layer, State, WorkerStatus
from everdeck.registry import WorkerRecord

_SHORTEST_SAMPLE_SECONDS: Final = 0.1
RECENT_SECONDS: Final = 1.0
"""How old a measurement may be that a list of everybody shows."""
OLDER_SECONDS: Final = 90.0
"""How old it may be where measuring everybody takes too long; all are sampled every minute where a page is served."""


class Health(Protocol):
    """What is known of everybody's health."""

    def signs(self) -> tuple[object, ...]:
        """All of it, to compare with later."""

    def summary(self, name: str) -> str | None:
        """One worker's, in a word."""

    def reason(self, name: str) -> str | None:
        """Why it is not well."""


def status_of(
    worker: Worker,
    clock: Clock,
    health: str | None,
    health_reason: str | None = None,
    *,
    fresh: bool = False,
) -> WorkerStatus:
    """One worker as it is now, from the owner's memory and /proc; of a fresh one there is nothing to measure yet."""
    if fresh and worker.pidfd is not None:  # nor is it kept: what is told of it next will be something else
        return _steady(worker, clock, health, health_reason, uptime_seconds=_uptime(worker.record, clock.boottime()))
    steady = glance_of(worker, clock, health, health_reason)
    return measured_status(worker, steady, clock, clock.boottime())


def measured_status(
    worker: Worker, steady: WorkerStatus, clock: Clock, now: float, recent_seconds: float = 0.0
) -> WorkerStatus:
    """What is told of it without measuring, completed by what moves by itself.

    A measurement that is not older than ``recent_seconds`` is not repeated.
    """
    record = worker.record
    if worker.pidfd is None:
        if record.backoff_until is None:
            return steady
        return replace(steady, backoff_until=_backoff_until(record, steady.state, clock))
    used = worker.used
    if used is None or not 0 <= now - used[0] < recent_seconds:
        used = measure(worker, now)
    return replace(steady, uptime_seconds=_uptime(record, now), cpu_percent=used[1], rss_bytes=used[2])


def was_measured(worker: Worker, now: float, within_seconds: float) -> bool:
    """Is there a measurement of it that is not older?"""
    return worker.used is not None and 0 <= now - worker.used[0] < within_seconds


def measure(worker: Worker, now: float) -> tuple[float, float, int]:
    """What it uses now, by the kernel; kept for those who ask soon again."""
    used = _usage(worker)
    worker.used = (now, _cpu_percent(worker, used, now), used.rss_bytes)
    return worker.used


def glance_of(worker: Worker, clock: Clock, health: str | None, health_reason: str | None) -> WorkerStatus:
    """One worker without what moves by itself: uptime, cpu and memory. Made anew only after something changed."""
    alive = worker.pidfd is not None
    if alive and worker.trouble is not None and health in {None, "healthy"}:
        # It runs and would not be healed by a restart: what is ill is what feeds it.
        health, health_reason = "degraded", worker.trouble
    record = worker.record
    facts = (record, worker.awaits_ready, alive, health, health_reason, worker.status_text)
    # Records are never changed, only replaced, so the first comparison is one of two addresses.
    if worker.glance is None or worker.glance[0] != facts:
        worker.glance = (facts, _steady(worker, clock, health, health_reason))
    return worker.glance[1]


def _steady(
    worker: Worker,
    clock: Clock,
    health: str | None,
    health_reason: str | None,
    *,
    uptime_seconds: float | None = None,
) -> WorkerStatus:
    alive = worker.pidfd is not None
    return _status(
        worker.record,
        worker.state,
        clock,
        alive=alive,
        uptime_seconds=uptime_seconds,
        health=health,
        health_reason=health_reason,
        status_text=worker.status_text,
        containment_=containment.strength_of(worker.record.cgroup) if alive else None,
    )


class Glance:
    """Everybody by name, as told last; only who changed since then is looked at again."""

    def __init__(self) -> None:
        self._changes = -1
        self._signs: tuple[object, ...] = ()
        self._told: list[WorkerStatus] = []

    def at(self, workers: Mapping[str, Worker], health: Health, clock: Clock) -> list[WorkerStatus]:
        """Everybody now, in a list of the caller's own."""
        signs = health.signs()
        if len(workers) != len(self._told) or signs != self._signs or not self._renewed(workers, health, clock):
            self._told = [_glance(workers[name], health, clock) for name in sorted(workers)]
        self._changes, self._signs = Worker.changes, signs
        return self._told.copy()

    def _renewed(self, workers: Mapping[str, Worker], health: Health, clock: Clock) -> bool:
        """Tell anew of those that changed; False if one of them was not there before, so another one is gone."""
        if self._changes == Worker.changes:
            return True
        for one in [worker for worker in workers.values() if worker.changed_at > self._changes]:
            place = bisect_left(self._told, one.name, key=_name)
            if place == len(self._told) or self._told[place].name != one.name:
                return False
            self._told[place] = _glance(one, health, clock)
        return True


def _glance(worker: Worker, health: Health, clock: Clock) -> WorkerStatus:
    return glance_of(worker, clock, health.summary(worker.name), health.reason(worker.name))


def _name(status: WorkerStatus) -> str:
    return status.name


def status_from_record(record: WorkerRecord, clock: Clock) -> WorkerStatus:
    """One worker as the registry and the kernel tell it when nobody owns the deck."""
    alive = record.identity is not None and ids.answer(record.identity) is ids.Answer.SAME
    state = record.phase
    if not alive and state.is_live:
        state = State.EXITED if record.desired == "running" else State.STOPPED
    told = _status(record, state, clock, alive=alive, status_text=record.status_text if alive else None)
    if not alive or record.identity is None:
        return told
    used = usage_of([record.identity.pid])
    return replace(told, uptime_seconds=_uptime(record, clock.boottime()), rss_bytes=used.rss_bytes)


def crash_times(record: WorkerRecord, clock: Clock) -> list[float]:
    """When a worker crashed within its window, as seconds since the epoch."""
    if record.timers_boot_id != ids.boot_id():
        return []
    shift = clock.wall() - clock.boottime()
    return [time + shift for time in record.crash_times]


def layers_of(
    worker: Worker, bound: bool, *, guardian_pid: int | None, layers: frozenset[str], alive: bool | None = None
) -> list[Layer]:
    """Which of the four layers protect this worker, and what each stands on here; ``alive`` if we do not hold it."""
    tree = worker.tree()
    proxy = worker.record.proxy_lock
    lifeline = bound and worker.lifeline is not None
    if not bound:
        why_l1 = "an adoptable worker is meant to outlive its owner"
    elif not lifeline:
        why_l1 = "no lifeline: not running, or switched off"
    else:
        why_l1 = "end-of-file on its lifeline when the owner dies" + (
            f"; guardian pid {guardian_pid} ends it if it does not look" if guardian_pid else "; no guardian is running"
        )
    return [
        Layer(
            "L1",
            lifeline,
            "lifeline and guardian" if lifeline and guardian_pid else "lifeline" if lifeline else "none",
            why_l1,
        ),
        Layer(
            "L2",
            "L2" in layers and (worker.has_process if alive is None else alive),
            "held by the owner for it" if proxy else "carried by the tree",
            "flock on its own lock file: a second copy cannot start while any holder lives",
        ),
        Layer(
            "L3",
            "L3" in layers,
            str(tree.strength),
            {
                Containment.CGROUP: "SIGTERM, grace, then cgroup.kill: nothing it forked can get away",
                Containment.CGROUP_JOINED: "SIGTERM, grace, then cgroup.kill; it joined its cgroup after its start, "
                "and what left its tree before that may get away",
                Containment.COOKIE: "SIGTERM, grace, then SIGKILL to its group, its cookie and holders of its lock",
                Containment.GROUP: "SIGTERM, grace, then SIGKILL to its process group; what called setsid may get away",
            }[tree.strength],
        ),
        Layer(
            "L4",
            "L4" in layers,
            "identity and cookie",
            "the next owner reaps it at open" if bound else "the next owner adopts it at open, by pid and start time",
        ),
    ]


def _status(
    record: WorkerRecord,
    state: State,
    clock: Clock,
    *,
    alive: bool,
    uptime_seconds: float | None = None,
    health: str | None = None,
    health_reason: str | None = None,
    status_text: str | None = None,
    containment_: Containment | None = None,
) -> WorkerStatus:
    spec = record.spec
    if (broken := record.broken) is not None:
        status_text = f"its record cannot be read ({broken}); remove it, or start it with --replace"
        state = state if alive else State.FAILED
        health = BROKEN
    identity = record.identity if alive else None
    return WorkerStatus(
        name=record.name,
        state=state,
        pid=None if identity is None else identity.pid,
        started_at=None if record.started_at is None else _date(record.started_at),
        uptime_seconds=uptime_seconds,
        exit=record.exit,
        restarts=record.restarts,
        crashes=record.crashes,
        adopted=record.adopted,
        lifetime=spec.lifetime,
        port=record.port,
        health=health,
        health_reason=health_reason or record.reason,
        status_text=status_text,
        backoff_until=_backoff_until(record, state, clock),
        containment=containment_,
        labels=spec.labels,
    )


def _uptime(record: WorkerRecord, now: float) -> float | None:
    if record.identity is None:
        return None
    return round(max(0.0, now - record.identity.start_ticks / ids.CLOCK_TICKS), 3)


def _backoff_until(record: WorkerRecord, state: State, clock: Clock) -> datetime | None:
    if record.backoff_until is None or record.timers_boot_id != ids.boot_id() or state is not State.BACKOFF:
        return None
    return _date(clock.wall() + record.backoff_until - clock.boottime())


def _date(seconds: float) -> datetime | None:
    """None for a time that no calendar has: an old record may hold any number, and one worker is not all of them."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _usage(worker: Worker) -> Usage:
    """What the whole tree uses where a cgroup lists it cheaply, else what the leader uses."""
    identity = worker.record.identity
    leader = [] if identity is None else [identity.pid]
    if worker.record.cgroup is not None:
        return usage_of(containment.pids_in(worker.record.cgroup) or leader)
    return usage_of(leader)


def _cpu_percent(worker: Worker, used: Usage, now: float) -> float:
    """Since the last look; at the first look, since the start."""
    before = worker.cpu_sample
    identity = worker.record.identity
    if before is None:
        start = identity.start_ticks / ids.CLOCK_TICKS if identity is not None else now
        before = (start, 0.0)
    elapsed = now - before[0]
    if elapsed < _SHORTEST_SAMPLE_SECONDS:
        return (
            0.0 if elapsed <= 0 else round(max(0.0, used.cpu_seconds - before[1]) / _SHORTEST_SAMPLE_SECONDS * 100, 1)
        )
    worker.cpu_sample = (now, used.cpu_seconds)
    return round(max(0.0, used.cpu_seconds - before[1]) / elapsed * 100, 1)
