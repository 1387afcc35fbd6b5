"""Somebody's daemon over HTTP as a deck: the verbs of :class:`everdeck.verbs.Verbs` over its API.

``everdeck.open("https://box:8440", token=...)`` makes one. Errors are raised as the daemon raised them
(:mod:`everdeck.faults`). A request that cannot be delivered because nobody listens is a :class:`NoOwner`. One whose
answer was lost on the way is asked again for half a minute, under the same ``Idempotency-Key``: the daemon keeps the
key with the outcome (:mod:`everdeck.deck.deeds`), so the verb is done once. Then it is a :class:`ClientError`.

Streams reconnect by themselves for as long as the deck is open. Events are numbered and log lines have positions, so a
stream goes on after the last one that arrived (``Last-Event-ID``): nothing is missed and nothing comes twice.

The HTTP client is httpx: it is asynchronous, knows TLS and proxies, and a cancelled request lets go of its connection.
"""

import asyncio
import builtins
import contextlib
import inspect
import logging
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from os import PathLike
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from everdeck.errors import ClientError, DeckClosed, MessageLost, NoOwner, SpecError, TokenRefused, Unsupported
from everdeck.faults import Fault, error_of
from everdeck.messages import (
    FarHold,
    FeedStatus,
    Letter,
    LetterVerb,
    Message,
    MessageStream,
    Which,
    failure_of,
    is_leaving,
    outgoing,
)
from everdeck.model import Event, Layer, ProcessInfo, WorkerSpec, WorkerStatus, worker_name
from everdeck.verbs import (
    RESTARTS_AT_ONCE,
    Abilities,
    Inspection,
    Member,
    Name,
    OpenDeck,
    Run,
    Started,
    Stopped,
    Workers,
    checked_parallel,
    current_caller,
    spec_of,
    specs_of,
    told_once,
)

# A verb takes as long as it takes: a stop waits for the grace period, a start for a slow disk.
_TIMEOUT: Final = httpx.Timeout(None, connect=10.0)
# The daemon says something on every stream at least every ten seconds.
_STREAM_TIMEOUT: Final = httpx.Timeout(35.0, connect=10.0)
_AGAIN_SECONDS: Final = 0.1
_AGAIN_CAP_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 30.0
_PAGE: Final = 1000
# Messages that the daemon hands over ahead of their handling; the others are left for other readers.
_IN_HAND: Final = 8

_Answer = TypeVar("_Answer")
_log: Final = logging.getLogger("everdeck.remote")


class _Page(msgspec.Struct):
    workers: list[WorkerStatus]
    next: str | None = None


class _Position(msgspec.Struct):
    last_event_id: int


class _Lines(msgspec.Struct):
    lines: list[str]


class _Told(msgspec.Struct):
    """One line of a batch: what became of one worker, or of all of them."""

    name: str | None = None
    status: WorkerStatus | None = None
    fault: Fault | None = None
    done: list[WorkerStatus] | None = None


class _Refusal(msgspec.Struct):
    """What is read of a problem document."""

    title: str = ""
    detail: str = ""
    fault: Fault | None = None


class _Promised(msgspec.Struct):
    number: str


class _Decided(msgspec.Struct):
    done: bool


class _Feed(msgspec.Struct):
    status: FeedStatus
    letters: list[Letter]


class _Handed(msgspec.Struct):
    claim: str
    message: Message


