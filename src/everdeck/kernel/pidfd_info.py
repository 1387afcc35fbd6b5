"""What a pidfd remembers of its process, also after it was reaped: ``PIDFD_GET_INFO``.

The ioctl exists since Linux 6.13 and tells the cgroup; since 6.15 it also tells how a reaped process ended, if the
pidfd was open before. An older kernel, and a process that was reaped before its kernel could remember, give None.

See linux/pidfd.h, ``struct pidfd_info``.
"""

import errno
import fcntl
import struct
from dataclasses import dataclass
from typing import Final

CGROUP: Final = 1 << 2
EXIT: Final = 1 << 3

# The first version of the struct: mask, cgroupid, eleven ids, exit_code.
_INFO: Final = struct.Struct("<QQ11Ii")
_PIDFD_GET_INFO: Final = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
# ENOTTY, EINVAL: an older kernel. ESRCH: reaped before it could remember, or of another pid namespace.
_UNTOLD: Final = frozenset({errno.ENOTTY, errno.EINVAL, errno.ESRCH, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class Remembered:
    """The answer: ``told`` has the bits of what the kernel filled in."""

    told: int
    cgroup_number: int
    wait_status: int


def ask(pidfd: int, wanted: int) -> Remembered | None:
    """What the pidfd remembers of the wanted bits (:data:`CGROUP`, :data:`EXIT`); None if it cannot tell."""
    request = bytearray(_INFO.size)
    struct.pack_into("<Q", request, 0, wanted)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request)
    except OSError as err:
        if err.errno in _UNTOLD:
            return None
        raise
    told, cgroup_number, *_, wait_status = _INFO.unpack(request)
    return Remembered(told, cgroup_number, wait_status)
