"""``everdeck start``: start a worker."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Final

import msgspec

from everdeck.cli import DONE, USED_WRONGLY, output
from everdeck.cli.reach import is_elsewhere, reached
from everdeck.errors import SpecError
from everdeck.model import WorkerSpec, worker_name

# Options whose value is one field of the spec as it is; `--set` reaches every other one.
FIELDS: Final = {
    "inherit_env": "inherit_env",
    "restart": "restart.policy",
    "max_crashes": "restart.max_crashes",
    "grace": "stop.grace_seconds",
    "stop_signal": "stop.signal",
    "open_files": "limits.open_files",
    "notify": "health.notify",
    "watchdog": "health.watchdog_seconds",
    "health_http": "health.http",
    "port": "port",
    "user": "user",
    "sandbox": "sandbox.level",
}


def start_options(parser: ArgumentParser) -> None:
    """Options of start."""
    parser.usage = "everdeck start NAME [options] -- COMMAND …"
    parser.add_argument("name", metavar="NAME", help="usually a user's id")
    parser.add_argument("-e", "--env", action="append", default=[], metavar="K=V", help="an environment variable")
    parser.add_argument("--inherit-env", action="append", default=[], metavar="K", help="pass on the daemon's own")
    parser.add_argument(
        "--secret", action="append", default=[], metavar="K=FILE", help="a secret, read from FILE (- is standard input)"
    )
    parser.add_argument("--secret-env", action="append", default=[], metavar="K=FILE", help="the same, also as env")
    parser.add_argument("--bound", action="store_true", help="ends with the owner (default: survives it)")
    parser.add_argument("--template", metavar="T", help="start from [template.T] of the applied everdeck.toml")
    parser.add_argument(
        "--satellite", metavar="KIND", help="a ready worker: telegram, gmail, smtp, cron, webhook, or another package's"
    )
    parser.add_argument(
        "--to",
        metavar="TARGET",
        help="where a satellite's messages go: a URL, module:function (default: deck.messages)",
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="K=V", help="of the satellite's kind, such as first_run=take"
    )
    parser.add_argument("--cwd", metavar="DIR", help="working directory (default: this one)")
    parser.add_argument("--restart", choices=("always", "on-failure", "never"), help="default: on-failure")
    parser.add_argument("--max-crashes", type=int, metavar="N", help="crashes in five minutes before it waits for you")
    parser.add_argument("--grace", type=float, metavar="SECONDS", help="between SIGTERM and SIGKILL (default 5)")
    parser.add_argument("--stop-signal", metavar="NAME", help="default TERM")
    parser.add_argument("--memory", metavar="BYTES", help="memory limit, such as 200M")
    parser.add_argument("--open-files", type=int, metavar="N", help="limit of open files")
    parser.add_argument("--port", action="store_true", help="give it a stable port in $PORT")
    parser.add_argument("--notify", action="store_true", help="ready when it says READY=1 (systemd's protocol)")
    parser.add_argument("--watchdog", type=float, metavar="SECONDS", help="unhealthy if it is silent for so long")
    parser.add_argument("--health-http", metavar="URL", help="such as http://127.0.0.1:$PORT/healthz")
    parser.add_argument("--user", metavar="USER", help="run as this user; auto: a uid of its own")
    parser.add_argument("--sandbox", choices=("off", "basic", "strict"), help="what it may do (default: off)")
    parser.add_argument("--label", action="append", default=[], metavar="K=V", help="a word to filter by")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field of the spec, as in everdeck.toml: log.keep=3, umask=0o077, limits.pids=50",
    )
    parser.add_argument("--replace", action="store_true", help="if it runs with another spec, stop it first")
    parser.add_argument("--json", action="store_true", help="print its status as JSON")
    parser.epilog = (
        "examples:\n"
        "  everdeck start alice -e TZ=UTC --secret TOKEN=alice.token -- python3 bot.py\n"
        "  everdeck start alice                       (a known worker again)\n"
        "  everdeck start bob --template bot -e CHAT=42\n"
        "  everdeck start bob-tg --satellite telegram --secret TOKEN=bob.token\n"
        "  everdeck start nightly --satellite cron --option expression='0 3 * * *' -- python3 job.py"
    )


def start(options: Namespace) -> int:
    """Start a worker: a new one with its command after --, or a known one by its name alone.

    It runs in the directory you are in now. Its environment is clean: PATH, HOME, LANG, TZ, USER and SHELL, plus
    what you give. If it already runs with the same command and options, nothing happens; with others the start is
    refused unless you say --replace.
    """
    own = _own_fields(options)
    command = options.command_line
    if (options.to or options.option) and not options.satellite:
        raise SpecError("--to" if options.to else "--option", options.to or options.option, "only beside --satellite")
    if command == []:
        print("everdeck start: nothing after --", file=sys.stderr)
        return USED_WRONGLY
    name = worker_name(options.name)
    if options.template:
        from everdeck.client import Daemon

        with Daemon.of(options) as daemon:
            own |= {"command": command} if command else {}
            status = daemon.start_from_template(name, options.template, own, replace=options.replace)
        return _show(options, status)
    with reached(options) as deck:
        if command or options.satellite:
            if options.satellite:
                own["satellite"] = _satellite(options)
            else:
                own["command"] = command
            if command and not is_elsewhere(options.where):
                own.setdefault("cwd", str(Path.cwd()))
            status = msgspec.to_builtins(deck.start(name, _spec(own), replace=options.replace))
        elif own:
            print("everdeck start: options without a command; write it after --", file=sys.stderr)
            return USED_WRONGLY
        else:
            from everdeck.cli.act import on_one

            status = on_one(deck, "start", name)
    return _show(options, status)


def _spec(own: dict[str, Any]) -> WorkerSpec:
    try:
        return msgspec.convert(own, WorkerSpec)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        said, _, where = str(error).removesuffix("`").partition(" - at `$.")
        given: Any = own
        for key in where.split("."):
            given = given.get(key) if isinstance(given, dict) else given
        raise SpecError(where or "spec", given, said.replace("`", "")) from None


def _show(options: Namespace, status: dict[str, Any]) -> int:
    if options.json:
        import json

        print(json.dumps(status))
    else:
        colour = output.wants_colour()
        print(f"{status['name']} {output.state_in_colour(status['state'], colour=colour)} (pid {status['pid']})")
    return DONE


def _own_fields(options: Namespace) -> dict[str, Any]:
    """What was typed, as the fields of a spec; what was not typed is left out."""
    from everdeck.specforms import with_path

    secrets = {
        **{key: {"value": _read(file)} for key, file in _pairs("--secret", options.secret).items()},
        **{
            key: {"value": _read(file), "env": True} for key, file in _pairs("--secret-env", options.secret_env).items()
        },
    }
    given: dict[str, Any] = {
        "env": _pairs("--env", options.env),
        "secrets": secrets,
        "labels": _pairs("--label", options.label),
        "lifetime": "bound" if options.bound else None,
        "cwd": str(Path(options.cwd).resolve()) if options.cwd else None,
        "limits.memory_bytes": _bytes(options.memory),
    }
    given |= {path: getattr(options, option) for option, path in FIELDS.items()}
    typed = {path: value for path, value in given.items() if value is not False and value not in (None, {}, [])}
    typed |= {path: _toml_value(text) for path, text in _pairs("--set", options.set).items()}
    fields: dict[str, Any] = {}
    for path, value in typed.items():
        with_path(fields, path, value)
    return fields


def _toml_value(text: str) -> Any:
    """The value as it would stand in everdeck.toml; a text needs no quotes here."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _pairs(option: str, given: list[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SpecError(option, text, "NAME=VALUE")
        pairs[key] = value
    return pairs


def _read(file: str) -> str:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError("--secret", file, f"a readable file ({error.strerror})") from error
    except UnicodeDecodeError:
        raise SpecError("--secret", file, "a file of UTF-8 text") from None
    return text.removesuffix("\n")


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit():
        raise SpecError("--memory", text, "a number of bytes, such as 200000000 or 200M")
    return int(digits) * unit


def _satellite(options: Namespace) -> dict[str, Any]:
    """The field ``satellite``; the command after -- is where its messages go."""
    if options.to and options.command_line:
        raise SpecError("--to", options.to, "either --to or a command after --")
    return {
        "kind": options.satellite,
        "options": {name: _toml_value(text) for name, text in _pairs("--option", options.option).items()},
        "to": options.to or options.command_line,
        # The directory that a function is imported from; of another machine nobody knows it here.
        "path": None if is_elsewhere(options.where) else str(Path.cwd()),
    }
