"""``everdeck demo``: three sample users, the page, and a guided kill -9.

Everything lives in a temporary directory and is gone afterwards, however the tour ends. There is one way to clean up:
a process of its own, in a session of its own, waits for the end of a pipe that only the tour and the commands it is
just typing hold open. A closed terminal, SIGTERM and SIGKILL end that pipe just as the last step does.

In a terminal it waits for Enter between the steps; elsewhere it goes on by itself, waiting for facts.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from everdeck.cli import DONE, FAILED, INTERRUPTED, output
from everdeck.statedir import StateDir

PATIENCE_SECONDS = 60.0
PREFIX = "everdeck-demo-"
USERS = (("alice", False), ("bob", False), ("carol", True))


def demo_options(parser: ArgumentParser) -> None:
    """Options of demo."""
    parser.add_argument("--yes", action="store_true", help="do not wait for Enter between the steps")
    parser.add_argument("--no-page", action="store_true", help="the tour only, without the page")
    parser.epilog = "No configuration, no root, nothing left behind."


def demo(options: Namespace) -> int:
    """A tour of two minutes: three sample users with lively logs, the page in your browser, and a kill -9 of the
    owner, after which nothing is lost, nothing runs twice, and everything is supervised again.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    swept, line = _hire_sweeper(folder)
    tour = _Tour(folder / "state", line, waits=sys.stdin.isatty() and not options.yes, page=not options.no_page)
    try:
        return tour.walk()
    except _TourFailed as error:
        output.note(f"everdeck demo: {error}")
        return FAILED
    except EOFError:  # the terminal's input ended: as good as Ctrl-C
        return INTERRUPTED
    finally:
        with _deaf_to_interrupts():
            os.close(line)
            swept()


def sweep_options(parser: ArgumentParser) -> None:
    """Options of sweep."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the demo's temporary directory")


def sweep(options: Namespace) -> int:
    """Wait until the demo is over, however it ended; then end everything of its deck and delete its directory."""
    folder: Path = options.folder
    if not folder.name.startswith(PREFIX):
        output.note(f"everdeck sweep: {folder} is not a demo's directory")
        return FAILED
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    _end_everything(folder / "state")
    shutil.rmtree(folder, ignore_errors=True)
    return DONE


def _hire_sweeper(folder: Path) -> tuple[Callable[[], object], int]:
    """What waits for the process that cleans up, and the descriptor that it waits for the end of."""
    read_fd, write_fd = os.pipe()
    sweeper = subprocess.Popen(  # noqa: TID251 - no worker: it must outlive us and everybody else of the tour
        [sys.executable, "-P", "-m", "everdeck.cli", "sweep", str(folder)],
        stdin=read_fd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    os.close(read_fd)
    return sweeper.wait, write_fd


class _TourFailed(Exception):
    """Something was not as the tour promises."""


class _Tour:
    def __init__(self, state: Path, line: int, *, waits: bool, page: bool) -> None:
        self._state = state
        self._line = line
        self._waits = waits
        self._page = page
        self._colour = output.wants_colour()
        # One address for both owners, so that a page that is open comes back by itself.
        self._listen = f"127.0.0.1:{_free_port()}"

    def walk(self) -> int:
        print(
            "A tour of two minutes. Everdeck runs one process per user: never lost, never run twice.\n"
            "Everything happens in a temporary directory and is gone afterwards, however you leave (Ctrl-C is fine)."
        )
        self._say("1. The daemon owns a deck, and three users get a worker each. Carol's is bound to it.")
        self._up()
        for name, bound in USERS:
            words = ("--bound",) if bound else ()
            self._type("start", name, *words, "--", sys.executable, "-P", "-m", "everdeck.cli.sample_user", name)
        self._pause()

        self._say("2. They talk. Each line has a number.")
        self._until(lambda: all(self._numbers(name) for name, _ in USERS), "nobody said a word")
        self._type("ps")
        self._type("logs", "--all", "-n", "3")
        before = self._pids()
        self._pause("Press Enter to kill -9 the owner")

        owner = self._owner()
        self._say(f"3. kill -9 {owner}: the owner dies, as in an out-of-memory kill. It cannot say goodbye.")
        _kill_and_wait(owner)
        self._until(lambda: self._worker("carol")["pid"] is None, "the guardian did not end carol's worker")
        self._type("ps")
        print("Alice and Bob run on, not supervised. Carol was bound: the guardian ended her worker.")
        spoken = {name: len(self._numbers(name)) for name in ("alice", "bob")}
        self._until(lambda: all(len(self._numbers(name)) > spoken[name] for name in spoken), "the workers fell silent")
        self._pause("Press Enter to start a new owner")

        self._say("4. A new owner opens the deck. Opening is recovering.")
        self._up()
        self._until(lambda: self._worker("carol")["state"] == "running", "carol was not started again")
        self._type("ps")
        self._type("events", "-n", "6")
        self._check(before)
        if self._page:
            self._show_link()
        print("\nNext: README.md, docs/tutorial/first-deck.md, and everdeck help.")
        self._pause(
            f"{'Look around on the page. ' if self._page else ''}Press Enter to end the demo; nothing stays behind"
        )
        return DONE

    def _up(self) -> None:
        where = ("--listen", self._listen) if self._page else ("--no-http",)
        self._type("up", "--detach", *where)

    def _show_link(self) -> None:
        """The page's address with its token, so that it can be opened at any step."""
        command = [sys.executable, "-P", "-m", "everdeck.cli", *self._placed(("login",))]
        link = subprocess.run(command, check=True, capture_output=True, text=True, pass_fds=(self._line,)).stdout
        print(f"{output.painted('The page:', '1', colour=self._colour)} {link.strip()}")

    def _check(self, before: dict[str, int | None]) -> None:
        """What the tour promises, looked at: same processes, one each, and no gap in what they said."""
        after = self._pids()
        for name in ("alice", "bob"):
            if after[name] != before[name]:
                raise _TourFailed(f"{name} has another process now: {before[name]} → {after[name]}")
            numbers = self._numbers(name)
            if numbers != list(range(1, len(numbers) + 1)):
                raise _TourFailed(f"the log of {name} has a gap")
            print(
                f"{name}: the same process (pid {after[name]}), {len(numbers)} lines, 1 to {len(numbers)} without a gap"
            )
        print(f"carol: started again (pid {before['carol']} → {after['carol']}), because she was bound")
        copies = _copies(self._state)
        if any(count != 1 for count in copies.values()) or len(copies) != len(USERS):
            raise _TourFailed(f"processes per worker: {copies}")
        print(output.painted("Nothing was lost, and nothing runs twice.", "32", colour=self._colour))

    # --- typing and looking -------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        print(f"\n{output.painted(text, '1', colour=self._colour)}", flush=True)

    def _pause(self, text: str = "Press Enter to go on") -> None:
        if self._waits:
            input(output.painted(f"\n{text} … ", "2", colour=self._colour))

    def _type(self, *words: str) -> None:
        shown = " ".join(word if word != sys.executable else "python3" for word in words)
        print(output.painted(f"$ everdeck {shown}", "36", colour=self._colour), flush=True)
        command = [sys.executable, "-P", "-m", "everdeck.cli", *self._placed(words)]
        # It holds the sweeper's line too: what we type is carried to its end before anything is cleaned up.
        if subprocess.run(command, check=False, pass_fds=(self._line,)).returncode != 0:
            raise _TourFailed(f"everdeck {words[0]} failed")

    def _placed(self, words: tuple[str, ...]) -> list[str]:
        return ["--state", str(self._state), *words]

    def _look(self) -> dict[str, Any]:
        command = [sys.executable, "-P", "-m", "everdeck.cli", *self._placed(("ps", "--json"))]
        seen: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return seen

    def _owner(self) -> int:
        owner = self._look()["owner_pid"]
        if owner is None:
            raise _TourFailed("nobody owns the deck")
        return int(owner)

    def _worker(self, name: str) -> dict[str, Any]:
        return next(worker for worker in self._look()["workers"] if worker["name"] == name)

    def _pids(self) -> dict[str, int | None]:
        return {worker["name"]: worker["pid"] for worker in self._look()["workers"]}

    def _numbers(self, name: str) -> list[int]:
        from everdeck.logs import reader as logreader

        lines = logreader.read(StateDir(self._state).worker(name).log, lines=100_000)
        return [int(found.group(1)) for line in lines if (found := re.match(r"#(\d+) ", line))]

    def _until(self, fact: Callable[[], bool], complaint: str) -> None:
        import time

        deadline = time.monotonic() + PATIENCE_SECONDS
        while not fact():
            if time.monotonic() > deadline:
                raise _TourFailed(complaint)
            time.sleep(0.1)  # noqa: TID251 - what is waited for is what other processes print


