"""Calls of the C library one after another, in a thread that Python knows nothing of.

Between two calls that Python makes, its lock is taken, and whoever holds it may keep it for five milliseconds
(``sys.getswitchinterval``): a thread that starts processes one by one beside a busy loop mostly waits for that lock.
So the calls are put together first: each is a context of makecontext(3), which goes on to the next one when it
returns, and a thread of the C library runs from the first to the last.

That thread has a table of descriptors of its own, with the low numbers only: a process that is started there copies a
handful of entries and not one pidfd for each worker (close_range(2), ``CLOSE_RANGE_UNSHARE``). No Python may ever run
in such a thread: a garbage collection would close what it finds in the wrong table.

What a call returns is lost, so a chain is made of calls that leave their answer in memory. Arguments may be pointers:
the C library takes them as such since 2.8, on the two processors that are named below ("Notes" in makecontext(3)).
"""

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, TypeAlias

_CONTEXT_BYTES: Final = {"x86_64": 1024, "aarch64": 8192}.get(os.uname().machine, 0)
"""No less than a ``ucontext_t`` has: 968 on the one, 4560 on the other."""
_STACK_BYTES: Final = 65536
_BETWEEN_STACKS: Final = 256
_MOST_ARGUMENTS: Final = 6
_UNSHARE: Final = 2
_HIGHEST: Final = 0xFFFFFFFF
_NO_MORE: Final = (None,) * _MOST_ARGUMENTS

Call: TypeAlias = tuple[Any, tuple[Any, ...]]
"""Where a function of the C library is (:func:`place_of`), and what it is given: six numbers or addresses at most."""


class Chain:
    """Some calls, made ready. What they are given is the caller's to keep until :meth:`run` returns."""

    __slots__ = ("_contexts", "_stack")

    def __init__(self, calls: Sequence[Call], below: int) -> None:
        """``below``: the calls need no descriptor from this number on."""
        links: list[Call] = [(place_of("close_range"), (below, _HIGHEST, _UNSHARE)), *calls]
        # Before it ends: whoever waits for a thread hears of its end before the kernel lets go of its table.
        links.append((place_of("close_range"), (0, _HIGHEST, 0)))
        links.append((place_of("pthread_exit"), (None,)))
        self._stack = ctypes.create_string_buffer(_STACK_BYTES + _BETWEEN_STACKS * len(links))
        self._contexts = ctypes.create_string_buffer(_template().raw * len(links), _CONTEXT_BYTES * len(links))
        at, stack, make = ctypes.addressof(self._contexts), ctypes.addressof(self._stack), _held().makecontext
        for index, (function, given) in enumerate(links):
            # Of the last one the link is never followed. One stack for all: each begins above those before it, which
            # are over when it runs.
            stack_bytes = _STACK_BYTES + _BETWEEN_STACKS * index
            _HEAD.pack_into(self._contexts, _CONTEXT_BYTES * index, at + _CONTEXT_BYTES, stack, stack_bytes)
            make(at, function, _MOST_ARGUMENTS, *given, *_NO_MORE[len(given) :])
            at += _CONTEXT_BYTES

    def run(self) -> bool:
        """Make them and return when they are over; other threads go on. False if there was no thread to be had."""
        thread = ctypes.c_ulong()
        begin = place_of("setcontext")
        if _held().pthread_create(ctypes.byref(thread), None, begin, ctypes.addressof(self._contexts)):
            return False
        _unheld().pthread_join(thread, None)
        return True


@cache
def available() -> bool:
    """Can this C library do it? Tried once, with a call that changes nothing but our own memory."""
    if not _CONTEXT_BYTES or sys.byteorder != "little":
        return False
    try:
        ctypes.CDLL("libgcc_s.so.1")  # a thread that ends itself needs it, or the process is aborted (pthread_exit(3))
        for name in ("getcontext", "setcontext", "makecontext", "close_range", "pthread_create", "pthread_join"):
            place_of(name)
    except (OSError, AttributeError):  # musl has no contexts, a glibc before 2.34 no close_range
        return False
    whole = b"six arguments, the last of them a pointer"
    told = [ctypes.create_string_buffer(len(whole) + 1) for _ in range(2)]
    copies = [(place_of("memcpy"), (ctypes.addressof(one), whole, len(whole))) for one in told]
    return Chain(copies, 0).run() and all(one.value == whole for one in told)


def place_of(name: str) -> int:
    """The address of a function of the C library."""
    place = _places.get(name)
    if place is None:
        place = _places[name] = ctypes.cast(getattr(_unheld(), name), ctypes.c_void_p).value or 0
    return place


_places: dict[str, int] = {}


_HEAD: Final = struct.Struct("@8xQQ8xQ")
"""How a ``ucontext_t`` begins, on both processors: flags, link, and a stack with flags of its own."""


@cache
def _template() -> "ctypes.Array[ctypes.c_char]":
    """A context in which every signal is blocked: a handler of the host belongs to the host's own threads."""
    template = ctypes.create_string_buffer(_CONTEXT_BYTES)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        _held().getcontext(template)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return template


@cache
def _held() -> Any:
    # Not CDLL: these are short, and letting go of the interpreter's lock for each would take longer than they do.
    library = ctypes.PyDLL(None)
    pointer = ctypes.c_void_p
    library.makecontext.argtypes = [pointer, pointer, ctypes.c_int, *(pointer,) * _MOST_ARGUMENTS]
    library.makecontext.restype = None
    library.pthread_create.argtypes = [pointer, pointer, pointer, pointer]
    return library


@cache
def _unheld() -> Any:
    return ctypes.CDLL(None)
