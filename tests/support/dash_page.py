"""Words that tests of the page share: a worker's row, a page that is live, the command of a test worker."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from support import waiting

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Locator, Page

DEADLINE_MS = max(30_000.0, waiting.SECONDS * 500)  # a browser beside a cluster needs more of it
WORKER = str(Path(__file__).with_name("dash_worker.py"))


def worker(kind: str, *arguments: str) -> list[str]:
    """The command of a test worker (see dash_worker.py)."""
    return [sys.executable, WORKER, kind, *arguments]


def live(page: "Page") -> None:
    """Wait until the page follows the daemon."""
    try:
        page.locator('.pill[data-standing="live"]').wait_for(timeout=DEADLINE_MS)
    except Exception as error:
        shown = page.locator("body").inner_text()
        raise AssertionError(f"the page does not follow; it shows: {shown[:600]}") from error


def row(page: "Page", name: str) -> "Locator":
    """The row of a worker."""
    return page.locator(f'.worker-row[data-worker="{name}"]')


class Complaints:
    """What went wrong inside the page."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.expected: list[str] = []

    def expect(self, pattern: str) -> None:
        """This test provokes errors that match."""
        self.expected.append(pattern)

    def expect_removal(self, name: str) -> None:
        """This test removes the worker while the page may be asking about it."""
        self.expect(rf"status of 404 .*/api/v1/workers/{name}")

    def watch(self, page: "Page") -> None:
        """Hear this page."""
        page.on("pageerror", self._exception)
        page.on("console", self._message)

    def leave(self, page: "Page") -> None:
        """Hear it no more."""
        page.remove_listener("pageerror", self._exception)
        page.remove_listener("console", self._message)

    def unexpected(self) -> list[str]:
        """Those no test asked for."""
        return [text for text in self.seen if not any(re.search(pattern, text) for pattern in self.expected)]

    def _exception(self, error: object) -> None:
        self.seen.append(f"exception: {error}")

    def _message(self, message: "ConsoleMessage") -> None:
        if message.type == "error":
            self.seen.append(f"{message.text} ({urlsplit(message.location['url']).path})")
