"""A file system that hangs on purpose, as a dead NFS server or a broken disk does.

``python hung_mount.py PATH`` (as root) mounts it and says ``mounted``. It speaks FUSE by itself, the kernel's protocol
on ``/dev/fuse``: it answers the greeting and reads every request after that without ever answering one. A process that
looks anything up in it survives SIGKILL (state D from then on), as its request was read. When this program ends, the
kernel fails all requests and everybody goes on.

See linux/fuse.h: struct fuse_in_header, fuse_out_header, fuse_init_out.
"""

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_IN_HEADER = struct.Struct("<IIQQIIII")
_OUT_HEADER = struct.Struct("<IiQ")
_INIT = 26
_MS_NOSUID_NODEV = 2 | 4


@contextlib.contextmanager
def hung_mount(place: Path) -> "Iterator[subprocess.Popen[str]]":
    """The mount at ``place``; killing the process that is handed out lets everybody go on."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse, to mount a file system that hangs")
    place.mkdir()
    with subprocess.Popen(
        [sys.executable, __file__, str(place)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            said = server.stdout.readline()
            if said != "mounted\n":
                pytest.skip(f"no FUSE file system can be mounted here: {said}")
            yield server
        finally:
            server.kill()
            server.wait()
            subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


def _serve(place: str) -> None:
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"hung", place.encode(), b"fuse", _MS_NOSUID_NODEV, options) != 0:
        print(os.strerror(ctypes.get_errno()), flush=True)
        return
    greeting = os.read(fuse, 1 << 20)
    _, opcode, unique, *_ = _IN_HEADER.unpack_from(greeting)
    assert opcode == _INIT
    body = struct.pack("<IIIIHHIIHHIIHH20x", 7, 31, 0, 0, 16, 12, 4096, 1, 0, 0, 0, 0, 0, 0)[:64].ljust(64, b"\0")
    os.write(fuse, _OUT_HEADER.pack(_OUT_HEADER.size + len(body), 0, unique) + body)
    print("mounted", flush=True)
    while True:
        os.read(fuse, 1 << 20)


if __name__ == "__main__":
    _serve(sys.argv[1])
