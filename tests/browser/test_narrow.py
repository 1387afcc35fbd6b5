"""No view scrolls sideways on a small phone, whatever font the machine has."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.dash_daemon import Daemon, daemon_at
from support.dash_page import Complaints, live, row, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, expect

WIDTHS = (320, 360, 390)
# The page's own stack, which on a machine with DejaVu alone is already wide, and the widest font in common use.
FONTS = {"own": None, "wide": '"DejaVu Sans Mono", "Courier New", monospace'}
LONG = "customer-4711-with-a-name-that-was-chosen-by-somebody-who-never-saw-a-phone@example.org"

OFFENDERS = """() => {
    const wide = document.documentElement.scrollWidth;
    if (wide <= innerWidth) return [];
    return [`the page is ${wide} px wide`, ...[...document.querySelectorAll('body *')]
        .filter((element) => element.getBoundingClientRect().right > innerWidth + 1 && !element.closest('.unseen'))
        .map((element) => `${element.tagName}.${element.className}`)
        .slice(0, 12)];
}"""


@pytest.mark.parametrize("font", FONTS)
def test_no_view_scrolls_sideways(
    font: str, new_page: Callable[..., Page], daemon: Daemon, complaints: Complaints
) -> None:
    """The deck, a running and a failed worker, events, the form with everything open, help, and the login."""
    complaints.expect("401")
    daemon.start(LONG, worker("echo", "x" * 300), lifetime="bound", env={"A_LONG_VARIABLE_NAME_" * 3: "1"})
    daemon.start("failed", worker("crash"), restart={"max_crashes": 0})
    page = new_page(viewport={"width": WIDTHS[0], "height": 700})

    def set_font() -> None:
        page.evaluate(
            "font => font && document.documentElement.style.setProperty('--font', font)",
            FONTS[font],
        )

    found: list[str] = []

    def look(what: str) -> None:
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 700})
            found.extend(f"{what} at {width}: {offender}" for offender in page.evaluate(OFFENDERS))
        page.set_viewport_size({"width": WIDTHS[0], "height": 700})

    page.goto(daemon.base)
    page.get_by_label("Token").wait_for()
    set_font()
    look("login")
    page.goto(daemon.login_link)
    live(page)
    set_font()
    row(page, LONG).get_by_role("checkbox").check()
    expect(row(page, "failed")).to_have_attribute("data-state", "failed")
    look("deck")
    for address, ready in (
        (f"#/workers/{LONG}", ".log-line"),
        ("#/workers/failed", ".restarts-next"),
        ("#/events", ".event-list .event"),
        ("#/add", ".add-form"),
    ):
        page.evaluate("address => { location.hash = address; }", address)
        page.locator(ready).first.wait_for()
        if address == "#/add":
            page.locator(".segment", has_text="A command").click()
            page.get_by_text("Policies, health and limits").click()
        look(address)
    page.get_by_role("button", name="Help").click()
    look("help")
    assert not found, "\n".join(found)


def test_log_out_and_help_are_reached_by_thumb(new_page: Callable[..., Page], daemon: Daemon) -> None:
    """On a phone there is no keyboard to type ? on."""
    page = new_page(viewport={"width": 360, "height": 700}, has_touch=True)
    page.goto(daemon.login_link)
    live(page)
    page.get_by_role("button", name="Help").tap()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Theme").tap()
    dialog.get_by_role("button", name="Log out", exact=True).tap()
    page.get_by_label("Token").wait_for()


def test_the_pill_fits_when_the_daemon_is_gone(
    new_page: Callable[..., Page], tmp_path: Path, complaints: Complaints
) -> None:
    """At 320 px everything in the top bar is still there and inside."""
    complaints.expect("ERR_")
    page = new_page(viewport={"width": 320, "height": 700})
    with daemon_at(tmp_path / "state") as daemon:
        page.goto(daemon.login_link)
        live(page)
        daemon.leave()
    page.locator('.pill[data-standing="lost"]').wait_for()
    assert page.evaluate(OFFENDERS) == []
    box = page.locator(".pill").bounding_box()
    assert box is not None
    assert box["width"] > 40
    assert page.locator(".top-bar a, .top-bar button").evaluate_all(
        "all => all.every(one => one.getBoundingClientRect().right <= innerWidth)"
    )
