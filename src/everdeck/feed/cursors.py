"""The cursor without a database: one whole number in a text file.

Written to a temporary file, synced, renamed over the old one, and the directory synced: whoever reads it sees the old
number or the new one, also after a power cut (rename(2), fsync(2)). A file of that form that was there before us is
taken over. A file that holds anything else is an error that names the file and what it holds; it is kept as it is,
and is never taken for zero, because zero would mean doing everything again and a guess would mean losing something.

Beside the file, only while they are needed: ``NAME.attempt`` counts the attempts of the update in work, so that one
that takes the process with it is set aside after a few, and ``NAME.dead`` receives those, one JSON object per line.
"""

import os
import re
import stat
from os import PathLike
from pathlib import Path
from typing import Final

import msgspec

from everdeck import disk
from everdeck.child import LAST_END_ENV
from everdeck.errors import CursorUnreadable, InboxUnavailable, SpecError
from everdeck.feed.last_words import own_cookie

_NUMBER: Final = re.compile(r"\s*(\d{1,19})\s*", re.ASCII)
_SHOWN: Final = 80


class FileCursor:
    """One whole number in a text file, replaced as a whole after each update."""

    def __init__(self, path: str | PathLike[str]) -> None:
        # A link stays a link: the file behind it is the one that is replaced.
        self.path = Path(os.path.realpath(path))

    def __repr__(self) -> str:
        return f"FileCursor({str(self.path)!r})"

    def load(self) -> int | None:
        """The number, or None if there is no file yet."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as err:
            raise CursorUnreadable(f"{self.path}: {err.strerror} (errno {err.errno}); it was left as it is") from err
        match = _NUMBER.fullmatch(raw.decode("utf-8", errors="replace"))
        if match is None:
            shown = repr(raw[:_SHOWN]) + ("…" if len(raw) > _SHOWN else "")
            raise CursorUnreadable(
                f"{self.path} holds {shown}, which is not one whole number; it was kept. "
                f"Correct it, or remove it to start afresh"
            )
        return int(match[1])

    def save(self, value: int) -> None:
        """Replace the number; when this returns, it is on the disk."""
        if type(value) is not int or value < 0:
            raise SpecError("cursor", value, "a whole number, at least 0")
        self._replace(self.path, b"%d\n" % value, synced=True)

    def age_seconds(self, now: float) -> float | None:
        """How long ago the number was saved, by the wall clock; None if there is no file."""
        try:
            return now - self.path.stat().st_mtime
        except OSError:
            return None

    # --- the update in work ---

    def attempts_of(self, record_id: int | str) -> int:
        """How often this update was begun and not finished; a death that the deck has ordered since does not count."""
        try:
            noted = msgspec.json.decode(self._beside("attempt").read_bytes(), type=_Attempt)
        except (OSError, msgspec.DecodeError):
            return 0
        if noted.id != record_id:
            return 0
        ordered = os.environ.get(LAST_END_ENV) == "ordered" and noted.cookie != own_cookie()
        return noted.attempts - int(ordered and noted.attempts > 0)

    def note_attempt(self, record_id: int | str, attempts: int) -> None:
        """Count an attempt before it is made. Survives our death; a power cut may forget it, which harms nobody."""
        noted = msgspec.json.encode(_Attempt(record_id, attempts, own_cookie()))
        self._replace(self._beside("attempt"), noted, synced=False)

    def forget_attempts(self) -> None:
        """The update is finished."""
        self._beside("attempt").unlink(missing_ok=True)

    def set_aside(self, letter: dict[str, object]) -> None:
        """Append a dead letter, durably, before the cursor moves past it."""
        path = self._beside("dead")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, msgspec.json.encode(letter) + b"\n")
                disk.sync(fd)
            finally:
                os.close(fd)
            disk.sync_directory(path.parent)  # the first letter makes the file
        except OSError as err:
            raise InboxUnavailable(f"{path}: {err.strerror} (errno {err.errno})") from err

    # --- helpers ---

    def _beside(self, kind: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{kind}")

    def _replace(self, path: Path, content: bytes, *, synced: bool) -> None:
        try:
            disk.replace_file(path, content, mode=_mode_of(path), synced=synced)
        except OSError as err:
            raise InboxUnavailable(f"{path}: {err.strerror} (errno {err.errno}); the old number stands") from err


class _Attempt(msgspec.Struct):
    id: int | str
    attempts: int
    cookie: int = 0  # whose attempt it was


def _mode_of(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0o600
