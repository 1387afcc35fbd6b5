"""The addresses of a host, asked of the resolver off the loop, because one that is gone takes half a minute to say so.

getaddrinfo(3) has no deadline and cannot be interrupted. A thread of a pool that is stuck in it keeps whoever needs
that pool next waiting; so each name has a thread of its own and never more than one: whoever asks for it meanwhile
waits for the same answer, as long as he likes.
"""

import asyncio
import contextlib
import socket
import threading
from typing import Any, TypeAlias

Address: TypeAlias = tuple[socket.AddressFamily, Any]
"""A family and what is connected to in it."""


class Names:
    """The questions that are under way in one loop."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[list[Address]]] = {}

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Where a host can be connected to, the best first; raises OSError. The caller sets the deadline."""
        return [(family, (address[0], port, *address[2:])) for family, address in await self._of_host(host)]

    async def _of_host(self, host: str) -> list[Address]:
        with contextlib.suppress(socket.gaierror, UnicodeError):  # an address is its own answer
            return _looked_up(host, socket.AI_NUMERICHOST)
        answer = self._asked.get(host)
        if answer is None:
            loop = asyncio.get_running_loop()
            answer = self._asked[host] = loop.create_future()
            answer.add_done_callback(lambda done: (self._asked.pop(host), done.cancelled() or done.exception()))
            threading.Thread(target=_ask, args=(loop, answer, host), name="everdeck-name", daemon=True).start()
        return await asyncio.shield(answer)


def _ask(loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[list[Address]]", host: str) -> None:
    try:
        found: list[Address] | OSError = _looked_up(host)
    except (OSError, UnicodeError) as error:  # a label that is too long cannot even be asked about
        found = error if isinstance(error, OSError) else OSError(str(error))

    def tell() -> None:
        if isinstance(found, OSError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(tell)


def _looked_up(host: str, flags: int = 0) -> list[Address]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]
