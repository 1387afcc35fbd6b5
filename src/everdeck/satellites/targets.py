"""Where messages go, if not to the host: a function in the satellite, a URL, a command.

Each takes items from the inbox (in order per conversation, many conversations side by side), handles them, and finishes
each together with its replies in one transaction. What fails is tried again with backoff and set aside in the end.

A URL gets a POST with the message as JSON, signed as *Standard Webhooks* has it (``webhook-id``, ``webhook-timestamp``,
``webhook-signature``: HMAC-SHA256 over id, time and body) and an ``Idempotency-Key`` that is the same at every attempt.
2xx finishes the message, and the answer may carry replies; ``Retry-After`` is kept; 410 stops the delivery until the
satellite is started again; a redirect is an error, because a signed message goes where it was sent or nowhere.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import importlib
import inspect
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from everdeck.crashpoints import crash_point
from everdeck.errors import FeedClosed, MessageError, SpecError
from everdeck.feed.dispatcher import Dispatcher, Item
from everdeck.feed.inbox import Stream
from everdeck.feed.outbox import Outbox
from everdeck.feed.policy import FeedPolicy, Retry
from everdeck.messages import Message, Outgoing, channel_options, decoded_incoming, encoded, plain
from everdeck.model import SatelliteSpec
from everdeck.satellites.base import Context

if TYPE_CHECKING:
    from aiohttp import ClientSession, StreamReader

# A receiver that is down is tried for about two days; one that says no is believed after a few attempts.
URL_POLICY: Final = FeedPolicy(max_attempts=220, retry=Retry(1.0, 900.0))
URL_REFUSALS: Final = 5
URL_SECONDS: Final = 60.0
ANSWER_BYTES: Final = 1 << 20
SIGNING_SECRET: Final = "TO_SECRET"  # noqa: S105 - a name
SIGNING_FILE: Final = "to.key"

log = logging.getLogger("everdeck.satellite")


def target_of(spec: SatelliteSpec, context: Context, stream: Stream, outbox: Outbox, *, sends: bool) -> "Target | None":
    """What the spec says; None for the host, who comes and takes."""
    if spec.to is None:
        return None
    target: Target
    if not isinstance(spec.to, str):
        target = CommandTarget(context, stream, outbox, spec.to)
    elif spec.to.startswith(("http://", "https://")):
        target = UrlTarget(context, stream, outbox, spec.to)
    else:
        target = FunctionTarget(context, stream, outbox, function_of(spec.to, spec.path))
    target.sends = sends
    return target


def function_of(name: str, path: str | None) -> Callable[[Message], Any]:
    """The function of ``module:name``, imported from where the spec was written."""
    if path is not None and path not in sys.path:
        sys.path.insert(0, path)
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as err:
        raise SpecError("to", name, f"a function that can be imported ({err}; looked in {path or 'sys.path'})") from err
    if not callable(found):
        raise SpecError("to", name, "a function")
    function: Callable[[Message], Any] = found
    return function


class Target:
    """Takes what waits and handles it, until cancelled. ``problem`` is what a person should know."""

    def __init__(self, context: Context, stream: Stream, outbox: Outbox, policy: FeedPolicy | None = None) -> None:
        self.context = context
        self.outbox = outbox
        self.problem = ""
        self.sends = True
        self._policy = policy or FeedPolicy()
        self._dispatcher = Dispatcher(stream, self._policy)

    async def run(self) -> None:
        """Handle what waits, until cancelled; then what is in flight has the grace to finish."""
        await self._open()
        await self._dispatcher.open()
        loop = asyncio.get_running_loop()
        workers = [loop.create_task(self._work()) for _ in range(self._policy.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            stopping = loop.create_task(self._dispatcher.stop(self._policy.grace_seconds))
            await asyncio.wait({stopping}, timeout=self._policy.grace_seconds)
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await stopping
            await self._close()

    async def _open(self) -> None:
        """Make ready."""

    async def _close(self) -> None:
        """Let go."""

    async def handle(self, message: Message, item: Item) -> None:
        """Handle one; what it raises is a failure of this message."""
        raise NotImplementedError

    async def _work(self) -> None:
        while True:
            try:
                items = await self._dispatcher.take(1)
            except FeedClosed:
                return
            for item in items:
                await self._handle(item)

    async def _handle(self, item: Item) -> None:
        hold = _ItemHold(item, self.outbox, sends=self.sends)
        try:
            message = Message.of(
                decoded_incoming(item.payload), worker=self.context.worker, attempt=item.attempt, hold=hold
            )
        except msgspec.MsgspecError as err:
            await item.set_aside(err)
            return
        try:
            crash_point("satellite.target.starting")
            await self.handle(message, item)
            crash_point("satellite.target.returned")
        except asyncio.CancelledError as err:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                item.settle_as_handed_back()
                raise
            await item.failed(err)
        except Exception as err:  # noqa: BLE001 - the user's function, the other side's server
            await item.failed(err)
        else:
            await hold.finish(None)


class FunctionTarget(Target):
    """``to="module:function"``. A coroutine function runs in the loop, a plain one in a thread.

    What it returns as a text is a reply.
    """

    def __init__(self, context: Context, stream: Stream, outbox: Outbox, function: Callable[[Message], Any]) -> None:
        super().__init__(context, stream, outbox)
        self._function = function

    async def handle(self, message: Message, item: Item) -> None:
        """See :class:`Target`."""
        if inspect.iscoroutinefunction(self._function):
            answer = await self._function(message)
        else:
            answer = await asyncio.to_thread(self._function, message)
            if inspect.isawaitable(answer):
                answer = await answer
        if isinstance(answer, str) and answer and not item.acked:
            message.reply(answer)


class CommandTarget(Target):
    """``to=["python3", "job.py"]``: the message as JSON on its standard input, exit code 0 finishes it.

    What it prints is its reply, where the kind can send; otherwise it goes to the satellite's log.
    """

    def __init__(self, context: Context, stream: Stream, outbox: Outbox, command: tuple[str, ...]) -> None:
        super().__init__(context, stream, outbox)
        self._command = command

    async def handle(self, message: Message, item: Item) -> None:
        """See :class:`Target`."""
        del item
        facts = {"EVERDECK_MESSAGE_ID": message.id, "EVERDECK_MESSAGE_ATTEMPT": str(message.attempt)}
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if self.sends else None,
            env={**os.environ, **facts},
        )
        try:
            printed, _ = await process.communicate(msgspec.json.encode(plain(message)))
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # our own child, not reaped yet: its pid cannot be a stranger's
                await process.wait()
        if process.returncode != 0:
            raise MessageError(f"{self._command[0]} ended with code {process.returncode}")
        if self.sends and printed and (text := printed.decode("utf-8", "replace").strip()):
            message.reply(text)


class UrlTarget(Target):
    """``to="https://…"``: a signed, retried POST."""

    def __init__(self, context: Context, stream: Stream, outbox: Outbox, url: str) -> None:
        super().__init__(context, stream, outbox, URL_POLICY)
        self._url = url
        self._key = signing_key(context)
        self._session: ClientSession | None = None
        self._stopped = asyncio.Event()

    async def _open(self) -> None:
        from aiohttp import ClientSession, ClientTimeout  # noqa: PLC0415 - only this target needs it

        self._session = ClientSession(timeout=ClientTimeout(total=URL_SECONDS))

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def handle(self, message: Message, item: Item) -> None:
        """See :class:`Target`."""
        if self._session is None:
            raise MessageError("the session is not open")
        body = msgspec.json.encode(plain(message))
        key = f"{message.worker}-{item.stream}-{message.id}"
        moment = str(int(datetime.now(UTC).timestamp()))
        headers = {
            "content-type": "application/json",
            "idempotency-key": hashlib.sha256(key.encode()).hexdigest()[:32],
            "webhook-id": hashlib.sha256(key.encode()).hexdigest()[:32],
            "webhook-timestamp": moment,
        }
        headers["webhook-signature"] = signature(self._key, headers["webhook-id"], moment, body)
        async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as answer:
            content = await _whole(answer.content)
            await self._judge(answer.status, answer.headers.get("retry-after"), item)
        for reply in _replies_in(content):
            if reply.pop("attachments", None):
                self.context.tell("reply-without-files", url=self._url, why="a receiver has no say over files here")
            message.reply(reply.pop("text", ""), subject=reply.pop("subject", None), **channel_options(reply))

    async def _judge(self, status: int, retry_after: str | None, item: Item) -> None:
        if 200 <= status < 300:  # noqa: PLR2004 - HTTP's success
            self.problem = ""
            return
        if status == 410:  # noqa: PLR2004 - HTTP's "gone"
            self.problem = f"{self._url} answered 410 Gone: delivery stopped; start the satellite again to go on"
            self.context.tell("delivery-stopped", url=self._url)
            await item.hand_back()
            # Everybody who would deliver more waits here until the satellite is started again.
            await self._stopped.wait()
        error = Refused(f"{self._url} answered {status}", seconds_of(retry_after))
        refusal = 400 <= status < 500 and status not in {408, 425, 429}  # noqa: PLR2004 - HTTP's "your fault"
        if (refusal or 300 <= status < 400) and error.retry_after is None and item.attempt >= URL_REFUSALS:  # noqa: PLR2004 - a redirect
            await item.set_aside(error)
        raise error


class Refused(MessageError):
    """The receiver did not take it; ``retry_after`` is what it asked for."""

    def __init__(self, text: str, retry_after: float | None) -> None:
        self.retry_after = retry_after
        super().__init__(text)


async def _whole(content: "StreamReader") -> bytes:
    """The answer, up to what a sane one has: a read gives what has come so far, which may be its first packet."""
    body = bytearray()
    while len(body) < ANSWER_BYTES and (chunk := await content.read(ANSWER_BYTES - len(body))):
        body += chunk
    return bytes(body)


def signing_key(context: Context) -> bytes:
    """The secret ``TO_SECRET``, or a key that is made once and kept in the satellite's ``data/to.key``."""
    given = context.secret(SIGNING_SECRET)
    if given:
        return given.encode()
    path = context.data / SIGNING_FILE
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_urlsafe(32))
    return path.read_text("ascii").strip().encode()


