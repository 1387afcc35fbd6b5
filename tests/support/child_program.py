"""A Python program as a bound worker would see the world: a lifeline on stdin, the variables, lines on stdout.

The test is the parent: it holds the write end of the lifeline, reads what the program says, and waits for its end
on a pidfd. Nothing here needs the deck, so the child's side is tested alone.
"""

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

SOURCE = str(Path(__file__).parents[2] / "src")
DEADLINE_SECONDS = 30.0


class Program:
    """One running program. Leaving the ``with`` ends it, whatever it does."""

    def __init__(
        self,
        source: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        has_lifeline: bool = True,
    ) -> None:
        read_fd, self._write_fd = os.pipe()
        search = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": search, **(env or {})}
        if has_lifeline:
            environment["EVERDECK_LIFELINE_FD"] = "0"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(source), *arguments],
            stdin=read_fd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        os.close(read_fd)
        self.pidfd = os.pidfd_open(self.process.pid)
        self._unread = b""

    def line(self) -> str:
        """The next line the program says; fails loudly when it says nothing more."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + DEADLINE_SECONDS
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if not select.select([self.process.stdout], [], [], max(0, left))[0]:
                raise AssertionError(f"the program said nothing in time; so far {self._unread!r}")
            more = os.read(self.process.stdout.fileno(), 65536)
            if not more:
                raise AssertionError(f"the program ended after {self._unread!r}: {self.errors()}")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def cut_lifeline(self) -> float:
        """Die, as far as the program can tell. Answers when that was."""
        at = time.monotonic()
        os.close(self._write_fd)
        self._write_fd = -1
        return at

    def signal(self, number: int) -> None:
        """Send it a signal."""
        signal.pidfd_send_signal(self.pidfd, number)

    def ended(self) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        assert select.select([self.pidfd], [], [], DEADLINE_SECONDS)[0], "the program is still there"
        return self.process.wait()

    def errors(self) -> str:
        """What it said on stderr, once it ended."""
        assert self.process.stderr is not None
        self.ended()
        return self.process.stderr.read().decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        os.close(self.pidfd)
        if self._write_fd >= 0:
            os.close(self._write_fd)
