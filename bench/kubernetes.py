"""Many workers on a real cluster: how long they take to start, to come back after a node's death, and what they ask.

    scripts/cluster up && scripts/cluster everdeck
    scripts/cluster run .venv/bin/python -m bench.kubernetes --workers 100
    scripts/cluster down

Needs the cluster of ``scripts/cluster``: it switches a node off. Prints one JSON object. ``requests`` are counted by
the API server itself, for the whole cluster, so they hold what fences, kubelets and controllers ask;
``deck_requests`` are those of the deck alone.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from everdeck.cluster import ClusterDeck
from everdeck.cluster.api import Api
from everdeck.cluster.operator import Operator

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "cluster"
COMMAND = ("sleep", "1000000")
BACK_SECONDS = 1800.0
QUIET_SECONDS = 5.0
QUIET_TRIALS = 12


async def measured(namespace: str, workers: int, idle_seconds: float) -> dict[str, float]:
    """Start all, be idle, lose a node, have all back."""
    deck = ClusterDeck(f"kubernetes:{namespace}")
    await deck.open()
    api = await Api(namespace).connect()
    operator = asyncio.ensure_future(Operator(api).live())
    try:
        return await _measured(deck, workers, idle_seconds)
    finally:
        operator.cancel()
        await api.close()
        await asyncio.gather(operator, return_exceptions=True)
        await deck.close()


async def _measured(deck: ClusterDeck, workers: int, idle_seconds: float) -> dict[str, float]:
    names = [f"w{number}" for number in range(workers)]
    before, own, begin = requests(), deck.api.requests, time.monotonic()
    await deck.start_many(dict.fromkeys(names, COMMAND))
    started = time.monotonic() - begin
    asked, own_asked = requests() - before, deck.api.requests - own
    for _ in range(QUIET_TRIALS):  # the last events of the starts are still being written into the cluster
        own = deck.api.requests
        await asyncio.sleep(QUIET_SECONDS)
        if deck.api.requests == own:
            break
    own = deck.api.requests
    await asyncio.sleep(idle_seconds)
    idle = (deck.api.requests - own) * 60 / idle_seconds
    nodes = {one.name: (one.node, one.pod["metadata"]["uid"]) for one in deck.everybody() if one.pod is not None}
    lost = max({node for node, _ in nodes.values()}, key=[one for one, _ in nodes.values()].count)
    gone = {name: uid for name, (node, uid) in nodes.items() if node == lost}
    begin = time.monotonic()
    cluster("power-off", str(lost))

    def back() -> bool:
        return all(
            one.name not in gone or (one.pod is not None and one.pod["metadata"]["uid"] != gone[one.name] and one.lives)
            for one in deck.everybody()
        )

    async with asyncio.timeout(BACK_SECONDS):
        while not back():
            await deck.changed()
    all_back = time.monotonic() - begin
    cluster("power-on", str(lost))
    return {
        "workers": workers,
        "start_seconds": round(started, 1),
        "start_seconds_per_worker": round(started / workers, 2),
        "requests_per_worker": round(asked / workers, 1),
        "deck_requests_per_worker": round(own_asked / workers, 1),
        "idle_deck_requests_per_minute": round(idle, 1),
        "lost_with_the_node": len(gone),
        "all_back_seconds": round(all_back, 1),
    }


def requests() -> float:
    """How many requests the API server has answered."""
    text = cluster("kubectl", "get", "--raw", "/metrics")
    return sum(map(float, re.findall(r"^apiserver_request_total\{.*\} (\S+)$", text, re.MULTILINE)))


def cluster(*words: str) -> str:
    """A verb of ``scripts/cluster``."""
    return subprocess.run([sys.executable, SCRIPT, *words], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Make a namespace, measure, remove it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--idle-seconds", type=float, default=60)
    asked = parser.parse_args()
    namespace = "bench"
    cluster("kubectl", "create", "namespace", namespace)
    settings = ("--from-literal=image=localhost/everdeck:1", "--from-literal=image_pull_policy=Never")
    cluster("kubectl", "create", "configmap", "everdeck", "-n", namespace, *settings)
    try:
        print(json.dumps(asyncio.run(measured(namespace, asked.workers, asked.idle_seconds)), indent=2))
    finally:
        cluster("kubectl", "delete", "namespace", namespace, "--wait=false")


if __name__ == "__main__":
    main()
