"""Small file systems of a test's own."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, words: Sequence[str]) -> Iterator[Path]:
    """What ``mount`` and these words put at the place, taken away afterwards; skipped where that is not allowed."""
    done = subprocess.run(["mount", *words, str(place)], check=False, capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"it cannot be mounted here: {done.stderr!r}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
