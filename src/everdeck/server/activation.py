"""Sockets that systemd listens on for us: a ``.socket`` unit beside the daemon's own.

Connections then wait in the kernel's queue while the daemon restarts, a port below 1024 needs no right of ours, and the
first connection starts the daemon. The sockets are handed over as descriptors from 3 on, their number and whom they are
meant for in the environment. They stay systemd's: the file of a Unix socket is not ours to remove.

See sd_listen_fds(3), systemd.socket(5).
"""

import contextlib
import os
import socket
from typing import Final

_FIRST: Final = 3
_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def taken() -> dict[str, int]:
    """The descriptors that were lent to this process, ``unix`` and ``tcp``; empty if none were.

    Asked once: the environment is cleared, so that neither a worker nor the program after a reload takes them for its
    own. Of several of one kind the first is used, and what we do not serve is left alone.
    """
    said = {name: os.environ.pop(name, "") for name in _VARIABLES}
    lent: dict[str, int] = {}
    if said["LISTEN_PID"] != str(os.getpid()) or not said["LISTEN_FDS"].isdigit():
        return lent
    for fd in range(_FIRST, _FIRST + int(said["LISTEN_FDS"])):
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)  # noqa: FBT003 - the function has no keyword
            if (kind := _kind_of(fd)) is not None:
                lent.setdefault(kind, fd)
    return lent


def _kind_of(fd: int) -> str | None:
    looked_at = socket.socket(fileno=fd)
    try:
        if looked_at.type != socket.SOCK_STREAM or not looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        return {socket.AF_UNIX: "unix", socket.AF_INET: "tcp", socket.AF_INET6: "tcp"}.get(looked_at.family)
    finally:
        looked_at.detach()
