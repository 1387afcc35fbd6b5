"""Bots in processes that are forked from one that has imported the libraries: that takes seconds of CPU each time."""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_LIVES = multiprocessing.get_context("forkserver")
_LIVES.set_forkserver_preload(["everdeck.feed.aiogram", "everdeck.feed.ptb"])


@contextmanager
def life_of(act: Callable[..., object], *arguments: Any) -> Iterator[BaseProcess]:
    """A process that calls it; killed when the block ends."""
    life = _LIVES.Process(target=act, args=arguments)
    life.start()
    try:
        yield life
    finally:
        life.kill()
        life.join()


def run_program(program: Path, directory: Path, environment: dict[str, str]) -> None:
    """A program as it is run from a shell, in this directory."""
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [str(program)]
    sys.stdout = sys.stderr = (directory / "printed").open("a", buffering=1)
    runpy.run_path(str(program), run_name="__main__")


class Forked:
    """A bot's program in a forked process, with as much of ``subprocess.Popen`` as its tests use."""

    def __init__(self, command: list[str], errors: Path) -> None:
        self._process = _LIVES.Process(target=_run_bot, args=(command, errors))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As ``returncode``."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, once it has."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("bot", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """If it still runs."""
        if self._process.is_alive():
            os.kill(self.pid, number)


def _run_bot(command: list[str], errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))  # as the interpreter does
    runpy.run_path(command[0], run_name="__main__")
