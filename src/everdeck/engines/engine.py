"""What the deck needs from whoever brings workers to life."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from everdeck.kernel.lifeline import Lifeline
from everdeck.model import Cookie, Identity, WorkerName, WorkerSpec


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker that has been exec'ed. The pidfd and the lifeline are the caller's."""

    pidfd: int
    pid: int
    lifeline: Lifeline | None


class Engine(Protocol):
    """Prepares, starts and clears away one worker at a time; keeps nothing in memory about any of them."""

    def check(self, spec: WorkerSpec) -> None:
        """Refuse what this engine cannot do for the spec, before anything is written."""

    def prepare(self, name: WorkerName, spec: WorkerSpec) -> None:
        """Make the worker's directories and write its secrets."""

    def take_lock(self, name: WorkerName) -> int | None:
        """The descriptor that holds the worker's lock, or None if somebody else holds it."""

    def launch(
        self, name: WorkerName, spec: WorkerSpec, cookie: Cookie, port: int | None, lock_fd: int | None
    ) -> Launched:
        """Start it; the caller holds the lock and closes its copy afterwards."""

    def identify(self, launched: Launched) -> Identity:
        """Who it is."""

    def clear(self, name: WorkerName) -> None:
        """Remove everything of a worker whose tree is gone."""

    def lock_path(self, name: WorkerName) -> Path:
        """The worker's own lock file."""
