"""The machines of ``scripts/cluster``: switched off and on, cut off and joined again; and an operator to watch them."""

import base64
import contextlib
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from support import waiting

ROOT = Path(__file__).resolve().parents[2]
RUN = Path(os.environ.get("EVERDECK_CLUSTER_DIR") or "/var/tmp/everdeck-cluster")
IMAGE = "localhost/everdeck:1"
IN_THE_NETWORK = os.environ.get("KUBECONFIG") == str(RUN / "kubeconfig")
"""Do we run inside of the cluster's network, as `make test-kubernetes` does?"""
SERVER_ADDRESS = "10.77.0.1" if IN_THE_NETWORK else "127.0.0.1"
"""Where workers reach a server of the tests, in pods too."""
PAIRS = {"a": ("n1", "n2"), "b": ("n3", "n4"), "c": ("n5", "n6")}
"""Nodes of the cluster of `make test-kubernetes`. Tests that harm nodes have a pair of their own."""
CALM = "c"
FIGURES = RUN / "figures"
CONTROL = ("etcd", "apiserver", "controllers", "scheduler", "provisioner")


_HARM = {"power-off", "power-on", "partition", "heal", "stop", "start", "restart-kubelet"}


class Cluster:
    """What can be done to them."""

    def __init__(self, pair: str = CALM) -> None:
        self.pair = pair
        self.nodes = PAIRS[pair]
        self._harmed = True

    def do(self, *words: str) -> str:
        """One verb of the script."""
        self._harmed = self._harmed or words[0] in _HARM
        command = [sys.executable, str(ROOT / "scripts" / "cluster"), *words]
        if words[0] == "kubectl":  # we are in its network already, and one look more is not the start of a script
            command = ["kubectl", f"--kubeconfig={RUN / 'kubeconfig'}", *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def harmed(self) -> None:
        """Somebody else is about to switch something off."""
        self._harmed = True

    def get(self, *words: str) -> dict:
        """An object as kubectl shows it."""
        return json.loads(self.do("kubectl", "get", *words, "-o", "json"))

    def rights(self, namespace: str, account: str) -> set[tuple[str, str, str]]:
        """Verb, resource and name of all that an account may do in its namespace, beyond what every account may."""
        body = {"spec": {"namespace": namespace}}
        with self.as_account(namespace, account) as client:
            answer = client.post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", json=body)
        return {
            (verb, resource, name)
            for rule in answer.raise_for_status().json()["status"]["resourceRules"]
            for verb in rule["verbs"]
            for resource in rule["resources"]
            for name in rule.get("resourceNames") or [""]
            if not resource.startswith("selfsubject")
        }

    def token_of(self, namespace: str, account: str) -> str:
        """With it one is who the account's pods are."""
        (held,) = self.get("serviceaccount", account, "-n", namespace)["secrets"]
        return base64.b64decode(self.get("secret", held["name"], "-n", namespace)["data"]["token"]).decode()

    def as_account(self, namespace: str, account: str) -> httpx.Client:
        """The API server, asked by an account of a namespace."""
        return _server(self.token_of(namespace, account))

    def as_administrator(self) -> httpx.Client:
        """The same, asked by whom nothing is forbidden."""
        return _server(json.loads((RUN / "kubeconfig").read_text())["users"][0]["user"]["token"])

    def volume(self, namespace: str, worker: str) -> Path:
        """Where a worker's volume lies on this machine."""
        claim = self.get("pvc", f"data-{worker}-0", "-n", namespace)
        return RUN / "volumes" / f"pvc-{claim['metadata']['uid']}"

    def node_of(self, namespace: str, worker: str) -> str:
        """Where its pod is."""
        return self.get("pod", f"{worker}-0", "-n", namespace)["spec"]["nodeName"]

    def runs(self, part: str) -> bool:
        """Is this part or node there?"""
        try:
            pid, since = (RUN / "parts" / part).read_text().split()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return fields[19] == since and fields[0] not in "ZX"

    def all_is_well(self) -> None:
        """Every part runs, every node of ours is on, joined and ready."""
        if not self._harmed:
            return
        for part in CONTROL:
            if not self.runs(part):
                self.do("start", part)
        for node in self.nodes:
            self.do("heal", node)
            if not self.runs(node):
                self.do("power-on", node)
        until(self._answers, "the API server is ready")
        until(lambda: all(map(self._ready, self.nodes)), "the nodes are ready")
        for node in self.nodes:
            until(lambda node=node: self._hears(node), f"the kubelet of {node} knows its pods")
        self._harmed = False

    def _answers(self) -> bool:
        try:
            return self.do("kubectl", "get", "--raw", "/readyz") == "ok"
        except AssertionError:
            return False

    def _ready(self, node: str) -> bool:
        conditions = self.get("node", node)["status"]["conditions"]
        return "True" in [one["status"] for one in conditions if one["type"] == "Ready"]

    def _hears(self, node: str) -> bool:
        """A node that was cut off is ready long before its kubelet notices that nobody tells it of pods any more."""
        pods = self.get("pods", "--all-namespaces", f"--field-selector=spec.nodeName={node}")["items"]
        try:
            known = json.loads(self.do("kubectl", "get", "--raw", f"/api/v1/nodes/{node}/proxy/pods"))["items"] or []
        except AssertionError:  # nor does it answer yet
            return False
        return {pod["metadata"]["uid"] for pod in pods} == {pod["metadata"]["uid"] for pod in known}


def _server(token: str) -> httpx.Client:
    authority = ssl.create_default_context(cafile=RUN / "pki" / "ca.crt")
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=f"https://{SERVER_ADDRESS}", verify=authority, headers=headers, timeout=30)


@contextlib.contextmanager
def fresh_namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of its own, on the nodes of this test, gone afterwards."""
    name = f"t{time.monotonic_ns()}"
    here = {"scheduler.alpha.kubernetes.io/node-selector": f"everdeck.test/pair={cluster.pair}"}
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "annotations": here}}
    with cluster.as_administrator() as server:
        server.post("/api/v1/namespaces", json=made).raise_for_status()
    settings = [f"--from-literal=image={IMAGE}", "--from-literal=image_pull_policy=Never"]
    cluster.do("kubectl", "create", "configmap", "everdeck", "-n", name, *settings)
    try:
        yield name
    finally:
        cluster.do("kubectl", "delete", "namespace", name, "--wait=false")


class Operator:
    """``everdeck operator`` as a process of this machine, inside the cluster's network."""

    def __init__(self, namespace: str) -> None:
        self._words = [sys.executable, "-P", "-m", "everdeck.cli", "operator", "--namespace", namespace]
        self.start()

    def start(self) -> None:
        """Another one."""
        self._process = subprocess.Popen(self._words, stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        """At once."""
        self._process.kill()
        self._process.wait()


def figure(text: str) -> None:
    """A number that people want to see, though the test that measured it has passed."""
    print(text, flush=True)
    with FIGURES.open("a") as file:
        file.write(f"{text}\n")


def until(fact: Callable[[], object], what: str, seconds: float = 120) -> Any:
    """What happens in a cluster takes longer, and a look is a request."""
    return waiting.until(fact, what, seconds, pause_seconds=0.2)


def everdeck(*words: str, cwd: Path, code: int = 0, **more: str) -> str:
    """What the command prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "everdeck.cli", *words],
        cwd=cwd,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
