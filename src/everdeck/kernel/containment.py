"""All processes of one worker's tree: finding them, signalling them, proving that none is left.

Three strengths, reported as they are:

- ``cgroup``: the worker has a cgroup v2 directory of its own and was in it before its first instruction. Whatever it
  forks stays inside, whatever it calls itself, and ``cgroup.kill`` ends all of it at once. The directory is on disk, so
  it outlives the owner. Then nothing else counts: neither a cookie nor a lock, which a worker can hand to a stranger.
- ``cgroup, joined after start``: the same from the moment it was moved in, which is a moment after its start; a process
  that left its tree within that moment and dropped its cookie stays outside.
- ``cookie``: every process of the tree inherits the random ``EVERDECK_COOKIE`` of this start in its environment,
  and the descriptor of the worker's lock. One pass over /proc finds the cookie; a process that cleared its
  environment is still found as a holder of the lock. Holding the lock proves nothing by itself, because a descriptor
  can be passed to anybody: account, start time, session and the owner's own cgroup must fit as well.
- ``group``: /proc does not show us environments; only the process group of the leader is known.

Group signals go through ``PIDFD_SIGNAL_PROCESS_GROUP`` (6.9), which names the group by the kernel's own object;
below that a member is verified first. A bare number is never signalled.

See cgroups(7), ``Documentation/admin-guide/cgroup-v2.rst``, proc_pid_environ(5).
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

from everdeck.child import COOKIE_ENV
from everdeck.errors import KernelError, NotPermitted, ProcessGone
from everdeck.kernel import flock
from everdeck.kernel import identity as ids
from everdeck.model import Containment, Cookie, Identity
from everdeck.statedir import DATA

_COOKIE_KEY: Final = f"{COOKIE_ENV}=".encode()
OWNER_LEAF: Final = "everdeck-owner"  # where the owner sits when it needs controllers; see controllers.py
_GATHER_LOOKS: Final = 64  # a tree that still forks outside after so many looks is left to its cookie


@dataclass(frozen=True, slots=True)
class Tree:
    """What we know of one worker's tree: enough to find it, signal it and prove it gone."""

    name: str
    cookie: Cookie
    # None for a process that was taken over and does not carry a lock. Texts do as well: a Path takes 5 µs to make.
    lock_path: Path | str | None
    identity: Identity | None = None
    cgroup: Path | str | None = None

    @property
    def is_contained(self) -> bool:
        """Has all of it been in its cgroup from the first instruction on?"""
        return self.cgroup is not None and not str(self.cgroup).endswith(_JOINED)

    @property
    def strength(self) -> Containment:
        """How strongly this tree can be found and ended."""
        return strength_of(None if self.cgroup is None else str(self.cgroup))


_JOINED: Final = "~joined"  # no worker's name ends like that


def strength_of(cgroup: str | None) -> Containment:
    """How strongly a tree can be found and ended that has this cgroup."""
    if cgroup is not None:
        return Containment.CGROUP_JOINED if cgroup.endswith(_JOINED) else Containment.CGROUP
    return Containment.COOKIE if environments_are_readable() else Containment.GROUP


def joined_later(cgroup: Path | str) -> Path:
    """The cgroup of a worker that could not be born in it; the name tells whoever finds it, also the next owner."""
    return Path(f"{cgroup}{_JOINED}")


def new_cookie() -> Cookie:
    """The random id of one start of one worker."""
    return Cookie(os.urandom(16).hex())


# --- finding ----------------------------------------------------------------------------------------------------


def members(trees: Sequence[Tree]) -> dict[Cookie, list[int]]:
    """The live pids of each tree, by its cookie; at most one pass over /proc for all of them.

    A pid in the answer is a claim about now: open its pidfd and :func:`belongs` before you signal it.
    """
    found: dict[Cookie, set[int]] = {tree.cookie: set() for tree in trees}
    to_scan: list[Tree] = []
    for tree in trees:
        if tree.cgroup is not None and (pids := pids_in(tree.cgroup)) is not None:
            found[tree.cookie].update(pids)
        else:
            to_scan.append(tree)
    if to_scan:
        carried = cookie_scan({tree.cookie for tree in to_scan})
        for tree in to_scan:
            found[tree.cookie].update(pid for pid in carried[tree.cookie] if _may_be_ours(tree, pid))
    for tree in trees:
        # A lock that is held by nobody we found: somebody cleared its environment or left the cgroup.
        if not tree.is_contained and tree.lock_path is not None and not found[tree.cookie]:
            found[tree.cookie].update(_heirs(tree, tree.lock_path))
    return {cookie: sorted(pids) for cookie, pids in found.items()}


