"""Calls that never return, disks that are full or read-only, programs that cannot start: one worker's trouble each."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from everdeck import Deck, Health, Restart, State, Stop
from everdeck.deck.peek import peek
from everdeck.errors import SpawnFailed
from everdeck.kernel import native as native_calls
from everdeck.kernel.identity import read_stat
from support.deck_owner import owner
from support.hung_mount import hung_mount
from support.mounts import mounted
from support.waiting import until

FOREVER = ["sleep", "1000"]


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes; needs root to mount one."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place = tmp_path / "small"
    place.mkdir()
    if request.param == "tmpfs":
        mount = ["-t", "tmpfs", "-o", "size=4m", "none"]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(16 << 20)
        made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=False, capture_output=True)
        if made.returncode != 0:
            pytest.skip(f"no ext4 can be made here: {made.stderr!r}")
        mount = ["-o", "loop,errors=remount-ro", str(image)]
    with mounted(place, mount):
        yield place


def fill(place: Path) -> Path:
    """Write until not a byte more fits."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 4096, 512, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return filler


def test_a_deck_is_taken_over_though_the_disk_is_full(tmp_path: Path) -> None:
    """The owner was killed and not a byte is free: the next one opens from the reserve, and can stop who filled it."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    with mounted(place, ["-t", "tmpfs", "-o", "size=16m", "none"]):
        state = place / "state"
        with owner(state) as manager:
            pid = manager.ask("start", "greedy", FOREVER)["pid"]
            manager.kill()
        filler = fill(place)
        with Deck(state) as deck:
            assert deck.status("greedy").pid == pid
            assert deck.stop("greedy").state is State.STOPPED
            filler.unlink()


def test_the_worker_that_fills_the_disk_can_be_stopped(small_disk: Path) -> None:
    """Signals need no disk; what is true is shown at once and recorded when there is room again."""
    state = small_disk / "state"
    with Deck(state) as deck:
        pids = [deck.start(f"w{n}", FOREVER).pid for n in range(12)]
        filler = fill(small_disk)
        for number in range(12):
            assert deck.stop(f"w{number}").state is State.STOPPED
        assert all(_is_dead(pid) for pid in pids if pid is not None)
        assert {status.state for status in deck.list()} == {State.STOPPED}
        filler.unlink()
        until(lambda: {one.state for one in peek(state).workers} == {State.STOPPED}, "the registry has it too")
        told = [event.worker for event in deck.events() if event.kind == "stopped"]
        assert sorted(told) == sorted(f"w{n}" for n in range(12)), "each stop is told once"
        assert deck.start("later", FOREVER).state is State.RUNNING
        deck.stop_all()


def test_a_crash_on_a_full_disk_is_shown_and_the_worker_comes_back(small_disk: Path) -> None:
    """What ended is not shown as running; with room again it runs again."""
    with Deck(small_disk / "state") as deck:
        for number in range(40):  # enough that the registry's log needs a page that is not there
            deck.start(f"w{number}", FOREVER, restart=Restart(backoff_seconds=0, max_crashes=1000))
        first = deck.status("w0").pid
        filler = fill(small_disk)
        _use_up_the_reserve(deck)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: deck.status("w0").pid != first, "it is not shown as alive")
        filler.unlink()
        until(lambda: deck.status("w0").state is State.RUNNING, "it runs again when there is room")
        deck.stop_all()


def _use_up_the_reserve(deck: Deck) -> None:
    for number in range(20, 40):
        deck.stop(f"w{number}")


def test_a_disk_that_became_read_only_lets_workers_be_stopped(small_disk: Path, tmp_path: Path) -> None:
    """As ext4 does by itself after an error; the owner's memory has the truth."""
    device = _device_of(small_disk)
    trigger = Path(f"/sys/fs/ext4/{device}/trigger_fs_error")
    if not trigger.exists():
        pytest.skip("only ext4 can be made read-only under open files")
    with Deck(small_disk / "state", durability="process") as deck:
        first = deck.start("first", FOREVER)
        trigger.write_text("a test")
        with pytest.raises(OSError, match=r"[Rr]ead-only"):
            (small_disk / "x").touch()
        assert deck.stop("first").state is State.STOPPED
        assert first.pid is not None
        assert _is_dead(first.pid)
        assert deck.status("first").state is State.STOPPED


def _device_of(place: Path) -> str:
    for line in Path("/proc/mounts").read_text().splitlines():
        device, where, *_ = line.split()
        if where == str(place):
            return Path(device).name
    return "none"


