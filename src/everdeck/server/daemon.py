"""``everdeck up``: own the deck, apply the configuration, serve the socket and the page, and leave well.

The daemon adds no state of its own to the deck: killed at any instruction, the next one finds everything by opening
the deck. SIGTERM stops bound workers, leaves adoptable ones running and says which; as PID 1 of a container, whose end
is everybody's, it stops all of them politely. ``reload`` replaces the program
under the same pid (execve(2) keeps pid, children and the descriptors that are not close-on-exec), so children stay
children and their exit codes are not missed; the sockets and the connections without a request are carried over too, so
no connection is refused or reset meanwhile.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from msgspec import UNSET

from everdeck import child, wording
from everdeck.config import said_for_kubernetes
from everdeck.deck import AsyncDeck
from everdeck.deck.home import make_state_dir
from everdeck.deck.peek import peek
from everdeck.errors import DeckError
from everdeck.kernel import heap, orphans, spawn
from everdeck.model import Event, WorkerStatus
from everdeck.server import TYPED_IN_ENV, activation, applying, fitness
from everdeck.server.app import create_app
from everdeck.server.auth import Door
from everdeck.server.documents import Applied, ApplyRequest
from everdeck.server.fitness import DaemonOptions
from everdeck.server.samples import RECORD_SECONDS
from everdeck.server.services import Services
from everdeck.server.serving import HttpFront
from everdeck.server.tokens import token_of
from everdeck.statedir import StateDir

REEXEC_ENV: Final = "EVERDECK_REEXEC"
_ORPHAN_SECONDS: Final = 0.5
_SETTLED_SECONDS: Final = 2.0
_log: Final = logging.getLogger("everdeck")


def run(options: DaemonOptions, out: TextIO) -> int:
    """Be the daemon until told to leave; returns the exit code."""
    _configure_logging(options.log_format, options.log_file, options.access_log)
    address = None if options.listen is None else fitness.listen_address(options)
    return asyncio.run(_Daemon(options, address, out).live())


def _address_of(fd: int, options: DaemonOptions) -> tuple[str, int]:
    """Where a socket listens that systemd lent us; the rule about addresses that others reach holds for it too."""
    lent = socket.socket(fileno=fd)
    try:
        host, port = lent.getsockname()[:2]
    finally:
        lent.detach()
    shown = f"[{host}]" if ":" in host else host
    return fitness.listen_address(replace(options, listen=f"{shown}:{port}"))


def _settle() -> None:
    """What start-up left behind is garbage now; freezing the rest keeps later collections short.

    A moment after it: with thousands of workers this takes a tenth of a second, and people wait for the start.
    """
    heap.give_back()
    gc.freeze()
    gc.enable()


class _Daemon:
    def __init__(self, options: DaemonOptions, address: tuple[str, int] | None, out: TextIO) -> None:
        self._options = options
        self._address = address
        self._out = out
        self._carried: dict[str, Any] = json.loads(os.environ.pop(REEXEC_ENV, "{}"))
        if lent := activation.taken():
            self._carried |= {**lent, "lent": sorted(lent)}
        # Whatever we make is for our account only; workers have the umask that we were started with.
        self._umask = spawn.make_files_private(self._carried.get("umask"))
        # As many descriptors as we may have; workers have the limit that we were started with.
        self._open_files = spawn.raise_open_files(self._carried.get("open_files"))
        self._is_init = os.getpid() == 1
        self._leave = asyncio.Event()

    async def live(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            # Under nohup, or in the background of a script, some are ignored. That stays so for us; but an ignored
            # signal would be inherited by every worker, and a handler is not.
            ignored = signal.getsignal(number) is signal.SIG_IGN and number in {signal.SIGHUP, signal.SIGQUIT}
            if ignored:
                loop.add_signal_handler(number, _nothing)
            elif number is not signal.SIGQUIT:
                loop.add_signal_handler(number, self._leave.set)
        config = self._options.config
        durability = "power" if config is None else config.deck.durability
        log_room = None if config is None else config.logs
        state_dir, elsewhere = self._options.state_dir, self._options.elsewhere
        if elsewhere is None:
            uids = None if config is None or config.deck.auto_uids is UNSET else config.deck.auto_uids
            people = self._options.people
            deck = AsyncDeck(state_dir, durability=durability, people=people, log_room=log_room, auto_uids=uids)
        else:
            make_state_dir(state_dir)
            deck = AsyncDeck(elsewhere, home=state_dir)
        await deck.open()
        reaping = asyncio.ensure_future(_reap_orphans()) if self._is_init else None
        try:
            await self._own(deck)
        finally:
            # As PID 1 our end is the end of everybody in the container: so all are stopped politely first.
            await deck.close(everybody=self._is_init)
            if reaping is not None:
                reaping.cancel()
        return self._outcome()

    def _outcome(self) -> int:
        """The exit code: 1 if somebody lives on who should not."""
        if self._options.elsewhere is not None:
            return 0
        left = [
            one
            for one in peek(self._options.state_dir).workers
            if one.pid and (self._is_init or one.lifetime == "bound")
        ]
        if left:
            _log.error("could not be stopped: %s", _named(left))
        return 1 if left else 0

    async def _own(self, deck: AsyncDeck) -> None:
        deck.on_event(_log_event)
        door, fresh_token = self._door(deck.state_dir)
        services = Services(deck, datetime.now(UTC), door, self._sample_seconds())
        services.preflight = lambda: asyncio.ensure_future(fitness.preflight())
        front = HttpFront(create_app(services, self._hosts(), self._options.public_url), self._options.people)
        services.connections = lambda: front.connections
        notifying: asyncio.Task[None] | None = None
        try:
            await self._listen(front, deck.state_dir)
            services.page = None if self._address is None else self._base_url()
            await self._apply(deck)
            notifying = self._notifying(deck)
            link = await self._say_ready(deck, fresh_token)
            self._options.ready(link)
            asyncio.get_running_loop().call_later(_SETTLED_SECONDS, _settle)
            if await self._reload_or_leave(services):
                await self._reexec(deck, services, front)
            child.notify("STOPPING=1")
            await self._say_leaving(deck)
        finally:
            if notifying is not None:
                notifying.cancel()
                await asyncio.gather(notifying, return_exceptions=True)
            services.close()
            await front.close()

    def _notifying(self, deck: AsyncDeck) -> "asyncio.Task[None] | None":
        config = self._options.config
        if config is None or config.notify is None:
            return None
        from everdeck.server.notifying import Notifier  # noqa: PLC0415 - loaded only where somebody is to be told

        task = asyncio.ensure_future(Notifier(deck, config.notify).run())
        task.add_done_callback(_say_why_it_ended)
        return task

    def _door(self, state_dir: Path) -> tuple[Door | None, str | None]:
        if self._address is None:
            return None, None
        token, fresh = token_of(state_dir)
        return Door(state_dir), token if fresh else None

    def _sample_seconds(self) -> float | None:
        """How often everybody is sampled; by itself only where somebody may look at it later."""
        return self._options.sample_seconds or (None if self._address is None else RECORD_SECONDS)

    def _hosts(self) -> Iterable[str]:
        named = () if self._address is None else (self._address[0],)
        return {*named, *self._options.hosts}

    async def _listen(self, front: HttpFront, state_dir: Path) -> None:
        lent = self._carried.get("lent", ())
        connected = self._carried.get("unix_connected", ())
        await front.listen_unix(state_dir, self._carried.get("unix"), connected, lent="unix" in lent)
        if self._address is not None:
            tls = fitness.tls_of(self._options)
            if "tcp" in lent:
                self._address = _address_of(self._carried["tcp"], self._options)
            host, port = self._address
            try:
                connected = self._carried.get("tcp_connected", ())
                self._address = await front.listen_tcp(host, port, tls, self._carried.get("tcp"), connected)
            except DeckError as error:
                # Nobody asked for the usual port, so another deck that has it is no reason to refuse.
                if self._options.listen_was_asked_for:
                    raise
                self._address = await front.listen_tcp(host, 0, tls)
                _log.info("%s; taking port %d", error, self._address[1])

    async def _apply(self, deck: AsyncDeck) -> None:
        config = self._options.config
        if config is None:
            return
        workers = config.workers
        if self._options.elsewhere is not None:
            deck.configure(said_for_kubernetes(config))
            workers = applying.in_the_image(workers, config.path)
        applied = await applying.apply(deck, ApplyRequest(workers, config.templates, config.path), again=True)
        for line in summary(applied):
            _log.info("%s", line)
        config.workers.clear()  # the deck knows them now; a second copy of thousands of specs helps nobody

    async def _say_ready(self, deck: AsyncDeck, fresh_token: str | None) -> str:
        statuses = await deck.glance()
        alive = sum(status.state.is_live for status in statuses)
        child.notify("READY=1", f"MAINPID={os.getpid()}", f"STATUS=supervising {alive} of {len(statuses)} workers")
        told = "supervising" if deck.is_here else "serving"
        _log.info("%s %d of %d workers in %s (pid %d)", told, alive, len(statuses), deck.where, os.getpid())
        if not deck.is_here:
            _log.info("SIGTERM ends this daemon; the workers are the cluster's and run on")
        elif self._is_init:
            longest = max([(await deck.spec(one.name)).stop.grace_seconds for one in statuses], default=5)
            _log.info(
                "this is PID 1: SIGTERM stops every worker, which may take %g s; give the container longer than that",
                longest,
            )
        else:
            _log.info("SIGTERM stops bound workers; adoptable ones run on and the next `everdeck up` takes them over")
        if self._address is None:
            return ""
        base = self._base_url()
        if fresh_token is None:
            _log.info("the page is at %s (log in with the token in %s)", base, StateDir(deck.state_dir).token)
            return base
        link = login_link(base, fresh_token)
        if self._out.isatty():
            print(f"The page, shown once with its token: {link}", file=self._out, flush=True)
        else:
            # Whatever is printed there is kept and may be read by others; a token is not for keeping in a log.
            _log.info("the page is at %s; the token for the login is in %s", base, StateDir(deck.state_dir).token)
        return link

    def _base_url(self) -> str:
        assert self._address is not None  # noqa: S101 - asked only when TCP is served
        if self._options.public_url is not None:
            return f"{self._options.public_url.rstrip('/')}/"
        host, port = self._address
        wildcard = host in {"0.0.0.0", "::"}  # noqa: S104 - nobody can call us by that; this machine's own name will do
        shown = "localhost" if wildcard else f"[{host}]" if ":" in host else host
        scheme = "https" if self._options.tls_cert else "http"
        return f"{scheme}://{shown}:{port}/"

    async def _reload_or_leave(self, services: Services) -> bool:
        """True when the program is to be replaced, False when it is to end."""
        waits = {
            asyncio.ensure_future(self._leave.wait()),
            asyncio.ensure_future(services.leave_wanted.wait()),
            reload := asyncio.ensure_future(services.reload_wanted.wait()),
        }
        pings = asyncio.ensure_future(_watchdog())
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in (*waits, pings):
                wait.cancel()
        return reload in done and not self._leave.is_set() and not services.leave_wanted.is_set()

    async def _reexec(self, deck: AsyncDeck, services: Services, front: HttpFront) -> NoReturn:
        child.notify("RELOADING=1", f"MONOTONIC_USEC={_monotonic_usec()}")
        services.close()
        carried: dict[str, Any] = {
            **await front.handover(),
            "umask": self._umask,
            "open_files": self._open_files,
            "lent": self._carried.get("lent", []),
        }
        _log.info("continuing as pid %d with the installed code", os.getpid())
        logging.shutdown()
        self._out.flush()
        kept = deck.prepare_reexec() if deck.is_here else {}
        environment = {**os.environ, **kept, REEXEC_ENV: json.dumps(carried)}
        environment[TYPED_IN_ENV] = str(Path.cwd())
        words = fitness.next_image()
        os.chdir("/")
        os.execve(sys.executable, words, environment)  # noqa: S606 - replacing the program is the point

    async def _say_leaving(self, deck: AsyncDeck) -> None:
        if not deck.is_here:
            self._say("leaving; the workers are the cluster's and run on")
            return
        statuses = [status for status in await deck.glance() if status.state.is_live]
        bound = [status for status in statuses if status.lifetime == "bound"]
        left = [status for status in statuses if status.lifetime == "adoptable"]
        if self._is_init:
            self._say(f"stopping {len(statuses)}: {_named(statuses)}")
            return
        if bound:
            self._say(f"stopping {len(bound)} bound: {_named(bound)}")
        if left:
            self._say(f"left running {len(left)} adoptable: {_named(left)}")
            self._say("they are not supervised now; `everdeck up` takes them over again")

    def _say(self, text: str) -> None:
        _log.info("%s", text)


def login_link(base: str, token: str) -> str:
    """The link that logs a browser in. Behind the ``#`` the token stays in the browser: no proxy and no log sees it."""
    return f"{base}login#token={token}"


