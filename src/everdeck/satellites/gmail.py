"""The kind ``gmail``: a mailbox on any IMAP server, answered by SMTP.

The position is UIDVALIDITY and the next UID of the folder: flags and UNSEEN are people's. IDLE is a hint that something
came; a look every few minutes stands behind it, and it is renewed long before the 29 minutes of RFC 2177. When
UIDVALIDITY changes, everything is looked at again and what is known is left out: by Gmail's own X-GM-MSGID where there
is one, else by Message-ID. A mail that Gmail puts into the folder again (a label that is taken off and put on gives it
a new UID) is the same mail, and is left out at any time. What a first run has left out stays out, by its age.

A mail is fetched in parts into ``data/mail`` and only then stored, so its size does not matter. IMAP runs in threads of
its own (``imap-tools``); being told to leave hangs up at once. A second connection marks or moves what is done.

Nobody is answered who must not be (RFC 3834: automatic mails, lists, our own address), and nobody more often per hour
than ``replies_per_hour``: two programs that answer each other stop.
"""

import asyncio
import contextlib
import imaplib
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from imap_tools import BaseMailBox, MailBox, MailBoxStartTls, MailBoxUnencrypted
from imap_tools.errors import MailboxFolderSelectError

from everdeck.crashpoints import crash_point
from everdeck.errors import MessageError, SendRefused, SpecError
from everdeck.feed.records import Cursor, Position
from everdeck.messages import Incoming, Outgoing
from everdeck.satellites import GmailOptions
from everdeck.satellites.base import Arrived, Context, Kind
from everdeck.satellites.mailing import SmtpError, SmtpSender, composed, recipient_of, tell_refused
from everdeck.satellites.mime import message_of
from everdeck.satellites.oauth import AccessToken

IMAP_SECONDS: Final = 60.0
KNOWN_SECONDS: Final = 30.0
# How far a server's clock may be behind ours before a new mail looks like one of the time before the first run.
SKEW_SECONDS: Final = 3600.0
# A look behind IDLE: it also keeps routers and servers from forgetting the connection.
IDLE_SECONDS: Final = 240.0
POLL_SECONDS: Final = 30.0
PART_BYTES: Final = 256_000
BATCH_MAILS: Final = 20
BATCH_BYTES: Final = 20_000_000
MAIL: Final = "mail"
GOOGLES: Final = "gm:"
_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS everdeck_mail (key TEXT PRIMARY KEY, uid TEXT NOT NULL) STRICT",
    "CREATE TABLE IF NOT EXISTS everdeck_replied (address TEXT NOT NULL, at REAL NOT NULL) STRICT",
)
_SINCE: Final = "since"  # no Message-ID: those have brackets
_KNOWN: Final = "SELECT key FROM everdeck_mail WHERE key IN (SELECT value FROM json_each(?))"
_Answer = TypeVar("_Answer")


