"""A worker's voice and its place: notify, watchdog pings, events, and the lock that makes it the only one."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.child_program import Program


class Ear:
    """A datagram socket that hears what a program says."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(30)
        self.env = {"NOTIFY_SOCKET": address}

    def heard(self) -> str:
        """The next datagram."""
        return self.socket.recv(65536).decode()


@pytest.fixture(params=["path", "abstract"])
def ear(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ear]:
    """Both kinds of addresses that systemd hands out."""
    listening = Ear(str(tmp_path / "n") if request.param == "path" else f"@everdeck-test-{os.getpid()}")
    yield listening
    listening.socket.close()


def test_notify_sends_one_datagram_with_a_line_per_fact(ear: Ear) -> None:
    """Lines and keywords go together; a newline inside a value cannot make a line of its own."""
    source = """
        from everdeck.child import notify
        print(notify("READY=1", STATUS="all\\nwell", MAINPID=7))
    """
    with Program(source, env=ear.env) as program:
        assert ear.heard() == "READY=1\nSTATUS=all well\nMAINPID=7"
        assert program.line() == "True"


def test_an_event_travels_as_json(ear: Ear) -> None:
    """A worker's own event is one field, so that systemd would ignore it."""
    source = "from everdeck.child import emit\nemit({'dead': 7, 'text': 'a\\nb'})"
    with Program(source, env=ear.env):
        key, _, value = ear.heard().partition("=")
        assert key == "X_EVERDECK_EVENT"
        assert json.loads(value) == {"dead": 7, "text": "a\nb"}


def test_a_manager_that_is_away_does_not_hurt(tmp_path: Path) -> None:
    """No socket, a socket nobody listens on, and a full queue are all answered with False, at once."""
    source = """
        import os, socket, sys
        from everdeck.child import notify
        print(notify("READY=1"))
        left = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        left.bind(os.environ["NOTIFY_SOCKET"])
        while notify("STATUS=" + "x" * 1000): pass
        print("full")
        left.close()
        print(notify("READY=1"))
    """
    with Program(source, env={"NOTIFY_SOCKET": str(tmp_path / "n")}) as program:
        assert [program.line() for _ in range(3)] == ["False", "full", "False"]
        assert program.ended() == 0


@pytest.mark.parametrize("ear", ["path"], indirect=True)
def test_main_says_ready_pings_and_says_farewell(ear: Ear) -> None:
    """``main`` wires all of it: READY=1, pings at half the watchdog's time, STOPPING=1 when told to leave."""
    source = """
        import asyncio
        from everdeck.child import main
        main(asyncio.Event().wait)
    """
    with Program(source, env=ear.env | {"WATCHDOG_USEC": "100000"}) as program:
        assert ear.heard() == "READY=1"
        assert ear.heard() == "WATCHDOG=1\nREADY=1"
        assert ear.heard() == "WATCHDOG=1\nREADY=1"
        program.cut_lifeline()
        while (said := ear.heard()) != "STOPPING=1":
            assert said == "WATCHDOG=1\nREADY=1"
        assert program.ended() == 0
        assert program.errors() == ""


@pytest.mark.parametrize("ear", ["path"], indirect=True)
def test_the_watchdog_thread_stops_pinging_without_progress(ear: Ear) -> None:
    """A thread pings while the function it was given says that there is progress, and no longer."""
    source = """
        from everdeck.child import watchdog_thread, lifeline
        left = iter([True, True, False])
        watchdog_thread(lambda: next(left))
        with lifeline() as life:
            life.wait()
    """
    with Program(source, env=ear.env | {"WATCHDOG_USEC": "20000"}) as program:
        assert ear.heard() == "WATCHDOG=1"
        assert ear.heard() == "WATCHDOG=1"
        program.cut_lifeline()
        assert program.ended() == 0
        ear.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            ear.heard()


