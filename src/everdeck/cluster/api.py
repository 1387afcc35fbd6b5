"""The cluster's API, as much of it as a deck needs: plain requests, watches, and commands in a pod.

It stands on the official client (``kubernetes.aio``), which knows how people log in: kubeconfig with its plug-ins, or
the account of the pod that we run in. Objects are plain values here, as in the manifests that people read: the client's
typed models of every kind cost seconds to load and say nothing that our few fields need.

Errors are translated once: :class:`NotThere`, :class:`Conflict`, :class:`Refusal`, and :class:`ClientError` for an
API server that cannot be reached.
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlencode

from everdeck.cluster.objects import Manifest
from everdeck.errors import ClientError

if TYPE_CHECKING:
    import aiohttp

REQUEST_SECONDS: Final = 30.0
_KEEP_ALIVE: Final = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 15,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
}
_GROUPS: Final = {
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Node": ("/api/v1", "nodes"),
    "Pod": ("/api/v1", "pods"),
    "Secret": ("/api/v1", "secrets"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
}


class Refusal(ClientError):
    """The API server said no."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"the cluster refused: {message or reason or status}")
        self.status = status
        self.reason = reason


class NotThere(Refusal):
    """No such object."""


class Conflict(Refusal):
    """It is there already, or somebody changed it since it was read."""


