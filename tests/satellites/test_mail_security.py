"""Mail over TLS with certificates that are checked, and with tokens instead of passwords, against real servers."""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs

import pytest
from imap_tools import MailBoxUnencrypted

from everdeck import AsyncDeck, Restart, Satellite
from everdeck.model import EventKind
from everdeck.satellites import gmail as gmail_module
from support.sat_gmail import GmailLike
from support.sat_mail import SUBMISSION, Dovecot, Smtpd, a_mail, needs_dovecot, needs_smtpd
from support.waiting import eventually

pytestmark = [pytest.mark.timeout(300)]

Run = Callable[[Callable[[], Awaitable[Any]]], Any]
needs_submission = pytest.mark.skipif(
    not SUBMISSION.exists(), reason="needs Dovecot's submission service (make setup installs it)"
)
AGAIN = Restart("always", max_crashes=1000, backoff_seconds=0.05, backoff_cap_seconds=0.2)


@needs_dovecot
@needs_smtpd
@needs_submission
def test_a_certificate_is_checked_and_a_wrong_password_is_said(state: Path, run: Run) -> None:
    """Nothing is said to a server that cannot prove who it is; with its authority both directions work."""

    async def scenario(imap: Dovecot, smtp: Smtpd) -> None:
        imap.deliver(a_mail("over tls"))
        async with AsyncDeck(state) as deck, asyncio.TaskGroup() as ways:
            for way in ("tls", "starttls"):
                ways.create_task(in_this_way(deck, imap, smtp, way))

    async def in_this_way(deck: AsyncDeck, imap: Dovecot, smtp: Smtpd, way: str) -> None:
        incoming = {"password": imap.password, "host": "localhost", "tls": way, "first_run": "take", "after": "keep"}
        incoming["port"] = imap.tls_port if way == "tls" else imap.port
        outgoing = {"port": imap.submissions_port if way == "tls" else imap.submission_port, "tls": way}
        outgoing |= {"user": imap.user}
        known = {"SSL_CERT_FILE": str(imap.cert)}
        reader, writer = f"in-{way}", f"out-{way}"
        await deck.start(reader, Satellite.gmail(imap.user, **incoming))
        await deck.start(writer, Satellite.smtp("localhost", password="wrong", **outgoing))
        await deck.send(writer, to="alice@example.org", text=f"sealed by {way}.")
        for name in (reader, writer):
            await eventually(lambda name=name: _says(deck, name, "certificate"), f"{name} trusts nobody")
        assert imap.password not in ((await deck.feed(reader)).error or "")
        await deck.start(reader, Satellite.gmail(imap.user, env=known, **incoming), replace=True)
        await deck.start(writer, Satellite.smtp("localhost", password="wrong", env=known, **outgoing), replace=True)
        async with deck.messages(reader) as messages, await anext(messages) as message:
            assert message.text.strip() == "over tls"
        await eventually(lambda: _says(deck, writer, "refuses the password of bob"), "the password is wrong")
        right = Satellite.smtp("localhost", password=imap.password, env=known, **outgoing)
        await deck.start(writer, right, replace=True)
        words = f"sealed by {way}.".encode()
        await eventually(lambda: any(words in mail for mail in smtp.taken()), "it was sent")

    with Smtpd() as smtp, Dovecot(tls=True, relay=smtp.port) as imap:
        run(lambda: scenario(imap, smtp))


