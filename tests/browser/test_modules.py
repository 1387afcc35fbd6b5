"""The page's pure modules, asked directly inside the browser, and the vendored files against their record."""

import hashlib
import shlex
from pathlib import Path
from typing import Any

import pytest

from everdeck.server import dashboard
from support.wordings import WORDINGS

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page

STATIC = Path(dashboard.__file__).parent / "static"


def _call(page: Page, module: str, name: str, *arguments: Any) -> Any:
    return page.evaluate(
        """async ([module, name, given]) => {
            const root = document.querySelector('script[type=module]').src.replace(/app\\.js$/, '');
            return (await import(root + module))[name](...given);
        }""",
        [module, name, list(arguments)],
    )


def test_colours_of_terminals(page: Page) -> None:
    """SGR is understood, everything else that escapes is dropped, text is never lost."""
    runs = _call(page, "widgets/ansi.js", "runs", "a\x1b[1;31mb\x1b[0mc\x1b[38;5;208md\x1b[38;2;1;2;3me\x1b[mf")
    assert "".join(run["text"] for run in runs) == "abcdef"
    assert runs[1]["style"] == {"bold": True, "fg": 1}
    assert runs[2]["style"] is None
    assert runs[3]["style"] == {"fg": "rgb(255 135 0)"}
    assert runs[4]["style"] == {"fg": "rgb(1 2 3)"}
    for text in (
        "\x1b[2J\x1b[Hx",
        "\x1b]0;title\x07x",
        "\x1b]8;;http://a\x1b\\x\x1b]8;;\x1b\\",
        "\x1b[999;999;m\x1b[38;5mx",
        "\x1bx"[:1] + "x",
    ):
        assert _call(page, "widgets/ansi.js", "plain", text) == "x", repr(text)


@pytest.mark.parametrize(
    "line", ["python3 bot.py", "a 'b c' \"d e\" f\\ g", "''", "a\"b\"'c'", 'x "\\"" \'\\\'', "  spaced   out  "]
)
def test_a_command_line_becomes_the_words_a_shell_would_make(page: Page, line: str) -> None:
    """Quotes and backslashes as in a POSIX shell."""
    assert _call(page, "widgets/words.js", "split", line) == {"words": shlex.split(line), "open": False}


def test_an_open_quote_is_seen(page: Page) -> None:
    """So that the form can say it before the daemon would."""
    assert _call(page, "widgets/words.js", "split", "a 'b")["open"] is True


@pytest.mark.parametrize(("told", "words"), WORDINGS)
def test_an_event_is_told_as_everywhere(page: Page, told: dict[str, object], words: str) -> None:
    """The page has its own copy of the rules of ``everdeck.wording``; this table holds both."""
    assert _call(page, "core/format.js", "detail", {"detail": told}) == words


def test_an_end_that_was_asked_for_is_not_bad(page: Page) -> None:
    """SIGTERM of a stop is calm, of a stranger it is bad."""
    killed = {"kind": "killed", "signal": 15}
    assert _call(page, "core/format.js", "exit", killed, True) == {"text": "SIGTERM", "tone": "calm"}
    assert _call(page, "core/format.js", "exit", killed) == {"text": "SIGTERM", "tone": "bad"}


def test_what_an_event_makes_of_a_row(page: Page) -> None:
    """The forecast of a row, until the daemon confirms it."""
    row = {"name": "a", "state": "running", "pid": 7, "restarts": 1, "crashes": 0, "adopted": True, "rss_bytes": 5}
    at = "2026-01-01T00:00:00Z"

    def after(kind: str, **detail: Any) -> Any:
        return _call(page, "core/fold.js", "statusAfter", row, {"kind": kind, "at": at, "detail": detail})

    crashed = after("crashed", delay_seconds=4, exit={"kind": "exited", "code": 3})
    assert (crashed["state"], crashed["pid"], crashed["crashes"]) == ("backoff", None, 1)
    assert crashed["backoff_until"] == "2026-01-01T00:00:04.000Z"
    assert crashed["exit"] == {"kind": "exited", "code": 3}
    restarted = after("restarted", pid=9)
    assert (restarted["state"], restarted["pid"], restarted["restarts"], restarted["adopted"]) == (
        "running",
        9,
        2,
        False,
    )
    assert after("log-rotated") == row


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("duration", [3], "3s"),
        ("duration", [61], "1m 1s"),
        ("duration", [90_000], "1d 1h"),
        ("duration", [None], "–"),
        ("bytes", [12_600_000], "13 MB"),
        ("bytes", [2_500_000_000], "2.5 GB"),
        ("percent", [0.24], "0.2%"),
        ("ago", [0, 1000], "just now"),
        ("ago", [0, 7_200_000], "2h ago"),
        ("ago", [5000, 0], "in 5s"),
    ],
)
def test_values_as_people_read_them(page: Page, name: str, given: list[Any], text: str) -> None:
    """Short, and never more precise than useful."""
    assert _call(page, "core/format.js", name, *given) == text


def test_vendored_files_are_what_the_record_says() -> None:
    """Every vendored file is listed with version, licence and checksum, and every licence is there."""
    vendor = STATIC / "vendor"
    listed: set[str] = set()
    for line in (vendor / "VERSIONS").read_text().splitlines():
        if line.startswith("#"):
            continue
        package, _version, _licence, name, checksum = line.split()[:5]
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == checksum, name
        assert (vendor / f"LICENSE.{package}").is_file()
        listed.add(name)
    present = {file.name for file in vendor.iterdir() if not file.name.startswith("LICENSE")} - {"VERSIONS"}
    assert present == listed


def test_nothing_points_to_another_host() -> None:
    """No address of another host in anything the browser loads, vendored comments and XML names aside."""
    for file in STATIC.rglob("*"):
        if file.suffix in {".js", ".css", ".mjs", ".svg"} and file.parent.name != "vendor":
            text = file.read_text().replace("http://www.w3.org/2000/svg", "").replace("http://127.0.0.1:$PORT", "")
            assert "http://" not in text, file
            assert "https://" not in text, file
