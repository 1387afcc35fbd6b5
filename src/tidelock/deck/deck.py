"""The deck: verbs on workers, and the one loop that keeps them as they should be.

Opening a deck is recovering a deck; there is no other way to start, and no clean shutdown that anything relies on.
Every verb records its intent, acts, and records the outcome; between the steps stand the crash points. The kernel
is asked, never remembered: what the registry says about a process is believed only after its identity was compared.

Verbs on one worker take turns; verbs on different workers do not wait for each other. Nothing here polls: deaths
come from pidfds, restarts from one timer per waiting worker, and a deck whose workers just run does not wake up.

Everything runs in the event loop that opened the deck. For threads and plain scripts there is
:class:`tidelock.deck.facade.Deck`.
"""

import asyncio
import builtins
import contextlib
import difflib
import logging
import os
import signal
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Final, Self, assert_never

from msgspec.structs import replace

from tidelock.crashpoints import crash_point
from tidelock.deck import logs as deck_logs
from tidelock.deck import reconcile as rules
from tidelock.deck.clock import Clock
from tidelock.deck.events import EventStream
from tidelock.deck.gather import Gathered, Gatherer
from tidelock.deck.guardian_link import GuardianLink
from tidelock.deck.health import HealthKeeper
from tidelock.deck.home import DeckHome, Inherited
from tidelock.deck.observe import Layer, layers_of, status_of
from tidelock.deck.watch import DeathWatch
from tidelock.deck.worker import LIVE_PHASES, Worker
from tidelock.engines.engine import Launched
from tidelock.engines.local import LocalEngine, choose_port, port_is_free
from tidelock.errors import (
    DeckClosed,
    KernelError,
    LockConflict,
    PortUnavailable,
    ProcessGone,
    RegistryError,
    SpawnFailed,
    SpecChanged,
    SpecError,
    StopFailed,
    TidelockError,
    UnknownWorker,
    WorkerFailed,
)
from tidelock.kernel import containment, exits, flock, logfiles
from tidelock.kernel import identity as ids
from tidelock.kernel.containment import Tree
from tidelock.kernel.escalation import Escalation, Outcome, Subject
from tidelock.kernel.notify import Notification, NotifySocket, speaker
from tidelock.kernel.usage import ProcessInfo, describe
from tidelock.model import (
    Containment,
    Event,
    EventKind,
    Exit,
    Identity,
    State,
    UnknownExit,
    WorkerName,
    WorkerSpec,
    WorkerStatus,
    worker_name,
)
from tidelock.registry import Record, Registry
from tidelock.registry.store import encoded_spec

_log: Final = logging.getLogger("tidelock.deck")

ALL_LAYERS: Final = frozenset({"L1", "L2", "L3", "L4"})
"""The four layers of a bound worker; tests switch some off to show that each holds alone."""

_EXIT_PATIENCE_SECONDS: Final = 1.0  # how long an adopted worker's new parent may take to reap it
_REGISTRY_RETRY_SECONDS: Final = 1.0  # disk full or locked: there is no descriptor that tells when it is over
_VFORK_LOOKS: Final = 200


