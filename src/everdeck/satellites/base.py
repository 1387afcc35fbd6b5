"""What a kind of satellite is made of: two methods, ``fetch`` and ``send``.

A kind joins one account to the outside. It is asked for what is new (``fetch``) at the position that was stored last,
and handed what is to be sent (``send``). Everything else is done for it: what it fetched is on disk before it is asked
again, what it sends was on disk before, attempts and retries, order per conversation, dead letters, health, the four
layers. It may be killed at any instruction.

A package adds a kind with an entry point of the group ``everdeck.satellites`` that names a
:class:`everdeck.satellites.KindEntry`::

    class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        server: str

    PIGEON = KindEntry("pigeon", "pigeon_post:Pigeon", Options, secrets=("RING",), needs=(("RING",),))

    class Pigeon(Kind[Options]):
        async def fetch(self, position):                  # may wait for news; may be cancelled at any time
            birds = await self.loft.landed_after(position.cursor)
            return Arrived([Incoming(id=bird.ring, channel="pigeon", …) for bird in birds], cursor=birds[-1].ring)

        async def send(self, outgoing):                   # returns when the other side has it; raises otherwise
            await self.loft.release(outgoing.to, outgoing.text, ring=outgoing.id)

:mod:`everdeck.testing.satellites` runs the kill -9 suite on a new kind.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from everdeck.errors import SpecError
from everdeck.feed.policy import SENDING, Retry
from everdeck.feed.records import Cursor, Position
from everdeck.feed.store import wall_clock
from everdeck.messages import Incoming, Outgoing

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a fetch found, and where to ask next (``cursor``; None leaves it where it is).

    ``asked`` is the offset that was sent upstream, for accounts whose ids may start again at random (Telegram's do).
    """

    messages: Sequence[Incoming] = ()
    cursor: Cursor = None
    asked: int | None = None


@dataclass(slots=True)
class Context:
    """What a kind may know and say.

    ``connected`` and ``failing`` are what people see as the state of the connection; ``tell`` is an event of the deck.
    ``transaction`` is one in the satellite's file, for tables of the kind's own.
    """

    worker: str
    data: Path
    credentials: Path | None
    port: int | None = None
    clock: Callable[[], float] = wall_clock
    transaction: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
    connected: Callable[..., None] = lambda **_: None
    failing: Callable[[str], None] = lambda _: None
    tell: Callable[..., None] = lambda *_, **__: None
    facts: dict[str, Any] = field(default_factory=dict)

    def secret(self, name: str) -> str | None:
        """The content of a secret's file, without its final newline; None if it was not given."""
        if self.credentials is None:
            return None
        try:
            return (self.credentials / name).read_text("utf-8").removesuffix("\n")
        except FileNotFoundError:
            return None

    def needed_secret(self, name: str) -> str:
        """The same, refused when it was not given."""
        found = self.secret(name)
        if not found:
            raise SpecError(f"secrets.{name}", None, f"a value: start the satellite with --secret {name}=FILE")
        return found


class Kind(Generic[OptionsT]):
    """One account. Made in the satellite's process, opened once, asked and handed to until it is closed.

    ``name`` keys the position, so it must stay the same for the same account (``telegram:<bot id>``, never the token)
    and must be known after :meth:`open`.
    """

    name: str = ""
    retry: Retry = SENDING.retry
    max_attempts: int = SENDING.max_attempts
    """How a message that cannot be sent is tried again: about a day by default."""
    senders: int = 1
    """How many messages may be on the wire at once: as many may be sent twice when the satellite is killed."""
    tells_finished: bool = False
    """Whether :meth:`finished` is to be told of every message that is done."""
    files: str = ""
    """The directory below ``data/`` for what comes with messages; a month later it goes, if its message is done."""

    def __init__(self, options: OptionsT, context: Context) -> None:
        self.options = options
        self.context = context

    async def open(self) -> None:
        """Make ready; the account need not be reachable yet."""

    async def close(self) -> None:
        """Let go."""

    async def fetch(self, position: Position) -> Arrived | None:
        """What is new at this position. It may wait for news, and be cancelled at any time.

        What was returned and not stored must come again when it is asked at the same position. None: nothing will ever
        come again. What it raises is told in words and tried again with backoff.
        """
        raise NotImplementedError

    async def send(self, outgoing: Outgoing) -> None:
        """Send one message; return when the other side has it.

        Raise :class:`everdeck.errors.SendRefused` if it will never take it. Any other error is tried again; with an
        attribute ``retry_after`` after that many seconds. ``outgoing.id`` is the same at every attempt.
        """
        raise NotImplementedError

    async def stored(self, messages: Sequence[Incoming]) -> None:
        """What the last fetch returned is on disk now."""

    async def check(self) -> None:
        """For a kind that receives nothing: can the account be used? What it raises is told and tried again."""

    async def skip_history(self) -> Cursor:
        """Where the new begins, for a first run that leaves out what is there already."""
        return None

    async def finished(self, ids: Sequence[str]) -> None:
        """These messages are done: mark or move them on the other side. Told at least once."""


def old_files(directory: Path, before: float) -> list[Path]:
    """What was last changed before that time."""
    found = []
    for place in directory.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            if place.lstat().st_mtime < before:
                found.append(place)
    return found


def forget_files(directory: Path, places: Iterable[Path], messages: Iterable[Incoming]) -> None:
    """Remove these, unless one of the messages, which are not done, has it."""
    needed = {
        Path(path).relative_to(directory).parts[0]
        for message in messages
        for path in (message.raw.get("file"), *(attachment.path for attachment in message.attachments))
        if isinstance(path, str) and path.startswith(f"{directory}/")
    }
    for place in places:
        if place.name not in needed:
            with contextlib.suppress(OSError):
                shutil.rmtree(place) if place.is_dir() else place.unlink()


def safe_name(name: str, *, most: int = 120) -> str:
    """A file name that is only a name: no directory, nothing hidden, nothing that a terminal or a shell minds."""
    plain = "".join(c if c.isalnum() or c in "._- +@()" else "_" for c in os.path.basename(name.replace("\\", "/")))  # noqa: PTH119 - a name, not a path
    plain = plain.strip(". ") or "file"
    stem, dot, ending = plain.rpartition(".")
    if len(plain.encode()) > most:
        ending = ending[-16:] if dot else ""
        stem = (stem if dot else plain).encode()[: most - len(ending.encode()) - 1].decode("utf-8", "ignore")
        plain = f"{stem}.{ending}" if ending else stem
    return plain
