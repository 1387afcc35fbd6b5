"""One poller per token, and who else might be polling."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everdeck.errors import PollerConflict
from everdeck.feed import Inbox, PollerLock, local_suspects

TOKEN = "123456:AAF-a-token-that-only-this-test-knows"

HOLDER = """
import os, sys
from everdeck.feed import PollerLock
with PollerLock(os.environ["BOT_TOKEN"]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[str]"]:
    """Another process that polls with the token, in a runtime directory of this test."""
    monkeypatch.setenv("EVERDECK_RUNTIME_DIR", str(tmp_path / "run"))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env=os.environ | {"BOT_TOKEN": TOKEN},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_poller_is_refused_and_told_who_polls(holder: "subprocess.Popen[str]") -> None:
    """Another token is free; when the holder dies, however, so is this one."""
    with pytest.raises(PollerConflict, match=f"pid {holder.pid}") as caught, PollerLock(TOKEN):
        pass
    assert TOKEN not in str(caught.value)
    with PollerLock("another token"):
        pass
    holder.kill()
    holder.wait()
    with PollerLock(TOKEN):
        pass


def test_the_lock_is_released_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its file's name says nothing about the token."""
    monkeypatch.setenv("EVERDECK_RUNTIME_DIR", str(tmp_path / "run"))
    for _ in range(2):
        with PollerLock(TOKEN) as lock:
            assert lock.acquire() is lock
            with pytest.raises(PollerConflict):
                PollerLock(TOKEN).acquire()
    names = [file.name for file in (tmp_path / "run").iterdir()]
    assert len(names) == 1
    assert "123456" not in names[0]


def test_suspects_carry_the_token_in_their_environment_or_command(holder: "subprocess.Popen[str]") -> None:
    """They are named without showing the token."""
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", TOKEN], stdin=subprocess.PIPE)
    try:
        suspects = {suspect.pid: suspect.command for suspect in local_suspects(TOKEN)}
    finally:
        other.communicate()
    assert set(suspects) == {holder.pid, other.pid}
    assert "<token>" in suspects[other.pid]
    assert not any(TOKEN in command for command in suspects.values())


def test_a_suspect_is_known_by_the_lock_or_by_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token comes from a file: nothing of it is in a command line or an environment."""
    monkeypatch.setenv("EVERDECK_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "token").write_text(TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connects = f"import socket\nkept = socket.create_connection(('127.0.0.1', {port}))\n"
        locks = "from everdeck.feed import PollerLock\nkept = PollerLock(open('token').read()).acquire()\n"
        with _waiting(connects, tmp_path) as talks:
            assert [(one.pid, one.by) for one in local_suspects(TOKEN, f"127.0.0.1:{port}")] == [
                (talks.pid, "connection")
            ]
            with _waiting(locks, tmp_path) as holds:
                # Who merely talks to the server may be another bot.
                assert [(one.pid, one.by) for one in local_suspects(TOKEN, f"127.0.0.1:{port}")] == [
                    (holds.pid, "lock")
                ]


def test_forked_children_let_go_of_the_lock_and_of_the_inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of processes outlives a bot that is killed; the next bot can start all the same."""
    monkeypatch.setenv("EVERDECK_RUNTIME_DIR", str(tmp_path / "run"))
    forks = f"""
import asyncio, multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
from everdeck.feed import Inbox, PollerLock
kept = PollerLock({TOKEN!r}).acquire()
async def main():
    async with Inbox("bot.db"):
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
        print(pool.submit(os.getpid).result(), flush=True)
        import sys; sys.stdin.read()
asyncio.run(main())
"""
    child = None
    with _waiting(forks, tmp_path, ready=False) as bot:
        try:
            assert bot.stdout is not None
            child = int(bot.stdout.readline())
            with pytest.raises(PollerConflict):
                PollerLock(TOKEN).acquire()
            bot.kill()
            bot.wait()
            os.kill(child, 0)  # it lives
            with PollerLock(TOKEN):
                asyncio.run(_opened(tmp_path / "bot.db"))
        finally:
            if child is not None:
                os.kill(child, signal.SIGKILL)


async def _opened(path: Path) -> None:
    async with Inbox(path):
        pass


@contextmanager
def _waiting(program: str, directory: Path, *, ready: bool = True) -> Iterator["subprocess.Popen[str]"]:
    """A program that does this and waits for the end of its input."""
    after = "import sys\nprint('ready', flush=True)\nsys.stdin.read()\n" if ready else ""
    process = subprocess.Popen(
        [sys.executable, "-c", program + after], cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if ready:
            assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()
