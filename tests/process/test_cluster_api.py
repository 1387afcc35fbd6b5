"""What of a cluster needs only its API server: events, the operator, manifests, the fence with its few rights."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from everdeck.cluster.api import Api
from everdeck.cluster.events import EventLog, Told
from everdeck.cluster.export import manifests
from everdeck.cluster.fence import STATUS_ANNOTATION, TOLD_ANNOTATION
from everdeck.cluster.lease import Terms
from everdeck.cluster.objects import WORKER_LABEL, Settings, dependents, stateful_set
from everdeck.cluster.operator import Operator
from everdeck.model import EventKind, WorkerSpec, worker_name
from support.cluster_api import MISSING, ApiServer
from support.waiting import eventually

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

ALICE = worker_name("alice")
DEADLINE_SECONDS = 90.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One for the file."""
    with ApiServer(tmp_path_factory.mktemp("api")).running() as running:
        yield running


@pytest.fixture
def with_api(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Api], Awaitable[Any]]], Any]:
    """Run a scenario in a namespace of its own."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))

    def run(scenario: Callable[[Api], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            api = await Api(f"n{os.urandom(4).hex()}").connect()
            try:
                body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": api.namespace}}
                await api.ask("POST", "/api/v1/namespaces", body)
                async with asyncio.timeout(DEADLINE_SECONDS):
                    return await scenario(api)
            finally:
                await api.close()

        return asyncio.run(whole())

    return run


def test_many_append_and_each_event_has_one_id(with_api: Callable[..., Any]) -> None:
    """Three logs append at once, two transfer the same words of a pod: no gap, nothing twice, in order."""

    async def scenario(api: Api) -> None:
        logs = [EventLog(api) for _ in range(3)]
        now = (await logs[0].append("x", EventKind.STARTED)).at
        told = [Told(number, now, EventKind.CRASHED) for number in range(1, 6)]
        await asyncio.gather(
            *(log.append(f"w{number}", EventKind.STARTED) for number in range(10) for log in logs),
            *(log.transfer("pod", "deck-1", told) for log in logs),
        )
        events = await logs[0].events()
        assert [event.id for event in events] == list(range(1, 1 + 30 + 5 + 1))
        assert [event.kind for event in events].count(EventKind.CRASHED) == 5
        assert await EventLog(api).last_id() == 36

    with_api(scenario)


def test_what_somebody_else_has_carried_over_is_asked_about_once(with_api: Callable[..., Any]) -> None:
    """A Lease tells the same words at each renewal; a deck that is idle asks nothing because of them."""

    async def scenario(api: Api) -> None:
        words = [Told(n, datetime.now(UTC), EventKind.STARTED, {}) for n in (1, 2)]
        ours, theirs = EventLog(api), EventLog(api)
        assert len(await ours.transfer("alice", "renewed", words[:1])) == 1
        assert len(await theirs.transfer("alice", "renewed", words)) == 1
        assert await ours.transfer("alice", "renewed", words) == []
        asked = api.requests
        assert await ours.transfer("alice", "renewed", words) == []
        assert api.requests == asked

    with_api(scenario)


def test_the_exported_manifests_are_taken(with_api: Callable[..., Any]) -> None:
    """By a real API server, each of them."""

    async def scenario(api: Api) -> None:
        settings = Settings(api.namespace, image="localhost/nothing:1")
        made = manifests(settings, {"alice": WorkerSpec.of(["sleep", "1"], env={"A": "1"})})
        for manifest in made:
            if manifest["kind"] in {"StatefulSet", "Lease", "Role", "RoleBinding", "Secret", "ConfigMap"}:
                await api.create(manifest)
        kinds = {manifest["kind"] for manifest in made}
        assert {"Namespace", "Deployment", "ClusterRole", "ClusterRoleBinding", "ServiceAccount"} <= kinds

    with_api(scenario)


def test_a_dead_nodes_pod_is_forgotten_when_its_lease_is_silent_and_not_before(with_api: Callable[..., Any]) -> None:
    """One of two operators leads; it frees the Lease and forgets the pod; a Lease that is renewed is left alone."""

    async def scenario(api: Api) -> None:
        node = f"node-{api.namespace}"
        await api.ask("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
        for name in ("silent", "renewed"):
            await _pod_with_lease(api, name, node)
        operators = [Operator(api, Terms(duration=4)) for _ in range(2)]
        living = [asyncio.ensure_future(operator.live()) for operator in operators]

        async def renew() -> None:
            while True:
                await api.patch("Lease", "renewed", {"metadata": {"annotations": {"beat": os.urandom(4).hex()}}})
                await asyncio.sleep(1)

        renewing = asyncio.ensure_future(renew())
        try:
            await eventually(lambda: _is_gone(api, "silent-0"), "the pod is forgotten", DEADLINE_SECONDS)
            assert (await api.get("Lease", "silent"))["spec"].get("holderIdentity") in {"", None}
            assert await api.find("Pod", "renewed-0") is not None
            assert (await api.get("Lease", "renewed"))["spec"]["holderIdentity"] == "somebody"
            assert [operator.leads for operator in operators].count(True) == 1
            told = [event for event in await EventLog(api).events() if event.kind is EventKind.ORPHAN_REAPED]
            assert [event.worker for event in told] == ["silent"]
        finally:
            for task in (renewing, *living):
                task.cancel()
            await asyncio.gather(renewing, *living, return_exceptions=True)

    with_api(scenario)


async def _pod_with_lease(api: Api, name: str, node: str) -> None:
    settings = Settings(api.namespace, image="localhost/nothing:1", lease_seconds=4)
    key, spec = worker_name(name), WorkerSpec.of(["sleep", "1"])
    await api.create(stateful_set(key, spec, settings, start="", replicas=1))
    meta = {"name": f"{name}-0", "labels": {WORKER_LABEL: name}}
    container = {"name": "worker", "image": "localhost/nothing:1"}
    pod = {"nodeName": node, "containers": [container], "terminationGracePeriodSeconds": 600}
    await api.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod})
    for manifest in dependents(key, spec, settings, None):
        if manifest["kind"] == "Lease":
            manifest["spec"]["holderIdentity"] = "somebody"
            await api.create(manifest)


async def _is_gone(api: Api, pod: str) -> bool:
    return await api.find("Pod", pod) is None


async def _is_told(api: Api) -> bool:
    return STATUS_ANNOTATION in (await api.get("Lease", "alice"))["metadata"]["annotations"]


FENCE = """
mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp "$AUTHORITY" /run/secrets/kubernetes.io/serviceaccount/ca.crt
cp "$TOKEN" /run/secrets/kubernetes.io/serviceaccount/token
exec "$PYTHON" -P -m everdeck.cluster.fence -- sleep 1000
"""


def test_a_fence_holds_its_lease_and_lets_go_and_the_pod_before_it_starts_nothing(
    with_api: Callable[..., Any], server: ApiServer, tmp_path: Path
) -> None:
    """As process 1 of its own namespace, with the account that the manifests give it and no other right."""

    async def scenario(api: Api) -> None:
        settings = Settings(api.namespace, image="localhost/nothing:1", lease_seconds=4)
        spec = WorkerSpec.of(["sleep", "1000"])
        for manifest in dependents(ALICE, spec, settings, None):
            await api.create(manifest)
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
        granted = await api.ask("POST", f"{api.path('ServiceAccount', 'alice')}/token", asked)
        (tmp_path / "token").write_text(granted["status"]["token"])
        (tmp_path / "given").mkdir()
        (tmp_path / "given" / "spec.json").write_text(json.dumps({"command": ["sleep", "1000"]}))
        pod = {"containers": [{"name": "worker", "image": "localhost/nothing:1"}]}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "alice-0"}, "spec": pod}
        made = await api.create(body)

        fence = _fence(server, tmp_path, api.namespace, made["metadata"]["uid"])
        try:
            await eventually(lambda: _is_told(api), "the worker's state is told", DEADLINE_SECONDS)
            lease = await api.get("Lease", "alice")
            assert lease["spec"]["holderIdentity"] == f"alice-0_{made['metadata']['uid']}"
            assert json.loads(lease["metadata"]["annotations"][STATUS_ANNOTATION])["status"]["state"] == "running"
            os.kill(_first_process(fence), signal.SIGTERM)
            assert await asyncio.to_thread(fence.wait, DEADLINE_SECONDS) == 0
        finally:
            fence.kill()
        lease = await api.get("Lease", "alice")
        assert lease["spec"].get("holderIdentity") in {"", None}
        told = [one["kind"] for one in json.loads(lease["metadata"]["annotations"][TOLD_ANNOTATION])]
        assert told == ["started", "stopping", "stopped"]

        await api.delete("Pod", "alice-0", force=True)
        await api.create(body)
        late = _fence(server, tmp_path, api.namespace, made["metadata"]["uid"])
        assert await asyncio.to_thread(late.wait, DEADLINE_SECONDS) == 75
        assert (await api.get("Lease", "alice"))["spec"].get("holderIdentity") in {"", None}

    with_api(scenario)


def _fence(server: ApiServer, place: Path, namespace: str, uid: str) -> "subprocess.Popen[bytes]":
    told = {
        "AUTHORITY": server.authority,
        "TOKEN": place / "token",
        "PYTHON": sys.executable,
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": server.port,
        "EVERDECK_NAMESPACE": namespace,
        "EVERDECK_POD": "alice-0",
        "EVERDECK_POD_UID": uid,
        "EVERDECK_LEASE": "alice",
        "EVERDECK_WORKER_NAME": "alice",
        "EVERDECK_LEASE_SECONDS": 4,
        "EVERDECK_VOLUME": place,
        "EVERDECK_GIVEN": place / "given",
    }
    words = ["unshare", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child", "sh", "-ec", FENCE]
    environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
    return subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL)


def _first_process(unshare: "subprocess.Popen[bytes]") -> int:
    return int(Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()[0])
