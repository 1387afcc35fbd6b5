"""A note beside each worker's lock: what was started there, for the day on which the registry is lost or old.

``workers/NAME/note`` is written by the owner at each start, before the process exists, and is the owner's: a worker of
another account can neither read nor write it. It holds the cookie of that start and the spec, without the values of
secrets. A registry that was deleted, damaged or restored from a backup is compared with it: whoever holds the lock was
started with what the note says, also when the program has overwritten its own environment (as setproctitle does).

A note is not synced: it is for the processes that outlived a registry, and no process outlives a power cut. One that a
cut left empty is no note.

The next start of the same spec differs by its cookie alone, which is written over the old one in place: a rename over
an existing file makes ext4 write the new one out at once (``auto_da_alloc``), half a millisecond of every replacement.
A process that is killed cannot leave half of such a write: it is one call within one page.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from everdeck import disk
from everdeck.errors import SpecError
from everdeck.model import Cookie, WorkerSpec
from everdeck.statedir import NOTE

_LARGEST_BYTES: Final = 1 << 24
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Note(msgspec.Struct, frozen=True):
    """The last start of one worker."""

    cookie: Cookie
    spec: WorkerSpec


_decode: Final = msgspec.json.Decoder(Note).decode


_BEFORE_COOKIE: Final = b'{"cookie":"'
_IN_PLACE_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write(home: str, cookie: Cookie, spec_json: bytes) -> None:
    """Note a start that is about to happen."""
    path, said = f"{home}/{NOTE}", content(cookie, spec_json)
    if not _renewed(path, cookie.encode(), said):
        disk.replace_file(path, said, synced=False)


def content(cookie: Cookie, spec_json: bytes) -> bytes:
    """What the note of such a start says."""
    return _BEFORE_COOKIE + cookie.encode() + b'","spec":' + spec_json + b"}"


def _renewed(path: str, cookie: bytes, content: bytes) -> bool:
    """Was it enough to write the cookie over that of the last start, because all else is as it was?"""
    first, last = len(_BEFORE_COOKIE), len(_BEFORE_COOKIE) + len(cookie)
    try:
        fd = os.open(path, _IN_PLACE_FLAGS)
    except OSError:  # the first start, or something that is no note
        return False
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != len(content) or facts.st_nlink != 1:
            return False
        old = os.pread(fd, len(content) + 1, 0)
        if old[:first] != content[:first] or old[last:] != content[last:]:
            return False
        return os.pwrite(fd, cookie, first) == len(cookie)
    except OSError:
        return False
    finally:
        os.close(fd)


def read(home: Path | str) -> Note | None:
    """The last note, if there is one that can be read and is ours."""
    try:
        return _decode(_raw(home))
    except (msgspec.MsgspecError, SpecError, ValueError):
        return None


def tells_of_another_start(home: str, cookie: Cookie) -> bool:
    """Is there a note, and is it not of this start? Cheap, because ten thousand are asked when a deck is opened."""
    raw = _raw(home)
    return bool(raw) and cookie.encode() not in raw


def _raw(home: Path | str) -> bytes:
    try:
        fd = os.open(f"{home}/{NOTE}", _FLAGS)
    except PermissionError:
        reopened = _closed_to_us(f"{home}/{NOTE}")
        if reopened is None:
            return b""
        fd = reopened
    except OSError:
        return b""
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_size > _LARGEST_BYTES:
            return b""
        return os.read(fd, facts.st_size)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _closed_to_us(path: str) -> int | None:
    """Our own file, whose mode a worker of our account changed: no sandbox can keep it from that."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            facts = os.fstat(fd)
            if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
                os.chmod(f"/proc/self/fd/{fd}", 0o600)  # noqa: PTH101 - the one that was looked at
                return os.open(path, _FLAGS)
        finally:
            os.close(fd)
    return None
