"""What follows when a worker ended by itself, or is ill: its policy decides, here it is carried out.

The leader's end is heard from its pidfd. What it left behind is ended first, then the end is recorded with what the
policy says (:func:`everdeck.deck.reconcile.after_end`): rest, start again at once or after a delay, or give up. A delay
is one timer for one worker; nobody else waits for it. A start that fails goes back to the queue, so that a stop is
always heard.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from typing import Any, Final, assert_never

from msgspec.structs import replace

from everdeck.crashpoints import crash_point
from everdeck.deck import daemons
from everdeck.deck import reconcile as rules
from everdeck.deck.ending import Ending, exit_detail, killed, out_of_memory, pid_of, stop_failed
from everdeck.deck.outcomes import End
from everdeck.deck.parts import RETRY_SECONDS, Parts
from everdeck.deck.starting import Starting
from everdeck.deck.worker import Worker
from everdeck.errors import EverdeckError, KernelError, RegistryError, StopFailed
from everdeck.kernel import containment, controllers, exits
from everdeck.kernel import identity as ids
from everdeck.logs import files as logfiles
from everdeck.model import EventKind, Exit, Exited, Killed, State, UnknownExit
from everdeck.registry import WorkerRecord

_log: Final = logging.getLogger("everdeck.deck")

_EXIT_PATIENCE_SECONDS: Final = 5.0  # how long an adopted worker's new parent may take to reap it
_NEVER_RAN: Final = exits.from_wait_status(127 << 8)
# A power cut leaves no trace where it took lines from the end of a log, so the mark after them tells of it.
_WITH_THE_MACHINE: Final = "with the machine: what it wrote last may not have reached the disk"
_RAN_SECONDS: Final = 1.0
_ILL: Final = exits.from_wait_status(signal.SIGKILL)


class Healing:
    """Carries out restart policies."""

    def __init__(self, parts: Parts, ending: Ending, starting: Starting) -> None:
        self._parts = parts
        self._ending = ending
        self._starting = starting

    def died(self, worker: Worker) -> None:
        """A pidfd became readable. Called by the death watch."""
        if not self._parts.closing:
            self._parts.tasks.start(self._ended(worker))

    async def _ended(self, worker: Worker) -> None:
        parts = self._parts
        await self.reaped(worker)  # before it takes its turn: a stop does not wait for somebody's parent
        async with parts.turns.of(worker.name):
            if parts.workers.get(worker.name) is worker and not parts.closing:
                await self.ended(worker)

    async def ended(self, worker: Worker) -> None:
        """The leader ended and nobody asked for it: end what it left behind, then do as its policy says."""
        if worker.pidfd is None or ids.is_alive(worker.pidfd):
            return
        self._parts.watch.forget(worker.pidfd)
        crash_point("ended.seen")
        try:
            if worker.record.desired == "stopped":
                # Its stop could not be finished when it was asked for (disk full): finish it. It was no crash.
                await self._ending.stop([worker])
                return
            ended_as, kills = _exit_of(worker), _kernel_kills(worker)
            if kills and ended_as == Killed(signal.SIGKILL):
                ended_as = Killed(signal.SIGKILL, oom=True)
            left_behind, alone = [], containment.is_gone(worker.tree(), leader_ended=True)
            if not alone:
                left_behind = await self._end_leftovers(worker)
            await self.settle(worker, ended_as, left_behind, oom_kills=kills, alone=alone)
        except (RegistryError, KernelError, StopFailed, OSError) as err:
            self._look_again(worker, err)

    async def _end_leftovers(self, worker: Worker) -> list[str]:
        """What the leader left behind goes first; while any of it lives, there is no next copy. Returns who it was."""
        tree = worker.tree()
        leader = pid_of(worker.record)
        left = [ids.command_line(pid) for pid in containment.members([tree])[tree.cookie] if pid != leader]
        outcome = (await self._ending.end_trees([self._ending.subject(worker)]))[worker.name]
        self._parts.note([(worker, worker.record, killed(outcome))] if outcome.killed else [])
        if not outcome.gone:
            raise stop_failed(worker.name, outcome)
        return [command for command in left if command]

    def _look_again(self, worker: Worker, err: Exception) -> None:
        """It is dead, and that could not be dealt with: nothing tells when it can be, so try again."""
        _log.warning("worker %r ended, which cannot be dealt with yet: %s", worker.name, err)
        if worker.has_process and not self._parts.closing:
            worker.cancel_timer()
            worker.timer = self._parts.loop.call_later(RETRY_SECONDS, self.died, worker)

    async def settle(
        self,
        worker: Worker,
        ended_as: Exit,
        left_behind: Sequence[str] = (),
        *,
        oom_kills: int = 0,
        alone: bool = False,
    ) -> None:
        """The tree is gone: decide, record, and start again if that is due at once.

        ``alone``: nobody was left when its leader had ended, so nobody had to be killed.
        """
        parts, record = self._parts, worker.record
        now = parts.clock.boottime()
        uptime = parts.uptime(record, now)
        crash_times, draw = _crash_times(record), parts.clock.draw()
        unready = record.unready + 1 if worker.awaits_ready else 0
        decision = rules.after_end(
            rules.Ended(
                ended_as,
                uptime,
                record.spec.restart,
                record.streak,
                crash_times,
                now,
                draw,
                our_child=worker.is_child,
                unready=unready,
            )
        )
        ended = replace(
            record,
            unready=unready,
            exit=ended_as,
            identity=None,
            cgroup=None,
            crash_times=decision.crash_times,
            timers_boot_id=ids.boot_id(),
            backoff_until=None,
        )
        told: dict[str, Any] = {"exit": exit_detail(ended_as), "uptime_seconds": round(uptime, 3)}
        if oom_kills:
            ended = replace(ended, reason=out_of_memory(record.spec, oom_kills))
            told["oom_kills"] = oom_kills
        if ended.reason is not None:
            told["reason"] = ended.reason
        if isinstance(ended_as, UnknownExit):
            told["why_unknown"] = _why_unknown(worker)
        if left_behind and ended_as == Exited(0):
            # A start that goes into the background looks like success, and then there is nothing: say what happened.
            why = f"it left a daemon behind, which was ended; {daemons.advice(record.spec.command)}"
            told |= {"reason": why, "left_behind": [command[:200] for command in left_behind]}
            ended = replace(ended, reason=why)
        match decision:
            case rules.Rest():
                ended = replace(ended, phase=State.EXITED, crashes=record.crashes + decision.crashed)
                self._save_end(worker, ended, told, crashed=decision.crashed)
            case rules.GiveUp():
                ended = replace(ended, phase=State.FAILED, crashes=record.crashes + 1, streak=decision.streak)
                self._save_end(worker, ended, told, crashed=True)
            case rules.RestartIn():
                ended = replace(
                    ended,
                    phase=State.BACKOFF,
                    crashes=record.crashes + decision.crashed,
                    streak=decision.streak,
                    backoff_until=now + decision.delay_seconds,
                )
                told["delay_seconds"] = round(decision.delay_seconds, 3)
                if decision.delay_seconds > 0:
                    self._save_end(worker, ended, told, crashed=decision.crashed)
                    self.start_later(worker, decision.delay_seconds)
                    return
                # One killed through its cgroup would be killed at its birth there: whoever ran for a while was not.
                # A limit may count the last one's zombie.
                again = alone and worker.is_child and not oom_kills and uptime >= _RAN_SECONDS
                again = again and not controllers.needed(record.spec.limits)
                end = End(
                    self._told_of_end(worker, ended, told, crashed=decision.crashed),
                    _mark_of_end(record, ended),
                    same_cgroup=again and record.cgroup is not None,
                )
                worker.record = ended
                if end.same_cgroup:
                    await self._replace(worker, end)
                else:
                    self._ending.let_go(worker)
                    await self._restart(worker, end)
            case _:
                assert_never(decision)

    async def _replace(self, worker: Worker, end: End) -> None:
        """Start the next one before the last one's zombie is reaped and its descriptors are closed."""
        held = self._ending.set_aside(worker)
        try:
            await self._restart(worker, end)
        finally:
            held.let_go()
            if not worker.has_process:
                self._parts.logs.unwatch(worker.record.name)

    def _save_end(self, worker: Worker, ended: WorkerRecord, told: dict[str, Any], *, crashed: bool) -> None:
        parts, mark = self._parts, _mark_of_end(worker.record, ended)
        parts.note([(worker, ended, self._told_of_end(worker, ended, told, crashed=crashed))])
        logfiles.mark(parts.engine.log_text(ended.name), mark)
        self._ending.let_go(worker)
        crash_point("ended.recorded")

    def _told_of_end(
        self, worker: Worker, ended: WorkerRecord, told: dict[str, Any], *, crashed: bool
    ) -> list[tuple[EventKind, dict[str, Any]]]:
        pid = pid_of(worker.record)
        events = [(EventKind.CRASHED if crashed else EventKind.EXITED, {"pid": pid, **told})]
        if ended.phase is State.FAILED:
            why = {} if ended.reason is None else {"reason": ended.reason}
            events.append((EventKind.FAILED, {"crashes": max(len(ended.crash_times), ended.unready), **why}))
        return events

    # --- later --------------------------------------------------------------------------------------------------

    def start_later(self, worker: Worker, delay_seconds: float) -> None:
        """One timer for this one worker; nobody else waits for it."""
        worker.cancel_timer()
        worker.timer = self._parts.loop.call_later(max(0.0, delay_seconds), self._due, worker)

    def _due(self, worker: Worker) -> None:
        worker.timer = None
        if not self._parts.closing:
            self._parts.tasks.start(self._restart_waiting(worker))

    async def _restart_waiting(self, worker: Worker) -> None:
        parts = self._parts
        async with parts.turns.of(worker.name):
            known = parts.workers.get(worker.name) is worker
            if known and worker.record.phase is State.BACKOFF and not parts.closing:
                await self._restart(worker)

    async def _restart(self, worker: Worker, end: End | None = None) -> None:
        await self.start_wanted(worker, EventKind.RESTARTED, end=end, by="policy")

    async def start_wanted(self, worker: Worker, kind: EventKind, *, end: End | None = None, **detail: Any) -> None:
        """Start it because it should run; a failure is dealt with here and goes back to the queue."""
        parts, before = self._parts, worker.record
        try:
            await self._starting.launch(worker, kind, end=end, **detail)
        except (RegistryError, OSError) as err:
            # The owner's trouble, not the worker's: nothing is counted against it.
            _log.warning("worker %r cannot be started yet: %s", worker.name, err)
            waiting = replace(before, desired="running", phase=State.BACKOFF)
            with contextlib.suppress(RegistryError):
                parts.registry.save(waiting)
            worker.record = waiting
            self.start_later(worker, RETRY_SECONDS)
        except EverdeckError as err:
            self.could_not_run(worker, before, err)

    def could_not_run(self, worker: Worker, before: WorkerRecord, error: EverdeckError) -> None:
        """It could not even be executed: that is a crash like any other, at an uptime of nothing.

        Also where it is the machine that has no process left for it: told, tried again later and later, and in the
        end left to a person, like any other reason not to run.
        """
        parts = self._parts
        now = parts.clock.boottime()
        restart = before.spec.restart
        decision = rules.after_end(
            rules.Ended(_NEVER_RAN, 0.0, restart, before.streak, _crash_times(before), now, parts.clock.draw())
        )
        again = isinstance(decision, rules.RestartIn)
        # Never at once: a program that cannot be executed fails in microseconds, and nobody else would get a turn.
        delay = max(decision.delay_seconds, 0.01) if isinstance(decision, rules.RestartIn) else 0.0
        failed = replace(
            before,
            desired="running",
            phase=State.BACKOFF if again else State.FAILED,
            identity=None,
            crashes=before.crashes + 1,
            streak=before.streak + 1,
            crash_times=decision.crash_times,
            timers_boot_id=ids.boot_id(),
            backoff_until=now + delay if again else None,
        )
        events: list[tuple[EventKind, dict[str, Any]]] = [(EventKind.CRASHED, {"pid": None, "error": str(error)})]
        if not again:
            events.append((EventKind.FAILED, {"crashes": len(failed.crash_times), "error": str(error)}))
        parts.note([(worker, failed, events)])
        if again:
            self.start_later(worker, delay)

    def explained(self, worker: Worker, crashes: int) -> None:
        """Its feed has set a message aside for so many of its crashes: they do not count towards its breaker.

        That is the worker's own word, so within a window no more are taken off than the breaker allows: whoever
        crashes and explains for ever has twice the patience, and not an endless one.
        """
        restart = worker.record.spec.restart
        since = self._parts.clock.wall() - restart.window_seconds
        recent = [one for one in worker.explained_at if one > since]
        crashes = min(crashes, len(worker.record.crash_times), restart.max_crashes - len(recent))
        if crashes <= 0:
            return
        worker.explained_at = (*recent, *[self._parts.clock.wall()] * crashes)
        left = worker.record.crash_times[: len(worker.record.crash_times) - crashes]
        if left != worker.record.crash_times:
            record = replace(worker.record, crash_times=left)
            self._parts.registry.save(record)
            worker.record = record

    # --- illness ------------------------------------------------------------------------------------------------

    def replace_unhealthy(self, worker: Worker) -> None:
        """A hung worker is ended and started again by its policy."""
        self._parts.tasks.start(self._replace_unhealthy(worker, worker.record.cookie))

    async def _replace_unhealthy(self, worker: Worker, cookie: str) -> None:
        parts = self._parts
        async with parts.turns.of(worker.name):
            if worker.record.cookie != cookie or worker.record.phase is not State.UNHEALTHY or parts.closing:
                return
            try:
                await self._end_leftovers(worker)
                worker.ended_ill = True
                # Ended by us for being ill: a crash to its policy, whatever code it managed to leave with.
                await self.settle(worker, _ILL)
            except (RegistryError, KernelError, StopFailed, OSError) as err:
                self._look_again(worker, err)

    # --- how it ended -------------------------------------------------------------------------------------------

    async def reaped(self, worker: Worker) -> None:
        """Wait a while until the leader's parent has reaped it: before that, the kernel does not tell how it ended."""
        pidfd = worker.pidfd
        if pidfd is None or worker.is_child or ids.is_alive(pidfd) or not exits.pidfds_tell():
            return
        if not isinstance(exits.told_by_pidfd(pidfd), UnknownExit):
            return
        reaped = asyncio.Event()
        self._parts.watch.reaped(pidfd, reaped.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_PATIENCE_SECONDS):
                await reaped.wait()
        if worker.pidfd == pidfd:  # else a stop has dealt with it meanwhile, and the number may be another's
            self._parts.watch.forget(pidfd)


