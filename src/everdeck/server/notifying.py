"""Tell a person, elsewhere: a signed POST to a URL, or a message through a satellite, when something needs them.

Events of the wanted kinds are gathered until none has come for the quiet time (at most six times as long), so a storm
is one message. A message is tried until it is taken. How far was told is kept in ``STATE/notified.json``, written after
the other side has it: killed at any instruction, the next daemon goes on there, so an event is told at least once, and
``webhook-id`` is the same at every attempt. The first daemon with a ``[notify]`` begins with now, not with the past.

A POST is signed as *Standard Webhooks* has it, like those of satellites; a redirect is an error.
"""

import asyncio
import contextlib
import logging
import platform
import random
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from everdeck import wording
from everdeck.config import Notify
from everdeck.crashpoints import crash_point
from everdeck.deck import AsyncDeck
from everdeck.disk import replace_file
from everdeck.errors import EverdeckError
from everdeck.model import Event
from everdeck.satellites.targets import seconds_of, signature
from everdeck.statedir import StateDir

POST_SECONDS: Final = 30.0
MOST_EVENTS: Final = 100
MOST_NAMED: Final = 5
_LONGEST_QUIET: Final = 6
_FIRST_RETRY_SECONDS: Final = 1.0
_LAST_RETRY_SECONDS: Final = 300.0
_log: Final = logging.getLogger("everdeck")


class Told(msgspec.Struct, frozen=True):
    """Up to which event everything was told."""

    event_id: int


class NotTaken(EverdeckError):
    """The other side did not take a message; ``after_seconds`` is when it wants to be asked again, if it said so."""

    def __init__(self, text: str, after_seconds: float | None = None) -> None:
        self.after_seconds = after_seconds
        super().__init__(text)


class Notifier:
    """Follows a deck's events and tells of those that were asked for."""

    def __init__(self, deck: AsyncDeck, notify: Notify) -> None:
        self._deck = deck
        self._notify = notify
        self._path = StateDir(Path(deck.state_dir)).notified
        self._deliver: Callable[[Sequence[Event], int], Awaitable[None]] = (
            self._post if notify.url is not None else self._send
        )

    async def run(self) -> None:
        """Until cancelled."""
        told = await self._begin()
        gathered: list[Event] = []
        async with contextlib.aclosing(_Following(self._deck, told)) as following:
            while True:
                gathered.append(await self._wanted(following))
                await self._gather(following, gathered)
                await self._tell(gathered[:MOST_EVENTS], len(gathered))
                crash_point("notify.told")
                await asyncio.to_thread(self._remember, gathered[-1].id)
                gathered.clear()

    async def _begin(self) -> int:
        try:
            return msgspec.json.decode(await asyncio.to_thread(self._path.read_bytes), type=Told).event_id
        except (OSError, msgspec.DecodeError):
            now = await self._deck.last_event_id()
            await asyncio.to_thread(self._remember, now)
            return now

    def _remember(self, event_id: int) -> None:
        replace_file(self._path, msgspec.json.encode(Told(event_id)))

    async def _wanted(self, following: "_Following") -> Event:
        while True:
            event = await following.next()
            if is_wanted(event, self._notify.events):
                return event

    async def _gather(self, following: "_Following", gathered: list[Event]) -> None:
        """Wait until it is quiet, and take what comes meanwhile."""
        quiet = self._notify.quiet_seconds
        loop = asyncio.get_running_loop()
        latest = loop.time() + quiet * _LONGEST_QUIET
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(latest):
                while True:
                    async with asyncio.timeout(quiet):
                        gathered.append(await self._wanted(following))

    async def _tell(self, events: Sequence[Event], count: int) -> None:
        """Until it was taken. The pauses grow, and are spread so that many decks do not come at once."""
        pause = _FIRST_RETRY_SECONDS
        while True:
            try:
                await self._deliver(events, count)
            except EverdeckError as error:
                asked_for = error.after_seconds if isinstance(error, NotTaken) else None
                wait = asked_for if asked_for is not None else pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
                _log.warning("not notified of event %d: %s; trying again in %.0f s", events[0].id, error, wait)
                await asyncio.sleep(wait)  # noqa: TID251 - another machine gives no event when it is back
                pause = min(pause * 2, _LAST_RETRY_SECONDS)
            else:
                return

    async def _post(self, events: Sequence[Event], count: int) -> None:
        body = msgspec.json.encode(document(events, count, self._deck.deck_id))
        moment = str(int(datetime.now(UTC).timestamp()))
        message_id = f"{self._deck.deck_id}-{events[0].id}"
        headers = {"content-type": "application/json", "webhook-id": message_id, "webhook-timestamp": moment}
        if self._notify.secret is not None:
            headers["webhook-signature"] = signature(self._notify.secret.encode(), message_id, moment, body)
        await asyncio.to_thread(post, str(self._notify.url), body, headers)

    async def _send(self, events: Sequence[Event], count: int) -> None:
        await self._deck.send(str(self._notify.satellite), to=str(self._notify.to), text=text_of(events, count))


class _Following:
    """A deck's events one at a time. One wait for the next survives the time limits of those who wait for it."""

    def __init__(self, deck: AsyncDeck, after: int) -> None:
        self._events = aiter(deck.follow(after=after))
        self._coming: asyncio.Future[Event] | None = None

    async def next(self) -> Event:
        """The next event; if we are cancelled meanwhile it is the next one for whoever comes then."""
        if self._coming is None:
            self._coming = asyncio.ensure_future(anext(self._events))
        event = await asyncio.shield(self._coming)
        self._coming = None
        return event

    async def aclose(self) -> None:
        """Stop following."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)
        close = getattr(self._events, "aclose", None)
        if close is not None:
            await close()


def is_wanted(event: Event, kinds: Sequence[str]) -> bool:
    """Whether somebody is to be told; a dead letter is an event of a feed."""
    if event.kind == "feed":
        return "feed" in kinds or (event.detail.get("what") == "dead-letter" and "dead-letter" in kinds)
    return str(event.kind) in kinds


def document(events: Sequence[Event], count: int, deck_id: str) -> dict[str, Any]:
    """What is posted: a sentence for people (chat services show ``text``), and the events for programs."""
    return {
        "text": text_of(events, count),
        "deck": deck_id,
        "host": platform.node(),
        "count": count,
        "events": [{**msgspec.to_builtins(event), "text": wording.detail(event.detail)} for event in events],
    }


def text_of(events: Sequence[Event], count: int) -> str:
    """``alice failed: exit code 1`` or ``3 failed, 1 unhealthy: alice, bob, carol, dave``."""
    if count == 1:
        told = wording.detail(events[0].detail)
        return f"{events[0].worker or 'the deck'} {_kind(events[0])}" + (f": {told}" if told else "")
    kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(map(_kind, events)).items())
    names = list(dict.fromkeys(event.worker or "the deck" for event in events))
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    unnamed = f" (and {count - len(events)} further events)" if count > len(events) else ""
    return f"{kinds}: {', '.join(names[:MOST_NAMED])}{more}{unnamed}"


def _kind(event: Event) -> str:
    return "dead-letter" if event.kind == "feed" else str(event.kind)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What is signed goes where it was sent, or nowhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Never followed: the answer itself is then an error."""


def post(url: str, body: bytes, headers: dict[str, str]) -> None:
    """One attempt; raises :class:`NotTaken` with the reason."""
    request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310 - its scheme was checked with the file
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=POST_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        with error:
            raise NotTaken(f"{url} answered {error.code}", seconds_of(error.headers.get("retry-after"))) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise NotTaken(f"{url}: {reason}") from error