class MailboxError(MessageError):
    """The mailbox cannot be used now. ``refused``: the password or the token is not accepted."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(text)


class Gmail(Kind[GmailOptions]):
    """One mailbox."""

    tells_finished = True
    files = MAIL

    def __init__(self, options: GmailOptions, context: Context) -> None:
        super().__init__(options, context)
        self.name = f"imap:{options.user}@{options.host}/{options.folder}"
        self.tells_finished = options.after != "keep"
        password = context.secret("PASSWORD")
        oauth = context.secret("OAUTH")
        if password is None and oauth is None and options.oauth_command is None:
            raise SpecError("secrets", None, "PASSWORD or OAUTH, or the option oauth_command")
        self._token = None if password is not None else AccessToken(oauth, options.oauth_command)
        self._reading = Mailbox(options, password, self._token)
        self._marking = Mailbox(options, password, self._token)
        self._sender = SmtpSender(
            host=options.smtp_host,
            port=options.smtp_port,
            tls=options.smtp_tls,
            user=options.user,
            password=password,
            token=None if self._token is None else self._token.get,
        )
        self._since: datetime | None = None
        self._smtp_error = ""

    async def open(self) -> None:
        """See :class:`Kind`."""
        async with self.context.transaction() as db:
            for statement in _TABLES:
                db.execute(statement)
            row = db.execute("SELECT uid FROM everdeck_mail WHERE key = ?", (_SINCE,)).fetchone()
        self._since = None if row is None else datetime.fromisoformat(row[0])

    async def close(self) -> None:
        """See :class:`Kind`."""
        self._reading.hang_up()
        self._marking.hang_up()
        await self._sender.close()

    # --- in -----------------------------------------------------------------------------------------------------

    async def fetch(self, position: Position) -> Arrived:
        """See :class:`Kind`."""
        if self._token is not None:
            await self._token.get()
        cursor = str(position.cursor) if position.cursor is not None else None
        place = self.context.data / MAIL
        found = await self._reading.run(
            lambda box: _news(box, self.options, cursor, self._known, self._since, place, self._say_connected)
        )
        if found.resynced:
            self.context.tell("uidvalidity-changed", folder=self.options.folder, left_out=found.left_out)
        return Arrived(found.messages, found.cursor)

    def _say_connected(self) -> None:
        """From the thread: the connection stands, though nothing may come for minutes."""
        self._reading.loop().call_soon_threadsafe(lambda: self.context.connected(account=self.options.user))

    async def skip_history(self) -> Cursor:
        """See :class:`Kind`."""
        validity, following = await self._reading.run(lambda box: _place(box, self.options.folder))
        # What is left out now has no key here; when UIDs are new one day, it is known by its age.
        self._since = datetime.fromtimestamp(self.context.clock() - SKEW_SECONDS, UTC)
        async with self.context.transaction() as db:
            db.execute("INSERT OR REPLACE INTO everdeck_mail VALUES (?, ?)", (_SINCE, self._since.isoformat()))
        return f"{validity}:{following}"

    async def stored(self, messages: Sequence[Incoming]) -> None:
        """Remember the mails by their own names, for the day when UIDVALIDITY changes."""
        rows = [(key, message.id) for message in messages if (key := _key_of(message))]
        async with self.context.transaction() as db:
            db.executemany("INSERT OR IGNORE INTO everdeck_mail VALUES (?, ?)", rows)

    async def finished(self, ids: Sequence[str]) -> None:
        """See :class:`Kind`."""
        crash_point("satellite.gmail.marking")
        await self._marking.run(lambda box: _mark(box, self.options, ids))
        crash_point("satellite.gmail.marked")

    def _known(self, keys: Sequence[str]) -> set[str]:
        """From the thread: which of these mails have been here. All of them would not fit into memory for ever."""
        asked = asyncio.run_coroutine_threadsafe(self._known_among(keys), self._reading.loop())
        return asked.result(KNOWN_SECONDS)

    async def _known_among(self, keys: Sequence[str]) -> set[str]:
        async with self.context.transaction() as db:
            return {key for (key,) in db.execute(_KNOWN, (msgspec.json.encode(keys).decode(),)).fetchall()}

    # --- out ----------------------------------------------------------------------------------------------------

    async def send(self, outgoing: Outgoing) -> None:
        """See :class:`Kind`."""
        answered = None
        if outgoing.answers is not None:
            why = outgoing.answers.raw.get("automatic")
            if why:
                raise SendRefused(f"not answered, or two programs would answer each other: {why}")
            answered = recipient_of(outgoing)
            await self._refuse_too_many(answered)
        mail = composed(outgoing, self.options.user)
        try:
            refused = await self._sender.send(mail)
        except SmtpError as err:
            if self._smtp_error != str(err):
                self.context.tell("smtp-failing", error=str(err))
            self._smtp_error = str(err)
            if err.refused and self._token is not None:
                self._token.forget()
            raise
        self._smtp_error = ""
        tell_refused(self.context.tell, refused)
        if answered is not None:
            async with self.context.transaction() as db:
                db.execute("INSERT INTO everdeck_replied VALUES (?, ?)", (answered, self.context.clock()))

    async def _refuse_too_many(self, address: str) -> None:
        now = self.context.clock()
        async with self.context.transaction() as db:
            db.execute("DELETE FROM everdeck_replied WHERE at < ? OR at > ?", (now - 3600, now + 3600))
            (count,) = db.execute("SELECT count(*) FROM everdeck_replied WHERE address = ?", (address,)).fetchone()
        if count >= self.options.replies_per_hour:
            self.context.tell("reply-limit", address=address, per_hour=self.options.replies_per_hour)
            raise SendRefused(f"{address} got {count} replies within an hour: that is how loops look")


class Mailbox:
    """One IMAP connection, used from a thread of its own; made anew after every error."""

    def __init__(self, options: GmailOptions, password: str | None, token: AccessToken | None) -> None:
        self._options = options
        self._password = password
        self._token = token
        self._box: BaseMailBox | None = None
        self._socket: socket.socket | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="imap")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that asked."""
        if self._loop is None:
            raise MailboxError("nobody has asked yet")
        return self._loop

    async def run(self, act: Callable[[BaseMailBox], _Answer]) -> _Answer:
        """Do something with the folder selected; hang up when cancelled, so that nobody waits for a server."""
        self._loop = asyncio.get_running_loop()
        try:
            return await self._loop.run_in_executor(self._thread, self._act, act)
        except asyncio.CancelledError:
            self.hang_up()
            raise

    def hang_up(self) -> None:
        """End whatever the thread is waiting for."""
        self._closed = True
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _act(self, act: Callable[[BaseMailBox], _Answer]) -> _Answer:
        try:
            if self._box is None:
                self._box = self._connected()
            return act(self._box)
        except BaseException as err:
            self._drop()
            raise _in_words(err, self._options) from err

    def _connected(self) -> BaseMailBox:
        options = self._options
        box: BaseMailBox
        if options.tls == "tls":
            context = ssl.create_default_context()
            box = MailBox(options.host, options.port, timeout=IMAP_SECONDS, ssl_context=context)
        elif options.tls == "starttls":
            context = ssl.create_default_context()
            box = MailBoxStartTls(options.host, options.port, timeout=IMAP_SECONDS, ssl_context=context)
        else:
            box = MailBoxUnencrypted(options.host, options.port, timeout=IMAP_SECONDS)
        self._box, self._socket = box, box.client.sock
        if self._closed:
            raise MailboxError("closing")
        try:
            if self._token is not None:
                _authenticate(box.client, options.user, self._token.now())
                self._token.taken()
            else:
                box.client.login(options.user, self._password or "")
        except imaplib.IMAP4.abort:
            raise
        except imaplib.IMAP4.error as err:
            what, refused = "password", True
            if self._token is not None:
                what, refused = "token", not self._token.forget()
            words = f"the server refuses the {what} of {options.user}: {_said(err)}"
            raise MailboxError(words, refused=refused) from None
        # A server may offer more to those it knows (IDLE, X-GM-EXT-1), and imaplib asks only before the login.
        _, told = _checked(box.client.capability())
        box.client.capabilities = tuple(_text(told[-1:]).upper().split())
        try:
            box.folder.set(options.folder)
        except MailboxFolderSelectError as err:
            said = _text(err.command_result[1])
            raise MailboxError(f"the folder {options.folder!r} cannot be opened: {said}") from None
        return box

    def _drop(self) -> None:
        box, self._box, self._socket = self._box, None, None
        if box is not None:
            with contextlib.suppress(Exception):
                box.client.shutdown()


