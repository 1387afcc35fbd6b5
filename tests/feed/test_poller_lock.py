"""One poller per token, and who else might be polling."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck.errors import PollerConflict
from everdeck.feed import PollerLock, local_suspects

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
