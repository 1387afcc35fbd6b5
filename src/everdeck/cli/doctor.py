"""``everdeck doctor``: check kernel features, find problems, and offer to mend them."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from everdeck import wording
from everdeck.cli import DONE, FAILED, output

if TYPE_CHECKING:
    from everdeck.cli.examination import LockHeld, Report
    from everdeck.deck.strays import Stray

SCREENFUL = 20


def doctor_options(parser: ArgumentParser) -> None:
    """Options of doctor."""
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")
    parser.add_argument("--fix", action="store_true", help="offer to end orphans of this deck, one by one")
    parser.epilog = (
        "examples:\n"
        "  everdeck doctor\n"
        "  everdeck doctor --json | jq .layers\n"
        "  everdeck doctor --fix\n\n"
        "Exit code 1 when something is wrong. Nothing is ended without --fix and your yes, and processes\n"
        "that only look alike are never ended from here."
    )


def doctor(options: Namespace) -> int:
    """Look at the machine and the deck: kernel features and what each gives, how strongly workers are contained,
    limits, locks and their holders, duplicates and orphans, and a verdict for each of the four layers.
    """
    from everdeck.cli.examination import examine

    report = examine(options.state)
    if options.json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _print(report)
    mended = _fix(report.suspects, str(Path.cwd() / options.state)) if options.fix else 0
    return FAILED if len(report.problems) > mended else DONE


def _print(report: "Report") -> None:
    colour = output.wants_colour()

    def told(*, good: bool, text: str) -> str:
        return f"  {output.painted('yes' if good else 'NO ', '32' if good else '31', colour=colour)}  {text}"

    owner = f"owner is pid {report.owner_pid}" if report.supervised else "not supervised"
    print(f"Linux {report.kernel}; deck {report.state_dir}: {owner}")
    _section(
        "Kernel and machine",
        [
            told(good=one.present, text=f"{one.name}: {one.gives if one.present else one.without}")
            for one in report.features
        ],
    )
    print(f"\nContainment: {report.containment}")
    _section("Layers", [told(good=one.holds, text=f"{one.layer}: {one.strength}; {one.why}") for one in report.layers])
    _section(
        "Limits",
        [
            told(good=one.enough, text=f"{one.name} = {'unlimited' if one.value is None else one.value}: {one.room}")
            for one in report.limits
        ],
    )
    _section("Locks held", [wording.plain(f"  {lock.lock}: {_holders(lock)}") for lock in report.locks])
    _section(
        "Duplicates and orphans",
        [wording.plain(f"  pid {one.pid} {one.kind}: {one.command[:80]}; {one.why}") for one in report.suspects],
    )
    print()
    for problem in report.problems:
        print(output.painted(wording.plain(f"! {problem}"), "31", colour=colour))
    if not report.problems:
        print(output.painted("Nothing is wrong.", "32", colour=colour))


def _section(title: str, lines: list[str]) -> None:
    print(f"\n{title}")
    for line in lines[:SCREENFUL] or ["  none"]:
        print(line)
    if len(lines) > SCREENFUL:
        print(f"  and {len(lines) - SCREENFUL} more (--json shows all)")


def _holders(lock: "LockHeld") -> str:
    who = [f"pid {pid} ({command[:60]})" for pid, command in zip(lock.holders, lock.commands, strict=True)]
    return ", ".join(who) or "by a process that cannot be seen from here"


def _fix(suspects: "list[Stray]", here: str) -> int:
    """Offer to end what carries a cookie of this deck and is wanted by no record; returns how many are gone."""
    mended = 0
    for suspect in suspects:
        if suspect.cookie is None:
            output.note(f"pid {suspect.pid} only looks alike: end it yourself if it is yours to end")
            continue
        if suspect.deck != here:
            output.note(f"pid {suspect.pid} is of another deck: everdeck doctor --fix --state {suspect.deck}")
            continue
        try:
            answer = input(wording.plain(f"End pid {suspect.pid} ({suspect.command[:60]}), {suspect.kind}? [y/N] "))
        except EOFError:
            answer = ""
        if answer.strip().lower() in {"y", "yes"} and _end(suspect):
            mended += 1
    return mended


def _end(suspect: "Stray") -> bool:
    from everdeck.kernel.containment import Tree
    from everdeck.kernel.escalation import Subject, stop_trees
    from everdeck.model import Cookie

    # By its cookie, read again when it is signalled: whoever got the pid meanwhile is not meant.
    tree = Tree(suspect.worker or str(suspect.pid), Cookie(suspect.cookie or ""), None)
    outcome = stop_trees([Subject(tree)])[tree.name]
    print(f"pid {suspect.pid}: {'gone' if outcome.gone else 'still there'}")
    return outcome.gone