class AsyncDeck:
    """All workers of one state directory, from inside an event loop.

    Use it as ``async with AsyncDeck("state") as deck``; leaving stops the bound workers and leaves the adoptable
    ones running. A second owner of the same directory gets :class:`tidelock.errors.DeckOwned`.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        layers: Iterable[str] = ALL_LAYERS,
    ) -> None:
        self.state_dir = Path(os.path.abspath(state_dir))  # noqa: PTH100 - resolve() would follow links
        self.deck_id = ""
        self.owner_pid = os.getpid()
        self._clock = clock or Clock()
        self._layers = frozenset(layers)
        self._home = DeckHome(self.state_dir)
        self._workers: dict[str, Worker] = {}
        self._turns: dict[str, _Turn] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._watch = DeathWatch()
        self._is_open = False
        self._closing = False

    # --- opening and closing ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> Self:
        """Own the state directory and recover everything in it."""
        if self._is_open:
            return self
        self.owner_pid = os.getpid()
        self._closing = False
        self._loop = asyncio.get_running_loop()
        inherited = self._home.open()
        try:
            self._open_parts(inherited)
            await self._recover(inherited)
        except BaseException:
            await self._let_go()
            raise
        self._is_open = True
        _open_decks.add(self)
        return self

    def _open_parts(self, inherited: Inherited) -> None:
        crash_point("open.locked")
        self._registry = Registry.open(self._home.registry_path)
        self._events = EventStream(self._registry, self._clock)
        self.deck_id = self._registry.meta("deck_id") or ""
        if not self.deck_id:
            self.deck_id = uuid.uuid4().hex[:16]
            self._registry.set_meta("deck_id", self.deck_id)
        crash_point("open.registry")
        self._watch.open(self._loop)
        self._notify = (
            NotifySocket(self.state_dir)
            if inherited.notify_fd is None
            else NotifySocket.inherited(inherited.notify_fd, self.state_dir)
        )
        self._loop.add_reader(self._notify.fileno(), self._heard)
        cgroup_home = containment.cgroup_home()
        self._engine = LocalEngine(
            self._home.workers_dir,
            cgroup_home=None if cgroup_home is None else cgroup_home / f"tidelock-{self.deck_id}",
            notify_socket=self._notify.address,
            with_lifeline="L1" in self._layers,
            with_lock="L2" in self._layers,
        )
        self._gatherer = Gatherer(self._gathered, self._loop)
        self._logs = deck_logs.LogKeeper(self._log_rotated)
        self._logs.open()
        self._health = HealthKeeper(
            self._became_ready, self._became_unhealthy, self._became_healthy, self._said_status, self._said_event
        )
        self._health.open()
        self._guardian = GuardianLink(self._watch, enabled="L1" in self._layers)
        if inherited.guardian is not None:
            self._guardian.inherit(inherited.guardian)

    async def close(self) -> None:
        """Stop the bound workers, leave the adoptable ones running, and let go of the directory."""
        if not self._is_open or os.getpid() != self.owner_pid:
            return
        self._closing = True
        bound = [worker for worker in self._workers.values() if worker.has_process and self._is_bound(worker)]
        try:
            await self._stop_workers([worker.name for worker in bound], wanted="running")
        except TidelockError:
            _log.exception("closing: some bound workers could not be stopped; the next owner ends them")
        await self._let_go()

    async def _let_go(self) -> None:
        """Close everything; workers that are left are the next owner's."""
        self._is_open = False
        self._closing = True
        _open_decks.discard(self)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for worker in self._workers.values():
            worker.cancel_timer()
        for part in ("_health", "_logs", "_guardian", "_gatherer", "_notify", "_events", "_engine", "_registry"):
            opened = self.__dict__.pop(part, None)
            if opened is None:
                continue
            if part == "_notify":
                self._loop.remove_reader(opened.fileno())
            closing = opened.close()
            if asyncio.iscoroutine(closing):
                await closing
        self._watch.close()
        for worker in self._workers.values():
            worker.let_go()
        self._workers.clear()
        self._home.close()

    def forget_in_fork(self) -> None:
        """In a forked copy of the owner: let go of everything whose copy would speak for the owner."""
        self._is_open = False
        self._watch.close_in_fork()
        self._home.close_in_fork()

    def prepare_reexec(self) -> dict[str, str]:
        """Make what must survive an exec in place inheritable; returns the environment that tells the next image.

        The caller calls :func:`os.execve` at once. Same pid, so children stay children; the deck's lock, the lifelines
        of bound workers, the ear for notifications and the guardian's line are carried over as descriptors.
        """
        self._check_open()
        lifelines = {
            worker.name: worker.lifeline.write_fd for worker in self._workers.values() if worker.lifeline is not None
        }
        return self._home.hand_over(lifelines, self._notify.fileno(), self._guardian.hand_over())

    # --- verbs --------------------------------------------------------------------------------------------------

    async def start(
        self,
        name: str | int,
        command: Sequence[str | PurePath] | WorkerSpec | None = None,
        *,
        replace: bool = False,
        **fields: Any,
    ) -> WorkerStatus:
        """Start a worker; return when its program has been exec'ed and recorded.

        Without a command a known worker is started again. A running worker with the same spec is left alone; with
        another spec :class:`SpecChanged` is raised unless ``replace`` is true.
        """
        key = worker_name(name)
        if command is None and fields:
            raise SpecError("command", None, "a command, when other fields are given")
        spec = None if command is None else WorkerSpec.of(command, **fields)
        self._check_open()
        if spec is not None:
            self._engine.check(spec)
        async with self._turn(key):
            self._check_open()
            worker = self._workers.get(key)
            if worker is None:
                if spec is None:
                    raise self._unknown(key)
                return await self._start_new(key, spec)
            return await self._start_known(worker, spec, may_replace=replace)

    async def stop(self, name: str | int) -> WorkerStatus:
        """Stop a worker; return when its whole tree is proven gone."""
        key = worker_name(name)
        self._check_open()
        self._known(key)
        await self._stop_workers([key])
        return self._status(self._known(key))

    async def stop_many(
        self, names: Iterable[str | int], progress: Callable[[WorkerStatus], None] | None = None
    ) -> builtins.list[WorkerStatus]:
        """Stop many at once; ``progress`` hears of each one that is gone."""
        keys = [worker_name(name) for name in names]
        self._check_open()
        for key in keys:
            self._known(key)
        await self._stop_workers(keys, progress=progress)
        return [self._status(self._known(key)) for key in keys]

    async def stop_all(self) -> builtins.list[WorkerStatus]:
        """Stop every worker of the deck."""
        self._check_open()
        return await self.stop_many(list(self._workers))

    async def restart(self, name: str | int) -> WorkerStatus:
        """Stop a worker and start it again with the spec it has."""
        key = worker_name(name)
        self._check_open()
        async with self._turn(key):
            worker = self._known(key)
            await self._stop_turned([worker], wanted="running")
            crash_point("restart.stopped")
            await self._launch(worker, EventKind.RESTARTED, by="request")
            return self._status(worker)

    async def reset(self, name: str | int) -> WorkerStatus:
        """Forget a worker's crashes; if it should run and does not, start it now."""
        key = worker_name(name)
        self._check_open()
        async with self._turn(key):
            worker = self._known(key)
            worker.cancel_timer()
            waiting = worker.record.phase in {State.FAILED, State.BACKOFF}
            phase = State.STOPPED if waiting else worker.record.phase
            cleared = replace(
                worker.record, phase=phase, crashes=0, streak=0, crash_times=(), backoff_until=None, timers_boot_id=None
            )
            self._save(worker, cleared, (EventKind.RESET, {}))
            crash_point("reset.recorded")
            if waiting and cleared.desired == "running":
                await self._launch(worker, EventKind.STARTED, by="reset")
            return self._status(worker)

    async def remove(self, name: str | int) -> None:
        """Stop a worker and remove its record, log, data and secrets."""
        key = worker_name(name)
        self._check_open()
        async with self._turn(key):
            worker = self._known(key)
            await self._stop_turned([worker])
            crash_point("remove.stopped")
            self._home.set_aside(key)
            crash_point("remove.set-aside")
            with self._registry.transaction():
                self._registry.delete(worker.record.name)
                self._events.append(key, EventKind.STOPPED, removed=True)
            del self._workers[key]
            self._events.wake()
            crash_point("remove.recorded")
            cgroup = self._engine.cgroup_path(worker.record.name)
            if cgroup is not None:
                self._gatherer.remove(cgroup)
            await asyncio.to_thread(self._home.clear_set_aside)

    async def status(self, name: str | int) -> WorkerStatus:
        """One worker as it is now."""
        key = worker_name(name)
        self._check_open()
        return self._status(self._known(key))

    async def list(self) -> builtins.list[WorkerStatus]:
        """Every worker as it is now, by name."""
        self._check_open()
        return [self._status(self._workers[name]) for name in sorted(self._workers)]

    async def spec(self, name: str | int) -> WorkerSpec:
        """What a worker runs; the values of its secrets are None."""
        self._check_open()
        return self._known(worker_name(name)).record.spec

    async def crash_times(self, name: str | int) -> builtins.list[float]:
        """When a worker crashed within its window, as seconds since the epoch."""
        self._check_open()
        record = self._known(worker_name(name)).record
        if record.timers_boot_id != ids.boot_id():
            return []
        shift = self._clock.wall() - self._clock.boottime()
        return [time + shift for time in record.crash_times]

    async def logs(self, name: str | int, lines: int = 20) -> builtins.list[str]:
        """The last lines of a worker's log, across rotations."""
        key = worker_name(name)
        self._check_open()
        self._known(key)
        return await deck_logs.read(self._engine.log_dir(key), lines=lines)

    def log_dir(self, name: str | int) -> Path:
        """Where a worker's log files are."""
        key = worker_name(name)
        self._known(key)
        return self._engine.log_dir(key)

    async def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> builtins.list[Event]:
        """What happened after an event id, oldest first; durable, so it can be replayed."""
        self._check_open()
        return self._registry.events(after, limit, worker)

    async def last_event_id(self) -> int:
        """The id of the newest event."""
        self._check_open()
        return self._registry.last_event_id()

    def follow(self, after: int | None = None) -> AsyncIterator[Event]:
        """Each event after an id (None: from now on), then each new one as it happens."""
        self._check_open()
        return self._events.follow(after)

    def on_event(self, callback: Callable[[Event], Any]) -> Callable[[], None]:
        """Call back for each event from now on; returns what unsubscribes.

        The callback runs in a thread of its own (a coroutine function in the deck's loop), in order, outside the
        deck's way: it may be slow or raise, and is told nothing twice.
        """
        self._check_open()
        return self._events.listen(callback, self._loop)

    async def record_event(self, worker: str | None, kind: EventKind, detail: dict[str, Any]) -> Event:
        """Add an event of somebody else's to the stream, for example a feed's."""
        self._check_open()
        with self._registry.transaction():
            event = self._events.append(worker, kind, **detail)
        self._events.wake()
        return event

    async def reconcile(self) -> None:
        """Compare every worker with the kernel now and act on differences; rarely needed, deaths are heard at once."""
        self._check_open()
        for name in list(self._workers):
            async with self._turn(name):
                worker = self._workers.get(name)
                if worker is not None and worker.pidfd is not None and not ids.is_alive(worker.pidfd):
                    await self._ended_turned(worker)
                elif worker is not None and not worker.has_process and worker.timer is None:
                    await self._bring_up(worker)

    async def adopt(self, name: str | int, pid: int, **fields: Any) -> WorkerStatus:
        """Take over a process that somebody else started, without stopping it.

        Its command line, working directory and the given fields become its spec, so that it can be started again.
        It carries no lock of ours, so the owner holds the lock for it.
        """
        key = worker_name(name)
        self._check_open()
        async with self._turn(key):
            known = self._workers.get(key)
            if known is not None and known.has_process:
                raise SpecChanged(key, ("pid",))
            return self._adopt_stranger(key, pid, fields)

    async def tree(self, name: str | int) -> builtins.list[ProcessInfo]:
        """Every process of a worker's tree."""
        self._check_open()
        worker = self._known(worker_name(name))
        if not worker.has_process or worker.record.identity is None:
            return []
        pids = set(containment.members([worker.tree()])[worker.record.cookie]) | {worker.record.identity.pid}
        return describe(pids)

    async def layers(self, name: str | int) -> builtins.list[Layer]:
        """Which of the four layers protect a worker here, and how strongly."""
        self._check_open()
        worker = self._known(worker_name(name))
        return layers_of(worker, self._is_bound(worker), guardian_pid=self._guardian.pid, layers=self._layers)

    # --- starting -----------------------------------------------------------------------------------------------

    async def _start_new(self, name: WorkerName, spec: WorkerSpec) -> WorkerStatus:
        record = Record(name, encoded_spec(spec), "running", State.STOPPED, containment.new_cookie())
        worker = Worker(record, self._engine.lock_path(name))
        self._workers[name] = worker
        try:
            self._engine.prepare(name, spec)
            await self._launch(worker, EventKind.STARTED, spec=spec)
        except BaseException:
            # Nothing was there before, so nothing is there afterwards.
            if not worker.has_process:
                self._undo_new(worker)
            raise
        return self._status(worker)

    def _undo_new(self, worker: Worker) -> None:
        worker.cancel_timer()
        del self._workers[worker.name]
        with contextlib.suppress(RegistryError):
            self._registry.delete(worker.record.name)
        if not flock.is_held(worker.lock_path):
            with contextlib.suppress(TidelockError, OSError):
                self._engine.clear(worker.record.name)

    async def _start_known(self, worker: Worker, spec: WorkerSpec | None, *, may_replace: bool) -> WorkerStatus:
        record = worker.record
        changed = () if spec is None else self._changed_fields(record, spec)
        if worker.has_process:
            if not changed and record.desired == "running":
                return self._status(worker)
            if changed and not may_replace:
                raise SpecChanged(record.name, changed)
            await self._stop_turned([worker], wanted="running")
        elif record.phase is State.FAILED and not changed and not may_replace:
            raise WorkerFailed(record.name, f"{len(record.crash_times)} crashes within its window")
        worker.cancel_timer()
        if spec is not None and changed:
            self._engine.prepare(worker.record.name, spec)
            # A new spec is a new attempt: what the old one did does not count against it.
            fresh = replace(
                worker.record, spec_json=encoded_spec(spec), crashes=0, streak=0, crash_times=(), backoff_until=None
            )
            worker.record = fresh
        await self._launch(worker, EventKind.STARTED, spec=spec if changed else None)
        return self._status(worker)

    def _changed_fields(self, record: Record, spec: WorkerSpec) -> tuple[str, ...]:
        stored, wanted = record.spec, spec.without_secret_values()
        changed = [field for field in WorkerSpec.__struct_fields__ if getattr(stored, field) != getattr(wanted, field)]
        if "secrets" not in changed and not self._engine.same_secrets(record.name, spec):
            changed.append("secrets")
        return tuple(changed)

    async def _launch(self, worker: Worker, kind: EventKind, *, spec: WorkerSpec | None = None, **detail: Any) -> None:
        """One start, step by step. On failure the worker rests as it was, and nothing runs."""
        before = worker.record
        spec = spec or before.spec
        worker.cancel_timer()
        port = self._port_for(worker, spec)
        intent = replace(
            before,
            desired="running",
            phase=State.STARTING,
            cookie=containment.new_cookie(),
            identity=None,
            cgroup=None,
            proxy_lock=False,
            port=port,
            backoff_until=None,
            adopted=False,
            ready=False,
        )
        crash_point("start.begin")
        with self._registry.transaction():
            self._registry.save(intent)
        worker.record = intent
        crash_point("start.intent-recorded")
        launched: Launched | None = None
        try:
            lock_fd = await self._lock_for(worker, before)
            if lock_fd is None:
                return  # the holder turned out to be the worker itself: adopted
            try:
                crash_point("start.locked")
                launched = self._engine.launch(intent.name, spec, intent.cookie, port, lock_fd)
            finally:
                # From here on only the worker's tree carries the lock.
                os.close(lock_fd)
            crash_point("start.spawned")
            self._record_start(worker, spec, launched, kind, detail)
        except BaseException:
            if launched is not None:
                await self._abandon(worker, launched)
            self._back_to_rest(worker, before)
            raise
        crash_point("start.recorded")
        self._tend(worker, spec, fresh=True)

    def _record_start(
        self, worker: Worker, spec: WorkerSpec, launched: Launched, kind: EventKind, detail: dict[str, Any]
    ) -> None:
        now = self._clock.wall()
        restarted = kind is EventKind.RESTARTED
        running = replace(
            worker.record,
            phase=State.RUNNING,
            identity=launched.identity,
            started_at=now,
            restarts=worker.record.restarts + restarted,
        )
        pid = launched.identity.pid
        with self._registry.transaction():
            self._registry.save(running)
            self._events.append(running.name, kind, pid=pid, **detail)
        worker.record = running
        worker.pidfd = launched.pidfd
        worker.is_child = True
        worker.lifeline = launched.lifeline
        logfiles.mark(self._engine.log_dir(running.name), f"started pid={pid} cookie={running.cookie}")
        if spec.lifetime == "bound":
            crash_point("start.before-guardian")
            self._bind(worker, spec)
        self._events.wake()

    def _tend(self, worker: Worker, spec: WorkerSpec, *, fresh: bool) -> None:
        """From now on: hear of its death, keep its log, ask for its health, contain it."""
        if worker.pidfd is None:
            return
        name = worker.record.name
        self._watch.ended(worker.pidfd, _weak_call(self, worker))
        self._logs.watch(name, self._engine.log_dir(name), spec.log)
        if spec.health is not None:
            worker.awaits_ready = not worker.record.ready
            self._health.watch(
                name,
                spec.health,
                port=worker.record.port,
                env=spec.env,
                cwd=spec.cwd or str(self._engine.home(name) / "data"),
                already_ready=worker.record.ready,
            )
        cgroup = self._engine.cgroup_path(name)
        if cgroup is not None and (fresh or worker.record.cgroup is None):
            self._gatherer.gather(worker.tree(), cgroup)

    async def _lock_for(self, worker: Worker, before: Record) -> int | None:
        """The worker's lock; what is left of an earlier start is adopted (None) or ended; a stranger is a conflict."""
        name = worker.record.name
        lock_fd = self._engine.take_lock(name)
        if lock_fd is not None:
            return lock_fd
        if "L2" not in self._layers:
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        tree = Tree(name, before.cookie, worker.lock_path, before.identity)
        leader = self._leader_by_cookie(tree)
        if leader is not None and before.spec.lifetime == "adoptable":
            self._adopt_found(worker, replace(worker.record, cookie=before.cookie), leader)
            return None
        if containment.cookie_scan([before.cookie])[before.cookie]:
            await self._end_trees([Subject(tree)])
            lock_fd = self._engine.take_lock(name)
            if lock_fd is not None:
                return lock_fd
        raise self._conflict(worker)

    def _conflict(self, worker: Worker) -> LockConflict:
        holders = flock.holders(worker.lock_path)
        pid = holders[0] if holders else None
        command = "" if pid is None else ids.command_line(pid)
        with contextlib.suppress(RegistryError), self._registry.transaction():
            self._events.append(worker.name, EventKind.LOCK_CONFLICT, pid=pid, command=command)
        self._events.wake()
        return LockConflict(worker.name, pid, command)

    def _port_for(self, worker: Worker, spec: WorkerSpec) -> int | None:
        if not spec.port:
            return None
        port = worker.record.port
        if port is None:
            taken = {other.record.port for other in self._workers.values() if other.record.port is not None}
            return choose_port(worker.record.name, taken)
        if not port_is_free(port):
            raise PortUnavailable(
                f"worker {worker.name!r}: its port {port} is taken by another program; end that program, "
                f"or remove the worker and start it anew to get another port"
            )
        return port

    async def _abandon(self, worker: Worker, launched: Launched) -> None:
        """It runs but could not be recorded: end it, or the next owner would find a worker that nobody noted."""
        tree = Tree(worker.name, worker.record.cookie, worker.lock_path, launched.identity)
        try:
            await self._end_trees([Subject(tree, launched.pidfd, signal.SIGKILL, 0)])
        finally:
            exits.reap_child(launched.pidfd)
            os.close(launched.pidfd)
            if launched.lifeline is not None:
                launched.lifeline.close()
            worker.pidfd = None
            worker.lifeline = None
            worker.is_child = False

    def _back_to_rest(self, worker: Worker, before: Record) -> None:
        """A start failed: note that nothing runs. The record keeps what it said before, with nobody alive in it."""
        phase = State.STOPPED if before.phase in LIVE_PHASES else before.phase
        resting = replace(before, phase=phase, desired="stopped", identity=None, cgroup=None)
        worker.record = resting
        with contextlib.suppress(RegistryError), self._registry.transaction():
            self._registry.save(resting)

    def _bind(self, worker: Worker, spec: WorkerSpec) -> None:
        self._guardian.bind(worker.tree(), spec.stop.signal_number, spec.stop.grace_seconds)

    # --- ending by itself ---------------------------------------------------------------------------------------

    def _died(self, worker: Worker) -> None:
        """A pidfd became readable. Called by the death watch."""
        if not self._closing:
            self._spawn_task(self._ended(worker))

    async def _ended(self, worker: Worker) -> None:
        async with self._turn(worker.name):
            if self._workers.get(worker.name) is worker and worker.pidfd is not None and not self._closing:
                await self._ended_turned(worker)

    async def _ended_turned(self, worker: Worker) -> None:
        """The leader ended and nobody asked for it: end what it left behind, then do as its policy says."""
        if worker.pidfd is None or ids.is_alive(worker.pidfd):
            return
        self._watch.forget(worker.pidfd)
        crash_point("ended.seen")
        ended_as = await self._exit_of(worker)
        tree = worker.tree()
        try:
            if not containment.is_gone(tree):
                await self._end_leftovers(worker)
            await self._settle_end(worker, ended_as)
        except RegistryError as err:
            _log.warning("worker %r ended (%s), which cannot be recorded yet: %s", worker.name, ended_as, err)
            worker.timer = self._loop.call_later(_REGISTRY_RETRY_SECONDS, self._died, worker)

    async def _end_leftovers(self, worker: Worker) -> None:
        stop = worker.record.spec.stop
        subject = Subject(worker.tree(), worker.pidfd, stop.signal_number, stop.grace_seconds)
        outcome = (await self._end_trees([subject]))[worker.name]
        if outcome.killed:
            with self._registry.transaction():
                self._append_killed(worker.name, outcome)

    async def _settle_end(self, worker: Worker, ended_as: Exit) -> None:
        """The tree is gone: decide, record, and start again if that is due at once."""
        record = worker.record
        spec = record.spec
        now = self._clock.boottime()
        same_boot = record.timers_boot_id == ids.boot_id()
        uptime = self._uptime(record, now)
        decision = rules.after_end(
            rules.Ended(
                ended_as,
                uptime,
                spec.restart,
                record.streak,
                record.crash_times if same_boot else (),
                now,
                self._clock.draw(),
            )
        )
        ended = replace(
            record, exit=ended_as, identity=None, cgroup=None, timers_boot_id=ids.boot_id(), backoff_until=None
        )
        told = {"exit": _exit_detail(ended_as), "uptime_seconds": round(uptime, 3)}
        match decision:
            case rules.Rest():
                ended = replace(
                    ended,
                    phase=State.EXITED,
                    crash_times=decision.crash_times,
                    crashes=record.crashes + decision.crashed,
                )
                self._save_end(worker, ended, decision.crashed, told)
            case rules.GiveUp():
                ended = replace(
                    ended,
                    phase=State.FAILED,
                    crash_times=decision.crash_times,
                    crashes=record.crashes + 1,
                    streak=decision.streak,
                )
                self._save_end(worker, ended, True, told, failed=True)  # noqa: FBT003 - crashed
            case rules.RestartIn():
                ended = replace(
                    ended,
                    phase=State.BACKOFF,
                    crash_times=decision.crash_times,
                    crashes=record.crashes + decision.crashed,
                    streak=decision.streak,
                    backoff_until=now + decision.delay_seconds,
                )
                self._save_end(
                    worker, ended, decision.crashed, told | {"delay_seconds": round(decision.delay_seconds, 3)}
                )
                crash_point("ended.recorded")
                if decision.delay_seconds <= 0:
                    await self._restart_due(worker)
                else:
                    self._start_later(worker, decision.delay_seconds)
            case _:
                assert_never(decision)

    def _save_end(
        self, worker: Worker, ended: Record, crashed: bool, told: dict[str, Any], *, failed: bool = False
    ) -> None:
        kind = EventKind.CRASHED if crashed else EventKind.EXITED
        pid = worker.record.identity.pid if worker.record.identity else None
        with self._registry.transaction():
            self._registry.save(ended)
            self._events.append(worker.name, kind, pid=pid, **told)
            if failed:
                self._events.append(worker.name, EventKind.FAILED, crashes=len(ended.crash_times))
        logfiles.mark(self._engine.log_dir(ended.name), f"ended pid={pid} {ended.exit}")
        worker.record = ended
        self._untend(worker)
        self._events.wake()

    def _untend(self, worker: Worker) -> None:
        """Its process is gone: let go of what we held for it."""
        name = worker.record.name
        if worker.pidfd is not None:
            self._watch.forget(worker.pidfd)
        if worker.lifeline is not None or self._is_bound(worker):
            self._guardian.unbind(name)
        self._health.unwatch(name)
        self._logs.unwatch(name)
        worker.let_go()

    def _start_later(self, worker: Worker, delay_seconds: float) -> None:
        worker.cancel_timer()
        worker.timer = self._loop.call_later(max(0.0, delay_seconds), self._due, worker)

    def _due(self, worker: Worker) -> None:
        worker.timer = None
        if not self._closing:
            self._spawn_task(self._restart_waiting(worker))

    async def _restart_waiting(self, worker: Worker) -> None:
        async with self._turn(worker.name):
            if self._workers.get(worker.name) is worker and worker.record.phase is State.BACKOFF and not self._closing:
                await self._restart_due(worker)

    async def _restart_due(self, worker: Worker) -> None:
        """Its time has come. A start that fails goes back to the queue, so a stop is always heard."""
        before = worker.record
        try:
            await self._launch(worker, EventKind.RESTARTED, by="policy")
        except RegistryError as err:
            _log.warning("worker %r cannot be restarted yet: %s", worker.name, err)
            worker.record = before
            self._start_later(worker, _REGISTRY_RETRY_SECONDS)
        except TidelockError as err:
            await self._restart_failed(worker, before, err)

    async def _restart_failed(self, worker: Worker, before: Record, error: TidelockError) -> None:
        """It could not even be executed: that is a crash like any other, at an uptime of nothing."""
        restart = before.spec.restart
        now = self._clock.boottime()
        decision = rules.after_end(
            rules.Ended(_NEVER_RAN, 0.0, restart, before.streak, before.crash_times, now, self._clock.draw())
        )
        give_up = not isinstance(decision, rules.RestartIn)
        delay = 0.0 if not isinstance(decision, rules.RestartIn) else max(decision.delay_seconds, 0.001)
        failed = replace(
            before,
            desired="running",
            phase=State.FAILED if give_up else State.BACKOFF,
            crashes=before.crashes + 1,
            streak=before.streak + 1,
            crash_times=decision.crash_times,
            timers_boot_id=ids.boot_id(),
            backoff_until=None if give_up else now + delay,
        )
        try:
            with self._registry.transaction():
                self._registry.save(failed)
                self._events.append(worker.name, EventKind.CRASHED, error=str(error), pid=None)
                if give_up:
                    self._events.append(
                        worker.name, EventKind.FAILED, crashes=len(failed.crash_times), error=str(error)
                    )
        except RegistryError:
            _log.exception("worker %r: a failed restart could not be recorded", worker.name)
        worker.record = failed
        self._events.wake()
        if not give_up:
            self._start_later(worker, delay)

    async def _exit_of(self, worker: Worker) -> Exit:
        """How the leader ended. Our child waits for us; somebody else's is told by its pidfd once it was reaped."""
        pidfd = worker.pidfd
        if pidfd is None:
            return UnknownExit()
        if worker.is_child:
            return exits.peek_child(pidfd) or UnknownExit()
        told = exits.told_by_pidfd(pidfd)
        if not isinstance(told, UnknownExit):
            return told
        reaped = asyncio.Event()
        self._watch.reaped(pidfd, reaped.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_PATIENCE_SECONDS):
                await reaped.wait()
        self._watch.forget(pidfd)
        return exits.told_by_pidfd(pidfd)

    # --- stopping -----------------------------------------------------------------------------------------------

    async def _stop_workers(
        self,
        names: Sequence[str],
        *,
        wanted: str = "stopped",
        progress: Callable[[WorkerStatus], None] | None = None,
    ) -> None:
        async with contextlib.AsyncExitStack() as turns:
            # In one order everywhere, so two callers cannot wait for each other.
            for name in sorted(set(names)):
                await turns.enter_async_context(self._turn(name))
            workers = [self._workers[name] for name in sorted(set(names)) if name in self._workers]
            await self._stop_turned(workers, wanted=wanted, progress=progress)

    async def _stop_turned(
        self,
        workers: Sequence[Worker],
        *,
        wanted: str = "stopped",
        progress: Callable[[WorkerStatus], None] | None = None,
    ) -> None:
        """Stop workers whose turn we have: intent, signals, proof, record. ``wanted`` is what is wanted afterwards."""
        to_end: dict[str, Worker] = {}
        with self._registry.transaction():
            for worker in workers:
                worker.cancel_timer()
                record = worker.record
                if worker.has_process or record.phase in LIVE_PHASES:
                    to_end[worker.name] = worker
                    saved = replace(record, desired=wanted, phase=State.STOPPING)
                    self._events.append(record.name, EventKind.STOPPING, pid=_pid(record))
                else:
                    resting = State.STOPPED if record.phase in {State.BACKOFF, State.FAILED} else record.phase
                    saved = replace(record, desired=wanted, phase=resting, backoff_until=None)
                    if resting is not record.phase:
                        self._events.append(record.name, EventKind.STOPPED, pid=None)
                self._registry.save(saved)
                worker.record = saved
        self._events.wake()
        crash_point("stop.intent-recorded")
        if progress is not None:
            for worker in workers:
                if worker.name not in to_end:
                    progress(self._status(worker))
        subjects = [self._subject(worker) for worker in to_end.values()]
        failures: builtins.list[StopFailed] = []

        def gone(outcomes: dict[str, Outcome]) -> None:
            crash_point("stop.tree-gone")
            with self._registry.transaction():
                for name, outcome in outcomes.items():
                    if outcome.gone:
                        self._record_stopped(to_end[name], outcome)
                    else:
                        failures.append(_stop_failed(name, outcome))
            for name, outcome in outcomes.items():
                if outcome.gone:
                    self._untend(to_end[name])
                if progress is not None:
                    progress(self._status(to_end[name]))
            self._events.wake()
            crash_point("stop.recorded")

        await self._end_trees(subjects, gone)
        if failures:
            raise failures[0]

    def _subject(self, worker: Worker) -> Subject:
        stop = worker.record.spec.stop
        if worker.pidfd is not None:
            self._watch.forget(worker.pidfd)
        if worker.proxy_lock_fd is not None:
            os.close(worker.proxy_lock_fd)
            worker.proxy_lock_fd = None
        # Layer 3 switched off: ask, and wait for as long as it takes.
        grace = stop.grace_seconds if "L3" in self._layers else 1e9
        return Subject(worker.tree(), worker.pidfd, stop.signal_number, grace)

    def _record_stopped(self, worker: Worker, outcome: Outcome) -> None:
        record = worker.record
        ended_as = record.exit
        if worker.pidfd is not None:
            seen = exits.peek_child(worker.pidfd) if worker.is_child else exits.told_by_pidfd(worker.pidfd)
            ended_as = seen or UnknownExit()
        self._append_killed(record.name, outcome)
        stopped = replace(record, phase=State.STOPPED, exit=ended_as, identity=None, cgroup=None, streak=0)
        self._registry.save(stopped)
        self._events.append(
            record.name,
            EventKind.STOPPED,
            pid=_pid(record),
            exit=None if ended_as is None else _exit_detail(ended_as),
        )
        logfiles.mark(self._engine.log_dir(record.name), f"stopped pid={_pid(record)} {ended_as}")
        worker.record = stopped

    def _append_killed(self, name: str, outcome: Outcome) -> None:
        if outcome.killed:
            survivors = [{"pid": one.pid, "command": one.command[:200]} for one in outcome.killed]
            self._events.append(name, EventKind.KILLED, survivors=survivors)

    async def _end_trees(
        self, subjects: Sequence[Subject], on_outcomes: Callable[[dict[str, Outcome]], None] | None = None
    ) -> dict[str, Outcome]:
        """Drive one escalation from the loop; outcomes are told in the batches in which they come."""
        if not subjects:
            return {}
        told: set[str] = set()
        with Escalation(subjects) as escalation:
            stirred = asyncio.Event()
            self._loop.add_reader(escalation.fileno(), stirred.set)
            try:
                escalation.begin()
                crash_point("stop.signalled")
                while True:
                    new = {name: outcome for name, outcome in escalation.outcomes.items() if name not in told}
                    if new:
                        told.update(new)
                        if on_outcomes is not None:
                            on_outcomes(new)
                    if escalation.done:
                        return escalation.outcomes
                    await self._stirred(stirred, escalation.next_deadline())
                    escalation.advance()
            finally:
                self._loop.remove_reader(escalation.fileno())

    async def _stirred(self, stirred: asyncio.Event, deadline: float | None) -> None:
        # The escalation reads time.monotonic(), which is also asyncio's clock.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await stirred.wait()
        stirred.clear()

    # --- recovering ---------------------------------------------------------------------------------------------

    async def _recover(self, inherited: Inherited) -> None:
        """Bring the deck from whatever the last owner left to what is wanted."""
        for name in self._home.finish_removals():
            self._registry.delete(WorkerName(name))
        records = self._registry.records()
        for record in records:
            self._workers[record.name] = Worker(record, self._engine.lock_path(record.name))
        self._tell_owner_changed()
        self._find_unrecorded()
        crash_point("open.read")
        for name, fd in inherited.lifelines.items():
            worker = self._workers.get(name)
            if worker is not None:
                worker.lifeline = self._home.lifeline_from(fd)
        decisions = await self._look_at_all()
        self._adopt_all([worker for worker, decision in decisions if isinstance(decision, rules.Adopt)])
        crash_point("open.adopted")
        orphans = {
            worker.name: (worker, decision) for worker, decision in decisions if isinstance(decision, rules.EndTree)
        }
        await self._end_orphans(orphans)
        crash_point("open.orphans-ended")
        for worker, decision in decisions:
            async with self._turn(worker.name):
                if isinstance(decision, rules.Conflict):
                    self._conflict(worker)
                elif not isinstance(decision, rules.Adopt):
                    await self._bring_up(worker)
        crash_point("open.recovered")

    def _tell_owner_changed(self) -> None:
        previous = self._registry.meta("owner_pid")
        with self._registry.transaction():
            self._registry.set_meta("owner_pid", str(self.owner_pid))
            detail: dict[str, Any] = {"pid": self.owner_pid, "previous_pid": int(previous) if previous else None}
            if self._registry.set_aside is not None:
                detail |= {"set_aside": self._registry.set_aside.name, "why": self._registry.corruption}
                _log.warning("the registry was not sound and was set aside as %s", self._registry.set_aside)
            self._events.append(None, EventKind.OWNER_CHANGED, **detail)

    async def _look_at_all(self) -> builtins.list[tuple[Worker, rules.Opening]]:
        """Compare every record with the kernel; only what may be alive is looked at."""
        maybe_alive = [worker for worker in self._workers.values() if worker.record.phase in LIVE_PHASES]
        answers: dict[str, str] = {}
        for worker in maybe_alive:
            answers[worker.name] = self._find_leader(worker)
        gone = [worker for worker in maybe_alive if answers[worker.name] == "gone"]
        await self._find_unidentified([worker for worker in gone if worker.record.identity is None], answers)
        gone = [worker for worker in gone if answers[worker.name] == "gone"]
        left = containment.members([worker.tree() for worker in gone]) if gone else {}
        decisions: builtins.list[tuple[Worker, rules.Opening]] = []
        for worker in self._workers.values():
            record = worker.record
            found = rules.Found(
                leader=answers.get(worker.name, "gone"),  # type: ignore[arg-type]
                tree_left=bool(left.get(record.cookie)),
                wanted=record.desired,
                phase=record.phase,
                lifetime=record.spec.lifetime if record.phase in LIVE_PHASES else "adoptable",
                never_identified=record.identity is None,
                ours=worker.lifeline is not None or "L4" not in self._layers,
            )
            decisions.append((worker, rules.on_open(found)))
        return decisions

    def _find_leader(self, worker: Worker) -> str:
        """Is the recorded process alive? If so, hold its pidfd."""
        identity = worker.record.identity
        if identity is None:
            return "gone"
        try:
            worker.pidfd = ids.open_verified(identity)
        except ProcessGone:
            return "gone"
        except KernelError:
            return "unknown"
        worker.is_child = exits.is_our_child(worker.pidfd)
        return "alive"

    async def _find_unidentified(self, workers: Sequence[Worker], answers: dict[str, str]) -> None:
        """The last owner died between spawning and recording: find the process by its cookie while its lock is held.

        A child between vfork and exec still shows its parent's environment, so look again until the cookie shows
        or the lock is free.
        """
        for worker in workers:
            tree = worker.tree()
            for _ in range(_VFORK_LOOKS):
                leader = self._leader_by_cookie(tree)
                if leader is not None:
                    pidfd, identity = leader
                    worker.pidfd = pidfd
                    worker.record = replace(worker.record, identity=identity, started_at=self._clock.wall())
                    answers[worker.name] = "alive"
                    break
                if not flock.is_held(worker.lock_path):
                    break
                await asyncio.to_thread(_until_proc_changes)

    def _leader_by_cookie(self, tree: Tree) -> tuple[int, Identity] | None:
        """The session leader among the processes that carry the cookie, with a pidfd that is the caller's."""
        for pid in containment.cookie_scan([tree.cookie])[tree.cookie]:
            try:
                pidfd = ids.open_pidfd(pid)
            except KernelError:
                continue
            try:
                identity = ids.identity_of(pidfd, pid)
                if ids.read_stat(pid).session == pid and containment.cookie_of(pid) == tree.cookie:
                    return pidfd, identity
            except KernelError:
                pass
            os.close(pidfd)
        return None

    def _find_unrecorded(self) -> None:
        """Workers whose lock is held but whom the registry does not know: it was lost, they were not."""
        for name in self._home.worker_names():
            if name in self._workers:
                continue
            lock_path = self._engine.lock_path(name)
            if not lock_path.exists():
                self._home.discard_unstarted(name)
                continue
            if not flock.is_held(lock_path):
                continue
            for pid in flock.holders(lock_path):
                cookie = containment.cookie_of(pid)
                with contextlib.suppress(KernelError):
                    if cookie is None or ids.read_stat(pid).session != pid:
                        continue
                    spec = _spec_from_process(pid, {})
                    pidfd = ids.open_pidfd(pid)
                    identity = ids.identity_of(pidfd, pid)
                    os.close(pidfd)
                    record = Record(name, encoded_spec(spec), "running", State.RUNNING, cookie, identity)
                    record = replace(record, started_at=self._started_at(identity))
                    self._registry.save(record)
                    self._workers[name] = Worker(record, lock_path)
                    break

    def _adopt_all(self, workers: Sequence[Worker]) -> None:
        with self._registry.transaction():
            for worker in workers:
                record = replace(
                    worker.record,
                    phase=State.UNHEALTHY if worker.record.phase is State.UNHEALTHY else State.RUNNING,
                    desired="running",
                    adopted=True,
                )
                self._registry.save(record)
                self._events.append(record.name, EventKind.ADOPTED, pid=_pid(record))
                worker.record = record
        for worker in workers:
            spec = worker.record.spec
            if worker.record.proxy_lock:
                worker.proxy_lock_fd = self._engine.take_lock(worker.record.name)
            if spec.lifetime == "bound":
                self._bind(worker, spec)
            self._tend(worker, spec, fresh=False)
        self._events.wake()

    def _adopt_found(self, worker: Worker, record: Record, leader: tuple[int, Identity]) -> None:
        worker.pidfd, identity = leader
        worker.is_child = exits.is_our_child(worker.pidfd)
        worker.record = replace(record, identity=identity, phase=State.RUNNING, started_at=self._started_at(identity))
        self._adopt_all([worker])

    async def _end_orphans(self, orphans: "dict[str, tuple[Worker, rules.EndTree]]") -> None:
        """End what should not live, all at once, and note why."""

        def gone(outcomes: dict[str, Outcome]) -> None:
            with self._registry.transaction():
                for name, outcome in outcomes.items():
                    worker, decision = orphans[name]
                    if not outcome.gone:
                        _log.error("%s", _stop_failed(name, outcome))
                        continue
                    if decision.why == "wanted-stopped":
                        self._record_stopped(worker, outcome)
                        continue
                    self._append_killed(name, outcome)
                    self._events.append(name, EventKind.ORPHAN_REAPED, pid=_pid(worker.record), why=decision.why)
                    if decision.why == "bound-orphan":
                        worker.record = replace(worker.record, phase=State.STOPPED, identity=None, cgroup=None)
                    self._registry.save(worker.record)
            for name, outcome in outcomes.items():
                worker, _ = orphans[name]
                if outcome.gone:
                    worker.let_go()
            self._events.wake()

        await self._end_trees([self._subject(worker) for worker, _ in orphans.values()], gone)

    async def _bring_up(self, worker: Worker) -> None:
        """Nobody runs for this worker: do what its record says comes next."""
        record = worker.record
        found = rules.Found("gone", False, record.desired, record.phase, "adoptable", record.identity is None)  # noqa: FBT003 - tree_left
        match rules.on_open(found):
            case rules.NoteEnd():
                await self._settle_end(worker, _exit_of_zombie(record))
            case rules.StartNow():
                await self._start_wanted(worker)
            case _:
                if record.phase is State.BACKOFF and record.desired == "running":
                    until = record.backoff_until if record.timers_boot_id == ids.boot_id() else None
                    self._start_later(worker, 0.0 if until is None else until - self._clock.boottime())

    async def _start_wanted(self, worker: Worker) -> None:
        before = worker.record
        try:
            await self._launch(worker, EventKind.STARTED, by="recovery")
        except RegistryError as err:
            _log.warning("worker %r cannot be started yet: %s", worker.name, err)
            worker.record = replace(before, desired="running", phase=State.BACKOFF)
            self._start_later(worker, _REGISTRY_RETRY_SECONDS)
        except TidelockError as err:
            await self._restart_failed(worker, before, err)

    def _adopt_stranger(self, name: WorkerName, pid: int, fields: dict[str, Any]) -> WorkerStatus:
        try:
            pidfd = ids.open_pidfd(pid)
        except ProcessGone:
            raise SpecError("pid", pid, "the pid of a process that is running") from None
        try:
            identity = ids.identity_of(pidfd, pid)
            if pid in {os.getpid(), 1} or any(
                worker.record.identity == identity for worker in self._workers.values() if worker.has_process
            ):
                raise SpecError("pid", pid, "a process that is neither ours nor a worker of this deck already")
            spec = _spec_from_process(pid, fields)
            self._engine.check(spec)
            self._engine.prepare(name, spec)
            lock_fd = self._engine.take_lock(name)
            if lock_fd is None:
                known = self._workers.get(name) or Worker(
                    Record(name, encoded_spec(spec), "running", State.STOPPED, containment.new_cookie()),
                    self._engine.lock_path(name),
                )
                raise self._conflict(known)
            record = Record(
                name,
                encoded_spec(spec),
                "running",
                State.RUNNING,
                containment.new_cookie(),
                identity,
                proxy_lock=True,
                started_at=self._started_at(identity),
                adopted=True,
            )
            worker = Worker(record, self._engine.lock_path(name))
            with self._registry.transaction():
                self._registry.save(record)
                self._events.append(
                    name, EventKind.ADOPTED, pid=pid, command=" ".join(spec.command)[:200], by="request"
                )
        except BaseException:
            os.close(pidfd)
            raise
        crash_point("adopt.recorded")
        worker.pidfd = pidfd
        worker.is_child = exits.is_our_child(pidfd)
        worker.proxy_lock_fd = lock_fd
        self._workers[name] = worker
        self._tend(worker, spec, fresh=True)
        self._events.wake()
        return self._status(worker)

    # --- heard from the parts -----------------------------------------------------------------------------------

    def _gathered(self, done: builtins.list[Gathered]) -> None:
        """Some trees are inside their cgroups: note it, so that the next owner knows."""
        if self._closing or "_registry" not in self.__dict__:
            return
        try:
            with self._registry.transaction():
                for one in done:
                    worker = self._workers.get(one.tree.name)
                    if worker is not None and worker.has_process and worker.record.cookie == one.tree.cookie:
                        record = replace(worker.record, cgroup=str(one.cgroup))
                        self._registry.save(record)
                        worker.record = record
        except RegistryError as err:
            _log.warning("the cgroups of %d workers could not be recorded: %s", len(done), err)
        for one in done:
            worker = self._workers.get(one.tree.name)
            if worker is not None and worker.lifeline is not None and worker.record.cgroup is not None:
                self._bind(worker, worker.record.spec)

    def _heard(self) -> None:
        """Somebody spoke to the notify socket; only a process of a worker's own tree may speak for it."""
        by_leader = {
            worker.record.identity.pid: worker.tree()
            for worker in self._workers.values()
            if worker.has_process and worker.record.identity
        }
        by_cookie = {tree.cookie: tree for tree in by_leader.values()}
        try:
            for said in self._notify.receive():
                self._hear_one(said, by_leader, by_cookie)
        except KernelError as err:
            _log.warning("notifications: %s", err)

    def _hear_one(self, said: Notification, by_leader: dict[int, Tree], by_cookie: "dict[Any, Tree]") -> None:
        name = speaker(said, by_leader, by_cookie)
        if name is None:
            _log.info("pid %d spoke to the notify socket and is of no worker", said.pid)
            return
        worker = self._workers.get(name)
        if worker is None:
            return
        self._health.notified(name, said.fields)
        if worker.record.spec.health is None:
            self._hear_without_health(worker, said.fields)

    def _hear_without_health(self, worker: Worker, fields: dict[str, str]) -> None:
        """Programs speak the protocol whether or not anybody asked: show what they say."""
        if "STATUS" in fields:
            self._said_status(worker.name, fields["STATUS"])
        if fields.get("READY") == "1" and not worker.record.ready:
            self._became_ready(worker.name)
        if "X_TIDELOCK_EVENT" in fields:
            self._said_raw_event(worker.name, fields["X_TIDELOCK_EVENT"])

    def _said_raw_event(self, name: str, text: str) -> None:
        import json  # noqa: PLC0415 - rare

        with contextlib.suppress(ValueError):
            detail = json.loads(text)
            if isinstance(detail, dict):
                self._said_event(name, detail)

    def _became_ready(self, name: str) -> None:
        worker = self._workers.get(name)
        if worker is None or not worker.has_process:
            return
        worker.awaits_ready = False
        self._note(worker, replace(worker.record, ready=True), EventKind.READY, pid=_pid(worker.record))

    def _became_healthy(self, name: str) -> None:
        worker = self._workers.get(name)
        if worker is not None and worker.record.phase is State.UNHEALTHY:
            self._note(worker, replace(worker.record, phase=State.RUNNING), EventKind.READY, recovered=True)

    def _became_unhealthy(self, name: str, reason: str) -> None:
        """A hung worker is unhealthy, then restarted by its policy."""
        worker = self._workers.get(name)
        if worker is None or not worker.has_process or worker.record.phase not in {State.RUNNING, State.STARTING}:
            return
        self._note(worker, replace(worker.record, phase=State.UNHEALTHY), EventKind.UNHEALTHY, reason=reason)
        if worker.record.spec.restart.policy != "never":
            self._spawn_task(self._replace_unhealthy(worker, worker.record.cookie))

    async def _replace_unhealthy(self, worker: Worker, cookie: str) -> None:
        async with self._turn(worker.name):
            if worker.record.cookie != cookie or worker.record.phase is not State.UNHEALTHY or self._closing:
                return
            outcome = (await self._end_trees([self._subject(worker)]))[worker.name]
            if not outcome.gone:
                _log.error("%s", _stop_failed(worker.name, outcome))
                return
            with self._registry.transaction():
                self._append_killed(worker.name, outcome)
            # Ended by us for being ill: a crash to its policy, whatever code it managed to leave with.
            await self._settle_end(worker, _ILL)

    def _said_status(self, name: str, text: str) -> None:
        worker = self._workers.get(name)
        if worker is not None and worker.has_process:
            worker.status_text = text[:500]

    def _said_event(self, name: str, detail: dict[str, Any]) -> None:
        with contextlib.suppress(RegistryError), self._registry.transaction():
            self._events.append(name, EventKind.FEED, **{str(key): value for key, value in detail.items()})
        self._events.wake()

    def _log_rotated(self, name: str, detail: dict[str, Any]) -> None:
        with contextlib.suppress(RegistryError), self._registry.transaction():
            self._events.append(name, EventKind.LOG_ROTATED, **detail)
        self._events.wake()

    def _note(self, worker: Worker, record: Record, kind: EventKind, **detail: Any) -> None:
        """Record a change that nobody waits for; if it cannot be recorded it is true all the same."""
        try:
            self._save(worker, record, (kind, detail))
        except RegistryError as err:
            worker.record = record
            _log.warning("worker %r is %s, which could not be recorded: %s", worker.name, kind, err)

    # --- small things -------------------------------------------------------------------------------------------

    def _save(self, worker: Worker, record: Record, *events: tuple[EventKind, dict[str, Any]]) -> None:
        with self._registry.transaction():
            self._registry.save(record)
            for kind, detail in events:
                self._events.append(record.name, kind, **detail)
        worker.record = record
        if events:
            self._events.wake()

    def _status(self, worker: Worker) -> WorkerStatus:
        return status_of(worker, self._clock, self._health.summary(worker.name))

    def _is_bound(self, worker: Worker) -> bool:
        return worker.record.spec.lifetime == "bound"

    def _uptime(self, record: Record, now: float) -> float:
        if record.identity is None or record.identity.boot_id != ids.boot_id():
            return 0.0
        return max(0.0, now - record.identity.start_ticks / ids.CLOCK_TICKS)

    def _started_at(self, identity: Identity) -> float:
        return self._clock.wall() - max(0.0, self._clock.boottime() - identity.start_ticks / ids.CLOCK_TICKS)

    def _known(self, name: str) -> Worker:
        worker = self._workers.get(name)
        if worker is None:
            raise self._unknown(name)
        return worker

    def _unknown(self, name: str) -> UnknownWorker:
        return UnknownWorker(name, tuple(difflib.get_close_matches(name, list(self._workers), n=3)))

    def _check_open(self) -> None:
        if os.getpid() != self.owner_pid:
            raise DeckClosed(
                f"the deck {self.state_dir} was opened by pid {self.owner_pid}; this process is a fork of it: "
                f"open a deck of its own here, or ask the owner"
            )
        if not self._is_open:
            raise DeckClosed(f"the deck {self.state_dir} is closed; open it first")

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Background work with an owner: it is cancelled and awaited when the deck closes."""
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background work on the deck failed", exc_info=error)

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """One verb at a time on one worker."""
        turn = self._turns.get(name)
        if turn is None:
            turn = self._turns[name] = _Turn()
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if turn.users == 0:
                self._turns.pop(name, None)


class _Turn:
    """A lock that exists only while somebody wants it: ten thousand quiet workers have none."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


