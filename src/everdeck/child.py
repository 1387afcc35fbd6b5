"""For workers: leave when the parent dies, say when you are ready, run once.

This file is the worker's side of Everdeck. It stands alone: standard library only, no other module of the
package, and neither asyncio nor threading is loaded unless the program loaded it, so a project that does not
want the dependency can copy it as one file.

    from everdeck.child import lifeline

    async with lifeline():                  # asyncio, trio, anyio: the body is cancelled
        await poll_forever()

    with lifeline():                        # a plain script: the body is interrupted
        poll_forever()

The owner holds the write end of a pipe and never writes; we hold the read end. The kernel closes the write end
however the owner dies, so end-of-file means "the parent is gone" and cannot be missed, forged or delayed by it
(pipe(7), poll(2) POLLHUP). A thread of its own waits for that: it costs no wake-ups, works under every event
loop and under none, and is not held up by a body that blocks.

Without Everdeck (none of the variables below is set) nothing here does harm: there is no lifeline to watch,
:func:`notify` says False, the watchdog has nothing to ping. SIGTERM and SIGINT end the body all the same.
"""

import _thread
import errno
import fcntl
import os
import re
import select
import signal
import stat
import sys
from collections.abc import Awaitable, Callable
from types import FrameType, TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

WORKER_ENV: Final = "EVERDECK_WORKER"
DIR_ENV: Final = "EVERDECK_DIR"
COOKIE_ENV: Final = "EVERDECK_COOKIE"
LAST_END_ENV: Final = "EVERDECK_LAST_END"
SATELLITE_ENV: Final = "EVERDECK_SATELLITE"
LIFELINE_FD_ENV: Final = "EVERDECK_LIFELINE_FD"
NOTIFY_SOCKET_ENV: Final = "NOTIFY_SOCKET"
CREDENTIALS_DIRECTORY_ENV: Final = "CREDENTIALS_DIRECTORY"
PORT_ENV: Final = "PORT"
WATCHDOG_USEC_ENV: Final = "WATCHDOG_USEC"
WATCHDOG_PID_ENV: Final = "WATCHDOG_PID"
RUNTIME_DIR_ENV: Final = "EVERDECK_RUNTIME_DIR"
EVENT_FIELD: Final = "X_EVERDECK_EVENT"

PARENT_DEATH: Final = "parent-death"
ANOTHER_INSTANCE_EXIT_CODE: Final = 2
_NUDGE: Final = signal.SIGURG  # ignored by default, so one that comes too late does no harm
_NUDGE_SECONDS: Final = 0.02
_NUDGES: Final = 50
_ROOM_SECONDS: Final = 0.25
LINGERED_EXIT_CODE: Final = 70

_Result = TypeVar("_Result")


# --- L1: the lifeline -------------------------------------------------------------------------------------------


