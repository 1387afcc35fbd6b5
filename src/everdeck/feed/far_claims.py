"""The inbox of a worker with fewer rights than ours: read by a small program that has the worker's rights.

A worker may write where its inbox lies. What is called ``feed.db`` there may be a link to somebody's file, a pipe, or a
database made to harm whoever opens it; its shared memory may be cut short while it is mapped, which ends the reader
with SIGBUS. So nobody who may do more than the worker opens it. :class:`FarClaims` has the methods of
:class:`everdeck.feed.claims.Claims`, asks them of that program over a socket, and believes none of its answers more
than the worker: each has a type, a size and a deadline, and a program that misses it is ended.

The claims are the program's own: it ends with the socket, by a death and not politely, so that whatever its asker held
goes to the next reader as if the asker itself had been seen dying.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final, Protocol, TypeVar

import msgspec

from everdeck.errors import EverdeckError, InboxUnavailable, KernelError
from everdeck.faults import Fault, error_of, fault_of
from everdeck.feed.claims import Claim, Claims, Other, Put
from everdeck.kernel import exits
from everdeck.kernel import identity as ids
from everdeck.kernel.spawn import Child

ANSWER_SECONDS: Final = 30.0
"""Longer than the patience of SQLite for another writer, and than an interpreter takes to start on a busy machine."""
PAUSE_SECONDS: Final = (1.0, 60.0)
LARGEST_FRAME: Final = 64 << 20
MEMORY_BYTES: Final = 1 << 30
_LENGTH: Final = struct.Struct("!I")
_T = TypeVar("_T")


class Begin(Protocol):
    """Starts the words with the worker's rights and these descriptors, and nothing else open."""

    def __call__(self, words: Sequence[str], keep_fds: Sequence[int]) -> Child:
        """The child is the caller's to end."""


class _Answer(msgspec.Struct, array_like=True):
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    fault: Fault | None = None


