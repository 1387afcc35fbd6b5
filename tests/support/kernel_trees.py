"""Trees for the kernel's tests: started by the kernel layer itself, ended whatever happens.

A program that has something to say says it on the pipe behind ``$SAY``: tests wait for its words, never for time.
"""

import os
import select
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everdeck.kernel import containment, exits, flock, spawn
from everdeck.kernel.birth import Birth
from everdeck.kernel.containment import Tree
from everdeck.kernel.escalation import Subject, stop_trees

DEADLINE_SECONDS = 30


@dataclass
class Started:
    """One running tree and the pipe it speaks on."""

    tree: Tree
    pidfd: int
    said_fd: int
    _heard: bytes = b""

    @property
    def pid(self) -> int:
        """The leader's pid."""
        assert self.tree.identity is not None
        return self.tree.identity.pid

    def line(self) -> str:
        """The next line it said; fails loudly when it says nothing."""
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self.said_fd], [], [], DEADLINE_SECONDS)
            assert ready, f"{self.tree.name} said nothing in {DEADLINE_SECONDS} s"
            piece = os.read(self.said_fd, 4096)
            assert piece, f"{self.tree.name} closed its pipe after {self._heard!r}"
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def subject(self, grace_seconds: float = 5.0) -> Subject:
        """The tree as something to be ended."""
        return Subject(self.tree, self.pidfd, signal.SIGTERM, grace_seconds)


@dataclass
class Nursery:
    """Starts trees in one directory and ends every one of them."""

    directory: Path
    started: list[Started] = field(default_factory=list)
    others: list[int] = field(default_factory=list)

    def start(
        self,
        command: Sequence[str],
        *,
        name: str | None = None,
        cgroup: Path | None = None,
        env: dict[str, str] | None = None,
        **how: object,
    ) -> Started:
        """One more tree: its own lock, its own cookie, a pipe to speak on; born in its cgroup if there is one."""
        name = name or f"w{len(self.started)}"
        lock_path = self.directory / f"{name}.lock"
        lock_fd = flock.take(lock_path)
        assert lock_fd is not None
        said_fd, say_fd = os.pipe2(os.O_CLOEXEC)
        null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        cookie = containment.new_cookie()
        given = {"EVERDECK_COOKIE": cookie, "PATH": os.environ["PATH"], "SAY": str(say_fd), **(env or {})}
        if cgroup is not None:
            assert containment.make_fresh_cgroup(cgroup)
            how["birth"] = Birth(cgroup=str(cgroup), cgroup_required=True)
        try:
            spawned = spawn.spawn(
                command,
                env=given,
                cwd=str(how.pop("cwd", self.directory)),
                stdin_fd=int(how.pop("stdin_fd", null_fd)),  # type: ignore[call-overload]
                stdout_fd=null_fd,
                stderr_fd=null_fd,
                keep_fds=[lock_fd, say_fd],
                **how,  # type: ignore[arg-type]
            )
        except BaseException:
            os.close(said_fd)
            raise
        finally:
            for fd in (lock_fd, say_fd, null_fd):
                os.close(fd)
        identity = spawn.identify(spawned)
        one = Started(Tree(name, cookie, lock_path, identity, cgroup), spawned.pidfd, said_fd)
        self.started.append(one)  # before anything can fail: whoever is in the list is ended
        return one

    def end(self) -> None:
        """End every tree that was started, whatever became of it."""
        for one in self.started:
            # Also the fork bomb, which one round of signals would only thin out.
            outcome = stop_trees([Subject(one.tree, one.pidfd, signal.SIGKILL, 0)])[one.tree.name]
            if exits.is_our_child(one.pidfd):
                os.waitid(os.P_PIDFD, one.pidfd, os.WEXITED)
            os.close(one.pidfd)
            os.close(one.said_fd)
            if one.tree.cgroup is not None:
                containment.remove_cgroup(one.tree.cgroup)
            assert outcome.gone, outcome
        for pid in self.others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def wait_readable(fd: int) -> None:
    """Wait for the fact behind a descriptor; fails loudly."""
    assert ready_among([fd], DEADLINE_SECONDS), f"nothing happened in {DEADLINE_SECONDS} s"


def ready_among(fds: Sequence[int], seconds: float) -> list[int]:
    """Those of the descriptors that have something to tell, or get it in that time."""
    poller = select.poll()  # not select(): a pidfd of ours has a number near 1,024, or above
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(seconds * 1000)]
