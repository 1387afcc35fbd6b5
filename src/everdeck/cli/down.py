"""``everdeck down``: end the daemon. The workers stay, unless they are asked to go too."""

import os
import sys
from argparse import ArgumentParser, Namespace

from everdeck.cli import DONE, FAILED
from everdeck.cli.reach import reached
from everdeck.client import Daemon
from everdeck.errors import EverdeckError

LEAVE_SECONDS = 60.0


def down_options(parser: ArgumentParser) -> None:
    """Options of down."""
    parser.add_argument("--workers", action="store_true", help="stop every worker first")
    parser.epilog = (
        "examples:\n"
        "  everdeck down              (adoptable workers run on; the next `everdeck up` takes them over)\n"
        "  everdeck down --workers    (nothing of this deck runs afterwards)"
    )


def down(options: Namespace) -> int:
    """Stop the daemon. Bound workers end with it; adoptable ones run on, unsupervised, until the next `everdeck up`.

    It returns when the daemon is gone. Logs, data and records stay; `everdeck rm` deletes those.
    """
    from everdeck.errors import ProcessGone
    from everdeck.kernel import identity as ids

    with Daemon.of(options) as daemon:
        owner = daemon.deck()["owner_pid"]
        try:
            pidfd = ids.open_pidfd(owner)
        except ProcessGone:
            return DONE
        try:
            if options.workers and not _all_stopped(options):
                return FAILED
            left = daemon.leave()["left_running"]
            return _gone(pidfd, owner, left)
        finally:
            os.close(pidfd)


def _all_stopped(options: Namespace) -> bool:
    try:
        with reached(options) as deck:
            deck.stop_many([status.name for status in deck.list()], lambda _status: None)
    except EverdeckError as error:
        print(f"everdeck: {error}", file=sys.stderr)
        print("everdeck: the daemon was left running, so that this can be looked at", file=sys.stderr)
        return False
    return True


def _gone(pidfd: int, owner: int, left: int) -> int:
    from select import select

    if not select([pidfd], [], [], LEAVE_SECONDS)[0]:
        print(f"everdeck: the daemon (pid {owner}) was told to leave and is still there", file=sys.stderr)
        return FAILED
    print(f"down (pid {owner})" + (f"; {left} workers run on, unsupervised" if left else ""))
    return DONE
