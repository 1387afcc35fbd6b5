"""Owners of a deck as processes of their own, to be killed; and waiting for facts about a deck.

``python deck_owner.py STATE [DURABILITY]`` opens the deck, then obeys one JSON line at a time (verb, arguments,
fields) and answers each with one line. The owner ends with its standard input, or by whatever the test does to it.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from everdeck import Deck, EverdeckError, Restart, Stop
from everdeck.model import Health

DEADLINE_SECONDS = 60


class Owner:
    """The test's side of an owner process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    @property
    def pid(self) -> int:
        """The owner's pid."""
        return self.process.pid

    def ask(self, verb: str, *arguments: Any, **fields: Any) -> Any:
        """One verb, and its answer as plain values."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, arguments, fields]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """The next line that the owner says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the owner ended: {self.process.stderr.read() if self.process.stderr else ''}"
        said = json.loads(line)
        assert "error" not in said, said
        return said["answer"]

    def kill(self) -> None:
        """As if the machine's power for this one process was cut."""
        self.process.kill()
        self.process.wait()


@contextmanager
def owner(state: Path, *python_options: str, **env: str) -> Iterator[Owner]:
    """An owner that has opened the deck; killed at the end, whatever happened."""
    import os

    with subprocess.Popen(
        [sys.executable, *python_options, __file__, str(state)],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        one = Owner(process)
        try:
            assert one.answer() == "open"
            yield one
        finally:
            process.kill()


def copies(mark: str) -> list[int]:
    """The pids of live processes whose command line holds the mark."""
    from everdeck.kernel.identity import command_line, read_stat

    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and mark in command_line(int(entry.name)):
            try:
                if not read_stat(int(entry.name)).dead:
                    found.append(int(entry.name))
            except EverdeckError:
                continue
    return found


def _main() -> None:
    with Deck(sys.argv[1], durability="process" if "process" in sys.argv[2:] else "power") as deck:
        _say("open")
        for line in sys.stdin:
            verb, arguments, fields = json.loads(line)
            for name, kind in (("restart", Restart), ("stop", Stop), ("health", Health)):
                if isinstance(fields.get(name), dict):
                    fields[name] = kind(**fields[name])
            try:
                _say(msgspec.to_builtins(getattr(deck, verb)(*arguments, **fields)))
            except EverdeckError as err:
                print(json.dumps({"error": repr(err)}), flush=True)


def _say(answer: Any) -> None:
    print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    _main()
