"""One process, started in its own session, with exactly what it was given.

Four ways, one result. :mod:`everdeck.kernel.native` does everything in the process itself between its birth and its
exec. Without it, :mod:`everdeck.kernel.posix` or ``subprocess.Popen`` without ``preexec_fn`` (both vfork and exec in C,
safe in a threaded host) is enough for a worker that asks for nothing special; whatever else
:class:`everdeck.kernel.birth.Birth` asks for, and undoing a signal mask or ignored signals that the host would pass on
where ``posix_spawn`` cannot do it, is done by :mod:`everdeck.kernel.launch`, a short program that the worker's process
runs first and then replaces by the worker's own, at the price of starting an interpreter.

Nothing that the worker chose is used with our rights: its environment reaches the launcher by a descriptor, and its
working directory is entered and its program looked for when the rights have been given up.

See vfork(2), execve(2), setsid(2), signal(7) "Execution of signal handlers; dispositions over execve".
"""

import _signal  # type: ignore[import-not-found]  # the C module behind signal; it has no stubs
import contextlib
import errno
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from everdeck.errors import ProcessGone, ResourceExhausted, SpawnFailed
from everdeck.kernel import identity as ids
from everdeck.kernel import native, posix
from everdeck.kernel.birth import Birth, Program
from everdeck.model import Identity

# What the host may have set to "ignore" and a worker should not inherit. SIGPIPE and SIGXFSZ are put back by Popen.
_WATCHED_SIGNALS: Final = tuple(
    int(getattr(signal, f"SIG{name}"))
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "ALRM", "CHLD", "CONT", "TSTP", "TTIN", "TTOU", "WINCH")
)


_PLAIN: Final = Birth()
_NO_CLONE3: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL})  # not built, an older kernel, or filtered away
_LAUNCHER_LOOK_MILLISECONDS: Final = 100
_LAUNCHER_LOOKS: Final = 600
_ENDED_UNSEEN_TICKS: Final = 1 << 62  # later than any process starts: never anybody's, and an uptime of nothing


@dataclass(frozen=True, slots=True)
class Child:
    """A process that has been exec'ed: our child, with a pidfd that is the caller's to close."""

    pidfd: int
    pid: int
    in_cgroup: bool = False
    """Was it in the wanted cgroup before its first instruction?"""


def kill_group(child: Child) -> None:
    """End everything in the process group of a child that leads one and that nobody has reaped yet."""
    if ids.has_group_signal():
        ids.send_group_signal(child.pidfd, signal.SIGKILL)
        return
    # Below 6.9 by number: a child keeps its pid until we reap it, alive or not, and so its group's number is ours.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def make_files_private(given: int | None = None) -> int:
    """From now on this process makes files for its own account only; its workers keep the umask it had, or the given.

    For a program of its own (the daemon). Inside a host the umask is the host's business, and each file of ours says
    its mode itself.
    """
    global _workers_umask  # noqa: PLW0603 - the umask is one per process, and so is this note of it
    before = os.umask(0o077)
    _workers_umask = before if given is None else given
    return _workers_umask


def raise_open_files(given: int | None = None) -> int:
    """From now on this process may open as many files as its hard limit says; its workers keep the limit it had.

    ``given`` is that limit when an image of this program before has raised it already. For a program of its own, as
    :func:`make_files_private`.
    """
    global _workers_open_files  # noqa: PLW0603 - as above
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _workers_open_files = soft if given is None else given
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _workers_open_files


_workers_umask: int | None = None
_workers_open_files: int | None = None


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    stdin_fd: int,
    stdout_fd: int,
    stderr_fd: int,
    keep_fds: Sequence[int] = (),
    birth: Birth = _PLAIN,
    may_hang: bool = False,
) -> Child:
    """Start ``command`` in a new session; return when its program has been exec'ed. See :class:`Start`."""
    stdio = (stdin_fd, stdout_fd, stderr_fd)
    start = Start(command, env=env, cwd=cwd, stdio=stdio, keep_fds=keep_fds, birth=birth, may_hang=may_hang)
    start.call()
    return start.child()