def cookie_scan(cookies: Iterable[Cookie] | None = None) -> dict[Cookie, list[int]]:
    """The live pids that carry each cookie in their environment; of every cookie if none is named.

    A child between vfork and exec still shows its parent's environment (the memory is shared), so a scan
    that must not miss anything is repeated while the worker's lock is held.
    """
    wanted = None if cookies is None else set(cookies)
    found: dict[Cookie, list[int]] = {cookie: [] for cookie in wanted or ()}
    own = os.getpid()
    for pid in flock.all_pids():
        if pid == own:
            continue
        cookie = cookie_of(pid)
        if cookie is not None and (wanted is None or cookie in wanted):
            found.setdefault(cookie, []).append(pid)
    return found


def cookie_of(pid: int) -> Cookie | None:
    """The cookie in a process's environment; None if there is none, it is a zombie, or it is hidden from us."""
    try:
        environ = ids.read_proc(pid, "environ")
    except KernelError:
        return None
    start = 0 if environ.startswith(_COOKIE_KEY) else environ.find(b"\0" + _COOKIE_KEY) + 1
    if start == 0 and not environ.startswith(_COOKIE_KEY):
        return None
    value = environ[start + len(_COOKIE_KEY) :]
    return Cookie(value.partition(b"\0")[0].decode("ascii", "replace"))


def strength(owner: int | None) -> Literal["cgroup", "cookie", "group"]:
    """How the owner's workers are contained; where nobody owns the deck, those of an owner that is started here."""
    if cgroup_home(owner) is not None:
        return "cgroup"
    return "cookie" if environments_are_readable() else "group"


def environment_of(pid: int) -> dict[str, str]:
    """A process's environment as it was started with; empty if it is hidden from us."""
    try:
        environ = ids.read_proc(pid, "environ")
    except KernelError:
        return {}
    pairs = (pair.decode("utf-8", "replace").partition("=") for pair in environ.split(b"\0") if b"=" in pair)
    return {key: value for key, _, value in pairs}


def belongs(tree: Tree, pid: int, pidfd: int) -> bool:
    """Is the process behind ``pidfd``, which was opened for this pid, one of the tree?"""
    if tree.identity is not None and tree.identity.pid == pid:
        return ids.is_same(tree.identity, pidfd)
    if tree.cgroup is not None and (pids := pids_in(tree.cgroup)) is not None and pid in pids:
        return True
    if tree.is_contained:
        return False
    if cookie_of(pid) == tree.cookie and _may_be_ours(tree, pid):
        return True
    return tree.lock_path is not None and _is_ours_by_lock(tree, tree.lock_path, pid)


def is_gone(tree: Tree, found: Sequence[int] | None = None, *, leader_ended: bool = False) -> bool:
    """Is every process of the tree proven gone: lock free, identity dead, cgroup or cookie scan empty?

    ``found`` is the answer of :func:`members` for this tree if the caller has just asked, ``leader_ended`` what a pidfd
    of the leader's has told it.
    """
    if not leader_ended and tree.identity is not None and ids.answer(tree.identity) is not ids.Answer.DIFFERENT:
        return False
    if not tree.is_contained and tree.lock_path is not None and flock.is_held(tree.lock_path):
        return False
    return not (members([tree])[tree.cookie] if found is None else found)


def account_of(lock_path: Path | str) -> int:
    """The account that a worker runs as: ``data`` beside its lock is the account's, and only we can give it away."""
    try:
        return os.stat(f"{os.path.dirname(lock_path)}/{DATA}").st_uid  # noqa: PTH116, PTH120 - asked for each process
    except OSError:
        return os.geteuid()


def _may_be_ours(tree: Tree, pid: int) -> bool:
    """May we, who can signal everybody, take this process for one of the tree by what it says of itself?

    A worker can make a program of another account carry its cookie. Without root the kernel says no by itself, and such
    a process is a survivor that we tell of.
    """
    if os.geteuid() != 0 or tree.lock_path is None:
        return True
    account = account_of(tree.lock_path)
    try:
        return account == 0 or ids.accounts_of(pid) == {account}
    except KernelError:
        return False


def _heirs(tree: Tree, lock_path: Path | str) -> list[int]:
    if not flock.is_held(lock_path):
        return []
    return [pid for pid in flock.holders(lock_path) if _is_ours_by_lock(tree, lock_path, pid)]


