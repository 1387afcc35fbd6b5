"""Many workers: all are started, a node is lost, all are back; a deck that is idle asks nothing."""

import asyncio
import os

from bench.kubernetes import measured

from support.cluster_machines import Cluster, figure

PAIR = "a"
WORKERS = int(os.environ.get("WORKERS", "8"))


def test_all_are_started_and_all_are_back(cluster: Cluster, namespace: str) -> None:
    """``WORKERS=100`` does it with as many; the numbers are printed."""
    cluster.harmed()
    found = asyncio.run(measured(namespace, WORKERS, idle_seconds=20))

    figure(f"many: {found}")
    assert found["idle_deck_requests_per_minute"] < 10
    assert found["lost_with_the_node"] > 0
