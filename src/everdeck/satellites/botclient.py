"""The Bot API, as thin as it can be: one session, raw JSON, errors in words.

What a refusal means is decided here once: a token that is refused, a wait that is asked for, a message that will never
be taken, a server that is away. Telegram's own limits are kept before the server has to say so: 30 messages per second
in all, one per second to a chat, twenty per minute to a group (core.telegram.org/bots/faq#broadcasting-to-users).
"""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, FormData

from everdeck.errors import MessageError, PollerConflict, SendRefused
from everdeck.messages import Outgoing

CALL_SECONDS: Final = 20.0
MAX_TEXT: Final = 4096
MAX_CAPTION: Final = 1024
PER_SECOND: Final = 30
CHAT_SECONDS: Final = 1.0
GROUP_PER_MINUTE: Final = 20
REMEMBERED_CHATS: Final = 10_000
CHUNK: Final = 1 << 16


class BotApiError(MessageError):
    """The server said no, or could not be reached. ``refused``: the token itself is not accepted."""

    def __init__(self, text: str, *, status: int = 0, retry_after: float | None = None, refused: bool = False) -> None:
        self.status = status
        self.retry_after = retry_after
        self.refused = refused
        super().__init__(text)


class BotClient:
    """One bot."""

    def __init__(self, token: str, base_url: str) -> None:
        self.token = token
        self.base_url = base_url.rstrip("/")
        self._session: ClientSession | None = None
        self._pace = Pace()
        self._sent_parts: dict[str, int] = {}

    def open(self) -> None:
        """Make ready to ask."""
        self._session = ClientSession(timeout=ClientTimeout(total=CALL_SECONDS))

    async def close(self) -> None:
        """Hang up: a poll that waits is ended at once."""
        if self._session is not None:
            await self._session.close()

    async def call(self, method: str, seconds: float = CALL_SECONDS, **params: Any) -> Any:
        """The result of one method."""
        given = {name: value for name, value in params.items() if value is not None}
        return await self._post(method, {"json": given}, seconds)

    async def upload(self, method: str, field: str, file: Path, **params: Any) -> Any:
        """The result of one method that is given a file."""
        form = FormData()
        for name, value in params.items():
            if value is not None:
                text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
                form.add_field(name, text)
        with file.open("rb") as content:
            form.add_field(field, content, filename=file.name)
            return await self._post(method, {"data": form}, CALL_SECONDS * 4)

    async def _post(self, method: str, body: dict[str, Any], seconds: float) -> Any:
        url = f"{self.base_url}/bot{self.token}/{method}"
        try:
            async with self._open_session().post(url, timeout=ClientTimeout(total=seconds), **body) as answer:
                status, content = answer.status, await answer.read()
        except TimeoutError:
            raise BotApiError(f"{self.base_url} did not answer {method} within {seconds:g} s") from None
        except (ClientError, OSError) as err:
            # The URL holds the token, and so may the error's text.
            words = str(err).replace(self.token, "<token>") or type(err).__name__
            raise BotApiError(f"{self.base_url} cannot be reached: {words}") from None
        try:
            told = msgspec.json.decode(content)
        except msgspec.DecodeError:
            raise BotApiError(f"{method}: answered {status} with something that is not JSON", status=status) from None
        if isinstance(told, dict) and told.get("ok"):
            return told.get("result")
        raise _refusal(method, status, told if isinstance(told, dict) else {})

    async def download(self, file_id: str, to: Path) -> None:
        """A file that somebody sent, whole or not at all."""
        found = await self.call("getFile", file_id=file_id)
        path = str(found.get("file_path", ""))
        partial = to.with_name(f".{to.name}.part")
        try:
            if path.startswith("/"):  # a local Bot API server gives the file itself
                await asyncio.to_thread(_copy, Path(path), partial)
            else:
                url = f"{self.base_url}/file/bot{self.token}/{path}"
                async with self._open_session().get(url, timeout=ClientTimeout(total=CALL_SECONDS * 4)) as answer:
                    if answer.status != 200:  # noqa: PLR2004 - HTTP's "here it is"
                        raise BotApiError(f"the file {path} was answered with {answer.status}", status=answer.status)
                    with partial.open("wb") as file:
                        async for chunk in answer.content.iter_chunked(CHUNK):
                            file.write(chunk)
        except (ClientError, TimeoutError, OSError) as err:
            partial.unlink(missing_ok=True)
            raise BotApiError(f"a file could not be fetched: {type(err).__name__}") from None
        partial.replace(to)

    async def send(self, outgoing: Outgoing) -> None:
        """Send a text (in parts if it is long) and files, within Telegram's limits."""
        chat = int(outgoing.to) if outgoing.to.lstrip("-").isdigit() else outgoing.to
        parts: list[tuple[str, Any]] = [("text", part) for part in parts_of(outgoing.text)]
        parts += [("file", Path(path)) for path in outgoing.attachments]
        name = outgoing.id or ""
        # A later part that fails must not repeat the earlier ones, as long as this process lives.
        for number, (kind, part) in enumerate(parts):
            if number < self._sent_parts.get(name, 0):
                continue
            wait = self._pace.turn(outgoing.to)
            if wait > 0:
                raise Later(wait)
            try:
                if kind == "text":
                    said = {**outgoing.options, "chat_id": chat, "text": part}
                    await self._post("sendMessage", {"json": said}, CALL_SECONDS)
                else:
                    await self.upload("sendDocument", "document", part, chat_id=chat)
            except BotApiError as err:
                if err.status in {400, 403, 404}:
                    raise SendRefused(f"Telegram refuses it: {err}") from None
                raise
            except OSError as err:
                raise SendRefused(f"the file {part} cannot be read: {err.strerror}") from None
            self._sent_parts[name] = number + 1
        self._sent_parts.pop(name, None)

    def _open_session(self) -> ClientSession:
        if self._session is None:
            raise BotApiError("the session is not open")
        return self._session


