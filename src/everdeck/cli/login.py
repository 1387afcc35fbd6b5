"""``everdeck login``: the page's link with its token, once more."""

import sys
from argparse import ArgumentParser, Namespace

from everdeck.cli import DONE, FAILED
from everdeck.client import Daemon


def login_options(parser: ArgumentParser) -> None:
    """Options of login."""
    parser.add_argument("--json", action="store_true", help='{"page", "link"}')
    parser.epilog = (
        "examples:\n"
        "  everdeck login\n"
        "  xdg-open $(everdeck login)\n\n"
        "Whoever has the link can do what you can do. It holds the token of STATE/token."
    )


def login(options: Namespace) -> int:
    """Print the link that opens the page and logs you in, as `everdeck up` shows it once."""
    from everdeck.statedir import StateDir

    with Daemon.of(options) as daemon:
        page = daemon.deck()["page"]
    if page is None:
        print("everdeck: this daemon serves no page; start it without --no-http", file=sys.stderr)
        return FAILED
    path = StateDir(options.state).token
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        print(f"everdeck: {path}: {error.strerror}", file=sys.stderr)
        return FAILED
    link = f"{page}login#token={token}"
    if options.json:
        import json

        print(json.dumps({"page": page, "link": link}))
    else:
        print(link)
    return DONE
