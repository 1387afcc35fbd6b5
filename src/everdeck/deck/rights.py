"""What a worker may do, as the kernel is told it at its birth: account, limits, cgroup, sandbox.

A spec says what is wanted; :func:`check` refuses what this machine cannot hold, before anything is written;
:func:`born` gives what the kernel layer applies between birth and exec; :func:`holds` says it in plain words.

With ``user="auto"`` a worker has a uid of its own, from a range (:func:`use_auto_uids`, ``EVERDECK_AUTO_UIDS``). The
note of it is the owner of its ``data`` directory, which only root can change, so it cannot be lost or disagree with the
files. Uids are given in turn and not again before the range has been used up, because files of an old one may lie
anywhere.
"""

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from everdeck import disk
from everdeck.errors import LimitUnavailable, SpecError
from everdeck.kernel import controllers, quotas, sandbox
from everdeck.kernel.birth import Birth
from everdeck.model import Containment, Hold, Limits, WorkerSpec
from everdeck.statedir import DATA, QUOTA, SECRETS, TMP

AUTO: Final = "auto"
AUTO_UIDS_ENV: Final = "EVERDECK_AUTO_UIDS"
DEFAULT_AUTO_UIDS: Final = "1900000000-1900065535"
_LAST_UID: Final = "last-uid"
_PRIVATE_UMASK: Final = 0o077
_PACKAGE: Final = str(Path(__file__).parents[1])
_NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Account:
    """Who a worker runs as; None keeps ours."""

    uid: int | None
    gid: int | None
    groups: tuple[int, ...] | None


def check(spec: WorkerSpec) -> None:
    """Refuse accounts and sandboxes that cannot be had here."""
    if spec.user == AUTO:
        _needs_root("user", AUTO)
        _auto_uids()
        if spec.group is not None:
            raise SpecError("group", spec.group, "nothing beside user='auto', which has a group of its own")
    else:
        account_of(spec)
    if spec.sandbox.level == "off":
        return
    if sandbox.has_capabilities() and not sandbox.can_empty_capabilities():
        raise LimitUnavailable(
            "sandbox.level", spec.sandbox.level, "off: we have capabilities and may not take them away (CAP_SETPCAP)"
        )
    if spec.sandbox.level == "strict" and (why := sandbox.why_not_strict()) is not None:
        raise LimitUnavailable("sandbox.level", "strict", f"off or basic on this machine: {why}")


def account_of(spec: WorkerSpec, home: Path | str | None = None) -> Account | None:
    """Who it runs as, refused if there is no such account; None: as who we are. ``auto`` is read from its home."""
    if spec.user is None and spec.group is None:
        return None
    field = "user" if spec.user is not None else "group"
    _needs_root(field, str(getattr(spec, field)))
    if spec.user == AUTO:
        uid = None if home is None else _auto_uid_of(Path(home))
        return None if uid is None else Account(uid, uid, ())
    uid, gid, groups = None, None, None
    if spec.user is not None:
        entry = passwd_entry(spec.user)
        uid, gid = entry.pw_uid, entry.pw_gid
        groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    if spec.group is not None:
        gid = _group(spec.group)
        groups = (gid,) if groups is None else tuple({*groups, gid})
    return Account(uid, gid, groups)


def passwd_entry(user: str) -> pwd.struct_passwd:
    """The account of this name or number."""
    try:
        return pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except KeyError:
        raise SpecError("user", user, "a user of this machine") from None


def environment(spec: WorkerSpec, home: str) -> dict[str, str]:
    """What its account and its sandbox change in its environment."""
    env: dict[str, str] = {}
    if spec.user == AUTO:
        env = {"HOME": f"{home}/{DATA}", "USER": f"everdeck-{_auto_uid_of(Path(home))}", "SHELL": "/bin/sh"}
    elif spec.user is not None:
        entry = passwd_entry(spec.user)
        env = {"HOME": entry.pw_dir, "USER": entry.pw_name, "SHELL": entry.pw_shell}
    if spec.sandbox.level == "strict":  # the usual places are out of its reach
        env |= {"HOME": f"{home}/{DATA}", "TMPDIR": f"{home}/{TMP}"}
    return env


