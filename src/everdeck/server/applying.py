"""From a configuration to a deck: the plan, carrying it out, and remembering what came from a file.

A worker that a file no longer names is removed only if a file brought it; one that was started by hand stays. Which
ones a file brought, and the templates, are kept in ``STATE/applied.json`` (on a cluster in a Secret), written before
the deck is changed (the union of old and new) and again afterwards: a crash between the two leaves names too many in
it, never too few, and the next ``apply`` comes to the same plan.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from everdeck.crashpoints import crash_point
from everdeck.deck import AsyncDeck
from everdeck.errors import EverdeckError, RegistryUnavailable
from everdeck.model import State, WorkerSpec, WorkerStatus, worker_name
from everdeck.server.documents import Applied, ApplyRequest, BulkResult, Change
from everdeck.server.problems import problem_of

MOST_AT_ONCE: Final = 16


class _File(msgspec.Struct, frozen=True):
    """Which file the last configuration was: all that most questions are about, and read without the rest."""

    file: str | None = None


class Memory(_File, frozen=True):
    """What the last configuration brought."""

    workers: tuple[str, ...] = ()
    templates: dict[str, dict[str, Any]] = {}


async def remembered(deck: AsyncDeck) -> Memory:
    """What the last apply left; nothing if there was none."""
    return await _remembered(deck, Memory)


async def directory(deck: AsyncDeck) -> str:
    """Where the applied file stands or, without one, where the daemon was started."""
    file = (await _remembered(deck, _File)).file
    return str(Path(file).parent if file else Path.cwd())


def in_the_image(workers: Mapping[str, WorkerSpec], file: str) -> dict[str, WorkerSpec]:
    """The same for a cluster: the directory in which the file stands, where they run on one box, is in no image."""
    beside = str(Path(file).resolve().parent)

    def inside(spec: WorkerSpec) -> WorkerSpec:
        satellite = spec.satellite
        if satellite is not None and satellite.path == beside:
            satellite = msgspec.structs.replace(satellite, path=None)
        return msgspec.structs.replace(spec, cwd=None if spec.cwd == beside else spec.cwd, satellite=satellite)

    return {name: inside(spec) for name, spec in workers.items()}


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
    before = await remembered(deck)
    statuses = {status.name: status for status in await deck.glance()}
    current = {name: await deck.whole_spec(name) for name in statuses}
    plan = plan_for(current, request.workers, frozenset(before.workers))
    if request.dry_run:
        return Applied(plan, [], dry_run=True)
    names = tuple(sorted({*before.workers, *request.workers}))
    await _remember(deck, Memory(request.file, names, request.templates))
    crash_point("apply.remembered")
    with contextlib.suppress(EverdeckError):  # each is asked for again below, and tells then
        await deck.stop_many([change.name for change in plan if change.action == "remove"])
    added = {change.name: request.workers[change.name] for change in plan if change.action == "add"}
    # Whoever runs as the file says is left alone, and with it the price of asking thousands of them one by one.
    right = {State.STARTING, State.RUNNING, State.UNHEALTHY} | ({State.STOPPED} if again else set())
    done: dict[str, WorkerStatus | Exception] = {
        one.name: statuses[one.name] for one in plan if one.action == "unchanged" and statuses[one.name].state in right
    }
    # A spec that cannot be had here is refused before any is started: then each is asked for by itself, and tells.
    with contextlib.suppress(ExceptionGroup, EverdeckError):
        await deck.start_many(added, replace=True, progress=done.__setitem__)
    results = await _carried_out(deck, plan, request.workers, done)
    crash_point("apply.carried-out")
    kept = {*request.workers, *(result.name for result in results if not result.ok and result.name in before.workers)}
    await _remember(deck, Memory(request.file, tuple(sorted(kept)), request.templates))
    return Applied(plan, results, dry_run=False)


async def _carried_out(
    deck: AsyncDeck,
    plan: Iterable[Change],
    wanted: Mapping[str, WorkerSpec],
    done: Mapping[str, WorkerStatus | Exception],
) -> list[BulkResult]:
    """One result per change; only what is not done yet is given a task, because a thousand of them are a megabyte."""
    gate = asyncio.Semaphore(MOST_AT_ONCE)

    async def carry_out(change: Change) -> BulkResult:
        async with gate:
            return await _changed(deck, change, wanted)

    left = [change for change in plan if change.name not in done]
    changed = dict(zip((one.name for one in left), await asyncio.gather(*map(carry_out, left)), strict=True))
    return [changed.get(one.name) or result_of(one.name, done[one.name]) for one in plan]


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


_Kept = TypeVar("_Kept", bound=_File)


async def _remembered(deck: AsyncDeck, kind: type[_Kept]) -> _Kept:
    try:
        kept = await deck.applied()
        return kind() if kept is None else msgspec.json.decode(kept, type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise RegistryUnavailable(f"what the last apply left cannot be read: {error}") from error


async def _remember(deck: AsyncDeck, memory: Memory) -> None:
    try:
        await deck.remember_applied(msgspec.json.encode(memory))
    except OSError as error:
        raise RegistryUnavailable(f"what was applied cannot be written: {error.strerror}") from error
