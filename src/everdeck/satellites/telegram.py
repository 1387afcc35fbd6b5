"""The kind ``telegram``: a bot by long polling.

The feed's own care is used as it is: epochs of ids, the offset that is sent only until it is confirmed, the skip that a
crash cannot run over a backlog, one poller per token. A poll waits ten seconds at the server and is hung up at once
when the satellite is told to leave. Files that people send are in ``data/files`` before their message is stored.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from everdeck.errors import PollerConflict, SpecError
from everdeck.feed.botapi import chat_of
from everdeck.feed.poller_lock import PollerLock, local_suspects
from everdeck.feed.records import Cursor, Position
from everdeck.messages import Attachment, Incoming, Outgoing
from everdeck.satellites import TelegramOptions
from everdeck.satellites.base import Arrived, Context, Kind, safe_name
from everdeck.satellites.botclient import BotApiError, BotClient

POLL_SECONDS: Final = 10
MAX_FILE_BYTES: Final = 20_000_000
DOWNLOADS: Final = 4
FILE_ATTEMPTS: Final = 3
FILES: Final = "files"


class Telegram(Kind[TelegramOptions]):
    """One bot."""

    files = FILES

    def __init__(self, options: TelegramOptions, context: Context) -> None:
        super().__init__(options, context)
        token = context.needed_secret("TOKEN")
        bot_id = token.partition(":")[0]
        if not bot_id.isdigit():
            raise SpecError("secrets.TOKEN", "<hidden>", "a bot token: the bot's number, a colon, a secret")
        self.name = f"telegram:{bot_id}"
        self.client = BotClient(token, options.base_url)
        self._files = Files(self.client, context)
        self._lock = PollerLock(token)
        self._account: str | None = None

    async def open(self) -> None:
        """See :class:`Kind`."""
        self.client.open()

    async def close(self) -> None:
        """See :class:`Kind`."""
        await self.client.close()
        self._lock.release()

    async def fetch(self, position: Position) -> Arrived:
        """See :class:`Kind`."""
        updates = await self._updates(offset=position.offset, timeout=POLL_SECONDS)
        messages = [incoming(update, self.context.data / FILES) for update in updates]
        await self._files.fetch(updates, messages)
        cursor = int(messages[-1].id) + 1 if messages else None
        return Arrived(messages, cursor, asked=position.offset)

    async def skip_history(self) -> Cursor:
        """See :class:`Kind`."""
        updates = await self._updates(offset=-1, timeout=0)
        return int(updates[-1]["update_id"]) + 1 if updates else None

    async def send(self, outgoing: Outgoing) -> None:
        """See :class:`Kind`."""
        await self.client.send(outgoing)

    async def _updates(self, *, offset: int, timeout: int) -> list[dict[str, Any]]:  # noqa: ASYNC109 - the API's word
        self._lock.acquire()
        if self._account is None:
            me = await self.client.call("getMe")
            self._account = f"@{me.get('username') or me.get('id')}"
            self.context.connected(account=self._account)
        try:
            found = await self.client.call("getUpdates", POLL_SECONDS + 15.0, offset=offset, timeout=timeout, limit=100)
        except PollerConflict as err:
            suspects = await asyncio.to_thread(local_suspects, self.client.token)
            self.context.tell(
                "poller-conflict", error=str(err), suspects=[msgspec.to_builtins(one) for one in suspects]
            )
            raise
        if not isinstance(found, list) or not all(
            isinstance(one, dict) and type(one.get("update_id")) is int for one in found
        ):
            raise BotApiError("getUpdates answered with something that is not a list of updates")
        return found


def incoming(update: dict[str, Any], files: Path) -> Incoming:
    """An update as a message. Every kind of update becomes one: what has no text has its ``raw``."""
    content = next((part for kind, part in update.items() if kind != "update_id" and isinstance(part, dict)), {})
    sender = content.get("from") or content.get("sender_chat") or {}
    moment = content.get("date") or content.get("edit_date") or (content.get("message") or {}).get("date") or 0
    return Incoming(
        id=str(update["update_id"]),
        channel="telegram",
        conversation=chat_of(update),
        sender=str(sender["id"]) if isinstance(sender, dict) and "id" in sender else None,
        text=str(content.get("text") or content.get("caption") or content.get("data") or content.get("query") or ""),
        attachments=tuple(_attachment(file, files) for file in files_of(update)),
        at=datetime.fromtimestamp(moment if isinstance(moment, int) else 0, UTC),
        raw=update,
    )


def files_of(update: dict[str, Any]) -> list[dict[str, Any]]:
    """The files of an update: of a photo the largest size."""
    content = update.get("message") or update.get("channel_post") or update.get("edited_message") or {}
    found = []
    if isinstance(photo := content.get("photo"), list) and photo:
        found.append({"file_name": "photo.jpg", "mime_type": "image/jpeg", **photo[-1]})
    for kind in ("document", "audio", "voice", "video", "video_note", "animation", "sticker"):
        file = content.get(kind)
        if not isinstance(file, dict) or "file_id" not in file:
            continue
        # A GIF comes as an animation and as a document: the same file twice.
        if not any(other.get("file_unique_id") == file.get("file_unique_id") for other in found):
            found.append({"file_name": kind, **file})
    return found


def _attachment(file: dict[str, Any], files: Path) -> Attachment:
    name = safe_name(str(file["file_name"]))
    size = file.get("file_size")
    large = isinstance(size, int) and size > MAX_FILE_BYTES
    unique = safe_name(str(file.get("file_unique_id") or file["file_id"]))
    return Attachment(
        name=name,
        path=str(files / f"{unique}-{name}"),
        media_type=str(file.get("mime_type") or "application/octet-stream"),
        size=size if isinstance(size, int) else None,
        problem=f"larger than the {MAX_FILE_BYTES // 1_000_000} MB that the Bot API hands out" if large else None,
    )


class Files:
    """Fetches what people sent. A file that cannot be had holds up its message for some attempts only: that is told."""

    def __init__(self, client: BotClient, context: Context) -> None:
        self._client = client
        self._context = context
        self._tries: Counter[str] = Counter()

    async def fetch(self, updates: Sequence[dict[str, Any]], messages: Sequence[Incoming]) -> None:
        """Fetch what is not here yet, a few at a time."""
        wanted = [
            (file, attachment)
            for update, message in zip(updates, messages, strict=True)
            for file, attachment in zip(files_of(update), message.attachments, strict=True)
            if attachment.problem is None
        ]
        gate = asyncio.Semaphore(DOWNLOADS)

        async def one(file: dict[str, Any], attachment: Attachment) -> None:
            async with gate:
                await self._one(str(file["file_id"]), attachment)

        for outcome in await asyncio.gather(*(one(*pair) for pair in wanted), return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _one(self, file_id: str, attachment: Attachment) -> None:
        path = Path(attachment.path)
        if not await asyncio.to_thread(_wanted, path):
            return
        try:
            await self._client.download(file_id, path)
        except BotApiError as err:
            self._tries[file_id] += 1
            servers_fault = not err.status or err.status >= 500  # noqa: PLR2004 - HTTP's own division
            if servers_fault and self._tries[file_id] < FILE_ATTEMPTS:
                raise  # nothing was stored: the whole batch comes again
            self._context.tell("file-failed", name=attachment.name, error=str(err))
        self._tries.pop(file_id, None)


def _wanted(path: Path) -> bool:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        os.utime(path)  # as new: it is of a message again that is not done
    except FileNotFoundError:
        return True
    return False
