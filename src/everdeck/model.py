"""The values everybody speaks in: what to run, who runs, how it ended, what happened.

All of them are frozen and validated when they are made: a refused value says which field, what was given and
what is accepted (:class:`everdeck.errors.SpecError`), and because nothing is written before a spec exists,
nothing has to be undone. The same types are stored in the registry, sent over HTTP and described in OpenAPI.

This module decides nothing and touches nothing: no ``os``, no clock, no I/O.
"""

import re
import signal as _signal
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import datetime
from enum import StrEnum
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any, Final, Literal, NewType, Self, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from everdeck.errors import NameRefused, SpecError

WorkerName = NewType("WorkerName", str)
Cookie = NewType("Cookie", str)

NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9._\-@:+]{1,128}", re.ASCII)
_ENV_KEY: Final = re.compile(r"[^=\0]+")
_SECRET_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,128}", re.ASCII)
_NAME_RULE: Final = "1-128 characters of A-Z a-z 0-9 . _ - @ : +, but not '.' or '..'"


def worker_name(given: object) -> WorkerName:
    """The name as we use it: integers become strings, everything outside the alphabet is refused."""
    text = str(given) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(text, str) or not NAME_PATTERN.fullmatch(text) or text in {".", ".."}:
        raise NameRefused("name", given, _NAME_RULE)
    return WorkerName(text)


class State(StrEnum):
    """What a worker is doing, as far as the kernel and the registry together can tell."""

    STARTING = "starting"
    RUNNING = "running"
    UNHEALTHY = "unhealthy"
    STOPPING = "stopping"
    STOPPED = "stopped"
    EXITED = "exited"
    BACKOFF = "backoff"
    FAILED = "failed"

    @property
    def is_live(self) -> bool:
        """Whether a process belongs to it: every other state says that none runs."""
        return self in _LIVE


_LIVE: Final = frozenset({State.STARTING, State.RUNNING, State.UNHEALTHY, State.STOPPING})


class EventKind(StrEnum):
    """Everything that can happen to a worker or its deck."""

    STARTED = "started"
    READY = "ready"
    ADOPTED = "adopted"
    STOPPING = "stopping"
    STOPPED = "stopped"
    EXITED = "exited"
    CRASHED = "crashed"
    RESTARTED = "restarted"
    FAILED = "failed"
    RESET = "reset"
    UNHEALTHY = "unhealthy"
    KILLED = "killed"
    ORPHAN_REAPED = "orphan-reaped"
    LOCK_CONFLICT = "lock-conflict"
    LOG_ROTATED = "log-rotated"
    OWNER_CHANGED = "owner-changed"
    FEED = "feed"


class Containment(StrEnum):
    """How strongly a worker's tree can be found and ended, strongest first."""

    CGROUP = "cgroup"
    CGROUP_JOINED = "cgroup, joined after start"
    COOKIE = "cookie"
    GROUP = "group"


SandboxLevel: TypeAlias = Literal["off", "basic", "strict"]
Lifetime: TypeAlias = Literal["bound", "adoptable"]
DurabilityMode: TypeAlias = Literal["power", "process"]
Policy: TypeAlias = Literal["always", "on-failure", "never"]


# --- how a process ended ----------------------------------------------------------------------------------------


class Exited(msgspec.Struct, frozen=True, tag_field="kind", tag="exited"):
    """The process left by itself with this code."""

    code: int

    def __str__(self) -> str:
        return f"exit code {self.code}"


class Killed(msgspec.Struct, frozen=True, tag_field="kind", tag="killed", omit_defaults=True):
    """A signal ended the process; ``oom`` when it was the kernel's, because its tree was at its memory limit."""

    signal: int
    oom: bool = False

    def __str__(self) -> str:
        why = " (out of memory)" if self.oom else ""
        try:
            return f"killed by {_signal.Signals(self.signal).name}{why}"
        except ValueError:
            return f"killed by signal {self.signal}{why}"