class Tokens:
    """A token endpoint as Google's is, and the place where a mail server asks whether a token is good."""

    def __init__(self, user: str) -> None:
        self.user = user
        self.refresh_token = secrets.token_hex(8)
        self.good: set[str] = set()
        self.given = 0
        handler = type("Handler", (_TokenHandler,), {"tokens": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, asked: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """What is said."""
        if path == "/introspect":
            return 200, {"active": asked.get("token") in self.good, "email": self.user}
        wanted = {"grant_type": "refresh_token", "refresh_token": self.refresh_token, "client_id": "c"}
        if any(asked.get(name) != value for name, value in wanted.items()):
            return 400, {"error": "invalid_grant", "error_description": "Token has been expired or revoked."}
        self.given += 1
        self.good.add(token := secrets.token_hex(16))
        return 200, {"access_token": token, "expires_in": 3600, "token_type": "Bearer"}


class _TokenHandler(BaseHTTPRequestHandler):
    tokens: Tokens

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        status, told = self.tokens.answer(self.path, {name: values[0] for name, values in parse_qs(body).items()})
        content = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def tokens() -> Iterator[Tokens]:
    """For the user of the mail server."""
    with Tokens(Dovecot.user) as tokens:
        yield tokens


@needs_dovecot
@needs_smtpd
@needs_submission
def test_a_refresh_token_gives_tokens_for_both_directions(state: Path, run: Run, tokens: Tokens) -> None:
    """XOAUTH2 for IMAP and SMTP; a token that the server no longer takes is replaced; a bad grant is told in words."""

    async def scenario(imap: Dovecot, smtp: Smtpd) -> None:
        imap.deliver(a_mail("first"))
        grant = {"client_id": "c", "client_secret": "s", "token_uri": f"{tokens.url}/token"}
        place = {
            "host": "localhost",
            "port": imap.tls_port,
            "first_run": "take",
            "restart": AGAIN,
            "smtp_host": "localhost",
            "smtp_port": imap.submission_port,
            "env": {"SSL_CERT_FILE": str(imap.cert)},
        }
        async with AsyncDeck(state) as deck:
            await deck.start("mail", Satellite.gmail(imap.user, oauth={**grant, "refresh_token": "stale"}, **place))
            await eventually(lambda: _says(deck, "mail", "refuses the refresh token: 400"), "the grant is bad")
            good = {**grant, "refresh_token": tokens.refresh_token}
            await deck.start("mail", Satellite.gmail(imap.user, oauth=good, **place), replace=True)
            async with deck.messages("mail") as messages:
                async with await anext(messages) as message:
                    await message.reply("answered with a token")
                await eventually(lambda: any(b"answered with a token" in mail for mail in smtp.taken()), "the reply")
                tokens.good.clear()
                await asyncio.to_thread(imap.stop)
                await asyncio.to_thread(imap.start)
                imap.deliver(a_mail("second"))
                async with await anext(messages) as message:
                    assert message.text.strip() == "second"
                    await message.reply("and again")
                await eventually(lambda: any(b"and again" in mail for mail in smtp.taken()), "the second reply")
            assert tokens.given >= 2
            for token in tokens.good:
                assert token not in str(await deck.events())

    with Smtpd() as smtp, Dovecot(tls=True, tokens=f"{tokens.url}/introspect", relay=smtp.port) as imap:
        run(lambda: scenario(imap, smtp))


@needs_dovecot
def test_a_command_prints_the_token(state: Path, run: Run, tokens: Tokens) -> None:
    """``oauth=["…"]``: whatever people use to get one; each new connection may ask for another."""
    tokens.good.add("printed")

    async def scenario(imap: Dovecot) -> None:
        imap.deliver(a_mail("by command"))
        place = {"host": "127.0.0.1", "port": imap.port, "tls": "off", "first_run": "take"}
        async with AsyncDeck(state) as deck:
            await deck.start("mail", Satellite.gmail(imap.user, oauth=["false"], **place))
            await eventually(lambda: _says(deck, "mail", "false printed no token"), "there is none")
            await deck.start("mail", Satellite.gmail(imap.user, oauth=["echo", "printed"], **place), replace=True)
            async with deck.messages("mail") as messages, await anext(messages) as message:
                assert message.text.strip() == "by command"

    with Dovecot(tokens=f"{tokens.url}/introspect") as imap:
        run(lambda: scenario(imap))


def test_news_that_come_with_the_consent_to_idle_are_heard() -> None:
    """A mail between the look and the wait: the server tells of it in the same breath, and never again."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                connection.sendall(b"* OK ready\r\n")
                tag = b""
                for line in lines:
                    if line == b"DONE\r\n":
                        connection.sendall(tag + b" OK done\r\n")
                        continue
                    tag, command = line.split()[:2]
                    told = {b"CAPABILITY": b"* CAPABILITY IMAP4rev1 IDLE\r\n", b"IDLE": b"+ idling\r\n* 1 EXISTS\r\n"}
                    done = b"" if command == b"IDLE" else tag + b" OK done\r\n"
                    connection.sendall(told.get(command, b"") + done)

        serving = pool.submit(serve)
        box = MailBoxUnencrypted("127.0.0.1", listener.getsockname()[1], timeout=90)
        box.client.login("bob", "x")
        began = time.monotonic()
        gmail_module._wait(box)
        assert time.monotonic() - began < gmail_module.IDLE_SECONDS / 2
        box.client.shutdown()
        serving.result(60)


def test_a_server_without_idle_is_looked_at_and_left_at_once(state: Path, run: Run) -> None:
    """Nothing tells of news there; a stop does not wait for the next look."""

    async def scenario(imap: GmailLike) -> None:
        place = {"host": "127.0.0.1", "port": imap.port, "tls": "off", "first_run": "take"}
        async with AsyncDeck(state) as deck:
            await deck.start("mail", Satellite.gmail(imap.user, password=imap.password, **place))
            imap.deliver(a_mail("hello"), 1)
            async with deck.messages("mail") as messages, await anext(messages) as message:
                assert message.text.strip() == "hello"
            await deck.stop("mail")
            assert not [event for event in await deck.events() if event.kind is EventKind.KILLED]

    with GmailLike(idle=False) as imap:
        run(lambda: scenario(imap))


def test_gmails_own_ids_tell_mails_apart(state: Path, run: Run) -> None:
    """Without a Message-ID, with a shared one, in the folder again, after UIDVALIDITY changed: each mail comes once."""
    bare = b"From: alice@example.org\r\nSubject: x\r\n\r\nbare %d\r\n"

    async def scenario(imap: GmailLike) -> None:
        imap.deliver(bare % 1, 101)
        imap.deliver(a_mail("twin one", message_id="<same@example.org>"), 102)
        spec = {"password": imap.password, "host": "127.0.0.1", "tls": "off", "first_run": "take", "after": "keep"}
        async with AsyncDeck(state) as deck:
            await deck.start("mail", Satellite.gmail(imap.user, port=imap.port, **spec))
            seen = []
            async with deck.messages("mail") as messages:
                for _ in range(2):
                    async with await anext(messages) as message:
                        seen.append(message.text.strip())
                imap.deliver(bare % 1, 101)  # the label was taken off and put on again
                imap.deliver(a_mail("twin two", message_id="<same@example.org>"), 103)
                async with await anext(messages) as message:
                    seen.append(message.text.strip())
                await asyncio.to_thread(imap.new_uidvalidity)
                imap.deliver(bare % 2, 104)
                async with await anext(messages) as message:
                    seen.append(message.text.strip())
            assert seen == ["bare 1", "twin one", "twin two", "bare 2"]
            assert (await deck.feed("mail")).waiting == 0

    with GmailLike() as imap:
        run(lambda: scenario(imap))


async def _says(deck: AsyncDeck, name: str, words: str) -> bool:
    return words in ((await deck.feed(name)).error or "")
