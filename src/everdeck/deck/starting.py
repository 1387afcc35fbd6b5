"""One start, step by step: intent, lock, spawn, record; and taking over what is already there.

Each arrow between the steps is a crash point. The worker's lock decides whether there may be a start at all: while
any process of an earlier tree holds it, that tree is adopted or ended first, and a stranger's hold is a conflict.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final

from msgspec.structs import replace

from everdeck.crashpoints import crash_point
from everdeck.deck import notes, reaching
from everdeck.deck.crew import Done
from everdeck.deck.ending import Ending, pid_of
from everdeck.deck.engine import Engine, Launched, Ready, choose_port, port_is_free
from everdeck.deck.firsts import Firsts
from everdeck.deck.outcomes import End, Launch, Outcomes, last_end, told_end
from everdeck.deck.parts import Parts
from everdeck.deck.worker import Worker
from everdeck.errors import (
    EverdeckError,
    KernelError,
    LockConflict,
    PortUnavailable,
    ProcessGone,
    RecordBroken,
    RegistryError,
    SpecError,
)
from everdeck.kernel import containment, exits, flock
from everdeck.kernel import identity as ids
from everdeck.kernel.containment import Tree
from everdeck.kernel.escalation import Subject
from everdeck.model import EventKind, Identity, State, WorkerName, WorkerSpec
from everdeck.registry import WorkerRecord
from everdeck.registry.store import encoded_spec

_log: Final = logging.getLogger("everdeck.deck")


_MOST_UNDER_WAY: Final = 4
"""How many starts may wait for the crew: each has its log and its lock open meanwhile, and others get the loop only
when they are over. The crew needs no more than the next one to be always at work."""
_LAYOUT_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.001
_AWAY_SECONDS: Final = 0.03
"""For how long a group may keep the loop from everybody else: deaths, notifications and requests wait meanwhile."""


class Starting:
    """Starts workers, and adopts those that run already."""

    def __init__(self, parts: Parts, ending: Ending) -> None:
        self._parts = parts
        self._ending = ending
        self._outcomes = Outcomes(parts, ending)
        self._firsts = Firsts(parts, self._outcomes)
        self.tend = self._outcomes.tend
        self.bind = self._outcomes.bind

    async def launch(
        self,
        worker: Worker,
        kind: EventKind,
        *,
        spec: WorkerSpec | None = None,
        end: End | None = None,
        **detail: Any,
    ) -> None:
        """Start a worker whose turn the caller has. On failure it rests as it was, and nothing runs.

        ``end`` is what led to this start and is not recorded yet; it is when this returns or raises.
        """
        order = Launch(worker, kind, spec or worker.record.spec, worker.record, detail, end)
        if end is not None:
            order.end_mark, order.same_cgroup = end.mark, end.same_cgroup
        await self.launch_all([order])
        if order.failure is not None:
            raise order.failure

    async def launch_all(self, orders: Sequence[Launch]) -> None:
        """Start workers whose turns the caller has: one commit of all intents, every spawn, one commit of all outcomes.

        The crew starts one while the next is made ready, and those that it started are recorded meanwhile. Where that
        takes longer than a moment, the outcomes are committed in several parts, and others get the loop in between.
        Each order has its own failure; the others go on. A crash anywhere in it is the same for many
        as for one: what was spawned and not recorded carries the cookie of a recorded intent, and what was intended
        only is started by the next owner.
        """
        crash_point("start.begin")
        self._intend(orders)
        crash_point("start.intent-recorded")
        first = [order for order in orders if order.homeless and order.failure is None]
        alone = len(orders) == 1
        interrupted = await self._firsts.launch(first, alone=alone) if first else None
        orders = [order for order in orders if order.launched is None and order.failure is None]
        if not orders:
            return
        spawned: list[Launch] = []
        under_way, done = 0, Done()
        begin = monotonic()
        for order in orders:
            if order.failure is not None:
                continue
            if spawned and interrupted is None and monotonic() - begin > _AWAY_SECONDS:
                # Nobody is born that the loop does not know of while others have it.
                under_way = self._taken(done, under_way, spawned)
                await self._outcomes.settle(spawned)
                spawned = []
                interrupted = await _others_go_first()
                begin = monotonic()
            order.failure = interrupted or await self._make_ready(order)
            if order.ready is not None:
                if alone or not order.ready.start.is_quick:
                    order.ready.start.call()
                    self._take(order, spawned)
                else:
                    self._parts.crew.give(order.ready.start.call, order, done)
                    under_way += 1
            elif order.launched is not None:
                spawned.append(order)
            elif order.failure is not None:
                self._outcomes.back_to_rest(order)
            interrupted = None if order.failure is None or isinstance(order.failure, Exception) else order.failure
            under_way = self._taken(done, under_way, spawned, most=_MOST_UNDER_WAY - 1)
        self._taken(done, under_way, spawned)
        await self._outcomes.settle(spawned)

    def _taken(self, done: Done, under_way: int, spawned: list[Launch], most: int = 0) -> int:
        """Take what the crew has done; wait until it has at most so many left, and tell how many."""
        while under_way and (under_way > most or not done.empty()):
            self._take(self._parts.crew.take(done), spawned)
            under_way -= 1
        return under_way

    def _take(self, order: Launch, spawned: list[Launch]) -> None:
        """What came of a call: it is one of those that were spawned, or goes back to rest."""
        assert order.ready is not None  # noqa: S101 - it was called
        ready, order.ready = order.ready, None
        try:
            order.launched = self._parts.engine.launched(ready)
            crash_point("start.spawned")
        except BaseException as err:  # noqa: BLE001 - told through the order; what the others spawned must be recorded
            order.failure = err
        if order.launched is not None:
            spawned.append(order)
        else:
            self._outcomes.back_to_rest(order)

    def _intend(self, orders: Sequence[Launch]) -> None:
        """Commit that these will run, and under which cookies."""
        intents: list[tuple[Launch, WorkerRecord]] = []
        ports: set[int] = set()
        for order in orders:
            order.worker.cancel_timer()
            try:
                _refuse_broken(order)
                port = self._port_for(order.worker, order.spec, ports)
            except (EverdeckError, OSError) as err:
                order.failure = err
                continue
            if port is not None:
                ports.add(port)
            intent = replace(
                order.before,
                desired="running",
                phase=State.STARTING,
                # That of one who never ran is nobody's yet.
                cookie=order.before.cookie if order.homeless else containment.new_cookie(),
                identity=None,
                cgroup=None,
                proxy_lock=False,
                port=port,
                backoff_until=None,
                adopted=False,
                ready=False,
                status_text=None,
                # Now, so that an owner who dies before the outcome is recorded has counted it.
                restarts=order.before.restarts + (order.kind is EventKind.RESTARTED),
                # Why the last one ended; of an ill one it is told until this one is known to be well.
                reason=order.before.reason if order.spec.health is not None else None,
            )
            intents.append((order, intent))
        if len(intents) == 1 and _is_led_to(intents[0][0]):
            intents[0][0].worker.record = intents[0][1]  # in memory: see End
        else:
            self._commit(intents)
        for order in orders:
            if order.failure is not None and order.end is not None:  # there is no start to tell of it with
                self._parts.note([(order.worker, order.before, order.end.events)])
                order.end = None
                self._outcomes.mark_end(order)

    def _commit(self, intents: Sequence[tuple[Launch, WorkerRecord]]) -> None:
        registry = self._parts.registry
        try:
            if len(intents) == 1 and intents[0][0].end is None:  # one statement is its own transaction, the cheapest
                registry.save(intents[0][1])
            elif intents:
                with registry.transaction():
                    registry.save_all(intent for _, intent in intents)
                    self._parts.events.pass_on_all([told for order, _ in intents for told in told_end(order)])
        except BaseException as err:  # noqa: BLE001 - told through the orders
            for order, _ in intents:
                order.failure = err
            return
        for order, intent in intents:
            order.worker.record = intent
            order.is_noted, order.end = True, None

    async def _make_ready(self, order: Launch) -> BaseException | None:
        """As :meth:`_locked_and_ready`; whatever goes wrong is this order's and told as a value."""
        try:
            await self._locked_and_ready(order)
        except BaseException as err:  # noqa: BLE001 - what the others spawned must still be recorded
            return err
        return None

    async def _locked_and_ready(self, order: Launch) -> None:
        """The lock, then everything but the process; the record comes with those of the others."""
        parts, worker, spec = self._parts, order.worker, order.spec
        intent = worker.record
        if order.homeless:
            parts.engine.prepare(intent.name, spec)
        paths = reaching.to_ask_about(spec.command, spec.cwd) if spec.command else []
        may_hang = bool(paths) and not await reaching.reached(paths, spec.command[0])
        # Only now: until the intent was recorded, a crash would have started the old spec, and with the old secrets.
        # Who has just ended was started with this very spec, and has settled it.
        if (spec.secrets or order.end is None) and parts.engine.settle_secrets(intent.name, spec, intent.spec_json):
            crash_point("start.secrets-settled")
        lock_fd = await self._lock_for(worker, order.before)
        if lock_fd is None:
            return  # the holder turned out to be the worker itself: adopted
        try:
            crash_point("start.locked")
            try:
                notes.write(f"{parts.engine.workers_dir}/{intent.name}", intent.cookie, intent.spec_json)
            except OSError:  # no room for it: the registry has it, and the process itself can be asked
                self._record_intent(order)
            if spec.lifetime == "bound":
                # Before it runs: a guardian that knows the cookie ends it though we die before we know its pid.
                self._outcomes.bind(worker, spec)
                crash_point("start.guarded")
            end_mark, order.end_mark = order.end_mark, None
            make_ready = partial(
                parts.engine.make_ready,
                *(intent.name, spec, intent.cookie, intent.port, lock_fd),
                last_end=last_end(worker, order.before),
                end_mark=end_mark,
                same_cgroup=order.same_cgroup,
                may_hang=may_hang,
            )
            if not may_hang:
                order.ready = make_ready()
                lock_fd = -1  # closed with the rest of it: from then on only the worker's tree carries the lock
                return
            carried, lock_fd = lock_fd, -1  # the thread's, which may need it longer than we wait
            order.launched = await reaching.launched(
                partial(_with_lock, parts.engine, make_ready, carried), _undo_launched, spec.command[0]
            )
        finally:
            if lock_fd >= 0:
                os.close(lock_fd)
        crash_point("start.spawned")

    def _record_intent(self, order: Launch) -> None:
        """Now at the latest, if that was left to its note and there is none."""
        if order.end is not None:
            with self._parts.registry.transaction():
                self._parts.registry.save(order.worker.record)
                self._parts.events.pass_on_all(told_end(order))
            order.is_noted, order.end = True, None

    # --- the lock -----------------------------------------------------------------------------------------------

    async def _lock_for(self, worker: Worker, before: WorkerRecord) -> int | None:
        """The worker's lock; what is left of an earlier start is adopted (None) or ended; a stranger is a conflict."""
        engine, name = self._parts.engine, worker.record.name
        if before.identity is not None and ids.answer(before.identity) is not ids.Answer.DIFFERENT:
            raise self.conflict(worker)  # not proven dead, though it may have dropped its lock
        lock_fd = engine.take_lock(name)
        if lock_fd is not None:
            return lock_fd
        if "L2" not in self._parts.layers:
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        tree = Tree(name, before.cookie, worker.lock_path, before.identity)
        leader = leader_by_cookie(tree) or self._leader_by_note(worker, before)
        if leader is not None and before.spec.lifetime == "adoptable":
            worker.pidfd, identity = leader
            worker.is_child = exits.is_our_child(worker.pidfd)
            worker.record = replace(
                worker.record,
                cookie=before.cookie,
                identity=identity,
                phase=State.RUNNING,
                restarts=before.restarts,
                started_at=self._parts.started_at(identity),
            )
            self.adopt([worker], {})
            return None
        if leader is not None:
            os.close(leader[0])
        if containment.cookie_scan([before.cookie])[before.cookie]:
            await self._ending.end_trees([Subject(tree)])
            lock_fd = engine.take_lock(name)
            if lock_fd is not None:
                return lock_fd
        raise self.conflict(worker)

    def _leader_by_note(self, worker: Worker, before: WorkerRecord) -> tuple[int, Identity] | None:
        """Who holds the lock, if the note beside it says that it is of the start that the record means."""
        note = notes.read(self._parts.engine.home(worker.record.name))
        return leader_by_lock(worker.lock_path) if note is not None and note.cookie == before.cookie else None

    def conflict(self, worker: Worker) -> LockConflict:
        """Somebody holds the lock whom we cannot prove to be ours: an event, and the error that says who."""
        holders = flock.holders(worker.lock_path)
        pid = holders[0] if holders else None
        command = "" if pid is None else ids.command_line(pid)
        with contextlib.suppress(RegistryError), self._parts.registry.transaction():
            self._parts.events.append(worker.name, EventKind.LOCK_CONFLICT, pid=pid, command=command)
        self._parts.events.wake()
        return LockConflict(worker.name, pid, command)

    def _port_for(self, worker: Worker, spec: WorkerSpec, chosen: set[int]) -> int | None:
        if not spec.port:
            return None
        port = worker.record.port
        if port is None:
            workers = self._parts.workers.values()
            taken = {one.record.port for one in workers if one.record.port is not None}
            return choose_port(worker.record.name, taken | chosen)
        if not port_is_free(port):
            raise PortUnavailable(
                f"worker {worker.name!r}: its port {port} is taken by another program; end that program, "
                f"or remove the worker and start it anew to get another port"
            )
        return port

    # --- taking over --------------------------------------------------------------------------------------------

    def adopt(self, workers: list[Worker], recorded: Mapping[WorkerName, WorkerRecord]) -> None:
        """Take over workers whose pidfds we hold; one commit for all, which writes what is not recorded like that."""
        parts = self._parts
        adopted: list[WorkerRecord] = []
        for worker in workers:
            ill = worker.record.phase is State.UNHEALTHY
            phase = State.UNHEALTHY if ill else State.RUNNING
            adopted.append(replace(worker.record, phase=phase, desired="running", adopted=True))
        with parts.registry.transaction():
            parts.registry.save_all([record for record in adopted if record != recorded.get(record.name)])
            told = [(record.name, EventKind.ADOPTED, {"pid": pid_of(record)}) for record in adopted]
            parts.events.pass_on_all(told)
        for worker, record in zip(workers, adopted, strict=True):
            worker.record = record
            worker.status_text = record.status_text
            spec = record.spec
            if record.proxy_lock:
                worker.proxy_lock_fd = parts.engine.take_lock(record.name)
            if spec.lifetime == "bound":
                self._outcomes.bind(worker, spec)
            self._outcomes.tend(worker, spec, fresh=False)
        parts.events.wake()

    def adopt_stranger(self, name: WorkerName, pid: int, fields: dict[str, Any]) -> Worker:
        """Take over a process that somebody else started; the owner holds its lock for it."""
        parts = self._parts
        try:
            pidfd = ids.open_pidfd(pid)
        except ProcessGone:
            raise SpecError("pid", pid, "the pid of a process that is running") from None
        worker: Worker | None = None
        try:
            identity = ids.identity_of(pidfd, pid)
            self._refuse_ours(pid, identity)
            spec = spec_from_process(pid, fields)
            ids.identity_of(pidfd, pid)  # still the same: what was read in between was its own
            parts.engine.check(spec)
            parts.engine.prepare(name, spec)
            record = WorkerRecord(
                name,
                encoded_spec(spec),
                "running",
                State.RUNNING,
                containment.new_cookie(),
                identity,
                proxy_lock=True,
                started_at=parts.started_at(identity),
                adopted=True,
            )
            worker = Worker(record, parts.engine.workers_dir)
            worker.proxy_lock_fd = self._lock_for_stranger(worker)
            detail = {"pid": pid, "command": " ".join(spec.command)[:200], "by": "request"}
            parts.save(worker, record, (EventKind.ADOPTED, detail))
        except BaseException:
            os.close(pidfd)
            if worker is not None:
                worker.let_go()
            raise
        crash_point("adopt.recorded")
        worker.pidfd = pidfd
        worker.is_child = exits.is_our_child(pidfd)
        return worker

    def _lock_for_stranger(self, worker: Worker) -> int:
        lock_fd = self._parts.engine.take_lock(worker.record.name)
        if lock_fd is None:
            raise self.conflict(worker)
        return lock_fd

    def _refuse_ours(self, pid: int, identity: Identity) -> None:
        known = any(one.record.identity == identity for one in self._parts.workers.values() if one.has_process)
        if known or pid in {os.getpid(), 1}:
            raise SpecError("pid", pid, "a process that is neither ours nor a worker of this deck already")


