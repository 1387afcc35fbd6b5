"""Random SIGKILLs of a deck's owner and its workers, while a watcher counts copies: ``make chaos SECONDS=60 SEED=7``.

Three parties, each with processes of its own:

- some *users* open the deck and run random verbs on its workers as fast as they can. One of them owns it, the others
  are members; when the owner is killed a member takes its place. With ``--pid1`` there is one user, and it is PID 1 of
  a pid namespace, as in a container: its death ends everybody in it;
- the *killer* (this process) ends, at random, the owner in the middle of whatever it does, a member, or a worker, and
  starts the next user at once. Now and then it stops the owner for longer than anybody's patience (SIGSTOP) before
  the blow, or fills the disk for a moment (as root: the deck is on a small file system of its own);
- the *watcher* (a thread here) reads ``/proc`` without a pause and remembers the largest number of live processes
  that one worker ever had. It must be 1: a second copy at any moment is the failure this program looks for.

In the end the deck is opened once more, and must reach what its registry says: each worker that should run runs
once, no other does, and the events' ids have no gap. The same seed makes the same choices; the kernel's scheduling
stays its own, so a seed repeats a plan, not a run.
"""

import argparse
import contextlib
import multiprocessing
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
from everdeck.registry.store import EVENTS_KEPT

WORKERS = 12
USERS = 3
SETTLE_SECONDS = 60
PACE_SECONDS = 0.15
# The breaker must stay out of it: here every worker crashes far more often than a person would allow.
POLICY = Restart("always", max_crashes=1_000_000, backoff_seconds=0.01, backoff_cap_seconds=0.05)


@dataclass
class Report:
    """What happened, and what must not have."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    most_copies: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def owner_kills(self) -> int:
        """How often an owner was killed."""
        return self.counts["owners killed"]

    @property
    def worker_kills(self) -> int:
        """How often a worker was killed."""
        return self.counts["workers killed"]

    def __str__(self) -> str:
        verdict = "OK" if not self.wrong else "FAILED\n  " + "\n  ".join(self.wrong)
        told = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items())) or "nothing happened"
        return (
            f"{told}; looked {self.samples} times; most copies of one worker ever seen: {self.most_copies}; {verdict}"
        )


def run(
    seconds: float, seed: int, *, pid1: bool = False, users: int = USERS, pace_seconds: float = PACE_SECONDS
) -> Report:
    """Kill for so many seconds, then check; leaves nothing behind."""
    place = Path(tempfile.mkdtemp(prefix="everdeck-chaos-"))
    small = _small_disk(place)
    state = place / "state"
    report = Report()
    watcher = Watcher(state, report)
    try:
        with watcher:
            crowd = Crowd(state, random.Random(seed), report, pid1=pid1, users=1 if pid1 else users)
            _kill_at_random(crowd, seconds, watcher, small, pace_seconds)
            _check(state, report)
    finally:
        _end_all(state)
        if small:
            subprocess.run(["umount", "-l", str(place)], check=False)
        shutil.rmtree(place, ignore_errors=True)
    return report


def _small_disk(place: Path) -> bool:
    """A file system of its own that can be filled without harming others; only root may mount one."""
    if os.geteuid() != 0:
        return False
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(place)]
    return subprocess.run(mount, check=False, capture_output=True).returncode == 0


# A user that has everything loaded when it is born, so that the time goes into killing, not into imports.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["everdeck.deck.owner", "everdeck.deck.member", "everdeck.deck.facade"])


class _Born:
    """A forked user, to be handled like the ones that are executed."""

    def __init__(self, state: Path, seed: int) -> None:
        self._process = _forks.Process(target=_use, args=(state, seed), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """How it ended."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def wait(self) -> None:
        """Until it has ended."""
        self._process.join()


_User = subprocess.Popen[bytes] | _Born


