"""When a worker counts as ready, unhealthy and well again: decided without a clock or a process."""

import pytest

from everdeck.deck.health import (
    BecameHealthy,
    BecameReady,
    BecameUnhealthy,
    HealthState,
    Phase,
    after_failed_check,
    after_good_sign,
    after_silence,
)
from everdeck.model import Health

TWO = Health(tcp="127.0.0.1:1", failures=2)


def test_the_first_good_sign_makes_it_ready_and_only_the_first() -> None:
    """Ready is said once."""
    state, verdict = after_good_sign(HealthState())
    assert (state.phase, verdict) == (Phase.HEALTHY, BecameReady())
    assert after_good_sign(state) == (state, None)


def test_failures_while_it_starts_do_not_count() -> None:
    """A server that is not listening yet is starting, not ill; the start timeout is what ends the patience."""
    state = HealthState()
    for _ in range(10):
        state, verdict = after_failed_check(state, TWO, "refused")
        assert verdict is None
    assert state == HealthState()
    assert after_silence(state, "not ready after 1 s")[1] == BecameUnhealthy("not ready after 1 s")


def test_failures_count_in_a_row_and_are_told_once() -> None:
    """One good answer between two bad ones starts the count again; unhealthy is said once."""
    state = HealthState(Phase.HEALTHY)
    state, verdict = after_failed_check(state, TWO, "refused")
    assert verdict is None
    state, verdict = after_good_sign(state)
    assert verdict is None
    state, _ = after_failed_check(state, TWO, "refused")
    state, verdict = after_failed_check(state, TWO, "refused")
    assert verdict == BecameUnhealthy("2 failed checks in a row: refused")
    state, verdict = after_failed_check(state, TWO, "refused")
    assert (state.phase, verdict) == (Phase.UNHEALTHY, None)
    state, verdict = after_good_sign(state)
    assert (state, verdict) == (HealthState(Phase.HEALTHY), BecameHealthy())


@pytest.mark.parametrize("phase", list(Phase))
def test_a_worker_that_is_leaving_may_be_silent(phase: Phase) -> None:
    """After STOPPING=1 neither silence nor a refused check is held against it."""
    state = HealthState(phase, leaving=True)
    assert after_silence(state, "no ping") == (state, None)
    assert after_failed_check(state, TWO, "refused")[1] is None
