"""Is a worker ready, and is it still well? What it says itself, and what we ask it.

:class:`HealthState` and the ``after_…`` functions decide, without a clock or a process; :class:`HealthKeeper` waits
and asks: datagrams of systemd's notify protocol, HTTP, TCP and command checks, the start timeout and the watchdog.
It tells the deck by callbacks and acts on nobody itself.

A worker without a health spec costs nothing here: no task, no timer, no wake-up. A watchdog costs one timer,
moved when it fires and not at each ping.

Nobody is judged by what we could not hear. Silence counts only while we listened (:mod:`everdeck.deck.attention`), what
is waiting in the socket is heard first, and a worker that was started under an earlier owner counts from the first word
that reaches this one: a client that connected to the socket of the owner before speaks to nobody.

HTTP is asked with ``http.client`` in a small pool of threads: the standard library's own implementation, TLS
included, bounded by a deadline from the outside. A client on asyncio streams would be a second, hand-written one;
an async client library would be a dependency of the core for one GET of a few bytes.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from everdeck import wording
from everdeck.child import EVENT_FIELD, LIFELINE_FD_ENV, PORT_ENV
from everdeck.clock import Clock
from everdeck.deck import reaching
from everdeck.deck.attention import Attention
from everdeck.deck.naming import Address, Names
from everdeck.errors import EverdeckError
from everdeck.kernel import exits
from everdeck.kernel.birth import Birth
from everdeck.kernel.spawn import Child, kill_group, spawn
from everdeck.model import Exited, Health

_HTTP_THREADS: Final = 16
_FIRST_ASK_SECONDS: Final = 0.05
_OUTPUT_BYTES: Final = 200
_STATUS_LETTERS: Final = 500
_LONGEST_EXTENSION: Final = 86_400.0
_GOOD_STATUS: Final = range(200, 400)


def _plainly() -> AbstractContextManager[Birth]:
    """With our own rights, for a worker that has them too."""
    return contextlib.nullcontext(Birth())


# --- decisions --------------------------------------------------------------------------------------------------


class Phase(StrEnum):
    """What the deck shows as a worker's health."""

    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class HealthState(Struct, frozen=True):
    """One worker's health, as far as it is known."""

    phase: Phase = Phase.STARTING
    failures_in_a_row: int = 0
    leaving: bool = False


class BecameReady(Struct, frozen=True):
    """Said or shown for the first time that it works."""


class BecameUnhealthy(Struct, frozen=True):
    """Took too long to start, failed too often, or fell silent."""

    reason: str


class BecameHealthy(Struct, frozen=True):
    """Works again."""


Verdict: TypeAlias = BecameReady | BecameUnhealthy | BecameHealthy


def after_good_sign(state: HealthState) -> tuple[HealthState, Verdict | None]:
    """A check passed, ``READY=1`` or a ping came."""
    well = replace(state, phase=Phase.HEALTHY, failures_in_a_row=0)
    match state.phase:
        case Phase.STARTING:
            return well, BecameReady()
        case Phase.UNHEALTHY:
            return well, BecameHealthy()
        case Phase.HEALTHY:
            return well, None


def after_failed_check(state: HealthState, health: Health, reason: str) -> tuple[HealthState, Verdict | None]:
    """A check failed. While it starts, only the start timeout counts; a worker that is leaving may fail."""
    if state.phase is Phase.STARTING or state.leaving:
        return state, None
    failed = replace(state, failures_in_a_row=state.failures_in_a_row + 1)
    if failed.failures_in_a_row < health.failures:
        return failed, None
    return after_silence(failed, f"{failed.failures_in_a_row} failed checks in a row: {reason}")


def after_silence(state: HealthState, reason: str) -> tuple[HealthState, Verdict | None]:
    """A deadline passed, or the failures are enough. Said once, until it is well again."""
    if state.phase is Phase.UNHEALTHY or state.leaving:
        return state, None
    return replace(state, phase=Phase.UNHEALTHY), BecameUnhealthy(reason)


# --- the keeper -------------------------------------------------------------------------------------------------


class _Watched(Struct, eq=False):
    """One worker that has a health spec, and what runs for it."""

    health: Health
    state: HealthState
    timers: dict[str, asyncio.TimerHandle] = {}
    start_deadline: float = 0.0
    last_ping: float = 0.0
    reason: str | None = None
    unheard: bool = False  # of an earlier owner, and nothing it said has reached us yet
    checks: asyncio.Task[None] | None = None


