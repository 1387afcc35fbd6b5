"""Nodes die, are cut off and come back; servers are killed; clocks stand still: a worker never runs twice.

``TRIALS=20`` repeats power cuts and partitions as often. Each trial's numbers are printed (``-s`` shows them).
"""

import os
import signal
import time
from pathlib import Path

import pytest

from everdeck import Deck
from support.cluster_beats import COMMAND, Stretch, beats_file, overlaps, stretches
from support.cluster_machines import Cluster, Operator, until

TRIALS = int(os.environ.get("TRIALS", "1"))
BACK_WITHIN_SECONDS = 30.0


@pytest.fixture
def beats(cluster: Cluster, namespace: str, deck: Deck) -> Path:
    """A worker that beats, and where."""
    assert deck.start("alice", COMMAND).state == "running"
    path = beats_file(cluster.volume(namespace, "alice"), "alice")
    until(lambda: stretches(path), "the first beat")
    return path


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _next_life(beats: Path, lives: int, seconds: float = 150) -> Stretch:
    """The first copy after so many others."""
    until(lambda: len(stretches(beats)) > lives, f"copy {lives + 1}", seconds)
    return stretches(beats)[lives]


def _settled(beats: Path) -> list[Stretch]:
    """Every life, when the newest one has beaten for a while."""
    newest = stretches(beats)[-1]
    until(lambda: stretches(beats)[-1].last > newest.last + 2, "the newest copy goes on")
    return stretches(beats)


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_node_loses_power(cluster: Cluster, namespace: str, beats: Path, operator: Operator, trial: int) -> None:
    """The worker is back on the other node within half a minute, and the two never lived together."""
    node = cluster.node_of(namespace, "alice")
    lives, cut_at = len(stretches(beats)), _now()
    cluster.do("power-off", node)

    following = _next_life(beats, lives)
    print(f"power-off trial {trial}: back after {following.first - cut_at:.1f} s")

    assert not overlaps(_settled(beats))
    assert cluster.node_of(namespace, "alice") != node
    assert following.first - cut_at < BACK_WITHIN_SECONDS


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_node_is_cut_off_and_healed(
    cluster: Cluster, namespace: str, beats: Path, operator: Operator, trial: int
) -> None:
    """Its copy ends before the next one begins, and does not come back when the cable does."""
    node = cluster.node_of(namespace, "alice")
    lives, cut_at = len(stretches(beats)), _now()
    cluster.do("partition", node)

    following = _next_life(beats, lives)
    print(f"partition trial {trial}: back after {following.first - cut_at:.1f} s")
    cluster.do("heal", node)
    until(lambda: node in cluster.do("kubectl", "get", "nodes", "--no-headers"), "the node is known")

    assert not overlaps(_settled(beats))
    assert following.first - cut_at < BACK_WITHIN_SECONDS
    assert len(stretches(beats)) == lives + 1, "the healed node's old copy came back"


def test_the_api_server_is_away_for_a_minute(cluster: Cluster, beats: Path, operator: Operator) -> None:
    """Nobody can renew, so the program rests; it goes on by itself when the server is back."""
    lives = len(stretches(beats))
    cluster.do("stop", "apiserver")
    until(lambda: _now() - stretches(beats)[-1].last > 5, "the program rests")
    away_since = _now()
    until(lambda: _now() - away_since > 60, "a minute", 90)
    assert len(stretches(beats)) == lives
    cluster.do("start", "apiserver")

    _next_life(beats, lives)
    assert not overlaps(_settled(beats))


def test_etcd_is_restarted(cluster: Cluster, beats: Path, operator: Operator) -> None:
    """Shorter than the Lease: nothing ends."""
    cluster.do("stop", "etcd")
    cluster.do("start", "etcd")

    assert not overlaps(_settled(beats))


def test_the_operator_is_killed_before_a_node_dies(
    cluster: Cluster, namespace: str, beats: Path, operator: Operator
) -> None:
    """The next one does its work."""
    operator.kill()
    lives = len(stretches(beats))
    cluster.do("power-off", cluster.node_of(namespace, "alice"))
    successor = Operator(namespace)
    try:
        _next_life(beats, lives)
        assert not overlaps(_settled(beats))
    finally:
        successor.kill()


def test_a_kubelet_is_restarted(cluster: Cluster, namespace: str, beats: Path, operator: Operator) -> None:
    """Its pods do not notice."""
    lives = len(stretches(beats))
    cluster.do("restart-kubelet", cluster.node_of(namespace, "alice"))

    assert len(_settled(beats)) == lives


def test_a_fence_is_stopped_and_continued(cluster: Cluster, namespace: str, beats: Path, operator: Operator) -> None:
    """The watchdog ends the program in time; the continued fence starts it again only with its Lease."""
    fence = _fence_of(namespace)
    lives = len(stretches(beats))
    os.kill(fence, signal.SIGSTOP)
    stopped_at = _now()
    try:
        until(lambda: _now() - stretches(beats)[-1].last > 2, "the program is ended", 30)
        assert stretches(beats)[-1].last - stopped_at < 8, "it lived longer than its Lease"
    finally:
        os.kill(fence, signal.SIGCONT)

    _next_life(beats, lives)
    assert not overlaps(_settled(beats))


def _fence_of(namespace: str) -> int:
    """The fence's pid on this machine: the first process of alice's container in this namespace."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes().split(b"\0")
                first = (entry / "status").read_text()
            except OSError:
                continue
            ours = f"EVERDECK_NAMESPACE={namespace}".encode() in environment
            if b"everdeck.cluster.fence" in words and b"--watchdog" not in words and ours:
                inside = next(line for line in first.splitlines() if line.startswith("NSpid:")).split()
                if inside[-1] == "1":
                    return int(entry.name)
    raise AssertionError("no fence was found")
