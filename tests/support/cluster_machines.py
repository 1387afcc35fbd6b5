"""The machines of ``scripts/cluster``: switched off and on, cut off and joined again; and an operator to watch them."""

import atexit
import base64
import contextlib
import functools
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
_CORE, _APPS, _LEASES = "/api/v1", "/apis/apps/v1", "/apis/coordination.k8s.io/v1"
KINDS = {
    **{kind: (_CORE, f"{kind}s") for kind in ("configmap", "node", "pod", "secret", "serviceaccount")},
    "pvc": (_CORE, "persistentvolumeclaims"),
    "statefulset": (_APPS, "statefulsets"),
    "lease": (_LEASES, "leases"),
}
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

    def get(self, kind: str, name: str = "", *, namespace: str = "", **query: str) -> dict:
        """An object, or the list of them. Asked by ourselves: a kubectl for each look keeps half a core busy."""
        group, plural = KINDS[kind]
        within = f"/namespaces/{namespace}" if namespace else ""
        return self.ask("GET", f"{group}{within}/{plural}{f'/{name}' if name else ''}", params=query).json()

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """One request of the administrator's; as with kubectl, what the server refuses is an AssertionError."""
        try:
            answer = self.asked(method, path, **more)
        except httpx.TransportError as error:
            raise AssertionError(f"{method} {path}: {error!r}") from error
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text[:300]}"
        return answer

    def asked(self, method: str, path: str, **more: Any) -> httpx.Response:
        """The same, whatever is answered."""
        administrator = _administrator()
        try:
            return administrator.request(method, path, **more)
        except httpx.RemoteProtocolError:  # a kept connection of a server that was restarted
            return administrator.request(method, path, **more)

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
        (held,) = self.get("serviceaccount", account, namespace=namespace)["secrets"]
        return base64.b64decode(self.get("secret", held["name"], namespace=namespace)["data"]["token"]).decode()

    def as_account(self, namespace: str, account: str) -> httpx.Client:
        """The API server, asked by an account of a namespace."""
        return _server(self.token_of(namespace, account))

    def volume(self, namespace: str, worker: str) -> Path:
        """Where a worker's volume lies on this machine."""
        claim = self.get("pvc", f"data-{worker}-0", namespace=namespace)
        return RUN / "volumes" / f"pvc-{claim['metadata']['uid']}"

    def node_of(self, namespace: str, worker: str) -> str:
        """Where its pod is."""
        return self.get("pod", f"{worker}-0", namespace=namespace)["spec"]["nodeName"]

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
            return self.ask("GET", "/readyz").text == "ok"
        except AssertionError:
            return False

    def _ready(self, node: str) -> bool:
        conditions = self.get("node", node)["status"]["conditions"]
        return "True" in [one["status"] for one in conditions if one["type"] == "Ready"]

    def _hears(self, node: str) -> bool:
        """A node that was cut off is ready long before its kubelet notices that nobody tells it of pods any more."""
        pods = self.get("pod", fieldSelector=f"spec.nodeName={node}")["items"]
        try:
            known = self.ask("GET", f"/api/v1/nodes/{node}/proxy/pods").json()["items"] or []
        except AssertionError:  # nor does it answer yet
            return False
        return {pod["metadata"]["uid"] for pod in pods} == {pod["metadata"]["uid"] for pod in known}


@functools.cache
def _administrator() -> httpx.Client:
    """One connection for all looks of this process."""
    client = _server(json.loads((RUN / "kubeconfig").read_text())["users"][0]["user"]["token"])
    atexit.register(client.close)
    return client


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
    cluster.ask("POST", "/api/v1/namespaces", json=made)
    settings = {"image": IMAGE, "image_pull_policy": "Never"}
    given = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "everdeck"}, "data": settings}
    cluster.ask("POST", f"/api/v1/namespaces/{name}/configmaps", json=given)
    try:
        yield name
    finally:
        cluster.ask("DELETE", f"/api/v1/namespaces/{name}")


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