def summary(applied: Applied) -> list[str]:
    """A plan in words: one line per change, and a last one that counts."""
    signs = {"add": "+", "change": "~", "remove": "-"}
    lines = []
    for change in applied.plan:
        if change.action in signs:
            fields = f" ({', '.join(change.fields)})" if change.fields else ""
            lines.append(f"{signs[change.action]} {change.name}{fields}")
    lines += [f"! {result.name}: {result.problem.detail}" for result in applied.results if result.problem is not None]
    counts = {action: sum(change.action == action for change in applied.plan) for action in (*signs, "unchanged")}
    lines.append(
        ", ".join(
            f"{count} to {action}" if action in signs else f"{count} {action}" for action, count in counts.items()
        )
    )
    return lines


# --- PID 1 ------------------------------------------------------------------------------------------------------


async def _reap_orphans() -> None:
    """As PID 1: reap the dead whom nobody waits for. Whoever is ours is reaped within a second by whoever waits."""
    died = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, died.set)
    died.set()  # an image before us may have left some
    suspects: set[int] = set()
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ORPHAN_SECONDS if suspects else None):
                await died.wait()
        died.clear()
        await asyncio.sleep(_ORPHAN_SECONDS)  # noqa: TID251 - to see who stays dead there is only time
        dead = orphans.dead_strangers()
        for pid in dead & suspects:
            orphans.reap(pid)
        suspects = dead - suspects


