"""The receiving end of systemd's notify protocol: who said what.

A worker sends datagrams to the socket named in ``NOTIFY_SOCKET``. The kernel attaches the sender's pid and user
(``SO_PASSCRED``; only a process that is root anyway can claim another pid) and, since Linux 6.5, a pidfd of it
(``SO_PASSPIDFD``), so the pid cannot come to mean a stranger while we look it up. :func:`speaker` then says which
worker the sender belongs to: one worker cannot speak for another, and who is no worker is not heard.

The address is the same for every owner of a state directory, and a new owner puts its socket there in one step
(bind beside it, rename over it), so a worker that was started before keeps being heard after.

See sd_notify(3), unix(7) SCM_CREDENTIALS, ``include/uapi/linux/pidfd.h``.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Self

from everdeck.child import runtime_directory
from everdeck.errors import KernelError, StateDirRefused
from everdeck.kernel import identity as ids
from everdeck.kernel import pidfd_info
from everdeck.kernel.containment import Tree, account_of, cookie_of, is_inside
from everdeck.model import Cookie

ADDRESS_BYTES: Final = 107
_MESSAGE_BYTES: Final = 65536
_CREDENTIALS: Final = struct.Struct("=iII")
# Not yet in Python's socket module; the values of every architecture but alpha, parisc and sparc.
_SO_PASSPIDFD: Final = 76
_SCM_PIDFD: Final = 4
_MAX_FDS: Final = 16  # more than a message of ours needs; all of them are closed
MOST_PER_TURN: Final = 64
_MOST_ANCESTORS: Final = 32


@dataclass(frozen=True, slots=True)
class Notification:
    """One datagram, as the kernel vouches for it. ``pidfd`` is None below Linux 6.5, and closed by the receiver."""

    pid: int
    uid: int
    fields: dict[str, str]
    pidfd: int | None = None


class NotifySocket:
    """The deck's ear. Non-blocking; give :meth:`fileno` to the loop and iterate :meth:`receive` when it is readable."""

    def __init__(self, state_dir: Path) -> None:
        self.address = address_for(state_dir)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            _want_credentials(self._socket)
            self._inode = _take_place(self._socket, self.address)
        except BaseException:
            self._socket.close()
            raise

    @classmethod
    def inherited(cls, fd: int, state_dir: Path) -> Self:
        """The same ear after an exec in place: what was said in between is still in its queue."""
        self = cls.__new__(cls)
        self.address = address_for(state_dir)
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._inode = os.stat(self.address).st_ino  # noqa: PTH116 - a raw path, a raw number
        return self

    def fileno(self) -> int:
        """Readable when something was said."""
        return self._socket.fileno()

    def receive(self) -> Iterator[Notification]:
        """What has been said since, at most :data:`MOST_PER_TURN` of it; ends when nothing is left.

        More stays in the queue and the descriptor readable, so whoever waits for the loop comes before the rest of a
        flood.

        Handle each one before asking for the next: its pidfd is closed then. A sender that waits for us
        (``BARRIER=1``, as systemd-notify does) is let go only when the datagrams before it were handled, so it is
        still alive while they are looked up.
        """
        left = MOST_PER_TURN
        room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4) + socket.CMSG_SPACE(4 * _MAX_FDS)
        while left > 0:
            left -= 1
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError as err:
                raise KernelError(f"{self.address}: recvmsg: {err.strerror} (errno {err.errno})") from err
            pid, uid, pidfd, passed = _unpacked(ancillary)
            try:
                if pid > 0 and not flags & socket.MSG_TRUNC:
                    yield Notification(pid, uid, parsed(data), pidfd)
            finally:
                for fd in (*passed, *(() if pidfd is None else (pidfd,))):
                    os.close(fd)

    def close(self) -> None:
        """Stop listening. The name goes too, unless a later owner already sits there."""
        with contextlib.suppress(OSError):
            if os.stat(self.address).st_ino == self._inode:  # noqa: PTH116 - as above
                os.unlink(self.address)  # noqa: PTH108 - as above
        self._socket.close()

    def give_away(self) -> None:
        """Somebody else listens with a copy of this socket: close ours, and leave the name."""
        self._socket.close()