class FarClaims(Claims):
    """One reader of one feed file, by a program that ``begin`` starts: at first need, and again when it has ended."""

    def __init__(  # not Claims.__init__: that opens the file
        self, path: Path, begin: Begin, keep: "Callable[[FarClaims], bool] | None" = None
    ) -> None:
        self.path = path
        self._begin = begin
        self._keep = keep
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        self._bell: tuple[int, int] | None = None
        self._pause, self._again_at = PAUSE_SECONDS[0], 0.0

    def close(self) -> None:
        """As :meth:`Claims.close`. Whoever is given to ``keep`` may be used again as it is; its program has let go."""
        if self._socket is not None:
            kept = False
            with contextlib.suppress(EverdeckError):
                self._tell("close")
                kept = self._bell is None and self._keep is not None and self._keep(self)
            if kept:
                return
            self.end()
        if self._bell is not None:
            for fd in self._bell:
                os.close(fd)
            self._bell = None

    def is_there(self) -> bool:
        """Has it a program that runs?"""
        return self._child is not None and not ids.is_readable(self._child.pidfd, 0)

    def forget(self) -> None:
        """In a forked copy: the program is our parent's child."""
        if self._socket is not None:
            self._socket.close()
        if self._child is not None:
            os.close(self._child.pidfd)
        self._socket = self._child = None

    def take(self, most: int = 1) -> list[Claim]:
        """As :meth:`Claims.take`."""
        return self._ask("take", list[Claim], most)

    def next_due(self) -> float | None:
        """As :meth:`Claims.next_due`."""
        (due,) = self._ask("next_due", tuple[float | None])
        return due

    def others(self) -> list[Other]:
        """As :meth:`Claims.others`."""
        return self._ask("others", list[Other])

    def forget_unseen(self) -> None:
        """As :meth:`Claims.forget_unseen`."""
        self._tell("forget_unseen")

    def renew(self) -> None:
        """As :meth:`Claims.renew`."""
        self._tell("renew")

    def finish(self, claim: Claim, replies: Sequence[Put] = ()) -> None:
        """As :meth:`Claims.finish`."""
        self._tell("finish", claim, tuple(replies))

    def fail(self, claim: Claim, error: str, *, retry_after: float | None = None) -> bool:
        """As :meth:`Claims.fail`."""
        return self._ask("fail", bool, claim, error, retry_after)

    def hand_back(self, claim: Claim) -> None:
        """As :meth:`Claims.hand_back`."""
        self._tell("hand_back", claim)

    def put(self, *puts: Put) -> list[int]:
        """As :meth:`Claims.put`."""
        return self._ask("put", list[int], puts)

    def counts(self) -> tuple[int, ...]:
        """As :meth:`Claims.counts`."""
        return self._ask("counts", tuple[int, int, int, int, int, int, int])

    def facts(self) -> dict[str, str]:
        """As :meth:`Claims.facts`."""
        return self._ask("facts", dict[str, str])

    def state_facts(self, **facts: str) -> None:
        """As :meth:`Claims.state_facts`."""
        self._tell("state_facts", facts)

    def items(self, *, state: int | None = None, number: int | None = None, limit: int = 100) -> list[Any]:
        """As :meth:`Claims.items`."""
        return self._ask("items", list[list[Any]], state, number, limit)

    def done(self, *, number: int | None = None, limit: int = 100) -> list[Any]:
        """As :meth:`Claims.done`."""
        return self._ask("done", list[list[Any]], number, limit)

    def outbox(self, *, state: int | None = None, number: int | None = None, limit: int = 100) -> list[Any]:
        """As :meth:`Claims.outbox`."""
        return self._ask("outbox", list[list[Any]], state, number, limit)

    def act(self, query: str, number: int) -> bool:
        """As :meth:`Claims.act`."""
        return self._ask("act", bool, query, number)

    def ring(self) -> None:
        """As :meth:`Claims.ring`."""
        self._tell("ring")

    def listen(self) -> int:
        """As :meth:`Claims.listen`: the bell is told on by the program, through a pipe of ours."""
        if self._bell is None:
            # Both ends stay open here: without a writer the other one would be readable for ever.
            self._bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self.end()  # the next program gets it
        self._tell("listen")
        return self._bell[0]

    def heard(self) -> None:
        """As :meth:`Claims.heard`."""
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell[0], 4096)

    # --- helpers, in the order they are called ------------------------------------------------------------------

    def _tell(self, method: str, *arguments: Any) -> None:
        self._ask(method, type(None), *arguments)

    def _ask(self, method: str, kind: type[_T], *arguments: Any) -> _T:
        deadline = monotonic() + ANSWER_SECONDS
        try:
            if self._socket is None:
                self._start()
                if self._bell is not None and method != "listen":
                    self._exchange("listen", (), deadline)
            answer = self._exchange(method, arguments, deadline)
            fault = answer.fault
            if fault is None:
                self._pause = PAUSE_SECONDS[0]
                return msgspec.msgpack.decode(answer.value, type=kind)
        except (OSError, EOFError, msgspec.MsgspecError, ValueError) as err:
            why = f"no answer within {ANSWER_SECONDS:g} s" if isinstance(err, TimeoutError) else str(err)
            self._broken(slow=isinstance(err, TimeoutError))
            raise InboxUnavailable(f"{self.path}: its reader with the worker's rights failed: {why}") from err
        raise error_of(fault)

    def _start(self) -> None:
        if monotonic() < self._again_at:
            raise InboxUnavailable(f"{self.path}: its reader with the worker's rights failed a moment ago")
        ours, theirs = socket.socketpair()
        try:
            words = [sys.executable, "-I", "-m", __name__, str(theirs.fileno()), str(self._bell_end()), str(self.path)]
            keep = [theirs.fileno(), *(() if self._bell is None else (self._bell[1],))]
            self._child = self._begin(words, keep)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours

    def _bell_end(self) -> int:
        return -1 if self._bell is None else self._bell[1]

    def _exchange(self, method: str, arguments: tuple[Any, ...], deadline: float) -> _Answer:
        assert self._socket is not None  # noqa: S101 - the caller has started it
        return _exchanged(self._socket, (method, arguments), deadline)

    def _broken(self, *, slow: bool) -> None:
        """Ask no more of this program, and start no other one at once: the worker may do it again."""
        self.end()
        self._pause = PAUSE_SECONDS[1] if slow else min(self._pause * 2, PAUSE_SECONDS[1])
        self._again_at = monotonic() + self._pause

    def end(self) -> None:
        """End the program at once, claims and all."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(KernelError):
                ids.send_signal(child.pidfd, signal.SIGKILL)
            ids.is_readable(child.pidfd, PAUSE_SECONDS[0])  # one that hangs in the kernel is left to it
            exits.reap_child(child.pidfd)
            os.close(child.pidfd)


def _exchanged(line: socket.socket, request: Any, deadline: float) -> _Answer:
    message = msgspec.msgpack.encode(request)
    line.settimeout(_left(deadline))
    line.sendall(_LENGTH.pack(len(message)) + message)
    (length,) = _LENGTH.unpack(_received(line, _LENGTH.size, deadline))
    if length > LARGEST_FRAME:
        raise ValueError(f"an answer of {length} bytes")
    return msgspec.msgpack.decode(_received(line, length, deadline), type=_Answer)


def _received(line: socket.socket, count: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while count:
        line.settimeout(None if deadline is None else _left(deadline))
        part = line.recv(min(count, 1 << 16))
        if not part:
            raise EOFError("it ended")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _left(deadline: float) -> float:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError
    return left


# --- the program ------------------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    """Answer what is asked on the socket until it ends; ring on when the file's bell rings."""
    line, bell_fd, path = socket.socket(fileno=int(words[0])), int(words[1]), Path(words[2])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    server = _Server(path)
    poll = select.poll()
    poll.register(line, select.POLLIN)
    heard_fd = -1
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if heard_fd in ready and server.claims is not None:
            server.claims.heard()
            with contextlib.suppress(BlockingIOError):
                os.write(bell_fd, b"!")
        if line.fileno() not in ready:
            continue
        try:
            (length,) = _LENGTH.unpack(_received(line, _LENGTH.size, None))
            method, arguments = msgspec.msgpack.decode(_received(line, length, None), type=tuple[str, list[Any]])
        except (EOFError, OSError):
            os._exit(0)  # as if killed: what was claimed is for the next reader
        answer = server.answered(method, arguments)
        if server.heard_fd != heard_fd:
            heard_fd = server.heard_fd
            poll.register(heard_fd, select.POLLIN)
        encoded = msgspec.msgpack.encode(answer)
        line.sendall(_LENGTH.pack(len(encoded)) + encoded)
        if method == "close" and heard_fd >= 0:
            return  # its bell is closed with it


