"""The C side of a start: ``_spawn.c``, called through ctypes. Without it everything works, more slowly.

It is built when the package is built, if there is a compiler then (``hatch_build.py``); :func:`available` says whether
this machine has it. ``EVERDECK_NATIVE=0`` switches it off, for tests of the way that does without.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from everdeck.errors import KernelError
from everdeck.kernel.birth import Birth, Program
from everdeck.kernel.descriptors import HIGH

STEPS: Final = (
    "clone",
    "cgroup",
    "session",
    "descriptors",
    "limits.open_files",
    "limits.nice",
    "limits.oom_score_adj",
    "sandbox: capabilities",
    "group",
    "user",
    "cwd",
    "sandbox: no new privileges",
    "sandbox: landlock",
    "sandbox: seccomp",
    "exec",
    "patience",
    "home",
)
"""In the order of ``enum step`` in the C file: what the kernel refused."""

_AS_IT_IS: Final = -1
_NICE_AS_IT_IS: Final = 20


class Refused(Exception):
    """The kernel refused one step; nothing is left behind."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(step, number)
        self.step = step
        self.number = number


def available() -> bool:
    """Is the C side there, and of this version?"""
    return _library() is not None


def spawn(program: Program, birth: Birth) -> tuple[int, int]:
    """Start it; the pid and a pidfd. Returns when the program has been exec'ed, raises :class:`Refused`."""
    return Start(program, birth).run()


