"""``everdeck.toml``: which workers there should be, and the templates they are made from.

This file owns the shape of the configuration, its JSON Schema, and what a person is told when it is wrong:
every problem at once, each with its line, its key and, where one is near, the key that was probably meant.
A file is taken whole or not at all, so a broken one changes nothing.

Secrets are named by file, never written into the configuration: a configuration is copied, committed and
mailed. Relative paths start at the directory of the file that names them.

It stands on TOML 1.0 (``tomllib``), which tells no line numbers for values; statements are located by parsing
them one at a time with the same parser, so quoting and multi-line values need no second grammar.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from everdeck.access import Role
from everdeck.errors import ConfigRefused, NameRefused, SpecError
from everdeck.model import (
    DurabilityMode,
    EventKind,
    LogRoom,
    Sandbox,
    SandboxLevel,
    SatelliteSpec,
    Secret,
    WorkerSpec,
    worker_name,
)
from everdeck.satellites import completed, option_schemas
from everdeck.specforms import optional_fields

SCHEMA_ID: Final = "everdeck.schema.json"
DEFAULT_FILE: Final = "everdeck.toml"
NOTIFIED: Final = ("failed", "unhealthy", "dead-letter", "lock-conflict")


class SecretFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a secret's value is read from, and whether it reaches the worker as env too."""

    file: Annotated[str, Meta(description="Path of the file that holds the value; one final newline is dropped.")]
    env: Annotated[bool, Meta(description="Also pass it as an environment variable of that name.")] = False


# What a template and a worker may both say: the fields of WorkerSpec, all optional, and three of them said differently.
_Table: Any = msgspec.defstruct(
    "_Table",
    [
        *optional_fields(
            secrets=Annotated[
                dict[str, str | SecretFile], Meta(description="Secrets, each named by the file that holds it.")
            ],
            cwd=Annotated[str, Meta(description="Working directory; the one this file stands in if not given.")],
            sandbox=Annotated[SandboxLevel | Sandbox, Meta(description="What it may do: off, basic or strict.")],
            satellite=Annotated[
                str | dict[str, Any],
                Meta(description="The kind of a satellite, or a table with kind and its options; instead of command."),
            ],
        ),
        (
            "to",
            Annotated[
                str | tuple[str, ...],
                Meta(
                    description="Where a satellite's messages go: a URL, module:function, a command. Else to the host."
                ),
            ]
            | UnsetType,
            UNSET,
        ),
    ],
    frozen=True,
    forbid_unknown_fields=True,
)


class TemplateTable(_Table):  # type: ignore[misc]  # made above
    """``[template.NAME]``: what several workers have in common."""


class WorkerTable(_Table):  # type: ignore[misc]  # as above
    """``[worker.NAME]``: one worker; what it says itself wins over its template."""

    template: Annotated[str, Meta(description="The [template.NAME] this worker starts from.")] | UnsetType = UNSET


class DefaultsTable(_Table):  # type: ignore[misc]  # as above
    """``[defaults]``: what every template and worker of the file starts from."""


class ServerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[server]``: how the page and the API are served. Options of ``everdeck up`` win over it."""

    listen: Annotated[str, Meta(description="HOST:PORT of the page.")] | UnsetType = UNSET
    http: Annotated[bool, Meta(description="false: the Unix socket only.")] = True
    hosts: Annotated[tuple[str, ...], Meta(description="Further host names the page may be called by.")] = ()
    tls_cert: Annotated[str, Meta(description="Certificate chain, PEM.")] | UnsetType = UNSET
    tls_key: Annotated[str, Meta(description="Private key, PEM.")] | UnsetType = UNSET
    tls_client_ca: (
        Annotated[str, Meta(description="PEM of the authority whose certificates clients must show.")] | UnsetType
    ) = UNSET
    public_url: (
        Annotated[
            str,
            Meta(
                pattern=r"^https?://[^/\s?#@]+(/[^\s?#]*)?$",
                description="What people type to reach the page, when that is a proxy in front of it.",
            ),
        ]
        | UnsetType
    ) = UNSET
    access_log: (
        Annotated[str, Meta(description="File for one JSON line per request; '-' is standard error.")] | UnsetType
    ) = UNSET
    users: Annotated[
        dict[str, Role], Meta(description="Accounts of this machine that may use the sockets, each with its role.")
    ] = {}
    groups: Annotated[dict[str, Role], Meta(description="The same for groups.")] = {}
    sample_seconds: (
        Annotated[float, Meta(gt=0, description="Keep sampling cpu and memory this often, also unwatched.")] | UnsetType
    ) = UNSET


class DeckTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[deck]``: what holds for the deck as a whole."""

    durability: Annotated[
        DurabilityMode,
        Meta(description="What an answer survives: a power cut, or the death of any process (quicker to give)."),
    ] = "power"
    auto_uids: (
        Annotated[
            str,
            Meta(
                pattern=r"^[0-9]+-[0-9]+$",
                description='Uids for workers with user = "auto": FIRST-LAST; one range per deck.',
            ),
        ]
        | UnsetType
    ) = UNSET


class NotifyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[notify]``: whom to tell, elsewhere, when something needs a person."""

    url: Annotated[str, Meta(description="POST a signed JSON document there.")] | UnsetType = UNSET
    secret: Annotated[str | SecretFile, Meta(description="The file with the key that signs the POST.")] | UnsetType = (
        UNSET
    )
    satellite: Annotated[str, Meta(description="Or send a message through this satellite …")] | UnsetType = UNSET
    to: Annotated[str, Meta(description="… to this chat or address.")] | UnsetType = UNSET
    events: Annotated[tuple[str, ...], Meta(description="Kinds of events, and dead-letter.")] = NOTIFIED
    quiet_seconds: Annotated[
        float, Meta(ge=0, le=3600, description="Gather events until none has come for so long; a storm is one message.")
    ] = 10.0


class Notify(msgspec.Struct, frozen=True):
    """``[notify]`` that was read without a problem, its secret too."""

    events: tuple[str, ...]
    quiet_seconds: float
    url: str | None = None
    secret: str | None = None
    satellite: str | None = None
    to: str | None = None


class KubernetesTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[kubernetes]``: how workers run as pods. Not used on one box."""

    namespace: Annotated[str, Meta(description="Where the workers live.")] = "everdeck"
    image: Annotated[str, Meta(description="The image of every worker, with everdeck in it.")] | UnsetType = UNSET
    image_pull_policy: Annotated[str, Meta(description="Always, IfNotPresent or Never.")] | UnsetType = UNSET
    storage_class: Annotated[str, Meta(description="Of the volumes; else the default one.")] | UnsetType = UNSET
    volume_size: Annotated[str, Meta(description="The size of each worker's volume.")] = "1Gi"
    lease_seconds: Annotated[
        float, Meta(ge=4, le=300, description="How long a worker's Lease holds: shorter is back sooner.")
    ] = 8


class ConfigTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of ``everdeck.toml``."""

    deck: DeckTable = DeckTable()
    logs: LogRoom = LogRoom()
    server: ServerTable = ServerTable()
    notify: NotifyTable | UnsetType = UNSET
    kubernetes: KubernetesTable = KubernetesTable()
    defaults: DefaultsTable | UnsetType = UNSET
    template: dict[str, TemplateTable] = {}
    worker: dict[str, WorkerTable] = {}


class Config(msgspec.Struct, frozen=True):
    """A configuration that was read without a problem: every worker complete, secrets read."""

    path: str
    workers: dict[str, WorkerSpec]
    templates: dict[str, dict[str, Any]]
    server: ServerTable = ServerTable()
    notify: Notify | None = None
    kubernetes: KubernetesTable = KubernetesTable()
    deck: DeckTable = DeckTable()
    logs: LogRoom = LogRoom()


def load(path: str | Path) -> Config:
    """Read a configuration file; raises :class:`ConfigRefused` with every problem it has."""
    file = Path(path)
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigRefused(str(file), (f"cannot be read: {error.strerror}",)) from error
    except UnicodeDecodeError as error:
        raise ConfigRefused(str(file), ("is not UTF-8 text",)) from error
    return parse(text, file)


def parse(text: str, file: Path) -> Config:
    """The configuration in a text; ``file`` is named in messages and is where relative paths start."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigRefused(str(file), (_syntax_problem(error),)) from error
    return _Reader(document, text, file).config()


