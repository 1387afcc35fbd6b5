"""The kind ``webhook``: an HTTP listener on the worker's stable port.

A request is answered with 200 only after its message is on disk; if it cannot be stored the answer is 503 and the
sender comes again. With a secret each request's signature is checked before anything else is looked at, in constant
time, as the sender's own documentation has it (``preset``): GitHub, Stripe, Slack, Telegram; without a preset as
Standard Webhooks has it, which is also how ``to="https://…"`` signs. A delivery that comes twice is recognised by its
own id. With Telegram's preset and the bot's token the message is as it is by polling: files are fetched before it is
stored, and replies are sent.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

import msgspec
from aiohttp import web
from msgspec.structs import replace

from everdeck.crashpoints import crash_point
from everdeck.errors import SendRefused, SpecError
from everdeck.feed.records import Position
from everdeck.messages import Incoming, Outgoing
from everdeck.satellites import WebhookOptions
from everdeck.satellites.base import Arrived, Context, Kind
from everdeck.satellites.botclient import BotApiError, BotClient
from everdeck.satellites.targets import signature
from everdeck.satellites.telegram import FILES, Files, incoming

STORE_SECONDS: Final = 10.0
TOLERANCE_SECONDS: Final = 300
BATCH: Final = 200
_HIDDEN: Final = frozenset({"authorization", "cookie", "x-telegram-bot-api-secret-token", "proxy-authorization"})


class Webhook(Kind[WebhookOptions]):
    """One listener."""

    files = FILES

    def __init__(self, options: WebhookOptions, context: Context) -> None:
        super().__init__(options, context)
        self.name = f"webhook:{options.path}"
        self._secret = (context.secret("SECRET") or "").encode()
        if options.preset is not None and not self._secret:
            raise SpecError("secrets.SECRET", None, f"a value: the preset {options.preset!r} checks signatures with it")
        self._waiting: list[tuple[Incoming, asyncio.Future[bool]]] = []
        self._given: list[tuple[Incoming, asyncio.Future[bool]]] = []
        self._arrived = asyncio.Event()
        self._runner: web.AppRunner | None = None
        token = context.secret("TOKEN")
        base_url = options.base_url if options.preset == "telegram" else None
        self._bot = BotClient(token, base_url) if token and base_url else None
        self._files = None if self._bot is None else Files(self._bot, context)

    async def open(self) -> None:
        """Listen."""
        app = web.Application(client_max_size=self.options.max_bytes)
        app.router.add_post(self.options.path, self._post)
        app.router.add_get(self.options.path, self._get)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.options.host, self.context.port or 0, reuse_address=True).start()
        port = self._runner.addresses[0][1]
        self.context.connected(account=f"http://{self.options.host}:{port}{self.options.path}")
        if self._bot is not None:
            self._bot.open()

    async def close(self) -> None:
        """Listen no more; who waits for an answer hears that it was not stored."""
        for _, told in (*self._waiting, *self._given):
            if not told.done():
                told.set_result(False)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._bot is not None:
            await self._bot.close()

    async def fetch(self, position: Position) -> Arrived:
        """What was posted; what was given before and not stored comes first."""
        del position
        while not self._waiting and not self._given:
            self._arrived.clear()
            await self._arrived.wait()
        room = BATCH - len(self._given)
        self._given += self._waiting[:room]
        del self._waiting[:room]
        return Arrived([message for message, _ in self._given])

    async def stored(self, messages: Sequence[Incoming]) -> None:
        """They are on disk: answer."""
        crash_point("satellite.webhook.stored")
        given, self._given = self._given[: len(messages)], self._given[len(messages) :]
        for _, told in given:
            if not told.done():
                told.set_result(True)

    async def send(self, outgoing: Outgoing) -> None:
        """Only Telegram's webhook mode has a way back."""
        if self._bot is None:
            raise SendRefused("a webhook cannot be answered later; send by a satellite of another kind")
        await self._bot.send(outgoing)

    # --- requests -----------------------------------------------------------------------------------------------

    async def _get(self, _: web.Request) -> web.Response:
        return web.Response(status=405, text="POST here\n", headers={"allow": "POST"})

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.read()  # more than max_bytes: aiohttp answers 413
        problem = refusal(self.options.preset, self._secret, request.headers, body, self.context.clock())
        if problem is not None:
            self.context.tell("request-refused", why=problem, address=request.remote)
            return web.Response(status=401, text=f"{problem}\n")
        value = decoded(body)
        if self.options.preset == "slack" and isinstance(value, dict) and value.get("type") == "url_verification":
            return web.Response(text=str(value.get("challenge", "")))
        try:
            message = self._message(request, body, value)
            if self._files is not None:
                await self._files.fetch([value], [message])
        except ValueError as err:
            return web.Response(status=400, text=f"{err}\n")
        except BotApiError as err:
            self.context.tell("file-failed", error=str(err))
            return _not_now("a file of it cannot be fetched")
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((message, told))
        self._arrived.set()
        try:
            async with asyncio.timeout(STORE_SECONDS):
                is_stored = await asyncio.shield(told)
        except TimeoutError:
            is_stored = False
        crash_point("satellite.webhook.answering")
        if not is_stored:
            return _not_now("not stored")
        return web.json_response({"id": message.id})

    def _message(self, request: web.Request, body: bytes, value: Any) -> Incoming:
        if self.options.preset == "telegram":
            if not isinstance(value, dict) or type(value.get("update_id")) is not int:
                raise ValueError("not an update of Telegram")
            update = incoming(value, self.context.data / FILES)
            return update if self._files is not None else _without_files(update)
        headers = {name.lower(): text for name, text in request.headers.items() if name.lower() not in _HIDDEN}
        return Incoming(
            id=delivery_id(self.options.preset, request.headers, value),
            channel="webhook",
            text=body.decode("utf-8", "replace"),
            at=datetime.fromtimestamp(self.context.clock(), UTC),
            raw={"headers": headers, "query": dict(request.query), "body": value, "preset": self.options.preset},
        )


