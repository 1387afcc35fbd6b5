"""The page about Kubernetes: its program is run as it stands, on a real cluster."""

import subprocess
import sys
from pathlib import Path

from support.repo_examples import ROOT, examples_of

PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"


def test_the_program_of_the_page_runs(namespace: str, tmp_path: Path) -> None:
    """Only the namespace is another one."""
    (example,) = [one for one in examples_of(PAGE) if one.language == "python"]
    program = example.text.replace("kubernetes:bots", f"kubernetes:{namespace}")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "running"
