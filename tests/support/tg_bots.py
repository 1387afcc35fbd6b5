"""Starting, killing and reading the test bots, for tests and benchmarks."""

import copy
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Self

from everdeck.testing.telegram import TelegramServer
from support.tg_lives import Forked

SUPPORT = Path(__file__).parent
LIBRARIES = ("aiogram", "ptb")


class BotProcess:
    """One bot in its own process, talking to the server; killed when the block ends.

    With ``forked`` it comes from a process that has imported the library already; measurements want a program of its
    own.
    """

    def __init__(
        self,
        library: str,
        server: TelegramServer,
        directory: Path,
        *options: str,
        durable: bool = True,
        env: dict[str, str] | None = None,
        python: str = sys.executable,
        forked: bool = False,
    ) -> None:
        self.library = library
        self.server = server
        self.directory = directory
        self.journal_path = directory / "journal"
        self.errors_path = directory / "stderr"
        self.command = [
            python,
            str(SUPPORT / f"tg_bot_{library}.py"),
            *("--url", server.url, "--token", server.token, "--log", str(self.journal_path)),
            *(("--db", str(directory / "bot.db")) if durable else ()),
            *options,
        ]
        self.env = env
        self.forked = forked
        self._handled = Handled()
        self.process: subprocess.Popen[bytes] | Forked | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it (again)."""
        if self.forked:
            assert self.env is None, "what was imported has read its environment already"
            self.process = Forked(self.command[1:], self.errors_path)
            return
        with self.errors_path.open("ab") as errors:
            self.process = subprocess.Popen(self.command, stderr=errors, env=self.env)

    @property
    def running(self) -> subprocess.Popen[bytes] | Forked:
        """The process, which must have been started."""
        assert self.process is not None
        return self.process

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.signal(signal.SIGKILL)
        self.running.wait()

    def terminate(self, seconds: float) -> int:
        """SIGTERM, then wait; SIGKILL after this many seconds. The exit code."""
        self.signal(signal.SIGTERM)
        try:
            return self.running.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.running.wait()

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs (Popen checks that it was not reaped)."""
        self.running.send_signal(number)

    # --- what it did ---

    def journal(self) -> "Handled":
        """What its handlers wrote down so far, over all its lives."""
        self._handled.read_on(self.journal_path)
        return self._handled.copy()

    def wait_for(
        self, fact: Callable[["Handled"], bool], seconds: float = 180.0, *, until_exit: bool = True
    ) -> "Handled":
        """Wait until the journal shows it. The bot is another program: its file is looked at, there is no event."""
        deadline = time.monotonic() + seconds
        while True:
            self._handled.read_on(self.journal_path)
            handled = self._handled
            if fact(handled):
                return handled.copy()
            if time.monotonic() > deadline or (until_exit and self.running.poll() is not None):
                known = self.errors_path.exists()
                errors = self.errors_path.read_text(errors="replace")[-3000:] if known else "elsewhere"
                raise TimeoutError(f"{handled}; {self.server.summary()}; exit {self.running.poll()}; stderr: {errors}")
            time.sleep(0.01)


class Handled:
    """How often each update's handler began and ended."""

    def __init__(self) -> None:
        self.began: Counter[int] = Counter()
        self.ended: Counter[int] = Counter()
        self._read = 0

    def read_on(self, path: Path) -> None:
        """Take in the whole lines that were added; a file that is not there yet is an empty one."""
        if not path.exists():
            return
        with path.open("rb") as journal:
            journal.seek(self._read)
            added = journal.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            what, _, update_id = line.partition(b" ")
            (self.began if what == b"begin" else self.ended)[int(update_id)] += 1

    def copy(self) -> Self:
        """As it is now."""
        return copy.deepcopy(self)

    def lost(self, ids: list[int]) -> list[int]:
        """Which of these no handler ever finished."""
        return [update_id for update_id in ids if not self.ended[update_id]]

    def duplicates(self) -> int:
        """How many times a handler finished an update that had been finished before."""
        return sum(count - 1 for count in self.ended.values())

    def __str__(self) -> str:
        return f"{len(self.began)} began, {len(self.ended)} ended"
