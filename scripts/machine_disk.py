#!/usr/bin/env python3
"""A disk with a volatile write cache, for tests of power cuts: what was not flushed can be lost.

    machine_disk.py IMAGE NBD-SOCKET CONTROL-SOCKET

It serves IMAGE by the NBD protocol. A write stays in memory until the client flushes, or asks for this one write to be
forced through (FUA): exactly what a disk promises, and no more. On the control socket, one word per line:

    off all      the power is gone: forget every write that was not flushed
    off SEED     forget some of them, chosen by SEED: a disk may have written any of its cache, in any order
    off none     forget none: only the machine is reset
    on           the power is back

and each is answered with the number of blocks that were forgotten. While it is off every request fails: whoever ends
the machine afterwards may flush as much as it likes (qemu does when it is stopped or resets its devices).

See the NBD protocol (https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md), fixed newstyle handshake.
"""

import asyncio
import os
import random
import struct
import sys

_MAGIC, _OPTION_MAGIC, _REPLY_MAGIC = b"NBDMAGIC", b"IHAVEOPT", 0x3E889045565A9
_FIXED_NEWSTYLE, _NO_ZEROES = 1, 2
_EXPORT_NAME, _ABORT, _INFO, _GO = 1, 2, 6, 7
_ACK, _INFO_REPLY, _UNSUPPORTED = 1, 3, 0x80000001
_HAS_FLAGS, _SEND_FLUSH, _SEND_FUA = 1, 4, 8
_REQUEST, _SIMPLE_REPLY = 0x25609513, 0x67446698
_READ, _WRITE, _DISCONNECT, _FLUSH = 0, 1, 2, 3
_FUA = 1
_EIO, _EINVAL = 5, 22
_BLOCK = 512  # what can be asked for
# What it writes in one piece, as disks with sectors of 4 KiB do. ext4 relies on it: a commit of its journal of which
# only some of the eight sectors were written is a corrupt one, and the file system is not mounted any more.
_PIECE = 4096


class Disk:
    """The blocks that are safe (a file), and those that are only in the cache."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR)
        self.size = os.fstat(self._fd).st_size
        self._cache: dict[int, bytes] = {}
        self.is_off = False

    def read(self, offset: int, length: int) -> bytes:
        """What was written last, safe or not."""
        data = bytearray(os.pread(self._fd, length, offset))
        if self._cache:
            for at in range(0, length, _BLOCK):
                block = self._cache.get(offset + at)
                if block is not None:
                    data[at : at + _BLOCK] = block
        return bytes(data)

    def write(self, offset: int, data: bytes, *, through: bool) -> None:
        """Into the cache; ``through`` it if the client says so."""
        if through:
            os.pwrite(self._fd, data, offset)
            for at in range(0, len(data), _BLOCK):
                self._cache.pop(offset + at, None)
            return
        for at in range(0, len(data), _BLOCK):
            self._cache[offset + at] = data[at : at + _BLOCK]

    def flush(self) -> None:
        """All that was written so far is safe from now on."""
        self._keep(self._cache)
        self._cache.clear()

    def switch_off(self, what: str) -> int:
        """The power is gone; answers how many blocks went with it."""
        self.is_off = True
        kept: dict[int, bytes] = {}
        if what == "none":
            kept = dict(self._cache)
        elif what != "all":
            chance = random.Random(int(what))
            share = chance.random()
            written = {piece for piece in {offset // _PIECE for offset in self._cache} if chance.random() < share}
            kept = {offset: data for offset, data in self._cache.items() if offset // _PIECE in written}
        self._keep(kept)
        lost = len(self._cache) - len(kept)
        self._cache.clear()
        return lost

    def _keep(self, blocks: dict[int, bytes]) -> None:
        for offset, data in blocks.items():
            os.pwrite(self._fd, data, offset)


async def serve(disk: Disk, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One client of the disk."""
    try:
        if await _handshake(disk, reader, writer):
            await _requests(disk, reader, writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _handshake(disk: Disk, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(_MAGIC + _OPTION_MAGIC + struct.pack(">H", _FIXED_NEWSTYLE | _NO_ZEROES))
    await reader.readexactly(4)
    about = struct.pack(">QH", disk.size, _HAS_FLAGS | _SEND_FLUSH | _SEND_FUA)
    while True:
        _, option, length = struct.unpack(">8sII", await reader.readexactly(16))
        await reader.readexactly(length)

        def reply(kind: int, data: bytes = b"", option: int = option) -> None:
            writer.write(struct.pack(">QIII", _REPLY_MAGIC, option, kind, len(data)) + data)

        if option == _EXPORT_NAME:
            writer.write(about)
            return True
        if option in {_INFO, _GO}:
            reply(_INFO_REPLY, struct.pack(">H", 0) + about)
            reply(_ACK)
            if option == _GO:
                return True
        elif option == _ABORT:
            reply(_ACK)
            return False
        else:
            reply(_UNSUPPORTED)


async def _requests(disk: Disk, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        head = await reader.readexactly(28)
        _, flags, kind, handle, offset, length = struct.unpack(">IHHQQI", head)
        data, error = b"", 0
        given = await reader.readexactly(length) if kind == _WRITE else b""
        if kind == _DISCONNECT:
            return
        if disk.is_off:
            error = _EIO
        elif kind == _READ:
            data = disk.read(offset, length)
        elif kind == _WRITE:
            disk.write(offset, given, through=bool(flags & _FUA))
        elif kind == _FLUSH:
            disk.flush()
        else:
            error = _EINVAL
        writer.write(struct.pack(">IIQ", _SIMPLE_REPLY, error, handle) + data)
        await writer.drain()


async def obey(disk: Disk, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Who has his finger on the switch."""
    while line := await reader.readline():
        lost = 0
        match line.decode().split():
            case ["off", what]:
                lost = disk.switch_off(what)
            case ["on"]:
                disk.is_off = False
        writer.write(f"{lost}\n".encode())
        await writer.drain()
    writer.close()


async def main(image: str, nbd: str, control: str) -> None:
    """Serve both sockets until killed."""
    disk = Disk(image)
    async with (
        await asyncio.start_unix_server(lambda r, w: serve(disk, r, w), nbd) as one,
        await asyncio.start_unix_server(lambda r, w: obey(disk, r, w), control) as other,
    ):
        await asyncio.gather(one.serve_forever(), other.serve_forever())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