def _is_dead(pid: int) -> bool:
    try:
        return read_stat(pid).dead
    except Exception:  # noqa: BLE001 - gone
        return True


def test_a_program_that_is_missing_for_a_moment_is_tried_again(tmp_path: Path) -> None:
    """A restart in the middle of a deploy: told to the caller, an event, backoff, and then it runs."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    with Deck(tmp_path / "state") as deck:
        deck.start("w", [str(program)], restart=Restart(backoff_seconds=0.05, max_crashes=100))
        program.rename(tmp_path / "away")
        with pytest.raises(SpawnFailed, match="program"):
            deck.restart("w")
        assert deck.status("w").state is State.BACKOFF
        crashed = [event for event in deck.events(worker="w") if event.kind == "crashed"]
        assert "No such file" in crashed[0].detail["error"]
        (tmp_path / "away").rename(program)
        until(lambda: deck.status("w").state is State.RUNNING, "it is started as soon as it can be")
        deck.stop_all()


def test_a_program_that_stays_missing_trips_the_breaker(tmp_path: Path) -> None:
    """It does not try for ever, and it does not give up in silence."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    with Deck(tmp_path / "state") as deck:
        deck.start("w", [str(program)], restart=Restart(backoff_seconds=0.01, backoff_cap_seconds=0.02, max_crashes=2))
        program.unlink()
        with pytest.raises(SpawnFailed):
            deck.restart("w")
        until(lambda: deck.status("w").state is State.FAILED, "the breaker trips")
        kinds = [event.kind for event in deck.events(worker="w")]
        assert kinds[-1] == "failed"
        assert kinds.count("crashed") == 3


def test_open_does_not_wait_for_a_process_that_cannot_be_killed(tmp_path: Path) -> None:
    """It is `stopping` with the reason; the others are recovered; it goes on by itself when the kernel lets go."""
    state = tmp_path / "state"
    with hung_mount(tmp_path / "hung") as server:
        # Bound, so that the next owner has to end it; deaf, because it sits in a call that never returns.
        stuck = [sys.executable, "-c", f"import os; print('in', flush=True); os.stat({str(tmp_path / 'hung' / 'x')!r})"]
        with owner(state) as manager:
            pid = manager.ask("start", "stuck", stuck, lifetime="bound", stop={"grace_seconds": 0.2})["pid"]
            other = manager.ask("start", "other", FOREVER)["pid"]
            until(
                lambda: "request_wait_answer" in Path(f"/proc/{pid}/wchan").read_text(), "it waits for the file system"
            )
            manager.kill()
        began = time.monotonic()
        with Deck(state) as deck:
            took = time.monotonic() - began
            shown = deck.status("stuck")
            assert shown.state is State.STOPPING
            assert "survived SIGKILL" in (shown.health_reason or "")
            assert deck.status("other").pid == other
            assert took < 8, "the patience for a kill is ten seconds, and open does not spend it"
            server.kill()
            until(lambda: deck.status("stuck").pid not in {None, pid}, "it goes on by itself")
            until(lambda: deck.status("stuck").state is not State.STOPPING, "and is what it should be")
            deck.stop_all()


@pytest.mark.parametrize("what", ["program", "cwd"])
def test_a_hung_file_system_fails_its_own_worker_and_freezes_nobody(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is refused after its deadline; meanwhile the others are heard, and the owner can be ended."""
    monkeypatch.setattr("everdeck.deck.reaching.DEADLINE_SECONDS", 1.0)
    hung = tmp_path / "hung"
    with hung_mount(hung), Deck(tmp_path / "state") as deck:
        spec = (
            {"command": [str(hung / "program")]} if what == "program" else {"command": FOREVER, "cwd": str(hung / "x")}
        )
        with ThreadPoolExecutor(1) as pool:
            stuck = pool.submit(deck.start, "stuck", **spec)
            assert deck.start("other", FOREVER, restart=Restart(backoff_seconds=0)).pid
            assert deck.stop("other").state is State.STOPPED
            with pytest.raises(SpawnFailed, match=r"does not answer"):
                stuck.result(timeout=60)
        assert [status.name for status in deck.list()] == ["other"]


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "plain"])
def test_a_file_system_that_hangs_at_the_exec_freezes_nobody(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answered when it was looked at, and not when the program was opened: the start fails, all others go on.

    What comes of it when the file system answers again does not live: nobody asked for it any more.
    """
    monkeypatch.setattr("everdeck.deck.reaching.DEADLINE_SECONDS", 1.0)
    monkeypatch.setenv("EVERDECK_NATIVE", native)
    native_calls._library.cache_clear()
    hung = tmp_path / "hung"
    try:
        with hung_mount(hung, late=True) as server, Deck(tmp_path / "state") as deck:
            deck.start("other", FOREVER)
            with ThreadPoolExecutor(1) as pool:
                stuck = pool.submit(deck.start, "stuck", [str(hung / "program")], restart=Restart("never"))
                until(_starting_threads, "somebody is in the exec")
                assert deck.stop("other").state is State.STOPPED
                assert deck.start("other").pid
                with pytest.raises(SpawnFailed, match=r"does not answer"):
                    stuck.result(timeout=60)
            assert [status.name for status in deck.list()] == ["other"]
            server.kill()
            until(lambda: not _starting_threads(), "the thread came back")
            assert deck.start("stuck", FOREVER).pid, "its lock is free again"
            deck.stop_all()
    finally:
        native_calls._library.cache_clear()


def _starting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "everdeck-start"]


