"""The inbox from another process: readers that share the work, and nothing but the file between them and the pump.

A *reader* is a program that takes messages out of a feed which some other process fills. It writes down what it takes
(a *claim*) before it handles it, and finishes it together with its replies in one transaction. So either side may be
killed at any instruction: what was claimed by a reader that is gone is claimed by the next one.

A reader is gone when its process is (boot id, pid and start time, asked of the kernel), or when its lease has run out:
it renews the lease while it holds something, by the clock that does not step, so only a reader that is frozen or out of
sight (another machine's, another pid namespace's) is judged by it. Whoever comes back after that finds its claim gone
and commits nothing (:class:`everdeck.errors.MessageLost`).

Synchronous; one object per thread.
"""

import os
import random
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from everdeck.crashpoints import crash_point
from everdeck.errors import KernelError, MessageLost
from everdeck.feed.policy import DEFAULT, FeedPolicy
from everdeck.feed.store import SQL, wall_clock
from everdeck.feed.store import _connect as connect
from everdeck.feed.store import _statements as statements
from everdeck.feed.store import _translated as translated
from everdeck.kernel import identity as ids
from everdeck.kernel import inotify
from everdeck.model import Identity

PROMISE_SECONDS: Final = 3600.0
LEASE_SECONDS: Final = 60.0
FAR_SECONDS: Final = 24 * 3600.0
ERROR_TEXT_LENGTH: Final = 2000
REPLIES: Final = "replies"
WAITING, RUNNING, DEAD = 0, 1, 2


class Claim(NamedTuple):
    """An item that this reader handles."""

    seq: int
    stream: int
    payload: bytes
    attempt: int


class Put(NamedTuple):
    """A message for the outbox; those of one key are sent in order."""

    key: str | None
    payload: bytes
    request: str | None = None
    """Put under the same id again it is the same message."""


@dataclass(frozen=True, slots=True)
class Other:
    """Another reader of the same file."""

    id: str
    identity: Identity
    pid_space: int
    lease_until: float

    def is_gone(self, now: float) -> bool:
        """By the kernel's word if it can be asked, else by its lease."""
        if self.identity.boot_id != ids.boot_id() or self.lease_until < now:
            return True
        return self.is_visible and ids.answer(self.identity) is ids.Answer.DIFFERENT

    @property
    def is_visible(self) -> bool:
        """Does its pid mean something here?"""
        return self.pid_space == pid_space()


