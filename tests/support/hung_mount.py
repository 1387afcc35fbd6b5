"""A file system that hangs on purpose, as a dead NFS server or a broken disk does.

``python hung_mount.py PATH [late]`` (as root) mounts it and says ``mounted``. It speaks FUSE by itself, the kernel's
protocol on ``/dev/fuse``: it answers the greeting and reads every request after that without ever answering one. A
process that looks anything up in it survives SIGKILL (state D from then on), as its request was read. With ``late`` it
answers questions about the file ``program`` in it, an executable, and hangs when that is opened, as exec does: a mount
that died between the look and the exec. When this program ends, the kernel fails all requests and everybody goes on.

See linux/fuse.h: struct fuse_in_header, fuse_out_header, fuse_init_out.
"""

import contextlib
import ctypes
import errno
import os
import stat
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
_LOOKUP, _FORGET, _GETATTR, _OPEN, _INIT, _INTERRUPT, _BATCH_FORGET = 1, 2, 3, 14, 26, 36, 42
_MS_NOSUID_NODEV = 2 | 4


@contextlib.contextmanager
def hung_mount(place: Path, *, late: bool = False) -> "Iterator[subprocess.Popen[str]]":
    """The mount at ``place``; killing the process that is handed out lets everybody go on."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse, to mount a file system that hangs")
    place.mkdir()
    with subprocess.Popen(
        [sys.executable, __file__, str(place), *(["late"] if late else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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


def _serve(place: str, *, late: bool) -> None:
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
        request = os.read(fuse, 1 << 20)
        _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(request)
        if late and (body := _answer(opcode, node, request[_IN_HEADER.size :])) is not None:
            number, answer = body
            os.write(fuse, _OUT_HEADER.pack(_OUT_HEADER.size + len(answer), number, unique) + answer)


def _answer(opcode: int, node: int, asked: bytes) -> tuple[int, bytes] | None:
    """An errno (negative) and a body for whoever only looks; None for whoever opens, and is left waiting."""
    if opcode == _LOOKUP:
        if asked.rstrip(b"\0") != b"program":
            return -errno.ENOENT, b""
        return 0, struct.pack("<QQQQII", 2, 0, 0, 0, 0, 0) + _attributes(2)
    if opcode == _GETATTR:
        return 0, struct.pack("<QII", 0, 0, 0) + _attributes(node)
    if opcode in {_OPEN, _FORGET, _INTERRUPT, _BATCH_FORGET}:
        return None
    return -errno.ENOSYS, b""


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o755
    return struct.pack("<6Q10I", node, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


if __name__ == "__main__":
    _serve(sys.argv[1], late="late" in sys.argv[2:])
