"""The worker view: live log, events, restarts, layers, processes, environment, health and plots."""

import shlex
from pathlib import Path

import pytest

from support.dash_daemon import Daemon
from support.dash_page import Complaints, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, expect


def _tell(daemon: Daemon, name: str, *lines: str) -> None:
    """Make the ``colours`` worker print these lines; it reads them from a fifo in its directory."""
    fifo = daemon.state_dir / "workers" / name / "data" / "more"
    with fifo.open("w") as pipe:
        pipe.writelines(f"{line}\n" for line in lines)


def _open(page: Page, name: str) -> None:
    page.evaluate("name => { location.hash = `#/workers/${encodeURIComponent(name)}`; }", name)
    expect(page.get_by_role("heading", name=name, level=1)).to_be_visible()


def test_the_log_is_live_and_in_colour(page: Page, daemon: Daemon) -> None:
    """Old lines and new ones appear, with the colours the worker asked for."""
    daemon.start("alice", worker("colours"))
    _open(page, "alice")
    paper = page.get_by_role("log")
    expect(paper).to_contain_text("plain first line")
    expect(paper.locator(".ansi-fg-1", has_text="colour 31")).to_be_visible()
    expect(paper.locator(".ansi-bold").first).to_have_css("font-weight", "700")
    assert "rgb(10 200 150)" in (paper.locator("span", has_text="true colour").get_attribute("style") or "")
    assert "\x1b" not in paper.inner_text()
    _tell(daemon, "alice", "a new line")
    expect(paper.locator(".log-line").last).to_have_text("a new line")


def test_pausing_holds_new_lines_back(page: Page, daemon: Daemon) -> None:
    """Paused, the paper stands still and says how many wait; following shows them."""
    daemon.start("alice", worker("colours"))
    _open(page, "alice")
    paper = page.get_by_role("log")
    expect(paper).to_contain_text("orange")
    page.get_by_role("button", name="Pause").click()
    paper.dispatch_event("scroll")  # the browser tells late of the last scroll to the bottom: not a wish of the reader
    _tell(daemon, "alice", "while paused", "and another")
    expect(page.locator(".log-standing")).to_have_text("paused, 2 new")
    expect(paper).not_to_contain_text("while paused")
    page.get_by_role("button", name="Follow", exact=True).click()
    expect(paper).to_contain_text("while paused")
    expect(page.locator(".log-standing")).to_have_text("following")


def test_searching_the_log(page: Page, daemon: Daemon) -> None:
    """Matches are counted and stepped through; others can be hidden; the whole log can be asked."""
    daemon.start("alice", worker("colours"))
    _open(page, "alice")
    expect(page.get_by_role("log")).to_contain_text("orange")
    search = page.get_by_role("searchbox", name="Search the log")
    search.fill("colour 3")
    expect(page.locator(".hit-count")).to_have_text("8/8")
    page.get_by_role("button", name="Next match").click()
    expect(page.locator(".hit-count")).to_have_text("1/8")
    expect(page.locator(".log-line.is-current")).to_contain_text("colour 30")
    page.get_by_role("button", name="only matches").click()
    expect(page.locator(".log-line:visible")).to_have_count(8)
    page.get_by_role("button", name="whole log").click()
    expect(page.get_by_role("region", name="Matches in the whole log")).to_contain_text("8 matching lines")


def test_downloading_the_log(page: Page, daemon: Daemon, tmp_path: Path) -> None:
    """The download is the log, byte for byte."""
    daemon.start("alice", worker("echo", "to be kept"))
    _open(page, "alice")
    expect(page.get_by_role("log")).to_contain_text("to be kept")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="Download the log").click()
    waiting.value.save_as(tmp_path / "alice.log")
    assert "to be kept\n" in (tmp_path / "alice.log").read_text()


