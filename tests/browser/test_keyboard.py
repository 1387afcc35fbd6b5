"""The whole page by keyboard alone."""

import shlex

import pytest

from support.dash_daemon import Daemon
from support.dash_page import Complaints, row, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, expect


def _focused(page: Page) -> str:
    name: str = page.evaluate("document.activeElement?.dataset.worker ?? ''")
    return name


def test_moving_and_acting(page: Page, daemon: Daemon) -> None:
    """J k move, x stops after a question, s starts, r restarts, Space selects, Enter opens, Escape leaves."""
    for name in ("ann", "ben", "cid"):
        daemon.start(name, worker("quiet"))
    expect(page.locator(".worker-row")).to_have_count(3)
    keys = page.keyboard
    keys.press("j")
    expect(row(page, "ann")).to_be_focused()
    keys.press("j")
    expect(row(page, "ben")).to_be_focused()
    keys.press("ArrowDown")
    expect(row(page, "cid")).to_be_focused()
    keys.press("k")
    expect(row(page, "ben")).to_be_focused()

    keys.press("x")
    expect(page.get_by_role("dialog").get_by_role("button", name="Stop")).to_be_focused()
    keys.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(row(page, "ben")).to_be_focused()
    assert daemon.state("ben") == "running"
    keys.press("x")
    expect(page.get_by_role("dialog").get_by_role("button", name="Stop")).to_be_focused()
    keys.press("Enter")
    expect(row(page, "ben")).to_have_attribute("data-state", "stopped")
    expect(row(page, "ben")).to_be_focused()
    keys.press("s")
    expect(row(page, "ben")).to_have_attribute("data-state", "running")
    before = daemon.get("/workers/ben")["pid"]
    keys.press("r")
    expect(row(page, "ben").locator(".c-pid")).not_to_have_text(str(before))

    keys.press("Space")
    expect(row(page, "ben")).to_have_attribute("aria-selected", "true")
    keys.press("a")
    expect(page.locator(".bulk-count")).to_have_text("3 workers selected")
    keys.press("a")
    keys.press("Enter")
    expect(page.get_by_role("heading", name="ben", level=1)).to_be_visible()
    keys.press("Escape")
    expect(page.locator(".worker-row")).to_have_count(3)


def test_search_and_help(page: Page, daemon: Daemon) -> None:
    """/ goes to the search, Escape leaves it, ? shows the keys that are heard here."""
    daemon.start("ann", worker("quiet"))
    daemon.start("ben", worker("quiet"))
    expect(page.locator(".worker-row")).to_have_count(2)
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox", name="Search workers")).to_be_focused()
    page.keyboard.type("be?s")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Backspace")
    page.keyboard.press("Backspace")
    expect(page.locator(".worker-row")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    help_dialog = page.get_by_role("dialog", name="Keyboard")
    for text in ("Next worker", "Stop it", "Search", "This help"):
        expect(help_dialog).to_contain_text(text)
    page.keyboard.press("Escape")
    expect(help_dialog).to_have_count(0)


def test_from_nothing_to_a_removed_worker_without_a_mouse(page: Page, daemon: Daemon, complaints: Complaints) -> None:
    """Add a worker, read its log, stop it and remove it, by keys and Tab only; focus is always visible."""
    complaints.expect_removal("ann")
    keys = page.keyboard
    keys.press("c")
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    keys.type("ann")
    keys.press("Tab")
    keys.press("ArrowRight")
    expect(page.get_by_role("radio", name="A command")).to_be_checked()
    keys.press("Tab")
    expect(page.get_by_label("Command", exact=True)).to_be_focused()
    keys.type(shlex.join(worker("echo", "typed")))
    keys.press("Enter")
    expect(page.get_by_role("heading", name="ann", level=1)).to_be_visible()
    expect(page.get_by_role("log")).to_contain_text("typed")
    keys.press("f")
    expect(page.locator(".log-standing")).to_contain_text("paused")
    keys.press("Delete")
    expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    keys.press("Tab")
    keys.press("Enter")
    expect(page.get_by_role("heading", name="No workers yet")).to_be_visible()
    assert daemon.names() == set()


def test_tab_reaches_every_part_of_the_deck_in_order(fresh_page: Page, daemon: Daemon) -> None:
    """Skip link, top bar, filters, search, table, and the actions of the row one is on; nothing traps the focus."""
    daemon.start("ann", worker("quiet"))
    daemon.start("ben", worker("quiet"))
    expect(fresh_page.locator(".worker-row")).to_have_count(2)
    seen: list[str] = []
    for _ in range(40):
        fresh_page.keyboard.press("Tab")
        label = fresh_page.evaluate(
            """() => {
                const at = document.activeElement;
                if (at === document.body) return 'END';
                return (at.getAttribute('aria-label') || at.dataset.worker || at.textContent || at.type).trim();
            }"""
        )
        seen.append(label)
        if label == "END":
            break
    assert seen[0] == "Skip to content"
    for part in ("Events", "Help and log out", "Group by template", "ann", "Stop ann", "Restart ann", "Remove ann"):
        assert any(part in label for label in seen), f"{part} not reached: {seen}"
    assert not any("Stop ben" in label for label in seen), (
        "one row's actions at a time: the others are reached by j and k"
    )
