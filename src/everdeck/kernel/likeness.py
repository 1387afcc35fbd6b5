"""Processes that are nobody's and look like several copies of one program.

They were started with the same command line in the same directory, or hold the same token in their environment, and at
least one of them has lost its parent. That is how thirteen orphaned bots look from outside; it is a suspicion and never
more, so nobody is signalled for it.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from everdeck.child import COOKIE_ENV
from everdeck.errors import KernelError
from everdeck.kernel import containment, flock
from everdeck.kernel import identity as ids

_SECRET_WORDS: Final = ("TOKEN", "SECRET", "API_KEY", "APIKEY", "PASSWORD")
_INTERPRETERS: Final = ("python", "node", "ruby", "perl", "php", "java", "deno", "bun")


class Alike(NamedTuple):
    """One of several that look alike."""

    pid: int
    command: str
    why: str


def likenesses() -> Iterator[Alike]:
    """Processes that are nobody's and look like several copies of one program."""
    same_command: dict[str, list[int]] = defaultdict(list)
    same_secret: dict[tuple[str, bytes], list[int]] = defaultdict(list)
    for pid, command, environment in _programs_of_nobody():
        try:
            place = Path(f"/proc/{pid}/cwd").readlink()
        except OSError:
            continue
        same_command[f"{command}\0{place}"].append(pid)
        for key, value in environment.items():
            if value and any(word in key.upper() for word in _SECRET_WORDS):
                same_secret[key, hashlib.sha256(value.encode()).digest()].append(pid)
    told: set[int] = set()
    for alike, pids in same_command.items():
        command, _, place_text = alike.partition("\0")
        for pid, count in _suspicious(pids):
            told.add(pid)
            yield Alike(pid, command[:200], f"one of {count} alike in {place_text}")
    for (name, _), pids in same_secret.items():
        for pid, count in _suspicious([pid for pid in pids if pid not in told]):
            yield Alike(pid, ids.command_line(pid)[:200], f"one of {count} with the same {name}")


def _programs_of_nobody() -> Iterator[tuple[int, str, dict[str, str]]]:
    """Scripts that some interpreter runs and that are no worker of any deck."""
    for pid in flock.all_pids():
        command = ids.command_line(pid)
        program, _, rest = command.partition(" ")
        if not rest or pid in {1, os.getpid()} or not program.rpartition("/")[2].startswith(_INTERPRETERS):
            continue
        environment = containment.environment_of(pid)
        if COOKIE_ENV not in environment and "everdeck" not in command:
            yield pid, command, environment


def _suspicious(pids: list[int]) -> Iterator[tuple[int, int]]:
    """Those of them that nobody else of them started, if there are several and one has lost its parent."""
    apart = _unrelated(pids)
    if len(apart) > 1 and any(_is_orphan(pid) for pid in apart):
        yield from ((pid, len(apart)) for pid in apart)


def _unrelated(pids: list[int]) -> list[int]:
    """Without those that another of them started: a server and its own workers are one."""
    chosen = set(pids)
    return [pid for pid in pids if not chosen & set(_ancestors(pid))]


def _ancestors(pid: int) -> Iterator[int]:
    for _ in range(64):
        try:
            pid = ids.read_stat(pid).ppid
        except KernelError:
            return
        if pid <= 1:
            return
        yield pid


def _is_orphan(pid: int) -> bool:
    """Whether its parent is gone: taken by pid 1, or by a reaper that is not in its session's line."""
    try:
        stat = ids.read_stat(pid)
        if stat.ppid == 1:
            return True
        parent = ids.read_stat(stat.ppid)
    except KernelError:
        return False
    # A subreaper (systemd --user, a container's init) leads a session of its own and never shares the child's.
    return parent.session != stat.session and parent.ppid in {0, 1} and stat.pid != stat.session
