"""The events view: all events, filtered, linked and live."""

import pytest

from support.dash_daemon import Daemon
from support.dash_page import worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, expect


def test_an_event_does_not_disturb_the_typing(page: Page, daemon: Daemon) -> None:
    """A filter that is half typed stays in its box when an event comes in."""
    daemon.start("alice", worker("quiet"))
    page.get_by_role("link", name="Events").click()
    box = page.get_by_role("searchbox", name="Only this worker")
    box.press_sequentially("ali")
    daemon.start("bob", worker("quiet"))
    expect(page.locator(".event-list .event").filter(has_text="bob").first).to_be_visible()
    box.press_sequentially("ce")
    expect(box).to_have_value("alice")
    box.press("Enter")
    expect(page.locator(".event-list .event").filter(has_text="bob")).to_have_count(0)
    assert "worker=alice" in page.url
    page.get_by_role("button", name="Clear filters").click()
    expect(box).to_have_value("")


def test_events_are_filtered_linked_and_live(page: Page, daemon: Daemon) -> None:
    """By kind and by worker; the address keeps the filter; a new event comes by itself; one event has its own link."""
    daemon.start("alice", worker("quiet"))
    daemon.start("bob", worker("quiet"))
    page.get_by_role("link", name="Events").click()
    events = page.locator(".event-list .event")
    expect(events.filter(has_text="alice").first).to_be_visible()

    page.get_by_role("searchbox", name="Only this worker").fill("alice")
    page.get_by_role("searchbox", name="Only this worker").press("Enter")
    expect(events.filter(has_text="bob")).to_have_count(0)
    page.get_by_role("button", name="started", exact=True).click()
    expect(events.filter(has_not_text="started")).to_have_count(0)
    assert "worker=alice" in page.url
    assert "kind=started" in page.url
    page.reload()
    expect(events.filter(has_text="alice").first).to_be_visible()
    expect(events.filter(has_text="bob")).to_have_count(0)

    page.get_by_role("button", name="Clear filters").click()
    daemon.post("/workers/bob/stop")
    newest = daemon.get("/events", last=1)[0]
    expect(events.first).to_have_attribute("data-event", str(newest["id"]))
    expect(events.first).to_contain_text("stopped")
    expect(events.first.locator("time")).to_have_attribute("datetime", newest["at"])
    assert events.first.locator("time").get_attribute("title")

    events.first.get_by_role("link", name=f"Link to event {newest['id']}").click()
    expect(page.locator(".event.is-marked")).to_have_attribute("data-event", str(newest["id"]))
    assert f"id={newest['id']}" in page.url
