"""Workers' names as names of Kubernetes objects, and back.

A worker may be called ``Alice@example.org:2``; an object's name has lower-case letters, digits and hyphens, and a pod
of a StatefulSet must fit ``NAME-0`` and a revision into 63 characters. A name that fits is kept as it is. In any other
each character that does not fit becomes ``--`` and two hexadecimal digits. A name that is too long is cut and ends in
a hash: it cannot be read back, so every object also carries the worker's name in an annotation, which is the truth.
"""

import hashlib
import re
from typing import Final

from everdeck.model import WorkerName, worker_name

LONGEST: Final = 45
_FITS: Final = re.compile(r"[a-z]([a-z0-9]|-(?!-))*(?<!-)\Z")
_ESCAPE: Final = re.compile(r"--([0-9a-f]{2})")
_PREFIX: Final = "w--"
"""What an escaped name begins with: no name that is kept as it is contains two hyphens in a row."""
_CUT: Final = "x--"
_OURS: Final = "everdeck"
"""What the names of the deck's own objects begin with; a worker of such a name is escaped."""


def object_name(name: WorkerName) -> str:
    """The name of the worker's objects."""
    if len(name) <= LONGEST and _FITS.match(name) and not name.startswith(_OURS):
        return name
    escaped = _PREFIX + "".join(
        one if one.isdigit() or (one.isalpha() and one.islower()) else f"--{ord(one):02x}" for one in name
    )
    # An object's name must not end in a hyphen, and none does: an escape ends in a digit or a letter.
    if len(escaped) <= LONGEST:
        return escaped
    digest = hashlib.sha256(name.encode()).hexdigest()[:20]
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[: LONGEST - len(_CUT) - len(digest) - 1].strip("-")
    return f"{_CUT}{readable}-{digest}" if readable else f"{_CUT}{digest}"


def name_of(object_name: str) -> WorkerName | None:
    """The worker's name; None for one that was cut."""
    if object_name.startswith(_CUT):
        return None
    if not object_name.startswith(_PREFIX):
        return worker_name(object_name)
    return worker_name(_ESCAPE.sub(lambda match: chr(int(match[1], 16)), object_name.removeprefix(_PREFIX)))
