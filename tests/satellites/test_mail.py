"""The gmail and smtp satellites against Dovecot and OpenSMTPD: in, out, faults of servers, odd mails, death."""

import asyncio
import email
import email.policy
import hashlib
import imaplib
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import psutil
import pytest

from everdeck import AsyncDeck, Restart, Satellite, WorkerSpec
from everdeck.crashpoints import CRASH_AT_ENV
from everdeck.messages import outgoing
from everdeck.model import EventKind
from everdeck.satellites import gmail as gmail_module
from everdeck.satellites import mailing as mailing_module
from everdeck.satellites.bridge import send
from everdeck.testing.satellites import NAME, Victim, kill_trial
from support.sat_clock import FastClock
from support.sat_gmail import GmailLike
from support.sat_mail import Dovecot, Smtpd, SmtpFaults, a_mail, flaky, needs_dovecot, needs_smtpd
from support.sat_trial import patience, size, tell
from support.waiting import eventually

pytestmark = [needs_dovecot, needs_smtpd, patience(300)]

Run = Callable[[Callable[[], Awaitable[Any]]], Any]
AGAIN = Restart("always", max_crashes=1000, backoff_seconds=0.05, backoff_cap_seconds=0.2)
BOMB = int(os.environ.get("EVERDECK_MAIL_BOMB", "200"))
POINTS = sorted(
    {
        point
        for module in (gmail_module, mailing_module)
        for point in re.findall(r'crash_point\("([^"]+)"\)', Path(str(module.__file__)).read_text())
    }
)


@pytest.fixture(scope="module")
def smtp() -> Iterator[Smtpd]:
    """One SMTP server for all tests; each looks for its own texts."""
    with Smtpd() as server:
        yield server


@pytest.fixture
def imap() -> Iterator[Dovecot]:
    """An IMAP server for one test."""
    with Dovecot() as server:
        yield server


def mailbox(imap: Dovecot, smtp: Smtpd, **fields: Any) -> WorkerSpec:
    """A satellite for this mailbox that takes what is there."""
    fields = {
        "password": imap.password,
        "host": "127.0.0.1",
        "port": imap.port,
        "tls": "off",
        "smtp_host": "127.0.0.1",
        "smtp_port": smtp.port,
        "smtp_tls": "off",
        "first_run": "take",
        "restart": AGAIN,
        **fields,
    }
    return Satellite.gmail(imap.user, **fields)


def sent(smtp: Smtpd, having: str = "") -> list[EmailMessage]:
    """The mails that were delivered and whose text has this."""
    mails = [email.message_from_bytes(raw, policy=email.policy.default) for raw in smtp.taken()]
    return [mail for mail in mails if having in _text(mail)]  # type: ignore[misc]


def _text(mail: Any) -> str:
    body = mail.get_body(("plain",))
    return "" if body is None else str(body.get_content())


def test_a_mail_is_answered_in_its_thread_and_marked_as_seen(state: Path, imap: Dovecot, smtp: Smtpd, run: Run) -> None:
    """The reply has In-Reply-To, References and Auto-Submitted; the mail is seen only after it is done."""
    reference = "<root@example.org>"
    imap.deliver(a_mail("what is 6 x 7?", subject="Frage: äöü", message_id="<q@example.org>", References=reference))

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("mail", mailbox(imap, smtp))
            async with deck.messages("mail") as messages:
                message = await anext(messages)
                async with message:
                    assert (message.channel, message.sender) == ("mail", "alice@example.org")
                    assert (message.subject, message.text.strip()) == ("Frage: äöü", "what is 6 x 7?")
                    assert message.conversation == reference
                    assert not any(file.name.endswith("S") for file in imap.mails())
                    await message.reply("it is 42")
            await eventually(lambda: sent(smtp, "it is 42"), "the reply")
            await eventually(lambda: all(file.name.endswith("S") for file in imap.mails()), "it is marked as seen")

    run(scenario)
    (reply,) = sent(smtp, "it is 42")
    assert reply["to"] == "alice@example.org"
    assert reply["subject"] == "Re: Frage: äöü"
    assert reply["in-reply-to"] == "<q@example.org>"
    assert reply["references"] == f"{reference} <q@example.org>"
    assert reply["auto-submitted"] == "auto-replied"


