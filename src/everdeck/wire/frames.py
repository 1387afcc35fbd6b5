"""What travels on ``deck.sock``: a length of four bytes, then a MessagePack array that begins with its kind.

The owner speaks first (:class:`Welcome`). Whoever connects says who it is (:class:`Hello`) and asks; questions are
numbered by the asker, and their answers come in any order. A stream is a question with many answers: the owner sends as
many :class:`Item` as it was allowed to (:class:`More`) and waits, so a reader that stops reading costs the owner one
question and one write buffer.

A frame that is too long is known by its length, before any of it is kept. Numbers and names beyond what we know are
refused by name, so that two releases that meet on one socket can tell what the other did not understand.
"""

import struct
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import msgspec

from everdeck.errors import ClientError
from everdeck.faults import Fault
from everdeck.verbs import Caller

VERSION: Final = 1
MOST_ASKED_BYTES: Final = 16 << 20
"""The longest frame that an owner takes: some ten thousand specs in one ``start_many``."""
MOST_ANSWERED_BYTES: Final = 1 << 30
WINDOW: Final = 64
"""How many items of a stream an owner may send before it is allowed more."""

_LENGTH: Final = struct.Struct(">I")


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    pass


class Hello(_Frame, frozen=True, array_like=True, tag="hello"):
    """Who asks. A member has the deck open and may succeed its owner; anybody else only asks."""

    version: int
    program: str
    member: bool = False


class Ask(_Frame, frozen=True, array_like=True, tag="ask"):
    """One question: its number on this connection, the verb, and for a verb that acts the id that makes it one act."""

    number: int
    verb: msgspec.Raw
    request: str | None = None
    caller: Caller | None = None


class More(_Frame, frozen=True, array_like=True, tag="more"):
    """The reader of a stream has room for so many more items."""

    number: int
    items: int


class Cancel(_Frame, frozen=True, array_like=True, tag="cancel"):
    """The reader of a stream has left. A verb that acts is carried to its end all the same."""

    number: int


class Welcome(_Frame, frozen=True, array_like=True, tag="welcome"):
    """Who owns the deck."""

    version: int
    owner_pid: int
    deck_id: str
    everdeck: str


class Item(_Frame, frozen=True, array_like=True, tag="item"):
    """One item of a stream, or the progress of a verb."""

    number: int
    value: msgspec.Raw


class Answer(_Frame, frozen=True, array_like=True, tag="answer"):
    """The answer to a question, or the end of a stream."""

    number: int
    value: msgspec.Raw


class Refused(_Frame, frozen=True, array_like=True, tag="refused"):
    """The error instead of an answer; number 0 is about the connection itself, which ends with it."""

    number: int
    fault: Fault


class Offer(_Frame, frozen=True, array_like=True, tag="offer"):
    """The owner leaves and this member may have the deck: it fetches the descriptors with this word."""

    word: str


Asked: TypeAlias = Hello | Ask | More | Cancel
Answered: TypeAlias = Welcome | Item | Answer | Refused | Offer

_encode: Final = msgspec.msgpack.Encoder().encode
decode_asked: Final = msgspec.msgpack.Decoder(Asked).decode
decode_answered: Final = msgspec.msgpack.Decoder(Answered).decode


class FrameRefused(ClientError):
    """What came is not a frame, or one that is too long; the connection ends."""


def packed(frame: Asked | Answered) -> bytes:
    """A frame as it is sent."""
    body = _encode(frame)
    return _LENGTH.pack(len(body)) + body


def raw(value: Any) -> msgspec.Raw:
    """A value as a part of a frame."""
    return msgspec.Raw(_encode(value))


class Cutter:
    """Cuts what arrives into the bodies of frames; keeps at most one frame that is not complete."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept = bytearray()

    @property
    def holds_a_part(self) -> bool:
        """Is a frame begun and not complete?"""
        return bool(self._kept)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Each body that is complete now; raises at a length that is too large, before its bytes are kept."""
        kept = self._kept
        kept += data
        begin = 0
        try:
            while len(kept) - begin >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(kept, begin)
                if length > self._most_bytes:
                    begin = len(kept)
                    raise FrameRefused(f"a frame of {length} bytes was announced; at most {self._most_bytes} are taken")
                end = begin + _LENGTH.size + length
                if end > len(kept):
                    break
                body = bytes(kept[begin + _LENGTH.size : end])
                begin = end
                yield body
        finally:
            del kept[:begin]