def _exit_of(worker: Worker) -> Exit:
    """Our child waits for us; somebody else's is told by its pidfd once it was reaped."""
    if worker.pidfd is None:
        return UnknownExit()
    if worker.is_child:
        return exits.peek_child(worker.pidfd) or UnknownExit()
    return exits.told_by_pidfd(worker.pidfd)


def _kernel_kills(worker: Worker) -> int:
    """How many of its tree the kernel killed for want of memory; asked before its cgroup is removed."""
    return 0 if worker.record.cgroup is None else controllers.oom_kills(worker.record.cgroup)


def _mark_of_end(record: WorkerRecord, ended: WorkerRecord) -> str:
    """What its log is told."""
    return f"ended pid={pid_of(record)} {_WITH_THE_MACHINE if _is_of_another_boot(record) else ended.exit}"


def _is_of_another_boot(record: WorkerRecord) -> bool:
    return record.identity is not None and record.identity.boot_id != ids.boot_id()


def _why_unknown(worker: Worker) -> str:
    if _is_of_another_boot(worker.record):
        return "it ended with the machine, which was switched off or booted anew"
    if worker.pidfd is None:
        return "it ended while nobody watched"
    if not exits.pidfds_tell():
        return "it was another process's child, and this kernel does not tell how such a one ended (Linux 6.15 does)"
    return f"its parent did not reap it within {_EXIT_PATIENCE_SECONDS:g} s"


def _crash_times(record: WorkerRecord) -> tuple[float, ...]:
    """The crashes of this boot: seconds since another boot mean nothing now."""
    return record.crash_times if record.timers_boot_id == ids.boot_id() else ()


def exit_of_zombie(record: WorkerRecord) -> Exit:
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