class HealthKeeper:
    """Keeps watch over the workers of a deck. Everything happens in the loop that :meth:`open` was called in."""

    def __init__(
        self,
        on_ready: Callable[[str], None],
        on_unhealthy: Callable[[str, str], None],
        on_healthy: Callable[[str], None],
        on_status: Callable[[str, str], None],
        on_event: Callable[[str, dict[str, Any]], None],
        *,
        hear: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self._on_ready = on_ready
        self._on_unhealthy = on_unhealthy
        self._on_healthy = on_healthy
        self._on_status = on_status
        self._on_event = on_event
        self._hear = hear
        self._clock = clock or Clock()
        self._attention: Attention | None = None
        self._watched: dict[str, _Watched] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._names = Names()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Take the running loop."""
        self._loop = asyncio.get_running_loop()
        self._attention = Attention(self._loop, self._clock)

    def watch(
        self,
        name: str,
        health: Health,
        *,
        port: int | None,
        env: Mapping[str, str],
        cwd: str,
        already_ready: bool,
        heard_by_another: bool = False,
        born: Callable[[], AbstractContextManager[Birth]] = _plainly,
    ) -> None:
        """Watch over a worker that was just started, or adopted (``already_ready``); a second watch replaces the first.

        ``env`` and ``cwd`` are the worker's own; a command check runs with them, with PATH and with PORT. It is the
        worker's program in the worker's directory, so it is ``born`` with the worker's rights: its account, its cgroup.
        With ``heard_by_another`` it was started when another socket of ours was listening.
        """
        self.unwatch(name)
        loop = self._running_loop()
        state = HealthState(Phase.HEALTHY if already_ready else Phase.STARTING)
        watched = self._watched[name] = _Watched(health, state, last_ping=loop.time())
        speaks = health.notify or health.watchdog_seconds is not None
        watched.unheard = heard_by_another and speaks
        ask = self._question(health, port, env, cwd, born)
        if ask is not None:
            watched.checks = loop.create_task(self._keep_asking(name, watched, ask), name=f"health of {name}")
        if already_ready:
            if not watched.unheard:
                self._arm_watchdog(name, watched)
        elif ask is None and not health.notify:
            # A watchdog alone: nothing says "ready", so it is when it runs. Not from inside watch(): the caller
            # has not finished starting it.
            watched.timers["ready"] = loop.call_later(0, self._good_sign, name, watched)
        else:
            watched.start_deadline = loop.time() + health.start_timeout_seconds
            if ask is not None or not watched.unheard:
                self._arm_start_timeout(name, watched)

    def unwatch(self, name: str) -> None:
        """Forget a worker: it ended, or is being stopped."""
        watched = self._watched.pop(name, None)
        if watched is None:
            return
        for timer in watched.timers.values():
            timer.cancel()
        if not self._watched:
            self._listening().end()
        if watched.checks is not None:
            # A check in flight is cancelled; close() waits for those that clean up after themselves.
            watched.checks.cancel()
            self._ending.add(watched.checks)
            watched.checks.add_done_callback(self._ending.discard)

    def notified(self, name: str, fields: dict[str, str]) -> None:
        """Take note of a datagram that is known to come from this worker; of one that is not watched, none.

        What a worker without a health spec says needs no keeper: the deck hears it by itself.
        """
        watched = self._watched.get(name)
        if watched is None:
            return
        self._is_heard(name, watched)
        if (status := fields.get("STATUS")) is not None:
            self._on_status(name, status[:_STATUS_LETTERS])
        if (event := _event(fields)) is not None:
            self._on_event(name, event)
        if fields.get("STOPPING") == "1":
            watched.state = replace(watched.state, leaving=True)
        if (microseconds := fields.get("EXTEND_TIMEOUT_USEC", "")).isdecimal():
            # A worker's word: as many digits as it likes, but no more time than a spec could ask for.
            extended = self._running_loop().time() + min(int(microseconds[:18]) / 1_000_000, _LONGEST_EXTENSION)
            watched.start_deadline = max(watched.start_deadline, extended)
        said_ready = fields.get("READY") == "1" and watched.state.phase is Phase.STARTING
        if said_ready:
            self._good_sign(name, watched)
        self._heard_watchdog(name, watched, fields.get("WATCHDOG"))

    def summary(self, name: str) -> str | None:
        """``healthy``, ``unhealthy`` or ``starting``; None for a worker without health checks."""
        watched = self._watched.get(name)
        return None if watched is None else str(watched.state.phase)

    def signs(self) -> tuple[object, ...]:
        """All that :meth:`summary` and :meth:`reason` would tell, to compare with later."""
        return tuple([(watched.state.phase, watched.reason) for watched in self._watched.values()])

    def reason(self, name: str) -> str | None:
        """Why it is not well, or the last answer of a check that has not passed yet."""
        watched = self._watched.get(name)
        return None if watched is None else watched.reason

    async def close(self) -> None:
        """Stop asking, and wait until every check that is in flight has cleaned up."""
        for name in list(self._watched):
            self.unwatch(name)
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._threads is not None:
            # Their sockets were shut down, so they leave at once; only one that is still connecting takes its timeout.
            threads, self._threads = self._threads, None
            await asyncio.to_thread(threads.shutdown, wait=True, cancel_futures=True)

    # What a sign means, and who is told.

    def _is_heard(self, name: str, watched: _Watched) -> None:
        """A word of it reached us, so the next ones can too: from here on its silence counts."""
        if watched.unheard:
            watched.unheard = False
            watched.last_ping = self._running_loop().time()
            if watched.state.phase is Phase.STARTING and "start" not in watched.timers:
                watched.start_deadline = watched.last_ping + watched.health.start_timeout_seconds
                self._arm_start_timeout(name, watched)
            elif watched.state.phase is not Phase.STARTING:
                self._arm_watchdog(name, watched)

    def _good_sign(self, name: str, watched: _Watched) -> None:
        watched.reason = None
        watched.state, verdict = after_good_sign(watched.state)
        self._tell(name, watched, verdict)

    def _bad_sign(self, name: str, watched: _Watched, reason: str) -> None:
        watched.reason = reason
        watched.state, verdict = after_silence(watched.state, reason)
        self._tell(name, watched, verdict)

    def _tell(self, name: str, watched: _Watched, verdict: Verdict | None) -> None:
        if verdict is None or self._watched.get(name) is not watched:
            return
        match verdict:
            case BecameReady():
                if (timer := watched.timers.pop("start", None)) is not None:
                    timer.cancel()
                watched.last_ping = self._running_loop().time()
                self._arm_watchdog(name, watched)
                self._on_ready(name)
            case BecameHealthy():
                self._on_healthy(name)
            case BecameUnhealthy(reason):
                watched.reason = reason
                self._on_unhealthy(name, reason)

    # Deadlines.

    def _arm_start_timeout(self, name: str, watched: _Watched) -> None:
        self._listening().begin(watched.health.start_timeout_seconds)
        watched.timers["start"] = self._running_loop().call_at(
            watched.start_deadline, self._start_timeout, name, watched
        )

    def _start_timeout(self, name: str, watched: _Watched) -> None:
        self._hear()
        if self._watched.get(name) is not watched or "start" not in watched.timers:
            return  # what was waiting in the socket said that it is ready, or that it leaves
        now, listening_since = self._running_loop().time(), self._listening().look()
        if listening_since > watched.start_deadline - watched.health.start_timeout_seconds:
            # We were away in between: what it may have said meanwhile, it can say within what is left to any new one.
            watched.start_deadline = max(watched.start_deadline, listening_since + watched.health.start_timeout_seconds)
        if now < watched.start_deadline:  # or it asked for more time
            self._arm_start_timeout(name, watched)
            return
        answer = f": {watched.reason}" if watched.reason else ""
        self._bad_sign(name, watched, f"not ready after {watched.health.start_timeout_seconds:g} s{answer}")

    def _arm_watchdog(self, name: str, watched: _Watched) -> None:
        if watched.health.watchdog_seconds is not None:
            self._listening().begin(watched.health.watchdog_seconds)
            if (timer := watched.timers.get("watchdog")) is not None:
                timer.cancel()
            due = watched.last_ping + watched.health.watchdog_seconds
            watched.timers["watchdog"] = self._running_loop().call_at(due, self._watchdog_due, name, watched)

    def _watchdog_due(self, name: str, watched: _Watched) -> None:
        seconds = watched.health.watchdog_seconds
        if seconds is None:
            return
        self._hear()
        watched.last_ping = max(watched.last_ping, self._listening().look())
        if self._watched.get(name) is not watched or "watchdog" not in watched.timers:
            return  # what was waiting in the socket ended it
        if self._running_loop().time() >= watched.last_ping + seconds:
            del watched.timers["watchdog"]
            self._bad_sign(name, watched, f"no watchdog ping for {seconds:g} s")
        else:  # pings came since; the timer moves now and not at each of them
            self._arm_watchdog(name, watched)

    def _heard_watchdog(self, name: str, watched: _Watched, word: str | None) -> None:
        if watched.health.watchdog_seconds is None:
            return
        if word == "trigger":
            self._bad_sign(name, watched, "the worker reported itself as hung (WATCHDOG=trigger)")
        elif word == "1":
            watched.last_ping = self._running_loop().time()
            # A ping says that it lives again, but not that its checks pass.
            if watched.state.phase is Phase.UNHEALTHY and watched.checks is None:
                self._good_sign(name, watched)
            if watched.state.phase is not Phase.STARTING and "watchdog" not in watched.timers:
                self._arm_watchdog(name, watched)

    # Questions.

    def _question(
        self,
        health: Health,
        port: int | None,
        env: Mapping[str, str],
        cwd: str,
        born: Callable[[], AbstractContextManager[Birth]],
    ) -> "Callable[[], Awaitable[str | None]] | None":
        """The check as a coroutine function that answers None, or why it failed; None if there is none to ask."""
        number = "" if port is None else str(port)
        if health.http is not None:
            url = health.http.replace("$PORT", number)
            return lambda: self._ask_http(url, health.timeout_seconds)
        if health.tcp is not None:
            host, _, tcp_port = health.tcp.replace("$PORT", number).rpartition(":")
            return lambda: self._ask_tcp(host.strip("[]"), tcp_port, health.timeout_seconds)
        if health.command is not None:
            command = health.command
            its_env = {key: value for key, value in env.items() if key != LIFELINE_FD_ENV}
            its_env.setdefault("PATH", os.environ.get("PATH", os.defpath))
            if port is not None:
                its_env.setdefault(PORT_ENV, number)
            return lambda: _ask_command(command, its_env, cwd, health.timeout_seconds, born)
        return None

    async def _keep_asking(self, name: str, watched: _Watched, ask: Callable[[], Awaitable[str | None]]) -> None:
        health = watched.health
        pause = min(_FIRST_ASK_SECONDS, health.interval_seconds)
        while True:
            # The next question is due by the clock; there is no fact to wait for.
            await asyncio.sleep(pause)  # noqa: TID251 - see above
            if watched.state.phase is Phase.STARTING:
                pause = min(pause * 2, health.interval_seconds)
            else:
                pause = health.interval_seconds
            if health.notify and watched.state.phase is Phase.STARTING:
                continue  # it will say itself when it is worth asking
            breaks = self._listening().breaks
            trouble = await ask()
            if self._watched.get(name) is not watched:
                return
            self._listening().look()
            if trouble is not None and self._listening().breaks != breaks:
                continue  # we were away while it may have answered
            watched.reason = trouble if watched.state.phase is Phase.STARTING else watched.reason
            if trouble is None:
                self._good_sign(name, watched)
            else:
                watched.state, verdict = after_failed_check(watched.state, health, trouble)
                self._tell(name, watched, verdict)

    async def _ask_http(self, url: str, timeout_seconds: float) -> str | None:
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(_HTTP_THREADS, "everdeck-health")
        asking = _HttpQuestion(url, timeout_seconds)
        try:
            async with asyncio.timeout(timeout_seconds):
                addresses = await self._names.addresses(asking.host, asking.port)
                answer = self._running_loop().run_in_executor(self._threads, asking.answer, addresses)
                answer.add_done_callback(lambda done: done.cancelled() or done.exception())
                return await asyncio.shield(answer)
        except TimeoutError:
            return f"GET {url}: no answer within {timeout_seconds:g} s"
        except OSError as err:
            return f"GET {url}: {err.strerror or err}"
        finally:
            asking.give_up()  # a server that drips its answer byte by byte must not keep the thread

    async def _ask_tcp(self, host: str, port: str, timeout_seconds: float) -> str | None:
        failed = OSError("it has no address")
        if not port.isdecimal():
            return f"connect {host}:{port}: not a port"
        try:
            async with asyncio.timeout(timeout_seconds):
                for _, address in await self._names.addresses(host, int(port)):
                    try:
                        _, writer = await asyncio.open_connection(*address[:2])
                    except OSError as err:
                        failed = err
                        continue
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
                    return None
        except TimeoutError:
            return f"connect {host}:{port}: no answer within {timeout_seconds:g} s"
        except OSError as err:
            failed = err
        return f"connect {host}:{port}: {failed.strerror or failed}"

    def _listening(self) -> Attention:
        if self._attention is None:
            raise RuntimeError("HealthKeeper.open() was not called")
        return self._attention

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("HealthKeeper.open() was not called")
        return self._loop


# --- one question each; the answer is None, or why it failed ----------------------------------------------------


class _HttpQuestion:
    """One GET of which only the status matters."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        import http.client  # noqa: PLC0415 - a megabyte with all that it loads, for those who ask by HTTP

        self._url = url
        self._failures = (OSError, http.client.HTTPException)
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._timeout_seconds = timeout_seconds
        self._connection = (
            http.client.HTTPConnection(self.host, parts.port, timeout=timeout_seconds)
            if self._tls is None
            else http.client.HTTPSConnection(self.host, parts.port, timeout=timeout_seconds, context=self._tls)
        )
        self.port = self._connection.port

    def answer(self, addresses: list[Address]) -> str | None:
        """Runs in a thread. The name was looked up before, because that may take longer than a thread has."""
        try:
            self._connection.sock = self._connected(addresses)
            self._connection.request("GET", self._target, headers={"User-Agent": "everdeck", "Connection": "close"})
            status = self._connection.getresponse().status
        except self._failures as err:
            return f"GET {self._url}: {err or type(err).__name__}"
        finally:
            self._connection.close()
        return None if status in _GOOD_STATUS else f"HTTP {status} from {self._url}"

    def _connected(self, addresses: list[Address]) -> socket.socket:
        failed = OSError("it has no address")
        for family, address in addresses:
            plain = socket.socket(family, socket.SOCK_STREAM)
            plain.settimeout(self._timeout_seconds)
            try:
                plain.connect(address)
                return plain if self._tls is None else self._tls.wrap_socket(plain, server_hostname=self.host)
            except OSError as err:
                plain.close()
                failed = err
        raise failed

    def give_up(self) -> None:
        """Wake the thread if it still waits for the socket."""
        waiting = self._connection.sock
        if waiting is not None:
            with contextlib.suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)


