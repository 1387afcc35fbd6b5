"""Story 1's failure modes against the four layers, each alone and all together. The table is the docs' table.

One owner process holds a deck per column, so each row kills one owner. A deck without L4 forgets its registry
between the owners: that is the manager of the story, which never looked for an earlier instance.
"""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everdeck.deck import AsyncDeck
from everdeck.errors import EverdeckError
from everdeck.model import Stop
from support.child_owner import Owner, Reports
from support.child_program import SOURCE

COLUMNS = {
    "L1 alone": frozenset({"L1"}),
    "L2 alone": frozenset({"L2"}),
    "L3 alone": frozenset({"L3"}),
    "L4 alone": frozenset({"L4"}),
    "all": frozenset({"L1", "L2", "L3", "L4"}),
}
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "four-layers.md"
GRACE_SECONDS = 0.3
PATIENCE_SECONDS = 20.0

BOT = """
import os, signal, sys
from everdeck.child import lifeline, singleton
name, fifo, layers, manner = sys.argv[1:5]
if "L2" in layers:
    singleton(name)
if manner == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def say():
    with open(fifo, "w") as out:
        out.write(f"{name} {os.getpid()} {os.getpid()}\\n")
if "L1" in layers and manner == "polite":
    with lifeline(signals=False) as life:
        say()
        life.wait()
else:
    say()
    while True:
        signal.pause()
"""


class Cell:
    """One deck of one column: its state directory and its bot."""

    def __init__(self, column: str, directory: Path, reports: Reports, manner: str) -> None:
        self.layers = COLUMNS[column]
        self.state = directory / column.replace(" ", "-")
        self.name = f"bot-{column.replace(' ', '-')}"
        self.runtime_dir = directory / "run"
        self.reports = reports
        self.manner = manner
        self.env = {"PYTHONPATH": SOURCE, "EVERDECK_RUNTIME_DIR": str(self.runtime_dir)}
        self.fields = {"lifetime": "bound", "env": self.env}

    @property
    def command(self) -> list[str]:
        """The bot, as this column runs it."""
        layers = ",".join(sorted(self.layers))
        return [sys.executable, "-c", BOT, self.name, str(self.reports.path), layers, self.manner]

    def start(self, owner: Owner) -> None:
        """Open the deck and start the bot in it."""
        owner.do("open", self.state, sorted(self.layers))
        owner.do("start", self.state, self.name, self.command, stop={"grace_seconds": GRACE_SECONDS}, **self.fields)
        self.reports.await_roles_of(self.name, 1)

    def copies(self) -> list[str]:
        """The copies of the bot that are alive."""
        return self.reports.alive(self.name)

    def after_death(self) -> str:
        """The owner is dead: what becomes of the bot, and of a second start?"""
        if "L1" in self.layers and self.reports.await_gone(self.name, PATIENCE_SECONDS if self.polite else 0) == []:
            return "gone at once"
        return asyncio.run(self._next_owner())

    @property
    def polite(self) -> bool:
        """Does the bot look at its lifeline, or the guardian live to end it?"""
        return self.manner != "orphan"

    async def _next_owner(self) -> str:
        if "L4" not in self.layers:
            for part in self.state.glob("deck.db*"):
                part.unlink()
        async with AsyncDeck(self.state, layers=self.layers) as deck:
            if not self.copies():
                return "gone at the next open"
            try:
                await deck.start(
                    self.name, self.command, stop=Stop(grace_seconds=GRACE_SECONDS), lifetime="bound", env=self.env
                )
                await asyncio.to_thread(self.reports.await_roles_of, self.name, 2)
            except EverdeckError:
                pass
            copies = len(self.copies())
            for pid in self.copies():
                os.kill(int(pid), signal.SIGKILL)
            return "two copies" if copies > 1 else "lives on, no second copy"


class CountingReports(Reports):
    """Bots say their pid as their role, so copies can be counted."""

    def await_roles_of(self, name: str, number: int) -> None:
        """Wait until this many copies have said their pid, or until a new copy has left without a word."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(who == name for who, _ in self.pidfds) < number:
            assert time.monotonic() < deadline, f"{name}: copy number {number} never came"
            self.take(0.05)
            if number > 1 and not _others_running(name, {int(pid) for who, pid in self.pidfds if who == name}):
                return

    def take(self, seconds: float) -> None:
        """Read what is there."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return
        self._unread += os.read(self._fd, 65536)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            who, role, pid = line.decode().split()
            self.pidfds[who, role] = os.pidfd_open(int(pid))


def _others_running(name: str, known: set[int]) -> bool:
    """Does a process run under this worker's name that has not said its pid yet?"""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in known:
            try:
                if f"EVERDECK_WORKER={name}\0".encode() in (entry / "environ").read_bytes():
                    return True
            except OSError:
                continue
    return False


# --- the rows: how the owner ends, or what is done to the bot ---------------------------------------------------


def clean_shutdown(owner: Owner, cells: list[Cell]) -> dict[str, str]:
    """The owner closes its decks."""
    for cell in cells:
        owner.do("close", cell.state)
    return {cell.name: "two copies" if cell.copies() else "gone at once" for cell in cells}