def _with_lock(engine: Engine, make_ready: Callable[[], Ready], lock_fd: int) -> Launched:
    """Launch, and leave the lock to the worker's tree."""
    try:
        ready = make_ready()
    except BaseException:
        os.close(lock_fd)
        raise
    ready.start.call()
    return engine.launched(ready)


def _undo_launched(launched: Launched) -> None:
    """It runs, and nobody waits for it any more: end it before it does anything. It may be called in a thread."""
    ids.send_signal(launched.pidfd, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, launched.pidfd, os.WEXITED)
    os.close(launched.pidfd)
    if launched.lifeline is not None:
        launched.lifeline.close()


def _is_led_to(order: Launch) -> bool:
    """Is its process found though no intent is in the registry? Nobody else gets the loop before it is recorded."""
    if order.end is None or not order.same_cgroup:
        return False
    return reaching.known_near(reaching.to_ask_about(order.spec.command, order.spec.cwd))


def _refuse_broken(order: Launch) -> None:
    if order.spec is order.before.spec and order.before.broken is not None:
        raise RecordBroken(order.worker.name, order.before.broken)


async def _others_go_first() -> BaseException | None:
    """Let everybody who waits for the loop have it once; tells if we were cancelled meanwhile."""
    try:
        await asyncio.sleep(0)  # noqa: TID251 - no wait
    except asyncio.CancelledError as err:
        return err
    return None


