"""``/api/v1/messages``: what satellites bring in, for programs in any language; and their feeds, for people.

A stream hands out messages, each with a *claim*. Whoever has the claim finishes the message (``ack``, with replies in
the same transaction), puts it back (``fail``) or reads its attachments. When the stream ends, whatever was not finished
is handed back: a reader that dies leaves its messages for the next. ``most`` is how many may be in hand at once.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any, BinaryIO, Final, Literal

import msgspec
from litestar import Response, get, post
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody, PathParameter, QueryParameter
from litestar.response import Stream

from everdeck.access import Role
from everdeck.errors import MessageLost
from everdeck.messages import FeedStatus, Letter, Message, MessageStream, Which, channel_options, plain
from everdeck.model import worker_name
from everdeck.satellites import kinds, option_schemas
from everdeck.server.api.asking import ACTS, READS, READS_ONE, Asked, Name, services_of, stream_of, told
from everdeck.server.entrance import grant_of
from everdeck.server.services import Services
from everdeck.server.sse import PING_SECONDS
from everdeck.statedir import StateDir

MOST_IN_HAND: Final = 100
_PIECE_BYTES: Final = 1 << 18
_PING: Final = b"event: ping\ndata: {}\n\n"
Claim = Annotated[str, PathParameter(description="What the stream gave with the message.", max_length=64)]


class Handed(msgspec.Struct, frozen=True):
    """One message of the stream, and the claim to finish it with."""

    claim: str
    message: Message


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reply in the conversation of the message."""

    text: str
    subject: str | None = None
    options: dict[str, Any] = {}


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message is done; its replies are promised in the same transaction."""

    replies: list[Reply] = []


class Fail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message could not be handled: it is tried again, and set aside after the last attempt."""

    error: str = "the reader failed"


class SendRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message to send by a satellite."""

    to: str | int
    text: str
    subject: str | None = None
    options: dict[str, Any] = {}


class Promised(msgspec.Struct, frozen=True):
    """It is on disk and will be sent; ``number`` is what the feed shows."""

    number: str


class FeedView(msgspec.Struct, frozen=True):
    """A satellite's feed: its state in numbers and words, and some of its messages."""

    status: FeedStatus
    letters: list[Letter]


class Decided(msgspec.Struct, frozen=True):
    """Whether there was such a message."""

    done: bool


class KindView(msgspec.Struct, frozen=True):
    """A kind of satellite: what it is, the secrets it reads, and a JSON Schema of its options."""

    name: str
    text: str
    secrets: tuple[str, ...]
    sends: bool
    receives: bool
    options: dict[str, Any]


@get(
    "/api/v1/messages",
    responses={
        **READS_ONE,
        200: ResponseSpec(
            data_container=Handed,
            media_type="text/event-stream",
            description="Each event is one of these",
            generate_examples=False,
        ),
    },
    summary="Messages as they come, as server-sent events",
    tags=["messages"],
)
async def stream_messages(
    request: Asked,
    worker: Annotated[str | None, QueryParameter(description="Only this satellite's; else those of all.")] = None,
    most: Annotated[int, QueryParameter(ge=1, le=MOST_IN_HAND, description="How many may be in hand at once.")] = 1,
) -> Response[Any]:
    """Each message is handed to one reader of all that read; those of one conversation come one after another.

    An event `message` carries `{"claim": …, "message": {…}}`. What is not finished when the stream ends comes again.
    """
    services = services_of(request)
    if worker is not None:
        await services.deck.status(worker_name(worker))
    messages = services.deck.messages(worker)
    chunks = _handed_out(services, messages, most)
    first = await anext(chunks)  # here, so that what refuses it is an answer and not a stream that ends at once
    return stream_of(_begun(first, chunks))


@post(
    "/api/v1/messages/{claim:str}/ack",
    responses=ACTS,
    status_code=200,
    summary="Finish a message, with its replies",
    tags=["messages"],
)
async def finish_message(request: Asked, claim: Claim, data: JSONBody[Ack]) -> Decided:
    """The end of the message and its replies are one transaction on disk."""
    services = services_of(request)

    async def finish() -> Decided:
        given = [(reply, channel_options(reply.options)) for reply in data.replies]
        message = _held(services, claim)  # a reply that is refused leaves it in hand
        for reply, options in given:
            message.reply(reply.text, subject=reply.subject, **options)
        await _taken(services, claim).done()
        return Decided(done=True)

    return await services.answers.once(f"ack {claim}", finish)


@post(
    "/api/v1/messages/{claim:str}/reply",
    responses=ACTS,
    status_code=200,
    summary="Keep a reply until the message is finished",
    tags=["messages"],
)
async def reply_to_message(request: Asked, claim: Claim, data: JSONBody[Reply]) -> Decided:
    """It is committed with the end of the message (`ack`), and sent by the satellite."""
    _held(services_of(request), claim).reply(data.text, subject=data.subject, **channel_options(data.options))
    return Decided(done=True)


@post(
    "/api/v1/messages/{claim:str}/fail",
    responses=ACTS,
    status_code=200,
    summary="Put a message back to be tried again",
    tags=["messages"],
)
async def fail_message(request: Asked, claim: Claim, data: JSONBody[Fail]) -> Decided:
    """After the last attempt it is a dead letter."""
    services = services_of(request)

    async def fail() -> Decided:
        await _taken(services, claim).failed(data.error)
        return Decided(done=True)

    return await services.answers.once(f"fail {claim}", fail)