class Claims:
    """One reader of one feed file. ``with Claims(path) as claims:`` or ``close()``."""

    def __init__(self, path: Path, *, policy: FeedPolicy = DEFAULT) -> None:
        self.path = path
        self.id = uuid.uuid4().hex
        self._policy = policy
        self._connection = connect(path, create=True)
        self._is_reader = False
        self._bell_fd: int | None = None
        self._looked_at = 0.0
        try:
            with translated(path):
                for statement in statements(files("everdeck.feed").joinpath("sql/claims.sql").read_text("utf-8")):
                    self._connection.execute(statement)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Let go of the file; whatever is still claimed is handed back, uncounted."""
        if self._is_reader:
            self._is_reader = False
            with suppress(Exception), self._transaction():
                for seq, _ in self._connection.execute(SQL["claims_of"], (self.id,)).fetchall():
                    self._connection.execute(SQL["item_hand_back"], (0, seq))
                self._connection.execute(SQL["claims_drop"], (self.id,))
                self._connection.execute(SQL["reader_drop"], (self.id,))
            self.ring()
        self._connection.close()
        if self._bell_fd is not None:
            os.close(self._bell_fd)
            self._bell_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- taking -------------------------------------------------------------------------------------------------

    def take(self, most: int = 1) -> list[Claim]:
        """Claim what may be handled now: in order per conversation, the oldest first."""
        now, wall = ids.boottime(), wall_clock()
        self._looked_at = wall
        if not self._others_gone(now) and not self._has_work(wall):
            return []
        with self._transaction():
            crash_point("claims.take.begun")
            for other in self._others_gone(now):
                self._free(other, wall)
            self._connection.execute(SQL["items_unclaimed"])
            rows = self._connection.execute(SQL["items_claimable"], (wall, wall + FAR_SECONDS, most)).fetchall()
            taken = [Claim(*row) for row in rows]
            if taken:
                self._lease(now)
                numbers = f"[{','.join(str(claim.seq) for claim in taken)}]"
                self._connection.execute(SQL["items_taken"], (numbers,))
                self._connection.executemany(SQL["claim_add"], [(claim.seq, self.id) for claim in taken])
            crash_point("claims.take.written")
        crash_point("claims.take.committed")
        return taken

    def next_due(self) -> float | None:
        """In how many seconds something that :meth:`take` found too early may be handled; None if there is nothing.

        By the clock of that look: what has become due since then is due now, and nobody else would tell of it.
        """
        with translated(self.path):
            (due,) = self._connection.execute(SQL["items_next_due"], (self._looked_at,)).fetchone()
        return None if due is None else max(0.0, min(due - wall_clock(), FAR_SECONDS))

    def others(self) -> list[Other]:
        """The other readers."""
        with translated(self.path):
            rows = self._connection.execute(SQL["readers"], (self.id,)).fetchall()
        return [Other(row[0], Identity(row[1], row[3], row[4]), row[2], row[5]) for row in rows]

    def forget_unseen(self) -> None:
        """Free what readers of other pid namespaces hold: for who knows that none of them lives, lease or not."""
        with self._transaction():
            for other in self.others():
                if not other.is_visible:
                    self._free(other, wall_clock())

    def renew(self) -> None:
        """Say that this reader lives, while it holds something."""
        with self._transaction():
            self._lease(ids.boottime())

    # --- finishing ----------------------------------------------------------------------------------------------

    def finish(self, claim: Claim, replies: Sequence[Put] = ()) -> None:
        """The message is done and its replies are promised, in one transaction; synced if there are replies."""
        with self._transaction(durable=bool(replies)):
            crash_point("claims.finish.begun")
            self._give_up(claim)
            self._connection.execute(SQL["item_done"], (claim.seq,))
            self._connection.execute(SQL["stream_done"], (1, claim.stream))
            crash_point("claims.finish.acked")
            self._put(replies)
            crash_point("claims.finish.replied")
        crash_point("claims.finish.committed")
        self.ring()

    def fail(self, claim: Claim, error: str, *, retry_after: float | None = None) -> bool:
        """The handler raised: try again later; after the last attempt it is set aside. Says whether it was."""
        wall = wall_clock()
        with self._transaction():
            self._give_up(claim)
            dead = claim.attempt >= self._policy.max_attempts
            if dead:
                self._connection.execute(SQL["item_dead"], (error[:ERROR_TEXT_LENGTH], wall, claim.seq))
            else:
                delay = self._policy.retry.delay(claim.attempt, random.random())  # noqa: S311 - jitter
                wait = delay if retry_after is None else retry_after
                self._connection.execute(SQL["item_retry"], (wall + wait, error[:ERROR_TEXT_LENGTH], claim.seq))
            crash_point("claims.fail.written")
        self.ring()
        return dead

    def hand_back(self, claim: Claim) -> None:
        """Nobody will finish it here; the attempt is not counted."""
        with self._transaction():
            self._give_up(claim)
            self._connection.execute(SQL["item_hand_back"], (0, claim.seq))
        self.ring()

    # --- without a claim ----------------------------------------------------------------------------------------

    def put(self, *puts: Put) -> list[int]:
        """Promise messages of our own; returns their numbers once that is synced."""
        with self._transaction(durable=True):
            numbers = self._put(puts)
            crash_point("claims.put.written")
        crash_point("claims.put.committed")
        self.ring()
        return numbers

    def counts(self) -> tuple[int, ...]:
        """Done, waiting, in flight, dead, to be sent, unsent, readers."""
        with translated(self.path):
            found: tuple[int, ...] = self._connection.execute(SQL["feed_counts"]).fetchone()
        return found

    def facts(self) -> dict[str, str]:
        """What the satellite tells of itself."""
        with translated(self.path):
            return dict(self._connection.execute(SQL["facts"]).fetchall())

    def state_facts(self, **facts: str) -> None:
        """Write down what the satellite tells of itself."""
        with self._transaction():
            self._connection.executemany(SQL["fact_put"], list(facts.items()))

    def items(self, *, state: int | None = None, number: int | None = None, limit: int = 100) -> list[Any]:
        """Rows of what came in; see ``feed_items``."""
        with translated(self.path):
            return self._connection.execute(SQL["feed_items"], (state, state, number, number, limit)).fetchall()

    def done(self, *, number: int | None = None, limit: int = 100) -> list[Any]:
        """Rows of what is done and still remembered, the newest first; as ``feed_items``."""
        with translated(self.path):
            return self._connection.execute(SQL["feed_done"], (number, number, limit)).fetchall()

    def outbox(self, *, state: int | None = None, number: int | None = None, limit: int = 100) -> list[Any]:
        """Rows of what goes out; see ``feed_outbox``."""
        with translated(self.path):
            return self._connection.execute(SQL["feed_outbox"], (state, state, number, number, limit)).fetchall()

    def act(self, query: str, number: int) -> bool:
        """One of the statements on dead letters and unsent messages; False if there is none of that number."""
        with self._transaction():
            done = self._connection.execute(SQL[query], (number,)).rowcount == 1
        self.ring()
        return done

    def ring(self) -> None:
        """Tell the pump, the outbox and the other readers that something has changed."""
        bell = bell_path(self.path)
        try:
            os.utime(bell)
        except FileNotFoundError:
            with suppress(OSError):
                os.close(os.open(bell, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:
            pass

    def listen(self) -> int:
        """A descriptor that becomes readable when somebody rings; closed with the claims. OSError: there is none."""
        if self._bell_fd is None:
            self.ring()  # the file that is watched must be there
            fd = inotify.open_inotify()
            try:
                inotify.add_watch(fd, str(bell_path(self.path)), inotify.ATTRIB)
            except OSError:
                os.close(fd)
                raise
            self._bell_fd = fd
        return self._bell_fd

    def heard(self) -> None:
        """Take note that somebody rang."""
        if self._bell_fd is not None:
            for _ in inotify.heard(self._bell_fd):
                pass

    # --- helpers, in the order they are called ------------------------------------------------------------------

    def _others_gone(self, now: float) -> list[Other]:
        return [other for other in self.others() if other.is_gone(now)]

    def _has_work(self, wall: float) -> bool:
        with translated(self.path):
            row = self._connection.execute(SQL["items_claimable"], (wall, wall + FAR_SECONDS, 1)).fetchone()
            return row is not None or self._connection.execute(SQL["items_lost"]).fetchone() is not None

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[None]:
        with translated(self.path):
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _free(self, other: Other, wall: float) -> None:
        """What a reader that is gone had claimed. Of several nobody knows which one it was: all keep a last attempt."""
        held = self._connection.execute(SQL["claims_of"], (other.id,)).fetchall()
        most = self._policy.max_attempts
        for seq, attempts in held:
            if len(held) == 1 and attempts >= most:
                error = f"the reader (pid {other.identity.pid}) died during attempt {attempts}"
                self._connection.execute(SQL["item_crashed_out"], (wall, error, seq))
            else:
                self._connection.execute(SQL["claim_left_behind"], (most - (len(held) > 1), seq))
        self._connection.execute(SQL["claims_drop"], (other.id,))
        self._connection.execute(SQL["reader_drop"], (other.id,))
        crash_point("claims.free.written")

    def _lease(self, now: float) -> None:
        me = own_identity()
        row = (self.id, me.boot_id, pid_space(), me.pid, me.start_ticks, now + LEASE_SECONDS)
        self._connection.execute(SQL["reader_put"], row)
        self._is_reader = True

    def _give_up(self, claim: Claim) -> None:
        if self._connection.execute(SQL["claim_drop"], (claim.seq, self.id)).rowcount != 1:
            raise MessageLost(
                f"message {claim.seq} of {self.path} is another reader's now: this one was silent for "
                f"more than {LEASE_SECONDS:g} s; nothing was committed"
            )

    def _put(self, puts: Sequence[Put]) -> list[int]:
        wall, numbers = wall_clock(), []
        for put in puts:
            known = put.request and self._connection.execute(SQL["promise_of"], (put.request,)).fetchone()
            if known:
                numbers.append(known[0])
                continue
            written = self._connection.execute(SQL["outbox_put"], (REPLIES, put.key, put.payload, wall))
            numbers.append(int(written.lastrowid or 0))
            if put.request is not None:
                self._connection.execute(SQL["promises_forget"], (wall - PROMISE_SECONDS,))
                self._connection.execute(SQL["promise_add"], (put.request, numbers[-1], wall))
        return numbers


def bell_path(path: Path) -> Path:
    """The file that is touched when something changes; see :mod:`everdeck.feed.bell`."""
    return path.with_name(f"{path.name}.lock")


def own_identity() -> Identity:
    """Who we are; asked anew after a fork."""
    pid = os.getpid()
    return Identity(ids.boot_id(), pid, ids.read_stat(pid).start_ticks)


def pid_space() -> int:
    """The pid namespace that our pids are numbers of."""
    return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - a kernel file


def watch_fd(other: Other) -> int | None:
    """A descriptor that becomes readable when that reader dies; None if it is out of sight or gone."""
    if not other.is_visible:
        return None
    try:
        return ids.open_verified(other.identity)
    except (KernelError, OverflowError, ValueError):  # numbers that are no process's
        return None
