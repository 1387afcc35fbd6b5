"""The deck of a namespace: the verbs of the contract, over objects of the cluster.

It keeps nothing of its own: what should be is in StatefulSets and Secrets, what is comes from pods and Leases, and
three watches keep a picture of them, so looking costs no request. Any number of these decks may be open anywhere.
A verb writes its intent into the cluster and waits for the fact; whoever dies on the way leaves what the next one
finishes. What can only be done inside a pod (its log, a restart in place) goes through the pod's own deck.
"""

import asyncio
import base64
import builtins
import contextlib
import dataclasses
import inspect
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from everdeck.cluster.api import Api, Conflict
from everdeck.cluster.events import EventLog
from everdeck.cluster.inside import answer_to, line_into, output_of, spoken_with
from everdeck.cluster.mirror import Mirror
from everdeck.cluster.naming import object_name
from everdeck.cluster.objects import (
    APPLIED,
    CAME_FROM_ANNOTATION,
    MANAGED,
    READER_LABEL,
    SETTINGS,
    START_ANNOTATION,
    WORKER_LABEL,
    Manifest,
    Settings,
    check,
    claim,
    claim_name,
    dependents,
    pod_name,
    secret,
    spec_of,
    stateful_set,
    volume_pod,
)
from everdeck.cluster.observe import Objects, status_of, trouble_of
from everdeck.cluster.post import ClusterMessages, Post, to_send
from everdeck.cluster.read import Told, Wish
from everdeck.cluster.volume import RESTART
from everdeck.crashpoints import crash_point
from everdeck.errors import (
    ClientError,
    DeckClosed,
    EverdeckError,
    SpawnFailed,
    SpecChanged,
    SpecError,
    UnknownWorker,
    Unsupported,
    WorkerFailed,
)
from everdeck.faults import error_of
from everdeck.messages import FeedStatus, Letter, LetterVerb, Which
from everdeck.model import (
    Event,
    Layer,
    ProcessInfo,
    State,
    WorkerName,
    WorkerSpec,
    WorkerStatus,
    worker_name,
)
from everdeck.verbs import (
    RESTARTS_AT_ONCE,
    Abilities,
    Inspection,
    Member,
    Name,
    Run,
    Started,
    Stopped,
    Workers,
    checked_parallel,
)
from everdeck.wire import requests as ask

START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 120.0
ADDRESS_SECONDS: Final = 60.0
_AT_ONCE: Final = 16
READ: Final = ("python3", "-P", "-m", "everdeck.cluster.read")
_log: Final = logging.getLogger("everdeck.cluster")
IMAGE_ENV: Final = "EVERDECK_IMAGE"

UNSUPPORTED: Final = {
    "adopt": "a process of this machine cannot be taken over by a cluster; start the worker there instead",
    "user": "a pod has an account of its own",
    "cgroups": "a pod's cgroup is the kubelet's: limits are set there, and nothing of it is shown here",
}


