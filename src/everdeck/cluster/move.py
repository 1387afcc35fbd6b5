"""A worker moves from a directory of this machine into a namespace: stopped here, its files and secrets copied, started
there. At no moment does it run in both places, and at no moment are its files only half somewhere.

The order decides that. It is stopped here, and this process holds its lock while its files are copied, so nobody can
start it here meanwhile. Only when they have arrived, as a digest proves, is it known there; then it is forgotten here;
then it is started there. Whoever is killed on the way leaves it stopped, or running in one place, and the same
command again goes on from there:

=====================  ======================================  =================================================
here                   there                                   the same command again
=====================  ======================================  =================================================
known                  unknown                                 begins anew; what was copied is replaced
known, stopped         known, as coming from this deck         forgets it here, starts it there
known, runs again      known, as coming from this deck         is refused: its files here are newer than those there
unknown                known, as coming from this deck         starts it there
=====================  ======================================  =================================================
"""

import asyncio
import contextlib
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Final

import msgspec

from everdeck.cluster.deck import ClusterDeck
from everdeck.cluster.receive import LENGTH, PARTS
from everdeck.crashpoints import crash_point
from everdeck.deck import AsyncDeck
from everdeck.errors import ClientError, LockConflict, SpecError, UnknownWorker
from everdeck.kernel import flock
from everdeck.model import WorkerName, WorkerSpec, WorkerStatus
from everdeck.statedir import StateDir

_BLOCK: Final = 1 << 20


class Moved(msgspec.Struct, frozen=True):
    """What became of one worker."""

    status: WorkerStatus
    copied_bytes: int = 0
    dropped_cwd: str | None = None
    left_out: int = 0


class _Kept(msgspec.Struct, frozen=True):
    """The other side's answer."""

    digest: str
    size: int


async def move(here: AsyncDeck, there: ClusterDeck, name: WorkerName, *, keep: bool = False) -> Moved:
    """Move one worker. With ``keep`` it stays known here, stopped."""
    came_from = there.came_from(name)
    if came_from is not None and came_from != here.deck_id:
        raise SpecError("name", name, f"another name: kubernetes:{there.namespace} has a worker of this one")
    try:
        spec = await here.whole_spec(name)
    except UnknownWorker:
        if came_from is None:
            raise
        return Moved(await there.start(name))
    if came_from is not None and (await here.status(name)).state.is_live:
        # Somebody went on with it here after a move that was cut off, or after one with ``keep``.
        raise SpecError(
            "name",
            name,
            f"a worker that does not run here: kubernetes:{there.namespace} has it from an earlier move, with files "
            "of that time; stop it here to go on with those, or remove it there (rm --data) to move it anew",
        )
    inside = _in_a_pod(spec)
    there.check(inside)
    size = left_out = 0
    if came_from is None:
        size, left_out = await _carried(here, there, name, inside)
        crash_point("move.known-there")
    if not keep:
        await here.remove(name)
        crash_point("move.forgotten-here")
    return Moved(await there.start(name), size, None if spec.cwd == inside.cwd else spec.cwd, left_out)


async def _carried(here: AsyncDeck, there: ClusterDeck, name: WorkerName, spec: WorkerSpec) -> tuple[int, int]:
    """Stop it, copy its files, and make it known there, not running."""
    await here.stop(name)
    crash_point("move.stopped")
    place = StateDir(here.state_dir).worker(name)
    lock = flock.take(place.lock)
    if lock is None:
        raise LockConflict(name, next(iter(flock.holders(place.lock)), None), "not a worker of this deck")
    try:
        archive = _Archive(place.path)
        async with contextlib.aclosing(archive.blocks()) as blocks:
            kept = msgspec.json.decode(await there.receive(name, spec, blocks), type=_Kept)
        if kept.digest != archive.digest.hexdigest():
            raise ClientError(f"{name}: what arrived is not what was sent; it is stopped here, and unknown there")
        crash_point("move.copied")
        await there.know(name, spec, came_from=here.deck_id)
    finally:
        os.close(lock)
    return kept.size, archive.left_out


def _in_a_pod(spec: WorkerSpec) -> WorkerSpec:
    """A directory of this machine is in no image: there it runs in its own."""
    return msgspec.structs.replace(spec, cwd=None)


class _Archive:
    """A worker's files as a tar archive, in blocks that say how long they are."""

    def __init__(self, folder: Path) -> None:
        self.digest = hashlib.sha256()
        self.left_out = 0
        self._folder = folder

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """Each block after its length; the last one is empty."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(None, self._write, write_fd)
        try:
            while block := await loop.run_in_executor(None, os.read, read_fd, _BLOCK):
                self.digest.update(block)
                yield LENGTH.pack(len(block)) + block
        finally:
            os.close(read_fd)
            await asyncio.wait({writing})
        writing.result()
        yield LENGTH.pack(0)

    def _write(self, write_fd: int) -> None:
        with (
            contextlib.suppress(BrokenPipeError),  # the reader left, and says why itself
            os.fdopen(write_fd, "wb") as pipe,
            tarfile.open(fileobj=pipe, mode="w|") as tar,
        ):
            for part in PARTS:
                for member, content in self._members(part):
                    tar.addfile(member, content)

    def _members(self, part: str) -> Iterator[tuple[tarfile.TarInfo, io.BufferedReader | None]]:
        """Every file, directory and link. The worker may have made anything there: no link is followed, nothing that
        is no file is opened, and everything is opened from its directory's descriptor (openat(2), O_NOFOLLOW).
        """
        root = self._folder / part
        if not root.is_dir() or root.is_symlink():
            return
        for path, folders, files, folder_fd in os.fwalk(root, follow_symlinks=False):
            at = Path(part) / Path(path).relative_to(root)
            yield _member(at, os.fstat(folder_fd)), None
            for name in (*folders, *files):
                found = os.lstat(name, dir_fd=folder_fd)
                if stat.S_ISLNK(found.st_mode):
                    link = _member(at / name, found)
                    link.linkname = os.readlink(name, dir_fd=folder_fd)
                    yield link, None
                elif stat.S_ISREG(found.st_mode):
                    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
                    with os.fdopen(fd, "rb") as content:
                        yield _member(at / name, os.fstat(fd)), content
                elif not stat.S_ISDIR(found.st_mode):
                    self.left_out += 1  # a pipe, a socket: nothing that can be carried


def _member(path: Path, found: os.stat_result) -> tarfile.TarInfo:
    member = tarfile.TarInfo(str(path))
    member.mode, member.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
    if stat.S_ISDIR(found.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        member.type = tarfile.SYMTYPE
    else:
        member.size = found.st_size
    return member
