"""Which Kubernetes objects a worker is made of. Decides only: plain values in, plain manifests out.

A worker is a StatefulSet of 0 or 1 with a volume of its own. Everything else of it belongs to the StatefulSet and goes
with it: the Secret with its spec, environment and secrets; its Lease; and an account that may read its own pod and
update its own Lease, nothing else. The spec also stands in an annotation, without values of environment and secrets.

``everdeck export kubernetes`` writes the same manifests, with the operator and its rights.
"""

import base64
import secrets
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from everdeck.cluster.lease import Terms
from everdeck.cluster.naming import object_name
from everdeck.cluster.volume import SECRET_PREFIX, SPEC_FILE
from everdeck.errors import LimitUnavailable, SpecError
from everdeck.model import WorkerName, WorkerSpec

Manifest: TypeAlias = dict[str, Any]

MANAGED: Final = {"app.kubernetes.io/managed-by": "everdeck"}
WORKER_LABEL: Final = "everdeck.dev/worker"
READER_LABEL: Final = "everdeck.dev/reader"
NAME_ANNOTATION: Final = "everdeck.dev/name"
SPEC_ANNOTATION: Final = "everdeck.dev/spec"
START_ANNOTATION: Final = "everdeck.dev/start"
CAME_FROM_ANNOTATION: Final = "everdeck.dev/came-from"
VOLUME: Final = "data"
ACCOUNT_ID: Final = 10001
"""Whoever the worker's processes run as: pods of the "restricted" level may not be root."""

_FENCE_CPU: Final = 10  # thousandths of a processor

SETTINGS: Final = "everdeck"
"""The ConfigMap that keeps the settings of the deck of a namespace."""

APPLIED: Final = "everdeck-applied"
"""The Secret that keeps what the last configuration brought."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the workers of one namespace have in common; ``[kubernetes]`` in everdeck.toml."""

    namespace: str
    image: str | None = None
    image_pull_policy: str | None = None
    storage_class: str | None = None
    volume_size: str = "1Gi"
    lease_seconds: float = Terms().duration


def pod_name(name: WorkerName) -> str:
    """The one pod of a worker."""
    return f"{object_name(name)}-0"


def claim_name(name: WorkerName) -> str:
    """Its volume's claim, which the StatefulSet makes and nobody but ``remove`` takes away."""
    return f"{VOLUME}-{object_name(name)}-0"


def check(spec: WorkerSpec, settings: Settings) -> None:
    """Refuse what a pod cannot give, by name, before anything is written."""
    if image_of(spec, settings) is None:
        raise SpecError("image", None, 'an image with everdeck installed: [kubernetes] image = "…", or EVERDECK_IMAGE')
    for field in ("user", "group"):
        if getattr(spec, field) is not None:
            raise SpecError(field, getattr(spec, field), f"no {field} on Kubernetes: a pod has an account of its own")
    if spec.limits.pids is not None:
        raise LimitUnavailable("limits.pids", spec.limits.pids, "no limit of processes on Kubernetes: it is the node's")
    if spec.limits.oom_score_adj is not None:
        raise LimitUnavailable("limits.oom_score_adj", spec.limits.oom_score_adj, "nothing: the kubelet sets it")


def image_of(spec: WorkerSpec, settings: Settings) -> str | None:
    """The worker's own image, else the deck's."""
    return spec.labels.get("everdeck.dev/image") or settings.image


def stateful_set(name: WorkerName, spec: WorkerSpec, settings: Settings, *, start: str, replicas: int) -> Manifest:
    """The worker itself. ``start`` is the random id of this start: a new one makes a new pod."""
    own = object_name(name)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {**_meta(name, settings), "annotations": _annotations(name, spec)},
        "spec": {
            "replicas": replicas,
            "serviceName": own,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},  # a pod ends when a verb says so, not when a template changes
            "selector": {"matchLabels": {WORKER_LABEL: own}},
            "template": {
                "metadata": {
                    "labels": {**MANAGED, WORKER_LABEL: own},
                    "annotations": {NAME_ANNOTATION: name, START_ANNOTATION: start},
                },
                "spec": _pod(name, spec, settings, start),
            },
            "volumeClaimTemplates": [_claim(settings)],
        },
    }


def dependents(name: WorkerName, spec: WorkerSpec, settings: Settings, owner_uid: str | None) -> list[Manifest]:
    """What belongs to the StatefulSet, in the order in which it must be there before the pod is.

    ``owner_uid`` is the StatefulSet's, so that they go with it; None where it is not made yet (an export).
    """
    own = object_name(name)
    meta = _owned(name, settings, owner_uid)
    return [
        secret(name, spec, settings, owner_uid),
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {**meta, "annotations": {NAME_ANNOTATION: name}},
            "spec": {"holderIdentity": "", "leaseDurationSeconds": round(settings.lease_seconds)},
        },
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": meta,
            "rules": [
                {"apiGroups": [""], "resources": ["pods"], "resourceNames": [f"{own}-0"], "verbs": ["get"]},
                {
                    "apiGroups": ["coordination.k8s.io"],
                    "resources": ["leases"],
                    "resourceNames": [own],
                    "verbs": ["get", "update"],
                },
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": own},
            "subjects": [{"kind": "ServiceAccount", "name": own, "namespace": settings.namespace}],
        },
    ]


def secret(name: WorkerName, spec: WorkerSpec, settings: Settings, owner_uid: str | None) -> Manifest:
    """Spec, environment and secrets, as the pod's deck reads them."""
    meta = _owned(name, settings, owner_uid)
    data = {SPEC_FILE: msgspec.json.encode(spec.without_secret_values())}
    data |= {f"{SECRET_PREFIX}{key}": one.value.encode() for key, one in spec.secrets.items() if one.value is not None}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta,
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }


def spec_of(secret_object: Manifest) -> WorkerSpec:
    """The spec that a worker's Secret holds, with the values of its secrets."""
    data = {key: base64.b64decode(value) for key, value in (secret_object.get("data") or {}).items()}
    fields = msgspec.json.decode(data[SPEC_FILE])
    for key, one in fields.get("secrets", {}).items():
        value = data.get(f"{SECRET_PREFIX}{key}")
        one["value"] = None if value is None else value.decode()
    return msgspec.convert(fields, WorkerSpec)


def _meta(name: WorkerName, settings: Settings) -> Manifest:
    own = object_name(name)
    return {"name": own, "namespace": settings.namespace, "labels": {**MANAGED, WORKER_LABEL: own}}


def volume_pod(name: WorkerName, spec: WorkerSpec, settings: Settings, *, writes: bool = False) -> Manifest:
    """A pod with a stopped worker's volume and no program: for its log, or to bring its files. It ends by itself."""
    pod = _pod(name, spec, settings, "")
    container = pod["containers"][0]
    container["command"] = ["sleep", "3600" if writes else "300"]
    container["env"] = []
    container["volumeMounts"] = [
        {**one, "readOnly": not writes} for one in container["volumeMounts"] if one["name"] == VOLUME
    ]
    pod |= {
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "volumes": [{"name": VOLUME, "persistentVolumeClaim": {"claimName": claim_name(name), "readOnly": not writes}}],
    }
    del pod["serviceAccountName"]  # it has no rights, and of a worker that is only coming there is none yet
    own = f"{object_name(name)}-reader-{secrets.token_hex(3)}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": own, "namespace": settings.namespace, "labels": {**MANAGED, READER_LABEL: own}},
        "spec": pod,
    }


def claim(name: WorkerName, settings: Settings) -> Manifest:
    """The claim of a worker's volume, as its StatefulSet would make it: for files that come before the worker does."""
    template = _claim(settings)
    meta = {**template["metadata"], "name": claim_name(name), "namespace": settings.namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **template, "metadata": meta}


def _owned(name: WorkerName, settings: Settings, owner_uid: str | None) -> Manifest:
    meta = _meta(name, settings)
    if owner_uid is not None:
        owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": object_name(name), "uid": owner_uid}
        meta["ownerReferences"] = [owner]
    return meta


def _annotations(name: WorkerName, spec: WorkerSpec) -> dict[str, str]:
    shown = WorkerSpec.of(spec.without_secret_values(), env=dict.fromkeys(spec.env, ""))
    return {NAME_ANNOTATION: name, SPEC_ANNOTATION: msgspec.json.encode(shown).decode()}


def _claim(settings: Settings) -> Manifest:
    spec: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": settings.volume_size}}}
    if settings.storage_class is not None:
        spec["storageClassName"] = settings.storage_class
    return {"metadata": {"name": VOLUME, "labels": dict(MANAGED)}, "spec": spec}


def _pod(name: WorkerName, spec: WorkerSpec, settings: Settings, start: str) -> Manifest:
    own = object_name(name)
    return {
        "serviceAccountName": own,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(spec.stop.grace_seconds) + 15,
        # Evicted by nobody: a pod whose Lease is renewed lives, whatever its kubelet says; of a silent one the
        # operator takes care.
        "tolerations": [
            {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute"}
            for taint in ("not-ready", "unreachable")
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": ACCOUNT_ID,
            "runAsGroup": ACCOUNT_ID,
            "fsGroup": ACCOUNT_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(name, spec, settings, start)],
        "volumes": [
            {"name": "given", "secret": {"secretName": own, "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _container(name: WorkerName, spec: WorkerSpec, settings: Settings, start: str) -> Manifest:
    container: Manifest = {
        "name": "worker",
        "image": image_of(spec, settings),
        # A dollar sign before a parenthesis would be a variable of the kubelet's.
        "command": [
            "python3",
            "-P",
            "-m",
            "everdeck.cluster.fence",
            "--",
            *(w.replace("$", "$$") for w in spec.command),
        ],
        "env": [
            _from_field("EVERDECK_NAMESPACE", "metadata.namespace"),
            _from_field("EVERDECK_POD", "metadata.name"),
            _from_field("EVERDECK_POD_UID", "metadata.uid"),
            _from_field("EVERDECK_NODE", "spec.nodeName"),
            {"name": "EVERDECK_LEASE", "value": object_name(name)},
            {"name": "EVERDECK_WORKER_NAME", "value": name},
            {"name": "EVERDECK_START", "value": start},
            {"name": "EVERDECK_LEASE_SECONDS", "value": f"{settings.lease_seconds:g}"},
            {"name": "EVERDECK_GRACE_SECONDS", "value": f"{spec.stop.grace_seconds:g}"},
            {"name": "HOME", "value": "/everdeck"},
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": VOLUME, "mountPath": "/everdeck"},
            {"name": "given", "mountPath": "/etc/everdeck", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
        ],
        "resources": _resources(spec),
    }
    if settings.image_pull_policy is not None:
        container["imagePullPolicy"] = settings.image_pull_policy
    return container


def _from_field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _resources(spec: WorkerSpec) -> Manifest:
    limits: dict[str, str] = {}
    if spec.limits.memory_bytes is not None:
        limits["memory"] = str(spec.limits.memory_bytes)
    if spec.limits.cpu_percent is not None:
        limits["cpu"] = f"{round(spec.limits.cpu_percent * 10)}m"
    # Who asks for nothing gets what others leave over: on a busy node less than a fence needs to renew its Lease.
    requests = {"cpu": f"{_FENCE_CPU}m", **limits}
    return {"limits": limits, "requests": requests} if limits else {"requests": requests}