class _Server:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.claims: Claims | None = None
        self.heard_fd = -1

    def answered(self, method: str, arguments: list[Any]) -> _Answer:
        try:
            if method == "close":
                return self._closed()
            if self.claims is None:
                self.claims = Claims(self._path)
            return _Answer(msgspec.Raw(msgspec.msgpack.encode(self._method(self.claims, method)(*arguments))))
        except EverdeckError as err:
            return _Answer(fault=fault_of(err))
        except Exception as err:  # noqa: BLE001 - a file that is none of ours can make SQLite say anything
            return _Answer(fault=fault_of(InboxUnavailable(f"{self._path}: {type(err).__name__}: {err}")))

    def _closed(self) -> _Answer:
        """The next question opens the file anew: it may be another one by then."""
        if self.claims is not None:
            self.claims.close()
            self.claims = None
        return _Answer()

    def _method(self, claims: Claims, method: str) -> Callable[..., Any]:
        """As it is asked for: without names of arguments, and tuples as lists."""
        asked: dict[str, Callable[..., Any]] = {
            "next_due": lambda: (claims.next_due(),),
            "finish": lambda claim, replies: claims.finish(Claim(*claim), [Put(*one) for one in replies]),
            "fail": lambda claim, error, after: claims.fail(Claim(*claim), error, retry_after=after),
            "hand_back": lambda claim: claims.hand_back(Claim(*claim)),
            "put": lambda puts: claims.put(*(Put(*one) for one in puts)),
            "items": lambda state, number, limit: claims.items(state=state, number=number, limit=limit),
            "outbox": lambda state, number, limit: claims.outbox(state=state, number=number, limit=limit),
            "done": lambda number, limit: claims.done(number=number, limit=limit),
            "state_facts": lambda facts: claims.state_facts(**facts),
            "listen": self._listen,
        }
        return asked.get(method) or getattr(claims, method)

    def _listen(self) -> None:
        if self.claims is not None:
            self.heard_fd = self.claims.listen()


if __name__ == "__main__":
    main(sys.argv[1:])