class UnknownExit(msgspec.Struct, frozen=True, tag_field="kind", tag="unknown"):
    """Nobody saw how it ended: neither success nor failure."""

    def __str__(self) -> str:
        return "unknown"


Exit: TypeAlias = Exited | Killed | UnknownExit


# --- who a process is -------------------------------------------------------------------------------------------


class Identity(msgspec.Struct, frozen=True):
    """Who a process is beyond its pid: comparable across restarts of ours, never across boots.

    ``pidfd_inode`` is None below Linux 6.9, where the kernel gives all pidfds one inode.
    """

    boot_id: str
    pid: int
    start_ticks: int
    pidfd_inode: int | None = None


# --- the spec ---------------------------------------------------------------------------------------------------


class Restart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a worker that ended is started again, how long it waits, and when a person has to look."""

    policy: Policy = "on-failure"
    max_crashes: int = 5
    window_seconds: float = 300
    backoff_seconds: float = 1.0
    backoff_cap_seconds: float = 60.0
    stable_seconds: float = 60

    def __post_init__(self) -> None:
        _one_of("restart.policy", self.policy, ("always", "on-failure", "never"))
        _whole("restart.max_crashes", self.max_crashes, least=0, most=_MOST_CRASHES)
        _number("restart.window_seconds", self.window_seconds, above=0)
        _number("restart.backoff_seconds", self.backoff_seconds, least=0)
        _number("restart.backoff_cap_seconds", self.backoff_cap_seconds, least=self.backoff_seconds)
        _number("restart.stable_seconds", self.stable_seconds, least=0)


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker is asked to leave, and how long it may take before SIGKILL."""

    signal: str = "TERM"
    grace_seconds: float = 5

    def __post_init__(self) -> None:
        accepted = "a signal name such as TERM, INT, HUP, QUIT, USR1"
        if not isinstance(self.signal, str):
            raise SpecError("stop.signal", self.signal, accepted)
        name = self.signal.upper().removeprefix("SIG")
        if f"SIG{name}" not in _signal.Signals.__members__:
            raise SpecError("stop.signal", self.signal, accepted)
        force_setattr(self, "signal", name)
        _number("stop.grace_seconds", self.grace_seconds, least=0)

    @property
    def signal_number(self) -> int:
        """The number of :attr:`signal` on this machine."""
        return int(_signal.Signals[f"SIG{self.signal}"])


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a worker's log is rotated and what is kept."""

    max_bytes: int = 10_000_000
    max_age_seconds: float | None = None
    keep: int = 10
    compress: bool = True
    split_stderr: bool = False

    def __post_init__(self) -> None:
        _whole("log.max_bytes", self.max_bytes, least=4096, most=_MOST_BYTES)
        if self.max_age_seconds is not None:
            _number("log.max_age_seconds", self.max_age_seconds, above=0)
        _whole("log.keep", self.keep, least=0, most=_MOST_ARCHIVES)
        _boolean("log.compress", self.compress)
        _boolean("log.split_stderr", self.split_stderr)


class LogRoom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of the disk all logs of a deck may take together; beyond it the oldest archives go first."""

    budget_bytes: int | None = None
    keep_free_bytes: int | None = None
    """None: a twentieth of the file system, at most a gibibyte."""

    def __post_init__(self) -> None:
        for name in ("budget_bytes", "keep_free_bytes"):
            if getattr(self, name) is not None:
                _whole(f"logs.{name}", getattr(self, name), least=0, most=_MOST_BYTES)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker may use. A limit that this machine cannot enforce is refused at start, never ignored."""

    memory_bytes: int | None = None
    cpu_percent: float | None = None
    pids: int | None = None
    open_files: int | None = None
    nice: int | None = None
    oom_score_adj: int | None = None
    disk_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None:
            _whole("limits.memory_bytes", self.memory_bytes, least=4096, most=_MOST_BYTES)
        if self.cpu_percent is not None:
            _number("limits.cpu_percent", self.cpu_percent, above=0, most=_MOST_PERCENT)
        if self.pids is not None:
            _whole("limits.pids", self.pids, least=1, most=_MOST_PIDS)
        if self.open_files is not None:
            _whole("limits.open_files", self.open_files, least=8, most=_MOST_FILES)
        if self.nice is not None:
            _whole("limits.nice", self.nice, least=-20, most=19)
        if self.oom_score_adj is not None:
            _whole("limits.oom_score_adj", self.oom_score_adj, least=-1000, most=1000)
        if self.disk_bytes is not None:
            _whole("limits.disk_bytes", self.disk_bytes, least=4096)


