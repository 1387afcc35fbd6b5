"""``everdeck send``: send a message by a satellite."""

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from everdeck.cli import DONE
from everdeck.cli.reach import TOKEN_ENV, is_elsewhere


def send_options(parser: ArgumentParser) -> None:
    """Options of send."""
    parser.usage = "everdeck send NAME --to WHOM [options] TEXT"
    parser.add_argument("name", metavar="NAME", help="a satellite that can send: telegram, gmail, smtp")
    parser.add_argument("text", metavar="TEXT", help="what to say (- is standard input)")
    parser.add_argument("--to", required=True, metavar="WHOM", help="a chat's number, a mail address")
    parser.add_argument("--subject", metavar="TEXT", help="of a mail")
    parser.add_argument("--attach", action="append", default=[], metavar="FILE", help="a file that goes with it")
    parser.add_argument("--json", action="store_true", help="print its number as JSON")
    parser.epilog = (
        "examples:\n"
        "  everdeck send bob-tg --to 4242 'good morning'\n"
        "  df -h | everdeck send mail --to bob@example.org --subject 'disk space' -"
    )


def send(options: Namespace) -> int:
    """Send a message by a satellite: its words are on disk when this returns.

    The satellite sends it now, or as soon as it runs and the other side can be reached; `everdeck feed NAME` shows
    what is still to be sent and what was refused. No daemon is needed to take the message.
    """
    text = sys.stdin.read() if options.text == "-" else options.text
    files = [str(Path(file).resolve(strict=True)) for file in options.attach]
    number = (_by_its_deck if is_elsewhere(options.where) else _by_its_file)(options, text, files)
    if options.json:
        import json

        print(json.dumps({"worker": options.name, "number": f"out-{number}"}))
    else:
        print(f"{options.name}: out-{number} will be sent to {options.to}")
    return DONE


def _by_its_file(options: Namespace, text: str, files: list[str]) -> int:
    from everdeck.deck.feeds import feed_of
    from everdeck.deck.peek import peek_spec
    from everdeck.errors import SpecError
    from everdeck.messages import outgoing
    from everdeck.satellites import bridge, kind_of

    spec = peek_spec(options.state, options.name)
    if spec.satellite is None or not kind_of(spec.satellite.kind).sends:
        raise SpecError("NAME", options.name, "a satellite that can send: telegram, gmail, smtp")
    message = outgoing(options.to, text, subject=options.subject, attachments=files)
    return bridge.send(feed_of(options.state, options.name, spec), message)


def _by_its_deck(options: Namespace, text: str, files: list[str]) -> int:
    from everdeck import Deck

    with Deck(options.where, token=os.environ.get(TOKEN_ENV)) as deck:
        return deck.send(options.name, to=options.to, text=text, subject=options.subject, attachments=files)
