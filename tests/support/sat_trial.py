"""How large the kill trials are: small in ``make test``; EVERDECK_TRIAL=500:20 for the numbers in the docs."""

import os
from typing import NamedTuple

import pytest

from everdeck.testing.satellites import Trial

IS_LARGE = "EVERDECK_TRIAL" in os.environ or "EVERDECK_MAIL_BOMB" in os.environ


def patience(seconds: int) -> pytest.MarkDecorator:
    """How long one test may take; a large trial as long as it takes."""
    return pytest.mark.timeout(3600 if IS_LARGE else seconds)


class Size(NamedTuple):
    """Messages that arrive, kills meanwhile, and how long all of it may take."""

    messages: int
    kills: int
    deadline_seconds: float


def size(messages: int, kills: int) -> Size:
    """What the environment says, else this."""
    asked = os.environ.get("EVERDECK_TRIAL")
    if asked is None:
        return Size(messages, kills, 120.0)
    many, _, deaths = asked.partition(":")
    return Size(int(many), int(deaths or 20), 900.0)


def tell(kind: str, who: str, trial: Trial) -> None:
    """One line for whoever wants the numbers (pytest -s)."""
    print(
        f"\ntrial {kind}, {who} killed {trial.kills} times, {len(trial.delivered)} messages: {len(trial.lost)} lost, "
        f"{trial.duplicates} answers twice, {trial.handled_again} handled again, {trial.seconds:.0f} s"
    )
