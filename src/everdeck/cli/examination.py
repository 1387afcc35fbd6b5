"""What ``doctor`` finds out: the machine's features, the deck's layers, and processes that should not be.

It only looks. Three kinds of processes are looked for: orphans (they carry the cookie of a deck and no record there
wants them, or the record says that the worker is at rest), duplicates (two trees that carry the same worker's name),
and likenesses: processes that are nobody's and that were started with the same command line in the same directory
several times, or that hold the same token in their environment. The last kind is how thirteen orphaned bots look from
outside; it is a suspicion and never more.
"""

import contextlib
import hashlib
import os
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from everdeck.child import COOKIE_ENV, DIR_ENV, WORKER_ENV
from everdeck.cli import output
from everdeck.deck.peek import peek
from everdeck.errors import EverdeckError, KernelError, RegistryError
from everdeck.kernel import containment, controllers, exits, flock, notify, quotas, sandbox
from everdeck.kernel import identity as ids
from everdeck.logs import room
from everdeck.model import LogRoom, State, UnknownExit, WorkerName
from everdeck.registry.store import WorkerRecord, read_only
from everdeck.statedir import StateDir, WorkerDir

_SECRET_WORDS: Final = (b"TOKEN", b"SECRET", b"API_KEY", b"APIKEY", b"PASSWORD")
_AT_REST: Final = {State.STOPPED, State.EXITED, State.FAILED}
_INTERPRETERS: Final = ("python", "node", "ruby", "perl", "php", "java", "deno", "bun")


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


class Stray(msgspec.Struct, frozen=True):
    """A process that should perhaps not be."""

    pid: int
    kind: str
    command: str
    why: str
    worker: str | None = None
    cookie: str | None = None
    deck: str | None = None


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
    records = _records(state, problems)
    try:
        snapshot = peek(state)
        supervised, owner, workers = snapshot.supervised, snapshot.owner_pid, snapshot.workers
    except EverdeckError as error:
        problems.append(str(error))
        supervised, owner, workers = False, None, []
    features = list(_features(state, owner))
    strength = _strength(owner)
    limits = [*_limits(len(workers), owner), *_log_room(state)]
    suspects = [*_unwanted(state, records), *_likenesses()]
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


def _records(state: Path, problems: list[str]) -> list[WorkerRecord]:
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
        _has_exit_info(),
        "the exit code of an adopted worker is known",
        "an adopted worker's end is 'unknown': neither success nor failure",
    )
    yield Feature(
        "notifications with the sender's pidfd (6.5)",
        notify.tells_pidfds(),
        "READY=1 and WATCHDOG=1 are known to be of a worker, though the sender has ended and its pid is another's",
        "a sender that has ended before its word is read is not believed: systemd-notify from a script may be missed",
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
        _can_collapse(state),
        "logs are rotated without losing a byte and without the worker noticing",
        "the head is punched out: the same, but the file's length keeps growing",
    )


def _has_exit_info() -> bool:
    pid = os.posix_spawn("/proc/self/exe", ["python3", "-SEsc", ""], {})
    pidfd = ids.open_pidfd(pid)
    try:
        os.waitpid(pid, 0)
        return not isinstance(exits.told_by_pidfd(pidfd), UnknownExit)
    finally:
        os.close(pidfd)


def _can_collapse(state: Path) -> bool:
    """Try it on a file of our own beside the logs; FALLOC_FL_COLLAPSE_RANGE is 8 (linux/falloc.h)."""
    import ctypes
    import tempfile

    folder = state if state.is_dir() else Path(tempfile.gettempdir())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            block = os.fstatvfs(file.fileno()).f_bsize
            file.write(b"\0" * (4 * block))
            file.flush()
            return bool(libc.fallocate(file.fileno(), 8, 0, block) == 0)
    except OSError:
        return False


def _strength(owner: int | None) -> str:
    """Of the owner's workers; where nobody owns the deck, of those that an owner would have that is started here."""
    if containment.cgroup_home(owner) is not None:
        return "cgroup"
    return "cookie" if containment.environments_are_readable() else "group"


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


