"""The C library's ``posix_spawn``, called through ctypes: a plain start for machines without our own C side.

``subprocess.Popen`` holds the interpreter's lock until the exec is over, and blocked or ignored signals of the host
would reach the worker. ``posix_spawn`` lets go of the lock and undoes both. What it cannot do (umask, limits, accounts,
a sandbox, a cgroup that must hold the worker from its first instruction) stays with the other ways, and so does every
refusal: it tells an errno and not which step it was.

First starts are made several in one call (:class:`FirstStarts`): their files here, and their processes by a
:class:`everdeck.kernel.chain.Chain`, without Python.

Needs glibc 2.34 (``addclosefrom_np``; ``addchdir_np`` is older). See posix_spawn(3).
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
from collections.abc import Sequence
from functools import cache
from time import CLOCK_BOOTTIME
from typing import Any, Final

from everdeck.kernel import chain, descriptors, inotify
from everdeck.kernel import identity as ids
from everdeck.kernel.birth import Birth, Program
from everdeck.kernel.native import STEPS, First, Made, Places, Refused, candidates, programs_in, texts
from everdeck.statedir import DATA, LOCK, LOG, NOTE

_SET_SIGNALS_DEFAULT, _SET_MASK, _SET_SESSION = 0x04, 0x08, 0x80
_SIGNAL_SET_BYTES: Final = 128
_LARGER_THAN_ANY: Final = 1024  # posix_spawnattr_t has 336 bytes, posix_spawn_file_actions_t 80
_ACTIONS_BYTES: Final = 256
_LOCK_MEANWHILE: Final = 3
_NEW: Final = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_LOCK_FLAGS: Final = os.O_RDWR | _NEW
_LOG_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | _NEW
_TICK_NANOSECONDS: Final = 1_000_000_000 // ids.CLOCK_TICKS
_APART_NANOSECONDS: Final = 1000  # more than two ways to read one clock differ
_NOT_BORN: Final = -1


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


class FirstStarts:
    """Several first starts; see :class:`everdeck.kernel.native.FirstStarts`.

    Home, lock, note and log of each are made by :meth:`make_ready`, in the loop: as calls of Python that others wait
    for they would take longer beside it. The processes are born one after another in :meth:`call`.
    """

    __slots__ = (
        "_births",
        "_chain",
        "_clocks",
        "_die_locked",
        "_inotify_fd",
        "_kept",
        "_made",
        "_pids",
        "_places",
        "_workers",
    )

    def __init__(
        self,
        places: Places,
        birth: Birth,
        workers: Sequence[First],
        *,
        inotify_fd: int = -1,
        die_locked: int = 0,
    ) -> None:
        # Where nobody waits for children, one that ends at once could not be opened any more: see Start.
        if not starts_first() or birth != Birth() or signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            raise Refused("clone", errno.ENOSYS)
        if any("\0" in "".join((*worker.command, *worker.env, worker.cwd)) for worker in workers):
            raise Refused("exec", errno.EINVAL)  # it would end there
        self._workers = workers
        self._places = places
        self._inotify_fd = inotify_fd
        self._die_locked = die_locked
        self._births: list[_Birth] = []
        self._made: list[Made] = []
        self._kept: list[Any] = []
        self._chain: chain.Chain | None = None

    def make_ready(self) -> None:
        """Make the files of each, and put their births together."""
        workers = self._workers
        births = [self._furnished(worker) for worker in workers]
        self._births = births
        living = [birth for birth in births if birth.error == 0]
        self._pids = (ctypes.c_int * len(births))(*[_NOT_BORN] * len(births))
        self._clocks = (ctypes.c_int64 * (2 * len(births) + 2))()
        pid, clock = ctypes.addressof(self._pids), ctypes.addressof(self._clocks)
        spawn, tell_time = chain.place_of("posix_spawn"), chain.place_of("clock_gettime")
        attributes = ctypes.addressof(_attributes())
        calls: list[chain.Call] = [(tell_time, (CLOCK_BOOTTIME, clock))]
        encoded = _Encoded()
        found: dict[tuple[str, str], bytes] = {}
        for index, birth in enumerate(births):
            if birth.error == 0:
                program, actions, arguments, environment = self._described(workers[index], birth, found, encoded)
                calls.append((spawn, (pid + 4 * index, program, actions, attributes, arguments, environment)))
            calls.append((tell_time, (CLOCK_BOOTTIME, clock + 16 * index + 16)))
        if living:
            below = (
                max(self._places.null_fd, *[birth.lock_fd for birth in living], *[birth.log_fd for birth in living]) + 1
            )
            self._chain = chain.Chain(calls, below)

    def call(self) -> None:
        """Start them all; other threads go on meanwhile."""
        if self._chain is not None:
            self._chain.run()

    def begin(self) -> None:
        """As :meth:`call`: there is nothing that could be done meanwhile."""
        self.call()

    def end(self) -> None:
        """Nothing is under way."""

    def told(self) -> list[Made]:
        """What came of each, in the same order; where there is a process, its pidfd is the caller's."""
        if not self._made:
            library = _library()
            self._made = [self._born(index, birth) for index, birth in enumerate(self._births)]
            for one in self._kept:
                if isinstance(one, _Actions):
                    library.posix_spawn_file_actions_destroy(one)
            self._kept.clear()
            self._chain = None
        return self._made

    def _furnished(self, worker: First) -> "_Birth":
        """Its directories, its lock, which is taken, its note and its log with the mark of its start.

        New names only: whatever is there already is to be judged step by step.
        """
        birth, name, workers_fd = _Birth(), worker.name, self._places.workers_fd
        try:
            os.mkdir(name, 0o700, dir_fd=workers_fd)
            os.mkdir(f"{name}/{LOG}", 0o700, dir_fd=workers_fd)
            os.mkdir(f"{name}/{DATA}", 0o700, dir_fd=workers_fd)
            birth.lock_fd = os.open(f"{name}/{LOCK}", _LOCK_FLAGS, 0o600, dir_fd=workers_fd)
            fcntl.flock(birth.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._die_locked -= 1
            if self._die_locked == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            _write_note(workers_fd, f"{name}/{NOTE}", worker.note)
            birth.log_fd = os.open(f"{name}/{LOG}/current", _LOG_FLAGS, 0o600, dir_fd=workers_fd)
            if min(birth.lock_fd, birth.log_fd) <= _LOCK_MEANWHILE:
                birth.error = errno.EBADF  # in the way of the standard descriptors
                return birth
            _write_mark(birth.log_fd, worker.mark)
            if self._inotify_fd >= 0:
                with contextlib.suppress(OSError):
                    path = f"/proc/self/fd/{birth.log_fd}"
                    birth.watch = inotify.add_watch(self._inotify_fd, path, inotify.MODIFY | inotify.ONESHOT)
        except OSError as err:
            birth.error = err.errno or errno.EINVAL
        return birth

    def _described(
        self, worker: First, birth: "_Birth", found: dict[tuple[str, str], bytes], encoded: "_Encoded"
    ) -> tuple[Any, ...]:
        """What ``posix_spawn`` is given: program, file actions, arguments, environment; kept until it is over."""
        library, null_fd = _library(), self._places.null_fd
        name = worker.command[0], worker.path
        if name not in found:
            runnable = (one for one in programs_in(*name) if os.access(one, os.X_OK))
            found[name] = os.fsencode(next(runnable, worker.command[0]))
        actions = _Actions()
        at = ctypes.addressof(actions)
        duplicate = library.posix_spawn_file_actions_adddup2
        library.posix_spawn_file_actions_init(at)
        duplicate(at, null_fd, 0)
        duplicate(at, birth.log_fd, 1)
        duplicate(at, birth.log_fd, 2)
        # Everything else is closed now, not by the exec: that wakes us before it closes anything, and among what was
        # copied are the locks of the others.
        duplicate(at, birth.lock_fd, _LOCK_MEANWHILE)
        library.posix_spawn_file_actions_addclosefrom_np(at, _LOCK_MEANWHILE + 1)
        duplicate(at, _LOCK_MEANWHILE, birth.lock_fd)
        library.posix_spawn_file_actions_addclose(at, _LOCK_MEANWHILE)
        library.posix_spawn_file_actions_addchdir_np(at, os.fsencode(worker.cwd))
        arguments = texts([encoded[word] for word in worker.command])
        environment = texts([encoded[word] for word in worker.env])
        self._kept += (actions, arguments, environment, found[name])
        return found[name], at, ctypes.addressof(arguments), ctypes.addressof(environment)

    def _born(self, index: int, birth: "_Birth") -> Made:
        """Whom it became; from here on nobody but the worker's tree carries its lock."""
        for fd in (birth.lock_fd, birth.log_fd):
            if fd >= 0:
                os.close(fd)
        pid, step, error, pidfd = self._pids[index], _NOT_BORN, birth.error, -1
        if error:
            step = STEPS.index("home")
        elif pid == _NOT_BORN:
            step, error = STEPS.index("clone"), errno.ENOSYS  # another way must be taken, which tells why
        else:
            try:
                pidfd = descriptors.raised(os.pidfd_open(pid))
            except ProcessLookupError:  # the host reaps whatever ends
                step, error = STEPS.index("exec"), errno.ESRCH
            except OSError as err:  # no descriptor left; the pid is our unreaped child's, so it is nobody else's
                step, error = STEPS.index("clone"), err.errno or errno.EMFILE
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        if step >= 0:
            if birth.watch >= 0:
                inotify.remove_watch(self._inotify_fd, birth.watch)
            return Made(-1, 0, -1, -1, step, error, -1)
        return Made(self._start_ticks(index), os.fstat(pidfd).st_ino, pid, pidfd, step, 0, birth.watch)

    def _start_ticks(self, index: int) -> int:
        """When it began, by the clock before and after: -1 if a tick ended in between, or nearly."""
        seconds, more, last_seconds, last_more = self._clocks[2 * index : 2 * index + 4]
        first = (seconds * 1_000_000_000 + more - _APART_NANOSECONDS) // _TICK_NANOSECONDS
        last = (last_seconds * 1_000_000_000 + last_more + _APART_NANOSECONDS) // _TICK_NANOSECONDS
        return first if first == last and seconds > 0 else -1


_Actions: Final = ctypes.c_char * _ACTIONS_BYTES


class _Encoded(dict[str, bytes]):
    """Each word is encoded once: most are the same for all."""

    def __missing__(self, word: str) -> bytes:
        whole = self[word] = os.fsencode(word)
        return whole


class _Birth:
    """What was made for one worker."""

    __slots__ = ("error", "lock_fd", "log_fd", "watch")

    def __init__(self) -> None:
        self.lock_fd = self.log_fd = self.watch = -1
        self.error = 0


def _write_note(workers_fd: int, path: str, note: bytes) -> None:
    """Where there is no room for it, the registry has it, and the process itself can be asked."""
    try:
        fd = os.open(path, os.O_WRONLY | _NEW, 0o600, dir_fd=workers_fd)
    except OSError:
        return
    try:
        whole = os.write(fd, note) == len(note)
    except OSError:
        whole = False
    finally:
        os.close(fd)
    if not whole:
        os.unlink(path, dir_fd=workers_fd)


def _write_mark(log_fd: int, mark: str) -> None:
    with contextlib.suppress(OSError):  # a full disk loses the mark and nothing else
        os.write(log_fd, mark.encode())


def available() -> bool:
    """Does the C library have what a start needs?"""
    return _library() is not None


def starts_first() -> bool:
    """Can it make several first starts without Python?"""
    return available() and chain.available()


@cache
def _library() -> Any:
    # Not CDLL: these are short, and letting go of the interpreter's lock for each would take longer than they do.
    library = ctypes.PyDLL(None)
    try:
        for name in ("init", "destroy", "adddup2", "addclose", "addclosefrom_np", "addchdir_np"):
            getattr(library, f"posix_spawn_file_actions_{name}")
    except AttributeError:  # musl, or a glibc before 2.34
        return None
    number, pointer = ctypes.c_int, ctypes.c_void_p
    library.posix_spawn_file_actions_init.argtypes = [pointer]
    library.posix_spawn_file_actions_destroy.argtypes = [pointer]
    library.posix_spawn_file_actions_adddup2.argtypes = [pointer, number, number]
    library.posix_spawn_file_actions_addclose.argtypes = [pointer, number]
    library.posix_spawn_file_actions_addclosefrom_np.argtypes = [pointer, number]
    library.posix_spawn_file_actions_addchdir_np.argtypes = [pointer, ctypes.c_char_p]
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
