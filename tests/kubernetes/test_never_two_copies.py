"""Nodes die, are cut off and come back; servers are killed: a worker, always the same one, never runs twice.

``TRIALS=20`` repeats power cuts and partitions as often. Each trial's numbers are printed (``-s`` shows them).
"""

import os
from collections.abc import Iterator
from statistics import median

import pytest

from everdeck import Deck
from support.cluster_beats import COMMAND, Beats, beats_file, now, overlaps
from support.cluster_machines import Cluster, Operator, fresh_namespace, until

TRIALS = int(os.environ.get("TRIALS", "1"))
BACK_WITHIN_SECONDS = 30.0


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    """One for all of these tests."""
    cluster.all_is_well()
    with fresh_namespace(cluster) as name:
        yield name
        cluster.all_is_well()


@pytest.fixture(scope="module")
def operator(namespace: str) -> Iterator[Operator]:
    """An operator for it."""
    made = Operator(namespace)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def every_beat(cluster: Cluster, namespace: str) -> Beats:
    """What the worker writes."""
    with Deck(f"kubernetes:{namespace}") as deck:
        assert deck.start("alice", COMMAND).state == "running"
    beats = Beats(beats_file(cluster.volume(namespace, "alice"), "alice"))
    until(beats.stretches, "the first beat")
    return beats


@pytest.fixture
def beats(cluster: Cluster, every_beat: Beats, operator: Operator) -> Iterator[Beats]:
    """The same, of a worker that is well, on a cluster that is; and nothing of before is forgiven."""
    cluster.all_is_well()
    assert not overlaps(every_beat.settled())
    yield every_beat
    cluster.all_is_well()


def _pod_uid(cluster: Cluster, namespace: str) -> str:
    uid: str = cluster.get("pod", "alice-0", "-n", namespace)["metadata"]["uid"]
    return uid


def _all_back_soon(harm: str, times: list[float]) -> None:
    least, usual, most = min(times), median(times), max(times)
    print(f"{harm}: {len(times)} times back after {least:.1f} to {most:.1f} s, median {usual:.1f}", flush=True)
    assert most < BACK_WITHIN_SECONDS


def test_a_node_loses_power(cluster: Cluster, namespace: str, beats: Beats) -> None:
    """The worker is back on the other node within half a minute, and the two never lived together."""
    times = []
    for trial in range(TRIALS):
        node = cluster.node_of(namespace, "alice")
        cut_at = now()
        cluster.do("power-off", node)
        lives = beats.lives  # by now: on a busy machine a fence may have begun anew before the cut

        times.append(beats.next_life(lives).first - cut_at)
        print(f"power-off, trial {trial}: back after {times[-1]:.1f} s", flush=True)

        assert not overlaps(beats.settled())
        assert cluster.node_of(namespace, "alice") != node
        cluster.all_is_well()
    _all_back_soon("power-off", times)


def test_a_node_is_cut_off_and_healed(cluster: Cluster, namespace: str, beats: Beats) -> None:
    """Its copy ends before the next one begins, and does not come back when the cable does."""
    times = []
    for trial in range(TRIALS):
        node = cluster.node_of(namespace, "alice")
        cut_at = now()
        cluster.do("partition", node)
        lives = beats.lives  # by now: on a busy machine a fence may have begun anew before the cut

        times.append(beats.next_life(lives).first - cut_at)
        print(f"partition, trial {trial}: back after {times[-1]:.1f} s", flush=True)
        cluster.all_is_well()

        assert not overlaps(beats.settled())
        assert beats.lives == lives + 1, "the healed node's old copy came back"
    _all_back_soon("partition", times)


def test_the_api_server_is_away_for_a_minute(cluster: Cluster, namespace: str, beats: Beats) -> None:
    """Nobody can renew, so the program rests; it goes on by itself, in its pod, when the server is back."""
    lives, pod = beats.lives, _pod_uid(cluster, namespace)
    cluster.do("stop", "apiserver")
    until(lambda: now() - beats.newest.last > 5, "the program rests")
    away_since = now()
    until(lambda: now() - away_since > 60, "a minute", 90)
    assert beats.lives == lives
    cluster.do("start", "apiserver")

    beats.next_life(lives)
    assert not overlaps(beats.settled())
    assert _pod_uid(cluster, namespace) == pod


def test_etcd_is_restarted(cluster: Cluster, beats: Beats) -> None:
    """Shorter than the Lease: nothing ends."""
    cluster.do("stop", "etcd")
    cluster.do("start", "etcd")

    assert not overlaps(beats.settled())


def test_the_operator_is_killed_before_a_node_dies(
    cluster: Cluster, namespace: str, beats: Beats, operator: Operator
) -> None:
    """The next one does its work."""
    operator.kill()
    lives = beats.lives
    cluster.do("power-off", cluster.node_of(namespace, "alice"))
    operator.start()

    beats.next_life(lives)
    assert not overlaps(beats.settled())


def test_a_kubelet_is_restarted(cluster: Cluster, namespace: str, beats: Beats) -> None:
    """Its pods do not notice."""
    lives = beats.lives
    cluster.do("restart-kubelet", cluster.node_of(namespace, "alice"))

    assert len(beats.settled()) == lives
