"""Keep every worker's log within its size, and hand lines to whoever listens.

The worker writes its log itself, so nobody tells us when it has grown. One inotify descriptor does, for all workers:
a watch is armed for one event only, so a writer of a million lines wakes us once. After that we look at the file's
size, at times chosen from how fast it grew, until it is silent again; then the watch is armed anew. A silent worker
costs no wake-up, no timer and no descriptor.

All logs together have a budget and a floor of free space (:mod:`everdeck.logs.room`), which is looked at while logs
are written and after rotations.

The rotation itself (:mod:`everdeck.logs.files`) runs in one thread beside the loop, and between two rotations that
thread compresses archives that are ten seconds old, a mebibyte at a time and at a third of a core. It is started by
the first log that needs it.

Where the user's inotify limits are used up, the workers without a watch are looked at when the deck wakes up anyway
(:meth:`LogKeeper.poke`) and every ten seconds; that is said once.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from everdeck.clock import Clock
from everdeck.kernel import inotify
from everdeck.logs import files as logfiles
from everdeck.logs import ledger as logledger
from everdeck.logs import reader as logreader
from everdeck.logs import room as logroom
from everdeck.logs.files import Method, Rotation
from everdeck.logs.ledger import BUSY, CURRENT, STDERR
from everdeck.logs.reader import Follower, Line
from everdeck.logs.room import Freed
from everdeck.model import Log, LogRoom

_log: Final = logging.getLogger("everdeck.logs")

_QUICK_LOOK_SECONDS: Final = 0.05  # after a silence: is this the first of many lines, or the only one?
_SLOW_LOOK_SECONDS: Final = 0.5  # the longest we stay away from a log that is being written
_FASTEST_LOOK_SECONDS: Final = 0.002
_STALLED_LOOK_SECONDS: Final = 10.0  # a rotation failed (disk full): when to try again
_UNWATCHED_LOOK_SECONDS: Final = 10.0
_REPORT_SECONDS: Final = 1.0
_AT_ONCE: Final = 16  # logs that are taken up in one turn of the loop: one to two milliseconds
_ROOM_SECONDS: Final = 0.25  # between two looks at the free space, while logs are written
_BUDGET_SECONDS: Final = 10.0  # between two counts of all logs, while some are rotated
_CUT: Final = Log(max_bytes=1 << 16, keep=0)  # no archive is left to go: of a log that grows this much stays
_INDEX_SECONDS: Final = 1.0  # between two entries of the time index …
_INDEX_BYTES: Final = 4096  # … if this much was written; a log that grows more slowly gets an entry
_INDEX_SLOW_SECONDS: Final = 10.0  # … this often, or the index would be as large as the log
_WAKE_SLACK_SECONDS: Final = 1.0  # by how much a first write may precede our hearing of it


# --- reading, for a loop ----------------------------------------------------------------------------------------


async def read(
    log_dir: Path,
    *,
    lines: int | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    grep: str | None = None,
    colour: bool = False,
) -> list[str]:
    """As :func:`everdeck.logs.reader.read`, in a thread."""

    def all_of_them() -> list[str]:
        return list(logreader.read(log_dir, lines=lines, since=since, until=until, grep=grep, colour=colour))

    return await asyncio.to_thread(all_of_them)


async def follow(log_dir: Path, *, lines: int = 0, grep: str | None = None, colour: bool = False) -> AsyncIterator[str]:
    """The last ``lines`` of a log and then every new one, until the log is removed or the caller leaves."""
    async with contextlib.aclosing(follow_many({"": log_dir}, lines=lines, grep=grep, colour=colour)) as found:
        async for line in found:
            yield line.text


async def follow_many(
    logs: Mapping[str, Path], *, lines: int = 0, grep: str | None = None, colour: bool = False
) -> AsyncGenerator[Line, None]:
    """The same for several logs; each line says whose it is."""
    with Follower(grep=grep, colour=colour) as follower:
        for name, log_dir in logs.items():
            follower.add(name, log_dir, lines=lines)
        async with contextlib.aclosing(bundles(follower)) as found:
            async for bundle in found:
                for line in bundle:
                    yield line


async def bundles(
    follower: Follower,
    *,
    limit: int = 200,
    idle_seconds: float | None = None,
    woken: asyncio.Event | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[list[Line], None]:
    """What a follower finds, as it comes, until none of its logs is left: the one loop that waits for log lines.

    An empty bundle tells of ``idle_seconds`` of silence. Whoever wants it to end earlier lets ``is_over`` be true and
    sets ``woken``.
    """
    loop = asyncio.get_running_loop()
    changed = woken or asyncio.Event()
    spoke = loop.time()
    listening = follower.fileno()
    if listening >= 0:
        loop.add_reader(listening, changed.set)
    try:
        while follower.names and not is_over():
            changed.clear()
            found = follower.ready(limit=limit)
            if found or (idle_seconds is not None and loop.time() - spoke >= idle_seconds):
                yield found
                spoke = loop.time()
            if listening >= 0 and follower.fileno() < 0:  # the last watch was refused: it closed the descriptor
                loop.remove_reader(listening)
                listening = -1
            if follower.unread:
                await asyncio.sleep(0)  # noqa: TID251 - no wait: others get their turn while we catch up
                continue
            idle_left = None if idle_seconds is None else spoke + idle_seconds - loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_left if listening >= 0 else logreader.POLL_SECONDS):
                    await changed.wait()
    finally:
        if listening >= 0:
            loop.remove_reader(listening)


# --- keeping logs within their size -----------------------------------------------------------------------------


class Armed(NamedTuple):
    """A watch for one write to a log, and where the log ended when it was armed."""

    watch: int
    position: int


class LogKeeper:
    """Rotates the logs of all workers of a deck, woken by what they write.

    ``on_rotated(name, detail)`` is called in the loop, at most once per second and worker.
    """

    def __init__(
        self,
        on_rotated: Callable[[str, dict[str, Any]], None],
        clock: Clock | None = None,
        *,
        compress_after_seconds: float = 10.0,
        room: LogRoom | None = None,
        workers_dir: Path | None = None,
    ) -> None:
        self._on_rotated = on_rotated
        self._room = room or LogRoom()
        self._workers_dir = workers_dir
        self._room_looked_at = self._counted_at = self._nothing_to_give_until = _NEVER
        self._making_room = False
        self._clock = clock or Clock()
        self._compress_after_seconds = compress_after_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inotify = -1
        self._logs: dict[str, _Watched] = {}
        self._soon: dict[str, tuple[Path | str, Log]] = {}
        self._armed: dict[int, _Watched] = {}
        self._expected = 0
        self._early: set[int] = set()  # watches that were heard of before they were known
        self._unwatched: dict[_Watched, None] = {}
        self._unwatched_timer: asyncio.TimerHandle | None = None
        self._poked_at = 0.0
        self._looks: list[tuple[float, int, _Watched]] = []
        self._look_number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._hand: _RotatingHand | None = None
        self._reports = _Reports(self._report)
        self._said: set[str] = set()

    def open(self) -> None:
        """Begin; call it inside the running loop."""
        self._loop = self._reports.loop = asyncio.get_running_loop()
        try:
            self._inotify = inotify.open_inotify()
        except inotify.Exhausted as err:
            self._say_exhausted(err)
        else:
            self._loop.add_reader(self._inotify, self._hear)
        self._mind_room(rotated=True)

    def watch_soon(self, name: str, log_dir: Path | str, policy: Log) -> None:
        """As :meth:`watch`, in one of the next turns of the loop: a thousand logs at once delay nobody who waits."""
        self.unwatch(name)
        assert self._loop is not None  # noqa: S101 - it is open
        if not self._soon:
            self._loop.call_soon(self._watch_some)
        self._soon[name] = (log_dir, policy)

    def _watch_some(self) -> None:
        for name in list(itertools.islice(self._soon, _AT_ONCE)):
            self.watch(name, *self._soon[name])
        if self._soon and self._loop is not None:
            self._loop.call_soon(self._watch_some)

    @property
    def inotify_fd(self) -> int:
        """Where whoever makes a log may arm a watch for its first write; below 0: there is none."""
        return self._inotify

    def expect(self, more: int) -> None:
        """So many more watches are being armed elsewhere, or fewer; one may be heard of before it is known here."""
        self._expected += more
        if self._expected <= 0:
            self._early.clear()

    def watch(self, name: str, log_dir: Path | str, policy: Log, armed: Armed | None = None) -> None:
        """Keep the log of ``name`` within ``policy`` from now on; also one written by a worker of an earlier owner.

        Of a log that was made just now the watch may be ``armed`` already: nobody has written to it before that.
        """
        self.unwatch(name)
        watched = _Watched(name, str(log_dir), policy)
        if armed is None or policy.max_age_seconds:
            self._watch(name, watched)
        else:
            self._watch_armed(name, watched, armed)
        if policy.split_stderr:
            self._watch(_stderr(name), _Watched(name, f"{log_dir}/{STDERR}", policy))

    def unwatch(self, name: str) -> None:
        """Leave the log of ``name`` alone. On return its directory may be removed."""
        self._soon.pop(name, None)
        for key in (name, _stderr(name)):
            watched = self._logs.pop(key, None)
            if watched is None:
                continue
            watched.gone = True
            self._disarm(watched)
            self._unwatched.pop(watched, None)
            if self._hand is not None:
                self._hand.let_go(watched)

    def poke(self) -> None:
        """The deck is awake anyway: look at the logs that have no watch. Nothing to do where inotify works."""
        if self._unwatched and self._now() - self._poked_at >= 1.0:
            self._look_at_unwatched()

    def close(self) -> None:
        """Stop looking. A rotation that is under way is finished first, so that the deck's lock still covers it."""
        for watched in self._logs.values():
            watched.gone = True
        if self._timer is not None:
            self._timer.cancel()
        if self._unwatched_timer is not None:
            self._unwatched_timer.cancel()
        if self._hand is not None:
            self._hand.close()
            self._collect()
            self._hand = None
        self._reports.close()
        if self._inotify >= 0 and self._loop is not None:
            self._loop.remove_reader(self._inotify)
            os.close(self._inotify)
            self._inotify = -1
        self._soon.clear()
        self._logs.clear()
        self._armed.clear()
        self._unwatched.clear()
        self._looks.clear()

    # -- hearing

    def _watch_armed(self, key: str, watched: "_Watched", armed: Armed) -> None:
        self._logs[key] = watched
        watched.watch, watched.position = armed
        watched.looked_at = self._now() - _SLOW_LOOK_SECONDS
        if armed.watch in self._early:
            self._early.discard(armed.watch)
            watched.watch = -1
            self._look(watched, woken=True)
        else:
            self._armed[armed.watch] = watched

    def _watch(self, key: str, watched: "_Watched") -> None:
        self._logs[key] = watched
        found = watched.stat()
        if found is None:
            return
        # The ledger is read at the first look: most logs have none, and most workers are silent.
        watched.position = found.st_size
        # As if after a silence: the first line of a worker may be the first of many.
        watched.looked_at = self._now() - _SLOW_LOOK_SECONDS
        if os.path.exists(f"{watched.log_dir}/{BUSY}"):  # noqa: PTH110 - at ten thousand workers
            self._rotate(watched)
        # Holes do not count: what is allocated tells whether it is worth a look, and the look is exact.
        elif min(found.st_size, found.st_blocks * 512) >= watched.policy.max_bytes or watched.policy.max_age_seconds:
            self._look_later(watched, self._now())
        else:
            self._arm(watched)

    def _arm(self, watched: "_Watched") -> bool:
        """Ask the kernel for one event at the next write; whether it took the order."""
        if self._inotify < 0:
            self._leave_unwatched(watched)
            return False
        try:
            watched.watch = inotify.add_watch(self._inotify, watched.current, inotify.MODIFY | inotify.ONESHOT)
        except inotify.Exhausted as err:
            self._say_exhausted(err)
            self._leave_unwatched(watched)
            return False
        except OSError:  # removed: there is nothing to keep
            return False
        self._armed[watched.watch] = watched
        self._unwatched.pop(watched, None)
        return True

    def _disarm(self, watched: "_Watched") -> None:
        if watched.watch >= 0:
            if self._armed.pop(watched.watch, None) is not None and self._inotify >= 0:
                inotify.remove_watch(self._inotify, watched.watch)
            watched.watch = -1

    def _hear(self) -> None:
        for watch, mask in inotify.heard(self._inotify):
            if mask & inotify.OVERFLOW:
                # Events were dropped, and with them the order for one more: look at everybody once.
                now = self._now()
                for watched in list(self._armed.values()):
                    self._disarm(watched)
                    self._look_later(watched, now)
                continue
            watched_or_none = self._armed.pop(watch, None)
            if watched_or_none is not None:
                watched_or_none.watch = -1
                self._look(watched_or_none, woken=True)
            elif self._expected > 0 and mask & inotify.MODIFY:
                self._early.add(watch)
        self.poke()

    # -- looking

    def _look(self, watched: "_Watched", *, woken: bool = False) -> None:
        """See how far a log has come, and decide when to look again: after an event, after a while, or never."""
        if watched.gone or watched.in_hand:
            return
        now = self._now()
        before, looked_at = watched.position, watched.looked_at
        found = watched.stat()
        if found is None:
            return
        if watched.ledger is None:  # the first look: until now only the size was known
            before = self._position(watched, before)
        position = self._position(watched, found.st_size)
        watched.position, watched.looked_at = position, now
        if position != before:
            self._mind_room(watched)
            self._note(watched, before, position, now, silent_since=looked_at if woken else None)
        ledger = watched.ledger or _NEVER_ROTATED
        waiting = position - ledger.head
        emptied = found.st_size < ledger.head - ledger.base  # by hand: the ledger has to hear of it
        age_left = self._age_left(watched) if waiting > 0 else None
        if emptied or waiting >= watched.policy.max_bytes or (age_left is not None and age_left <= 0):
            self._rotate(watched)
        elif woken:
            was_silent = now - looked_at >= _SLOW_LOOK_SECONDS
            self._look_later(watched, now + (_QUICK_LOOK_SECONDS if was_silent else _SLOW_LOOK_SECONDS))
        elif position > before and looked_at:
            rate = (position - before) / max(now - looked_at, 1e-6)
            full_in = 0.7 * (watched.policy.max_bytes - waiting) / rate
            self._look_later(watched, now + min(max(full_in, _FASTEST_LOOK_SECONDS), _SLOW_LOOK_SECONDS))
        elif self._arm(watched) and (found := watched.stat()) and self._position(watched, found.st_size) != position:
            # Written between the look and the order: no event will tell.
            self._disarm(watched)
            self._look_later(watched, now + _QUICK_LOOK_SECONDS)
        elif age_left is not None:
            self._look_when_old(watched, now + age_left + 0.001)

    def _position(self, watched: "_Watched", size: int) -> int:
        ledger = watched.ledger
        if ledger is None:
            ledger = logledger.load(watched.log_dir)
            watched.ledger = ledger = ledger if ledger.number else _NEVER_ROTATED
        return (ledger.base if size >= ledger.head - ledger.base else ledger.head) + size

    def _age_left(self, watched: "_Watched") -> float | None:
        if watched.policy.max_age_seconds is None:
            return None
        wall = self._clock.wall()
        ledger = watched.ledger or _NEVER_ROTATED
        since = ledger.rotated_at or logfiles.first_noted(Path(watched.log_dir)) or wall
        return since + watched.policy.max_age_seconds - wall

    def _note(self, watched: "_Watched", before: int, position: int, now: float, *, silent_since: float | None) -> None:
        """Enter into the time index that the log has reached ``position``."""
        wall = self._clock.wall()
        entries = []
        if silent_since is not None:
            # It ended at `before` until the write that woke us, which was a moment ago.
            entries.append((max(wall - _WAKE_SLACK_SECONDS, wall - (now - silent_since)), before))
        grown = position - watched.noted_position
        if now - watched.noted_at >= (_INDEX_SECONDS if grown >= _INDEX_BYTES else _INDEX_SLOW_SECONDS):
            watched.noted_at, watched.noted_position = now, position
            logfiles.note(watched.log_dir, [*entries, (wall, position)])

    def _look_later(self, watched: "_Watched", when: float) -> None:
        if when - self._now() >= _SLOW_LOOK_SECONDS / 2:
            when = (when // 0.1 + 1) * 0.1  # many logs, few wake-ups
        watched.look_at = when
        self._look_number += 1
        heapq.heappush(self._looks, (when, self._look_number, watched))
        self._set_timer()

    def _look_when_old(self, watched: "_Watched", when: float) -> None:
        """Beside the next look: the same moment until the next rotation, so it is entered once."""
        if abs(watched.old_at - when) > 1.0:
            watched.old_at = when
            self._look_number += 1
            heapq.heappush(self._looks, (when, self._look_number, watched))
            self._set_timer()

    def _set_timer(self) -> None:
        if not self._looks or self._loop is None:
            return
        when = self._looks[0][0]
        if self._timer is not None:
            if not self._timer.cancelled() and self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._look_at_due)

    def _look_at_due(self) -> None:
        self._timer = None
        now = self._now() + _FASTEST_LOOK_SECONDS / 2
        for _ in range(500):  # then others get their turn
            if not self._looks or self._looks[0][0] > now:
                break
            when, _number, watched = heapq.heappop(self._looks)
            if watched.gone or when not in (watched.look_at, watched.old_at):
                continue
            if when == watched.old_at:
                watched.old_at = 0.0
            self._disarm(watched)
            self._look(watched)
        self._set_timer()

    def _now(self) -> float:
        if self._loop is None:
            raise RuntimeError("LogKeeper.open() was not called")
        return self._loop.time()

    # -- without inotify

    def _leave_unwatched(self, watched: "_Watched") -> None:
        self._unwatched[watched] = None
        if self._unwatched_timer is None and self._loop is not None:
            self._unwatched_timer = self._loop.call_later(_UNWATCHED_LOOK_SECONDS, self._look_at_unwatched)

    def _look_at_unwatched(self) -> None:
        if self._unwatched_timer is not None:
            self._unwatched_timer.cancel()
            self._unwatched_timer = None
        self._poked_at = now = self._now()
        waiting, self._unwatched = self._unwatched, {}
        for watched in waiting:
            self._look_later(watched, now)

    def _say_exhausted(self, err: OSError) -> None:
        self._say(
            "inotify",
            f"inotify is used up ({err.strerror}): logs without a watch are looked at every "
            f"{_UNWATCHED_LOOK_SECONDS:.0f} s instead of when they are written; "
            "raise fs.inotify.max_user_watches or fs.inotify.max_user_instances",
        )

    def _say(self, subject: str, text: str) -> str | None:
        """Warn once per subject."""
        if subject in self._said:
            return None
        self._said.add(subject)
        _log.warning("%s", text)
        return text

    # -- rotating

    def _rotate(self, watched: "_Watched") -> None:
        if self._loop is not None:
            watched.in_hand = True
            self._the_hand().take(watched)

    def _the_hand(self) -> "_RotatingHand":
        if self._hand is None:
            assert self._loop is not None  # noqa: S101 - whoever asks has looked

            def make_room() -> Freed:
                return Freed() if self._workers_dir is None else logroom.make_room(self._room, self._workers_dir)

            compress_after = self._compress_after_seconds
            self._hand = _RotatingHand(self._loop, self._clock, self._collect, make_room, compress_after)
        return self._hand

    def _collect(self) -> None:
        """Back in the loop: see what the hand has done."""
        while self._hand is not None and self._hand.freed:
            self._room_made(self._hand.freed.popleft())
        while self._hand is not None and self._hand.done:
            self._rotated(*self._hand.done.popleft())

    def _rotated(self, watched: "_Watched", rotation: Rotation | None, error: Exception | None) -> None:
        watched.in_hand = False
        if rotation is not None:
            self._said.discard(f"failed {watched.name}")
            self._reports.add(watched.name, rotation, watched.cut or self._warning(watched, rotation))
            self._mind_room(rotated=True)
        watched.cut = ""
        if watched.gone:
            return
        first = watched.ledger is None
        watched.ledger = None
        size = found.st_size if (found := watched.stat()) else 0
        position = self._position(watched, size)
        if first:
            watched.position = position
        if error is not None:
            self._say(
                f"failed {watched.name}",
                f"the log of {watched.name!r} cannot be rotated: {error}; it stays as it is and is tried again",
            )
            self._look_later(watched, self._now() + _STALLED_LOOK_SECONDS)
            return
        if rotation is None:
            # Nothing could be done yet (less than a block, or somebody holds the lock): not at once again.
            self._look_later(watched, self._now() + _SLOW_LOOK_SECONDS)
            return
        self._look(watched)

    # -- room for all of them

    def make_room(self) -> None:
        """The disk is full: let the oldest archives go now, whatever was looked at a moment ago."""
        if self._workers_dir is not None and self._loop is not None and not self._making_room:
            self._making_room = True
            self._the_hand().make_room()

    def _mind_room(self, grown: "_Watched | None" = None, *, rotated: bool = False) -> None:
        """Look whether the logs together are too large: at the free space often, at their sum after rotations."""
        if self._workers_dir is None or self._making_room:
            return
        now = self._now()
        if now - self._room_looked_at < _ROOM_SECONDS:
            return
        if now < self._nothing_to_give_until and (grown is None or not _can_be_cut(grown)):
            return
        self._room_looked_at = now
        try:
            short = logroom.space(self._room, self._workers_dir).short_bytes > 0
        except OSError:
            return
        if self._room.budget_bytes is not None and rotated and now - self._counted_at >= _BUDGET_SECONDS:
            self._counted_at = now
            short = True
        if short:
            self.make_room()

    def _room_made(self, freed: Freed) -> None:
        """Back in the loop: tell what went. Where that was not enough the logs that grow are cut, the largest first."""
        self._making_room = False
        for name, pruned in freed.pruned.items():
            told = f"{freed.why}: the oldest archives of all logs were removed"
            self._report(name, {"archives": [], "bytes": 0, "pruned": pruned[-20:], "warning": told})
        if freed.pruned:
            count = sum(len(pruned) for pruned in freed.pruned.values())
            _log.warning(
                "%s: the %d oldest archives of the logs of %d workers went", freed.why, count, len(freed.pruned)
            )
        short, cut = freed.short_bytes, False
        for watched in sorted(self._logs.values(), key=_waiting, reverse=True):
            if short <= 0 or not _can_be_cut(watched):
                break
            if not watched.in_hand:
                short -= _waiting(watched)
                cut = True
                watched.cut = f"{freed.why}, and no archive is left to remove"
                self._disarm(watched)
                self._rotate(watched)
        if freed.short_bytes and not cut and not freed.pruned:
            # Somebody else fills the disk, and logs have nothing left to give: looking at all of them again can wait.
            self._nothing_to_give_until = self._now() + _STALLED_LOOK_SECONDS

    def _warning(self, watched: "_Watched", rotation: Rotation) -> str | None:
        if rotation.method is not Method.TRUNCATE:
            return None
        return self._say(
            f"truncate {watched.name}",
            f"the filesystem under {watched.log_dir} can neither collapse nor punch: the log of {watched.name!r} "
            "is copied and emptied, and a line written in that instant is lost",
        )

    def _report(self, name: str, detail: dict[str, Any]) -> None:
        try:
            self._on_rotated(name, detail)
        except Exception:  # noqa: BLE001 - the callback is the deck's; rotating goes on whatever it does
            _log.exception("the callback for a rotated log of %r raised", name)


