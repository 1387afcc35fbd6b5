"""What must be true of a process before its program runs; the defaults ask for nothing.

Applied between the birth of the process and its exec, by :mod:`everdeck.kernel.native` or, where that is not built, by
:mod:`everdeck.kernel.launch`: the order of the steps is the same in both, and rights are given up before anything that
the worker chose (its working directory, its environment, its program) is looked at.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Program(NamedTuple):
    """What is exec'ed, and what it has open: 0, 1, 2 and ``keep_fds``."""

    command: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdio: tuple[int, int, int]
    keep_fds: Sequence[int]


@dataclass(frozen=True, slots=True)
class Birth:
    """None and False: as it is in the process that starts it."""

    cgroup: str | None = None
    cgroup_required: bool = False
    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] | None = None
    umask: int | None = None
    open_files: int | None = None
    open_files_soft: int | None = None
    """What it may raise again; for a worker of a process that raised its own limit."""
    nice: int | None = None
    oom_score_adj: int | None = None
    no_core: bool = False
    no_capabilities: bool = False
    no_new_privileges: bool = False
    ruleset_fd: int | None = None
    """A Landlock ruleset; it stays the caller's to close."""
    filter: bytes = b""
    """A seccomp filter: ``struct sock_filter[]``."""

    @property
    def changes_account(self) -> bool:
        """Does it give up the rights of the process that starts it?"""
        return (self.uid is not None and self.uid != os.geteuid()) or self.groups is not None

    @property
    def is_plain(self) -> bool:
        """Is there nothing that only the process itself can do, but for the umask and a soft limit?

        A cgroup that may be joined later is no reason to start an interpreter first.
        """
        return (
            replace(self, umask=None, open_files_soft=None, cgroup=self.cgroup if self.cgroup_required else None)
            == Birth()
        )
