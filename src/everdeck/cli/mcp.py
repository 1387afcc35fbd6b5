"""``everdeck mcp``: the deck for agents, over the Model Context Protocol."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from everdeck.cli import DONE, USED_WRONGLY
from everdeck.cli.reach import TOKEN_ENV, is_elsewhere

if TYPE_CHECKING:
    from everdeck.integrations.mcp_bounds import Bounds

MCP_TOKEN_ENV = "EVERDECK_MCP_TOKEN"  # noqa: S105 - the name of the variable
_SHORTEST_TOKEN = 16


def mcp_options(parser: ArgumentParser) -> None:
    """Options of mcp."""
    parser.add_argument("--allow", choices=["read", "operate"], default="read", help="what agents may do")
    parser.add_argument(
        "--commands",
        action="append",
        metavar="ALLOWLIST",
        help="with operate: a command line that may be started, or @FILE with one per line; * is any one word or part "
        "of one (repeatable; default: workers that are known, and no new ones)",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only workers with this label exist for agents, and new ones get it (repeatable)",
    )
    parser.add_argument("--http", metavar="HOST:PORT", help="serve http://HOST:PORT/mcp instead of standard input")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"with --http: the token that clients show; made if it is not there (default: ${MCP_TOKEN_ENV})",
    )
    parser.epilog = (
        "examples:\n"
        "  everdeck mcp --state /srv/bots/.everdeck\n"
        "  everdeck mcp --allow operate --label team=a --commands 'python bot.py *'\n"
        "  everdeck mcp --http 127.0.0.1:8450 --token-file ~/.everdeck-mcp-token"
    )


def mcp(options: Namespace) -> int:
    """Serve the deck to agents by the Model Context Protocol: over standard input and output to the program that
    started this, or over HTTP to whoever shows the token.

    Agents may look; with --allow operate they may also start, stop and restart workers and send messages. Every act is
    recorded with the client's name. Nobody becomes the owner of the deck by this.
    """
    try:
        from everdeck.integrations import mcp as door
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("everdeck"):
            raise
        print(f"everdeck: mcp needs {missing.name}: pip install 'everdeck[mcp]'", file=sys.stderr)
        return USED_WRONGLY
    if options.allow == "read" and options.commands:
        print("everdeck: --commands bounds what may be started: say --allow operate too", file=sys.stderr)
        return USED_WRONGLY
    bounds = _bounds(options)
    elsewhere = is_elsewhere(options.where)
    deck = door.deck_at(options.where, os.environ.get(TOKEN_ENV))
    server = door.DeckServer(deck, bounds, None if elsewhere else lambda: _examined(options.state))
    if options.http is None:
        # A thread that reads standard input cannot be interrupted; nothing is lost by dying here.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        asyncio.run(door.over_stdio(server, deck))
        return DONE
    token = _token(options.token_file)
    if token is None:
        print(
            f"everdeck: --http needs a token of {_SHORTEST_TOKEN} characters or more: --token-file FILE makes one, "
            f"or set ${MCP_TOKEN_ENV}",
            file=sys.stderr,
        )
        return USED_WRONGLY
    with _listening(options.http) as listener:
        host, port = listener.getsockname()[:2]

        def ready() -> None:
            print(f"everdeck mcp: serving http://{host}:{port}/mcp", file=sys.stderr, flush=True)

        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(door.over_http(server, deck, listener, token, ready))
    return DONE


def _bounds(options: Namespace) -> "Bounds":
    from everdeck.access import Role, selector
    from everdeck.integrations.mcp_bounds import Bounds, allowed_commands

    lines: list[str] | None = None
    for given in options.commands or ():
        file = Path(given[1:]).expanduser() if given.startswith("@") else None
        lines = [*(lines or []), *(file.read_text(encoding="utf-8").splitlines() if file is not None else [given])]
    return Bounds(Role(options.allow), None if lines is None else allowed_commands(lines), selector(options.label))


def _examined(state: Path) -> "list[str]":
    from everdeck.cli.examination import examine

    return examine(state).problems


def _token(file: Path | None) -> str | None:
    """The token that clients must show; None: there is none, or one that can be guessed."""
    if file is None:
        token = os.environ.get(MCP_TOKEN_ENV, "")
    else:
        import secrets

        with contextlib.suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as made:
                made.write(secrets.token_urlsafe(32) + "\n")
        token = file.read_text(encoding="utf-8").strip()
    return token if len(token) >= _SHORTEST_TOKEN else None


def _listening(address: str) -> socket.socket:
    from everdeck.errors import SpecError

    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal():
        raise SpecError("--http", address, "HOST:PORT, such as 127.0.0.1:8450")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family)
    except (OSError, OverflowError) as error:
        raise SpecError("--http", address, f"an address of this machine that is free ({error})") from error
