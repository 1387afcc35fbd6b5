"""Nodes die, are cut off and come back; servers are killed; clocks stand still: a worker never runs twice.

``TRIALS=20`` repeats power cuts and partitions as often. Each trial's numbers are printed (``-s`` shows them).
"""

import os
import signal
import time
from pathlib import Path

import pytest

from everdeck import Deck
from support.cluster_beats import COMMAND, Beats, Stretch, beats_file, overlaps
from support.cluster_machines import Cluster, Operator, until

TRIALS = int(os.environ.get("TRIALS", "1"))
BACK_WITHIN_SECONDS = 30.0


@pytest.fixture
def beats(cluster: Cluster, namespace: str, deck: Deck) -> Beats:
    """What a worker that beats writes."""
    assert deck.start("alice", COMMAND).state == "running"
    beats = Beats(beats_file(cluster.volume(namespace, "alice"), "alice"))
    until(beats.stretches, "the first beat")
    return beats


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _next_life(beats: Beats, lives: int, seconds: float = 150) -> Stretch:
    """The first copy after so many others."""
    until(lambda: beats.lives > lives, f"copy {lives + 1}", seconds)
    return beats.stretches()[lives]


def _settled(beats: Beats) -> list[Stretch]:
    """Every life, when the newest one has beaten for a while."""
    newest = beats.newest
    until(lambda: beats.newest.last > newest.last + 2, "the newest copy goes on")
    return beats.stretches()


@pytest.mark.usefixtures("operator")
def test_a_node_loses_power(cluster: Cluster, namespace: str, beats: Beats) -> None:
    """The worker is back on the other node within half a minute, and the two never lived together."""
    for trial in range(TRIALS):
        node = cluster.node_of(namespace, "alice")
        lives, cut_at = beats.lives, _now()
        cluster.do("power-off", node)

        back = _next_life(beats, lives).first - cut_at
        print(f"power-off, trial {trial}: back after {back:.1f} s", flush=True)

        assert not overlaps(_settled(beats))
        assert cluster.node_of(namespace, "alice") != node
        assert back < BACK_WITHIN_SECONDS
        cluster.all_is_well()


@pytest.mark.usefixtures("operator")
def test_a_node_is_cut_off_and_healed(cluster: Cluster, namespace: str, beats: Beats) -> None:
    """Its copy ends before the next one begins, and does not come back when the cable does."""
    for trial in range(TRIALS):
        node = cluster.node_of(namespace, "alice")
        lives, cut_at = beats.lives, _now()
        cluster.do("partition", node)

        back = _next_life(beats, lives).first - cut_at
        print(f"partition, trial {trial}: back after {back:.1f} s", flush=True)
        cluster.all_is_well()

        assert not overlaps(_settled(beats))
        assert back < BACK_WITHIN_SECONDS
        assert beats.lives == lives + 1, "the healed node's old copy came back"


def test_the_api_server_is_away_for_a_minute(cluster: Cluster, beats: Beats, operator: Operator) -> None:
    """Nobody can renew, so the program rests; it goes on by itself when the server is back."""
    lives = beats.lives
    cluster.do("stop", "apiserver")
    until(lambda: _now() - beats.newest.last > 5, "the program rests")
    away_since = _now()
    until(lambda: _now() - away_since > 60, "a minute", 90)
    assert beats.lives == lives
    cluster.do("start", "apiserver")

    _next_life(beats, lives)
    assert not overlaps(_settled(beats))


def test_etcd_is_restarted(cluster: Cluster, beats: Beats, operator: Operator) -> None:
    """Shorter than the Lease: nothing ends."""
    cluster.do("stop", "etcd")
    cluster.do("start", "etcd")

    assert not overlaps(_settled(beats))


def test_the_operator_is_killed_before_a_node_dies(
    cluster: Cluster, namespace: str, beats: Beats, operator: Operator
) -> None:
    """The next one does its work."""
    operator.kill()
    lives = beats.lives
    cluster.do("power-off", cluster.node_of(namespace, "alice"))
    successor = Operator(namespace)
    try:
        _next_life(beats, lives)
        assert not overlaps(_settled(beats))
    finally:
        successor.kill()


def test_a_kubelet_is_restarted(cluster: Cluster, namespace: str, beats: Beats, operator: Operator) -> None:
    """Its pods do not notice."""
    lives = beats.lives
    cluster.do("restart-kubelet", cluster.node_of(namespace, "alice"))

    assert len(_settled(beats)) == lives


def test_a_fence_is_stopped_and_continued(cluster: Cluster, namespace: str, beats: Beats, operator: Operator) -> None:
    """The watchdog ends the program in time; the continued fence starts it again only with its Lease."""
    fence = _fence_of(namespace)
    lives = beats.lives
    os.kill(fence, signal.SIGSTOP)
    stopped_at = _now()
    try:
        until(lambda: _now() - beats.newest.last > 2, "the program is ended", 30)
        assert beats.newest.last - stopped_at < 8, "it lived longer than its Lease"
    finally:
        os.kill(fence, signal.SIGCONT)

    _next_life(beats, lives)
    assert not overlaps(_settled(beats))


_FAKED = {
    "LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "FAKETIME_TIMESTAMP_FILE": "/everdeck/clock",
    "FAKETIME_NO_CACHE": "1",
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
}


def test_the_clock_of_a_node_is_stepped(cluster: Cluster, namespace: str, deck: Deck) -> None:
    """An hour forward, two back: the fence counts with a clock that nobody steps, and the program goes on."""
    assert deck.start("alice", COMMAND).state == "running"
    volume = cluster.volume(namespace, "alice")
    clock = volume / "clock"
    clock.write_text("+0")
    environment = [f"{name}={value}" for name, value in _FAKED.items()]
    cluster.do("kubectl", "set", "env", "statefulset/alice", "-n", namespace, *environment)
    deck.restart("alice")
    beats = Beats(beats_file(volume, "alice"))
    lives = beats.lives

    def renewed() -> str:
        return cluster.get("lease", "alice", "-n", namespace)["spec"]["renewTime"][:13]

    at_first = renewed()
    clock.write_text("+7200")
    until(lambda: renewed() > at_first, "the node's clock is ahead")
    _settled(beats)
    clock.write_text("-7200")
    until(lambda: renewed() < at_first, "the node's clock is behind")

    assert not overlaps(_settled(beats))
    assert beats.lives == lives, "the program was ended by a step of the clock"


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
