"""Which items a process is working on, in memory that outlives the process.

A handler may end the process at any instruction, and a commit before each handler would cost more than most handlers
do. So what is running, and what has finished but is not committed yet, is kept in a shared mapping of the inbox's lock
file: one store of eight bytes each. The kernel keeps the pages of a killed process (mmap(2), MAP_SHARED), so the next
start reads what the last one was doing when it ended. A power cut may undo it, as it may undo a commit that was not
synced: then work is done again, and none is lost.

The mapping names the database that it belongs to: beside another one (a deleted and remade file) it means nothing.

Behind the mapped part the same file takes the last words of a process that ends itself (see ``last_words``). After a
fatal signal they are the names of the functions that were at work, so a handler is run under a function that is named
after its item's slot (:meth:`Ledger.reserve`): among any number of items side by side the next start knows which one
it was.
"""

import mmap
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from types import FunctionType
from typing import Any, Final, TypeAlias

_WORDS: Final = 8192
_SIZE: Final = 8 * _WORDS
_MAGIC: Final = 0x6576_6465_636B_0001
_HEADER: Final = 8
_AT_FILE, _AT_FLAGS, _AT_COOKIE, _AT_OOM = 1, 2, 3, 4
_LAST_WORDS_LENGTH: Final = 16_000
SLOTS: Final = _WORDS - _HEADER
_WITNESS: Final = re.compile(r" in everdeck_item_([0-9a-f]+)_([0-9]+)$", re.MULTILINE)


class Mark(IntEnum):
    """What is known of an item: its handler runs; it has finished; it ended the process, or would not end."""

    RUNNING = 1
    DONE = 2
    GUILTY = 4


# For every item: until Python 3.12 the name of a member is a call, and these are a third of a microsecond each.
RUNNING, DONE = int(Mark.RUNNING), int(Mark.DONE)


class End(IntFlag):
    """What a process noted about its own end: it was asked to stop; it ended itself; it replaced its program.

    ``ELSEWHERE``: it ended itself, by an item of another inbox.
    """

    STOPPING = 1
    BY_ITSELF = 2
    EXECED = 4
    ELSEWHERE = 8


@dataclass(frozen=True, slots=True)
class LastRun:
    """What the last process left behind, by item number."""

    running: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    guilty: frozenset[int] = frozenset()
    end: End | int = 0
    cookie: int = 0
    oom_kills: int = 0
    last_words: str = ""


Witness: TypeAlias = Callable[[Awaitable[Any]], Coroutine[Any, Any, Any]]


