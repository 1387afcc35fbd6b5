"""JupyterHub's single-user servers as workers of a deck: a hub may die at any moment and loses none of them.

``c.JupyterHub.spawner_class = "everdeck"`` is the whole change. The hub opens a deck, the directory ``.everdeck``
unless it is told another place. Every server is an adoptable worker whose name follows from the user's and the server's
name, so the hub's database holds nothing that could be lost or wrong: no pid. A hub that was killed in the middle of a
spawn asks the deck for that name, and the deck knows whether there is a server, where it listens, and that there is
only one.

Nobody polls: the deck tells when a server ended, and then the hub's own callbacks run.

:class:`EverdeckSpawner` is a kind of jupyterhub's ``LocalProcessSpawner``, so that its settings hold here too:
``env_keep``, ``shell_cmd``, and ``term_timeout`` as the time that a server has to leave.
"""

import asyncio
import contextlib
import os
import pwd
import shlex
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from jupyterhub.spawner import LocalProcessSpawner  # type: ignore[import-untyped]
from tornado import web
from traitlets import Any as Anything
from traitlets import Dict, Enum, Integer, Unicode, default

from everdeck.crashpoints import crash_point
from everdeck.deck import AsyncDeck
from everdeck.errors import ClientError, EverdeckError, UnknownWorker, WorkerFailed
from everdeck.integrations.jupyterhub_names import worker_of
from everdeck.model import (
    Event,
    EventKind,
    Exited,
    Killed,
    Limits,
    Restart,
    Sandbox,
    Secret,
    State,
    Stop,
    WorkerSpec,
    WorkerStatus,
)
from everdeck.verbs import Caller, asked_by