def signature(key: bytes, message_id: str, moment: str, body: bytes) -> str:
    """As Standard Webhooks writes it: ``v1,`` and the HMAC in base64."""
    digest = hmac.digest(key, f"{message_id}.{moment}.".encode() + body, "sha256")
    return f"v1,{base64.b64encode(digest).decode()}"


def seconds_of(retry_after: str | None) -> float | None:
    """``Retry-After`` as seconds: a number, or a date."""
    if retry_after is None:
        return None
    if retry_after.strip().isdigit():
        return float(retry_after)
    try:
        moment = parsedate_to_datetime(retry_after)
    except (TypeError, ValueError):
        return None
    return max(0.0, (moment.astimezone(UTC) - datetime.now(UTC)).total_seconds())


def _replies_in(content: bytes) -> list[dict[str, Any]]:
    """``{"reply": "text"}`` or ``{"replies": ["text", {"text": …, "subject": …}]}``; anything else is no reply."""
    try:
        answer = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return []
    if not isinstance(answer, dict):
        return []
    found = answer.get("replies", [answer["reply"]] if "reply" in answer else [])
    if not isinstance(found, list):
        return []
    replies = [{"text": one} if isinstance(one, str) else one for one in found]
    return [dict(one) for one in replies if isinstance(one, dict) and _is_reply(one)]


