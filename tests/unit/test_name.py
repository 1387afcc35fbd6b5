"""The product has one name."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EARLIER = "tide" + "lock"  # the working name: a stranger's package on the index


def test_nothing_in_the_tree_carries_the_working_name() -> None:
    """Neither a file's name nor its contents, in any case."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [name for name in listed.splitlines() if EARLIER in name.lower()] == []

    found = subprocess.run(["git", "grep", "-il", EARLIER], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.stdout.splitlines() == []
