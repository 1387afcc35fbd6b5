"""Where tests that only kill processes keep their files.

SIGKILL leaves the page cache alone, so a RAM disk shows the same as a disk, without hundreds of syncs of a busy one.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RAM_DISK = Path("/dev/shm")


@contextmanager
def quick_directory() -> Iterator[Path]:
    """A directory in memory if there is one, gone afterwards."""
    place = RAM_DISK if os.access(RAM_DISK, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="everdeck-feed-", dir=place) as directory:
        yield Path(directory)
