"""What import-linter cannot see: what really is loaded when a module is imported.

``import everdeck.child`` first runs ``everdeck/__init__.py``, so a static look at ``child.py`` proves nothing about
the worker that imports it. Each test asks a fresh interpreter for its ``sys.modules``.
"""

import json
import subprocess
import sys
import tomllib
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


def test_contributors_are_told_the_layers_that_are_checked() -> None:
    """CONTRIBUTING.md lists them as import-linter reads them."""
    root = Path(__file__).parents[2]
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")

    told = (root / "CONTRIBUTING.md").read_text().partition("Imports point down only:")[2].split("```")[1]

    assert told.split("\n")[1:-1] == [layer.strip("()") for layer in layers]


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


SERVE = """
from everdeck.server import daemon, fitness
import os, pathlib, signal
leave = lambda link: os.kill(os.getpid(), signal.SIGTERM)
options = fitness.DaemonOptions(pathlib.Path({state!r}), listen="127.0.0.1:0", ready=leave)
daemon.run(options, sys.stderr)
"""


def test_a_daemon_does_not_load_what_it_may_never_use(tmp_path: Path) -> None:
    """It makes its token, serves the Unix socket and TCP, and leaves, all without OpenSSL, YAML or a debugger."""
    pytest.importorskip("litestar")
    put_off = {"_ssl", "_hashlib", "tomllib._parser", "logging.handlers", "html.entities", "stringprep", "_csv", "_bz2"}
    never = {"bdb", "click", "_pickle", "multiprocessing", "uvicorn.main", "yaml.reader"}

    loaded = loaded_by(SERVE.format(state=str(tmp_path / "state")))

    assert not loaded & (put_off | never)
    assert loaded >= {"ssl", "asyncio.sslproto", "everdeck.server.app", "uvicorn.protocols.http.h11_impl"}


USE = """
from everdeck.server import daemon
from configparser import RawConfigParser
from html import escape
from secrets import compare_digest
from ssl import CERT_NONE, PROTOCOL_TLS_SERVER, SSLSocket
import asyncio, logging, socket
from uvicorn.config import SSL_PROTOCOL_VERSION

plain = socket.socket()
assert not isinstance(plain, SSLSocket) and not isinstance(plain, RawConfigParser)
assert "_ssl" not in sys.modules
import configparser, hashlib, pdb, pickle, shutil, ssl, uvicorn, yaml
context = ssl.create_default_context()
wrapped = context.wrap_socket(plain, do_handshake_on_connect=False, server_hostname="localhost")
assert isinstance(wrapped, SSLSocket) and isinstance(wrapped, ssl.SSLSocket) and SSLSocket is not ssl.SSLSocket
assert (CERT_NONE, PROTOCOL_TLS_SERVER) == (ssl.CERT_NONE, ssl.PROTOCOL_TLS_SERVER) and SSL_PROTOCOL_VERSION == 17
assert asyncio.sslproto.SSLAgainErrors[0] is ssl.SSLWantReadError
assert isinstance(configparser.RawConfigParser(), RawConfigParser)
assert escape("<") == "&lt;" and compare_digest("a", "a") and not compare_digest("a", "b")
uvicorn.Server, pdb.Pdb, shutil.rmtree, pickle.dumps(yaml.safe_load("[1]")), hashlib.sha256(b"")
logging.config.dictConfig({"version": 1})
"""


def test_whoever_uses_what_was_put_off_has_it() -> None:
    """By an attribute, or by a name that was imported before; a stand-in for a class knows the real one's objects."""
    pytest.importorskip("litestar")

    assert loaded_by(USE) >= {"_ssl", "_hashlib", "_pickle", "bdb", "click", "html.entities", "uvicorn.main"}


THREADS = """
import threading
from everdeck.server import later
later.put_off()
import calendar, tomllib
begun = threading.Barrier(8)
found = []
def look():
    begun.wait()
    found.append((tomllib.loads("a = 1"), calendar.isleap(2000)))
threads = [threading.Thread(target=look) for _ in range(8)]
for one in threads: one.start()
for one in threads: one.join()
assert found == [({"a": 1}, True)] * 8, found
try:
    tomllib.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
"""


def test_threads_that_look_at_once_all_find_what_was_put_off() -> None:
    """The second waits for the first, and does not see half a module."""
    pytest.importorskip("litestar")

    assert "tomllib._parser" in loaded_by(THREADS)
