"""The table of descriptors: large enough before it matters, and with the lock at the end that is let go of first.

Two rules of the kernel stand behind this (Linux 6.18, fs/file.c, kernel/task_work.c):

- In a process with threads a table grows by waiting until every processor has seen it (``synchronize_rcu``): 8 to 20 ms
  for each doubling. A thousand pidfds are three doublings, and a takeover should not wait for them.
- When a process is killed its descriptors are let go of from the highest number to the lowest. To let go of an inotify
  descriptor takes 7 to 30 ms (``synchronize_srcu``), and what has a lower number waits for it.
"""

import fcntl
import os
import resource
from typing import Final

HIGH: Final = 1000
"""Above what a process opens by itself, and below the usual limit of 1024."""
MANY: Final = 4096
"""Room for a deck of two thousand workers, in 32 KiB of the kernel's memory."""


def grow(count: int) -> None:
    """Make room for so many descriptors now, or for as many as we may have; a table never shrinks again."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        count = min(count, soft)
    probe = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.close(fcntl.fcntl(probe, fcntl.F_DUPFD_CLOEXEC, max(count - 1, 0)))
    except OSError:
        pass  # no room at all is told by whoever needs a descriptor
    finally:
        os.close(probe)


def raised(fd: int) -> int:
    """The same open file under a high number, so that the kernel lets go of it first; as it was if there is no room."""
    if fd >= HIGH:
        return fd
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH)
    except OSError:
        return fd
    os.close(fd)
    return high
