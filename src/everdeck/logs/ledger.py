"""Where the bytes of a log are: the layout of a log directory and the book that is kept over it.

Everything a worker ever wrote has a **position**: the number of bytes before it. The directory holds a window
of that stream::

    20261115T101500Z-000000000000000000.log.gz     positions      0 ..  9,998,336      archives, named by the
    20261115T102000Z-000000000009998336.log        positions 9,998,336 .. 19,996,672   position they begin at
    current                                        the rest; the worker appends to it itself
    ledger                                         base, head, and the step a rotation has reached
    index                                          (time, position) pairs, for --since and --until

**base** is the position of the first byte of the file ``current``; **head** is the first position that is in no
archive yet. Between the two lie bytes that are archived and on their way out; nobody reads them again.

The ledger is two fixed slots, overwritten in turn, each with a number and a checksum: a process killed while
writing leaves the other slot, and a full disk cannot refuse a write into a block that exists.
It is written *before* the file is changed in a way that needs it, so a reader that finds the ledger unchanged
after reading knows that what it read was in place (the argument of a sequence lock).

Whether the first ``dropping`` bytes have already left the file cannot be told from its size (the worker
appends) nor from its content (a log may repeat itself). So before they are removed a random **stamp** is
written over them: stamp there, not removed; stamp not there, removed.

A power cut may take from the end of ``current`` what an archive already holds, because the archive was synced and the
file is the worker's. So an entry also names the **boot** it was made in: of another one, what is at the front of the
file is compared with the archives, and what differs from them is new.
"""

import contextlib
import errno
import json
import os
import re
import stat
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, Self

from everdeck import disk
from everdeck.kernel.identity import boot_id

if TYPE_CHECKING:
    import gzip

CURRENT: Final = "current"
LEDGER: Final = "ledger"
INDEX: Final = "index"
STDERR: Final = "stderr"
BUSY: Final = "busy"  # exists while a rotation or compression is under way: recovery looks for this one name
PART: Final = ".part"

_ARCHIVE: Final = re.compile(r"(\d{8}T\d{6}Z)-(\d{18,})\.log(\.gz)?", re.ASCII)
_SLOT_BYTES: Final = 512
# Nothing there, or something that is no file of ours: a link, a socket.
_NO_FILE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
STAMP_BYTES: Final = 32
_COMPARE_BYTES: Final = 1 << 16
# A gzip member's head (RFC 1952) with our extra field "TL": how long the member is, compressed and plain.
MEMBER_HEAD: Final = struct.Struct("<BBBBIBBH2sHII")


class Ledger(NamedTuple):
    """What is true of a log directory."""

    number: int = 0
    base: int = 0
    head: int = 0
    newest: str = ""
    rotated_at: float = 0.0
    dropping: int = 0
    how: str = ""
    stamp: str = ""
    punched: bool = True
    boot: str = ""

    @property
    def is_of_another_boot(self) -> bool:
        """Was the machine off since this was written?"""
        return bool(self.boot) and self.boot != this_boot()

    def changed(self, **fields: object) -> Self:
        """The next entry, with these fields changed."""
        return self._replace(number=self.number + 1, **fields)  # type: ignore[arg-type]  # fields as above


def this_boot() -> str:
    """The name of this boot, in few letters: an entry has half a kilobyte."""
    return f"{zlib.crc32(boot_id().encode()):08x}"


class Archive(NamedTuple):
    """One archive: the position of its first byte, its file name, and whether it is compressed."""

    start: int
    name: str
    compressed: bool


def archive_name(at: str, start: int) -> str:
    """The file name of the archive that begins at ``start`` (18 digits: names sort as positions do)."""
    return f"{at}-{start:018d}.log"


def archives(log_dir: Path | str | int, newest: str = "") -> list[Archive]:
    """The archives, oldest first. Of one that exists plain and compressed, the plain one.

    ``newest`` is the archive the ledger names last: it counts also while it still carries its temporary name,
    because with the ledger's entry it was complete.
    """
    found: dict[int, Archive] = {}
    for entry in os.listdir(log_dir):  # noqa: PTH208 - log_dir may be a descriptor, which a Path cannot be
        name = newest if newest and entry == newest + PART else entry
        match = _ARCHIVE.fullmatch(name)
        if match is None:
            continue
        archive = Archive(int(match[2]), entry, match[3] is not None)
        other = found.get(archive.start)
        if other is None or other.compressed:
            found[archive.start] = archive
    return [found[start] for start in sorted(found)]


