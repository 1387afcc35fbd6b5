"""The owner's side of the guardian: keeps one alive while somebody is bound, and tells it who that is.

The state is the set of bound workers; words are how it travels. A guardian that died is replaced and told
everything again, so a word that never arrived is no loss. Words that do not fit into the channel wait here: the
owner never blocks on its guardian.

The owner's end of the channel is close-on-exec and closed in forks of the owner, so its end-of-file means the
owner's death and nothing else; only an exec in place carries it over, on purpose.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Any, Final

from everdeck.deck.watch import DeathWatch
from everdeck.errors import KernelError
from everdeck.kernel import exits, flock
from everdeck.kernel import identity as ids
from everdeck.kernel.bound import Bind, Unbind, Word, encode
from everdeck.kernel.containment import Tree
from everdeck.kernel.lifeline import Lifeline, forget_in_forks
from everdeck.kernel.spawn import Child, python_program, spawn
from everdeck.statedir import WorkerDir

_log: Final = logging.getLogger("everdeck.guardian")

IDLE_SECONDS: Final = 5.0
"""How long a guardian with nobody to guard is kept: a worker that is just being restarted needs it again."""

LOG_NAME: Final = "guardian.log"
_FIRST_DELAY_SECONDS: Final = 0.05
_LONGEST_DELAY_SECONDS: Final = 30.0
_SHORT_LIFE_SECONDS: Final = 2.0
_BUFFER_BYTES: Final = 1 << 20


class GuardianLink:
    """One guardian for one deck, started with the first bound worker. All of it runs in the deck's loop."""

    def __init__(self, watch: DeathWatch, *, enabled: bool = True, state_dir: Path | None = None) -> None:
        self._watch = watch
        self._enabled = enabled
        self._state_dir = state_dir
        self._bound: dict[str, Bind] = {}
        self._channel: Lifeline | None = None  # its write end; the guardian has the other
        self._unsaid: deque[Word] = deque()
        self._pidfd: int | None = None
        self._leaving: set[int] = set()  # pidfds of guardians that were let go
        self._started_at = 0.0
        self._delay_seconds = _FIRST_DELAY_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._may_guard = False  # inherited, and not yet told anew by us for whom
        self.pid: int | None = None

    def bind(self, tree: Tree, signal_number: int, grace_seconds: float) -> None:
        """When the owner dies, end this tree. Say it again when more is known of it."""
        if not self._enabled:
            return
        if self._state_dir is None and tree.lock_path is not None:
            self._state_dir = WorkerDir(Path(tree.lock_path).parent).deck.path
        word = self._bound[tree.name] = Bind(tree, signal_number, grace_seconds)
        if self._channel is None:
            self.ensure()
        else:
            self._cancel_timer()
            self._say(word)

    def unbind(self, name: str) -> None:
        """That tree is gone; a guardian with nobody left to guard leaves after a while."""
        if self._bound.pop(name, None) is None:
            return
        self._say(Unbind(name))
        if not self._bound and self._channel is not None:
            self._cancel_timer()
            self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._dismiss)

    def ensure(self) -> None:
        """Start a guardian if somebody is bound and none is there, and tell it everything."""
        self._cancel_timer()
        if not self._bound or self._channel is not None or not self._enabled:
            return
        try:
            self._start()
        except (KernelError, OSError) as err:
            # The workers have their lifelines and the next open reaps: L1 and L4 hold without a guardian.
            _log.warning("no guardian for %d bound workers yet: %s", len(self._bound), err)
            self._try_again_later()
            return
        for word in self._bound.values():
            self._say(word)

    def hand_over(self) -> dict[str, int] | None:
        """For an exec in place: the channel and the guardian's pid. The next image calls :meth:`inherit` with them."""
        if self._channel is None or self.pid is None:
            return None
        os.set_inheritable(self._channel.write_fd, True)  # noqa: FBT003 - the os module's order
        return {"channel_fd": self._channel.write_fd, "pid": self.pid}

    def lent(self) -> tuple[int, int] | None:
        """For the next owner: the channel and the guardian's pid."""
        return None if self._channel is None or self.pid is None else (self._channel.write_fd, self.pid)

    def give_away(self) -> None:
        """The next owner has a copy of the channel, so closing ours ends nobody."""
        self._enabled = False
        self._cancel_timer()
        self._close_channel()
        for pidfd in (self._pidfd, *self._leaving):
            if pidfd is not None:
                self._watch.forget(pidfd)
                os.close(pidfd)
        self._pidfd = self.pid = None
        self._leaving.clear()

    def inherit(self, handed_over: dict[str, int]) -> None:
        """Go on with the guardian that the image before us started; it is still our child."""
        self._take_channel(handed_over["channel_fd"])
        try:
            pidfd = ids.open_pidfd(handed_over["pid"])
        except KernelError:  # it ended during the exec
            self._close_channel()
            return
        self._keep(pidfd, handed_over["pid"])
        self._may_guard = True
        # Those that are still bound are bound anew in a moment; if none is, it need not stay.
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._dismiss)

    def settle(self) -> None:
        """The deck is recovered: whoever is bound was bound anew, so we know whom it guards."""
        self._may_guard = False

    async def close(self) -> None:
        """Let the guardian go. It ends whoever is still bound first, which after a clean close is nobody."""
        self._enabled = False
        self._cancel_timer()
        self._let_go()
        for pidfd in list(self._leaving):
            self._watch.forget(pidfd)
            # It has nothing to do, and may not even have finished starting: do not wait for that. But one that we took
            # over and a recovery that failed know more than we do: it sees our end-of-file and ends whom it guards.
            if not self._bound and not self._may_guard:
                ids.send_signal(pidfd, signal.SIGKILL)
                await _ended(pidfd)
            self._reap(pidfd)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            with contextlib.suppress(OSError):
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            self._take_channel(ours.detach())
            try:
                spawned = _spawned(theirs, self._state_dir)
            except BaseException:
                self._close_channel()
                raise
        self._keep(spawned.pidfd, spawned.pid)

    def _keep(self, pidfd: int, pid: int) -> None:
        self._pidfd, self.pid = pidfd, pid
        self._started_at = asyncio.get_running_loop().time()
        self._watch.ended(pidfd, self._died)

    def _take_channel(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # noqa: FBT003 - the os module's order
        os.set_blocking(fd, False)
        self._channel = Lifeline(-1, fd)
        forget_in_forks(self._channel)

    def _close_channel(self) -> None:
        self._unsaid.clear()
        if self._channel is not None:
            asyncio.get_running_loop().remove_writer(self._channel.write_fd)
            self._channel.close()
            self._channel = None

    def _say(self, word: Word) -> None:
        self._unsaid.append(word)
        if len(self._unsaid) == 1:
            self._flush()

    def _flush(self) -> None:
        """Say what waits; if the guardian does not listen fast enough, go on when it does."""
        if self._channel is None:
            self._unsaid.clear()
            return
        loop, fd = asyncio.get_running_loop(), self._channel.write_fd
        while self._unsaid:
            try:
                _send(fd, encode(self._unsaid[0]))
            except BlockingIOError:
                loop.add_writer(fd, self._flush)
                return
            except OSError:  # it is dead; its pidfd tells us, and its successor hears everything anew
                self._unsaid.clear()
                break
            self._unsaid.popleft()
        loop.remove_writer(fd)

    def _died(self) -> None:
        """The guardian ended though nobody asked it to: somebody killed it. Start another."""
        self._close_channel()
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            _log.warning("the guardian (pid %s) was ended; %d workers are bound", self.pid, len(self._bound))
            self._reap(pidfd)
        self.pid = None
        if asyncio.get_running_loop().time() - self._started_at > _SHORT_LIFE_SECONDS:
            self._delay_seconds = _FIRST_DELAY_SECONDS
            self.ensure()
        else:
            self._try_again_later()

    def _try_again_later(self) -> None:
        """One that cannot start, or dies at once, is tried again, less and less often."""
        if self._enabled:
            self._timer = asyncio.get_running_loop().call_later(self._delay_seconds, self.ensure)
            self._delay_seconds = min(self._delay_seconds * 2, _LONGEST_DELAY_SECONDS)

    def _dismiss(self) -> None:
        """Nobody has been bound for a while."""
        self._timer = None
        if self._may_guard:  # a recovery that takes its time
            self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._dismiss)
            return
        self._let_go()

    def _let_go(self) -> None:
        """End-of-file: it leaves. It is our child, so it is reaped when it has."""
        self._close_channel()
        pidfd, self._pidfd, self.pid = self._pidfd, None, None
        if pidfd is not None:
            self._watch.forget(pidfd)
            self._leaving.add(pidfd)
            self._watch.ended(pidfd, lambda: self._reap(pidfd))

    def _reap(self, pidfd: int) -> None:
        self._leaving.discard(pidfd)
        exits.reap_child(pidfd)
        os.close(pidfd)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def guardian_of(owner: int | None) -> int | None:
    """The pid of an owner's guardian, found through /proc; None if it has none that can be seen."""
    for pid in flock.all_pids() if owner is not None else ():
        with contextlib.suppress(KernelError):
            if "everdeck.guardian" in ids.command_line(pid) and ids.read_stat(pid).ppid == owner:
                return pid
    return None


