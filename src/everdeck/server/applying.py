"""From a configuration to a deck: the plan, carrying it out, and remembering what came from a file.

A worker that a file no longer names is removed only if a file brought it; one that was started by hand stays. Which
ones a file brought, and the templates, are kept in ``STATE/applied.json``, written before the deck is changed (the
union of old and new) and again afterwards: a crash between the two leaves names too many in it, never too few, and the
next ``apply`` comes to the same plan.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from everdeck import disk
from everdeck.crashpoints import crash_point
from everdeck.deck import AsyncDeck
from everdeck.errors import EverdeckError, RegistryUnavailable
from everdeck.kernel import credentials
from everdeck.model import State, WorkerSpec, WorkerStatus, worker_name
from everdeck.server.documents import Applied, ApplyRequest, BulkResult, Change
from everdeck.server.problems import problem_of
from everdeck.statedir import StateDir

MOST_AT_ONCE: Final = 16


class Memory(msgspec.Struct, frozen=True):
    """What the last configuration brought."""

    file: str | None = None
    workers: tuple[str, ...] = ()
    templates: dict[str, dict[str, Any]] = {}


def remembered(state_dir: Path) -> Memory:
    """What the last apply left; nothing if there was none."""
    try:
        return msgspec.json.decode(StateDir(state_dir).applied.read_bytes(), type=Memory)
    except FileNotFoundError:
        return Memory()
    except (OSError, msgspec.DecodeError) as error:
        raise RegistryUnavailable(f"{StateDir(state_dir).applied} cannot be read: {error}") from error


def directory(state_dir: Path) -> str:
    """Where the applied file stands or, without one, where the daemon was started."""
    file = remembered(state_dir).file
    return str(Path(file).parent if file else Path.cwd())


def plan_for(
    current: Mapping[str, WorkerSpec], wanted: Mapping[str, WorkerSpec], from_file: frozenset[str]
) -> list[Change]:
    """What must change, by name. ``current`` holds secret values too, so that a new one shows as a change."""
    plan = []
    for name in sorted(current.keys() | wanted.keys()):
        if name not in wanted:
            if name in from_file:
                plan.append(Change(name, "remove"))
        elif name not in current:
            plan.append(Change(name, "add"))
        else:
            fields = differing_fields(current[name], wanted[name])
            plan.append(Change(name, "change" if fields else "unchanged", fields))
    return plan


def differing_fields(one: WorkerSpec, other: WorkerSpec) -> tuple[str, ...]:
    """The fields in which two specs differ."""
    return tuple(field for field in WorkerSpec.__struct_fields__ if getattr(one, field) != getattr(other, field))


async def apply(deck: AsyncDeck, request: ApplyRequest, *, again: bool = False) -> Applied:
    """Plan and, unless it is a dry run, do it; one worker's failure does not keep the others from theirs.

    ``again`` is a daemon that reads its file once more because it was started: whoever was stopped by hand, and has not
    changed in the file since, stays stopped. Somebody who types ``apply`` means that they run.
    """
    for name in request.workers:
        worker_name(name)
    before = await asyncio.to_thread(remembered, deck.state_dir)
    statuses = {status.name: status for status in await deck.list()}
    current = {name: await _spec_with_secrets(deck, name) for name in statuses}
    plan = plan_for(current, request.workers, frozenset(before.workers))
    if request.dry_run:
        return Applied(plan, [], dry_run=True)
    names = tuple(sorted({*before.workers, *request.workers}))
    await asyncio.to_thread(_remember, deck.state_dir, Memory(request.file, names, request.templates))
    crash_point("apply.remembered")
    with contextlib.suppress(EverdeckError):  # each is asked for again below, and tells then
        await deck.stop_many([change.name for change in plan if change.action == "remove"])
    added = {change.name: request.workers[change.name] for change in plan if change.action == "add"}
    done: dict[str, WorkerStatus | Exception] = {}
    if again:
        stopped = {name for name, status in statuses.items() if status.state is State.STOPPED}
        done |= {one.name: statuses[one.name] for one in plan if one.action == "unchanged" and one.name in stopped}
    # A spec that cannot be had here is refused before any is started: then each is asked for by itself, and tells.
    with contextlib.suppress(ExceptionGroup, EverdeckError):
        await deck.start_many(added, replace=True, progress=done.__setitem__)
    gate = asyncio.Semaphore(MOST_AT_ONCE)
    results = await asyncio.gather(*(_carry_out(deck, change, request.workers, done, gate) for change in plan))
    crash_point("apply.carried-out")
    kept = {*request.workers, *(result.name for result in results if not result.ok and result.name in before.workers)}
    await asyncio.to_thread(_remember, deck.state_dir, Memory(request.file, tuple(sorted(kept)), request.templates))
    return Applied(plan, list(results), dry_run=False)


async def _carry_out(
    deck: AsyncDeck,
    change: Change,
    wanted: Mapping[str, WorkerSpec],
    done: Mapping[str, WorkerStatus | Exception],
    gate: asyncio.Semaphore,
) -> BulkResult:
    if change.name in done:
        return result_of(change.name, done[change.name])
    async with gate:
        return await _changed(deck, change, wanted)


def result_of(name: str, answer: WorkerStatus | Exception) -> BulkResult:
    """What a start told of one worker, for whoever asked for many; what is not an answer of the deck is raised."""
    match answer:
        case WorkerStatus():
            return BulkResult(name, ok=True, status=answer)
        case EverdeckError():
            return BulkResult(name, ok=False, problem=problem_of(answer))
        case _:
            raise answer


async def _changed(deck: AsyncDeck, change: Change, wanted: Mapping[str, WorkerSpec]) -> BulkResult:
    try:
        match change.action:
            case "add" | "change":
                status = await deck.start(change.name, wanted[change.name], replace=True)
                return BulkResult(change.name, ok=True, status=status)
            case "remove":
                await deck.remove(change.name)
                return BulkResult(change.name, ok=True)
            case "unchanged":
                # The file says it should run, so one that was stopped by hand is started again.
                return BulkResult(change.name, ok=True, status=await deck.start(change.name))
    except EverdeckError as error:
        return BulkResult(change.name, ok=False, problem=problem_of(error))


async def _spec_with_secrets(deck: AsyncDeck, name: str) -> WorkerSpec:
    spec = await deck.spec(name)
    if not spec.secrets:
        return spec
    folder = StateDir(deck.state_dir).worker(name).secrets
    values = await asyncio.to_thread(_read_secrets, folder, tuple(spec.secrets))
    known = {key: msgspec.structs.replace(secret, value=values[key]) for key, secret in spec.secrets.items()}
    return msgspec.structs.replace(spec, secrets=known)


def _read_secrets(folder: Path, names: tuple[str, ...]) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    for name in names:
        try:
            values[name] = credentials.read(folder, name).decode()
        except (OSError, UnicodeDecodeError):
            values[name] = None
    return values


def _remember(state_dir: Path, memory: Memory) -> None:
    path = StateDir(state_dir).applied
    try:
        disk.replace_file(path, msgspec.json.encode(memory))
    except OSError as error:
        raise RegistryUnavailable(f"{path} cannot be written: {error.strerror}") from error