def test_what_is_done_can_be_moved_away(state: Path, imap: Dovecot, smtp: Smtpd, run: Run) -> None:
    """``after="move:Done"``: nothing is moved before it is done; the folder is made."""
    imap.deliver(a_mail("one"))

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("mail", mailbox(imap, smtp, after="move:Done"))
            async with deck.messages("mail") as messages:
                async with await anext(messages):
                    assert len(imap.mails()) == 1
                await eventually(lambda: len(imap.mails("Done")) == 1, "it was moved")
                await eventually(lambda: not imap.mails(), "and not only copied")
                imap.deliver(a_mail("two"))
                async with await anext(messages) as message:
                    assert message.text.strip() == "two"

    run(scenario)


def test_nobody_is_answered_who_must_not_be(state: Path, imap: Dovecot, smtp: Smtpd, run: Run) -> None:
    """Automatic mails, lists and our own address are messages, but a reply to them is set aside, with the reason."""
    for number, headers in enumerate(
        ({"Auto-Submitted": "auto-replied"}, {"Precedence": "bulk"}, {"List-Id": "<l.example.org>"}, {})
    ):
        sender = imap.user if not headers else "alice@example.org"
        imap.deliver(a_mail(f"loop {number}", sender=sender, **{k.replace("-", "_"): v for k, v in headers.items()}))

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("mail", mailbox(imap, smtp))
            async with deck.messages("mail") as messages:
                for _ in range(4):
                    async with await anext(messages) as message:
                        await message.reply(f"re: {message.text}")
            await eventually(lambda: _unsent(deck, 4), "all four were set aside")
            errors = [letter.error or "" for letter in await deck.letters("mail")]
            assert all("not answered" in error for error in errors), errors

    run(scenario)
    assert sent(smtp, "re: loop") == []


def test_a_sender_is_not_answered_more_often_than_the_limit(state: Path, imap: Dovecot, smtp: Smtpd, run: Run) -> None:
    """Two programs that answer each other stop after ``replies_per_hour``."""
    for number in range(5):
        imap.deliver(a_mail(f"ping {number}", sender="robot@example.org"))

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            spec = mailbox(imap, smtp)
            limited = Satellite.of(
                "gmail",
                {**spec.satellite.options, "replies_per_hour": 3},  # type: ignore[union-attr]
                secrets=spec.secrets,
            )
            await deck.start("mail", limited)
            async with deck.messages("mail") as messages:
                for _ in range(5):
                    async with await anext(messages) as message:
                        await message.reply(f"pong to {message.text}")
                    await eventually(lambda: _nothing_to_send(deck), "it was sent or set aside")
            assert (await deck.feed("mail")).unsent == 2

    run(scenario)
    assert len(sent(smtp, "pong to")) == 3


def test_a_wrong_password_is_said_in_words_and_the_right_one_works(
    state: Path, imap: Dovecot, smtp: Smtpd, run: Run
) -> None:
    """The satellite stays up, the server's own words are shown, and nothing is lost meanwhile."""
    imap.deliver(a_mail("hello"))

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("mail", mailbox(imap, smtp, password="wrong"))
            await eventually(lambda: _failing(deck), "the refusal")
            error = (await deck.feed("mail")).error or ""
            assert "the server refuses the password" in error
            assert "AUTHENTICATIONFAILED" in error
            await deck.start("mail", mailbox(imap, smtp), replace=True)
            async with deck.messages("mail") as messages, await anext(messages) as message:
                assert message.text.strip() == "hello"

    run(scenario)


def test_a_connection_reset_in_the_middle_of_a_mail_is_tried_again(
    state: Path, imap: Dovecot, smtp: Smtpd, run: Run
) -> None:
    """The mail arrives once, whole."""
    content = os.urandom(500_000)
    imap.deliver(_with_attachment("big", content))

    async def scenario() -> None:
        with flaky(imap.port) as way:
            way.cut_after = 400_000
            async with AsyncDeck(state) as deck:
                await deck.start("mail", mailbox(imap, smtp, port=way.port))
                async with deck.messages("mail") as messages, await anext(messages) as message:
                    (attachment,) = message.attachments
                    assert Path(attachment.path).read_bytes() == content
                assert way.cuts == 1
                assert (await deck.feed("mail")).done == 1

    run(scenario)


