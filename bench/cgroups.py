"""Removes the cgroups of a deck that was killed in a measurement: nobody is left who would."""

import contextlib
import sqlite3
from pathlib import Path

_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


def remove_cgroups(state_dir: Path) -> None:
    """Remove the empty cgroup directories of the deck in ``state_dir``, if there is a deck; a live one is refused."""
    registry = state_dir / "deck.db"
    if not registry.exists():
        return
    with contextlib.closing(sqlite3.connect(registry)) as connection:
        row = connection.execute("SELECT value FROM meta WHERE key = 'deck_id'").fetchone()
    for mount in _MOUNTS if row is not None else ():
        home = mount / _own_cgroup() / f"everdeck-{row[0]}"
        with contextlib.suppress(OSError):  # not there, or removed meanwhile
            for directory in (*home.iterdir(), home):
                with contextlib.suppress(OSError):  # a file of the kernel's, or a process is still inside
                    directory.rmdir()


def _own_cgroup() -> str:
    """Where we are below the mount; a deck makes its own directory beside."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::").lstrip("/")
    return ""
