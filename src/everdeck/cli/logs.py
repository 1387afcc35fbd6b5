"""``everdeck logs``: what workers print, read from their files, with or without an owner."""

import os
import sys
from argparse import ArgumentParser, Namespace

from everdeck.cli import DONE, FAILED, USED_WRONGLY, output
from everdeck.cli.reach import is_elsewhere, reached
from everdeck.model import worker_name
from everdeck.statedir import StateDir


def logs_options(parser: ArgumentParser) -> None:
    """Options of logs."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="workers; several are shown together")
    parser.add_argument("--all", action="store_true", help="every worker")
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more")
    parser.add_argument("-n", "--lines", type=int, default=None, metavar="N", help="the last N lines (default 20)")
    parser.add_argument("--since", metavar="WHEN", help="10m, 2h, 1d, 20:40, 2026-11-15, 2026-11-15T20:40")
    parser.add_argument("--until", metavar="WHEN", help="as --since")
    parser.add_argument("-g", "--grep", metavar="REGEX", help="only lines that match")
    parser.add_argument("-t", "--times", action="store_true", help="the time before lines that have none of their own")
    parser.add_argument("--json", action="store_true", help='one {"worker", "at", "line"} per line')
    parser.epilog = (
        "examples:\n"
        "  everdeck logs alice -f\n"
        "  everdeck logs alice --times\n"
        "  everdeck logs alice bob --since 10m --grep 'error|timeout'\n"
        "  everdeck logs --all -f"
    )


def logs(options: Namespace) -> int:
    """What workers print: the last lines, lines since a moment, or as they come."""
    if is_elsewhere(options.where):
        return _from_elsewhere(options)
    places = StateDir(options.state)
    folder = places.workers
    known = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()) if folder.is_dir() else []
    names = known if options.all else [worker_name(name) for name in options.names]
    if not names and not options.all:
        print("everdeck logs: say which worker, or --all", file=sys.stderr)
        return USED_WRONGLY
    for name in names:
        if name not in known:
            output.note(f"everdeck: no worker {name!r} in this deck{output.suggestions(name, known)}")
            return FAILED
    if not _supervised(options):
        output.note("not supervised: no owner is running; this is what was written so far")
    from everdeck.logs import ledger
    from everdeck.logs import reader as logreader
    from everdeck.logs import show as logshow

    code = DONE
    for name in names:
        log_dir = places.worker(name).log
        if (obstacle := ledger.obstacle(log_dir)) is not None:
            code = FAILED
            output.note(
                f"everdeck: {log_dir / ledger.CURRENT} is {obstacle}, not a log, and is not read; "
                f"move it away, and the next start of {name!r} makes a log again"
            )
    since = logreader.moment(options.since) if options.since else None
    until = logreader.moment(options.until) if options.until else None
    lines = options.lines
    if lines is None:
        lines = None if since or until else 20
    logshow.show(
        {name: places.worker(name).log for name in names},
        sys.stdout,
        lines=lines,
        follow=options.follow,
        since=since,
        until=until,
        grep=options.grep,
        times=options.times,
        as_json=options.json,
    )
    return code


def _from_elsewhere(options: Namespace) -> int:
    """The log of one worker on another machine, by the verbs of its daemon."""
    from everdeck.logs import reader as logreader

    if options.all or len(options.names) != 1 or options.times or options.json:
        print("everdeck logs: of a deck elsewhere, one worker at a time, without --times and --json", file=sys.stderr)
        return USED_WRONGLY
    name = worker_name(options.names[0])
    since = logreader.moment(options.since) if options.since else None
    until = logreader.moment(options.until) if options.until else None
    lines = options.lines if options.lines is not None else None if since or until else 20
    with reached(options) as deck:
        if options.follow:
            for line in deck.follow_logs(name, lines or 0, options.grep):
                print(line, flush=True)
            return DONE
        for line in deck.logs(name, lines, since=since, until=until, grep=options.grep):
            print(line)
    return DONE


def _supervised(options: Namespace) -> bool:
    """Whether somebody listens on the deck's socket; nothing is asked."""
    from everdeck.errors import ClientError

    try:
        with reached(options, patience_seconds=0) as deck:
            deck.owner_pid()
    except ClientError:
        return False
    return True
