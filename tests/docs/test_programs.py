"""The programs in ``examples/`` do what their first lines say."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.repo_examples import ROOT
from support.repo_processes import end_all_under

EXAMPLES = ROOT / "examples"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """An empty directory; whatever still runs there afterwards is ended."""
    try:
        yield tmp_path
    finally:
        end_all_under(tmp_path)


def run(here: Path, *words: str) -> str:
    """What a program prints when it is run in that directory with the examples in reach."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    # A file, not a pipe: the bots that a program leaves behind keep its stdout open.
    with (here / "printed").open("w+") as printed:
        done = subprocess.run(
            [sys.executable, *words], cwd=here, env=environment, stdout=printed, stderr=printed, timeout=60, check=False
        )
        printed.seek(0)
        text = printed.read()
    assert done.returncode == 0, text
    return text


def test_bots_in_a_deck_are_found_again_by_the_next_run(here: Path) -> None:
    """The second run of the program shows the pids of the first, and can stop them."""
    program = str(EXAMPLES / "bots_after.py")

    first = run(here, program)
    second = run(here, program)
    stopped = run(here, program, "stop")

    assert "alice running" in first
    assert first == second
    assert stopped == "alice stopped None\nbob stopped None\n"


def test_bots_in_a_dict_are_forgotten_by_the_next_run(here: Path) -> None:
    """The program before: its successor does not know the bot that it left running."""
    first = run(here, "-c", "import bots_before as b; b.start('alice'); print(b.is_running('alice'))")
    second = run(here, "-c", "import bots_before as b; print(b.is_running('alice'))")

    assert (first, second) == ("True\n", "False\n")


def test_the_api_finds_its_bots_again(here: Path) -> None:
    """Two lives of the FastAPI example serve one and the same bot."""
    pytest.importorskip("fastapi", reason="the example needs fastapi")
    script = (
        "import fastapi_bots; from fastapi.testclient import TestClient\n"
        "with TestClient(fastapi_bots.app) as client:\n"
        "    print(client.post('/users/alice/bot').json()['pid'])\n"
    )
    stop = script.replace("post", "delete")

    first, second, last = run(here, "-c", script), run(here, "-c", script), run(here, "-c", stop)

    assert first == second
    assert last == "None\n"
