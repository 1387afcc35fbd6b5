"""The machines of ``scripts/cluster``: switched off and on, cut off and joined again; and an operator to watch them."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support import waiting

ROOT = Path(__file__).resolve().parents[2]
RUN = Path(os.environ.get("EVERDECK_CLUSTER_DIR") or "/var/tmp/everdeck-cluster")
IMAGE = "localhost/everdeck:1"
IN_THE_NETWORK = os.environ.get("KUBECONFIG") == str(RUN / "kubeconfig")
"""Do we run inside of the cluster's network, as `make test-kubernetes` does?"""
SERVER_ADDRESS = "10.77.0.1" if IN_THE_NETWORK else "127.0.0.1"
"""Where workers reach a server of the tests, in pods too."""
NODES = ("n1", "n2")
CONTROL = ("etcd", "apiserver", "controllers", "scheduler", "provisioner")


_HARM = {"power-off", "power-on", "partition", "heal", "stop", "start", "restart-kubelet"}


class Cluster:
    """What can be done to them."""

    def __init__(self) -> None:
        self._harmed = True

    def do(self, *words: str) -> str:
        """One verb of the script."""
        self._harmed = self._harmed or words[0] in _HARM
        command = [sys.executable, str(ROOT / "scripts" / "cluster"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def harmed(self) -> None:
        """Somebody else is about to switch something off."""
        self._harmed = True

    def get(self, *words: str) -> dict:
        """An object as kubectl shows it."""
        return json.loads(self.do("kubectl", "get", *words, "-o", "json"))

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
        """Every part runs, every node is on, joined and ready."""
        if not self._harmed:
            return
        for part in CONTROL:
            if not self.runs(part):
                self.do("start", part)
        for node in NODES:
            self.do("heal", node)
            if not self.runs(node):
                self.do("power-on", node)
        self.do("up")
        for node in NODES:
            until(lambda node=node: self._hears(node), f"the kubelet of {node} knows its pods")
        self._harmed = False

    def _hears(self, node: str) -> bool:
        """A node that was cut off is ready long before its kubelet notices that nobody tells it of pods any more."""
        pods = self.get("pods", "--all-namespaces", f"--field-selector=spec.nodeName={node}")["items"]
        try:
            known = json.loads(self.do("kubectl", "get", "--raw", f"/api/v1/nodes/{node}/proxy/pods"))["items"] or []
        except AssertionError:  # nor does it answer yet
            return False
        return {pod["metadata"]["uid"] for pod in pods} == {pod["metadata"]["uid"] for pod in known}


@contextlib.contextmanager
def fresh_namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of its own, gone afterwards."""
    name = f"t{time.monotonic_ns()}"
    cluster.do("kubectl", "create", "namespace", name)
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
