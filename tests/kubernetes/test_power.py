"""Nodes lose power: a worker, always the same one, is back soon and never runs twice.

``TRIALS=20`` repeats it as often; each trial's numbers are told.
"""

from support.cluster_beats import TRIALS, Beats, all_back_soon, now, overlaps
from support.cluster_machines import Cluster, Operator, figure

PAIR = "a"


def test_a_node_loses_power(cluster: Cluster, home: str, beats: Beats) -> None:
    """The worker is back on the other node within half a minute, and the two never lived together."""
    times = []
    for trial in range(TRIALS):
        node = cluster.node_of(home, "alice")
        cut_at = now()
        cluster.do("power-off", node)
        lives = beats.lives  # by now: on a busy machine a fence may have begun anew before the cut

        times.append(beats.next_life(lives).first - cut_at)
        figure(f"power-off, trial {trial}: back after {times[-1]:.1f} s")

        assert not overlaps(beats.settled())
        assert cluster.node_of(home, "alice") != node
        cluster.all_is_well()
    all_back_soon("power-off", times)


def test_the_operator_is_killed_before_a_node_dies(
    cluster: Cluster, home: str, beats: Beats, rescuer: Operator
) -> None:
    """The next one does its work."""
    rescuer.kill()
    lives = beats.lives
    cluster.do("power-off", cluster.node_of(home, "alice"))
    rescuer.start()

    beats.next_life(lives)
    assert not overlaps(beats.settled())
