"""Takes a worker's files from standard input and puts them on its volume; run in a pod that has nothing but the volume.

``python -m everdeck.cluster.receive NAME`` reads blocks, each after its length in four bytes, until one of length 0: a
tar archive of the worker's ``data/`` and ``log/``. What an earlier attempt left is removed first. It answers with the
digest of what it read, so that the sender knows that everything arrived. (The API's exec has no way to end a command's
input, so the end is a block.)
"""

import hashlib
import io
import json
import os
import secrets
import shutil
import struct
import sys
import tarfile
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

import msgspec

from everdeck.cluster.volume import STATE
from everdeck.deck import notes
from everdeck.model import Cookie, WorkerSpec, worker_name
from everdeck.statedir import StateDir, WorkerDir

LENGTH: Final = struct.Struct(">I")
PARTS: Final = ("data", "log")
"""What of a worker's directory is carried; its secrets travel with its spec, its lock stays."""


class Blocks(io.RawIOBase):
    """The archive out of its blocks."""

    def __init__(self, source: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self._source = source
        self._rest = b""
        self._over = False

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, into: memoryview) -> int:  # type: ignore[override]  # as the standard library calls it
        """The next bytes; 0 at the end."""
        if not self._rest and not self._over:
            (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
            self._over = length == 0
            self._rest = self._exactly(length)
            self.digest.update(self._rest)
            self.size += length
        taken = self._rest[: len(into)]
        into[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)

    def _exactly(self, length: int) -> bytes:
        block = self._source.read(length)
        if len(block) != length:
            raise EOFError("the sender went away in the middle")
        return block


def unpack(archive: Blocks, folder: Path) -> None:
    """Into the worker's directory; nothing outside of it, whatever the archive says."""
    for part in PARTS:
        shutil.rmtree(folder / part, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tarfile.open(fileobj=archive, mode="r|") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or path.parts[:1] not in {(part,) for part in PARTS}:
                raise ValueError(f"{member.name!r} does not belong into a worker's directory")
            if not (member.isreg() or member.isdir() or member.issym()):
                raise ValueError(f"{member.name!r} is neither file, directory nor link")
            member.uid, member.gid = os.getuid(), os.getgid()
            tar.extract(member, folder)
    while archive.read(1 << 16):
        pass


def leave_note(place: WorkerDir) -> None:
    """The pod's deck begins without a registry: a lock and a note tell it that these files are a worker's to keep."""
    place.lock.touch(mode=0o600)
    spec = msgspec.json.encode(WorkerSpec.of(("true",)))
    notes.write(str(place.path), Cookie(secrets.token_hex(16)), spec)


def main(arguments: list[str]) -> int:
    """Read, unpack, answer."""
    archive = Blocks(sys.stdin.buffer)
    place = StateDir(STATE).worker(worker_name(arguments[0]))
    unpack(archive, place.path)
    leave_note(place)
    os.sync()
    sys.stdout.write(json.dumps({"digest": archive.digest.hexdigest(), "size": archive.size}) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
