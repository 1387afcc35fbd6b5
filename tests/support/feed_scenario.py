"""One run of a program that uses every part of the feed, for tests that kill it anywhere.

State outlives the process in one directory: upstream servers in files, effects in append-only files and in the inbox's
own database. ``run(directory)`` works until everything is done. Whoever killed it runs it again and looks at what
was lost and what was done twice.

The parts: ``plain`` (at least once), ``tx`` (effectively once, with replies by the outbox), ``poison`` (an update that
always raises), ``skipped`` (first_run="skip" with a history), ``file`` (the text file instead of a database).
"""

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

from everdeck.feed import FileCursor, Inbox, Message, Outbox, Retry, consume
from support.feed_upstream import Upstream, UpstreamSource, update

PLAIN = range(1, 26)
TX = range(101, 116)
POISON = 7
HISTORY = range(201, 206)
AFTER_HISTORY = range(206, 212)
FILE = range(301, 309)
ASKED = range(501, 507)
FILE_POISON = 304
FILE_HISTORY = range(401, 403)
CONCURRENCY = 4
AT_ONCE = Retry(seconds=0.0, cap_seconds=0.0)


def prepare(directory: Path) -> None:
    """Fill the servers."""
    _upstream(directory, "plain").arrive(*(update(n, chat=n % 5) for n in PLAIN))
    _upstream(directory, "tx").arrive(*(update(n, chat=n % 4) for n in TX))
    _upstream(directory, "skipped").arrive(*(update(n) for n in HISTORY))
    _upstream(directory, "asked").arrive(*(update(n, chat=n % 3) for n in ASKED))
    _upstream(directory, "once").arrive(*(update(n) for n in HISTORY))
    _upstream(directory, "file").arrive(*(update(n) for n in FILE))
    _upstream(directory, "file-skipped").arrive(*(update(n) for n in FILE_HISTORY))


def downtime(directory: Path) -> None:
    """What arrives while nobody runs: the news after the history, once."""
    upstream = _upstream(directory, "skipped")
    if not (directory / "news").exists():
        (directory / "news").touch()
        upstream.arrive(*(update(n) for n in AFTER_HISTORY))


def run(directory: str | Path) -> None:
    """Work until everything is done."""
    logging.disable(logging.CRITICAL)
    asyncio.run(_run(Path(directory)))


async def _run(directory: Path) -> None:
    inbox = Inbox(directory / "bot.db", remember_ids=10)
    outbox = Outbox(inbox, retry=AT_ONCE)
    async with inbox:
        async with inbox.transaction() as db:
            db.execute("CREATE TABLE IF NOT EXISTS effect (id INTEGER)")

        async def plain(item: Any) -> None:
            if item.id == POISON:
                raise ValueError("poison")
            await asyncio.sleep(0)
            note(directory, "plain", f"{item.id} {item.key}")

        async def in_transaction(item: Any) -> None:
            async with item.transaction() as db:
                db.execute("INSERT INTO effect VALUES (?)", (item.id,))
                outbox.put(db, item.id, key=item.key)

        def send(message: Message) -> None:
            note(directory, "asked" if message.value in ASKED else "sent", f"{message.value} {message.key}")

        async def asks(item: Any) -> None:
            await outbox.send(item.id, key=item.key, item=item)

        async def skipped(item: Any) -> None:
            note(directory, "skipped", str(item.id))

        def by_file(item: Any) -> None:
            if item.id == FILE_POISON:
                raise ValueError("poison")
            note(directory, "file", str(item.id))

        def nothing(_item: Any) -> None: ...

        sender = asyncio.ensure_future(outbox.run(send, concurrency=2))
        options: dict[str, Any] = {"inbox": inbox, "concurrency": CONCURRENCY, "retry": AT_ONCE}
        await asyncio.gather(
            consume(_source(directory, "plain"), plain, **options),
            consume(_source(directory, "tx"), in_transaction, **options),
            consume(_source(directory, "asked"), asks, **options),
            consume(_source(directory, "once"), nothing, delivery="at-most-once", **options),
            consume(_Skipping(directory), skipped, first_run="skip", **options),
            consume(_source(directory, "file"), by_file, cursor=FileCursor(directory / "offset.txt"), retry=AT_ONCE),
            consume(
                _source(directory, "file-skipped"), nothing, cursor=FileCursor(directory / "skip.txt"), first_run="skip"
            ),
        )
        await inbox.housekeep()
        await outbox.sent()
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
    note(directory, "complete", "yes")


class _Skipping(UpstreamSource):
    """Its news arrive once the history is behind it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(_upstream(directory, "skipped"), "telegram:skipped")
        self._directory = directory

    async def fetch(self, position: Any) -> Any:
        downtime(self._directory)
        return await super().fetch(position)


def _upstream(directory: Path, name: str) -> Upstream:
    return Upstream(directory / f"{name}.json")


def _source(directory: Path, name: str) -> UpstreamSource:
    return UpstreamSource(_upstream(directory, name), f"telegram:{name}", limit=6)


def note(directory: Path, name: str, text: str) -> None:
    """One effect: a whole line in one write, so a killed process leaves none or all of it."""
    fd = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{text}\n".encode())
    finally:
        os.close(fd)


def noted(directory: Path, name: str) -> list[str]:
    """The effects, in order."""
    path = directory / f"{name}.log"
    return path.read_text().splitlines() if path.exists() else []


def crash_at(directory: str, point: str, visit: int) -> None:
    """Run and die at the given visit of a crash point; the same as EVERDECK_CRASH_AT in a fresh process."""
    from everdeck import crashpoints

    crashpoints._name, crashpoints._visits_left = point, visit
    run(directory)


if __name__ == "__main__":
    run(sys.argv[1])
