"""From a satellite's inbox to the program that handles its messages.

The pump and the reader meet only in the inbox (:mod:`everdeck.feed.claims`). This module owns the reader's side: a
thread that claims, commits and waits, so that a disk which is slow or busy never holds up the program's event loop.
It wakes for facts only: the bell of the file (inotify), the death of another reader (its pidfd), a retry that is due,
a lease to renew while something is held.

A message is claimed when somebody asks for one, so a program that takes one at a time has one in flight, and one that
starts a task for each has as many as it started.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import msgspec

from everdeck.errors import DeckClosed, EverdeckError, InboxUnavailable, MessageError, MessageLost
from everdeck.feed.claims import DEAD, LEASE_SECONDS, RUNNING, WAITING, Claim, Claims, Put, watch_fd
from everdeck.feed.handling import retry_after_of
from everdeck.kernel.identity import boottime
from everdeck.messages import (
    FeedStatus,
    Letter,
    LetterVerb,
    Message,
    MessageStream,
    Outgoing,
    Which,
    decoded_incoming,
    decoded_outgoing,
    encoded,
    is_leaving,
)
from everdeck.satellites import kinds

RENEW_SECONDS: Final = LEASE_SECONDS / 3
DISK_RETRY_SECONDS: Final = 1.0
PATIENCE_FACTOR: Final = 3.0
LONGEST_SECONDS: Final = 3600.0
UNWATCHED_SECONDS: Final = 5.0  # without inotify there is nothing that wakes us

_log: Final = logging.getLogger("everdeck.messages")
_Given: TypeAlias = concurrent.futures.Future[Message]
Feed: TypeAlias = Path | Callable[[], Claims]
"""Where a satellite's feed is; or how it is opened, where its satellite may do less than we."""


def opened(feed: Feed) -> Claims:
    """As one reader of it."""
    return Claims(feed) if isinstance(feed, Path) else feed()


