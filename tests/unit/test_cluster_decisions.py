"""What the deck of a cluster decides: names, objects, and when a Lease may be used, taken and given up on."""

import mmap
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everdeck import Satellite
from everdeck.cluster.api import Api
from everdeck.cluster.export import manifests
from everdeck.cluster.fence import STATUS_ANNOTATION, Deadline
from everdeck.cluster.lease import LONGEST_REST_SECONDS, Seen, Terms, Watched, may_take_at, rest_after, watched
from everdeck.cluster.mirror import Mirror
from everdeck.cluster.naming import LONGEST, name_of, object_name
from everdeck.cluster.objects import Manifest, Settings, check, dependents, spec_of, stateful_set, volume_pod
from everdeck.cluster.observe import Objects, status_of
from everdeck.cluster.rescue import Rescue, is_ready
from everdeck.errors import LimitUnavailable, SpecError
from everdeck.model import Killed, Limits, Secret, State, WorkerName, WorkerSpec, WorkerStatus, worker_name

pytestmark = pytest.mark.unit

NAMES = st.from_regex(r"\A[A-Za-z0-9._@:+-]{1,128}\Z").filter(lambda name: name not in {".", ".."})
SETTINGS = Settings("bots", image="example/bots:7")
TERMS = Terms()


# --- rests --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_a_lease_that_is_lost_again_and_again_is_taken_more_slowly(losses: int, chance: float) -> None:
    """The first time at once; then longer each time, apart from each other, and never for ever."""
    rest = rest_after(losses, chance)

    assert (rest == 0) == (losses <= 1)
    assert rest <= LONGEST_REST_SECONDS
    assert losses <= 1 or rest >= rest_after(losses, 1.0) / 2
    assert rest_after(losses + 1, chance) >= rest


# --- names --------------------------------------------------------------------------------------------------------


@given(NAMES)
def test_every_worker_name_becomes_a_name_that_kubernetes_takes(name: str) -> None:
    """Lower-case letters, digits and hyphens, short enough for a pod of a StatefulSet, never ending in a hyphen."""
    made = object_name(worker_name(name))

    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", made)
    assert len(made) <= LONGEST


@given(NAMES)
def test_a_name_that_was_not_cut_is_read_back(name: str) -> None:
    """Escapes are undone; what was too long is told by its annotation only."""
    key = worker_name(name)

    assert name_of(object_name(key)) in {key, None}


@given(st.lists(NAMES, unique=True, min_size=2, max_size=2))
def test_two_workers_never_share_an_object(names: list[str]) -> None:
    """Different names stay different, in any case and with any escape."""
    assert object_name(worker_name(names[0])) != object_name(worker_name(names[1]))


def test_a_name_that_fits_is_kept() -> None:
    """People find their worker by its own name."""
    assert object_name(worker_name("alice")) == "alice"
    assert object_name(worker_name("Alice@x")) == "w----41lice--40x"


# --- the Lease ----------------------------------------------------------------------------------------------------


@given(
    last_renewal=st.floats(0, 1000),
    seen_after=st.floats(0, 60),
    holder_speed=st.floats(0.95, 1.05),
)
def test_the_holder_is_gone_before_a_successor_may_take_the_lease(
    last_renewal: float, seen_after: float, holder_speed: float
) -> None:
    """In real time, with a holder's clock that is up to 5 % wrong, and whenever the successor saw the renewal."""
    killed_at = last_renewal + TERMS.kill / holder_speed
    watch = Watched(Seen("other", TERMS.duration, "7"), last_renewal + seen_after)

    assert may_take_at(watch, "us", TERMS) > killed_at + TERMS.margin


def test_a_renewal_begins_the_wait_anew() -> None:
    """A successor counts only while it sees the same version."""
    first = watched(None, Seen("other", 8, "1"), 100.0)

    assert watched(first, Seen("other", 8, "1"), 105.0).since == 100.0
    assert watched(first, Seen("other", 8, "2"), 105.0).since == 105.0