def reports(state_dir: Path) -> list[dict[str, Any]]:
    """What guardians of earlier owners did, oldest first: ``worker``, ``at``, ``gone``, ``killed``, ``survivors``.

    A new owner makes events of them (they are the escalations nobody was there to record) and then calls
    :func:`forget_reports`.
    """
    try:
        lines = (state_dir / LOG_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a traceback, or a line that was cut by a full disk
            said = json.loads(line)
            if isinstance(said, dict) and {"worker", "at", "gone", "killed", "survivors"} <= said.keys():
                found.append(said)
    return found


def forget_reports(state_dir: Path) -> None:
    """They have been recorded. A guardian that is still at work appends to the emptied file."""
    with contextlib.suppress(OSError):
        os.truncate(state_dir / LOG_NAME, 0)


def _spawned(channel: socket.socket, state_dir: Path | None) -> Child:
    """A new guardian with its end of the channel. What it has to say goes to the state directory."""
    with contextlib.ExitStack() as files:
        said = nothing = files.enter_context(open(os.devnull, "r+b", buffering=0))  # noqa: PTH123 - raw descriptors
        if state_dir is not None:
            with contextlib.suppress(OSError):  # a full disk takes away its voice, not the guardian
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                said = files.enter_context(os.fdopen(os.open(state_dir / LOG_NAME, flags, 0o600), "ab", buffering=0))
        return spawn(
            # Without site and the current directory: it finds what we found, and starts sooner.
            [
                *(python_program(), "-S", "-s", "-P", "-m", "everdeck.guardian", str(channel.fileno())),
                *(() if state_dir is None else (str(state_dir),)),
            ],
            env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": _search_path()},
            cwd="/",
            stdin_fd=nothing.fileno(),
            stdout_fd=said.fileno(),
            stderr_fd=said.fileno(),
            keep_fds=[channel.fileno()],
        )


def _send(fd: int, packet: bytes) -> None:
    # The descriptor belongs to the Lifeline, which forgets it in forks; the socket object only borrows it.
    borrowed = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=fd)
    try:
        borrowed.send(packet, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    finally:
        borrowed.detach()


def _search_path() -> str:
    """Where this process found its modules: the guardian runs without site and must find the same."""
    return os.pathsep.join(entry for entry in sys.path if entry)


async def _ended(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    fact = asyncio.Event()
    loop.add_reader(pidfd, fact.set)
    try:
        await fact.wait()
    finally:
        loop.remove_reader(pidfd)
