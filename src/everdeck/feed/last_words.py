"""What a process can still say when it ends itself, and what the kernel tells of it afterwards.

A death from outside (``kill -9``) and a death by one's own hand look the same to the next start, unless the dying
process leaves word. Three kinds can: a fatal signal (SIGSEGV, SIGABRT, …) is written down by Python's faulthandler,
with the place in the code; ``os._exit`` and ``os.abort`` are ours for as long as an inbox is open, and name the item
whose handler called them; an ``exec`` by a handler (a bot that restarts itself) finishes that handler's item. A kill by
the out-of-memory killer is counted by the kernel.

A program that has enabled faulthandler itself keeps it; then its crashes are explained by the deck's word or not at
all.
"""

import faulthandler
import os
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Protocol

from everdeck.child import COOKIE_ENV, LAST_END_ENV
from everdeck.feed.blame import Cause
from everdeck.feed.ledger import End, LastRun, Ledger

_ENDING: Final = ("_exit", "abort")
_REPLACING: Final = ("execv", "execve")


class Numbered(Protocol):
    """An item, as far as it matters here: its number, and where that means something."""

    seq: int

    @property
    def ledger(self) -> Ledger:
        """Where it is noted: other inboxes of this process have numbers of their own."""


current: ContextVar[Numbered | None] = ContextVar("everdeck_item", default=None)
_open: dict[int, Ledger] = {}
_originals: dict[str, Any] = {}
_owner_pid = 0
_took_faults = False


def listen(fd: int, ledger: Ledger) -> None:
    """From now on this process leaves word in this ledger; its file takes what faulthandler has to say."""
    global _owner_pid, _took_faults  # noqa: PLW0603 - a process ends once, whatever is open in it
    if not _open:
        _owner_pid = os.getpid()
        for name in (*_ENDING, *_REPLACING):
            _originals[name] = getattr(os, name)
            setattr(os, name, _telling(name, _originals[name]))
    _open[fd] = ledger
    if not faulthandler.is_enabled():
        faulthandler.enable(fd, all_threads=False)
        _took_faults = True


def stop_listening(fd: int) -> None:
    """The ledger is being closed."""
    global _took_faults  # noqa: PLW0603 - as above
    _open.pop(fd, None)
    if _open:
        return
    for name, original in _originals.items():
        setattr(os, name, original)
    _originals.clear()
    if _took_faults:
        faulthandler.disable()
        _took_faults = False


def forked() -> None:
    """We are a copy of the process that listens: our death is none of its business."""
    global _took_faults  # noqa: PLW0603 - as above
    if _took_faults:
        faulthandler.disable()
        _took_faults = False


def cause_of(last: LastRun) -> Cause:
    """Why the process that left this ended."""
    if last.end & (End.STOPPING | End.EXECED | End.ELSEWHERE):
        return Cause.ORDERED
    if last.end & End.BY_ITSELF or last.last_words:
        return Cause.OWN
    told = os.environ.get(LAST_END_ENV, "")
    # A wrapper inside the worker may have started us again, and then the deck's word is about an earlier process.
    if told and last.cookie != own_cookie():
        if told == "ordered":
            return Cause.ORDERED
        if told not in {"killed 9", "unknown"}:
            return Cause.OWN
    return Cause.OWN if oom_kills() > last.oom_kills else Cause.UNEXPLAINED


def own_cookie() -> int:
    """A number for this start by a deck; 0 without one."""
    return int(os.environ.get(COOKIE_ENV, "")[:12] or "0", 16) if _is_hex(os.environ.get(COOKIE_ENV, "")[:12]) else 0


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it was started: in our cgroup if it tells."""
    for path in (*_memory_events(), Path("/proc/vmstat")):
        try:
            lines = path.read_text("ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _memory_events() -> list[Path]:
    try:
        own = Path("/proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return []
    return [Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "memory.events" for line in own if line.startswith("0::")]


def _telling(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        # A forked child ends by os._exit too; its death is not ours.
        ours = os.getpid() == _owner_pid
        item, ledgers = current.get(), list(_open.values()) if ours else []
        own = item.ledger if item is not None and item.ledger in ledgers else None
        for ledger in ledgers:
            ended = End.BY_ITSELF if own in {None, ledger} else End.ELSEWHERE
            ledger.note_end(ended if name in _ENDING else End.EXECED)
        if item is not None and own is not None:
            (own.blame if name in _ENDING else own.finish)(item.seq)
        try:
            return original(*arguments, **options)
        except BaseException:
            for ledger in ledgers:
                ledger.take_back_end(End.EXECED)  # no such program
            if item is not None and own is not None:
                own.begin(item.seq)
            raise

    call.__name__ = call.__qualname__ = name
    call.__doc__ = original.__doc__
    return call


def _is_hex(text: str) -> bool:
    return bool(text) and all(letter in "0123456789abcdef" for letter in text)