def test_a_new_uidvalidity_brings_nothing_twice_and_loses_nothing(
    state: Path, imap: Dovecot, smtp: Smtpd, run: Run
) -> None:
    """The folder is looked at anew: what is known by its Message-ID, or was left out by the first run, stays out."""
    for number in range(5):
        imap.deliver(a_mail(f"history {number}"))
    for file in imap.mails():
        os.utime(file, (1_700_000_000, 1_700_000_000))  # what Dovecot tells as INTERNALDATE

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("mail", mailbox(imap, smtp, after="keep", first_run="skip"))
            await eventually(lambda: _connected(deck), "the history is left out")
            for number in range(30):
                imap.deliver(a_mail(f"old {number}"))
            async with deck.messages("mail") as messages:
                for _ in range(30):
                    async with await anext(messages) as message:
                        assert message.text.startswith("old")
                await asyncio.to_thread(imap.new_uidvalidity)
                imap.deliver(a_mail("new"))
                async with await anext(messages) as message:
                    assert message.text.strip() == "new"
            told = [event.detail for event in await deck.events() if event.detail.get("what") == "uidvalidity-changed"]
            assert told
            assert (await deck.feed("mail")).done == 31

    run(scenario)


def test_a_deleted_folder_is_waited_for(state: Path, imap: Dovecot, smtp: Smtpd, run: Run) -> None:
    """While somebody reads it the folder goes: that is said in words, and when it is there again its mails come."""
    imap.make_folder("Jobs")
    imap.deliver(a_mail("before"), "Jobs")

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("mail", mailbox(imap, smtp, folder="Jobs", after="keep"))
            async with deck.messages("mail") as messages:
                async with await anext(messages) as message:
                    assert message.text.strip() == "before"
                await asyncio.to_thread(_delete_folder, imap, "Jobs")
                await eventually(lambda: _misses(deck, "Jobs"), "the folder is missed")
                imap.make_folder("Jobs")
                imap.deliver(a_mail("after"), "Jobs")
                async with await anext(messages) as message:
                    assert message.text.strip() == "after"

    run(scenario)


def _delete_folder(imap: Dovecot, folder: str) -> None:
    with imaplib.IMAP4("127.0.0.1", imap.port) as client:
        client.login(imap.user, imap.password)
        assert client.delete(folder)[0] == "OK"


def test_thirty_megabytes_cost_little_memory(state: Path, imap: Dovecot, smtp: Smtpd, run: Run) -> None:
    """The attachment is in a file, byte for byte; the satellite never held it whole."""
    content = os.urandom(22_000_000)  # 30 MB as base64
    imap.deliver(_with_attachment("huge", content, name="../../etc/pass wd.bin"))

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("mail", mailbox(imap, smtp))
            async with deck.messages("mail") as messages, await anext(messages) as message:
                (attachment,) = message.attachments
                assert attachment.name == "pass wd.bin"
                assert Path(attachment.path).resolve().is_relative_to((state / "workers/mail/data").resolve()), (
                    attachment.path
                )
                found = hashlib.sha256(Path(attachment.path).read_bytes()).hexdigest()
                assert found == hashlib.sha256(content).hexdigest()
                assert message.text.strip() == "huge"
            pid = (await deck.status("mail")).pid
            peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            assert peak is not None
            assert int(peak[1]) < 110_000, f"{peak[1]} kB"

    run(scenario)


def test_broken_mails_are_delivered_as_they_are(state: Path, imap: Dovecot, smtp: Smtpd, run: Run) -> None:
    """Odd charsets, missing ends, no header at all: each is a message, none holds up the next."""
    odd = [
        b"From: a@b.org\r\nSubject: =?utf-99?Q?=zz?=\r\nContent-Type: text/plain; charset=klingon\r\n\r\nt\xfcr\r\n",
        b"Content-Type: multipart/mixed; boundary=x\r\n\r\n--x\r\nContent-Type: text/plain\r\n\r\nno end 1\r\n",
        b"no header, just words 2\r\n",
        b"\r\n\r\n\x01\xff\xfe binary 3\r\n",
        b"From: =?broken\r\nDate: yesterday\r\nContent-Type: multipart/mixed\r\n\r\nno boundary 4\r\n",
        b"From: a@example.org\r\nContent-Transfer-Encoding: base64\r\n\r\n!!!! not base64 5\r\n",
    ]
    for raw in odd:
        imap.deliver(raw)
        time.sleep(0.01)
    imap.deliver(a_mail("sound"))

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("mail", mailbox(imap, smtp))
            raws = []
            async with deck.messages("mail") as messages:
                for _ in range(len(odd) + 1):
                    async with await anext(messages) as message:
                        raws.append(Path(message.raw["file"]).read_bytes().replace(b"\r\n", b"\n"))
            for raw in odd:
                assert any(raw.replace(b"\r\n", b"\n") == found for found in raws), raw
            assert (await deck.feed("mail")).dead == 0

    run(scenario)


