"""Whose turn it is: in order per key, fair across keys, suspects alone. Pure.

A *lane* is the queue of one key. A lane is served one item at a time; lanes take turns, so a key with ten thousand
items delays another key by one item at most. Items without a key are lanes of their own.

A *suspect* was in flight whenever the process died, and dies once more with its last attempt. It gets that attempt
alone: if the process dies again it was the one, and its neighbours are not blamed for it.

Only numbers and keys are held here, never payloads: a backlog of 50,000 items is a few megabytes.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeAlias

LaneKey: TypeAlias = str | int


@dataclass(slots=True)
class Lanes:
    """The backlog by key. Times are given in, so the same calls give the same answers."""

    _queued: dict[LaneKey, list[int]] = field(default_factory=dict)
    _turns: deque[LaneKey] = field(default_factory=deque)
    _busy: set[LaneKey] = field(default_factory=set)
    _delayed: list[tuple[float, LaneKey]] = field(default_factory=list)
    _waits: set[LaneKey] = field(default_factory=set)
    _suspects: set[int] = field(default_factory=set)
    _alone: LaneKey | None = None

    def __len__(self) -> int:
        return sum(map(len, self._queued.values()))

    @property
    def in_flight(self) -> int:
        """How many lanes are being served."""
        return len(self._busy)

    def add(self, seq: int, key: str | None) -> LaneKey:
        """A new item, behind the others of its key."""
        lane: LaneKey = seq if key is None else key
        queue = self._queued.get(lane)
        if queue is None:
            self._queued[lane] = [seq]
            if lane not in self._busy:  # otherwise release() gives it a turn
                self._turns.append(lane)
        else:
            queue.append(seq)
        return lane

    def suspect(self, seq: int) -> None:
        """Serve this item only while nothing else is in flight."""
        self._suspects.add(seq)

    def pick(self, most: int, now: float) -> list[tuple[int, LaneKey]]:
        """The next items to serve, each of another lane; they are in flight from now on."""
        self._wake(now)
        picked: list[tuple[int, LaneKey]] = []
        while self._turns and len(picked) < most and self._alone is None:
            lane = self._turns[0]
            if self._queued[lane][0] in self._suspects:
                if self._busy:
                    break  # nothing new starts until the others are done, or a busy inbox would never let it in
                self._alone = lane
            self._turns.popleft()
            queue = self._queued[lane]
            picked.append((queue.pop(0), lane))
            if not queue:
                del self._queued[lane]
            self._busy.add(lane)
        return picked

    def may_pick(self, now: float) -> bool:
        """Would :meth:`pick` find something?"""
        self._wake(now)
        if not self._turns or self._alone is not None:
            return False
        return not self._busy or self._queued[self._turns[0]][0] not in self._suspects

    def seqs(self) -> set[int]:
        """The numbers of everything that waits."""
        return {seq for queue in self._queued.values() for seq in queue}

    def release(self, lane: LaneKey) -> None:
        """The item in flight is finished; the next of its lane waits for its turn."""
        self._free(lane)
        if lane in self._queued:
            self._turns.append(lane)

    def step_aside(self, seq: int, lane: LaneKey) -> LaneKey:
        """The item in flight goes on in a lane of its own, which is the answer; its old lane is served again."""
        alone = self._alone == lane
        self.release(lane)
        self._busy.add(seq)
        if alone:
            self._alone = seq
        return seq

    def put_back(self, seq: int, lane: LaneKey, due: float | None = None) -> None:
        """The item in flight is not finished: it is first in its lane again, not before ``due``."""
        self._free(lane)
        self._queued.setdefault(lane, []).insert(0, seq)
        if due is None:
            self._turns.appendleft(lane)
        else:
            self._waits.add(lane)
            heappush(self._delayed, (due, lane))

    def revive(self, seq: int, key: str | None) -> None:
        """Another process has put it here: a dead letter to be tried again, or a new one. Its number is its place."""
        lane: LaneKey = seq if key is None else key
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
        return self._delayed[0][0] if self._delayed else None

    def _wake(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            _, lane = heappop(self._delayed)
            self._waits.discard(lane)
            self._turns.append(lane)

    def _free(self, lane: LaneKey) -> None:
        self._busy.discard(lane)
        if self._alone == lane:
            self._alone = None
