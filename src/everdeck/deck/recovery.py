"""From whatever the last owner left to what is wanted. This is the only way a deck starts.

For each record the kernel is asked: same identity, then adopt (or, if bound, reap: L4); gone, then end what is left of
its tree, note the end and do as its policy says; never identified, then look for its cookie while its lock is held.
Strangers are left alone. What to do is decided by :func:`everdeck.deck.reconcile.on_open`.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec.structs import replace

from everdeck.child import DIR_ENV, WORKER_ENV
from everdeck.crashpoints import crash_point
from everdeck.deck import guardian_link, notes
from everdeck.deck import reconcile as rules
from everdeck.deck.ending import Ending, exit_detail, killed, pid_of
from everdeck.deck.healing import Healing, exit_of_zombie
from everdeck.deck.home import Inherited
from everdeck.deck.parts import RETRY_SECONDS, Change, Parts
from everdeck.deck.starting import Starting, leader_by_cookie, leader_by_lock, spec_from_process
from everdeck.deck.worker import Worker
from everdeck.errors import (
    KernelError,
    NameRefused,
    ProcessGone,
    RegistryError,
    RegistryUnavailable,
    ResourceExhausted,
    SpecError,
    StateDirRefused,
)
from everdeck.kernel import containment, exits, flock
from everdeck.kernel import identity as ids
from everdeck.kernel.escalation import Outcome
from everdeck.model import Cookie, EventKind, State, UnknownExit, WorkerName, WorkerSpec, worker_name
from everdeck.registry import WorkerRecord
from everdeck.registry.store import encoded_spec
from everdeck.statedir import DATA

_log: Final = logging.getLogger("everdeck.deck")
_OWNER_DIED_FIRST: Final = "the owner that saw it died before it could record how it ended"

# A child needs microseconds from vfork to exec; this many looks take seconds, and then something else is wrong.
_VFORK_LOOKS: Final = 500

# SIGKILL needs a moment to be acted upon; whoever is still there then is stuck in the kernel, and open does not wait.
_UNKILLABLE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """One worker and what is to be done with it."""

    worker: Worker
    decision: rules.Opening


class Recovery:
    """Opens a deck that somebody may have left in any state."""

    def __init__(self, parts: Parts, ending: Ending, starting: Starting, healing: Healing) -> None:
        self._parts = parts
        self._ending = ending
        self._starting = starting
        self._healing = healing

    async def recover(self, owner_pid: int, inherited: Inherited) -> None:
        """Bring everything to what is wanted; returns when it is so."""
        parts = self._parts
        recorded = {record.name: record for record in parts.registry.records()}
        for record in recorded.values():
            parts.workers[record.name] = self._worker(record)
        self._finish_removals()
        self._find_unrecorded()
        newer = self._believe_locks()
        remade = self._remake_homes()
        self._tell_owner_changed(owner_pid, found_by_lock=newer, homes_made_again=remade)
        crash_point("open.read")
        for name, fd in inherited.lifelines.items():
            if name in parts.workers:
                parts.workers[name].lifeline = parts.home.lifeline_from(fd)
        seen = self._look_at_all(handed_on=inherited.lock_fd is not None)
        self._starting.adopt([one.worker for one in seen if isinstance(one.decision, rules.Adopt)], recorded)
        crash_point("open.adopted")
        orphans = {one.worker.name: one for one in seen if isinstance(one.decision, rules.EndTree)}
        unended = await self._end_orphans(orphans)
        crash_point("open.orphans-ended")
        for one in seen:
            if isinstance(one.decision, rules.Adopt):
                continue
            async with parts.turns.of(one.worker.name):
                if one.worker.name in unended:
                    self._leave_unkillable(one, unended[one.worker.name])
                elif isinstance(one.decision, rules.Conflict):
                    self._starting.conflict(one.worker)
                else:
                    await self.bring_up(one.worker)
        parts.deeds.settled()
        crash_point("open.recovered")

    def _finish_removals(self) -> None:
        """An earlier owner set these workers' directories aside: what is left of them goes, and that is told."""
        parts = self._parts
        begun = parts.home.removals_begun()
        for name in begun:
            if parts.workers.pop(name, None) is not None:
                with parts.deeds.resumed_removal(name):
                    parts.forget(WorkerName(name), EventKind.STOPPED, removed=True)
        if begun:
            with contextlib.suppress(RegistryError):  # what the disk refuses now, the next owner finishes
                parts.registry.sync()
                parts.home.clear_set_aside()

    async def bring_up(self, worker: Worker) -> None:
        """Nobody runs for this worker: do what its record says comes next."""
        record = worker.record
        decision = rules.on_open(
            rules.Found(
                leader="gone",
                tree_left=False,
                wanted=record.desired,
                phase=record.phase,
                lifetime="adoptable",
                never_identified=record.identity is None,
            )
        )
        match decision:
            case rules.NoteEnd():
                await self._healing.settle(worker, exit_of_zombie(record))
            case rules.StartNow():
                with self._parts.deeds.resumed(worker.name, EventKind.STARTED) as kind:
                    await self._healing.start_wanted(worker, kind, by="recovery")
            case _:
                self.wait_again(worker)

    def wait_again(self, worker: Worker) -> None:
        """Set the timer of a worker that its record says is waiting; of any other, nothing."""
        record = worker.record
        if record.phase is State.BACKOFF and record.desired == "running":
            until = record.backoff_until if record.timers_boot_id == ids.boot_id() else None
            self._healing.start_later(worker, 0.0 if until is None else until - self._parts.clock.boottime())

    def _worker(self, record: WorkerRecord) -> Worker:
        worker = Worker(record, self._parts.engine.workers_dir)
        worker.on_death = self._healing.died
        return worker

    def _tell_owner_changed(self, owner_pid: int, **found: list[str]) -> None:
        registry = self._parts.registry
        previous = registry.meta("owner_pid")
        detail: dict[str, Any] = {"pid": owner_pid, "previous_pid": int(previous) if previous else None}
        detail |= {what: names for what, names in found.items() if names}
        if registry.set_aside is not None:
            detail |= {"set_aside": registry.set_aside.name, "why": registry.corruption}
            _log.warning("the registry was not sound and was set aside as %s", registry.set_aside)
        reports = guardian_link.reports(self._parts.home.state_dir)
        with registry.transaction():
            registry.set_meta("owner_pid", str(owner_pid))
            self._parts.events.append(None, EventKind.OWNER_CHANGED, **detail)
            for report in reports:
                if report["killed"]:
                    # What the guardian had to kill when the last owner was gone, and nobody was there to record it.
                    told = {"survivors": report["killed"], "by": "guardian", "at": report["at"]}
                    self._parts.events.append(report["worker"], EventKind.KILLED, **told)
        guardian_link.forget_reports(self._parts.home.state_dir)

    # --- looking ------------------------------------------------------------------------------------------------

    def _look_at_all(self, *, handed_on: bool) -> list[_Seen]:
        """Compare every record with the kernel; only what may be alive is looked at."""
        workers = self._parts.workers.values()
        for worker in workers:
            self._look_where_it_was_born(worker)
        alive = [worker for worker in workers if worker.record.phase.is_live]
        # One scan for all starts that were never recorded: a scan per start would be a scan per worker of a group.
        unidentified = [worker.record.cookie for worker in alive if worker.record.identity is None]
        carried = containment.cookie_scan(unidentified) if unidentified else {}
        answers = {worker.name: self._find_leader(worker, carried, handed_on=handed_on) for worker in alive}
        gone = [self._parts.workers[name] for name, answer in answers.items() if answer == "gone"]
        left = containment.members([worker.tree() for worker in gone]) if gone else {}
        return [
            _Seen(worker, self._decide(worker, answers.get(worker.name, "gone"), bool(left.get(worker.record.cookie))))
            for worker in workers
        ]

    def _look_where_it_was_born(self, worker: Worker) -> None:
        """A start that was never recorded may have left its tree in the cgroup in which it was born."""
        record = worker.record
        if record.phase is not State.STARTING or record.cgroup is not None:
            return
        cgroup = self._parts.engine.cgroup_path(record.name)
        if cgroup is not None and containment.is_populated(cgroup):
            worker.record = replace(record, cgroup=str(cgroup))

    def _decide(self, worker: Worker, leader: Literal["alive", "gone", "unknown"], tree_left: bool) -> rules.Opening:
        record = worker.record
        return rules.on_open(
            rules.Found(
                leader=leader,
                tree_left=tree_left,
                wanted=record.desired,
                phase=record.phase,
                lifetime=record.spec.lifetime if leader == "alive" else "adoptable",
                never_identified=record.identity is None,
                # Carried over by an exec in place; or layer 4 is switched off in a test.
                ours=worker.lifeline is not None or "L4" not in self._parts.layers,
            )
        )

    def _find_leader(
        self, worker: Worker, carried: Mapping[Cookie, Sequence[int]], *, handed_on: bool
    ) -> Literal["alive", "gone", "unknown"]:
        """Is the recorded process alive? If so, hold its pidfd."""
        identity = worker.record.identity
        if identity is None:
            may_run = carried.get(worker.record.cookie) or flock.is_held(worker.lock_path)
            return self._find_unidentified(worker) if may_run else "gone"
        try:
            worker.pidfd = ids.open_verified(identity, by_inode=handed_on)
        except ProcessGone:
            return "gone"
        except ResourceExhausted:
            raise  # an owner that cannot hold all of its workers must say so, and hold none
        except KernelError:
            return "unknown"
        worker.is_child = exits.is_our_child(worker.pidfd)
        return "alive"

    def _find_unidentified(self, worker: Worker) -> Literal["alive", "gone"]:
        """The last owner died between spawning and recording: find the process by its cookie while its lock is held.

        A child between vfork and exec still shows its parent's environment, or none yet, so look again until the
        cookie shows or the lock is free.
        """
        for _ in range(_VFORK_LOOKS):
            leader = leader_by_cookie(worker.tree())
            if leader is not None:
                worker.pidfd, identity = leader
                started_at = self._parts.started_at(identity)
                worker.record = replace(worker.record, identity=identity, started_at=started_at)
                return "alive"
            if not flock.is_held(worker.lock_path):
                return "gone"
            os.sched_yield()
        return "gone"

    def _find_unrecorded(self) -> None:
        """Workers that the registry does not know: it was lost or is old, they were not."""
        parts = self._parts
        # Looking for an earlier instance is what layer 4 is; tests switch it off.
        lost = (parts.registry.set_aside is not None or parts.registry.is_new) and "L4" in parts.layers
        if lost:
            self._find_by_cookie()
        for name in parts.home.worker_names():
            if name in parts.workers:
                continue
            lock_path = parts.engine.lock_path(name)
            if not lock_path.exists():
                parts.home.discard_unstarted(name)
            elif flock.is_held(lock_path):
                self._find_by_lock(name)
            elif lost and (note := notes.read(parts.engine.home(name))) is not None:
                # Nobody runs for it: what it was is known again, and a person says whether it should run.
                self._know(WorkerRecord(name, encoded_spec(note.spec), "stopped", State.STOPPED, note.cookie))

    def _find_by_lock(self, name: WorkerName) -> None:
        """Its lock is held: by whom it was handed down to, its leader first."""
        lock_path = self._parts.engine.lock_path(name)
        heirs = [pid for pid in flock.holders(lock_path) if flock.is_heir(lock_path, pid)]
        for pid in heirs:
            with contextlib.suppress(KernelError):
                if self._find_again(name, pid):
                    return
        note = notes.read(self._parts.engine.home(name))
        if heirs and note is not None:  # its leader is gone, and others of its tree are not: recovery ends them
            self._know(WorkerRecord(name, encoded_spec(note.spec), "running", State.RUNNING, note.cookie))

    def _find_by_cookie(self) -> None:
        """A worker that dropped its lock (sudo, closefrom) still says in its environment whose it is.

        Anybody can say that. Whoever is of the worker's own account gains nothing by it, and nobody else is believed.
        """
        parts = self._parts
        for pids in containment.cookie_scan().values():
            for pid in pids:
                environment = containment.environment_of(pid)
                with contextlib.suppress(KernelError, NameRefused):
                    name = worker_name(environment.get(WORKER_ENV))
                    home, known = parts.engine.home(name), name in parts.workers
                    if environment.get(DIR_ENV) == str(home) and not known and parts.engine.lock_path(name).exists():
                        self._find_again(name, pid, by_claim=True)

    def _find_again(self, name: WorkerName, pid: int, *, by_claim: bool = False) -> bool:
        """Note down a worker that the registry lost, as what its process is; its account is the process's own.

        A program that has overwritten its environment shows no cookie, or another; an heir of the lock is of the noted
        start, sandbox and all. A claim counts only with the cookie that was noted: else whoever is of the same account
        and in a sandbox would name a worker that has none, and be started again in its place.
        """
        parts, cookie = self._parts, containment.cookie_of(pid)
        note = notes.read(parts.engine.home(name))
        if cookie is None and note is not None and not by_claim:
            cookie = note.cookie
        if cookie is None or ids.read_stat(pid).session != pid:
            return False
        if by_claim and (note is None or note.cookie != cookie):
            return False
        # The directory is the account's. An heir of the lock may have given up our rights by itself.
        account = containment.account_of(parts.engine.lock_path(name))
        gave_up = account == os.geteuid() and not by_claim
        if not gave_up and ids.accounts_of(pid) != {account}:
            return False
        pidfd = ids.open_pidfd(pid)
        try:
            identity = ids.identity_of(pidfd, pid)
            spec = self._spec_of(name, pid) if note is None else note.spec
            if ids.is_readable(pidfd):
                return False
        except SpecError as err:
            self._leave_stopped(name, pid, err)
            return True
        finally:
            os.close(pidfd)
        record = WorkerRecord(name, encoded_spec(spec), "running", State.RUNNING, cookie, identity)
        self._know(replace(record, started_at=self._parts.started_at(identity)))
        return True

    def _spec_of(self, name: WorkerName, pid: int) -> WorkerSpec:
        spec = spec_from_process(pid, self._parts.engine.fields_of_running(name, pid))
        self._parts.engine.check(spec)
        return spec

    def _know(self, record: WorkerRecord) -> None:
        self._parts.registry.save(record)
        self._parts.workers[record.name] = self._worker(record)

    def _leave_stopped(self, name: WorkerName, pid: int, error: SpecError) -> None:
        """It runs, and we do not know as whom we may start it again: so we do not, and say why."""
        parts = self._parts
        spec = WorkerSpec(command=(ids.command_line(pid) or "unknown",))
        record = WorkerRecord(name, encoded_spec(spec), "stopped", State.STOPPED, containment.new_cookie())
        with parts.registry.transaction():
            parts.registry.save(record)
            parts.events.append(name, EventKind.LOCK_CONFLICT, pid=pid, command=ids.command_line(pid), why=str(error))
        parts.workers[name] = self._worker(record)

    def _believe_locks(self) -> list[str]:
        """Where a lock is held by a start that the registry does not know (it is older), the lock is right.

        The note beside the lock tells of which start it is; a registry restored from a backup tells of another.
        """
        newer = []
        for worker in self._parts.workers.values():
            home = f"{self._parts.engine.workers_dir}/{worker.name}"
            if not notes.tells_of_another_start(home, worker.record.cookie) or not flock.is_held(worker.lock_path):
                continue
            note, leader = notes.read(home), leader_by_lock(worker.lock_path)
            if note is None or leader is None:
                continue
            pidfd, identity = leader
            os.close(pidfd)
            before, cgroup = worker.record, worker.record.cgroup
            worker.record = replace(
                before,
                spec_json=encoded_spec(note.spec),
                desired="running",
                phase=State.RUNNING,
                cookie=note.cookie,
                identity=identity,
                # A replacement may be born in the cgroup of the one before, and its owner die before it is recorded.
                cgroup=cgroup if cgroup is not None and containment.is_inside(cgroup, identity.pid) else None,
                started_at=self._parts.started_at(identity),
            )
            with self._parts.registry.transaction():
                if before.identity is not None and ids.answer(before.identity) is ids.Answer.DIFFERENT:
                    # Its end was not recorded, because the owner died first: that it ended is told all the same.
                    self._parts.events.append(
                        before.name,
                        EventKind.EXITED,
                        pid=before.identity.pid,
                        exit=exit_detail(UnknownExit()),
                        why_unknown=_OWNER_DIED_FIRST,
                    )
                    worker.record = replace(worker.record, exit=UnknownExit(), restarts=before.restarts + 1)
                self._parts.registry.save(worker.record)
            newer.append(worker.name)
        return newer

    def _remake_homes(self) -> list[str]:
        """A record without a directory (a power cut, somebody's rm): it gets an empty one again, and that is said."""
        remade, workers_dir = [], self._parts.engine.workers_dir
        for worker in self._parts.workers.values():
            # Of a home that was made just before the cut the disk may have a part only.
            if not os.path.isdir(f"{workers_dir}/{worker.name}/{DATA}"):  # noqa: PTH112 - ten thousand times
                with contextlib.suppress(StateDirRefused, RegistryUnavailable):
                    self._parts.engine.prepare(worker.record.name, worker.record.spec)
                    remade.append(worker.name)
        if remade:
            _log.warning("%d workers had no directory any more and got an empty one: %s", len(remade), remade[:20])
        return remade

    # --- ending -------------------------------------------------------------------------------------------------

    async def _end_orphans(self, orphans: dict[str, _Seen]) -> dict[str, Outcome]:
        """End what should not live, all at once, and note why; returns those that could not be ended."""

        def gone(outcomes: dict[str, Outcome]) -> None:
            ended = {name: outcome for name, outcome in outcomes.items() if outcome.gone}
            self._parts.note([self._reaped(orphans[name], outcome) for name, outcome in ended.items()])
            for name in ended:
                orphans[name].worker.let_go()

        subjects = [self._ending.subject(one.worker) for one in orphans.values()]
        outcomes = await self._ending.end_trees(subjects, gone, kill_patience_seconds=_UNKILLABLE_SECONDS)
        return {name: outcome for name, outcome in outcomes.items() if not outcome.gone}

    def _reaped(self, orphan: _Seen, outcome: Outcome) -> Change:
        worker, decision = orphan.worker, orphan.decision
        why = decision.why if isinstance(decision, rules.EndTree) else "wanted-stopped"
        if why == "wanted-stopped" or worker.record.desired == "stopped":
            return self._ending.stopped(worker, outcome)
        record = worker.record
        told = [*killed(outcome), (EventKind.ORPHAN_REAPED, {"pid": pid_of(record), "why": why})]
        if why == "bound-orphan":
            record = replace(record, phase=State.STOPPED, identity=None, cgroup=None)
        return worker, record, told

    # --- who cannot be killed ---------------------------------------------------------------------------------------

    def _leave_unkillable(self, orphan: _Seen, outcome: Outcome) -> None:
        """It survived SIGKILL (in a call into a dead disk or mount): it goes on when the kernel lets go of it."""
        worker = orphan.worker
        survivors = [{"pid": one.pid, "command": one.command[:200]} for one in outcome.survivors]
        pids = ", ".join(str(one["pid"]) for one in survivors) or "a process that could not be found"
        reason = f"pid {pids} survived SIGKILL: in a call that cannot be interrupted; it goes on when that returns"
        _log.error("worker %r: %s", worker.name, reason)
        stuck = replace(worker.record, phase=State.STOPPING, reason=reason)
        event = (EventKind.STOPPING, {"pid": pid_of(worker.record), "reason": reason, "survivors": survivors})
        self._parts.note([(worker, stuck, [event])])
        self._parts.tasks.start(self._go_on_when_released(orphan, tuple(one.pid for one in outcome.survivors)))

    async def _go_on_when_released(self, orphan: _Seen, pids: tuple[int, ...]) -> None:
        parts, worker = self._parts, orphan.worker
        cookie = worker.record.cookie
        while True:
            await self._ended(pids)
            async with parts.turns.of(worker.name):
                if parts.closing or parts.workers.get(worker.name) is not worker or worker.record.cookie != cookie:
                    return
                if worker.record.phase is not State.STOPPING:
                    return
                tree = worker.tree()
                pids = tuple(containment.members([tree])[tree.cookie])
                if not pids and containment.is_gone(tree, ()):
                    worker.record = replace(worker.record, reason=None)
                    parts.note([self._reaped(orphan, Outcome(gone=True))])
                    worker.let_go()
                    await self.bring_up(worker)
                    return
            if not pids:  # somebody holds its lock whom we cannot see: there is nothing to wait for but time
                await asyncio.sleep(RETRY_SECONDS)  # noqa: TID251 - see above

    async def _ended(self, pids: Sequence[int]) -> None:
        """Wait until all of them have ended."""
        for pid in pids:
            try:
                pidfd = ids.open_pidfd(pid)
            except KernelError:
                continue
            ended = asyncio.Event()
            self._parts.watch.ended(pidfd, ended.set)
            try:
                await ended.wait()
            finally:
                self._parts.watch.forget(pidfd)
                os.close(pidfd)