class RemoteDeck:
    """The deck of a daemon at a URL. ``token`` is what ``everdeck token create`` or ``STATE/token`` gave."""

    def __init__(self, where: str, *, token: str | None = None) -> None:
        url = httpx.URL(where)
        if url.scheme not in {"http", "https"} or not url.host:
            raise SpecError("where", where, "http://HOST:PORT or https://HOST:PORT")
        if url.query or url.fragment or url.userinfo:
            raise SpecError("where", where, "a URL without a user, a query and a fragment; give the token as token=")
        self.where = where
        self._base = url
        self._token = token
        self._client: httpx.AsyncClient | None = None
        self._was_reached = False
        self._subscriptions: set[_Subscription] = set()

    # --- opening and closing ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> Self:
        """Reach the daemon and show it the token."""
        if self._client is None:
            headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
            self._client = httpx.AsyncClient(base_url=self._base, headers=headers, timeout=_TIMEOUT)
            try:
                await self.last_event_id()
            except BaseException:
                await self.close()
                raise
        return self

    async def close(self) -> None:
        """End the streams and let go of the connections; nothing changes for the workers."""
        for subscription in list(self._subscriptions):
            subscription.end()
        self._subscriptions.clear()
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    # --- verbs, as in everdeck.verbs ----------------------------------------------------------------------------

    async def start(self, name: Name, command: Run = None, *, replace: bool = False, **fields: Any) -> WorkerStatus:
        """Start a worker; return when its program has been exec'ed and recorded."""
        key = worker_name(name)
        spec = spec_of("command", command, fields)
        if spec is None:
            return await self._act(WorkerStatus, f"{_worker(key)}/start")
        body = {"name": key, "spec": spec}
        return await self._act(WorkerStatus, "/api/v1/workers", body, replace=int(replace))

    async def start_many(
        self, workers: Workers, *, replace: bool = False, progress: Started | None = None, **fields: Any
    ) -> builtins.list[WorkerStatus]:
        """Start many: what :meth:`start` promises for each, at a lower price, because they share their commits."""
        body = {"workers": specs_of(workers, fields), "replace": replace}
        return await self._batch("/api/v1/start-many", body, _telling(progress))

    async def stop(self, name: Name) -> WorkerStatus:
        """Stop a worker; return when its whole tree is proven gone."""
        return await self._act(WorkerStatus, f"{_worker(worker_name(name))}/stop")

    async def stop_many(self, names: Iterable[Name], progress: Stopped | None = None) -> builtins.list[WorkerStatus]:
        """Stop many at once; ``progress`` hears of each one that is gone."""
        tell = told_once(progress or _nobody, lambda status: status.name)

        def hear(told: _Told) -> None:
            if told.status is not None:
                tell(told.status)

        return await self._batch("/api/v1/stop-many", {"names": [worker_name(name) for name in names]}, hear)

    async def stop_all(self) -> builtins.list[WorkerStatus]:
        """Stop every worker of the deck."""
        return await self._batch("/api/v1/stop-many", {"names": "all"}, lambda _told: None)

    async def restart(self, name: Name) -> WorkerStatus:
        """Stop a worker and start it again with the spec it has."""
        return await self._act(WorkerStatus, f"{_worker(worker_name(name))}/restart")

    async def restart_many(
        self, names: Iterable[Name], *, parallel: int = RESTARTS_AT_ONCE, progress: Started | None = None
    ) -> builtins.list[WorkerStatus]:
        """Restart many, in groups: at most ``parallel`` of them are down at the same time."""
        body = {"names": [worker_name(name) for name in names], "parallel": checked_parallel(parallel)}
        return await self._batch("/api/v1/restart-many", body, _telling(progress))

    async def reset(self, name: Name) -> WorkerStatus:
        """Forget a worker's crashes; if it should run and does not, start it now."""
        return await self._act(WorkerStatus, f"{_worker(worker_name(name))}/reset")

    async def remove(self, name: Name, *, data: bool = False) -> None:
        """Stop a worker and remove its record, log, data and secrets."""
        await self._send("DELETE", _worker(worker_name(name)), key=_new_key(), **({"data": 1} if data else {}))

    async def adopt(self, name: Name, pid: int, **fields: Any) -> WorkerStatus:
        """Take over a process that somebody else started on the daemon's machine, without stopping it."""
        checked = WorkerSpec.of(("its own",), **fields)
        body = {"pid": pid, **{field: getattr(checked, field) for field in fields}}
        return await self._act(WorkerStatus, f"{_worker(worker_name(name))}/adopt", body)

    async def reconcile(self) -> None:
        """Compare every worker with the kernel now and act on differences; rarely needed, deaths are heard at once."""
        await self._send("POST", "/api/v1/reconcile", key=_new_key())

    async def status(self, name: Name) -> WorkerStatus:
        """One worker as it is now."""
        return await self._ask(WorkerStatus, "GET", _worker(worker_name(name)))

    async def address(self, name: Name) -> str:  # noqa: ARG002 - one machine for all of them
        """The host at which a worker's port is reached: the daemon's."""
        return urlsplit(self.where).hostname or self.where

    async def list(self) -> builtins.list[WorkerStatus]:
        """Every worker as it is now, by name."""
        found: builtins.list[WorkerStatus] = []
        page = await self._ask(_Page, "GET", "/api/v1/workers", limit=_PAGE)
        found += page.workers
        while page.next is not None:
            page = await self._ask(_Page, "GET", "/api/v1/workers", limit=_PAGE, cursor=page.next)
            found += page.workers
        return found

    async def inspect(self, name: Name) -> Inspection:
        """Everything about one worker."""
        return await self._ask(Inspection, "GET", f"{_worker(worker_name(name))}/inspect")

    async def spec(self, name: Name) -> WorkerSpec:
        """What a worker runs; the values of its secrets are None."""
        return await self._ask(WorkerSpec, "GET", f"{_worker(worker_name(name))}/spec")

    async def tree(self, name: Name) -> builtins.list[ProcessInfo]:
        """Every process of a worker's tree."""
        return (await self.inspect(name)).tree

    async def layers(self, name: Name) -> builtins.list[Layer]:
        """Which of the four layers protect a worker there, and how strongly."""
        return (await self.inspect(name)).layers

    async def logs(
        self,
        name: Name,
        lines: int | None = 20,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        grep: str | None = None,
    ) -> builtins.list[str]:
        """The last lines of a worker's log (None: all of them), across rotations."""
        asked: dict[str, Any] = {"whole": 1} if lines is None else {"lines": lines}
        asked |= {} if grep is None else {"grep": grep}
        for key, moment in (("since", since), ("until", until)):
            if moment is not None:
                asked[key] = moment.astimezone().isoformat()
        return (await self._ask(_Lines, "GET", f"{_worker(worker_name(name))}/logs", **asked)).lines

    async def follow_logs(self, name: Name, lines: int = 0, *, grep: str | None = None) -> AsyncIterator[str]:
        """The last lines of a worker's log, then each new one as it is written."""
        asked: dict[str, Any] = {"follow": 1, "colour": 0, "lines": lines} | ({} if grep is None else {"grep": grep})
        path = f"{_worker(worker_name(name))}/logs"
        async with contextlib.aclosing(self._stream(path, asked, None)) as told:
            async for kind, data in told:
                if kind == "end":
                    return
                texts = msgspec.json.decode(data)
                for text in texts["texts"] if kind == "lines" else [texts["text"]]:
                    yield text

    async def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> builtins.list[Event]:
        """What happened after an event id, oldest first; durable, so it can be replayed."""
        found: builtins.list[Event] = []
        asked = {} if worker is None else {"worker": worker}
        while limit is None or len(found) < limit:
            most = _PAGE if limit is None else min(_PAGE, limit - len(found))
            batch = await self._ask(list[Event], "GET", "/api/v1/events", after=after, limit=most, **asked)
            found += batch
            if len(batch) < most:
                break
            after = batch[-1].id
        return found

    async def last_event_id(self) -> int:
        """The id of the newest event, 0 if nothing ever happened."""
        return (await self._ask(_Position, "GET", "/api/v1/deck")).last_event_id

    async def follow(self, after: int | None = None) -> AsyncIterator[Event]:
        """Each event after an id (None: from now on), then each new one as it happens: in order, each once."""
        position = await self.last_event_id() if after is None else after
        async with contextlib.aclosing(self._stream("/api/v1/events", {}, position)) as told:
            async for _, data in told:
                event = _decoded(data, Event)
                if event.id > position:
                    position = event.id
                    yield event

    def on_event(self, callback: Callable[[Event], Any]) -> Callable[[], None]:
        """Call back for each event from now on; returns what unsubscribes."""
        self._connected()
        subscription = _Subscription(self, callback)
        self._subscriptions.add(subscription)

        def unsubscribe() -> None:
            self._subscriptions.discard(subscription)
            subscription.end()

        return unsubscribe

    # --- messages -----------------------------------------------------------------------------------------------

    def messages(self, name: Name | None = None, *, run: Callable[[Any], Any] | None = None) -> "RemoteMessages":
        """What comes in by a satellite (None: by all of them): ``async for message in deck.messages(): …``."""
        return RemoteMessages(self, None if name is None else worker_name(name), run)

    async def send(
        self,
        name: Name,
        *,
        to: str | int,
        text: str = "",
        subject: str | None = None,
        attachments: Sequence[str | PathLike[str]] = (),
        **options: Any,
    ) -> int:
        """Send a message by a satellite; returns its number once it is on the daemon's disk."""
        if attachments:
            raise Unsupported("attachments", "files of this machine are not on the daemon's")
        message = outgoing(to, text, subject=subject, **options)
        body = {"to": message.to, "text": text, "subject": subject, "options": options}
        promised = await self._act(_Promised, f"{_worker(worker_name(name))}/send", body)
        return int(promised.number.removeprefix("out-"))

    async def feed(self, name: Name) -> FeedStatus:
        """A satellite's feed: account, connection, what waits, is in flight, done, set aside, to be sent."""
        return (await self._ask(_Feed, "GET", f"{_worker(worker_name(name))}/feed", limit=1)).status

    async def letters(
        self, name: Name, *, which: Which = "dead", number: str | None = None, limit: int = 100
    ) -> builtins.list[Letter]:
        """What is in a satellite's feed: set aside (``dead``), ``waiting``, ``done``, or ``all`` that is not done."""
        asked = {"which": which, "limit": limit} | ({} if number is None else {"number": number})
        return (await self._ask(_Feed, "GET", f"{_worker(worker_name(name))}/feed", **asked)).letters

    async def decide(self, name: Name, verb: LetterVerb, number: str) -> bool:
        """``retry`` or ``drop`` a dead letter, or ``replay`` a done message; False if there is none of that number."""
        path = f"{_worker(worker_name(name))}/feed/{quote(number, safe='')}/{verb}"
        return (await self._act(_Decided, path)).done

    async def abilities(self) -> Abilities:
        """What this deck can do, and which verbs it cannot keep."""
        there = await self._ask(Abilities, "GET", "/api/v1/abilities")
        return Abilities("remote", self.where, there.unsupported)

    async def members(self) -> builtins.list[Member]:
        """Every process that has the deck open, its owner first."""
        return await self._ask(list[Member], "GET", "/api/v1/members")

    # --- asking -------------------------------------------------------------------------------------------------

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            raise DeckClosed(f"the deck {self.where} is closed; open it first")
        return self._client

    async def _ask(self, kind: type[_Answer], method: str, path: str, body: object = None, **asked: Any) -> _Answer:
        return _decoded(await self._send(method, path, body, **asked), kind)

    async def _act(self, kind: type[_Answer], path: str, body: object = None, **asked: Any) -> _Answer:
        """Asked again under the same key until it is answered: the daemon does it once."""
        return _decoded(await self._send("POST", path, body, key=_new_key(), **asked), kind)

    async def _send(
        self, method: str, path: str, body: object = None, *, key: str | None = None, **asked: Any
    ) -> bytes:
        await self._positions_known(method)
        headers = {"accept": "application/json", **({} if body is None else _JSON), **_for_whom(), **_keyed(key)}
        content = None if body is None else _encoded(body)

        async def ask(client: httpx.AsyncClient) -> httpx.Response:
            return await client.request(method, path.lstrip("/"), params=asked, content=content, headers=headers)

        response = await self._answered(ask, repeated=key is not None or method == "GET")
        if response.is_error:
            raise self._error(response.status_code, response.content)
        return response.content

    async def _batch(self, path: str, body: object, hear: Callable[[_Told], None]) -> builtins.list[WorkerStatus]:
        """A verb for many: each line of the answer tells of one worker, and the last one of all of them."""
        await self._positions_known("POST")
        headers, content = {**_JSON, **_for_whom(), **_keyed(_new_key())}, _encoded(body)

        async def ask(client: httpx.AsyncClient) -> _Told | None:
            last: _Told | None = None
            async with client.stream("POST", path.lstrip("/"), content=content, headers=headers) as response:
                if response.is_error:
                    raise self._error(response.status_code, await response.aread())
                async for line in _lines(response):
                    last = _decoded(line, _Told)
                    hear(last)
            return last

        last = await self._answered(ask, repeated=True)
        if last is None or (last.done is None and last.fault is None):
            raise ClientError(f"{self.where} broke off before it had told of every worker; look with `list`")
        if last.done is None:
            raise error_of(last.fault or Fault("ClientError", "an answer without an end"))
        return last.done

    async def _answered(
        self, ask: Callable[[httpx.AsyncClient], Coroutine[Any, Any, _Answer]], *, repeated: bool
    ) -> _Answer:
        """What is answered; a question that may be repeated is asked again when its answer was lost on the way."""
        lost: httpx.HTTPError | None = None
        deadline, wait = 0.0, _AGAIN_SECONDS
        while True:
            try:
                answer = await ask(self._connected())
            except httpx.HTTPError as error:
                if lost is None:
                    if not (repeated and self._was_reached) or isinstance(error, httpx.ConnectError):
                        raise self._lost(error) from error
                    lost, deadline = error, monotonic() + _PATIENCE_SECONDS
                elif monotonic() > deadline:
                    raise self._lost(lost) from error
            else:
                self._was_reached = True
                return answer
            await asyncio.sleep(wait * (0.5 + random.random() / 2))  # noqa: TID251, S311 - nobody tells when it is back; jitter
            wait = min(wait * 2, _AGAIN_CAP_SECONDS)

    async def _stream(
        self, path: str, asked: Mapping[str, Any], position: int | None
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Name and data of each server-sent event but pings, resumed after the last one when the connection ends."""
        wait = _AGAIN_SECONDS
        began = False
        while self._client is not None:
            headers = {"accept": "text/event-stream"} | ({} if position is None else {"last-event-id": str(position)})
            try:
                async with self._client.stream(
                    "GET", path.lstrip("/"), params=dict(asked), headers=headers, timeout=_STREAM_TIMEOUT
                ) as response:
                    if response.is_client_error or (response.is_error and not began):
                        raise self._error(response.status_code, await response.aread())
                    async for kind, number, data in _server_sent(response):
                        began, wait = True, _AGAIN_SECONDS
                        position = position if number is None else number
                        if kind != "ping":
                            yield kind, data
                        if kind == "end":
                            return
            except httpx.TransportError as error:
                if not began:
                    raise self._lost(error) from error
            await asyncio.sleep(wait * (0.5 + random.random() / 2))  # noqa: TID251, S311 - nobody tells when it is back; jitter
            wait = min(wait * 2, _AGAIN_CAP_SECONDS)

    async def _positions_known(self, method: str) -> None:
        """What this program does after ``on_event`` is heard by the callback: its first position comes first."""
        if method != "GET" and self._subscriptions:
            await asyncio.gather(*(asyncio.shield(one.begun) for one in self._subscriptions))

    def _lost(self, error: httpx.HTTPError) -> ClientError:
        match error:
            case httpx.ConnectError():
                return NoOwner(f"nobody answers at {self.where}: {error}")
            case httpx.TimeoutException():
                return ClientError(f"{self.where} did not answer in time")
            case _:
                why = str(error) or type(error).__name__
                return ClientError(
                    f"{self.where} went away before it answered ({why}); what it had done is recorded there"
                )

    def _error(self, status: int, raw: bytes) -> Exception:
        try:
            told = msgspec.json.decode(raw, type=_Refusal)
        except msgspec.MsgspecError:
            told = _Refusal(detail=raw[:500].decode("utf-8", "replace"))
        said = told.detail or told.title or "no reason was given"
        if told.fault is not None:
            return error_of(told.fault)
        if status == httpx.codes.UNAUTHORIZED:
            return TokenRefused(f"{self.where}: {said}")
        return ClientError(f"{self.where} answered {status}: {said}")


if TYPE_CHECKING:  # mypy proves that it keeps the contract

    def _keeps_the_contract(deck: RemoteDeck) -> OpenDeck:
        return deck


class RemoteMessages(MessageStream):
    """``async for message in deck.messages()`` over a daemon's stream; see :mod:`everdeck.satellites.bridge`."""

    def __init__(self, deck: RemoteDeck, worker: str | None, run: Callable[[Any], Any] | None) -> None:
        super().__init__(run)
        self._deck = deck
        self._worker = worker
        self._stream: AsyncGenerator[tuple[str, bytes], None] | None = None

    async def begin(self) -> None:
        """The daemon looks, when the first message is asked for."""

    async def __anext__(self) -> Message:
        return await (self._next() if self._run is None else asyncio.to_thread(self._run, self._next()))

    def _next_now(self, run: Callable[[Any], Any]) -> Message:
        message: Message = run(self._next())
        return message

    async def _next(self) -> Message:
        if self._stream is None:
            asked = {"most": _IN_HAND} | ({} if self._worker is None else {"worker": self._worker})
            self._stream = self._deck._stream("/api/v1/messages", asked, None)  # noqa: SLF001 - of one module
        stream = self._stream
        async for _, data in stream:
            handed = _decoded(data, _Handed)
            hold = _RemoteHold(self._deck, handed.claim, self._run, lambda: self._stream is stream)
            handed.message.__dict__["_hold"] = hold
            return handed.message
        raise DeckClosed(f"the deck {self._deck.where} is closed")

    async def aclose(self) -> None:
        """Take nothing more; the daemon hands back what was not finished."""
        stream, self._stream = self._stream, None
        if stream is not None:
            work = stream.aclose()
            await (work if self._run is None else asyncio.to_thread(self._run, work))

    def close(self) -> None:
        """The same for programs without an event loop."""
        if self._run is not None and self._stream is not None:
            stream, self._stream = self._stream, None
            self._run(stream.aclose())


class _RemoteHold(FarHold):
    """A claim at the daemon; see :class:`everdeck.messages.Hold`."""

    no_files = "files of this machine are not on the daemon's"

    def __init__(
        self, deck: RemoteDeck, claim: str, run: Callable[[Any], Any] | None, is_open: Callable[[], bool]
    ) -> None:
        super().__init__(run)
        self._deck = deck
        self._path = f"/api/v1/messages/{claim}"
        self._is_open = is_open

    async def _end(self, error: BaseException | None) -> None:
        if not self._is_open():
            # The daemon hands it back as soon as it hears that the stream has ended: who is quicker must not matter.
            if error is None:
                raise MessageLost("the messages are closed; it was handed back")
            return
        if error is None:
            replies = [{"text": one.text, "subject": one.subject, "options": one.options} for one in self._replies]
            await self._deck._act(_Decided, f"{self._path}/ack", {"replies": replies})  # noqa: SLF001 - as above
        elif is_leaving(error):
            await self._deck._act(_Decided, f"{self._path}/release")  # noqa: SLF001 - as above
        else:
            said = {"error": failure_of(error)}
            await self._deck._act(_Decided, f"{self._path}/fail", said)  # noqa: SLF001 - as above


class _Subscription:
    """One callback: a task that follows and calls it in a thread, so that it can wait for nobody else."""

    def __init__(self, deck: RemoteDeck, callback: Callable[[Event], Any]) -> None:
        self._deck = deck
        self._callback = callback
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self._task = asyncio.ensure_future(self._run())

    def end(self) -> None:
        """Call back no more."""
        self._task.cancel()
        if not self.begun.done():
            self.begun.set_result(None)

    async def _run(self) -> None:
        try:
            position = await self._deck.last_event_id()
            if not self.begun.done():
                self.begun.set_result(None)
            async for event in self._deck.follow(position):
                await self._call(event)
        except Exception:  # noqa: BLE001 - the edge: there is nobody to raise it to
            _log.exception("the events of %s are heard no more", self._deck.where)
        finally:
            if not self.begun.done():
                self.begun.set_result(None)

    async def _call(self, event: Event) -> None:
        try:
            result = await asyncio.to_thread(self._callback, event)
            if inspect.iscoroutine(result):
                await result
        except asyncio.CancelledError:
            raise
        except BaseException:  # noqa: BLE001 - whatever a callback raises, even SystemExit, is its own failure
            _log.exception("an on_event callback raised at event %d (%s of %s)", event.id, event.kind, event.worker)


# --- below: in the order it is called ---------------------------------------------------------------------------

_JSON: Final = {"content-type": "application/json"}


def _for_whom() -> dict[str, str]:
    """A program that asks for somebody else says for whom; the daemon records it beside the token's own name."""
    caller = current_caller()
    return (
        {}
        if caller is None or caller.token is None
        else {"everdeck-for": caller.token.encode("ascii", "replace").decode()}
    )


def _new_key() -> str:
    return secrets.token_hex(16)


def _keyed(key: str | None) -> dict[str, str]:
    """The id under which the daemon does it once, however often it is asked."""
    return {} if key is None else {"idempotency-key": key}


def _nobody(*_: object) -> None:
    """Nobody asked for progress."""


def _worker(name: str) -> str:
    return f"/api/v1/workers/{quote(name, safe='')}"


def _encoded(body: object) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (TypeError, UnicodeEncodeError) as error:
        raise SpecError("fields", "a value that cannot be sent", str(error)) from error


def _decoded(raw: bytes, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise ClientError(f"an answer that this version does not understand: {error}") from error


def _telling(progress: Started | None) -> "Callable[[_Told], None]":
    tell = told_once(progress or _nobody, lambda name, _answer: name)

    def hear(told: _Told) -> None:
        if told.name is not None:
            tell(told.name, error_of(told.fault) if told.fault is not None else _given(told.status))

    return hear


def _given(status: WorkerStatus | None) -> WorkerStatus:
    if status is None:
        raise ClientError("an answer without a status")
    return status


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines by newline alone: httpx's own would also break at U+2028, which JSON may hold."""
    rest = b""
    async for block in response.aiter_bytes():
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


async def _server_sent(response: httpx.Response) -> AsyncIterator[tuple[str, int | None, bytes]]:
    """Name, id and data of each event; see the HTML standard, "Server-sent events"."""
    name, number, data = "", None, b""
    async for ended in _lines(response):
        line = ended.removesuffix(b"\r")
        if not line:
            if data:
                yield name, number, data
            name, number, data = "", None, b""
        elif line.startswith(b"data: "):
            data += line[6:]
        elif line.startswith(b"event: "):
            name = line[7:].decode("ascii", "replace")
        elif line.startswith(b"id: ") and line[4:].isdigit():
            number = int(line[4:])