def test_a_mail_bomb_is_worked_off(state: Path, imap: Dovecot, smtp: Smtpd, run: Run) -> None:
    """Every mail of it arrives; EVERDECK_MAIL_BOMB=10000 for the large one."""
    for number in range(BOMB):
        imap.deliver(a_mail(f"bomb {number}"))

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start("mail", mailbox(imap, smtp, after="keep"))
            seen = set()
            async with deck.messages("mail") as messages:
                while len(seen) < BOMB:
                    async with await anext(messages) as message:
                        seen.add(message.text.strip())
            pid = (await deck.status("mail")).pid
            assert psutil.Process(pid).memory_info().rss < 150_000_000
            assert (await deck.feed("mail")).done == BOMB

    if BOMB <= 500:
        run(scenario)
    else:
        asyncio.run(scenario())


def test_a_new_mail_is_in_the_program_within_milliseconds(state: Path, run: Run) -> None:
    """From a server that tells those who IDLE at once to ``deck.messages``: half of them within 50 ms when idle."""

    async def scenario(imap: GmailLike) -> list[float]:
        spent = []
        place = {"host": "127.0.0.1", "port": imap.port, "tls": "off", "first_run": "take", "after": "keep"}
        async with AsyncDeck(state) as deck:
            await deck.start("mail", Satellite.gmail(imap.user, password=imap.password, **place))
            async with deck.messages("mail") as messages:
                for number in range(21):
                    began = time.perf_counter()
                    imap.deliver(a_mail(str(number)), number + 1)
                    async with await anext(messages):
                        spent.append(time.perf_counter() - began)
                    await imap.idling()
        return sorted(spent[1:])

    with GmailLike() as imap:
        spent = run(lambda: scenario(imap))
    print(f"p50 {spent[10] * 1000:.1f} ms, p95 {spent[18] * 1000:.1f} ms")
    assert spent[2] < 0.050 * max(1.0, os.getloadavg()[0]), "the quickest tenth; others run beside this test"


# --- smtp -------------------------------------------------------------------------------------------------------


def test_a_server_that_says_later_is_asked_again_and_one_that_says_no_is_believed(
    state: Path, smtp: Smtpd, run: Run
) -> None:
    """421, 450, 452 are tried again with the same Message-ID; 550 and 552 are set aside with the server's words."""
    with SmtpFaults(smtp.port) as way:
        way.faults = [("MAIL", "421 4.3.2 shutting down"), ("RCPT", "450 4.2.1 busy"), ("DATA-END", "452 4.2.2 quota")]

        async def scenario() -> None:
            async with AsyncDeck(state) as deck:
                spec = Satellite.smtp("127.0.0.1", port=way.port, tls="off", sender="bob@example.org", restart=AGAIN)
                await deck.start("out", spec)
                await deck.send("out", to="alice@example.org", text="patience 1", subject="a")
                await eventually(lambda: sent(smtp, "patience 1"), "it was taken in the end", 60)
                assert not way.faults
                way.faults = [("RCPT", "550 5.1.1 no such user"), ("DATA-END", "552 5.2.2 mailbox full")]
                await deck.send("out", to="nobody@example.org", text="refused 1")
                await deck.send("out", to="full@example.org", text="refused 2")
                way.faults.append(("RCPT TO:<GONE", "550 5.1.1 moved"))
                await deck.send("out", to="alice@example.org", text="after it", cc=["gone@example.org"])
                await eventually(lambda: _unsent(deck, 2, "out"), "both were set aside")
                errors = " ".join(letter.error or "" for letter in await deck.letters("out"))
                assert "550 5.1.1 no such user" in errors
                assert "552 5.2.2 mailbox full" in errors
                await eventually(lambda: sent(smtp, "after it"), "the rest flows")
                told = {event.detail.get("what") for event in await deck.events() if event.kind is EventKind.FEED}
                assert {"unsent", "recipient-refused"} <= told

        run(scenario)
    (mail,) = sent(smtp, "patience 1")
    assert mail["message-id"]


