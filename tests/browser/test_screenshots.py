"""The pictures in docs/img: each view, light and dark, on a desktop and a phone, from a real daemon with real workers.

Taken only when asked for: ``make docs-img``, or ``EVERDECK_SCREENSHOTS=docs/img pytest tests/browser -k screenshot``.
"""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.dash_daemon import Daemon, daemon_at
from support.dash_page import live, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import expect

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

FOLDER = os.environ.get("EVERDECK_SCREENSHOTS")
SIZES: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1440, "height": 900}},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "is_mobile": True,
        "has_touch": True,
    },
}
VIEWS = {"deck": "#/", "worker": "#/workers/elena", "events": "#/events", "add": "#/add"}
BOTS = ("alice", "bob", "carol", "dmitri", "elena", "farid", "grace", "hiro", "ines", "jonas")
CONFIG = """
[template.telegram]
command = ["python3", "-m", "everdeck.satellites.telegram"]

[template.gmail]
command = ["python3", "-m", "everdeck.satellites.gmail"]
"""
# Sparklines and plots need some samples behind them, one every two seconds.
SAMPLES = 30

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="pictures are taken by make docs-img"),
    pytest.mark.timeout(600),
]


def test_screenshots(tmp_path: Path, new_page: "Callable[..., Page]", complaints: object) -> None:
    """Take them all."""
    config = tmp_path / "deck.toml"
    config.write_text(CONFIG)
    with daemon_at(tmp_path / "bots" / "state", config) as daemon:
        _inhabit(daemon)
        _wait_for_samples(daemon)
        for size, options in SIZES.items():
            for scheme in ("light", "dark"):
                page = new_page(color_scheme=scheme, reduced_motion="reduce", **options)
                page.goto(daemon.login_link)
                live(page)
                for view, address in VIEWS.items():
                    page.evaluate("address => { location.hash = address; }", address)
                    _settle(page, view)
                    _save(page, f"{view}-{size}-{scheme}.png")
                page.context.close()


def _inhabit(daemon: Daemon) -> None:
    for number, name in enumerate(BOTS):
        template = ("telegram", "gmail", "telegram")[number % 3]
        said = ("talks",) if number % 4 == 1 else ()
        fields: dict[str, Any] = {"labels": {"template": template}, "health": {"notify": True}}
        if number % 4 == 0:
            fields |= {
                "lifetime": "bound",
                "env": {"TZ": "UTC", "BOT_NAME": name},
                "secrets": {"BOT_TOKEN": {"value": "x"}},
            }
        daemon.start(name, worker("busy", str(6 + number * 5 % 30), *said), **fields)
    daemon.start(
        "katya", worker("refuse"), labels={"template": "telegram"}, restart={"max_crashes": 2, "backoff_seconds": 0.1}
    )
    daemon.start(
        "liam", worker("crash"), labels={"template": "gmail"}, restart={"backoff_seconds": 50, "max_crashes": 9}
    )
    daemon.start("mei", worker("quiet"), labels={"template": "telegram"})
    daemon.post("/workers/mei/stop")
    while any(daemon.state(name) != "running" for name in BOTS):
        time.sleep(0.2)
    # A restart of the daemon, so that adoption can be seen.
    daemon.kill()
    daemon.up()
    daemon.post("/workers/jonas/restart")


def _wait_for_samples(daemon: Daemon) -> None:
    """Watch, as a page would, until there is something to draw."""
    for _ in range(600):
        at = daemon.get("/samples", names=",".join(BOTS))[BOTS[4]]["at"]
        if len(at) >= SAMPLES:
            return
        time.sleep(1)  # pictures of the passing of time need time to pass; no test depends on it
    raise AssertionError("no samples were taken")


def _settle(page: "Page", view: str) -> None:
    ready = {
        "deck": ".worker-row .c-rss .spark-line",
        "worker": ".plot canvas",
        "events": ".event-list .event",
        "add": ".add-form",
    }[view]
    page.locator(ready).first.wait_for(state="attached")
    if view == "deck":
        expect(page.locator(".headline")).to_contain_text("1 worker failed")
        expect(page.locator(".worker-row .c-line .quiet")).not_to_have_count(9)
    if view == "worker":
        expect(page.locator(".log-line").first).to_be_attached()
        expect(page.locator(".layer")).to_have_count(4)
    page.evaluate("document.activeElement?.blur(); scrollTo(0, 0)")
    page.evaluate("document.fonts.ready")


def _save(page: "Page", name: str) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed (group browser)")
    assert FOLDER is not None
    folder = Path(FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / f".{name}"
    page.screenshot(path=raw, type="png", animations="disabled")
    with image.open(raw) as picture:
        # A page has few colours: a palette makes the files a third of their size. The common ones are kept exactly (the
        # eye sees a tint on a large surface), the others are spread over what is left.
        full = picture.convert("RGB")
        counted = sorted(full.getcolors(maxcolors=1 << 24), reverse=True)
        common = [channel for _, colour in counted[:160] for channel in colour]
        spread = full.quantize(colors=96, method=image.Quantize.MAXCOVERAGE).getpalette()[: 96 * 3]
        palette = image.new("P", (1, 1))
        palette.putpalette([*common, *spread])
        full.quantize(palette=palette, dither=image.Dither.NONE).save(folder / name, optimize=True)
    raw.unlink()
