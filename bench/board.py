"""The harness's side of the board: who began to run, when, and waiting for it without polling.

Layout and protocol are in ``native/board.h``. Waiting is futex(2) on the counter of published entries: the worker
that reaches the target wakes us, so no timer of ours and no look into ``/proc`` disturbs what is being timed.
"""

import ctypes
import mmap
import os
import platform
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

WORKER: Final = 0
PLANTED: Final = 1
DONE: Final = 2

_HEADER_BYTES: Final = 64
_ENTRY: Final = struct.Struct("=QiiiiII")
_WORD: Final = struct.Struct("=I")
_FUTEX_WAIT: Final = 0
_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine(), 202)

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@dataclass(frozen=True, slots=True)
class Stamp:
    """One process said that it runs."""

    at_ns: int
    pid: int
    slot: int
    kind: int


class BoardTimeout(Exception):
    """Fewer processes than expected began to run before the deadline."""


class Board:
    """A shared file of stamps. Entries are only ever added."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        size = _HEADER_BYTES + capacity * _ENTRY.size
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        _WORD.pack_into(self._map, 12, capacity)
        self._words = (ctypes.c_uint32 * 3).from_buffer(self._map)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._words
        self._map.close()

    @property
    def published(self) -> int:
        """How many stamps there are."""
        return int(self._words[0])

    def stamps(self, after: int = 0, kind: int | None = WORKER) -> list[Stamp]:
        """The stamps from the ``after``-th on, of one kind or (None) of all."""
        found = []
        for index in range(after, self.published):
            at_ns, pid, slot, of_kind, *_ = _ENTRY.unpack_from(self._map, _HEADER_BYTES + index * _ENTRY.size)
            if kind is None or of_kind == kind:
                found.append(Stamp(at_ns, pid, slot, of_kind))
        return found

    def wait_for(self, total: int, timeout_seconds: float) -> None:
        """Sleep until ``total`` stamps were published since the board was made."""
        self._words[2] = total
        deadline = time.monotonic() + timeout_seconds
        while (seen := self.published) < total:
            left = deadline - time.monotonic()
            if left <= 0:
                raise BoardTimeout(f"{seen} of {total} processes ran within {timeout_seconds:g} s")
            # The kernel compares the word with `seen` once more before it sleeps, so a stamp that arrives between
            # our look and the call is not slept over (futex(2), FUTEX_WAIT).
            patience = _Timespec(int(left), int(left % 1 * 1e9))
            _libc.syscall(_SYS_FUTEX, ctypes.byref(self._words), _FUTEX_WAIT, seen, ctypes.byref(patience), None, 0)
