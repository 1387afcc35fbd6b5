"""A small model against the real deck: verbs, deaths, owner kills, reused pids and clock steps, in any order.

The model knows only what is wanted of each worker. After every step the real deck, whoever owns it by now, must agree:
what should run runs exactly once, what should not does not run at all, and a stranger is never touched.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everdeck import Deck, Restart, State, UnknownWorker
from everdeck.clock import Clock
from everdeck.kernel.identity import command_line, read_stat
from support.deck_owner import owner
from support.repo_processes import end_all_under
from support.waiting import until

NAMES = st.sampled_from(["ann", "bob", "cyd"])
NS_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
POLICY = Restart("always", max_crashes=10_000, backoff_seconds=0)


class SteppingClock(Clock):
    """A wall clock that a test may set; the clock that decisions use does not follow."""

    def __init__(self) -> None:
        self.shift = 0.0

    def wall(self) -> float:
        """The wall clock, wherever it was set to."""
        return time.time() + self.shift


class DeckMachine(RuleBasedStateMachine):
    """One deck, three names, and everything that can happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="everdeck-machine-"))
        self.state = self.directory / "state"
        self.clock = SteppingClock()
        self.deck = Deck(self.state, clock=self.clock)
        self.wanted: dict[str, bool] = {}
        self.strangers: list[subprocess.Popen[bytes]] = []
        self.reuses = 0
        self.last_event = 0

    def teardown(self) -> None:
        """Nothing stays: workers, strangers, directory."""
        with contextlib.suppress(Exception):
            self.deck.stop_all()
        self.deck.close()
        for stranger in self.strangers:
            assert stranger.poll() is None, "a stranger was ended"
            stranger.kill()
            stranger.wait()
        end_all_under(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- what may happen ----------------------------------------------------------------------------------------

    @rule(name=NAMES)
    def start(self, name: str) -> None:
        """Somebody starts a worker, running or not."""
        self.deck.start(name, ["sleep", "1000"], restart=POLICY)
        self.wanted[name] = True

    @rule(name=NAMES)
    def stop(self, name: str) -> None:
        """Somebody stops a worker."""
        try:
            self.deck.stop(name)
        except UnknownWorker:
            assert name not in self.wanted
        else:
            self.wanted[name] = False

    @rule(name=NAMES)
    def restart(self, name: str) -> None:
        """Somebody restarts a worker."""
        if name in self.wanted:
            self.deck.restart(name)
            self.wanted[name] = True

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        """Somebody removes a worker."""
        if self.wanted.pop(name, None) is not None:
            self.deck.remove(name)

    @rule(name=NAMES)
    def a_worker_dies(self, name: str) -> None:
        """SIGKILL from outside; its policy brings it back."""
        pid = self.deck.status(name).pid if self.wanted.get(name) else None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            until(lambda: self.deck.status(name).pid not in {None, pid}, "it is restarted")

    @rule()
    def the_owner_goes(self) -> None:
        """Another owner opens the deck; what the first one knew only in memory is gone."""
        self.deck.close()
        self.deck = Deck(self.state, clock=self.clock)

    @rule(name=NAMES, verb=st.sampled_from(["start", "restart", "stop"]))
    def an_owner_is_killed(self, name: str, verb: str) -> None:
        """A process of its own owns the deck, does one thing and is ended by SIGKILL; we own it again."""
        self.deck.close()
        with owner(self.state) as other:
            if verb == "start":
                other.ask("start", name, ["sleep", "1000"], restart=msgspec.to_builtins(POLICY))
                self.wanted[name] = True
            elif name in self.wanted:
                other.ask(verb, name)
                self.wanted[name] = verb == "restart"
            other.kill()
        self.deck = Deck(self.state, clock=self.clock)

    @rule(names=st.lists(NAMES, unique=True))
    def workers_die_while_nobody_watches(self, names: list[str]) -> None:
        """Nobody watches while some workers die; the next owner finds out."""
        victims = [self.deck.status(name).pid for name in names if self.wanted.get(name)]
        self.deck.close()
        for pid in victims:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        until(lambda: all(_is_gone(pid) for pid in victims if pid is not None))
        self.deck = Deck(self.state, clock=self.clock)

    @precondition(lambda self: os.geteuid() == 0 and os.access(NS_LAST_PID, os.W_OK) and self.reuses < 3)
    @rule(name=NAMES)
    def a_dead_workers_pid_is_taken_by_a_stranger(self, name: str) -> None:
        """While nobody watches, a worker dies and a stranger gets its pid."""
        if not self.wanted.get(name):
            return
        self.reuses += 1
        pid = self.deck.status(name).pid
        assert pid is not None
        self.deck.close()
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        NS_LAST_PID.write_text(str(pid - 1))
        self.strangers.append(subprocess.Popen(["sleep", "1000"]))
        self.deck = Deck(self.state, clock=self.clock)

    @rule(seconds=st.sampled_from([-86_400.0, -5.0, 5.0, 86_400.0]))
    def the_clock_steps(self, seconds: float) -> None:
        """NTP, or a person, sets the wall clock."""
        self.clock.shift += seconds

    # --- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def everything_is_as_wanted(self) -> None:
        """Exactly once, or not at all; and the events tell it without a gap."""
        shown = {status.name: status for status in self.deck.list()}
        assert set(shown) == set(self.wanted)
        expected = {name: [shown[name].pid] for name, wanted in self.wanted.items() if wanted}
        for name, wanted in self.wanted.items():
            assert (shown[name].state is State.RUNNING) == wanted, shown[name]
        until(lambda: self._seen_as(expected), f"/proc shows {expected}")
        events = self.deck.events(after=self.last_event)
        assert [event.id for event in events] == list(range(self.last_event + 1, self.last_event + len(events) + 1))
        self.last_event += len(events)
        assert all(stranger.poll() is None for stranger in self.strangers), "a stranger was ended"

    def _seen_as(self, expected: dict[str, list[int | None]]) -> bool:
        """Does /proc show exactly these? One too many fails at once; right after its exec one may not show yet."""
        running = self._processes()
        for name, pids in running.items():
            assert set(pids) <= set(expected.get(name, [])), (name, pids, expected)
        return running == expected

    def _processes(self) -> dict[str, list[int]]:
        """The live processes of this deck, by worker, found by their environment and not by our own records."""
        found: dict[str, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or "sleep 1000" not in command_line(int(entry.name)):
                continue
            with contextlib.suppress(OSError, ValueError):
                pairs = dict(pair.split(b"=", 1) for pair in (entry / "environ").read_bytes().split(b"\0") if pair)
                if pairs.get(b"EVERDECK_DIR", b"").startswith(bytes(self.state)):
                    found.setdefault(pairs[b"EVERDECK_WORKER"].decode(), []).append(int(entry.name))
        return found


def _is_gone(pid: int) -> bool:
    try:
        return read_stat(pid).dead
    except Exception:  # noqa: BLE001 - reaped
        return True


DeckMachine.TestCase.settings = settings(
    max_examples=6,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=bool(os.environ.get("CI")),
)
TestDeckMachine = DeckMachine.TestCase
