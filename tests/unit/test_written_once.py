"""A fact is written in one place; what cannot derive it (a page's script, a document) is compared with that place."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from everdeck.model import State
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
