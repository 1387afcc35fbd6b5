"""The real Chromium that tests of the page drive, with an empty profile."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from support.dash_page import DEADLINE_MS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = os.environ.get("EVERDECK_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def chromium() -> Iterator["Browser"]:
    """One browser; the test is skipped, with the reason, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    sync_api.expect.set_options(timeout=DEADLINE_MS)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()
