"""The tutorial's program, as it stands on the page, answers Telegram and mail against real servers."""

import email
import email.policy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everdeck.testing.telegram import TelegramServer
from support.repo_examples import ROOT, examples_of
from support.sat_mail import Dovecot, Smtpd, a_mail, needs_dovecot, needs_smtpd

PAGE = ROOT / "docs" / "tutorial" / "agent-behind-telegram-and-mail.md"

pytestmark = [needs_dovecot, needs_smtpd, pytest.mark.timeout(180)]


def waited(fact: Callable[[], object], what: str) -> None:
    """Until it is so."""
    deadline = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_thirty_lines_answer_telegram_and_mail(tmp_path: Path) -> None:
    """The same loop, the same words; and the title does not lie about the lines."""
    (program,) = [example.text for example in examples_of(PAGE) if example.file == "agent.py"]
    assert len([line for line in program.splitlines() if line.strip()]) <= 30
    (tmp_path / "agent.py").write_text(program)
    with TelegramServer() as bot, Dovecot() as imap, Smtpd() as smtp:
        bot.say("hello there", chat_id=7)
        imap.deliver(a_mail("one two three"))
        mail = {
            "host": "127.0.0.1", "port": imap.port, "tls": "off", "first_run": "take",
            "smtp_host": "127.0.0.1", "smtp_port": smtp.port, "smtp_tls": "off",
        }  # fmt: skip
        env = {
            **os.environ,
            "TOKEN": bot.token,
            "TELEGRAM": json.dumps({"base_url": bot.url, "first_run": "take"}),
            "MAIL_USER": imap.user,
            "MAIL_PASSWORD": imap.password,
            "MAIL": json.dumps(mail),
        }
        agent = subprocess.Popen([sys.executable, "agent.py"], cwd=tmp_path, env=env)
        try:
            waited(lambda: [c.params["text"] for c in bot.calls("sendMessage")] == ["You wrote 2 words."], "telegram")
            waited(smtp.taken, "mail")
        finally:
            agent.terminate()
            agent.wait(30)
        reply = email.message_from_bytes(smtp.taken()[0], policy=email.policy.default)
        assert "You wrote 3 words." in str(reply.get_content())  # type: ignore[attr-defined]
