"""A Bot API server on loopback that behaves as Telegram's does where it hurts.

It owns the HTTP side: tokens, methods, long polls, conflicts, injected faults. What ``offset`` means is in
:mod:`everdeck.testing.updatequeue`. It runs in a thread of the test's process, so a test pushes updates and looks
at what was confirmed by plain calls, while the bot under test is a process or a coroutine that only knows a URL.

>>> with TelegramServer() as server:
...     server.say("hello", chat_id=7)
...     # start a bot that talks to server.url with server.token …

It promises the server's unkind habits (read from tdlib/telegram-bot-api): the *older* of two waiting polls gets the
409, and with a backlog nobody waits, so nobody gets one; the same offset again within 3 s is made to wait, and within
0.5 s it gets one update; a second conflict is answered 3 s late; an answer holds at most 4 MB.

Also a program: ``python -m everdeck.testing.telegram --port 8081 --updates FILE``.
"""

import argparse
import asyncio
import contextlib
import logging
import mimetypes
import random
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec
from aiohttp import web

from everdeck.testing.updatequeue import MAX_PENDING, QueuedUpdate, UpdateQueue

Update: TypeAlias = dict[str, Any]
Params: TypeAlias = dict[str, Any]
FaultKind: TypeAlias = Literal["error", "drop", "drop-after", "garbage", "delay"]

DEFAULT_TOKEN: Final = "4242:everdeck-testing-token"  # noqa: S105 - a token of a server that exists only in tests
MAX_TIMEOUT_SECONDS: Final = 50
MAX_TEXT: Final = 4096
MAX_FILE_BYTES: Final = 20_000_000
_TOKEN: Final = re.compile(r"(\d{1,15}):[A-Za-z0-9_-]+")
_WAKE_SECONDS: Final = 0.002
_OTHER_GET_UPDATES: Final = (
    "Conflict: terminated by other getUpdates request; make sure that only one bot instance is running"
)
_SET_WEBHOOK: Final = "Conflict: terminated by setWebhook request"
_WEBHOOK_ACTIVE: Final = (
    "Conflict: can't use getUpdates method while webhook is active; use deleteWebhook to delete the webhook first"
)
# Every kind an update can have, as of Bot API 9. The ones not sent unless asked for are in _OPT_IN.
_KINDS: Final = frozenset(
    {
        *("message", "edited_message", "channel_post", "edited_channel_post", "business_connection"),
        *("business_message", "edited_business_message", "deleted_business_messages", "message_reaction"),
        *("message_reaction_count", "inline_query", "chosen_inline_result", "callback_query", "shipping_query"),
        *("pre_checkout_query", "purchased_paid_media", "poll", "poll_answer", "my_chat_member", "chat_member"),
        *("chat_join_request", "chat_boost", "removed_chat_boost"),
    }
)
_OPT_IN: Final = frozenset({"chat_member", "message_reaction", "message_reaction_count"})
_ANSWERED_TRUE: Final = re.compile(
    r"(answer|set|delete|pin|unpin|ban|unban|restrict|promote|approve|decline|leave|close|reopen|hide|unhide|log)"
)

log = logging.getLogger(__name__)
_peer: ContextVar[str] = ContextVar("everdeck_telegram_peer", default="")


