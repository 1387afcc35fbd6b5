"""Limits under systemd: where controllers may be enabled, what the unit says, and how a lack of memory is told."""

import signal
from pathlib import Path

import msgspec
import pytest

from everdeck.cli.export import delegation
from everdeck.deck.ending import exit_detail, out_of_memory
from everdeck.errors import LimitUnavailable
from everdeck.kernel import controllers
from everdeck.model import Exit, Killed, Limits, WorkerSpec


def _group(path: Path, *, controllers_here: str = "", enabled: str = "", pids: str = "") -> Path:
    """A directory with the files of a cgroup: what we read and write, without the kernel behind it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.controllers").write_text(controllers_here)
    (path / "cgroup.subtree_control").write_text(enabled)
    (path / "cgroup.type").write_text("domain\n")
    (path / "cgroup.procs").write_text(pids)
    return path


def test_nothing_is_enabled_where_a_stranger_sits(tmp_path: Path) -> None:
    """The kernel would take cpu and pids, and turn the directory into `domain threaded`: refused, with the way out."""
    home = _group(tmp_path / "session.scope", controllers_here="cpu memory pids", pids="1\n")
    worker = home / "everdeck-1" / "alice"
    with pytest.raises(LimitUnavailable, match=r"limits.pids.*pid 1 .*systemd-run.* Delegate=yes everdeck up"):
        controllers.apply(worker, Limits(pids=5))
    assert (home / "cgroup.subtree_control").read_text() == ""
    assert set(controllers.missing(home)) == {"memory", "cpu", "pids"}


def test_a_controller_that_is_not_delegated_is_named(tmp_path: Path) -> None:
    """Those that are there can be had; of the others the reason says which one is missing where."""
    home = _group(tmp_path / "user.service", controllers_here="memory pids")
    assert list(controllers.missing(home)) == ["cpu"]
    with pytest.raises(LimitUnavailable, match=r"limits.cpu_percent.*'cpu' is not available in .*user\.service"):
        controllers.apply(home / "everdeck-1" / "alice", Limits(cpu_percent=20))


def test_what_holds_already_is_not_asked_for_again(tmp_path: Path) -> None:
    """With enabled controllers nobody is moved and only the limit is written."""
    home = _group(tmp_path / "unit", enabled="cpu memory pids", pids="1\n")
    deck = _group(home / "everdeck-1", enabled="cpu memory pids")
    worker = _group(deck / "alice")
    controllers.apply(worker, Limits(memory_bytes=1 << 20, cpu_percent=20, pids=7))
    assert (worker / "memory.max").read_text() == "1048576"
    assert (worker / "cpu.max").read_text() == "20000 100000"
    assert (worker / "pids.max").read_text() == "7"
    assert controllers.missing(home) == {}


def test_kills_are_counted_from_memory_events(tmp_path: Path) -> None:
    """`oom` counts how often the limit was hit, `oom_kill` who died of it."""
    worker = _group(_group(tmp_path / "deck", enabled="memory") / "alice")
    assert controllers.oom_kills(worker) == 0
    (worker / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert controllers.oom_kills(worker) == 2


@pytest.mark.parametrize(
    ("version", "subgroup", "release"), [(252, False, True), (254, True, False), (257, True, False), (None, True, True)]
)
def test_the_unit_fits_the_systemd_it_is_for(version: int | None, subgroup: bool, release: bool) -> None:
    """From 254 on systemd puts the daemon into a leaf itself; below, its controllers are released at each end."""
    told = delegation(version)
    assert "Delegate=yes\n" in told
    assert ("DelegateSubgroup=everdeck-owner" in told) is subgroup
    assert ("ExecStopPost=-" in told and "everdeck.kernel.controllers release" in told) is release


def test_a_kill_for_want_of_memory_is_not_a_bare_sigkill() -> None:
    """In words and in JSON, there and back; the usual kill is written as ever."""
    told = Killed(signal.SIGKILL, oom=True)
    assert str(told) == "killed by SIGKILL (out of memory)"
    assert exit_detail(told) == {"kind": "killed", "signal": 9, "oom": True}
    assert exit_detail(Killed(signal.SIGKILL)) == {"kind": "killed", "signal": 9}
    assert msgspec.json.decode(msgspec.json.encode(told), type=Exit) == told
    spec = WorkerSpec(("x",), limits=Limits(memory_bytes=4096))
    assert out_of_memory(spec, 1) == "out of memory at its limit of 4096 bytes: the kernel killed a process of it"
    assert "killed 2 processes of it" in out_of_memory(spec, 2)