class Sandbox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker may do. What this machine cannot hold is refused at start, never weakened.

    ``basic``: it gains no privileges, dumps no core, makes files for its own account, and is in a cgroup of its own.
    ``strict``: besides, it reaches only its own directories, the system (read-only), the paths and TCP ports that are
    listed here, and the system calls of ordinary programs.
    """

    level: SandboxLevel = "off"
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    tcp_connect: tuple[int, ...] | Literal["any"] = ()
    tcp_bind: tuple[int, ...] | Literal["any"] = ()
    unix_sockets: bool = False

    def __post_init__(self) -> None:
        _one_of("sandbox.level", self.level, ("off", "basic", "strict"))
        for field in ("read", "write"):
            force_setattr(self, field, _absolute_paths(f"sandbox.{field}", getattr(self, field)))
        for field in ("tcp_connect", "tcp_bind"):
            force_setattr(self, field, _ports(f"sandbox.{field}", getattr(self, field)))
        _boolean("sandbox.unix_sockets", self.unix_sockets)
        if self.level != "strict" and (
            self.read or self.write or self.tcp_connect or self.tcp_bind or self.unix_sockets
        ):
            raise SpecError("sandbox", self.level, "paths, ports and unix_sockets only with level strict")


class Health(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How we learn that a worker is ready and still well.

    ``notify`` and ``watchdog_seconds`` follow systemd's protocol (``READY=1``, ``WATCHDOG=1``); ``http``,
    ``tcp`` and ``command`` are asked every ``interval_seconds``. ``$PORT`` in ``http`` and ``tcp`` stands for
    the worker's port. After ``failures`` failed checks in a row the worker is unhealthy.
    """

    notify: bool = False
    watchdog_seconds: float | None = None
    http: str | None = None
    tcp: str | None = None
    command: tuple[str, ...] | None = None
    interval_seconds: float = 10
    timeout_seconds: float = 3
    failures: int = 3
    start_timeout_seconds: float = 60

    def __post_init__(self) -> None:
        _boolean("health.notify", self.notify)
        if self.watchdog_seconds is not None:
            _number("health.watchdog_seconds", self.watchdog_seconds, above=0)
        if self.http is not None and not (isinstance(self.http, str) and re.match(r"https?://[^/\s]+", self.http)):
            raise SpecError("health.http", self.http, "a URL such as http://127.0.0.1:$PORT/healthz")
        if self.tcp is not None and not (isinstance(self.tcp, str) and re.fullmatch(r".+:(\d+|\$PORT)", self.tcp)):
            raise SpecError("health.tcp", self.tcp, "HOST:PORT, such as 127.0.0.1:$PORT")
        if self.command is not None:
            force_setattr(self, "command", _command("health.command", self.command))
        if sum(check is not None for check in (self.http, self.tcp, self.command)) > 1:
            raise SpecError("health", "several of http, tcp, command", "at most one of http, tcp, command")
        _number("health.interval_seconds", self.interval_seconds, above=0)
        _number("health.timeout_seconds", self.timeout_seconds, above=0)
        _whole("health.failures", self.failures, least=1, most=_MOST_CRASHES)
        _number("health.start_timeout_seconds", self.start_timeout_seconds, above=0)


