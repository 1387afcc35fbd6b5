"""Login by token: the link, the form, and what a stranger sees."""

from collections.abc import Callable

import httpx
import pytest

from support.dash_daemon import Daemon
from support.dash_page import Complaints, live, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, expect


def test_without_a_token_there_is_a_form_and_no_data(
    new_page: Callable[..., Page], daemon: Daemon, complaints: Complaints
) -> None:
    """A stranger sees the form; a wrong token is refused at its field; the right one opens the deck."""
    complaints.expect("401")
    daemon.start("alice", worker("quiet"))
    page = new_page()
    page.goto(daemon.base)
    expect(page.get_by_role("heading", name="Everdeck")).to_be_visible()
    assert "alice" not in page.content()
    field = page.get_by_label("Token")
    expect(field).to_be_focused()
    field.fill("not the token")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("does not know this token")
    expect(field).to_have_attribute("aria-invalid", "true")
    field.fill(daemon.token)
    page.get_by_role("button", name="Log in").click()
    live(page)
    expect(page.locator('.worker-row[data-worker="alice"]')).to_be_visible()


def test_the_link_logs_in_and_leaves_no_token_behind(new_page: Callable[..., Page], daemon: Daemon) -> None:
    """After the link the address holds no token, and neither the page's script nor its storage can read it."""
    page = new_page()
    page.goto(daemon.login_link)
    live(page)
    assert daemon.token not in page.url
    assert daemon.token not in page.evaluate("JSON.stringify(localStorage) + JSON.stringify(sessionStorage)")
    assert page.context.cookies() == []


def test_a_session_that_ends_leads_to_the_form(
    new_page: Callable[..., Page], daemon: Daemon, complaints: Complaints
) -> None:
    """When the daemon no longer knows the session, the page asks for the token instead of showing old data."""
    complaints.expect("401")
    page = new_page()
    page.goto(daemon.login_link)
    live(page)
    page.evaluate("localStorage.removeItem('everdeck-session')")
    page.get_by_role("link", name="Events").click()
    expect(page.get_by_label("Token")).to_be_visible()


def test_logging_out(new_page: Callable[..., Page], daemon: Daemon, complaints: Complaints) -> None:
    """The way out is under the keyboard help; afterwards this browser is a stranger again."""
    complaints.expect("401")
    page = new_page()
    page.goto(daemon.login_link)
    live(page)
    page.get_by_role("button", name="Help and log out").click()
    expect(page.get_by_role("dialog", name="Keyboard")).to_contain_text(str(daemon.pid))
    session = page.evaluate("localStorage.getItem('everdeck-session')")
    page.get_by_role("button", name="Log out", exact=True).click()
    expect(page.get_by_label("Token")).to_be_visible()
    # A copy that somebody made is worth nothing either.
    refused = httpx.get(f"{daemon.base}/api/v1/workers", headers={"Authorization": f"Bearer {session}"})
    assert refused.status_code == 401
    page.reload()
    expect(page.get_by_label("Token")).to_be_visible()


def test_the_page_forbids_everything_it_does_not_need(daemon: Daemon) -> None:
    """The policy allows no inline script or style, no other host, no frame, and no markup made from text."""
    answer = httpx.get(f"{daemon.base}/")
    policy = answer.headers.get_list("content-security-policy")
    assert len(policy) == 1
    rules = dict(rule.strip().split(" ", 1) for rule in policy[0].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == "'self'"
    assert rules["style-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["../__init__.py", "..%2f__init__.py", "%2e%2e/__init__.py", "vendor/VERSIONS", "core", ""]
)
def test_static_serves_only_the_pages_own_files(daemon: Daemon, path: str) -> None:
    """Neither a path that climbs out, nor a folder, nor a file that is not part of the page is served."""
    answer = httpx.get(f"{daemon.base}/static/x/{path}")
    assert answer.status_code in {400, 401, 404}
    assert "create_dashboard_routes" not in answer.text
