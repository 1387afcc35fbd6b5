"""The programs in ``examples/`` do what their first lines say."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from everdeck import Deck
from everdeck.kernel import sandbox
from everdeck.testing.telegram import TelegramServer
from support.cli_daemon import free_port, pidfd_of
from support.repo_examples import ROOT
from support.repo_processes import end_all_under
from support.waiting import until

EXAMPLES = ROOT / "examples"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """An empty directory; whatever still runs there afterwards is ended."""
    try:
        yield tmp_path
    finally:
        end_all_under(tmp_path)


def run(here: Path, *words: str) -> str:
    """What a program prints when it is run in that directory with the examples in reach."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    # A file, not a pipe: the bots that a program leaves behind keep its stdout open.
    with (here / "printed").open("w+") as printed:
        done = subprocess.run(
            [sys.executable, *words], cwd=here, env=environment, stdout=printed, stderr=printed, timeout=60, check=False
        )
        printed.seek(0)
        text = printed.read()
    assert done.returncode == 0, text
    return text


def test_bots_in_a_deck_are_found_again_by_the_next_run(here: Path) -> None:
    """The second run of the program shows the pids of the first, and can stop them."""
    program = str(EXAMPLES / "bots_after.py")

    first = run(here, program)
    second = run(here, program)
    stopped = run(here, program, "stop")

    assert "alice running" in first
    assert first == second
    assert stopped == "alice stopped None\nbob stopped None\n"


def test_bots_in_a_dict_are_forgotten_by_the_next_run(here: Path) -> None:
    """The program before: its successor does not know the bot that it left running."""
    first = run(here, "-c", "import bots_before as b; b.start('alice'); print(b.is_running('alice'))")
    second = run(here, "-c", "import bots_before as b; print(b.is_running('alice'))")

    assert (first, second) == ("True\n", "False\n")


def test_the_api_finds_its_bots_again(here: Path) -> None:
    """Two lives of the FastAPI example serve one and the same bot."""
    pytest.importorskip("fastapi", reason="the example needs fastapi")
    script = (
        "import fastapi_bots; from fastapi.testclient import TestClient\n"
        "with TestClient(fastapi_bots.app) as client:\n"
        "    print(client.post('/users/alice/bot').json()['pid'])\n"
    )
    stop = script.replace("post", "delete")

    first, second, last = run(here, "-c", script), run(here, "-c", script), run(here, "-c", stop)

    assert first == second
    assert last == "None\n"