def leader_by_cookie(tree: Tree) -> tuple[int, Identity] | None:
    """The session leader among the processes that carry the cookie, with a pidfd that is the caller's."""
    for pid in containment.cookie_scan([tree.cookie])[tree.cookie]:
        try:
            pidfd = ids.open_pidfd(pid)
        except KernelError:
            continue
        with contextlib.suppress(KernelError):
            identity = ids.identity_of(pidfd, pid)
            if ids.read_stat(pid).session == pid and containment.cookie_of(pid) == tree.cookie:
                return pidfd, identity
        os.close(pidfd)
    return None


def leader_by_lock(lock_path: Path) -> tuple[int, Identity] | None:
    """The session leader among those to whom the lock was handed down, with a pidfd that is the caller's.

    A program that overwrites its environment shows no cookie any more; its lock it still holds. A descriptor can be
    passed to anybody, so whoever is not of the worker's account is a stranger.
    """
    account = containment.account_of(lock_path)
    for pid in flock.holders(lock_path):
        with contextlib.suppress(KernelError):
            if ids.read_stat(pid).session != pid or not flock.is_heir(lock_path, pid):
                continue
            if account != os.geteuid() and ids.accounts_of(pid) != {account}:
                continue
            pidfd = ids.open_pidfd(pid)
            try:
                identity = ids.identity_of(pidfd, pid)
            except KernelError:
                os.close(pidfd)
                continue
            if flock.is_heir(lock_path, pid) and not ids.is_readable(pidfd):
                return pidfd, identity
            os.close(pidfd)
    return None


