"""Who pays for the death of a process: only the guilty. Pure.

Many items run side by side, and a dead process does not say which of them it was. What is known: how it ended, and
which items were running. From that follows how far each of them is suspected:

* *fresh*: never in flight at a death that somebody must answer for. Nobody makes fresh work wait.
* *watched*: was there at an unexplained death, or beside a suspect. Runs beside a few other watched ones.
* *alone*: runs as the only suspect, for a limited time, in a slot of its own.
* *accused*: a death is laid to it. Runs alone too, and before the other suspects, but after those fresh ones that the
  last death has interrupted: however many poison the process, nobody innocent is interrupted by each of them.

A death has one of three causes. ORDERED (a stop, a restart, a deploy) counts for nobody. OWN (a fatal signal from
within, ``os._exit``, out of memory, or the deck saw its exit code) counts for the one that is known to have done it,
else for the only suspect, else for all. UNEXPLAINED is what ``kill -9`` from outside looks like: it counts for nobody
until an item was alone at many of them, each after a longer time of quiet, so that a series of kills cannot meet it
again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

# An innocent item must be in flight at each of these, the last ones with nobody else suspected and after waits of
# 2, 4, 8, … seconds; whatever kills it so reliably is the item.
UNEXPLAINED_DEATHS: Final = 8
# Fewer would not tell a killer from somebody who stood beside two of them.
OWN_DEATHS: Final = 3
ALONE_AFTER_KILLS: Final = 4
QUIET_CAP_SECONDS: Final = 60.0
WATCHED_AT_ONCE: Final = 8


class Cause(Enum):
    """Why the last process ended."""

    ORDERED = "ordered"
    OWN = "own"
    UNEXPLAINED = "unexplained"


class Suspicion(Enum):
    """How an item is to be run."""

    FRESH = "fresh"
    WATCHED = "watched"
    ALONE = "alone"
    ACCUSED = "accused"


@dataclass(frozen=True, slots=True)
class Charge:
    """What is held against one item: ``crashes`` it must answer for, ``kills`` that nobody explained."""

    seq: int
    crashes: int = 0
    kills: int = 0

    @property
    def suspicion(self) -> Suspicion:
        """How it is to be run."""
        if self.crashes:
            return Suspicion.ACCUSED
        if self.kills >= ALONE_AFTER_KILLS:
            return Suspicion.ALONE
        return Suspicion.WATCHED if self.kills else Suspicion.FRESH

    @property
    def quiet_seconds(self) -> float:
        """How long the process must have lived before it runs again."""
        beyond = self.kills - ALONE_AFTER_KILLS
        return 0.0 if beyond < 1 else min(QUIET_CAP_SECONDS, 2.0**beyond)


def deaths_that_convict(max_attempts: int) -> tuple[int, int]:
    """How many crashes, and how many kills, before an item is set aside."""
    return max(OWN_DEATHS, max_attempts), max(UNEXPLAINED_DEATHS, max_attempts)


def charges_after(cause: Cause, running: Iterable[Charge], guilty: frozenset[int]) -> list[Charge]:
    """What is held against each of those that were running, after this death; only the changed ones."""
    there = list(running)
    known = [charge for charge in there if charge.seq in guilty]
    if known:
        return [replace(charge, crashes=charge.crashes + 1) for charge in known]
    match cause:
        case Cause.ORDERED:
            return []
        case Cause.UNEXPLAINED:
            return [replace(charge, kills=charge.kills + 1) for charge in there]
        case Cause.OWN:
            return _own(there)


def _own(there: list[Charge]) -> list[Charge]:
    suspects = [charge for charge in there if charge.suspicion is not Suspicion.FRESH]
    fresh = [charge for charge in there if charge.suspicion is Suspicion.FRESH]
    if not suspects:
        return [replace(charge, crashes=1) for charge in fresh]
    watched = [replace(charge, kills=1) for charge in fresh]
    if len(suspects) == 1:
        return [replace(suspects[0], crashes=suspects[0].crashes + 1), *watched]
    return [*(replace(charge, kills=max(charge.kills, ALONE_AFTER_KILLS)) for charge in suspects), *watched]
