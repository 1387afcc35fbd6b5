"""The satellite's own process: a pump, an outbox, a place where messages go, and what is told of them.

The pump asks the kind and stores what came; only a stored position is ever asked with. The outbox hands what was
promised to the kind. They meet whoever handles the messages only in the inbox, ``data/feed.db``, so each may fail,
wait or be killed without the others. A kind whose account cannot be reached is tried again with backoff: that is told
in words (status, facts in the file, an event when it begins and when it ends) and never ends the process.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from everdeck import child
from everdeck.crashpoints import crash_point
from everdeck.errors import EverdeckError, InboxUnavailable, SpecError
from everdeck.feed.claims import Claims
from everdeck.feed.handling import retry_after_of
from everdeck.feed.inbox import Inbox, Stream
from everdeck.feed.outbox import Message as Promised
from everdeck.feed.outbox import Outbox
from everdeck.feed.policy import Retry
from everdeck.feed.records import Record, Start
from everdeck.feed.reporting import StreamReport
from everdeck.feed.store import SQL
from everdeck.messages import Incoming, decoded_incoming, decoded_outgoing, encoded
from everdeck.model import SatelliteSpec
from everdeck.satellites import FEED, kind_of
from everdeck.satellites.base import Arrived, Context, Kind, forget_files, old_files
from everdeck.satellites.targets import Target, target_of
from everdeck.statedir import DATA

# A server that is away may come back any second: ten seconds of silence at most.
PUMP_RETRY: Final = Retry(0.5, 10.0)
# A refused password does not become right by asking; asking often locks accounts.
REFUSED_RETRY: Final = Retry(10.0, 120.0)
STATUS_SECONDS: Final = 1.0
CONTACT_SECONDS: Final = 60.0
DAY_SECONDS: Final = 86_400.0
FILES_SECONDS: Final = 30 * DAY_SECONDS

log = logging.getLogger("everdeck.satellite")


def main(arguments: Sequence[str]) -> int:
    """Run a satellite as its spec says; the spec comes in the environment, secrets as files."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    text = os.environ.get(child.SATELLITE_ENV)
    if len(arguments) != 1 or text is None:
        sys.stderr.write(
            "usage: python -m everdeck.satellites KIND\n"
            "It is started by a deck: everdeck start NAME --satellite KIND --secret TOKEN=FILE\n"
        )
        return 2
    try:
        satellite = Process.of(msgspec.json.decode(text, type=SatelliteSpec), arguments[0])
        child.main(satellite.run, ready=False)
    except EverdeckError as err:
        log.error("%s", err)  # noqa: TRY400 - the message says it all
        child.notify(STATUS=str(err)[:500])
        return 1
    return 0