class Reader:
    """Takes messages out of any number of satellites' inboxes, for one program.

    ``add(name, path)`` each inbox, then ``async for`` or ``for``. ``close()`` hands back what was not finished.
    Any thread and any event loop may take from it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wants: deque[_Given] = deque()
        self._orders: deque[tuple[Callable[[], None], concurrent.futures.Future[None]]] = deque()
        self._to_open: dict[str, Feed] = {}
        self._to_open_later: dict[str, tuple[float, Feed]] = {}
        self._to_close: set[str] = set()
        self._files: dict[str, _File] = {}
        self._held = 0
        self._closed = False
        self._pid = os.getpid()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        _open_readers.add(self)

    def add(self, name: str, feed: Feed) -> None:
        """Read from this satellite's inbox too."""
        with self._lock:
            if name not in self._to_open and (name not in self._files or name in self._to_close):
                self._to_open_later.pop(name, None)
                self._to_open[name] = feed
        self._wake()

    def remove(self, name: str) -> None:
        """The satellite is no more, and its inbox with it."""
        with self._lock:
            self._to_open.pop(name, None)
            self._to_open_later.pop(name, None)
            self._to_close.add(name)
        self._wake()

    # --- taking -------------------------------------------------------------------------------------------------

    async def get(self) -> Message:
        """The next message, when there is one."""
        given = self._want()
        try:
            return await asyncio.wrap_future(given)
        except asyncio.CancelledError:
            self._unwant(given)
            raise

    def get_now(self, timeout_seconds: float | None = None) -> Message:
        """The same for programs without an event loop; TimeoutError when there is none in time."""
        given = self._want()
        try:
            return given.result(timeout_seconds)
        except BaseException:
            self._unwant(given)
            raise

    def close(self) -> None:
        """Take nothing more; what was not finished is handed back, uncounted."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
        _open_readers.discard(self)
        if self._pid != os.getpid():
            return  # a forked copy: nothing here is ours
        if thread is None:
            self._close_wake()
            return
        self._wake()
        if thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _want(self) -> _Given:
        given: _Given = concurrent.futures.Future()
        with self._lock:
            if self._closed or self._pid != os.getpid():
                raise DeckClosed("the messages are closed, or this process is a fork of the one that reads them")
            self._wants.append(given)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="everdeck-messages", daemon=True)
                self._thread.start()
        self._wake()
        return given

    def _unwant(self, given: _Given) -> None:
        """Nobody waits for it any more; if it was handed out in the same moment it goes back."""

        def hand_back(given: _Given) -> None:
            if not given.cancelled() and given.exception() is None:
                given.result().__dict__["_hold"].finish_later(asyncio.CancelledError())

        # What can no longer be cancelled may be claimed and not given yet.
        if not given.cancel():
            given.add_done_callback(hand_back)

    # --- for holds ----------------------------------------------------------------------------------------------

    def order(self, act: Callable[[], None]) -> "concurrent.futures.Future[None]":
        """Do it in the reader's thread."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.set_running_or_notify_cancel()  # an order is carried out, though whoever gave it is cancelled
        with self._lock:
            if self._closed:
                done.set_exception(DeckClosed("the messages are closed; it was handed back"))
                return done
            self._orders.append((act, done))
        self._wake()
        return done

    def let_go(self) -> None:
        """One less is held."""
        self._held -= 1

    # --- the thread ---------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        # Under the lock: the number of a closed descriptor is the next file's that anybody opens.
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _close_wake(self) -> None:
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        renew_at = monotonic() + RENEW_SECONDS
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                if self._closed:  # looked at after the bell was taken: a close in between has rung it in vain
                    break
                self._open_new(poll)
                self._carry_out()
                wait = min(self._give_back(), self._hand_out(poll))
                if self._held:
                    if monotonic() >= renew_at:
                        self._renew()
                        renew_at = monotonic() + RENEW_SECONDS
                    wait = min(wait, max(0.0, renew_at - monotonic()))
                else:
                    renew_at = monotonic() + RENEW_SECONDS
                with self._lock:
                    more = bool(self._orders or self._to_open)
                    for due, _ in self._to_open_later.values():
                        wait = min(wait, max(0.0, due - monotonic()))
                milliseconds = None if wait == _FOREVER else max(1, round(min(wait, LONGEST_SECONDS) * 1000))
                ready = {fd for fd, _ in poll.poll(0 if more else milliseconds)}
                for file in self._files.values():
                    file.hear(poll, ready)
        except BaseException as err:
            _log.exception("the reader of messages failed")
            self._fail(err)
            raise
        finally:
            self._end()

    def _open_new(self, poll: "select.poll") -> None:
        with self._lock:
            new, self._to_open = self._to_open, {}
            gone, self._to_close = self._to_close, set()
            for name, (due, feed) in list(self._to_open_later.items()):
                if due <= monotonic():
                    new[name] = feed
                    del self._to_open_later[name]
        for name in gone & self._files.keys():
            self._files.pop(name).close(poll)
        for name, feed in new.items():
            if name in self._files:
                continue  # told of twice while it was being opened
            began = monotonic()
            try:
                self._files[name] = _File(name, feed, poll)
            except (EverdeckError, OSError) as err:
                _log.warning("messages of %r cannot be read yet: %s", name, err)
                # One that takes long to fail holds up the others, so it has a turn rarely.
                pause = max(DISK_RETRY_SECONDS, PATIENCE_FACTOR * (monotonic() - began))
                with self._lock:
                    self._to_open_later[name] = (monotonic() + pause, feed)

    def _carry_out(self) -> None:
        while True:
            with self._lock:
                if not self._orders:
                    return
                act, done = self._orders.popleft()
            try:
                act()
            except BaseException as err:  # noqa: BLE001 - it belongs to whoever gave the order
                done.set_exception(err)
            else:
                done.set_result(None)

    def _give_back(self) -> float:
        """Give back what could not be finished; returns when to try again."""
        return min((file.give_back() for file in self._files.values()), default=_FOREVER)

    def _hand_out(self, poll: "select.poll") -> float:
        """Give everybody who waits a message, in turns over the inboxes; returns how long nothing can come."""
        wait = _FOREVER
        idle: set[str] = set()
        troubled: set[str] = set()  # their disk says when to look again, and nothing else
        while len(idle) < len(self._files):
            for name, file in list(self._files.items()):
                given = self._next_want()
                if given is None:
                    return wait
                try:
                    claims = file.claims.take(1)
                except EverdeckError as err:
                    _log.warning("messages of %r: %s", name, err)
                    claims, wait = [], min(wait, DISK_RETRY_SECONDS)
                    troubled.add(name)
                if claims:
                    self._give(file, claims[0], given)
                    idle.discard(name)
                else:
                    with self._lock:
                        self._wants.appendleft(given)
                    idle.add(name)
        with self._lock:
            if not self._wants:
                return wait
        for name in self._files.keys() - troubled:
            wait = min(wait, self._files[name].patience(poll))
        return wait

    def _next_want(self) -> _Given | None:
        with self._lock:
            while self._wants:
                given = self._wants.popleft()
                if not given.cancelled():
                    return given
        return None

    def _give(self, file: "_File", claim: Claim, given: _Given) -> None:
        self._held += 1
        hold = _Hold(self, file, claim)
        try:
            message = Message.of(decoded_incoming(claim.payload), worker=file.name, attempt=claim.attempt, hold=hold)
        except Exception as err:  # noqa: BLE001 - a record that is none of ours; it must not stop the others
            why = f"not a message: {err}"
            self._held -= 1
            with contextlib.suppress(EverdeckError):
                file.end(claim, lambda: file.claims.fail(claim, why))
            with self._lock:
                self._wants.appendleft(given)
            return
        if not given.set_running_or_notify_cancel():
            self._held -= 1
            with contextlib.suppress(EverdeckError):
                file.end(claim, lambda: file.claims.hand_back(claim))
            return
        given.set_result(message)

    def _renew(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(EverdeckError):
                file.claims.renew()

    def _fail(self, err: BaseException) -> None:
        with self._lock:
            self._closed = True
            waiting, self._wants = list(self._wants), deque()
            orders, self._orders = list(self._orders), deque()
        futures: list[concurrent.futures.Future[Any]] = [*waiting, *(done for _, done in orders)]
        for future in futures:
            if not future.done():
                future.set_exception(MessageError(f"the reader of messages failed: {err}"))

    def _end(self) -> None:
        self._carry_out()
        for file in self._files.values():
            file.close(None)
        with self._lock:
            waiting, self._wants = list(self._wants), deque()
        for given in waiting:
            if not given.done():
                given.set_exception(DeckClosed("the messages are closed"))
        self._close_wake()


_FOREVER: Final = float("inf")
_open_readers: "weakref.WeakSet[Reader]" = weakref.WeakSet()


@atexit.register
def _close_readers() -> None:
    """A program that leaves politely hands back at once, so that nobody has to notice its death."""
    for reader in list(_open_readers):
        reader.close()


class _File:
    """One satellite's inbox, as the reader's thread sees it."""

    def __init__(self, name: str, feed: Feed, poll: "select.poll") -> None:
        self.name = name
        self.claims = opened(feed)
        try:
            entry = kinds().get(self.claims.facts().get("kind", ""))
        except BaseException:
            self.claims.close()
            raise
        self.sends = entry is None or entry.sends
        self._watched: dict[str, int] = {}
        self._left: list[Claim] = []
        self._fd: int | None = None
        try:
            self._fd = self.claims.listen()
            poll.register(self._fd, select.POLLIN)
        except (EverdeckError, OSError) as err:
            _log.info("messages of %r are looked for every %g s: %s", name, UNWATCHED_SECONDS, err)

    def hear(self, poll: "select.poll", ready: Container[int]) -> None:
        """Take note of the bell, and of the deaths among what is ready."""
        self.claims.heard()
        for other, fd in list(self._watched.items()):
            if fd in ready:
                self._unwatch(other, poll)

    def end(self, claim: Claim, act: Callable[[], Any]) -> None:
        """Finish a claim. If that cannot be written now, it is still ours, and nobody but us can give it back."""
        try:
            act()
        except MessageLost:
            raise
        except EverdeckError:
            self._left.append(claim)
            raise

    def give_back(self) -> float:
        """Give back what could not be finished, uncounted; returns when to try again."""
        while self._left:
            try:
                self.claims.hand_back(self._left[0])
            except MessageLost:
                pass  # its end was written after all, or somebody else has it
            except EverdeckError as err:
                _log.warning("messages of %r cannot be given back yet: %s", self.name, err)
                return DISK_RETRY_SECONDS
            del self._left[0]
        return _FOREVER

    def patience(self, poll: "select.poll") -> float:
        """How long nothing can happen here that nobody tells us of; watches those who may leave something behind."""
        waits = [_FOREVER if self._fd is not None else UNWATCHED_SECONDS]
        try:
            others = {other.id: other for other in self.claims.others()}
            due = self.claims.next_due()
        except EverdeckError:
            return DISK_RETRY_SECONDS
        if due is not None:
            waits.append(max(0.01, due))
        for gone in self._watched.keys() - others.keys():
            self._unwatch(gone, poll)
        for name, other in others.items():
            if name not in self._watched:
                fd = watch_fd(other)
                if fd is not None:
                    self._watched[name] = fd
                    poll.register(fd, select.POLLIN)
                elif other.is_gone(boottime()):
                    waits.append(0.0)  # it died since we looked, and nobody else will tell of it
            # It may be frozen, or where we cannot see it: then its lease decides.
            waits.append(max(0.05, other.lease_until - boottime() + 0.05))
        return min(waits)

    def close(self, poll: "select.poll | None") -> None:
        if poll is not None and self._fd is not None:
            poll.unregister(self._fd)
        self._fd = None
        self.claims.close()
        for fd in self._watched.values():
            if poll is not None:
                poll.unregister(fd)
            os.close(fd)
        self._watched.clear()

    def _unwatch(self, other: str, poll: "select.poll") -> None:
        fd = self._watched.pop(other)
        poll.unregister(fd)
        os.close(fd)


class _Hold:
    """A claim in the program's hands; see :class:`everdeck.messages.Hold`."""

    def __init__(self, reader: Reader, file: _File, claim: Claim) -> None:
        self._reader = reader
        self._file = file
        self._claim = claim
        self._replies: list[Put] = []
        self._over = False

    def reply(self, reply: Outgoing) -> None:
        if not self._file.sends:
            raise MessageError("this kind of satellite cannot send: there is nobody who could be answered")
        if self._over:
            raise MessageError("the message is finished; use deck.send(...) for more words")
        self._replies.append(Put(reply.to, encoded(reply)))

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        raise MessageError("message.transaction() is for functions that run in the satellite (to='module:function')")

    async def finish(self, error: BaseException | None) -> None:
        await asyncio.wrap_future(self.finish_later(error))

    def finish_now(self, error: BaseException | None) -> None:
        self.finish_later(error).result()

    def finish_later(self, error: BaseException | None) -> "concurrent.futures.Future[None]":
        if self._over:
            done: concurrent.futures.Future[None] = concurrent.futures.Future()
            done.set_result(None)
            return done
        self._over = True
        return self._reader.order(lambda: self._finish(error))

    def _finish(self, error: BaseException | None) -> None:
        self._reader.let_go()
        self._file.end(self._claim, lambda: self._ended(error))

    def _ended(self, error: BaseException | None) -> None:
        claims, claim = self._file.claims, self._claim
        if error is None:
            claims.finish(claim, self._replies)
        elif is_leaving(error):
            claims.hand_back(claim)
        else:
            claims.fail(claim, _words_of(error), retry_after=retry_after_of(error))


def _words_of(error: BaseException) -> str:
    """An error that was only said, not raised, is its own words."""
    return str(error) if type(error) is MessageError else f"{type(error).__name__}: {error}"


class Messages(MessageStream):
    """The messages of a deck on this machine, by its satellites' inboxes.

    ``find`` says which inboxes there are, and tells of each later one; it runs in the deck's own loop, through ``run``
    where that is another thread's.
    """

    def __init__(self, find: Callable[[Reader], Any], run: Callable[[Any], Any] | None = None) -> None:
        super().__init__(run)
        self._find = find
        self._reader: Reader | None = None
        self._leave: Callable[[], None] | None = None

    async def begin(self) -> None:
        """Find the inboxes."""
        if self._reader is None:
            reader = Reader()
            work = self._find(reader)
            self._leave = await work if self._run is None else await asyncio.to_thread(self._run, work)
            self._reader = reader

    async def __anext__(self) -> Message:
        await self.begin()
        assert self._reader is not None  # noqa: S101 - begun
        try:
            return await self._reader.get()
        except DeckClosed:
            raise StopAsyncIteration from None

    def _next_now(self, run: Callable[[Any], Any]) -> Message:
        if self._reader is None:
            reader = Reader()
            self._leave = run(self._find(reader))
            self._reader = reader
        try:
            return self._reader.get_now()
        except DeckClosed:
            raise StopIteration from None

    async def aclose(self) -> None:
        """Take nothing more; what was not finished is handed back."""
        # Shielded: a cancelled wait would take the work back from a pool that has not begun it.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self.close))

    def close(self) -> None:
        """The same for programs without an event loop."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
        if self._reader is not None:
            self._reader.close()


def send(feed: Feed, message: Outgoing, request: str | None = None) -> int:
    """Promise a message; returns its number once that is on disk. The satellite sends it, now or when it runs.

    Promised again under the same request id it is the same message.
    """
    with opened(feed) as claims:
        (number,) = claims.put(Put(message.to, encoded(message), request))
        return number


# --- looking, and deciding about what was set aside -------------------------------------------------------------


def feed_status(feed: Feed, worker: str) -> FeedStatus:
    """A satellite's feed in numbers and words."""
    with _understood(worker), opened(feed) as claims:
        facts, (done, waiting, running, dead, to_send, unsent, readers) = claims.facts(), claims.counts()
        return FeedStatus(
            worker=worker,
            kind=facts.get("kind", ""),
            account=facts.get("account") or None,
            connection=facts.get("connection") or "connecting",
            error=facts.get("error") or None,
            since=_moment(facts.get("since")),
            last_contact_at=_moment(facts.get("last_contact_at")),
            done=done,
            waiting=waiting,
            in_flight=running,
            dead=dead,
            to_send=to_send,
            unsent=unsent,
            readers=readers,
        )


def letters(feed: Feed, *, which: Which = "dead", number: str | None = None, limit: int = 100) -> list[Letter]:
    """What was set aside, what waits, what is done and remembered: received, then to be sent."""
    state = {"dead": DEAD, "all": None, "waiting": WAITING, "done": None}[which]
    out = number is not None and number.startswith("out-")
    digits = (number or "").removeprefix("out-")
    if number is not None and not digits.isdecimal():
        return []
    seq = int(digits) if digits else None
    with _understood("the feed"), opened(feed) as claims:
        if which == "done":
            return [_received(row) for row in claims.done(number=seq, limit=limit)]
        received = [] if out else [_received(row) for row in claims.items(state=state, number=seq, limit=limit)]
        sent = [] if number and not out else [_sent(row) for row in claims.outbox(state=state, number=seq, limit=limit)]
    return received + sent


def decide(feed: Feed, verb: LetterVerb, number: str) -> bool:
    """Retry, drop or replay one; False if there is none of that number."""
    out, digits = number.startswith("out-"), number.removeprefix("out-")
    if not digits.isdecimal():
        return False
    query = _DECISIONS[(verb, out)]
    with opened(feed) as claims:
        return query is not None and claims.act(query, int(digits))


@contextlib.contextmanager
def _understood(what: str) -> Iterator[None]:
    """The file may be a hostile worker's: what cannot be made sense of is its trouble, said as such."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as err:
        raise InboxUnavailable(f"{what}: the file holds what no satellite writes: {err!r}") from err


_DECISIONS: Final[dict[tuple[LetterVerb, bool], str | None]] = {
    ("retry", False): "dead_retry",
    ("drop", False): "dead_drop",
    ("replay", False): "done_replay",
    ("retry", True): "outbox_dead_retry",
    ("drop", True): "outbox_dead_drop",
    ("replay", True): None,
}
_STATES: Final = {WAITING: "waiting", RUNNING: "in flight", DEAD: "dead", 3: "done"}


def _received(row: Any) -> Letter:
    seq, _, record_id, key, state, attempts, error, at, _, payload = row
    try:
        message = decoded_incoming(payload)
        text, sender, subject = message.text, message.sender, message.subject
    except msgspec.MsgspecError:
        text, sender, subject = payload.decode("utf-8", "replace"), None, None
    return Letter(
        number=str(seq),
        direction="in",
        state=_STATES[state],
        id=str(record_id),
        conversation=key,
        sender=sender,
        subject=subject,
        text=text,
        attempts=attempts,
        error=error,
        at=datetime.fromtimestamp(at, UTC),
        payload=payload.decode("utf-8", "replace"),
    )


def _sent(row: Any) -> Letter:
    seq, _, key, state, attempts, error, at, _, payload = row
    try:
        message = decoded_outgoing(payload)
        text, subject = message.text, message.subject
    except msgspec.MsgspecError:
        text, subject = payload.decode("utf-8", "replace"), None
    return Letter(
        number=f"out-{seq}",
        direction="out",
        state="unsent" if state == DEAD else "to send",
        id=None,
        conversation=key,
        sender=None,
        subject=subject,
        text=text,
        attempts=attempts,
        error=error,
        at=datetime.fromtimestamp(at, UTC),
        payload=payload.decode("utf-8", "replace"),
    )


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
