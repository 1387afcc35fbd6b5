"""What a role may not do is not on the page, and the daemon refuses it to whoever asks all the same."""

from collections.abc import Callable
from datetime import UTC, datetime

import httpx
import pytest

from everdeck.access import Role
from everdeck.kernel import sandbox
from everdeck.server.tokens import Tokens
from support.dash_daemon import Daemon
from support.dash_page import Complaints, live, row, worker

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group browser)")
from playwright.sync_api import Page, expect

ACTS = ["start", "stop", "restart", "reset", "remove"]
NEW = {"name": "eve", "spec": {"command": ["sleep", "1000"]}}


@pytest.mark.parametrize(
    ("role", "acts", "answers"),
    [
        (Role.READ, [], {"restart": 403, "add": 403, "spec": 403, "remove": 403}),
        (Role.OPERATE, ACTS[:-1], {"restart": 200, "add": 403, "spec": 200, "remove": 403}),
        (Role.ADMIN, ACTS, {"restart": 200, "add": 201, "spec": 200, "remove": 204}),
    ],
)
def test_a_role_sees_what_it_may_do(
    new_page: Callable[..., Page],
    daemon: Daemon,
    complaints: Complaints,
    role: Role,
    acts: list[str],
    answers: dict[str, int],
) -> None:
    """Its verbs, the way to add, edit and clone; and the same requests by hand."""
    complaints.expect(
        "40[134]"
    )  # what is refused, a worker that was removed by hand, a token that is revoked at the end
    daemon.start("alice", worker("quiet"), sandbox={"level": "basic"})
    tokens = Tokens(daemon.state_dir)
    secret = tokens.create(f"tester-{role}", role, {}, datetime.now(UTC), None)
    try:
        page = new_page()
        page.goto(f"{daemon.base}/login#token={secret}")
        live(page)
        expect(row(page, "alice")).to_be_visible()
        expect(page.get_by_role("link", name="Add", exact=True)).to_have_count(int(role is Role.ADMIN))
        page.evaluate("location.hash = '#/workers/alice'")
        held = page.get_by_role("region", name="What it cannot do")
        expect(held).to_contain_text("cannot gain privileges (setuid programs, capabilities)")
        expect(held).to_contain_text("only with sandbox strict")
        expect(page.get_by_role("region", name="Spec")).to_contain_text("basic")
        shown = page.locator(".worker-acts [data-verb]")
        assert [button.get_attribute("data-verb") for button in shown.all()] == acts
        for title in ("Edit", "Clone"):
            expect(page.locator(".worker-acts").get_by_role("link", name=title)).to_have_count(int(role is Role.ADMIN))
        with httpx.Client(
            base_url=f"{daemon.base}/api/v1", headers={"authorization": f"Bearer {secret}"}, timeout=60
        ) as client:
            asked = {
                "restart": client.post("/workers/alice/restart"),
                "add": client.post("/workers", json=NEW),
                "spec": client.get("/workers/alice/spec"),
                "remove": client.delete("/workers/alice"),
            }
        assert {what: answer.status_code for what, answer in asked.items()} == answers
    finally:
        tokens.revoke(f"tester-{role}")


def test_the_form_offers_the_sandbox(page: Page, daemon: Daemon) -> None:
    """What is chosen is what the worker runs in, and an edit keeps what is listed beside it."""
    if (why := sandbox.why_not_strict()) is not None:
        pytest.skip(why)
    page.evaluate("location.hash = '#/add'")
    page.locator(".segment", has_text="A command").click()
    page.get_by_label("Name", exact=True).fill("boxed")
    page.get_by_label("Command", exact=True).fill("sleep 1000")
    page.get_by_label("Working directory").fill("")
    page.get_by_text("Policies, health and limits").click()
    page.get_by_label("Sandbox").select_option("strict")
    page.get_by_role("button", name="Add and start").click()
    held = page.get_by_role("region", name="What it cannot do")
    expect(held).to_contain_text("reaches only its own directories")
    assert daemon.get("/workers/boxed/spec")["sandbox"]["level"] == "strict"
