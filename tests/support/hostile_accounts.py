"""Accounts that exist for one test session, and a place that they can reach."""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Account:
    """One unprivileged account of this machine."""

    name: str
    uid: int
    gid: int

    def run(self, *words: str | Path, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a program as this account and look at its exit code."""
        done = subprocess.run(
            [str(word) for word in words],
            user=self.uid,
            group=self.gid,
            extra_groups=[],
            cwd="/",
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if expect is not None:
            assert done.returncode == expect, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


@contextlib.contextmanager
def made(label: str) -> Iterator[Account]:
    """An account that is removed again; its group is its own."""
    name = f"evdk-{os.getpid()}-{label}"
    subprocess.run(
        ["useradd", "--no-create-home", "--user-group", "--home-dir", "/nonexistent", "--shell", "/bin/sh", name],
        check=True,
        capture_output=True,
    )
    try:
        entry = pwd.getpwnam(name)
        yield Account(name, entry.pw_uid, entry.pw_gid)
    finally:
        subprocess.run(["userdel", name], check=False, capture_output=True)


@contextlib.contextmanager
def open_place() -> Iterator[Path]:
    """A directory that every account can pass through, removed at the end."""
    place = Path(tempfile.mkdtemp(prefix="everdeck-hostile-", dir="/tmp"))
    place.chmod(0o711)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