def said_for_kubernetes(config: Config) -> dict[str, Any]:
    """What ``[kubernetes]`` says, by name; what it does not say is left to the namespace's own settings."""
    table, usual = config.kubernetes, KubernetesTable()
    fields = ((name, getattr(table, name)) for name in table.__struct_fields__)
    return {name: value for name, value in fields if value is not UNSET and value != getattr(usual, name)}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of ``everdeck.toml``, for editors."""
    schema = msgspec.json.schema(ConfigTable)
    names = {"pattern": r"^(?!\.{1,2}$)[A-Za-z0-9._\-@:+]{1,128}$"}
    schema["$defs"]["ConfigTable"]["properties"]["worker"]["propertyNames"] = names
    tables = {
        name: {**_options_schema(options), "title": f"satellite {name}"} for name, options in option_schemas().items()
    }
    for name, table in tables.items():
        table["properties"] = {"kind": {"const": name}, "to": {"type": ["string", "array"]}, **table["properties"]}
        table["required"] = ["kind", *table.get("required", [])]
    for kind in ("TemplateTable", "WorkerTable"):
        asked = schema["$defs"][kind]["properties"]["satellite"]
        asked["anyOf"] = [{"enum": list(tables)}, *tables.values()]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "everdeck.toml",
        **schema,
    }


def spec_from_template(name: str, template: Mapping[str, Any], own: Mapping[str, Any]) -> WorkerSpec:
    """The spec of a worker made from a stored template and what was said for it alone.

    Templates are stored as written, so secrets are still files here; they are read now.
    """
    # One that was applied over HTTP stands in no directory of this machine.
    base = Path(template["_file"]).parent if "_file" in template else None
    table = _merged({key: value for key, value in template.items() if key != "_file"}, own)
    try:
        converted = msgspec.convert(table, TemplateTable)
        return _spec(converted, base)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        raise SpecError(f"worker {name!r}", _path_of(error) or "template", _said(error)) from None


def _options_schema(whole: dict[str, Any]) -> dict[str, Any]:
    """The one table that a schema of options is about."""
    (table,) = whole["$defs"].values()
    return dict(table)


# --- reading ----------------------------------------------------------------------------------------------------


class _Reader:
    """One pass over a document that collects every problem before it answers."""

    def __init__(self, document: dict[str, Any], text: str, file: Path) -> None:
        self._document = document
        self._file = file
        self._place = file.parent.resolve()
        self._text = text
        self._problems: list[tuple[int, str]] = []
        given = document.get("defaults", {})
        self._defaults: dict[str, Any] = given if isinstance(given, dict) else {}

    def config(self) -> Config:
        self._refuse_unknown(("",), self._document, ConfigTable, ())
        server = self._server()
        notify = self._notify()
        kubernetes = self._converted(("kubernetes",), self._document.get("kubernetes", {}), KubernetesTable)
        deck = self._converted(("deck",), self._document.get("deck", {}), DeckTable)
        logs = self._converted(("logs",), self._document.get("logs", {}), LogRoom)
        self._converted(("defaults",), self._defaults, DefaultsTable)
        templates = self._templates()
        workers = {name: spec for name, spec in self._workers(templates) if spec is not None}
        if self._problems:
            ordered = dict.fromkeys(
                f"line {line}: {what}" if line else what for line, what in sorted(self._problems, key=lambda p: p[0])
            )
            raise ConfigRefused(str(self._file), tuple(ordered))
        whole_path = str(self._file.resolve())
        stored = {name: {**table, "_file": whole_path} for name, table in templates.items()}
        return Config(whole_path, workers, stored, server, notify, kubernetes, deck, logs)

    def _problem(self, keys: tuple[str, ...], what: str) -> None:
        self._problems.append((self._line(keys), f"{_dotted(keys)}: {what}"))

    @cached_property
    def _lines(self) -> dict[tuple[str, ...], int]:
        """Where each key stands: the file is read a second time for that, and only if something is wrong with it."""
        return dict(_located(self._text))

    def _line(self, keys: tuple[str, ...]) -> int:
        for length in range(len(keys), 0, -1):
            if (line := self._lines.get(keys[:length])) is not None:
                return line
        return 0

    def _server(self) -> ServerTable:
        given = self._document.get("server", {})
        converted: ServerTable | None = self._converted(("server",), given, ServerTable)
        if converted is None:
            return ServerTable()
        if (converted.tls_cert is UNSET) != (converted.tls_key is UNSET):
            self._problem(("server",), "tls_cert and tls_key belong together; only one is given")
        changes = {
            key: str(self._file.parent / value)
            for key in ("tls_cert", "tls_key", "tls_client_ca", "access_log")
            if isinstance(value := getattr(converted, key), str) and value != "-"
        }
        return msgspec.structs.replace(converted, **changes)

    def _notify(self) -> Notify | None:
        if "notify" not in self._document:
            return None
        converted: NotifyTable | None = self._converted(("notify",), self._document["notify"], NotifyTable)
        if converted is None:
            return None
        given = {key: value for key in ("url", "satellite", "to") if isinstance(value := getattr(converted, key), str)}
        if ("url" in given) == ("satellite" in given) or ("satellite" in given) != ("to" in given):
            self._problem(("notify",), "accepted: a url, or a satellite and whom it writes to")
        if "url" in given and not re.match(r"https?://[^/]", given["url"]):
            self._problem(("notify", "url"), f"{given['url']!r} was given; accepted: http://… or https://…")
        known = {*(str(kind) for kind in EventKind), "dead-letter"}
        for kind in converted.events:
            if kind not in known:
                self._problem(("notify", "events"), _unknown("event", kind, dict.fromkeys(known)))
        secret = None
        if converted.secret is not UNSET:
            try:
                secret = _read_secret("secret", converted.secret, self._file.parent).value
            except SpecError as error:
                self._problem(("notify", "secret"), _detail(error))
        return Notify(converted.events, converted.quiet_seconds, secret=secret, **given)

    def _templates(self) -> dict[str, dict[str, Any]]:
        tables = self._tables("template")
        for name, table in tables.items():
            self._converted(("template", name), table, TemplateTable)
        return {name: _merged(self._defaults, table) for name, table in tables.items()}

    def _workers(self, templates: dict[str, dict[str, Any]]) -> Iterator[tuple[str, WorkerSpec | None]]:
        for name, table in self._tables("worker").items():
            yield name, self._worker(name, table, templates)

    def _worker(self, name: str, table: dict[str, Any], templates: dict[str, dict[str, Any]]) -> WorkerSpec | None:
        keys = ("worker", name)
        try:
            worker_name(name)
        except NameRefused as error:
            self._problem(keys, f"not a worker's name; accepted: {error.accepted}")
            return None
        own: WorkerTable | None = self._converted(keys, table, WorkerTable)
        if own is None or (base := self._base(keys, own, templates)) is None:
            return None
        merged: WorkerTable | None = own
        if self._defaults or base:
            merged = self._converted(keys, _merged(_merged(self._defaults, base), table), WorkerTable)
        if merged is None:
            return None
        try:
            return completed(_spec(merged, self._place))
        except SpecError as error:
            self._problem((*keys, *_keys_of(error)), _detail(error))
            return None

    def _base(
        self, keys: tuple[str, ...], own: WorkerTable, templates: dict[str, dict[str, Any]]
    ) -> dict[str, Any] | None:
        """The template's table, empty without one; None when it has a problem."""
        if not isinstance(own.template, str):
            return {}
        base = templates.get(own.template)
        if base is None:
            self._problem((*keys, "template"), _unknown("template", own.template, templates))
            return None
        try:
            msgspec.convert(base, TemplateTable)
        except msgspec.ValidationError:
            return None  # already told where the template stands
        return base

    def _tables(self, kind: str) -> dict[str, dict[str, Any]]:
        tables = self._document.get(kind, {})
        if not isinstance(tables, dict):
            self._problem((kind,), f"{_kind_of(tables)} was given; accepted: tables such as [{kind}.alice]")
            return {}
        kept = {}
        for name, table in tables.items():
            if isinstance(table, dict):
                kept[name] = table
            else:
                self._problem(
                    (kind, name), f"{_kind_of(table)} was given; accepted: a table, written as [{kind}.{name}]"
                )
        return kept

    def _converted(self, keys: tuple[str, ...], table: Any, kind: type[Any]) -> Any:
        """The table as ``kind``, or None when it has a problem, which is then recorded."""
        before = len(self._problems)
        self._refuse_unknown(keys, table, kind, ())
        if len(self._problems) > before:
            return None
        try:
            return msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            cause = error.__cause__
            if isinstance(cause, SpecError):
                self._problem((*keys, *_keys_of(cause)), _detail(cause))
            else:
                self._problem((*keys, *_path_of(error)), _said(error))
            return None

    def _refuse_unknown(self, keys: tuple[str, ...], table: Any, kind: Any, inner: tuple[str, ...]) -> None:
        """Name every key that the type does not have; go down into nested structs that were given as tables."""
        if not isinstance(table, dict):
            return
        accepted = _fields_of(kind)
        here = tuple(key for key in (*keys, *inner) if key)
        for key, value in table.items():
            if key not in accepted:
                self._problem((*here, key), _unknown("key", key, accepted))
            elif (nested := _struct_in(accepted[key])) is not None and keys != ("",):
                self._refuse_unknown(keys, value, nested, (*inner, key))


