"""The feed: nothing that was delivered is lost.

    from everdeck.feed import Inbox, consume, poll

    async def handle(item):                                   # at least once; in order per key; retried when it raises
        async with item.transaction() as db:                  # effectively once: the writes and the ack are one commit
            db.execute("INSERT INTO seen (text) VALUES (?)", (item.value["text"],))

    await consume(poll(fetch, every=5), handle, inbox=Inbox("bot.db"), key=lambda value: value["chat"], concurrency=32)

``FileCursor`` is the same without a database: one number in a text file. ``Outbox`` sends replies that were promised
in a transaction. ``Feed`` is for libraries that have handlers of their own. See docs/reference/feed.md.
"""

from everdeck.feed.consume import Feed, consume
from everdeck.feed.cursors import FileCursor
from everdeck.feed.dispatcher import Dispatcher, Item
from everdeck.feed.inbox import DeadLetter, Inbox, Stream
from everdeck.feed.outbox import Message, Outbox
from everdeck.feed.policy import FeedPolicy, Retry
from everdeck.feed.poller_lock import PollerLock, Suspect, local_suspects
from everdeck.feed.records import Batch, Counts, Position, Record, Source, Start, Stored
from everdeck.feed.reporting import Reporter
from everdeck.feed.sources.polled import poll
from everdeck.feed.store import Transaction

__all__ = [
    "Batch",
    "Counts",
    "DeadLetter",
    "Dispatcher",
    "Feed",
    "FeedPolicy",
    "FileCursor",
    "Inbox",
    "Item",
    "Message",
    "Outbox",
    "PollerLock",
    "Position",
    "Record",
    "Reporter",
    "Retry",
    "Source",
    "Start",
    "Stored",
    "Stream",
    "Suspect",
    "Transaction",
    "consume",
    "local_suspects",
    "poll",
]
