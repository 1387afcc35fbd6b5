"""One worker in the owner's memory: its record and the descriptors we hold for it.

Kept small: an owner may hold ten thousand of these for years.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from everdeck.kernel import exits
from everdeck.kernel.containment import Tree
from everdeck.model import State
from everdeck.registry import WorkerRecord
from everdeck.statedir import LOCK

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from everdeck.kernel.lifeline import Lifeline
    from everdeck.model import WorkerStatus


_set: Final = object.__setattr__
_TOLD: Final = frozenset({"record", "pidfd", "awaits_ready", "status_text", "trouble"})


@dataclass(frozen=True, slots=True)
class Held:
    """What the kernel gave us for one process of a worker."""

    pidfd: int | None
    is_child: bool
    lifeline: "Lifeline | None"
    proxy_lock_fd: int | None

    def let_go(self) -> None:
        """Close every descriptor; reap the process if it is our child and has ended."""
        if self.pidfd is not None:
            if self.is_child:
                exits.reap_child(self.pidfd)
            os.close(self.pidfd)
        if self.lifeline is not None:
            self.lifeline.close()
        if self.proxy_lock_fd is not None:
            os.close(self.proxy_lock_fd)


class Worker:
    """The record as it was last committed, and what the kernel gave us."""

    changes: ClassVar[int] = 0
    """How often something changed that a list tells of any worker: a list is looked through only if this moved."""

    __slots__ = (
        "awaits_ready",
        "changed_at",
        "cpu_sample",
        "ended_ill",
        "explained_at",
        "glance",
        "is_child",
        "lifeline",
        "on_death",
        "pidfd",
        "proxy_lock_fd",
        "record",
        "status_text",
        "timer",
        "trouble",
        "used",
        "workers_dir",
    )

    changed_at: int
    """What :attr:`changes` was when it changed last."""
    record: WorkerRecord
    workers_dir: Path
    on_death: "Callable[[Worker], None]"
    pidfd: int | None
    is_child: bool
    lifeline: "Lifeline | None"
    proxy_lock_fd: int | None
    timer: "asyncio.TimerHandle | None"
    awaits_ready: bool
    status_text: str | None
    ended_ill: bool
    explained_at: tuple[float, ...]
    """When each crash was taken off its breaker by its own word."""
    trouble: str | None
    """What its feed cannot do at the moment."""
    cpu_sample: tuple[float, float] | None
    used: tuple[float, float, int] | None
    """When it was measured, percent of a core, bytes."""
    glance: "tuple[tuple[object, ...], WorkerStatus] | None"
    """What was told of it last without measuring, and the facts that it was made from."""

    def __init__(self, record: WorkerRecord, workers_dir: Path) -> None:
        for name, value in _AT_FIRST:  # not one by one: each would ask below whether it is told to anybody
            _set(self, name, value)
        _set(self, "workers_dir", workers_dir)
        self.record = record

    def __setattr__(self, name: str, value: object) -> None:
        _set(self, name, value)
        if name in _TOLD:
            Worker.changes += 1
            _set(self, "changed_at", Worker.changes)

    def started(self, record: WorkerRecord, pidfd: int, line: "Lifeline | None") -> None:
        """A child of ours runs for it: all of it at once, because each change asks whether it is told to anybody."""
        _set(self, "pidfd", pidfd)
        _set(self, "is_child", True)  # noqa: FBT003 - the value of a field
        _set(self, "lifeline", line)
        self.record = record

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.record.name

    @property
    def lock_path(self) -> Path:
        """The worker's own lock file; made when asked for, because a kept Path costs half a kilobyte per worker."""
        return Path(f"{self.workers_dir}/{self.record.name}/{LOCK}")

    @property
    def state(self) -> State:
        """What people are told; a worker that has yet to say that it is ready is starting."""
        if self.record.phase is State.RUNNING and self.awaits_ready:
            return State.STARTING
        return self.record.phase

    @property
    def has_process(self) -> bool:
        """Do we hold a process for it?"""
        return self.pidfd is not None

    def tree(self) -> Tree:
        """What the kernel layer needs to know to find and end it."""
        record = self.record
        return Tree(
            record.name,
            record.cookie,
            None if record.proxy_lock else f"{self.workers_dir}/{record.name}/{LOCK}",
            record.identity,
            record.cgroup,
        )

    def died(self) -> None:
        """Its pidfd became readable."""
        self.on_death(self)

    def cancel_timer(self) -> None:
        """Whatever was going to happen later does not."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def let_go(self) -> None:
        """Close every descriptor; reap the leader if it is our child and has ended."""
        self.set_aside().let_go()

    def set_aside(self) -> Held:
        """Hold nothing from now on; what was held is the caller's to let go of."""
        held = Held(self.pidfd, self.is_child, self.lifeline, self.proxy_lock_fd)
        for name, value in _OF_NO_PROCESS:
            _set(self, name, value)
        self.pidfd = None  # not like the others: who looks at a list has to see that something changed
        return held


def _nobody_listens(_: Worker) -> None:
    """Before the deck listens there is nothing to do: recovery looks for itself."""


_OF_NO_PROCESS: Final[tuple[tuple[str, Any], ...]] = (
    ("is_child", False),
    ("lifeline", None),
    ("proxy_lock_fd", None),
    ("awaits_ready", False),
    ("status_text", None),
    ("trouble", None),
    ("cpu_sample", None),
    ("used", None),
)

_AT_FIRST: Final[tuple[tuple[str, Any], ...]] = (
    *_OF_NO_PROCESS,
    ("changed_at", 0),
    ("on_death", _nobody_listens),
    ("pidfd", None),
    ("timer", None),
    ("ended_ill", False),
    ("explained_at", ()),
    ("glance", None),
)
