"""``everdeck adopt``: take over a process that somebody else started."""

import sys
from argparse import ArgumentParser, Namespace

import msgspec

from everdeck.cli import DONE, USED_WRONGLY
from everdeck.cli.reach import reached
from everdeck.model import worker_name


def adopt_options(parser: ArgumentParser) -> None:
    """Options of adopt."""
    parser.add_argument("name", metavar="NAME", help="the worker it becomes")
    parser.add_argument("pid", metavar="PID", type=int, help="the process, as it runs now")
    parser.add_argument(
        "-e", "--env", action="append", default=[], metavar="K[=V]", help="keep this variable for restarts"
    )
    parser.add_argument("--json", action="store_true", help="print its status as JSON")
    parser.epilog = (
        "example:\n"
        "  everdeck adopt alice $(pgrep -f 'bot.py --user alice') -e BOT_HOME\n\n"
        "-e K takes the variable's value from the running process, -e K=V sets it. Everything else of its\n"
        "environment is left out of the spec. It cannot be given our lock, so it is known by its identity."
    )


def adopt(options: Namespace) -> int:
    """Take over a running process: it goes on undisturbed, and is supervised from now on.

    Its command line and working directory become the spec from which it is restarted.
    """
    if options.pid < 2:  # noqa: PLR2004 - pid 1 is the machine's, not a worker
        print("everdeck adopt: PID must be a process of yours", file=sys.stderr)
        return USED_WRONGLY
    env = {}
    for text in options.env:
        key, equals, value = text.partition("=")
        env[key] = value if equals else _environment_of(options.pid).get(key, "")
    with reached(options) as deck:
        status = msgspec.to_builtins(deck.adopt(worker_name(options.name), options.pid, {"env": env} if env else {}))
    if options.json:
        import json

        print(json.dumps(status))
    else:
        print(f"{status['name']} {status['state']} (pid {status['pid']}), adopted")
    return DONE


def _environment_of(pid: int) -> dict[str, str]:
    from pathlib import Path

    from everdeck.errors import SpecError

    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError as error:
        raise SpecError("PID", pid, f"a process whose environment may be read ({error.strerror})") from error
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry)
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, _, value in pairs}
