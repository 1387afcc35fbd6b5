"""The power is cut while a deck and a feed work: what was answered holds, and nothing is told twice or lost.

The disk (scripts/machine_disk.py) forgets what was not flushed: all of it, some of it in any order, or nothing, as when
only the machine is reset. The ledger is outside. EVERDECK_CUTS says how often (5 unless told).
"""

import json
import os
from collections.abc import Iterator
from typing import IO, Any

from support.machine import Cut, Machine
from support.power_ledger import Ledger

CUTS = int(os.environ.get("EVERDECK_CUTS", "5"))
ANSWERS = 12  # between two cuts
UNSYNCED = bool(os.environ.get("EVERDECK_UNSYNCED"))


def _lines(line: IO[str]) -> Iterator[dict[str, Any]]:
    """What the workload tells; a line that the cut tore is no line."""
    for text in line:
        try:
            yield json.loads(text)
        except ValueError:
            continue


def test_what_was_answered_survives_power_cuts(machine: Machine) -> None:
    """Without its syncs (EVERDECK_UNSYNCED=1) the same program is caught."""
    with machine.listening() as line:
        machine.begin()
        faults = _faults_of_cuts(machine, _lines(line))
    if UNSYNCED:
        assert faults, "a program without syncs must be caught"
    else:
        assert not faults, "\n".join(faults)


def _faults_of_cuts(machine: Machine, told: Iterator[dict[str, Any]]) -> list[str]:
    ledger, lost = Ledger(), 0
    faults: list[str] = []
    kinds: tuple[Cut, ...] = ("all", 1, None)
    for cut in range(CUTS + 1):
        found = next(one for one in told if _heard(ledger, one)["what"] == "found")
        faults += [f"cut {cut}: {fault}" for fault in (ledger.faults(found) if cut else ())]
        ledger.begin_again(found)
        first = next(one for one in told if _heard(ledger, one)["what"] == "confirmed")
        faults += [f"cut {cut}: {fault}" for fault in ledger.lost_messages(first["below"])]
        if cut == CUTS:
            break
        before = ledger.answers
        while ledger.answers - before < ANSWERS:
            ledger.hear(next(told))
        ledger.begun = False
        kind = kinds[cut % len(kinds)]
        lost += machine.switch_off_and_on(cut if isinstance(kind, int) else kind)
        print(
            f"cut {cut + 1} ({kind}): {ledger.answers} answers, {len(ledger.events)} events, "
            f"{ledger.confirmed} messages, {lost} blocks lost so far, {len(faults)} faults",
            flush=True,
        )
    return faults


def _heard(ledger: Ledger, line: dict[str, Any]) -> dict[str, Any]:
    """What was told before the cut counts, whenever it is read; the first poll after it is judged before it counts."""
    if line["what"] != "confirmed" or not ledger.begun:
        ledger.hear(line)
    return line
