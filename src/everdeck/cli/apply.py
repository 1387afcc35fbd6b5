"""``everdeck apply`` and ``everdeck schema``: from a file to a deck."""

import contextlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from everdeck.cli import CLUSTER, DONE, FAILED, output
from everdeck.client import Daemon

if TYPE_CHECKING:
    from everdeck.config import Config

_SIGNS = {"add": ("+", "32"), "change": ("~", "33"), "remove": ("-", "31")}


def apply_options(parser: ArgumentParser) -> None:
    """Options of apply."""
    parser.add_argument("file", metavar="FILE", nargs="?", default="everdeck.toml", help="default: everdeck.toml")
    parser.add_argument("--dry-run", action="store_true", help="show the plan and change nothing")
    parser.add_argument("--json", action="store_true", help="the plan and the results as JSON")
    parser.epilog = (
        "examples:\n"
        "  everdeck apply --dry-run\n"
        "  everdeck apply everdeck.toml\n\n"
        "A file with a mistake changes nothing: every problem is shown with its line and key.\n"
        "Workers started by hand are left alone; workers that an earlier file brought and this one\n"
        "no longer names are removed."
    )


def apply(options: Namespace) -> int:
    """Make the workers match a configuration file.

    The plan is shown first: what is added, changed, removed and unchanged.
    """
    import msgspec

    from everdeck.config import load

    config = load(options.file)
    body = {
        "workers": msgspec.to_builtins(config.workers),
        "templates": config.templates,
        "file": config.path,
        "dry_run": True,
    }
    with _applier(options, config) as carry_out:
        applied = carry_out(body)
        if not options.json:
            _print_plan(applied)
        if not options.dry_run:
            applied = carry_out({**body, "dry_run": False})
    if options.json:
        import json

        print(json.dumps(applied))
    failed = [result for result in applied["results"] if not result["ok"]]
    for result in failed:
        print(f"everdeck: {result['name']}: {result['problem']['detail']}", file=sys.stderr)
    if not options.json and not options.dry_run and not failed:
        print("done")
    return FAILED if failed else DONE


@contextlib.contextmanager
def _applier(options: Namespace, config: "Config") -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Who carries out a plan: the deck's daemon; for a cluster, which needs none, this process."""
    if not options.where.startswith(CLUSTER):
        with Daemon.of(options) as daemon:
            yield daemon.apply
        return
    import asyncio

    import msgspec

    from everdeck.config import said_for_kubernetes
    from everdeck.deck import AsyncDeck
    from everdeck.server import applying
    from everdeck.server.documents import ApplyRequest

    deck = AsyncDeck(options.where)
    with asyncio.Runner() as runner:

        def carry_out(body: dict[str, Any]) -> dict[str, Any]:
            workers = applying.in_the_image(config.workers, config.path)
            request = ApplyRequest(workers, config.templates, config.path, dry_run=body["dry_run"])
            done: dict[str, Any] = msgspec.to_builtins(runner.run(applying.apply(deck, request)))
            return done

        runner.run(deck.open())
        try:
            deck.configure(said_for_kubernetes(config))
            yield carry_out
        finally:
            runner.run(deck.close())


def _print_plan(applied: dict[str, Any]) -> None:
    colour = output.wants_colour()
    counts = dict.fromkeys((*_SIGNS, "unchanged"), 0)
    for change in applied["plan"]:
        counts[change["action"]] += 1
        if change["action"] in _SIGNS:
            sign, paint = _SIGNS[change["action"]]
            fields = f" ({', '.join(change['fields'])})" if change["fields"] else ""
            print(output.painted(f"{sign} {change['name']}{fields}", paint, colour=colour))
    words = [f"{count} to {action}" if action in _SIGNS else f"{count} {action}" for action, count in counts.items()]
    print(", ".join(words))
