"""The C side of a start: ``_spawn.c``, called through ctypes. Without it everything works, more slowly.

It is built when the package is built, if there is a compiler then (``hatch_build.py``); :func:`available` says whether
this machine has it. ``EVERDECK_NATIVE=0`` switches it off, for tests of the way that does without.
"""

import ctypes
import errno
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from everdeck.errors import KernelError
from everdeck.kernel.birth import Birth, Program

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
    library = _library()
    if library is None:
        raise Refused("clone", errno.ENOSYS)
    order = _order(program, birth)
    answer = _Answer()
    cgroup_fd = _AS_IT_IS
    if birth.cgroup is not None:
        try:
            cgroup_fd = os.open(birth.cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as err:
            raise Refused("cgroup", err.errno or errno.EINVAL) from err
    try:
        order.cgroup_fd = cgroup_fd
        failed = library.everdeck_spawn(ctypes.byref(order), ctypes.byref(answer))
    finally:
        if cgroup_fd >= 0:
            os.close(cgroup_fd)
    if failed:
        raise Refused(STEPS[answer.step], answer.error)
    return answer.pid, answer.pidfd


def allow_paths(ruleset_fd: int, paths: Sequence[bytes], access: int, of_a_file: int) -> bool:
    """Let a Landlock ruleset reach these paths, those that are files with fewer rights; False without the C side."""
    library = _library()
    if library is None:
        return False
    number = library.everdeck_allow_paths(ruleset_fd, _texts(paths), len(paths), access, of_a_file)
    if number:
        raise KernelError(f"landlock: {os.strerror(number)} (errno {number})")
    return True


class _Order(ctypes.Structure):
    _fields_ = (
        ("programs", ctypes.POINTER(ctypes.c_char_p)),
        ("argv", ctypes.POINTER(ctypes.c_char_p)),
        ("envp", ctypes.POINTER(ctypes.c_char_p)),
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
    )


class _Answer(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_int32),
        ("pidfd", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("error", ctypes.c_int32),
    )


def _order(program: Program, birth: Birth) -> _Order:
    order = _Order()
    order.programs = _texts(_candidates(program.command[0], program.env))
    order.argv = _texts([os.fsencode(word) for word in program.command])
    order.envp = _texts([os.fsencode(f"{key}={value}") for key, value in program.env.items()])
    order.cwd = os.fsencode(program.cwd)
    order.keep = (ctypes.c_int * len(program.keep_fds))(*program.keep_fds)
    order.keep_count = len(program.keep_fds)
    groups = birth.groups or ()
    order.groups = (ctypes.c_uint * len(groups))(*groups)
    order.groups_count = _AS_IT_IS if birth.groups is None else len(groups)
    order.oom_score_adj = None if birth.oom_score_adj is None else str(birth.oom_score_adj).encode()
    order.filter = birth.filter or None
    order.filter_length = len(birth.filter) // 8
    order.uid = _AS_IT_IS if birth.uid is None else birth.uid
    order.gid = _AS_IT_IS if birth.gid is None else birth.gid
    order.open_files = _AS_IT_IS if birth.open_files is None else birth.open_files
    order.open_files_soft = _AS_IT_IS if birth.open_files_soft is None else birth.open_files_soft
    order.stdio = program.stdio
    order.umask = _AS_IT_IS if birth.umask is None else birth.umask
    order.nice = _NICE_AS_IT_IS if birth.nice is None else birth.nice
    order.ruleset_fd = _AS_IT_IS if birth.ruleset_fd is None else birth.ruleset_fd
    order.no_core = birth.no_core
    order.no_capabilities = birth.no_capabilities
    order.no_new_privileges = birth.no_new_privileges
    order.apart = birth.changes_account
    return order


def _texts(words: Sequence[bytes]) -> "ctypes.Array[ctypes.c_char_p]":
    return (ctypes.c_char_p * (len(words) + 1))(*words, None)


def _candidates(program: str, env: Mapping[str, str]) -> list[bytes]:
    """Where execvp would look, by the PATH that the program will have."""
    if "/" in program:
        return [os.fsencode(program)]
    return [os.fsencode(f"{folder}/{program}") for folder in os.get_exec_path(dict(env))]


@cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("EVERDECK_NATIVE") == "0":
        return None
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_spawn.so")))
        library.everdeck_order_bytes.restype = ctypes.c_size_t
        if library.everdeck_order_bytes() != ctypes.sizeof(_Order):  # left over from another version
            return None
        library.everdeck_spawn.argtypes = [ctypes.POINTER(_Order), ctypes.POINTER(_Answer)]
        library.everdeck_spawn.restype = ctypes.c_int
        texts, rights = ctypes.POINTER(ctypes.c_char_p), ctypes.c_uint64
        library.everdeck_allow_paths.argtypes = [ctypes.c_int, texts, ctypes.c_int, rights, rights]
        library.everdeck_allow_paths.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library
