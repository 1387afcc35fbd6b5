"""The threat model names the test of each attack; each is there, and each test of an attack is named."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/threat-model.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and "---" not in line and "| test |" not in line]


def test_every_attack_has_a_test_that_exists() -> None:
    """The last column is a file of tests/hostile, or a path, and it has tests."""
    assert len(ROWS) > 30
    for row in ROWS:
        named = re.findall(r"`([\w/]*test_\w+\.py)`", row.rstrip("| ").rpartition("|")[2])
        assert named, f"no test is named: {row}"
        for name in named:
            path = ROOT / (name if "/" in name else f"tests/hostile/{name}")
            assert path.exists(), f"{name} is named and not there"
            assert re.search(r"^def test_", path.read_text(encoding="utf-8"), re.MULTILINE), f"{name} has no test"


def test_every_file_of_attacks_is_in_the_table() -> None:
    """A reader finds from the table whatever is tried."""
    there = {path.name for path in (ROOT / "tests/hostile").glob("test_*.py")}
    assert there <= set(re.findall(r"`(test_\w+\.py)`", PAGE))