def _is_reply(one: Mapping[str, Any]) -> bool:
    words = (one.get("text", ""), one.get("subject") or "")
    return all(isinstance(word, str) for word in words) and not {"to", "answers"} & one.keys()


class _ItemHold:
    """An item in a target's hands; see :class:`everdeck.messages.Hold`."""

    def __init__(self, item: Item, outbox: Outbox, *, sends: bool) -> None:
        self._item = item
        self._outbox = outbox
        self._sends = sends
        self._replies: list[Outgoing] = []

    def reply(self, reply: Outgoing) -> None:
        if not self._sends:
            raise MessageError("this kind of satellite cannot send: there is nobody who could be answered")
        if self._item.acked:
            raise MessageError("the message is finished; its replies belong before the end of its transaction")
        self._replies.append(reply)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self._transaction()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Any]:
        async with self._item.transaction() as db:
            yield db
            for reply in self._replies:
                self._outbox.put(db, encoded(reply), key=reply.to)
            crash_point("satellite.target.replied")

    async def finish(self, error: BaseException | None) -> None:
        if error is not None:
            await self._item.failed(error)
            return
        if self._item.settled:
            return
        if self._replies and not self._item.acked:
            async with self._transaction():
                pass
        await self._item.done()

    def finish_now(self, error: BaseException | None) -> None:  # noqa: ARG002 - the protocol's
        raise MessageError("in the satellite a message is finished when its function returns")