@dataclass(slots=True)
class Poll:
    """One ``getUpdates`` request: what was asked, what the server made of it, what it answered.

    ``status`` is None while the poll waits. ``peer`` is the address of its connection, which tells pollers apart.
    """

    at: float
    offset: int
    limit: int
    timeout: float
    token: str
    given: list[int] = field(default_factory=list)
    status: int | None = None
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One request other than ``getUpdates``."""

    at: float
    method: str
    params: Params
    token: str
    result: Any = None


@dataclass(slots=True)
class _Fault:
    method: str
    kind: FaultKind
    times: int
    status: int = 500
    description: str = "Internal Server Error"
    retry_after: int | None = None
    seconds: float = 0.0
    chat_id: int | None = None


@dataclass(slots=True)
class _Waiting:
    ended: "asyncio.Future[str | None]"
    offset: int
    limit: int


class _ApiError(Exception):
    def __init__(self, status: int, description: str, retry_after: int | None = None) -> None:
        super().__init__(description)
        self.status = status
        self.description = description
        self.retry_after = retry_after


class _Bot:
    """What the server knows about one bot id, whichever of its tokens is used."""

    def __init__(self, bot_id: int, queue: UpdateQueue) -> None:
        self.bot_id = bot_id
        self.queue = queue
        self.kinds: frozenset[str] = _KINDS - _OPT_IN
        self.webhook = ""
        self.waiting: _Waiting | None = None
        self.previous_offset = -1
        self.previous_start = float("-inf")
        self.next_conflict_at = float("-inf")
        self.polls: list[Poll] = []
        self.calls: list[Call] = []
        self.next_message_id = 1
        self.sent_at: dict[Any, float] = {}
        self.files: dict[str, tuple[str, bytes]] = {}

    @property
    def me(self) -> dict[str, Any]:
        return {
            "id": self.bot_id,
            "is_bot": True,
            "first_name": f"Test bot {self.bot_id}",
            "username": f"test_{self.bot_id}_bot",
            "can_join_groups": True,
            "can_read_all_group_messages": False,
            "supports_inline_queries": False,
        }


class TelegramServer:
    """A Bot API server for tests; see the module's text.

    Each server has a ``token`` of its own unless one is given: tests that run side by side are different bots, as the
    lock that refuses a second poller of one token needs it. ``host`` is where it listens. ``max_pending`` is 100,000 at
    Telegram. ``conflict_pause_seconds`` is how late a second 409 comes (3 at Telegram). ``messages_per_second`` limits
    what one chat may be sent, answered with 429 beyond; None means no limit.
    All methods may be called from any thread. Closing keeps what was recorded.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        seed: int | None = None,
        max_pending: int = MAX_PENDING,
        conflict_pause_seconds: float = 3.0,
        messages_per_second: float | None = None,
    ) -> None:
        self.token = new_token() if token is None else token
        self.host = host
        self.port = port
        self._random = random.Random(seed)  # noqa: S311 - ids of a test server, not secrets
        self._max_pending = max_pending
        self._conflict_pause = conflict_pause_seconds
        self._messages_per_second = messages_per_second
        self._skipped_seconds = 0.0
        self._bots: dict[int, _Bot] = {}
        self._revoked: set[str] = set()
        self._faults: list[_Fault] = []
        self._answers: dict[str, Any] = {}
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def bot_id(self) -> int:
        """The number in the token."""
        return int(self.token.partition(":")[0])

    # --- running ----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it listens. aiogram: ``TelegramAPIServer.from_base(server.url)``."""
        return f"http://{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        """The same for python-telegram-bot: ``builder.base_url(server.base_url)``."""
        return f"{self.url}/bot"

    def start(self) -> Self:
        """Listen; after :meth:`close` on the same port again, with everything still queued."""
        if self._thread is not None:
            raise RuntimeError("the server is running")
        listening = threading.Event()
        failure: list[BaseException] = []
        self._thread = threading.Thread(
            target=self._run, args=(listening, failure), name="telegram-server", daemon=True
        )
        self._thread.start()
        listening.wait()
        if failure:
            self._thread.join()
            self._thread = None
            raise failure[0]
        return self

    def close(self) -> None:
        """Stop listening: waiting polls see their connection end. What was queued and recorded stays."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Not reachable inside this block."""
        self.close()
        try:
            yield
        finally:
            self.start()

    # --- what users do ----------------------------------------------------------------------------------------

    def push(self, *updates: Update, token: str | None = None) -> list[int]:
        """Queue raw updates as they are, readable or not, and return their ids.

        An update of a kind that the bot did not ask for (``allowed_updates``) or that finds the queue full gets no id.
        """
        with self._changed:
            bot = self._bot(token)
            ids: list[int] = []
            for update in updates:
                kinds = _KINDS.intersection(update)
                if kinds and not kinds & bot.kinds:
                    continue
                update_id = bot.queue.push(update)
                if update_id is not None:
                    ids.append(update_id)
            if ids:
                self._wake(bot)
            self._changed.notify_all()
        return ids

    def say(self, text: str, *, chat_id: int = 1, user_id: int | None = None, token: str | None = None) -> int:
        """A person writes a message; returns the update's id."""
        with self._changed:
            bot = self._bot(token)
            message_id, bot.next_message_id = bot.next_message_id, bot.next_message_id + 1
            return self._one(self.push(text_update(text, chat_id, user_id, message_id), token=token))

    def send_file(
        self,
        name: str,
        content: bytes,
        *,
        caption: str = "",
        chat_id: int = 1,
        user_id: int | None = None,
        token: str | None = None,
    ) -> int:
        """A person sends a document; the bot may fetch it (getFile, then its path). Returns the update's id."""
        with self._changed:
            bot = self._bot(token)
            message_id, bot.next_message_id = bot.next_message_id, bot.next_message_id + 1
            file_id = f"{self._random.getrandbits(96):x}"
            bot.files[file_id] = (f"documents/file_{message_id}{Path(name).suffix}", content)
            document = {
                "file_id": file_id,
                "file_unique_id": file_id[:16],
                "file_name": name,
                "mime_type": mimetypes.guess_type(name)[0] or "application/octet-stream",
                "file_size": len(content),
            }
            person = _person(user_id if user_id is not None else abs(chat_id))
            said: dict[str, Any] = {"document": document} | ({"caption": caption} if caption else {})
            return self._one(self.push({"message": _message(message_id, chat_id, person, said)}, token=token))

    def press(self, data: str, *, chat_id: int = 1, user_id: int | None = None, token: str | None = None) -> int:
        """A person presses an inline button that carries ``data``; returns the update's id."""
        person = _person(user_id if user_id is not None else abs(chat_id))
        query = {"id": str(self._random.getrandbits(60)), "from": person, "chat_instance": "1", "data": data}
        with self._changed:
            bot = self._bot(token)
            query["message"] = _message(bot.next_message_id, chat_id, bot.me, {"text": "…"})
            return self._one(self.push({"callback_query": query}, token=token))

    def push_file(self, path: str | Path, *, token: str | None = None) -> list[int]:
        """Queue every update of a file: one JSON object per line, or one JSON array."""
        return self.push(*updates_of_file(path), token=token)

    def start_epoch(self, first_id: int | None = None, *, token: str | None = None) -> None:
        """The quiet week has passed: ids start again, at random or at ``first_id``."""
        with self._changed:
            self._bot(token).queue.start_epoch(first_id)

    def advance(self, seconds: float) -> None:
        """Let time pass for what the server keeps: a day ends updates, a quiet week ends ids."""
        with self._changed:
            self._skipped_seconds += seconds
            self._changed.notify_all()

    # --- what goes wrong --------------------------------------------------------------------------------------

    def fail(
        self,
        method: str,
        status: int = 500,
        description: str = "Internal Server Error",
        *,
        retry_after: int | None = None,
        times: int = 1,
        chat_id: int | None = None,
    ) -> None:
        """Answer the next ``times`` calls of a method with an error. ``retry_after`` makes it a 429."""
        if retry_after is not None:
            status, description = 429, f"Too Many Requests: retry after {retry_after}"
        self._inject(_Fault(method.lower(), "error", times, status, description, retry_after, chat_id=chat_id))

    def drop(self, method: str, *, after: bool = False, times: int = 1) -> None:
        """End the connection without an answer: before the method does its work, or ``after`` it did."""
        self._inject(_Fault(method.lower(), "drop-after" if after else "drop", times))

    def garbage(self, method: str, *, times: int = 1) -> None:
        """Answer with a proxy's 502 page instead of JSON."""
        self._inject(_Fault(method.lower(), "garbage", times, 502))

    def delay(self, method: str, seconds: float, *, times: int = 1) -> None:
        """Think for that long before the method does its work."""
        self._inject(_Fault(method.lower(), "delay", times, seconds=seconds))

    def answer(self, method: str, result: object) -> None:
        """From now on answer a method with this result, or with ``result(params)`` when it is callable."""
        with self._changed:
            self._answers[method.lower()] = result

    def revoke(self, token: str) -> None:
        """Answer this token with 401 from now on. Another token of the same bot id sees the same queue."""
        with self._changed:
            self._revoked.add(token)

    # --- what happened ----------------------------------------------------------------------------------------

    def pending(self, token: str | None = None) -> list[int]:
        """Ids still queued."""
        with self._changed:
            return self._bot(token).queue.pending()

    def confirmed(self, token: str | None = None) -> list[int]:
        """Ids forgotten because an offset passed them, in order."""
        with self._changed:
            return list(self._bot(token).queue.confirmed)

    def expired(self, token: str | None = None) -> list[int]:
        """Ids given up after a day, or at the end of an epoch."""
        with self._changed:
            self._bot(token).queue.pending()
            return list(self._bot(token).queue.expired)

    def refused(self, token: str | None = None) -> int:
        """How many updates did not fit into the queue."""
        with self._changed:
            return self._bot(token).queue.refused

    def polls(self, token: str | None = None) -> list[Poll]:
        """Every ``getUpdates``, oldest first; the last may still wait (status None)."""
        with self._changed:
            return list(self._bot(token).polls)

    def calls(self, method: str | None = None, *, token: str | None = None) -> list[Call]:
        """Every other request that did its work, oldest first."""
        with self._changed:
            wanted = None if method is None else method.lower()
            return [call for call in self._bot(token).calls if wanted is None or call.method == wanted]

    def sent(self, chat_id: int | None = None, *, token: str | None = None) -> list[str]:
        """The texts of all messages the bot sent, in order; of one chat if asked."""
        return [
            str(call.params.get("text", ""))
            for call in self.calls("sendMessage", token=token)
            if chat_id is None or str(call.params.get("chat_id")) == str(chat_id)
        ]

    def wait_for(self, fact: Callable[[Self], bool], timeout: float = 30.0) -> None:
        """Return once ``fact(server)`` holds; it is looked at whenever something changed. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not fact(self):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"not within {timeout} s: {self.summary()}")
                self._changed.wait(min(left, 1.0))

    def summary(self, token: str | None = None) -> str:
        """The state in one line, for a failing test's message."""
        with self._changed:
            bot = self._bot(token)
            return (
                f"{len(bot.queue.pending())} pending, {len(bot.queue.confirmed)} confirmed, "
                f"{len(bot.polls)} polls (last: {bot.polls[-1] if bot.polls else None}), {len(bot.calls)} other calls"
            )

    # --- the control side, below ------------------------------------------------------------------------------

    @staticmethod
    def _one(ids: list[int]) -> int:
        if not ids:
            raise RuntimeError("the update was refused: the queue is full or the bot did not ask for this kind")
        return ids[0]

    def _inject(self, fault: _Fault) -> None:
        with self._changed:
            self._faults.append(fault)

    def _bot(self, token: str | None) -> _Bot:
        given = self.token if token is None else token
        match = _TOKEN.fullmatch(given)
        if match is None:
            raise ValueError(f"not a bot token: {given!r}")
        bot_id = int(match[1])
        if bot_id not in self._bots:
            self._bots[bot_id] = _Bot(bot_id, UpdateQueue(self._now, self._random, max_pending=self._max_pending))
        return self._bots[bot_id]

    def _now(self) -> float:
        return time.monotonic() + self._skipped_seconds

    def _wake(self, bot: _Bot) -> None:
        # The real server waits a moment for more updates to come, so that a burst is one answer.
        waiting = bot.waiting
        if waiting is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, _WAKE_SECONDS, _end, waiting, None)

    # --- the HTTP side, in the server's thread ----------------------------------------------------------------

    def _run(self, listening: threading.Event, failure: list[BaseException]) -> None:
        asyncio.run(self._serve(listening, failure))

    async def _serve(self, listening: threading.Event, failure: list[BaseException]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/bot{token}/{method}", self._on_request)
        app.router.add_get("/file/bot{token}/{path:.+}", self._on_file)
        app.router.add_get("/control/bots/{bot_id}", self._on_state)
        app.router.add_post("/control/updates", self._on_push)
        app.router.add_post("/control/faults", self._on_fault)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.host, self.port)
            await site.start()
            self.port = runner.addresses[0][1]
            listening.set()
            await self._stop.wait()
        except OSError as error:
            failure.append(error)
        finally:
            with self._changed:
                for bot in self._bots.values():
                    waiting, bot.waiting = bot.waiting, None
                    if waiting is not None:
                        waiting.ended.cancel()
            await runner.cleanup()
            listening.set()

    async def _on_request(self, request: web.Request) -> web.StreamResponse:
        name = request.transport.get_extra_info("peername") if request.transport is not None else None
        _peer.set(f"{name[0]}:{name[1]}" if name else "")
        token, method = request.match_info["token"], request.match_info["method"].lower()
        try:
            params = await _params(request)
            bot, fault = self._admit(token, method, params)
            if fault is not None:
                await _suffer(fault, request)
            body = await self._perform(bot, token, method, params)
            if fault is not None and fault.kind == "drop-after":
                _hang_up(request)
        except _ApiError as error:
            return _error_response(error)
        except ConnectionResetError:
            # The client died, or a test asked for it: nobody reads this, and aiohttp logs nothing.
            return web.Response(status=499)
        except _Garbage:
            return web.Response(status=502, text="<html><h1>502 Bad Gateway</h1></html>", content_type="text/html")
        return web.Response(body=b'{"ok":true,"result":' + body + b"}", content_type="application/json")

    async def _on_file(self, request: web.Request) -> web.StreamResponse:
        try:
            bot, fault = self._admit(request.match_info["token"], "file", {})
            if fault is not None:
                await _suffer(fault, request)
        except _ApiError as error:
            return _error_response(error)
        except ConnectionResetError:
            return web.Response(status=499)
        found = dict(bot.files.values()).get(request.match_info["path"])
        return _error_response(_ApiError(404, "Not Found")) if found is None else web.Response(body=found)

    def _admit(self, token: str, method: str, params: Params) -> tuple[_Bot, _Fault | None]:
        with self._changed:
            if _TOKEN.fullmatch(token) is None:
                raise _ApiError(404, "Not Found")
            if token in self._revoked:
                raise _ApiError(401, "Unauthorized")
            return self._bot(token), self._take_fault(method, params)

    def _take_fault(self, method: str, params: Params) -> _Fault | None:
        for fault in self._faults:
            if fault.method != method or (
                fault.chat_id is not None and str(fault.chat_id) != str(params.get("chat_id"))
            ):
                continue
            fault.times -= 1
            if fault.times <= 0:
                self._faults.remove(fault)
            return fault
        return None

    async def _perform(self, bot: _Bot, token: str, method: str, params: Params) -> bytes:
        if method == "getupdates":
            return await self._get_updates(bot, token, params)
        with self._changed:
            result = self._result_of(bot, method, params)
            bot.calls.append(Call(self._now(), method, params, token, result))
            self._changed.notify_all()
        return msgspec.json.encode(result)

    async def _get_updates(self, bot: _Bot, token: str, params: Params) -> bytes:
        offset = _integer(params, "offset", 0)
        limit = min(max(_integer(params, "limit", 100), 1), 100)
        timeout = min(max(_integer(params, "timeout", 0), 0), MAX_TIMEOUT_SECONDS)
        now = time.monotonic()
        with self._changed:
            bot.kinds = _kinds_asked_for(params, bot.kinds)
            if offset == bot.previous_offset and timeout < 3 and now < bot.previous_start + 3.0:  # noqa: PLR2004 - Telegram's number, see the module's text
                timeout = 3
            if offset == bot.previous_offset and now < bot.previous_start + 0.5:
                limit = 1
            bot.previous_offset, bot.previous_start = offset, now
            poll = Poll(self._now(), offset, limit, timeout, token, peer=_peer.get())
            bot.polls.append(poll)
            if bot.webhook:
                pause, waiting = self._conflict_pause_of(bot), None
            else:
                events = bot.queue.get(offset, limit)
                if events or timeout == 0:
                    return self._given(poll, events)
                pause = 0.0
                if bot.waiting is not None:
                    _end(bot.waiting, _OTHER_GET_UPDATES)
                ended = asyncio.get_running_loop().create_future()
                waiting = bot.waiting = _Waiting(ended, offset if offset > 0 else bot.queue.head, limit)
            self._changed.notify_all()
        if waiting is None:
            await self._fail_poll(poll, _WEBHOOK_ACTIVE, pause)
        else:
            conflict = await self._wait(bot, waiting, timeout)
            if conflict is not None:
                with self._changed:
                    pause = self._conflict_pause_of(bot)
                await self._fail_poll(poll, conflict, pause)
            with self._changed:
                # The offset is applied again: what was queued below it meanwhile is silently forgotten.
                return self._given(poll, bot.queue.get(waiting.offset, limit))
        raise AssertionError

    async def _wait(self, bot: _Bot, waiting: _Waiting, timeout: float) -> str | None:  # noqa: ASYNC109 - the poll's own timeout, answered with an empty batch, not with an exception
        try:
            async with asyncio.timeout(timeout):
                return await waiting.ended
        except TimeoutError:
            return None
        finally:
            with self._changed:
                if bot.waiting is waiting:
                    bot.waiting = None

    def _given(self, poll: Poll, events: list[QueuedUpdate]) -> bytes:
        poll.given = [event.update_id for event in events]
        poll.status = 200
        self._changed.notify_all()
        return b"[" + b",".join(event.json for event in events) + b"]"

    def _conflict_pause_of(self, bot: _Bot) -> float:
        now = time.monotonic()
        if now < bot.next_conflict_at:
            return self._conflict_pause
        bot.next_conflict_at = now + self._conflict_pause
        return 0.0

    async def _fail_poll(self, poll: Poll, description: str, pause: float) -> None:
        with self._changed:
            poll.status = 409
            self._changed.notify_all()
        await asyncio.sleep(pause)  # noqa: TID251 - the real server holds a second conflict back for this long
        raise _ApiError(409, description)

    def _result_of(self, bot: _Bot, method: str, params: Params) -> Any:
        if method in self._answers:
            answer = self._answers[method]
            return answer(params) if callable(answer) else answer
        if method in _OWN_METHODS:
            return _OWN_METHODS[method](bot, params)
        if method.startswith(("send", "edit", "copy", "forward")) and method != "sendchataction":
            return self._message_result(bot, method, params)
        if method == "sendchataction" or _ANSWERED_TRUE.match(method):
            return True
        raise _ApiError(404, "Not Found: method not found")

    def _message_result(self, bot: _Bot, method: str, params: Params) -> Any:
        chat_id = params.get("chat_id")
        if chat_id in {None, ""}:
            raise _ApiError(400, "Bad Request: chat_id is empty")
        text = str(params.get("text", ""))
        if method in {"sendmessage", "editmessagetext"}:
            if not text:
                raise _ApiError(400, "Bad Request: message text is empty")
            if len(text) > MAX_TEXT:
                raise _ApiError(400, "Bad Request: message is too long")
        if self._messages_per_second is not None and method.startswith("send"):
            now, key = self._now(), str(chat_id)
            if now < bot.sent_at.get(key, float("-inf")) + 1 / self._messages_per_second:
                raise _ApiError(429, "Too Many Requests: retry after 1", retry_after=1)
            bot.sent_at[key] = now
        message_id, bot.next_message_id = bot.next_message_id, bot.next_message_id + 1
        if method.startswith("copy"):
            return {"message_id": message_id}
        if method.startswith("edit"):
            message_id = _integer(params, "message_id", message_id)
        content: dict[str, Any] = {key: str(params[key]) for key in ("text", "caption") if key in params}
        return _message(message_id, chat_id, bot.me, content)

    # --- control by HTTP, for tests in another process ---------------------------------------------------------

    async def _on_state(self, request: web.Request) -> web.Response:
        with self._changed:
            bot = self._bot(f"{request.match_info['bot_id']}:control")
            state = {
                "pending": bot.queue.pending(),
                "confirmed": bot.queue.confirmed,
                "expired": bot.queue.expired,
                "refused": bot.queue.refused,
                "polls": bot.polls,
                "calls": bot.calls,
            }
            body = msgspec.json.encode(state)
        return web.Response(body=body, content_type="application/json")

    async def _on_push(self, request: web.Request) -> web.Response:
        given = await request.json()
        updates = given if isinstance(given, list) else [given]
        ids = self.push(*updates, token=request.query.get("token"))
        return web.json_response({"ids": ids})

    async def _on_fault(self, request: web.Request) -> web.Response:
        given = await request.json()
        self._inject(_Fault(given["method"].lower(), **{key: given[key] for key in given if key != "method"}))
        return web.json_response({})


