"""axe-core finds nothing serious, in any view, light and dark, on a desktop and a phone; motion can be turned off."""

from pathlib import Path
from typing import Any, Literal

import pytest

from support.dash_daemon import Daemon
from support.dash_page import live, row, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, ViewportSize, expect

DESKTOP: ViewportSize = {"width": 1440, "height": 900}
PHONE: ViewportSize = {"width": 360, "height": 740}
# Colours are the same at every size, so the dark ones are looked at once.
CASES = [("light", (DESKTOP, PHONE)), ("dark", (DESKTOP,))]
AXE = Path(__file__).parent / "vendor" / "axe.min.js"


def _findings(page: Page) -> list[str]:
    """Serious and critical findings, with the elements they were found at."""
    # Into the page's own world by the debugger, not by the document: the page's policy stays as it is.
    page.evaluate(AXE.read_text() + "; undefined")
    result: dict[str, Any] = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{found['impact']}: {found['id']}: {found['help']}: {node['target']}: {node['failureSummary']}"
        for found in result["violations"]
        if found["impact"] in {"serious", "critical"}
        for node in found["nodes"][:5]
    ]


@pytest.mark.parametrize(("scheme", "sizes"), CASES, ids=["light", "dark"])
def test_axe_finds_nothing_serious(
    fresh_page: Page, daemon: Daemon, scheme: Literal["light", "dark"], sizes: tuple[ViewportSize, ...]
) -> None:
    """Every view and the dialogs, with workers in every state."""
    daemon.start("alice", worker("colours"), lifetime="bound", env={"A": "1"}, secrets={"T": {"value": "v"}})
    daemon.start("says", worker("status", "waiting"), health={"notify": True})
    daemon.start("failed", worker("crash"), restart={"max_crashes": 0})
    daemon.start("backoff", worker("crash"), restart={"backoff_seconds": 50, "max_crashes": 20})
    daemon.start("stopped", worker("quiet"))
    daemon.post("/workers/stopped/stop")
    fresh_page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    expect(row(fresh_page, "failed")).to_have_attribute("data-state", "failed")
    row(fresh_page, "alice").get_by_role("checkbox").check()
    found: list[str] = []
    for size in sizes:
        fresh_page.set_viewport_size(size)
        found += _findings(fresh_page)
        assert fresh_page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            f"the deck scrolls sideways at {size}"
        )
    fresh_page.set_viewport_size(DESKTOP)
    row(fresh_page, "alice").get_by_role("button", name="Remove alice").click()
    found += _findings(fresh_page)
    fresh_page.keyboard.press("Escape")
    fresh_page.keyboard.press("?")
    found += _findings(fresh_page)
    fresh_page.keyboard.press("Escape")

    for address, ready in (
        ("#/workers/alice", ".log-line"),
        ("#/workers/failed", ".restarts-next"),
        ("#/events", ".event-list .event"),
        ("#/add", ".add-form"),
        ("#/?q=nobody-has-this-name", ".state-page"),
    ):
        fresh_page.evaluate("address => { location.hash = address; }", address)
        fresh_page.locator(ready).first.wait_for()
        for size in sizes:
            fresh_page.set_viewport_size(size)
            found += [f"{address}: {finding}" for finding in _findings(fresh_page)]
            assert fresh_page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                f"{address} scrolls sideways at {size}"
            )
        fresh_page.set_viewport_size(DESKTOP)
    assert not found, "\n".join(found)


def test_motion_can_be_turned_off(fresh_page: Page, daemon: Daemon) -> None:
    """With reduced motion nothing is animated."""
    daemon.start("backoff", worker("crash"), restart={"backoff_seconds": 50, "max_crashes": 20})
    phase = row(fresh_page, "backoff").locator(".phase")
    expect(row(fresh_page, "backoff")).to_have_attribute("data-state", "backoff")
    expect(phase).not_to_have_css("animation-name", "none")
    fresh_page.emulate_media(reduced_motion="reduce")
    expect(phase).to_have_css("animation-name", "none")


def test_the_theme_is_chosen_and_remembered(fresh_page: Page, daemon: Daemon) -> None:
    """Light and dark can be forced, and survive a reload."""
    fresh_page.emulate_media(color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = fresh_page.evaluate(ground)
    fresh_page.get_by_role("button", name="Theme: auto").click()
    fresh_page.get_by_role("button", name="Theme: light").click()
    expect(fresh_page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = fresh_page.evaluate(ground)
    assert dark != light
    fresh_page.reload()
    live(fresh_page)
    assert fresh_page.evaluate(ground) == dark
    fresh_page.get_by_role("button", name="Theme: dark").click()
    assert fresh_page.evaluate(ground) == light