class ClusterDeck:
    """All workers of one namespace; keeps :class:`everdeck.verbs.Verbs`."""

    def __init__(self, where: str, *, token: str | None = None, settings: Settings | None = None) -> None:
        namespace = where.removeprefix("kubernetes:")
        if token is not None:
            raise SpecError("token", "<hidden>", "no token for a cluster: kubeconfig says who we are")
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", namespace):
            raise SpecError("where", where, "kubernetes:NAMESPACE, a name of lower-case letters, digits and hyphens")
        self.namespace = namespace
        self.settings = settings or Settings(namespace)
        self._settings_given = settings is not None
        self._api = api = Api(namespace)
        self._log = EventLog(api)
        self._changed = asyncio.Condition()
        self._sets = Mirror(api, "StatefulSet", WORKER_LABEL, self._wake)
        self._pods = Mirror(api, "Pod", WORKER_LABEL, self._pods_changed)
        self._pod_uids: dict[str, str] = {}
        self._leases = Mirror(api, "Lease", WORKER_LABEL, self._leases_changed)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._untold: set[str] = set()
        self._told = asyncio.Event()
        self._closed = True
        self._post = Post(self)

    # --- opening and closing ------------------------------------------------------------------------------------

    async def open(self) -> Self:
        """Connect, and look at everything once."""
        if not self._closed:
            return self
        await self._api.connect()
        self._closed = False
        try:
            if not self._settings_given:
                self.settings = await _settings(self._api)
            await self._look()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Let go. Nothing stops: the workers are the cluster's."""
        if self._closed:
            return
        self._closed = True
        await self._post.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        # Before they notice: a watch that hangs up by itself says goodbye first, and waits for a busy server to answer.
        await self._api.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        mirrors = (self._sets, self._pods, self._leases)
        for mirror in mirrors:
            self._background(mirror.keep())
        self._background(self._transfer())
        try:
            async with asyncio.timeout(30):
                for mirror in mirrors:
                    await mirror.current.wait()
        except TimeoutError:
            await self._api.ask("GET", self._api.path("StatefulSet"))  # raises what keeps us from looking
            raise ClientError(f"the namespace {self.namespace!r} cannot be read") from None

    def _background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- facts --------------------------------------------------------------------------------------------------

    @property
    def api(self) -> Api:
        """The cluster."""
        return self._api

    async def changed(self) -> None:
        """Wait for any change of any worker."""
        async with self._changed:
            await self._changed.wait()

    def _wake(self) -> None:
        self._background(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _pods_changed(self) -> None:
        """Whoever speaks with a pod that was replaced would wait for its node; the next one is there to be asked."""
        before = self._pod_uids
        self._pod_uids = {name: pod["metadata"]["uid"] for name, pod in self._pods.objects.items()}
        for name, uid in before.items():
            if self._pod_uids.get(name) != uid:
                self._background(self._api.leave(name))
        self._wake()

    def _leases_changed(self) -> None:
        self._untold.update(self._leases.objects)
        self._told.set()
        self._wake()

    async def _transfer(self) -> None:
        """Put what pods tell into the deck's events; the operator does the same, and each event is taken once."""
        while True:
            await self._told.wait()
            self._told.clear()
            names, self._untold = self._untold, set()
            for own in names:
                objects = self._objects_of(own)
                report = None if objects is None else objects.report
                if objects is not None and report is not None:
                    with contextlib.suppress(ClientError):
                        await self._log.transfer(objects.name, report.deck, objects.told)

    async def _until(self, fact: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until it is so; False if it was not within the time."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(fact)
        except TimeoutError:
            return False
        return True

    def _objects_of(self, own: str) -> Objects | None:
        made = self._sets.objects.get(own)
        if made is None:
            return None
        return Objects(made, self._pods.objects.get(f"{own}-0"), self._leases.objects.get(own))

    def known(self, name: WorkerName) -> Objects:
        """One worker's objects as they are now."""
        self._check_open()
        objects = self._objects_of(object_name(name))
        if objects is None:
            raise self._unknown(name)
        return objects

    def everybody(self) -> builtins.list[Objects]:
        """Those of every worker, by name."""
        found = [self._objects_of(own) for own in self._sets.objects]
        return sorted((one for one in found if one is not None), key=lambda one: one.name)

    def _unknown(self, name: WorkerName) -> UnknownWorker:
        return UnknownWorker(name, tuple(get_close_matches(name, [one.name for one in self.everybody()], n=3)))

    def _check_open(self) -> None:
        if self._closed:
            raise DeckClosed(f"the deck kubernetes:{self.namespace} is closed")

    # --- verbs that act -----------------------------------------------------------------------------------------

    async def start(self, name: Name, command: Run = None, *, replace: bool = False, **fields: Any) -> WorkerStatus:
        """Write the worker's objects, scale it to 1, and wait until its pod reports that the program runs."""
        self._check_open()
        key = worker_name(name)
        known = self._objects_of(object_name(key))
        if command is None and not fields:
            if known is None:
                raise self._unknown(key)
            return await self._start_known(key, known)
        spec = WorkerSpec.of(() if command is None else command, **fields)
        check(spec, self.settings)
        if known is None:
            return await self._start_new(key, spec)
        current = spec_of(await self._api.get("Secret", object_name(key)))
        different = _different(current, spec)
        if not different:
            return await self._start_known(key, known)
        if known.wanted and not replace:
            raise SpecChanged(key, different)
        return await self._start_changed(key, _kept_secrets(spec, current), known)

    async def _start_new(self, name: WorkerName, spec: WorkerSpec) -> WorkerStatus:
        await self.know(name, spec)
        crash_point("cluster.known")
        try:
            return await self._scaled_up(name)
        except SpawnFailed:  # as on one box, of a worker that never was there is nothing left
            await self.remove(name, data=True)
            raise

    async def _lease(self, manifest: Manifest) -> None:
        with contextlib.suppress(Conflict):  # one that is there may be held: it is not ours to write
            await self._api.create(manifest)

    async def _start_known(self, name: WorkerName, known: Objects) -> WorkerStatus:
        status = status_of(known, _now())
        if known.wanted and status.state is State.FAILED:
            raise WorkerFailed(name, f"{status.crashes} crashes")
        if known.wanted and status.state.is_live:
            return await self._started(name)
        await self._restamp(name)
        if known.wanted:
            await self._api.delete("Pod", pod_name(name))  # it rests (exited, backoff): a new pod is a new start
            self._background(self._forget(known))
        return await self._scaled_up(name)

    async def _start_changed(self, name: WorkerName, spec: WorkerSpec, known: Objects) -> WorkerStatus:
        uid = known.stateful_set["metadata"]["uid"]
        await self._api.put(secret(name, spec, self.settings, uid))
        manifest = stateful_set(name, spec, self.settings, start=secrets.token_hex(8), replicas=1)
        change = {
            "metadata": {"annotations": manifest["metadata"]["annotations"]},
            "spec": {"template": manifest["spec"]["template"], "replicas": 1},
        }
        self._sets.take(await self._api.patch("StatefulSet", object_name(name), change))
        await self._api.delete("Pod", pod_name(name))
        self._background(self._forget(known))
        return await self._started(name)

    async def _forget(self, known: Objects) -> None:
        """Once its fence has said that nothing is left in a pod that ends, its object need not wait for the kubelet.

        The kubelet tidies up first, which takes it up to ten seconds, and only then there is a place for the next pod.
        """
        if known.pod is None:
            return
        own, uid = object_name(known.name), known.pod["metadata"]["uid"]

        def there() -> Objects | None:
            now = self._objects_of(own)
            return now if now is not None and now.pod is not None and now.pod["metadata"]["uid"] == uid else None

        await self._until(lambda: (now := there()) is None or now.empty, STOP_SECONDS)
        if (now := there()) is not None and now.empty:
            with contextlib.suppress(ClientError):  # another deck did it, or the kubelet will
                await self._api.delete("Pod", f"{own}-0", uid=uid, force=True)

    async def _end_outdated(self, known: Objects) -> None:
        """The cluster's controller may not have read yet what we wrote, and make a pod as it was to be before."""
        assert known.pod is not None  # noqa: S101 - it is the pod that is outdated
        uid = known.pod["metadata"]["uid"]
        with contextlib.suppress(Conflict):  # it is another one already
            await self._api.delete("Pod", known.pod["metadata"]["name"], uid=uid)
        self._background(self._forget(known))
        own = object_name(known.name)
        await self._until(lambda: (now := self._objects_of(own)) is None or not now.outdated, None)

    async def _restamp(self, name: WorkerName, kind: str = "") -> None:
        """A new id of a start, so that the report of the last one is not taken for the next one's."""
        start = kind + secrets.token_hex(8)
        while True:
            made = await self._api.get("StatefulSet", object_name(name))
            container = made["spec"]["template"]["spec"]["containers"][0]
            container["env"] = [one for one in container["env"] if one["name"] != "EVERDECK_START"]
            container["env"].append({"name": "EVERDECK_START", "value": start})
            made["spec"]["template"]["metadata"]["annotations"][START_ANNOTATION] = start
            with contextlib.suppress(Conflict):  # the cluster's controller has written its status meanwhile
                self._sets.take(await self._api.replace(made))
                return

    async def _scaled_up(self, name: WorkerName) -> WorkerStatus:
        self._sets.take(await self._api.patch("StatefulSet", object_name(name), {"spec": {"replicas": 1}}))
        return await self._started(name)

    async def _started(self, name: WorkerName) -> WorkerStatus:
        """Wait for the pod's own word; a pod that cannot be started says why."""

        def settled() -> bool:
            objects = self._objects_of(object_name(name))
            if objects is None or (objects.pod is not None and trouble_of(objects.pod) is not None):
                return True
            report = objects.report
            if report is None or report.start != objects.start:
                return False
            return report.fault is not None or report.status.state is not State.STARTING

        def outdated() -> bool:
            objects = self._objects_of(object_name(name))
            return objects is not None and objects.outdated

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while await self._until(lambda: outdated() or settled(), None) and outdated():
                    await self._end_outdated(self.known(name))
        objects = self.known(name)
        if objects.pod is not None and (trouble := trouble_of(objects.pod)) is not None:
            raise SpawnFailed(objects.spec.command[0], 0, trouble)
        report = objects.report
        if report is not None and report.start == objects.start and report.fault is not None:
            raise error_of(report.fault)
        return status_of(objects, _now())

    async def start_many(
        self, workers: Workers, *, replace: bool = False, progress: Started | None = None, **fields: Any
    ) -> builtins.list[WorkerStatus]:
        """Several at a time; each has its own fate."""
        wanted: dict[WorkerName, Run] = {}
        for name, command in workers.items():
            key = worker_name(name)
            if key in wanted:
                raise SpecError("workers", key, "each name once")
            if command is not None or fields:
                check(WorkerSpec.of(() if command is None else command, **fields), self.settings)
            wanted[key] = command

        def start(name: WorkerName) -> Awaitable[WorkerStatus]:
            return self.start(name, wanted[name], replace=replace, **fields)

        return await self._each(list(wanted), start, asyncio.Semaphore(_AT_ONCE), progress, "started")

    async def _each(
        self,
        names: Sequence[WorkerName],
        act: Callable[[WorkerName], Awaitable[WorkerStatus]],
        gate: asyncio.Semaphore,
        progress: Started | None,
        done: str,
    ) -> builtins.list[WorkerStatus]:
        """Act on each, as many at a time as the gate lets in; what fails is raised together, in the end."""
        answers: dict[WorkerName, WorkerStatus | Exception] = {}

        async def one(name: WorkerName) -> None:
            async with gate:
                try:
                    answers[name] = await act(name)
                except EverdeckError as error:
                    answers[name] = error
            if progress is not None:
                progress(name, answers[name])

        await asyncio.gather(*(one(name) for name in names))
        failed = [answer for answer in answers.values() if isinstance(answer, Exception)]
        if failed:
            raise ExceptionGroup(f"{len(failed)} of {len(names)} workers could not be {done}", failed)
        return [answer for name in names if isinstance(answer := answers[name], WorkerStatus)]

    async def stop(self, name: Name) -> WorkerStatus:
        """Scale it to 0, and wait until its pod is gone; of a pod on a dead node, until its Lease is over."""
        key = worker_name(name)
        known = self.known(key)
        self._sets.take(await self._api.patch("StatefulSet", object_name(key), {"spec": {"replicas": 0}}))
        self._background(self._forget(known))
        gone = await self._until(lambda: f"{object_name(key)}-0" not in self._pods.objects, STOP_SECONDS)
        if not gone:
            pod = self._pods.objects.get(pod_name(key))
            raise ClientError(
                f"{key} is not gone after {STOP_SECONDS:.0f} s: its pod waits for node "
                f"{None if pod is None else pod['spec'].get('nodeName')}; it is wanted stopped and will be"
            )
        return status_of(self.known(key), _now())

    async def stop_many(self, names: Iterable[Name], progress: Stopped | None = None) -> builtins.list[WorkerStatus]:
        """All at once."""
        keys = [worker_name(name) for name in names]
        for key in keys:
            self.known(key)

        async def one(key: WorkerName) -> WorkerStatus:
            status = await self.stop(key)
            if progress is not None:
                progress(status)
            return status

        return list(await asyncio.gather(*(one(key) for key in keys)))

    async def stop_all(self) -> builtins.list[WorkerStatus]:
        """Every worker of the namespace."""
        self._check_open()
        return await self.stop_many([one.name for one in self.everybody()])

    async def restart(self, name: Name) -> WorkerStatus:
        """A new pod with the spec it has."""
        key = worker_name(name)
        known = self.known(key)
        await self._restamp(key, RESTART)
        if known.wanted:
            await self._api.delete("Pod", pod_name(key))
            self._background(self._forget(known))
        return await self._scaled_up(key)

    async def restart_many(
        self, names: Iterable[Name], *, parallel: int = RESTARTS_AT_ONCE, progress: Started | None = None
    ) -> builtins.list[WorkerStatus]:
        """So many at a time; each has its own fate."""
        keys = list(dict.fromkeys(worker_name(name) for name in names))
        for key in keys:
            self.known(key)
        gate = asyncio.Semaphore(checked_parallel(parallel))
        return await self._each(keys, self.restart, gate, progress, "restarted")

    async def reset(self, name: Name) -> WorkerStatus:
        """Forget its crashes: the pod's deck does, in place; without a pod the next start does."""
        key = worker_name(name)
        known = self.known(key)
        if not known.wanted:
            return status_of(known, _now())
        async with line_into(self._api, pod_name(key)) as line:
            await line.ask(ask.Reset(key), request=secrets.token_hex(16))
        return await self._started(key)

    async def remove(self, name: Name, *, data: bool = False) -> None:
        """Stop it and delete its objects; its volume stays unless ``data`` is true."""
        key = worker_name(name)
        await self.stop(key)
        own = object_name(key)
        await self._api.delete("StatefulSet", own)
        for kind in ("Secret", "Lease", "RoleBinding", "Role", "ServiceAccount"):
            await self._api.delete(kind, own)
        if data:
            await self._api.delete("PersistentVolumeClaim", claim_name(key))
        await self._until(lambda: own not in self._sets.objects, STOP_SECONDS)

    async def adopt(self, name: Name, pid: int, **fields: Any) -> WorkerStatus:  # noqa: ARG002 - the contract's
        """Not here."""
        raise Unsupported("adopt", UNSUPPORTED["adopt"])

    async def reconcile(self) -> None:
        """Nothing to do: the cluster's controllers compare all the time."""
        self._check_open()

    # --- messages -----------------------------------------------------------------------------------------------

    def messages(self, name: Name | None = None, *, run: Callable[[Any], Any] | None = None) -> ClusterMessages:
        """What comes in by a satellite (None: by all of them): ``async for message in deck.messages(): …``."""
        self._check_open()
        return self._post.messages(name, run)

    async def send(
        self,
        name: Name,
        *,
        to: str | int,
        text: str = "",
        subject: str | None = None,
        attachments: Sequence[str | os.PathLike[str]] = (),
        **options: Any,
    ) -> int:
        """Send a message by a satellite; returns its number once it is on the satellite's volume."""
        return await self._post.send(name, to_send(to, text, subject, attachments, options))

    async def feed(self, name: Name) -> FeedStatus:
        """A satellite's feed: account, connection, what waits, is in flight, done, set aside, to be sent."""
        return await self._post.feed(name)

    async def letters(
        self, name: Name, *, which: Which = "dead", number: str | None = None, limit: int = 100
    ) -> builtins.list[Letter]:
        """What is in a satellite's feed: set aside (``dead``), ``waiting``, ``done``, or ``all`` that is not done."""
        return await self._post.letters(name, which, number, limit)

    async def decide(self, name: Name, verb: LetterVerb, number: str) -> bool:
        """``retry`` or ``drop`` a dead letter, or ``replay`` a done message; False if there is none of that number."""
        return await self._post.decide(name, verb, number)

    # --- for those who bring a worker from elsewhere ------------------------------------------------------------

    def check(self, spec: WorkerSpec) -> None:
        """Refuse what a pod cannot give, by name."""
        check(spec, self.settings)

    def came_from(self, name: WorkerName) -> str | None:
        """The id of the deck that this worker was brought from; "" if it was not; None if it is not known."""
        objects = self._objects_of(object_name(name))
        return None if objects is None else objects.came_from

    async def know(self, name: WorkerName, spec: WorkerSpec, *, came_from: str | None = None) -> None:
        """Write a worker's objects; nothing runs yet."""
        manifest = stateful_set(name, spec, self.settings, start=secrets.token_hex(8), replicas=0)
        if came_from is not None:
            manifest["metadata"]["annotations"][CAME_FROM_ANNOTATION] = came_from
        try:
            made = await self._api.create(manifest)
        except Conflict:  # another deck is starting it at this moment, or died on the way: finish what it began
            made = await self._api.get("StatefulSet", object_name(name))
        self._sets.take(made)
        for one in dependents(name, spec, self.settings, made["metadata"]["uid"]):
            await self._api.put(one) if one["kind"] != "Lease" else await self._lease(one)

    async def receive(self, name: WorkerName, spec: WorkerSpec, blocks: AsyncIterator[bytes]) -> bytes:
        """Put a worker's files on its volume, which is made if it is not there; returns what the pod answered."""
        with contextlib.suppress(Conflict):
            await self._api.create(claim(name, self.settings))
        words = ("python3", "-P", "-m", "everdeck.cluster.receive", name)
        async with self._pod_with_volume(volume_pod(name, spec, self.settings, writes=True)) as pod:
            return await answer_to(self._api, pod, words, blocks)

    # --- what a daemon or a file needs beside the verbs ---------------------------------------------------------

    def configure(self, told: Mapping[str, Any]) -> None:
        """What ``[kubernetes]`` of a file says wins over what the namespace keeps; the namespace is the one we have."""
        said = {key: value for key, value in told.items() if key != "namespace"}
        self.settings = dataclasses.replace(self.settings, **said)

    async def applied(self) -> bytes | None:
        """What the last configuration left to be remembered."""
        kept = await self._api.find("Secret", APPLIED)
        return None if kept is None else base64.b64decode(kept["data"]["memory"])

    async def remember_applied(self, memory: bytes) -> None:
        """In a Secret: templates hold values of environments."""
        meta = {"name": APPLIED, "namespace": self.namespace, "labels": dict(MANAGED)}
        data = {"memory": base64.b64encode(memory).decode()}
        await self._api.put({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})

    # --- verbs that look ----------------------------------------------------------------------------------------

    async def status(self, name: Name) -> WorkerStatus:
        """As its Lease and its pod tell."""
        return status_of(self.known(worker_name(name)), _now())

    async def address(self, name: Name) -> str:
        """The host at which a worker's port is reached: its pod's, from inside the cluster.

        The kubelet tells of it later than the worker itself tells that it runs, so a live one is waited for.
        """
        key = worker_name(name)

        def told() -> bool:
            return self.known(key).address is not None or not status_of(self.known(key), _now()).state.is_live

        await self._until(told, ADDRESS_SECONDS)
        found = self.known(key).address
        if found is None:
            raise Unsupported("address", f"the pod of {name!r} has no address yet")
        return found

    async def list(self) -> builtins.list[WorkerStatus]:
        """Every worker, by name."""
        self._check_open()
        now = _now()
        return [status_of(one, now) for one in self.everybody()]

    async def spec(self, name: Name) -> WorkerSpec:
        """From its Secret; the values of its secrets are None."""
        key = worker_name(name)
        self.known(key)
        return spec_of(await self._api.get("Secret", object_name(key))).without_secret_values()

    async def whole_spec(self, name: Name) -> WorkerSpec:
        """The same, with the values of its secrets."""
        key = worker_name(name)
        self.known(key)
        return spec_of(await self._api.get("Secret", object_name(key)))

    async def inspect(self, name: Name) -> Inspection:
        """Everything about one worker; its processes and its crashes as the deck in its pod sees them."""
        key = worker_name(name)
        status, spec, layers = await self.status(key), await self.spec(key), await self.layers(key)
        if self.known(key).lives:
            with contextlib.suppress(ClientError):  # its pod is on its way out: then it has no processes to show
                async with line_into(self._api, pod_name(key)) as line:
                    inside = await line.ask(ask.Inspect(key))
                return Inspection(status, spec, layers, inside.tree, inside.crash_times)
        return Inspection(status, spec, layers, [], [])

    async def tree(self, name: Name) -> builtins.list[ProcessInfo]:
        """Its processes with the pids that they have in the pod."""
        key = worker_name(name)
        return (await self.inspect(key)).tree

    async def layers(self, name: Name) -> builtins.list[Layer]:
        """The same four layers, by the cluster's means."""
        objects = self.known(worker_name(name))
        held = bool(((objects.lease or {}).get("spec") or {}).get("holderIdentity"))
        return [
            Layer(
                "L1",
                holds=True,
                strength="pid namespace",
                why="the fence is the pod's first process: its death ends the pod",
            ),
            Layer(
                "L2", holds=held, strength="Lease", why="the program runs only while its pod holds the worker's Lease"
            ),
            Layer("L3", holds=True, strength="SIGKILL", why="everything in the pod is killed before the Lease is over"),
            Layer(
                "L4", holds=True, strength="pod uid", why="a pod that is not the live one of its name starts nothing"
            ),
        ]

    async def logs(
        self,
        name: Name,
        lines: int | None = 20,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        grep: str | None = None,
    ) -> builtins.list[str]:
        """From the log on its volume, archives included: read by the deck in its pod, or by one that only reads."""
        key = worker_name(name)
        if self.known(key).lives:
            with contextlib.suppress(ClientError):  # its pod is on its way out: what it wrote is on its volume
                async with line_into(self._api, pod_name(key)) as line:
                    return await line.ask(ask.Logs(key, lines, since=since, until=until, grep=grep))
        async with self._pod_with_volume(volume_pod(key, self.known(key).spec, self.settings)) as pod:
            wish = msgspec.json.encode(Wish(key, lines, since, until, grep)).decode()
            said = await output_of(self._api, pod, (*READ, wish))
        return msgspec.json.decode(said, type=builtins.list[str])

    async def follow_logs(self, name: Name, lines: int = 0, *, grep: str | None = None) -> AsyncIterator[str]:
        """The same, and each new line, over every pod that it will have; ends when the worker is removed."""
        key = worker_name(name)
        self.known(key)
        wish = Wish(key, lines, grep=grep)
        while (known := self._objects_of(object_name(key))) is not None:
            try:
                async with self._reading(key, wish, lives=known.lives) as found:
                    async for told in found:
                        wish = msgspec.structs.replace(wish, position=told.position)
                        if told.text is not None:
                            yield told.text
            except ClientError:
                _log.info("%s: its pod went away; its log goes on in the next one", key)
            if known.lives:
                await self.changed()
            else:
                await self._until(lambda: (now := self._objects_of(object_name(key))) is None or now.lives, None)

    @contextlib.asynccontextmanager
    async def _reading(self, name: WorkerName, wish: Wish, *, lives: bool) -> AsyncIterator[AsyncIterator[Told]]:
        """A log's lines with their positions: as they come from a pod that lives, or those that are on the volume."""
        async with contextlib.AsyncExitStack() as undo:
            pod = pod_name(name)
            if not lives:
                manifest = volume_pod(name, self.known(name).spec, self.settings)
                pod = await undo.enter_async_context(self._pod_with_volume(manifest))
            asked = msgspec.json.encode(msgspec.structs.replace(wish, mode="follow" if lives else "rest")).decode()
            lines, _ = await undo.enter_async_context(spoken_with(self._api, pod, (*READ, asked)))

            async def told() -> AsyncIterator[Told]:
                async for line in lines:
                    yield msgspec.json.decode(line, type=Told)

            yield told()

    @contextlib.asynccontextmanager
    async def _pod_with_volume(self, manifest: Manifest) -> AsyncIterator[str]:
        """A pod that has a stopped worker's volume and no program, for as long as the body runs."""
        made = await self._api.create(manifest)
        own = made["metadata"]["name"]
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._until_running(made)
            yield own
        finally:
            await self._api.delete("Pod", own, force=True)

    async def _until_running(self, pod: Manifest) -> None:
        """A pod without the worker's label is in no picture of ours: it has a watch of its own."""
        own, label = pod["metadata"]["name"], f"{READER_LABEL}={pod['metadata']['name']}"
        while pod.get("status", {}).get("phase") != "Running":
            if (trouble := trouble_of(pod)) is not None:
                raise ClientError(f"the volume cannot be read: {trouble}")
            version = pod["metadata"]["resourceVersion"]
            async with contextlib.aclosing(self._api.watch("Pod", version, label)) as changes:
                async for kind, changed in changes:
                    if kind == "DELETED":
                        raise ClientError(f"pod {own} was deleted before it had read anything")
                    pod = changed
                    break
                else:
                    pod = await self._api.get("Pod", own)

    async def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> builtins.list[Event]:
        """From the cluster's objects."""
        self._check_open()
        return await self._log.events(after, limit, worker)

    async def last_event_id(self) -> int:
        """The newest."""
        self._check_open()
        return await self._log.last_id()

    def follow(self, after: int | None = None) -> AsyncIterator[Event]:
        """By a watch."""
        self._check_open()
        return self._log.follow(after)

    def on_event(self, callback: Callable[[Event], Any]) -> Callable[[], None]:
        """A task of ours that follows."""
        self._check_open()

        async def call() -> None:
            async for event in self._log.follow(None):
                with contextlib.suppress(Exception):  # a raising callback never harms the deck
                    if inspect.isawaitable(answer := callback(event)):
                        await answer

        task = asyncio.get_running_loop().create_task(call())
        self._tasks.add(task)
        return lambda: (task.cancel(), None)[1]

    async def abilities(self) -> Abilities:
        """Everything but what needs a process of this machine."""
        return Abilities("cluster", f"kubernetes:{self.namespace}", dict(UNSUPPORTED))

    async def members(self) -> builtins.list[Member]:
        """Nobody owns it but the cluster."""
        self._check_open()
        return []


if TYPE_CHECKING:  # mypy proves that it keeps the contract
    from everdeck.verbs import OpenDeck

    def _keeps_the_contract(deck: ClusterDeck) -> OpenDeck:
        return deck


def _different(one: WorkerSpec, other: WorkerSpec) -> tuple[str, ...]:
    """The fields in which two specs differ; a secret without a value means the one that is there."""
    other = _kept_secrets(other, one)
    return tuple(name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name))


def _kept_secrets(spec: WorkerSpec, current: WorkerSpec) -> WorkerSpec:
    kept = {
        name: current.secrets[name] if one.value is None and name in current.secrets else one
        for name, one in spec.secrets.items()
    }
    return WorkerSpec.of(spec, secrets=kept)


def _now() -> datetime:
    return datetime.now(UTC)


async def _settings(api: Api) -> Settings:
    """What the namespace says; the environment of this process wins."""
    kept = await api.find("ConfigMap", SETTINGS)
    data = (kept or {}).get("data") or {}
    return Settings(
        namespace=api.namespace,
        image=os.environ.get(IMAGE_ENV) or data.get("image"),
        image_pull_policy=data.get("image_pull_policy"),
        storage_class=data.get("storage_class"),
        volume_size=data.get("volume_size", "1Gi"),
        lease_seconds=float(data.get("lease_seconds", Settings("").lease_seconds)),
    )
