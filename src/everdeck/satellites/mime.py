"""A mail as a message: headers, text, attachments in files; whatever its makers did to it.

Mails of some megabytes are read by the standard library. Larger ones are walked through line by line, and their
attachments are decoded straight into files, so a mail of any size costs a few megabytes of memory. Names of files are
made safe. A mail that cannot be understood is still a message: its ``raw["file"]`` has it byte for byte.

See RFC 5322, RFC 2045-2047, RFC 3834 (who must not be answered).
"""

import binascii
import contextlib
import email
import email.policy
import html
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.header import decode_header, make_header
from email.message import Message
from email.utils import getaddresses, parseaddr, parsedate_to_datetime
from pathlib import Path
from typing import IO, Any, Final

from everdeck.messages import EPOCH, Attachment, Incoming
from everdeck.satellites.base import safe_name

WHOLE_BYTES: Final = 2_000_000
TEXT_BYTES: Final = 1_000_000
HEADER_BYTES: Final = 256_000
LINE_BYTES: Final = 1 << 16
MOST_PARTS: Final = 500
_KEPT_HEADERS: Final = (
    *("from", "to", "cc", "reply-to", "subject", "date", "message-id", "in-reply-to", "references", "return-path"),
    *("auto-submitted", "precedence", "list-id", "list-unsubscribe", "x-auto-response-suppress", "x-loop"),
)
_MESSAGE_ID: Final = re.compile(r"<[^<>\s]+>")


def message_of(file: Path, *, id: str, files: Path, own: str, received_at: datetime | None = None) -> Incoming:  # noqa: A002 - the field's name
    """The mail in ``file``; attachments go to the directory ``files``."""
    headers: dict[str, str] = {}
    text, problem = "", None
    attachments: tuple[Attachment, ...] = ()
    try:
        with file.open("rb") as content:
            head = _head(content)
            headers = {name: _decoded(head[name]) for name in _KEPT_HEADERS if head.get(name) is not None}
            if file.stat().st_size <= WHOLE_BYTES:
                text, attachments = _whole(file, files)
            else:
                text, attachments = _walked(file, files)
    except Exception as err:  # noqa: BLE001 - a mail can break every parser; it is delivered as it is
        problem = f"{type(err).__name__}: {err}"
    references = _MESSAGE_ID.findall(headers.get("references", "")) or _MESSAGE_ID.findall(
        headers.get("in-reply-to", "")
    )
    own_id = next(iter(_MESSAGE_ID.findall(headers.get("message-id", ""))), None)
    sender = parseaddr(headers.get("from", ""))[1] or None
    raw: dict[str, Any] = {
        "headers": headers,
        "message_id": own_id,
        "references": references,
        "reply_to": parseaddr(headers.get("reply-to", ""))[1] or sender,
        "file": str(file),
        "automatic": automatic(headers, own),
    }
    if problem is not None:
        raw["problem"] = problem
    return Incoming(
        id=id,
        channel="mail",
        conversation=references[0] if references else own_id or id,
        sender=sender,
        text=text,
        subject=headers.get("subject"),
        attachments=tuple(attachments),
        at=_moment(headers.get("date")) or received_at or EPOCH,
        raw=raw,
    )


def automatic(headers: dict[str, str], own: str) -> str | None:
    """Why this mail must not be answered by a program, in words; None if it may be (RFC 3834)."""
    submitted = headers.get("auto-submitted", "no").partition(";")[0].strip().lower()
    precedence = headers.get("precedence", "").strip().lower()
    sender = parseaddr(headers.get("from", ""))[1].lower()
    reasons = (
        (submitted not in {"", "no"}, f"Auto-Submitted: {submitted}"),
        (precedence in {"bulk", "junk", "list", "auto_reply"}, f"Precedence: {precedence}"),
        (headers.get("return-path", "").strip() == "<>", "an empty sender: a report of a mail server"),
        ("list-id" in headers or "list-unsubscribe" in headers, "a mailing list"),
        (bool(own) and sender == own.lower(), "our own address"),
        (sender.partition("@")[0] in {"mailer-daemon", "postmaster"}, f"from {sender}"),
    )
    return next((why for holds, why in reasons if holds), None)


def addresses(header: str) -> list[str]:
    """The addresses in a header."""
    return [address for _, address in getaddresses([header]) if address]


# --- small mails: the standard library --------------------------------------------------------------------------


def _whole(file: Path, files: Path) -> tuple[str, tuple[Attachment, ...]]:
    with file.open("rb") as content:
        mail = email.message_from_binary_file(content, policy=email.policy.default)
    texts: dict[str, str] = {}
    attachments: list[Attachment] = []
    for number, part in enumerate(_leaves(mail)):
        kind = part.get_content_type()
        name = _file_name(part)
        if name is None and kind in {"text/plain", "text/html"} and kind not in texts:
            texts[kind] = _text_of(part)
        else:
            payload = part.get_payload(decode=True)
            content_bytes = payload if isinstance(payload, bytes) else str(part).encode("utf-8", "replace")
            attachments.append(_kept(content_bytes, files, number, name, kind))
    return texts.get("text/plain") or _plain(texts.get("text/html", "")), tuple(attachments)


def _leaves(mail: Message) -> Iterator[Message]:
    found = 0
    for part in mail.walk():
        if part.is_multipart() and part.get_content_type() != "message/rfc822":
            continue
        if part.get_content_type() == "message/rfc822" or not part.is_multipart():
            found += 1
            if found > MOST_PARTS:
                return
            yield part