@post(
    "/api/v1/messages/{claim:str}/release",
    responses=ACTS,
    status_code=200,
    summary="Hand a message back; the attempt is not counted",
    tags=["messages"],
)
async def release_message(request: Asked, claim: Claim) -> Decided:
    """For a reader that is told to leave."""
    services = services_of(request)

    async def release() -> Decided:
        await _taken(services, claim).release()
        return Decided(done=True)

    return await services.answers.once(f"release {claim}", release)


@get(
    "/api/v1/messages/{claim:str}/attachments/{number:int}",
    responses=told(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    summary="The content of an attachment",
    tags=["messages"],
)
async def read_attachment(request: Asked, claim: Claim, number: FromPath[int]) -> Stream:
    """While the message is in hand."""
    from everdeck.deck import feeds  # noqa: PLC0415 - most daemons never need the feed, which costs memory

    services = services_of(request)
    message = _held(services, claim)
    if not 0 <= number < len(message.attachments):
        raise NotFoundException(f"the message has {len(message.attachments)} attachments; they are counted from 0")
    attachment = message.attachments[number]
    data = StateDir(services.deck.state_dir).worker(message.worker).data
    file = await asyncio.to_thread(feeds.open_attachment, data, attachment.path)
    return Stream(_pieces(file), media_type="application/octet-stream", headers={"cache-control": "no-store"})


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    with file:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece


@post(
    "/api/v1/workers/{name:str}/send",
    responses=ACTS,
    status_code=202,
    summary="Send a message by a satellite",
    tags=["messages"],
)
async def send_message(request: Asked, name: Name, data: JSONBody[SendRequest]) -> Promised:
    """It is on disk when this is answered; the satellite sends it and retries."""
    number = await services_of(request).deck.send(
        worker_name(name), to=data.to, text=data.text, subject=data.subject, **channel_options(data.options)
    )
    return Promised(f"out-{number}")


@get("/api/v1/workers/{name:str}/feed", responses=READS_ONE, summary="A satellite's feed", tags=["messages"])
async def show_feed(
    request: Asked,
    name: Name,
    which: FromQuery[Literal["dead", "waiting", "done", "all"]] = "dead",
    limit: Annotated[int, QueryParameter(ge=1, le=1000)] = 100,
    number: FromQuery[str | None] = None,
) -> FeedView:
    """Account, connection, last contact, what waits, is in flight, done, set aside and to be sent.

    The words of messages take the role operate: without it there are the numbers and no letters.
    """
    deck, key = services_of(request).deck, worker_name(name)
    status = await deck.feed(key)
    if not grant_of(request).role.includes(Role.OPERATE):
        return FeedView(status, [])
    shown: Which = which
    return FeedView(status, await deck.letters(key, which=shown, number=number, limit=limit))


@post(
    "/api/v1/workers/{name:str}/feed/{number:str}/{verb:str}",
    responses=ACTS,
    status_code=200,
    summary="Retry, drop or replay one message",
    tags=["messages"],
)
async def decide_letter(
    request: Asked, name: Name, number: FromPath[str], verb: FromPath[Literal["retry", "drop", "replay"]]
) -> Decided:
    """`number` as the feed shows it; what goes out begins with `out-`."""
    services = services_of(request)

    async def decide() -> Decided:
        return Decided(await services.deck.decide(worker_name(name), verb, number))

    return await services.answers.once(f"{verb} {name} {number}", decide)


@get("/api/v1/satellites", responses=READS, summary="Kinds of satellites", tags=["messages"])
async def list_kinds() -> list[KindView]:
    """What can be started, with the options and secrets that each takes."""
    schemas = option_schemas()
    return [
        KindView(entry.name, entry.text, entry.secrets, entry.sends, entry.receives, schemas[name])
        for name, entry in kinds().items()
    ]


HANDLERS: Final[list[HTTPRouteHandler]] = [
    stream_messages,
    finish_message,
    reply_to_message,
    fail_message,
    release_message,
    read_attachment,
    send_message,
    show_feed,
    decide_letter,
    list_kinds,
]


async def _begun(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(rest):
        yield first
        async for chunk in rest:
            yield chunk


async def _handed_out(services: Services, messages: MessageStream, most: int) -> AsyncGenerator[bytes, None]:
    mine: set[str] = set()
    fewer = asyncio.Event()
    services.held_listeners.add(fewer)
    closing = asyncio.ensure_future(services.closing.wait())
    upcoming: asyncio.Future[Message] | None = None
    try:
        await messages.begin()
        yield _PING
        while not closing.done():
            mine &= set(services.held)
            if upcoming is None and len(mine) < most:
                upcoming = asyncio.ensure_future(anext(messages))
            changed = asyncio.ensure_future(fewer.wait())
            waits = {closing, changed} | ({upcoming} if upcoming is not None else set())
            done, _ = await asyncio.wait(waits, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            fewer.clear()
            if not done:
                yield _PING
            if upcoming is not None and upcoming.done():
                message, upcoming = upcoming.result(), None
                claim = secrets.token_hex(16)
                services.held[claim] = message
                mine.add(claim)
                body = msgspec.json.encode({"claim": claim, "message": plain(message)})
                yield b"event: message\ndata: %b\n\n" % body
    finally:
        services.held_listeners.discard(fewer)
        closing.cancel()
        if upcoming is not None:
            upcoming.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await upcoming
        for claim in mine:
            services.held.pop(claim, None)
        await messages.aclose()


def _held(services: Services, claim: str) -> Message:
    message = services.held.get(claim)
    if message is None:
        raise MessageLost("no message is in hand with this claim: its stream has ended, or it is finished")
    return message


def _taken(services: Services, claim: str) -> Message:
    message = _held(services, claim)
    del services.held[claim]
    for fewer in services.held_listeners:
        fewer.set()
    return message
