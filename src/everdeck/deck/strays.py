"""Processes and locks of a deck that its records do not account for: orphans and duplicates.

An orphan carries the cookie of a deck and no record there wants it, or the record says that the worker is at rest. A
duplicate is a second tree that carries a worker's name. This only looks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from everdeck.child import DIR_ENV, WORKER_ENV
from everdeck.errors import RegistryError
from everdeck.kernel import containment
from everdeck.kernel import identity as ids
from everdeck.model import State
from everdeck.registry import WorkerRecord, read_only
from everdeck.statedir import StateDir

_AT_REST: Final = {State.STOPPED, State.EXITED, State.FAILED}


class Stray(msgspec.Struct, frozen=True):
    """A process that should perhaps not be."""

    pid: int
    kind: str
    command: str
    why: str
    worker: str | None = None
    cookie: str | None = None
    deck: str | None = None


def records_of(state: Path, problems: list[str]) -> list[WorkerRecord]:
    """What the registry of a deck says; what keeps it from being read goes to the problems."""
    path = StateDir(state).registry
    if not path.exists():
        return []
    try:
        registry = read_only(path)
    except RegistryError as error:
        problems.append(str(error))
        return []
    try:
        return list(registry.records())
    finally:
        registry.close()


def unwanted(state: Path, records: list[WorkerRecord]) -> Iterator[Stray]:
    """Processes with a cookie that no record of their deck knows, or with that of a worker at rest, in any deck."""
    here = Path.cwd() / state
    decks: dict[Path, list[WorkerRecord] | None] = {here: records}
    for cookie, pids in containment.cookie_scan().items():
        for pid in pids:
            environment = containment.environment_of(pid)
            folder = Path(environment.get(DIR_ENV, ""))
            worker = environment.get(WORKER_ENV, "")
            deck = folder.parent.parent
            if not worker or not folder.is_absolute():
                continue  # a cookie without its deck says nothing
            if deck not in decks:
                decks[deck] = _records_elsewhere(deck)
            known = decks[deck]
            # Another user's deck, or one that cannot be read now, is that user's to look at.
            if known is None:
                continue
            record = next((record for record in known if record.cookie == cookie), None)
            if record is not None and (record.identity is not None or record.phase not in _AT_REST):
                continue
            if record is not None:
                yield Stray(
                    pid,
                    "orphan",
                    ids.command_line(pid)[:200],
                    f"lives with the cookie of worker {record.name!r}, whose record says {record.phase}",
                    record.name,
                    cookie,
                    str(deck),
                )
                continue
            doubled = any(other.name == worker and other.identity is not None for other in known)
            yield Stray(
                pid,
                "duplicate" if doubled else "orphan",
                ids.command_line(pid)[:200],
                f"runs as worker {worker!r} of {'this deck' if deck == here else deck}, and no record there wants it",
                worker,
                cookie,
                str(deck),
            )


def _records_elsewhere(deck: Path) -> list[WorkerRecord] | None:
    """The records of another deck; none if it was deleted under its workers, None if they cannot be read."""
    try:
        if not StateDir(deck).registry.exists():
            return []
    except OSError:
        return None
    problems: list[str] = []
    records = records_of(deck, problems)
    return None if problems else records