def _text_of(part: Message) -> str:
    payload = part.get_payload(decode=True)
    if not isinstance(payload, bytes):
        return str(part.get_payload())
    return _in_charset(payload, part.get_content_charset())


def _in_charset(payload: bytes, charset: str | None) -> str:
    for guess in (charset, "utf-8", "cp1252"):
        if guess:
            with contextlib.suppress(LookupError, UnicodeDecodeError):
                return payload.decode(guess)
    return payload.decode("utf-8", "replace")


def _file_name(part: Message) -> str | None:
    try:
        name = part.get_filename()
    except Exception:  # noqa: BLE001 - a broken header is no name
        name = None
    if name is None and part.get_content_disposition() == "attachment":
        return "attachment"
    return None if name is None else _decoded(name)


def _kept(content: bytes, files: Path, number: int, name: str | None, kind: str) -> Attachment:
    shown = safe_name(name or f"part-{number}")
    files.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = files / f"{number}-{shown}"
    path.write_bytes(content)
    return Attachment(name=shown, path=str(path), media_type=kind, size=len(content))


# --- large mails: line by line ----------------------------------------------------------------------------------


def _walked(file: Path, files: Path) -> tuple[str, tuple[Attachment, ...]]:
    texts: dict[str, str] = {}
    attachments: list[Attachment] = []
    with file.open("rb") as content:
        head = _head(content)
        _walk(content, head, [], texts, attachments, files)
    return texts.get("text/plain") or _plain(texts.get("text/html", "")), tuple(attachments)


def _walk(
    content: IO[bytes],
    head: Message,
    boundaries: Sequence[bytes],
    texts: dict[str, str],
    attachments: list[Attachment],
    files: Path,
) -> bytes | None:
    """One part from behind its header to the boundary that ends it, which is the answer (None: the end of the mail)."""
    boundary = head.get_boundary()
    if head.get_content_maintype() == "multipart" and boundary and len(boundaries) < 50:  # noqa: PLR2004 - deeper is an attack
        own = b"--" + boundary.encode("utf-8", "replace")
        inner = [*boundaries, own]
        ended = _skip_to(content, inner)
        while ended is not None and ended.rstrip() == own and len(attachments) < MOST_PARTS:
            ended = _walk(content, _head(content), inner, texts, attachments, files)
        if ended is not None and ended.rstrip() == own + b"--":
            return _skip_to(content, boundaries)
        return ended
    kind, name = head.get_content_type(), _file_name(head)
    if name is None and kind in {"text/plain", "text/html"} and kind not in texts:
        kept = bytearray()

        def collect(chunk: bytes) -> None:
            if len(kept) < TEXT_BYTES:
                kept.extend(chunk)

        ended = _decode(content, head, boundaries, collect)
        texts[kind] = _in_charset(bytes(kept), head.get_content_charset())
        return ended
    shown = safe_name(name or f"part-{len(attachments)}")
    files.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = files / f"{len(attachments)}-{shown}"
    with path.open("wb") as out:
        ended = _decode(content, head, boundaries, out.write)
    attachments.append(Attachment(name=shown, path=str(path), media_type=kind, size=path.stat().st_size))
    return ended


def _decode(content: IO[bytes], head: Message, boundaries: Sequence[bytes], write: Any) -> bytes | None:
    encoding = str(head.get("content-transfer-encoding", "")).strip().lower()
    left = b""
    while line := content.readline(LINE_BYTES):
        if _is_boundary(line, boundaries):
            break
        if encoding == "base64":
            left += re.sub(rb"[^A-Za-z0-9+/=]", b"", line)
            usable = len(left) - len(left) % 4
            with contextlib.suppress(binascii.Error):
                write(binascii.a2b_base64(left[:usable]))
            left = left[usable:]
        elif encoding == "quoted-printable":
            write(binascii.a2b_qp(line))
        else:
            write(line)
    return line or None


def _skip_to(content: IO[bytes], boundaries: Sequence[bytes]) -> bytes | None:
    while line := content.readline(LINE_BYTES):
        if _is_boundary(line, boundaries):
            return line
    return None


def _is_boundary(line: bytes, boundaries: Sequence[bytes]) -> bool:
    if not line.startswith(b"--"):
        return False
    plain = line.rstrip()
    return any(plain in {boundary, boundary + b"--"} for boundary in boundaries)


# --- helpers ----------------------------------------------------------------------------------------------------


def _head(content: IO[bytes]) -> Message:
    """The header at this place of the file; the file stands behind it afterwards."""
    lines = bytearray()
    while line := content.readline(LINE_BYTES):
        if not line.strip(b"\r\n"):
            break
        if len(lines) < HEADER_BYTES:
            lines += line
    # The older policy: it gives the texts as they are and does not raise on broken ones.
    return email.message_from_bytes(bytes(lines), policy=email.policy.compat32)


def _decoded(value: object) -> str:
    text = str(value)
    with contextlib.suppress(Exception):
        text = str(make_header(decode_header(text)))
    return " ".join(text.encode("utf-8", "replace").decode("utf-8").split())


def _moment(date: str | None) -> datetime | None:
    if not date:
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        moment = parsedate_to_datetime(date)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return None


def _plain(text: str) -> str:
    """The words of an HTML text; for reading, not for showing."""
    without = re.sub(r"(?is)<(script|style|head)\b.*?</\1\s*>", " ", text[:TEXT_BYTES])
    broken = re.sub(r"(?i)<br\s*/?>|</(p|div|tr|li|h\d)\s*>", "\n", without)
    words = html.unescape(re.sub(r"(?s)<[^>]*>", "", broken))
    return "\n".join(" ".join(line.split()) for line in words.splitlines() if line.strip())
