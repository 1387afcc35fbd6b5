"""``everdeck move``: workers of this machine's deck become workers of a cluster's."""

import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import msgspec

from everdeck.cli import CLUSTER, DONE, FAILED, USED_WRONGLY, output


def move_options(parser: ArgumentParser) -> None:
    """Options of move."""
    parser.usage = "everdeck move --to kubernetes:NAMESPACE NAME… | --all"
    parser.add_argument("names", metavar="NAME", nargs="*", help="workers of this deck")
    parser.add_argument("--to", required=True, metavar="WHERE", help="kubernetes:NAMESPACE")
    parser.add_argument("--all", action="store_true", help="every worker of this deck")
    parser.add_argument("--keep", action="store_true", help="leave it known here, stopped, with its files")
    parser.add_argument("--json", action="store_true", help='{"results": [{"name", "ok", "status" or "problem"}]}')
    parser.epilog = (
        "examples:\n"
        "  everdeck move --to kubernetes:bots alice bob\n"
        "  everdeck move --to kubernetes:bots --all --keep\n\n"
        "Killed on the way it leaves each worker stopped, or running in one place; type the same again to go on."
    )


def move(options: Namespace) -> int:
    """Move workers from this machine to a cluster: stop them here, copy their data, log and secrets, start them there.

    A worker never runs in both places. When its files have arrived, as a checksum proves, it is forgotten here, with
    them, unless you say --keep. Its command must be in the cluster's image; it runs in its data directory there.
    """
    if bool(options.names) == options.all:
        print("everdeck move: say which workers, or --all", file=sys.stderr)
        return USED_WRONGLY
    if options.where.startswith(CLUSTER) or not options.to.startswith(CLUSTER):
        print("everdeck move: from a directory of this machine (--state) --to kubernetes:NAMESPACE", file=sys.stderr)
        return USED_WRONGLY
    import asyncio

    results = asyncio.run(_moved(options))
    failed = [result for result in results if not result["ok"]]
    if options.json:
        import json

        print(json.dumps({"results": results}))
    for result in failed:
        print(f"everdeck: {result['name']}: {result['problem']['detail']}", file=sys.stderr)
    return FAILED if failed else DONE


async def _moved(options: Namespace) -> list[dict[str, Any]]:
    """One after the other: each is away for as short as possible."""
    from everdeck.cluster import ClusterDeck
    from everdeck.cluster.move import move as move_one
    from everdeck.deck import AsyncDeck
    from everdeck.errors import EverdeckError
    from everdeck.faults import fault_of
    from everdeck.model import worker_name

    there = ClusterDeck(options.to)
    results: list[dict[str, Any]] = []
    async with AsyncDeck(options.state) as here:
        await there.open()
        try:
            names = [status.name for status in await here.list()] if options.all else options.names
            for name in dict.fromkeys(worker_name(name) for name in names):
                try:
                    moved = await move_one(here, there, name, keep=options.keep)
                except EverdeckError as error:
                    problem = {"detail": str(error), **msgspec.to_builtins(fault_of(error))}
                    results.append({"name": name, "ok": False, "problem": problem})
                    continue
                results.append({"name": name, "ok": True, "status": msgspec.to_builtins(moved.status)})
                if not options.json:
                    _print(name, options, moved)
        finally:
            await there.close()
    return results


def _print(name: str, options: Namespace, moved: Any) -> None:
    copied = f", {output.size(moved.copied_bytes)} copied" if moved.copied_bytes else ""
    print(f"{name} {moved.status.state} in {options.to}{copied}", flush=True)
    if moved.dropped_cwd is not None:
        print(f"  it ran in {moved.dropped_cwd}, which is no directory there; it runs in its data directory now")
    if moved.left_out:
        print(f"  {moved.left_out} pipes and sockets in its data directory were left out")
    if options.keep:
        print(f"  it is still known here, stopped: `everdeck rm {name}` when you are sure")
