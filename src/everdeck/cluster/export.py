"""Everything that a namespace needs, as manifests that people apply by hand. Decides only.

The namespace at Pod Security's "restricted" level, the deck's settings, an operator with the rights it needs and no
more, and the workers of a configuration file, as :mod:`objects` makes them.
"""

import secrets
from collections.abc import Mapping
from typing import Final

from everdeck.cluster.objects import ACCOUNT_ID, MANAGED, SETTINGS, Manifest, Settings, check, dependents, stateful_set
from everdeck.model import WorkerSpec, worker_name

OPERATOR: Final = "everdeck-operator"
_REPLICAS: Final = 2
_METRICS_PORT: Final = 9090


def manifests(settings: Settings, workers: Mapping[str, WorkerSpec]) -> list[Manifest]:
    """In the order in which they can be applied."""
    made = [namespace(settings), settings_object(settings), *operator(settings)]
    for name, spec in sorted(workers.items()):
        key = worker_name(name)
        check(spec, settings)
        made += dependents(key, spec, settings, None)
        made.append(stateful_set(key, spec, settings, start=secrets.token_hex(8), replicas=1))
    return made


def namespace(settings: Settings) -> Manifest:
    """With the level that our pods meet."""
    labels = {**MANAGED, "pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": settings.namespace, "labels": labels}}


def settings_object(settings: Settings) -> Manifest:
    """What every deck of the namespace reads when it is opened."""
    told = {
        "image": settings.image,
        "image_pull_policy": settings.image_pull_policy,
        "storage_class": settings.storage_class,
        "volume_size": settings.volume_size,
        "lease_seconds": f"{settings.lease_seconds:g}",
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": SETTINGS, "namespace": settings.namespace, "labels": dict(MANAGED)},
        "data": {key: value for key, value in told.items() if value is not None},
    }


def operator(settings: Settings) -> list[Manifest]:
    """Two replicas, one of which leads; its account, and what that may do."""
    meta = {"name": OPERATOR, "namespace": settings.namespace, "labels": dict(MANAGED)}
    cluster_name = f"{OPERATOR}-{settings.namespace}"
    subject = {"kind": "ServiceAccount", "name": OPERATOR, "namespace": settings.namespace}
    labels = {**MANAGED, "app.kubernetes.io/name": OPERATOR}
    container: Manifest = {
        "name": "operator",
        "image": settings.image,
        "command": ["everdeck", "operator", "--metrics", f"0.0.0.0:{_METRICS_PORT}"],
        "ports": [{"name": "metrics", "containerPort": _METRICS_PORT}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": {"memory": "80Mi", "cpu": "10m"}},
    }
    if settings.image_pull_policy is not None:
        container["imagePullPolicy"] = settings.image_pull_policy
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": meta,
            "rules": [
                _rule("", ["pods"], ["get", "list", "watch", "delete"]),
                _rule("", ["configmaps"], ["get", "list", "watch", "create", "update", "delete"]),
                _rule("coordination.k8s.io", ["leases"], ["get", "list", "watch", "create", "update"]),
                _rule("apps", ["statefulsets"], ["get", "list", "watch"]),
            ],
        },
        _binding("RoleBinding", meta, "Role", OPERATOR, subject),
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": cluster_name, "labels": dict(MANAGED)},
            "rules": [_rule("", ["nodes"], ["get", "list", "watch"])],
        },
        _binding(
            "ClusterRoleBinding", {"name": cluster_name, "labels": dict(MANAGED)}, "ClusterRole", cluster_name, subject
        ),
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta,
            "spec": {
                "replicas": _REPLICAS,
                "selector": {"matchLabels": {"app.kubernetes.io/name": OPERATOR}},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "serviceAccountName": OPERATOR,
                        # On two nodes if there are two: the node that dies may be the leader's.
                        "affinity": {
                            "podAntiAffinity": {
                                "preferredDuringSchedulingIgnoredDuringExecution": [
                                    {
                                        "weight": 100,
                                        "podAffinityTerm": {
                                            "topologyKey": "kubernetes.io/hostname",
                                            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": OPERATOR}},
                                        },
                                    }
                                ]
                            }
                        },
                        "securityContext": {
                            "runAsNonRoot": True,
                            "runAsUser": ACCOUNT_ID,
                            "runAsGroup": ACCOUNT_ID,
                            "seccompProfile": {"type": "RuntimeDefault"},
                        },
                        "containers": [container],
                    },
                },
            },
        },
    ]


def _rule(group: str, resources: list[str], verbs: list[str]) -> Manifest:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}


def _binding(kind: str, meta: Manifest, role_kind: str, role: str, subject: Manifest) -> Manifest:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": meta,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role_kind, "name": role},
        "subjects": [subject],
    }
