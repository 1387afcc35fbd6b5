"""What the page says when things are not as they should be: not supervised, not readable, slow."""

import json
from collections.abc import Callable

import pytest

from support.dash_daemon import Daemon
from support.dash_page import Complaints, live, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, Route, expect


def test_connected_and_supervised_are_two_facts(new_page: Callable[..., Page], daemon: Daemon) -> None:
    """A daemon that answers but owns nothing is said to supervise nothing."""
    daemon.start("alice", worker("quiet"))

    def unowned(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=json.dumps({**answer.json(), "supervised": False, "owner_pid": None}))

    page = new_page()
    page.route("**/api/v1/deck", unowned)
    page.goto(daemon.login_link)
    expect(page.locator('.pill[data-standing="unsupervised"]')).to_have_text("Not supervisedNo owner")
    expect(page.get_by_role("alert")).to_contain_text("no process owns this deck")
    expect(page.locator('.worker-row[data-worker="alice"]')).to_be_visible()


def test_a_deck_that_cannot_be_read_says_why_and_is_tried_again(
    new_page: Callable[..., Page], daemon: Daemon, complaints: Complaints
) -> None:
    """The daemon's reason is shown, and the button leads on once the cause is gone."""
    complaints.expect("status of 503")
    page = new_page()
    problem = {"type": "urn:everdeck:registry-unavailable", "title": "Service Unavailable", "status": 503}
    page.route(
        "**/api/v1/workers?*",
        lambda route: route.fulfill(
            status=503,
            content_type="application/problem+json",
            body=json.dumps({**problem, "detail": "the disk is full"}),
        ),
    )
    page.goto(daemon.login_link)
    expect(page.get_by_role("heading", name="The deck cannot be read")).to_be_visible()
    expect(page.locator(".state-page")).to_contain_text("the disk is full")
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="No workers yet")).to_be_visible()
    live(page)


def test_while_the_deck_is_being_read_its_shape_is_shown(new_page: Callable[..., Page], daemon: Daemon) -> None:
    """A slow answer leaves no blank page and no empty-deck message."""
    held: list[Route] = []
    page = new_page()
    page.route("**/api/v1/workers?*", lambda route: held.append(route))  # noqa: PLW0108 - it must be a function
    page.goto(daemon.login_link)
    expect(page.get_by_role("status", name="Reading the deck")).to_be_visible()
    expect(page.get_by_text("No workers yet")).to_have_count(0)
    page.wait_for_function("() => performance.getEntriesByName(location.origin + '/api/v1/deck').length > 0")
    page.unroute_all()  # lets go of what is held
    expect(page.get_by_role("heading", name="No workers yet")).to_be_visible()
