"""Calling what the user gave us: the handler, the key function, the listener; and the wait an error asks for."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeAlias

import msgspec

from everdeck.feed.records import Record

KeyOf: TypeAlias = Callable[[Any], object]
FeedEvent: TypeAlias = dict[str, Any]
Listener: TypeAlias = Callable[[FeedEvent], None]

log = logging.getLogger("everdeck.feed")


async def call(handler: Callable[[Any], Awaitable[object] | object], item: object) -> None:
    """Run a handler, a coroutine function or a plain one. A plain one runs in the event loop and holds it up."""
    result = handler(item)
    if inspect.isawaitable(result):
        await result


async def answer_of(handler: Callable[[Any], Awaitable[object] | object], item: object) -> object:
    """As :func:`call`, with what it returned."""
    result = handler(item)
    return await result if inspect.isawaitable(result) else result


def keyed(record: Record, key: KeyOf) -> Record:
    """The record with the key that the user's function gives it, from its JSON value.

    A function that fails on one odd record must not hold up the others, so that record goes without a key.
    """
    if record.key is not None:
        return record
    try:
        found = key(msgspec.json.decode(record.payload))
    except Exception as err:  # noqa: BLE001 - the user's function on data from outside
        log.warning(
            "record %r: the key function raised %s: %s; it is handled without a key", record.id, type(err).__name__, err
        )
        return record
    return record if found is None else msgspec.structs.replace(record, key=str(found))


def retry_after_of(error: BaseException) -> float | None:
    """How long the other side asked us to wait (Telegram's 429), if it did: the error's ``retry_after``."""
    asked = getattr(error, "retry_after", None)
    if isinstance(asked, timedelta):
        return asked.total_seconds()
    return float(asked) if isinstance(asked, int | float) and not isinstance(asked, bool) else None


def is_news(minutes: int) -> bool:
    """Whether a handler that still runs after so many minutes is told of: 1, 5, 15, then every hour."""
    return minutes in {1, 5, 15} or (minutes > 0 and minutes % 60 == 0)


def tell(listener: Listener | None, feed: str, what: str, facts: FeedEvent) -> None:
    """Let the log and the listener know what happened. A listener that raises harms nobody."""
    facts = {name: fact for name, fact in facts.items() if fact is not None}
    log.warning("feed %s: %s (%s)", feed, what, ", ".join(f"{name}={fact!r}" for name, fact in facts.items()))
    if listener is not None:
        try:
            listener({"feed": feed, "what": what, **facts})
        except Exception:
            log.exception("feed %s: a listener raised", feed)