def _not_now(why: str) -> web.Response:
    return web.Response(status=503, text=f"{why}; send it again\n", headers={"retry-after": "5"})


def _without_files(message: Incoming) -> Incoming:
    """Nobody can fetch them without the bot's token."""
    problem = "not fetched: start the satellite with --secret TOKEN=FILE"
    files = tuple(replace(file, problem=file.problem or problem) for file in message.attachments)
    return replace(message, attachments=files)


def decoded(body: bytes) -> Any:
    """The body as JSON; None if it is none."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None


def delivery_id(preset: str | None, headers: Mapping[str, str], value: Any) -> str:
    """What the sender calls this delivery, so that a repetition is recognised; else something new."""
    field = {"stripe": "id", "slack": "event_id"}.get(preset or "")
    if field and isinstance(value, dict) and isinstance(value.get(field), str):
        return str(value[field])
    for name in ("x-github-delivery", "webhook-id", "idempotency-key", "x-request-id"):
        if headers.get(name):
            return headers[name]
    return uuid4().hex


def refusal(preset: str | None, secret: bytes, headers: Mapping[str, str], body: bytes, now: float) -> str | None:
    """Why a request is not accepted, in words; None if it is."""
    if not secret:
        return None
    check = {"github": _github, "stripe": _stripe, "slack": _slack, "telegram": _telegram, None: _standard}[preset]
    return check(secret, headers, body, now)


def _github(secret: bytes, headers: Mapping[str, str], body: bytes, _: float) -> str | None:
    given = headers.get("x-hub-signature-256", "")
    wanted = f"sha256={hmac.new(secret, body, hashlib.sha256).hexdigest()}"
    return _compared(given, [wanted], "X-Hub-Signature-256")


def _stripe(secret: bytes, headers: Mapping[str, str], body: bytes, now: float) -> str | None:
    pairs = [part.strip().partition("=") for part in headers.get("stripe-signature", "").split(",")]
    moment = next((value for name, _, value in pairs if name == "t"), "")
    if (old := _too_old(moment, now)) is not None:
        return old
    wanted = hmac.new(secret, f"{moment}.".encode() + body, hashlib.sha256).hexdigest()
    given = [value for name, _, value in pairs if name == "v1"]
    return _compared(wanted, given, "Stripe-Signature")


def _slack(secret: bytes, headers: Mapping[str, str], body: bytes, now: float) -> str | None:
    moment = headers.get("x-slack-request-timestamp", "")
    if (old := _too_old(moment, now)) is not None:
        return old
    wanted = f"v0={hmac.new(secret, f'v0:{moment}:'.encode() + body, hashlib.sha256).hexdigest()}"
    return _compared(headers.get("x-slack-signature", ""), [wanted], "X-Slack-Signature")


def _telegram(secret: bytes, headers: Mapping[str, str], _: bytes, __: float) -> str | None:
    given = headers.get("x-telegram-bot-api-secret-token", "")
    return _compared(given, [secret.decode()], "X-Telegram-Bot-Api-Secret-Token")


def _standard(secret: bytes, headers: Mapping[str, str], body: bytes, now: float) -> str | None:
    moment = headers.get("webhook-timestamp", "")
    if (old := _too_old(moment, now)) is not None:
        return old
    name = headers.get("webhook-id", "")
    wanted = [signature(secret, name, moment, body)]
    if secret.startswith(b"whsec_"):  # the form in which senders hand out keys: base64
        with contextlib.suppress(binascii.Error):
            wanted.append(signature(base64.b64decode(secret[6:]), name, moment, body))
    for given in headers.get("webhook-signature", "").split():
        if _compared(given, wanted, "") is None:
            return None
    return "the signature in webhook-signature is missing or wrong"


def _compared(given: str, wanted: Sequence[str], header: str) -> str | None:
    matches = [hmac.compare_digest(given.encode(), one.encode()) for one in wanted]
    return None if any(matches) else f"the signature in {header} is missing or wrong"


def _too_old(moment: str, now: float) -> str | None:
    if not moment.isdigit():
        return "the time of the signature is missing"
    return "the signature is too old or from the future" if abs(now - int(moment)) > TOLERANCE_SECONDS else None