@pytest.mark.parametrize("holder", ["", "us"])
def test_nobodys_lease_and_our_own_are_free_at_once(holder: str) -> None:
    """A fence that let go, and one that was restarted in the same pod, cost no wait."""
    assert may_take_at(Watched(Seen(holder, 8, "1"), 100.0), "us", TERMS) == 100.0


def test_the_longer_of_two_durations_counts() -> None:
    """A holder of an older release may have longer terms than ours."""
    assert may_take_at(Watched(Seen("other", 60, "1"), 0.0), "us", TERMS) == 60 + TERMS.margin


def test_a_program_cannot_lengthen_its_own_time() -> None:
    """It has the fence's account and finds the descriptor: it reads what others see, and cannot write."""
    deadline = Deadline.make()
    found = os.open(f"/proc/self/fd/{deadline.fd}", os.O_RDWR)
    try:
        deadline.at = 7.0
        assert Deadline(found).at == 7.0
        with pytest.raises(PermissionError):
            mmap.mmap(found, 8)
        with pytest.raises(PermissionError):
            os.write(found, b"12345678")
        with pytest.raises(PermissionError):
            os.ftruncate(found, 0)
    finally:
        os.close(found)
        os.close(deadline.fd)


# --- rescue -------------------------------------------------------------------------------------------------------


def _pod(node: str = "n1") -> dict[str, object]:
    return {"metadata": {"name": "alice-0", "uid": "u"}, "spec": {"nodeName": node}}


def _lease(holder: str = "alice-0_u") -> dict[str, object]:
    return {"metadata": {"resourceVersion": "1"}, "spec": {"holderIdentity": holder, "leaseDurationSeconds": 8}}


def test_a_pod_of_a_node_that_answers_is_never_forgotten() -> None:
    """However old its Lease looks."""
    assert Rescue(_pod(), True, _lease(), 0.0).due_at is None


def test_a_pod_of_a_silent_node_is_forgotten_when_its_lease_is_over() -> None:
    """Counted from when we first saw the version that it has."""
    assert Rescue(_pod(), False, _lease(), 50.0).due_at == 50.0 + 8 + TERMS.margin


def test_a_lease_that_was_taken_from_a_fence_is_waited_for_as_well() -> None:
    """Emptied or deleted by hand, it says nothing about the fence, which goes on until its own time is over."""
    assert Rescue(_pod(), False, _lease(""), 50.0).due_at == 50.0 + TERMS.duration + TERMS.margin
    assert Rescue(_pod(), False, None, 50.0).due_at == 50.0 + TERMS.duration + TERMS.margin


def test_a_picture_keeps_the_later_version_and_remembers_when_something_went() -> None:
    """The answer to a write may come after the watch has told of the next one."""
    mirror = Mirror(Api("bots"), "Lease", "", lambda: None)
    mirror.take({"metadata": {"name": "alice", "resourceVersion": "10"}})
    since = mirror.unchanged_since("alice")
    mirror.take({"metadata": {"name": "alice", "resourceVersion": "9"}})

    assert mirror.objects["alice"]["metadata"]["resourceVersion"] == "10"
    assert mirror.unchanged_since("alice") == since
    mirror.drop("alice")
    assert mirror.unchanged_since("alice") > since


