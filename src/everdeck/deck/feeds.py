"""How a satellite's feed is opened: by its name where the satellite may do what we may, else with its own rights.

The satellite writes in the directory of its feed, so a name in it is the satellite's word (docs/explanation/
threat-model.md). Whoever may do more than the satellite, because that has another account or a strict sandbox, asks a
program that may do no more than it: :mod:`everdeck.feed.far_claims`.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from everdeck.deck import rights
from everdeck.deck.idle_readers import idle_readers
from everdeck.errors import InboxUnavailable, MessageError
from everdeck.feed.claims import Claims
from everdeck.feed.far_claims import FarClaims
from everdeck.kernel.spawn import Child, spawn
from everdeck.model import WorkerSpec
from everdeck.satellites import FEED
from everdeck.satellites.bridge import Feed
from everdeck.statedir import StateDir, WorkerDir

_SAFELY: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def feed_of(state_dir: Path, name: str, spec: WorkerSpec) -> Feed:
    """Where it is, or how it is opened."""
    place = StateDir(state_dir.absolute()).worker(name)
    path = place.data / FEED
    if spec.user is None and spec.group is None and spec.sandbox.level != "strict":
        return path

    def with_its_rights() -> Claims:
        # Who it is, not what it is called: "auto" may be another uid by now.
        its = (rights.account_of(spec, place.path), spec)
        kept = idle_readers.taken(path, its)
        if isinstance(kept, FarClaims):
            return kept
        return FarClaims(
            path,
            lambda words, keep_fds: _beside(place, spec, words, keep_fds),
            lambda claims: idle_readers.keep(path, its, claims),
        )

    return with_its_rights


def open_attachment(data: Path, path: str) -> BinaryIO:
    """A file that a message names: one below the satellite's ``data/``, reached without links, and nobody else's.

    Whatever the satellite wrote as its path, nothing else is read: it may be run by somebody who may read less than we.
    It is read in pieces: a file with holes may be longer than our memory.
    """
    try:
        return os.fdopen(_reached(data, Path(path).relative_to(data).parts), "rb", buffering=0)
    except (OSError, ValueError) as err:
        raise MessageError(f"the attachment {path!r} cannot be read: {err}") from err


def _reached(data: Path, parts: Sequence[str]) -> int:
    with contextlib.ExitStack() as opened:
        fd = os.open(data, _SAFELY | os.O_DIRECTORY)
        opened.callback(os.close, fd)
        owner = os.fstat(fd).st_uid
        for at, part in enumerate(parts, 1):
            if part == "..":
                raise OSError(errno.ELOOP, "leads upward")
            fd = os.open(part, _SAFELY if at == len(parts) else _SAFELY | os.O_DIRECTORY, dir_fd=fd)
            opened.callback(os.close, fd)
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1 or facts.st_uid != owner:
            raise OSError(errno.ELOOP, "not a plain file of the satellite's own")
        return os.dup(fd)


def _beside(place: WorkerDir, spec: WorkerSpec, words: Sequence[str], keep_fds: Sequence[int]) -> Child:
    """Start it with what the satellite may do. Not in its cgroup: a message in hand outlives a restart of it."""
    with (
        rights.born(spec, str(place.path), None, None, beside=True) as birth,
        open(os.devnull, "r+b") as nothing,  # noqa: PTH123 - opened for its descriptor
    ):
        if spec.user is not None and birth.uid is None:
            raise InboxUnavailable(f"{place.data / FEED}: the satellite has no account yet; it was never started")
        null = nothing.fileno()
        env = {"PATH": os.defpath, "HOME": str(place.data)}
        return spawn(
            words, env=env, cwd="/", stdin_fd=null, stdout_fd=null, stderr_fd=null, keep_fds=keep_fds, birth=birth
        )
