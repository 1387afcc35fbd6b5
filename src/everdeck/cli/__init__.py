"""The command line: one function per verb, loaded when it is typed.

This file owns what all verbs share: finding the verb, ``--state``, exit codes and what is printed when something went
wrong. It imports nothing that the chosen verb does not need, because ``everdeck ps`` is typed all day and should cost
the start of Python and little more: argparse takes 9 ms of CPU to load where click takes 90.

Exit codes: 0 done, 1 the thing failed, 2 used wrongly, 3 no owner is running.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from pathlib import Path

DONE: Final = 0
FAILED: Final = 1
USED_WRONGLY: Final = 2
NO_OWNER: Final = 3
INTERRUPTED: Final = 130


class Verb(NamedTuple):
    """Where a verb lives and the line that the overview shows for it."""

    module: str
    help: str
    group: str


_DAEMON, _WORKERS, _LOOK, _MOVE = "The daemon", "Workers", "Looking", "Moving and mending"

VERBS: Final[dict[str, Verb]] = {
    "demo": Verb("demo", "three sample users, the page, and a guided kill -9", _DAEMON),
    "up": Verb("up", "own the deck: supervise, apply everdeck.toml, serve the socket and the page", _DAEMON),
    "apply": Verb("apply", "make the deck as a file says; shows the plan first", _DAEMON),
    "reload": Verb("reload", "replace the running daemon by the installed code, without stopping anything", _DAEMON),
    "start": Verb("start", "start a worker", _WORKERS),
    "stop": Verb("act", "stop workers; returns when their whole trees are gone", _WORKERS),
    "restart": Verb("act", "stop workers and start them again", _WORKERS),
    "reset": Verb("act", "let failed workers try again", _WORKERS),
    "rm": Verb("act", "stop workers and forget them, their logs and their data", _WORKERS),
    "ps": Verb("ps", "who runs", _LOOK),
    "logs": Verb("logs", "what workers print", _LOOK),
    "events": Verb("events", "what happened", _LOOK),
    "top": Verb("top", "a live view in the terminal", _LOOK),
    "doctor": Verb("doctor", "what this machine gives, and what is wrong on it", _MOVE),
    "adopt": Verb("adopt", "take over a process that somebody else started", _MOVE),
    "export": Verb("export", "a systemd unit or a Kubernetes manifest for this deck", _MOVE),
    "feed": Verb("feed", "inboxes, dead letters and cursors of feeds", _MOVE),
    "schema": Verb("schema", "the JSON Schema of everdeck.toml, for editors", _MOVE),
    "completion": Verb("completion", "completion for bash, zsh and fish", _MOVE),
}
_HIDDEN: Final[dict[str, Verb]] = {
    "preflight": Verb("reload", "", ""),
    "complete": Verb("completion", "", ""),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough (`everdeck ps | head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = DONE
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else FAILED
    return code


def _dispatch(arguments: list[str]) -> int:
    state: str | None = None
    while arguments:
        word = arguments.pop(0)
        if word in {"-h", "--help"}:
            print(_overview())
            return DONE
        if word in {"-V", "--version"}:
            from everdeck import __version__

            print(f"everdeck {__version__}")
            return DONE
        if word == "--state" and arguments:
            state = arguments.pop(0)
        elif word.startswith("--state="):
            state = word.partition("=")[2]
        elif word.startswith("-"):
            return _misused(f"unknown option {word!r} before the verb")
        else:
            return _run(word, arguments, state)
    print(_overview(), file=sys.stderr)
    return USED_WRONGLY


def _run(name: str, arguments: list[str], state: str | None) -> int:
    verb = VERBS.get(name) or _HIDDEN.get(name)
    if verb is None:
        from difflib import get_close_matches

        near = get_close_matches(name, VERBS, n=1, cutoff=0.5)
        return _misused(f"unknown verb {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if name == "feed":
        return _feed(arguments, state)
    options = _parsed(name, arguments, state)
    from everdeck.errors import EverdeckError

    function = getattr(_module(verb), name)
    try:
        code: int = function(options)
    except EverdeckError as error:
        return _told(error, options.state)
    return code


def parser_of(name: str) -> "ArgumentParser":
    """The parser of one verb."""
    from argparse import ArgumentParser, RawDescriptionHelpFormatter

    verb = VERBS.get(name) or _HIDDEN[name]
    module = _module(verb)
    function = getattr(module, name)
    parser = ArgumentParser(
        prog=f"everdeck {name}",
        description=_dedented(function.__doc__ or ""),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--state", metavar="DIR", help="the deck's directory (default: $EVERDECK_STATE, else ./.everdeck)"
    )
    getattr(module, f"{name}_options")(parser)
    return parser


def _dedented(docstring: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in docstring.strip().splitlines())


def _parsed(name: str, arguments: list[str], state: str | None) -> "Namespace":
    from pathlib import Path

    # What follows "--" is somebody else's command line and none of our options.
    own, command = arguments, None
    if name in {"start", "complete"} and "--" in arguments:
        cut = arguments.index("--")
        own, command = arguments[:cut], arguments[cut + 1 :]
    options = parser_of(name).parse_args(own)
    options.verb = name
    options.command_line = command
    options.state = Path(options.state or state or os.environ.get("EVERDECK_STATE") or ".everdeck")
    return options


def _module(verb: Verb) -> object:
    from importlib import import_module

    return import_module(f"everdeck.cli.{verb.module}")


def _told(error: Exception, state: "Path") -> int:
    """Say what went wrong, and choose the exit code."""
    from everdeck.errors import NoOwner, OwnerRefused, SpecError

    if isinstance(error, NoOwner):
        from shlex import quote

        if (owner := _owner_without_a_socket(state)) is not None:
            print(
                f"everdeck: {state} is owned by {owner}, which serves no socket: act from that program", file=sys.stderr
            )
            return FAILED
        print(f"everdeck: {error}\nStart it with: everdeck up --detach --state {quote(str(state))}", file=sys.stderr)
        return NO_OWNER
    print(f"everdeck: {error}", file=sys.stderr)
    if isinstance(error, OwnerRefused):
        misuse = {"spec-error", "name-refused", "limit-unavailable"}
        return USED_WRONGLY if getattr(error, "kind", "") in misuse else FAILED
    from everdeck.errors import ConfigRefused

    return USED_WRONGLY if isinstance(error, SpecError) and not isinstance(error, ConfigRefused) else FAILED


def _owner_without_a_socket(state: "Path") -> str | None:
    """Who holds the deck's lock though nobody answers: a program that uses the library, or a starting daemon."""
    from everdeck.kernel import flock
    from everdeck.statedir import StateDir

    lock = StateDir(state).lock
    if not lock.exists() or not flock.is_held(lock):
        return None
    holders = flock.holders(lock)
    return f"pid {holders[0]}" if holders else "another process"


def _misused(what: str) -> int:
    print(f"everdeck: {what}\nSee: everdeck --help", file=sys.stderr)
    return USED_WRONGLY


def _overview() -> str:
    lines = [
        "usage: everdeck [--state DIR] VERB …",
        "",
        "One long-lived process per user on one box: never lost, never run twice.",
    ]
    for group in (_DAEMON, _WORKERS, _LOOK, _MOVE):
        lines += ["", f"{group}:"]
        lines += [f"  {name:<11} {verb.help}" for name, verb in VERBS.items() if verb.group == group]
    lines += [
        "",
        "Options:",
        "  --state DIR  the deck's directory (default: $EVERDECK_STATE, else ./.everdeck); also after the verb",
        "  --version    the version",
        "",
        "Exit codes: 0 done, 1 the thing failed, 2 used wrongly, 3 no owner is running.",
        "First steps: everdeck demo.  More: everdeck VERB --help",
    ]
    return "\n".join(lines)


def _feed(arguments: list[str], state: str | None) -> int:
    """``everdeck feed`` is a small application of its own."""
    from everdeck.cli.feed import feed_app

    if state is not None:
        os.environ["EVERDECK_STATE"] = state
    feed_app(args=arguments, prog_name="everdeck feed")
    return DONE
