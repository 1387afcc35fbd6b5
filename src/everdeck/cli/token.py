"""``everdeck token create | list | revoke``: who else may talk to the deck over TCP, and what they may do.

Works on the files of the state directory, so it needs no daemon; a daemon that runs sees it at its next request.
"""

import json
import re
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from everdeck.access import Role, selector
from everdeck.cli import DONE, FAILED, output
from everdeck.errors import SpecError, StateDirRefused

if TYPE_CHECKING:
    from everdeck.server.tokens import Tokens

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def token_options(parser: ArgumentParser) -> None:
    """Options of token."""
    actions = parser.add_subparsers(dest="action", metavar="create|list|revoke", required=True)
    shared: dict[str, Any] = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
    create = actions.add_parser("create", help="make a token and print it, once", **shared)
    create.add_argument("name", metavar="NAME", help="whom it is for; events and the access log say it")
    create.add_argument("--role", choices=[role.value for role in Role], default=Role.READ.value, help="default: read")
    create.add_argument(
        "--label", action="append", default=[], metavar="KEY=VALUE", help="only workers with this label; repeatable"
    )
    create.add_argument("--expires", metavar="WHEN", help="30d, 12h, or 2027-01-31; without it, never")
    listing = actions.add_parser("list", help="names, roles, labels and ends; never the tokens", **shared)
    revoke = actions.add_parser("revoke", help="it opens nothing from now on", **shared)
    revoke.add_argument("names", metavar="NAME", nargs="+", help="tokens")
    for one in (create, listing, revoke):
        one.add_argument("--json", action="store_true", help="for machines")
        one.add_argument("--state", metavar="DIR", default=SUPPRESS, help=SUPPRESS)
    parser.epilog = (
        "examples:\n"
        "  everdeck token create grafana                       (role read)\n"
        "  everdeck token create ci --role operate --label team=a --expires 30d\n"
        "  everdeck token revoke ci"
    )


def token(options: Namespace) -> int:
    """Tokens for the API and the page: each has a name, a role, and if you like labels and an end.

    read: look. operate: also start, stop, restart and reset known workers. admin: also say what is run, which is
    everything the daemon's own account may do. Only a digest is kept, so a lost token is replaced, not shown again.
    """
    from everdeck.server.tokens import Tokens

    if not options.state.is_dir():
        raise StateDirRefused(f"{options.state}: there is no deck here; `everdeck up` makes one")
    tokens = Tokens(options.state)
    now = datetime.now(UTC)
    if options.action == "create":
        expires_at = None if options.expires is None else ends_at(options.expires, now)
        secret = tokens.create(options.name, Role(options.role), selector(options.label), now, expires_at)
        print(json.dumps({"name": options.name, "token": secret}) if options.json else secret)
        if not options.json and sys.stdout.isatty():
            print("It is shown only now. Send it as `Authorization: Bearer …`, or paste it into the page.")
        return DONE
    if options.action == "revoke":
        return _revoke(tokens, options)
    return _list(tokens, options, now)


def _revoke(tokens: "Tokens", options: Namespace) -> int:
    code = DONE
    for name in options.names:
        try:
            tokens.revoke(name)
        except SpecError as error:
            print(f"everdeck: {error}", file=sys.stderr)
            code = FAILED
        else:
            print(json.dumps({"revoked": name}) if options.json else f"{name} revoked")
    return code


def _list(tokens: "Tokens", options: Namespace, now: datetime) -> int:
    known = tokens.list()
    if options.json:
        for one in known:
            told = {"name": one.name, "role": one.role, "labels": one.labels, "created_at": one.created_at.isoformat()}
            ends = None if one.expires_at is None else one.expires_at.isoformat()
            print(json.dumps({**told, "expires_at": ends, "expired": not one.is_valid(now)}))
        return DONE
    if not known:
        print("no tokens yet; `everdeck up` makes the deck's own, `everdeck token create NAME` others")
        return DONE
    rows = [
        (
            one.name,
            one.role.value,
            ",".join(f"{key}={value}" for key, value in one.labels.items()) or "all",
            f"{one.created_at.astimezone():%Y-%m-%d %H:%M}",
            "never"
            if one.expires_at is None
            else f"{one.expires_at.astimezone():%Y-%m-%d %H:%M}" + ("" if one.is_valid(now) else " (expired)"),
        )
        for one in known
    ]
    print(output.table(("NAME", "ROLE", "WORKERS", "CREATED", "EXPIRES"), rows))
    return DONE


def ends_at(text: str, now: datetime) -> datetime:
    """When a token ends that is to live so long, or until then."""
    if match := re.fullmatch(r"(\d{1,6})\s*([mhdw])", text.strip()):
        return now + timedelta(**{_UNITS[match[2]]: int(match[1])})
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise SpecError("expires", text, "30d, 12h, or a date such as 2027-01-31") from None
    return at if at.tzinfo else at.astimezone()
