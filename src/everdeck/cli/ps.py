"""``everdeck ps``: who runs. Works with no owner too, and then says so."""

import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from datetime import datetime

import msgspec

from everdeck import wording
from everdeck.cli import DONE, FAILED, output
from everdeck.cli.reach import is_elsewhere, reached
from everdeck.errors import ClientError, NoOwner
from everdeck.model import BROKEN, Snapshot, State, WorkerStatus, worker_name

# A hung owner must not hang the one verb that shows it.
ANSWER_SECONDS = 10.0
MOST_NAME = 128
_ENDED = frozenset({State.EXITED, State.BACKOFF, State.FAILED})
STATES = ("running", "starting", "unhealthy", "backoff", "failed", "stopping", "stopped", "exited")
NOT_SUPERVISED = "not supervised: no owner is running; start one with `everdeck up`"


def ps_options(parser: ArgumentParser) -> None:
    """Options of ps."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these workers")
    parser.add_argument("--json", action="store_true", help='{"supervised", "owner_pid", "workers": [...]}')
    parser.add_argument("--state-is", metavar="STATE", choices=STATES, help="only workers in this state")
    parser.add_argument("--label", metavar="KEY[=VALUE]", help="only workers with this label")
    parser.add_argument("-q", "--quiet", action="store_true", help="names only")
    parser.epilog = (
        "examples:\n"
        "  everdeck ps\n"
        "  everdeck ps alice bob\n"
        "  everdeck ps --json | jq '.workers[] | select(.state == \"failed\").name'\n"
        "  everdeck ps -q --state-is failed | xargs everdeck reset"
    )


def ps(options: Namespace) -> int:
    """List workers and their state, one line each, and the deck's totals.

    Being up and being supervised are two facts: with no owner running, the workers are shown as the registry and
    the kernel know them, and a last line says that nobody would restart them.
    """
    shown = look(options)
    if options.names and (unknown := _unknown(options.names, [worker.name for worker in shown.workers])):
        print(unknown, file=sys.stderr)
        return FAILED
    if options.names or options.state_is or options.label:
        wanted = [worker for worker in shown.workers if _is_wanted(worker, options)]
        shown = Snapshot(shown.supervised, shown.owner_pid, wanted)
    if options.json:
        print(msgspec.json.encode(shown).decode())
    elif options.quiet:
        for worker in shown.workers:
            print(worker.name)
    else:
        _print_table(shown)
    return DONE


def look(options: Namespace) -> Snapshot:
    """The deck as its owner sees it or, without one, as the registry and the kernel do."""
    try:
        with reached(options, timeout_seconds=ANSWER_SECONDS, patience_seconds=0) as deck:
            workers = deck.list()
            return Snapshot(supervised=True, owner_pid=deck.owner_pid(), workers=workers)
    except ClientError as error:
        if is_elsewhere(options.where):
            raise
        if not isinstance(error, NoOwner):
            output.note(f"everdeck: {error}; this is what the registry and the kernel know")

        from everdeck.deck.peek import peek

        return peek(options.state)


def _unknown(names: list[str], known: list[str]) -> str:
    """What is said about names that are no worker's; empty when all are known."""
    missing = [worker_name(name) for name in names if name not in known]
    return "\n".join(f"everdeck: no worker {name!r} in this deck{output.suggestions(name, known)}" for name in missing)


def _is_wanted(worker: WorkerStatus, options: Namespace) -> bool:
    if options.names and worker.name not in options.names:
        return False
    if options.state_is and worker.state != options.state_is:
        return False
    if options.label:
        key, wants_value, value = options.label.partition("=")
        return key in worker.labels and (not wants_value or worker.labels[key] == value)
    return True


def _print_table(shown: Snapshot) -> None:
    workers = shown.workers
    if workers:
        header = ("NAME", "STATE", "PID", "UPTIME", "CPU", "RSS", "RESTARTS", "NOTE")
        colours: list[dict[int, str]] = []
        if output.wants_colour():
            paints = [output.STATE_COLOURS.get(worker.state) for worker in workers]
            colours = [{1: paint} if paint else {} for paint in paints]
        width = name_width(output.columns()) if sys.stdout.isatty() else MOST_NAME
        print(output.table(header, [_row(worker, width) for worker in workers], colours))
        if len(workers) > 1:
            print(totals(workers))
    elif shown.supervised:
        print("no workers yet; start one with `everdeck start NAME -- COMMAND`")
    if not shown.supervised:
        print(NOT_SUPERVISED)


def name_width(columns: int) -> int:
    """How wide names may be in a terminal of so many columns: the other columns take about 58."""
    return max(12, columns - 58)


def totals(workers: list[WorkerStatus]) -> str:
    """``3 workers: 2 running, 1 failed; cpu 3.1%, memory 48.2M``."""
    counts = Counter([worker.state for worker in workers])
    states = ", ".join(f"{counts[State(state)]} {state}" for state in STATES if counts[State(state)])
    cpu = sum([worker.cpu_percent or 0 for worker in workers])
    rss = sum([worker.rss_bytes or 0 for worker in workers])
    return f"{len(workers)} workers: {states}; cpu {cpu:.1f}%, memory {output.size(rss)}"


def _row(worker: WorkerStatus, width: int) -> tuple[str, ...]:
    # Piped on, a name is whole: a program reads it. In a terminal one long name must not push the rest off.
    name = worker.name if len(worker.name) <= width else output.shortened(worker.name, width)
    cpu = worker.cpu_percent
    return (
        name,
        worker.state,
        str(worker.pid or "-"),
        output.duration(worker.uptime_seconds),
        "-" if cpu is None else f"{cpu:.1f}%",
        output.size(worker.rss_bytes),
        str(worker.restarts),
        note(worker),
    )


def note(worker: WorkerStatus) -> str:
    """What a person wants to know beside the numbers."""
    notes = []
    if worker.lifetime == "bound":
        notes.append("bound")
    if worker.state is State.BACKOFF and (until := worker.backoff_until):
        notes.append(f"next try in {output.duration((until - datetime.now(until.tzinfo)).total_seconds())}")
    if worker.state is State.FAILED and worker.health != BROKEN:
        notes.append(f"{worker.crashes} crashes; look at its log, then `everdeck reset {worker.name}`")
    if worker.exit is not None and worker.state in _ENDED:
        notes.append(wording.ending(msgspec.to_builtins(worker.exit)))
    if worker.port:
        notes.append(f"port {worker.port}")
    if worker.health:
        notes.append(worker.health)
    if worker.health_reason:
        notes.append(worker.health_reason)
    if worker.status_text:
        notes.append(worker.status_text)
    return ", ".join(notes)
