"""Nothing a worker says or is called is ever run or becomes markup."""

import pytest

from support.dash_daemon import Daemon
from support.dash_page import Complaints, row, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, expect

ATTACKS = (
    "<script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    '"><svg onload=window.pwned=1>',
    "javascript:window.pwned=1",
    "\x1b]8;;javascript:window.pwned=1\x07click\x1b]8;;\x07",
    "\x1b[31m</span><b id=injected>x",
    "${window.pwned=1}{{constructor.constructor('window.pwned=1')()}}",
)


def _unharmed(page: Page) -> None:
    assert page.evaluate("window.pwned") is None
    assert page.locator("#injected").count() == 0
    assert page.evaluate("document.querySelectorAll('#app script, #app img, #app iframe').length") == 0


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", 'a"b', "../../etc", "a b", "a\nb", "é"])
def test_names_are_refused_by_the_daemon(daemon: Daemon, name: str) -> None:
    """A name that could be markup or a path never gets into the deck."""
    answer = daemon.client.post("/workers", json={"name": name, "spec": {"command": ["true"]}})
    assert answer.status_code == 422
    assert answer.json()["field"] == "name"


def test_attacks_in_logs_status_and_environment(page: Page, daemon: Daemon) -> None:
    """Log lines, STATUS text, environment keys, labels and arguments are shown as they are, as text."""
    log = "\n".join(ATTACKS)
    daemon.start(
        "talks",
        worker("echo", log),
        env={"<script>pwned()</script>": "1"},
        labels={"template": ATTACKS[0]},
        secrets={"T": {"value": "v"}},
    )
    daemon.start("says", worker("status", ATTACKS[1]), health={"notify": True})
    expect(row(page, "says").locator(".c-line")).to_have_text(ATTACKS[1])
    expect(row(page, "talks")).to_contain_text(ATTACKS[0])
    page.get_by_role("button", name="Group by template").click()
    expect(page.locator(".group-row").first).to_contain_text("<script>")
    _unharmed(page)

    page.evaluate("location.hash = '#/workers/says'")
    expect(page.locator(".worker-standing")).to_contain_text(ATTACKS[1])
    _unharmed(page)

    page.evaluate("location.hash = '#/workers/talks'")
    paper = page.get_by_role("log")
    for attack in (ATTACKS[0], ATTACKS[1], "</span><b id=injected>x"):
        expect(paper).to_contain_text(attack)
    expect(paper.locator("a")).to_have_count(0)
    expect(page.get_by_role("region", name="Environment")).to_contain_text("<script>pwned()</script>")
    expect(page.get_by_role("region", name="Spec")).to_contain_text("window.pwned=1")
    _unharmed(page)


ADDRESSES = (
    "#/workers/%3Cimg%20src=x%20onerror=window.pwned=1%3E",
    "#/events?worker=%3Cscript%3E&kind=%22%3E",
    "#/%3Csvg%20onload=window.pwned=1%3E",
    "#/?q=%3Cimg%20src=x%20onerror=window.pwned=1%3E",
    "#/add?template=%3Cscript%3Ewindow.pwned=1%3C/script%3E",
)


def test_attacks_in_the_address(fresh_page: Page, daemon: Daemon, complaints: Complaints) -> None:
    """A crafted link shows its text and does nothing else."""
    complaints.expect("status of 4")
    for address in ADDRESSES:
        fresh_page.goto(f"{daemon.base}/{address}")
        expect(fresh_page.locator("h1, h2").first).to_be_visible()
        _unharmed(fresh_page)


def test_markup_from_text_is_impossible(fresh_page: Page, complaints: Complaints) -> None:
    """Trusted Types: even our own code could not turn a string into markup."""
    complaints.expect("TrustedHTML|trusted")
    refused = fresh_page.evaluate(
        """() => {
            try { document.createElement('div').innerHTML = '<b>x</b>'; return false; }
            catch (error) { return error instanceof TypeError; }
        }"""
    )
    assert refused
