"""The wheel holds what the tests test, and works on a machine that has nothing but its declared dependencies.

Developers and CI run the tests against an editable install. That stands for the wheel only because this file
shows that the wheel holds the same files, byte for byte.
"""

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from support.repo_examples import ROOT

SOURCE = ROOT / "src"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout without any network."""
    out = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def empty_machine(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and the closure of its declared dependencies, and nothing else."""
    place = tmp_path_factory.mktemp("machine")
    venv.create(place, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(place), "platbase": str(place)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for distribution in _needed_by("everdeck", {}):
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in {"..", "__pycache__"}}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return place


def _needed_by(name: str, seen: dict[str, importlib.metadata.Distribution]) -> list[importlib.metadata.Distribution]:
    """The distributions that this one requires without extras, and those that they require."""
    for requirement in importlib.metadata.requires(name) or ():
        wanted = re.match(r"[\w.-]+", requirement)
        if wanted is None or ";" in requirement or wanted[0].lower() in seen:
            continue  # a marker is an extra or another platform; what a core dependency needs has none on Linux
        seen[wanted[0].lower()] = importlib.metadata.distribution(wanted[0])
        _needed_by(wanted[0], seen)
    return list(seen.values())


def test_the_wheel_holds_the_package_byte_for_byte(wheel: Path) -> None:
    """Nothing that the tests import is missing from the wheel, nothing in it differs, and nothing else is in it."""
    sources = {
        str(path.relative_to(SOURCE)): path.read_bytes()
        for path in (SOURCE / "everdeck").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}

    assert sorted(held) == sorted(sources)
    assert [name for name in held if held[name] != sources[name]] == []


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    """Version, typing marker, licence and the command are in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in names if name.endswith("METADATA"))
        commands = next(archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))

    assert f"Version: {importlib.metadata.version('everdeck')}" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "everdeck = everdeck.cli:command" in commands
    assert "everdeck/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)


def test_the_wheel_supervises_on_an_empty_machine(empty_machine: Path, tmp_path: Path) -> None:
    """With the core dependencies alone, a deck starts and stops a worker and the command answers."""
    python = empty_machine / "bin" / "python"
    script = (
        "import everdeck, sys\n"
        "assert everdeck.__file__.startswith(sys.prefix), everdeck.__file__\n"
        "with everdeck.Deck('state') as deck:\n"
        "    assert deck.start('alice', ['sleep', '1000']).state == 'running'\n"
        "    assert deck.stop('alice').state == 'stopped'\n"
    )
    for command in (["-c", script], ["-c", "from everdeck.cli import main; main()", "--state", "state", "ps"]):
        done = subprocess.run(
            [str(python), "-I", *command], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
