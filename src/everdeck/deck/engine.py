"""Workers as processes of this machine: their directories, their environment, their secrets, their port.

Owns ``STATE/workers/NAME/{lock,log/,data/,secrets/}``. A worker starts from a clean environment: the few names that
every program expects, what its spec says, and what it needs to talk to us. The manager's own environment, with
whatever keys it may hold, is not passed on.
"""

import contextlib
import errno
import os
import socket
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from everdeck import child, disk
from everdeck.deck import rights
from everdeck.errors import LimitUnavailable, PortUnavailable, RegistryUnavailable, SpecError, StateDirRefused
from everdeck.kernel import containment, controllers, credentials, flock, lifeline, native, quotas, sandbox, spawn
from everdeck.kernel.birth import Birth
from everdeck.logs import files as logfiles
from everdeck.model import Cookie, Identity, Limits, Secret, WorkerName, WorkerSpec
from everdeck.statedir import DATA, LOCK, LOG, PARTS, PARTS_OF_ALL, QUOTA, SECRETS

PASSED_THROUGH: Final = ("PATH", "HOME", "LANG", "TZ", "USER", "SHELL")
_WRITTEN_BY_US: Final = (
    child.COOKIE_ENV,
    child.LAST_END_ENV,
    child.WORKER_ENV,
    child.DIR_ENV,
    child.SATELLITE_ENV,
    child.LIFELINE_FD_ENV,
    child.NOTIFY_SOCKET_ENV,
    child.CREDENTIALS_DIRECTORY_ENV,
    child.PORT_ENV,
    child.WATCHDOG_USEC_ENV,
)
_WRITTEN_BY_SHELLS: Final = ("PWD", "OLDPWD", "SHLVL", "_")
_DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FIRST_PORT: Final = 20_000  # below the kernel's range for outgoing connections (32768-60999)
_PORTS: Final = 12_000
_LAST_STANDARD_FD: Final = 2
_NO_LIMITS: Final = Limits()
_ITS_OWN: Final = frozenset({child.COOKIE_ENV, child.WORKER_ENV, child.DIR_ENV})
"""What no two workers have in common."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker that has been exec'ed. The pidfd and the lifeline are the caller's."""

    pidfd: int
    pid: int
    lifeline: lifeline.Lifeline | None
    cgroup: str | None = None
    """Where it was born, if it was born in a cgroup of its own."""


@dataclass(eq=False, slots=True)
class Ready:
    """A worker for which everything is made but its process: its log is open and marked, its lifeline laid.

    :attr:`start` may be called in another thread. Whatever comes of it, :meth:`Engine.launched` is called once.
    """

    log_dir: str
    start: spawn.Start
    stdout_fd: int
    stderr_fd: int
    lock_fd: int | None
    line: lifeline.Lifeline | None
    birth: Birth
    given_up: contextlib.AbstractContextManager[Birth]
    """What its birth needs until it is over."""

    def close(self) -> None:
        """Let go of what only its birth needed. From here on nobody but the worker's tree carries its lock."""
        os.close(self.stdout_fd)
        if self.stderr_fd != self.stdout_fd:
            os.close(self.stderr_fd)
        if self.lock_fd is not None:
            os.close(self.lock_fd)
        self.given_up.__exit__(None, None, None)


