"""What callers are told about a worker: the record, and what the kernel says right now."""

from datetime import UTC, datetime
from typing import Final

from everdeck.clock import Clock
from everdeck.deck.worker import Worker
from everdeck.kernel import containment
from everdeck.kernel import identity as ids
from everdeck.kernel.usage import Usage, usage_of
from everdeck.model import Containment, Layer, State, WorkerStatus
from everdeck.registry import Record

_SHORTEST_SAMPLE_SECONDS: Final = 0.1


def status_of(
    worker: Worker, clock: Clock, health: str | None, health_reason: str | None = None, *, fresh: bool = False
) -> WorkerStatus:
    """One worker as it is now, from the owner's memory and /proc; of a fresh one there is nothing to measure yet."""
    record = worker.record
    alive = worker.pidfd is not None
    now = clock.boottime()
    used = _usage(worker) if alive and not fresh else None
    if alive and worker.trouble is not None and health in {None, "healthy"}:
        # It runs and would not be healed by a restart: what is ill is what feeds it.
        health, health_reason = "degraded", worker.trouble
    return _status(
        record,
        worker.state,
        clock,
        alive=alive,
        health=health,
        health_reason=health_reason,
        status_text=worker.status_text,
        used=used,
        cpu_percent=None if used is None else _cpu_percent(worker, used, now),
        containment_=worker.tree().strength if alive else None,
    )


def status_from_record(record: Record, clock: Clock) -> WorkerStatus:
    """One worker as the registry and the kernel tell it when nobody owns the deck."""
    alive = record.identity is not None and ids.answer(record.identity) is ids.Answer.SAME
    state = record.phase
    if not alive and state.is_live:
        state = State.EXITED if record.desired == "running" else State.STOPPED
    used = usage_of([record.identity.pid]) if alive and record.identity is not None else None
    return _status(record, state, clock, alive=alive, used=used, status_text=record.status_text if alive else None)


def layers_of(worker: Worker, bound: bool, *, guardian_pid: int | None, layers: frozenset[str]) -> list[Layer]:
    """Which of the four layers protect this worker, and what each stands on here."""
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
            "L2" in layers and worker.has_process,
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
    record: Record,
    state: State,
    clock: Clock,
    *,
    alive: bool,
    health: str | None = None,
    health_reason: str | None = None,
    status_text: str | None = None,
    used: Usage | None = None,
    cpu_percent: float | None = None,
    containment_: Containment | None = None,
) -> WorkerStatus:
    spec = record.spec
    if record.broken is not None:
        status_text = f"its record cannot be read ({record.broken}); remove it, or start it with --replace"
        state = state if alive else State.FAILED
    identity = record.identity if alive else None
    now = clock.boottime()
    uptime = None if identity is None else max(0.0, now - identity.start_ticks / ids.CLOCK_TICKS)
    backoff_until = None
    if record.backoff_until is not None and record.timers_boot_id == ids.boot_id() and state is State.BACKOFF:
        backoff_until = _date(clock.wall() + record.backoff_until - now)
    return WorkerStatus(
        name=record.name,
        state=state,
        pid=None if identity is None else identity.pid,
        started_at=None if record.started_at is None else _date(record.started_at),
        uptime_seconds=None if uptime is None else round(uptime, 3),
        exit=record.exit,
        restarts=record.restarts,
        crashes=record.crashes,
        adopted=record.adopted,
        lifetime=spec.lifetime,
        port=record.port,
        health=health,
        health_reason=health_reason or record.reason,
        status_text=status_text,
        cpu_percent=cpu_percent,
        rss_bytes=None if used is None else used.rss_bytes,
        backoff_until=backoff_until,
        containment=containment_,
        labels=spec.labels,
    )


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
        return usage_of(containment.members([worker.tree()])[worker.record.cookie] or leader)
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
