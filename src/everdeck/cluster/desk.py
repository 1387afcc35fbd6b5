"""Messages of a pod's satellite, for readers outside of the pod: one JSON value per line on standard input and output.

``python -m everdeck.cluster.desk NAME`` hands out messages as they come, each with a number, and takes how each of them
ended. When its input ends, whatever was not finished goes back to the inbox: a reader that dies leaves its messages for
the next. ``… desk NAME VERB ARGUMENTS`` is one question about the feed: ``send``, ``feed``, ``letters``, ``decide``.

The work is done by :mod:`everdeck.satellites.bridge` on the satellite's own file, as on one box.
"""

import asyncio
import sys
from typing import Final

import msgspec

from everdeck.cluster.forms import Answer, Decide, Ended, Handed, Kept, Letters
from everdeck.cluster.volume import STATE
from everdeck.deck.feeds import feed_of
from everdeck.deck.peek import peek_spec
from everdeck.errors import EverdeckError, MessageLost
from everdeck.faults import fault_of
from everdeck.messages import Message, Outgoing
from everdeck.satellites import bridge

MOST_IN_HAND: Final = 8
LONGEST: Final = 64 << 20


class _Desk:
    """Hands out, and takes ends, until its input ends."""

    def __init__(self, name: str) -> None:
        self._reader = bridge.Reader()
        self._reader.add(name, _feed(name))
        self._in_hand: dict[int, Message] = {}
        self._free = asyncio.Semaphore(MOST_IN_HAND)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(limit=LONGEST)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        handing = asyncio.ensure_future(self._hand_out())
        try:
            while line := await lines.readline():
                await self._take(msgspec.json.decode(line, type=Ended))
        finally:
            handing.cancel()
            await asyncio.gather(handing, return_exceptions=True)
            await loop.run_in_executor(None, self._reader.close)

    async def _hand_out(self) -> None:
        number = 0
        while True:
            await self._free.acquire()
            message = await self._reader.get()
            number += 1
            self._in_hand[number] = message
            _print(Handed(number, message))

    async def _take(self, ended: Ended) -> None:
        message = self._in_hand.pop(ended.claim, None)
        if message is None:
            _print(Kept(ended.claim, fault_of(MessageLost("no message is in hand with this number"))))
            return
        try:
            if ended.error is not None:
                await message.failed(ended.error)
            elif ended.released:
                await message.release()
            else:
                for reply in ended.replies:
                    message.reply(reply.text, subject=reply.subject, **reply.options)
                await message.done()
        except EverdeckError as error:
            _print(Kept(ended.claim, fault_of(error)))
        else:
            _print(Kept(ended.claim))
        finally:
            self._free.release()


def answered(name: str, verb: str, arguments: str) -> Answer:
    """One question about the feed."""
    feed = _feed(name)
    match verb:
        case "send":
            return Answer(number=bridge.send(feed, msgspec.json.decode(arguments, type=Outgoing)))
        case "feed":
            return Answer(feed=bridge.feed_status(feed, name))
        case "letters":
            asked = msgspec.json.decode(arguments, type=Letters)
            return Answer(letters=bridge.letters(feed, which=asked.which, number=asked.number, limit=asked.limit))
        case _:
            decision = msgspec.json.decode(arguments, type=Decide)
            return Answer(done=bridge.decide(feed, decision.verb, decision.number))


def _feed(name: str) -> bridge.Feed:
    return feed_of(STATE, name, peek_spec(STATE, name))


def _print(value: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def main(arguments: list[str]) -> int:
    """``desk NAME`` or ``desk NAME VERB ARGUMENTS``."""
    if len(arguments) == 1:
        asyncio.run(_Desk(arguments[0]).serve())
        return 0
    try:
        answer = answered(*arguments)
    except EverdeckError as error:
        answer = Answer(fault=fault_of(error))
    _print(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
