"""A page of which not every file arrives, as when the network changes meanwhile, becomes whole by itself."""

from collections.abc import Callable

import pytest

from support.dash_daemon import Daemon
from support.dash_page import Complaints, live

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, Route, expect

FAILED = "ERR_NETWORK_CHANGED|ERR_FAILED|ERR_INTERNET_DISCONNECTED"


class Network:
    """Fails the first requests of an address."""

    def __init__(self, page: Page, pattern: str, times: int) -> None:
        self.failed = 0
        self._times = times
        page.route(pattern, self._answer)

    def _answer(self, route: Route) -> None:
        if self.failed < self._times:
            self.failed += 1
            route.abort("failed")
        else:
            route.continue_()


@pytest.mark.parametrize("missing", ["**/app.js", "**/core/api.js", "**/views/*.js", "**/api/v1/login"])
def test_what_does_not_arrive_is_asked_for_again(
    new_page: Callable[..., Page], daemon: Daemon, complaints: Complaints, missing: str
) -> None:
    """A module, or the login itself: the link still logs in."""
    complaints.expect(FAILED)
    page = new_page()
    network = Network(page, missing, times=2)
    page.goto(daemon.login_link)
    live(page)
    assert network.failed == 2
    assert daemon.token not in page.url


def test_a_style_sheet_comes_later(new_page: Callable[..., Page], daemon: Daemon, complaints: Complaints) -> None:
    """Without loading anything else anew, and in its place among the others."""
    complaints.expect(FAILED)
    page = new_page()
    Network(page, "**/theme/*.css", times=1)
    page.goto(daemon.login_link)
    live(page)
    whole = "() => [...document.querySelectorAll('link[rel=stylesheet]')].every((link) => link.sheet)"
    page.wait_for_function(whole)
    order = "() => [...document.querySelectorAll('link[rel=stylesheet]')].map((link) => link.href)"
    loaded = page.evaluate(order)
    page.reload()
    live(page)
    assert page.evaluate(order) == loaded


def test_a_page_that_never_arrives_says_so(
    new_page: Callable[..., Page], daemon: Daemon, complaints: Complaints
) -> None:
    """After some tries it stops trying, and says what else there is."""
    complaints.expect(FAILED)
    page = new_page()
    page.add_init_script("const later = setTimeout; setTimeout = (act, _) => later(act, 0)")
    Network(page, "**/app.js", times=100)
    page.goto(daemon.base)
    expect(page.get_by_role("status")).to_contain_text("could not be loaded")
