"""Nodes are cut off and joined again, and their kubelets die: a worker never runs twice.

``TRIALS=20`` repeats partitions as often; each trial's numbers are told.
"""

from support.cluster_beats import TRIALS, Beats, all_back_soon, now, overlaps
from support.cluster_machines import Cluster, figure

PAIR = "b"


def test_a_node_is_cut_off_and_healed(cluster: Cluster, home: str, beats: Beats) -> None:
    """Its copy ends before the next one begins, and does not come back when the cable does."""
    times = []
    for trial in range(TRIALS):
        node = cluster.node_of(home, "alice")
        cut_at = now()
        cluster.do("partition", node)
        lives = beats.lives  # by now: on a busy machine a fence may have begun anew before the cut

        times.append(beats.next_life(lives).first - cut_at)
        figure(f"partition, trial {trial}: back after {times[-1]:.1f} s")
        cluster.all_is_well()

        assert not overlaps(beats.settled())
        assert beats.lives == lives + 1, "the healed node's old copy came back"
    all_back_soon("partition", times)


def test_a_kubelet_is_restarted(cluster: Cluster, home: str, beats: Beats) -> None:
    """Its pods do not notice."""
    lives = beats.lives
    cluster.do("restart-kubelet", cluster.node_of(home, "alice"))

    assert len(beats.settled()) == lives
