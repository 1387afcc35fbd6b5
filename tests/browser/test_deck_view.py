"""The deck view: what each row says, finding workers, and every action on one or many of them."""

import re
from typing import TYPE_CHECKING

import pytest

from support.dash_daemon import Daemon
from support.dash_page import Complaints, live, row, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, expect

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_row_tells_all_there_is_to_know_at_a_glance(page: Page, daemon: Daemon) -> None:
    """State, pid, uptime, restarts, resources, lifetime, origin, last exit and last line are in the row."""
    status = daemon.start("alice", worker("echo", "hello from alice"), lifetime="bound")
    daemon.start("crashed", worker("crash"), restart={"policy": "never"})
    alice = row(page, "alice")
    expect(alice).to_contain_text("running")
    expect(alice).to_contain_text("bound")
    expect(alice).to_contain_text("own")
    expect(alice.locator(".c-pid")).to_have_text(str(status["pid"]))
    expect(alice.locator(".c-uptime")).to_contain_text("s")
    expect(alice.locator(".c-restarts")).to_have_text("0")
    expect(alice.locator(".c-rss")).to_contain_text("MB")
    expect(alice.locator(".c-line")).to_have_text("hello from alice")
    expect(alice.locator(".c-cpu .spark-line")).to_be_attached()
    expect(alice.locator(".c-rss .spark-line")).to_be_attached()
    crashed = row(page, "crashed")
    expect(crashed.locator(".c-exit")).to_have_text("exit 3")


