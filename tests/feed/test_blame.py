"""Who pays for a death: pure decisions."""

import pytest

from everdeck.feed.blame import Cause, Charge, Suspicion, charges_after, deaths_that_convict

NOBODY: frozenset[int] = frozenset()


def test_an_ordered_death_counts_for_nobody() -> None:
    """A stop, a restart, a deploy."""
    assert charges_after(Cause.ORDERED, [Charge(1), Charge(2, 1)], NOBODY) == []


def test_one_that_would_not_end_at_a_stop_is_known() -> None:
    """It ignored its cancellation: that counts although the death was ordered."""
    assert charges_after(Cause.ORDERED, [Charge(1), Charge(2)], frozenset({2})) == [Charge(2, 1)]


def test_a_death_of_ones_own_makes_all_fresh_ones_suspects() -> None:
    """Nobody knows which of them it was."""
    after = charges_after(Cause.OWN, [Charge(1), Charge(2)], NOBODY)
    assert after == [Charge(1, 1), Charge(2, 1)]
    assert {charge.suspicion for charge in after} == {Suspicion.ACCUSED}


def test_the_only_suspect_answers_for_it() -> None:
    """And those beside it are watched from then on: it may have been one of them."""
    after = charges_after(Cause.OWN, [Charge(1, 1), Charge(2)], NOBODY)
    assert after == [Charge(1, 2), Charge(2, 0, 1)]
    assert after[1].suspicion is Suspicion.WATCHED


def test_of_several_suspects_none_answers_but_each_runs_alone_from_then_on() -> None:
    """A death counts only for who ran with no other suspect."""
    after = charges_after(Cause.OWN, [Charge(1, 0, 1), Charge(2, 0, 1)], NOBODY)
    assert [charge.crashes for charge in after] == [0, 0]
    assert {charge.suspicion for charge in after} == {Suspicion.ALONE}


def test_kills_from_outside_need_longer_and_longer_quiet() -> None:
    """A series of kills cannot meet the same item again and again."""
    charge = Charge(1)
    quiet = []
    for _ in range(8):
        (charge,) = charges_after(Cause.UNEXPLAINED, [charge], NOBODY)
        quiet.append(charge.quiet_seconds)
    assert quiet == [0, 0, 0, 0, 2, 4, 8, 16]
    assert charge.crashes == 0


@pytest.mark.parametrize(("max_attempts", "needed"), [(1, (3, 8)), (3, (3, 8)), (10, (10, 10))])
def test_how_many_deaths_convict(max_attempts: int, needed: tuple[int, int]) -> None:
    """Never fewer than three: two would not tell a killer from somebody who stood beside two of them."""
    assert deaths_that_convict(max_attempts) == needed
