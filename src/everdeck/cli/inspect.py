"""``everdeck inspect``: everything about one worker."""

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import msgspec

from everdeck import wording
from everdeck.cli import DONE, output
from everdeck.cli.act import with_suggestions
from everdeck.cli.ps import NOT_SUPERVISED
from everdeck.cli.reach import is_elsewhere, reached
from everdeck.errors import NoOwner, UnknownWorker
from everdeck.model import Event, EventKind, worker_name
from everdeck.statedir import StateDir
from everdeck.verbs import Inspection

MOST_ENDS = 10
_ENDS = {
    EventKind.CRASHED,
    EventKind.EXITED,
    EventKind.STOPPED,
    EventKind.FAILED,
    EventKind.UNHEALTHY,
    EventKind.KILLED,
}


def inspect_options(parser: ArgumentParser) -> None:
    """Options of inspect."""
    parser.add_argument("name", metavar="NAME", help="a worker")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    parser.epilog = "examples:\n  everdeck inspect alice\n  everdeck inspect alice --json | jq .spec.command"


def inspect(options: Namespace) -> int:
    """Everything about one worker: what it runs and where, its health and the last reason, how it ended before, what
    contains it, its processes and its files. Values of variables and secrets are never shown, only their names.

    With no owner running it is told as the registry and the kernel know it, and a line says so.
    """
    name = worker_name(options.name)
    inspection, events = _look(options, name)
    found: dict[str, Any] = msgspec.to_builtins(inspection)
    found["ends"] = msgspec.to_builtins([event for event in events if event.kind in _ENDS][-MOST_ENDS:])
    spec = found["spec"]
    spec["env_keys"], spec["secret_names"] = sorted(spec.pop("env")), sorted(spec.pop("secrets"))
    found["paths"] = {}
    if not is_elsewhere(options.where):
        place = StateDir.at(options.state.absolute()).worker(name)
        found["paths"] = {part: str(getattr(place, part)) for part in ("path", "log", "data", "secrets", "lock")}
        if spec["satellite"] is not None:
            from everdeck.deck.feeds import feed_of
            from everdeck.satellites import bridge

            found["feed"] = msgspec.to_builtins(bridge.feed_status(feed_of(options.state, name, inspection.spec), name))
    spec["cwd"] = spec["cwd"] or found["paths"].get("data") or "its data/"
    if options.json:
        json.dump(found, sys.stdout)
        print()
    else:
        for title, rows in _sections(found):
            print(output.painted(title, "1", colour=output.wants_colour()))
            width = max((len(key) for key, _ in rows), default=0)
            for key, value in rows:
                print(wording.plain(f"  {key.ljust(width)}  {value}".rstrip()))
    return DONE


def _look(options: Namespace, name: str) -> tuple[Inspection, list[Event]]:
    """The worker as its owner sees it or, without one, as the registry and the kernel do."""
    try:
        with reached(options, patience_seconds=0) as deck:
            try:
                return deck.inspect(name), deck.events(0, sys.maxsize, name)
            except UnknownWorker as unknown:
                raise with_suggestions(deck, unknown) from None
    except NoOwner:
        if is_elsewhere(options.where):
            raise
        output.note(NOT_SUPERVISED)

        from everdeck.deck.peek import peek_events, peek_inspection

        return peek_inspection(options.state, name), peek_events(options.state, worker=name)


def _sections(found: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    from shlex import join

    status, spec = found["status"], found["spec"]
    now = [
        ("state", status["state"] + (f" (pid {status['pid']})" if status["pid"] else "")),
        ("uptime", output.duration(status["uptime_seconds"])),
        ("health", status["health"] or ("no check" if spec["health"] is None else "-")),
        ("says", status["status_text"] or "-"),
        ("last end", wording.ending(status["exit"]) or "-"),
        ("restarts", f"{status['restarts']}, crashes {status['crashes']}"),
        ("cpu, memory", f"{_percent(status['cpu_percent'])}, {output.size(status['rss_bytes'])}"),
        ("contained by", str(status["containment"] or "-")),
    ]
    what = [
        ("command", join(spec["command"])),
        ("cwd", spec["cwd"]),
        ("env", ", ".join(spec["env_keys"]) or "-"),
        ("secrets", ", ".join(spec["secret_names"]) or "-"),
        ("lifetime", spec["lifetime"]),
        ("port", str(status["port"] or "-")),
        ("user", spec["user"] or "-"),
        ("labels", ", ".join(f"{key}={value}" for key, value in spec["labels"].items()) or "-"),
    ]
    what += [
        (part, wording.detail(spec[part]) or "-") for part in ("restart", "stop", "health", "limits") if spec.get(part)
    ]
    known = {*(key for key, _ in what), "env_keys", "secret_names", "group", "log"}
    what += [
        (key.replace("_", " "), wording.detail({"": value}).strip())
        for key, value in spec.items()
        if key not in known and value
    ]
    ends = [
        (event["at"][:19].replace("T", " "), f"{event['kind']} {wording.detail(event['detail'])}")
        for event in reversed(found["ends"])
    ]
    layers = [
        (layer["layer"], f"{layer['strength'] if layer['holds'] else 'no'}: {layer['why']}")
        for layer in found["layers"]
    ]
    held = [("holds" if one["holds"] else "no", wording_of(one)) for one in found.get("holds", [])]
    tree = [(str(process["pid"]), process["command"] or process["name"]) for process in found["tree"]]
    return [
        (status["name"], now),
        *([("Its feed", _feed(found["feed"]))] if "feed" in found else []),
        ("What it runs", what),
        ("What protects it", layers),
        ("What it cannot do", held),
        ("Its processes", tree or [("none", "")]),
        ("How it ended before, newest first", ends or [("never", "")]),
        ("Its files", list(found["paths"].items()) or [("on the daemon's machine", "")]),
    ]


def _feed(feed: dict[str, Any]) -> list[tuple[str, str]]:
    contact = (feed["last_contact_at"] or "never")[:19].replace("T", " ")
    return [
        ("account", feed["account"] or "-"),
        ("connection", feed["connection"] + (f": {feed['error']}" if feed["error"] else "")),
        ("last contact", contact),
        ("in", ", ".join(f"{feed[one]:,} {one.replace('_', ' ')}" for one in ("waiting", "in_flight", "done", "dead"))),
        ("out", f"{feed['to_send']:,} to send, {feed['unsent']:,} unsent"),
    ]


def wording_of(one: dict[str, Any]) -> str:
    """One line: what it cannot do, and why that does not hold."""
    return f"{one['what']} ({one['why']})" if one["why"] else str(one["what"])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"
