"""The owner is killed, and the worst children are gone all the same: the guardian, alone, insists."""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import child_worst_roles
from support.child_owner import Owner, Reports

WORST = Path(__file__).parents[1] / "support" / "child_worst.py"
GRACE_SECONDS = 0.4
A_LITTLE_SECONDS = 10.0  # generous: a loaded machine is not what is tested


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Reports]:
    """Where the workers say who they are."""
    fifo = Reports(tmp_path / "fifo")
    yield fifo
    fifo.close()


def start_worst(owner: Owner, state: Path, kind: str, name: str, fifo: Path) -> None:
    """Start one of the worst children, bound."""
    owner.do(
        "start",
        state,
        name,
        [sys.executable, "-S", "-E", str(WORST), kind, name, str(fifo)],
        lifetime="bound",
        stop={"grace_seconds": GRACE_SECONDS},
    )


def test_the_owner_is_killed_and_every_worst_child_is_gone(tmp_path: Path, reports: Reports) -> None:
    """All kinds at once: deaf, daemonised, detached, without descriptors, without environment, stopped, forking."""
    state = tmp_path / "state"
    with Owner() as owner:
        owner.do("open", state)
        for kind, roles in child_worst_roles.ROLES.items():
            start_worst(owner, state, kind, kind, reports.path)
            reports.await_roles(kind, *roles)
        guardian = os.pidfd_open(owner.do("guardian", state))
        # The one that cleared its environment and its descriptors is found by its cgroup or its lock.
        killed_at = owner.kill()
        left = {kind: reports.await_gone(kind, GRACE_SECONDS + A_LITTLE_SECONDS) for kind in child_worst_roles.ROLES}
        took = time.monotonic() - killed_at
        assert not any(left.values()), left
        print(f"stubborn trees: gone {took:.2f} s after the owner's SIGKILL, with a grace of {GRACE_SECONDS} s")
        reports.pidfds["guardian", "guardian"] = guardian
        assert reports.await_gone("guardian", A_LITTLE_SECONDS) == []
    assert _processes_of(state) == []
    said = (state / "guardian.log").read_text(encoding="utf-8")
    assert said.count('"gone": true') == len(child_worst_roles.ROLES), said


def test_what_was_forked_before_the_leader_left_is_ended_too(tmp_path: Path, reports: Reports) -> None:
    """The leader obeys its lifeline; its deaf family does not, and is ended by the guardian."""
    state = tmp_path / "state"
    source = (
        "import os, runpy, sys, threading\n"
        "sys.argv[1:] = ['setsid', 'bot', sys.argv[1]]\n"
        "threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()\n"
        f"runpy.run_path({str(WORST)!r}, run_name='__main__')\n"
    )
    with Owner() as owner:
        owner.do("open", state)
        owner.do(
            "start",
            state,
            "bot",
            [sys.executable, "-W", "ignore", "-c", source, str(reports.path)],
            lifetime="bound",
            stop={"grace_seconds": GRACE_SECONDS},
        )
        reports.await_roles("bot", "leader", "child")
        owner.kill()
        assert reports.await_gone("bot", GRACE_SECONDS + A_LITTLE_SECONDS) == []


@pytest.mark.parametrize("program", ["redis-server", "node", "gunicorn"])
def test_unmodified_programs(tmp_path: Path, program: str) -> None:
    """Programs that know nothing of lifelines leave with the owner: by SIGTERM, in their own way."""
    state = tmp_path / "state"
    command, health = _real_program(program, tmp_path)
    with Owner() as owner:
        owner.do("open", state)
        owner.do("start", state, program, command, lifetime="bound", port=True, health=health)
        pids = [*_await_ready(owner, state, program), owner.do("guardian", state)]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        try:
            owner.kill()
            for pid, pidfd in zip(pids, pidfds, strict=True):
                assert select.select([pidfd], [], [], 5 + A_LITTLE_SECONDS)[0], f"{program}: {pid} outlived its owner"
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
    said = (state / "guardian.log").read_text(encoding="utf-8")
    assert '"killed": []' in said, "it had to be killed, though it knows SIGTERM"


def _real_program(program: str, tmp_path: Path) -> tuple[list[str], dict[str, object]]:
    path = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if path is None:
        pytest.skip(f"{program} is not installed")
    match program:
        case "redis-server":
            return ["sh", "-c", f'exec {path} --port $PORT --save "" --dir .'], {
                "tcp": "127.0.0.1:$PORT",
                "interval_seconds": 0.1,
            }
        case "node":
            script = (
                "require('http').createServer((q, r) => r.end('well'))"
                ".listen(process.env.PORT, '127.0.0.1'); process.on('SIGTERM', () => process.exit(0))"
            )
            return [path, "-e", script], {"http": "http://127.0.0.1:$PORT/", "interval_seconds": 0.1}
        case _:
            (tmp_path / "app.py").write_text("def app(env, start):\n    start('200 OK', [])\n    return [b'well']\n")
            # gunicorn speaks systemd's notify protocol by itself: READY=1 makes it ready.
            serve = f"exec {path} --chdir {tmp_path} -b 127.0.0.1:$PORT --workers 2 app:app"
            return ["sh", "-c", serve], {"notify": True}


def _await_ready(owner: Owner, state: Path, name: str) -> list[int]:
    deadline = time.monotonic() + 30
    while owner.do("status", state, name)["state"] != "running":
        assert time.monotonic() < deadline, owner.do("logs", state, name)
    assert any(event["kind"] == "ready" for event in owner.do("events", state))
    return [process["pid"] for process in owner.do("tree", state, name)]


def _processes_of(state: Path) -> list[int]:
    """Processes that say in their environment that they are a worker of this deck."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"EVERDECK_DIR={state}/".encode() in environ:
                found.append(int(entry.name))
    return found


def test_the_guardian_leaves_a_program_alone_that_took_a_pid(tmp_path: Path, reports: Reports) -> None:
    """Told of an identity that is not alive any more, the guardian signals nobody, whoever has the pid now."""
    state = tmp_path / "state"
    with Owner() as owner:
        owner.do("open", state)
        start_worst(owner, state, "deaf", "bot", reports.path)
        reports.await_roles("bot", "leader")
        # A stranger with the same command line and no cookie lives beside it.
        stranger = subprocess.Popen(
            [sys.executable, "-S", "-E", str(WORST), "deaf", "stranger", str(reports.path)], start_new_session=True
        )
        reports.await_roles("stranger", "leader")
        owner.kill()
        assert reports.await_gone("bot", GRACE_SECONDS + A_LITTLE_SECONDS) == []
        assert reports.alive("stranger") == ["leader"]
        stranger.send_signal(signal.SIGKILL)
        stranger.wait()
