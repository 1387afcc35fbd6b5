"""A satellite on the page: added by a form, its token never shown again, its feed with retry and drop."""

import pytest

from everdeck.testing.telegram import TelegramServer
from support.dash_daemon import Daemon

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, expect

HOSTILE = "<img src=x onerror=window.pwned=1>\u202egnp\x9b31m"
"""Markup, a mark that turns what follows, and an 8-bit control."""


def test_a_satellite_is_added_by_form_and_its_feed_is_seen(page: Page, daemon: Daemon) -> None:
    """Connection in words, numbers, what was set aside; the token is in no answer and nowhere on the page."""
    with TelegramServer() as bot:
        bot.fail("sendMessage", 403, "Forbidden: bot was blocked by the user", chat_id=7)
        page.get_by_role("link", name="Add", exact=True).click()
        page.locator(".segment", has_text="A satellite").click()
        page.get_by_label("Name", exact=True).fill("bob-tg")
        page.get_by_label("Kind").select_option("telegram")
        page.get_by_label("Secret 1 value").fill(bot.token)
        for number, (key, value) in enumerate((("base_url", bot.url), ("first_run", "take")), 1):
            page.get_by_role("button", name="Add option").click()
            page.get_by_label(f"Option {number} name").fill(key)
            page.get_by_label(f"Option {number} value").fill(value)
        page.get_by_role("button", name="Add and start").click()
        feed = page.get_by_role("region", name="Feed")
        expect(feed).to_contain_text("connected", timeout=30_000)
        expect(feed).to_contain_text(f"@test_{bot.bot_id}_bot")
        daemon.post("/workers/bob-tg/send", {"to": 7, "text": f"hello blocked {HOSTILE}"})
        expect(feed).to_contain_text("blocked by the user", timeout=30_000)
        expect(feed).to_contain_text("<img src=x onerror=window.pwned=1>\\u202egnp\\u009b31m")
        assert page.evaluate("window.pwned") is None
        assert feed.locator("img").count() == 0
        feed.get_by_role("button", name="Drop").click()
        expect(feed).not_to_contain_text("hello blocked", timeout=30_000)
        assert bot.token.partition(":")[2] not in page.content()
