"""How a worker is, from its objects. Decides only."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from everdeck.cluster.events import Told
from everdeck.cluster.fence import LEFT_ANNOTATION, STATUS_ANNOTATION, TOLD_ANNOTATION
from everdeck.cluster.objects import CAME_FROM_ANNOTATION, NAME_ANNOTATION, SPEC_ANNOTATION, START_ANNOTATION, Manifest
from everdeck.faults import Fault
from everdeck.model import State, WorkerName, WorkerSpec, WorkerStatus, worker_name


class Report(msgspec.Struct, frozen=True):
    """What the fence wrote into the Lease: the worker as its pod's deck sees it, and which start that was."""

    status: WorkerStatus
    deck: str = ""
    start: str = ""
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Objects:
    """What there is of one worker."""

    stateful_set: Manifest
    pod: Manifest | None
    lease: Manifest | None

    @property
    def name(self) -> WorkerName:
        """The worker's name, whatever its objects are called."""
        return worker_name(_annotations(self.stateful_set)[NAME_ANNOTATION])

    @property
    def wanted(self) -> bool:
        """Should it run?"""
        return bool(self.stateful_set["spec"].get("replicas"))

    @property
    def lives(self) -> bool:
        """Is the deck in its pod there to be asked?"""
        report = self.report
        return self.wanted and self.pod is not None and report is not None and report.start == self.start

    @property
    def empty(self) -> bool:
        """Is nothing left in its pod, which is being deleted, as its fence says?"""
        if self.pod is None or not self.pod["metadata"].get("deletionTimestamp") or self.lease is None:
            return False
        left = _annotations(self.lease).get(LEFT_ANNOTATION)
        return left == self.pod["metadata"]["uid"] and not self.lease["spec"].get("holderIdentity")

    @property
    def outdated(self) -> bool:
        """Was its pod, which is to stay, made for an earlier start than the newest?"""
        if self.pod is None or self.pod["metadata"].get("deletionTimestamp"):
            return False
        return _annotations(self.pod).get(START_ANNOTATION, "") != self.start

    @property
    def start(self) -> str:
        """The id of the newest start that was asked for."""
        template = self.stateful_set["spec"]["template"]
        return str(template["metadata"].get("annotations", {}).get(START_ANNOTATION, ""))

    @property
    def report(self) -> Report | None:
        """What was last heard of it."""
        text = _annotations(self.lease).get(STATUS_ANNOTATION) if self.lease else None
        return None if text is None else msgspec.json.decode(text, type=Report)

    @property
    def told(self) -> list[Told]:
        """Its newest events."""
        text = _annotations(self.lease).get(TOLD_ANNOTATION) if self.lease else None
        return [] if text is None else msgspec.json.decode(text, type=list[Told])

    @property
    def spec(self) -> WorkerSpec:
        """Its spec, without the values of environment and secrets."""
        return msgspec.json.decode(_annotations(self.stateful_set)[SPEC_ANNOTATION], type=WorkerSpec)

    @property
    def came_from(self) -> str:
        """The id of the deck that it was moved from; empty if it was started here."""
        return _annotations(self.stateful_set).get(CAME_FROM_ANNOTATION, "")

    @property
    def node(self) -> str | None:
        """Where its pod is."""
        return None if self.pod is None else self.pod["spec"].get("nodeName")

    @property
    def address(self) -> str | None:
        """Where its pod is reached from inside the cluster."""
        return None if self.pod is None else self.pod.get("status", {}).get("podIP")


def status_of(objects: Objects, now: datetime) -> WorkerStatus:
    """The worker as people are told."""
    report = objects.report
    known = report.status if report is not None else WorkerStatus(objects.name, State.STOPPED)
    spec = objects.spec
    common: dict[str, Any] = {"name": objects.name, "lifetime": spec.lifetime, "labels": spec.labels}
    resting: dict[str, Any] = {
        **common,
        "pid": None,
        "uptime_seconds": None,
        "cpu_percent": None,
        "rss_bytes": None,
        "containment": None,
    }
    if not objects.wanted:
        if objects.pod is not None:
            return msgspec.structs.replace(known, **common, state=State.STOPPING)
        return msgspec.structs.replace(known, **resting, state=State.STOPPED, backoff_until=None, started_at=None)
    if report is None or report.start != objects.start or objects.pod is None:
        return msgspec.structs.replace(known, **resting, state=State.STARTING, status_text=why_waiting(objects.pod))
    silent = silent_seconds(objects.lease, now)
    if silent is not None:
        text = f"node {objects.node} has not been heard of for {silent:.0f} s"
        return msgspec.structs.replace(known, **common, state=State.UNHEALTHY, status_text=text)
    if known.state is State.STOPPED and report.fault is None:  # by its fence, not by a verb: it is wanted
        text = "rests until its pod can renew the Lease"
        return msgspec.structs.replace(known, **resting, state=State.STARTING, status_text=text)
    uptime = (now - known.started_at).total_seconds() if known.started_at and known.state.is_live else None
    return msgspec.structs.replace(known, **common, uptime_seconds=uptime)


def silent_seconds(lease: Manifest | None, now: datetime) -> float | None:
    """For how long a Lease that should be renewed was not; by the wall clocks of two machines, so only for people."""
    spec = (lease or {}).get("spec") or {}
    if not spec.get("holderIdentity") or not spec.get("renewTime"):
        return None
    renewed = datetime.fromisoformat(spec["renewTime"]).astimezone(UTC)
    silent = (now - renewed).total_seconds()
    return silent if silent > 2 * float(spec.get("leaseDurationSeconds") or 0) else None


def why_waiting(pod: Manifest | None) -> str:
    """What a pod that has not said anything yet is waiting for, in the cluster's words."""
    if pod is None:
        return "waiting for its pod"
    if (trouble := trouble_of(pod)) is not None:
        return trouble
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return f"not placed on a node: {condition.get('message', '')}"
    if pod["metadata"].get("deletionTimestamp"):
        return f"waiting for the end of its pod on node {pod['spec'].get('nodeName')}"
    return "its container is being started, or waits for the Lease"


def trouble_of(pod: Manifest) -> str | None:
    """Why a container cannot be started: nothing that waiting would mend."""
    for container in pod.get("status", {}).get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in {
            "ErrImagePull",
            "ImagePullBackOff",
            "ErrImageNeverPull",
            "InvalidImageName",
            "CreateContainerConfigError",
            "CreateContainerError",
            "RunContainerError",
        }:
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    return None


def _annotations(manifest: Manifest | None) -> dict[str, str]:
    return ((manifest or {}).get("metadata") or {}).get("annotations") or {}
