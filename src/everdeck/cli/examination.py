"""What ``doctor`` finds out: the machine's features, the deck's layers, and processes that should not be.

It puts together what is probed elsewhere, each probe beside what it probes, and says what follows from it. Three kinds
of processes are told: orphans and duplicates (:mod:`everdeck.deck.strays`) and likenesses
(:mod:`everdeck.kernel.likeness`).
"""

import contextlib
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from everdeck.cli import output
from everdeck.deck.guardian_link import guardian_of
from everdeck.deck.peek import peek
from everdeck.deck.strays import Stray, records_of, unwanted
from everdeck.errors import EverdeckError, KernelError
from everdeck.kernel import containment, controllers, exits, flock, likeness, native, notify, posix, quotas, sandbox
from everdeck.kernel import identity as ids
from everdeck.logs import files as logfiles
from everdeck.logs import room
from everdeck.model import LogRoom, WorkerName
from everdeck.registry.store import read_only
from everdeck.statedir import StateDir, WorkerDir


class Feature(msgspec.Struct, frozen=True):
    """Something this kernel or this machine has or lacks."""

    name: str
    present: bool
    gives: str
    without: str


class Limit(msgspec.Struct, frozen=True):
    """A limit, and how many workers it leaves room for."""

    name: str
    value: int | None
    room: str
    enough: bool


class LayerVerdict(msgspec.Struct, frozen=True):
    """Whether one of the four layers holds on this machine, and how strongly."""

    layer: str
    holds: bool
    strength: str
    why: str


class LockHeld(msgspec.Struct, frozen=True):
    """Who holds a lock of this deck."""

    lock: str
    holders: list[int]
    commands: list[str]


class Report(msgspec.Struct, frozen=True):
    """Everything the doctor saw."""

    kernel: str
    state_dir: str
    supervised: bool
    owner_pid: int | None
    containment: str
    features: list[Feature]
    limits: list[Limit]
    layers: list[LayerVerdict]
    locks: list[LockHeld]
    suspects: list[Stray]
    problems: list[str]


def examine(state: Path) -> Report:
    """Look at the machine and at one deck."""
    problems: list[str] = []
    records = records_of(state, problems)
    try:
        snapshot = peek(state)
        supervised, owner, workers = snapshot.supervised, snapshot.owner_pid, snapshot.workers
    except EverdeckError as error:
        problems.append(str(error))
        supervised, owner, workers = False, None, []
    features = list(_features(state, owner))
    strength = containment.strength(owner)
    limits = [*_limits(len(workers), owner), *_log_room(state)]
    suspects = [
        *unwanted(state, records),
        *(Stray(one.pid, "likeness", one.command, one.why) for one in likeness.likenesses()),
    ]
    locks = list(_locks(state))
    layers = list(_layers(state, features, strength, supervised=supervised, owner=owner, bound=_bound(workers)))
    if records and not supervised:
        problems.append("no owner is running: what crashes now stays down; start one with `everdeck up`")
    problems += [f"{layer.layer} does not hold: {layer.why}" for layer in layers if not layer.holds]
    problems += [f"{limit.name}: {limit.room}" for limit in limits if not limit.enough]
    problems += [f"pid {suspect.pid} ({suspect.kind}): {suspect.why}" for suspect in suspects]
    problems += _unaccounted(state, locks)
    return Report(
        kernel=os.uname().release,
        state_dir=str(state),
        supervised=supervised,
        owner_pid=owner,
        containment=strength,
        features=features,
        limits=limits,
        layers=layers,
        locks=locks,
        suspects=suspects,
        problems=problems,
    )


def _bound(workers: list[Any]) -> int:
    return sum(worker.lifetime == "bound" and worker.pid is not None for worker in workers)


# --- the machine ------------------------------------------------------------------------------------------------