# --- in the thread ----------------------------------------------------------------------------------------------


class Found(msgspec.Struct):
    """What a look has found, and where to look next."""

    messages: list[Incoming]
    cursor: str
    resynced: bool = False
    left_out: int = 0


def _news(
    box: BaseMailBox,
    options: GmailOptions,
    cursor: str | None,
    known: Callable[[Sequence[str]], set[str]],
    since: datetime | None,
    directory: Path,
    connected: Callable[[], None],
) -> Found:
    validity, following = _place(box, options.folder)
    connected()
    before, start, again = _parsed(cursor)
    resynced = cursor is not None and before != validity
    if before != validity:
        start, again = 1, resynced
    uids = _uids_from(box, start)
    if not uids and cursor is not None and not resynced:
        _wait(box)
        uids = _uids_from(box, start)
    if not uids:
        return Found([], f"{validity}:{max(start, following)}", resynced)
    facts = _sizes(box, uids[:BATCH_MAILS])
    compared = [fact.key for fact in facts.values() if fact.key and (again or fact.key.startswith(GOOGLES))]
    here = known(compared) if compared else set()
    messages: list[Incoming] = []
    left_out, total, last = 0, 0, start - 1
    for uid in uids[:BATCH_MAILS]:
        mail = facts.get(uid)
        if mail is not None and messages and total + mail.size > BATCH_BYTES:
            break
        last = uid
        if mail is None:  # expunged meanwhile
            continue
        if mail.key in here or (again and since is not None and mail.at is not None and mail.at < since):
            left_out += 1
            continue
        if mail.key is not None and mail.key.startswith(GOOGLES):
            here.add(mail.key)  # twice in one batch is once
        total += mail.size
        message = _fetched(box, validity, uid, mail, directory, options.user)
        if message is not None:
            messages.append(message)
    # While a folder is looked at anew, the position says so: every mail of it is compared with those that are known.
    more = again and last < uids[-1]
    return Found(messages, f"{validity}:{last + 1}{':again' if more else ''}", resynced, left_out)