def test_an_answer_that_was_lost_repeats_the_same_message_id(state: Path, smtp: Smtpd, run: Run) -> None:
    """SMTP cannot tell us that it has it: the repetition can be recognised by its Message-ID."""
    with SmtpFaults(smtp.port) as way:
        way.faults = [("LOST-END", "")]

        async def scenario() -> None:
            async with AsyncDeck(state) as deck:
                await deck.start("out", Satellite.smtp("127.0.0.1", port=way.port, tls="off", sender="bob@example.org"))
                await deck.send("out", to="alice@example.org", text="ambiguous")
                await eventually(lambda: len(sent(smtp, "ambiguous")) == 2, "it came again")

        run(scenario)
    first, second = sent(smtp, "ambiguous")
    assert first["message-id"] == second["message-id"]


def test_a_connection_reset_in_the_middle_of_data_is_tried_again(
    state: Path, smtp: Smtpd, run: Run, tmp_path: Path
) -> None:
    """A mail that was cut off is no mail; the second attempt arrives whole, and once, though the clock is set back."""
    (tmp_path / "data.bin").write_bytes(content := os.urandom(300_000))

    async def scenario() -> None:
        clock = FastClock(tmp_path / "clock")
        with flaky(smtp.port) as way:
            way.cut_client_after = 200_000
            async with AsyncDeck(state) as deck:
                fields = {"port": way.port, "tls": "off", "sender": "bob@example.org", "env": clock.env}
                await deck.start("out", Satellite.smtp("127.0.0.1", **fields))
                await deck.send("out", to="alice@example.org", text="cut off", attachments=[tmp_path / "data.bin"])
                await eventually(lambda: way.cuts == 1, "it was cut")
                clock.set_by(-86_400)
                await eventually(lambda: sent(smtp, "cut off"), "it was taken in the end")
                clock.set_by(2 * 86_400)
                await deck.send("out", to="alice@example.org", text="the day after")
                await eventually(lambda: sent(smtp, "the day after"), "the clock does not matter")

    run(scenario)
    (mail,) = sent(smtp, "cut off")
    (attachment,) = mail.iter_attachments()
    assert attachment.get_content() == content


def test_order_per_recipient_holds_though_one_waits(state: Path, smtp: Smtpd, run: Run) -> None:
    """A recipient that is told to wait keeps its order, and nobody else waits for it."""
    with SmtpFaults(smtp.port) as way:
        way.faults = [("RCPT TO:<SLOW", "450 4.2.1 greylisted")]

        async def scenario() -> None:
            async with AsyncDeck(state) as deck:
                await deck.start("out", Satellite.smtp("127.0.0.1", port=way.port, tls="off", sender="bob@example.org"))
                for number in range(3):
                    await deck.send("out", to="slow@example.org", text=f"slow {number}")
                await deck.send("out", to="fast@example.org", text="fast one")
                await eventually(lambda: len(sent(smtp, "slow ")) == 3 and sent(smtp, "fast one"), "all were sent")

        run(scenario)
        order = [line for line in way.seen if line.upper().startswith("RCPT")]
        assert order.count("RCPT TO:<slow@example.org>") == 4


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_no_mail_is_lost(state: Path, imap: Dovecot, smtp: Smtpd, run: Run, point: str) -> None:
    """It dies there once; every mail is answered, at most one answer is repeated, each is marked in the end."""
    mark = state.parent.name[-6:] + point[-8:]
    for number in range(3):
        imap.deliver(a_mail(f"{mark} {number}"))

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            env = {CRASH_AT_ENV: point}
            await deck.start("mail", mailbox(imap, smtp, restart=Restart("never"), env=env))

            async def answer() -> None:
                async with deck.messages("mail") as messages:
                    async for message in messages:
                        async with message:
                            await message.reply(f"re: {message.text}")

            answering = asyncio.ensure_future(answer())
            await eventually(lambda: _crashed(deck), f"it dies at {point}")
            await deck.start("mail", mailbox(imap, smtp), replace=True)
            await eventually(lambda: len({_text(mail) for mail in sent(smtp, f"re: {mark}")}) == 3, "all answers")
            await eventually(lambda: all(file.name.endswith("S") for file in imap.mails()), "all are seen")
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    run(scenario)
    # While one mail is being marked the answer to another may be on the wire.
    may_repeat = point in {"satellite.smtp.accepted", "satellite.gmail.marking", "satellite.gmail.marked"}
    assert len(sent(smtp, f"re: {mark}")) <= 3 + may_repeat