def _features(state: Path, owner: int | None) -> Iterator[Feature]:
    try:
        ids.require_pidfds()
    except KernelError as error:
        yield Feature("pidfds", present=False, gives="processes are held on to", without=str(error))
        return
    yield Feature(
        "pidfd inode numbers (6.9)",
        ids.has_pidfd_inodes(),
        "a process is told apart from every other of this boot, whatever its pid",
        "pid, start time and boot id decide; enough in practice",
    )
    yield Feature(
        "signals to a group by pidfd (6.9)",
        ids.has_group_signal(),
        "a whole group is signalled without a race",
        "a member is verified first, then its group is signalled",
    )
    yield Feature(
        "exit codes by pidfd (6.15)",
        exits.try_pidfd(),
        "the exit code of an adopted worker is known",
        "an adopted worker's end is 'unknown': neither success nor failure",
    )
    yield Feature(
        "notifications with the sender's pidfd (6.5)",
        notify.tells_pidfds(),
        "READY=1 and WATCHDOG=1 are known to be of a worker, though the sender has ended and its pid is another's",
        "a sender that has ended before its word is read is not believed: systemd-notify from a script may be missed",
    )
    yield Feature(
        "starts by our own C side",
        native.available(),
        "limits, accounts and sandboxes take 0.1 ms of a start, and a start takes as long with thousands as with ten",
        f"{'posix_spawn' if posix.available() else 'subprocess'} starts plain workers, and an interpreter of its own "
        "(20-40 ms) those with limits, an account or a sandbox; install again where there is a C compiler",
    )
    home = containment.cgroup_home(owner)
    yield Feature(
        "cgroup.kill in a cgroup of ours",
        home is not None,
        "even what called setsid() is found and ended, at once",
        "the cookie scan finds it, in a pass over /proc; " + controllers.how_to_delegate(root=os.geteuid() == 0),
    )
    without = {} if home is None else controllers.missing(home, owner)
    for controller, field in (("memory", "memory_bytes"), ("cpu", "cpu_percent"), ("pids", "pids")):
        yield Feature(
            f"the cgroup controller {controller}",
            home is not None and controller not in without,
            f"limits.{field} holds for a whole tree",
            f"limits.{field} is refused: {without.get(controller, 'there is no cgroup of ours')}",
        )
    not_strict = sandbox.why_not_strict()
    yield Feature(
        "Landlock with scopes (6.12)",
        not_strict is None,
        'sandbox="strict": a worker reaches its own directories and nothing else',
        f'sandbox="strict" is refused: {not_strict}',
    )
    yield Feature(
        "environments in /proc",
        containment.environments_are_readable(),
        "workers are found by their cookie after a crash",
        "only the recorded identity and the lock are left",
    )
    yield Feature(
        "sandbox basic",
        not sandbox.has_capabilities() or sandbox.can_empty_capabilities(),
        "a worker gains no privileges, leaves no core dumps and keeps its files to itself",
        "refused: we have capabilities and may not take them from a worker (CAP_SETPCAP)",
    )
    yield Feature(
        "accounts of their own (user, user=auto)",
        os.geteuid() == 0,
        "each worker can have another account than the deck",
        "refused: only root may change a worker's account; sandbox strict keeps workers apart without root",
    )
    quota = quotas.why_not(state if state.is_dir() else Path.cwd())
    yield Feature(
        "limits.disk_bytes",
        quota is None,
        "a worker's files take so many bytes and no more (project quotas)",
        f"refused: {quota}",
    )
    yield Feature(
        "removing the head of a log in place (ext4, xfs)",
        logfiles.can_collapse(_folder(state)),
        "logs are rotated without losing a byte and without the worker noticing",
        "the head is punched out: the same, but the file's length keeps growing",
    )


