"""``python -m bench``: install, measure what is missing, write the page."""

import argparse
import signal
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.build import build_programs
from bench.companions import COMPANIONS
from bench.drivers import DRIVERS
from bench.install import install_peers
from bench.measures import MEASURES
from bench.places import IMAGES, PAGE, RESULTS, WORK
from bench.report import headline_of, write_page
from bench.runner import Choice, keys_for, run_all
from bench.store import Key, Store


def main() -> int:
    """Do what the arguments ask for."""
    asked = _arguments()
    # A shell's background job ignores these; workers would inherit that, and undoing it costs a launcher per start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    console = Console(highlight=False)
    # Quick numbers are a smoke test: they neither resume nor replace a full run, and the published page stays.
    store = Store(WORK / "quick-results" if asked.quick else RESULTS, fresh=asked.fresh)
    if not asked.report and not asked.companions:
        build_programs()
        install_peers(console.print)
        choice = Choice(asked.quick, tuple(asked.only), tuple(asked.driver), asked.largest, asked.steady)
        keys = [key for key in keys_for(choice) if asked.again or not store.has(key)]
        _measure(keys, store, choice, console)
    if asked.companions:
        for companion in COMPANIONS:
            console.print(f"{companion.script}: {companion.run(store, quick=asked.quick)}", markup=False)
    page, images = (WORK / "benchmarks.md", WORK / "img") if asked.quick else (PAGE, IMAGES)
    write_page(store, page, images)
    console.print(f"written: {page}")
    return 0


def _measure(keys: list[Key], store: Store, choice: Choice, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=len(keys))
        for done, (key, result, seconds) in enumerate(run_all(keys, store, choice), start=1):
            outcome = f"failed: {result.failure}" if result.failure else headline_of(result)
            console.print(f"[{done}/{len(keys)}] {key!s:<40} {outcome} ({seconds:.1f} s)", markup=False, soft_wrap=True)
            upcoming = str(keys[done]) if done < len(keys) else "done"
            progress.update(task, advance=1, description=upcoming)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Everdeck beside its peers.")
    parser.add_argument("--quick", action="store_true", help="small sizes, one sample each: under three minutes")
    parser.add_argument("--only", action="append", default=[], choices=list(MEASURES), help="this measure (repeatable)")
    parser.add_argument(
        "--driver", action="append", default=[], choices=list(DRIVERS), help="this manager (repeatable)"
    )
    parser.add_argument("--largest", type=int, help="leave out sizes above this")
    parser.add_argument("--steady", action="store_true", help="at real-time priority, for a busy machine (needs root)")
    parser.add_argument("--again", action="store_true", help="measure also what is already there")
    parser.add_argument("--fresh", action="store_true", help="begin a new run instead of going on with the newest")
    parser.add_argument("--companions", action="store_true", help="run the single parts' scripts instead")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the page from the stored results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
