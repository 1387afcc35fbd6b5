"""``everdeck top``: a live view in the terminal, on Textual."""

import sys
from argparse import ArgumentParser, Namespace

from everdeck.cli import DONE, FAILED, USED_WRONGLY


def top_options(parser: ArgumentParser) -> None:
    """Options of top."""
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="how often to look (default 1)")
    parser.epilog = (
        "keys, as on the page: s start, x stop, r restart, e reset, Delete remove, l log on the whole screen,\n"
        "j/k down and up, / search, c/m/n sort by cpu, memory, name, q quit; stop, reset and remove ask first"
    )


def top(options: Namespace) -> int:
    """A live view of the deck: every worker with its cpu, memory and last words; act on the chosen one by a key."""
    if options.interval <= 0:
        print("everdeck top: --interval takes a number above 0", file=sys.stderr)
        return USED_WRONGLY
    if not sys.stdout.isatty():
        print("everdeck top needs a terminal; for scripts there is `everdeck ps --json`", file=sys.stderr)
        return USED_WRONGLY
    try:
        from everdeck.cli.top_view import Top
    except ModuleNotFoundError as error:
        print(f"everdeck: {error.name} is not installed; pip install 'everdeck[top]'", file=sys.stderr)
        return FAILED
    Top(options.state, options.interval).run()
    return DONE
