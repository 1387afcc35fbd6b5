"""``everdeck login``: the page's link with its token, once more, or with a new one."""

import sys
from argparse import ArgumentParser, Namespace

from everdeck.access import Role
from everdeck.cli import DONE, FAILED, USED_WRONGLY
from everdeck.client import Daemon


def login_options(parser: ArgumentParser) -> None:
    """Options of login."""
    parser.add_argument("--new", metavar="NAME", help="a link with a new token of this name, as `token create` makes")
    parser.add_argument("--role", choices=[role.value for role in Role], help="what it may do; default: read")
    parser.add_argument("--expires", metavar="WHEN", help="30d, 12h, or 2027-01-31; without it, never")
    parser.add_argument("--json", action="store_true", help='{"page", "link"}')
    parser.epilog = (
        "examples:\n"
        "  everdeck login\n"
        "  xdg-open $(everdeck login)\n"
        "  everdeck login --new carol --role operate --expires 12h\n\n"
        "Whoever has the link can do what its token may do: without --new that is what you may do, since it holds the\n"
        "token of STATE/token. `everdeck token revoke NAME` ends a new one."
    )


def login(options: Namespace) -> int:
    """Print the link that opens the page and logs you in, as `everdeck up` shows it once."""
    if options.new is None and (options.role or options.expires):
        print("everdeck: --role and --expires are for a new token: add --new NAME", file=sys.stderr)
        return USED_WRONGLY
    with Daemon.of(options) as daemon:
        page = daemon.deck()["page"]
    if page is None:
        print("everdeck: this daemon serves no page; start it without --no-http", file=sys.stderr)
        return FAILED
    token = _own(options) if options.new is None else _new(options)
    if token is None:
        return FAILED
    link = f"{page}login#token={token}"
    if options.json:
        import json

        print(json.dumps({"page": page, "link": link}))
    else:
        print(link)
    return DONE


def _own(options: Namespace) -> str | None:
    from everdeck.statedir import StateDir

    path = StateDir(options.state).token
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        print(f"everdeck: {path}: {error.strerror}; `everdeck login --new NAME` makes another token", file=sys.stderr)
        return None


def _new(options: Namespace) -> str:
    from datetime import UTC, datetime

    from everdeck.cli.token import ends_at
    from everdeck.server.tokens import Tokens

    now = datetime.now(UTC)
    expires_at = None if options.expires is None else ends_at(options.expires, now)
    return Tokens(options.state).create(options.new, Role(options.role or Role.READ), {}, now, expires_at)
