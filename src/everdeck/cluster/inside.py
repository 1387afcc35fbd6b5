"""The deck inside a worker's pod, reached through the API's exec: the same frames as on one box.

``everdeck.cluster.door`` runs in the pod and joins its standard input and output to the pod deck's socket; here the
websocket's channels are joined to one end of a socket pair, and the other end is a line as any member has.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

from everdeck.cluster.api import Api
from everdeck.errors import ClientError
from everdeck.wire.line import Line, LineLost

DOOR: Final = ("python3", "-P", "-m", "everdeck.cluster.door")
_STDIN: Final = b"\0"
_STDOUT: Final = 1
_STDERR: Final = 2
_END: Final = 3
_BLOCK: Final = 1 << 16


@contextlib.asynccontextmanager
async def line_into(api: Api, pod: str) -> AsyncIterator[Line]:
    """A line to the deck in a pod, for as long as the body runs."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)  # noqa: FBT003 - the call's own form
    async with contextlib.AsyncExitStack() as undo:
        undo.callback(ours.close)
        undo.callback(theirs.close)
        channels = await undo.enter_async_context(api.command(pod, DOOR))
        door = _Door(channels, theirs)
        undo.push_async_callback(door.close)
        try:
            line = await Line.over(ours, "everdeck")
            undo.callback(line.hang_up)
            yield line
        except LineLost as error:
            raise ClientError(f"the deck in pod {pod} does not answer: {door.complaint or error}") from error


async def output_of(api: Api, pod: str, words: Sequence[str]) -> bytes:
    """What a command in a pod prints."""
    said: dict[int, bytes] = {_STDOUT: b"", _STDERR: b"", _END: b""}
    async with api.command(pod, words) as channels:
        async for number, data in _channels(channels):
            said[number] = said.get(number, b"") + data
    if b'"Success"' not in said[_END]:
        raise ClientError(f"in pod {pod}: {(said[_STDERR] or said[_END]).decode('utf-8', 'replace').strip()[-500:]}")
    return said[_STDOUT]


async def answer_to(api: Api, pod: str, words: Sequence[str], blocks: AsyncIterator[bytes]) -> bytes:
    """What a command in a pod answers, in one line, after everything was said to it."""
    async with spoken_with(api, pod, words) as (lines, say):
        async for block in blocks:
            await say(block)
        async for line in lines:
            return line
    raise ClientError(f"in pod {pod}: {words[-2]} ended without an answer")


@contextlib.asynccontextmanager
async def spoken_with(
    api: Api, pod: str, words: Sequence[str]
) -> AsyncIterator[tuple[AsyncIterator[bytes], Callable[[bytes], Awaitable[None]]]]:
    """A command in a pod with whom one speaks in lines: what it prints, and how to say something to it."""
    async with api.command(pod, words) as channels:

        async def lines() -> AsyncIterator[bytes]:
            rest = b""
            async for number, data in _channels(channels):
                if number == _STDOUT:
                    *whole, rest = (rest + data).split(b"\n")
                    for line in whole:
                        yield line

        async def say(data: bytes) -> None:
            for begin in range(0, len(data), _BLOCK):
                await channels.send_bytes(_STDIN + data[begin : begin + _BLOCK])

        yield lines(), say


class _Door:
    """Carries bytes between a websocket of channels and a socket."""

    def __init__(self, channels: Any, inner: socket.socket) -> None:
        self.complaint = ""
        self._channels = channels
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._carriers = [self._loop.create_task(work) for work in (self._out(), self._back())]

    async def close(self) -> None:
        """Carry nothing any more."""
        for carrier in self._carriers:
            carrier.cancel()
        await asyncio.gather(*self._carriers, return_exceptions=True)

    async def _out(self) -> None:
        while block := await self._loop.sock_recv(self._inner, _BLOCK):
            await self._channels.send_bytes(_STDIN + block)

    async def _back(self) -> None:
        async for number, data in _channels(self._channels):
            if number == _STDOUT:
                await self._loop.sock_sendall(self._inner, data)
            elif number == _STDERR:
                self.complaint = data.decode("utf-8", "replace").strip().splitlines()[-1]
        self._inner.shutdown(socket.SHUT_RDWR)


async def _channels(channels: Any) -> AsyncIterator[tuple[int, bytes]]:
    async for message in channels:
        data = message.data if isinstance(message.data, bytes) else str(message.data).encode()
        if data[1:]:
            yield data[0], data[1:]