class Secret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that reaches the worker as a file in ``$CREDENTIALS_DIRECTORY``, or as env if ``env`` is set.

    ``value`` is None where the value is not ours to show: in the registry, the API and the page.
    """

    value: str | None
    env: bool = False

    def __repr__(self) -> str:
        return f"Secret(value={'None' if self.value is None else '<hidden>'}, env={self.env})"


class SatelliteSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which account a satellite joins, and where its messages go. Secrets are not in here: they are files.

    ``options`` are the kind's own (see ``everdeck.satellites``). ``to`` is None (this program reads them with
    ``deck.messages``), a function ``module:name``, a URL, or a command; ``path`` is the directory that the function's
    module is imported from.
    """

    kind: str
    options: dict[str, Any] = {}
    to: str | tuple[str, ...] | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not _KIND.fullmatch(self.kind):
            raise SpecError("satellite.kind", self.kind, "a word such as telegram, gmail, smtp, cron or webhook")
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise SpecError("satellite.options", self.options, "a mapping of names to values")
        if self.to is not None and not isinstance(self.to, str):
            force_setattr(self, "to", _command("satellite.to", self.to))
        elif isinstance(self.to, str) and not _TARGET.fullmatch(self.to):
            raise SpecError("satellite.to", self.to, "a URL, a function as module:name, or a command as a list")
        if self.path is not None:
            force_setattr(self, "path", _text("satellite.path", self.path))


