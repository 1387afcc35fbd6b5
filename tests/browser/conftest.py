"""Real headless Chromium against real daemons.

A test gets a ``page`` that is logged in at ``daemon``. Whatever the page prints as an error, every exception in it and
every violation of its Content-Security-Policy fails the test that caused it, unless the test says that it expects it.
"""

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from support.dash_browser import chromium
from support.dash_daemon import Daemon, daemon_at
from support.dash_page import DEADLINE_MS, WORKER, Complaints, live

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

TEMPLATES = f"""
[template.echo]
command = [{sys.executable!r}, {WORKER!r}, "echo", "from a template"]

[template.quiet]
command = [{sys.executable!r}, {WORKER!r}, "quiet"]
"""


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """One Chromium for each file, with an empty profile.

    Not for the session: Playwright's synchronous interface keeps an event loop running in this thread for as long as it
    is open, and the tests of other folders that follow in the same process could not call ``asyncio.run``.
    """
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for tests that leave no worker behind."""
    folder = tmp_path_factory.mktemp("deck")
    config = folder / "deck.toml"
    config.write_text(TEMPLATES)
    with daemon_at(folder / "state", config) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The shared daemon; its deck is empty before and after the test."""
    yield shared_daemon
    shared_daemon.post("/bulk", {"verb": "remove", "names": "all"})


@pytest.fixture
def complaints() -> Iterator[Complaints]:
    """Fails the test at its end if the page complained."""
    heard = Complaints()
    yield heard
    assert not heard.unexpected(), "the page complained:\n" + "\n".join(heard.unexpected())


@pytest.fixture
def new_page(browser: "Browser", complaints: Complaints) -> Iterator[Callable[..., "Page"]]:
    """Makes pages, each in a profile of its own, not logged in."""
    contexts: list[BrowserContext] = []

    def make(**options: Any) -> "Page":
        options.setdefault("viewport", {"width": 1440, "height": 900})
        context = browser.new_context(**options)
        context.set_default_timeout(DEADLINE_MS)
        contexts.append(context)
        page = context.new_page()
        complaints.watch(page)
        return page

    yield make
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def profile(browser: "Browser", shared_daemon: Daemon) -> Iterator["BrowserContext"]:
    """One profile that came in by the login link; its cache is warm after the first page, as a user's is."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(DEADLINE_MS)
    page = context.new_page()
    page.goto(shared_daemon.login_link)
    live(page)
    page.close()
    yield context
    context.close()


@pytest.fixture
def fresh_page(profile: "BrowserContext", daemon: Daemon, complaints: Complaints) -> Iterator["Page"]:
    """A page of its own that is logged in and shows the deck."""
    page = profile.new_page()
    complaints.watch(page)
    page.goto(daemon.base)
    live(page)
    yield page
    page.close()


@pytest.fixture(scope="module")
def kept_page(profile: "BrowserContext", shared_daemon: Daemon) -> Iterator["Page"]:
    """A page that is kept open, as people keep it; loading it anew is a third of a short test's time."""
    page = profile.new_page()
    page.goto(shared_daemon.base)
    yield page
    page.close()


@pytest.fixture
def page(kept_page: "Page", daemon: Daemon, complaints: Complaints) -> Iterator["Page"]:
    """The kept page, showing the deck with nothing selected and no notice."""
    complaints.watch(kept_page)
    live(kept_page)
    yield kept_page
    complaints.leave(kept_page)
    kept_page.keyboard.press("Escape")
    kept_page.evaluate("location.hash = '#/leaving'")
    kept_page.get_by_role("heading", name="Nothing here").wait_for()
    kept_page.evaluate("document.querySelectorAll('.toast [aria-label=Dismiss]').forEach(button => button.click())")
    kept_page.locator(".toast").first.wait_for(state="detached")
    kept_page.evaluate("location.hash = '#/'")