def test_ten_thousand_lines_are_read_without_a_stall(page: Page, daemon: Daemon) -> None:
    """A log of many lines shows its end, keeps a bounded number, and the page stays usable."""
    daemon.start("alice", worker("many", "30000"))
    _open(page, "alice")
    paper = page.get_by_role("log")
    expect(paper.locator(".log-line").last).to_have_text("line 29999 of many")
    assert paper.locator(".log-line").count() <= 10_000
    below = paper.evaluate("paper => paper.scrollHeight - paper.clientHeight - paper.scrollTop")
    assert below < 40, "the end of the log is in sight"


def test_layers_processes_environment_and_spec(page: Page, daemon: Daemon) -> None:
    """What protects the worker, what it consists of, and the names (never values) of its environment."""
    daemon.start(
        "alice", worker("family"), lifetime="bound", env={"GREETING": "not-for-the-page"},
        secrets={"TOKEN": {"value": "hunter2-hunter2"}}, labels={"team": "blue"},
    )  # fmt: skip
    _open(page, "alice")
    layers = page.get_by_role("region", name="Protection")
    expect(layers.locator(".layer")).to_have_count(4)
    expect(layers).to_contain_text("4 of 4 layers hold")
    for title in ("Lifeline", "Singleton", "Escalation", "Reap at start"):
        expect(layers).to_contain_text(title)
    processes = page.get_by_role("region", name="Processes")
    expect(processes.locator(".process")).to_have_count(2)
    expect(processes.locator("ul ul .process")).to_have_count(1)
    environment = page.get_by_role("region", name="Environment")
    expect(environment).to_contain_text("GREETING")
    expect(environment.locator(".is-secret")).to_contain_text("TOKEN")
    expect(page.get_by_role("region", name="Spec")).to_contain_text("team=blue")
    content = page.content()
    assert "not-for-the-page" not in content
    assert "hunter2" not in content
    answer = daemon.client.get("/workers/alice/detail").text
    assert "not-for-the-page" not in answer
    assert "hunter2" not in answer


def test_health_and_status_text(page: Page, daemon: Daemon) -> None:
    """What the worker says about itself stands under its name, and in its row."""
    daemon.start("alice", worker("status", "3 chats waiting"), health={"notify": True})
    expect(page.locator('.worker-row[data-worker="alice"] .c-line')).to_have_text("3 chats waiting")
    _open(page, "alice")
    expect(page.locator(".worker-standing")).to_contain_text("3 chats waiting")
    expect(page.locator(".worker-health")).to_have_text("healthy")


def test_crashes_backoff_breaker_and_reset(page: Page, daemon: Daemon) -> None:
    """Crashes are drawn, the countdown runs, the open breaker says what to do, and reset closes it."""
    daemon.start("slow", worker("crash"), restart={"backoff_seconds": 50, "backoff_cap_seconds": 60, "max_crashes": 20})
    _open(page, "slow")
    restarts = page.get_by_role("region", name="Restarts")
    expect(restarts.locator(".strip-crash").first).to_be_attached()
    expect(restarts).to_contain_text("Next start")
    expect(page.locator(".worker-standing")).to_contain_text("starts again")
    daemon.start("fails", worker("crash"), restart={"max_crashes": 0})
    _open(page, "fails")
    expect(page.get_by_role("region", name="Restarts")).to_contain_text("The breaker is open")
    expect(page.locator(".worker-standing")).to_have_text("failed")
    page.get_by_role("toolbar", name="Actions").get_by_role("button", name="Reset").click()
    page.get_by_role("dialog").get_by_role("button", name="Reset").click()
    expect(page.locator(".timeline .event-kind", has_text="reset").first).to_be_visible()


def test_the_timeline_is_live(page: Page, daemon: Daemon) -> None:
    """Events of this worker, and only of this one, appear as they happen."""
    daemon.start("alice", worker("quiet"))
    daemon.start("bob", worker("quiet"))
    _open(page, "alice")
    kinds = page.locator(".timeline .event-kind")
    expect(kinds.first).to_have_text("started")
    daemon.post("/workers/bob/restart")
    page.get_by_role("toolbar", name="Actions").get_by_role("button", name="Restart").click()
    expect(kinds.first).to_have_text("restarted")
    pids = {str(event["detail"].get("pid")) for event in daemon.get("/events", worker="bob")}
    assert not pids & set(page.locator(".timeline .event-detail").all_inner_texts())