class _MailOutside:
    """The kill suite's view of a mailbox."""

    def __init__(self, imap: Dovecot, smtp: Smtpd) -> None:
        self._imap, self._smtp = imap, smtp
        self._roots: dict[int, str] = {}
        self._before = len(smtp.taken())

    def spec(self) -> WorkerSpec:
        return Satellite.of(
            "gmail",
            {**mailbox(self._imap, self._smtp).satellite.options, "replies_per_hour": 100_000},  # type: ignore[union-attr]
            secrets={"PASSWORD": self._imap.password},
        )

    def deliver(self, text: str, conversation: int) -> None:
        root = self._roots.setdefault(conversation, f"<root-{conversation}@example.org>")
        self._imap.deliver(a_mail(text, References=root))
        time.sleep(0.002)

    def received(self) -> list[str]:
        mails = self._smtp.taken()[self._before :]
        return [_text(email.message_from_bytes(raw, policy=email.policy.default)).strip() for raw in mails]


@pytest.mark.parametrize("who", ["satellite", "host", "owner"])
def test_kill_trial_of_a_mailbox(state: Path, imap: Dovecot, smtp: Smtpd, who: Victim) -> None:
    """Each of the three killed twice while twenty mails arrive: none lost, at most one answer per kill repeated."""
    messages, kills, deadline = size(20, 2)
    outside = _MailOutside(imap, smtp)
    trial = kill_trial(outside, state, who=who, messages=messages, kills=kills, deadline_seconds=deadline)
    tell("gmail", who, trial)

    assert trial.kills == kills
    assert trial.lost == []
    assert trial.duplicates <= trial.kills


class _OutboxOutside:
    """The kill suite's view of an account that only sends: what is promised is what must arrive."""

    def __init__(self, smtp: Smtpd, state: Path) -> None:
        self._smtp, self._inbox = smtp, state / "workers" / NAME / "data" / "feed.db"
        self._before = len(smtp.taken())

    def spec(self) -> WorkerSpec:
        return Satellite.smtp("127.0.0.1", port=self._smtp.port, tls="off", sender="bob@example.org")

    def deliver(self, text: str, conversation: int) -> None:
        deadline = time.monotonic() + 60
        while not self._inbox.parent.is_dir():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        send(self._inbox, outgoing(f"user-{conversation}@example.org", f"re: {text}"))

    def received(self) -> list[str]:
        mails = self._smtp.taken()[self._before :]
        return [_text(email.message_from_bytes(raw, policy=email.policy.default)).strip() for raw in mails]


@pytest.mark.parametrize("who", ["satellite", "owner"])
def test_kill_trial_of_an_outbox(state: Path, smtp: Smtpd, who: Victim) -> None:
    """What was promised arrives."""
    messages, kills, deadline = size(30, 3)
    outside = _OutboxOutside(smtp, state)
    trial = kill_trial(outside, state, who=who, messages=messages, kills=kills, deadline_seconds=deadline)
    tell("smtp", who, trial)

    assert trial.lost == []
    assert trial.duplicates <= trial.kills
    assert len(trial.delivered) == messages


def _with_attachment(text: str, content: bytes, name: str = "data.bin") -> bytes:
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "alice@example.org", Dovecot.user, text
    mail["Message-ID"] = f"<{hashlib.sha256(content).hexdigest()[:16]}@example.org>"
    mail.set_content(text)
    mail.add_attachment(content, maintype="application", subtype="octet-stream", filename=name)
    return mail.as_bytes()


async def _unsent(deck: AsyncDeck, count: int, name: str = "mail") -> bool:
    return (await deck.feed(name)).unsent == count


async def _nothing_to_send(deck: AsyncDeck) -> bool:
    return (await deck.feed("mail")).to_send == 0


async def _misses(deck: AsyncDeck, folder: str) -> bool:
    return f"the folder {folder!r} cannot be opened" in ((await deck.feed("mail")).error or "")


async def _connected(deck: AsyncDeck) -> bool:
    return (await deck.feed("mail")).connection == "connected"


async def _failing(deck: AsyncDeck) -> bool:
    return (await deck.feed("mail")).connection == "failing"


async def _crashed(deck: AsyncDeck) -> bool:
    return any(event.kind is EventKind.CRASHED for event in await deck.events(worker="mail"))