# --- methods with an answer of their own --------------------------------------------------------------------------


def _set_webhook(bot: _Bot, params: Params) -> bool:
    bot.webhook = str(params.get("url", ""))
    bot.kinds = _kinds_asked_for(params, bot.kinds)
    if bot.webhook and bot.waiting is not None:
        _end(bot.waiting, _SET_WEBHOOK)
    return _drop_pending(bot, params)


def _delete_webhook(bot: _Bot, params: Params) -> bool:
    bot.webhook = ""
    return _drop_pending(bot, params)


def _drop_pending(bot: _Bot, params: Params) -> bool:
    if str(params.get("drop_pending_updates", "")).lower() in {"true", "1"}:
        bot.queue.clear()
    return True


def _webhook_info(bot: _Bot, _params: Params) -> dict[str, Any]:
    count = len(bot.queue.pending())
    return {"url": bot.webhook, "has_custom_certificate": False, "pending_update_count": count}


def _chat_info(_bot: _Bot, params: Params) -> dict[str, Any]:
    return _chat(params.get("chat_id", 0)) | {"accent_color_id": 0, "max_reaction_count": 11}


def _file_info(bot: _Bot, params: Params) -> dict[str, Any]:
    file_id = str(params.get("file_id", ""))
    path, content = bot.files.get(file_id, ("", b""))
    if not path:
        raise _ApiError(400, "Bad Request: invalid file_id")
    if len(content) > MAX_FILE_BYTES:
        raise _ApiError(400, "Bad Request: file is too big")
    return {"file_id": file_id, "file_unique_id": file_id[:16], "file_size": len(content), "file_path": path}


