"""The oldest supported versions of both libraries pass the same tests as the newest.

Each makes a virtual environment from PyPI, which takes a minute: only with EVERDECK_OLD_VERSIONS=1.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ("pytest>=9", "pytest-timeout", "httpx", "aiohttp")

pytestmark = [
    pytest.mark.skipif(not os.environ.get("EVERDECK_OLD_VERSIONS"), reason="slow: set EVERDECK_OLD_VERSIONS=1"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize(
    ("requirement", "tests"),
    [
        ("aiogram==3.13.0", ["test_aiogram.py", "test_telegram_bots.py"]),
        ("python-telegram-bot==21.0", ["test_ptb.py", "test_telegram_bots.py"]),
    ],
)
def test_oldest_versions(tmp_path: Path, requirement: str, tests: list[str]) -> None:
    """Install the oldest version we claim, and run the adapter's tests with it."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv is None:
        pytest.skip("needs uv")
    python = tmp_path / "venv/bin/python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", str(python), "-e", str(ROOT), requirement, *TESTS]
    subprocess.run(install, check=True)
    files = [str(ROOT / "tests/feed" / name) for name in tests]
    command = [str(python), "-m", "pytest", "-q", *files]
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
    assert "passed" in ran.stdout
