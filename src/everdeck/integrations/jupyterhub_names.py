"""The name of the worker that is somebody's server, and back: ``alice``, ``alice:gpu``, ``zo+C3+AB``.

Hubs have users of any letters, workers have names of few (:func:`everdeck.model.worker_name`). What a worker's name may
not hold, and the colon that stands before the name of a server, are written as ``+`` and the two hexadecimal digits of
each byte in UTF-8. A name that would be too long ends in its hash; its labels tell whose it is.
"""

import hashlib
import re
from typing import Final

_LONGEST: Final = 128
_HASH: Final = 32
_OTHER: Final = re.compile(rb"[^A-Za-z0-9._@-]")
_CODED: Final = re.compile(rb"\+([0-9A-F]{2})")


def worker_of(user: str, server: str = "") -> str:
    """The same two names give the same worker, and no other two do."""
    name = _coded(user) + (f":{_coded(server)}" if server else "")
    if name in {".", ".."}:
        name = name.replace(".", "+2E")
    if len(name) > _LONGEST:
        digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH]
        name = f"{name[: _LONGEST - _HASH - 2]}::{digest}"
    return name


def server_of(worker: str) -> tuple[str, str] | None:
    """The user and the server of a worker; None: the name was too long to be kept whole."""
    user, _, server = worker.partition(":")
    return None if "::" in worker else (_decoded(user), _decoded(server))


def _coded(text: str) -> str:
    return _OTHER.sub(lambda found: b"+%02X" % ord(found[0]), text.encode()).decode("ascii")


def _decoded(text: str) -> str:
    return _CODED.sub(lambda found: bytes.fromhex(found[1].decode()), text.encode()).decode()