# --- what is said -----------------------------------------------------------------------------------------------


def _say_why_it_ended(notifying: "asyncio.Task[None]") -> None:
    if not notifying.cancelled() and (error := notifying.exception()) is not None:
        _log.error("nobody is notified any more: %s", error)


def _named(statuses: list[WorkerStatus]) -> str:
    shown = ", ".join(f"{status.name} (pid {status.pid})" for status in statuses[:20])
    more = len(statuses) - 20
    return f"{shown} and {more} more" if more > 0 else shown


def _log_event(event: Event) -> None:
    told = wording.detail(event.detail)
    _log.info(
        "%s",
        f"{event.worker or 'deck'}: {event.kind}{f' ({told})' if told else ''}",
        extra={"event": {"id": event.id, "worker": event.worker, "kind": event.kind.value, "detail": event.detail}},
    )


def _configure_logging(log_format: str, log_file: Path | None, access_log: str | None) -> None:
    handler: logging.Handler
    handler = logging.StreamHandler(sys.stderr) if log_file is None else _own_log(log_file)
    colour = log_file is None and sys.stderr.isatty()
    handler.setFormatter(_JsonLines() if log_format == "json" else _ForPeople(colour=colour))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("everdeck").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    requests = logging.getLogger("everdeck.access")
    requests.propagate = False
    requests.setLevel(logging.CRITICAL if access_log is None else logging.INFO)
    if access_log is not None:
        requests.handlers[:] = [logging.StreamHandler(sys.stderr) if access_log == "-" else _own_log(Path(access_log))]


