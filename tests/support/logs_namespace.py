"""A user who may have no inotify descriptor: the limit is set in a namespace of our own, so nobody else feels it."""

import ctypes
import os
import sys
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
CANNOT = 77
"""The exit status of a program that could not get its namespace."""


def forbid_inotify() -> None:
    """From here on this process cannot open an inotify descriptor. Leaves with :data:`CANNOT` where that is refused."""
    uid, gid = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(_CLONE_NEWUSER) != 0:
        sys.exit(CANNOT)
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        Path("/proc/sys/user/max_inotify_instances").write_text("0")
    except OSError:
        sys.exit(CANNOT)
