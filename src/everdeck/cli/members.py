"""``everdeck members``: which processes have the deck open, and which of them owns it."""

import sys
from argparse import ArgumentParser, Namespace

import msgspec

from everdeck.cli import DONE
from everdeck.cli.reach import reached

# A hung owner must not hang a verb that only looks.
ANSWER_SECONDS = 10.0


def members_options(parser: ArgumentParser) -> None:
    """Options of members."""
    parser.add_argument("--json", action="store_true", help="a list of {pid, uid, program, owner, since}")
    parser.epilog = "examples:\n  everdeck members\n  everdeck members --json | jq '.[] | select(.owner).pid'"


def members(options: Namespace) -> int:
    """List the processes that have the deck open: its owner first, then the members by age.

    Any of them may own the deck tomorrow: when the owner ends, a member takes over.
    """
    with reached(options, timeout_seconds=ANSWER_SECONDS) as deck:
        found = deck.members()
    if options.json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return DONE
    if not found:
        print("nobody owns a cluster's deck; its workers are the cluster's")
        return DONE
    width = max(len(str(one.pid)) for one in found)
    for one in found:
        print(f"{one.pid:>{width}}  {'owner ' if one.owner else 'member'}  {one.program[:120]}")
    return DONE