class Ledger:
    """The mapping over an open lock file. One process at a time has it: whoever holds the lock.

    A handler's beginning and end are noted for every item, between handlers, where a call costs most: whoever hands
    items out gets a slot for each (:meth:`reserve`), and writes ``number << 3 | RUNNING``, then ``DONE``, into
    ``words[slot]`` himself.
    """

    def __init__(self, fd: int, file_id: int) -> None:
        self._fd = fd
        if os.fstat(fd).st_size < _SIZE:
            os.ftruncate(fd, _SIZE)
        self._map = mmap.mmap(fd, _SIZE)
        self.words = memoryview(self._map).cast("Q")
        self._file_id = file_id
        self._slots: dict[int, int] = {}
        self._witnesses: dict[int, Witness] = {}
        self._free = list(range(_WORDS - 1, _HEADER - 1, -1))
        self.last_run = self._read(file_id)

    @property
    def room(self) -> int:
        """How many more items can be noted."""
        return len(self._free)

    # --- notes ---

    def reserve(self, seq: int) -> tuple[int, Witness]:
        """A slot for this item until :meth:`forget`, in which nothing is noted yet, and its :data:`Witness`.

        That is a function whose name tells whose work it is that is awaited under it; see above. One frame more, a
        tenth of a microsecond. Tasks and threads that the handler starts have frames of their own.
        """
        slot = self._slots.get(seq)
        if slot is None:
            slot = self._slots[seq] = self._free.pop()
        witness = self._witnesses.get(slot)
        if witness is None:
            witness = self._witnesses[slot] = _named(f"everdeck_item_{self._file_id:x}_{slot}")
        return slot, witness

    def begin(self, seq: int) -> None:
        """Its handler runs."""
        slot = self._slots.get(seq)
        if slot is not None:
            self.words[slot] = seq << 3 | RUNNING

    def finish(self, seq: int) -> None:
        """Its handler has finished; until :meth:`forget` a restart would know."""
        slot = self._slots.get(seq)
        if slot is not None:
            self.words[slot] = seq << 3 | DONE

    def blame(self, seq: int) -> None:
        """It is what ends this process, or what keeps it from ending."""
        slot = self._slots.get(seq)
        if slot is not None:
            self.words[slot] |= Mark.GUILTY

    def forget(self, seq: int) -> None:
        """The database says it now, or nothing happened to it."""
        slot = self._slots.pop(seq, None)
        if slot is not None:
            self.words[slot] = 0
            self._free.append(slot)

    def forget_all(self, seqs: Iterable[int]) -> None:
        """As :meth:`forget`, for many: the database says all of it."""
        for seq in seqs:
            slot = self._slots.pop(seq, None)
            if slot is not None:
                self.words[slot] = 0
                self._free.append(slot)

    def note_end(self, how: End) -> None:
        """Say how this process is about to end."""
        self.words[_AT_FLAGS] |= how

    def take_back_end(self, how: End) -> None:
        """It did not end after all."""
        self.words[_AT_FLAGS] &= ~how

    # --- the life of it ---

    def start_over(self, file_id: int, *, cookie: int, oom_kills: int) -> None:
        """What the last run left has been dealt with: begin a page of our own."""
        self.words[0] = 0  # a page half written means nothing
        for slot in range(1, _WORDS):
            if self.words[slot]:
                self.words[slot] = 0
        self.words[_AT_FILE] = file_id
        self.words[_AT_COOKIE] = cookie
        self.words[_AT_OOM] = oom_kills
        self.words[0] = _MAGIC
        os.ftruncate(self._fd, _SIZE)
        os.lseek(self._fd, _SIZE, os.SEEK_SET)  # where last words go

    def close(self) -> None:
        """Let go of the memory; what is noted stays in the file."""
        self.words.release()
        self._map.close()

    def _read(self, file_id: int) -> LastRun:
        words = self.words
        if words[0] != _MAGIC or words[_AT_FILE] != file_id:
            return LastRun()
        found: dict[Mark, set[int]] = {mark: set() for mark in Mark}
        for slot in range(_HEADER, _WORDS):
            word = words[slot]
            for mark in Mark:
                if word & mark:
                    found[mark].add(word >> 3)
        said = os.pread(self._fd, _LAST_WORDS_LENGTH, _SIZE).decode("utf-8", errors="replace")
        witness = _WITNESS.search(said)  # the innermost
        if witness is not None and int(witness[1], 16) == file_id and _HEADER <= int(witness[2]) < _WORDS:
            found[Mark.GUILTY] |= {words[int(witness[2])] >> 3} & found[Mark.RUNNING]
        return LastRun(
            running=frozenset(found[Mark.RUNNING]),
            done=frozenset(found[Mark.DONE]),
            guilty=frozenset(found[Mark.GUILTY]),
            end=End(words[_AT_FLAGS] & 7),
            cookie=words[_AT_COOKIE],
            oom_kills=words[_AT_OOM],
            last_words=said,
        )


async def unnamed(work: Awaitable[Any]) -> Any:
    """The witness of an item that has no slot."""
    return await work


def _named(name: str) -> Witness:
    """:func:`unnamed` under another name: faulthandler writes down the names that code objects have."""
    return FunctionType(unnamed.__code__.replace(co_name=name), globals(), name)
