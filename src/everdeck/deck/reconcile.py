"""Desired against observed: what to do next with one worker. Decides only; touches nothing.

The deck observes the kernel, asks here, and acts. Every path that leads to a start, a stop or a rest goes through
one of these two functions, so a policy is changed in one place and tested without a process or a clock.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

from everdeck.deck.backoff import breaker_trips, crashes_in_window, next_delay, streak_after
from everdeck.model import Exit, Exited, Lifetime, Restart, State, UnknownExit

# --- what was seen ----------------------------------------------------------------------------------------------


class Found(Struct, frozen=True):
    """One worker as the kernel shows it when a deck is opened or reconciled."""

    leader: Literal["alive", "gone", "unknown"]
    tree_left: bool  # some process of the tree lives on
    wanted: Literal["running", "stopped"]
    phase: State
    lifetime: Lifetime
    never_identified: bool  # the last owner died between the intent and the record
    ours: bool = False  # started or adopted by this very owner


class Ended(Struct, frozen=True):
    """One worker's leader has ended, and nobody asked for it."""

    exit: Exit
    uptime_seconds: float
    restart: Restart
    streak: int
    crash_times: tuple[float, ...]
    now: float
    draw: float
    our_child: bool = False  # the owner was there when it ended
    unready: int = 0  # ends in a row, this one included, before which it was never ready


# --- what to do -------------------------------------------------------------------------------------------------


class Adopt(Struct, frozen=True):
    """It is alive and should be: take it over."""


class Leave(Struct, frozen=True):
    """Nothing to do: it rests as it should, or waits for its time or for a person."""


class EndTree(Struct, frozen=True):
    """Something lives that should not: end it, then look again."""

    why: Literal["wanted-stopped", "bound-orphan", "leader-died"]


class Conflict(Struct, frozen=True):
    """Somebody holds the lock whom we cannot prove to be ours: touch nothing, tell a person."""


class StartNow(Struct, frozen=True):
    """Nobody runs, somebody should."""


class NoteEnd(Struct, frozen=True):
    """It ended while nobody watched: note it, and let :func:`after_end` decide."""


Opening: TypeAlias = Adopt | Leave | EndTree | Conflict | StartNow | NoteEnd


def on_open(found: Found) -> Opening:  # noqa: PLR0911 - one return per row of the table is the table
    """What opening (= recovering) a deck does with one worker."""
    if found.leader == "unknown":
        return Conflict()
    if found.leader == "alive":
        if found.wanted == "stopped":
            return EndTree("wanted-stopped")
        # A bound worker may be adopted by nobody: its lifeline died with its owner (L4).
        return EndTree("bound-orphan") if found.lifetime == "bound" and not found.ours else Adopt()
    if found.tree_left:
        return EndTree("wanted-stopped" if found.wanted == "stopped" else "leader-died")
    if found.wanted == "stopped" and found.phase.is_live:
        # The last owner died on the way: the tree is gone, and that has yet to be noted.
        return EndTree("wanted-stopped")
    if (
        found.wanted == "running"
        and not found.never_identified
        and found.phase.is_live
        and found.phase is not State.STOPPING
    ):
        return NoteEnd()
    if found.wanted == "stopped" or found.phase in {State.EXITED, State.FAILED, State.BACKOFF}:
        return Leave()
    return StartNow()


class Rest(Struct, frozen=True):
    """It ended as its policy allows: no start."""

    crashed: bool
    crash_times: tuple[float, ...]


class RestartIn(Struct, frozen=True):
    """Start it again after a delay."""

    delay_seconds: float
    streak: int
    crashed: bool
    crash_times: tuple[float, ...]


class GiveUp(Struct, frozen=True):
    """The breaker trips: it is failed until a person resets it."""

    streak: int
    crash_times: tuple[float, ...]


After: TypeAlias = Rest | RestartIn | GiveUp


def after_end(ended: Ended) -> After:
    """What follows when a worker ended by itself.

    An end that nobody saw is neither success nor failure: it happens when the owner was away, once per owner, so
    the worker is started again at once unless its policy is ``never``, and nothing is counted against it. Where the
    ends of our own children are never seen (below Linux 6.15, in a host that reaps them) they come in a row, and a row
    backs off.
    """
    unseen = isinstance(ended.exit, UnknownExit)
    succeeded = isinstance(ended.exit, Exited) and ended.exit.code == 0
    crashed = not succeeded and not unseen
    crash_times = crashes_in_window(ended.restart, ended.crash_times, ended.now)
    if crashed:
        crash_times = (*crash_times, ended.now)
    policy = ended.restart.policy
    if policy == "never" or (policy == "on-failure" and succeeded):
        return Rest(crashed, crash_times)
    streak = streak_after(ended.restart, ended.streak, ended.uptime_seconds)
    if unseen and not ended.our_child:
        return RestartIn(0.0, ended.streak, crashed=False, crash_times=crash_times)
    # By number in a row too: what takes a minute to not become ready never fills a window of five.
    if crashed and (breaker_trips(ended.restart, len(crash_times)) or breaker_trips(ended.restart, ended.unready)):
        return GiveUp(streak, crash_times)
    return RestartIn(next_delay(ended.restart, streak, ended.draw), streak, crashed, crash_times)