def test_plots_are_drawn(page: Page, daemon: Daemon) -> None:
    """Two plots appear as soon as two samples exist."""
    daemon.start("alice", worker("quiet"))
    _open(page, "alice")
    expect(page.locator(".plot canvas")).to_have_count(2)
    expect(page.locator(".plot figcaption").nth(1)).to_contain_text("MB")


def test_stop_start_and_remove_from_the_worker_view(page: Page, daemon: Daemon, complaints: Complaints) -> None:
    """The buttons fit the state; removing leads back to the deck."""
    complaints.expect_removal("alice")
    daemon.start("alice", worker("quiet"))
    _open(page, "alice")
    acts = page.get_by_role("toolbar", name="Actions")
    expect(acts.get_by_role("button", name="Start", exact=True)).to_be_disabled()
    acts.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    expect(page.locator(".worker-standing")).to_contain_text("stopped")
    expect(page.get_by_role("region", name="Processes")).to_contain_text("No process is running")
    acts.get_by_role("button", name="Start", exact=True).click()
    expect(page.locator(".worker-standing")).to_contain_text("running")
    acts.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.get_by_role("heading", name="No workers yet")).to_be_visible()


def test_a_worker_that_is_not_there(page: Page, daemon: Daemon, complaints: Complaints) -> None:
    """A stale link says so and offers the way back."""
    complaints.expect("404")
    page.evaluate("location.hash = '#/workers/nobody'")
    expect(page.get_by_role("heading", name="No worker “nobody”")).to_be_visible()
    page.get_by_role("link", name="Back to the deck").click()
    expect(page.get_by_role("heading", name="No workers yet")).to_be_visible()


def test_edit_keeps_what_the_form_does_not_show(page: Page, daemon: Daemon, complaints: Complaints) -> None:
    """Only what was changed changes: secrets keep their values, and fields without a box stay as they are."""
    complaints.expect("409")
    daemon.start(
        "alice",
        worker("echo", "before"),
        env={"MOOD": "calm"},
        secrets={"TOKEN": {"value": "s3cret"}},
        log={"keep": 3},
        restart={"policy": "always", "backoff_cap_seconds": 33},
        labels={"team": "a"},
    )
    page.evaluate("location.hash = '#/workers/alice'")
    page.get_by_role("link", name="Edit").click()
    expect(page.get_by_role("heading", name="Edit alice")).to_be_visible()
    expect(page.get_by_label("Variable 1 value")).to_have_value("calm")
    page.get_by_label("Command", exact=True).fill(shlex.join(worker("echo", "after the edit")))
    page.get_by_label("Variable 1 value").fill("merry")
    page.get_by_role("button", name="Save and start").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop it and replace it").click()
    expect(page.get_by_role("log")).to_contain_text("after the edit")
    spec = daemon.get("/workers/alice/spec")
    assert spec["env"] == {"MOOD": "merry"}
    assert spec["log"]["keep"] == 3
    assert (spec["restart"]["policy"], spec["restart"]["backoff_cap_seconds"]) == ("always", 33)
    assert spec["labels"] == {"team": "a"}
    secret = daemon.state_dir / "workers" / "alice" / "secrets" / "TOKEN"
    assert secret.read_text() == "s3cret"


def test_clone_makes_another_worker_of_the_same_spec(page: Page, daemon: Daemon) -> None:
    """The name is asked for; the rest is there."""
    daemon.start("ann", worker("echo", "one of two"), env={"A": "1"}, labels={"team": "a"})
    page.evaluate("location.hash = '#/workers/ann'")
    page.get_by_role("link", name="Clone").click()
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    page.get_by_label("Name", exact=True).fill("bea")
    page.get_by_role("button", name="Add and start").click()
    expect(page.get_by_role("heading", name="bea", level=1)).to_be_visible()
    specs = [daemon.get(f"/workers/{name}/spec") for name in ("ann", "bea")]
    for spec in specs:
        spec["cwd"] = None
    assert specs[0] == specs[1]
    assert daemon.names() == {"ann", "bea"}