class Start:
    """One start, made ready: all that is left is one call that needs no Python, in whichever thread."""

    __slots__ = ("_answer", "_call", "_cgroup_fd", "_failed", "_order")

    def __init__(self, program: Program, birth: Birth) -> None:
        library = _library()
        if library is None:
            raise Refused("clone", errno.ENOSYS)
        self._call = library.everdeck_start
        self._order = _order(program, birth)
        self._answer = _Answer(step=0, error=errno.ENOSYS)  # until it is called
        self._failed = 1
        self._cgroup_fd = _AS_IT_IS
        if birth.cgroup is not None:
            try:
                self._cgroup_fd = os.open(birth.cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as err:
                raise Refused("cgroup", err.errno or errno.EINVAL) from err
        self._order.cgroup_fd = self._cgroup_fd

    def run(self) -> tuple[int, int]:
        """Start it, and tell."""
        self.call()
        return self.told()

    def call(self) -> None:
        """Start it; other threads go on meanwhile."""
        self._failed = self._call(self._order, self._answer)

    def told(self) -> tuple[int, int]:
        """How the call went: the pid and a pidfd, or :class:`Refused`. To be asked once, after the call."""
        if self._cgroup_fd >= 0:
            os.close(self._cgroup_fd)
            self._cgroup_fd = _AS_IT_IS
        if self._failed:
            raise Refused(STEPS[self._answer.step], self._answer.error)
        return self._answer.pid, self._answer.pidfd


class First(NamedTuple):
    """A worker that has no home yet and asks for nothing special."""

    name: str
    cgroup: str
    """To be made, and to be born in; empty: ours."""
    note: bytes
    mark: str
    """The first line of its log."""
    command: Sequence[str]
    cwd: str
    path: str
    """Where its program is looked for, if its name is no path."""
    env: Sequence[str]
    """``NAME=value``, each."""


class Made(NamedTuple):
    """What came of one of them: a process, or the step that was refused (see :data:`STEPS`; below 0: none)."""

    start_ticks: int
    """Below 0: to be asked for."""
    pidfd_inode: int
    pid: int
    pidfd: int
    step: int
    error: int
    watch: int
    """Of its log, armed before its first instruction; below 0: none."""


class Places(NamedTuple):
    """Where first starts are made; the numbers are descriptors that stay the caller's."""

    workers: str
    """The directory of all homes, and the same open:"""
    workers_fd: int
    null_fd: int
    """/dev/null."""
    cgroups_fd: int = _AS_IT_IS
    """The directory of all cgroups; below 0: it is not open."""


class FirstStarts:
    """Several first starts, made ready: home, lock, note, log and process of each, in one call that needs no Python."""

    __slots__ = ("_batch", "_failed", "_library", "_made", "_under_way")

    def __init__(
        self,
        places: Places,
        birth: Birth,
        workers: Sequence[First],
        *,
        inotify_fd: int = _AS_IT_IS,
        die_locked: int = 0,
    ) -> None:
        """Of ``birth`` only what all share counts.

        ``inotify_fd`` hears of the first write to each log, once (see :attr:`Made.watch`).
        """
        library = _library()
        if library is None:
            raise Refused("clone", errno.ENOSYS)
        counts: list[int] = []
        words: list[str] = []
        for name, cgroup, _, mark, command, cwd, path, env in workers:
            programs = programs_in(command[0], path)
            words += (name, cgroup, cwd, mark, *programs, *command, *env)
            counts += (len(programs), len(command), len(env))
        self._library = library
        self._batch = _Batch(
            texts=_in_one_piece(words),
            notes=b"\0".join([worker.note for worker in workers]),
            counts=struct.pack(f"{len(counts)}i", *counts),  # a third of the price of an array
            open_files_soft=_given(birth.open_files_soft),
            count=len(workers),
            workers=os.fsencode(places.workers),
            workers_fd=places.workers_fd,
            null_fd=places.null_fd,
            cgroups_fd=places.cgroups_fd,
            umask=_given(birth.umask),
            die_locked=die_locked,
            inotify_fd=inotify_fd,
        )
        self._made = ctypes.create_string_buffer(_MADE.size * len(workers))
        self._failed = 1
        self._under_way = ctypes.c_void_p()

    def make_ready(self) -> None:
        """Nothing is left to do before the call."""

    def call(self) -> None:
        """Start them all; other threads go on meanwhile."""
        self._failed = self._library.everdeck_start_first(self._batch, self._made)

    def begin(self) -> None:
        """Start the only one, and return while its program is exec'ed; :meth:`end` it before you let go of it."""
        self._failed = self._library.everdeck_begin_first(self._batch, self._made, self._under_way)

    def end(self) -> None:
        """Return when its program is exec'ed, or refused. Harmless when that is over."""
        if self._under_way.value is not None:
            self._library.everdeck_end_first(self._batch, self._under_way)
            self._under_way.value = None

    def told(self) -> list[Made]:
        """What came of each, in the same order; :class:`Refused` if there was no call, or it began nothing.

        Of one that is being exec'ed, who it is.
        """
        if self._failed:
            raise Refused("clone", errno.ENOMEM)
        return [Made._make(one) for one in _MADE.iter_unpack(self._made)]


def add_rules(ruleset_fd: int, rules: bytes, count: int) -> bool:
    """Add Landlock rules (``struct landlock_path_beneath_attr[]``) to a ruleset; False without the C side."""
    library = _library()
    if library is None:
        return False
    _rules_added(library.everdeck_add_rules(ruleset_fd, rules, count))
    return True


def allow_paths(ruleset_fd: int, paths: Sequence[str], access: int, of_a_file: int) -> bool:
    """Let a Landlock ruleset reach these paths, those that are files with fewer rights; False without the C side."""
    library = _library()
    if library is None:
        return False
    _rules_added(library.everdeck_allow_paths(ruleset_fd, _in_one_piece(paths), len(paths), access, of_a_file))
    return True


def _rules_added(number: int) -> None:
    if number:
        raise KernelError(f"landlock: {os.strerror(number)} (errno {number})")


class _Order(ctypes.Structure):
    _fields_ = (
        ("words", ctypes.c_char_p),
        ("cwd", ctypes.c_char_p),
        ("keep", ctypes.POINTER(ctypes.c_int)),
        ("groups", ctypes.POINTER(ctypes.c_uint)),
        ("oom_score_adj", ctypes.c_char_p),
        ("filter", ctypes.c_char_p),
        ("uid", ctypes.c_int64),
        ("gid", ctypes.c_int64),
        ("open_files", ctypes.c_int64),
        ("open_files_soft", ctypes.c_int64),
        ("stdio", ctypes.c_int32 * 3),
        ("keep_count", ctypes.c_int32),
        ("groups_count", ctypes.c_int32),
        ("cgroup_fd", ctypes.c_int32),
        ("umask", ctypes.c_int32),
        ("nice", ctypes.c_int32),
        ("ruleset_fd", ctypes.c_int32),
        ("filter_length", ctypes.c_int32),
        ("no_core", ctypes.c_int32),
        ("no_capabilities", ctypes.c_int32),
        ("no_new_privileges", ctypes.c_int32),
        ("apart", ctypes.c_int32),
        ("programs_count", ctypes.c_int32),
        ("argv_count", ctypes.c_int32),
        ("env_count", ctypes.c_int32),
        ("below", ctypes.c_int32),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("texts", ctypes.c_char_p),
        ("notes", ctypes.c_char_p),
        ("counts", ctypes.c_char_p),
        ("workers", ctypes.c_char_p),
        ("open_files_soft", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("workers_fd", ctypes.c_int32),
        ("null_fd", ctypes.c_int32),
        ("umask", ctypes.c_int32),
        ("cgroups_fd", ctypes.c_int32),
        ("die_locked", ctypes.c_int32),
        ("inotify_fd", ctypes.c_int32),
    )


_MADE: Final = struct.Struct("@qQiiiii4x")


class _Answer(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_int32),
        ("pidfd", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("error", ctypes.c_int32),
    )


def _order(program: Program, birth: Birth) -> _Order:
    programs, kept = candidates(program.command[0], program.env), program.keep_fds
    words = [*programs, *program.command, *[f"{key}={value}" for key, value in program.env.items()]]
    # One text in one piece: a list of pointers, made here, would take longer than the system calls of the start.
    order = _Order(
        words=_in_one_piece(words),
        programs_count=len(programs),
        argv_count=len(program.command),
        env_count=len(program.env),
        cwd=os.fsencode(program.cwd),
        stdio=program.stdio,
        keep=(ctypes.c_int * len(kept))(*kept),
        keep_count=len(kept),
        groups_count=_AS_IT_IS,
        oom_score_adj=None if birth.oom_score_adj is None else str(birth.oom_score_adj).encode(),
        filter=birth.filter or None,
        filter_length=len(birth.filter) // 8,
        uid=_given(birth.uid),
        gid=_given(birth.gid),
        open_files=_given(birth.open_files),
        open_files_soft=_given(birth.open_files_soft),
        umask=_given(birth.umask),
        nice=_NICE_AS_IT_IS if birth.nice is None else birth.nice,
        ruleset_fd=_given(birth.ruleset_fd),
        no_core=birth.no_core,
        no_capabilities=birth.no_capabilities,
        no_new_privileges=birth.no_new_privileges,
        apart=birth.changes_account,
        below=HIGH if max(*program.stdio, *kept, _given(birth.ruleset_fd)) < HIGH else 0,
    )
    if birth.groups is not None:
        order.groups = (ctypes.c_uint * len(birth.groups))(*birth.groups)
        order.groups_count = len(birth.groups)
    return order


def _given(value: int | None) -> int:
    return _AS_IT_IS if value is None else value


def _in_one_piece(words: Sequence[str]) -> bytes:
    whole = os.fsencode("\0".join(words))
    if whole.count(b"\0") != len(words) - 1:  # one of them would be taken for two
        raise Refused("exec", errno.EINVAL)
    return whole


def texts(words: Sequence[bytes]) -> "ctypes.Array[ctypes.c_char_p]":
    """As C takes a list of them: the last one is none."""
    return (ctypes.c_char_p * (len(words) + 1))(*words, None)


def candidates(program: str, env: Mapping[str, str]) -> list[str]:
    """Where execvp would look, by the PATH that the program will have."""
    return [program] if "/" in program else [f"{folder}/{program}" for folder in os.get_exec_path(dict(env))]


def programs_in(program: str, path: str) -> list[str]:
    """The same by the PATH itself."""
    if "/" in program:
        return [program]
    return [f"{folder}/{program}" for folder in path.split(os.pathsep)]


@cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("EVERDECK_NATIVE") == "0":
        return None
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_spawn.so")))
        library.everdeck_order_bytes.restype = ctypes.c_size_t
        if library.everdeck_order_bytes() != ctypes.sizeof(_Order):  # left over from another version
            return None
        library.everdeck_batch_bytes.restype = ctypes.c_size_t
        if library.everdeck_batch_bytes() != ctypes.sizeof(_Batch) + _MADE.size:
            return None
        library.everdeck_start_first.argtypes = [ctypes.POINTER(_Batch), ctypes.c_char_p]
        library.everdeck_start_first.restype = ctypes.c_int
        under_way = ctypes.c_void_p
        library.everdeck_begin_first.argtypes = [
            *library.everdeck_start_first.argtypes,
            ctypes.POINTER(under_way),
        ]
        library.everdeck_begin_first.restype = ctypes.c_int
        library.everdeck_end_first.argtypes = [ctypes.POINTER(_Batch), under_way]
        library.everdeck_end_first.restype = None
        library.everdeck_start.argtypes = [ctypes.POINTER(_Order), ctypes.POINTER(_Answer)]
        library.everdeck_start.restype = ctypes.c_int
        library.everdeck_add_rules.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
        library.everdeck_add_rules.restype = ctypes.c_int
        library.everdeck_allow_paths.argtypes = [
            *library.everdeck_add_rules.argtypes,
            ctypes.c_uint64,
            ctypes.c_uint64,
        ]
        library.everdeck_allow_paths.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library
