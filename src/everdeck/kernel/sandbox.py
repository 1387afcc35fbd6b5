"""What a strictly sandboxed worker may reach: Landlock for files and TCP, seccomp for what Landlock does not know.

Both are taken on by the process itself, without root, and stay with everything it starts. A Landlock ruleset is made
here, as a descriptor, and enforced between birth and exec; paths that are not in it are unreachable, whatever their
modes say, also for root. The seccomp filter closes what would lead around the ruleset: other kinds of sockets (MPTCP
and SCTP are not TCP to Landlock), connecting by ``MSG_FASTOPEN``, io_uring, namespaces, ptrace, mounts, the interfaces
of the kernel. Connecting to a Unix socket by its path is not Landlock's business either (up to ABI 8), so streams of
that family are refused as a whole; datagrams stay, because ``READY=1`` and syslog are some.

See landlock(7), seccomp(2), ``Documentation/userspace-api/landlock.rst`` "Current limitations".
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final, TypeAlias

from everdeck.errors import KernelError
from everdeck.kernel import native
from everdeck.kernel.openings import RULE, Named, Openings

LEAST_ABI: Final = 6
"""Files, TCP ports, and signals and abstract sockets kept inside: Linux 6.12."""

_CREATE_RULESET, _ADD_RULE = 444, 445
_PATH_BENEATH, _NET_PORT = 1, 2
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 11, 1 << 14, 1 << 15
_ALL_FILES: Final = (1 << 16) - 1
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPED: Final = 3  # abstract Unix sockets and signals
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_CHANGE: Final = _ALL_FILES & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV)
_DEVICE: Final = _READ_FILE | _WRITE_FILE | _IOCTL_DEV
_OF_A_FILE: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/gnu/store"),
    *("/proc", "/sys", "/run/systemd/resolve", "/run/resolvconf", "/var/lib/ca-certificates"),
)
_ETC: Final = (
    *("alternatives", "ca-certificates", "crypto-policies", "fonts", "ld.so.conf.d", "pki/ca-trust", "pki/tls/certs"),
    *("profile.d", "ssl/certs", "ssl/openssl.cnf", "terminfo"),
)
_FOLDERS_OF_PROGRAMS: Final = frozenset(
    f"{around}/{last}" for around in ("", "/usr", "/usr/local") for last in ("bin", "sbin")
)
_BESIDE_BIN: Final = ("bin", "lib", "lib64", "libexec", "share", "include", "pyvenv.cfg")
_DEVICES: Final = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts"))


@dataclass(frozen=True, slots=True)
class Reach:
    """Paths and TCP ports; None is every port. ``hidden`` is never reached, though a path above it is."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    connect: tuple[int, ...] | None = ()
    bind: tuple[int, ...] | None = ()
    hidden: str = ""


@cache
def landlock_abi() -> int:
    """What this kernel knows of Landlock; 0 if nothing."""
    answer = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    return max(0, int(answer))


def why_not_strict() -> str | None:
    """Why this machine cannot keep what ``strict`` says; None if it can."""
    if os.uname().machine not in _NUMBERS_OF:
        return f"there is no filter of system calls for {os.uname().machine}"
    if landlock_abi() < LEAST_ABI:
        found = f"ABI {landlock_abi()}" if landlock_abi() else "none"
        return f"it needs Landlock ABI {LEAST_ABI} (Linux 6.12, enabled at boot); here is {found}"
    return None