@pytest.mark.parametrize("ear", ["path"], indirect=True)
def test_trio_pings_too(ear: Ear) -> None:
    """The async helper sleeps with the loop that runs it."""
    source = """
        import trio
        from everdeck.child import lifeline, watchdog_pings

        async def work():
            async with lifeline():
                await watchdog_pings()

        trio.run(work)
    """
    with Program(source, env=ear.env | {"WATCHDOG_USEC": "20000"}) as program:
        assert [ear.heard(), ear.heard()] == ["WATCHDOG=1", "WATCHDOG=1"]
        program.signal(signal.SIGTERM)
        assert program.ended() == 0


def test_a_watchdog_for_another_process_is_not_ours() -> None:
    """WATCHDOG_PID names the process that is watched; a child that inherits the variables stays silent."""
    source = "from everdeck.child import watchdog_seconds\nprint(watchdog_seconds())"
    with Program(source, env={"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}) as program:
        assert program.line() == "None"


HOLD = """
    import sys
    from everdeck.child import lifeline, singleton
    singleton("bot-7")
    print("alone", flush=True)
    with lifeline() as life:
        life.wait()
"""


def test_a_second_instance_leaves_with_code_2(tmp_path: Path) -> None:
    """The copy started by hand is told who runs and leaves; when the first dies by SIGKILL the next one may run."""
    env = {"EVERDECK_RUNTIME_DIR": str(tmp_path / "run")}
    with Program(HOLD, env=env) as first:
        assert first.line() == "alone"
        with Program(HOLD, env=env) as second:
            assert second.ended() == 2
            assert second.errors() == (
                f"bot-7: another instance is running (pid {first.process.pid}); this one leaves\n"
            )
        first.signal(signal.SIGKILL)
        assert first.ended() == -signal.SIGKILL
        with Program(HOLD, env=env) as third:
            assert third.line() == "alone"


def test_the_lock_is_not_passed_to_programs_the_worker_runs(tmp_path: Path) -> None:
    """A helper that outlives the worker does not keep the next instance out."""
    env = {"EVERDECK_RUNTIME_DIR": str(tmp_path / "run")}
    source = """
        import subprocess, sys
        from everdeck.child import singleton
        singleton("bot-7")
        helper = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=-3, stderr=-3)
        print(helper.pid, flush=True)
        sys.stdin.read()
    """
    with Program(source, env=env) as first:
        helper = os.pidfd_open(int(first.line()))
        try:
            first.signal(signal.SIGKILL)
            first.ended()
            with Program(HOLD, env=env) as second:
                assert second.line() == "alone"
        finally:
            signal.pidfd_send_signal(helper, signal.SIGKILL)
            os.close(helper)


def test_a_runtime_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """In a directory that somebody else can write to, somebody else could take our place."""
    loose = tmp_path / "run"
    loose.mkdir()
    loose.chmod(0o777)
    with Program(HOLD, env={"EVERDECK_RUNTIME_DIR": str(loose)}) as program:
        assert program.ended() == 1
        assert "PermissionError" in program.errors()


def test_a_name_that_is_no_file_name_is_refused() -> None:
    """The name becomes a file's name: no slash, nothing empty."""
    from everdeck.child import Singleton

    for name in ("", "../x", "a/b", "a\0b", "x" * 129):
        with pytest.raises(ValueError, match="singleton name"):
            Singleton.take(name)


def test_a_strangers_directory_under_our_name_is_no_denial() -> None:
    """Anybody may make /tmp/everdeck-UID; the next name is taken instead, and by every copy the same."""
    if os.getuid() != 0:
        pytest.skip("needs root to be two other users")
    uid = 54321
    script = (
        "import os, sys\n"
        "from everdeck.child import runtime_directory\n"
        "os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))\n"
        "print(runtime_directory())\n"
    )
    squatted = Path(f"/tmp/everdeck-{uid}")
    squatted.mkdir(mode=0o777)
    made: set[str] = set()
    try:
        os.chown(squatted, uid + 1, uid + 1)
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", script, str(uid)],
                env={"PATH": os.environ["PATH"]},
                capture_output=True,
                text=True,
                check=False,
                cwd="/",
            )
            assert done.returncode == 0, done.stderr
            made.add(done.stdout.strip())
        assert made == {f"{squatted}.1"}
    finally:
        squatted.rmdir()
        for path in made:
            Path(path).rmdir()