def _number_in(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


# --- the layers -------------------------------------------------------------------------------------------------


def _layers(
    state: Path, features: list[Feature], strength: str, *, supervised: bool, owner: int | None, bound: int
) -> Iterator[LayerVerdict]:
    guardian = _guardian_of(owner)
    if not supervised or not bound:
        why = "no bound worker runs now; a pipe needs nothing but the kernel"
        yield LayerVerdict("L1 lifeline", holds=True, strength="not in use", why=why)
    elif guardian is None:
        why = f"{bound} bound workers run and no guardian of owner {owner} was found; it is respawned when it dies"
        yield LayerVerdict("L1 lifeline", holds=False, strength="cooperating workers only", why=why)
    else:
        why = f"guardian is pid {guardian}, {bound} bound workers"
        yield LayerVerdict("L1 lifeline", holds=True, strength="lifeline and guardian", why=why)
    holds, why = _locks_work(state)
    yield LayerVerdict("L2 lock", holds=holds, strength="flock, inherited by the whole tree", why=why)
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


def _guardian_of(owner: int | None) -> int | None:
    for pid in flock.all_pids():
        if "everdeck.guardian" in ids.command_line(pid) and owner is not None:
            try:
                if ids.read_stat(pid).ppid == owner:
                    return pid
            except KernelError:
                continue
    return None


def _locks_work(state: Path) -> tuple[bool, str]:
    """Take a lock twice where the deck's locks are: the second time must be refused (some network shares do not)."""
    import tempfile

    folder = state if state.is_dir() else Path(tempfile.gettempdir())
    path = folder / f".doctor-lock-{os.getpid()}"
    try:
        first = flock.take(path)
        try:
            refused = flock.is_held(path)
        finally:
            if first is not None:
                os.close(first)
            path.unlink()
    except (OSError, EverdeckError) as error:
        return False, f"locks cannot be tried in {folder}: {error}"
    return (
        (True, f"tried in {folder}") if refused else (False, f"{folder} grants one lock twice; is it a network share?")
    )


def _locks(state: Path) -> Iterator[LockHeld]:
    """The deck's lock with its holder, and each worker's lock that is held."""
    found = [StateDir(state).lock]
    workers = StateDir(state).workers
    if workers.is_dir():
        found += sorted(WorkerDir(Path(entry.path)).lock for entry in os.scandir(workers))
    held = [path for path in found if path.exists() and flock.is_held(path)]
    by_inode = _open_files({(facts.st_dev, facts.st_ino) for path in held for facts in (path.stat(),)})
    for path in held:
        facts = path.stat()
        pids = by_inode.get((facts.st_dev, facts.st_ino), [])
        yield LockHeld(str(path.relative_to(state)), pids, [ids.command_line(pid)[:120] for pid in pids])


def _unaccounted(state: Path, locks: list[LockHeld]) -> Iterator[str]:
    """Workers' locks that are held though no record says that the worker lives.

    Records are read after the locks were seen, because a start is recorded before it takes its lock; and a lock is
    looked at again after that, because a stop lets go of it before it is recorded.
    """
    records = {record.name: record for record in _records(state, [])}
    for held in locks:
        path = state / held.lock
        record = records.get(WorkerName(path.parent.name))
        if path == StateDir(state).lock or (record is not None and record.phase.is_live) or not flock.is_held(path):
            continue
        told = zip(held.holders, held.commands, strict=True)
        holders = ", ".join(f"pid {pid} ({command})" for pid, command in told) or "a process that cannot be seen here"
        says = "no record knows this worker" if record is None else f"its record says {record.phase}"
        yield f"{held.lock} is held by {holders}, but {says}: it cannot be started until they end"


def _open_files(wanted: set[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """Who has these files open, in one pass over /proc."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for pid in flock.all_pids() if wanted else ():
        try:
            descriptors = list(os.scandir(f"/proc/{pid}/fd"))
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                facts = Path(descriptor.path).stat()
            except OSError:
                continue
            key = (facts.st_dev, facts.st_ino)
            if key in wanted and pid not in found[key] and pid != os.getpid():
                found[key].append(pid)
    return found


# --- who should not be ------------------------------------------------------------------------------------------


def _unwanted(state: Path, records: list[WorkerRecord]) -> Iterator[Stray]:
    """Processes with a cookie that no record of their deck knows, or with that of a worker at rest, in any deck."""
    here = Path.cwd() / state
    decks: dict[Path, list[WorkerRecord] | None] = {here: records}
    for cookie, pids in containment.cookie_scan().items():
        for pid in pids:
            environment = _environment(pid)
            folder = Path(environment.get(DIR_ENV.encode(), b"").decode("utf-8", "replace"))
            worker = environment.get(WORKER_ENV.encode(), b"").decode("utf-8", "replace")
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
    records = _records(deck, problems)
    return None if problems else records


def _likenesses() -> Iterator[Stray]:
    """Processes that are nobody's and look like several copies of one program."""
    same_command: dict[str, list[int]] = defaultdict(list)
    same_secret: dict[tuple[str, bytes], list[int]] = defaultdict(list)
    for pid, command, environment in _programs_of_nobody():
        try:
            place = Path(f"/proc/{pid}/cwd").readlink()
        except OSError:
            continue
        same_command[f"{command}\0{place}"].append(pid)
        for key, value in environment.items():
            if value and any(word in key.upper() for word in _SECRET_WORDS):
                same_secret[key.decode("utf-8", "replace"), hashlib.sha256(value).digest()].append(pid)
    told: set[int] = set()
    for alike, pids in same_command.items():
        command, _, place_text = alike.partition("\0")
        for pid, count in _suspicious(pids):
            told.add(pid)
            yield Stray(pid, "likeness", command[:200], f"one of {count} alike in {place_text}")
    for (name, _), pids in same_secret.items():
        for pid, count in _suspicious([pid for pid in pids if pid not in told]):
            yield Stray(pid, "likeness", ids.command_line(pid)[:200], f"one of {count} with the same {name}")


def _programs_of_nobody() -> Iterator[tuple[int, str, dict[bytes, bytes]]]:
    """Scripts that some interpreter runs and that are no worker of any deck."""
    for pid in flock.all_pids():
        command = ids.command_line(pid)
        program, _, rest = command.partition(" ")
        if not rest or pid in {1, os.getpid()} or not program.rpartition("/")[2].startswith(_INTERPRETERS):
            continue
        environment = _environment(pid)
        if COOKIE_ENV.encode() not in environment and "everdeck" not in command:
            yield pid, command, environment


def _suspicious(pids: list[int]) -> Iterator[tuple[int, int]]:
    """Those of them that nobody else of them started, if there are several and one has lost its parent."""
    apart = _unrelated(pids)
    if len(apart) > 1 and any(_is_orphan(pid) for pid in apart):
        yield from ((pid, len(apart)) for pid in apart)


def _unrelated(pids: list[int]) -> list[int]:
    """Without those that another of them started: a server and its own workers are one."""
    chosen = set(pids)
    return [pid for pid in pids if not chosen & set(_ancestors(pid))]


def _ancestors(pid: int) -> Iterator[int]:
    for _ in range(64):
        try:
            pid = ids.read_stat(pid).ppid
        except KernelError:
            return
        if pid <= 1:
            return
        yield pid


def _is_orphan(pid: int) -> bool:
    """Whether its parent is gone: taken by pid 1, or by a reaper that is not in its session's line."""
    try:
        stat = ids.read_stat(pid)
        if stat.ppid == 1:
            return True
        parent = ids.read_stat(stat.ppid)
    except KernelError:
        return False
    # A subreaper (systemd --user, a container's init) leads a session of its own and never shares the child's.
    return parent.session != stat.session and parent.ppid in {0, 1} and stat.pid != stat.session


def _environment(pid: int) -> dict[bytes, bytes]:
    try:
        raw = ids.read_proc(pid, "environ")
    except KernelError:
        return {}
    return {key: value for key, equals, value in (entry.partition(b"=") for entry in raw.split(b"\0")) if equals}