@contextlib.contextmanager
def born(spec: WorkerSpec, home: str, cgroup: str | None, port: int | None, *, beside: bool = False) -> Iterator[Birth]:
    """What must be true before its program runs, or one that we run for it ``beside`` it.

    Its cgroup must hold it from the start where that bounds it (limits, a sandbox) or where it is somebody else's
    program (another account); otherwise it is better so, and the next best is to join it a moment later.
    """
    limits, account, boxed = spec.limits, account_of(spec, home), spec.sandbox.level != "off"
    if account is None and not boxed and limits == _NO_LIMITS and spec.umask is None:  # nearly everybody
        yield Birth(cgroup=cgroup)
        return
    bounded = account is not None or boxed or (controllers.needed(limits) and not beside)
    ruleset_fd = sandbox.ruleset(_reach(spec, Path(home), port)) if spec.sandbox.level == "strict" else None
    try:
        yield Birth(
            cgroup=cgroup,
            cgroup_required=cgroup is not None and bounded,
            uid=None if account is None else account.uid,
            gid=None if account is None else account.gid,
            groups=None if account is None else account.groups,
            umask=_PRIVATE_UMASK if boxed and spec.umask is None else spec.umask,
            open_files=limits.open_files,
            nice=limits.nice,
            oom_score_adj=limits.oom_score_adj,
            no_core=boxed,
            no_capabilities=boxed and sandbox.can_empty_capabilities(),
            no_new_privileges=boxed,
            ruleset_fd=ruleset_fd,
            filter=b"" if ruleset_fd is None else sandbox.system_call_filter(unix_sockets=spec.sandbox.unix_sockets),
        )
    finally:
        if ruleset_fd is not None:
            os.close(ruleset_fd)


def furnish(spec: WorkerSpec, home: Path, state_dir: Path) -> Account | None:
    """Make what its account and its sandbox need in its home; the account it will run as.

    Nothing is given away by name: ``home`` is ours, and what is below ``data`` is looked at through descriptors.
    """
    own = [home / DATA]
    if spec.sandbox.level == "strict":
        (home / TMP).mkdir(mode=0o700, exist_ok=True)
        own.append(home / TMP)
    account = account_of(spec, home)
    if spec.user == AUTO and account is None:
        uid = _next_auto_uid(home, state_dir)
        account = Account(uid, uid, ())
    try:
        if account is not None and account.uid is not None:
            for folder in own:
                _give(folder, account.uid, -1 if account.gid is None else account.gid)
        _limit_disk(spec, home, own)
    except RecursionError:
        raise SpecError("user", spec.user, f"{home}/{DATA} with directories that can be followed: too deep") from None
    return account


def forget_disk_limit(home: Path) -> None:
    """Before its home is removed: the number of its project is free for the next one."""
    project = _project_of(home)
    if project is not None:
        quotas.unlimit(home, project)


def holds(spec: WorkerSpec, containment_: Containment | None) -> list[Hold]:
    """What a worker can and cannot do, in plain words; what does not hold says why."""
    box = spec.sandbox
    boxed, strict = box.level != "off", box.level == "strict"
    off = "" if boxed else "sandbox is off"
    not_strict = "" if strict else "only with sandbox strict"
    contained = containment_ is Containment.CGROUP
    shared = "" if spec.user else "it runs as the account that owns the deck; user= or user='auto' gives it another"
    listed = ", ".join(map(str, box.tcp_connect)) or "none"
    bound = ", ".join([*map(str, box.tcp_bind), *(["its own"] if spec.port else [])]) or "none"
    why_outside = "" if contained else f"containment is {containment_ or 'unknown until it runs'}"
    facts = [
        ("cannot touch what belongs to the deck or to workers of other accounts", bool(spec.user), shared),
        ("cannot gain privileges (setuid programs, capabilities)", boxed, off),
        ("leaves no core dumps, and its files are for its account only", boxed, off),
        ("everything it starts is ended with it", contained, why_outside),
        ("reaches only its own directories and what is listed; the system read-only", strict, not_strict),
        (f"connects to TCP ports: {listed}", strict and box.tcp_connect != "any", not_strict or "any port is listed"),
        (f"listens on TCP ports: {bound}", strict and box.tcp_bind != "any", not_strict or "any port is listed"),
        ("connects to no Unix socket of others", strict and not box.unix_sockets, not_strict or "unix_sockets is set"),
        ("cannot trace, mount, make namespaces, signal others or change their limits and turns", strict, not_strict),
        (
            "changes no modes, times and attributes of files outside its reach",
            spec.user == AUTO,
            "Landlock has no right for that, so it may for other files of its account; user='auto' has none",
        ),
        ("sends no UDP", False, "nothing here limits UDP"),
    ]
    if (most := spec.limits.disk_bytes) is not None:
        facts.append(
            (f"its files take at most {most} bytes", strict, f"{not_strict}: an account may free its own files")
        )
    return [Hold(what, it_holds, "" if it_holds else why) for what, it_holds, why in facts]


def _limit_disk(spec: WorkerSpec, home: Path, own: list[Path]) -> None:
    """What its own directories may hold together; a limit that the spec no longer has is taken away."""
    most, project = spec.limits.disk_bytes, _project_of(home)
    if most is not None:
        project = quotas.limit(own, most, project)
        disk.replace_file(home / QUOTA, f"{project}\n".encode())
    elif project is not None:
        quotas.unlimit(home, project)
        (home / QUOTA).unlink()