class Crowd:
    """The users of the deck, one of whom owns it."""

    def __init__(self, state: Path, choice: random.Random, report: Report, *, pid1: bool, users: int) -> None:
        self.state = state
        self.choice = choice
        self.report = report
        self._pid1 = pid1
        self._count = users
        self.users: list[_User] = []

    def fill(self) -> None:
        """As many as there should be. One that left by itself is a failure: nothing but us ends them."""
        for user in [one for one in self.users if one.poll() is not None]:
            self.report.wrong.append(f"a user ended by itself with {user.returncode}")
            self.users.remove(user)
        while len(self.users) < self._count:
            seed = self.choice.getrandbits(32)
            if self._pid1:
                words = [sys.executable, __file__, "--owner", str(self.state), "--seed", str(seed)]
                words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *words]
                self.users.append(subprocess.Popen(words))
            else:
                self.users.append(_Born(self.state, seed))

    def owner(self) -> _User | None:
        """The one that owns the deck now; None in the moment in which nobody does."""
        if self._pid1:
            return self.users[0] if self.users else None
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.state / "deck.lock").read_text())
            return next((user for user in self.users if user.pid == pid), None)
        return None

    def pid(self, user: _User) -> int:
        """The process to hit: behind ``unshare`` it is its child, which may not be there yet."""
        if not self._pid1:
            return user.pid
        children = Path(f"/proc/{user.pid}/task/{user.pid}/children")
        while user.poll() is None:
            if found := children.read_text().split():
                return int(found[0])
            time.sleep(0.001)
        return user.pid

    def _end(self, user: _User) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(user), signal.SIGKILL)
        user.wait()

    def kill(self, user: _User, what: str) -> None:
        """End one user at once."""
        self._end(user)
        self.users.remove(user)
        self.report.counts[what] += 1

    def end(self) -> None:
        """Nobody is left."""
        for user in self.users:
            self._end(user)
        self.users.clear()


def _kill_at_random(crowd: Crowd, seconds: float, watcher: "Watcher", small: bool, pace_seconds: float) -> None:
    choice, report = crowd.choice, crowd.report
    try:
        crowd.fill()
        # The clock starts with the first worker, so that a busy machine spends the seconds on killing, not on loading.
        watcher.first_seen.wait(SETTLE_SECONDS)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not report.wrong:
            # How long the owner may work before the next blow decides where it is hit: mostly soon, in the
            # middle of recovery or of a first verb; sometimes late.
            time.sleep(choice.expovariate(1 / pace_seconds))
            blow = choice.random()
            owner = crowd.owner()
            if blow < 0.45:
                if owner is None:
                    continue
                if blow < 0.4:
                    crowd.kill(owner, "owners killed")
                else:
                    _pause(crowd, owner)
            elif blow < 0.5 and small:
                _fill_disk(crowd)
            elif blow < 0.55 and len(crowd.users) > 1:
                crowd.kill(
                    choice.choice([user for user in crowd.users if user is not owner] or crowd.users), "users killed"
                )
            elif alive := _leaders(crowd.state):
                _kill_worker(crowd, choice.choice(sorted(alive)))
            crowd.fill()
    finally:
        crowd.end()


def _pause(crowd: Crowd, owner: _User) -> None:
    """Stop the owner for a while; half of the time it dies without ever going on."""
    pid = crowd.pid(owner)
    os.kill(pid, signal.SIGSTOP)
    crowd.report.counts["owners paused"] += 1
    time.sleep(crowd.choice.uniform(0.2, 1.5))
    if crowd.choice.random() < 0.5:
        crowd.kill(owner, "owners killed")
    else:
        os.kill(pid, signal.SIGCONT)


def _fill_disk(crowd: Crowd) -> None:
    """Not a byte is free for a moment, in which the owner may also die."""
    filler = crowd.state.parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * (1 << 16))
    crowd.report.counts["disks filled"] += 1
    time.sleep(crowd.choice.uniform(0.1, 0.6))
    owner = crowd.owner()
    if owner is not None and crowd.choice.random() < 0.3:
        crowd.kill(owner, "owners killed")
    filler.unlink()


def _kill_worker(crowd: Crowd, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if pid in _leaders(crowd.state):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                crowd.report.counts["workers killed"] += 1
        finally:
            os.close(pidfd)


def _use(state: Path, seed: int) -> None:
    """A user's part: open, then one random verb after the other until somebody ends it."""
    choice = random.Random(seed)
    while True:
        # A disk that is full just now refuses the opening; nothing else may.
        with contextlib.suppress(EverdeckError), Deck(state) as deck:
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
        while not self._enough.wait(0.02):
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
        # Older ones were forgotten, but for those that somebody asked for: a fast machine makes more than are kept.
        ids = [one for one in ids if one > ids[-1] - EVENTS_KEPT]
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
    parser.add_argument("--pid1", action="store_true", help="the owner is PID 1 of a pid namespace (needs root)")
    parser.add_argument("--users", type=int, default=USERS, help="how many processes open the deck at once")
    parser.add_argument(
        "--pace", type=float, default=PACE_SECONDS, help="seconds between two blows, on average (default %(default)s)"
    )
    parser.add_argument("--owner", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.owner:
        _use(asked.owner, asked.seed)
    users = 1 if asked.pid1 else asked.users
    where = ", as PID 1" if asked.pid1 else ""
    print(f"chaos: seed {asked.seed}, {asked.seconds:g} s, {WORKERS} workers, {users} users{where}", flush=True)
    report = run(asked.seconds, asked.seed, pid1=asked.pid1, users=users, pace_seconds=asked.pace)
    print(f"chaos: {report}", flush=True)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
