"""The power is cut while a deck and a feed work: what was answered holds, and nothing is told twice or lost.

The disk (scripts/machine_disk.py) forgets what was not flushed: all of it, some of it in any order, or nothing, as when
only the machine is reset. The ledger is outside. EVERDECK_CUTS says how often (6 unless told).
"""

import json
import os
import random
import time
from collections.abc import Iterator
from typing import IO, Any

from support.machine import Cut, Machine
from support.power_ledger import Ledger

CUTS = int(os.environ.get("EVERDECK_CUTS", "6"))
ANSWERS = 20  # between two cuts, at most
MORE_LINES = 30  # and up to as many lines of any kind: a cut comes at any moment
COLD_EVERY = 20  # a boot by way of the kernel, after its own reset
BOOKED_SECONDS = 900


def test_what_was_answered_survives_power_cuts(machine: Machine) -> None:
    """No number used twice, no answer taken back, no secret empty, no message lost or doubled, no rotated line gone."""
    ledger, faults = _cut_again_and_again(machine, CUTS, "work")
    assert not faults, "\n".join(faults)
    assert ledger.rotations
    assert ledger.unsynced_lost["page"], "what nobody synced is lost with the memory"
    assert ledger.blocks_lost, "and what was not flushed with the disk's cache"


def test_a_program_without_syncs_is_caught(machine: Machine) -> None:
    """The checker can fail."""
    _, faults = _cut_again_and_again(machine, 2, "unsynced")
    assert faults
    print("caught:", *faults, sep="\n  ")


def _cut_again_and_again(machine: Machine, cuts: int, place: str) -> tuple[Ledger, list[str]]:
    ledger, faults, told_faults = Ledger(), list[str](), 0
    chance = random.Random()
    how: Cut = "none"
    for cut in range(cuts + 1):
        begun = time.monotonic()
        # All that is known outside is asked for again at the end; before that only what is new.
        given = {"place": place, "unsynced": place == "unsynced", "after": ledger.last_event if cut < cuts else 0}
        with machine.at_work(cold=how == "sysrq", **given) as line:
            told = _lines(line)
            found = next(one for one in told if _heard(ledger, one)["what"] == "found")
            faults += [f"cut {cut}: {fault}" for fault in (ledger.faults(found) if cut else ())]
            ledger.begin_again(found)
            first = next(one for one in told if _heard(ledger, one)["what"] == "confirmed")
            faults += [f"cut {cut}: {fault}" for fault in ledger.lost_messages(first["below"])]
            if len(faults) > told_faults and place == "work":
                print(f"the disk as it was before this start: {machine.keep_disk(f'before-{cut}')}", flush=True)
            up = time.monotonic()
            if cut == cuts:
                faults += _what_stays_unbooked(ledger, told)
                machine.switch_off("none", line)
                break
            enough = ledger.answers + chance.randint(3, ANSWERS)
            while ledger.answers < enough:
                ledger.hear(next(told))
            for _ in range(chance.randrange(MORE_LINES)):
                ledger.hear(next(told))
            ledger.begun = False
            how = "sysrq" if cut % COLD_EVERY == 3 else ("all", cut, "none")[cut % 3]
            ledger.blocks_lost += machine.switch_off(how, line)
            for one in told:  # what came out before the power was gone was told
                ledger.hear(one)
        print(
            f"cut {cut + 1} ({how}): {ledger.answers} answers, {len(ledger.events)} events, "
            f"{ledger.confirmed} messages, {ledger.rotations} rotations, {ledger.blocks_lost} blocks and "
            f"{dict(ledger.unsynced_lost)} of what nobody synced lost so far, "
            f"{len(faults)} faults; up {up - begun:.0f} s, worked {time.monotonic() - up:.0f} s",
            *faults[told_faults:],
            sep="\n  ",
            flush=True,
        )
        told_faults = len(faults)
    return ledger, faults


def _what_stays_unbooked(ledger: Ledger, told: Iterator[dict[str, Any]]) -> list[str]:
    below, deadline = ledger.confirmed, time.monotonic() + BOOKED_SECONDS
    while (left := ledger.unbooked(below)) and time.monotonic() < deadline:
        ledger.hear(next(told))
    return [f"messages {sorted(left)} were taken and never booked"] if left else []


def _lines(line: IO[str]) -> Iterator[dict[str, Any]]:
    """What the workload tells; a line that the cut tore is no line, and the last one."""
    torn = ""
    for text in line:
        assert not torn, f"a line is torn though others follow: {torn[:200]} … {torn[-200:]}"
        try:
            yield json.loads(text)
        except ValueError:
            torn = text


def _heard(ledger: Ledger, line: dict[str, Any]) -> dict[str, Any]:
    """What was told before the cut counts, whenever it is read; the first poll after it is judged before it counts."""
    if line["what"] != "confirmed" or not ledger.begun:
        ledger.hear(line)
    return line
