"""What import-linter cannot see: what really is loaded when a module is imported.

``import everdeck.child`` first runs ``everdeck/__init__.py``, so a static look at ``child.py`` proves nothing about
the worker that imports it. Each test asks a fresh interpreter for its ``sys.modules``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after the statement."""
    report = "print(json.dumps(sorted(set(sys.modules) - before)))"
    script = f"import json, sys\nbefore = set(sys.modules)\n{statement}\n{report}"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    return set(json.loads(done.stdout))


def packages(modules: set[str]) -> set[str]:
    """The top-level packages of these modules."""
    return {module.partition(".")[0] for module in modules}


def test_a_worker_that_imports_child_loads_no_event_loop_no_database_and_no_deck() -> None:
    """``everdeck.child`` costs a worker next to nothing, and needs nothing that is not in the standard library."""
    loaded = loaded_by("import everdeck.child")

    assert not packages(loaded) & {"asyncio", "sqlite3", "msgspec", "psutil", "typer", "rich", "litestar"}
    assert {module for module in loaded if module.startswith("everdeck")} == {"everdeck", "everdeck.child"}


def test_the_package_root_loads_nothing_until_a_name_is_used() -> None:
    """``import everdeck`` is free; the first use of a name loads its home."""
    loaded = loaded_by("import everdeck; everdeck.__version__; dir(everdeck)")

    assert {module for module in loaded if module.startswith("everdeck")} == {"everdeck"}


@pytest.mark.parametrize("module", ["everdeck.model", "everdeck.errors", "everdeck.crashpoints", "everdeck.kernel"])
def test_the_lower_layers_load_no_event_loop_and_no_database(module: str) -> None:
    """Values, errors and the kernel layer are synchronous: importing them starts no machinery."""
    loaded = loaded_by(f"import {module}")

    assert not packages(loaded) & {"asyncio", "sqlite3", "concurrent"}


def test_every_public_name_can_be_loaded() -> None:
    """Each name in ``everdeck.__all__`` is there when it is asked for."""
    loaded_by("import everdeck\nfor name in everdeck.__all__: getattr(everdeck, name)")


def test_the_command_line_knows_no_address_of_the_api() -> None:
    """It speaks the typed verbs; what only a daemon has is asked by everdeck.client."""
    sources = (Path(__file__).parents[2] / "src" / "everdeck" / "cli").glob("*.py")

    assert not [source.name for source in sources if "/api/v1" in source.read_text()]


def test_ps_loads_no_event_loop_and_no_http() -> None:
    """It is typed all day."""
    loaded = loaded_by("import everdeck.cli.ps")

    assert not packages(loaded) & {"asyncio", "http", "httpx", "sqlite3", "rich", "typer"}


def test_a_daemon_does_not_load_what_it_never_uses() -> None:
    """No command line of uvicorn, no YAML, no debugger, no pickles; whoever asks for one of them has it."""
    pytest.importorskip("litestar")
    create = "from everdeck.server import daemon; from everdeck.server.serving import Config"
    load = "Config(lambda: None, lifespan='off', log_config=None, ws='none').load()"
    never = {"bdb", "click", "_pickle", "multiprocessing", "uvicorn.main", "yaml.reader"}

    assert not loaded_by(f"{create}\n{load}") & never
    used = "import pdb, pickle, uvicorn, yaml; uvicorn.Server, pdb.Pdb, pickle.dumps(yaml.safe_load('[1]'))"
    assert loaded_by(f"{create}\n{used}\nimport logging; logging.config.dictConfig({{'version': 1}})") >= never
