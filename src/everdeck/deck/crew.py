"""The part of a start that needs no Python, done beside the loop: a thread calls, the loop prepares the next one.

Between its birth and its exec a process keeps whoever started it waiting (vfork(2)), for a quarter of a millisecond in
which an interpreter has nothing to do. So the starts of a group are made ready by the loop one after another, called by
this thread with the interpreter's lock released, and what came of them is taken by the loop again: locks, crash points
and records stay where they are.

First starts are handed to it several in one call, which makes their files too, and the loop is everybody's meanwhile.

It keeps nothing of what it is handed: a thread that could not be started, or is gone, costs time and no
start. All signals are blocked in it, because a handler of the host belongs to the host's own threads.
"""

import asyncio
import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

_LOOK_SECONDS: Final = 1.0  # only a thread that died makes anybody wait so long

Done: TypeAlias = queue.SimpleQueue[Any]
"""Where the calls of one group arrive when they are over."""


class Crew:
    """One thread, or ``hands`` of them, each started with a call that finds it missing.

    What one thread is given is done in that order; several make no promise.
    """

    def __init__(self, hands: int = 1) -> None:
        self._hands = hands
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], object, Done] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def give(self, call: Callable[[], None], token: object, done: Done) -> None:
        """Have it called soon; the token arrives at ``done`` afterwards."""
        self._calls.put((call, token, done))
        if len(self._threads) < self._hands:
            thread = threading.Thread(target=self._run, name="everdeck-spawn", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads allowed: see take()
                thread.start()
                self._threads.append(thread)

    def take(self, done: Done) -> Any:
        """The next token that arrives; what nobody calls is called here."""
        while True:
            try:
                if self._threads:
                    return done.get(timeout=_LOOK_SECONDS)
                return done.get_nowait()
            except queue.Empty:
                self._fill_in()

    def begin(self, call: Callable[[], None]) -> "asyncio.Future[None]":
        """Have it called soon; the future is done when it is over, so others may have the loop until then."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def told() -> None:
            if not over.done():
                over.set_result(None)

        def then_tell() -> None:
            try:
                call()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(told)

        self.give(then_tell, None, Done())
        return over

    async def outlasted(self, over: "asyncio.Future[None]") -> BaseException | None:
        """Return when it is done, not before: what is born by then has to be recorded. Tells if we were cancelled."""
        interrupted: BaseException | None = None
        while not over.done():
            self._fill_in()
            try:
                await asyncio.wait([over], timeout=_LOOK_SECONDS)
            except asyncio.CancelledError as err:
                interrupted = err
        return interrupted

    def close(self) -> None:
        """End the threads, after what they were given."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while (given := self._calls.get()) is not None:
            _carry_out(*given)

    def _fill_in(self) -> None:
        """If none of them lives, do here what they left; the next call starts another one."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if self._threads:
            return
        with contextlib.suppress(queue.Empty):
            while (given := self._calls.get_nowait()) is not None:
                _carry_out(*given)


def processors() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0))


def _carry_out(call: Callable[[], None], token: object, done: Done) -> None:
    try:
        with contextlib.suppress(Exception):  # whoever asks for the child hears of it
            call()
    finally:
        done.put(token)
