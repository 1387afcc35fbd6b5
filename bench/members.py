"""Owner and members: how long a takeover takes, what a verb through a member costs, what an idle member costs.

    python -m bench.members takeover --workers 1000 --trials 20
    python -m bench.members verbs --starts 1000
    python -m bench.members idle --seconds 10
    python -m bench.members handover --workers 50 --trials 100

Each prints one line of JSON. A takeover is measured from the SIGKILL of the owner to the first verb that its successor
answered, in a member that asked at once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from everdeck import Deck, Restart

OTHER = """
import sys, time
from everdeck import Deck, Restart
deck = Deck(sys.argv[1], durability=sys.argv[2])
print("up", flush=True)
for line in sys.stdin:
    first, last = map(int, line.split())
    began = time.perf_counter()
    for number in range(first, last):
        deck.start(f"o{number}", ["true"], restart=Restart("never"))
    print(time.perf_counter() - began, flush=True)
deck.close()
"""
SLEEPER = ["sleep", "100000"]


@contextmanager
def other(state: Path, durability: str = "process") -> Iterator["subprocess.Popen[str]"]:
    """Another process that has the deck open, killed in the end."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(state), durability], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - asked for above
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def takeover(state: Path, workers: int, trials: int) -> dict[str, Any]:
    """Kill the owner, ask at once: the member that asks takes over."""
    seconds, cpu = [], []
    deck = Deck(state, durability="process")
    deck.start_many({f"w{number}": SLEEPER for number in range(workers)})
    pids = {one.name: one.pid for one in deck.list()}
    try:
        for _ in range(trials):
            with other(state) as owner:
                deck.close()  # politely: the other process owns the deck now
                deck = Deck(state, durability="process")
                assert deck.abilities().kind == "member"  # noqa: S101 - else there is nothing to measure
                began, used = time.perf_counter(), time.process_time()
                owner.kill()
                deck.status("w0")
                seconds.append(time.perf_counter() - began)
                cpu.append(time.process_time() - used)
                assert deck.abilities().kind == "owner"  # noqa: S101 - as above
        same = pids == {one.name: one.pid for one in deck.list()}
        spread = {**_spread(seconds), "cpu_p50_ms": round(statistics.median(cpu) * 1000, 1)}
        return {"workers": workers, "trials": trials, **spread, "same_processes": same}
    finally:
        deck.stop_all()
        deck.close()


def verbs(state: Path, starts: int, durability: str) -> dict[str, Any]:
    """The same starts on the owner and through a member, in turns of a hundred, in one run."""
    on_owner, through_member = [], []
    with other(state, durability) as owner, Deck(state, durability=durability) as deck:  # type: ignore[arg-type]
        assert deck.abilities().kind == "member"  # noqa: S101 - else there is nothing to compare
        assert owner.stdin is not None  # noqa: S101 - asked for above
        assert owner.stdout is not None  # noqa: S101 - as above
        for first in range(0, starts, 100):
            owner.stdin.write(f"{first} {first + 100}\n")
            owner.stdin.flush()
            on_owner.append(float(owner.stdout.readline()) / 100)
            began = time.perf_counter()
            for number in range(first, first + 100):
                deck.start(f"m{number}", ["true"], restart=Restart("never"))
            through_member.append((time.perf_counter() - began) / 100)
        owner.stdin.close()
        owner.wait(60)
    return {
        "starts": starts,
        "durability": durability,
        "owner_ms": round(statistics.median(on_owner) * 1000, 3),
        "member_ms": round(statistics.median(through_member) * 1000, 3),
        "ratio": round(statistics.median(through_member) / statistics.median(on_owner), 2),
    }


def idle(state: Path, seconds: float) -> dict[str, Any]:
    """How often any thread of a member's deck is switched to while nothing happens."""
    with other(state), Deck(state) as deck:
        deck.start("w", SLEEPER)
        threading.Event().wait(2)
        before = _switches()
        threading.Event().wait(seconds)
        after = _switches()
        deck.stop_all()
    return {"seconds": seconds, "wake_ups": sum(after[task] - before.get(task, 0) for task in after)}


def handover(state: Path, workers: int, trials: int) -> dict[str, Any]:
    """Owner after owner leaves politely; how many bound workers ended."""
    deck = Deck(state, durability="process")
    pids = {one.name: one.pid for one in deck.start_many({f"b{n}": SLEEPER for n in range(workers)}, lifetime="bound")}
    seconds, ended = [], 0
    for _ in range(trials):
        successor = Deck(state, durability="process")
        began = time.perf_counter()
        deck.close()
        successor.status("b0")
        seconds.append(time.perf_counter() - began)
        deck = successor
        now = {one.name: one.pid for one in deck.list()}
        ended += sum(now[name] != pid for name, pid in pids.items())
        pids = now
    deck.stop_all()
    deck.close()
    return {"workers": workers, "trials": trials, "ended": ended, **_spread(seconds)}


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_ms": round(statistics.median(ordered) * 1000, 1),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1000, 1),
    }


def _switches() -> dict[str, int]:
    """Voluntary switches of every thread but this one."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            text = (task / "status").read_text()
            found[task.name] = int(text.split("voluntary_ctxt_switches:")[1].split()[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("takeover", "verbs", "idle", "handover"))
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--durability", choices=("power", "process"), default="power")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="everdeck-members-") as folder:
        state = Path(folder) / "state"
        match options.what:
            case "takeover":
                found = takeover(state, options.workers, options.trials)
            case "verbs":
                found = verbs(state, options.starts, options.durability)
            case "idle":
                found = idle(state, options.seconds)
            case _:
                found = handover(state, options.workers, options.trials)
    print(json.dumps({"what": options.what, **found}))


if __name__ == "__main__":
    main()
