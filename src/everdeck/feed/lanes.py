"""Whose turn it is: in order per key, fair across keys, innocents first. Pure.

A *lane* is the queue of one key. A lane is served one item at a time; lanes take turns, so a key with ten thousand
items delays another key by one item at most. Items without a key are lanes of their own.

A *suspect* was in flight when a process died (see ``blame``). Suspects have slots of their own: a few watched ones side
by side, or one alone. They never take a slot from fresh work, and one that takes long gives its slot to the next.

Only numbers and keys are held here, never payloads. An item without a key is only a number among the turns: a backlog
of 50,000 of them is two megabytes.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeAlias

from everdeck.feed.blame import WATCHED_AT_ONCE, Suspicion

LaneKey: TypeAlias = str | int


@dataclass(slots=True)
class Lanes:
    """The backlog by key. Times are given in, so the same calls give the same answers."""

    _queued: dict[LaneKey, list[int]] = field(default_factory=dict)
    _turns: deque[LaneKey] = field(default_factory=deque)
    _busy: set[LaneKey] = field(default_factory=set)
    _delayed: list[tuple[float, LaneKey]] = field(default_factory=list)
    _waits: set[LaneKey] = field(default_factory=set)
    _suspects: dict[int, Suspicion] = field(default_factory=dict)
    _suspect_turns: deque[LaneKey] = field(default_factory=deque)
    _accused_turns: deque[LaneKey] = field(default_factory=deque)
    _accused_from: float | None = None
    _on_trial: dict[LaneKey, Suspicion] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seqs())

    @property
    def in_flight(self) -> int:
        """How many lanes are being served."""
        return len(self._busy)

    def add(self, seq: int, key: str | None) -> LaneKey:
        """A new item, behind the others of its key."""
        if key is None:
            self._turns.append(seq)
            return seq
        lane: LaneKey = key
        queue = self._queued.get(lane)
        if queue is None:
            self._queued[lane] = [seq]
            if lane not in self._busy:  # otherwise release() gives it a turn
                self._turns.append(lane)
        else:
            queue.append(seq)
        return lane

    def add_all(self, arrived: Iterable[tuple[int, str | None]]) -> None:
        """As :meth:`add`, for many."""
        turns, queued, busy = self._turns, self._queued, self._busy
        for seq, key in arrived:
            if key is None:
                turns.append(seq)
            elif key in queued:
                queued[key].append(seq)
            else:
                queued[key] = [seq]
                if key not in busy:
                    turns.append(key)

    def suspect(self, seq: int, how: Suspicion) -> None:
        """Serve this item only in a slot for suspects."""
        if how is not Suspicion.FRESH:
            self._suspects[seq] = how

    def hold_accused(self, until: float) -> None:
        """Serve nobody who is accused before that."""
        self._accused_from = until

    def pick(self, most: int, now: float) -> list[tuple[int, LaneKey]]:
        """The next fresh items to serve, each of another lane; they are in flight from now on."""
        self._wake(now)
        turns, suspects = self._turns, self._suspects
        picked: list[tuple[int, LaneKey]] = []
        while turns and len(picked) < most:
            lane = turns.popleft()
            if suspects and self._head(lane) in suspects:
                self._line_up(lane)
            else:
                picked.append((self._start(lane), lane))
        return picked

    def pick_suspects(self, most: int, now: float) -> list[tuple[int, LaneKey]]:
        """The suspects that may be served now: some watched ones, or one alone."""
        self._sort_out(now)
        picked: list[tuple[int, LaneKey]] = []
        while (turns := self._suspects_next()) and len(picked) < most and self._may_try(turns[0]):
            lane = turns.popleft()
            seq = self._start(lane)
            self._on_trial[lane] = self._suspects.get(seq, Suspicion.WATCHED)
            picked.append((seq, lane))
        return picked

    def may_pick(self, now: float) -> bool:
        """Would :meth:`pick` find something?"""
        self._sort_out(now)
        return bool(self._turns)

    def may_pick_suspects(self, now: float) -> bool:
        """Would :meth:`pick_suspects` find something?"""
        self._sort_out(now)
        turns = self._suspects_next()
        return bool(turns) and self._may_try(turns[0])

    def excuse(self, lane: LaneKey) -> None:
        """It has been on trial for long enough: the next suspect may be tried, while it goes on."""
        self._on_trial.pop(lane, None)

    @property
    def on_trial(self) -> int:
        """How many suspects are being tried."""
        return len(self._on_trial)

    def is_on_trial(self, lane: LaneKey) -> bool:
        """Is the item in flight there in a slot for suspects?"""
        return lane in self._on_trial

    def seqs(self) -> set[int]:
        """The numbers of everything that waits."""
        loose = (
            lane for lanes in (self._turns, self._suspect_turns, self._accused_turns, self._waits) for lane in lanes
        )
        return {seq for queue in self._queued.values() for seq in queue} | {
            lane for lane in loose if isinstance(lane, int) and lane not in self._queued
        }

    def release(self, lane: LaneKey) -> None:
        """The item in flight is finished; the next of its lane waits for its turn."""
        self._free(lane)
        if lane in self._queued:
            self._turns.append(lane)

    def finish(self, done: Sequence[tuple[int, LaneKey]]) -> None:
        """These, that were in flight, are done: nothing is held against them, and the next of their lanes wait."""
        busy, queued, turns = self._busy, self._queued, self._turns
        for seq, lane in done:
            busy.discard(lane)
            if self._on_trial:
                self._on_trial.pop(lane, None)
            if self._suspects:
                self._suspects.pop(seq, None)
            if lane in queued:
                turns.append(lane)

    def step_aside(self, seq: int, lane: LaneKey) -> LaneKey:
        """The item in flight goes on in a lane of its own, which is the answer; its old lane is served again."""
        trial = self._on_trial.get(lane)
        self.release(lane)
        self._busy.add(seq)
        if trial is not None:
            self._on_trial[seq] = trial
        return seq

    def put_back(self, seq: int, lane: LaneKey, due: float | None = None) -> None:
        """The item in flight is not finished: it is first in its lane again, not before ``due``."""
        self._free(lane)
        if lane != seq:
            self._queued.setdefault(lane, []).insert(0, seq)
        if due is None:
            self._turns.appendleft(lane)
        else:
            self._waits.add(lane)
            heappush(self._delayed, (due, lane))

    def revive(self, seq: int, key: str | None) -> None:
        """Another process has put it here: a dead letter to be tried again, or a new one. Its number is its place."""
        lane: LaneKey = seq if key is None else key
        self._suspects.pop(seq, None)
        if lane in self._queued:
            insort(self._queued[lane], seq)
        else:
            self.add(seq, key)

    def delay(self, lane: LaneKey, due: float) -> None:
        """Do not serve this lane before ``due``: its first item waits for a retry since before we started."""
        if lane not in self._waits and lane not in self._busy:
            self._turns.remove(lane)
            self._waits.add(lane)
            heappush(self._delayed, (due, lane))

    def next_due(self) -> float | None:
        """When the next delayed lane may be served."""
        due = [self._delayed[0][0]] if self._delayed else []
        if self._accused_from is not None and self._accused_turns:
            due.append(self._accused_from)
        return min(due, default=None)

    # --- helpers ---

    def _start(self, lane: LaneKey) -> int:
        self._busy.add(lane)
        queue = self._queued.get(lane)
        if queue is None:
            return int(lane)  # an item without a key
        seq = queue.pop(0)
        if not queue:
            del self._queued[lane]
        return seq

    def _head(self, lane: LaneKey) -> int:
        queue = self._queued.get(lane)
        return int(lane) if queue is None else queue[0]

    def _sort_out(self, now: float) -> None:
        """Let suspects that are next in their lanes wait with the other suspects."""
        self._wake(now)
        if self._suspects:
            for _ in range(len(self._turns)):
                if self._head(self._turns[0]) not in self._suspects:
                    break
                self._line_up(self._turns.popleft())

    def _line_up(self, lane: LaneKey) -> None:
        accused = self._suspects[self._head(lane)] is Suspicion.ACCUSED
        (self._accused_turns if accused else self._suspect_turns).append(lane)

    def _suspects_next(self) -> deque[LaneKey]:
        """Whose turn it is among the suspects: those who are accused go first, once they may."""
        return self._accused_turns if self._accused_turns and self._accused_from is None else self._suspect_turns

    def _may_try(self, lane: LaneKey) -> bool:
        if not self._on_trial:
            return True
        how = self._suspects.get(self._head(lane), Suspicion.FRESH)
        watched = {Suspicion.FRESH, Suspicion.WATCHED}
        return how in watched and watched.issuperset(self._on_trial.values()) and len(self._on_trial) < WATCHED_AT_ONCE

    def _wake(self, now: float) -> None:
        if self._accused_from is not None and self._accused_from <= now:
            self._accused_from = None
        while self._delayed and self._delayed[0][0] <= now:
            _, lane = heappop(self._delayed)
            self._waits.discard(lane)
            self._turns.append(lane)

    def _free(self, lane: LaneKey) -> None:
        self._busy.discard(lane)
        self._on_trial.pop(lane, None)
