"""Rotations in processes of their own, so that they can be killed in the middle.

Run as a program it serves: for each line ``CRASH_AT MAX_BYTES KEEP LOG_DIR`` it forks a child that recovers, rotates
and compresses, and prints how the child ended (negative: by which signal). A fork of a warm process takes a few
milliseconds where a new interpreter takes hundreds; there is no thread in it, so forking is safe.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from everdeck import crashpoints
from everdeck.logs import files as logfiles
from everdeck.model import Log

NOW = 1_800_000_000.0


class Rotations:
    """The tests' end of the server."""

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._server.communicate(timeout=30)

    def run(self, log_dir: Path, max_bytes: int, keep: int, crash_at: str = "") -> int:
        """Recover, rotate and compress in a process of its own; its exit status."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{crash_at or '-'} {max_bytes} {keep} {log_dir}\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def _rotate(crash_at: str, max_bytes: int, keep: int, log_dir: Path) -> None:
    os.environ[crashpoints.CRASH_AT_ENV] = "" if crash_at == "-" else crash_at
    crashpoints._name, crashpoints._visits_left = crashpoints._armed()
    logfiles.recover(log_dir)
    logfiles.rotate_if_due(log_dir, Log(max_bytes=max_bytes, keep=keep), NOW)
    for _ in logfiles.compressing(log_dir):
        pass


def _serve() -> None:
    for line in sys.stdin:
        crash_at, max_bytes, keep, log_dir = line.rstrip("\n").split(" ", 3)
        child = os.fork()
        if child == 0:
            try:
                _rotate(crash_at, int(max_bytes), int(keep), Path(log_dir))
            except BaseException:  # noqa: BLE001 - a forked child never returns into its parent's code
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
