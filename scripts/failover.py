"""Many processes use one deck with random verbs while its owner is killed again and again.

    python scripts/failover.py --seconds 60 --processes 8 --workers 100 --every 1.0 --seed 7

Each process notes every verb before it asks and every answer after it; whoever is killed is replaced. In the end the
notes are compared with the events, with the requests that the registry holds, and with the kernel:

- no process saw an error that its verb may not raise;
- every verb that was answered as done is recorded once, under its request id, with one event;
- of every worker at most one copy ran at any look, and what should run in the end runs exactly once.

Prints one line of JSON; exits with 1 if anything was found.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from everdeck import Deck, EverdeckError, SpecChanged, State, UnknownWorker, WorkerFailed
from everdeck.deck.home import owner_pid
from everdeck.kernel.containment import cookie_scan, environment_of

VERBS = ("start", "start", "stop", "restart", "restart", "reset", "status", "list", "remove")
MAY_RAISE = (UnknownWorker, SpecChanged, WorkerFailed)


def main() -> int:
    """Run the trial, or be one of its processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--use", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.use is not None:
        use(options.state, options.use, options.workers, options.seed)
        return 0
    with tempfile.TemporaryDirectory(prefix="everdeck-failover-") as folder:
        found = trial(options.state or Path(folder) / "state", Path(folder), options)
    print(json.dumps(found))
    return 1 if found["problems"] else 0


# --- one process of many ----------------------------------------------------------------------------------------


def use(state: Path, notes: Path, workers: int, seed: int) -> None:
    """Random verbs on random workers until somebody ends us; two threads, so verbs overlap."""
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())
    with Deck(state, durability="process") as deck, notes.open("a", buffering=1) as said:
        lock = threading.Lock()

        def note(**line: Any) -> None:
            with lock:
                said.write(json.dumps(line) + "\n")

        def act(number: int) -> None:
            choose = random.Random(seed * 1000 + number)
            while not leave.is_set():
                verb, name = choose.choice(VERBS), f"w{choose.randrange(workers)}"
                one_verb(deck, verb, name, note)

        threads = [threading.Thread(target=act, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        print("up", flush=True)
        leave.wait()
        for thread in threads:
            thread.join(30)


def one_verb(deck: Deck, verb: str, name: str, note: Any) -> None:
    """Ask one, and note what came of it."""
    began = time.monotonic()
    note(verb=verb, worker=name, asked=True)
    try:
        if verb == "start":
            deck.start(name, ["sleep", "1000"])
        elif verb == "list":
            deck.list()
        else:
            getattr(deck, verb)(name)
        note(verb=verb, worker=name, seconds=round(time.monotonic() - began, 4))
    except MAY_RAISE as err:
        note(verb=verb, worker=name, refused=type(err).__name__)
    except BaseException as err:  # noqa: BLE001 - whatever it is, it is what we look for
        note(verb=verb, worker=name, problem=f"{type(err).__name__}: {err}")


# --- the trial --------------------------------------------------------------------------------------------------


def trial(state: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Let them use the deck, kill owner after owner, and compare."""
    notes = folder / "notes"
    notes.mkdir()
    processes: list[subprocess.Popen[str]] = []
    born, killed = 0, 0

    def join() -> None:
        nonlocal born
        born += 1
        command = [sys.executable, __file__, "--state", str(state), "--use", str(notes / str(born))]
        process = subprocess.Popen(
            [*command, "--workers", str(options.workers), "--seed", str(options.seed + born)],
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)

    copies = Copies(state)
    try:
        for _ in range(options.processes):
            join()
        for process in processes:
            assert process.stdout is not None  # noqa: S101 - we asked for it
            process.stdout.readline()
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            time.sleep(options.every)
            copies.look()
            victim = next((one for one in processes if one.pid == owner_pid(state)), None)
            if victim is not None:
                victim.kill()
                victim.wait()
                processes.remove(victim)
                killed += 1
                join()
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(120)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return judged(state, notes, copies, killed)


class Copies:
    """The most processes that were seen for one worker at one look."""

    def __init__(self, state: Path) -> None:
        self._mark = f"{state}/workers/"
        self.most = 0
        self.looks = 0

    def look(self) -> Counter[str]:
        """By worker: how many session leaders carry a cookie of this deck right now."""
        found: Counter[str] = Counter()
        for pids in cookie_scan().values():
            for pid in pids:
                environment = environment_of(pid)
                if environment.get("EVERDECK_DIR", "").startswith(self._mark):
                    found[environment.get("EVERDECK_WORKER", "")] += 1
        self.most = max(self.most, *found.values(), 0)
        self.looks += 1
        return found


def judged(state: Path, notes: Path, copies: Copies, killed: int) -> dict[str, Any]:
    """What was found, against what must hold."""
    lines = [json.loads(line) for path in notes.iterdir() for line in _whole_lines(path)]
    problems = sorted({line["problem"] for line in lines if "problem" in line})
    done = Counter(line["verb"] for line in lines if "seconds" in line)
    with Deck(state, durability="process") as deck:
        statuses = deck.list()
        copies.look()
        wanted = {one.name for one in statuses if one.state is State.RUNNING}
        running = copies.look()
        events = deck.events()
        with sqlite3.connect(f"file:{state}/deck.db?mode=ro", uri=True) as registry:
            requests = registry.execute("SELECT id, worker, event FROM requests").fetchall()
        for one in statuses:
            deck.remove(one.name)
    if copies.most > 1:
        problems.append(f"{copies.most} copies of one worker at once")
    if any(count != 1 for name, count in running.items() if name in wanted) or set(running) - wanted:
        problems.append("what runs in the end is not what should")
    if [event.id for event in events] != list(range(1, len(events) + 1)):
        problems.append("event ids have gaps")
    linked = Counter(event for _, _, event in requests if event is not None)
    problems += [f"event {event} was told for {count} requests" for event, count in linked.items() if count > 1]
    for verb, kind in (("restart", "restarted"), ("reset", "reset")):
        # Nobody but a request tells these, so they lie between what was answered and what was asked for; those that
        # were asked for and neither answered nor refused are of processes that were killed.
        asked = sum(line["verb"] == verb for line in lines if "asked" in line)
        asked -= sum(line["verb"] == verb for line in lines if "refused" in line)
        seen = sum(event.kind.value == kind for event in events)
        if not done[verb] <= seen <= asked:
            problems.append(f"{done[verb]} {verb} were answered, {seen} were told, {asked} were asked for")
    slowest = max((line["seconds"] for line in lines if "seconds" in line), default=0.0)
    refused = Counter(line["refused"] for line in lines if "refused" in line)
    return {
        "problems": problems,
        "verbs": sum(done.values()),
        "done": dict(done),
        "refused": dict(refused),
        "owners_killed": killed,
        "most_copies": copies.most,
        "looks": copies.looks,
        "events": len(events),
        "requests": len(requests),
        "slowest_verb_seconds": slowest,
    }


def _whole_lines(path: Path) -> list[str]:
    """Without the last one, if its writer was killed in it."""
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EverdeckError as refusal:
        sys.exit(f"failover: {refusal} (pid {os.getpid()})")