_NEVER: Final = -1e9
_NEVER_ROTATED: Final = logledger.Ledger()


def _stderr(name: str) -> str:
    return f"{name}/{STDERR}"  # a slash is in no worker's name


class _Watched:
    """One log and when it was last looked at. Small: there may be ten thousand."""

    __slots__ = (
        "cut", "gone", "in_hand", "ledger", "log_dir", "look_at", "looked_at",
        "name", "noted_at", "noted_position", "old_at", "policy", "position", "watch",
    )  # fmt: skip

    def __init__(self, name: str, log_dir: str, policy: Log) -> None:
        self.name = name
        self.log_dir = log_dir
        self.policy = policy
        self.watch = -1
        self.position = 0
        self.looked_at = 0.0
        self.look_at = 0.0
        self.old_at = 0.0
        self.noted_at = _NEVER
        self.noted_position = 0
        self.ledger: logledger.Ledger | None = None
        self.in_hand = False
        self.gone = False
        self.cut = ""  # why it is made short, while it is

    @property
    def current(self) -> str:
        return f"{self.log_dir}/{CURRENT}"

    def stat(self) -> os.stat_result | None:
        try:
            return os.stat(self.current)  # noqa: PTH116 - a hot path, and a Path costs more than the call
        except OSError:
            return None


