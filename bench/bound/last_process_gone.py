"""From the owner's SIGKILL to the last bound process gone, and what the guardian weighs.

    python bench/bound/last_process_gone.py [--quick] [--trials N] [--workers N] [--json FILE]

Each trial starts an owner with N bound workers, waits until every one of them has said that it is in its body, kills
the owner with SIGKILL and waits on the pidfds of all workers. Three kinds of workers: Python programs in
``with lifeline()``; shells that read their stdin, the oldest form of cooperation; and programs that ignore their
lifeline and SIGTERM, which the guardian ends after their grace.
"""

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCE = str(Path(__file__).parents[2] / "src")
DEADLINE_SECONDS = 120.0
GRACE_SECONDS = 1.0

LIFELINE = """
import sys
sys.path.insert(0, sys.argv[2])
from everdeck.child import lifeline
with lifeline():
    with open(sys.argv[1], "w") as fifo:  # closed here: what a signal raises in a file's destructor, Python drops
        fifo.write("x")
    __import__("signal").pause()
"""
KINDS: dict[str, list[str]] = {
    "python, with lifeline()": [sys.executable, "-S", "-E", "-c", LIFELINE, "FIFO", SOURCE],
    "sh, reads stdin": ["sh", "-c", "printf x > FIFO; read _"],
    "deaf, grace 1 s": ["sh", "-c", "trap '' TERM INT HUP; printf x > FIFO; while :; do sleep 60 & wait; done"],
}
OWNER = """
import asyncio, json, re, sys
from everdeck.deck import AsyncDeck
from everdeck.model import Stop

async def main():
    state, workers, grace, *command = sys.argv[1:]
    deck = AsyncDeck(state)
    await deck.open()
    pids = []
    for number in range(int(workers)):
        status = await deck.start(f"bot-{number}", command, lifetime="bound", stop=Stop(grace_seconds=float(grace)))
        pids.append(status.pid)
    guardian = re.search("guardian pid ([0-9]+)", (await deck.layers("bot-0"))[0].why)
    print(json.dumps({"pids": pids, "guardian": int(guardian[1])}), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def trial(kind: str, workers: int, directory: Path) -> dict[str, float]:
    """One owner's life and death: seconds until the last worker was gone, and the guardian's PSS before."""
    fifo = directory / "fifo"
    os.mkfifo(fifo)
    words = os.open(fifo, os.O_RDWR)
    command = [word.replace("FIFO", str(fifo)) for word in KINDS[kind]]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory / "state"), str(workers), str(GRACE_SECONDS), *command],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": SOURCE},
    )
    told = json.loads(owner.stdout.readline())  # type: ignore[union-attr]  # it is a pipe
    said = 0
    while said < workers:
        _await(words, time.monotonic() + DEADLINE_SECONDS, "a worker did not get into its body")
        said += len(os.read(words, 4096))
    pidfds = [os.pidfd_open(pid) for pid in told["pids"]]
    guardian = os.pidfd_open(told["guardian"])
    pss = _pss_bytes(told["guardian"])
    began = time.monotonic()
    owner.kill()
    for pidfd in pidfds:
        _await(pidfd, began + DEADLINE_SECONDS, "a bound worker outlived its owner")
    took = time.monotonic() - began
    _await(guardian, began + DEADLINE_SECONDS, "the guardian did not leave")
    for fd in (*pidfds, guardian, words):
        os.close(fd)
    owner.communicate()
    return {"seconds": took, "guardian_pss_bytes": pss}


def main() -> None:
    """Run the trials of every kind and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 trials with 10 workers: does it work?")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    trials, workers = (5, 10) if chosen.quick else (chosen.trials, chosen.workers)
    results: dict[str, Any] = {"trials": trials, "workers": workers, "load_before": os.getloadavg()[0], "kinds": {}}
    for kind in KINDS:
        number = trials if "deaf" not in kind else max(3, trials // 10)
        seen = []
        for _ in range(number):
            with tempfile.TemporaryDirectory(prefix="everdeck-bench-") as directory:
                seen.append(trial(kind, workers, Path(directory)))
        results["kinds"][kind] = _summary(seen)
        print(_line(kind, results["kinds"][kind]), flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _summary(seen: list[dict[str, float]]) -> dict[str, float]:
    seconds = sorted(one["seconds"] for one in seen)
    return {
        "trials": len(seconds),
        "p50_ms": round(statistics.median(seconds) * 1000, 1),
        "p99_ms": round(seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))] * 1000, 1),
        "max_ms": round(seconds[-1] * 1000, 1),
        "guardian_pss_mb": round(statistics.median(one["guardian_pss_bytes"] for one in seen) / 1e6, 1),
    }


def _line(kind: str, told: dict[str, float]) -> str:
    return (
        f"{kind:26} {told['trials']:4} trials   p50 {told['p50_ms']:8.1f} ms   p99 {told['p99_ms']:8.1f} ms   "
        f"max {told['max_ms']:8.1f} ms   guardian {told['guardian_pss_mb']:.1f} MB PSS"
    )


def _await(fd: int, deadline: float, otherwise: str) -> None:
    if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise TimeoutError(otherwise)


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
