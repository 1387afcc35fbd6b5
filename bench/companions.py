"""Benchmarks of single parts that live beside the managers' and are run with them; what they print is kept as it is."""

import subprocess
import sys
from dataclasses import dataclass

from bench.places import REPO
from bench.store import Store

_MOST_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Companion:
    """One script, how it is run, and what it shows."""

    script: str
    about: str
    arguments: tuple[str, ...] = ()
    quick_arguments: tuple[str, ...] = ("--quick",)

    def run(self, store: Store, *, quick: bool) -> str:
        """Run it, keep what it printed, and say how it went."""
        arguments = self.quick_arguments if quick else self.arguments
        try:
            done = subprocess.run(
                [sys.executable, self.script, *arguments],
                cwd=REPO,
                capture_output=True,
                text=True,
                check=False,
                timeout=_MOST_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"failed: not done after {_MOST_SECONDS} s"
        if not done.stdout.strip():
            return f"failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
        store.put_printed(self.script, done.stdout)
        return "done" if done.returncode == 0 else f"exit code {done.returncode}"


COMPANIONS = (
    Companion("bench/ladder.py", "what each guarantee of a start costs at the least, without Everdeck's code"),
    Companion("bench/sandbox_cost.py", "what a sandbox costs per start", (), ("--rounds", "30")),
    Companion("bench/bound/last_process_gone.py", "from the owner's SIGKILL to the last bound process gone"),
    Companion(
        "bench/logs/rotation_ratio.py",
        "what rotation costs the writer, in pairs",
        (),
        ("--megabytes", "50", "--rounds", "1"),
    ),
    Companion("bench/feed/loss.py", "what stock and durable bots lose when they are killed"),
    Companion("bench/feed/throughput.py", "a durable bot's speed beside a stock one's"),
    Companion("bench/feed_inbox.py", "what the inbox alone carries", (), ("50000",)),
    Companion(
        "bench/satellites.py",
        "a satellite of each kind: latency, throughput, memory, wake-ups while idle",
        (),
        ("--messages", "100", "--idle", "10"),
    ),
    Companion(
        "bench/page/cost.py",
        "what one open page costs the daemon",
        (),
        ("--workers", "200", "--seconds", "3", "--pages", "0", "1"),
    ),
)
