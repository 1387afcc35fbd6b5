"""The blocking end of ``deck.sock`` for a command line: it starts in a few milliseconds, because no loop is loaded.

>>> with WireClient("state") as owner:
...     owner.ask(requests.Status("alice")).state
'running'
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec

from everdeck.errors import ClientError, NoOwner
from everdeck.faults import error_of
from everdeck.kernel import flock, unixsocket
from everdeck.statedir import SOCKET, StateDir
from everdeck.verbs import Caller
from everdeck.wire import frames
from everdeck.wire.frames import Answer, Answered, Ask, Asked, Cutter, Hello, Item, More, Refused, Welcome
from everdeck.wire.requests import Stream, Verb, decoder

if TYPE_CHECKING:
    import socket

    from everdeck.kernel.vacancy import Vacancy

PATIENCE_SECONDS: Final = 3.0
"""How long an owner that has the deck's lock may take to serve its socket."""
_READ_BYTES: Final = 1 << 18
_REFILL: Final = frames.WINDOW // 2
_Answer = TypeVar("_Answer")


class WireClient:
    """The owner of one deck, as a program sees it that only wants to ask.

    A verb that acts is asked again when its owner dies and another one answers within ``patience_seconds``: the request
    id makes it one act. Raises :class:`NoOwner` when nobody owns the deck. ``caller`` is for whom it asks, if not for
    itself.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        *,
        timeout_seconds: float | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        program: str = "everdeck",
        caller: Caller | None = None,
    ) -> None:
        self._state = StateDir.at(state_dir)
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._program = program
        self._caller = caller
        self._connection: socket.socket | None = None
        self._cutter = Cutter(frames.MOST_ANSWERED_BYTES)
        self._bodies: list[bytes] = []
        self._number = 0
        self.owner: Welcome | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> Welcome:
        """Reach the owner now; says who it is."""
        deadline = time.monotonic() + self._patience_seconds
        vacancy: Vacancy | None = None
        with contextlib.ExitStack() as watching:
            while True:
                try:
                    return self._reached()
                except (NoOwner, ClientError) as refusal:
                    self.close()
                    if not flock.is_held(self._state.lock):
                        raise NoOwner(f"no owner is running for {self._state.path}") from refusal
                    if (left := deadline - time.monotonic()) <= 0:
                        raise  # somebody owns it: what keeps it from answering is told as it is
                if vacancy is None:  # and look once more: from now on it is heard
                    vacancy = watching.enter_context(contextlib.closing(_vacancy_of(self._state.path)))
                else:
                    vacancy.wait(left)

    def _reached(self) -> Welcome:
        if self.owner is None:
            self._connect()
        assert self.owner is not None  # noqa: S101 - it welcomed us
        return self.owner

    def close(self) -> None:
        """Hang up."""
        connection, self._connection, self.owner = self._connection, None, None
        self._cutter = Cutter(frames.MOST_ANSWERED_BYTES)
        self._bodies.clear()
        if connection is not None:
            connection.close()

    def ask(self, verb: Verb[_Answer], tell: Callable[[Any], None] | None = None) -> _Answer:
        """The answer, or the error as the owner raised it; ``tell`` hears of progress."""
        request = os.urandom(16).hex() if verb.deed is not None else None
        while True:
            self.connect()
            try:
                return self._asked(verb, request, tell)
            except _Vanished as vanished:
                self.close()
                try:
                    self.connect()
                except NoOwner:
                    raise ClientError(
                        f"the owner of {self._state.path} went away before it answered; what it had done is recorded: "
                        f"look with `everdeck ps`, and start it with `everdeck up`"
                    ) from vanished

    def stream(self, verb: Stream[_Answer]) -> Iterator[_Answer]:
        """Each item as it comes; ends with :class:`ClientError` when the owner goes."""
        self.connect()
        number = self._send_ask(verb, None)
        item_of, taken = decoder(verb.items).decode, 0
        try:
            while True:
                match frame := self._frame():
                    case Item(of, value) if of == number:
                        yield item_of(value)
                        taken += 1
                        if taken == _REFILL:
                            self._send(More(number, taken))
                            taken = 0
                    case Answer(of) if of == number:
                        return
                    case Refused():
                        raise error_of(frame.fault)
        finally:
            self.close()  # items that are on their way would be taken for answers of the next question

    def _asked(self, verb: Verb[_Answer], request: str | None, tell: Callable[[Any], None] | None) -> _Answer:
        number = self._send_ask(verb, request)
        while True:
            match self._frame():
                case Answer(of, value) if of == number:
                    answer: _Answer = decoder(verb.answers).decode(value)
                    return answer
                case Refused(of, fault) if of in {number, 0}:
                    raise error_of(fault)
                case Item(of, value) if of == number and tell is not None:
                    tell(decoder(verb.items).decode(value))
                case _:
                    pass

    def _send_ask(self, verb: Verb[Any], request: str | None) -> int:
        self._number += 1
        self._send(Ask(self._number, frames.raw(verb), request, self._caller))
        return self._number

    def _connect(self) -> None:
        try:
            self._connection = unixsocket.connect(Path(self._state.path), SOCKET, self._timeout_seconds)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            raise NoOwner(f"no owner is running for {self._state.path}") from error
        except OSError as error:
            raise ClientError(f"cannot reach the owner of {self._state.path}: {error.strerror}") from error
        self._send(Hello(frames.VERSION, self._program))
        while self.owner is None:
            frame = self._frame()
            if isinstance(frame, Welcome):
                self.owner = frame
            elif isinstance(frame, Refused):
                raise error_of(frame.fault)

    def _send(self, frame: Asked) -> None:
        assert self._connection is not None  # noqa: S101 - connected before anything is sent
        try:
            self._connection.sendall(frames.packed(frame))
        except OSError as error:
            raise _Vanished("the owner went away") from error

    def _frame(self) -> Answered:
        assert self._connection is not None  # noqa: S101 - as above
        while not self._bodies:
            try:
                data = self._connection.recv(_READ_BYTES)
            except TimeoutError as error:
                raise ClientError(
                    f"the owner of {self._state.path} did not answer within {self._timeout_seconds:g} s"
                ) from error
            except OSError as error:
                raise _Vanished("the owner went away") from error
            if not data:
                raise _Vanished("the owner went away")
            self._bodies.extend(self._cutter.feed(data))
        try:
            frame: Answered = frames.decode_answered(self._bodies.pop(0))
        except msgspec.MsgspecError as error:
            raise ClientError(f"the owner of {self._state.path} speaks another language: {error}") from error
        return frame


def _vacancy_of(state_dir: Path) -> "Vacancy":
    from everdeck.kernel.vacancy import Vacancy  # noqa: PLC0415 - needed only while an owner comes or goes

    return Vacancy(state_dir)


class _Vanished(ClientError):
    """The connection ended."""
