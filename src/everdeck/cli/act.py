"""``everdeck stop | restart | reset | rm``: one verb for one worker, several, or all."""

import contextlib
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import Any

import msgspec

from everdeck.cli import DONE, FAILED, USED_WRONGLY
from everdeck.cli.reach import Reached, reached
from everdeck.errors import EverdeckError, NameRefused, UnknownWorker
from everdeck.model import WorkerStatus, worker_name
from everdeck.verbs import MOST_AT_ONCE, RESTARTS_AT_ONCE

_PAST = {"stop": "stopped", "restart": "restarted", "reset": "reset", "remove": "removed"}
MANY = 20
RESETS_AT_ONCE = 16


def stop_options(parser: ArgumentParser) -> None:
    """Options of stop."""
    _options(parser, "stop")


def restart_options(parser: ArgumentParser) -> None:
    """Options of restart."""
    _options(parser, "restart")
    parser.add_argument(
        "--parallel",
        metavar="N",
        type=_parallel,
        default=RESTARTS_AT_ONCE,
        help=f"at most so many at the same time, 1-{MOST_AT_ONCE} (default %(default)s); 1 is a rolling restart",
    )


def reset_options(parser: ArgumentParser) -> None:
    """Options of reset."""
    _options(parser, "reset")


def rm_options(parser: ArgumentParser) -> None:
    """Options of rm."""
    _options(parser, "rm")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask, also with --all in a terminal")
    parser.add_argument(
        "--data", action="store_true", help="on Kubernetes: the volume too (on one box data always goes)"
    )


def stop(options: Namespace) -> int:
    """Stop workers: SIGTERM, the grace period, then SIGKILL to whatever is left of the tree.

    Any number stop in parallel. It returns when the trees are proven gone, so nothing you run next can
    collide with the old processes.
    """
    return _act(options, "stop")


def restart(options: Namespace) -> int:
    """Stop workers and start them again with the same spec, at most --parallel of them at the same time."""
    return _act(options, "restart")


def reset(options: Namespace) -> int:
    """Let workers try again that crashed too often: their crashes are forgotten and they are started."""
    return _act(options, "reset")


def rm(options: Namespace) -> int:
    """Stop workers and forget them. Their logs, data and secrets are deleted; on Kubernetes the volume stays unless
    you say --data.
    """
    if options.all and not options.yes and sys.stdin.isatty() and sys.stdout.isatty():
        answer = input(f"Remove every worker of {options.state}, with logs and data? [y/N] ")
        if answer.strip().lower() not in {"y", "yes"}:
            return FAILED
    return _act(options, "remove")


def on_one(deck: Reached, verb: str, name: str, *, data: bool = False) -> dict[str, Any]:
    """Act on one worker; an unknown name is answered with the ones that are near."""
    try:
        if verb == "remove":
            deck.remove(worker_name(name), data=data)
            return {"name": name, "state": "removed"}
        act: dict[str, Callable[[str], WorkerStatus]] = {
            "start": deck.start,
            "stop": deck.stop,
            "restart": deck.restart,
            "reset": deck.reset,
        }
        status: dict[str, Any] = msgspec.to_builtins(act[verb](worker_name(name)))
    except UnknownWorker as unknown:
        raise with_suggestions(deck, unknown) from None
    return status


def _options(parser: ArgumentParser, verb: str) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="workers")
    parser.add_argument("--all", action="store_true", help="every worker of the deck")
    parser.add_argument("--json", action="store_true", help='{"results": [{"name", "ok", "status" or "problem"}]}')
    parser.epilog = f"examples:\n  everdeck {verb} alice bob\n  everdeck {verb} --all"


def _parallel(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_AT_ONCE):
        raise ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_AT_ONCE}")
    return int(text)


def _act(options: Namespace, verb: str) -> int:
    if bool(options.names) == options.all:
        print(f"everdeck {options.verb}: say which workers, or --all", file=sys.stderr)
        return USED_WRONGLY
    with reached(options) as deck:
        if len(options.names) == 1:
            status = on_one(deck, verb, options.names[0], data=getattr(options, "data", False))
            result = {"name": options.names[0], "ok": True, "status": None if verb == "remove" else status}
            return _report([result], verb, options)
        names = list(dict.fromkeys(options.names)) or [status.name for status in deck.list()]
        results = _with_progress(options, deck, verb, names)
        return _report(results, verb, options)