_OWN_METHODS: Final[dict[str, Callable[[_Bot, Params], Any]]] = {
    "getme": lambda bot, _params: bot.me,
    "setwebhook": _set_webhook,
    "deletewebhook": _delete_webhook,
    "getwebhookinfo": _webhook_info,
    "getchat": _chat_info,
    "getfile": _file_info,
}


def new_token() -> str:
    """A token of a bot that nobody else has."""
    return f"{random.SystemRandom().randrange(10**8, 10**9)}:{secrets.token_urlsafe(24)}"


# --- updates as Telegram would write them -----------------------------------------------------------------------


def text_update(text: str, chat_id: int = 1, user_id: int | None = None, message_id: int = 1) -> Update:
    """A message update without an id, for :meth:`TelegramServer.push` or a file."""
    person = _person(user_id if user_id is not None else abs(chat_id))
    content: dict[str, Any] = {"text": text}
    command = re.match(r"/[A-Za-z0-9_]+(@\w+)?", text)
    if command is not None:
        content["entities"] = [{"type": "bot_command", "offset": 0, "length": command.end()}]
    return {"message": _message(message_id, chat_id, person, content)}


def updates_of_file(path: str | Path) -> list[Update]:
    """The updates of a file: one JSON object per line, or one JSON array."""
    text = Path(path).read_bytes().strip()
    if text.startswith(b"["):
        return msgspec.json.decode(text, type=list[dict[str, Any]])
    return [msgspec.json.decode(line, type=dict[str, Any]) for line in text.splitlines() if line.strip()]