class LifelineClosed(SystemExit):
    """Raised in the body of ``with lifeline():`` when it is time to leave; the ``with`` swallows it.

    It is a SystemExit with code 0, so ``except Exception`` in the body does not swallow it, and where it
    escapes the ``with`` (a signal may arrive between two instructions of its end) the program leaves quietly.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason


def lifeline(*, interrupt: bool = True, signals: bool = True, linger_seconds: float | None = 5.0) -> "Lifeline":
    """End the body when the parent dies, or on SIGTERM or SIGINT.

    Use it as ``async with`` (the body is cancelled and the cancellation ends at the ``async with``) or as ``with``
    (the body gets :class:`LifelineClosed`, which ends at the ``with``; a blocking system call is interrupted).
    What follows the block runs in both cases: that is the place for a farewell.

    ``interrupt=False`` only tells: look at ``life.closed``, or wait with ``life.wait(timeout)``.
    ``signals=False`` leaves SIGTERM and SIGINT as they are. Outside the main thread Python allows no signal
    handlers and no interruption, so there both are off and the body has to look for itself.

    After the parent's death nobody is left to escalate, so a process that is still there ``linger_seconds``
    later ends itself with exit code 70, whatever it is blocked in. None waits forever.
    """
    return Lifeline(interrupt=interrupt, signals=signals, linger_seconds=linger_seconds)


class Lifeline:
    """What :func:`lifeline` gives: whether it is time to leave, and why. Use once.

    ``reason`` is None, ``"parent-death"``, ``"SIGTERM"`` or ``"SIGINT"``; ``present`` says whether this process
    has a lifeline at all.
    """

    def __init__(self, *, interrupt: bool, signals: bool, linger_seconds: float | None) -> None:
        self.reason: str | None = None
        self.present = False
        self._interrupt = interrupt
        self._signals = signals
        self._linger_seconds = linger_seconds
        self._told_fd = -1
        self._telling = _thread.allocate_lock()  # between the watching thread and the end; no handler takes it
        self._over = False
        self._watch: _Watch | None = None
        self._earlier: dict[signal.Signals, Any] = {}
        self._body: _Body | None = None  # of an async with
        self._main_thread: int | None = None  # of a with whose signals we took; None in any other thread
        self._in_body = False  # of a with that is interrupted
        self._heard_fds = (-1, -1)  # what Python writes to when a signal arrived, whoever runs
        self._swallowed = False
        self._earlier_hook: Callable[[Any], object] | None = None

    @property
    def closed(self) -> bool:
        """It is time to leave."""
        return self.reason is not None

    def fileno(self) -> int:
        """A descriptor that becomes, and stays, readable when it is time to leave."""
        return self._told_fd

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until it is time to leave, or until the timeout; say whether it is time."""
        if self._told_fd >= 0 and not self.closed:
            _readable_within(self._told_fd, timeout_seconds)
        return self.closed

    def __enter__(self) -> Self:
        self._open()
        # SIGTERM is taken even with signals=False: it is how the watching thread interrupts this one.
        numbers = ([signal.SIGTERM] if self._interrupt or self._signals else []) + [signal.SIGINT] * self._signals
        if self._take(numbers):
            self._main_thread = _thread.get_ident()
            self._in_body = self._interrupt
        self._listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            self._in_body = False
        except LifelineClosed:  # the signal came after the body's last instruction and before that line
            self._in_body = False
        self._close()
        return isinstance(error, LifelineClosed)

    async def __aenter__(self) -> Self:
        self._open()
        if self._interrupt:
            self._body = _running_body()
        self._take([signal.SIGTERM, signal.SIGINT] if self._signals else [])
        self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._close()
        return self._body is not None and await self._body.leave(error)

    def _open(self) -> None:
        if self._told_fd >= 0 or self.closed:
            raise RuntimeError("a lifeline is used once: call lifeline() again")
        self._told_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def _take(self, numbers: list[signal.Signals]) -> bool:
        for number in numbers:
            try:
                self._earlier[number] = signal.signal(number, self._signalled)
            except ValueError:  # not the main thread
                return False
        return bool(numbers)

    def _listen(self) -> None:
        fd = _lifeline_fd()
        self.present = fd is not None
        if fd is not None:
            heard_fd = self._hear_of_signals()
            self._watch = _Watch(fd, self._parent_died, self._linger_seconds, heard_fd, self._nudge)

    def _hear_of_signals(self) -> int:
        """Let the watching thread hear of signals that the main thread may sleep through; -1 if it cannot.

        A handler in Python runs between two instructions of the main thread. A signal that arrives when the thread is
        past that point and not yet in its system call, or that the kernel gives to another thread, interrupts
        nothing, and the call may take as long as a long poll. Who is nudged then looks at what has arrived.
        """
        if self._main_thread is None or signal.getsignal(_NUDGE) != signal.SIG_DFL:
            return -1
        try:
            heard_fds = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:  # no descriptors left: then it is as it is without
            return -1
        earlier = signal.set_wakeup_fd(heard_fds[1], warn_on_full_buffer=False)
        if earlier >= 0:  # somebody listens already, an event loop perhaps: then it is theirs
            signal.set_wakeup_fd(earlier, warn_on_full_buffer=False)
            for fd in heard_fds:
                os.close(fd)
            return -1
        signal.signal(_NUDGE, _nothing)
        # Both ends stay open as long as Python may write: a pipe that nobody reads would be a SIGPIPE.
        self._heard_fds = heard_fds
        self._earlier_hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return os.dup(heard_fds[0])

    def _unraisable(self, what: Any) -> None:
        """A finaliser ran when the handler raised, and Python went on as if nothing had been: say it once more."""
        if isinstance(what.exc_value, LifelineClosed) and self._heard_fds[1] >= 0:
            self._swallowed = self._in_body = True
            os.write(self._heard_fds[1], bytes([signal.SIGTERM]))
        elif self._earlier_hook is not None:
            self._earlier_hook(what)

    def _nudge(self) -> bool:
        """Interrupt the system call that the main thread is in, and ask for nothing; False when that is not needed."""
        with self._telling:
            waits = self._in_body or self.reason is None
            if self._over or not waits or self._main_thread is None or signal.getsignal(_NUDGE) != _nothing:
                return False
            signal.pthread_kill(self._main_thread, signal.SIGTERM if self._swallowed else _NUDGE)
            return True

    def _stop_hearing(self) -> None:
        heard_fds, self._heard_fds = self._heard_fds, (-1, -1)
        if heard_fds[1] < 0:
            return
        try:
            current = signal.set_wakeup_fd(-1)
            if current not in (heard_fds[1], -1):  # the body's own event loop, say
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        except (ValueError, OSError):  # the body left one that is closed
            signal.set_wakeup_fd(-1)
        for fd in heard_fds:
            os.close(fd)
        if sys.unraisablehook == self._unraisable and self._earlier_hook is not None:
            sys.unraisablehook = self._earlier_hook
        if signal.getsignal(_NUDGE) == _nothing:
            signal.signal(_NUDGE, signal.SIG_DFL)

    def _close(self) -> None:
        with self._telling:  # from here on the watching thread neither writes nor signals
            self._over = True
            fd, self._told_fd = self._told_fd, -1
            if fd >= 0:
                os.close(fd)
        # Its last signal may be on the way. It is delivered at the end of a system call, and must find our handler
        # in place, not the default action that would end the process in the middle of its farewell.
        signal.sigpending()
        for number, handler in self._earlier.items():
            # A handler that the body put in place is the program's wish; so is one that Python cannot name.
            if handler is not None and signal.getsignal(number) == self._signalled:
                signal.signal(number, handler)
        self._stop_hearing()
        if self._watch is not None:
            self._watch.end()

    def _parent_died(self) -> None:
        with self._telling:
            if self._over:
                return
            self._tell(PARENT_DEATH)
            if self._body is not None:
                self._body.cancel_soon()
            elif self._in_body and self._main_thread is not None:
                # A signal to that very thread also ends the system call it waits in: the handler raises (PEP 475).
                signal.pthread_kill(self._main_thread, signal.SIGTERM)

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        if not self._signals and not self.closed:
            self._pass_on(number)
            return
        if self.closed and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C: a person does not want to wait for the farewell
        self._tell(signal.Signals(number).name)
        if self._body is not None:
            self._body.cancel_soon()
        elif self._in_body:
            self._in_body = self._swallowed = False
            raise LifelineClosed(self.reason or "")

    def _pass_on(self, number: int) -> None:
        """We took SIGTERM only for our own thread's sake; one that comes from outside goes where it used to."""
        earlier = self._earlier[signal.SIGTERM]
        if callable(earlier):
            earlier(number, None)
        elif earlier == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _tell(self, reason: str) -> None:
        self.reason = self.reason or reason
        if self._told_fd >= 0:
            os.eventfd_write(self._told_fd, 1)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """A handler that does nothing: that it runs is the point, because Python then runs what else is due."""