async def laid_out(pid: int) -> None:
    """Return when it has a command line: after an exec it has none until the kernel has laid the new program out.

    Whoever started it hears of the exec before that. A kernel thread and a zombie have no program and never get one.
    """
    deadline = monotonic() + _LAYOUT_SECONDS
    with contextlib.suppress(KernelError, OSError):
        while not ids.read_proc(pid, "cmdline") and os.readlink(f"/proc/{pid}/exe"):  # noqa: PTH115 - a kernel file
            if monotonic() > deadline:
                return
            await asyncio.sleep(_LOOK_SECONDS)  # noqa: TID251 - the kernel gives no sign of it


def spec_from_process(pid: int, fields: dict[str, Any]) -> WorkerSpec:
    """What a running process seems to have been started with; started again it is of the account that it is of now."""
    account = ids.accounts_of(pid)
    words = [word.decode("utf-8", "replace") for word in ids.read_proc(pid, "cmdline").rstrip(b"\0").split(b"\0")]
    if not words or not words[0]:
        raise SpecError("pid", pid, "a process with a command line")
    given = dict(fields)
    if "cwd" not in given:
        with contextlib.suppress(OSError):
            given["cwd"] = os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115 - a kernel file
    if given.get("user") is None and account != {os.geteuid()}:
        given["user"] = _one_account(pid, account)
    # Asked again: a program that changed its account meanwhile has not the rights of the words that were read.
    if ids.accounts_of(pid) != account:
        raise SpecError("pid", pid, "a process that does not change its account just now")
    return WorkerSpec.of(given.pop("command", words), **given)


def _one_account(pid: int, account: set[int]) -> str:
    if len(account) != 1 or os.geteuid() != 0:
        told = "/".join(str(uid) for uid in sorted(account))
        raise SpecError("pid", pid, f"a process of one account that we may start programs as (it is of uid {told})")
    (uid,) = account
    return str(uid)
