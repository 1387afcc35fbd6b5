"""Directories on filesystems that let go of the front of a file in different ways."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# ext4 collapses, tmpfs only punches holes, ramfs does neither.
FILESYSTEMS = ("ext4", "tmpfs", "ramfs")
METHODS = {"ext4": "collapse", "tmpfs": "punch", "ramfs": "truncate"}


@contextlib.contextmanager
def directory_on(filesystem: str, tmp_path: Path, options: str = "") -> Iterator[Path]:
    """A new directory on that filesystem, or skip the test."""
    if filesystem == "ext4":
        found = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True)
        if found.stdout.strip() not in ("ext2/ext3", "xfs"):
            pytest.skip(f"{tmp_path} is on {found.stdout.strip()}, which cannot collapse a range")
        yield tmp_path / "on-disk"
        return
    if filesystem == "tmpfs" and not options and os.access("/dev/shm", os.W_OK):
        place = Path(tempfile.mkdtemp(prefix="everdeck-logs-", dir="/dev/shm"))
        try:
            yield place / "in-memory"
        finally:
            shutil.rmtree(place)
        return
    if os.geteuid() != 0:
        pytest.skip(f"mounting {filesystem} needs root")
    place = tmp_path / f"mnt-{filesystem}"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", filesystem, *(["-o", options] if options else []), "none", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount {filesystem}: {mounted.stderr.strip()}")
    try:
        yield place / "mounted"
    finally:
        subprocess.run(["umount", str(place)], check=True)
