"""The command line: one function per verb, loaded when it is typed.

This file owns what all verbs share: finding the verb, ``--state``, exit codes and what is printed when something went
wrong. It imports nothing that the chosen verb does not need, because ``everdeck ps`` is typed all day and should cost
the start of Python and little more: argparse takes 9 ms of CPU to load where click takes 90.

Exit codes: 0 done, 1 operation failed, 2 invalid usage, 3 no owner is running.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from pathlib import Path

DONE: Final = 0
FAILED: Final = 1
USED_WRONGLY: Final = 2
NO_OWNER: Final = 3
INTERRUPTED: Final = 130


class Entry(NamedTuple):
    """Where a verb lives and the line that the overview shows for it."""

    module: str
    help: str
    group: str


_DAEMON, _WORKERS, _LOOK, _MOVE = "The daemon", "Workers", "Looking", "Moving and mending"

VERBS: Final[dict[str, Entry]] = {
    "demo": Entry("demo", "three sample users, the page, and a guided kill -9", _DAEMON),
    "up": Entry("up", "start the daemon: supervise, apply everdeck.toml, serve the command line and the page", _DAEMON),
    "down": Entry("down", "stop the daemon; workers stay unless you say --workers", _DAEMON),
    "login": Entry("login", "the page's link with its token, once more", _DAEMON),
    "apply": Entry("apply", "make the workers match a configuration file; shows the plan first", _DAEMON),
    "reload": Entry("reload", "replace the running daemon by the installed code, without stopping anything", _DAEMON),
    "token": Entry("token", "who else may talk to the deck, and what they may do", _DAEMON),
    "start": Entry("start", "start a worker", _WORKERS),
    "stop": Entry("act", "stop workers; returns when their whole trees are gone", _WORKERS),
    "restart": Entry("act", "stop workers and start them again", _WORKERS),
    "reset": Entry("act", "let failed workers try again", _WORKERS),
    "rm": Entry("act", "stop workers and forget them, their logs and their data", _WORKERS),
    "ps": Entry("ps", "list workers and their state", _LOOK),
    "inspect": Entry("inspect", "everything about one worker", _LOOK),
    "logs": Entry("logs", "what workers print", _LOOK),
    "events": Entry("events", "what happened", _LOOK),
    "members": Entry("members", "which processes have the deck open, and which one owns it", _LOOK),
    "top": Entry("top", "a live view in the terminal", _LOOK),
    "doctor": Entry("doctor", "check kernel features and find problems", _MOVE),
    "adopt": Entry("adopt", "take over a process that somebody else started", _MOVE),
    "export": Entry("export", "a systemd unit or a Kubernetes manifest for this deck", _MOVE),
    "move": Entry("move", "move workers from this machine to a Kubernetes namespace", _MOVE),
    "operator": Entry("operator", "bring back workers of a Kubernetes namespace whose node has died", _MOVE),
    "mcp": Entry("mcp", "serve the deck to agents by the Model Context Protocol", _MOVE),
    "send": Entry("send", "send a message by a satellite", _WORKERS),
    "feed": Entry("feed", "a satellite's messages: what waits, what was set aside; any inbox's file", _MOVE),
    "schema": Entry("schema", "the JSON Schema of everdeck.toml, for editors", _MOVE),
    "completion": Entry("completion", "completion for bash, zsh and fish", _MOVE),
}
# What people type who come from another tool, or from English.
ALIASES: Final[dict[str, str]] = {
    "ls": "ps",
    "list": "ps",
    "status": "ps",
    "remove": "rm",
    "delete": "rm",
    "show": "inspect",
    "describe": "inspect",
    "quit": "down",
}
# Never suggested: a person who mistyped something else may well press Enter on the suggestion.
_DESTROYING: Final = frozenset({"rm", "stop", "down"})
# Verbs that need nothing of this machine, so that the deck may be a daemon's at a URL.
_ANYWHERE: Final = frozenset(
    {
        "ps",
        "start",
        "stop",
        "restart",
        "reset",
        "rm",
        "adopt",
        "logs",
        "events",
        "inspect",
        "members",
        "apply",
        "reload",
        "mcp",
        "send",
    }
)
# What a daemon over a cluster keeps on this machine.
_OVER_A_CLUSTER: Final = frozenset({"up", "down", "login", "token", "operator", "move"})
# Verbs that ask once, print and end: nothing of theirs is left to be collected or put in order.
_BRIEF: Final = frozenset({"ps", "start", "stop", "restart", "reset", "rm", "adopt", "inspect", "members", "complete"})
DEFAULT_STATE: Final = ".everdeck"
CLUSTER: Final = "kubernetes:"
SCHEMES: Final = ("http://", "https://", CLUSTER)
_WITHOUT_A_DECK: Final = frozenset({"demo", "sweep", "export", "feed", "schema", "completion", "complete"})
_HIDDEN: Final[dict[str, Entry]] = {
    "complete": Entry("completion", "", ""),
    "sweep": Entry("demo", "", ""),
}


def command() -> NoReturn:
    """What a shell starts: run the command that was typed, and leave.

    Objects are not looked through for garbage while modules are loaded, because all of them stay. A brief verb leaves
    without taking the interpreter apart, which takes as long as everything that ``ps`` does among a thousand workers.
    """
    gc.disable()
    code = main()
    if not gc.isenabled() and ("threading" not in sys.modules or sys.modules["threading"].active_count() == 1):
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


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
        elif word == "help":
            return _help(arguments)
        else:
            return _run(ALIASES.get(word, word), arguments, state)
    print(_overview(), file=sys.stderr)
    return USED_WRONGLY


def _help(arguments: list[str]) -> int:
    """``everdeck help [VERB]``."""
    if not arguments:
        print(_overview())
        return DONE
    name = ALIASES.get(arguments[0], arguments[0])
    if name not in VERBS:
        return _unknown(arguments[0])
    parser_of(name).print_help()
    return DONE


def _unknown(word: str) -> int:
    from difflib import get_close_matches

    known = [name for name in (*VERBS, *ALIASES) if ALIASES.get(name, name) not in _DESTROYING]
    near = get_close_matches(word, known, n=1, cutoff=0.75)
    return _misused(f"unknown verb {word!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _run(name: str, arguments: list[str], state: str | None) -> int:
    entry = VERBS.get(name) or _HIDDEN.get(name)
    if entry is None:
        return _unknown(name)
    if name in _BRIEF:
        _load_msgspec()
    options = _parsed(name, arguments, state)
    reachable = _ANYWHERE | _WITHOUT_A_DECK | (_OVER_A_CLUSTER if options.where.startswith(CLUSTER) else frozenset())
    if options.where.startswith(SCHEMES) and name not in reachable:
        return _misused(f"`everdeck {name}` needs a directory of this machine, not {options.where}")
    from everdeck.errors import EverdeckError
    from everdeck.statedir import StateDir

    function = getattr(_module(entry), name)
    if name not in _BRIEF:
        gc.enable()  # see command()
    try:
        # Another account that is let in may pass to the socket, and not list the directory.
        if name not in _WITHOUT_A_DECK and not os.access(StateDir.at(options.state).socket, os.W_OK):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.scandir(options.state).close()
        code: int = function(options)
    except EverdeckError as error:
        return _told(error, options.state, elsewhere=options.where.startswith(SCHEMES))
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            raise
        return _refused(error)
    return code


def _load_msgspec() -> None:
    """Without ``typing_extensions``, which it asks for what ``typing`` has by itself since Python 3.11.

    That takes 12 ms to load, as long as everything else of msgspec. Whoever needs it later loads it as always.
    """
    absent = "typing_extensions" not in sys.modules
    if absent:
        sys.modules["typing_extensions"] = None  # type: ignore[assignment]  # "may not be imported" (import system, 5.3.1)
    try:
        import msgspec  # noqa: F401
    finally:
        if absent:
            del sys.modules["typing_extensions"]


def parser_of(name: str) -> "ArgumentParser":
    """The parser of one verb."""
    from argparse import ArgumentParser, RawDescriptionHelpFormatter

    from everdeck.cli.output import columns

    module = _module(VERBS.get(name) or _HIDDEN[name])
    function = getattr(module, name)
    parser = ArgumentParser(
        prog=f"everdeck {name}",
        description=_dedented(function.__doc__ or ""),
        formatter_class=lambda prog: RawDescriptionHelpFormatter(prog, width=columns() - 2),  # as by itself
        allow_abbrev=False,
    )
    parser.add_argument(
        "--state",
        metavar="DIR",
        help="a directory, kubernetes:NAMESPACE or a daemon's URL (default: $EVERDECK_STATE, else ./.everdeck)",
    )
    getattr(module, f"{name}_options")(parser)
    return parser


def _dedented(docstring: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in docstring.strip().splitlines())


def _parsed(name: str, arguments: list[str], state: str | None) -> "Namespace":
    # What follows "--" is somebody else's command line and none of our options.
    own, command = arguments, None
    if name in {"start", "complete"} and "--" in arguments:
        cut = arguments.index("--")
        own, command = arguments[:cut], arguments[cut + 1 :]
    if name == "feed":
        from everdeck.cli.feed import words_of

        own = words_of(own)
    parser = parser_of(name)
    options, more = parser.parse_known_args(own)
    if more:
        if name == "start" and command is None and not more[0].startswith("-"):
            from shlex import join

            meant = [*own[: own.index(more[0])], "--", *own[own.index(more[0]) :]]
            parser.error(f"the command stands after --; type: everdeck start {join(meant)}")
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    options.verb = name
    options.command_line = command
    options.where = options.state or state or os.environ.get("EVERDECK_STATE") or DEFAULT_STATE
    options.state = home_of(options.where)
    return options


def home_of(where: str) -> "Path":
    """The state directory; of a cluster, where a daemon over it keeps its own files (token, socket, samples)."""
    from pathlib import Path

    return Path(DEFAULT_STATE, where.replace(":", "-")) if where.startswith(CLUSTER) else Path(where)


def _module(entry: Entry) -> object:
    from importlib import import_module

    return import_module(f"everdeck.cli.{entry.module}")


def _told(error: Exception, state: "Path", *, elsewhere: bool) -> int:
    """Say what went wrong, and choose the exit code."""
    from everdeck.errors import NoOwner, OwnerRefused, SpecError

    if isinstance(error, NoOwner) and elsewhere:
        print(f"everdeck: {error}", file=sys.stderr)
        return NO_OWNER
    if isinstance(error, NoOwner):
        from shlex import quote

        if (owner := _owner_without_a_socket(state)) is not None:
            print(
                f"everdeck: {state} is owned by {owner}, which does not serve this: "
                f"`everdeck up` beside it does, or act from that program",
                file=sys.stderr,
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


def _refused(error: OSError) -> int:
    """A file or directory that the system does not let us use: which one, why, and who may."""
    print(f"everdeck: {error.filename}: {error.strerror}{_whose(str(error.filename))}", file=sys.stderr)
    return FAILED


def _whose(path: str) -> str:
    """``; it belongs to bob``, when that is the reason; or nothing."""
    from pathlib import Path

    for place in (Path(path), *Path(path).absolute().parents):
        try:
            uid = place.stat().st_uid
        except OSError:
            continue
        if uid == os.geteuid():
            return ""
        from pwd import getpwuid

        try:
            owner = getpwuid(uid).pw_name
        except KeyError:
            owner = f"uid {uid}"
        return f"; {place} belongs to {owner}"
    return ""


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
        lines += [f"  {name:<11} {entry.help}" for name, entry in VERBS.items() if entry.group == group]
    lines += [
        "",
        "Options:",
        "  --state DIR  the deck's directory (default: $EVERDECK_STATE, else ./.everdeck); also after the verb",
        "  --version    the version",
        "",
        "Exit codes: 0 done, 1 operation failed, 2 invalid usage, 3 no owner is running.",
        "First steps: everdeck demo.  More: everdeck help VERB",
    ]
    return "\n".join(lines)