_NEVER_RAN: Final = exits.from_wait_status(127 << 8)
_ILL: Final = exits.from_wait_status(signal.SIGKILL)

_open_decks: "weakref.WeakSet[AsyncDeck]" = weakref.WeakSet()


def _forget_decks_in_forked_child() -> None:
    for deck in list(_open_decks):
        deck.forget_in_fork()


os.register_at_fork(after_in_child=_forget_decks_in_forked_child)


def _weak_call(deck: AsyncDeck, worker: Worker) -> Callable[[], None]:
    return lambda: deck._died(worker)  # noqa: SLF001 - the deck's own callback, made here to stay small


def _pid(record: Record) -> int | None:
    return record.identity.pid if record.identity is not None else None


def _exit_detail(ended_as: Exit) -> dict[str, Any]:
    from msgspec import to_builtins  # noqa: PLC0415 - keeps the module's first lines to what matters

    detail: dict[str, Any] = to_builtins(ended_as)
    return detail


def _exit_of_zombie(record: Record) -> Exit:
    """A child of ours that ended while we exec'ed in place is still there to be asked."""
    identity = record.identity
    if identity is None or identity.boot_id != ids.boot_id():
        return UnknownExit()
    try:
        pidfd = ids.open_pidfd(identity.pid)
    except KernelError:
        return UnknownExit()
    try:
        if ids.is_same(identity, pidfd) and exits.is_our_child(pidfd):
            return exits.reap_child(pidfd) or UnknownExit()
    finally:
        os.close(pidfd)
    return UnknownExit()


def _spec_from_process(pid: int, fields: dict[str, Any]) -> WorkerSpec:
    """What a running process seems to have been started with."""
    words = [word.decode("utf-8", "replace") for word in ids.read_proc(pid, "cmdline").rstrip(b"\0").split(b"\0")]
    if not words or not words[0]:
        raise SpecError("pid", pid, "a process with a command line")
    given = dict(fields)
    if "cwd" not in given:
        with contextlib.suppress(OSError):
            given["cwd"] = os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115 - a kernel file
    return WorkerSpec.of(given.pop("command", words), **given)


def _stop_failed(name: str, outcome: Outcome) -> StopFailed:
    survivors = tuple(one.pid for one in outcome.survivors)
    return StopFailed(name, survivors, "; ".join(one.command[:80] for one in outcome.survivors) or "its lock is held")


def _until_proc_changes() -> None:
    """Give a child that is between vfork and exec the processor; it needs microseconds."""
    os.sched_yield()


__all__ = ["ALL_LAYERS", "AsyncDeck", "Containment", "Layer", "SpawnFailed"]