_KIND: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}", re.ASCII)
_TARGET: Final = re.compile(r"https?://[^/\s]\S*|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to run and under which policies. Only a satellite has no command of its own.

    A field is declared here and nowhere else: everdeck.toml and its schema, the API's request and view, the command
    line's ``--set`` and ``inspect`` are made from these lines (:mod:`everdeck.specforms`).
    """

    # Policies that are not given are made and checked once: nobody can change them, and a thousand specs share them.
    command: Annotated[tuple[str, ...], Meta(description="The program and its arguments.")] = ()
    env: Annotated[dict[str, str], Meta(description="Environment of the worker.")] = {}
    inherit_env: Annotated[tuple[str, ...], Meta(description="Names passed on from the daemon's environment.")] = ()
    secrets: Annotated[dict[str, Secret], Meta(description="Values that are never shown.")] = {}
    cwd: Annotated[str | None, Meta(description="Working directory.")] = None
    lifetime: Annotated[Lifetime, Meta(description="bound: ends with the daemon. adoptable: survives it.")] = (
        "adoptable"
    )
    restart: Annotated[Restart, Meta(description="When it is started again.")] = msgspec.field(
        default_factory=cache(Restart)
    )
    stop: Annotated[Stop, Meta(description="How it is asked to leave.")] = msgspec.field(default_factory=cache(Stop))
    health: Annotated[Health | None, Meta(description="How we learn that it is ready and well.")] = None
    limits: Annotated[Limits, Meta(description="What it may use.")] = msgspec.field(default_factory=cache(Limits))
    sandbox: Annotated[Sandbox, Meta(description="What it may do: off, basic or strict.")] = msgspec.field(
        default_factory=cache(Sandbox)
    )
    log: Annotated[Log, Meta(description="When its log is rotated and what is kept.")] = msgspec.field(
        default_factory=cache(Log)
    )
    port: Annotated[bool, Meta(description="Give it a stable port in $PORT.")] = False
    user: Annotated[str | None, Meta(description="Run as this user.")] = None
    group: Annotated[str | None, Meta(description="Run as this group.")] = None
    umask: Annotated[int | None, Meta(description="File mode mask, such as 0o077.")] = None
    labels: Annotated[dict[str, str], Meta(description="Free words to filter by.")] = {}
    satellite: Annotated[SatelliteSpec | None, Meta(description="Which account it joins, instead of a command.")] = None

    def __post_init__(self) -> None:
        force_setattr(self, "command", _own_command(self.command, self.satellite))
        force_setattr(self, "env", _env(self.env))
        force_setattr(self, "inherit_env", _inherited(self.inherit_env))
        force_setattr(self, "secrets", _secrets(self.secrets))
        force_setattr(self, "labels", _labels(self.labels))
        if self.cwd is not None:
            force_setattr(self, "cwd", _text("cwd", str(self.cwd) if isinstance(self.cwd, PurePath) else self.cwd))
        _one_of("lifetime", self.lifetime, ("bound", "adoptable"))
        _instance("restart", self.restart, Restart)
        _instance("stop", self.stop, Stop)
        _instance("limits", self.limits, Limits)
        force_setattr(self, "sandbox", _sandbox(self.sandbox))
        _instance("log", self.log, Log)
        if self.health is not None:
            _instance("health", self.health, Health)
        _boolean("port", self.port)
        for field in ("user", "group"):
            account = getattr(self, field)
            if account is not None:
                force_setattr(self, field, _text(field, str(account) if type(account) is int else account))
        if self.umask is not None:
            _whole("umask", self.umask, least=0, most=0o777)
        if self.secrets or self.inherit_env or self.port:
            self._check_names()

    def _check_names(self) -> None:
        """No name in the environment may have two values, or be one of ours."""
        as_env = {name for name, secret in self.secrets.items() if secret.env}
        both = sorted(set(self.env) & as_env)
        if both:
            raise SpecError("secrets", both, "names that are not also in env")
        for field, names in (("inherit_env", self.inherit_env), ("secrets", as_env)):
            ours = sorted(_RESERVED_ENV & set(names))
            if ours:
                raise SpecError(field, ours, f"names that are not one of {', '.join(sorted(_RESERVED_ENV))}")
        if self.port and ("PORT" in self.env or "PORT" in as_env or "PORT" in self.inherit_env):
            raise SpecError("env['PORT']", "PORT", "no PORT beside port=True, which gives the worker its own")

    @classmethod
    def of(cls, command: "Sequence[str | PurePath] | WorkerSpec", **fields: Any) -> Self:
        """A spec from what a caller typed: a command and fields, or a spec with some fields changed."""
        for field, value in fields.items():
            if field == "command" or field not in cls.__struct_fields__:
                known = set(cls.__struct_fields__) - {"command"}
                raise SpecError(field, value, f"one of the fields {', '.join(sorted(known))}")
        if isinstance(command, WorkerSpec):
            current = {name: getattr(command, name) for name in cls.__struct_fields__}
            return cls(**(current | fields))
        return cls(command, **fields)  # type: ignore[arg-type]  # __post_init__ refuses what is not a command

    def with_command(self, command: "Sequence[str | PurePath]") -> Self:
        """The same for another command, which is all that is checked: the rest was, and is shared."""
        other = copy(self)
        force_setattr(other, "command", _own_command(command, self.satellite))
        return other

    def without_secret_values(self) -> Self:
        """The same spec as it may be stored and shown."""
        if not self.secrets:
            return self
        hidden = {name: Secret(None, env=secret.env) for name, secret in self.secrets.items()}
        return msgspec.structs.replace(self, secrets=hidden)


# --- what callers get back --------------------------------------------------------------------------------------


class Hold(msgspec.Struct, frozen=True):
    """One thing that a worker cannot do, in plain words: whether that holds, and if not, why."""

    what: str
    holds: bool
    why: str = ""


BROKEN: Final = "broken"
"""The health of a worker whose record cannot be read: no reset helps it, and its status text says what does."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker as it is now."""

    name: str
    state: State
    pid: int | None = None
    started_at: datetime | None = None
    uptime_seconds: float | None = None
    exit: Exit | None = None
    restarts: int = 0
    crashes: int = 0
    adopted: bool = False
    lifetime: Lifetime = "adoptable"
    port: int | None = None
    health: str | None = None
    health_reason: str | None = None
    status_text: str | None = None
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    backoff_until: datetime | None = None
    containment: Containment | None = None
    labels: dict[str, str] = {}


class Snapshot(msgspec.Struct, frozen=True):
    """The deck as somebody sees it who does not own it: what is up, and whether anybody supervises it."""

    supervised: bool
    owner_pid: int | None
    workers: list[WorkerStatus]


class Event(msgspec.Struct, frozen=True):
    """One thing that happened. Ids grow by one, without gaps; ``worker`` is None for the deck itself."""

    id: int
    at: datetime
    worker: str | None
    kind: EventKind
    detail: dict[str, Any] = {}


class Layer(msgspec.Struct, frozen=True):
    """One of the four layers, for one worker: does it hold here, how strongly, and why."""

    layer: str
    holds: bool
    strength: str
    why: str


class ProcessInfo(msgspec.Struct, frozen=True):
    """One process of a worker's tree, for people."""

    pid: int
    ppid: int
    name: str
    command: str
    state: str
    rss_bytes: int


# --- validation, in the order it is called ----------------------------------------------------------------------


def _one_of(field: str, given: object, accepted: tuple[str, ...]) -> None:
    if given not in accepted:
        raise SpecError(field, given, " | ".join(accepted))


def _whole(field: str, given: object, least: int | None = None, most: int | None = None) -> None:
    if type(given) is not int or (least is not None and given < least) or (most is not None and given > most):
        raise SpecError(field, given, _range("a whole number", least, most))


# What all later arithmetic and formatting survives: deadlines become dates, sizes become kernel numbers.
_LONGEST_SECONDS: Final = 10 * 366 * 86_400.0
_MOST_CRASHES: Final = 1_000_000
_MOST_BYTES: Final = 1 << 60
_MOST_ARCHIVES: Final = 100_000
_MOST_PERCENT: Final = 1_000_000.0
_MOST_PIDS: Final = 4_194_304  # PID_MAX_LIMIT of a 64-bit kernel
_MOST_FILES: Final = 1 << 30


def _number(
    field: str,
    given: object,
    least: float | None = None,
    above: float | None = None,
    most: float = _LONGEST_SECONDS,
) -> None:
    # NaN is refused too: it is neither below nor above anything.
    if isinstance(given, bool) or not isinstance(given, int | float) or not -most <= given <= most:
        raise SpecError(field, given, f"a number of at most {most:.0f}")
    if (least is not None and given < least) or (above is not None and given <= above):
        raise SpecError(
            field, given, f"a number above {above}" if above is not None else f"a number of at least {least}"
        )


def _range(what: str, least: int | None, most: int | None) -> str:
    if most is not None:
        return f"{what} from {least} to {most}"
    return what if least is None else f"{what} of at least {least}"


def _boolean(field: str, given: object) -> None:
    if not isinstance(given, bool):
        raise SpecError(field, given, "true or false")


def _instance(field: str, given: object, kind: type) -> None:
    if not isinstance(given, kind):
        raise SpecError(field, given, f"a {kind.__name__}(...)")


def _is_text(given: object) -> bool:
    """A text that can be an argument, a variable or a file: no NUL, and no lone surrogate, which has no encoding."""
    return isinstance(given, str) and (given.isascii() or not _SURROGATE.search(given)) and "\0" not in given


_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def _text(field: str, given: object) -> str:
    if not isinstance(given, str) or not given or not _is_text(given):
        raise SpecError(field, given, "a text that is not empty and holds neither NUL nor lone surrogates")
    return given


def _own_command(given: object, satellite: object) -> tuple[str, ...]:
    """Only a satellite may leave it out."""
    if satellite is not None:
        _instance("satellite", satellite, SatelliteSpec)
    return () if satellite is not None and given == () else _command("command", given)


def _command(field: str, given: object) -> tuple[str, ...]:
    accepted = "a list of texts: the program and its arguments"
    # A list or a tuple is asked for first: it is what comes, and what is abstract takes longer to ask for.
    if isinstance(given, str | bytes) or not isinstance(given, list | tuple | Sequence) or not given:
        raise SpecError(field, given, accepted)
    words = tuple([str(word) if isinstance(word, PurePath) else word for word in given])
    for word in words:
        if not _is_text(word):
            raise SpecError(field, given, accepted + " (a word is not a text, or holds NUL or a lone surrogate)")
    if not words[0]:
        raise SpecError(field, given, accepted + " (the program is empty)")
    return words


def _mapping(field: str, given: object) -> Mapping[Any, Any]:
    if type(given) is not dict and not isinstance(given, Mapping):
        raise SpecError(field, given, "a mapping of names to texts")
    return given


def _env(given: object) -> dict[str, str]:
    env: dict[str, str] = {}
    for key, value in _mapping("env", given).items():
        if not isinstance(key, str) or not _ENV_KEY.fullmatch(key) or not _is_text(key):
            raise SpecError(f"env[{key!r}]", key, "a name without '=' or NUL")
        if not _is_text(value):
            raise SpecError(f"env[{key!r}]", value, "a text without NUL and lone surrogates")
        if key in _RESERVED_ENV:
            raise SpecError(f"env[{key!r}]", key, f"a name that is not one of {', '.join(sorted(_RESERVED_ENV))}")
        env[key] = value
    return env


# Written by us into every worker; a spec that sets them would break adoption or health.
_RESERVED_ENV: Final = frozenset(
    {
        "EVERDECK_WORKER",
        "EVERDECK_DIR",
        "EVERDECK_COOKIE",
        "EVERDECK_LIFELINE_FD",
        "EVERDECK_SATELLITE",
        "NOTIFY_SOCKET",
    }
)


def _inherited(given: object) -> tuple[str, ...]:
    if given == ():
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise SpecError("inherit_env", given, "a list of environment names")
    for name in given:
        if not isinstance(name, str) or not _ENV_KEY.fullmatch(name):
            raise SpecError("inherit_env", name, "an environment name")
    return tuple(given)


def _secrets(given: object) -> dict[str, Secret]:
    secrets: dict[str, Secret] = {}
    for name, value in _mapping("secrets", given).items():
        if not isinstance(name, str) or not _SECRET_NAME.fullmatch(name) or name in {".", ".."}:
            raise SpecError("secrets", name, "names of 1-128 characters of A-Z a-z 0-9 _ . -")
        secret = Secret(value) if isinstance(value, str) else value
        if not isinstance(secret, Secret) or not isinstance(secret.value, str | None):
            raise SpecError(f"secrets[{name!r}]", type(value).__name__, "a text or Secret(text, env=...)")
        if secret.value is not None and not _is_text(secret.value):
            raise SpecError(f"secrets[{name!r}]", "<hidden>", "a text without NUL and lone surrogates")
        secrets[name] = secret
    return secrets


def _sandbox(given: object) -> Sandbox:
    """The level alone says it too."""
    if isinstance(given, str):
        _one_of("sandbox", given, ("off", "basic", "strict"))
        return Sandbox(given)  # type: ignore[arg-type]  # one of the three
    if not isinstance(given, Sandbox):
        raise SpecError("sandbox", given, "off, basic, strict or Sandbox(...)")
    return given


def _absolute_paths(field: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise SpecError(field, given, "a list of absolute paths")
    paths = [str(path) if isinstance(path, PurePath) else path for path in given]
    for path in paths:
        if not isinstance(path, str) or not path.startswith("/") or not _is_text(path):
            raise SpecError(field, path, "an absolute path")
    return tuple(paths)


def _ports(field: str, given: object) -> "tuple[int, ...] | Literal['any']":
    if given == "any":
        return "any"
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise SpecError(field, given, "a list of TCP ports, or any")
    for port in given:
        _whole(field, port, least=1, most=65535)
    return tuple(given)


def _labels(given: object) -> dict[str, str]:
    labels: dict[str, str] = {}
    for key, value in _mapping("labels", given).items():
        labels[_text("labels", key)] = value if value == "" else _text(f"labels[{key!r}]", value)
    return labels
