"""Bots in processes that are forked from one that has imported the libraries: that takes seconds of CPU each time."""

import multiprocessing
import os
import runpy
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
