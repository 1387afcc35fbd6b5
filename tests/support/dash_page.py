"""Words that tests of the page share: a worker's row, a page that is live, the command of a test worker."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

DEADLINE_MS = 30_000
WORKER = str(Path(__file__).with_name("dash_worker.py"))


def worker(kind: str, *arguments: str) -> list[str]:
    """The command of a test worker (see dash_worker.py)."""
    return [sys.executable, WORKER, kind, *arguments]


def live(page: "Page") -> None:
    """Wait until the page follows the daemon."""
    page.locator('.pill[data-standing="live"]').wait_for(timeout=DEADLINE_MS)


def row(page: "Page", name: str) -> "Locator":
    """The row of a worker."""
    return page.locator(f'.worker-row[data-worker="{name}"]')
