"""Satellites: ready-made bound workers that join one account to the outside.

    from everdeck import Satellite

    deck.start("bob-tg", Satellite.telegram(token=Secret(...)))       # messages come to this program
    async for message in deck.messages("bob-tg"):
        async with message:
            await message.reply(f"you said {message.text}")

This module owns what the deck has to know of a satellite: which kinds there are, which options and secrets each takes,
and the spec that is made of them. What a kind does is in a module of its own, which only the satellite's process loads.
Third parties add kinds by the entry point ``everdeck.satellites``; see :mod:`everdeck.satellites.base`.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import force_setattr, replace

from everdeck.child import runtime_directory
from everdeck.errors import SpecError
from everdeck.model import Health, Sandbox, SatelliteSpec, Secret, WorkerSpec

__all__ = ["KindEntry", "Satellite", "Target", "kind_of", "kinds"]

Target: TypeAlias = str | Sequence[str] | Callable[..., Any] | None
"""Where messages go: None (the host), a function or ``"module:name"``, a URL, a command."""
SecretText: TypeAlias = str | Secret
Tls: TypeAlias = Literal["tls", "starttls", "off"]
FirstRun: TypeAlias = Literal["skip", "take"]

GROUP: Final = "everdeck.satellites"
TELEGRAM: Final = "https://api.telegram.org"
HTTPS_PORT: Final = 443
WATCHDOG_SECONDS: Final = 60.0
FEED: Final = "feed.db"


# --- which kinds there are --------------------------------------------------------------------------------------


class KindEntry(msgspec.Struct, frozen=True):
    """What the deck knows of a kind without loading its code.

    ``options`` is a msgspec struct; ``where`` is ``module:class`` of the :class:`~everdeck.satellites.base.Kind`.
    ``secrets`` are the names that it reads, ``needs`` those it cannot do without (one of each group).
    """

    name: str
    where: str
    options: Any
    secrets: tuple[str, ...] = ()
    needs: tuple[tuple[str, ...], ...] = ()
    port: bool = False
    sends: bool = True
    receives: bool = True
    text: str = ""


class TelegramOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the kind ``telegram``."""

    base_url: str = TELEGRAM
    first_run: FirstRun = "skip"

    def __post_init__(self) -> None:
        _one_of("first_run", self.first_run, ("skip", "take"))
        _url("base_url", self.base_url)


class GmailOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the kind ``gmail``: any IMAP server, and the SMTP server that replies go to."""

    user: str
    host: str = "imap.gmail.com"
    port: int = 993
    tls: Tls = "tls"
    folder: str = "INBOX"
    smtp_host: str = "smtp.gmail.com"
    smtp_port: int = 587
    smtp_tls: Tls = "starttls"
    after: str = "seen"
    first_run: FirstRun = "skip"
    oauth_command: tuple[str, ...] | None = None
    replies_per_hour: int = 20

    def __post_init__(self) -> None:
        _text("user", self.user)
        _port("port", self.port)
        _port("smtp_port", self.smtp_port)
        _one_of("tls", self.tls, ("tls", "starttls", "off"))
        _one_of("smtp_tls", self.smtp_tls, ("tls", "starttls", "off"))
        _one_of("first_run", self.first_run, ("skip", "take"))
        if self.after not in {"seen", "keep"} and not self.after.startswith("move:"):
            raise SpecError("after", self.after, "seen | keep | move:FOLDER")


class SmtpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the kind ``smtp``: an outbox that is sent."""

    host: str
    port: int = 587
    tls: Tls = "starttls"
    user: str | None = None
    sender: str | None = None
    give_up_days: float = 5.0

    def __post_init__(self) -> None:
        _text("host", self.host)
        _port("port", self.port)
        _one_of("tls", self.tls, ("tls", "starttls", "off"))
        if self.sender is None and (self.user is None or "@" not in self.user):
            raise SpecError("sender", self.sender, "the address that mails come from, unless user is one")


class CronOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the kind ``cron``."""

    expression: str
    tz: str = "UTC"
    missed: Literal["once", "all", "skip"] = "once"

    def __post_init__(self) -> None:
        _text("expression", self.expression)
        _check_cron(self.expression, self.tz)
        _one_of("missed", self.missed, ("once", "all", "skip"))


class WebhookOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the kind ``webhook``: an HTTP listener on the worker's port.

    ``base_url`` is for Telegram's preset with the secret TOKEN: where replies are sent and files fetched.
    """

    path: str = "/"
    preset: Literal["github", "stripe", "slack", "telegram"] | None = None
    host: str = "127.0.0.1"
    max_bytes: int = 1_000_000
    base_url: str | None = None

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise SpecError("path", self.path, "a path such as /hook")
        if self.preset is not None:
            _one_of("preset", self.preset, ("github", "stripe", "slack", "telegram"))
        if self.preset == "telegram" and self.base_url is None:
            force_setattr(self, "base_url", TELEGRAM)
        if self.base_url is not None:
            _url("base_url", self.base_url)
        if type(self.max_bytes) is not int or self.max_bytes < 1:
            raise SpecError("max_bytes", self.max_bytes, "a whole number, at least 1")


_OURS: Final = (
    KindEntry(
        "telegram",
        "everdeck.satellites.telegram:Telegram",
        TelegramOptions,
        secrets=("TOKEN",),
        needs=(("TOKEN",),),
        text="a Telegram bot by long polling",
    ),
    KindEntry(
        "gmail",
        "everdeck.satellites.gmail:Gmail",
        GmailOptions,
        secrets=("PASSWORD", "OAUTH"),
        text="a mailbox: IMAP in, SMTP out; any server",
    ),
    KindEntry(
        "smtp",
        "everdeck.satellites.smtp:Smtp",
        SmtpOptions,
        secrets=("PASSWORD",),
        receives=False,
        text="an outbox that is sent by SMTP",
    ),
    KindEntry("cron", "everdeck.satellites.cron:Cron", CronOptions, sends=False, text="ticks of a cron expression"),
    KindEntry(
        "webhook",
        "everdeck.satellites.webhook:Webhook",
        WebhookOptions,
        secrets=("SECRET", "TOKEN"),
        port=True,
        text="an HTTP listener; stored before it is answered",
    ),
)


@cache
def kinds() -> Mapping[str, KindEntry]:
    """Every kind that is installed, by name: ours, then those of other packages."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - thirty modules, for whoever names a kind

    found = {entry.name: entry for entry in _OURS}
    for point in entry_points(group=GROUP):
        if point.name not in found:
            found[point.name] = point.load()
    return found


def kind_of(name: str) -> KindEntry:
    """The kind of that name; refused with the names that there are."""
    entry = kinds().get(name)
    if entry is None:
        raise SpecError("satellite.kind", name, " | ".join(kinds()))
    return entry


# --- the spec of a satellite ------------------------------------------------------------------------------------


class Satellite:
    """Specs of satellites: ``deck.start(name, Satellite.telegram(token))``.

    Each takes ``to=`` (see :data:`Target`) and the fields of :class:`everdeck.model.WorkerSpec`.
    """

    @staticmethod
    def telegram(
        token: SecretText,
        *,
        base_url: str = TELEGRAM,
        first_run: FirstRun = "skip",
        to: Target = None,
        **fields: Any,
    ) -> WorkerSpec:
        """A Telegram bot, by long polling. ``base_url`` may be a local Bot API server."""
        return Satellite.of(
            "telegram",
            {"base_url": base_url, "first_run": first_run},
            secrets=_with({"TOKEN": token}, fields),
            to=to,
            **fields,
        )

    @staticmethod
    def gmail(
        user: str,
        *,
        password: SecretText | None = None,
        oauth: Mapping[str, str] | Sequence[str] | SecretText | None = None,
        host: str = "imap.gmail.com",
        port: int = 993,
        tls: Tls = "tls",
        folder: str = "INBOX",
        smtp_host: str = "smtp.gmail.com",
        smtp_port: int = 587,
        smtp_tls: Tls = "starttls",
        after: str = "seen",
        first_run: FirstRun = "skip",
        to: Target = None,
        **fields: Any,
    ) -> WorkerSpec:
        """A mailbox on any IMAP server; replies go out by SMTP.

        ``oauth`` is a mapping with ``client_id``, ``client_secret`` and ``refresh_token`` (or its JSON), or a command
        that prints an access token. ``after`` says what becomes of a mail that is done: ``seen``, ``keep`` or
        ``move:FOLDER``.
        """
        if (password is None) == (oauth is None):
            raise SpecError("password", "both or neither of password and oauth", "one of password=... and oauth=...")
        options = {
            "user": user,
            "host": host,
            "port": port,
            "tls": tls,
            "folder": folder,
            "smtp_host": smtp_host,
            "smtp_port": smtp_port,
            "smtp_tls": smtp_tls,
            "after": after,
            "first_run": first_run,
        }
        secrets: dict[str, SecretText] = {} if password is None else {"PASSWORD": password}
        if isinstance(oauth, Mapping):
            secrets["OAUTH"] = msgspec.json.encode(oauth).decode()
        elif isinstance(oauth, str | Secret):
            secrets["OAUTH"] = oauth
        elif oauth is not None:
            options["oauth_command"] = tuple(oauth)
        return Satellite.of("gmail", options, secrets=_with(secrets, fields), to=to, **fields)

    @staticmethod
    def smtp(
        host: str,
        *,
        port: int = 587,
        tls: Tls = "starttls",
        user: str | None = None,
        password: SecretText | None = None,
        sender: str | None = None,
        to: Target = None,
        **fields: Any,
    ) -> WorkerSpec:
        """An outbox: what ``deck.send`` and ``everdeck send`` give it is sent by SMTP."""
        options = {"host": host, "port": port, "tls": tls, "user": user, "sender": sender}
        secrets = {} if password is None else {"PASSWORD": password}
        return Satellite.of("smtp", options, secrets=_with(secrets, fields), to=to, **fields)

    @staticmethod
    def cron(
        expression: str,
        *,
        tz: str = "UTC",
        missed: Literal["once", "all", "skip"] = "once",
        to: Target = None,
        **fields: Any,
    ) -> WorkerSpec:
        """Each tick of a cron expression is a message; ``missed`` says what becomes of ticks while nobody ran."""
        return Satellite.of("cron", {"expression": expression, "tz": tz, "missed": missed}, to=to, **fields)

    @staticmethod
    def webhook(
        path: str = "/",
        *,
        secret: SecretText | None = None,
        preset: Literal["github", "stripe", "slack", "telegram"] | None = None,
        to: Target = None,
        **fields: Any,
    ) -> WorkerSpec:
        """An HTTP listener on the worker's port. With ``secret`` signatures are checked, as ``preset`` has them."""
        if preset is not None and secret is None:
            raise SpecError("secret", secret, f"a value: the preset {preset!r} checks signatures with it")
        secrets = {} if secret is None else {"SECRET": secret}
        return Satellite.of(
            "webhook", {"path": path, "preset": preset}, secrets=_with(secrets, fields), to=to, **fields
        )

    @staticmethod
    def of(
        kind: str,
        options: Mapping[str, Any] | None = None,
        *,
        secrets: Mapping[str, SecretText] | None = None,
        to: Target = None,
        **fields: Any,
    ) -> WorkerSpec:
        """A satellite of any kind, also of other packages."""
        target, path = _target(to)
        given = {name: value for name, value in (options or {}).items() if value is not None}
        own = dict(secrets or {})
        return completed(
            WorkerSpec.of(WorkerSpec((), satellite=SatelliteSpec(kind, given, target, path)), secrets=own, **fields)
        )


