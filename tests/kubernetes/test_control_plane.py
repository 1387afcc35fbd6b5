"""The servers of the cluster itself are killed: a worker rests or goes on, and never runs twice.

Nothing else can run meanwhile, so these tests come first and alone.
"""

from support.cluster_beats import Beats, now, overlaps
from support.cluster_machines import Cluster, until


def _pod_uid(cluster: Cluster, home: str) -> str:
    uid: str = cluster.get("pod", "alice-0", namespace=home)["metadata"]["uid"]
    return uid


def test_the_api_server_is_away_for_a_minute(cluster: Cluster, home: str, beats: Beats) -> None:
    """Nobody can renew, so the program rests; it goes on by itself, in its pod, when the server is back."""
    lives, pod = beats.lives, _pod_uid(cluster, home)
    cluster.do("stop", "apiserver")
    away_since = now()
    until(lambda: now() - beats.newest.last > 5, "the program rests")
    until(lambda: now() - away_since > 60, "a minute", 90)
    assert beats.lives == lives
    cluster.do("start", "apiserver")

    beats.next_life(lives)
    assert not overlaps(beats.settled())
    assert _pod_uid(cluster, home) == pod


def test_etcd_is_restarted(cluster: Cluster, beats: Beats) -> None:
    """Shorter than the Lease: nothing ends."""
    cluster.do("stop", "etcd")
    cluster.do("start", "etcd")

    assert not overlaps(beats.settled())
