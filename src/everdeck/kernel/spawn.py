"""One process, started in its own session, with exactly what it was given.

``subprocess.Popen`` without ``preexec_fn`` does vfork and exec in C: safe in a threaded host, and the parent
goes on only when the exec has happened or failed, so there is nothing to wait for. It closes every descriptor
but the ones we pass. What it cannot do before the exec (resource limits, nice, oom_score_adj, joining a cgroup,
undoing a signal mask or ignored signals that the host would pass on) is done by :mod:`everdeck.kernel.launch`,
a short program that the worker's process runs first and then replaces by the worker's own; it is used only when
one of these is asked for, because it costs the start of a Python interpreter.

See vfork(2), execve(2), setsid(2), signal(7) "Execution of signal handlers; dispositions over execve".
"""

import _signal  # type: ignore[import-not-found]  # the C module behind signal; it has no stubs
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from everdeck.errors import ProcessGone, ResourceExhausted, SpawnFailed
from everdeck.kernel import identity as ids
from everdeck.model import Identity

# What the host may have set to "ignore" and a worker should not inherit. SIGPIPE and SIGXFSZ are put back by Popen.
_WATCHED_SIGNALS: Final = tuple(
    int(getattr(signal, f"SIG{name}"))
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "ALRM", "CHLD", "CONT", "TSTP", "TTIN", "TTOU", "WINCH")
)


@dataclass(frozen=True, slots=True)
class Privileges:
    """Who the worker runs as; None keeps ours."""

    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class BeforeExec:
    """What must be true of the process before its program runs; the defaults ask for nothing."""

    open_files: int | None = None
    nice: int | None = None
    oom_score_adj: int | None = None
    cgroup_procs: str | None = None

    def asks_for_something(self) -> bool:
        """Does any of it need the launcher?"""
        return self != _NOTHING


_NOTHING: Final = BeforeExec()
_ENDED_UNSEEN_TICKS: Final = 1 << 62  # later than any process starts: never anybody's, and an uptime of nothing


@dataclass(frozen=True, slots=True)
class Child:
    """A process that has been exec'ed: our child, with a pidfd that is the caller's to close."""

    pidfd: int
    pid: int


def make_files_private(given: int | None = None) -> int:
    """From now on this process makes files for its own account only; its workers keep the umask it had, or the given.

    For a program of its own (the daemon). Inside a host the umask is the host's business, and each file of ours says
    its mode itself.
    """
    global _workers_umask  # noqa: PLW0603 - the umask is one per process, and so is this note of it
    before = os.umask(0o077)
    _workers_umask = before if given is None else given
    return _workers_umask


_workers_umask: int | None = None


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    stdin_fd: int,
    stdout_fd: int,
    stderr_fd: int,
    keep_fds: Sequence[int] = (),
    umask: int | None = None,
    privileges: Privileges | None = None,
    before_exec: BeforeExec = _NOTHING,
) -> Child:
    """Start ``command`` in a new session; return when its program has been exec'ed.

    The child has 0, 1, 2 and ``keep_fds`` open and nothing else. When the program cannot be executed,
    :class:`SpawnFailed` names it and the errno, and no process is left behind.
    """
    if umask is None:
        umask = _workers_umask
    if before_exec.asks_for_something() or privileges is not None or _signals_need_undoing():
        return _spawn_through_launcher(
            command, env, cwd, (stdin_fd, stdout_fd, stderr_fd), keep_fds, umask, privileges, before_exec
        )
    return _held(_popen(command, env, cwd, (stdin_fd, stdout_fd, stderr_fd), keep_fds, umask))


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


def _popen(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    stdio: tuple[int, int, int],
    keep_fds: Sequence[int],
    umask: int | None,
) -> int:
    """The pid of the exec'ed child. The Popen object is told that it need not care for it."""
    stdin_fd, stdout_fd, stderr_fd = stdio
    try:
        child = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=stdin_fd,
            stdout=stdout_fd,
            stderr=stderr_fd,
            pass_fds=keep_fds,
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


def _spawn_through_launcher(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    stdio: tuple[int, int, int],
    keep_fds: Sequence[int],
    umask: int | None,
    privileges: Privileges | None,
    before_exec: BeforeExec,
) -> Child:
    report_fd, child_report_fd = os.pipe2(os.O_CLOEXEC)
    try:
        orders = {
            "report_fd": child_report_fd,
            "umask": umask,
            "lc_ctype": env.get("LC_CTYPE"),
            **asdict(before_exec),
            **(asdict(privileges) if privileges else {}),
        }
        launcher = str(Path(__file__).with_name("launch.py"))
        words = [python_program(), "-I", "-S", launcher, json.dumps(orders), *command]
        pid = _popen(words, env, cwd, stdio, [*keep_fds, child_report_fd], None)
        os.close(child_report_fd)
        child_report_fd = -1
        child = _held(pid)
        # End-of-file: the worker's program replaced the launcher and close-on-exec closed the pipe.
        complaint = b""
        while piece := os.read(report_fd, 4096):
            complaint += piece
        if complaint:
            os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
            os.close(child.pidfd)
            told = json.loads(complaint)
            raise SpawnFailed(command[0], told["errno"], told["what"])
        return child
    finally:
        os.close(report_fd)
        if child_report_fd >= 0:
            os.close(child_report_fd)


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
