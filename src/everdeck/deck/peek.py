"""A look at a deck without owning it: what is up, and whether anybody supervises it. These are two facts."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from everdeck.clock import Clock
from everdeck.deck import rights
from everdeck.deck.home import owner_pid
from everdeck.deck.observe import crash_times, layers_of, status_from_record
from everdeck.deck.worker import Worker
from everdeck.errors import UnknownWorker
from everdeck.kernel import containment, flock
from everdeck.kernel.usage import describe
from everdeck.model import Event, Snapshot, WorkerSpec
from everdeck.registry import WorkerRecord, read_only
from everdeck.statedir import StateDir
from everdeck.verbs import Inspection


def peek(state_dir: str | Path) -> Snapshot:
    """Every worker as the registry and the kernel tell it; a directory without a registry is an empty deck."""
    places = StateDir.at(state_dir)
    supervised = flock.is_held(places.lock)
    owner = owner_pid(places.path) if supervised else None
    if not places.registry.exists():
        return Snapshot(supervised, owner, [])
    clock = Clock()
    registry = read_only(places.registry)
    try:
        return Snapshot(supervised, owner, [status_from_record(record, clock) for record in registry.records()])
    finally:
        registry.close()


def peek_inspection(state_dir: str | Path, name: str) -> Inspection:
    """Everything about one worker, as the registry and the kernel tell it; nobody holds a lifeline without an owner."""
    places, clock = StateDir.at(state_dir), Clock()
    record = _record(places, name)
    status = status_from_record(record, clock)
    worker = Worker(record, places.workers)
    pids: set[int] = set()
    if status.pid is not None:
        pids = {*containment.members([worker.tree()])[record.cookie], status.pid}
        status = msgspec.structs.replace(status, containment=worker.tree().strength)
    layers = layers_of(
        worker,
        record.spec.lifetime == "bound",
        guardian_pid=None,
        layers=frozenset({"L4", *({"L2", "L3"} if pids else ())}),
        alive=bool(pids),
    )
    crashes = [datetime.fromtimestamp(at, UTC) for at in crash_times(record, clock)]
    held = rights.holds(record.spec, status.containment)
    return Inspection(status, record.spec, layers, describe(pids), crashes, held)


def peek_spec(state_dir: str | Path, name: str) -> WorkerSpec:
    """What a worker runs, as it is noted; :class:`UnknownWorker` with names that are near."""
    return _record(StateDir.at(state_dir), name).spec


def _record(places: StateDir, name: str) -> WorkerRecord:
    records = {}
    if places.registry.exists():
        registry = read_only(places.registry)
        try:
            records = {str(record.name): record for record in registry.records()}
        finally:
            registry.close()
    if name not in records:
        from difflib import get_close_matches  # noqa: PLC0415 - for those who mistyped

        raise UnknownWorker(name, tuple(get_close_matches(name, records, n=3)))
    return records[name]


def peek_events(
    state_dir: str | Path, after: int = 0, limit: int | None = None, worker: str | None = None
) -> list[Event]:
    """What happened after an event id, oldest first."""
    path = StateDir.at(state_dir).registry
    if not path.exists():
        return []
    registry = read_only(path)
    try:
        return registry.events(after, limit, worker)
    finally:
        registry.close()
