"""What of a cluster needs only its API server: events, the operator, manifests, the fence with its few rights."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from everdeck.cluster import deck, events
from everdeck.cluster.api import REQUEST_SECONDS, Api
from everdeck.cluster.deck import ClusterDeck
from everdeck.cluster.events import EventLog, Told
from everdeck.cluster.export import manifests
from everdeck.cluster.fence import LEFT_ANNOTATION, STATUS_ANNOTATION, TOLD_ANNOTATION
from everdeck.cluster.lease import Terms
from everdeck.cluster.mirror import Mirror
from everdeck.cluster.move import move
from everdeck.cluster.objects import START_ANNOTATION, WORKER_LABEL, Manifest, Settings, dependents, stateful_set
from everdeck.cluster.operator import Operator
from everdeck.deck import AsyncDeck
from everdeck.errors import ClientError, SpecError
from everdeck.kernel.identity import boottime
from everdeck.model import EventKind, State, WorkerSpec, worker_name
from support.cluster_api import MISSING, ApiServer
from support.waiting import eventually

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

ALICE = worker_name("alice")
DEADLINE_SECONDS = 90.0
LONG_SECONDS = 240


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


def test_a_worker_that_went_on_here_after_a_move_is_not_started_there(
    with_api: Callable[..., Any], tmp_path: Path
) -> None:
    """A move was cut off when it was known there, and somebody started it here again: then it would run twice."""

    async def scenario(api: Api) -> None:
        there = ClusterDeck(f"kubernetes:{api.namespace}", settings=Settings(api.namespace, image="x"))
        async with AsyncDeck(tmp_path / "state") as here, contextlib.AsyncExitStack() as undo:
            await there.open()
            undo.push_async_callback(there.close)
            await here.start(ALICE, ["sleep", "1000"])
            await there.know(ALICE, await here.whole_spec(ALICE), came_from=here.deck_id)
            for keep in (True, False):
                with pytest.raises(SpecError, match="does not run here"):
                    await move(here, there, ALICE, keep=keep)
            assert (await here.status(ALICE)).state is State.RUNNING
            assert (await api.get("StatefulSet", "alice"))["spec"]["replicas"] == 0
            await here.remove(ALICE)

    with_api(scenario)


class _Held(Api):
    """Makes the second object of events only when it is let."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def create(self, manifest: Manifest) -> Manifest:
        if manifest["metadata"]["name"].endswith("000002"):
            self.asked.set()
            await self.let.wait()
        return await super().create(manifest)