class Start:
    """One start of ``command`` in a new session: made ready here, called in whichever thread, and asked for its child.

    The child has 0, 1, 2 and ``keep_fds`` open and nothing else. When the program cannot be executed,
    :class:`SpawnFailed` names it and the errno, and no process is left behind. A cgroup that refuses the process is an
    error only if ``birth`` says that it must be inside.

    With ``may_hang`` (a program on somebody else's file system) other threads go on while the kernel does not answer:
    ``Popen`` would hold the interpreter's lock until the exec is over.
    """

    __slots__ = ("_birth", "_may_hang", "_program", "_quick", "_refused")

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        stdio: tuple[int, int, int],
        keep_fds: Sequence[int],
        birth: Birth,
        may_hang: bool = False,
    ) -> None:
        if birth.umask is None and _workers_umask is not None:
            birth = replace(birth, umask=_workers_umask)
        if birth.open_files is None and _workers_open_files is not None:
            birth = replace(birth, open_files_soft=_workers_open_files)
        self._program = Program(command, env, cwd, stdio, keep_fds)
        self._birth = birth
        self._may_hang = may_hang
        self._refused: native.Refused | None = None
        self._quick: native.Start | posix.Start | None = None
        try:
            make = native.Start if native.available() else posix.Start
            self._quick = make(self._program, birth)
        except native.Refused as err:
            self._refused = err

    @property
    def is_quick(self) -> bool:
        """Does :meth:`call` do all of it, without the interpreter's lock?"""
        return self._quick is not None

    def call(self) -> None:
        """Start it, as far as that can be done without Python."""
        if self._quick is not None:
            self._quick.call()

    def child(self) -> Child:
        """What came of the call; what could not be done there is done now."""
        program, birth = self._program, self._birth
        try:
            return self._called()
        except native.Refused as err:
            if err.step != "clone" or err.number not in _NO_CLONE3:
                raise _as_error(err, program.command[0], program.cwd) from err
        if birth.is_plain and not self._may_hang and not _signals_need_undoing():
            try:
                with _soft_limit(birth.open_files_soft):
                    return _held(_popen(program, birth.umask))
            except ResourceExhausted:
                if birth.open_files_soft is None:
                    raise
                # We have more open than the worker may: the limit cannot be lent to it on the way, so it lowers its
                # own.
        return _spawn_through_launcher(program, birth)

    def _called(self) -> Child:
        birth = self._birth
        try:
            if self._refused is not None:
                raise self._refused
            assert self._quick is not None  # noqa: S101 - or it was refused
            if isinstance(self._quick, posix.Start):
                return _held(self._quick.told())
            pid, pidfd = self._quick.told()
        except native.Refused as err:
            if err.step != "cgroup" or birth.cgroup_required:
                raise
            birth = replace(birth, cgroup=None)
            pid, pidfd = native.spawn(self._program, birth)
        return Child(pidfd, pid, in_cgroup=birth.cgroup is not None)


FirstStarts: TypeAlias = native.FirstStarts | posix.FirstStarts


def starts_first() -> bool:
    """Can several first starts be one call here?"""
    if native.available():
        return True
    return _workers_umask is None and _workers_open_files is None and posix.starts_first()


def first_starts(
    places: native.Places, workers: Sequence[native.First], *, inotify_fd: int, die_locked: int
) -> FirstStarts:
    """Workers that have no home yet; they get what a worker of this process gets."""
    birth = Birth(umask=_workers_umask, open_files_soft=_workers_open_files)
    make = native.FirstStarts if native.available() else posix.FirstStarts
    return make(places, birth, workers, inotify_fd=inotify_fd, die_locked=die_locked)


def identity_of_first(made: native.Made) -> Identity | None:
    """Who it is, if that was read at its birth."""
    if made.start_ticks < 0:
        return None
    return Identity(ids.boot_id(), made.pid, made.start_ticks, made.pidfd_inode if ids.has_pidfd_inodes() else None)


def is_refusal(made: native.Made) -> bool:
    """Was the worker itself refused? Anything else that went wrong is tried again, step by step, and tells why."""
    return native.STEPS[made.step] not in {"home", "clone"}


def error_of(made: native.Made, program: str, cwd: str) -> SpawnFailed | ResourceExhausted:
    """Why a first start was refused."""
    return _as_error(native.Refused(native.STEPS[made.step], made.error), program, cwd)


def identify(child: Child) -> Identity:
    """Who it is. The child stays the caller's to end if it cannot be identified (hidepid and a setuid program).

    This may wait: at once after the exec the kernel makes the reader wait until the new program's memory is laid out
    (100 µs on average), a moment later it answers in 15 µs. Meanwhile the child may have ended. That is no failure:
    it is known by its pidfd; and in a host that reaps all its children it gets a start time that no process has.
    """
    try:
        return ids.identity_of(child.pidfd, child.pid)
    except ProcessGone:
        return Identity(ids.boot_id(), child.pid, _ENDED_UNSEEN_TICKS, ids.pidfd_inode(child.pidfd))


def python_program() -> str:
    """The interpreter that runs us; inside a host that embeds Python, ``sys.executable`` may be the host."""
    if sys.executable and Path(sys.executable).name.startswith("python"):
        return sys.executable
    for name in (f"python{sys.version_info.major}.{sys.version_info.minor}", "python3"):
        candidate = Path(sys.exec_prefix, "bin", name)
        if candidate.exists():
            return str(candidate)
    return "python3"


def _popen(program: Program, umask: int | None) -> int:
    """The pid of the exec'ed child. The Popen object is told that it need not care for it."""
    command, cwd = program.command, program.cwd
    stdin_fd, stdout_fd, stderr_fd = program.stdio
    try:
        child = subprocess.Popen(
            command,
            env=program.env,
            cwd=cwd,
            stdin=stdin_fd,
            stdout=stdout_fd,
            stderr=stderr_fd,
            pass_fds=program.keep_fds,
            start_new_session=True,
            umask=-1 if umask is None else umask,
        )
    except OSError as err:
        raise _refused(err, command[0], cwd) from err
    except (subprocess.SubprocessError, ValueError) as err:
        raise SpawnFailed(command[0], errno.EINVAL, str(err)) from err
    # We wait through the pidfd. Without this, Popen's finaliser would put the pid on a list that later
    # Popen calls of the host reap from, and the exit status would be theirs.
    child.returncode = 0
    return child.pid


