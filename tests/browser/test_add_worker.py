"""Adding a worker: from a command, from a template, and every refusal next to its field."""

import os
import shlex

import pytest

from everdeck.kernel import flock
from support.dash_daemon import Daemon
from support.dash_page import Complaints, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, expect


def _add(page: Page) -> None:
    page.get_by_role("link", name="Add", exact=True).click()
    expect(page.get_by_role("heading", name="Add a worker")).to_be_visible()


def test_from_a_command(page: Page, daemon: Daemon) -> None:
    """The words, variables, secrets and lifetime that were typed are what runs."""
    _add(page)
    page.locator(".segment", has_text="A command").click()
    page.get_by_label("Name", exact=True).fill("alice@example")
    page.get_by_label("Command", exact=True).fill(shlex.join(worker("echo", "two words")))
    expect(page.locator(".word").last).to_have_text("two words")
    page.get_by_role("button", name="Add variable").click()
    page.get_by_label("Variable 1 name").fill("GREETING")
    page.get_by_label("Variable 1 value").fill("hello")
    page.get_by_role("button", name="Add secret").click()
    page.get_by_label("Secret 1 name").fill("TOKEN")
    page.get_by_label("Secret 1 value").fill("s3cret")
    page.get_by_text("Bound", exact=True).click()
    page.get_by_role("button", name="Add and start").click()
    expect(page.get_by_role("heading", name="alice@example", level=1)).to_be_visible()
    expect(page.get_by_role("log")).to_contain_text("two words")
    spec = daemon.get("/workers/alice@example/detail")["spec"]
    assert spec["command"] == worker("echo", "two words")
    assert spec["lifetime"] == "bound"
    assert spec["env_keys"] == ["GREETING"]
    assert spec["secret_names"] == ["TOKEN"]


def test_a_command_finds_its_files_in_the_directory_that_is_offered(page: Page, daemon: Daemon) -> None:
    """The form offers the directory that the configuration stands in; an emptied one is the worker's own data/."""
    place = daemon.state_dir.parent
    (place / "greet.sh").write_text("echo hello from beside the file; exec sleep 1000")
    _add(page)
    page.locator(".segment", has_text="A command").click()
    expect(page.get_by_label("Working directory")).to_have_value(str(place))
    page.get_by_label("Name", exact=True).fill("here")
    page.get_by_label("Command", exact=True).fill("sh greet.sh")
    page.get_by_role("button", name="Add and start").click()
    expect(page.get_by_role("log")).to_contain_text("hello from beside the file")

    _add(page)
    page.locator(".segment", has_text="A command").click()
    page.get_by_label("Name", exact=True).fill("there")
    page.get_by_label("Command", exact=True).fill("sh -c 'pwd; exec sleep 1000'")
    page.get_by_label("Working directory").fill("")
    page.get_by_role("button", name="Add and start").click()
    expect(page.get_by_role("log")).to_contain_text(str(daemon.state_dir / "workers" / "there" / "data"))


def test_from_a_template(page: Page, daemon: Daemon) -> None:
    """A name and a template are enough; the worker is grouped under the template."""
    _add(page)
    page.get_by_label("Name", exact=True).fill("tina")
    page.get_by_label("Template", exact=True).select_option("echo")
    page.get_by_role("button", name="Add and start").click()
    expect(page.get_by_role("log")).to_contain_text("from a template")
    assert daemon.get("/workers/tina")["labels"]["template"] == "echo"


@pytest.mark.parametrize(
    ("fields", "field", "part"),
    [
        ({"Name": "no spaces please", "Command": "true"}, "name", "accepted"),
        ({"Name": "ok", "Command": ""}, "command", "accepted"),
        ({"Name": "ok", "Command": "/no/such/program"}, "command", "No such file"),
        ({"Name": "ok", "Command": "true", "Crashes allowed": "-4"}, "restart.max_crashes", "from 0 to"),
        ({"Name": "ok", "Command": "true", "Grace, seconds": "soon"}, "stop.grace_seconds", "number"),
        ({"Name": "ok", "Command": "true", "Stop signal": "NOISE"}, "stop.signal", "signal name"),
        ({"Name": "ok", "Command": "true", "Nice": "99"}, "limits.nice", "19"),
    ],
)
def test_a_refusal_stands_at_its_field(
    page: Page, daemon: Daemon, complaints: Complaints, fields: dict[str, str], field: str, part: str
) -> None:
    """The field is marked, described by the daemon's reason, and focused; nothing was started."""
    complaints.expect("status of 4")
    _add(page)
    page.locator(".segment", has_text="A command").click()
    page.get_by_text("Policies, health and limits").click()
    for label, value in fields.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_role("button", name="Add and start").click()
    wrong = page.locator(f'[name="{field}"]')
    expect(wrong).to_have_attribute("aria-invalid", "true")
    described = (wrong.get_attribute("aria-describedby") or "").split()[0]
    expect(page.locator(f'[id="{described}"]')).to_contain_text(part)
    expect(wrong).to_be_focused()
    assert daemon.names() <= {"ok"}


def test_another_conflict_is_said_as_what_it_is(page: Page, daemon: Daemon, complaints: Complaints) -> None:
    """Somebody holds the worker's lock: nothing to replace, so nobody is asked to."""
    complaints.expect("409")
    home = daemon.state_dir / "workers" / "alice"
    home.mkdir(parents=True, mode=0o700)
    lock = flock.take(home / "lock")
    assert lock is not None
    try:
        _add(page)
        page.locator(".segment", has_text="A command").click()
        page.get_by_label("Name", exact=True).fill("alice")
        page.get_by_label("Command", exact=True).fill(shlex.join(worker("quiet")))
        page.get_by_role("button", name="Add and start").click()
        expect(page.get_by_role("alert")).to_contain_text("lock")
        expect(page.get_by_role("dialog")).to_have_count(0)
    finally:
        os.close(lock)


def test_another_spec_for_a_known_name_asks_before_it_replaces(
    page: Page, daemon: Daemon, complaints: Complaints
) -> None:
    """The conflict is explained; only the second yes replaces the worker."""
    complaints.expect("409")
    first = daemon.start("alice", worker("quiet"))
    _add(page)
    page.locator(".segment", has_text="A command").click()
    page.get_by_label("Name", exact=True).fill("alice")
    page.get_by_label("Command", exact=True).fill(shlex.join(worker("echo", "replaced")))
    page.get_by_role("button", name="Add and start").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("another spec")
    assert daemon.get("/workers/alice")["pid"] == first["pid"]
    dialog.get_by_role("button", name="Stop it and replace it").click()
    expect(page.get_by_role("log")).to_contain_text("replaced")
