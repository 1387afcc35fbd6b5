"""A fence that is stopped, and one whose clock is stepped: the program ends in time, or goes on."""

import os
import signal
from pathlib import Path

from everdeck import Deck
from support.cluster_beats import COMMAND, Beats, beats_file, now, overlaps
from support.cluster_machines import Cluster, until


def test_a_fence_is_stopped_and_continued(cluster: Cluster, namespace: str, deck: Deck) -> None:
    """The watchdog ends the program in time; the continued fence starts it again only with its Lease."""
    assert deck.start("alice", COMMAND).state == "running"
    beats = Beats(beats_file(cluster.volume(namespace, "alice"), "alice"))
    until(beats.stretches, "the first beat")
    fence = _fence_of(namespace)
    lives = beats.lives
    os.kill(fence, signal.SIGSTOP)
    stopped_at = now()
    try:
        until(lambda: now() - beats.newest.last > 2, "the program is ended", 30)
        assert beats.newest.last - stopped_at < 8, "it lived longer than its Lease"
    finally:
        os.kill(fence, signal.SIGCONT)

    beats.next_life(lives)
    assert not overlaps(beats.settled())


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
        return cluster.get("lease", "alice", namespace=namespace)["spec"]["renewTime"][:13]

    at_first = renewed()
    clock.write_text("+7200")
    until(lambda: renewed() > at_first, "the node's clock is ahead")
    beats.settled()
    clock.write_text("-7200")
    until(lambda: renewed() < at_first, "the node's clock is behind")

    assert not overlaps(beats.settled())
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
            if b"everdeck.cluster.fence" in words and ours:
                inside = next(line for line in first.splitlines() if line.startswith("NSpid:")).split()
                if inside[-1] == "1":
                    return int(entry.name)
    raise AssertionError("no fence was found")