def _spec(table: TemplateTable | WorkerTable, base: Path | None) -> WorkerSpec:
    if table.command is UNSET and table.satellite is UNSET:
        raise SpecError("command", "nothing", "a list of texts: the program and its arguments")
    fields = {
        key: value
        for key in WorkerSpec.__struct_fields__
        if (value := getattr(table, key)) is not UNSET and key not in {"secrets", "satellite"}
    }
    if table.satellite is not UNSET:
        fields["satellite"] = _satellite(table, base)
    elif table.to is not UNSET:
        raise SpecError("to", table.to, 'only beside satellite = "…"')
    if isinstance(table.secrets, dict):
        fields["secrets"] = {name: _read_secret(name, entry, base or Path()) for name, entry in table.secrets.items()}
    if base is not None:
        # Where the file stands, so that `command = ["python3", "bot.py"]` finds the bot.py beside it.
        fields["cwd"] = str(base / (table.cwd if isinstance(table.cwd, str) else ""))
    template = getattr(table, "template", UNSET)
    if isinstance(template, str):
        fields["labels"] = {"template": template, **fields.get("labels", {})}
    return WorkerSpec(**fields)


def _satellite(table: _Table, base: Path | None) -> SatelliteSpec:
    given = table.satellite
    options = {"kind": given} if isinstance(given, str) else dict(given or {})
    kind, to, path = (options.pop(name, None) for name in ("kind", "to", "path"))
    if isinstance(inner := options.get("options"), dict):  # as the API has it
        options = {**options, **inner}
        del options["options"]
    if not isinstance(kind, str):
        raise SpecError("satellite.kind", kind, "a word such as telegram, gmail, smtp, cron or webhook")
    target = table.to if isinstance(table.to, str | tuple) else to
    return SatelliteSpec(kind, options, target, path if base is None else str(base))


