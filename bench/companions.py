"""Benchmarks of single parts that live beside the managers' and are run with them; what they print is kept as it is."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.places import REPO

_MOST_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Companion:
    """One script, how it is run, and what it shows."""

    script: str
    about: str
    arguments: tuple[str, ...] = ()
    quick_arguments: tuple[str, ...] = ("--quick",)

    def run(self, results: Path, *, quick: bool) -> str:
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
        (results / self._file_name).write_text(done.stdout)
        return "done" if done.returncode == 0 else f"exit code {done.returncode}"

    def printed_in(self, results: Path) -> str | None:
        """What it printed last, if it ran."""
        path = results / self._file_name
        return path.read_text() if path.exists() else None

    @property
    def _file_name(self) -> str:
        return "companion-" + self.script.removeprefix("bench/").removesuffix(".py").replace("/", "-") + ".txt"


COMPANIONS = (
    Companion("bench/ladder.py", "what each guarantee of a start costs at the least, without Everdeck's code"),
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
        "bench/page/cost.py",
        "what one open page costs the daemon",
        (),
        ("--workers", "200", "--seconds", "3", "--pages", "0", "1"),
    ),
)