def _end_everything(state: Path) -> None:
    """Remove every worker and end the daemon; without an owner the deck is opened once more to do it."""
    if not state.exists():
        return
    base = [sys.executable, "-P", "-m", "everdeck.cli", "--state", str(state)]

    def quietly(*words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*base, *words], check=False, capture_output=True, stdin=subprocess.DEVNULL)

    if b'"supervised": true' not in quietly("ps", "--json").stdout:
        quietly("up", "--detach", "--no-http")
    quietly("rm", "--all", "--yes")
    quietly("down")


def _free_port() -> int:
    """The usual port if nobody has it, else any."""
    import socket

    for port in (8787, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    return 0


def _kill_and_wait(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process and wait until it is gone; by pidfd, so that nobody else is meant."""
    from everdeck.errors import ProcessGone
    from everdeck.kernel import identity as ids

    try:
        pidfd = ids.open_pidfd(pid)
    except ProcessGone:
        return
    try:
        ids.send_signal(pidfd, number)
        if not ids.is_readable(pidfd, PATIENCE_SECONDS):
            raise _TourFailed(f"pid {pid} did not end")
    finally:
        os.close(pidfd)


def _copies(state: Path) -> dict[str, int]:
    """How many processes carry each worker's name of this deck in their environment."""
    from everdeck.child import DIR_ENV, WORKER_ENV

    found: dict[str, int] = {}
    place = f"{DIR_ENV}={state}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            environment = (Path(entry.path) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(place) for word in environment):
            for word in environment:
                if word.startswith(f"{WORKER_ENV}=".encode()):
                    name = word.partition(b"=")[2].decode()
                    found[name] = found.get(name, 0) + 1
    return found


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C must not leave the workers behind that the tour has started."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
