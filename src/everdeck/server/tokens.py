"""The tokens of a deck and the sessions that browsers got for them, on disk as digests.

``STATE/token`` is the deck's own token, made at the first start: in the clear, 0600, of role admin. Whoever can read
it owns the state directory and needs no token. All others are made by ``everdeck token create`` and are only shown
there: ``STATE/tokens.json`` has their SHA-256 (they are 256 random bits, so nothing slower is needed), name, role,
labels and expiry. A session is what a browser keeps instead of a token: it ends by itself, at log-out, and with its
token. Sessions are in ``STATE/sessions.json``, so that they outlive the daemon.

Each file is replaced whole (:func:`everdeck.disk.replace_file`), under a lock on the directory, because several
programs may write: flock(2). A reader looks at the file's identity before it trusts what it remembers, so a revocation
holds from the next request on.
"""

import base64
import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from everdeck import disk
from everdeck.access import Grant, Role
from everdeck.errors import SpecError, StateDirRefused
from everdeck.model import worker_name

TOKEN_FILE: Final = "token"  # noqa: S105 - the name of the file
TOKENS_FILE: Final = "tokens.json"
SESSIONS_FILE: Final = "sessions.json"
DECK_TOKEN: Final = "deck"  # noqa: S105 - its name
PREFIX: Final = "edk_"  # so that a scanner of leaked secrets can know ours
SESSION_PREFIX: Final = "eds_"
SESSION_LIFE: Final = timedelta(days=7)
MOST_SESSIONS: Final = 500
_SHORTEST: Final = 32  # characters; of base64 they are 192 bits

_Kept = TypeVar("_Kept", bound=msgspec.Struct)


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One token as it is kept."""

    name: str
    digest: str
    role: Role
    labels: dict[str, str] = {}
    created_at: datetime
    expires_at: datetime | None = None

    @property
    def grant(self) -> Grant:
        """What it lets its bearer do."""
        return Grant(self.name, self.role, self.labels)

    def is_valid(self, now: datetime) -> bool:
        """Has it not expired?"""
        return self.expires_at is None or now < self.expires_at


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One login of one browser."""

    digest: str
    token_digest: str
    begun_at: datetime
    expires_at: datetime


def digest_of(secret: str) -> str:
    """As a secret is kept and looked up: looking up a digest tells nothing about the secret by its time."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class Tokens:
    """The tokens of one state directory; every call sees what is on disk now."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._named: _File[Token] = _File(state_dir / TOKENS_FILE, Token)
        self._deck: tuple[tuple[int, ...] | None, Token | None] = (None, None)

    def find(self, secret: str, now: datetime) -> Token | None:
        """The valid token that this is the secret of."""
        return self.by_digest(digest_of(secret), now)

    def by_digest(self, digest: str, now: datetime) -> Token | None:
        """The same by its digest."""
        token = next((one for one in self.list() if one.digest == digest), None)
        return token if token is not None and token.is_valid(now) else None

    def list(self) -> "list[Token]":
        """All of them, the deck's own first; expired ones too."""
        own = self._deck_token()
        return [*([] if own is None else [own]), *self._named.read()]

    def create(
        self, name: str, role: Role, labels: dict[str, str], now: datetime, expires_at: datetime | None = None
    ) -> str:
        """A new token; what is returned is shown once and kept nowhere."""
        checked = worker_name(name)
        if checked == DECK_TOKEN:
            raise SpecError("name", name, f"another name; {DECK_TOKEN!r} is the deck's own token, in STATE/token")
        if expires_at is not None and expires_at <= now:
            raise SpecError("expires", expires_at.isoformat(), "a time to come")
        secret = PREFIX + fresh_secret()
        token = Token(
            name=checked, digest=digest_of(secret), role=role, labels=labels, created_at=now, expires_at=expires_at
        )
        with self._named.changing() as known:
            if any(one.name == checked for one in known):
                raise SpecError("name", name, "a name that no other token has; revoke that one first")
            known.append(token)
        return secret

    def revoke(self, name: str) -> None:
        """It opens nothing from now on, and neither do the sessions that were got for it."""
        if name == DECK_TOKEN:
            with contextlib.suppress(FileNotFoundError):
                (self._state_dir / TOKEN_FILE).unlink()
                disk.sync_directory(self._state_dir)
                return
        with self._named.changing() as known:
            left = [one for one in known if one.name != name]
            if len(left) == len(known):
                names = ", ".join(one.name for one in known) or "there are none"
                raise SpecError("name", name, f"a token of this deck ({names})")
            known[:] = left

    def _deck_token(self) -> Token | None:
        path = self._state_dir / TOKEN_FILE
        try:
            facts = _identity_of(os.lstat(path))
        except OSError:
            return None
        if self._deck[0] != facts:
            secret = read_token(path)
            token = Token(
                name=DECK_TOKEN,
                digest=digest_of(secret),
                role=Role.ADMIN,
                created_at=datetime.fromtimestamp(facts[2] / 1e9, UTC),
            )
            self._deck = (facts, token)
        return self._deck[1]


