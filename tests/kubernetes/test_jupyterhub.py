"""A hub on this machine whose servers are pods: it may die, and the same pod goes on."""

from pathlib import Path

from everdeck import Deck
from support.cluster_machines import RUN, SERVER_ADDRESS, Cluster, until
from support.jupyter_hub import Browser, Hub, proxy_program, running
from support.repo_examples import ROOT, examples_of

IMAGE = "localhost/jupyter:1"
PAGE = ROOT / "docs" / "how-to" / "jupyterhub.md"


def config(namespace: str) -> str:
    """That of the page, with the names of this cluster."""
    (example,) = [one.text for one in examples_of(PAGE) if "kubernetes:" in one.text and one.file]
    mine = {"kubernetes:notebooks": f"kubernetes:{namespace}", "registry.example/notebook:7": IMAGE}
    for theirs, ours in mine.items():
        assert theirs in example
        example = example.replace(theirs, ours)
    return example + "c.Spawner.start_timeout = c.Spawner.http_timeout = 300\n"


def test_a_killed_hub_finds_the_same_pod_and_kernel(
    namespace: str, deck: Deck, cluster: Cluster, tmp_path: Path
) -> None:
    """Log in, spawn, 6 × 7 in a kernel; kill -9 the hub and start it: the same pod, the same kernel; then stop."""
    proxy_program()
    until(
        lambda: all((RUN / "nodes" / node / "jupyter.id").exists() for node in cluster.nodes),
        "scripts/cluster jupyter",
        600,
    )

    def pod() -> tuple[str, str]:
        found = cluster.get("pod", "alice-0", namespace=namespace)
        return found["metadata"]["uid"], found["spec"]["nodeName"]

    hub = Hub(tmp_path, config(namespace), address=SERVER_ADDRESS)
    with running(hub), Browser(hub, "alice") as browser:
        browser.logs_in()
        browser.gets_in()
        kernel = browser.opens_kernel()
        assert browser.computes(kernel, "answer = 6 * 7\nanswer") == "42"
        before = pod()

        hub.kill()
        hub.start()

        assert browser.computes(kernel, "answer") == "42"
        assert pod() == before
        assert deck.status("alice").labels["user"] == "alice"
        hub.ask("DELETE", "users/alice/server")
        until(lambda: deck.status("alice").state == "stopped", "it is stopped")
        assert any("Kernel started" in line for line in deck.logs("alice", lines=None)), "what it said is kept"