def completed(spec: WorkerSpec) -> WorkerSpec:
    """The spec with everything that being a satellite means; any other spec as it is.

    Called wherever a spec comes in, so a satellite from a file, the command line, the API and the library is the same.
    """
    asked = spec.satellite
    if asked is None:
        return spec
    entry = kind_of(asked.kind)
    options = _checked_options(entry, asked.options)
    # Where a refresh token is exchanged is inside the secret: Google's is at the port of HTTPS, as all that are known.
    further = {HTTPS_PORT} if "OAUTH" in spec.secrets else set()
    spec = replace(spec, sandbox=_opened(spec.sandbox, asked, options, further))
    for group in entry.needs:
        if not set(group) & set(spec.secrets):
            raise SpecError(
                "secrets", sorted(spec.secrets), f"{' or '.join(group)}: the kind {entry.name!r} cannot do without it"
            )
    return replace(
        spec,
        command=("python3", "-m", "everdeck.satellites", entry.name),
        lifetime="bound",
        health=spec.health or Health(notify=True, watchdog_seconds=WATCHDOG_SECONDS),
        port=spec.port or entry.port,
        satellite=replace(asked, options=options),
    )


def _opened(sandbox: Sandbox, asked: SatelliteSpec, options: Mapping[str, Any], further: set[int]) -> Sandbox:
    """A strict sandbox with what every satellite needs: its interpreter, its code, and the ports of its account."""
    if sandbox.level != "strict":
        return sandbox
    code = {
        sys.prefix,
        sys.base_prefix,
        str(Path(__file__).resolve().parents[2]),
        *([asked.path] if asked.path else []),
    }
    urls = [value for value in (*options.values(), asked.to) if isinstance(value, str) and "://" in value]
    ports = further | {value for name, value in options.items() if name.endswith("port") and type(value) is int}
    ports |= {(parts := urlsplit(url)).port or (80 if parts.scheme == "http" else HTTPS_PORT) for url in urls}
    read = tuple(dict.fromkeys((*sandbox.read, *sorted(path for path in code if Path(path).is_dir()))))
    connect = sandbox.tcp_connect if sandbox.tcp_connect == "any" else tuple(sorted({*sandbox.tcp_connect, *ports}))
    # The lock that makes it the one poller of its token lies in this user's runtime directory.
    write = tuple(dict.fromkeys((*sandbox.write, runtime_directory())))
    return replace(sandbox, read=read, write=write, tcp_connect=connect)