class Engine:
    """Starts workers as child processes in their own sessions."""

    def __init__(
        self,
        workers_dir: Path,
        *,
        cgroup_home: Path | None = None,
        notify_socket: str | None = None,
        with_lifeline: bool = True,
        with_lock: bool = True,
    ) -> None:
        self.workers_dir = workers_dir
        self._workers = str(workers_dir)  # joined to texts: a path as an object costs as much as the system calls
        self.cgroup_home = cgroup_home
        self._cgroups = None if cgroup_home is None else str(cgroup_home)
        self.notify_socket = notify_socket
        self._with_lifeline = with_lifeline
        self._with_lock = with_lock
        self._null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        # The owner's environment as it is now: looked up once, because each look decodes (12-18 µs per start).
        self._places: native.Places | None = None
        self._has_cgroups: bool | None = None
        self._common: tuple[tuple[str | None, dict[str, str]], str, list[str]] | None = None
        self._passed_through = {key: os.environ[key] for key in PASSED_THROUGH if key in os.environ}

    def close(self) -> None:
        """Let go of the descriptors of ours."""
        sandbox.let_go()
        if self._null_fd >= 0:
            os.close(self._null_fd)
            self._null_fd = -1
        if self._places is not None:
            os.close(self._places.workers_fd)
            if self._places.cgroups_fd >= 0:
                os.close(self._places.cgroups_fd)
            self._places = None

    # --- places -------------------------------------------------------------------------------------------------

    def home(self, name: WorkerName) -> Path:
        """Everything on disk that belongs to one worker."""
        return self.workers_dir / name

    def lock_path(self, name: WorkerName) -> Path:
        """The worker's own lock file."""
        return Path(f"{self.workers_dir}/{name}/{LOCK}")

    def log_dir(self, name: WorkerName) -> Path:
        """Where the worker's own output goes."""
        return Path(self.log_text(name))

    def log_text(self, name: WorkerName) -> str:
        """The same as a text, for the way of every start and stop."""
        return f"{self._workers}/{name}/{LOG}"

    def cgroup_path(self, name: WorkerName) -> Path | None:
        """The worker's own cgroup directory, for those born in it; None where there are no cgroups for us."""
        return None if self.cgroup_home is None else self.cgroup_home / name

    def cgroup_text(self, name: WorkerName) -> str | None:
        """The same as a text, for the way of every start."""
        return None if self._cgroups is None else f"{self._cgroups}/{name}"

    # --- checks -------------------------------------------------------------------------------------------------

    def check(self, spec: WorkerSpec) -> None:
        """Refuse accounts and limits that cannot be had here, before anything is written."""
        if _asks_for_nothing(spec):
            return
        rights.check(spec)
        limits = spec.limits
        if limits.nice is not None and limits.nice < os.getpriority(os.PRIO_PROCESS, 0) and os.geteuid() != 0:
            raise LimitUnavailable("limits.nice", limits.nice, "a value not below our own, without root")
        if limits.oom_score_adj is not None and limits.oom_score_adj < 0 and os.geteuid() != 0:
            raise LimitUnavailable("limits.oom_score_adj", limits.oom_score_adj, "0 to 1000 without root")
        if limits.disk_bytes is not None and (why := quotas.why_not(self.workers_dir)) is not None:
            raise LimitUnavailable("limits.disk_bytes", limits.disk_bytes, f"nothing here: {why}")
        if controllers.needed(limits):
            self._check_cgroup_limits(spec)

    def _check_cgroup_limits(self, spec: WorkerSpec) -> None:
        field = next(name for name in ("memory_bytes", "cpu_percent", "pids") if getattr(spec.limits, name) is not None)
        if self.cgroup_home is None:
            raise LimitUnavailable(
                f"limits.{field}",
                getattr(spec.limits, field),
                "no such limit here: there is no cgroup v2 directory that we may use; "
                + controllers.how_to_delegate(root=os.geteuid() == 0),
            )
        probe = self.cgroup_home / f"probe-{os.urandom(8).hex()}"
        containment.make_cgroup(probe)
        try:
            controllers.apply(probe, spec.limits)
        finally:
            containment.remove_cgroup(probe)

    # --- starting -----------------------------------------------------------------------------------------------

    def prepare(self, name: WorkerName, spec: WorkerSpec, *, replacing_by: bytes | None = None) -> bool:
        """Make the directories (once) and put the secrets' files into place, each in one step.

        ``replacing_by`` is the spec as it will be recorded instead of the one that is: until then its secrets only lie
        ready (:meth:`settle_secrets`). True if there is more in it than directories, which a power cut must not take
        after an answer.
        """
        home = f"{self._workers}/{name}"
        special = spec.secrets or spec.user is not None or spec.sandbox.level == "strict"
        special = bool(special) or spec.limits.disk_bytes is not None
        try:
            try:
                os.mkdir(home, 0o700)  # noqa: PTH102 - raw calls: these lie on the way of every start
            except FileExistsError:
                special = special or os.path.exists(f"{home}/{QUOTA}")  # noqa: PTH110
                special = special or not os.path.isdir(f"{home}/{DATA}")  # noqa: PTH112
            else:
                for part in PARTS_OF_ALL:
                    os.mkdir(f"{home}/{part}", 0o700)  # noqa: PTH102
            if special:
                self._furnish(Path(home), spec, None if replacing_by is None else credentials.occasion_of(replacing_by))
        except OSError as err:
            raise _refused(err, Path(home)) from err
        return special

    def _furnish(self, home: Path, spec: WorkerSpec, occasion: str | None) -> None:
        """The rarer parts of a worker's home: what a crash left out, secrets, another account's rights.

        Only ``data`` is the account's. Everything else in here is ours, so that no name in it can be a worker's trap.
        """
        for part in PARTS:
            (home / part).mkdir(mode=0o700, exist_ok=True)
        account = rights.furnish(spec, home, self.workers_dir.parent)
        uid = None if account is None else account.uid
        values = {key: secret.value for key, secret in spec.secrets.items()}
        credentials.keep(home / SECRETS, values, uid, occasion)
        if uid is not None:
            # The worker's account must reach its own directories and nothing of the others.
            for directory in (self.workers_dir.parent, self.workers_dir, home):
                directory.chmod(0o711)

    def settle_secrets(self, name: WorkerName, spec: WorkerSpec, spec_json: bytes) -> bool:
        """Its spec is recorded: its secrets take their place, and those that it no longer has are removed.

        False if it never had any.
        """
        folder = f"{self._workers}/{name}/{SECRETS}"
        if not spec.secrets and not os.path.isdir(folder):  # noqa: PTH112 - on the way of every restart
            return False
        try:
            credentials.settle(Path(folder), spec.secrets, credentials.occasion_of(spec_json))
        except FileNotFoundError:  # somebody removed them all: the start that needs one says so
            pass
        except OSError as err:
            raise _refused(err, Path(folder)) from err
        return True

    def same_secrets(self, name: WorkerName, spec: WorkerSpec) -> bool:
        """Would :meth:`prepare` change any secret of the worker?"""
        folder = self.home(name) / SECRETS
        for secret_name, secret in spec.secrets.items():
            if secret.value is None:
                continue
            try:
                if credentials.read(folder, secret_name) != secret.value.encode():
                    return False
            except OSError:
                return False
        return True

    def take_lock(self, name: WorkerName) -> int | None:
        """The descriptor that holds the worker's lock, or None if somebody else holds it."""
        return flock.take(f"{self._workers}/{name}/{LOCK}")

    def starts_in_one(self, spec: WorkerSpec) -> bool:
        """Can the first start of such a worker be one call, without a step that needs Python?"""
        return (
            spec.lifetime == "adoptable"
            and not spec.secrets
            and spec.umask is None
            and not spec.log.split_stderr
            and _asks_for_nothing(spec)
            and self._with_lock
            and self._null_fd > _LAST_STANDARD_FD
            and spawn.starts_first()
        )

    def first(
        self,
        name: WorkerName,
        spec: WorkerSpec,
        cookie: Cookie,
        port: int | None,
        note: bytes,
        last_end: str | None,
        at: str,
    ) -> native.First:
        """Such a start, described; ``at`` is when, as its log tells it."""
        cwd = spec.cwd or f"{self._workers}/{name}/{DATA}"
        mark = logfiles.mark_text(f"started cookie={cookie}", at)
        path, words = self._words_of_environment(name, spec, cookie, port, last_end)
        return native.First(name, self._new_cgroup(name), note, mark, _command_of(spec), cwd, path, words)

    def first_starts(self, workers: Sequence[native.First], *, inotify_fd: int, die_locked: int) -> spawn.FirstStarts:
        """All of them, made ready to be called in whichever thread; ``inotify_fd`` hears of their first writes."""
        if self._places is None:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            cgroups_fd = os.open(self._cgroups, flags) if self._cgroups is not None and self._has_cgroups else -1
            self._places = native.Places(self._workers, os.open(self._workers, flags), self._null_fd, cgroups_fd)
        return spawn.first_starts(self._places, workers, inotify_fd=inotify_fd, die_locked=die_locked)

    def first_launched(self, first: native.First, made: native.Made) -> tuple[Launched, Identity | None]:
        """What came of one: its process, and who that is if it could be told; or why it was refused."""
        if made.step < 0:
            launched = Launched(made.pidfd, made.pid, None, first.cgroup or None)
            return launched, spawn.identity_of_first(made)
        error = spawn.error_of(made, first.command[0], first.cwd)
        logfiles.mark(f"{self._workers}/{first.name}/{LOG}", f"not started: {error}")
        raise error

    def _new_cgroup(self, name: WorkerName) -> str:
        if not native.available():  # it is moved there when it runs
            return ""
        if self._has_cgroups is None:
            self._has_cgroups = self.cgroup_home is not None and containment.make_cgroup(self.cgroup_home)
        return f"{self._cgroups}/{name}" if self._has_cgroups else ""

    def make_ready(
        self,
        name: WorkerName,
        spec: WorkerSpec,
        cookie: Cookie,
        port: int | None,
        lock_fd: int | None,
        *,
        last_end: str | None = None,
        end_mark: str | None = None,
        same_cgroup: bool = False,
        may_hang: bool = False,
    ) -> Ready:
        """Make everything that its spec says, up to its process; leaves nothing behind when that cannot be made.

        ``last_end`` is what the worker is told of how its last process ended, ``end_mark`` what its log is told of it
        if nobody has yet. With ``same_cgroup`` the cgroup of its last process may serve again. The lock is the caller's
        until this returns. With ``may_hang`` the kernel may never answer to the start; other threads go on meanwhile.
        """
        home = f"{self._workers}/{name}"
        log_dir = self.log_text(name)
        try:
            stdout_fd, stderr_fd = logfiles.open_for_worker(log_dir, split_stderr=spec.log.split_stderr)
        except OSError as err:
            raise _refused(err, Path(log_dir)) from err
        line: lifeline.Lifeline | None = None
        given_up: contextlib.AbstractContextManager[Birth] | None = None
        try:
            if spec.lifetime == "bound" and self._with_lifeline:
                line = lifeline.make()
            kept = (lock_fd if self._with_lock else None, line.read_fd if line else None)
            # Before the process exists: its first line cannot come before the mark of its start.
            ended = () if end_mark is None else (end_mark,)
            logfiles.mark(log_dir, *ended, f"started cookie={cookie}", fd=stdout_fd)
            given_up = rights.born(spec, home, self._cgroup_for(name, spec, same_cgroup=same_cgroup), port)
            birth = given_up.__enter__()
            start = spawn.Start(
                _command_of(spec),
                env=self._environment(name, spec, cookie, port, line, last_end),
                cwd=spec.cwd or f"{home}/{DATA}",
                stdio=(line.read_fd if line else self._null_fd, stdout_fd, stderr_fd),
                keep_fds=[fd for fd in kept if fd is not None],
                birth=birth,
                may_hang=may_hang,
            )
        except BaseException as err:
            logfiles.mark(log_dir, f"not started: {err}", fd=stdout_fd)
            if given_up is not None:
                given_up.__exit__(None, None, None)
            os.close(stdout_fd)
            if stderr_fd != stdout_fd:
                os.close(stderr_fd)
            if line is not None:
                line.close()
            raise
        return Ready(log_dir, start, stdout_fd, stderr_fd, lock_fd, line, birth, given_up)

    def launched(self, ready: Ready) -> Launched:
        """What came of a start that was called; leaves nothing behind when it could not be started."""
        line = ready.line
        try:
            spawned = ready.start.child()
        except BaseException as err:
            logfiles.mark(ready.log_dir, f"not started: {err}", fd=ready.stdout_fd)
            if line is not None:
                line.close()
            raise
        finally:
            ready.close()
        if line is not None:
            line.give_away_read_end()
        return Launched(spawned.pidfd, spawned.pid, line, ready.birth.cgroup if spawned.in_cgroup else None)

    def identify(self, launched: Launched) -> Identity:
        """Who it is."""
        return spawn.identify(spawn.Child(launched.pidfd, launched.pid))

    def fields_of_running(self, name: WorkerName, pid: int) -> dict[str, Any]:
        """What the spec of a running worker of ours must have said, for when the registry is lost.

        The values of secrets stay where they are: in their files.
        """
        environment = containment.environment_of(pid)
        kept = credentials.names(self.home(name) / SECRETS)
        ours = {*PASSED_THROUGH, *kept, *_WRITTEN_BY_US, *_WRITTEN_BY_SHELLS}
        fields: dict[str, Any] = {
            "env": {key: value for key, value in environment.items() if key not in ours},
            "secrets": {key: Secret(None, env=key in environment) for key in kept},
            "lifetime": "bound" if child.LIFELINE_FD_ENV in environment else "adoptable",
        }
        with contextlib.suppress(OSError):
            cwd = os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115 - a kernel file
            fields["cwd"] = None if cwd == f"{self.workers_dir}/{name}/{DATA}" else cwd
        return fields

    def clear(self, name: WorkerName) -> None:
        """Remove everything of a worker whose tree is gone. The caller holds its lock."""
        path = self.cgroup_path(name)
        if path is not None:
            containment.remove_cgroup(path)
            containment.remove_cgroup(containment.joined_later(path))
        home = self.home(name)
        rights.forget_disk_limit(home)
        try:
            disk.remove_tree(home)
        except FileNotFoundError:
            return
        except OSError as err:
            raise _refused(err, home) from err

    def born_beside(
        self, name: WorkerName, spec: WorkerSpec, cgroup: str | None, port: int | None
    ) -> contextlib.AbstractContextManager[Birth]:
        """How a program is born that we run for a worker, beside it: with what the worker may do, and no more."""
        return rights.born(spec, f"{self._workers}/{name}", cgroup, port, beside=True)

    def _cgroup_for(self, name: WorkerName, spec: WorkerSpec, *, same_cgroup: bool) -> str | None:
        """An empty cgroup with its limits, for a worker to be born in."""
        cgroup = self.cgroup_text(name)
        if cgroup is None:
            return None
        if not (same_cgroup and os.path.isdir(cgroup)) and not containment.make_fresh_cgroup(cgroup):  # noqa: PTH112
            return None
        if controllers.needed(spec.limits):
            controllers.apply(Path(cgroup), spec.limits)
        return cgroup

    def _words_of_environment(
        self, name: WorkerName, spec: WorkerSpec, cookie: Cookie, port: int | None, last_end: str | None
    ) -> tuple[str, list[str]]:
        """Its PATH, and each ``NAME=value``. What many have in common is put together once."""
        if spec.inherit_env or spec.health is not None or spec.satellite is not None or port is not None:
            env = self._environment(name, spec, cookie, port, None, last_end)
            return env["PATH"], [f"{key}={value}" for key, value in env.items()]
        if self._common is None or self._common[0] != (last_end, spec.env):
            env = self._environment(name, spec, cookie, port, None, last_end)
            common = [f"{key}={value}" for key, value in env.items() if key not in _ITS_OWN]
            self._common = (last_end, dict(spec.env)), env["PATH"], common
        _, path, common = self._common
        words = [f"{child.COOKIE_ENV}={cookie}", f"{child.WORKER_ENV}={name}", *common]
        words.append(f"{child.DIR_ENV}={self._workers}/{name}")
        return path, words

    def _environment(
        self,
        name: WorkerName,
        spec: WorkerSpec,
        cookie: Cookie,
        port: int | None,
        line: lifeline.Lifeline | None,
        last_end: str | None,
    ) -> dict[str, str]:
        # The cookie stands first: scans find it in the first bytes.
        env = {child.COOKIE_ENV: cookie, child.WORKER_ENV: name}
        env |= self._passed_through
        env |= {key: os.environ[key] for key in spec.inherit_env if key in os.environ}
        env.setdefault("PATH", _DEFAULT_PATH)
        home = f"{self._workers}/{name}"
        if spec.user is not None or spec.sandbox.level == "strict":
            env |= rights.environment(spec, home)
        env[child.DIR_ENV] = home
        env |= {} if last_end is None else {child.LAST_END_ENV: last_end}
        if self.notify_socket is not None:
            env[child.NOTIFY_SOCKET_ENV] = self.notify_socket
        if spec.health is not None and spec.health.watchdog_seconds is not None:
            env[child.WATCHDOG_USEC_ENV] = str(int(spec.health.watchdog_seconds * 1_000_000))
        if spec.satellite is not None:
            env[child.SATELLITE_ENV] = msgspec.json.encode(spec.satellite).decode()
        if line is not None:
            env[child.LIFELINE_FD_ENV] = str(line.read_fd)
        if port is not None:
            env[child.PORT_ENV] = str(port)
        if spec.secrets:
            env[child.CREDENTIALS_DIRECTORY_ENV] = f"{home}/{SECRETS}"
            for secret_name, secret in spec.secrets.items():
                if secret.env:
                    env[secret_name] = _secret_value(Path(home, SECRETS), secret_name)
        return env | spec.env


