"""A look at a deck without owning it: what is up, and whether anybody supervises it. These are two facts."""

from difflib import get_close_matches
from pathlib import Path

import msgspec

from everdeck.clock import Clock
from everdeck.deck.home import owner_pid
from everdeck.deck.observe import status_from_record
from everdeck.errors import UnknownWorker
from everdeck.kernel import flock
from everdeck.model import Event, WorkerSpec, WorkerStatus
from everdeck.registry import read_only
from everdeck.statedir import StateDir


class Snapshot(msgspec.Struct, frozen=True):
    """The deck as somebody sees it who does not own it."""

    supervised: bool
    owner_pid: int | None
    workers: list[WorkerStatus]


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


def peek_spec(state_dir: str | Path, name: str) -> WorkerSpec:
    """What a worker runs, as it is noted; :class:`UnknownWorker` with names that are near."""
    path = StateDir.at(state_dir).registry
    records = {}
    if path.exists():
        registry = read_only(path)
        try:
            records = {str(record.name): record for record in registry.records()}
        finally:
            registry.close()
    if name not in records:
        raise UnknownWorker(name, tuple(get_close_matches(name, records, n=3)))
    return records[name].spec


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