# A port is known when the worker starts, and the server reads it from its address: so that is put together here.
_LAUNCH: Final = 'export JUPYTERHUB_SERVICE_URL="$1$PORT$2"; shift 2; exec "$@"'
_LAUNCH_AT_HOME: Final = f'export HOME="$PWD"; {_LAUNCH}'
_APP: Final = "jupyterhub"
_TOKENS: Final = frozenset({"JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN"})
_PORT: Final = "PORT"
_OURS: Final = ("EVERDECK_", "NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY")
_OF_THIS_MACHINE: Final = frozenset(
    {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_ROOT", "CONDA_DEFAULT_ENV"}
)
_LOOPBACK: Final = "127.0.0.1"
_EVERY_ADDRESS: Final = frozenset({"", "0.0.0.0", "::", "*"})  # noqa: S104 - told apart, not listened on
_ENDS: Final = frozenset({EventKind.EXITED, EventKind.CRASHED, EventKind.STOPPED, EventKind.FAILED})
_TOLD: Final = {
    EventKind.STARTED: (50, "The server runs as pid {pid}"),
    EventKind.RESTARTED: (50, "The server runs as pid {pid}"),
    EventKind.READY: (80, "The server is ready"),
    EventKind.STOPPING: (20, "The server that ran before is being stopped"),
    EventKind.STOPPED: (30, "The server that ran before is stopped"),
    EventKind.LOCK_CONFLICT: (40, "Another program holds this server's lock"),
}
_LAST_WORDS: Final = 5
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGER: Final = 1.3  # so nobody waits a quarter longer than his server needs, and a hundred at once ask seldom
_LONGEST_PAUSE_SECONDS: Final = 2.0


class EverdeckSpawner(LocalProcessSpawner):  # type: ignore[misc]
    """Runs every single-user server as a worker of a deck."""

    deck = Unicode(
        help="""
        Where the servers run: a directory of this machine (made if it is not there), http(s)://HOST:PORT of an
        ``everdeck up``, or kubernetes:NAMESPACE. Default: $EVERDECK_STATE, else ``.everdeck`` where the hub runs.
        """
    ).tag(config=True)

    deck_token = Unicode(help="The token for a deck behind a URL. Default: $EVERDECK_TOKEN.").tag(config=True)

    run_as = Enum(
        ["account", "auto", "hub"],
        help="""
        As whom a server runs. ``account``: as the account of the user's name, in its home directory and with its
        groups (needs root; the default for root). ``auto``: with a uid of its own that nobody else has, in a directory
        of the deck (needs root). ``hub``: as who owns the deck, in a directory of the deck or in ``home_dir``.
        """,
    ).tag(config=True)

    home_dir = Unicode(
        help="""
        Home and working directory of a server, e.g. ``/srv/homes/{username}``; made if ``run_as`` is ``hub``. Default:
        the account's home, or the worker's own ``data`` directory in the deck.
        """
    ).tag(config=True)

    sandbox = Anything(
        "off",
        help="""
        What a server may do: ``off``, ``basic``, ``strict``, or an ``everdeck.model.Sandbox``. The word ``strict``
        means: what a notebook server needs (this Python, its home, TCP), and nothing else.
        """,
    ).tag(config=True)

    connect_ip = Unicode(
        help="The address at which the hub reaches servers. Default: that of the machine with the deck."
    ).tag(config=True)

    worker = Dict(
        help="""
        Other fields of ``everdeck.WorkerSpec``, e.g. ``{"restart": Restart("on-failure"), "log": Log(keep=3)}``. A
        server that ends stays down until its user asks for it, unless ``restart`` says otherwise.
        """
    ).tag(config=True)

    poll_interval = Integer(
        0, help="Seconds between two looks at a server. 0: the hub is told when a server ends, and never looks."
    ).tag(config=True)

    port = Integer(0, help="The servers' port. 0: a free one that each server keeps, by its deck.").tag(config=True)

    _worker = Unicode()
    _before = Anything(None)
    _unsubscribe: Callable[[], None] | None = None
    _starting: "asyncio.Future[WorkerStatus] | None" = None

    @default("deck")
    def _default_deck(self) -> str:
        return os.environ.get("EVERDECK_STATE", ".everdeck")

    @default("deck_token")
    def _default_deck_token(self) -> str:
        return os.environ.get("EVERDECK_TOKEN", "")

    @default("run_as")
    def _default_run_as(self) -> str:
        return "account" if not self._is_elsewhere and (os.geteuid() == 0 or self._is_myself) else "hub"

    @default("ip")
    def _default_ip(self) -> str:
        return "0.0.0.0" if self._is_elsewhere else _LOOPBACK  # noqa: S104 - the hub is on another machine

    # --- what the hub asks --------------------------------------------------------------------------------------

    async def start(self) -> tuple[str, int]:
        """Start the server, in the place of any that runs by its name; where the hub reaches it."""
        self._worker = self._own_worker
        news = await self._news()
        deck = news.deck
        self._before = await deck.last_event_id()
        crash_point("jupyterhub.begin")
        try:
            await self._refuse_others(deck)
            # The hub's start_timeout may cancel us in the middle: then stop waits until there is something to stop.
            self._starting = asyncio.ensure_future(self._started(deck, self._spec()))
            status = await asyncio.shield(self._starting)
            crash_point("jupyterhub.started")
            self.log.info("%s: worker %r runs as pid %s", self._log_name, self._worker, status.pid)
            address = await self._address(deck), status.port or self.port
            await self._listening(news, *address)
            crash_point("jupyterhub.listening")
        except EverdeckError as error:
            raise _Refused(error) from error
        return address

    async def poll(self) -> int | None:
        """None while it runs. A deck that does not answer is no proof of an end."""
        if not self._worker and self.server is None:
            return 0
        if self._starting is not None and not self._starting.done():
            return None  # the hub asks before it stops what it no longer waits for
        try:
            status = await (await self._news()).deck.status(self._worker or self._own_worker)
        except UnknownWorker:
            return 0
        except ClientError as error:
            self.log.warning("%s: %s", self._log_name, error)
            return None
        return _exit_code(status) if _is_a_server(status) else 0

    async def stop(self, now: bool = False) -> None:  # noqa: ARG002 - one escalation for both
        """End the server and everything that it started; return when all of it is proven gone."""
        deck = (await self._news()).deck
        name = self._worker or self._own_worker
        if self._starting is not None:
            await asyncio.wait({self._starting})
        with asked_by(self._caller), contextlib.suppress(UnknownWorker):
            if _is_a_server(await deck.status(name)):
                await deck.stop(name)
        crash_point("jupyterhub.stopped")

    async def get_url(self) -> str:
        """Where it listens: the hub does not know if it died in the middle of the spawn."""
        deck = (await self._news()).deck
        status = await deck.status(self._worker or self._own_worker)
        if status.port is None:
            return str(self.server.url)
        ip = await self._address(deck)
        scheme = "https" if self.internal_ssl else "http"
        return f"{scheme}://{f'[{ip}]' if ':' in ip else ip}:{status.port}{self.server.base_url}"

    def get_state(self) -> dict[str, Any]:
        """The worker's name is all there is to remember."""
        return {"worker": self._worker} if self._worker else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """As it was, or nothing: then its name follows from the user's and the server's."""
        self._worker = state.get("worker", "")

    def clear_state(self) -> None:
        """Forget which worker it was."""
        super().clear_state()
        self._worker = ""

    async def delete_forever(self) -> None:
        """The user or the named server is deleted: so are the worker, its log and its directory in the deck."""
        deck = (await self._news()).deck
        with asked_by(self._caller), contextlib.suppress(UnknownWorker):
            if _is_a_server(await deck.status(self._own_worker)):
                await deck.remove(self._own_worker)

    async def rename(self, old_name: str, new_name: str) -> None:
        """A server whose files lie in the deck keeps its name: its directory has it."""
        name = worker_of(self.user.name, old_name)
        with contextlib.suppress(UnknownWorker):
            await (await self._news()).deck.status(name)
            if not self._home:
                raise web.HTTPError(
                    400, f"the files of {old_name!r} are in its own directory: make {new_name!r} beside it"
                )

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """What the deck tells of this worker while the hub waits for it."""
        deck = (await self._news()).deck
        async for event in deck.follow(self._before):
            if event.worker != (self._worker or self._own_worker):
                continue
            if event.kind in _TOLD:
                progress, words = _TOLD[event.kind]
                yield {"progress": progress, "message": words.format(pid=event.detail.get("pid"))}
            elif event.kind in _ENDS:
                last = await deck.logs(event.worker, _LAST_WORDS)
                yield {"message": "\n".join([f"The server ended ({event.kind.value}). Its last words:", *last])}

    async def _started(self, deck: AsyncDeck, spec: WorkerSpec) -> WorkerStatus:
        with asked_by(self._caller):
            try:
                return await deck.start(self._worker, spec, replace=True)
            except WorkerFailed:  # who asks for a server is the person that a breaker waits for
                await deck.stop(self._worker)
                await deck.reset(self._worker)
                return await deck.start(self._worker, spec, replace=True)

    async def _listening(self, news: "News", ip: str, port: int) -> None:
        """Return when somebody listens there; a server that ended instead is told at once, with its last words."""
        ended = asyncio.Event()
        unsubscribe = news.listen(self._worker, ended.set)  # which is called now too: it may have ended already
        pause_seconds = _FIRST_PAUSE_SECONDS
        try:
            while not await _answers(ip, port):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_seconds):
                        await ended.wait()
                pause_seconds = min(pause_seconds * _LONGER, _LONGEST_PAUSE_SECONDS)
                if not ended.is_set():
                    continue
                ended.clear()
                status = await news.deck.status(self._worker)
                if _exit_code(status) is not None:
                    last = await news.deck.logs(self._worker, _LAST_WORDS)
                    raise EverdeckError("\n".join([f"the server ended ({status.exit}); its last words:", *last]))
        finally:
            unsubscribe()

    # --- told instead of polled ---------------------------------------------------------------------------------

    def start_polling(self) -> None:
        """Run the hub's callbacks when the deck tells that the server ended; look now, because it may have already."""
        super().start_polling()
        self._stop_listening()
        news = _open_news(self.deck, self.deck_token)
        self._unsubscribe = news.listen(self._worker or self._own_worker, lambda: news.run(self.poll_and_notify()))

    def stop_polling(self) -> None:
        """Neither look nor listen."""
        super().stop_polling()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    # --- what is run --------------------------------------------------------------------------------------------

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        """Who the server is and where it is at home, as far as the hub can tell."""
        if self.run_as == "account":
            _entry(self.user.name)
            env = super().user_env(env)
        elif self.run_as == "hub":
            env["USER"] = self.user.name
        if self.home_dir:
            env["HOME"] = self._home
        return env

    def move_certs(self, paths: dict[str, str]) -> Any:
        """Certificates go where the account can read them."""
        return super().move_certs(paths) if self.run_as == "account" else paths

    def _spec(self) -> WorkerSpec:
        if self.internal_ssl and (self.run_as == "auto" or self._is_elsewhere):
            raise EverdeckError(
                "the certificates of c.JupyterHub.internal_ssl cannot be read there: let c.EverdeckSpawner.run_as be "
                "'account' or 'hub', and the deck a directory of this machine"
            )
        if self.popen_kwargs:
            self.log.warning("popen_kwargs is not used here: c.EverdeckSpawner.worker has the fields of a worker")
        env = {key: str(value) for key, value in self.get_env().items() if not self._stays_here(key)}
        # What comes from the hub's configuration may be anything, so all of it is kept as a secret.
        hidden = {key for key in env if key in _TOKENS or key in self.environment}
        command = [*self.cmd, *self.get_args()]
        if self.shell_cmd:
            command = [*self.shell_cmd, shlex.join(command)]
        self._refuse_missing(command[0], env.get("PATH"))
        before, after = _around_port(env.pop("JUPYTERHUB_SERVICE_URL"), self.port)
        at_home = self.run_as == "hub" and not self.home_dir
        if self.port:
            env[_PORT] = str(self.port)
        fields: dict[str, Any] = {
            "env": {key: value for key, value in env.items() if key not in hidden},
            "secrets": {key: Secret(env[key], env=True) for key in sorted(hidden & set(env))},
            "cwd": self._home or None,
            "user": self._account if self.run_as == "account" else "auto" if self.run_as == "auto" else None,
            "umask": None if self.sandbox != "off" else _umask(),
            "restart": Restart("never"),
            "stop": Stop(grace_seconds=self.term_timeout),
            "limits": Limits(
                memory_bytes=int(self.mem_limit) if self.mem_limit else None,
                cpu_percent=self.cpu_limit * 100 if self.cpu_limit else None,
            ),
            "sandbox": self._sandbox(),
            "port": not self.port,
            "labels": self._labels,
        }
        launch = ["/bin/sh", "-c", _LAUNCH_AT_HOME if at_home else _LAUNCH, "sh", before, after, *command]
        # The configuration has the last word, but for what the hub itself must find again.
        added = {field: {**self.worker.get(field, {}), **fields[field]} for field in ("env", "secrets", "labels")}
        return WorkerSpec.of(launch, **(fields | self.worker | added))

    def _stays_here(self, key: str) -> bool:
        """Is a variable the hub's own affair, or true on its machine only?"""
        return (
            key == _PORT
            or key.startswith(_OURS)
            or (self._is_elsewhere and key in _OF_THIS_MACHINE and key not in self.environment)
        )

    def _sandbox(self) -> Any:
        if self.sandbox != "strict":
            return self.sandbox
        # Kernels are reached by TCP ports of their own choice.
        prefixes = sorted({sys.prefix, sys.base_prefix})
        write = (self._home,) if self._home else ()
        return Sandbox("strict", read=tuple(prefixes), write=write, tcp_bind="any", tcp_connect="any")

    @property
    def _home(self) -> str:
        """Where it works; empty: in the worker's own directory in the deck."""
        if self.home_dir:
            home = str(self.format_string(self.home_dir))
            if self.run_as == "hub" and not self._is_elsewhere:
                Path(home).mkdir(mode=0o700, parents=True, exist_ok=True)
            return home
        if self.run_as != "account":
            return ""
        # As LocalProcessSpawner: a home that is not there is no reason to have no server.
        wished = Path(_entry(self.user.name).pw_dir)
        return str(next(place for place in (wished, *wished.parents) if place.is_dir()))

    @property
    def _account(self) -> str | None:
        if self._is_myself and os.geteuid() != 0:
            return None
        # A spec takes "auto" and digits for something else than the name of an account.
        name, uid = self.user.name, _entry(self.user.name).pw_uid
        return str(uid) if name == "auto" or name.isdigit() else name

    @property
    def _is_myself(self) -> bool:
        try:
            return pwd.getpwnam(self.user.name).pw_uid == os.geteuid()
        except KeyError:
            return False

    @property
    def _labels(self) -> dict[str, str]:
        return {"app": _APP, "user": self.user.name, "server": self.name}

    @property
    def _own_worker(self) -> str:
        return worker_of(self.user.name, self.name)

    @property
    def _caller(self) -> Caller:
        return Caller(uid=os.getuid(), pid=os.getpid(), token=f"jupyterhub:{self.user.name}")

    # --- where --------------------------------------------------------------------------------------------------

    @property
    def _is_elsewhere(self) -> bool:
        return self.deck.startswith(("http://", "https://", "kubernetes:"))

    async def _address(self, deck: AsyncDeck) -> str:
        if self.connect_ip:
            return self.connect_ip
        if self._is_elsewhere or self.ip in _EVERY_ADDRESS:
            return await deck.address(self._worker or self._own_worker)
        return str(self.ip)

    async def _news(self) -> "News":
        news = _open_news(self.deck, self.deck_token)
        await news.opened()
        return news

    async def _refuse_others(self, deck: AsyncDeck) -> None:
        """A worker of that name that is nobody's server stays as it is."""
        try:
            status = await deck.status(self._own_worker)
        except UnknownWorker:
            return
        if not _is_a_server(status):
            raise EverdeckError(
                f"the deck {self.deck} has a worker {self._own_worker!r} that is not a server of this user; "
                "remove it, or give the hub a deck of its own (c.EverdeckSpawner.deck)"
            )

    def _refuse_missing(self, program: str, path: str | None) -> None:
        if not self._is_elsewhere and shutil.which(program, path=path) is None:
            raise EverdeckError(f"there is no program {program!r} in {path or 'PATH'} (c.Spawner.cmd)")