def _waiting(watched: _Watched) -> int:
    """How much of a log is in no archive yet, as of the last look."""
    return watched.position - (watched.ledger or _NEVER_ROTATED).head


def _can_be_cut(watched: "_Watched") -> bool:
    """Does its file hold so much that the disk gains by it?"""
    return _waiting(watched) > 2 * _CUT.max_bytes


class _Reports:
    """Tells of rotations, at most once per second and worker: a fast writer must not flood the event stream."""

    def __init__(self, tell: Callable[[str, dict[str, Any]], None]) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._tell = tell
        self._held: dict[str, dict[str, Any] | None] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def add(self, name: str, rotation: Rotation, warning: str | None) -> None:
        detail: dict[str, Any] = {
            "archives": list(rotation.archives),
            "bytes": rotation.archived_bytes,
            "method": str(rotation.method),
            "pruned": list(rotation.pruned),
        }
        if rotation.skipped_bytes:
            detail["skipped_bytes"] = rotation.skipped_bytes
        if warning is not None:
            detail["warning"] = warning
        if name not in self._timers:
            self._tell(name, detail)
            self._rest(name)
        elif (held := self._held.get(name)) is None:
            self._held[name] = detail
        else:
            self._held[name] = _merged(held, detail)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for name, held in self._held.items():
            if held is not None:
                self._tell(name, held)
        self._held.clear()

    def _rest(self, name: str) -> None:
        if self.loop is not None:
            self._timers[name] = self.loop.call_later(_REPORT_SECONDS, self._end_rest, name)

    def _end_rest(self, name: str) -> None:
        del self._timers[name]
        held = self._held.pop(name, None)
        if held is not None:
            self._tell(name, held)
            self._rest(name)


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two reports as one: lists follow each other, numbers add up. Long lists keep their ends."""
    merged = {**one, **other}
    for key, value in one.items():
        if isinstance(value, int):
            merged[key] = value + other.get(key, 0)
        elif isinstance(value, list):
            merged[key] = (value + other.get(key, []))[-20:]
    return merged


class _RotatingHand:
    """The thread that does the work on files: rotations first, compression in between."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        collect: Callable[[], None],
        make_room: Callable[[], Freed],
        compress_after_seconds: float,
    ) -> None:
        self.freed: deque[Freed] = deque()
        self._make_room = make_room
        self._room_wanted = False
        self.done: deque[tuple[_Watched, Rotation | None, Exception | None]] = deque()
        self._loop = loop
        self._clock = clock
        self._collect = collect
        self._change = threading.Condition()
        self._due: deque[_Watched] = deque()
        # An archive is compressed when it has reached this age: those of a fast writer are pruned before that, and
        # the worker that fills the disk is not also the one that keeps the processor busy.
        self._compress_after_seconds = compress_after_seconds
        self._to_compress: dict[_Watched, float] = {}  # and when, by the loop's clock; the next one first
        self._compressing: dict[_Watched, Iterator[None]] = {}
        self._at_work_on: _Watched | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="everdeck-logs", daemon=True)
        self._thread.start()

    def take(self, watched: _Watched) -> None:
        with self._change:
            self._due.append(watched)
            self._change.notify_all()

    def make_room(self) -> None:
        """Let the oldest archives go, before anything else."""
        with self._change:
            self._room_wanted = True
            self._change.notify_all()

    def let_go(self, watched: _Watched) -> None:
        """On return nothing is done to this log any more."""
        with self._change:
            if watched in self._due:
                self._due.remove(watched)
            self._change.wait_for(lambda: self._at_work_on is not watched)
            self._to_compress.pop(watched, None)
            self._compressing.pop(watched, None)

    def close(self) -> None:
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._change:
                self._at_work_on = None
                self._change.notify_all()
                self._change.wait_for(self._has_work, self._seconds_to_compression())
                if self._closing:
                    return
                room_wanted, self._room_wanted = self._room_wanted, False
            if room_wanted:
                self._free()
            with self._change:
                self._begin_compression()
                if not self._due and not self._compressing:
                    continue
                rotating = bool(self._due)
                watched = self._due.popleft() if rotating else next(iter(self._compressing))
                self._at_work_on = watched
            if rotating:
                self._rotate(watched)
                continue
            began = self._loop.time()
            self._compress(watched)
            # Twice as long at rest as at work: compression takes a third of a core at most, and gives way to
            # rotation. (A lower priority for this thread would let it be suspended while it holds the GIL.)
            with self._change:
                self._at_work_on = None
                self._change.notify_all()
                rest_seconds = 2 * (self._loop.time() - began)
                self._change.wait_for(lambda: self._due or self._closing or self._room_wanted, rest_seconds)

    def _has_work(self) -> bool:
        return bool(self._due or self._compressing or self._closing or self._room_wanted)

    def _seconds_to_compression(self) -> float | None:
        """How long to sleep when nothing is due: for ever, unless young archives are waiting."""
        if not self._to_compress:
            return None
        return max(0.0, min(self._to_compress.values()) - self._loop.time())

    def _begin_compression(self) -> None:
        now = self._loop.time()
        for watched in [watched for watched, when in self._to_compress.items() if when <= now]:
            del self._to_compress[watched]
            made_before = self._clock.wall() - self._compress_after_seconds
            self._compressing[watched] = logfiles.compressing(Path(watched.log_dir), made_before)

    def _compress_later(self, watched: _Watched, wait_seconds: float) -> None:
        """If there is something plain left, and nobody has thought of it yet."""
        waits = watched in self._to_compress or watched in self._compressing
        if watched.policy.compress and not waits and os.path.exists(f"{watched.log_dir}/{BUSY}"):  # noqa: PTH110 - a str
            self._to_compress[watched] = self._loop.time() + wait_seconds

    def _free(self) -> None:
        freed = Freed()
        try:
            freed = self._make_room()
        except OSError as err:
            _log.warning("no room could be made for logs: %s", err)
        self.freed.append(freed)
        with contextlib.suppress(RuntimeError):  # as below
            self._loop.call_soon_threadsafe(self._collect)

    def _rotate(self, watched: _Watched) -> None:
        rotation: Rotation | None = None
        error: Exception | None = None
        try:
            policy = _CUT if watched.cut else watched.policy
            rotation = logfiles.rotate_if_due(Path(watched.log_dir), policy, self._clock.wall())
            self._compress_later(watched, self._compress_after_seconds)
        except Exception as err:  # noqa: BLE001 - the edge of the thread: one log's trouble must not end all rotation
            error = err
        self.done.append((watched, rotation, error))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the answer
            self._loop.call_soon_threadsafe(self._collect)

    def _compress(self, watched: _Watched) -> None:
        steps = self._compressing.get(watched)
        wait_seconds = self._compress_after_seconds
        try:
            if steps is not None and next(steps, StopIteration) is not StopIteration:
                return
        except Exception as err:  # noqa: BLE001 - as above
            # A full disk, most likely: the plain archive stays and is tried again.
            _log.info("the archives of %r stay uncompressed for now: %s", watched.name, err)
            wait_seconds = max(wait_seconds, _STALLED_LOOK_SECONDS)
        with self._change:
            self._compressing.pop(watched, None)
            self._compress_later(watched, wait_seconds)
