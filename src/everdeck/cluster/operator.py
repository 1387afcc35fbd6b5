"""``everdeck operator``: brings back workers whose node has died, and keeps the namespace's events.

Any number of replicas may run; one leads, by a Lease of its own. The leader watches nodes, pods and Leases, forgets
pods of dead nodes when :mod:`rescue` allows it, and transfers what pods tell into the deck's events. It holds nothing
that the next leader could not read from the cluster.

Without an operator no worker is ever run twice either; one on a dead node then waits for a person.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final

from everdeck.cluster.api import Api, Conflict
from everdeck.cluster.events import EventLog, Told
from everdeck.cluster.fence import ACCOUNT, seen_in
from everdeck.cluster.lease import Terms, Watched, may_take_at, watched
from everdeck.cluster.mirror import Mirror
from everdeck.cluster.objects import MANAGED, WORKER_LABEL, Manifest
from everdeck.cluster.observe import Objects
from everdeck.cluster.rescue import Rescue, is_ready
from everdeck.crashpoints import crash_point
from everdeck.errors import ClientError, SpecError
from everdeck.kernel.identity import boottime
from everdeck.model import EventKind

LEASE: Final = "everdeck-operator"
LEADING: Final = Terms(duration=15.0)
"""Longer than a worker's: two who lead would do no harm, since the API server refuses whoever has an old picture, and
one who has much to do must not lose it by that."""
AT_ONCE: Final = 8
_log: Final = logging.getLogger("everdeck.operator")
_AGAIN_SECONDS: Final = 1.0


class Operator:
    """One replica."""

    def __init__(self, api: Api, terms: Terms | None = None) -> None:
        self._api = api
        self._terms = terms or Terms()
        self._leading = terms or LEADING
        self._us = f"{socket.gethostname()}_{os.getpid()}_{os.urandom(4).hex()}"
        self._events = EventLog(api)
        self._changed = asyncio.Event()
        self._pods = Mirror(api, "Pod", WORKER_LABEL, self._changed.set)
        self._leases = Mirror(api, "Lease", WORKER_LABEL, self._changed.set)
        self._sets = Mirror(api, "StatefulSet", WORKER_LABEL, self._changed.set)
        self._nodes = Mirror(api, "Node", "", self._changed.set)
        self._transferred: dict[str, str] = {}
        self.leads = False
        self.rescued = 0

    async def live(self) -> None:
        """Lead or wait to lead, for ever."""
        async with asyncio.TaskGroup() as tasks:
            for mirror in (self._pods, self._leases, self._sets, self._nodes):
                tasks.create_task(mirror.keep())
            await self._elect()

    # --- leading ------------------------------------------------------------------------------------------------

    async def _elect(self) -> None:
        watch: Watched | None = None
        while True:
            with contextlib.suppress(ClientError):
                lease = await self._own_lease()
                watch = watched(watch, seen_in(lease), boottime())
                at, asked_at = may_take_at(watch, self._us, self._leading), boottime()
                if at <= asked_at and (taken := await self._write(lease)) is not None:
                    _log.info("leading as %s", self._us)
                    await self._lead(taken, asked_at)
                    _log.warning("not leading any more")
                    watch = None
            await asyncio.sleep(_AGAIN_SECONDS)  # noqa: TID251 - whoever leads says nothing to us while all is well

    async def _lead(self, lease: Manifest, renewed_at: float) -> None:
        """Act while the Lease is ours; the work ends before anybody else may begin."""
        self.leads = True
        work = asyncio.get_running_loop().create_task(self._work())
        try:
            while (left := renewed_at + self._leading.polite - boottime()) > 0 and not work.done():
                await asyncio.wait({work}, timeout=min(left, self._leading.renew))
                sent_at = boottime()
                # An answer that comes later than the Lease holds is none.
                with contextlib.suppress(ClientError, TimeoutError):
                    async with asyncio.timeout(renewed_at + self._leading.polite - sent_at):
                        written = await self._write(lease)
                    if written is None:
                        return
                    lease, renewed_at = written, sent_at
        except asyncio.CancelledError:
            await self._let_go(lease)
            raise
        finally:
            self.leads = False
            work.cancel()
            (ended,) = await asyncio.gather(work, return_exceptions=True)
            if isinstance(ended, Exception):  # the edge: whoever leads next, and that may be us, tries again
                _log.error("the work of the leader failed", exc_info=ended)

    async def _own_lease(self) -> Manifest:
        found = await self._api.find("Lease", LEASE)
        if found is not None:
            return found
        manifest = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": LEASE, "namespace": self._api.namespace, "labels": dict(MANAGED)},
            "spec": {"holderIdentity": "", "leaseDurationSeconds": round(self._leading.duration)},
        }
        return await self._api.create(manifest)

    async def _let_go(self, lease: Manifest) -> None:
        """We are asked to end: whoever leads next need not wait."""
        with contextlib.suppress(ClientError, TimeoutError):
            async with asyncio.timeout(self._leading.request):
                await self._write(lease, holder="")

    async def _write(self, lease: Manifest, holder: str | None = None) -> Manifest | None:
        """Our name and the time; None if somebody else wrote since we read it."""
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = {**lease["spec"], "holderIdentity": self._us if holder is None else holder, "renewTime": now}
        try:
            return await self._api.replace({**lease, "spec": spec})
        except Conflict:
            return None

    # --- working ------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            for mirror in (self._pods, self._leases, self._sets, self._nodes):
                await mirror.current.wait()  # nobody is judged by an old picture
            self._changed.clear()
            await self._guarded(self._rescue)
            await self._guarded(self._transfer)
            next_at = self._next_due()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if next_at is None else max(0.05, next_at - boottime())):
                    await self._changed.wait()

    async def _guarded(self, work: Callable[[], Awaitable[Any]]) -> None:
        try:
            await work()
        except ClientError as error:
            _log.warning("%s; tried again with the next change", error)
            await asyncio.sleep(_AGAIN_SECONDS)  # noqa: TID251 - the API server is away
            self._changed.set()

    async def _transfer(self) -> None:
        for own in list(self._leases.objects):
            await self._transfer_of(own)

    async def _transfer_of(self, own: str) -> None:
        lease, made = self._leases.objects.get(own), self._sets.objects.get(own)
        if lease is None or made is None or self._transferred.get(own) == lease["metadata"]["resourceVersion"]:
            return
        objects = Objects(made, None, lease)
        report = objects.report
        if report is not None:
            await self._events.transfer(objects.name, report.deck, objects.told)
        self._transferred[own] = lease["metadata"]["resourceVersion"]

    async def _rescue(self) -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def rescued(own: str, case: Rescue) -> None:
            async with places:
                await self._rescue_one(own, case)

        due = [(own, case) for own, case in self._cases() if case.due_at is not None and case.due_at <= boottime()]
        outcomes = await asyncio.gather(*(rescued(own, case) for own, case in due), return_exceptions=True)
        for failure in outcomes:  # one that failed has kept nobody else waiting
            if failure is not None:
                raise failure

    async def _rescue_one(self, own: str, case: Rescue) -> None:
        if not await self._freed(case):
            return  # it was renewed at the last moment: somebody lives there
        meta, node = case.pod["metadata"], case.pod["spec"]["nodeName"]
        _log.warning("node %s does not answer and the Lease of %s is silent: its pod is forgotten", node, own)
        await self._transfer_of(own)  # what it told itself comes before its end
        await self._tell_of(own, node, meta["uid"])
        crash_point("operator.told")
        await self._api.delete("Pod", meta["name"], uid=meta["uid"], force=True)
        self._pods.drop(meta["name"])
        self.rescued += 1

    async def _tell_of(self, own: str, node: str, pod_uid: str) -> None:
        """Once for each pod, whoever leads: it is told before it is done, and a leader that dies then is followed."""
        made = self._sets.objects.get(own)
        if made is not None:
            detail = {"node": node, "why": "node-lost", "pod": pod_uid}
            told = Told(1, datetime.now(UTC), EventKind.ORPHAN_REAPED, detail)
            await self._events.transfer(Objects(made, None, None).name, f"pod:{pod_uid}", [told])

    async def _freed(self, case: Rescue) -> bool:
        """Take the silent holder's name off the Lease: we have waited as a successor would, so it need not once more.

        The API server refuses if the Lease is not the version that was silent for so long.
        """
        if case.lease is None or not case.lease["spec"].get("holderIdentity"):
            return True
        spec = {**case.lease["spec"], "holderIdentity": ""}
        try:
            self._leases.take(await self._api.replace({**case.lease, "spec": spec}))
        except Conflict:
            # The picture is behind. It is told anew, and the wait begins anew: else we would ask in a circle.
            if (now := await self._api.find("Lease", case.lease["metadata"]["name"])) is not None:
                self._leases.take(now)
            return False
        crash_point("operator.lease-freed")
        return True

    def _cases(self) -> list[tuple[str, Rescue]]:
        cases = []
        for pod in list(self._pods.objects.values()):
            own = pod["metadata"]["labels"][WORKER_LABEL]
            node = self._nodes.objects.get(pod["spec"].get("nodeName", ""))
            lease = self._leases.objects.get(own)
            cases.append((own, Rescue(pod, is_ready(node), lease, self._leases.unchanged_since(own), self._terms)))
        return cases

    def _next_due(self) -> float | None:
        return min((due for _, case in self._cases() if (due := case.due_at) is not None), default=None)

    def serve_metrics(self, listen: str) -> None:
        """``/metrics`` for Prometheus, by its own library, in a thread of its own."""
        from prometheus_client import CollectorRegistry, Gauge, start_http_server  # noqa: PLC0415 - only if asked for

        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit():
            raise SpecError("metrics", listen, "HOST:PORT, such as 0.0.0.0:9090")
        registry = CollectorRegistry()
        told: dict[str, tuple[str, Callable[[], float]]] = {
            "leads": ("Does this replica lead?", lambda: float(self.leads)),
            "rescued": ("Pods of dead nodes that this replica has forgotten.", lambda: float(self.rescued)),
            "requests": ("Requests of this replica to the API server.", lambda: float(self._api.requests)),
        }
        for name, (text, value) in told.items():
            Gauge(f"everdeck_operator_{name}", text, registry=registry).set_function(value)
        start_http_server(int(port), host.strip("[]"), registry)


def namespace_of(given: str | None, where: str) -> str:
    """The namespace that was typed, the deck's, or that of the pod that we run in."""
    if given is not None:
        return given
    if where.startswith("kubernetes:"):
        return where.removeprefix("kubernetes:")
    own = ACCOUNT / "namespace"
    if own.exists():
        return own.read_text().strip()
    raise SpecError("namespace", None, "--namespace NAME, or --state kubernetes:NAME")


async def run(namespace: str, metrics: str | None = None) -> None:
    """Be an operator until cancelled."""
    api = await Api(namespace).connect()
    operator = Operator(api)
    try:
        if metrics is not None:
            operator.serve_metrics(metrics)
        await operator.live()
    finally:
        await api.close()