def _parsed(cursor: str | None) -> tuple[int, int, bool]:
    """UIDVALIDITY, the next UID, and whether the folder is being looked at anew."""
    if cursor is None:
        return 0, 1, False
    validity, _, rest = cursor.partition(":")
    start, _, again = rest.partition(":")
    return int(validity), int(start), again == "again"


class Facts(msgspec.Struct):
    """What is known of a mail before it is fetched."""

    size: int
    key: str | None
    at: datetime | None


def _place(box: BaseMailBox, folder: str) -> tuple[int, int]:
    # NOOP first: a mail that arrived a moment ago is not seen by a session that has not been told (Dovecot).
    box.client.noop()
    status = box.folder.status(folder, ["UIDVALIDITY", "UIDNEXT"])
    return int(status["UIDVALIDITY"]), int(status["UIDNEXT"])


def _uids_from(box: BaseMailBox, start: int) -> list[int]:
    # "n:*" past the end returns the last old mail (RFC 3501, 6.4.8): filter.
    _, data = _checked(box.client.uid("SEARCH", f"UID {start}:*"))
    return sorted(uid for uid in map(int, (data[0] or b"").split()) if uid >= start)


def _wait(box: BaseMailBox) -> None:
    """Until something may have come; without IDLE, for a while."""
    if "IDLE" in box.client.capabilities:
        with box.idle as idle:
            answers = _came_with_consent(box) or idle.poll(timeout=IDLE_SECONDS)
        if any(b"BYE" in answer for answer in answers):
            raise MailboxError("the server says goodbye")
        if answers:
            return  # this session has been told: a question less on the way of a new mail
    else:
        # The server has no way to tell; but a connection that ends, at either side, is heard at once.
        select.select([box.client.sock], [], [], POLL_SECONDS)
    box.client.noop()


def _came_with_consent(box: BaseMailBox) -> list[bytes]:
    """What the server said together with its "+ idling": a mail that came since the last look.

    It is in the client's buffer by now, where poll(2) does not see it, and would be noticed with the next mail.
    """
    client, lines = box.client, []
    patience = client.sock.gettimeout()
    client.sock.settimeout(0)
    try:
        while True:
            lines.append(client._get_line())  # noqa: SLF001 - as imap-tools' poll reads
    except OSError:
        return lines
    except imaplib.IMAP4.abort as err:
        if "EOF" not in str(err):  # half a line
            raise
        return lines  # nothing more; if it is the end, the wait says so
    finally:
        client.sock.settimeout(patience)


def _sizes(box: BaseMailBox, uids: Sequence[int]) -> dict[int, Facts]:
    if not uids:
        return {}
    google = "X-GM-EXT-1" in box.client.capabilities
    asked = (
        f"(UID RFC822.SIZE INTERNALDATE {'X-GM-MSGID ' if google else ''}BODY.PEEK[HEADER.FIELDS (MESSAGE-ID DATE)])"
    )
    _, data = _checked(box.client.uid("FETCH", ",".join(map(str, uids)), asked))
    found: dict[int, Facts] = {}
    for item in data:
        if not isinstance(item, tuple):
            continue
        head = item[0].decode("ascii", "replace")
        uid, size = re.search(r"\bUID (\d+)", head), re.search(r"\bRFC822\.SIZE (\d+)", head)
        if uid is None or size is None:
            continue
        gm = re.search(r"\bX-GM-MSGID (\d+)", head)
        own = re.search(rb"(?im)^message-id:\s*(<[^<>\s]+>)", item[1])
        key = f"{GOOGLES}{gm[1]}" if gm else own[1].decode("ascii", "replace") if own else None
        found[int(uid[1])] = Facts(int(size[1]), key, _internal_date(head))
    return found


