"""How the harness talks to a library that is measured inside a host process.

The library's host is a process of its own, so that its memory, its wake-ups and its death are its own. Requests and
answers are JSON lines on the descriptors named in ``$BENCH_HOST_FDS``; standard output stays free for the library.
The host takes the times itself, on the monotonic clock that all processes share, so the pipe costs nothing.

Standard library only: hosts also run in the peers' environments.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any


def channel() -> tuple[int, int]:
    """The descriptors to read requests from and to write answers to; not passed on to workers."""
    reading, writing = map(int, os.environ.pop("BENCH_HOST_FDS").split(","))
    for fd in (reading, writing):
        os.set_inheritable(fd, False)  # noqa: FBT003 - the function's own signature
    return reading, writing


def answer(writing: int, **fields: Any) -> None:
    """One line back to the harness."""
    os.write(writing, json.dumps(fields).encode() + b"\n")


def timed(act: Callable[[], object]) -> dict[str, int]:
    """When something began and ended."""
    begin_ns = time.monotonic_ns()
    act()
    return {"begin_ns": begin_ns, "end_ns": time.monotonic_ns()}


def read_requests(reading: int, buffered: bytearray) -> list[dict[str, Any]] | None:
    """The requests that have arrived; None at end of file."""
    chunk = os.read(reading, 1 << 20)
    if not chunk:
        return None
    buffered += chunk
    *lines, rest = bytes(buffered).split(b"\n")
    buffered[:] = rest
    return [json.loads(line) for line in lines]