def _limits(workers: int, owner: int | None) -> Iterator[Limit]:
    soft = _limit_of(owner, resource.RLIMIT_NOFILE)
    # One pidfd per worker, up to two descriptors more for bound ones, and some for everything else.
    most = max(0, (soft - 64) // 3)
    yield Limit("open files (RLIMIT_NOFILE)", soft, f"room for about {most} workers", most > workers)
    processes = _limit_of(owner, resource.RLIMIT_NPROC)
    shown = None if processes == resource.RLIM_INFINITY else processes
    yield Limit(
        "processes (RLIMIT_NPROC)",
        shown,
        "no limit" if shown is None else "shared by this user",
        shown is None or shown > workers,
    )
    for name, path, least in (
        ("pids (kernel.pid_max)", "/proc/sys/kernel/pid_max", workers * 2 + 1000),
        ("inotify instances (fs.inotify.max_user_instances)", "/proc/sys/fs/inotify/max_user_instances", 8),
        ("inotify watches (fs.inotify.max_user_watches)", "/proc/sys/fs/inotify/max_user_watches", workers + 100),
    ):
        value = _number_in(path)
        enough = value is None or value >= least
        yield Limit(name, value, "enough" if enough else f"{least} would be needed", enough)


def _limit_of(owner: int | None, which: int) -> int:
    """The owner's own limit, where we may ask for it; else that of a process which is started here."""
    try:
        return resource.prlimit(owner or 0, which)[0]
    except (OSError, ValueError):
        return resource.getrlimit(which)[0]


def _log_room(state: Path) -> Iterator[Limit]:
    """The disk under the deck, and what all logs may take of it."""
    places = StateDir(state)
    if not places.registry.exists() or not places.workers.is_dir():
        return
    setting = LogRoom()
    with contextlib.suppress(EverdeckError, msgspec.MsgspecError):  # a registry that cannot be read is told elsewhere
        with contextlib.closing(read_only(places.registry)) as registry:
            noted = registry.meta(room.NOTED)
        setting = LogRoom() if noted is None else msgspec.json.decode(noted, type=LogRoom)
    disk = room.space(setting, places.workers)
    told = f"logs let go of their oldest archives below {output.size(disk.floor_bytes)} free"
    yield Limit("free space", disk.free_bytes, told, not disk.short_bytes)
    used = room.used_bytes(places.workers)
    budget = setting.budget_bytes
    told = "no budget for all of them" if budget is None else f"their budget is {output.size(budget)}"
    yield Limit("logs of all workers", used, told, budget is None or used <= 2 * budget)


def _folder(state: Path) -> Path:
    """Where to try what the deck will need; before there is one, where files may be made anyway."""
    return state if state.is_dir() else Path(tempfile.gettempdir())


def _number_in(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


# --- the layers -------------------------------------------------------------------------------------------------


def _layers(
    state: Path, features: list[Feature], strength: str, *, supervised: bool, owner: int | None, bound: int
) -> Iterator[LayerVerdict]:
    guardian = guardian_of(owner)
    if not supervised or not bound:
        why = "no bound worker runs now; a pipe needs nothing but the kernel"
        yield LayerVerdict("L1 lifeline", holds=True, strength="not in use", why=why)
    elif guardian is None:
        why = f"{bound} bound workers run and no guardian of owner {owner} was found; it is respawned when it dies"
        yield LayerVerdict("L1 lifeline", holds=False, strength="cooperating workers only", why=why)
    else:
        why = f"guardian is pid {guardian}, {bound} bound workers"
        yield LayerVerdict("L1 lifeline", holds=True, strength="lifeline and guardian", why=why)
    why_not = flock.why_not(_folder(state))
    why = why_not or f"tried in {_folder(state)}"
    yield LayerVerdict("L2 lock", holds=why_not is None, strength="flock, inherited by the whole tree", why=why)
    how = {
        "cgroup": "SIGTERM, SIGKILL, and cgroup.kill for what escaped",
        "cookie": "SIGTERM, SIGKILL, and the cookie scan for what escaped",
        "group": "SIGTERM and SIGKILL to the process group only",
    }
    yield LayerVerdict("L3 escalation", holds=strength != "group", strength=strength, why=how[strength])
    unique = any(feature.present for feature in features if feature.name.startswith("pidfd inode"))
    identity = "boot id, pid, start time and pidfd inode" if unique else "boot id, pid and start time"
    yield LayerVerdict(
        "L4 reap at start",
        holds=containment.environments_are_readable(),
        strength=identity,
        why="a live worker is recognised by its identity, one that was never recorded by its cookie",
    )


def _locks(state: Path) -> Iterator[LockHeld]:
    """The deck's lock with its holder, and each worker's lock that is held."""
    found = [StateDir(state).lock]
    workers = StateDir(state).workers
    if workers.is_dir():
        found += sorted(WorkerDir(Path(entry.path)).lock for entry in os.scandir(workers))
    held = [path for path in found if path.exists() and flock.is_held(path)]
    for path, pids in flock.openers(held).items():
        yield LockHeld(str(path.relative_to(state)), pids, [ids.command_line(pid)[:120] for pid in pids])


def _unaccounted(state: Path, locks: list[LockHeld]) -> Iterator[str]:
    """Workers' locks that are held though no record says that the worker lives.

    Records are read after the locks were seen, because a start is recorded before it takes its lock; and a lock is
    looked at again after that, because a stop lets go of it before it is recorded.
    """
    records = {record.name: record for record in records_of(state, [])}
    for held in locks:
        path = state / held.lock
        record = records.get(WorkerName(path.parent.name))
        if path == StateDir(state).lock or (record is not None and record.phase.is_live) or not flock.is_held(path):
            continue
        told = zip(held.holders, held.commands, strict=True)
        holders = ", ".join(f"pid {pid} ({command})" for pid, command in told) or "a process that cannot be seen here"
        says = "no record knows this worker" if record is None else f"its record says {record.phase}"
        yield f"{held.lock} is held by {holders}, but {says}: it cannot be started until they end"