@contextmanager
def serving(here: Path, *command: str, **env: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A program that runs on until the test ends; what it printed is shown if something goes wrong."""
    with (here / "served").open("ab") as printed:
        process = subprocess.Popen(
            command, cwd=here, env={**os.environ, **env}, stdout=printed, stderr=printed, start_new_session=True
        )
    try:
        yield process
    except BaseException:
        print((here / "served").read_text(errors="replace")[-4000:])
        raise
    finally:
        process.kill()
        process.wait()


def test_four_web_processes_share_one_deck_and_its_owner_may_die(here: Path) -> None:
    """Twenty requests at once for one bot start one; the owner is killed -9 and nobody's bot ends."""
    pytest.importorskip("fastapi", reason="the example needs fastapi")
    port = free_port()
    words = ["-m", "uvicorn", "--workers", "4", "--app-dir", str(EXAMPLES), "--port", str(port), "fastapi_four:app"]
    with serving(here, sys.executable, *words), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as web:
        until(lambda: answers(web), "the site answers")
        with ThreadPoolExecutor(20) as crowd:
            started = list(
                crowd.map(lambda _: httpx.put(f"http://127.0.0.1:{port}/bots/alice", timeout=60).json(), range(20))
            )
        assert len({one["pid"] for one in started}) == 1
        members = until(lambda: seen if len(seen := members_of(here)) == 4 else None, "all four have the deck open")
        owner = next(one["pid"] for one in members if one["owner"])

        with pidfd_of(owner) as pidfd:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        until(lambda: [one for one in members_of(here) if one["owner"] and one["pid"] != owner], "another owns it")

        found = until(lambda: answered(web), "the others answer")
        assert [(one["user"], one["pid"]) for one in found] == [("alice", started[0]["pid"])]
        with web.stream("GET", "/events") as stream:
            told = next(line for line in stream.iter_lines() if line.startswith("data: started"))
        assert told == "data: started alice"
        assert web.delete("/bots/alice").json()["state"] == "stopped"


def answers(web: httpx.Client) -> bool:
    """Is anybody there?"""
    with suppress(httpx.HTTPError):
        return web.get("/bots").status_code == httpx.codes.OK
    return False


def answered(web: httpx.Client) -> "list[dict[str, object]] | None":
    """What any of the processes says; the one that held our connection may have died."""
    with suppress(httpx.HTTPError):
        found: list[dict[str, object]] = web.get("/bots").json()
        return found
    return None


def members_of(here: Path) -> "list[dict[str, object]]":
    """Who has the example's deck open."""
    command = [sys.executable, "-m", "everdeck.cli", "members", "--json", "--state", str(here / "bots-state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found: list[dict[str, object]] = json.loads(done.stdout) if done.returncode == 0 else []
    return found


def test_a_django_site_and_its_command_see_the_same_bots(here: Path) -> None:
    """Started by the command, seen by the view and stopped by it, kept by a third process."""
    pytest.importorskip("django", reason="the example needs django")
    site = EXAMPLES / "django_bots"
    state = str(here / "bots-state")
    manage = [sys.executable, str(site / "manage.py")]
    port = free_port()

    def bots(*words: str) -> str:
        done = subprocess.run(
            [*manage, "bots", *words],
            env={**os.environ, "BOTS_STATE": state},
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    with serving(here, *manage, "bots", "keep", BOTS_STATE=state) as keeper:
        until(lambda: "keeping 0 bots" in (here / "served").read_text(), "it keeps")
        started = bots("start", "alice")
        with (
            serving(here, *manage, "runserver", "--noreload", f"127.0.0.1:{port}", BOTS_STATE=state),
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as web,
        ):
            until(lambda: answers_at(web, "/bots/"), "the site answers")
            assert web.post("/bots/bob/").json()["state"] == "running"
            seen = {one["user"]: one["pid"] for one in web.get("/bots/").json()["bots"]}
            assert started == f"alice running {seen['alice']}\n"
            keeper.kill()
            keeper.wait()
            assert web.delete("/bots/alice/").json() == {"user": "alice", "state": "stopped", "pid": None}
            assert web.delete("/bots/nobody/").status_code == httpx.codes.NOT_FOUND
            assert bots("list") == f"alice stopped -\nbob running {seen['bob']}\n"


def answers_at(web: httpx.Client, path: str) -> bool:
    """Is this page there?"""
    with suppress(httpx.HTTPError):
        return web.get(path).status_code == httpx.codes.OK
    return False


def test_everybody_who_says_start_has_an_agent_of_their_own(here: Path) -> None:
    """Two chats, two workers in sandboxes; the platform is killed -9, and the agents remember what they were told."""
    pytest.importorskip("aiohttp", reason="the example needs aiohttp")
    program = EXAMPLES / "telegram_agents.py"
    lines = (program.read_text() + program.with_name("telegram_agent.py").read_text()).splitlines()
    assert len([line for line in lines if line.strip()]) < 60
    if (why := sandbox.why_not_strict()) is not None:
        pytest.skip(f"no strict sandbox here: {why}")
    with TelegramServer() as telegram:
        env = {"TOKEN": telegram.token, "BOT_API": telegram.url}

        def says(chat: int, text: str, reply: str) -> None:
            many = len(telegram.sent(chat))
            telegram.say(text, chat_id=chat)
            telegram.wait_for(lambda server: len(server.sent(chat)) > many, timeout=60)
            assert telegram.sent(chat)[-1] == reply

        with serving(here, sys.executable, str(program), **env):
            telegram.wait_for(lambda server: bool(server.polls()), timeout=60)
            says(7, "hello", "Say /start first.")
            for chat in (7, 8):
                says(chat, "/start", "Your agent is up. Tell it something.")
            says(7, "I like tea", "Noted. I know 1 things about you.")
        with serving(here, sys.executable, str(program), **env):
            says(7, "and cake", "Noted. I know 2 things about you.")
            says(8, "I like coffee", "Noted. I know 1 things about you.")
        with Deck(here / "agents-state") as deck:
            assert deck.status("chat-7").adopted
            assert deck.spec("chat-8").sandbox.level == "strict"
