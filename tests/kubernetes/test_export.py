"""``everdeck export kubernetes``: what it writes is applied as it is, and does what it is for."""

import json
import re
from pathlib import Path

import httpx

from everdeck import Deck
from everdeck.cluster.export import OPERATOR
from support.cluster_beats import PROGRAM, Beats, beats_file, overlaps
from support.cluster_machines import IMAGE, Cluster, everdeck, until

PAIR = "b"


def test_the_exported_operator_brings_a_worker_back(
    cluster: Cluster, namespace: str, deck: Deck, tmp_path: Path
) -> None:
    """Two replicas on two nodes, one leads; when a node loses power its few rights are enough."""
    command = ["python3", "-c", f"print('here I am', flush=True)\n{PROGRAM}"]
    file, manifests = tmp_path / "everdeck.toml", tmp_path / "all.yaml"
    table = f'namespace = "{namespace}"\nimage = "{IMAGE}"\nimage_pull_policy = "Never"'
    file.write_text(f"[kubernetes]\n{table}\n[worker.alice]\ncommand = {json.dumps(command)}\n")
    everdeck("export", "kubernetes", str(file), "-o", str(manifests), cwd=tmp_path)
    cluster.do("kubectl", "apply", "-f", str(manifests))

    def operators() -> list[dict]:
        found = cluster.get("pod", namespace=namespace, labelSelector=f"app.kubernetes.io/name={OPERATOR}")["items"]
        return [pod for pod in found if pod["status"].get("podIP")]

    def leads() -> list[float]:
        return sorted(_told(pod["status"]["podIP"], "everdeck_operator_leads") for pod in operators())

    until(lambda: leads() == [0.0, 1.0], "one of two operators leads")
    assert {pod["spec"]["nodeName"] for pod in operators()} == set(cluster.nodes)
    until(lambda: deck.status("alice").state == "running", "the worker runs")
    beats = Beats(beats_file(cluster.volume(namespace, "alice"), "alice"))
    until(beats.stretches, "the first beat")
    until(lambda: "here I am" in cluster.do("kubectl", "logs", "alice-0", "-n", namespace), "kubectl shows its log")

    assert {resource for _, resource, _ in cluster.rights(namespace, OPERATOR)} == {
        *("pods", "configmaps", "leases", "statefulsets"),  # and of all namespaces:
        "nodes",
    }
    assert ("create", "pods", "") not in cluster.rights(namespace, OPERATOR), "it could run anything"
    with cluster.as_account(namespace, OPERATOR) as itself:
        core = f"/api/v1/namespaces/{namespace}"
        asked = [("GET", f"{core}/secrets"), ("POST", f"{core}/pods/alice-0/exec?command=id"), ("GET", "/api/v1/pods")]
        assert [itself.request(method, path).status_code for method, path in asked] == [403] * 3

    node = cluster.node_of(namespace, "alice")
    cluster.do("power-off", node)
    until(lambda: beats.lives == 2, "it is back", 150)

    assert not overlaps(beats.stretches())
    assert cluster.node_of(namespace, "alice") != node
    told = [event.detail for event in deck.events(worker="alice") if event.kind == "orphan-reaped"]
    assert [(detail["node"], detail["why"]) for detail in told] == [(node, "node-lost")]
    lives = [pod["status"]["podIP"] for pod in operators() if pod["spec"]["nodeName"] != node]
    until(lambda: 1.0 in [_told(address, "everdeck_operator_leads") for address in lives], "one leads there")
    assert sum(_told(address, "everdeck_operator_rescued") for address in lives) == 1.0, "its metrics count it"
    assert all(_told(address, "everdeck_operator_requests") > 0 for address in lives)


def _told(address: str, metric: str) -> float:
    """What a replica says about itself; -1 if nothing yet."""
    try:
        text = httpx.get(f"http://{address}:9090/metrics", timeout=2).text
    except httpx.HTTPError:
        return -1
    found = re.search(rf"^{metric} (\S+)$", text, re.MULTILINE)
    return -1 if found is None else float(found[1])