def _asks_for_nothing(spec: WorkerSpec) -> bool:
    """Neither another account nor a limit nor a sandbox, which not every machine has."""
    return spec.user is None and spec.group is None and spec.sandbox.level == "off" and spec.limits == _NO_LIMITS


def _command_of(spec: WorkerSpec) -> tuple[str, ...]:
    """What is executed: a satellite runs with the interpreter of its owner, wherever its spec was written."""
    return spec.command if spec.satellite is None else (sys.executable, *spec.command[1:])


# --- ports ------------------------------------------------------------------------------------------------------


def choose_port(name: WorkerName, taken: set[int]) -> int:
    """A free port for a worker that has none yet: the same one for the same name, if it can be had."""
    wish = zlib.crc32(name.encode()) % _PORTS
    for step in range(_PORTS):
        port = _FIRST_PORT + (wish + step) % _PORTS
        if port not in taken and port_is_free(port):
            return port
    raise PortUnavailable(f"worker {name!r}: no free port from {_FIRST_PORT} to {_FIRST_PORT + _PORTS - 1}")


def port_is_free(port: int) -> bool:
    """Can somebody listen on it now, on every address?"""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are still in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


# --- accounts and secrets ---------------------------------------------------------------------------------------


def _secret_value(folder: Path, name: str) -> str:
    try:
        return credentials.read(folder, name).decode()
    except (OSError, UnicodeDecodeError) as err:
        why = err.strerror if isinstance(err, OSError) else "not UTF-8"
        raise SpecError(f"secrets[{name!r}]", f"a file that cannot be read ({why})", "start with its value") from err


def _refused(err: OSError, path: Path) -> StateDirRefused | RegistryUnavailable:
    where = err.filename or path
    if err.errno in {errno.ENOSPC, errno.EDQUOT}:
        return RegistryUnavailable(f"{where}: the disk is full; free some space and try again")
    with contextlib.suppress(TypeError):
        return StateDirRefused(f"{where}: {err.strerror} (errno {err.errno})")
    return StateDirRefused(str(where))
