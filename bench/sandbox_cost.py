"""What a sandbox costs per start, and what the start of an interpreter would cost instead.

    python bench/sandbox_cost.py [--rounds 300]

Each round starts one program without a sandbox, with ``basic`` and with ``strict``, one after another, so that all
three see the same machine. The cost is processor time, ours and the child's, because that is what a busy machine does
not blur; the time on the clock is told beside it. The goal for ``strict`` is a millisecond more than without.
"""

import argparse
import contextlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everdeck.deck import rights
from everdeck.kernel import spawn
from everdeck.model import Sandbox, WorkerSpec

GOAL_MILLISECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one start, in the middle of all rounds."""

    processor_ms: float
    clock_ms: float


def main() -> int:
    """Print one line per way to start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=300)
    found = costs(parser.parse_args().rounds)
    for name, cost in found.items():
        more = cost.processor_ms - found["off"].processor_ms
        print(
            f"{name:<22} {cost.processor_ms:6.2f} ms of processor time ({more:+.2f}), {cost.clock_ms:6.2f} on the clock"
        )
    return int(found["strict"].processor_ms - found["off"].processor_ms > GOAL_MILLISECONDS)


def costs(rounds: int) -> dict[str, Cost]:
    """What each way to start costs, in turns."""
    with tempfile.TemporaryDirectory() as place:
        home = Path(place, "workers/alice")
        for part in ("data", "tmp", "secrets"):
            (home / part).mkdir(parents=True)
        ways: dict[str, Callable[[], None]] = {
            level: lambda level=level: _started(["/bin/true"], home, Sandbox(level))  # type: ignore[misc]
            for level in ("off", "basic", "strict")
        }
        ways["an interpreter first"] = lambda: _started([spawn.python_program(), "-I", "-S", "-c", ""], home, Sandbox())
        samples: dict[str, list[Cost]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                samples[name].append(_measured(way))
    return {
        name: Cost(
            statistics.median(one.processor_ms for one in found), statistics.median(one.clock_ms for one in found)
        )
        for name, found in samples.items()
    }


def _started(command: list[str], home: Path, box: Sandbox) -> None:
    spec = WorkerSpec(tuple(command), sandbox=box)
    with contextlib.ExitStack() as opened:
        birth = opened.enter_context(rights.born(spec, home, None, None))
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, null)
        env, cwd = {"PATH": os.defpath}, str(home / "data")
        child = spawn.spawn(command, env=env, cwd=cwd, stdin_fd=null, stdout_fd=null, stderr_fd=null, birth=birth)
    os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
    os.close(child.pidfd)


def _measured(way: Callable[[], None]) -> Cost:
    before, begin = _processor_seconds(), time.perf_counter()
    way()
    return Cost((_processor_seconds() - before) * 1000, (time.perf_counter() - begin) * 1000)


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    raise SystemExit(main())