class Later(MessageError):
    """Not now: Telegram's limits. The message waits, others do not."""

    def __init__(self, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(f"Telegram's limits: in {retry_after:.1f} s")


class Pace:
    """Whose turn it is to be sent to, within Telegram's limits."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=PER_SECOND)
        self._chats: dict[str, deque[float]] = {}

    def turn(self, chat: str) -> float:
        """0 if one more message to this chat is allowed now, and it counts; else in how many seconds it is."""
        now = asyncio.get_running_loop().time()
        wait = self._allowed_at(chat, now) - now
        if wait > 0:
            return wait
        self._last.append(now)
        self._chats.setdefault(chat, deque(maxlen=GROUP_PER_MINUTE)).append(now)
        if len(self._chats) > REMEMBERED_CHATS:
            self._chats = {one: times for one, times in self._chats.items() if times[-1] > now - 60.0}
        return 0.0

    def _allowed_at(self, chat: str, now: float) -> float:
        allowed = now
        if len(self._last) == PER_SECOND:
            allowed = max(allowed, self._last[0] + 1.0)
        if mine := self._chats.get(chat):
            allowed = max(allowed, mine[-1] + CHAT_SECONDS)
            if chat.startswith("-") and len(mine) == GROUP_PER_MINUTE:
                allowed = max(allowed, mine[0] + 60.0)
        return allowed


def parts_of(text: str) -> list[str]:
    """A text in pieces that one message may hold, cut between lines where there are any."""
    parts = []
    while text:
        if _units(text) <= MAX_TEXT:
            parts.append(text)
            break
        head = text[:MAX_TEXT]
        while _units(head) > MAX_TEXT:
            head = head[: -max(1, (_units(head) - MAX_TEXT) // 2)]
        cut = head.rfind("\n") + 1 or head.rfind(" ") + 1 or len(head)
        parts.append(text[:cut].rstrip("\n") or text[:cut])
        text = text[cut:]
    return parts


def _units(text: str) -> int:
    """Telegram counts in UTF-16 code units."""
    return len(text.encode("utf-16-le")) // 2


def _refusal(method: str, status: int, told: dict[str, Any]) -> Exception:
    said = str(told.get("description") or f"error {status}")
    parameters = told.get("parameters") or {}
    if status == 409:  # noqa: PLR2004 - HTTP's "conflict"
        return PollerConflict(f"another program polls with this token: {said}")
    if status in {401, 404} and method in {"getUpdates", "getMe"}:
        return BotApiError(f"the server refuses the token: {said}", status=status, refused=True)
    return BotApiError(said, status=status, retry_after=parameters.get("retry_after"), refused=status == 401)  # noqa: PLR2004 - HTTP's "who are you"


def _copy(source: Path, to: Path) -> None:
    import shutil  # noqa: PLC0415 - for local Bot API servers only

    shutil.copyfile(source, to)
