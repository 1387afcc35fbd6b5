"""The pipe whose end means that the parent died.

The owner holds the write end and never writes. Whichever way the owner dies, the kernel closes the write end,
and every reader sees end-of-file. This holds only while nobody else has a copy of the write end: it is made
close-on-exec in one step, so no worker inherits it, and a Python fork of the owner closes it in the child
(:func:`forget_in_forks`).

See pipe(7), pipe2(2).
"""

import contextlib
import os
import weakref
from dataclasses import dataclass

from everdeck.errors import ResourceExhausted


@dataclass(eq=False, slots=True, weakref_slot=True)
class Lifeline:
    """Both ends, until the read end has been given to the worker."""

    read_fd: int
    write_fd: int

    def give_away_read_end(self) -> None:
        """The worker has its copy; ours would only hide that it closed its end."""
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1

    def close(self) -> None:
        """Let go of both ends: every reader sees end-of-file now."""
        self.give_away_read_end()
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1


def make() -> Lifeline:
    """A new lifeline; both ends close on exec."""
    try:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    except OSError as err:
        raise ResourceExhausted(f"no pipe for a lifeline: {err.strerror}; raise the limit of open files") from err
    lifeline = Lifeline(read_fd, write_fd)
    forget_in_forks(lifeline)
    return lifeline


_ours: "weakref.WeakSet[Lifeline]" = weakref.WeakSet()


def forget_in_forks(lifeline: Lifeline) -> None:
    """A fork of the owner is not the owner: its copies are closed there, or its survival would keep workers alive."""
    _ours.add(lifeline)


def _close_in_forked_child() -> None:
    for lifeline in list(_ours):
        with contextlib.suppress(OSError):
            lifeline.close()
    _ours.clear()


os.register_at_fork(after_in_child=_close_in_forked_child)