class Process:
    """One satellite, from open to close."""

    def __init__(self, spec: SatelliteSpec, kind: Kind[Any], context: Context) -> None:
        self.spec = spec
        self.kind = kind
        self.context = context
        self.entry = kind_of(spec.kind)
        self.inbox = Inbox(context.data / FEED)
        self._told = [asyncio.Event(), asyncio.Event()]  # one for each task that looks at what has changed
        self._news = asyncio.Event()
        self._facts: dict[str, str] = {}
        self._said = ""
        self._failures = 0
        self._unsaid: dict[str, str] = {}
        context.transaction = self.inbox.transaction
        context.connected, context.failing, context.tell = self._connected, self._failing, self.tell

    @classmethod
    def of(cls, spec: SatelliteSpec, name: str) -> "Process":
        """From what the deck has put into the environment."""
        entry = kind_of(name)
        home = Path(os.environ[child.DIR_ENV])
        credentials = os.environ.get(child.CREDENTIALS_DIRECTORY_ENV)
        port = os.environ.get(child.PORT_ENV)
        context = Context(
            os.environ[child.WORKER_ENV],
            home / DATA,
            Path(credentials) if credentials else None,
            int(port) if port else None,
        )
        return cls(spec, made(entry.where, spec.options, entry.options, context), context)

    # --- the life of it -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        with Claims(self.inbox.path) as tables:  # what readers need in the file
            self._facts = tables.facts()
        await self.inbox.open()
        try:
            await self._remember(feed_id=self._facts.get("feed_id") or uuid4().hex[:16], kind=self.entry.name)
            await self.kind.open()
            try:
                await self._run()
            finally:
                await self.kind.close()
        finally:
            await self.inbox.close()

    async def _run(self) -> None:
        stream = self.inbox.stream(self.kind.name or self.entry.name)
        outbox = Outbox(
            self.inbox,
            max_attempts=self.kind.max_attempts,
            retry=self.kind.retry,
            on_event=lambda _: self._change(),
        )
        start = await stream.begin(getattr(self.kind.options, "first_run", "take"))
        target = target_of(self.spec, self.context, stream, outbox, sends=self.entry.sends)
        leave = self.inbox.store.bell.listen(lambda: self._others_wrote(stream))
        # An earlier run may have been killed between storing and ringing: readers look once more.
        self.inbox.store.bell.ring()
        try:
            async with asyncio.TaskGroup() as group:
                if self.entry.receives:
                    group.create_task(self._pump(stream, start))
                else:
                    group.create_task(self._keep_alive())
                if self.entry.sends:
                    group.create_task(outbox.run(self._send, concurrency=self.kind.senders))
                if target is not None:
                    group.create_task(target.run())
                if self.kind.files:
                    group.create_task(self._forget_files(self.context.data / self.kind.files))
                if self.kind.tells_finished:
                    group.create_task(self._tell_done())
                group.create_task(self._note())
                group.create_task(self._report(stream, target))
        finally:
            leave()

    # --- in -----------------------------------------------------------------------------------------------------

    async def _pump(self, stream: Stream, start: Start) -> None:
        if start is Start.SKIP:
            await self._persist(lambda: self._skip(stream))
        while await self._persist(lambda: self._ask_and_store(stream)):
            pass
        await self._remember(connection="ended")

    async def _skip(self, stream: Stream) -> bool:
        await stream.skip(to=await self.kind.skip_history())
        return True

    async def _ask_and_store(self, stream: Stream) -> bool:
        await stream.room()
        crash_point("satellite.pump.asking")
        arrived = await self.kind.fetch(stream.position())
        crash_point("satellite.pump.answered")
        if arrived is None:
            return False
        await self.store(stream, arrived)
        self._connected()
        await asyncio.sleep(0)  # noqa: TID251 - not a wait: a kind that always has an answer lets others have a turn
        return True

    async def store(self, stream: Stream, arrived: Arrived) -> int:
        """Put what arrived on disk; returns how many were new. Only then may the other side forget it."""
        numeric = arrived.asked is not None
        records = [_record(message, numeric=numeric) for message in arrived.messages]
        stored = await stream.store(records, arrived.cursor, asked=arrived.asked)
        crash_point("satellite.pump.stored")
        if self.kind.tells_finished and arrived.messages:
            # Afterwards: one that is noted and not stored would count as done, and be moved away unread.
            async with self.inbox.transaction() as db:
                db.executemany(SQL["after_add"], [(message.id,) for message in arrived.messages])
        if arrived.messages:
            await self.kind.stored(arrived.messages)
        if stored.restarted_ids:
            self.tell("ids-restarted", asked=arrived.asked, first=records[0].id)
        if stored.new:
            self.inbox.store.bell.ring()
            self._change()
        return stored.new

    async def _persist(self, step: Callable[[], Awaitable[bool]]) -> bool:
        """Do it until it works. Nothing was stored when it fails, so the same position is asked again."""
        failures = 0
        while True:
            try:
                return await step()
            except InboxUnavailable as err:
                wait = PUMP_RETRY.delay(1, 1.0)
                self._failing(f"the inbox cannot be written: {err}")
            except Exception as err:  # noqa: BLE001 - whatever a kind raises: the other side is not under our control
                failures += 1
                refused = getattr(err, "refused", False)
                asked = retry_after_of(err)
                wait = (REFUSED_RETRY if refused else PUMP_RETRY).delay(failures, 1.0) if asked is None else asked
                self._failing(in_words(err))
            await asyncio.sleep(wait)  # noqa: TID251 - the other side tells nobody when it is back

    def _others_wrote(self, stream: Stream) -> None:
        """A reader has finished something, or promised something: what waits is counted anew."""
        with contextlib.suppress(EverdeckError):
            stream.recount(stream.number)
            stream.left(waiting=0, done=0)
        self._change()

    async def _tell_done(self) -> None:
        """Let the kind mark on the other side what is done here."""
        changed = self._told[1]
        while True:
            changed.clear()
            ids = [row[0] for row in self.inbox.store.read("after_done")]
            if ids:
                try:
                    await self.kind.finished(ids)
                except Exception as err:  # noqa: BLE001 - as in the pump: it is told again later
                    log.warning("marking %d messages as done: %s", len(ids), in_words(err))
                    await asyncio.sleep(PUMP_RETRY.cap_seconds)  # noqa: TID251 - as above
                    continue
                async with self.inbox.transaction() as db:
                    db.executemany(SQL["after_drop"], [(one,) for one in ids])
            await changed.wait()

    async def _forget_files(self, directory: Path) -> None:
        """Once a day, let go what is old and of messages that are done: what waits or was set aside keeps its files."""
        while True:
            try:
                old = await asyncio.to_thread(old_files, directory, self.context.clock() - FILES_SECONDS)
                if old:
                    rows = await self.inbox.store.look("items_payloads")
                    await asyncio.to_thread(forget_files, directory, old, [decoded_incoming(row[0]) for row in rows])
            except (EverdeckError, OSError, msgspec.MsgspecError) as err:
                log.warning("old files stay: %s", in_words(err))
            await asyncio.sleep(DAY_SECONDS)  # noqa: TID251 - time itself is what makes them old

    # --- out ----------------------------------------------------------------------------------------------------

    async def _send(self, promised: Promised) -> None:
        outgoing = decoded_outgoing(promised.payload)
        crash_point("satellite.outbox.sending")
        await self.kind.send(replace(outgoing, id=f"{self._facts['feed_id']}-{promised.number}"))
        crash_point("satellite.outbox.sent")
        self._contact()
        self._change()

    async def _keep_alive(self) -> None:
        """Nothing comes in; say whether the account can be used, and stay."""
        await self._persist(self._check)
        await asyncio.get_running_loop().create_future()

    async def _check(self) -> bool:
        await self.kind.check()
        self._connected()
        return True

    # --- what is told -------------------------------------------------------------------------------------------

    def tell(self, what: str, **facts: Any) -> None:
        """An event of the deck, and a line in the log."""
        known = {name: fact for name, fact in facts.items() if fact is not None}
        log.warning("%s (%s)", what, ", ".join(f"{name}={fact!r}" for name, fact in known.items()))
        child.emit({"feed": self.kind.name or self.entry.name, "what": what, **known})

    def _connected(self, **facts: str) -> None:
        self._unsaid.update({name: str(value) for name, value in facts.items()})
        if self._fact("connection") != "connected":
            if self._fact("error"):
                self.tell("connected-again", account=self._fact("account"))
            self._unsaid |= {"connection": "connected", "error": "", "since": _now()}
        self._contact()

    def _failing(self, error: str) -> None:
        if self._fact("connection") != "failing" or self._fact("error") != error:
            if self._fact("connection") != "failing":
                self._unsaid["since"] = _now()
            self._unsaid |= {"connection": "failing", "error": error}
            self.tell("connection-failing", error=error, account=self._fact("account"))
            self._news.set()

    def _fact(self, name: str) -> str:
        return self._unsaid.get(name, self._facts.get(name, ""))

    def _contact(self) -> None:
        last = self._fact("last_contact_at")
        now = datetime.now(UTC)
        if not last or self._unsaid or (now - datetime.fromisoformat(last)).total_seconds() >= CONTACT_SECONDS:
            self._unsaid["last_contact_at"] = now.isoformat(timespec="seconds")
            self._news.set()

    async def _note(self) -> None:
        """Write down what people see of the connection, as soon as it changes."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._remember()
            except InboxUnavailable as err:
                log.warning("%s", err)
            self._change()

    async def _remember(self, **facts: str) -> None:
        facts = {**self._unsaid, **facts}
        async with self.inbox.transaction() as db:
            db.executemany(SQL["fact_put"], list(facts.items()))
        self._facts |= facts
        self._unsaid = {name: value for name, value in self._unsaid.items() if facts.get(name) != value}

    async def _report(self, stream: Stream, target: Target | None) -> None:
        """Say READY, then the numbers whenever they change, at most once a second; ping the watchdog."""
        untold, changed = StreamReport(stream), self._told[0]
        child.notify("READY=1", STATUS=self._status(target))
        async with asyncio.TaskGroup() as group:
            group.create_task(child.watchdog_pings(ready=True))
            group.create_task(self._hear(stream))
            while True:
                changed.clear()
                try:
                    await untold.tell_untold()
                    status = self._status(target)
                except EverdeckError as err:
                    status = f"inbox unavailable: {err}"
                if status != self._said and child.notify(STATUS=status):
                    self._said = status
                await asyncio.sleep(STATUS_SECONDS)  # noqa: TID251 - no more than one status per second
                await changed.wait()

    async def _hear(self, stream: Stream) -> None:
        while True:
            await stream.activity.wait()
            stream.activity.clear()
            self._change()

    def _change(self) -> None:
        for told in self._told:
            told.set()

    def _status(self, target: Target | None) -> str:
        done, waiting, running, dead, to_send, unsent, _ = self.inbox.store.read("feed_counts")[0]
        account, connection, error = (self._fact(name) for name in ("account", "connection", "error"))
        words = [f"{account or self.kind.name or self.entry.name}: {connection or 'connecting'}"]
        if connection == "failing":
            words.append(error[:200])
        if target is not None and target.problem:
            words.append(target.problem[:200])
        if self.entry.receives:
            words.append(f"{done:,} done, {waiting:,} waiting, {running:,} in flight, {dead:,} dead")
        if self.entry.sends:
            words.append(f"{to_send:,} to send" + (f", {unsent:,} unsent" if unsent else ""))
        return "; ".join(words)


# --- helpers, in the order they are called ----------------------------------------------------------------------


def made(where: str, options: Any, shape: Any, context: Context) -> Kind[Any]:
    """The kind, imported by its name."""
    from importlib import import_module  # noqa: PLC0415 - beside its only use

    module, _, name = where.partition(":")
    try:
        cls = getattr(import_module(module), name)
    except ImportError as err:
        raise SpecError(
            "satellite.kind", where, f"an installed package ({err}); pip install 'everdeck[satellites]'"
        ) from err
    kind: Kind[Any] = cls(msgspec.convert(options, shape), context)
    return kind


def _record(message: Incoming, *, numeric: bool) -> Record:
    return Record(int(message.id) if numeric else message.id, encoded(message), message.conversation)


def in_words(err: BaseException) -> str:
    """What a person is told: the error's own words, with its class where the words alone say little."""
    text = str(err).strip() or type(err).__name__
    return text if isinstance(err, EverdeckError) else f"{type(err).__name__}: {text}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