class News:
    """One deck that this hub has open, and who wants to hear when one of its workers ends."""

    def __init__(self, where: str, token: str) -> None:
        self.deck = AsyncDeck(where, token=token or None)
        self._loop = asyncio.get_running_loop()
        self._opening: asyncio.Task[None] | None = None
        self._listeners: dict[str, Callable[[], Any]] = {}
        self._running: set[asyncio.Task[Any]] = set()

    async def opened(self) -> None:
        """Once for everybody; one that failed is tried again by the next who asks."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = self._loop.create_task(self._open())
        await asyncio.shield(self._opening)

    def listen(self, worker: str, callback: Callable[[], Any]) -> Callable[[], None]:
        """Call back when this worker ended, and now, because it may have ended before; what takes it back."""
        self._listeners[worker] = callback
        self._tell(worker)

        def unsubscribe() -> None:
            if self._listeners.get(worker) is callback:
                del self._listeners[worker]

        return unsubscribe

    def run(self, telling: Coroutine[Any, Any, Any]) -> None:
        """Let the hub's callbacks run; they catch their own errors."""
        task = self._loop.create_task(telling)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _open(self) -> None:
        await self.deck.open()
        self.deck.on_event(self._heard)

    def _heard(self, event: Event) -> None:
        """In a thread of the deck's."""
        if event.kind in _ENDS and event.worker is not None:
            self._loop.call_soon_threadsafe(self._tell, event.worker)

    def _tell(self, worker: str) -> None:
        if (callback := self._listeners.get(worker)) is not None:
            callback()