def address_for(state_dir: Path) -> str:
    """Where the owners of this state directory listen: in it, or at a short path that stands for it.

    An address holds 107 bytes, and a state directory may be deeper; then it is a name made of the directory's hash
    in this user's runtime directory. Who may speak is decided by credentials, not by who can reach the name.
    """
    home = os.path.realpath(state_dir)
    inside = f"{home}/notify.sock"
    if len(os.fsencode(inside)) <= ADDRESS_BYTES - len(_NEXT):
        return inside
    import hashlib  # noqa: PLC0415 - few state directories lie so deep

    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:24]
    return f"{runtime_directory()}/{digest}.notify"


def parsed(data: bytes) -> dict[str, str]:
    """The fields of one datagram: a ``KEY=value`` per line. What is no such line is left out; the last one wins.

    The values end up on terminals and pages, so control characters become spaces.
    """
    fields: dict[str, str] = {}
    for line in data.decode("utf-8", "replace").split("\n"):
        key, equals, value = line.partition("=")
        if equals and key:
            fields[key] = "".join(letter if letter.isprintable() else " " for letter in value)
    return fields


def speaker(
    said: Notification,
    by_leader: Mapping[int, Tree],
    by_cookie: Mapping[Cookie, Tree],
) -> str | None:
    """The worker whose process said it, or None: nobody's, or gone without a trace.

    It must be of the worker's account, and in its cgroup where it has one. Which worker, in this order: the leader by
    its identity; the cookie in the sender's environment; an ancestor that is a
    leader (a helper that cleared its environment); the cgroup, which since Linux 6.15 the pidfd remembers even of
    a sender that ended before we looked.
    """
    with contextlib.suppress(KernelError):
        found = _by_process(said.pid, by_leader, by_cookie)
        # The pid was the sender's all along only if the sender is alive now; a zombie still keeps its pid.
        if found is not None and (said.pidfd is None or not _reaped(said.pidfd, said.pid)):
            return found.name if _may_speak_for(said, found) else None
    return _by_cgroup(said, (*by_leader.values(), *by_cookie.values()))


def _may_speak_for(said: Notification, tree: Tree) -> bool:
    """Only from inside the worker's cgroup where it has one, and as the worker's account: a cookie can be stolen."""
    if tree.cgroup is not None and not _is_in_cgroup(said, tree.cgroup):
        return False
    accounts = _accounts(tree)
    # A worker that is root may hand work to other accounts; of those the kernel, not a cookie, must say whose they are.
    return said.uid in accounts or (0 in accounts and (tree.cgroup is not None or _descends(said.pid, tree)))


def _accounts(tree: Tree) -> set[int]:
    """As whom the worker was started, and as whom its leader runs now: a program may give up root by itself."""
    accounts = {os.geteuid() if tree.lock_path is None else account_of(tree.lock_path)}
    if tree.identity is not None:
        with contextlib.suppress(KernelError):
            accounts |= ids.accounts_of(tree.identity.pid)
    return accounts


def _is_in_cgroup(said: Notification, cgroup: Path | str) -> bool:
    number = None if said.pidfd is None else _cgroup_number(said.pidfd)
    if not number:
        return is_inside(cgroup, said.pid)
    with contextlib.suppress(OSError):
        return os.stat(cgroup).st_ino == number  # noqa: PTH116 - a path or a text
    return False


_NEXT: Final = ".next"


def _want_credentials(receiver: socket.socket) -> None:
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with contextlib.suppress(OSError):  # below 6.5: the pid alone
        receiver.setsockopt(socket.SOL_SOCKET, _SO_PASSPIDFD, 1)