def _read_secret(name: str, entry: str | SecretFile, base: Path) -> Secret:
    file = base / (entry if isinstance(entry, str) else entry.file)
    try:
        value = file.read_bytes().decode("utf-8").removesuffix("\n")
    except OSError as error:
        raise SpecError(f"secrets.{name}", str(file), f"a readable file ({error.strerror})") from error
    except UnicodeDecodeError:
        raise SpecError(f"secrets.{name}", str(file), "a file of UTF-8 text") from None
    return Secret(value, env=isinstance(entry, SecretFile) and entry.env)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``own`` over ``base``; tables are joined key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in own.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


# --- what a person is told --------------------------------------------------------------------------------------


def _unknown(what: str, given: str, accepted: Mapping[str, Any]) -> str:
    import difflib  # noqa: PLC0415 - for those who mistyped

    begun = [name for name in accepted if name.startswith(given)]
    near = begun or difflib.get_close_matches(given, accepted, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(accepted)) or 'none'}"
    return f"unknown {what} {given!r}{hint}"


def _detail(error: SpecError) -> str:
    return str(error).removeprefix(f"{error.field}: ")


def _keys_of(error: SpecError) -> tuple[str, ...]:
    """The keys a refused field stands for: ``restart.max_crashes``, ``env['A']``."""
    return tuple(re.findall(r"[^.\[\]']+", error.field))