class _Refused(web.HTTPError):
    """Why there is no server, in words that the hub shows to its user."""

    def __init__(self, error: EverdeckError) -> None:
        super().__init__(500, str(error).replace("%", "%%"))
        self.jupyterhub_message = str(error)


_news: dict[tuple[str, str], News] = {}


def _open_news(where: str, token: str) -> News:
    key = (where, token)
    if key not in _news:
        _news[key] = News(where, token)
    return _news[key]


def _is_a_server(status: WorkerStatus) -> bool:
    """Is it the server that its name tells? Others may have workers in this deck too."""
    labels = status.labels
    return labels.get("app") == _APP and worker_of(labels.get("user", ""), labels.get("server", "")) == status.name


def _exit_code(status: WorkerStatus) -> int | None:
    """As Popen tells it; None while it runs, or will again by itself."""
    if status.state.is_live or status.state is State.BACKOFF:
        return None
    match status.exit:
        case Exited(code):
            return code
        case Killed(signal):
            return -signal
        case _:
            return 0


async def _answers(ip: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        probe.setblocking(False)  # noqa: FBT003 - takes it by position only
        try:
            await asyncio.get_running_loop().sock_connect(probe, (ip, port))
        except OSError:
            return False
    return True


def _around_port(url: str, port: int) -> tuple[str, str]:
    """``http://127.0.0.1:0/user/alice/`` in two halves, without its port."""
    parts = urlsplit(url)
    host = parts.netloc.removesuffix(f":{port}")
    return f"{parts.scheme}://{host}:", parts.path


def _umask() -> int:
    """The hub's own, which LocalProcessSpawner's servers inherit: to ask os.umask is to change it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def _entry(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise EverdeckError(
            f"this machine has no account {name!r}; make one, or let c.EverdeckSpawner.run_as be 'auto' or 'hub'"
        ) from None
