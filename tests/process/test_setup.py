"""``scripts/setup``: no further than was asked for, and not with apt unless somebody may be surprised by nothing."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 60


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose .venv is there already, on a machine whose apt-get only takes notes."""
    told_by = ("pyproject.toml", "scripts/setup", "hatch_build.py", "src/everdeck/kernel/_spawn.c")
    for file in (*told_by, "Makefile"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    sums = "".join(f"{hashlib.sha256((tmp_path / file).read_bytes()).hexdigest()}  {file}\n" for file in told_by)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / ".set-up-test").write_text(hashlib.sha256(sums.encode()).hexdigest())
    programs = {
        ".venv/bin/python": 'echo "python $*" >>notes; exit 1',
        "bin/apt-get": 'echo "apt-get $*" >>notes',
        "bin/sudo": 'shift; exec "$@"',
    }
    for name, script in programs.items():
        program = tmp_path / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    return tmp_path


def _environment(checkout: Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in {"CI", "EVERDECK_APT"}}
    return {**kept, "PATH": f"{checkout / 'bin'}:{kept['PATH']}", **more}


def _notes(checkout: Path) -> str:
    notes = checkout / "notes"
    return notes.read_text() if notes.exists() else ""


def _types(checkout: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [str(checkout / "scripts" / "setup"), *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=_environment(checkout, **more),
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def test_a_level_that_is_there_holds_the_ones_below_it(checkout: Path) -> None:
    """`make demo` after `make test` installs nothing, `make bench` does; a word that is no level is refused."""
    assert _types(checkout, "run").returncode == 0
    assert _types(checkout, "test").returncode == 0
    assert _notes(checkout) == ""
    assert _types(checkout, "bench").returncode != 0  # the python of this checkout installs nothing
    assert "pip install" in _notes(checkout)
    assert _types(checkout, "nonsense").returncode == 2


def test_the_demo_installs_the_daemon_and_nothing_else(checkout: Path) -> None:
    """No linter, no test tool, no benchmark for a tour."""
    (checkout / ".venv" / ".set-up-test").unlink()
    subprocess.run(
        ["make", "-C", str(checkout), "demo"],
        capture_output=True,
        env=_environment(checkout),
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert "pip install -q -e .[server]\n" in _notes(checkout)
    assert "--group" not in _notes(checkout)


@pytest.mark.parametrize(("answer", "used"), [("y", True), ("n", False), ("", False)])
def test_in_a_terminal_it_asks_before_apt(checkout: Path, answer: str, used: bool) -> None:
    """The packages are named in the question; anything but yes is no."""
    script = str(checkout / "scripts" / "setup")
    words = ["test", "no-such-program=some-package"]
    setup = pexpect.spawn(script, words, env=_environment(checkout), timeout=TIMEOUT_SECONDS)
    setup.expect("some-package with apt-get")
    setup.sendline(answer)
    setup.expect(pexpect.EOF)
    setup.close()
    assert ("install some-package" in _notes(checkout)) is used


@pytest.mark.parametrize(("environment", "used"), [({}, True), ({"CI": "true"}, True), ({"EVERDECK_APT": "no"}, False)])
def test_where_nobody_can_be_asked_it_says_how_to_say_no(
    checkout: Path, environment: dict[str, str], used: bool
) -> None:
    """In CI and in scripts the packages are installed, unless the environment says no."""
    told = _types(checkout, "test", "no-such-program=some-package", **environment).stderr
    assert ("install some-package" in _notes(checkout)) is used
    if not environment:
        assert "EVERDECK_APT=no" in told
    if not used:
        assert "not on this machine: no-such-program" in told
