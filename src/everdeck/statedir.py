"""The names in the state directory, each written once. See docs/reference/state-directory.md.

Only names: nothing is opened, made or locked here. Whoever starts a worker joins the names of its parts to a text
(``f"{home}/{LOG}"``), because paths as objects cost as much as the system calls there.
"""

import os
from pathlib import Path
from typing import Final, NamedTuple

SOCKET: Final = "deck.sock"
HTTP_SOCKET: Final = "http.sock"
WORKERS: Final = "workers"
LOCK: Final = "lock"
NOTE: Final = "note"
LOG: Final = "log"
DATA: Final = "data"
SECRETS: Final = "secrets"
TMP: Final = "tmp"
QUOTA: Final = "quota"
PARTS: Final = (LOG, DATA, SECRETS)
PARTS_OF_ALL: Final = (LOG, DATA)
"""What every worker has; secrets only who has some."""


class WorkerDir(NamedTuple):
    """``workers/NAME``: what belongs to one worker."""

    path: Path

    @property
    def lock(self) -> Path:
        """Held by the worker's own processes for as long as any of them lives."""
        return self.path / LOCK

    @property
    def note(self) -> Path:
        """What was last started here, for a registry that was lost."""
        return self.path / NOTE

    @property
    def log(self) -> Path:
        """What it writes, and the archives."""
        return self.path / LOG

    @property
    def data(self) -> Path:
        """Its working directory."""
        return self.path / DATA

    @property
    def secrets(self) -> Path:
        """Its secrets, one file each."""
        return self.path / SECRETS

    @property
    def deck(self) -> "StateDir":
        """The state directory it lies in."""
        return StateDir(self.path.parent.parent)


class StateDir(NamedTuple):
    """The directory of one deck."""

    path: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> "StateDir":
        """The same from what a caller typed."""
        return cls(Path(path))

    @property
    def lock(self) -> Path:
        """Held by the owner for as long as it lives."""
        return self.path / "deck.lock"

    @property
    def socket(self) -> Path:
        """Where verbs go."""
        return self.path / SOCKET

    @property
    def http_socket(self) -> Path:
        """Where the HTTP API listens besides TCP."""
        return self.path / HTTP_SOCKET

    @property
    def registry(self) -> Path:
        """The registry (SQLite)."""
        return self.path / "deck.db"

    @property
    def token(self) -> Path:
        """What a caller over TCP must show; made by the daemon."""
        return self.path / "token"

    @property
    def applied(self) -> Path:
        """Which configuration was applied last."""
        return self.path / "applied.json"

    @property
    def notified(self) -> Path:
        """Up to which event somebody elsewhere was told."""
        return self.path / "notified.json"

    @property
    def samples(self) -> Path:
        """CPU and memory of the last day and month, one file per worker."""
        return self.path / "samples"

    @property
    def workers(self) -> Path:
        """One directory per worker."""
        return self.path / WORKERS

    def worker(self, name: str) -> WorkerDir:
        """The directory of one worker; the name is checked by whoever got it."""
        return WorkerDir(self.workers / name)
