"""``everdeck events``: what happened, and what happens."""

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import msgspec

from everdeck import wording
from everdeck.cli import DONE, FAILED, USED_WRONGLY, output
from everdeck.cli.reach import is_elsewhere, reached
from everdeck.errors import ClientError, NoOwner
from everdeck.model import EventKind

RETRY_SECONDS = 0.5
NAME_WIDTH = 32


def events_options(parser: ArgumentParser) -> None:
    """Options of events."""
    parser.add_argument("worker", metavar="NAME", nargs="?", help="only this worker's")
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more; survives a restart of the owner")
    parser.add_argument("--json", action="store_true", help="one event per line, as JSON")
    parser.add_argument("--after", type=int, metavar="ID", help="only events after this id")
    parser.add_argument("-n", "--lines", type=int, default=None, metavar="N", help="only the last N")
    kinds = [kind.value for kind in EventKind]
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="KIND",
        choices=kinds,
        help="only this kind; may be repeated",
    )
    parser.epilog = (
        "examples:\n"
        "  everdeck events -n 20\n"
        "  everdeck events alice -f\n"
        "  everdeck events --kind crashed --kind failed\n"
        "  everdeck events --json --after 120 | jq -c 'select(.kind == \"crashed\")'"
    )


def events(options: Namespace) -> int:
    """What happened, oldest first. Events are durable and numbered, so none is missed between two looks."""
    if options.lines is not None and options.lines < 0:
        print("everdeck events: -n takes a number of at least 0", file=sys.stderr)
        return USED_WRONGLY
    if options.worker is not None and not _is_known(options):
        return FAILED
    last = _print_past(options)
    if options.follow:
        _print_future(options, last)
    return DONE


def _is_known(options: Namespace) -> bool:
    """Whether there is, or ever was, a worker of that name; says so if not."""
    from everdeck.cli.ps import look
    from everdeck.deck.peek import peek_events
    from everdeck.model import worker_name

    name = worker_name(options.worker)
    known = [worker.name for worker in look(options).workers]
    if name in known or (not is_elsewhere(options.where) and peek_events(options.state, limit=1, worker=name)):
        return True
    output.note(f"everdeck: no worker {name!r} in this deck{output.suggestions(name, known)}")
    return False


def _print_past(options: Namespace) -> int:
    """Everything recorded so far that was asked for; returns the last id there is."""
    last = options.after or 0
    found: list[dict[str, Any]] = []
    try:
        with reached(options, patience_seconds=0) as deck:
            while batch := deck.events(last, 5000, options.worker):
                last = batch[-1].id
                found += msgspec.to_builtins(batch)
    except NoOwner:
        if is_elsewhere(options.where):
            raise
        from everdeck.deck.peek import peek_events

        output.note("not supervised: no owner is running; these are the events recorded so far")
        found = msgspec.to_builtins(peek_events(options.state, after=last, worker=options.worker))
        last = found[-1]["id"] if found else last
    found = [event for event in found if _is_wanted(event, options)]
    if options.lines is not None:
        found = found[-options.lines :] if options.lines else []
    for event in found:
        _print(event, as_json=options.json)
    sys.stdout.flush()  # into a pipe too: what follows may be hours away
    return last


def _is_wanted(event: dict[str, Any], options: Namespace) -> bool:
    return not options.kind or event["kind"] in options.kind


def _print_future(options: Namespace, last: int) -> None:
    """Events as they come. When the owner goes, wait for the next one and resume after the last event seen."""
    lost = False
    while True:
        try:
            with reached(options) as deck:
                for event in deck.follow(last):
                    last, lost = event.id, False
                    told = msgspec.to_builtins(event)
                    if _is_wanted(told, options) and options.worker in (None, event.worker):
                        _print(told, as_json=options.json)
                    sys.stdout.flush()
        except ClientError:
            if not lost:
                output.note("not supervised: waiting for an owner; start one with `everdeck up`")
            lost = True
        _wait_for_an_owner()


def _wait_for_an_owner() -> None:
    import time

    time.sleep(RETRY_SECONDS)  # noqa: TID251 - a person waits; the socket of an owner that does not exist yet gives no event


def _print(event: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(event))
        return
    bad = {"crashed", "failed", "killed", "unhealthy", "lock-conflict", "orphan-reaped"}
    calm = {"stopping", "stopped", "exited", "log-rotated"}
    paint = "31" if event["kind"] in bad else "2" if event["kind"] in calm else "32"
    kind = output.painted(event["kind"].ljust(13), paint, colour=output.wants_colour())
    at = event["at"][:19].replace("T", " ")
    name = output.shortened(event["worker"] or "(deck)", NAME_WIDTH)
    print(f"{event['id']:>6}  {at}  {name:<16} {kind} {wording.plain(wording.detail(event['detail']))}".rstrip())
