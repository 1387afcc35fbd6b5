"""``everdeck stop | restart | reset | rm``: one verb for one worker, several, or all."""

import sys
import threading
from argparse import ArgumentParser, Namespace
from typing import Any

from everdeck.cli import DONE, FAILED, USED_WRONGLY, output
from everdeck.client import Client, Refusal
from everdeck.errors import ClientError, EverdeckError

_DONE_KINDS = {
    "stop": {"stopped", "exited"},
    "restart": {"restarted", "started"},
    "reset": {"reset"},
    "remove": {"stopped"},
}
_PAST = {"stop": "stopped", "restart": "restarted", "reset": "reset", "remove": "removed"}
MANY = 20


def stop_options(parser: ArgumentParser) -> None:
    """Options of stop."""
    _options(parser, "stop")


def restart_options(parser: ArgumentParser) -> None:
    """Options of restart."""
    _options(parser, "restart")


def reset_options(parser: ArgumentParser) -> None:
    """Options of reset."""
    _options(parser, "reset")


def rm_options(parser: ArgumentParser) -> None:
    """Options of rm."""
    _options(parser, "rm")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask, also with --all in a terminal")


def stop(options: Namespace) -> int:
    """Stop workers: SIGTERM, the grace period, then SIGKILL to whatever is left of the tree.

    Any number stop in parallel. It returns when the trees are proven gone, so nothing you run next can
    collide with the old processes.
    """
    return _act(options, "stop")


def restart(options: Namespace) -> int:
    """Stop workers and start them again with the same spec."""
    return _act(options, "restart")


def reset(options: Namespace) -> int:
    """Let workers try again that crashed too often: their crashes are forgotten and they are started."""
    return _act(options, "reset")


def rm(options: Namespace) -> int:
    """Stop workers and forget them. Their logs, data and secrets are deleted."""
    if options.all and not options.yes and sys.stdin.isatty() and sys.stdout.isatty():
        answer = input(f"Remove every worker of {options.state}, with logs and data? [y/N] ")
        if answer.strip().lower() not in {"y", "yes"}:
            return FAILED
    return _act(options, "remove")


def on_one(client: Client, verb: str, name: str) -> dict[str, Any]:
    """Act on one worker; an unknown name is answered with the ones that are near."""
    from urllib.parse import quote

    path = f"/api/v1/workers/{quote(name, safe='')}"
    try:
        if verb == "remove":
            client.request("DELETE", path)
            return {"name": name, "state": "removed"}
        status: dict[str, Any] = client.document("POST", f"{path}/{verb}")
    except Refusal as refusal:
        raise with_suggestions(client, refusal, name) from None
    return status


def _options(parser: ArgumentParser, verb: str) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="workers")
    parser.add_argument("--all", action="store_true", help="every worker of the deck")
    parser.add_argument("--json", action="store_true", help='{"results": [{"name", "ok", "status" or "problem"}]}')
    parser.epilog = f"examples:\n  everdeck {verb} alice bob\n  everdeck {verb} --all"


def _act(options: Namespace, verb: str) -> int:
    if bool(options.names) == options.all:
        print(f"everdeck {options.verb}: say which workers, or --all", file=sys.stderr)
        return USED_WRONGLY
    with Client(options.state) as client:
        if len(options.names) == 1:
            status = on_one(client, verb, options.names[0])
            result = {"name": options.names[0], "ok": True, "status": None if verb == "remove" else status}
            return _report([result], verb, options, client)
        names = options.names or [worker["name"] for worker in client.document("GET", "/api/v1/workers")["workers"]]
        results = _with_progress(options, client, verb, names)
        return _report(results, verb, options, client)


def _with_progress(options: Namespace, client: Client, verb: str, names: list[str]) -> list[dict[str, Any]]:
    if not (sys.stderr.isatty() and len(names) > 1):
        return _bulk(client, verb, names)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    after = client.document("GET", "/api/v1/deck")["last_event_id"]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{verb} …", total=len(names))

        def advance(done: int) -> None:
            progress.update(task, completed=done)

        watcher = threading.Thread(target=_watch, args=(options, after, verb, set(names), advance), daemon=True)
        watcher.start()
        results = _bulk(client, verb, names)
        progress.update(task, completed=len(names))
    return results


def _watch(options: Namespace, after: int, verb: str, names: set[str], advance: Any) -> None:
    """Count workers as their events say that they are done; only for the display, so its end is nobody's business."""
    import json

    done: set[str] = set()
    try:
        with Client(options.state) as client:
            for raw in client.follow_events(after=after):
                event = json.loads(raw)
                if event["worker"] in names and event["kind"] in _DONE_KINDS[verb]:
                    done.add(event["worker"])
                    advance(len(done))
    except ClientError:
        return


def _bulk(client: Client, verb: str, names: list[str]) -> list[dict[str, Any]]:
    answer: dict[str, list[dict[str, Any]]] = client.document("POST", "/api/v1/bulk", {"verb": verb, "names": names})
    return answer["results"]


def _report(results: list[dict[str, Any]], verb: str, options: Namespace, client: Client) -> int:
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
        detail = result["problem"]["detail"]
        if result["problem"]["status"] == 404 and "did you mean" not in detail:  # noqa: PLR2004 - HTTP's "not found"
            detail += output.suggestions(result["name"], _names(client))
        print(f"everdeck: {detail}", file=sys.stderr)
    if not results:
        print("no workers")
    return FAILED if failed else DONE


def _pid(status: dict[str, Any] | None) -> str:
    return f" (pid {status['pid']})" if status and status["pid"] else ""


def with_suggestions(client: Client, refusal: Refusal, name: str) -> EverdeckError:
    """The same refusal, with the names that are near if it says that there is no such worker."""
    if refusal.kind != "unknown-worker" or "did you mean" in str(refusal):
        return refusal
    detail = f"{refusal}{output.suggestions(name, _names(client))}"
    return Refusal({**refusal.problem, "detail": detail})


def _names(client: Client) -> list[str]:
    return [worker["name"] for worker in client.document("GET", "/api/v1/workers")["workers"]]
