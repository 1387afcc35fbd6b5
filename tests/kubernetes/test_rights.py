"""What a pod may ask of the cluster, and what a pod may be: the API server itself is asked, and refuses."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from everdeck import Deck
from support.cluster_machines import IMAGE, Cluster, fresh_namespace

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
FORBIDDEN = 403


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    """One for all of these tests, with a worker."""
    with fresh_namespace(cluster) as name:
        with Deck(f"kubernetes:{name}") as deck:
            deck.start("alice", ["sleep", "1000"])
        yield name


def test_a_fence_may_read_its_pod_and_renew_its_lease_and_nothing_else(cluster: Cluster, namespace: str) -> None:
    """With the token of a worker's pod, which the program in it can read."""
    core, leases = f"/api/v1/namespaces/{namespace}", LEASES.format(namespace)
    sets = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
    assert cluster.rights(namespace, "alice") == {
        ("get", "pods", "alice-0"),
        ("get", "leases", "alice"),
        ("update", "leases", "alice"),
    }
    with cluster.as_account(namespace, "alice") as fence:
        assert fence.get(f"{core}/pods/alice-0").is_success
        lease = fence.get(f"{leases}/alice").raise_for_status().json()
        lease["metadata"]["resourceVersion"] = "1"
        assert fence.put(f"{leases}/alice", json=lease).status_code == httpx.codes.CONFLICT, "it is late, not refused"

        refused = [
            ("GET", f"{core}/pods"),
            ("GET", f"{core}/pods/bob-0"),
            ("DELETE", f"{core}/pods/alice-0"),
            ("POST", f"{core}/pods/alice-0/exec?command=id"),
            ("GET", f"{core}/secrets"),
            ("GET", f"{core}/secrets/alice"),
            ("GET", f"{core}/configmaps/everdeck"),
            ("GET", leases),
            ("GET", f"{leases}/bob"),
            ("PUT", f"{leases}/bob"),
            ("PATCH", f"{leases}/alice"),
            ("DELETE", f"{leases}/alice"),
            ("POST", leases),
            ("PATCH", f"{sets}/alice/scale"),
            ("GET", "/api/v1/nodes"),
            ("GET", "/api/v1/namespaces"),
        ]
        asked = {
            (method, path): fence.request(
                method, path, json={}, headers={"Content-Type": "application/merge-patch+json"}
            ).status_code
            for method, path in refused
        }
    assert set(asked.values()) == {FORBIDDEN}, asked


def test_a_workers_pod_is_taken_as_it_is_by_a_restricted_cluster(cluster: Cluster, namespace: str) -> None:
    """The server lets nothing else in, and had nothing to add to what our manifests say."""
    template = cluster.get("statefulset", "alice", namespace=namespace)["spec"]["template"]["spec"]
    pod = cluster.get("pod", "alice-0", namespace=namespace)

    assert pod["metadata"]["annotations"]["kubernetes.io/psp"] == "restricted"
    assert pod["spec"]["securityContext"] == template["securityContext"]
    assert [one["securityContext"] for one in pod["spec"]["containers"]] == [
        one["securityContext"] for one in template["containers"]
    ]


def _more_than_allowed() -> Iterator[tuple[str, dict[str, Any]]]:
    """A pod that would be let in, and what makes each of the others too much."""
    meek: dict[str, Any] = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "c",
                "image": IMAGE,
                "command": ["true"],
                "imagePullPolicy": "Never",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
        "restartPolicy": "Never",
    }
    yield "", meek
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        yield field, {**meek, field: True}
    yield "hostPath", {**meek, "volumes": [{"name": "v", "hostPath": {"path": "/"}}]}
    yield "runAsUser", {**meek, "securityContext": {**meek["securityContext"], "runAsUser": 0}}
    unconfined = {"seccompProfile": {"type": "Unconfined"}}
    yield "seccomp", {**meek, "securityContext": {**meek["securityContext"], **unconfined}}
    for field, value in (
        ("privileged", True),
        ("allowPrivilegeEscalation", True),
        ("capabilities", {"drop": ["ALL"], "add": ["NET_ADMIN"]}),
    ):
        (container,) = meek["containers"]
        more = {**container, "securityContext": {**container["securityContext"], field: value}}
        yield field, {**meek, "containers": [more]}


@pytest.mark.parametrize(
    ("field", "spec"), list(_more_than_allowed()), ids=lambda one: one if isinstance(one, str) else ""
)
def test_the_cluster_of_these_tests_refuses_a_pod_that_is_more(
    cluster: Cluster, field: str, spec: dict[str, Any]
) -> None:
    """Else the test before this one shows nothing."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "p", "namespace": "default"}, "spec": spec}
    answer = cluster.asked("POST", "/api/v1/namespaces/default/pods?dryRun=All", json=pod)
    if field:
        assert answer.status_code == FORBIDDEN, json.dumps(answer.json())
        assert field in answer.text
    else:
        assert answer.is_success, answer.text