def option_schemas() -> dict[str, Any]:
    """A JSON Schema per kind, for editors, forms and the API."""
    return {name: msgspec.json.schema(entry.options) for name, entry in kinds().items()}


# --- helpers, in the order they are called ----------------------------------------------------------------------


def _with(own: Mapping[str, SecretText], fields: dict[str, Any]) -> dict[str, SecretText]:
    """The kind's secrets and those that were given as a field, such as TO_SECRET."""
    return {**own, **fields.pop("secrets", {})}


def _target(to: Target) -> tuple[str | tuple[str, ...] | None, str | None]:
    if to is None:
        return None, None
    if callable(to):
        name, module = getattr(to, "__qualname__", ""), getattr(to, "__module__", "")
        if module == "__main__":
            module = Path(getattr(sys.modules["__main__"], "__file__", "") or "").stem
        if not module or not name or "<" in name:
            raise SpecError("to", to, "a function at the top level of a module: the satellite imports it by name")
        return f"{module}:{name}", _root_of(to.__module__)
    if isinstance(to, str):
        function = not to.startswith(("http://", "https://"))
        return to, _root_of(to.partition(":")[0]) if function else None
    return tuple(to), None


def _root_of(module: str) -> str | None:
    """The directory that a module is imported from here, so that the satellite finds it too."""
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        return str(Path(file).resolve().parent) if file else None
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if found is None:
        return str(Path.cwd())
    if found.submodule_search_locations:
        return str(Path(next(iter(found.submodule_search_locations))).resolve().parent)
    return str(Path(found.origin).resolve().parent) if found.origin and found.has_location else None


def _checked_options(entry: KindEntry, given: Mapping[str, Any]) -> dict[str, Any]:
    known = entry.options.__struct_fields__
    for name, value in given.items():
        if name not in known:
            raise SpecError(f"satellite.{name}", value, f"one of {', '.join(known) or 'no options'}")
    try:
        options = msgspec.convert(dict(given), entry.options)
    except msgspec.ValidationError as err:
        if isinstance(err.__cause__, SpecError):
            raise err.__cause__ from None
        where = re.search(r" - at `\$\.(\w+)", str(err))
        missing = re.search(r"missing required field `(\w+)`", str(err))
        field = (where or missing or ["", "satellite"])[1]
        raise SpecError(field, given.get(field), str(err).partition(" - at ")[0]) from None
    # Defaults are written out: a spec means the same tomorrow, and two that mean the same are equal.
    return {name: value for name, value in msgspec.to_builtins(options).items() if value is not None}


def _one_of(field: str, given: object, accepted: tuple[str, ...]) -> None:
    if given not in accepted:
        raise SpecError(field, given, " | ".join(accepted))


def _text(field: str, given: object) -> None:
    if not isinstance(given, str) or not given:
        raise SpecError(field, given, "a text that is not empty")


def _url(field: str, given: str) -> None:
    if not given.startswith(("http://", "https://")):
        raise SpecError(field, given, f"a URL such as {TELEGRAM}")


def _port(field: str, given: object) -> None:
    if type(given) is not int or not 0 < given < 65536:  # noqa: PLR2004 - the range of TCP ports
        raise SpecError(field, given, "a port from 1 to 65535")


def _check_cron(expression: str, tz: str) -> None:
    """Refuse it before anything is written, where the package that knows is installed."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # noqa: PLC0415 - a quarter of a megabyte, for cron alone

    try:
        ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError) as err:
        raise SpecError("tz", tz, "the name of a time zone, such as Europe/Berlin") from err
    try:
        from cronsim import CronSim, CronSimError  # noqa: PLC0415 - an extra
    except ImportError:
        return
    try:
        CronSim(expression, datetime.now(UTC))
    except CronSimError as err:
        raise SpecError("expression", expression, f"five fields of cron ({err})") from err
