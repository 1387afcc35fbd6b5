"""Whatever a worker, a stranger or somebody outside says is shown, and not carried out by a terminal."""

import asyncio
import os
from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from everdeck.cli import doctor, feed
from everdeck.deck import health
from everdeck.deck.strays import Stray
from everdeck.messages import FeedStatus, Letter
from everdeck.satellites import bridge

# A title, a line break, an 8-bit control, a mark that turns the direction of text.
HOSTILE = "a\x1b]0;owned\x07\nforged: line\x9b31m\u202egnp"


def _shown_safely(text: str) -> None:
    assert "owned" in text
    assert all(line.isprintable() for line in text.rstrip("\n").split("\n"))
    assert not any(line.startswith("forged") for line in text.split("\n"))


@pytest.mark.parametrize("whole", [False, True])
def test_what_came_in_by_a_satellite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, whole: bool
) -> None:
    """Account, error, sender, text and payload of the feed are strangers' words."""
    numbers = dict.fromkeys(("done", "waiting", "in_flight", "dead", "to_send", "unsent", "readers"), 1)
    status = FeedStatus(
        worker="alice", kind="gmail", account=HOSTILE, connection="failing", error=HOSTILE, since=None,
        last_contact_at=None, **numbers,
    )  # fmt: skip
    letter = Letter(
        number="1", direction="in", state="dead", id=HOSTILE, conversation=HOSTILE, sender=HOSTILE, subject=None,
        text=HOSTILE, attempts=3, error=HOSTILE, at=datetime.now(UTC), payload=HOSTILE,
    )  # fmt: skip
    monkeypatch.setattr(bridge, "feed_status", lambda *_: status)
    monkeypatch.setattr(bridge, "letters", lambda *_, **__: [letter])
    options = Namespace(name="alice", json=False, which="dead", verb_within="")
    if whole:
        feed._print_letters([letter], options, whole=True)
    else:
        feed._overview(options, feed._FileFeed(Path("nowhere"), "alice"))
    _shown_safely(capsys.readouterr().out)


def test_the_question_before_an_orphan_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line is its own."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "n")
    assert doctor._fix([Stray(1, "orphan", HOSTILE, "why", cookie="c", deck="/here")], "/here") == 0
    _shown_safely(asked[0])


def test_what_a_health_command_prints() -> None:
    """It becomes the reason in events, status and page."""
    command = ("sh", "-c", 'printf %s "$0"; exit 1', HOSTILE)
    reason = asyncio.run(health._ask_command(command, dict(os.environ), "/", 60, health._plainly))
    assert reason is not None
    _shown_safely(reason)