def _said(error: msgspec.ValidationError) -> str:
    return re.sub(r" - at `[^`]*`$", "", str(error)).replace("Object", "the table").replace("`", "'")


def _path_of(error: msgspec.ValidationError) -> tuple[str, ...]:
    found = re.search(r" - at `\$?([^`]*)`$", str(error))
    return tuple(re.findall(r"\.([A-Za-z_]\w*)", found.group(1))) if found else ()


def _syntax_problem(error: "tomllib.TOMLDecodeError") -> str:
    found = re.search(r"^(.*) \(at (?:line (\d+), column (\d+)|(end of document))\)$", str(error))
    if not found:
        return f"not TOML: {error}"
    what, line, column, _ = found.groups()
    return f"line {line}, column {column}: not TOML: {what}" if line else f"end of file: not TOML: {what}"


def _dotted(keys: tuple[str, ...]) -> str:
    return ".".join(key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else f'"{key}"' for key in keys)


def _kind_of(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)


@cache
def _fields_of(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__struct_fields__}


def _struct_in(hint: Any) -> Any:
    """The one struct a field may hold, or None for scalars and free mappings."""
    for part in (hint, *get_args(hint)):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part
    return None


# --- where things stand in the file -----------------------------------------------------------------------------

_HEADER: Final = re.compile(r"\s*\[\[?(?P<key>[^\]]+)\]\]?\s*(#.*)?$")


def _located(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Every key of a valid document with the line it stands on; an outer key comes with its first mention."""
    seen: set[tuple[str, ...]] = set()
    table: tuple[str, ...] = ()
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        if not line.strip() or line.lstrip().startswith("#"):
            number += 1
            continue
        header = _HEADER.match(line)
        statement, used = _statement(lines, number)
        if header and used == 1 and (parsed := _parsed(f"{header['key']} = 0")) is not None:
            table = _keys(parsed)[0]
            found = [table]
        elif statement is not None:
            found = [table + keys for keys in _keys(statement)]
        else:
            found = []
        for keys in found:
            for length in range(1, len(keys) + 1):
                if keys[:length] not in seen or length == len(keys):
                    seen.add(keys[:length])
                    yield keys[:length], number + 1
        number += used


def _statement(lines: list[str], number: int) -> tuple[dict[str, Any] | None, int]:
    """The statement that begins on this line, parsed, and how many lines it takes."""
    most = min(len(lines), number + 2000)
    for end in range(number + 1, most + 1):
        parsed = _parsed("\n".join(lines[number:end]))
        if parsed is not None:
            return parsed, end - number
    return None, 1


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _keys(parsed: dict[str, Any]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in parsed.items():
        inner = _keys(value) if isinstance(value, dict) and value else []
        found.extend((key, *rest) for rest in inner)
        if not inner:
            found.append((key,))
    return found
