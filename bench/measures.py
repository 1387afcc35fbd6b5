"""What is measured. Each function takes a driver and a size, does it once, and returns plain numbers.

Times are taken on ``CLOCK_MONOTONIC``: the manager is asked at ``begin``, workers stamp the board when they run, and
deaths are seen on pidfds that were opened before. ``/proc`` is read only before and after.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import members, sandbox_cost
from bench.board import DONE, PLANTED, Board
from bench.drivers.driver import Driver, Span
from bench.plan import Plan, Worker, plan_for
from bench.processes import Watch, activity_of, memory_of, runs_order

Sample = dict[str, Any]

_START_SECONDS = 240.0
_STOP_SECONDS = 240.0
_SETTLE_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how thoroughly one sample is taken."""

    directory: Path
    quick: bool = False
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Life:
    """A manager that runs its plan."""

    driver: Driver
    board: Board
    plan: Plan
    begin: Span | None = None

    def workers(self) -> set[int]:
        """Every pid that ever stamped."""
        return {stamp.pid for stamp in self.board.stamps(kind=None)}

    def copies(self) -> list[int]:
        """How many live processes each worker of the plan has."""
        alive: Counter[int] = Counter()
        for stamp in self.board.stamps():
            alive[stamp.slot] += runs_order(stamp.pid, self.plan.workers[stamp.slot].order)
        return [alive[slot] for slot in range(len(self.plan.workers))]

    def settle(self) -> None:
        """Wait until nothing has begun to run for a while; no clock runs here."""
        seen, since = -1, time.monotonic()
        while time.monotonic() - since < _SETTLE_SECONDS:
            if self.board.published != seen:
                seen, since = self.board.published, time.monotonic()
            time.sleep(0.05)


def spawn(driver_type: type[Driver], count: int, setting: Setting) -> Sample:
    """Start ``count`` workers, look at the manager's memory, stop them all."""
    with _life(driver_type, plan_for(*_place(setting), count), start=False) as life:
        empty = memory_of(life.driver.managers(set()))
        began = life.driver.start()
        life.board.wait_for(count, _START_SECONDS)
        running_ns = max(stamp.at_ns for stamp in life.board.stamps())
        _let_bookkeeping_finish()
        workers = life.workers()
        full = memory_of(life.driver.managers(workers))
        stopped_ns, left = _stop_all(life, workers)
        return {
            "spawn_ms": (max(running_ns, began.end_ns) - began.begin_ns) / 1e6,
            "running_ms": (running_ns - began.begin_ns) / 1e6,
            "returned_ms": (began.end_ns - began.begin_ns) / 1e6,
            "pss_empty": empty.pss,
            "pss_full": full.pss,
            "private_empty": empty.private,
            "private_full": full.private,
            "stop_ms": stopped_ns / 1e6,
            "left_after_stop": left,
        }


def idle(driver_type: type[Driver], count: int, setting: Setting) -> Sample:
    """How often the manager wakes up while nothing happens."""
    seconds = 4.0 if setting.quick else 20.0
    with _life(driver_type, plan_for(*_place(setting), count)) as life:
        time.sleep(2.0)  # first-time work after the start (log files, cgroup moves, timers) is not idling
        managers = life.driver.managers(life.workers())
        before = activity_of(managers)
        time.sleep(seconds)
        spent = activity_of(managers).since(before)
        return {"seconds": seconds, "switches": spent.switches, "cpu_ms": spent.cpu_seconds * 1e3}


def restart(driver_type: type[Driver], count: int, setting: Setting) -> Sample:
    """Kill (-9) one worker after another and time until its replacement runs; for ours and the limit, three times each.

    A p99 of a hundred kills is one kill, which tells more of the machine than of the manager.
    """
    budget_seconds = 3.0 if setting.quick else 25.0
    times = 1 if setting.quick or driver_type.kind == "peer" else 3
    with _life(driver_type, plan_for(*_place(setting), count)) as life:
        time.sleep(1.5)  # some managers hold back what ran for less than a second; that is not a first restart
        delays_ms = []
        deadline = time.monotonic() + budget_seconds
        for number in range(times * count):
            victim = life.board.stamps(after=number)[0]  # the replacements stand behind those whom they replaced
            seen = life.board.published
            killed_ns = time.monotonic_ns()
            os.kill(victim.pid, signal.SIGKILL)
            life.board.wait_for(seen + 1, 30.0)
            delays_ms.append((life.board.stamps(after=seen)[0].at_ns - killed_ns) / 1e6)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)  # one crash at a time: the manager's bookkeeping of the last one is not in the way
        return {"delays_ms": delays_ms}


def deaf(driver_type: type[Driver], count: int, setting: Setting) -> Sample:
    """Stop workers that ignore SIGTERM, with a grace of 2 s."""
    with _life(driver_type, plan_for(*_place(setting), count, "deaf", grace_seconds=2)) as life:
        _let_bookkeeping_finish()
        stopped_ns, left = _stop_all(life, life.workers(), timeout_seconds=90)
        return {"stop_ms": stopped_ns / 1e6, "left_after_stop": left}


