"""The owner's side of the guardian: keeps one alive while somebody is bound, and tells it who that is.

The state is the set of bound workers; words are how it travels. A guardian that died is replaced and told
everything again, so a word that never arrived is no loss. Words that do not fit into the channel wait here: the
owner never blocks on its guardian.

The owner's end of the channel is close-on-exec and closed in forks of the owner, so its end-of-file means the
owner's death and nothing else; only an exec in place carries it over, on purpose.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Final

from tidelock.deck.watch import DeathWatch
from tidelock.errors import KernelError
from tidelock.kernel import exits, lifeline
from tidelock.kernel import identity as ids
from tidelock.kernel.bound import Bind, Unbind, Word, encode
from tidelock.kernel.containment import Tree
from tidelock.kernel.spawn import python_program, spawn

_log: Final = logging.getLogger("tidelock.guardian")

IDLE_SECONDS: Final = 5.0
"""How long a guardian with nobody to guard is kept: a worker that is just being restarted needs it again."""

_FAREWELL_SECONDS: Final = 5.0
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
        self._channel: lifeline.Lifeline | None = None
        self._speaker: socket.socket | None = None
        self._unsaid: list[Word] = []
        self._pidfd: int | None = None
        self._started_at = 0.0
        self._delay_seconds = _FIRST_DELAY_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self.pid: int | None = None

    def bind(self, tree: Tree, signal_number: int, grace_seconds: float) -> None:
        """When the owner dies, end this tree. Say it again when more is known of it."""
        if not self._enabled:
            return
        word = self._bound[tree.name] = Bind(tree, signal_number, grace_seconds)
        if self._speaker is None:
            self.ensure()
        else:
            self._cancel_timer()
            self._say(word)

    def unbind(self, name: str) -> None:
        """That tree is gone; a guardian with nobody left to guard leaves after a while."""
        if self._bound.pop(name, None) is None:
            return
        self._say(Unbind(name))
        if not self._bound and self._speaker is not None:
            self._cancel_timer()
            self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._dismiss)

    def ensure(self) -> None:
        """Start a guardian if somebody is bound and none is there, and tell it everything."""
        self._cancel_timer()
        if not self._bound or self._speaker is not None or not self._enabled:
            return
        try:
            self._start()
        except (KernelError, OSError) as err:
            # The workers have their lifelines and the next open reaps: L1 and L4 hold without a guardian.
            _log.warning("no guardian for %d bound workers yet: %s", len(self._bound), err)
            self._later()
            return
        for word in self._bound.values():
            self._say(word)

    def hand_over(self) -> tuple[int, int] | None:
        """For an exec in place: the channel and the guardian's pid. The next image calls :meth:`inherit` with them."""
        if self._speaker is None or self.pid is None:
            return None
        os.set_inheritable(self._speaker.fileno(), True)
        return self._speaker.fileno(), self.pid

    def inherit(self, handed_over: tuple[int, int]) -> None:
        """Go on with the guardian that the image before us started; it is still our child."""
        fd, pid = handed_over
        self._take_channel(socket.socket(fileno=fd))
        try:
            pidfd = ids.open_pidfd(pid)
        except KernelError:  # it ended during the exec
            self._close_channel()
            return
        self._keep(pidfd, pid)

    async def close(self) -> None:
        """Let the guardian go. It ends whoever is still bound first, which after a clean close is nobody."""
        self._enabled = False
        self._cancel_timer()
        pidfd, self._pidfd = self._pidfd, None
        self._close_channel()
        if pidfd is None:
            return
        self._watch.forget(pidfd)
        if not self._bound:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_SECONDS):
                    await _ended(pidfd)
        exits.reap_child(pidfd)
        os.close(pidfd)
        self.pid = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._take_channel(ours)
            try:
                with open(os.devnull, "r+b") as nothing, self._open_log() as log:  # noqa: PTH123 - raw descriptors are wanted
                    spawned = spawn(
                        # Without site and the current directory: it finds what we found, and starts sooner.
                        [python_program(), "-S", "-s", "-P", "-m", "tidelock.guardian", str(theirs.fileno())]
                        + ([] if self._state_dir is None else [str(self._state_dir)]),
                        env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": _search_path()},
                        cwd="/",
                        stdin_fd=nothing.fileno(),
                        stdout_fd=log.fileno(),
                        stderr_fd=log.fileno(),
                        keep_fds=[theirs.fileno()],
                    )
            except BaseException:
                self._close_channel()
                raise
        self._keep(spawned.pidfd, spawned.identity.pid)

    def _open_log(self) -> "contextlib.AbstractContextManager[socket.SocketIO]":
        where = os.devnull if self._state_dir is None else self._state_dir / "guardian.log"
        return open(where, "ab", buffering=0)  # type: ignore[return-value]  # noqa: PTH123, SIM115 - the caller closes it

    def _keep(self, pidfd: int, pid: int) -> None:
        self._pidfd, self.pid = pidfd, pid
        self._started_at = asyncio.get_running_loop().time()
        self._watch.ended(pidfd, self._died)

    def _take_channel(self, ours: socket.socket) -> None:
        ours.set_inheritable(False)
        ours.setblocking(False)
        with contextlib.suppress(OSError):
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._speaker = ours
        # A fork of the owner is not the owner: its copy is closed there, as the lifelines' are.
        self._channel = lifeline.Lifeline(-1, os.dup(ours.fileno()))
        os.close(self._channel.write_fd)
        self._channel = None

    def _close_channel(self) -> None:
        self._unsaid.clear()
        speaker, self._speaker = self._speaker, None
        if speaker is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                asyncio.get_running_loop().remove_writer(speaker.fileno())
            speaker.close()

    def _say(self, word: Word) -> None:
        if self._speaker is None:
            return
        self._unsaid.append(word)
        if len(self._unsaid) == 1:
            self._flush()

    def _flush(self) -> None:
        """Say what waits; if the guardian does not listen fast enough, go on when it does."""
        if self._speaker is None:
            return
        loop = asyncio.get_running_loop()
        while self._unsaid:
            try:
                self._speaker.send(encode(self._unsaid[0]), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                loop.add_writer(self._speaker.fileno(), self._flush)
                return
            except OSError:  # it is dead; its pidfd tells us, and its successor hears everything anew
                self._unsaid.clear()
                break
            self._unsaid.pop(0)
        loop.remove_writer(self._speaker.fileno())

    def _died(self) -> None:
        """The guardian ended though nobody asked it to: somebody killed it. Start another."""
        self._close_channel()
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            how = exits.reap_child(pidfd)
            os.close(pidfd)
            _log.warning("the guardian (pid %s) ended: %s; %d workers are bound", self.pid, how, len(self._bound))
        self.pid = None
        if asyncio.get_running_loop().time() - self._started_at > _SHORT_LIFE_SECONDS:
            self._delay_seconds = _FIRST_DELAY_SECONDS
            self.ensure()
        else:
            self._later()

    def _later(self) -> None:
        """One that cannot start, or dies at once, is tried again, less and less often."""
        if self._enabled:
            self._timer = asyncio.get_running_loop().call_later(self._delay_seconds, self.ensure)
            self._delay_seconds = min(self._delay_seconds * 2, _LONGEST_DELAY_SECONDS)

    def _dismiss(self) -> None:
        """Nobody has been bound for a while: end-of-file, and it leaves."""
        self._timer = None
        self._close_channel()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
