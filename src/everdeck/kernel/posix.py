"""The C library's ``posix_spawn``, called through ctypes: a plain start for machines without our own C side.

``subprocess.Popen`` holds the interpreter's lock until the exec is over, and blocked or ignored signals of the host
would reach the worker. ``posix_spawn`` lets go of the lock and undoes both. What it cannot do (umask, limits, accounts,
a sandbox, a cgroup that must hold the worker from its first instruction) stays with the other ways, and so does every
refusal: it tells an errno and not which step it was.

Needs glibc 2.34 (``addclosefrom_np``; ``addchdir_np`` is older). See posix_spawn(3).
"""

import ctypes
import errno
import os
import signal
from functools import cache
from typing import Any, Final

from everdeck.kernel.birth import Birth, Program
from everdeck.kernel.native import Refused, candidates, texts

_SET_SIGNALS_DEFAULT, _SET_MASK, _SET_SESSION = 0x04, 0x08, 0x80
_SIGNAL_SET_BYTES: Final = 128
_LARGER_THAN_ANY: Final = 1024  # posix_spawnattr_t has 336 bytes, posix_spawn_file_actions_t 80


class Start:
    """One start, made ready; see :class:`everdeck.kernel.native.Start`."""

    __slots__ = ("_arguments", "_environment", "_pid", "_program", "_refused", "_steps")

    def __init__(self, program: Program, birth: Birth) -> None:
        library = _library()
        kept, sources = program.keep_fds, (*program.stdio, *program.keep_fds)
        special = not birth.is_plain or birth.umask is not None or birth.open_files_soft is not None
        # Where nobody waits for children, one that ends at once could not be opened any more: its pid is all we have.
        special = special or signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        if library is None or special or min(sources) < len(sources):
            raise Refused("clone", errno.ENOSYS)
        found = (one for one in candidates(program.command[0], program.env) if os.access(one, os.X_OK))
        self._program = os.fsencode(next(found, program.command[0]))
        self._arguments = texts([os.fsencode(word) for word in program.command])
        self._environment = texts([os.fsencode(f"{key}={value}") for key, value in program.env.items()])
        self._pid = ctypes.c_int()
        self._refused = errno.ENOSYS
        self._steps = ctypes.create_string_buffer(_LARGER_THAN_ANY)
        library.posix_spawn_file_actions_init(self._steps)
        for to, fd in enumerate(sources):
            library.posix_spawn_file_actions_adddup2(self._steps, fd, to)
        library.posix_spawn_file_actions_addclosefrom_np(self._steps, len(sources))
        for low, fd in enumerate(kept, 3):  # those were in the way of closing everything else; back to their numbers
            library.posix_spawn_file_actions_adddup2(self._steps, low, fd)
            library.posix_spawn_file_actions_addclose(self._steps, low)
        library.posix_spawn_file_actions_addchdir_np(self._steps, os.fsencode(program.cwd))

    def call(self) -> None:
        """Start it; other threads go on meanwhile."""
        self._refused = _posix_spawn()(
            ctypes.byref(self._pid), self._program, self._steps, _attributes(), self._arguments, self._environment
        )

    def told(self) -> int:
        """The pid of the exec'ed child, or :class:`Refused`, which only says that another way must be taken."""
        library = _library()
        assert library is not None  # noqa: S101 - it was made ready
        library.posix_spawn_file_actions_destroy(self._steps)
        if self._refused:
            raise Refused("clone", errno.ENOSYS)
        return self._pid.value


def available() -> bool:
    """Does the C library have what a start needs?"""
    return _library() is not None


@cache
def _library() -> Any:
    # Not CDLL: these are short, and letting go of the interpreter's lock for each would take longer than they do.
    library = ctypes.PyDLL(None)
    try:
        for name in ("init", "destroy", "adddup2", "addclose", "addclosefrom_np", "addchdir_np"):
            getattr(library, f"posix_spawn_file_actions_{name}")
    except AttributeError:  # musl, or a glibc before 2.34
        return None
    return library


@cache
def _posix_spawn() -> Any:
    call = ctypes.CDLL(None).posix_spawn
    call.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    return call


@cache
def _attributes() -> "ctypes.Array[ctypes.c_char]":
    """A session of its own, no signal blocked, every signal with its default; the same for all starts."""
    library = ctypes.PyDLL(None)
    attributes = ctypes.create_string_buffer(_LARGER_THAN_ANY)
    library.posix_spawnattr_init(attributes)
    library.posix_spawnattr_setflags(attributes, ctypes.c_short(_SET_SIGNALS_DEFAULT | _SET_MASK | _SET_SESSION))
    library.posix_spawnattr_setsigdefault(attributes, ctypes.c_char_p(b"\xff" * _SIGNAL_SET_BYTES))
    library.posix_spawnattr_setsigmask(attributes, ctypes.c_char_p(b"\0" * _SIGNAL_SET_BYTES))
    return attributes