def crash(driver_type: type[Driver], count: int, setting: Setting) -> Sample:
    """Kill (-9) the manager, start it again, and count the copies of each worker.

    Variants: ``plain``; ``talk`` (workers print while it happens); ``helpers`` (per-worker helpers die too).
    """
    mode = "talk" if setting.variant == "talk" else "plain"
    with _life(driver_type, plan_for(*_place(setting), count, mode, grace_seconds=2)) as life:
        life.settle()
        first = life.workers()
        if setting.variant == "helpers":
            life.driver.kill_with_helpers(first)
        else:
            life.driver.kill_manager()
        time.sleep(0.5)  # workers that die of the broken pipe do so at their next line, 50 ms apart
        died = life.copies().count(0)
        life.driver.again()
        life.settle()
        copies = life.copies()
        everyone = life.workers()
        _, left = _stop_all(life, everyone, timeout_seconds=5)
        return {
            "died_with_manager": died,
            "duplicates": sum(max(0, number - 1) for number in copies),
            "lost": copies.count(0),
            "not_stoppable": left,
        }


def escape(driver_type: type[Driver], count: int, setting: Setting) -> Sample:
    """Plant a child, a child in its own session and a daemon, ``count`` of each; who is alive after stop?"""
    kinds = ("child", "setsid", "daemon")
    directory, board_path = _place(setting)
    workers = [Worker(f"w{slot}", f"{board_path}:{slot}:{kinds[slot // count]}") for slot in range(count * len(kinds))]
    plan = Plan(directory=directory, workers=workers, grace_seconds=2)
    with _life(driver_type, plan, expected=2 * len(workers)) as life:
        _let_bookkeeping_finish()
        planted = life.board.stamps(kind=PLANTED)
        _stop_all(life, {stamp.pid for stamp in life.board.stamps()})
        time.sleep(0.5)
        alive = Counter(kinds[stamp.slot // count] for stamp in planted if runs_order(stamp.pid, str(board_path)))
        return {kind: alive[kind] for kind in kinds}


def adopt(driver_type: type[Driver], count: int, setting: Setting) -> Sample:
    """Kill (-9) the manager of ``count`` live workers and time how long opening again takes."""
    with _life(driver_type, plan_for(*_place(setting), count)) as life:
        _let_bookkeeping_finish()
        life.driver.kill_manager()
        opened = life.driver.reopen()
        copies = life.copies()
        stopped_ns, left = _stop_all(life, life.workers())
        return {
            "open_ms": (opened.end_ns - opened.begin_ns) / 1e6,
            "running_once": copies.count(1),
            "stop_ms": stopped_ns / 1e6,
            "left_after_stop": left,
        }


def logs(driver_type: type[Driver], count: int, setting: Setting) -> Sample:
    """One worker prints ``count`` numbered lines of 100 bytes; rotation at 10 MB; nothing may be missing.

    Variants: ``lines`` (one write per line) and ``blocks`` (64,000 bytes per write).
    """
    directory, board_path = _place(setting)
    worker = Worker("w0", f"{board_path}:0:{setting.variant}:{count}")
    plan = Plan(directory=directory, workers=[worker], log_keep=count // 50_000 + 10, keeps_logs=True)
    with _life(driver_type, plan) as life:
        life.board.wait_for(2, _START_SECONDS)
        (began,), (done,) = life.board.stamps(), life.board.stamps(kind=DONE)
        kept = _kept_lines(life.driver, count)
        numbers = Counter(int(line[:10]) for line in kept if _whole(line))
        seconds = (done.at_ns - began.at_ns) / 1e9
        return {
            "seconds": seconds,
            "mb_per_second": count * 100 / 1e6 / seconds,
            "lost": count - len(numbers),
            "torn": sum(not _whole(line) for line in kept),
            "twice": sum(times - 1 for times in numbers.values()),
        }


def member(_driver_type: type[Driver], count: int, setting: Setting) -> Sample:
    """So many starts on the owner and as many through a member, in turns."""
    found = members.verbs(setting.directory / "state", count, "power")
    return {name: found[name] for name in ("owner_ms", "member_ms", "ratio")}


def sandbox(_driver_type: type[Driver], count: int, _setting: Setting) -> Sample:
    """What a sandbox adds to a start, in processor time, so many rounds in turns."""
    processor = {name: cost.processor_ms for name, cost in sandbox_cost.costs(count).items()}
    return {f"{name}_more_ms": processor[name] - processor["off"] for name in ("basic", "strict")}


@dataclass(frozen=True, slots=True)
class Measure:
    """A measurement and the sizes at which it is taken."""

    run: Callable[[type[Driver], int, Setting], Sample]
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    repeats: int
    headline: str
    """The number that decides whether a run was noisy; none for counts."""
    variants: tuple[str, ...] = ("",)
    applies: Callable[[type[Driver], str, int, bool], bool] = lambda driver, variant, count, quick: True  # noqa: ARG005


# In three minutes everybody is started once, and these few show what the other measurements look like.
_QUICK = frozenset({"popen", "everdeck", "everdeck-daemon", "s6", "supervisor"})


def _if_not_too_many(driver: type[Driver], _variant: str, count: int, _quick: bool) -> bool:
    return count <= driver.most


def _if_idle(driver: type[Driver], _variant: str, count: int, quick: bool) -> bool:
    # A thousand for us and for the limit, as the bar asks; a hundred shows what peers do.
    return _among(driver, quick) and (quick or (count == 1000) == (driver.kind != "peer"))


def _if_it_restarts(driver: type[Driver], _variant: str, _count: int, quick: bool) -> bool:
    return driver.restarts and (not quick or driver.name in _QUICK)


def _if_it_knows_grace(driver: type[Driver], _variant: str, _count: int, quick: bool) -> bool:
    return _among(driver, quick)


def _if_it_can_crash(driver: type[Driver], variant: str, _count: int, quick: bool) -> bool:
    return _among(driver, quick) and (variant == "plain" or not quick) and (variant != "helpers" or driver.helpers)


def _if_it_adopts(driver: type[Driver], _variant: str, count: int, quick: bool) -> bool:
    return driver.adopts and count <= driver.most and (not quick or driver.name in _QUICK)


def _if_it_keeps_logs(driver: type[Driver], variant: str, _count: int, quick: bool) -> bool:
    return driver.keeps_logs and (not quick or (driver.name in _QUICK and variant == "lines"))


def _if_it_is_the_library(driver: type[Driver], _variant: str, _count: int, _quick: bool) -> bool:
    return driver.name == "everdeck"


def _among(driver: type[Driver], quick: bool) -> bool:
    return driver.name in _QUICK if quick else driver.name != "posix_spawn"


MEASURES: dict[str, Measure] = {
    "spawn": Measure(spawn, (10, 100, 1000, 5000), (50,), 3, "spawn_ms", applies=_if_not_too_many),
    "idle": Measure(idle, (100, 1000), (50,), 1, "", applies=_if_idle),
    "restart": Measure(restart, (100,), (10,), 1, "", applies=_if_it_restarts),
    "deaf": Measure(deaf, (20,), (5,), 1, "stop_ms", applies=_if_it_knows_grace),
    "crash": Measure(crash, (50,), (5,), 1, "", ("plain", "talk", "helpers"), _if_it_can_crash),
    "escape": Measure(escape, (3,), (1,), 1, "", applies=_if_it_knows_grace),
    "adopt": Measure(adopt, (10, 100, 1000, 5000), (100,), 3, "open_ms", applies=_if_it_adopts),
    "logs": Measure(logs, (2_000_000,), (100_000,), 3, "seconds", ("lines", "blocks"), _if_it_keeps_logs),
    "member": Measure(member, (1000,), (100,), 1, "", applies=_if_it_is_the_library),
    "sandbox": Measure(sandbox, (300,), (30,), 1, "", applies=_if_it_is_the_library),
}


# --- steps of the measurements -----------------------------------------------------------------------------------


def _place(setting: Setting) -> tuple[Path, Path]:
    return setting.directory / "manager", setting.directory / "board"


@contextmanager
def _life(driver_type: type[Driver], plan: Plan, *, start: bool = True, expected: int | None = None) -> Iterator[Life]:
    plan.directory.mkdir(parents=True, exist_ok=True)
    total = expected if expected is not None else len(plan.workers)
    with Board(plan.directory.parent / "board", capacity=8 * total + 4096) as board:
        driver = driver_type(plan)
        try:
            driver.up()
            life = Life(driver, board, plan)
            if start:
                life = replace(life, begin=driver.start())
                board.wait_for(total, _START_SECONDS)
            yield life
        finally:
            driver.down()


def _let_bookkeeping_finish() -> None:
    # What a manager does after its workers run (log threads, cgroup moves, dump files) is neither start nor stop.
    time.sleep(0.5)


def _stop_all(life: Life, workers: set[int], timeout_seconds: float = _STOP_SECONDS) -> tuple[int, int]:
    """How many ns stopping took until the call returned and all were dead, and how many were not."""
    watch = Watch(workers)
    try:
        span = life.driver.stop()
        watch.wait(0.0)
        end_ns = span.end_ns if watch.left == 0 else watch.wait(timeout_seconds)
        return end_ns - span.begin_ns, watch.left
    finally:
        watch.close()


def _kept_lines(driver: Driver, count: int) -> list[bytes]:
    """The worker's lines as they were kept, once they are no more: pipes drain after the writer is done."""
    seen, since, lines = -1, time.monotonic(), list[bytes]()
    while len(lines) < count and time.monotonic() - since < _SETTLE_SECONDS:
        # Managers may add lines of their own, which begin with dashes; ours begin with a number.
        kept = driver.output("w0").splitlines(keepends=True)
        lines = [line for line in kept if not line.startswith((b"---", b"\n"))]
        if len(lines) != seen:
            seen, since = len(lines), time.monotonic()
    return lines


def _whole(line: bytes) -> bool:
    return len(line) == 100 and line.endswith(b".\n") and line[:10].isdigit()