def test_empty_deck_says_how_to_begin(page: Page, daemon: Daemon) -> None:
    """With no worker there is an invitation, not an empty table; its command is whole and can be copied."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the command").click()
    expect(page.locator(".toast", has_text="Copied")).to_be_visible()
    command = page.evaluate("navigator.clipboard.readText()")
    assert command == f"everdeck --state {daemon.state_dir} start alice -- python3 bot.py"
    assert page.locator(".copyable .command").evaluate("box => box.scrollWidth <= box.clientWidth")
    expect(page.get_by_role("heading", name="No workers yet")).to_be_visible()
    page.get_by_role("link", name="Add a worker").click()
    expect(page.get_by_role("heading", name="Add a worker")).to_be_visible()


def test_search_filter_sort_and_group(page: Page, daemon: Daemon) -> None:
    """The table shows what was asked for, and the address keeps the question."""
    for name in ("anna", "ben", "anton"):
        daemon.start(name, worker("quiet"), labels={"app": "jupyterhub", "user": name, "server": ""})
    daemon.post("/workers", {"name": "tina", "template": "quiet"})
    daemon.post("/workers/ben/stop")
    rows = page.locator(".worker-row")
    expect(rows).to_have_count(4)

    page.get_by_role("searchbox", name="Search workers").fill("an")
    expect(rows).to_have_count(2)
    page.get_by_role("searchbox", name="Search workers").fill("user=ben")
    expect(rows).to_have_count(1)
    expect(rows.locator(".label-tag")).to_have_text(["app=jupyterhub", "user=ben"])
    page.get_by_role("searchbox", name="Search workers").fill("")
    page.locator('.chip[data-state="stopped"]').click()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("ben")
    assert "state=stopped" in page.url
    page.reload()
    expect(rows).to_have_count(1)
    page.locator('.chip[data-state="stopped"]').click()
    expect(rows).to_have_count(4)

    page.get_by_role("button", name="Worker", exact=False).first.click()
    expect(rows.first).to_contain_text("tina")
    expect(page.get_by_role("columnheader", name="Worker")).to_have_attribute("aria-sort", "descending")

    page.get_by_role("button", name="Group by template").click()
    expect(page.locator(".group-row")).to_have_count(2)
    page.get_by_role("button", name="quiet 1").click()
    expect(rows).to_have_count(3)


def test_stop_asks_first_and_can_be_undone(page: Page, daemon: Daemon) -> None:
    """Stop is confirmed; Cancel does nothing; afterwards the worker can be started again from the notice."""
    daemon.start("alice", worker("quiet"))
    alice = row(page, "alice")
    alice.get_by_role("button", name="Stop alice").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert daemon.state("alice") == "running"

    alice.get_by_role("button", name="Stop alice").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    expect(alice).to_have_attribute("data-state", "stopped")
    assert daemon.state("alice") == "stopped"

    page.get_by_role("button", name="Start again").click()
    expect(alice).to_have_attribute("data-state", "running")
    assert daemon.state("alice") == "running"


def test_restart_start_reset_and_remove(page: Page, daemon: Daemon, complaints: Complaints) -> None:
    """Each verb reaches the daemon, and the row follows."""
    complaints.expect_removal("alice")
    first = daemon.start("alice", worker("quiet"))
    daemon.start("fails", worker("crash"), restart={"max_crashes": 0})
    alice = row(page, "alice")
    expect(alice.locator(".c-pid")).to_have_text(str(first["pid"]))  # not the row of an earlier test's alice
    alice.get_by_role("button", name="Restart alice").click()
    # Between the two processes the row shows a dash, while the daemon may still tell the old pid.
    expect(alice.locator(".c-pid")).to_have_text(re.compile(rf"^(?!{first['pid']}$)[0-9]+$"))
    expect(alice.locator(".c-pid")).to_have_text(str(daemon.get("/workers/alice")["pid"]))

    daemon.post("/workers/alice/stop")
    alice.get_by_role("button", name="Start alice", exact=True).click()
    expect(alice).to_have_attribute("data-state", "running")

    fails = row(page, "fails")
    expect(fails).to_have_attribute("data-state", "failed")
    fails.get_by_role("button", name="Reset fails").click()
    page.get_by_role("dialog").get_by_role("button", name="Reset").click()
    expect(page.locator(".toast", has_text="fails reset")).to_be_visible()

    alice.get_by_role("button", name="Remove alice").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("cannot be undone")
    dialog.get_by_role("button", name="Remove").click()
    expect(alice).to_have_count(0)
    assert "alice" not in daemon.names()


def test_many_at_once(page: Page, daemon: Daemon, complaints: Complaints) -> None:
    """Selected workers are stopped, started and removed together, after one question that names them."""
    complaints.expect_removal("user-")
    names = [f"user-{number}" for number in range(5)]
    for name in names:
        daemon.start(name, worker("quiet"))
    expect(page.locator(".worker-row")).to_have_count(5)
    row(page, "user-0").get_by_role("checkbox").click()
    row(page, "user-3").get_by_role("checkbox").click(modifiers=["Shift"])
    expect(page.locator(".bulk-count")).to_have_text("4 workers selected")

    page.get_by_role("toolbar").get_by_role("button", name="Stop").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Stop 4 workers?")
    expect(dialog).to_contain_text("user-2")
    dialog.get_by_role("button", name="Stop").click()
    expect(page.locator('.worker-row[data-state="stopped"]')).to_have_count(4)
    assert {name for name in names if daemon.state(name) == "stopped"} == set(names[:4])

    page.get_by_role("checkbox", name="Select all shown").click()
    page.get_by_role("toolbar").get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.get_by_role("heading", name="No workers yet")).to_be_visible()
    assert daemon.names() == set()


def test_ticks_stay_while_events_stream_in(page: Page, daemon: Daemon) -> None:
    """What is ticked slowly is what is selected, however often the rows are drawn again; Escape forgets all of it."""
    names = [f"user-{number}" for number in range(6)]
    for name in (*names, "busy"):
        daemon.start(name, worker("quiet"))
    expect(page.locator(".worker-row")).to_have_count(7)

    def something_happens() -> None:
        pid = daemon.post("/workers/busy/restart")["pid"]
        expect(row(page, "busy").locator(".c-pid")).to_have_text(str(pid))

    for count, name in enumerate(names, start=1):
        row(page, name).get_by_role("checkbox").click()
        something_happens()
        assert _selected(page) == names[:count]
    expect(page.locator(".bulk-count")).to_have_text("6 workers selected")
    row(page, "user-2").get_by_role("checkbox").click()
    page.get_by_role("searchbox", name="Search workers").fill("user-5")
    expect(page.locator(".bulk-count")).to_have_text("5 workers selected, 4 not shown")
    page.get_by_role("searchbox", name="Search workers").fill("")
    expect(page.locator(".worker-row")).to_have_count(7)
    page.locator("h1").click()
    page.keyboard.press("Escape")
    expect(page.locator(".bulk-bar")).to_have_count(0)
    something_happens()
    row(page, "user-4").get_by_role("checkbox").click()
    expect(page.locator(".bulk-count")).to_have_text("1 worker selected")
    assert _selected(page) == ["user-4"]


def test_a_worker_that_comes_back_under_its_name_is_not_selected(page: Page, daemon: Daemon) -> None:
    """A tick is for the worker that was there, not for whoever has its name next."""
    daemon.start("alice", worker("quiet"))
    daemon.start("bob", worker("quiet"))
    for name in ("alice", "bob"):
        row(page, name).get_by_role("checkbox").click()
    daemon.client.delete("/workers/alice").raise_for_status()
    expect(page.locator(".bulk-count")).to_have_text("1 worker selected")
    daemon.start("alice", worker("quiet"))
    expect(row(page, "alice")).to_have_attribute("data-state", "running")
    assert _selected(page) == ["bob"]


def _selected(page: Page) -> list[str]:
    found: list[str] = page.locator('.worker-row[aria-selected="true"]').evaluate_all(
        "rows => rows.map(row => row.dataset.worker)"
    )
    return found


def test_a_refused_verb_is_told(page: Page, daemon: Daemon, complaints: Complaints) -> None:
    """When the daemon refuses, the reason is shown and the row stays true."""
    complaints.expect("status of 4")
    daemon.start("fails", worker("crash"), restart={"max_crashes": 0})
    expect(row(page, "fails")).to_have_attribute("data-state", "failed")
    row(page, "fails").get_by_role("checkbox").click()
    page.get_by_role("toolbar").get_by_role("button", name="Start", exact=True).click()
    expect(page.locator(".toast.tone-bad")).to_contain_text("reset it")
    expect(row(page, "fails")).to_have_attribute("data-state", "failed")


def test_several_logs_together(page: Page, daemon: Daemon) -> None:
    """Each line with its worker's name; new lines come as they are written."""
    for name in ("ann", "ben"):
        daemon.start(name, worker("echo", f"hello from {name}"))
        row(page, name).get_by_role("checkbox").click()
    page.get_by_role("toolbar").get_by_role("link", name="Logs").click()
    log = page.get_by_role("log")
    for name in ("ann", "ben"):
        expect(log).to_contain_text(f"{name} │ hello from {name}")
    daemon.post("/workers/ann/restart")
    expect(log.locator(".log-line", has_text="ann │ hello from ann")).to_have_count(2)


