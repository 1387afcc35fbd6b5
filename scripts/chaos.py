"""Random SIGKILLs of a deck's owner and its workers, while a watcher counts copies: ``make chaos SECONDS=60 SEED=7``.

Three parties, each a process of its own:

- the *owner* opens the deck and runs random verbs on its workers as fast as it can;
- the *killer* (this process) ends, at random, the owner in the middle of whatever it does, or a worker, and starts
  the next owner at once;
- the *watcher* (a thread here) reads ``/proc`` without a pause and remembers the largest number of live processes
  that one worker ever had. It must be 1: a second copy at any moment is the failure this program looks for.

In the end the deck is opened once more, and must reach what its registry says: each worker that should run runs
once, no other does, and the events' ids have no gap. The same seed makes the same choices; the kernel's scheduling
stays its own, so a seed repeats a plan, not a run.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from everdeck import Deck, EverdeckError, Restart
from everdeck.child import DIR_ENV

WORKERS = 12
SETTLE_SECONDS = 60
# The breaker must stay out of it: here every worker crashes far more often than a person would allow.
POLICY = Restart("always", max_crashes=1_000_000, backoff_seconds=0.01, backoff_cap_seconds=0.05)


@dataclass
class Report:
    """What happened, and what must not have."""

    owner_kills: int = 0
    worker_kills: int = 0
    samples: int = 0
    most_copies: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = "OK" if not self.wrong else "FAILED\n  " + "\n  ".join(self.wrong)
        return (
            f"killed {self.owner_kills} owners and {self.worker_kills} workers; looked {self.samples} times; "
            f"most copies of one worker ever seen: {self.most_copies}; {verdict}"
        )


def run(seconds: float, seed: int) -> Report:
    """Kill for so many seconds, then check; leaves nothing behind."""
    state = Path(tempfile.mkdtemp(prefix="everdeck-chaos-"))
    report = Report()
    watcher = Watcher(state, report)
    try:
        with watcher:
            _kill_at_random(state, seconds, random.Random(seed), report, watcher)
            _check(state, report)
    finally:
        _end_all(state)
        shutil.rmtree(state, ignore_errors=True)
    return report


def _kill_at_random(state: Path, seconds: float, choice: random.Random, report: Report, watcher: "Watcher") -> None:
    owner = _new_owner(state, choice)
    try:
        # The clock starts with the first worker, so that a busy machine spends the seconds on killing, not on loading.
        watcher.first_seen.wait(SETTLE_SECONDS)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            # How long the owner may work before the next blow decides where it is hit: mostly soon, in the
            # middle of recovery or of a first verb; sometimes late.
            with contextlib.suppress(subprocess.TimeoutExpired):
                owner.wait(choice.expovariate(1 / 0.15))
                report.wrong.append(f"the owner ended by itself with {owner.returncode}")
                return
            if choice.random() < 0.4:
                owner.kill()
                owner.wait()
                report.owner_kills += 1
                owner = _new_owner(state, choice)
            elif alive := _leaders(state):
                pid = choice.choice(sorted(alive))
                with contextlib.suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(pid)
                    try:
                        if pid in _leaders(state):
                            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                            report.worker_kills += 1
                    finally:
                        os.close(pidfd)
    finally:
        owner.kill()
        owner.wait()


def _new_owner(state: Path, choice: random.Random) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--owner", str(state), "--seed", str(choice.getrandbits(32))])


def _own(state: Path, seed: int) -> None:
    """The owner's part: open, then one random verb after the other until somebody ends it."""
    choice = random.Random(seed)
    with Deck(state) as deck:
        while True:
            name = f"user-{choice.randrange(WORKERS)}"
            verb = choice.choice(["start", "start", "start", "stop", "restart", "remove"])
            with contextlib.suppress(EverdeckError, LookupError):
                if verb == "start":
                    deck.start(name, ["sleep", "100000"], restart=POLICY)
                else:
                    getattr(deck, verb)(name)


class Watcher:
    """Counts, without a pause, how many live processes each worker has; ``first_seen`` is set with the first one."""

    def __init__(self, state: Path, report: Report) -> None:
        self._state = state
        self._report = report
        self._enough = threading.Event()
        self.first_seen = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._enough.wait(0.005):
            copies = Counter(_leaders(self._state).values())
            self._report.samples += 1
            if copies:
                self.first_seen.set()
            for name, count in copies.items():
                self._report.most_copies = max(self._report.most_copies, count)
                if count > 1:
                    self._report.wrong.append(f"{count} copies of {name} at once")


def _leaders(state: Path) -> dict[int, str]:
    """The live worker processes of the deck: pid to worker directory's name."""
    return {pid: name for pid, name, command in _of_the_deck(state) if command.startswith("sleep")}


def _of_the_deck(state: Path) -> Iterator[tuple[int, str, str]]:
    marker = f"{DIR_ENV}={state}/workers/".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            at = environment.find(marker)
            if at < 0:
                continue
            name = environment[at + len(marker) :].partition(b"\0")[0].decode()
            yield int(entry.name), name, (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue


def _check(state: Path, report: Report) -> None:
    """One more open must reach what should be, and what the deck says must be what ``/proc`` says."""
    with Deck(state) as deck:
        deadline = time.monotonic() + SETTLE_SECONDS
        while differs := _difference(deck, state):
            if time.monotonic() > deadline:
                report.wrong.append(f"not settled after {SETTLE_SECONDS} s: {differs}")
                report.wrong += [f"{event.kind} {event.detail}" for event in deck.events(worker=differs[0])[-8:]]
                break
        ids = [event.id for event in deck.events()]
        if ids != list(range(ids[0], ids[0] + len(ids))):
            report.wrong.append("the events' ids have a gap")
        deck.stop_all()
        if left := list(_of_the_deck(state)):
            report.wrong.append(f"alive after stop_all: {left}")


def _difference(deck: Deck, state: Path) -> tuple[str, str, tuple[int, ...]] | None:
    """A worker that is on its way, or of which the deck and ``/proc`` tell different things."""
    found = _leaders(state)
    for status in deck.list():
        pids = tuple(pid for pid, name in found.items() if name == status.name)
        if (str(status.state), pids) not in {("running", (status.pid,)), ("stopped", ())}:
            return status.name, str(status.state), pids
    return None


def _end_all(state: Path) -> None:
    while left := [pid for pid, _, _ in _of_the_deck(state)]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    if any(pid == other for other, _, _ in _of_the_deck(state)):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                finally:
                    os.close(pidfd)


def main() -> int:
    """Run as a command; the exit status is 1 when something was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--owner", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.owner:
        _own(asked.owner, asked.seed)
    print(f"chaos: seed {asked.seed}, {asked.seconds:g} s, {WORKERS} workers", flush=True)
    report = run(asked.seconds, asked.seed)
    print(f"chaos: {report}", flush=True)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