def _message(message_id: int, chat_id: Any, sender: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    date = int(datetime.now(UTC).timestamp())
    return {"message_id": message_id, "from": sender, "chat": _chat(chat_id), "date": date} | content


def _person(user_id: int) -> dict[str, Any]:
    return {"id": user_id, "is_bot": False, "first_name": f"Person {user_id}", "language_code": "en"}


def _chat(chat_id: Any) -> dict[str, Any]:
    try:
        number = int(chat_id)
    except ValueError:
        return {"id": -1001, "type": "channel", "title": str(chat_id), "username": str(chat_id).lstrip("@")}
    if number < 0:
        return {"id": number, "type": "supergroup", "title": f"Group {number}"}
    return {"id": number, "type": "private", "first_name": f"Person {number}"}


# --- small parts of the HTTP side, in the order they are used ---------------------------------------------------


class _Garbage(Exception):
    pass


async def _params(request: web.Request) -> Params:
    params: Params = dict(request.query)
    if request.content_type == "application/json":
        params.update(await request.json())
    elif request.can_read_body:
        for key, value in (await request.post()).items():
            params[key] = f"<file {value.filename}>" if isinstance(value, web.FileField) else value
    return params


async def _suffer(fault: _Fault, request: web.Request) -> None:
    match fault.kind:
        case "error":
            raise _ApiError(fault.status, fault.description, fault.retry_after)
        case "drop":
            _hang_up(request)
        case "garbage":
            raise _Garbage
        case "delay":
            await asyncio.sleep(fault.seconds)  # noqa: TID251 - being slow is what this fault is
        case "drop-after":
            pass


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("a fault the test asked for")


def _error_response(error: _ApiError) -> web.Response:
    body: dict[str, Any] = {"ok": False, "error_code": error.status, "description": error.description}
    if error.retry_after is not None:
        body["parameters"] = {"retry_after": error.retry_after}
    return web.Response(status=error.status, body=msgspec.json.encode(body), content_type="application/json")


def _integer(params: Params, name: str, default: int) -> int:
    try:
        return int(params.get(name, default))
    except (TypeError, ValueError):
        return default


def _kinds_asked_for(params: Params, current: frozenset[str]) -> frozenset[str]:
    given = params.get("allowed_updates")
    if given is None:
        return current
    try:
        names = msgspec.json.decode(given) if isinstance(given, str) else given
        asked = _KINDS.intersection(str(name).lower() for name in names)
    except (msgspec.DecodeError, TypeError):
        return current
    return frozenset(asked) or (_KINDS - _OPT_IN)


def _end(waiting: _Waiting, conflict: str | None) -> None:
    if not waiting.ended.done():
        waiting.ended.set_result(conflict)


# --- as a program -----------------------------------------------------------------------------------------------


def main(arguments: Iterable[str] | None = None) -> None:
    """Serve until interrupted; the control side is under ``/control``."""
    parser = argparse.ArgumentParser(prog="python -m everdeck.testing.telegram", description=main.__doc__)
    parser.add_argument("--port", type=int, default=8081, help="port on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--token", default=DEFAULT_TOKEN, help="the bot whose queue gets the updates")
    parser.add_argument("--updates", type=Path, help="raw updates to serve: JSON lines, or one JSON array")
    parser.add_argument("--per-second", type=float, help="queue the file's updates at this rate instead of at once")
    parser.add_argument("--seed", type=int, help="make the random ids repeatable")
    given = parser.parse_args(None if arguments is None else list(arguments))
    with TelegramServer(token=given.token, port=given.port, seed=given.seed) as server:
        sys.stdout.write(f"listening on {server.url} for the token {server.token}\n")
        sys.stdout.flush()
        never = threading.Event()
        with contextlib.suppress(KeyboardInterrupt):
            for update in updates_of_file(given.updates) if given.updates else []:
                server.push(update)
                if given.per_second:
                    never.wait(1 / given.per_second)
            never.wait()


if __name__ == "__main__":
    main()