def test_an_object_that_is_full_is_never_written_again(
    with_api: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two meet at its end: one makes the next object, the other goes on in it, and no event has another's id."""
    monkeypatch.setattr(events, "MOST_PER_OBJECT", 3)

    async def scenario(api: Api) -> None:
        slow = await _Held(api.namespace).connect()
        try:
            for number in range(3):
                await EventLog(api).append(f"w{number}", EventKind.STARTED)
            late = asyncio.ensure_future(EventLog(slow).append("late", EventKind.STARTED))
            await slow.asked.wait()
            await EventLog(api).append("early", EventKind.STARTED)
            slow.let.set()
            await late
        finally:
            await slow.close()
        found = await EventLog(api).events()
        assert [(event.id, event.worker) for event in found[3:]] == [(4, "early"), (5, "late")]

    with_api(scenario)


def test_how_far_a_deck_was_read_is_forgotten_only_of_workers_that_are_gone(
    with_api: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object holds a megabyte: a namespace through which many workers went must not fill it with their names."""
    monkeypatch.setattr(events, "MOST_PER_OBJECT", 2)
    monkeypatch.setattr(events, "MOST_READ", 2)

    async def scenario(api: Api) -> None:
        for manifest in dependents(ALICE, WorkerSpec.of(["sleep", "1"]), Settings(api.namespace, image="x"), None):
            if manifest["kind"] == "Lease":
                manifest["metadata"]["annotations"][STATUS_ANNOTATION] = json.dumps({"deck": "deck-of-alice"})
                await api.create(manifest)
        told, log = [Told(1, datetime.now(UTC), EventKind.STARTED)], EventLog(api)
        for deck_id in ("deck-of-alice", "gone-1", "gone-2", "gone-3", "gone-4"):
            await log.transfer("somebody", deck_id, told)
        assert await log.transfer("alice", "deck-of-alice", told) == []
        objects, _ = await api.all("ConfigMap", events.LABEL)
        assert set(json.loads(objects[-1]["data"]["read"])) == {"deck-of-alice", "gone-3", "gone-4"}

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
    """One of two operators leads; it frees the Lease and forgets the pod; a Lease that is renewed is left alone.

    So is one whose renewals it does not hear of: it waits anew each time, and does not ask in a circle.
    """

    async def scenario(api: Api) -> None:
        node = f"node-{api.namespace}"
        await api.ask("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
        for name in ("silent", "renewed", "unheard"):
            await _pod_with_lease(api, name, node)
        terms = Terms(duration=4, margin=0.5, renew=0.5)
        deaf = await _Deaf(api.namespace).connect()
        operators = [Operator(deaf, terms) for _ in range(2)]
        living = [asyncio.ensure_future(operator.live()) for operator in operators]

        async def renew() -> None:
            while True:
                for name in ("renewed", "unheard"):
                    await api.patch("Lease", name, {"metadata": {"annotations": {"beat": os.urandom(4).hex()}}})
                await asyncio.sleep(0.2)

        renewing = asyncio.ensure_future(renew())
        try:
            await eventually(lambda: _is_gone(api, "silent-0"), "the pod is forgotten", DEADLINE_SECONDS)
            assert (await api.get("Lease", "silent"))["spec"].get("holderIdentity") in {"", None}
            await eventually(lambda: len(deaf.tried) > 1, "the unheard one is tried twice", DEADLINE_SECONDS)
            assert deaf.tried[1] - deaf.tried[0] >= terms.duration + terms.margin
            for name in ("renewed", "unheard"):
                assert await api.find("Pod", f"{name}-0") is not None
                assert (await api.get("Lease", name))["spec"]["holderIdentity"] == "somebody"
            await eventually(lambda: sum(one.leads for one in operators) == 1, "one leads", DEADLINE_SECONDS)
            told = [event for event in await EventLog(api).events() if event.kind is EventKind.ORPHAN_REAPED]
            assert [event.worker for event in told] == ["silent"]

            deaf.hangs = True
            await eventually(lambda: not any(one.leads for one in operators), "nobody leads", REQUEST_SECONDS / 2)
        finally:
            for task in (renewing, *living):
                task.cancel()
            await asyncio.gather(renewing, *living, return_exceptions=True)
            await deaf.close()

    with_api(scenario)


class _Deaf(Api):
    """Hears nothing of one Lease; and a server that does not answer those who renew, when it hangs."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.tried: list[float] = []
        self.hangs = False

    async def watch(self, kind: str, version: str, labels: str = "") -> AsyncGenerator[tuple[str, Manifest], None]:
        async for change, item in super().watch(kind, version, labels):
            if (kind, item["metadata"]["name"]) != ("Lease", "unheard"):
                yield change, item

    async def replace(self, manifest: Manifest) -> Manifest:
        if manifest["metadata"]["name"] == "unheard":
            self.tried.append(boottime())
        if self.hangs:
            await asyncio.Event().wait()
        return await super().replace(manifest)


def test_a_server_that_went_without_a_word_is_noticed(with_api: Callable[..., Any], server: ApiServer) -> None:
    """Whoever watches says nothing, so the kernel asks for him: the connection's timer is that of keepalive."""

    async def scenario(api: Api) -> None:
        _, version = await api.all("Pod")
        assert not _kept_alive(server.port)
        async with contextlib.aclosing(api.watch("Pod", version)) as changes:
            watching = asyncio.ensure_future(anext(changes))
            await eventually(lambda: _kept_alive(server.port), "the kernel asks", DEADLINE_SECONDS)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    with_api(scenario)


def test_a_closed_deck_has_hung_up_though_the_server_is_busy(with_api: Callable[..., Any], server: ApiServer) -> None:
    """No connection is left to a server that does not answer a goodbye: the loop that would wait for it ends now."""

    async def scenario(api: Api) -> None:
        opened = await ClusterDeck(f"kubernetes:{api.namespace}").open()
        await api.close()
        assert _connections(server.port) > 0
        with server.paused():
            await opened.close()
            assert _connections(server.port) == 0

    with_api(scenario)


def _connections(port: int) -> int:
    """How many sockets of this process are joined to a port."""
    table = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    ours = {name for name in _open_files() if name.startswith("socket:")}
    remote = [line.split() for line in table]
    return sum(int(one[2].rpartition(":")[2], 16) == port and f"socket:[{one[9]}]" in ours for one in remote)


def _kept_alive(port: int) -> bool:
    """Does a connection of ours to the port have the timer of keepalive? See proc(5): 2 in the field of timers."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    kept = {row[9] for row in rows if row[2].endswith(f":{port:04X}") and row[5].startswith("02:")}
    return any(f"socket:[{inode}]" in _open_files() for inode in kept)


def _open_files() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one by which we look
            yield str(entry.readlink())


class _BreaksOff(Api):
    """Its watches tell nothing, and end when they are told to: politely, or because the server has gone."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.ends: asyncio.Queue[bool] = asyncio.Queue()

    async def watch(self, kind: str, version: str, labels: str = "") -> AsyncGenerator[tuple[str, Manifest], None]:
        if not await self.ends.get():
            raise ClientError(f"the watch of {kind} after {version} broke off ({labels})")
        for nothing in ():
            yield nothing


def test_a_silence_that_nobody_could_break_is_none(with_api: Callable[..., Any]) -> None:
    """While the server is away no fence can renew: an operator begins to count when it hears again."""

    async def scenario(api: Api) -> None:
        await _pod_with_lease(api, "alice", "node")
        lone = await _BreaksOff(api.namespace).connect()
        looks = asyncio.Event()
        mirror = Mirror(lone, "Lease", WORKER_LABEL, looks.set)
        keeping = asyncio.ensure_future(mirror.keep())

        async def looked_again(*, politely: bool) -> float:
            looks.clear()
            lone.ends.put_nowait(politely)
            await looks.wait()
            return mirror.unchanged_since("alice")

        try:
            await mirror.current.wait()
            since = mirror.unchanged_since("alice")
            assert await looked_again(politely=True) == since
            assert await looked_again(politely=False) > since
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await lone.close()

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


@contextlib.asynccontextmanager
async def _a_deck_that_sees_a_pod(api: Api) -> AsyncGenerator[ClusterDeck, None]:
    opened = await ClusterDeck(f"kubernetes:{api.namespace}").open()
    try:
        await _pod_with_lease(api, "alice", "n1")
        await eventually(lambda: [one.node for one in opened.everybody()] == ["n1"], "it is seen")
        yield opened
    finally:
        await opened.close()


def test_a_pod_that_its_fence_has_left_does_not_wait_for_its_kubelet(
    with_api: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop returns when nothing is left in the pod, as its fence says; of another pod's word it takes no notice."""
    monkeypatch.setattr(deck, "STOP_SECONDS", 3.0)  # there is no kubelet: who waits for one waits for ever

    async def scenario(api: Api) -> None:
        async with _a_deck_that_sees_a_pod(api) as opened:
            uid = (await api.get("Pod", "alice-0"))["metadata"]["uid"]
            await api.delete("Pod", "alice-0")  # as the controller does that nobody runs here
            for left, holder in (("somebody-else", ""), (uid, "somebody")):
                change = {"metadata": {"annotations": {LEFT_ANNOTATION: left}}, "spec": {"holderIdentity": holder}}
                await api.patch("Lease", "alice", change)
                with pytest.raises(ClientError, match="is not gone"):
                    await opened.stop("alice")
                assert not await _is_gone(api, "alice-0")
            stopping = asyncio.ensure_future(opened.stop("alice"))
            await api.patch("Lease", "alice", {"spec": {"holderIdentity": ""}})
            assert (await stopping).state is State.STOPPED
            assert await _is_gone(api, "alice-0")

    with_api(scenario)


def test_a_pod_of_an_earlier_start_is_replaced(with_api: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller made it from what it had read before: who starts the worker would wait for its word for ever."""
    monkeypatch.setattr(deck, "START_SECONDS", 5.0)  # there is no kubelet, so nobody says a word

    async def scenario(api: Api) -> None:
        async with _a_deck_that_sees_a_pod(api) as opened:
            await opened.start("alice")
            assert "deletionTimestamp" not in (await api.get("Pod", "alice-0"))["metadata"]
            change = {"spec": {"template": {"metadata": {"annotations": {START_ANNOTATION: "newer"}}}}}
            await api.patch("StatefulSet", "alice", change)
            await eventually(lambda: [one.start for one in opened.everybody()] == ["newer"], "it is seen")
            await opened.start("alice")
            assert "deletionTimestamp" in (await api.get("Pod", "alice-0"))["metadata"]

    with_api(scenario)


async def _is_gone(api: Api, pod: str) -> bool:
    return await api.find("Pod", pod) is None


async def _is_told(api: Api, kind: str) -> bool:
    return kind in await _told(api)


async def _told(api: Api) -> list[str]:
    annotations = (await api.get("Lease", "alice"))["metadata"]["annotations"]
    return [one["kind"] for one in json.loads(annotations.get(TOLD_ANNOTATION, "[]"))]


async def _goes_on(api: Api) -> bool:
    """It was started a second time: again, or anew where the fence had stopped it first."""
    return len([kind for kind in await _told(api) if kind in {"started", "restarted"}]) > 1


FENCE = """
mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp "$AUTHORITY" /run/secrets/kubernetes.io/serviceaccount/ca.crt
cp "$TOKEN" /run/secrets/kubernetes.io/serviceaccount/token
exec "$PYTHON" -P -m everdeck.cluster.fence -- sleep 1000
"""


def test_a_fence_holds_its_lease_and_lets_go_and_the_pod_before_it_starts_nothing(
    with_api: Callable[..., Any], server: ApiServer, tmp_path: Path
) -> None:
    """As process 1 of its own namespace, with the account that the manifests give it and no other right.

    A watchdog that was killed is replaced, and a Lease that somebody took is respected at once: its time is so long
    that nothing ends here because it is over.
    """

    async def scenario(api: Api) -> None:
        settings = Settings(api.namespace, image="localhost/nothing:1", lease_seconds=LONG_SECONDS)
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
            await eventually(lambda: _is_told(api, "started"), "the worker's state is told", DEADLINE_SECONDS)
            lease = await api.get("Lease", "alice")
            assert lease["spec"]["holderIdentity"] == f"alice-0_{made['metadata']['uid']}"
            assert json.loads(lease["metadata"]["annotations"][STATUS_ANNOTATION])["status"]["state"] == "running"

            first = _first_process(fence)
            watchdog, owner = _children(first)
            os.kill(watchdog, signal.SIGKILL)
            await eventually(lambda: set(_children(first)) > {owner}, "there is another watchdog", DEADLINE_SECONDS)
            await api.patch("Lease", "alice", {"spec": {"holderIdentity": "somebody"}})
            await eventually(lambda: owner not in _children(first), "nothing runs", LONG_SECONDS / 4)
            assert (await api.get("Lease", "alice"))["spec"]["holderIdentity"] == "somebody"
            await api.patch("Lease", "alice", {"spec": {"holderIdentity": ""}})
            await api.patch("Lease", "alice", {"metadata": {"annotations": {LEFT_ANNOTATION: made["metadata"]["uid"]}}})
            await eventually(lambda: _goes_on(api), "it goes on", DEADLINE_SECONDS)
            assert LEFT_ANNOTATION not in (await api.get("Lease", "alice"))["metadata"]["annotations"]

            os.kill(first, signal.SIGTERM)
            assert await asyncio.to_thread(fence.wait, DEADLINE_SECONDS) == 0
        finally:
            fence.kill()
            fence.wait()
        lease = await api.get("Lease", "alice")
        assert lease["spec"].get("holderIdentity") in {"", None}
        assert lease["metadata"]["annotations"][LEFT_ANNOTATION] == made["metadata"]["uid"]
        told = [one["kind"] for one in json.loads(lease["metadata"]["annotations"][TOLD_ANNOTATION])]
        assert (told[0], told[-2:]) == ("started", ["stopping", "stopped"])

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
        "EVERDECK_LEASE_SECONDS": LONG_SECONDS,
        "EVERDECK_VOLUME": place,
        "EVERDECK_GIVEN": place / "given",
    }
    words = ["unshare", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child", "sh", "-ec", FENCE]
    environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
    return subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL)


def _first_process(unshare: "subprocess.Popen[bytes]") -> int:
    return _children(unshare.pid)[0]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