def strangers_with_lock(tree: Tree) -> list[int]:
    """Who holds the lock of a tree, if nobody of the tree does: there is nothing to end and nothing to wait for.

    Not a proof that the tree is gone (a program of it may have changed its account), so nothing starts beside them.
    """
    if tree.is_contained or tree.lock_path is None or not flock.is_held(tree.lock_path):
        return []
    holders = flock.holders(tree.lock_path)
    return [] if any(is_ours_by_lock(tree, pid) for pid in holders) else holders


def is_ours_by_lock(tree: Tree, pid: int) -> bool:
    """Is this process, which carries the worker's lock and no cookie, of the worker's tree?

    It inherited the lock from somebody who let go of it; it is of the worker's account alone; it is not older than the
    worker, nor is the leader of its session; it is no worker of its own; and it is in our own cgroup, where every
    process of a worker without one is. Anything else was handed the descriptor: a conflict, nobody to be signalled.
    """
    return tree.lock_path is not None and not tree.is_contained and _is_ours_by_lock(tree, tree.lock_path, pid)


def _is_ours_by_lock(tree: Tree, lock_path: Path | str, pid: int) -> bool:
    if tree.identity is None or not flock.is_heir(lock_path, pid):
        return False
    born, account = tree.identity.start_ticks, {account_of(lock_path)}
    try:
        stat = ids.read_stat(pid)
        fits = stat.start_ticks >= born and ids.accounts_of(pid) == account and cookie_of(pid) in {None, tree.cookie}
        if not fits or stat.session == tree.identity.pid:
            return fits
        if tree.cgroup is None and ids.read_proc(pid, "cgroup") != ids.read_proc(os.getpid(), "cgroup"):
            return False
    except KernelError:
        return False
    with contextlib.suppress(KernelError):  # it ended: whoever called setsid is gone, and its number is the session's
        return ids.read_stat(stat.session).start_ticks >= born and ids.accounts_of(stat.session) == account
    return True


@cache
def environments_are_readable() -> bool:
    """Can cookies be seen at all? Without our own environment in /proc there is no scan."""
    try:
        ids.read_proc(os.getpid(), "environ")
    except KernelError:
        return False
    return True


# --- signalling -------------------------------------------------------------------------------------------------


def signal_tree(
    tree: Tree,
    leader_pidfd: int | None,
    pids: Sequence[int],
    *numbers: int,
    to_group: Sequence[int] | None = None,
) -> None:
    """Send signals, in order, to the leader's group and to every member outside it.

    ``to_group`` are the group's own if it is to have others. SIGKILL goes through ``cgroup.kill`` as well, which leaves
    no time to fork.
    """
    if signal.SIGKILL in numbers and tree.cgroup is not None:
        kill_cgroup(tree.cgroup)
    if leader_pidfd is not None:
        for number in numbers if to_group is None else to_group:
            with contextlib.suppress(NotPermitted):
                _signal_group(tree, leader_pidfd, pids, number)
    for pid in pids:
        if tree.identity is None or leader_pidfd is None or pid != tree.identity.pid:
            _signal_member(tree, pid, numbers, group_was_reached=leader_pidfd is not None)


def _signal_member(tree: Tree, pid: int, numbers: Sequence[int], *, group_was_reached: bool) -> None:
    """Signal one process if it is of the tree and was not reached with its group; strangers are left alone."""
    try:
        pidfd = ids.open_pidfd(pid)
    except ProcessGone:
        return
    try:
        in_group = tree.identity is not None and ids.read_stat(pid).pgrp == tree.identity.pid
        if group_was_reached and in_group and ids.has_group_signal():
            return
        if not belongs(tree, pid, pidfd) or not ids.is_alive(pidfd):
            return
        for number in numbers:
            ids.send_signal(pidfd, number)
    except (ProcessGone, NotPermitted):  # a setuid program of the tree: the proof will tell, the others are signalled
        return
    finally:
        os.close(pidfd)