@contextlib.contextmanager
def _soft_limit(files: int | None) -> Iterator[None]:
    """Have this limit for a moment, which a child inherits (getrlimit(2)); None: as it is."""
    if files is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _held(pid: int) -> Child:
    try:
        return Child(ids.open_pidfd(pid), pid)
    except ResourceExhausted:
        _end_unidentified(pid)
        raise


def _end_unidentified(pid: int) -> None:
    """There is no descriptor left for a pidfd; the pid is our unreaped child's, so it is nobody else's."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _signals_need_undoing() -> bool:
    """Would the worker inherit blocked or ignored signals from the thread and process that we run in?"""
    if signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return True
    # The plain C functions: signal.getsignal() makes enums of its answers and, for a handler that is no number,
    # formats the handler into the text of an error that it swallows (1 µs here against 34-69 µs there).
    return any(_signal.getsignal(number) == _signal.SIG_IGN for number in _WATCHED_SIGNALS)


def _spawn_through_launcher(program: Program, birth: Birth) -> Child:
    command, env, cwd, stdio, keep_fds = program
    report_fd, child_report_fd = os.pipe2(os.O_CLOEXEC)
    orders_fd = os.memfd_create("everdeck-orders")
    try:
        orders = asdict(birth) | {
            "report_fd": child_report_fd,
            "filter": birth.filter.hex(),
            "command": list(command),
            "programs": [str(Path(folder, command[0])) for folder in _folders(command[0], env)],
            "env": dict(env),
            "cwd": cwd,
        }
        os.write(orders_fd, json.dumps(orders).encode())
        launcher = str(Path(__file__).with_name("launch.py"))
        words = [python_program(), "-I", "-S", launcher, str(orders_fd)]
        fds = [*keep_fds, child_report_fd, orders_fd, *(() if birth.ruleset_fd is None else (birth.ruleset_fd,))]
        # An empty environment: whatever the worker's says about the loader or about Python is for the worker.
        pid = _popen(Program(words, {}, "/", stdio, fds), None)
        os.close(child_report_fd)
        child_report_fd = -1
        child = _held(pid)
        complaint = _complaint(report_fd, child.pidfd)
        if complaint is not None:
            _end_unidentified(pid)
            os.close(child.pidfd)
            raise _as_error(complaint, command[0], cwd)
        return replace(child, in_cgroup=birth.cgroup is not None)
    finally:
        os.close(orders_fd)
        os.close(report_fd)
        if child_report_fd >= 0:
            os.close(child_report_fd)


def _complaint(report_fd: int, pidfd: int) -> native.Refused | None:
    """What the launcher could not do; None at end-of-file: the worker's program replaced it and closed the pipe.

    Once it is of another account that account may stop it, and we do not wait for that to end.
    """
    poller = select.poll()
    poller.register(report_fd, select.POLLIN)
    for _ in range(_LAUNCHER_LOOKS):
        if poller.poll(_LAUNCHER_LOOK_MILLISECONDS):
            said = os.read(report_fd, 4096)
            if not said:
                return None
            told = json.loads(said)
            return native.Refused(told["what"], told["errno"])
        if os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
            break
    return native.Refused("patience", errno.ETIMEDOUT)


def _folders(program: str, env: Mapping[str, str]) -> list[str]:
    return [""] if "/" in program else os.get_exec_path(dict(env))


def _as_error(refused: native.Refused, program: str, cwd: str) -> SpawnFailed | ResourceExhausted:
    match refused.step:
        case "exec":
            return SpawnFailed(program, refused.number)
        case "cwd":
            return SpawnFailed(program, refused.number, f"working directory {cwd}")
        case "patience":
            return SpawnFailed(program, refused.number, "stopped by its own account before it could run")
        case "clone":
            return _refused(OSError(refused.number, os.strerror(refused.number)), program, cwd)
        case step:
            return SpawnFailed(program, refused.number, step)


def _refused(err: OSError, program: str, cwd: str) -> SpawnFailed | ResourceExhausted:
    match err.errno:
        case errno.EAGAIN:
            return ResourceExhausted(f"cannot start {program!r}: no more processes allowed (ulimit -u, pids limit)")
        case errno.EMFILE | errno.ENFILE:
            return ResourceExhausted(
                f"cannot start {program!r}: {err.strerror}; raise the limit of open files (ulimit -n)"
            )
        case errno.ENOMEM:
            return ResourceExhausted(f"cannot start {program!r}: not enough memory")
        case _ if err.filename == cwd:
            return SpawnFailed(program, err.errno or errno.EINVAL, f"working directory {cwd}")
        case _:
            return SpawnFailed(program, err.errno or errno.EINVAL)