def _own_log(path: Path) -> logging.Handler:
    from everdeck.server.ownlog import OwnLog  # noqa: PLC0415 - most daemons have a terminal, a journal or a container

    return OwnLog(path)


class _ForPeople(logging.Formatter):
    """``20:41:03  alice: started (pid 412)``; under systemd without the time, which the journal has."""

    def __init__(self, *, colour: bool) -> None:
        stamp = "" if os.environ.get("JOURNAL_STREAM") else "%(asctime)s  "
        super().__init__(f"{stamp}%(message)s", datefmt="%H:%M:%S")
        self._colour = colour

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """What workers and strangers chose is shown, not carried out by the terminal that reads the log."""
        record.message = wording.plain(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        if self._colour and record.levelno >= logging.WARNING:
            return f"\x1b[31m{text}\x1b[0m"
        return text


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if (event := getattr(record, "event", None)) is not None:
            line["event"] = event
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _monotonic_usec() -> int:
    import time  # noqa: PLC0415 - one use, at a reload

    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


async def _watchdog() -> None:
    """Tell our own supervisor that the loop turns, if it asked for that (WATCHDOG_USEC); else do nothing."""
    if child.watchdog_seconds() is not None:
        await child.watchdog_pings()


def _nothing() -> None:
    """A signal that we were started to ignore."""