def test_a_node_that_is_not_known_does_not_answer() -> None:
    """Deleted nodes are gone."""
    assert not is_ready(None)
    assert is_ready({"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    assert not is_ready({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})


# --- how a worker is ----------------------------------------------------------------------------------------------


def test_a_worker_that_rests_for_its_lease_has_not_ended() -> None:
    """Its fence stopped it and starts it again: whoever waits for its end (a hub, a program) is told to wait."""
    wanted = stateful_set(_name(), WorkerSpec(("bot",)), SETTINGS, start="s", replicas=1)
    report = {"status": WorkerStatus(_name(), State.STOPPED, exit=Killed(15)), "start": "s"}
    told = {"metadata": {"annotations": {STATUS_ANNOTATION: msgspec.json.encode(report).decode()}}}

    assert status_of(Objects(wanted, _pod(), told), datetime.now(UTC)).state is State.STARTING
    wanted["spec"]["replicas"] = 0
    assert status_of(Objects(wanted, None, told), datetime.now(UTC)).state is State.STOPPED


# --- objects ------------------------------------------------------------------------------------------------------


def _name() -> WorkerName:
    return worker_name("alice")


def test_secrets_and_environment_stand_in_the_secret_only() -> None:
    """Neither the StatefulSet nor any other object shows a value."""
    spec = WorkerSpec(("bot",), env={"KEY": "value-of-env"}, secrets={"TOKEN": Secret("value-of-secret")})
    made = [stateful_set(_name(), spec, SETTINGS, start="s", replicas=1), *dependents(_name(), spec, SETTINGS, "uid")]
    shown = [msgspec.json.encode(one).decode() for one in made if one["kind"] != "Secret"]

    assert not [text for text in shown if "value-of" in text]
    assert spec_of(next(one for one in made if one["kind"] == "Secret")) == spec


def _pods_of_ours() -> Iterator[tuple[str, Manifest]]:
    """Every kind of pod that is ever made."""
    limited = Limits(memory_bytes=10**9, cpu_percent=50, open_files=100)
    for kind, spec in (
        ("worker", WorkerSpec(("bot",), secrets={"TOKEN": Secret("t")}, limits=limited)),
        ("satellite", WorkerSpec.of(Satellite.telegram(Secret("1:a")))),
    ):
        yield kind, stateful_set(_name(), spec, SETTINGS, start="s", replicas=1)["spec"]["template"]["spec"]
        yield f"{kind}, read", volume_pod(_name(), spec, SETTINGS)["spec"]
        yield f"{kind}, written", volume_pod(_name(), spec, SETTINGS, writes=True)["spec"]
    for one in manifests(SETTINGS, {}):
        if one["kind"] == "Deployment":
            yield "operator", one["spec"]["template"]["spec"]


def _beyond_restricted(pod: Manifest) -> list[str]:
    """Which rules of the Pod Security Standard "restricted" it breaks, rule by rule; "baseline" is part of it.

    See https://kubernetes.io/docs/concepts/security/pod-security-standards/.
    """
    context = pod.get("securityContext", {})
    containers = [one for kind in ("containers", "initContainers", "ephemeralContainers") for one in pod.get(kind, ())]
    own = [one.get("securityContext", {}) for one in containers]
    volumes = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"}
    volumes |= {"persistentVolumeClaim", "projected", "secret"}
    probes = ("livenessProbe", "readinessProbe", "startupProbe")
    hooks = [one[probe] for one in containers for probe in probes if probe in one]
    hooks += [hook for one in containers for hook in one.get("lifecycle", {}).values()]
    meets = {
        "no container": bool(containers),
        "host namespaces": not any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")),
        "HostProcess": not any("windowsOptions" in one for one in (context, *own)),
        "privileged": not any(one.get("privileged") for one in own),
        "capabilities": all(
            one.get("capabilities", {}).get("drop") == ["ALL"]
            and set(one["capabilities"].get("add", ())) <= {"NET_BIND_SERVICE"}
            for one in own
        ),
        "volume types": all({*one} - {"name"} <= volumes for one in pod.get("volumes", ())),
        "host ports": not any(port.get("hostPort") for one in containers for port in one.get("ports", ())),
        "hosts of probes": not any("host" in act for one in hooks for act in one.values() if isinstance(act, dict)),
        "AppArmor": not any("appArmorProfile" in one for one in (context, *own)),
        "SELinux": not any("seLinuxOptions" in one for one in (context, *own)),
        "procMount": not any("procMount" in one for one in own),
        "sysctls": not context.get("sysctls"),
        "privilege escalation": all(one.get("allowPrivilegeEscalation") is False for one in own),
        "non-root": context.get("runAsNonRoot") is True and all(one.get("runAsNonRoot", True) for one in own),
        "non-root user": all(one.get("runAsUser", 1) != 0 for one in (context, *own)),
        "seccomp": context.get("seccompProfile", {}).get("type") == "RuntimeDefault"
        and all(one.get("seccompProfile", {}).get("type", "RuntimeDefault") == "RuntimeDefault" for one in own),
    }
    return [rule for rule, met in meets.items() if not met]


def test_every_rule_of_the_level_can_be_broken() -> None:
    """Else the next test shows nothing."""
    bad = {"seccompProfile": {"type": "Unconfined"}, "runAsUser": 0, "procMount": "Unmasked", "privileged": True}
    bad |= {"windowsOptions": {}, "seLinuxOptions": {}, "appArmorProfile": {}}
    probe = {"httpGet": {"host": "elsewhere"}}
    container = {"securityContext": bad, "ports": [{"hostPort": 1}], "livenessProbe": probe}
    pod = {"hostPID": True, "containers": [container], "volumes": [{"name": "v", "hostPath": {}}]}
    pod["securityContext"] = {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}

    assert len(_beyond_restricted(pod)) == 15
    assert _beyond_restricted({}) == ["no container", "non-root", "seccomp"]


@pytest.mark.parametrize(("kind", "pod"), list(_pods_of_ours()), ids=lambda one: one if isinstance(one, str) else "")
def test_a_pod_meets_the_restricted_level(kind: str, pod: Manifest) -> None:
    """Every rule of it, by every pod that we make; and their root cannot be written."""
    assert _beyond_restricted(pod) == [], kind
    assert [one["securityContext"]["readOnlyRootFilesystem"] for one in pod["containers"]] == [True]


def test_a_fence_may_touch_its_own_lease_and_pod_only() -> None:
    """Every rule names the one object that it is about, and none lets it create or delete."""
    made = dependents(_name(), WorkerSpec(("bot",)), SETTINGS, "uid")
    role = next(one for one in made if one["kind"] == "Role")

    assert [rule["resourceNames"] for rule in role["rules"]] == [["alice-0"], ["alice"]]
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "update"}


def test_a_dollar_in_a_command_is_not_the_kubelets() -> None:
    """``$(HOME)`` would be replaced in a container's command."""
    made = stateful_set(_name(), WorkerSpec(("sh", "-c", "echo $(HOME)")), SETTINGS, start="s", replicas=1)

    assert made["spec"]["template"]["spec"]["containers"][0]["command"][-1] == "echo $$(HOME)"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"user": "alice"}, SpecError),
        ({"group": "bots"}, SpecError),
        ({"limits": Limits(pids=10)}, LimitUnavailable),
        ({"limits": Limits(oom_score_adj=10)}, LimitUnavailable),
    ],
)
def test_what_a_pod_cannot_give_is_refused_by_name(fields: dict[str, object], error: type[Exception]) -> None:
    """Before anything is written."""
    with pytest.raises(error):
        check(WorkerSpec.of(("bot",), **fields), SETTINGS)


def test_a_worker_without_an_image_is_refused() -> None:
    """With the way out."""
    with pytest.raises(SpecError, match="image"):
        check(WorkerSpec(("bot",)), Settings("bots"))


def test_limits_become_the_pods() -> None:
    """Memory in bytes, processor in thousandths."""
    spec = WorkerSpec(("bot",), limits=Limits(memory_bytes=1_000_000, cpu_percent=25))
    container = stateful_set(_name(), spec, SETTINGS, start="s", replicas=1)["spec"]["template"]["spec"]["containers"][
        0
    ]

    assert container["resources"]["limits"] == {"memory": "1000000", "cpu": "250m"}


def test_a_pod_asks_for_what_its_fence_needs() -> None:
    """One that asks for nothing cannot renew its Lease on a busy node; a limit below that is asked for as it is."""
    for limits, asked in (
        (Limits(), {"cpu": "10m"}),
        (Limits(memory_bytes=1_000_000), {"cpu": "10m", "memory": "1000000"}),
        (Limits(cpu_percent=0.5), {"cpu": "5m"}),
    ):
        manifest = stateful_set(_name(), WorkerSpec(("bot",), limits=limits), SETTINGS, start="s", replicas=1)
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == asked