class Sessions:
    """The sessions of one state directory."""

    def __init__(self, state_dir: Path, tokens: Tokens) -> None:
        self._file: _File[Session] = _File(state_dir / SESSIONS_FILE, Session)
        self._tokens = tokens

    def begin(self, token: Token, now: datetime) -> tuple[str, Session]:
        """A new session of whoever showed the token. Of very many the oldest ends."""
        secret = SESSION_PREFIX + fresh_secret()
        end = now + SESSION_LIFE
        session = Session(
            digest=digest_of(secret),
            token_digest=token.digest,
            begun_at=now,
            expires_at=end if token.expires_at is None else min(end, token.expires_at),
        )
        with self._file.changing() as known:
            known[:] = [*(one for one in known if now < one.expires_at), session][-MOST_SESSIONS:]
        return secret, session

    def find(self, secret: str, now: datetime) -> Token | None:
        """The token of a session that is neither over nor ended, if that token is still good."""
        digest = digest_of(secret)
        session = next((one for one in self._file.read() if one.digest == digest), None)
        if session is None or now >= session.expires_at:
            return None
        return self._tokens.by_digest(session.token_digest, now)

    def end(self, secret: str) -> None:
        """Log out."""
        digest = digest_of(secret)
        with self._file.changing() as known:
            known[:] = [one for one in known if one.digest != digest]


def fresh_secret() -> str:
    """As ``secrets.token_urlsafe`` makes it, but ``secrets`` loads OpenSSL, which a daemon may never need."""
    return base64.urlsafe_b64encode(os.urandom(32)).rstrip(b"=").decode("ascii")


def token_of(state_dir: Path) -> tuple[str, bool]:
    """The deck's own token and whether it was made just now. The file is 0600, and refused if others may read it."""
    while True:
        try:
            return read_token(state_dir / TOKEN_FILE), False
        except FileNotFoundError:
            token = fresh_secret()
            if _link_new(state_dir / TOKEN_FILE, token.encode("ascii") + b"\n"):
                return token, True


def read_token(path: Path) -> str:
    """What is in the deck's token file; raises FileNotFoundError or :class:`StateDirRefused`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateDirRefused(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or stat.S_IMODE(facts.st_mode) & 0o077:
            raise StateDirRefused(f"{path} may be read by others; chmod 600 it, or delete it to get a new token")
        token = file.read(4096).strip()
    if len(token) < _SHORTEST:
        raise StateDirRefused(f"{path} holds no token (32 characters or more); delete it to get a new one")
    return token


# --- below: files ------------------------------------------------------------------------------------------------


class _File(Generic[_Kept]):
    """A list of records in one JSON file."""

    def __init__(self, path: Path, kind: type[_Kept]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]  # msgspec takes it as a value
        self._seen: tuple[int, ...] | None = None
        self._records: list[_Kept] = []

    def read(self) -> list[_Kept]:
        """What is there now."""
        try:
            facts = _identity_of(os.lstat(self._path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StateDirRefused(f"{self._path}: {error.strerror}") from error
        if facts != self._seen:
            self._records = self._decoded()
            self._seen = facts
        return self._records

    @contextlib.contextmanager
    def changing(self) -> Iterator[list[_Kept]]:
        """The records to be changed; what was made of them is on disk when this is left, unless it raised."""
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            records = list(self.read())
            before = list(records)
            yield records
            if records != before:
                disk.replace_file(self._path, msgspec.json.format(msgspec.json.encode(records), indent=1))
        except OSError as error:
            raise StateDirRefused(f"{self._path}: {error.strerror}") from error
        finally:
            os.close(directory)

    def _decoded(self) -> list[_Kept]:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
                raise StateDirRefused(f"{self._path} may be read or written by others; chmod 600 it")
            try:
                return self._decoder.decode(file.read())
            except msgspec.MsgspecError as error:
                raise StateDirRefused(f"{self._path} cannot be read ({error}); delete it to begin anew") from error


def _identity_of(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode


def _link_new(path: Path, content: bytes) -> bool:
    """Make a file that was not there, whole at its first moment; False when another process was first."""
    fresh = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        _write_new(fresh, content)
        os.link(fresh, path)
        disk.sync_directory(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise StateDirRefused(f"{path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
    return True


def _write_new(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
