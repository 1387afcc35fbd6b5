"""The page outlives the daemon: it says that it is not connected, comes back by itself, and misses no event."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.dash_daemon import Daemon, daemon_at
from support.dash_page import Complaints, live, row, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, expect

# The page fails to reach a daemon that was killed: the browser reports each attempt.
REFUSED = "ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_EMPTY_RESPONSE|ERR_CONNECTION_RESET"


def _heard(page: Page) -> list[int]:
    ids: list[int] = page.evaluate("() => globalThis.heard")
    return ids


def test_a_daemon_that_is_killed_and_comes_back(
    new_page: Callable[..., Page], tmp_path: Path, complaints: Complaints
) -> None:
    """SIGKILL with the page open: shown as not connected, then live again; every event arrives once, in order."""
    complaints.expect(REFUSED)
    with daemon_at(tmp_path / "state") as daemon:
        page = new_page()
        page.goto(daemon.login_link)
        live(page)
        page.evaluate(
            """async () => {
                globalThis.heard = [];
                const root = document.querySelector('script[type=module]').src.replace(/app\\.js$/, '');
                const { onEvent } = await import(`${root}core/deck.js`);
                onEvent((event) => globalThis.heard.push(event.id));
            }"""
        )
        first = daemon.get("/deck")["last_event_id"]
        daemon.start("stays", worker("quiet"))
        daemon.start("bound", worker("quiet"), lifetime="bound")
        expect(row(page, "stays")).to_have_attribute("data-state", "running")
        pid = daemon.get("/workers/stays")["pid"]

        daemon.kill()
        expect(page.locator('.pill[data-standing="lost"]')).to_be_visible()
        expect(page.get_by_role("alert")).to_contain_text("Not connected")
        expect(row(page, "stays")).to_be_visible()

        daemon.up()
        daemon.start("fresh", worker("quiet"))
        live(page)
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(row(page, "fresh")).to_have_attribute("data-state", "running")
        expect(row(page, "stays")).to_contain_text("adopted")
        expect(row(page, "stays").locator(".c-pid")).to_have_text(str(pid))

        last = daemon.get("/deck")["last_event_id"]
        page.wait_for_function("last => globalThis.heard.at(-1) >= last", arg=last)
        heard = _heard(page)
        assert heard == list(range(first + 1, heard[-1] + 1))
        assert heard[-1] >= last


def test_the_worker_view_comes_back_too(new_page: Callable[..., Page], tmp_path: Path, complaints: Complaints) -> None:
    """A log that is being followed goes on after the daemon left and came back, without doubled lines."""
    complaints.expect(REFUSED)
    with daemon_at(tmp_path / "state") as daemon:
        daemon.start("alice", worker("colours"))
        page = new_page()
        page.goto(f"{daemon.login_link}")
        live(page)
        page.evaluate("location.hash = '#/workers/alice'")
        expect(page.get_by_role("log")).to_contain_text("orange")
        daemon.leave()
        expect(page.locator(".log-standing")).to_have_text("reconnecting")
        daemon.up()
        live(page)
        expect(page.locator(".log-standing")).to_have_text("following")
        with (daemon.state_dir / "workers" / "alice" / "data" / "more").open("w") as pipe:
            pipe.write("after the restart\n")
        expect(page.get_by_role("log")).to_contain_text("after the restart")
        expect(page.locator(".log-line", has_text="plain first line")).to_have_count(1)


def test_a_hidden_page_lets_go_of_its_connection(new_page: Callable[..., Page], daemon: Daemon) -> None:
    """Six connections per host is all a browser has: a page in the background closes its own after a while."""
    page = new_page()
    page.goto(daemon.login_link)
    live(page)
    page.clock.install()
    _become(page, "hidden")
    page.clock.run_for(25_000)
    expect(page.locator('.pill[data-standing="asleep"]')).to_be_visible()
    daemon.start("alice", worker("quiet"))
    _become(page, "visible")
    page.clock.resume()
    live(page)
    expect(row(page, "alice")).to_have_attribute("data-state", "running")


def _become(page: Page, visibility: str) -> None:
    page.evaluate(
        """value => {
            Object.defineProperty(document, 'visibilityState', { value, configurable: true });
            document.dispatchEvent(new Event('visibilitychange'));
        }""",
        visibility,
    )