def start_of(name: str) -> int:
    """The position of an archive's first byte, from its name (which may end in ``.part``)."""
    match = _ARCHIVE.fullmatch(name.removesuffix(PART))
    if match is None:
        raise ValueError(f"not an archive's name: {name!r}")
    return int(match[2])


def load(log_dir: Path | str, *, dir_fd: int | None = None) -> Ledger:
    """The ledger as last written; a log that was never rotated has none, and begins at 0."""
    data = _both_slots(LEDGER if dir_fd is not None else os.path.join(log_dir, LEDGER), dir_fd)  # noqa: PTH118 - a hot path
    if data is None:
        return Ledger()
    slots = [slot for at in (0, _SLOT_BYTES) if (slot := _unpacked(data[at : at + _SLOT_BYTES])) is not None]
    return max(slots, default=Ledger())


def is_blank(dir_fd: int) -> bool:
    """Is there a ledger in which nothing was ever written, as far as the disk knows?"""
    data = _both_slots(LEDGER, dir_fd)
    return data is not None and not data.strip(b" \0")


def _both_slots(path: str, dir_fd: int | None) -> bytes | None:
    """What the ledger's file holds; None if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as err:
        if err.errno not in _NO_FILE:
            raise
        return None
    try:
        return os.pread(fd, 2 * _SLOT_BYTES, 0) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)


def rebuilt(log_dir: Path | str) -> Ledger:
    """The ledger of a directory that has archives and has lost its ledger (deleted, or damaged by the disk).

    The newest archive ends where ``current`` goes on. Whether ``current`` still has a hole in front is seen from its
    first block; nothing else writes that many zeros at the very beginning.
    """
    there = archives(log_dir)
    if not there:
        return Ledger()
    newest = there[-1]
    head = newest.start + _plain_bytes(Path(log_dir) / newest.name, compressed=newest.compressed)
    base = head
    with contextlib.suppress(FileNotFoundError), (Path(log_dir) / CURRENT).open("rb") as current:
        if os.fstat(current.fileno()).st_size >= head and not any(current.read(4096)):
            base = 0
    return Ledger(number=1, base=base, head=head, newest=newest.name.removesuffix(".gz"))


def write(ledger_fd: int, ledger: Ledger, *, durable: bool = False) -> None:
    """Make ``ledger`` the truth for every process, and, if ``durable``, for the time after a power failure too."""
    os.pwrite(ledger_fd, _packed(ledger), (ledger.number % 2) * _SLOT_BYTES)
    if durable:
        disk.sync(ledger_fd)


def open_ledger(dir_fd: int) -> int:
    """The ledger's file for writing; both slots are allocated now, while there may still be room."""
    fd = os.open(LEDGER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        if os.fstat(fd).st_size < 2 * _SLOT_BYTES:
            os.pwrite(fd, b" " * (2 * _SLOT_BYTES), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_regular(path: str, flags: int) -> int:
    """A descriptor of a plain file; a link, a pipe or a directory in its place is refused and never waited for."""
    return open_measured(path, flags)[0]


def open_measured(path: str, flags: int) -> tuple[int, int]:
    """The same, and how many bytes it has."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file", path)
    return fd, facts.st_size


def obstacle(log_dir: Path | str) -> str | None:
    """What stands where the worker's file should be, in words; None if it is the file, or nothing is there yet."""
    try:
        mode = os.lstat(f"{log_dir}/{CURRENT}").st_mode
    except OSError:
        return None
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFLNK: "a link", stat.S_IFSOCK: "a socket"}
    return None if stat.S_ISREG(mode) else kinds.get(stat.S_IFMT(mode), "a device")


def last_byte(log_dir: Path | str, size: int) -> bytes:
    """The last byte of the file that the worker writes to."""
    fd = open_regular(f"{log_dir}/{CURRENT}", os.O_RDONLY)
    try:
        return os.pread(fd, 1, size - 1)
    finally:
        os.close(fd)


def is_stamped(current_fd: int, ledger: Ledger) -> bool:
    """Whether the bytes that are being dropped are still at the front of the file."""
    return os.pread(current_fd, STAMP_BYTES, 0) == stamp_bytes(ledger.stamp)


def stamp_bytes(stamp: str) -> bytes:
    """The stamp as it is written into the file; the ledger holds it in another form, so copying that is harmless."""
    return bytes.fromhex(stamp)


def base_in(current_fd: int, ledger: Ledger, size: int, log_dir: Path | str) -> int:
    """The position of the file's first byte now, also while a removal is under way or somebody truncated it."""
    if ledger.dropping:
        return ledger.base if is_stamped(current_fd, ledger) else ledger.base + ledger.dropping
    archived = ledger.head - ledger.base
    if archived > 0 and not ledger.punched and ledger.is_of_another_boot:
        return ledger.head - archived_front(current_fd, ledger, log_dir)
    # Shorter than what was archived from it: somebody emptied the file by hand. What comes now is new.
    return ledger.head if size < archived else ledger.base


def archived_front(current_fd: int, ledger: Ledger, log_dir: Path | str) -> int:
    """How much of the front of the file is what the archives hold from ``base`` to ``head``, or is punched out."""
    at = ledger.base
    for archive in archives(log_dir, ledger.newest):
        if archive.compressed or archive.start >= ledger.head:
            continue
        at = max(at, archive.start)
        with contextlib.suppress(FileNotFoundError), open(f"{log_dir}/{archive.name}", "rb") as file:  # noqa: PTH123 - a hot path
            while at < ledger.head and (held := os.pread(file.fileno(), _COMPARE_BYTES, at - archive.start)):
                found = os.pread(current_fd, len(held), at - ledger.base)
                same = _same(found, held)
                at += same
                if same < len(held):
                    return at - ledger.base
    return at - ledger.base


def _same(found: bytes, held: bytes) -> int:
    """How many bytes of ``found``, from its first, are those of ``held`` or zeros."""
    if found == held:
        return len(found)
    return next(
        (n for n, (one, other) in enumerate(zip(found, held, strict=False)) if one and one != other), len(found)
    )


def members(fd: int) -> list[tuple[int, int]]:
    """The lengths, compressed and plain, of the gzip members of an archive of ours; none for somebody else's file."""
    total = os.fstat(fd).st_size
    found: list[tuple[int, int]] = []
    offset = 0
    while offset < total:
        head = os.pread(fd, MEMBER_HEAD.size, offset)
        if len(head) < MEMBER_HEAD.size or head[:4] != b"\x1f\x8b\x08\x04" or head[12:14] != b"TL":
            return []
        packed, plain = MEMBER_HEAD.unpack(head)[-2:]
        if packed <= MEMBER_HEAD.size:
            return []
        found.append((packed, plain))
        offset += packed
    return found


def _plain_bytes(path: Path, *, compressed: bool) -> int:
    with path.open("rb") as file:
        if not compressed:
            return os.fstat(file.fileno()).st_size
        if lengths := members(file.fileno()):
            return sum(plain for _, plain in lengths)
        with plain(file) as plain_file:
            return plain_file.seek(0, os.SEEK_END)


def plain(file: BinaryIO) -> "gzip.GzipFile":
    """What a compressed file holds."""
    import gzip  # noqa: PLC0415 - most logs are never compressed

    return gzip.GzipFile(fileobj=file)


def _packed(ledger: Ledger) -> bytes:
    text = json.dumps(ledger._asdict(), separators=(",", ":"))
    line = f"{zlib.crc32(text.encode()):08x} {text}"
    return line.ljust(_SLOT_BYTES - 1).encode() + b"\n"


def _unpacked(slot: bytes) -> Ledger | None:
    crc, _, text = slot.rstrip().partition(b" ")
    try:
        if int(crc, 16) != zlib.crc32(text):
            return None
        return Ledger(**json.loads(text))
    except (ValueError, TypeError):
        return None
