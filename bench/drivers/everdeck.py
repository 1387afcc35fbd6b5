"""Everdeck, measured as a library (async and synchronous) and as a daemon."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from bench.drivers.driver import Driver, Kind, Span, wait_until
from bench.drivers.hosted import Hosted
from bench.plan import Plan


class Library(Hosted):
    """``AsyncDeck`` in a process of its own, all guarantees on."""

    name = "everdeck"
    kind: ClassVar[Kind] = "library"
    about = "`AsyncDeck`, `start_many` and `stop_all`, defaults but `backoff_seconds=0`"
    host = "deck_host"
    adopts = True
    keeps_logs = True

    def output(self, name: str) -> bytes:
        """Its archives and the current file, put together by its own reader."""
        return worker_output(self.plan, name)


class OtherStart(Library):
    """A deck of which only the start differs, so only that is measured."""

    restarts = False
    adopts = False
    keeps_logs = False


class OneByOne(OtherStart):
    """``AsyncDeck``, one start after another, each with its own two commits."""

    name = "everdeck-each"
    about = "`AsyncDeck`, one `await deck.start(…)` after another"

    def __init__(self, plan: Plan) -> None:
        super().__init__(replace(plan, options={"BENCH_START": "each"}))


class OneByOneUnsynced(OtherStart):
    """The same without a wait for the disk after each of them."""

    name = "everdeck-each-process"
    about = '`AsyncDeck` with `durability="process"`, one `await deck.start(…)` after another'

    def __init__(self, plan: Plan) -> None:
        super().__init__(replace(plan, options={"BENCH_START": "each", "BENCH_DURABILITY": "process"}))


class Pure(OtherStart):
    """``AsyncDeck`` as it is installed where there is no compiler."""

    name = "everdeck-pure"
    about = "`AsyncDeck` without the C side (`EVERDECK_NATIVE=0`): `posix_spawn` of the C library"

    def __init__(self, plan: Plan) -> None:
        super().__init__(replace(plan, options={"EVERDECK_NATIVE": "0"}))


class Facade(Library):
    """``Deck``, the synchronous facade."""

    name = "everdeck-sync"
    about = "`Deck`, the synchronous facade, one `deck.start(…)` after another"

    def __init__(self, plan: Plan) -> None:
        super().__init__(replace(plan, options={"BENCH_DECK": "facade"}))


class Daemon(Driver):
    """``everdeck up``, asked over its socket."""

    name = "everdeck-daemon"
    kind: ClassVar[Kind] = "daemon"
    about = "`everdeck up`; one `apply` with all workers over `deck.sock`; one request to stop all"
    adopts = True
    keeps_logs = True

    def up(self) -> None:
        """Start the daemon and wait until it answers."""
        from everdeck import client  # noqa: PLC0415 - the harness works, for peers, without the daemon's parts

        state = self.plan.directory / "state"
        self.launch([Path(sys.executable).with_name("everdeck"), "--state", state, "up", "--listen", "127.0.0.1:0"])
        self._client = client.Daemon(state, timeout_seconds=300)
        wait_until(self._answers, "the daemon's socket", 60)

    def start(self) -> Span:
        """One request for all, as ``everdeck apply`` sends it."""
        fields: dict[str, Any] = {
            "restart": {"policy": "on-failure", "backoff_seconds": 0},
            "stop": {"grace_seconds": self.plan.grace_seconds},
            "log": {"max_bytes": self.plan.log_bytes, "keep": self.plan.log_keep},
        }
        workers = {worker.name: {"command": worker.command, **fields} for worker in self.plan.workers}
        begin_ns = time.monotonic_ns()
        self._client.document("POST", "/api/v1/apply", {"workers": workers})
        span = Span(begin_ns, time.monotonic_ns())
        self._client.close()  # as a command would; a connection left open is closed by the server seconds later
        return span

    def stop(self) -> Span:
        """One request for all."""
        begin_ns = time.monotonic_ns()
        self._client.document("POST", "/api/v1/bulk", {"verb": "stop", "names": "all"})
        return Span(begin_ns, time.monotonic_ns())

    def reopen(self) -> Span:
        """From launching the daemon until it answers; opening is recovering, so by then it knows its workers."""
        begin_ns = time.monotonic_ns()
        self.up()
        return Span(begin_ns, time.monotonic_ns())

    def output(self, name: str) -> bytes:
        """Its archives and the current file, put together by its own reader."""
        return worker_output(self.plan, name)

    def _answers(self) -> bool:
        from everdeck.errors import EverdeckError  # noqa: PLC0415 - as above

        try:
            self._client.document("GET", "/healthz")
        except (OSError, EverdeckError):
            return False
        return True


def worker_output(plan: Plan, name: str) -> bytes:
    """Everything below a worker's ``log/``, in order: archives break at disk blocks, not at lines."""
    from everdeck.logs.reader import raw  # noqa: PLC0415 - as above

    return b"".join(raw(plan.directory / "state" / "workers" / name / "log"))
