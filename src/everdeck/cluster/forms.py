"""What is said between a reader of messages outside of a pod (:mod:`post`) and the desk inside of it (:mod:`desk`)."""

import msgspec

from everdeck.faults import Fault
from everdeck.messages import FeedStatus, Letter, LetterVerb, Message, Outgoing, Which


class Handed(msgspec.Struct, frozen=True, tag="message"):
    """A message, and the number by which its end is told."""

    claim: int
    message: Message


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a message ended: done, with its replies; failed; or handed back."""

    claim: int
    replies: list[Outgoing] = []
    error: str | None = None
    released: bool = False


class Kept(msgspec.Struct, frozen=True, tag="kept", omit_defaults=True):
    """That end is on disk, or why not."""

    claim: int
    fault: Fault | None = None


class Letters(msgspec.Struct, frozen=True):
    """Arguments of ``letters``."""

    which: Which = "dead"
    number: str | None = None
    limit: int = 100


class Decide(msgspec.Struct, frozen=True):
    """Arguments of ``decide``."""

    verb: LetterVerb
    number: str


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one question was answered with."""

    number: int | None = None
    done: bool = False
    feed: FeedStatus | None = None
    letters: list[Letter] = []
    fault: Fault | None = None
