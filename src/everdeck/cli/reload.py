"""``everdeck reload``."""

from argparse import ArgumentParser, Namespace
from typing import Any

from everdeck.cli import DONE, FAILED
from everdeck.client import Daemon
from everdeck.errors import ClientError

WAIT_SECONDS = 60.0


def reload_options(parser: ArgumentParser) -> None:
    """Options of reload."""
    parser.epilog = "example:\n  pip install --upgrade everdeck && everdeck reload"


def reload(options: Namespace) -> int:
    """Replace the running daemon by the code that is installed now: same pid, no worker notices.

    The new code is tried out first, in a process of its own that is started as the daemon will be, reads the
    configuration and the certificates, and writes to the registry. If that fails nothing is replaced and the reason
    is printed.
    """
    with Daemon.of(options) as daemon:
        before = daemon.deck()
        daemon.reload()
    after = _back(options, before["started_at"])
    if after is None:
        print("everdeck: the daemon did not come back; look with `everdeck doctor`, start with `everdeck up`")
        return FAILED
    print(
        f"pid {after['owner_pid']}: {before['version']} → {after['version']}, {sum(after['counts'].values())} workers"
    )
    return DONE


def _back(options: Namespace, before: str) -> dict[str, Any] | None:
    """The deck after the replacement: it answers again, and says that it was started anew."""
    import time

    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            with Daemon.of(options, timeout_seconds=WAIT_SECONDS) as daemon:
                deck = daemon.deck()
                if deck["started_at"] != before:
                    return deck
        except ClientError:
            pass
        time.sleep(0.02)  # noqa: TID251 - between two programs in one process there is nothing to wait on
    return None
