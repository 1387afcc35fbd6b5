"""What passes between an account outside and a program: messages in, messages out.

A satellite stores an :class:`Incoming` before the other side may forget it; whoever handles it gets a :class:`Message`,
whichever channel it came by. Both are plain values that can be encoded. A message that was handed out also knows its
*hold*: the claim that says who handles it. Leaving ``async with message:`` without an error finishes it together with
its replies, in one transaction on disk; leaving with an error puts it back; dying does nothing, and the next reader
gets it.

This module decides nothing and touches nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from os import PathLike, fspath
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, Protocol, Self, TypeAlias

import msgspec

from everdeck.errors import MessageError, SpecError, Unsupported

LetterVerb: TypeAlias = Literal["retry", "drop", "replay"]
Which: TypeAlias = Literal["dead", "waiting", "done", "all"]

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Attachment(msgspec.Struct, frozen=True):
    """A file that came with a message. ``path`` is absolute, in the satellite's ``data/``.

    ``problem`` says why there is no file, such as "larger than the 20 MB that the Bot API hands out".
    """

    name: str
    path: str
    media_type: str = "application/octet-stream"
    size: int | None = None
    problem: str | None = None


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """What a satellite stores of one message: everything but who handles it.

    ``id`` tells it from every other message of its account, as the other side names it. Messages of one
    ``conversation`` are handled in the order they came. ``raw`` is the message as its channel has it.
    """

    id: str
    channel: str
    conversation: str | None = None
    sender: str | None = None
    text: str = ""
    subject: str | None = None
    attachments: tuple[Attachment, ...] = ()
    at: datetime = EPOCH
    raw: dict[str, Any] = {}


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply has to know of the message that it answers."""

    id: str
    conversation: str | None = None
    sender: str | None = None
    subject: str | None = None
    raw: dict[str, Any] = {}


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A message that will be sent. ``to`` is the channel's own word: a chat's number, a mail address.

    ``attachments`` are paths of files. ``answers`` is set on replies. ``options`` go to the channel as they are
    (Telegram: ``parse_mode``, ``reply_markup``; mail: ``html``, ``headers``, ``cc``). ``id`` is the same at every
    attempt, so that the other side can tell a repetition.
    """

    to: str
    text: str = ""
    subject: str | None = None
    attachments: tuple[str, ...] = ()
    answers: Answered | None = None
    options: dict[str, Any] = {}
    id: str | None = None


def outgoing(
    to: object,
    text: str = "",
    *,
    subject: str | None = None,
    attachments: Sequence[str | PathLike[str]] = (),
    answers: Answered | None = None,
    **options: Any,
) -> Outgoing:
    """An outgoing message from what a caller typed; refused by field when it cannot be one."""
    if isinstance(to, bool) or not isinstance(to, str | int) or to == "":
        raise SpecError("to", to, "whom to send to: a chat, an address; a text or a number")
    if not isinstance(text, str):
        raise SpecError("text", text, "a text")
    if isinstance(attachments, str | bytes):
        raise SpecError("attachments", attachments, "a list of paths")
    if not text and not attachments:
        raise SpecError("text", text, "a text that is not empty, or attachments")
    try:
        msgspec.json.encode(options)
    except (TypeError, ValueError) as err:
        raise SpecError("options", sorted(options), f"values that can be written as JSON ({err})") from None
    return Outgoing(
        to=str(to),
        text=text,
        subject=subject,
        attachments=tuple(fspath(path) for path in attachments),
        answers=answers,
        options=options,
    )


def channel_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a message whose words came over a wire: none of them may be a field of the message.

    Above all not ``attachments``: the satellite would read any file that it can read, on a stranger's word.
    """
    for name in ("to", "text", "subject", "attachments", "answers"):
        if name in options:
            raise SpecError(f"options.{name}", options[name], "options of the channel only, such as parse_mode or html")
    return dict(options)


class Hold(Protocol):
    """Who handles a message, and how its end is told. Every method is called at most once, but for ``reply``."""

    def reply(self, reply: Outgoing) -> None:
        """Keep a reply until the end of the message."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """The handler's own writes, the replies and the end of the message in one commit."""

    async def finish(self, error: BaseException | None) -> None:
        """It is done, or has failed with ``error``; returns when that is on disk."""

    def finish_now(self, error: BaseException | None) -> None:
        """The same for programs without an event loop."""


class FarHold(ABC):
    """A message of a satellite that is reached over a line; ``run`` is how a synchronous reader runs coroutines."""

    no_files: ClassVar[str]
    """Why a file of this machine cannot be attached."""

    def __init__(self, run: Callable[[Any], Any] | None) -> None:
        self._run = run
        self._replies: list[Outgoing] = []
        self._over = False

    def reply(self, reply: Outgoing) -> None:
        """As :meth:`Hold.reply`."""
        if reply.attachments:
            raise Unsupported("attachments", self.no_files)
        self._replies.append(reply)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """As :meth:`Hold.transaction`."""
        raise Unsupported("transaction", "it is for functions that run in the satellite")

    async def finish(self, error: BaseException | None) -> None:
        """As :meth:`Hold.finish`."""
        from asyncio import to_thread  # noqa: PLC0415 - commands without a loop load this module

        work = self._finish(error)
        await (work if self._run is None else to_thread(self._run, work))

    def finish_now(self, error: BaseException | None) -> None:
        """As :meth:`Hold.finish_now`."""
        if self._run is None:
            raise TypeError("inside an event loop a message is finished by: async with message")
        self._run(self._finish(error))

    async def _finish(self, error: BaseException | None) -> None:
        if not self._over:
            self._over = True
            await self._end(error)

    @abstractmethod
    async def _end(self, error: BaseException | None) -> None:
        """Tell the satellite how it ended; called once."""


