"""A fact is written in one place; what cannot derive it (a page's script, a document) is compared with that place."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

from everdeck import config, details, specforms
from everdeck.cli import start
from everdeck.errors import SpecError
from everdeck.model import EventKind, Health, Limits, Log, Restart, Sandbox, State, Stop, WorkerSpec
from everdeck.server import documents
from everdeck.statedir import StateDir

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "everdeck").rglob("*.py"))


def texts_in(source: Path) -> Iterator[str]:
    """Every text constant of a module that is not a docstring."""
    tree = ast.parse(source.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_the_names_in_the_state_directory_stand_in_one_module() -> None:
    """Who needs a path in there asks StateDir; nobody joins the names himself."""
    places = StateDir(Path("STATE"))
    names = {path.name for path in (places.lock, places.socket, places.http_socket, places.registry, places.applied)}

    writers = {(source.name, name) for source in SOURCES for text in texts_in(source) for name in names if name == text}

    assert {source for source, _ in writers} == {"statedir.py"}
    assert {name for _, name in writers} == names


def test_the_state_directory_is_documented_name_by_name() -> None:
    """The reference shows every name that lies in the directory."""
    page = (ROOT / "docs" / "reference" / "state-directory.md").read_text()
    places = StateDir(Path("STATE"))
    worker = places.worker("NAME")
    deck = [places.lock, places.socket, places.http_socket, places.registry, places.token, places.applied]

    assert not [path.name for path in deck if f"  {path.name} " not in page]
    assert f"{places.workers.name}/{worker.path.name}/" in page
    assert not [path.name for path in (worker.lock, worker.log, worker.data, worker.secrets) if path.name not in page]


def test_the_page_knows_the_same_live_states() -> None:
    """The script cannot import an enum; its set is compared with the one of the model."""
    script = (ROOT / "src/everdeck/server/dashboard/static/core/fold.js").read_text()
    found = re.search(r"const ALIVE = new Set\(\[([^\]]*)\]\)", script)

    assert found is not None
    assert set(re.findall(r"'([\w-]+)'", found[1])) == {state.value for state in State if state.is_live}


# --- a field of the spec ----------------------------------------------------------------------------------------


def test_every_form_of_a_spec_has_every_field() -> None:
    """The file's tables, the API's request and its view are made from WorkerSpec; only hidden values differ."""
    fields = set(WorkerSpec.__struct_fields__)

    assert set(config.TemplateTable.__struct_fields__) == fields | {"to"}
    assert set(config.WorkerTable.__struct_fields__) == fields | {"to", "template"}
    assert set(documents.NewWorker.__struct_fields__) == fields | {"name", "spec", "template"}
    hidden = {"env": "env_keys", "secrets": "secret_names"}
    assert set(documents.SpecView.__struct_fields__) == {hidden.get(field, field) for field in fields}


def test_the_schema_and_the_api_tell_each_field_in_the_words_of_the_spec() -> None:
    """A description is written beside the field and shown wherever the field is."""
    said = {name: spec["description"] for name, spec in properties(WorkerSpec).items()}
    said_differently = {"cwd", "secrets", "satellite"}  # by file, relative to it, and with its options inline

    for kind in (config.WorkerTable, documents.NewWorker):
        told = properties(kind)
        assert not [name for name in said.keys() - said_differently if told[name].get("description") != said[name]]


def test_the_command_line_reaches_every_field() -> None:
    """A named option stands for a field that there is, and --set takes each path of the spec."""
    assert not [path for path in start.FIELDS.values() if path not in specforms.paths()]
    for path in specforms.paths():
        fields: dict[str, object] = {}
        specforms.with_path(fields, path, "given")
        assert list(fields) == [path.partition(".")[0]]
    with pytest.raises(SpecError, match=r"restart\.polizy"):
        specforms.with_path({}, "restart.polizy", "always")


@pytest.mark.parametrize(
    "kind", [WorkerSpec, Restart, Stop, Health, Limits, Sandbox, Log], ids=lambda kind: kind.__name__
)
def test_the_table_of_the_reference_has_each_field_with_its_default(kind: type[msgspec.Struct]) -> None:
    """docs/reference/spec.md is written by hand; its fields and defaults are compared with the struct."""
    page = (ROOT / "docs" / "reference" / "spec.md").read_text()
    table = page.split(f"\n## `{kind.__name__}`\n")[1].split("\n## ")[0]
    shown = {}
    for row in re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", table, re.MULTILINE):
        shown |= dict.fromkeys(re.findall(r"`(\w+)`", row[0]), row[1].strip())

    for field in msgspec.structs.fields(kind):
        default = field.default_factory if field.default is msgspec.NODEFAULT else field.default
        told = shown.get(field.name, "nothing")
        if told == "required":  # but for a satellite, which brings its own command
            assert (kind, field.name) == (WorkerSpec, "command")
        else:
            value = default() if callable(default) else default
            plain = f"`{type(value).__name__}()`" if isinstance(value, msgspec.Struct) else None
            assert told == plain or ast.literal_eval(told.strip("`").replace("10_000_000", "10000000")) == value


def properties(kind: type[msgspec.Struct]) -> dict[str, dict[str, object]]:
    """The properties in the JSON Schema of a struct."""
    found: dict[str, dict[str, object]] = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    return found


# --- the detail of an event -------------------------------------------------------------------------------------


def test_every_kind_of_event_has_its_detail_typed() -> None:
    """But the one whose detail is a worker's own word."""
    assert set(details.DETAILS) == set(EventKind) - {EventKind.FEED}


@pytest.mark.parametrize("kind", details.DETAILS, ids=str)
def test_the_reference_shows_each_key_of_a_detail(kind: EventKind) -> None:
    """In the row of its kind; ``crashed`` refers to ``exited``, and ``by`` is said once for all."""
    page = (ROOT / "docs" / "reference" / "events-and-states.md").read_text()
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `") and row.count("|") == 4}
    shown = rows[kind] + (rows["exited"] if kind is EventKind.CRASHED else "") + rows["crashed"] * (kind == "exited")

    assert not [key for key in get_type_hints(details.DETAILS[kind]) if key != "by" and f"`{key}`" not in shown]


@pytest.mark.parametrize("name", ["Order", "Record", "Subject", "Suspect", "Verb"])
def test_a_word_that_once_meant_several_things_names_one_class(name: str) -> None:
    """Whoever looks a word up in the code finds one thing."""
    found = [
        path
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    assert len(found) <= 1, found
