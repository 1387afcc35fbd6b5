"""Mails that go out: how they are written, and how an SMTP server takes them.

The ``Message-ID`` is made of the outbox's own number before the first attempt, so a repetition after a crash can be
recognised: SMTP itself cannot tell one. What a server's answer means is decided here once. 4xx, a lost connection and a
server that is away are tried again; 5xx is believed: the message is set aside at once, with the server's own words. A
password that is refused says nothing about the message, so the message waits.

Certificates are checked; ``SSL_CERT_FILE`` in the satellite's environment names another authority than the system's.
"""

import asyncio
import contextlib
import mimetypes
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import formatdate, getaddresses, parseaddr
from pathlib import Path
from typing import Final

import aiosmtplib

from everdeck.crashpoints import crash_point
from everdeck.errors import MessageError, SendRefused
from everdeck.messages import Outgoing

CONNECTIONS: Final = 4
IDLE_SECONDS: Final = 15.0
SMTP_SECONDS: Final = 60.0
PERMANENT: Final = 500
_OURS: Final = frozenset({"from", "to", "cc", "bcc", "subject", "message-id", "date", "in-reply-to", "references"})


class SmtpError(MessageError):
    """The server cannot be reached or did not take it now. ``refused``: the account itself is not accepted."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(text)


def composed(outgoing: Outgoing, sender: str) -> EmailMessage:
    """The mail; refused where it can never be one."""
    mail = EmailMessage()
    domain = parseaddr(sender)[1].rpartition("@")[2] or "localhost"
    answers = outgoing.answers
    raw = answers.raw if answers is not None else {}
    try:
        mail["From"] = sender
        mail["To"] = recipient_of(outgoing)
        if cc := outgoing.options.get("cc"):
            mail["Cc"] = cc if isinstance(cc, str) else ", ".join(cc)
        mail["Subject"] = _one_line(outgoing.subject or _re(answers.subject if answers is not None else None))
        mail["Date"] = formatdate()
        mail["Message-ID"] = f"<{outgoing.id}@{domain}>"
        if answers is not None and raw.get("message_id"):
            mail["In-Reply-To"] = raw["message_id"]
            mail["References"] = " ".join([*raw.get("references", ()), raw["message_id"]][-20:])
        if answers is not None:
            mail["Auto-Submitted"] = "auto-replied"
        for name, value in dict(outgoing.options.get("headers") or {}).items():
            if name.lower() not in _OURS:
                mail[name] = value
        mail.set_content(outgoing.text)
        if html := outgoing.options.get("html"):
            mail.add_alternative(str(html), subtype="html")
        for path in outgoing.attachments:
            _attach(mail, Path(path))
    except (ValueError, TypeError, AttributeError) as err:
        raise SendRefused(f"not a mail that can be written: {err}") from None
    except OSError as err:
        raise SendRefused(f"the file {err.filename} cannot be read: {err.strerror}") from None
    return mail


def recipient_of(outgoing: Outgoing) -> str:
    """To whom: a reply goes where the mail asked for it (Reply-To, else From)."""
    raw = outgoing.answers.raw if outgoing.answers is not None else {}
    found = str(raw.get("reply_to") or outgoing.to)
    address = parseaddr(found)[1]
    try:
        Address(addr_spec=address)
    except (ValueError, IndexError, AttributeError):
        address = ""
    if "@" not in address or any(char in found for char in "\r\n"):
        raise SendRefused(f"{found!r} is not a mail address")
    return found


class SmtpSender:
    """One account at one server: connections are kept for some seconds."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        tls: str,
        user: str | None,
        password: str | None,
        token: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._user = user
        self._password = password
        self._token = token
        self._idle: list[tuple[float, aiosmtplib.SMTP]] = []
        self._gate = asyncio.Semaphore(CONNECTIONS)
        self._reaper: asyncio.TimerHandle | None = None

    @property
    def where(self) -> str:
        """Host and port, for people."""
        return f"{self._host}:{self._port}"

    async def send(self, mail: EmailMessage) -> dict[str, tuple[int, str]]:
        """Hand it over; the answer are recipients that were refused while others were not."""
        recipients = [address for _, address in getaddresses([*mail.get_all("To", []), *mail.get_all("Cc", [])])]
        sender = parseaddr(str(mail["From"]))[1]
        async with self._gate, self._connected() as client:
            try:
                crash_point("satellite.smtp.sending")
                refused, _ = await client.send_message(mail, sender=sender, recipients=recipients)
            except aiosmtplib.SMTPRecipientsRefused as err:
                worst = err.recipients[0]
                raise _judged(
                    worst.code, f"{self.where} refuses {worst.recipient}: {worst.code} {worst.message}"
                ) from None
            except aiosmtplib.SMTPResponseException as err:
                raise _judged(err.code, f"{self.where} answers {err.code} {err.message}") from None
            except (aiosmtplib.SMTPException, OSError, TimeoutError) as err:
                raise SmtpError(f"{self.where}: {type(err).__name__}: {err}") from None
            crash_point("satellite.smtp.accepted")
        return {name: (answer.code, answer.message) for name, answer in refused.items()}

    async def check(self) -> None:
        """Can a connection be had, and is the account accepted?"""
        async with self._gate, self._connected():
            pass

    async def close(self) -> None:
        """Hang up."""
        if self._reaper is not None:
            self._reaper.cancel()
        for _, client in self._idle:
            client.close()
        self._idle.clear()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiosmtplib.SMTP]:
        client = await self._kept() or await self._new()
        try:
            yield client
        except SendRefused:
            await self._keep(client)
            raise
        except BaseException:
            client.close()
            raise
        await self._keep(client)

    async def _kept(self) -> aiosmtplib.SMTP | None:
        while self._idle:
            _, client = self._idle.pop()
            with contextlib.suppress(aiosmtplib.SMTPException, OSError, TimeoutError):
                await client.noop(timeout=5)
                return client
            client.close()
        return None

    async def _keep(self, client: aiosmtplib.SMTP) -> None:
        try:
            await client.rset()
        except (aiosmtplib.SMTPException, OSError, TimeoutError):
            client.close()
            return
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time() + IDLE_SECONDS, client))
        if self._reaper is None:
            self._reaper = loop.call_later(IDLE_SECONDS, self._reap)

    def _reap(self) -> None:
        loop = asyncio.get_running_loop()
        self._reaper = None
        for until, client in list(self._idle):
            if until <= loop.time() + 0.1:
                self._idle.remove((until, client))
                client.close()
        if self._idle:
            self._reaper = loop.call_later(IDLE_SECONDS, self._reap)

    async def _new(self) -> aiosmtplib.SMTP:
        client = aiosmtplib.SMTP(
            hostname=self._host,
            port=self._port,
            use_tls=self._tls == "tls",
            start_tls=self._tls == "starttls",
            tls_context=None if self._tls == "off" else ssl.create_default_context(),
            timeout=SMTP_SECONDS,
        )
        try:
            await client.connect()
            await self._log_in(client)
        except aiosmtplib.SMTPAuthenticationError as err:
            client.close()
            said = f"{err.code} {err.message}"
            what = "password" if self._token is None else "token"
            raise SmtpError(f"{self.where} refuses the {what} of {self._user}: {said}", refused=True) from None
        except (aiosmtplib.SMTPException, OSError, TimeoutError) as err:
            client.close()
            if (distrust := _distrust(err)) is not None:
                words = f"the certificate of {self.where} is not trusted: {distrust.verify_message}"
                raise SmtpError(words) from None
            raise SmtpError(f"{self.where} cannot be reached: {type(err).__name__}: {err}") from None
        return client

    async def _log_in(self, client: aiosmtplib.SMTP) -> None:
        if self._user is None or (self._password is None and self._token is None):
            return
        if client.is_ehlo_or_helo_needed:
            await client.ehlo()
        if not client.supports_extension("auth"):
            return  # a relay that knows its neighbours; one that wants a login says so when it is given a mail
        if self._token is not None:
            await client.auth_xoauth2(self._user, await self._token())
        else:
            await client.login(self._user, self._password or "")


def tell_refused(tell: Callable[..., None], refused: dict[str, tuple[int, str]]) -> None:
    """Some recipients were refused while others were not: the mail is out, so a person has to hear of them."""
    for address, (code, words) in refused.items():
        tell("recipient-refused", address=address, error=f"{code} {words}")


def _distrust(err: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """The refused certificate behind an error of the library."""
    while err is not None and not isinstance(err, ssl.SSLCertVerificationError):
        err = err.__cause__ or err.__context__
    return err


def _judged(code: int, text: str) -> Exception:
    return SendRefused(text) if code >= PERMANENT else SmtpError(text)


def _attach(mail: EmailMessage, path: Path) -> None:
    kind, encoding = mimetypes.guess_type(path.name)
    main, _, sub = (kind if kind and not encoding else "application/octet-stream").partition("/")
    mail.add_attachment(path.read_bytes(), maintype=main, subtype=sub, filename=path.name)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _re(subject: str | None) -> str:
    if not subject:
        return ""
    return subject if subject.lower().startswith("re:") else f"Re: {subject}"