def on_parent_death(callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` once, from a thread of its own, when the parent dies; at once if it is already dead.

    The answer takes the promise back. What the callback raises is reported by ``sys.unraisablehook``.
    Without a lifeline (not started by Everdeck, or an adoptable worker) nothing is ever called.
    """
    fd = _lifeline_fd()
    if fd is None:
        return lambda: None
    return _Watch(fd, callback, None).end


class _Watch:
    """A thread that waits for end-of-file on the lifeline. It owns its descriptors and closes them itself."""

    def __init__(
        self,
        fd: int,
        died: Callable[[], None],
        linger_seconds: float | None,
        heard_fd: int = -1,
        nudge: Callable[[], bool] = lambda: False,
    ) -> None:
        self._end_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._ended = _thread.allocate_lock()
        self._over = False
        self._seen = False
        self._nudge = nudge
        self._pid = os.getpid()
        try:
            _thread.start_new_thread(self._run, (fd, died, linger_seconds, heard_fd))
        except BaseException:
            for one in (self._end_fd, fd, heard_fd):
                if one >= 0:
                    os.close(one)
            raise

    def end(self) -> None:
        """Let the thread leave, unless the parent is dead: then the promise to linger no longer stands."""
        if os.getpid() != self._pid:  # a forked copy has no such thread, and shares the descriptor with who has
            return
        with self._ended:
            if not self._over and not self._seen:
                os.eventfd_write(self._end_fd, 1)

    def _run(self, fd: int, died: Callable[[], None], linger_seconds: float | None, heard_fd: int) -> None:
        # Signals belong to the main thread; if the kernel chose this one, nobody would be interrupted.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._seen = self._closed_before_end(fd, heard_fd)
            if not self._seen:
                return
            died()
            # Without a body that can be nudged there is nothing to do but to wait.
            can_nudge = heard_fd >= 0
            left = linger_seconds if linger_seconds is not None else _NUDGES * _NUDGE_SECONDS * can_nudge
            step = _NUDGE_SECONDS if can_nudge else left
            while left > 0:
                self._nudge()
                select.select([], [], [], min(step, left))
                left -= step
            if linger_seconds is not None:
                os._exit(LINGERED_EXIT_CODE)
        finally:
            with self._ended:
                self._over = True
                os.close(self._end_fd)
            os.close(fd)
            if heard_fd >= 0:
                os.close(heard_fd)

    def _closed_before_end(self, fd: int, heard_fd: int) -> bool:
        # No event is asked for: POLLHUP is reported always, and bytes that are not ours to read stay unread.
        poller = select.poll()
        poller.register(fd, 0)
        poller.register(self._end_fd, select.POLLIN)
        if heard_fd >= 0:
            poller.register(heard_fd, select.POLLIN)
        nudges = 0
        while True:
            ready = dict(poller.poll(_NUDGE_SECONDS * 1000 if nudges else None))
            if self._end_fd in ready:
                return False
            if fd in ready:
                return True
            if heard_fd in ready:
                heard = os.read(heard_fd, 4096)
                if not heard:  # the body is over
                    poller.unregister(heard_fd)
                elif signal.SIGTERM in heard or signal.SIGINT in heard:  # each byte is a signal's number
                    nudges = _NUDGES
            else:
                nudges = nudges - 1 if self._nudge() else 0


def _lifeline_fd() -> int | None:
    """A private copy of the lifeline's descriptor, or None if this process has none.

    A copy, because programs close their stdin, and the number would then come to mean another file. The
    variable is inherited by grandchildren whose stdin is something else, hence the look at the kind of file.
    """
    try:
        fd = int(os.environ[LIFELINE_FD_ENV])
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return None
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    except (KeyError, ValueError, OverflowError):
        return None
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise


def _readable_within(fd: int, seconds: float | None) -> bool:
    # Not select(2), which knows no descriptor above 1023.
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if seconds is None else max(0.0, seconds) * 1000))


class _Body(Protocol):
    """How the body of an ``async with`` is cancelled, and how that cancellation ends there."""

    def cancel_soon(self) -> None: ...

    async def leave(self, error: BaseException | None) -> bool: ...


def _running_body() -> "_Body":
    # A library that runs this coroutine is loaded; one that is not loaded is not asked for.
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        return _TrioBody(trio)
    return _AsyncioBody()


class _AsyncioBody:
    """The current task, cancelled the way ``asyncio.timeout`` does it."""

    def __init__(self) -> None:
        import asyncio  # noqa: PLC0415 - a coroutine runs, so it is loaded; a plain script never comes here

        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("async with lifeline() needs a task")
        self._loop = asyncio.get_running_loop()
        self._task = task
        self._asked_before = task.cancelling()
        self._cancelled = False
        self._left = False

    def cancel_soon(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._cancel_now)
        except RuntimeError:  # the loop is closed: the body is long over
            return

    def _cancel_now(self) -> None:
        if not self._left and not self._cancelled:
            self._cancelled = True
            self._task.cancel("lifeline closed")

    async def leave(self, error: BaseException | None) -> bool:
        import asyncio  # noqa: PLC0415 - as above

        self._left = True
        if not self._cancelled:
            return False
        others_asked_too = self._task.uncancel() > self._asked_before
        if isinstance(error, asyncio.CancelledError):
            return not others_asked_too
        # The body ended before the cancellation reached it. Below Python 3.13 uncancel() does not take back a
        # cancellation on its way, and it would hit whatever the caller awaits next: let it arrive here.
        try:
            await asyncio.sleep(0)  # noqa: TID251 - not a wait: the one point at which asyncio delivers
        except asyncio.CancelledError:
            if others_asked_too:
                raise
        return False


class _TrioBody:
    """A cancel scope around the body."""

    def __init__(self, trio: Any) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._scope = trio.CancelScope()
        self._scope.__enter__()

    def cancel_soon(self) -> None:
        try:
            self._token.run_sync_soon(self._scope.cancel)
        except RuntimeError:  # trio.RunFinishedError: the body is long over
            return

    async def leave(self, error: BaseException | None) -> bool:
        trace = None if error is None else error.__traceback__
        return bool(self._scope.__exit__(None if error is None else type(error), error, trace))


# --- systemd's notify protocol ----------------------------------------------------------------------------------


def notify(*lines: str, **fields: str | int) -> bool:
    """Tell the manager something: ``notify("READY=1", STATUS="42 chats")``. False if nobody heard it.

    It never raises for an absent manager: while the owner is being restarted there is nobody to hear, and a worker
    must not care. It waits for nothing but room in the ear of a busy manager, and for that a quarter of a second
    at most: the kernel queues ten datagrams, and many workers may begin at once. See sd_notify(3) for the names;
    ``READY``, ``STATUS``, ``WATCHDOG``, ``STOPPING`` and ``EXTEND_TIMEOUT_USEC`` are understood here and by systemd
    alike.
    """
    address = os.environ.get(NOTIFY_SOCKET_ENV, "")
    if not address.startswith(("/", "@")):
        return False
    said = [*lines, *(f"{key}={value}" for key, value in fields.items())]
    message = "\n".join(line.replace("\n", " ") for line in said).encode()
    import socket  # noqa: PLC0415 - most workers that import this file never speak

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as speaker:
        speaker.settimeout(_ROOM_SECONDS)
        try:
            # Connected, because only then can the kernel tell when there is room again.
            speaker.connect("\0" + address[1:] if address[0] == "@" else address)
            speaker.send(message)
        except OSError:  # TimeoutError is one
            return False
    return True


def emit(detail: dict[str, Any]) -> bool:
    """Put an event of the worker's own into the deck's event stream; ``detail`` must be JSON. False if unheard."""
    import json  # noqa: PLC0415 - as in notify

    return notify(**{EVENT_FIELD: json.dumps(detail, separators=(",", ":"))})


def watchdog_seconds() -> float | None:
    """How long the manager waits between two pings before it takes us for hung; None if it does not watch."""
    try:
        microseconds = int(os.environ[WATCHDOG_USEC_ENV])
        meant = int(os.environ.get(WATCHDOG_PID_ENV) or os.getpid())
    except (KeyError, ValueError):
        return None
    return microseconds / 1_000_000 if microseconds > 0 and meant == os.getpid() else None


async def watchdog_pings(*, ready: bool = False) -> None:
    """Ping the watchdog from the event loop, at half its time, until cancelled. Returns at once if none watches.

    A loop that hangs stops pinging, which is the point. With ``ready=True`` every ping repeats ``READY=1``:
    the owner may have been dead when it was said first.
    """
    seconds = watchdog_seconds()
    if seconds is None:
        return
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        sleep = trio.sleep
    else:
        import asyncio  # noqa: PLC0415 - a coroutine runs, so it is loaded

        sleep = asyncio.sleep  # noqa: TID251 - a ping is due by the clock, there is no fact to wait for
    while True:
        notify("WATCHDOG=1", *(("READY=1",) if ready else ()))
        await sleep(seconds / 2)


def watchdog_thread(alive: Callable[[], bool] | None = None) -> Callable[[], None]:
    """Ping the watchdog from a thread while ``alive()`` says True; the answer ends it.

    Without ``alive`` the pings prove only that the process exists: give a function that looks at real progress.
    """
    seconds = watchdog_seconds()
    if seconds is None:
        return lambda: None
    end_fd = os.eventfd(0, os.EFD_CLOEXEC)
    lock = _thread.allocate_lock()
    over = False

    def ping() -> None:
        nonlocal over
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while alive is None or alive():
                notify("WATCHDOG=1")
                if _readable_within(end_fd, seconds / 2):
                    return
        finally:
            with lock:
                over = True
                os.close(end_fd)

    def end() -> None:
        with lock:
            if not over:
                os.eventfd_write(end_fd, 1)

    _thread.start_new_thread(ping, ())
    return end


# --- L2: one instance -------------------------------------------------------------------------------------------


def singleton(name: str) -> "Singleton":
    """Be the only process of this user that runs under ``name``, or leave with exit code 2 and a line on stderr.

    The kernel holds the lock as long as this process lives and drops it however it dies (flock(2)), so there is
    no stale file to clean up. A copy started by hand is refused just as one started by a manager is.
    """
    held = Singleton.take(name)
    if held is None:
        holder = Singleton.holder(name)
        who = f"pid {holder}" if holder is not None else "another process"
        sys.stderr.write(f"{name}: another instance is running ({who}); this one leaves\n")
        sys.stderr.flush()
        raise SystemExit(ANOTHER_INSTANCE_EXIT_CODE)
    return held


class Singleton:
    """A lock that says "I am the one". It is held until :meth:`release`, the end of ``with``, or death."""

    def __init__(self, path: str, fd: int, directory_fd: int) -> None:
        self.path = path
        self._fds = [fd, directory_fd]

    @classmethod
    def take(cls, name: str) -> "Singleton | None":
        """The lock, or None if another process has it."""
        path = _lock_path(name)
        # A cleaner of /tmp leaves a directory alone while somebody holds a lock on it (systemd-tmpfiles(8));
        # if it removed the file of a lock in use, a second instance would lock a new file.
        directory_fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # noqa: PTH120 - pathlib would triple this file's imports
        try:
            fcntl.flock(directory_fd, fcntl.LOCK_SH)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except BaseException:
            os.close(directory_fd)
            raise
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            os.close(fd)
            os.close(directory_fd)
            return None
        return cls(path, fd, directory_fd)

    @staticmethod
    def holder(name: str) -> int | None:
        """The pid that the holder wrote down; a hint for people, never something to signal."""
        try:
            with open(_lock_path(name), encoding="ascii") as lock:  # noqa: PTH123 - as above
                return int(lock.read().strip())
        except (OSError, ValueError):
            return None

    def release(self) -> None:
        """Let the next one in."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_RUNTIME_NAMES = 16


def runtime_directory() -> str:
    """This user's directory for locks and sockets that need a short path: ours, not a link, nobody else writes.

    Others may pass through (0711) but not look around: a worker that runs as another user reaches its socket.

    It must be the same for a copy started by hand and for one started by a manager with a clean environment, so
    XDG_RUNTIME_DIR and TMPDIR are not asked. /run/user/UID is ours alone, where there is a login manager that makes it.
    Anybody may make a directory in /tmp, under our name too; then the next name is taken, the same by every copy.
    """
    asked = os.environ.get(RUNTIME_DIR_ENV)
    if asked:
        if not _made_ours(asked):
            raise PermissionError(
                errno.EPERM, "not a directory that only this user can write to; remove it or correct its mode", asked
            )
        return asked
    uid = os.getuid()
    places = ["/run/everdeck"] if uid == 0 else [f"/run/user/{uid}/everdeck"]
    places += [f"/tmp/everdeck-{uid}" + (f".{number}" if number else "") for number in range(_RUNTIME_NAMES)]  # noqa: S108 - each is checked for its owner and mode
    # One that is there before one that could be: /run/user/UID comes and goes with logins, and copies must agree.
    for path in (*filter(_is_ours, places), *places):
        if _made_ours(path):
            return path
    raise PermissionError(errno.EPERM, "nowhere to put locks and sockets; set EVERDECK_RUNTIME_DIR", places[-1])


def _made_ours(path: str) -> bool:
    """Is this a directory of ours that nobody else can write to, made now if there was none?"""
    try:
        os.mkdir(path, 0o711)  # noqa: PTH102 - as above
    except FileExistsError:
        return _is_ours(path)
    except OSError:
        return False
    return True


def _is_ours(path: str) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _lock_path(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9._\-@:+]{1,128}", name, re.ASCII) is None:
        raise ValueError(f"singleton name {name!r}: expected 1-128 characters of A-Z a-z 0-9 . _ - @ : +")
    return f"{runtime_directory()}/{name}.lock"


# --- all of it --------------------------------------------------------------------------------------------------


def main(
    async_function: Callable[[], Awaitable[_Result]],
    *,
    name: str | None = None,
    ready: bool = True,
    linger_seconds: float | None = 5.0,
) -> _Result | None:
    """Run a worker: one instance (if ``name`` is given), lifeline, signals, ``READY=1``, watchdog, ``STOPPING=1``.

    The answer is what the function returned, or None if it was told to leave. ``ready=False`` leaves it to the
    function to say ``notify("READY=1")`` when it really is.
    """
    import asyncio  # noqa: PLC0415 - main() is the async way in; the rest of this file does without

    async def run() -> _Result | None:
        result: _Result | None = None
        async with lifeline(linger_seconds=linger_seconds):
            if ready:
                notify("READY=1")
            pings = asyncio.ensure_future(watchdog_pings(ready=ready))
            try:
                result = await async_function()
            finally:
                pings.cancel()
                notify("STOPPING=1")
        return result

    if name is None:
        return asyncio.run(run())
    with singleton(name):
        return asyncio.run(run())