def _signal_group(tree: Tree, leader_pidfd: int, pids: Sequence[int], number: int) -> None:
    if ids.has_group_signal():
        # A process that was taken over need not lead a group; then it alone is meant.
        if not ids.send_group_signal(leader_pidfd, number):
            ids.send_signal(leader_pidfd, number)
        return
    # Below 6.9. The number of a group stays reserved while it has members, so a verified live member of the
    # tree in that group proves that the number is still ours.
    group = tree.identity.pid if tree.identity is not None else None
    for pid in pids:
        if group is not None and _is_live_member(tree, pid, group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
            return
    ids.send_signal(leader_pidfd, number)


def _is_live_member(tree: Tree, pid: int, group: int) -> bool:
    try:
        pidfd = ids.open_pidfd(pid)
    except KernelError:
        return False
    try:
        return ids.read_stat(pid).pgrp == group and belongs(tree, pid, pidfd) and ids.is_alive(pidfd)
    except KernelError:
        return False
    finally:
        os.close(pidfd)


# --- cgroups ----------------------------------------------------------------------------------------------------


def cgroup_home(pid: int | None = None) -> Path | None:
    """The cgroup v2 directory under which we may make our own, or None; tried once by making one.

    With a ``pid`` the directory under which that process may do so, as far as can be told without being it.
    """
    own = own_cgroup(pid)
    if own is None:
        return None
    home = own.parent if own.name == OWNER_LEAF else own
    if pid is not None and (account := _account_of_process(pid)) != os.geteuid():
        try:
            delegated = account in {0, home.stat().st_uid}
        except OSError:
            return None
        return home if delegated and (home / "cgroup.kill").exists() else None
    probe = home / f"everdeck-probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        probe.mkdir()
    except OSError:  # not root and not delegated, read-only, or a container without its own cgroup
        return None
    try:
        usable = (probe / "cgroup.kill").exists() and os.access(home / "cgroup.procs", os.W_OK)
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()
    return home if usable else None


def own_cgroup(pid: int | None = None) -> Path | None:
    """The cgroup v2 directory that a process sits in (we ourselves unless told); None where there is no cgroup v2."""
    mount = _cgroup2_mount()
    if mount is None:
        return None
    own = "/"
    with contextlib.suppress(OSError), open(f"/proc/{pid or 'self'}/cgroup", encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("0::"):
                own = line.rstrip("\n")[3:]
    return mount / own.lstrip("/")


def _account_of_process(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116 - a kernel file
    except OSError:
        return None


def make_cgroup(path: Path) -> bool:
    """Make a worker's directory (and its deck's); False if the kernel refuses, which costs only strength."""
    try:
        os.mkdir(path)  # noqa: PTH102 - one system call on the way of every start
    except FileExistsError:
        return True
    except FileNotFoundError:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
    except OSError:
        return False
    return True


def make_fresh_cgroup(path: Path | str) -> bool:
    """As :func:`make_cgroup`, for a worker that will be born in it: a directory that was never killed.

    A process that is cloned into a cgroup after a ``cgroup.kill`` is killed at its birth, for as long as the directory
    exists (seen on 6.18: the count of kills is compared with that of the parent's cgroup).
    """
    try:
        os.mkdir(path)  # noqa: PTH102 - raw calls: these lie on the way of every start
    except FileExistsError:  # of the start before
        with contextlib.suppress(OSError):
            os.rmdir(path)  # noqa: PTH106
        return make_cgroup(Path(path))
    except FileNotFoundError:  # the first worker of its deck
        return make_cgroup(Path(path))
    except OSError:
        return False
    return True


def enter_cgroup(path: Path, pid: int) -> bool:
    """Move a process, which the caller knows to be its own, into the cgroup; False if it is gone or refused.

    The kernel takes a lock for this that costs a grace period of RCU (8-15 ms when idle, seen on 6.18; 75 µs
    when moves follow each other), so callers do it off the path of a start.
    """
    try:
        fd = os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, str(pid).encode())
    except OSError:  # ESRCH: it ended; EBUSY, EOPNOTSUPP, EACCES: the cgroup does not take processes
        return False
    finally:
        os.close(fd)
    return True


def gather_into_cgroups(orders: Sequence[tuple[Tree, Path]]) -> list[tuple[Tree, Path]]:
    """Move whole trees into their cgroups: each leader first, then whatever was forked before it was inside.

    A child inherits the cgroup of its parent, so once a look finds nobody outside, nobody can get outside. One look
    is one pass over /proc for all trees: what daemonised before its leader was moved has no parent in the tree any
    more, and only its cookie tells. Returns the orders whose trees are inside.
    """
    inside_by_cookie = {tree.cookie: (tree, path) for tree, path in orders if _enter_leader(tree, path)}
    done: list[tuple[Tree, Path]] = []
    waiting = inside_by_cookie
    for _ in range(_GATHER_LOOKS):
        if not waiting:
            break
        # In this order: whoever is forked by somebody inside is inside, so a list of members that is older than the
        # list of those inside can only name too few outside, never too many.
        scanned = cookie_scan(waiting)
        unfinished = {}
        for cookie, (tree, path) in waiting.items():
            leader = tree.identity.pid if tree.identity is not None else 0
            members_seen = dict.fromkeys([*_descendants(leader), *scanned[cookie]])
            inside = set(pids_in(path) or ())
            outside = [pid for pid in members_seen if pid not in inside and not _is_dead(pid)]
            for pid in outside:
                if _enter_member(tree, path, pid, inside | {leader}):
                    inside.add(pid)
            if outside:
                unfinished[cookie] = (tree, path)
            else:
                done.append((tree, path))
        waiting = unfinished
    return done


def _enter_leader(tree: Tree, path: Path) -> bool:
    identity = tree.identity
    if identity is None or not make_cgroup(path):
        return False
    # The order to move it may be a second old: its pid may be a stranger's by now.
    return _enter_verified(path, identity.pid, lambda pidfd: ids.is_same(identity, pidfd))


def _enter_member(tree: Tree, path: Path, pid: int, parents: AbstractSet[int]) -> bool:
    return _enter_verified(path, pid, lambda _: cookie_of(pid) == tree.cookie or ids.read_stat(pid).ppid in parents)


def _enter_verified(path: Path, pid: int, is_ours: Callable[[int], bool]) -> bool:
    """Move a process into the cgroup if it is proven to be ours; what a reused pid moved by mistake is put back.

    cgroup.procs takes a number. The pidfd is opened first and asked again afterwards: while its process lives, the
    number cannot have been a stranger's.
    """
    try:
        pidfd = ids.open_pidfd(pid)
    except KernelError:
        return False
    try:
        if not is_ours(pidfd) or ids.is_readable(pidfd) or not enter_cgroup(path, pid):
            return False
        moved = ids.is_alive(pidfd)
        if not moved and pid in (pids_in(path) or ()):  # a zombie is not listed, so this is somebody else
            enter_cgroup(path.parent.parent, pid)
    except KernelError:
        return False
    else:
        return moved
    finally:
        os.close(pidfd)


def is_inside(path: Path | str, pid: int) -> bool:
    """Is this process in the cgroup now?"""
    return pid in (pids_in(path) or ())


def is_populated(path: Path) -> bool:
    """Is anybody in the cgroup?"""
    return bool(pids_in(path))


def _is_dead(pid: int) -> bool:
    try:
        return ids.read_stat(pid).dead
    except KernelError:
        return True


def kill_cgroup(path: Path | str) -> None:
    """End everything inside with SIGKILL, at once."""
    try:
        fd = os.open(f"{path}/cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:  # gone already, or below 5.14: the signals to the members remain
        return
    try:
        os.write(fd, b"1")
    except OSError:
        return
    finally:
        os.close(fd)


def remove_cgroup(path: Path | str) -> None:
    """Remove an empty directory; a busy one stays and is removed with the next stop."""
    with contextlib.suppress(OSError):
        os.rmdir(path)  # noqa: PTH106 - a path or a text


def remove_cgroups(home: Path) -> None:
    """Remove a deck's directory with every empty one in it; what is busy stays for the next owner."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(home):
            if entry.is_dir(follow_symlinks=False):
                remove_cgroup(Path(entry.path))
    remove_cgroup(home)


@cache
def _cgroup2_mount() -> Path | None:
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            before, _, after = line.partition(" - ")
            if after.startswith("cgroup2 "):
                return Path(before.split()[4].encode().decode("unicode_escape"))
    return None


def pids_in(path: Path | str) -> list[int] | None:
    """The pids inside, zombies excluded by the kernel; None if the directory does not exist."""
    try:
        fd = os.open(f"{path}/cgroup.procs", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = os.read(fd, 4096)
        if len(content) > 2048:  # noqa: PLR2004 - a sequence file may end a read before a number that did not fit
            while piece := os.read(fd, 65536):
                content += piece
    except OSError:
        return None
    finally:
        os.close(fd)
    return [*map(int, content.split())]


def _descendants(pid: int) -> list[int]:
    """Children, their children and so on, as the kernel lists them now."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError, KernelError):
            for task in os.listdir(f"/proc/{parent}/task"):  # noqa: PTH208 - names are all we want
                for word in ids.read_proc(parent, f"task/{task}/children").split():
                    found.append(int(word))
                    waiting.append(int(word))
    return found