def test_a_denser_list_totals_and_health(page: Page, daemon: Daemon) -> None:
    """Twice as many rows fit, the choice is remembered, the deck's totals and each worker's health are told."""
    daemon.start("well", worker("status", "fine"), health={"notify": True})
    daemon.start("plain", worker("quiet"))
    expect(row(page, "well").locator(".c-health")).not_to_have_text("–")
    expect(row(page, "plain").locator(".c-health")).to_have_text("–")
    expect(page.locator(".headline-totals")).to_contain_text("MB")

    def height() -> float:
        box = row(page, "plain").bounding_box()
        assert box is not None
        return box["height"]

    before = height()
    page.get_by_role("button", name="Dense").click()
    expect(page.locator(".worker-table.is-dense")).to_be_visible()
    assert height() < before * 0.7
    page.reload()
    expect(page.locator(".worker-table.is-dense")).to_be_visible()
    page.get_by_role("button", name="Dense").click()


def test_live_on_two_pages(page: Page, daemon: Daemon, new_page: "Callable[..., Page]") -> None:
    """What one page does, the other shows without being asked."""
    other = new_page()
    other.goto(daemon.login_link)
    live(other)
    daemon.start("alice", worker("quiet"))
    expect(row(other, "alice")).to_have_attribute("data-state", "running")
    row(page, "alice").get_by_role("button", name="Stop alice").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    expect(row(other, "alice")).to_have_attribute("data-state", "stopped")