async def _ask_command(
    command: tuple[str, ...],
    env: Mapping[str, str],
    cwd: str,
    timeout_seconds: float,
    born: Callable[[], AbstractContextManager[Birth]],
) -> str | None:
    """Run it, and let nothing of its process group stay behind, whatever happens."""
    output = os.memfd_create("everdeck-health")
    try:
        # Its program may lie on another file system than the worker's, and that one may hang.
        if paths := reaching.to_ask_about(command, cwd):
            await reaching.reached(paths, command[0])
        with born() as birth, open(os.devnull, "rb") as nothing:  # noqa: PTH123, ASYNC230 - /dev/null does not block
            stdin_fd = nothing.fileno()
            check = spawn(command, env=env, cwd=cwd, stdin_fd=stdin_fd, stdout_fd=output, stderr_fd=output, birth=birth)
        try:
            async with asyncio.timeout(timeout_seconds):
                await _readable(check.pidfd)
        except TimeoutError:
            return f"{command[0]}: no answer within {timeout_seconds:g} s"
        finally:
            ended = await _cleared_away(check)
        if ended == Exited(0):
            return None
        said = wording.plain(os.pread(output, _OUTPUT_BYTES, 0).decode("utf-8", "replace").strip())
        return f"{command[0]}: {ended}" + (f": {said}" if said else "")
    except EverdeckError as err:  # an account that is gone, a cgroup that refuses it: then it is not asked at all
        return str(err)
    finally:
        os.close(output)


async def _cleared_away(check: Child) -> object:
    """Kill the group of the check, its leader included, and reap the leader. SIGKILL needs no second word."""
    try:
        kill_group(check)
        await _readable(check.pidfd)
        return exits.reap_child(check.pidfd)
    finally:
        os.close(check.pidfd)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    fact = asyncio.Event()
    loop.add_reader(fd, fact.set)
    try:
        await fact.wait()
    finally:
        loop.remove_reader(fd)


def _event(fields: dict[str, str]) -> dict[str, Any] | None:
    """The worker's own event, if it is one: a JSON object. Anything else is not worth more than silence."""
    try:
        event = json.loads(fields.get(EVENT_FIELD, ""))
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
