"""Decisions without processes and without a clock: what opening does with a worker, and what follows an end."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from everdeck.deck import backoff
from everdeck.deck import reconcile as rules
from everdeck.deck.reconcile import Ended, Found
from everdeck.model import Exit, Exited, Killed, Restart, State, UnknownExit

FOUND = st.builds(
    Found,
    leader=st.sampled_from(["alive", "gone", "unknown"]),
    tree_left=st.booleans(),
    wanted=st.sampled_from(["running", "stopped"]),
    phase=st.sampled_from(list(State)),
    lifetime=st.sampled_from(["bound", "adoptable"]),
    never_identified=st.booleans(),
    ours=st.booleans(),
)
EXITS: st.SearchStrategy[Exit] = st.one_of(
    st.builds(Exited, st.integers(0, 255)), st.builds(Killed, st.integers(1, 64)), st.just(UnknownExit())
)


@given(FOUND)
def test_nothing_is_started_while_anything_of_it_lives(found: Found) -> None:
    """A start needs proof that nobody runs; unknown is no proof."""
    decision = rules.on_open(found)
    if found.leader != "gone" or found.tree_left:
        assert not isinstance(decision, rules.StartNow | rules.NoteEnd)
    if found.leader == "unknown":
        assert isinstance(decision, rules.Conflict)


@given(FOUND)
def test_what_should_not_run_is_ended_and_what_waits_is_left(found: Found) -> None:
    """A stopped worker never lives on; a failed or resting one is never started by opening."""
    decision = rules.on_open(found)
    if found.wanted == "stopped":
        assert not isinstance(decision, rules.StartNow | rules.Adopt | rules.NoteEnd)
    if found.leader == "gone" and not found.tree_left and found.phase in {State.FAILED, State.EXITED, State.BACKOFF}:
        assert isinstance(decision, rules.Leave)


@given(FOUND)
def test_a_bound_worker_is_adopted_by_nobody_else(found: Found) -> None:
    """L4: its lifeline died with its owner, so the next one reaps it."""
    if found.lifetime == "bound" and found.leader == "alive" and not found.ours:
        assert isinstance(rules.on_open(found), rules.EndTree)


def test_a_stop_that_was_interrupted_is_finished() -> None:
    """The owner died between the signal and the record; the tree is gone: it is noted as stopped, not left stopping."""
    found = Found("gone", False, "stopped", State.STOPPING, "adoptable", never_identified=False)
    assert rules.on_open(found) == rules.EndTree("wanted-stopped")


ENDED = st.builds(
    Ended,
    exit=EXITS,
    uptime_seconds=st.floats(0, 1e6),
    restart=st.builds(
        Restart,
        policy=st.sampled_from(["always", "on-failure", "never"]),
        max_crashes=st.integers(0, 10),
        backoff_seconds=st.floats(0, 5),
        backoff_cap_seconds=st.floats(5, 100),
    ),
    streak=st.integers(0, 1000),
    crash_times=st.lists(st.floats(0, 1e6), max_size=12).map(tuple),
    now=st.floats(0, 1e6),
    draw=st.floats(0, 1, exclude_max=True),
)


@given(ENDED)
def test_after_an_end(ended: Ended) -> None:
    """Never rests, success rests under on-failure, the unseen counts for nothing, delays stay below the cap."""
    after = rules.after_end(ended)
    success = ended.exit == Exited(0)
    if ended.restart.policy == "never" or (ended.restart.policy == "on-failure" and success):
        assert isinstance(after, rules.Rest)
    if isinstance(after, rules.RestartIn):
        assert 0 <= after.delay_seconds <= ended.restart.backoff_cap_seconds
    if isinstance(ended.exit, UnknownExit) and ended.restart.policy != "never":
        assert isinstance(after, rules.RestartIn)
        assert not after.crashed
    if isinstance(after, rules.GiveUp):
        assert len(after.crash_times) > ended.restart.max_crashes


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_grows_with_full_jitter_up_to_its_cap(streak: int, draw: float) -> None:
    """Between nothing and the exponential step, never above the cap, never an overflow."""
    restart = Restart(backoff_seconds=1.0, backoff_cap_seconds=60.0)
    assert 0 <= backoff.next_delay(restart, streak, draw) <= min(60.0, 2.0 ** min(streak - 1, 64))


def test_a_stable_time_begins_a_new_row() -> None:
    """A worker that ran well for long is not punished for crashes of last week."""
    restart = Restart(stable_seconds=60)
    assert backoff.streak_after(restart, 7, 61) == 1
    assert backoff.streak_after(restart, 7, 59) == 8
    assert backoff.crashes_in_window(Restart(window_seconds=10), (1.0, 95.0, 99.0), 100.0) == (95.0, 99.0)


def test_a_row_of_unseen_ends_backs_off() -> None:
    """A host that reaps our children on an old kernel must not make a worker that ends at once start without pause."""
    away = Ended(UnknownExit(), 0.1, Restart(), 3, (), 100.0, 0.5)
    after_away, after_there = rules.after_end(away), rules.after_end(msgspec.structs.replace(away, our_child=True))
    assert after_away == rules.RestartIn(0.0, 3, crashed=False, crash_times=())
    assert after_there == rules.RestartIn(4.0, 4, crashed=False, crash_times=())
