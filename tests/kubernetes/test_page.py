"""``everdeck up kubernetes:NAMESPACE``: the API and the page over a cluster, in a real browser."""

from pathlib import Path

import pytest

from everdeck import Deck
from support.cluster_machines import until
from support.dash_browser import chromium
from support.dash_daemon import Daemon
from support.dash_page import Complaints, live, row

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")

PROGRAM = "import time\nfor n in range(10**9): print('line', n, flush=True); time.sleep(0.2)"


def test_the_page_lists_shows_the_log_stops_and_starts(namespace: str, deck: Deck, tmp_path: Path) -> None:
    """What a person does first, on a worker that runs in a pod."""
    deck.start("alice", ["python3", "-c", PROGRAM], labels={"team": "blue"})
    daemon = Daemon(tmp_path / "home", Path(f"kubernetes:{namespace}"))
    daemon.up()
    try:
        _as_a_person(daemon, deck)
    finally:
        daemon.leave()
    assert deck.status("alice").state == "running", "the daemon's end is nothing to the workers"


def _as_a_person(daemon: Daemon, deck: Deck) -> None:
    from playwright.sync_api import expect

    heard = Complaints()
    heard.expect("ERR_NETWORK_CHANGED")  # nodes come and go beside us, and a browser drops its connections then
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        heard.watch(page)
        page.goto(daemon.login_link)
        live(page)
        expect(row(page, "alice")).to_contain_text("running")

        page.evaluate("location.hash = '#/workers/alice'")
        expect(page.get_by_role("heading", name="alice", level=1)).to_be_visible()
        paper = page.get_by_role("log")
        expect(paper).to_contain_text("line 1")
        lines = paper.locator(".log-line").count()
        until(lambda: paper.locator(".log-line").count() > lines, "the log goes on")

        acts = page.locator("main")
        acts.get_by_role("button", name="Stop").first.click()
        page.get_by_role("dialog").get_by_role("button", name="Stop").click()
        until(lambda: deck.status("alice").state == "stopped", "it is stopped")
        page.evaluate("location.hash = '#/'")
        expect(row(page, "alice")).to_contain_text("stopped", timeout=60_000)
        page.evaluate("location.hash = '#/workers/alice'")
        acts.get_by_role("button", name="Start").first.click()
        until(lambda: deck.status("alice").state == "running", "it is started")
        page.evaluate("location.hash = '#/'")
        expect(row(page, "alice")).to_contain_text("running", timeout=60_000)
    assert not heard.unexpected(), "\n".join(heard.unexpected())


def test_the_api_keeps_the_verbs_of_the_cluster(namespace: str, deck: Deck, tmp_path: Path) -> None:
    """A program that knows the daemon's address and a token has the same deck."""
    deck.start("alice", ["python3", "-c", PROGRAM])
    daemon = Daemon(tmp_path / "home", Path(f"kubernetes:{namespace}"))
    daemon.up()
    try:
        with Deck(daemon.base, token=daemon.token) as remote:
            assert [one.state for one in remote.list()] == ["running"]
            assert "line 0" in remote.logs("alice", lines=1000)
            assert any("python3" in (one.command or "") for one in remote.inspect("alice").tree)
            assert "adopt" in remote.abilities().unsupported
            assert remote.stop("alice").state == "stopped"
            until(lambda: "stopped" in {event.kind for event in remote.events()}, "its events")
    finally:
        daemon.leave()