def _with_progress(options: Namespace, deck: Reached, verb: str, names: list[str]) -> list[dict[str, Any]]:
    if not (sys.stderr.isatty() and len(names) > 1):
        return _on_many(options, deck, verb, names, lambda: None)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{verb} …", total=len(names))
        return _on_many(options, deck, verb, names, lambda: progress.advance(task))


def _on_many(
    options: Namespace, deck: Reached, verb: str, names: list[str], advance: Callable[[], object]
) -> list[dict[str, Any]]:
    """What became of each, in order; one that fails does not keep the others from theirs."""
    if verb in {"stop", "remove"}:
        known = {status.name for status in deck.list()}
        # All trees end in one pass; each is asked for again below, which then costs nothing or tells why.
        with contextlib.suppress(EverdeckError):
            deck.stop_many([name for name in names if name in known], lambda _status: advance())
        return [_result(deck, verb, name, data=getattr(options, "data", False)) for name in names]
    if verb == "restart":
        return _restarted(deck, names, options.parallel, advance)
    from concurrent.futures import ThreadPoolExecutor

    parallel = min(len(names) or 1, RESETS_AT_ONCE)
    waiting = iter(enumerate(names))
    results: dict[int, dict[str, Any]] = {}

    def take_turns() -> None:
        with reached(options) as own:  # one connection for all its turns
            # next() of an enumerate holds the interpreter's lock, so no name is taken twice.
            for number, name in waiting:
                results[number] = _result(own, verb, name)
                advance()

    with ThreadPoolExecutor(parallel) as pool:
        for lane in [pool.submit(take_turns) for _ in range(parallel)]:
            lane.result()
    return [results[number] for number in range(len(names))]


def _restarted(deck: Reached, names: list[str], parallel: int, advance: Callable[[], object]) -> list[dict[str, Any]]:
    """Restart all that are known, in groups; the owner tells of each."""
    answers: dict[str, WorkerStatus | Exception] = {}

    def progress(name: str, answer: WorkerStatus | Exception) -> None:
        answers[name] = answer
        advance()

    known = {status.name for status in deck.list()}
    with contextlib.suppress(ExceptionGroup):
        deck.restart_many([name for name in names if name in known], parallel, progress)
    return [_result(deck, "restart", name) if name not in answers else _answered(name, answers[name]) for name in names]


def _answered(name: str, answer: WorkerStatus | Exception) -> dict[str, Any]:
    if isinstance(answer, WorkerStatus):
        return {"name": name, "ok": True, "status": msgspec.to_builtins(answer)}
    if not isinstance(answer, EverdeckError):
        raise answer
    return {"name": name, "ok": False, "problem": {"detail": str(answer), **_told(answer)}}


def _result(deck: Reached, verb: str, name: str, *, data: bool = False) -> dict[str, Any]:
    try:
        status = on_one(deck, verb, name, data=data)
    except (EverdeckError, NameRefused) as error:
        return _answered(name, error)
    return {"name": name, "ok": True, "status": None if verb == "remove" else status}


def _told(error: EverdeckError) -> dict[str, Any]:
    from everdeck.faults import fault_of

    told: dict[str, Any] = msgspec.to_builtins(fault_of(error))
    return told


def _report(results: list[dict[str, Any]], verb: str, options: Namespace) -> int:
    failed = [result for result in results if not result["ok"]]
    if options.json:
        import json

        print(json.dumps({"results": results}))
        return FAILED if failed else DONE
    done = [result for result in results if result["ok"]]
    if len(done) <= MANY:
        for result in done:
            status = result["status"]
            print(f"{result['name']} {status['state'] if status else _PAST[verb]}{_pid(status)}")
    else:
        print(f"{len(done)} {_PAST[verb]}")
    for result in failed:
        print(f"everdeck: {result['problem']['detail']}", file=sys.stderr)
    if not results:
        print("no workers")
    return FAILED if failed else DONE


def _pid(status: dict[str, Any] | None) -> str:
    return f" (pid {status['pid']})" if status and status["pid"] else ""


def with_suggestions(deck: Reached, unknown: UnknownWorker) -> UnknownWorker:
    """The same error, with the names that are near."""
    if unknown.suggestions:
        return unknown
    from difflib import get_close_matches

    names = [status.name for status in deck.list()]
    return UnknownWorker(unknown.worker, tuple(get_close_matches(unknown.worker, names, n=3, cutoff=0.6)))