def _internal_date(head: str) -> datetime | None:
    moment = imaplib.Internaldate2tuple(head.encode("ascii", "replace"))
    return None if moment is None else datetime.fromtimestamp(time.mktime(moment), UTC)


def _fetched(box: BaseMailBox, validity: int, uid: int, facts: Facts, directory: Path, own: str) -> Incoming | None:
    place = directory / f"{validity}-{uid}"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = place / "mail.eml"
    partial = place / ".mail.part"
    with partial.open("wb") as out:
        offset = 0
        while True:
            _, data = _checked(box.client.uid("FETCH", str(uid), f"(BODY.PEEK[]<{offset}.{PART_BYTES}>)"))
            chunk = next((item[1] for item in data if isinstance(item, tuple)), None)
            if chunk is None:
                if offset == 0:
                    return None  # expunged meanwhile
                break
            out.write(chunk)
            offset += len(chunk)
            if len(chunk) < PART_BYTES:
                break
    partial.replace(file)
    message = message_of(file, id=f"{validity}:{uid}", files=place, own=own, received_at=facts.at)
    raw = {**message.raw, "uid": uid, "uidvalidity": validity, "key": facts.key}
    return msgspec.structs.replace(message, raw=raw)


def _mark(box: BaseMailBox, options: GmailOptions, ids: Sequence[str]) -> None:
    validity, _ = _place(box, options.folder)
    pairs = [one.partition(":") for one in ids]
    uids = [uid for known, _, uid in pairs if known == str(validity) and uid.isdigit()]
    if not uids:
        return
    numbers = ",".join(uids)
    if options.after == "seen":
        _checked(box.client.uid("STORE", numbers, "+FLAGS.SILENT", r"(\Seen)"))
        return
    folder = options.after.partition(":")[2]
    if not box.folder.exists(folder):
        box.folder.create(folder)
    for start in range(0, len(uids), 100):
        box.move(uids[start : start + 100], folder)


def _authenticate(client: imaplib.IMAP4, user: str, token: str) -> None:
    answers = iter([f"user={user}\x01auth=Bearer {token}\x01\x01".encode()])
    # A refusal comes as a challenge, and wants an empty answer before the error itself is told.
    client.authenticate("XOAUTH2", lambda _: next(answers, b""))


def _checked(answer: tuple[str, Any]) -> tuple[str, list[Any]]:
    status, data = answer
    if status != "OK":
        raise MailboxError(f"the server answers {status}: {_text(data)}")
    return status, list(data)


def _text(data: object) -> str:
    first = data[0] if isinstance(data, list | tuple) and data else data
    return first.decode("utf-8", "replace") if isinstance(first, bytes) else str(first)


def _said(err: BaseException) -> str:
    if isinstance(err, OSError) and err.strerror:
        return err.strerror
    words = err.args[0] if err.args else ""
    return words.decode("utf-8", "replace") if isinstance(words, bytes) else str(words)


def _in_words(err: BaseException, options: GmailOptions) -> BaseException:
    where = f"{options.host}:{options.port}"
    if isinstance(err, MailboxError) or not isinstance(err, Exception):
        return err
    if isinstance(err, ssl.SSLCertVerificationError):
        return MailboxError(f"the certificate of {where} is not trusted: {err.verify_message}")
    if isinstance(err, imaplib.IMAP4.abort | OSError):
        return MailboxError(f"the connection to {where} was lost: {_said(err) or type(err).__name__}")
    return MailboxError(f"{where}: {type(err).__name__}: {_said(err)}")


def _key_of(message: Incoming) -> str | None:
    key = message.raw.get("key") or message.raw.get("message_id")
    return None if key is None else str(key)
