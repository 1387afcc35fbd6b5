"""What people type: start --satellite, send, feed NAME; and the daemon's file with ``satellite = "…"``."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everdeck.testing.telegram import TelegramServer


def typed(state: Path, *words: str, stdin: str = "", cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """One command of a person."""
    return subprocess.run(
        [sys.executable, "-m", "everdeck.cli", "--state", str(state), *words],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
    )


def waited(fact: Callable[[], object], what: str) -> None:
    """Until it is so."""
    deadline = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextmanager
def daemon(state: Path, *words: str, cwd: Path | None = None) -> Iterator[None]:
    """``everdeck up`` until the end of the block."""
    up = typed(state, "up", "--detach", *words, cwd=cwd)
    assert up.returncode == 0, up.stderr
    try:
        yield
    finally:
        typed(state, "down", "--workers")


def test_a_satellite_from_the_command_line(state: Path, bot: TelegramServer, tmp_path: Path) -> None:
    """Started with a token's file, sent by, looked at; the token is nowhere to be seen."""
    token = tmp_path / "token"
    token.write_text(f"{bot.token}\n")
    with daemon(state):
        missing = typed(state, "start", "bob", "--satellite", "telegram")
        assert missing.returncode == 2
        assert "TOKEN" in missing.stderr
        unknown = typed(state, "start", "bob", "--satellite", "pigeon")
        assert (unknown.returncode, "telegram" in unknown.stderr) == (2, True)
        base = ("--option", f"base_url={bot.url}", "--option", "first_run=take")
        started = typed(state, "start", "bob", "--satellite", "telegram", "--secret", f"TOKEN={token}", *base)
        assert started.returncode == 0, started.stderr
        sent = typed(state, "send", "bob", "--to", "42", "good morning")
        assert "out-1" in sent.stdout
        assert typed(state, "send", "bob", "--to", "43", "-", stdin="from a pipe\n").returncode == 0
        waited(lambda: len(bot.calls("sendMessage")) == 2, "both were sent")
        bot.say("hello", chat_id=5)
        waited(lambda: _feed(state)["waiting"] == 1, "the message is in the feed")
        shown = typed(state, "feed", "bob", "list", "--which", "waiting")
        assert "hello" in shown.stdout
        people = typed(state, "feed", "bob")
        assert "connected" in people.stdout
        assert "1 waiting" in people.stdout
        inspected = typed(state, "inspect", "bob", "--json").stdout
        secret = bot.token.partition(":")[2]
        for text in (inspected, people.stdout, typed(state, "ps", "--json").stdout, typed(state, "events").stdout):
            assert secret not in text
        assert json.loads(inspected)["spec"]["satellite"]["kind"] == "telegram"
        assert typed(state, "send", "bob", "--to", "", "x").returncode == 2
        wrong = typed(state, "send", "bod", "--to", "1", "x")
        assert (wrong.returncode, "bob" in wrong.stderr) == (1, True)


def test_what_was_set_aside_is_retried_dropped_and_replayed(state: Path, bot: TelegramServer, tmp_path: Path) -> None:
    """The numbers that ``list`` shows are what the other verbs take; wrong ones are refused by name."""
    (tmp_path / "token").write_text(bot.token)
    (tmp_path / "mybot.py").write_text(
        "def handle(message):\n    if message.text == 'bad':\n        raise ValueError('no')\n"
    )
    base = ("--option", f"base_url={bot.url}", "--option", "first_run=take", "--to", "mybot:handle")
    with daemon(state):
        words = ("start", "bob", "--satellite", "telegram", "--secret", f"TOKEN={tmp_path}/token", *base)
        started = typed(state, *words, cwd=tmp_path)
        assert started.returncode == 0, started.stderr
        bot.say("good")
        bot.say("bad", chat_id=2)
        waited(lambda: _feed(state)["dead"] == 1 and _feed(state)["done"] == 1, "one done, one dead")
        (letter,) = _feed(state)["letters"]
        assert (letter["text"], letter["error"]) == ("bad", "ValueError: no")
        shown = typed(state, "feed", "bob", "show", letter["number"])
        assert "ValueError: no" in shown.stdout
        assert "to be tried again" in typed(state, "feed", "bob", "retry", letter["number"]).stdout
        waited(lambda: _feed(state)["dead"] == 1, "it failed again")
        assert "dropped" in typed(state, "feed", "bob", "drop", "--all").stdout
        gone = typed(state, "feed", "bob", "drop", letter["number"])
        assert gone.returncode == 1
        assert typed(state, "feed", "bob", "drop").returncode == 2
        done = json.loads(typed(state, "feed", "bob", "list", "--which", "done", "--json").stdout)
        assert done["text"] == "good"
        assert "handled again" in typed(state, "feed", "bob", "replay", done["number"]).stdout
        waited(lambda: _feed(state)["done"] == 2, "it was handled again")


def test_a_file_starts_a_satellite(state: Path, bot: TelegramServer, tmp_path: Path) -> None:
    """``satellite = "telegram"`` in everdeck.toml; the function is found beside the file."""
    (tmp_path / "bob.token").write_text(bot.token)
    (tmp_path / "mybot.py").write_text("def handle(message):\n    return f're: {message.text}'\n")
    (tmp_path / "everdeck.toml").write_text(
        "[worker.bob]\n"
        f'satellite = {{ kind = "telegram", base_url = "{bot.url}", first_run = "take" }}\n'
        'to = "mybot:handle"\n'
        'secrets = { TOKEN = "bob.token" }\n'
    )
    bot.say("hello")
    with daemon(state, str(tmp_path / "everdeck.toml"), "--no-http"):
        waited(lambda: [call.params["text"] for call in bot.calls("sendMessage")] == ["re: hello"], "the answer")


@pytest.mark.parametrize("words", [("send", "--help"), ("feed", "--help"), ("start", "--help")])
def test_the_help_names_what_there_is(state: Path, words: tuple[str, ...]) -> None:
    """Kinds, targets and examples are in the help."""
    text = typed(state, *words).stdout
    assert "examples:" in text
    assert "satellite" in text


def _feed(state: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(typed(state, "feed", "bob", "--json").stdout)
    return found