def ruleset(reach: Reach) -> int:
    """A Landlock ruleset, as a descriptor that the caller closes. Paths that do not exist are left out."""
    net = (_BIND_TCP if reach.bind is not None else 0) | (_CONNECT_TCP if reach.connect is not None else 0)
    attributes = struct.pack("=QQQ", _ALL_FILES, net, _SCOPED)
    fd = _checked(_libc().syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        way = _way_to(reach.hidden)
        system = _system_open(way)
        _add(fd, system.rules)
        for access, paths in system.by_name:
            _allow(fd, paths, access)
        _allow(fd, tuple(_visible(reach.read, way)), _READ)
        _allow(fd, tuple(_visible(reach.write, way)), _CHANGE)
        ports = [(_BIND_TCP, port) for port in reach.bind or ()]
        ports += [(_CONNECT_TCP, port) for port in reach.connect or ()]
        for access, port in ports:
            _checked(_libc().syscall(_ADD_RULE, fd, _NET_PORT, struct.pack("=QQ", access, port), 0))
    except BaseException:
        os.close(fd)
        raise
    return fd


def beside_program(program: str, path: str) -> tuple[str, ...]:
    """What a program needs of its own installation: itself, what its link means, and the libraries beside its ``bin``.

    For a virtual environment also the Python that it was made from. Nothing for a program of the system, which is
    reached anyway.
    """
    found = _found(program, path)
    if found is None:
        return ()
    wanted: dict[str, None] = {}
    for file in (found, os.path.realpath(found)):
        folder, _, _ = file.rpartition("/")
        if folder in _FOLDERS_OF_PROGRAMS:
            continue
        wanted[file] = None
        around, _, last = folder.rpartition("/")
        if last in {"bin", "sbin"}:
            wanted |= dict.fromkeys(f"{around}/{part}" for part in _BESIDE_BIN)
    return tuple(wanted)


def _found(program: str, path: str) -> str | None:
    if "/" in program:
        return program
    return next((f"{one}/{program}" for one in path.split(":") if one and os.access(f"{one}/{program}", os.X_OK)), None)


@lru_cache(maxsize=1)
def _system() -> tuple[str, ...]:
    """The programs and libraries of the machine, and of /etc what every account may read.

    Not all of /etc: a rule covers what is below, and there are keys below. New files at its top are seen by the next
    owner.
    """
    own = []
    for entry in os.scandir("/etc"):
        try:
            mode = entry.stat().st_mode
        except OSError:
            continue
        if stat.S_ISREG(mode) and mode & stat.S_IROTH:
            own.append(entry.path)
    return (*_SYSTEM, *(f"/etc/{name}" for name in _ETC), *sorted(own))


_Way = tuple[tuple[int, int], ...]


def _way_to(hidden: str) -> _Way:
    """What is hidden, then each directory above it, by inode: links and second mounts of them are the same ones."""
    folder, way = os.path.realpath(hidden) if hidden else "", []
    while folder:
        way.append(_inode(folder))
        folder = folder.rpartition("/")[0]
    return tuple(inode for inode in (*way, _inode("/")) if inode is not None) if way else ()


@lru_cache(maxsize=16)
def _visible_system(way: _Way) -> tuple[Named, ...]:
    """Looked at once per deck: there are a hundred paths."""
    return (_READ, tuple(_visible(_system(), way))), (_DEVICE | _READ_DIR, _DEVICES)


def _system_open(way: _Way) -> Openings:
    global _kept  # noqa: PLW0603 - the machine's files are the same for all decks of a process
    names, kept = _visible_system(way), _kept
    if kept is None or not kept.serve(names):
        kept = _kept = Openings(names, _OF_A_FILE)
    return kept


_kept: Openings | None = None


def let_go() -> None:
    """Close what is kept open from one start to the next; the next strict start opens it again."""
    global _kept  # noqa: PLW0603 - see above
    _kept = None


def _visible(paths: Iterable[str], way: _Way) -> Iterator[str]:
    """The paths; one above what is hidden is replaced by what is beside the way to it. Landlock has no exceptions."""
    for path in paths:
        inode = _inode(path) if way else None
        if inode not in way:
            yield path
        elif inode != way[0]:
            try:
                inside = sorted(entry.path for entry in os.scandir(path) if not entry.is_symlink())
            except OSError:
                continue
            yield from _visible(inside, way)


def _inode(path: str) -> tuple[int, int] | None:
    try:
        facts = os.stat(path)  # noqa: PTH116 - raw numbers, ten times per start
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _add(ruleset_fd: int, rules: bytes) -> None:
    size = RULE.size
    if native.add_rules(ruleset_fd, rules, len(rules) // size):
        return
    for at in range(0, len(rules), size):
        _checked(_libc().syscall(_ADD_RULE, ruleset_fd, _PATH_BENEATH, rules[at : at + size], 0))


def _allow(ruleset_fd: int, paths: Sequence[str], access: int) -> None:
    if not paths or native.allow_paths(ruleset_fd, paths, access, access & _OF_A_FILE):
        return
    for path in paths:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            allowed = access if stat.S_ISDIR(os.fstat(fd).st_mode) else access & _OF_A_FILE
            _add(ruleset_fd, RULE.pack(allowed, fd))
        finally:
            os.close(fd)


# --- seccomp ----------------------------------------------------------------------------------------------------

_Step: TypeAlias = tuple[int, int, int, int]
"""A ``struct sock_filter``: what to do, how many steps to jump over if so and if not, and with which number."""
_Question: TypeAlias = tuple[int, int, "int | tuple[_Step, ...]", "int | tuple[_Step, ...]"]
"""How a number is compared, with which, and where it goes on if so and if not: another question, or what is decided."""

_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32: Final = 0x40000000
_TRIED: Final = 512
"""About as many numbers as kernels have by now: the ranges of them are told apart by halves."""
_ONE_AMONG_OTHERS: Final = 3
_NEW_NAMESPACES: Final = 0x7E020000
_MSG_FASTOPEN: Final = 0x20000000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_STREAM, _DATAGRAM, _TYPE_BITS = 1, 2, 0xF
_PROTOCOLS: Final = (0, 1, 6, 17, 58)  # any, ICMP, TCP, UDP, ICMPv6

# Refused whatever their arguments: x86-64, then aarch64 (None: not there). unistd_64.h, asm-generic/unistd.h.
_REFUSED: Final[dict[str, tuple[int, int | None]]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "create_module": (174, None),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "file_setattr": (469, 469),
}
_NUMBERS_OF: Final = {"x86_64": 0, "aarch64": 1}
_SOCKET, _SENDTO, _SENDMSG, _SENDMMSG = (41, 198), (44, 206), (46, 211), (307, 269)
_CLONE, _CLONE3, _IOCTL = (56, 220), (435, 435), (16, 29)
_PRLIMIT, _SETPRIORITY, _IOPRIO_SET = (302, 261), (141, 140), (251, 30)
# sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr; the first argument is whose.
_SCHEDULE: Final = ((142, 118), (144, 119), (203, 122), (314, 274))
# chmod, fchmod, fchmodat, fchmodat2, mknod, mknodat; and where the mode is.
_MODES: Final = (
    *(((90, None), 1), ((91, 52), 1), ((268, 53), 2), ((452, 452), 2)),
    *(((133, None), 1), ((259, 33), 2)),
)
_SET_ID: Final = 0o6000
_REFUSED_REQUESTS: Final = (
    *(0x5412, 0x541C),  # TIOCSTI, TIOCLINUX: typing into somebody's terminal
    *(
        0x401C5820,
        0x40086602,
        0x40046602,
    ),  # FS_IOC_FSSETXATTR, FS_IOC_SETFLAGS: files of another project, outside quotas
)


@cache
def system_call_filter(*, unix_sockets: bool) -> bytes:
    """The filter for this processor, as ``struct sock_filter[]``.

    Everything is allowed but what is listed: a worker is any program, and a list of all that programs need would be
    wrong for the next one. Calls that are allowed whatever their arguments cost nothing: the kernel has a bit for each.
    """
    machine = os.uname().machine
    which = _NUMBERS_OF[machine]
    decided: dict[int, list[_Step]] = {
        number: [_refuse(errno.EPERM)] for numbers in _REFUSED.values() if (number := numbers[which]) is not None
    }
    # The C library asks clone instead, whose flags can be looked at.
    decided[_CLONE3[which]] = [_refuse(errno.ENOSYS)]
    decided[_CLONE[which]] = _without(0, _NEW_NAMESPACES)
    for call, at in ((_SENDTO, 3), (_SENDMSG, 2), (_SENDMMSG, 3)):
        decided[call[which]] = _without(at, _MSG_FASTOPEN)
    requests = [step for word in _REFUSED_REQUESTS for step in ((_EQUAL, 0, 1, word), _refuse(errno.EPERM))]
    decided[_IOCTL[which]] = [_argument(1), *requests, _allowed()]
    decided |= _only_its_own(which)
    for modes, at in _MODES:
        if (number := modes[which]) is not None:
            decided[number] = _without(at, _SET_ID)
    decided[_SOCKET[which]] = _sockets(unix_sockets=unix_sockets)
    if machine == "x86_64":
        decided[_X32] = [_refuse(errno.ENOSYS)]  # and whatever is above
    code: list[_Step] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),  # the calls of another processor have other numbers
        _refuse(errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER_AT),
        *_by_number(decided),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def _by_number(decided: Mapping[int, Sequence[_Step]]) -> list[_Step]:
    """Find what is decided of a number, by halves; all others are allowed.

    The kernel tries the filter with every number, at every start (``seccomp_cache_prepare``): asked one after another
    these were 36 steps for a number, and now they are 10. What is decided loads an argument or returns, so it never
    falls through, and the same decision stands there once.
    """
    ranges: list[tuple[int, tuple[_Step, ...]]] = [(0, (_allowed(),))]
    for number in sorted(decided):
        ranges = [one for one in ranges if one[0] != number]
        ranges.append((number, tuple(decided[number])))
        if number != _X32:
            ranges.append((number + 1, (_allowed(),)))
    ranges = [one for at, one in enumerate(ranges) if at == 0 or one[1] != ranges[at - 1][1]]
    questions: list[_Question] = []
    _halved(ranges, _TRIED, questions)
    code: list[_Step] = []
    places: dict[tuple[_Step, ...], int] = {}
    for then in dict.fromkeys(then for _, then in ranges):
        places[then] = len(questions) + len(code)
        code += then
    asked: list[_Step] = []
    for at, (how, number, *answers) in enumerate(questions):
        yes, no = ((one if isinstance(one, int) else places[one]) - at - 1 for one in answers)
        asked.append((how, yes, no, number))
    return [*asked, *code]


def _halved(
    ranges: Sequence[tuple[int, tuple[_Step, ...]]], end: int, questions: list[_Question]
) -> int | tuple[_Step, ...]:
    """Add the questions that tell these ranges apart; the place of the first, or what is decided if there is none."""
    if len(ranges) == 1:
        return ranges[0][1]
    place = len(questions)
    starts = [first for first, _ in ranges]
    if len(ranges) == _ONE_AMONG_OTHERS and ranges[0][1] == ranges[2][1] and starts[2] == starts[1] + 1:
        questions.append((_EQUAL, starts[1], ranges[1][1], ranges[0][1]))
        return place
    middle = (starts[0] + end) / 2
    half = min(range(1, len(ranges)), key=lambda at: abs(starts[at] - middle))
    questions.append((_AT_LEAST, starts[half], 0, 0))
    below = _halved(ranges[:half], starts[half], questions)
    above = _halved(ranges[half:], end, questions)
    questions[place] = (_AT_LEAST, starts[half], above, below)
    return place


def _without(at: int, bits: int) -> list[_Step]:
    """Allowed unless one of these bits is in that argument."""
    return [_argument(at), (_ANY_OF, 0, 1, bits), _refuse(errno.EPERM), _allowed()]


def _only_its_own(which: int) -> dict[int, list[_Step]]:
    """Limits and turns of others: for these calls an account is one person, and Landlock has no say.

    0 is the caller. A limit of others may be looked at; a nice of all processes of an account may not be set.
    """
    no = _refuse(errno.EPERM)
    decided: dict[int, list[_Step]] = {}
    # pthread_setschedparam(3) and pthread_setaffinity_np(3) name the caller's own thread by its number, which a filter
    # cannot tell from a stranger's, and programs do not expect a no: libzmq (every Jupyter kernel) aborts. So for a
    # number these say yes and have no effect.
    for numbers in _SCHEDULE:
        decided[numbers[which]] = [_argument(0), (_EQUAL, 1, 0, 0), _refuse(0), _allowed()]
    new_limit = [(_EQUAL, 0, 2, 0), _upper_half(2), (_EQUAL, 1, 0, 0), no]
    decided[_PRLIMIT[which]] = [_argument(0), (_EQUAL, 5, 0, 0), _argument(2), *new_limit, _allowed()]
    for numbers, of_a_user in ((_SETPRIORITY, 2), (_IOPRIO_SET, 3)):
        whose = [_argument(0), (_AT_LEAST, 2, 0, of_a_user), _argument(1), (_EQUAL, 1, 0, 0), no, _allowed()]
        decided[numbers[which]] = whose
    return decided


def _sockets(*, unix_sockets: bool) -> list[_Step]:
    """TCP, UDP and ICMP; asking for the addresses of this machine; Unix datagrams, or all of them."""
    local = [_allowed()] if unix_sockets else [*_kind(), (_EQUAL, 1, 0, _DATAGRAM), _refuse(errno.EACCES), _allowed()]
    known = [(_EQUAL, len(_PROTOCOLS) - at, 0, number) for at, number in enumerate(_PROTOCOLS)]
    internet = [
        *(*_kind(), (_EQUAL, 2, 0, _STREAM), (_EQUAL, 1, 0, _DATAGRAM), _refuse(errno.EPERM)),
        *(_argument(2), *known, _refuse(errno.EPROTONOSUPPORT), _allowed()),
    ]
    links = [_argument(2), (_EQUAL, 1, 0, 0), _refuse(errno.EPERM), _allowed()]
    return [
        _argument(0),
        *_if_equal(_AF_UNIX, local),
        *_if_equal(_AF_INET, internet),
        *_if_equal(_AF_INET6, internet),
        *_if_equal(_AF_NETLINK, links),
        _refuse(errno.EAFNOSUPPORT),
    ]


def _if_equal(value: int, then: list[_Step]) -> list[_Step]:
    return [(_EQUAL, 0, len(then), value), *then]


def _kind() -> list[_Step]:
    return [_argument(1), (_AND, 0, 0, _TYPE_BITS)]


def _argument(index: int) -> _Step:
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)  # the lower half; both processors are little-endian


def _upper_half(index: int) -> _Step:
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index + 4)


def _refuse(number: int) -> _Step:
    return (_RETURN, 0, 0, _REFUSE | number)


def _allowed() -> _Step:
    return (_RETURN, 0, 0, _ALLOW)


# --- capabilities -----------------------------------------------------------------------------------------------


@cache
def can_empty_capabilities() -> bool:
    """May we empty the bounding set of a child? Only with CAP_SETPCAP (8)."""
    return bool(_own_capabilities("CapEff") & 1 << 8)


@cache
def has_capabilities() -> bool:
    """Have we any that a child could inherit? An ordinary account has none, so there is nothing to take away."""
    return bool(_own_capabilities("CapPrm") | _own_capabilities("CapInh"))


def _own_capabilities(name: str) -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123 - kernel files are read as files
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1], 16)
    return 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise KernelError(f"landlock: {os.strerror(number)} (errno {number})")
    return answer


def ports(given: Sequence[int] | str) -> tuple[int, ...] | None:
    """As a spec says it (``any``, or a list), for a :class:`Reach`."""
    return None if given == "any" else tuple(int(port) for port in given)