def _project_of(home: Path) -> int | None:
    try:
        return int((home / QUOTA).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _reach(spec: WorkerSpec, home: Path, port: int | None) -> sandbox.Reach:
    """Its own directories, its program, where it was told to work, and what is listed.

    Whatever lies where it can write is reached anyway, and never looked up: it could be a link to anywhere by now.
    """
    box, at = spec.sandbox, str(home)
    write = [f"{at}/{DATA}", f"{at}/{TMP}"]
    write += [path for path in box.write if not _is_below(path, write)]
    path = spec.env.get("PATH") or os.environ.get("PATH", os.defpath)
    read = [f"{at}/{SECRETS}", _PACKAGE, *box.read, *(() if spec.cwd is None else (spec.cwd,))]
    program = spec.command[0] if spec.command else ""
    if program and not _is_below(os.path.join(spec.cwd or write[0], program), write):  # noqa: PTH118 - a text
        read += sandbox.beside_program(program, path)
    bind = sandbox.ports(box.tcp_bind)
    return sandbox.Reach(
        read=tuple(one for one in read if not _is_below(one, write)),
        write=tuple(write),
        connect=sandbox.ports(box.tcp_connect),
        bind=bind if bind is None or port is None else (*bind, port),
        hidden=str(home.parent.parent),
    )


def _is_below(path: str, folders: list[str]) -> bool:
    whole = os.path.abspath(path)  # noqa: PTH100 - by its letters alone: a link is what this is about
    return any(f"{whole}/".startswith(f"{folder.rstrip('/')}/") for folder in folders)


# --- accounts ---------------------------------------------------------------------------------------------------


def _needs_root(field: str, given: str) -> None:
    if os.geteuid() != 0:
        raise SpecError(field, given, "nothing without root: only root may change a worker's account")


def _group(group: str) -> int:
    try:
        return grp.getgrgid(int(group)).gr_gid if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise SpecError("group", group, "a group of this machine") from None


def use_auto_uids(text: str) -> None:
    """From now on this process gives uids of this range: ``FIRST-LAST``. Workers that have one keep it."""
    global _chosen_uids  # noqa: PLW0603 - accounts are the machine's, so there is one range per process
    _chosen_uids = _uids_in(text, "auto_uids")


_chosen_uids: range | None = None


def _auto_uids() -> range:
    return _chosen_uids or _uids_in(os.environ.get(AUTO_UIDS_ENV, DEFAULT_AUTO_UIDS), AUTO_UIDS_ENV)


def _uids_in(text: str, field: str) -> range:
    first, dash, last = text.partition("-")
    if not dash or not first.isdigit() or not last.isdigit() or not 0 < int(first) <= int(last) < 2**32 - 2:
        raise SpecError(field, text, f"FIRST-LAST, such as {DEFAULT_AUTO_UIDS}")
    return range(int(first), int(last) + 1)


def _auto_uid_of(home: Path) -> int | None:
    """The uid that it was given: of its data, nobody's by name. Not by the range, which may be another one by now."""
    try:
        uid = os.stat(home / DATA, follow_symlinks=False).st_uid  # noqa: PTH116 - the raw number
    except OSError:
        return None
    return None if uid == os.geteuid() or _has_entry(uid) else uid


def _next_auto_uid(home: Path, state_dir: Path) -> int:
    """One that no worker has; noted as given before it is used, so that a crash skips one and never gives one twice."""
    uids, note = _auto_uids(), state_dir / _LAST_UID
    taken = {uid for other in home.parent.iterdir() if (uid := _auto_uid_of(other)) is not None}
    try:
        last = int(note.read_text(encoding="ascii"))
    except (OSError, ValueError):
        last = max(taken, default=uids.start - 1)
    if last not in uids:  # of another range
        last = uids.start - 1
    for step in range(len(uids)):
        uid = uids[(last + 1 - uids.start + step) % len(uids)]
        if uid not in taken and not _has_entry(uid):
            disk.replace_file(note, f"{uid}\n".encode())
            return uid
    raise SpecError("user", AUTO, f"a free uid in the range {uids.start}-{uids[-1]}: all of them are in use")


def _has_entry(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _give(folder: Path, uid: int, gid: int) -> None:
    """Give a directory, and what its account before made in it, to the account. Links and second names stay."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        before = os.fstat(fd).st_uid
        if before not in {uid, os.geteuid()}:
            for _, folders, files, below_fd in os.fwalk(".", dir_fd=fd, follow_symlinks=False):
                for name in (*folders, *files):
                    _give_one(name, below_fd, before, uid, gid)
        os.fchown(fd, uid, gid)
    finally:
        os.close(fd)


def _give_one(name: str, folder_fd: int, before: int, uid: int, gid: int) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        try:
            facts = os.fstat(fd)
            if facts.st_uid == before and (stat.S_ISDIR(facts.st_mode) or facts.st_nlink == 1):
                # By the descriptor that was looked at: the name may mean something else by now.
                os.chown(f"/proc/self/fd/{fd}", uid, gid)
        finally:
            os.close(fd)
