"""The access log: one JSON line per request, or nothing.

Who asked for what, from where, what was answered and how long it took. The query is left out: it may hold a ticket.
Lines go to the logger ``everdeck.access``, which the daemon gives a file of its own when ``access_log`` is set.
"""

import logging
import time
from collections.abc import MutableMapping
from typing import Any, Final

import msgspec

from everdeck.server.serving import AsgiApp, Receive, Scope, Send

_log: Final = logging.getLogger("everdeck.access")


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request."""

    at: float
    method: str
    path: str
    status: int
    milliseconds: float
    uid: int | None = None
    pid: int | None = None
    token: str | None = None
    address: str | None = None


def logged(app: AsgiApp) -> AsgiApp:
    """The same application; while the log is on, each request is told when its answer has ended."""

    async def logging_app(scope: Scope, receive: Receive, send: Send) -> None:
        if not _log.isEnabledFor(logging.INFO):
            await app(scope, receive, send)
            return
        began, at = time.monotonic(), time.time()  # noqa: TID251 - a log is read beside other logs
        status = 0

        async def send_noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_noting)
        finally:
            caller = scope["state"].get("caller")
            line = Line(
                at=round(at, 3),
                method=scope["method"],
                path=scope["path"],
                status=status,
                milliseconds=round((time.monotonic() - began) * 1000, 1),
                uid=None if caller is None else caller.uid,
                pid=None if caller is None else caller.pid,
                token=None if caller is None else caller.token,
                address=caller.address if caller is not None else (scope.get("client") or (None,))[0],
            )
            _log.info("%s", msgspec.json.encode(line).decode("utf-8", "replace"))

    return logging_app