class Api:
    """One namespace of one cluster."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.requests = 0
        self._client: Any = None
        self._entered: dict[str, set[aiohttp.ClientWebSocketResponse]] = {}

    async def connect(self) -> Self:
        """As the pod that we run in, or as kubeconfig says."""
        try:
            from kubernetes.aio import client, config  # noqa: PLC0415 - half a second to load, for decks of clusters only
        except ImportError as error:
            raise ClientError("a deck on Kubernetes needs the extra: pip install 'everdeck[kubernetes]'") from error
        settings = client.Configuration()
        try:
            if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            else:
                await config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise ClientError(f"no cluster is configured here: {error}; set KUBECONFIG or run in a pod") from error
        settings.connection_pool_maxsize = 100
        self._client = client.ApiClient(settings)
        return self

    async def close(self) -> None:
        """Hang up."""
        if self._client is not None:
            await self._client.close()
            await asyncio.sleep(0.1)  # noqa: TID251 - TLS says goodbye in the loop's next turns and tells nobody when

    # --- objects --------------------------------------------------------------------------------------------------

    def path(self, kind: str, name: str = "") -> str:
        """Where objects of a kind are, or one of them."""
        group, plural = _GROUPS[kind]
        path = f"{group}/{plural}" if kind == "Node" else f"{group}/namespaces/{self.namespace}/{plural}"
        return f"{path}/{name}" if name else path

    async def get(self, kind: str, name: str) -> Manifest:
        """One object."""
        return await self.ask("GET", self.path(kind, name))

    async def find(self, kind: str, name: str) -> Manifest | None:
        """One object, or None."""
        with contextlib.suppress(NotThere):
            return await self.get(kind, name)
        return None

    async def all(self, kind: str, labels: str = "") -> tuple[list[Manifest], str]:
        """All objects of a kind, and the version from which a watch goes on."""
        answer = await self.ask("GET", self.path(kind), query={"labelSelector": labels} if labels else None)
        # The server says once for all of them what each is; alone, as from a watch, each says so itself.
        own = {"kind": kind, "apiVersion": answer["apiVersion"]}
        return [{**own, **item} for item in answer["items"]], answer["metadata"]["resourceVersion"]

    async def create(self, manifest: Manifest) -> Manifest:
        """Make it; :class:`Conflict` if it is there."""
        return await self.ask("POST", self.path(manifest["kind"]), manifest)

    async def replace(self, manifest: Manifest) -> Manifest:
        """Write it as a whole; :class:`Conflict` if it is not the version that was read."""
        return await self.ask("PUT", self.path(manifest["kind"], manifest["metadata"]["name"]), manifest)

    async def patch(self, kind: str, name: str, change: Manifest) -> Manifest:
        """Merge a change into it."""
        return await self.ask("PATCH", self.path(kind, name), change, content="application/merge-patch+json")

    async def put(self, manifest: Manifest) -> Manifest:
        """Make it, or make what is there the same."""
        try:
            return await self.create(manifest)
        except Conflict:
            name = manifest["metadata"]["name"]
            return await self.patch(manifest["kind"], name, manifest)

    async def delete(self, kind: str, name: str, *, uid: str | None = None, force: bool = False) -> None:
        """Delete it if it is there; with a uid only that very one. ``force`` forgets a pod without its kubelet."""
        body: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if force:
            body["gracePeriodSeconds"] = 0
        with contextlib.suppress(NotThere):
            await self.ask("DELETE", self.path(kind, name), body)

    # --- requests -------------------------------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Manifest:
        """One request; the answer as plain values."""
        async with self._request(method, path, body, query, content, REQUEST_SECONDS) as response:
            answer: Manifest = json.loads(await response.read())
            return answer

    async def watch(self, kind: str, version: str, labels: str = "") -> AsyncGenerator[tuple[str, Manifest], None]:
        """Each change after a version: ADDED, MODIFIED or DELETED, and the object. Ends when the server ends it."""
        query = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "false"}
        if labels:
            query["labelSelector"] = labels
        async with self._request("GET", self.path(kind), None, query, "application/json", None) as response:
            held = response.connection  # None: the answer is complete already
            _keep_alive(None if held is None or held.transport is None else held.transport.get_extra_info("socket"))
            try:
                async for line in response.content:
                    change = json.loads(line)
                    if change["type"] == "ERROR":
                        return  # the version is too old: the caller lists again
                    yield change["type"], change["object"]
            except (TimeoutError, OSError, _client_error()) as error:
                raise ClientError(f"the watch broke off: {error}") from error

    @contextlib.asynccontextmanager
    async def command(self, pod: str, words: Sequence[str]) -> "AsyncIterator[aiohttp.ClientWebSocketResponse]":
        """A command in a pod's container, as a websocket of numbered channels (0 stdin, 1 stdout, 2 stderr)."""
        asked = [("command", word) for word in words] + [(key, "true") for key in ("stdin", "stdout", "stderr")]
        path = f"{self.path('Pod', pod)}/exec?{urlencode([('container', 'worker'), *asked])}"
        headers, url, session = await self._prepared("GET", path, None)
        headers |= {"sec-websocket-protocol": "v4.channel.k8s.io", "Accept": "*/*"}
        self.requests += 1
        try:
            # The API server waits for the pod's node, which may be cut off: no kept-alive connection would tell.
            async with asyncio.timeout(REQUEST_SECONDS):
                channels = await session.ws_connect(url.replace("http", "ws", 1), headers=headers, max_msg_size=0)
        except (OSError, TimeoutError, _client_error()) as error:
            raise ClientError(f"pod {pod} cannot be entered: {error or type(error).__name__}") from error
        _keep_alive(channels.get_extra_info("socket"))
        self._entered.setdefault(pod, set()).add(channels)
        try:
            yield channels
        finally:
            self._entered.get(pod, set()).discard(channels)
            await channels.close()

    async def leave(self, pod: str) -> None:
        """End every command in a pod that is gone: a node that lost power does not hang up."""
        await asyncio.gather(*(channels.close() for channels in self._entered.pop(pod, ())))

    async def _prepared(self, method: str, path: str, body: Any) -> "tuple[dict[str, str], str, aiohttp.ClientSession]":
        _, url, headers, _, _ = await self._client.param_serialize(
            method, path, header_params={"Accept": "application/json"}, body=body, auth_settings=["BearerToken"]
        )
        rest = self._client.rest_client
        if rest.pool_manager is None:
            rest.pool_manager = rest._create_pool_manager()  # noqa: SLF001 - as the client itself does before a request
        return headers, url, rest.pool_manager

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Any, query: Mapping[str, str] | None, content: str, seconds: float | None
    ) -> "AsyncIterator[aiohttp.ClientResponse]":
        import aiohttp  # noqa: PLC0415 - comes with the client

        target = f"{path}?{urlencode(query)}" if query else path
        headers, url, session = await self._prepared(method, target, body)
        headers["Content-Type"] = content
        data = None if body is None else json.dumps(body)
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=REQUEST_SECONDS)
        self.requests += 1
        try:
            response = await session.request(method, url, headers=headers, data=data, timeout=timeout)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise ClientError(f"the cluster does not answer: {error or type(error).__name__}") from error
        async with response:
            if response.status >= 400:  # noqa: PLR2004 - where HTTP's refusals begin
                raise _refused(response.status, await response.text())
            try:
                yield response
            except (OSError, TimeoutError, aiohttp.ClientError) as error:
                raise ClientError(f"the cluster went away in the middle of an answer: {error}") from error


def _keep_alive(connection: socket.socket | None) -> None:
    """Let the kernel ask whether the server is still there.

    We only listen, so one that went without a word (its machine lost power, a laptop slept, a firewall forgot us)
    would be listened to for ever. See tcp(7).
    """
    if connection is not None:
        for option, value in _KEEP_ALIVE.items():
            connection.setsockopt(*option, value)


def _refused(status: int, text: str) -> Refusal:
    try:
        told = json.loads(text)
    except ValueError:
        told = {"message": text[:300]}
    kind = {404: NotThere, 409: Conflict}.get(status, Refusal)
    return kind(status, str(told.get("reason", "")), str(told.get("message", "")))


def _client_error() -> type[Exception]:
    import aiohttp  # noqa: PLC0415 - as above

    return aiohttp.ClientError
