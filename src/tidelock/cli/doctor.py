"""``tidelock doctor``: what this machine gives, what is wrong on it, and how to mend it."""

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from tidelock.cli import DONE, FAILED, output

if TYPE_CHECKING:
    from tidelock.cli.examination import Report, Suspect


def doctor_options(parser: ArgumentParser) -> None:
    """Options of doctor."""
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")
    parser.add_argument("--fix", action="store_true", help="offer to end orphans of this deck, one by one")
    parser.epilog = (
        "examples:\n"
        "  tidelock doctor\n"
        "  tidelock doctor --json | jq .layers\n"
        "  tidelock doctor --fix\n\n"
        "Exit code 1 when something is wrong. Nothing is ended without --fix and your yes, and processes\n"
        "that only look alike are never ended from here."
    )


def doctor(options: Namespace) -> int:
    """Look at the machine and the deck: kernel features and what each gives, how strongly workers are contained,
    limits, locks and their holders, duplicates and orphans, and a verdict for each of the four layers.
    """
    from tidelock.cli.examination import examine

    report = examine(options.state)
    if options.json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _print(report)
    mended = _fix(report.suspects) if options.fix else 0
    return FAILED if len(report.problems) > mended else DONE


def _print(report: "Report") -> None:
    colour = output.wants_colour()

    def mark(*, good: bool) -> str:
        return output.painted("yes" if good else "NO ", "32" if good else "31", colour=colour)

    owner = f"owner is pid {report.owner_pid}" if report.supervised else "not supervised"
    print(f"Linux {report.kernel}; deck {report.state_dir}: {owner}\n")
    print("Kernel and machine")
    for feature in report.features:
        print(f"  {mark(good=feature.present)}  {feature.name}: {feature.gives if feature.present else feature.without}")
    print(f"\nContainment: {report.containment}\n\nLayers")
    for layer in report.layers:
        print(f"  {mark(good=layer.holds)}  {layer.layer}: {layer.strength}; {layer.why}")
    print("\nLimits")
    for limit in report.limits:
        value = "unlimited" if limit.value is None else str(limit.value)
        print(f"  {mark(good=limit.enough)}  {limit.name} = {value}: {limit.room}")
    print("\nLocks held")
    for lock in report.locks[:20]:
        who = ", ".join(f"pid {pid} ({command[:60]})" for pid, command in zip(lock.holders, lock.commands, strict=True))
        print(f"  {lock.lock}: {who or 'by a process that cannot be seen from here'}")
    if len(report.locks) > 20:  # noqa: PLR2004 - a screenful
        print(f"  and {len(report.locks) - 20} more (--json shows all)")
    if not report.locks:
        print("  none")
    print("\nDuplicates and orphans")
    for suspect in report.suspects:
        print(f"  pid {suspect.pid} {suspect.kind}: {suspect.command[:80]} — {suspect.why}")
    if not report.suspects:
        print("  none found")
    print()
    for problem in report.problems:
        print(output.painted(f"! {problem}", "31", colour=colour))
    if not report.problems:
        print(output.painted("Nothing is wrong.", "32", colour=colour))


def _fix(suspects: "list[Suspect]") -> int:
    """Offer to end what carries our cookie and is wanted by no record; returns how many are gone."""
    mended = 0
    for suspect in suspects:
        if suspect.cookie is None:
            output.note(f"pid {suspect.pid} only looks alike: end it yourself if it is yours to end")
            continue
        try:
            answer = input(f"End pid {suspect.pid} ({suspect.command[:60]}), {suspect.kind}? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() in {"y", "yes"} and _end(suspect):
            mended += 1
    return mended


def _end(suspect: "Suspect") -> bool:
    from tidelock.kernel.containment import Tree
    from tidelock.kernel.escalation import Subject, stop_trees
    from tidelock.model import Cookie

    # By its cookie, read again when it is signalled: whoever got the pid meanwhile is not meant.
    tree = Tree(suspect.worker or str(suspect.pid), Cookie(suspect.cookie or ""), None)
    outcome = stop_trees([Subject(tree)])[tree.name]
    print(f"pid {suspect.pid}: {'gone' if outcome.gone else 'still there'}")
    return outcome.gone
