"""Serve a Unix socket that is listened on already, and leave its name in the directory alone.

Since Python 3.13 asyncio looks up the name that a socket was bound by, and removes it when the server is closed. Ours
are bound through ``/proc/self/fd/N`` of a directory that is closed again, and renamed into place: that name leads
nowhere, or to whatever has the number N by now. Who may remove the real name is decided by whoever made it.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any, Final

_KEEP_THE_NAME: Final[dict[str, Any]] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}


async def serve_unix(
    protocol: Callable[[], asyncio.BaseProtocol], listener: socket.socket, **options: Any
) -> asyncio.Server:
    """A server on a socket that is bound already."""
    loop = asyncio.get_running_loop()
    return await loop.create_unix_server(protocol, sock=listener, **_KEEP_THE_NAME, **options)