def sigkill(owner: Owner, cells: list[Cell]) -> dict[str, str]:
    """Kill -9."""
    owner.kill()
    return {cell.name: cell.after_death() for cell in cells}


def out_of_memory(owner: Owner, cells: list[Cell]) -> dict[str, str]:
    """The kernel picks the owner in the middle of its work: SIGKILL while verbs are in flight."""
    for cell in cells:
        owner.tell("start", cell.state, "another", ["sleep", "60"], lifetime="bound")
    owner.kill()
    return {cell.name: cell.after_death() for cell in cells}


def panic(owner: Owner, cells: list[Cell]) -> dict[str, str]:
    """An exception that nobody handles; nothing is closed."""
    owner.panic(cells[0].state)
    assert owner.ended() == 1
    return {cell.name: cell.after_death() for cell in cells}


def stopped_then_killed(owner: Owner, cells: list[Cell]) -> dict[str, str]:
    """SIGSTOP, then SIGKILL: the owner had no chance to do anything."""
    owner.signal(signal.SIGSTOP)
    owner.kill()
    return {cell.name: cell.after_death() for cell in cells}


def manual_duplicate(owner: Owner, cells: list[Cell]) -> dict[str, str]:
    """Somebody starts the same bot by hand, with the manager running."""
    results = {}
    for cell in cells:
        copy = subprocess.Popen(
            cell.command, env={"PATH": os.environ["PATH"]} | cell.env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while copy.poll() is None and len(cell.copies()) < 2:
            assert time.monotonic() < deadline
            cell.reports.take(0.05)  # type: ignore[attr-defined]
        results[cell.name] = "refused, exit code 2" if copy.poll() == 2 else "two copies"
        copy.kill()
        copy.communicate()
        owner.do("close", cell.state)
    return results


def ignores_sigterm(owner: Owner, cells: list[Cell]) -> dict[str, str]:
    """The bot ignores SIGTERM; ``stop`` is called, and given three times the grace."""
    for cell in cells:
        owner.tell("stop", cell.state, cell.name)
    results = {}
    for cell in cells:
        patience = PATIENCE_SECONDS if "L3" in cell.layers else 3 * GRACE_SECONDS
        left = cell.reports.await_gone(cell.name, patience)
        results[cell.name] = "stays" if left else "gone after the grace"
    return results


def orphan_of_an_earlier_crash(owner: Owner, cells: list[Cell]) -> dict[str, str]:
    """Owner and guardian were killed together, and the bot does not look at its lifeline."""
    guardians = [owner.do("guardian", cell.state) for cell in cells]
    owner.signal(signal.SIGSTOP)
    for guardian in guardians:
        if guardian is not None:
            os.kill(guardian, signal.SIGKILL)
    owner.kill()
    return {cell.name: cell.after_death() for cell in cells}


ROWS: dict[str, tuple[Callable[[Owner, list[Cell]], dict[str, str]], str]] = {
    "clean shutdown": (clean_shutdown, "polite"),
    "SIGKILL of the owner": (sigkill, "polite"),
    "OOM-like kill amid work": (out_of_memory, "polite"),
    "panic of the owner": (panic, "polite"),
    "SIGSTOP, then SIGKILL": (stopped_then_killed, "polite"),
    "manual duplicate spawn": (manual_duplicate, "polite"),
    "child ignores SIGTERM": (ignores_sigterm, "deaf"),
    "orphan of an earlier crash": (orphan_of_an_earlier_crash, "orphan"),
}

table: dict[str, dict[str, str]] = {}


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[CountingReports]:
    """Where the bots say who they are."""
    fifo = CountingReports(tmp_path / "fifo")
    yield fifo
    fifo.close()


@pytest.mark.parametrize("row", ROWS)
def test_row(row: str, tmp_path: Path, reports: CountingReports) -> None:
    """One way to fail, against each layer alone and all of them."""
    fail, manner = ROWS[row]
    cells = {column: Cell(column, tmp_path, reports, manner) for column in COLUMNS}
    with Owner() as owner:
        for cell in cells.values():
            cell.start(owner)
        results = fail(owner, list(cells.values()))
    table[row] = {column: results[cell.name] for column, cell in cells.items()}
    line = markdown_row(row, table[row])
    print(line)
    assert line in DOCS.read_text(encoding="utf-8"), f"docs/reference/four-layers.md says otherwise; seen:\n{line}"


def test_together_they_leave_nothing_to_chance() -> None:
    """Whatever fails, with all four layers nothing is left over and nothing runs twice."""
    if len(table) < len(ROWS):
        pytest.skip("the rows above did not all run")
    print("\n" + "\n".join(markdown_row(row, cells) for row, cells in table.items()))
    good = {"gone at once", "gone at the next open", "gone after the grace", "refused, exit code 2"}
    assert {row: cells["all"] for row, cells in table.items() if cells["all"] not in good} == {}


def markdown_row(row: str, cells: dict[str, str]) -> str:
    """The row as the docs have it."""
    return f"| {row} | " + " | ".join(cells[column] for column in COLUMNS) + " |"