@cache
def tells_pidfds() -> bool:
    """Does this kernel pass the sender's pidfd with what it said (6.5)?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asked:
        try:
            asked.setsockopt(socket.SOL_SOCKET, _SO_PASSPIDFD, 1)
        except OSError:
            return False
    return True


def _take_place(receiver: socket.socket, address: str) -> int:
    beside = address + _NEXT
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)  # noqa: PTH108 - a raw path
        receiver.bind(beside)
        os.chmod(beside, 0o666)  # noqa: PTH101, S103 - whoever reaches it may speak; credentials decide who is heard
        inode = os.stat(beside).st_ino  # noqa: PTH116 - as above
        os.rename(beside, address)  # noqa: PTH104 - as above
    except OSError as err:
        raise StateDirRefused(f"{address}: cannot listen: {err.strerror or err} (errno {err.errno})") from err
    return inode


def _unpacked(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, int, int | None, list[int]]:
    pid, uid, pidfd = 0, -1, None
    passed: list[int] = []
    for level, kind, content in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_CREDENTIALS and len(content) >= _CREDENTIALS.size:
            pid, uid, _ = _CREDENTIALS.unpack_from(content)
        elif kind == _SCM_PIDFD and len(content) >= 4:  # noqa: PLR2004 - one int
            number = struct.unpack_from("=i", content)[0]
            pidfd = number if number >= 0 else None  # a sender that was already reaped, below 6.15
        elif kind == socket.SCM_RIGHTS:
            passed += struct.unpack(f"={len(content) // 4}i", content[: len(content) // 4 * 4])
    return pid, uid, pidfd, passed


def _by_process(pid: int, by_leader: Mapping[int, Tree], by_cookie: Mapping[Cookie, Tree]) -> Tree | None:
    leader = _leader(pid, by_leader)
    if leader is not None:
        return leader
    cookie = cookie_of(pid)
    if cookie is not None and cookie in by_cookie:
        return by_cookie[cookie]
    for ancestor in _ancestors(pid):
        leader = _leader(ancestor, by_leader)
        if leader is not None:
            return leader
    return None


def _descends(pid: int, tree: Tree) -> bool:
    if tree.identity is None:
        return False
    by_leader = {tree.identity.pid: tree}
    return any(_leader(one, by_leader) is not None for one in (pid, *_ancestors(pid)))


def _ancestors(pid: int) -> Iterator[int]:
    for _ in range(_MOST_ANCESTORS):
        pid = ids.read_stat(pid).ppid
        if pid <= 1:
            return
        yield pid


def _leader(pid: int, by_leader: Mapping[int, Tree]) -> Tree | None:
    tree = by_leader.get(pid)
    if tree is None or tree.identity is None or ids.read_stat(pid).start_ticks != tree.identity.start_ticks:
        return None
    return tree


def _reaped(pidfd: int, pid: int) -> bool:
    """Has the sender ended so that its pid may be another's? A zombie keeps its pid."""
    if ids.is_alive(pidfd):
        return False
    try:
        return not ids.read_stat(pid).dead
    except KernelError:
        return True


def _by_cgroup(said: Notification, trees: Iterable[Tree]) -> str | None:
    if said.pidfd is None:
        return None
    number = _cgroup_number(said.pidfd)
    if not number:
        return None
    for tree in trees:
        with contextlib.suppress(OSError):
            # A cgroup's id is the inode of its directory (cgroups(7), name_to_handle_at(2)).
            if tree.cgroup is not None and os.stat(tree.cgroup).st_ino == number:  # noqa: PTH116 - a path or a text
                return tree.name if {said.uid, 0} & _accounts(tree) else None
    return None


def _cgroup_number(pidfd: int) -> int | None:
    wanted = pidfd_info.CGROUP | pidfd_info.EXIT
    known = pidfd_info.ask(pidfd, wanted)
    return known.cgroup_number if known is not None and known.told & wanted else None