def is_leaving(error: BaseException) -> bool:
    """Does whoever handles a message leave, rather than fail at it? Then it is handed back, uncounted."""
    from asyncio import CancelledError  # noqa: PLC0415 - commands without a loop load this module

    return isinstance(error, CancelledError | GeneratorExit | KeyboardInterrupt | SystemExit)


def failure_of(error: BaseException) -> str:
    """What a satellite far away is told of an error."""
    return f"{type(error).__name__}: {error}"[:2000]


class Message(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One message from outside, whichever channel it came by.

    ``id`` is the channel's own; ``worker`` the satellite it came by; ``channel`` its kind (``telegram``, ``mail``,
    ``cron``, ``webhook``); ``attempt`` counts from 1. ``raw`` is the message as its channel has it.
    """

    id: str
    worker: str
    channel: str
    conversation: str | None = None
    sender: str | None = None
    text: str = ""
    subject: str | None = None
    attachments: tuple[Attachment, ...] = ()
    at: datetime = EPOCH
    attempt: int = 1
    raw: dict[str, Any] = {}

    @classmethod
    def of(cls, incoming: Incoming, *, worker: str, attempt: int, hold: Hold | None = None) -> Self:
        """The message as it is handed out."""
        message = cls(
            worker=worker, attempt=attempt, **{name: getattr(incoming, name) for name in Incoming.__struct_fields__}
        )
        if hold is not None:
            message.__dict__["_hold"] = hold
        return message

    def reply(
        self,
        text: str = "",
        *,
        subject: str | None = None,
        attachments: Sequence[str | PathLike[str]] = (),
        **options: Any,
    ) -> "Kept":
        """Answer in the same conversation. It is committed with the end of the message and sent by the satellite.

        Works with and without ``await``: nothing is waited for here.
        """
        answers = Answered(
            id=self.id, conversation=self.conversation, sender=self.sender, subject=self.subject, raw=self.raw
        )
        to = self.conversation or self.sender
        if to is None:
            raise MessageError(f"message {self.id!r} of {self.worker!r} came from nobody who could be answered")
        self._held().reply(outgoing(to, text, subject=subject, attachments=attachments, answers=answers, **options))
        return Kept()

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """``async with message.transaction() as db:`` in a function of the satellite: effectively once.

        The function's own writes, its replies and the end of the message are one commit in the satellite's file.
        """
        return self._held().transaction()

    async def done(self) -> None:
        """Finish it; what ``async with`` does by itself."""
        await self._held().finish(None)

    async def failed(self, error: BaseException | str) -> None:
        """Put it back to be tried again, or set it aside after the last attempt."""
        await self._held().finish(_error(error))

    async def release(self) -> None:
        """Hand it back to whoever reads next; the attempt is not counted."""
        await self._held().finish(GeneratorExit())

    async def __aenter__(self) -> Self:
        self._held()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._held().finish(error)

    def __enter__(self) -> Self:
        self._held()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held().finish_now(error)

    def _held(self) -> Hold:
        hold: Hold | None = self.__dict__.get("_hold")
        if hold is None:
            raise MessageError(f"message {self.id!r} is a copy: only the one that was handed out can be answered")
        return hold


class MessageStream(ABC):
    """What ``deck.messages()`` gives: ``async for message in …``; under :class:`everdeck.Deck` also ``for``.

    ``run`` carries out a coroutine in the deck's own loop, for a program that has none; None: this is that loop.
    """

    def __init__(self, run: Callable[[Any], Any] | None) -> None:
        self._run = run

    @abstractmethod
    async def begin(self) -> None:
        """Find where the messages are; raises why there can be none. The first message does it by itself."""

    def __aiter__(self) -> Self:
        return self

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> Message:
        """The next message, when there is one."""

    def __next__(self) -> Message:
        if self._run is None:
            raise TypeError("inside an event loop the messages come by: async for message in deck.messages()")
        return self._next_now(self._run)

    @abstractmethod
    def _next_now(self, run: Callable[[Any], Any]) -> Message:
        """The same for programs without an event loop."""

    @abstractmethod
    async def aclose(self) -> None:
        """Take nothing more; what was not finished is handed back."""

    @abstractmethod
    def close(self) -> None:
        """The same for programs without an event loop."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FeedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A satellite's feed in numbers and words.

    ``connection`` is ``connecting``, ``connected``, ``failing`` (then ``error`` says why) or ``ended``.
    """

    worker: str
    kind: str
    account: str | None = None
    connection: str = "connecting"
    error: str | None = None
    since: datetime | None = None
    last_contact_at: datetime | None = None
    done: int = 0
    waiting: int = 0
    in_flight: int = 0
    dead: int = 0
    to_send: int = 0
    unsent: int = 0
    readers: int = 0


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """One message in a feed's file, for people: ``number`` is what the commands take; ``out-3`` is one to be sent."""

    number: str
    direction: Literal["in", "out"]
    state: str
    id: str | None
    conversation: str | None
    sender: str | None
    subject: str | None
    text: str
    attempts: int
    error: str | None
    at: datetime
    payload: str


class Kept:
    """What :meth:`Message.reply` gives: already kept, so awaiting it takes no time."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


def _error(error: BaseException | str) -> BaseException:
    return error if isinstance(error, BaseException) else MessageError(error)


def encoded(value: Incoming | Outgoing) -> bytes:
    """As it is stored."""
    return msgspec.json.encode(value)


decoded_incoming: Final = msgspec.json.Decoder(Incoming).decode
decoded_outgoing: Final = msgspec.json.Decoder(Outgoing).decode


def plain(message: Message) -> Mapping[str, Any]:
    """As it is sent to programs that are not Python."""
    found: dict[str, Any] = msgspec.to_builtins(message)
    return found
