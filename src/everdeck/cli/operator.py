"""``everdeck operator``: bring back workers of a Kubernetes namespace whose node has died."""

import asyncio
import logging
import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Coroutine
from typing import Any

from everdeck.cli import DONE


def operator_options(parser: ArgumentParser) -> None:
    """Options of operator."""
    parser.add_argument(
        "--namespace", default=None, metavar="NAME", help="the namespace (default: that of --state, or of this pod)"
    )
    parser.add_argument("--metrics", default=None, metavar="HOST:PORT", help="serve /metrics there (default: nowhere)")
    parser.epilog = (
        "examples:\n"
        "  everdeck operator --namespace bots\n"
        "  everdeck export kubernetes everdeck.toml | kubectl apply -f -    (deploys one)"
    )


def operator(options: Namespace) -> int:
    """Bring back workers of a Kubernetes namespace whose node has died, and keep the namespace's events.

    It runs until SIGTERM; any number may run at once, and one of them leads.
    """
    from everdeck.cluster import operator as cluster

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    namespace = cluster.namespace_of(options.namespace, str(options.state))
    asyncio.run(_live(cluster.run(namespace, options.metrics)))
    return DONE


async def _live(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        logging.getLogger("everdeck.operator").info("leaving")