def test_a_check_on_a_hung_file_system_fails_its_own_worker_and_freezes_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is unhealthy and says why; others are served, and repeated checks leave one waiting thread."""
    monkeypatch.setattr("everdeck.deck.reaching.DEADLINE_SECONDS", 1.0)
    hung = tmp_path / "hung"
    with hung_mount(hung), Deck(tmp_path / "state") as deck:
        check = Health(command=(str(hung / "check"),), interval_seconds=0.1, failures=1, start_timeout_seconds=300)
        deck.start("ill", FOREVER, health=check)
        assert deck.start("other", FOREVER).pid
        until(lambda: "does not answer" in (deck.status("ill").health_reason or ""), "it is said why")
        assert deck.stop("other").state is State.STOPPED
        asked = [thread for thread in threading.enumerate() if thread.name == "everdeck-reach"]
        assert len(asked) == 1
        deck.stop_all()


@pytest.mark.parametrize("how", ["shell", "redis"])
def test_a_program_that_daemonises_itself_is_told_of(tmp_path: Path, how: str) -> None:
    """It ended with 0 and what it left was ended: that is said, with what to type instead."""
    if how == "redis":
        command = ["redis-server", "--daemonize", "yes", "--port", "0", "--unixsocket", str(tmp_path / "redis.sock")]
        expected = "redis-server --daemonize no"
        if subprocess.run(["which", "redis-server"], check=False, capture_output=True).returncode != 0:
            pytest.skip("needs redis-server")
    else:
        command = ["sh", "-c", "setsid sleep 1000 & exit 0"]
        expected = "run it in the foreground"
    with Deck(tmp_path / "state") as deck:
        deck.start("d", command, stop=Stop(grace_seconds=5))
        until(lambda: deck.status("d").state is State.EXITED, "its leader left")
        told = next(event for event in deck.events(worker="d") if event.kind == "exited")
        assert "left a daemon behind" in told.detail["reason"]
        assert expected in told.detail["reason"]
        assert told.detail["left_behind"]
        assert expected in (deck.status("d").health_reason or "")


def test_the_reason_of_one_end_is_not_told_of_the_next_start(tmp_path: Path) -> None:
    """It left a daemon behind once; started again in the foreground, and killed there, it is told nothing of that."""
    once = f"[ -e {tmp_path}/flag ] && exec sleep 1000; touch {tmp_path}/flag; setsid sleep 1000 & exit 0"
    with Deck(tmp_path / "state") as deck:
        deck.start("d", ["sh", "-c", once], restart=Restart("never"))
        until(lambda: deck.status("d").health_reason is not None, "its leader left a daemon behind")
        pid = deck.start("d").pid
        assert deck.status("d").health_reason is None
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: deck.status("d").state is State.EXITED, "it was killed")
        told = next(event for event in deck.events(worker="d") if event.kind == "crashed")
        assert "reason" not in told.detail


def test_a_worker_that_simply_ends_is_told_nothing_about_daemons(tmp_path: Path) -> None:
    """Only what left somebody behind hears of it."""
    with Deck(tmp_path / "state") as deck:
        deck.start("d", ["true"])
        until(lambda: deck.status("d").state is State.EXITED, "it ended")
        told = next(event for event in deck.events(worker="d") if event.kind == "exited")
        assert "reason" not in told.detail
