"""Any function that can be asked is a source.

``poll(fn, every=5)`` calls ``fn(cursor)`` again and again. With whole numbers as ids the cursor is the last id + 1,
with texts the last id; None the first time. The function may answer with what it already answered: what is known is
dropped by its id. So the simplest correct function ignores the cursor and returns what there is.
"""

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from everdeck.errors import SourceError, SpecError
from everdeck.feed.records import Batch, Cursor, Position, Record, RecordId, Source

_ID_FIELDS: Final = ("update_id", "id")


def poll(
    fn: Callable[..., Any],
    *,
    every: float = 1.0,
    name: str | None = None,
    id: Callable[[Any], RecordId] | None = None,  # noqa: A002 - it is the word our users have for it
    key: Callable[[Any], object] | None = None,
) -> "Polled":
    """A source that calls ``fn`` every so many seconds.

    ``fn`` may be a coroutine function or a plain one (which runs in a thread), and takes the cursor if it takes an
    argument. It returns a list of JSON values, or of :class:`Record`, or a :class:`Batch`; None or an empty list is
    "nothing new". ``id(value)`` names a value; by default its ``update_id`` or ``id`` field does; a number or a text
    names itself.
    ``name`` keys the cursor and must not change; by default it is made of the function's module and name.
    """
    return Polled(fn, every=every, name=name, id_of=id, key_of=key)


def as_source(source: Source | Callable[..., Any]) -> Source:
    """A source as it is, or a plain function as a polled one."""
    if isinstance(source, Source):
        return source
    if callable(source):
        return poll(source)
    raise SpecError("source", source, "an object with name and fetch(position), or a function to poll")


class Polled:
    """See :func:`poll`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        every: float,
        name: str | None,
        id_of: Callable[[Any], RecordId] | None,
        key_of: Callable[[Any], object] | None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int | float) or not 0 <= every < float("inf"):
            raise SpecError("every", every, "seconds, at least 0")
        self.name = name or f"poll:{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__name__)}"
        self._fn = fn
        self._every = every
        self._id_of = id_of or _id_field
        self._key_of = key_of
        self._takes_cursor = _takes_an_argument(fn)
        self._not_before = 0.0

    async def fetch(self, position: Position) -> Batch:
        """Wait for the time of the next call, and call."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._not_before - loop.time()))  # noqa: TID251 - "every" is time
        self._not_before = loop.time() + self._every
        arguments = (position.cursor,) if self._takes_cursor else ()
        if inspect.iscoroutinefunction(self._fn) or inspect.iscoroutinefunction(getattr(self._fn, "__call__", None)):  # noqa: B004 - an object with an async __call__ is a coroutine function too
            answer = await self._fn(*arguments)
        else:
            answer = await _in_a_daemon(self._fn, *arguments)
            if inspect.isawaitable(answer):
                answer = await answer
        return self._batch(answer)

    def _batch(self, answer: Any) -> Batch:
        if isinstance(answer, Batch):
            return answer
        if answer is None:
            return Batch([])
        if isinstance(answer, str | bytes | dict) or not isinstance(answer, Iterable):
            raise SourceError(f"{self.name}: a list of values was expected, {type(answer).__name__} was returned")
        records = [value if isinstance(value, Record) else self._record(value) for value in answer]
        return Batch(records, cursor=cursor_behind(records))

    def _record(self, value: Any) -> Record:
        try:
            record_id = self._id_of(value)
            key = None if self._key_of is None else self._key_of(value)
            payload = msgspec.json.encode(value)
        except Exception as err:
            raise SourceError(f"{self.name}: a value without an id, or not JSON: {type(err).__name__}: {err}") from err
        if isinstance(record_id, bool) or not isinstance(record_id, int | str):
            raise SourceError(f"{self.name}: the id {record_id!r} is neither a whole number nor a text")
        return Record(record_id, payload, None if key is None else str(key))


async def _in_a_daemon(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a thread that nobody waits for: asyncio.to_thread would hold up the exit until it returns."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def tell(act: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever asked
            loop.call_soon_threadsafe(lambda: None if answered.done() else act(outcome))

    def run() -> None:
        try:
            answer = context.run(fn, *arguments)
        except BaseException as err:  # noqa: BLE001 - told to whoever waits
            tell(
                answered.set_exception, err if isinstance(err, Exception) else SourceError(f"the source ended: {err!r}")
            )
        else:
            tell(answered.set_result, answer)

    threading.Thread(target=run, name="feed poll", daemon=True).start()
    return await answered


def cursor_behind(records: list[Record]) -> Cursor:
    """Where to ask next: behind the largest number, or behind the last text."""
    if not records:
        return None
    numbers = [record.id for record in records if isinstance(record.id, int)]
    return max(numbers) + 1 if len(numbers) == len(records) else records[-1].cursor_after


def _id_field(value: Any) -> RecordId:
    if isinstance(value, int | str) and not isinstance(value, bool):
        return value  # a number or a name stands for itself
    for field in _ID_FIELDS:
        if isinstance(value, dict) and field in value:
            found: RecordId = value[field]
            return found
    raise KeyError("give id=..., or values with an 'update_id' or 'id' field")


def _takes_an_argument(fn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }
    return any(parameter.kind in positional for parameter in parameters)
