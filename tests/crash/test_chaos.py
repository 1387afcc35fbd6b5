"""A short run of ``make chaos`` as part of every test run; the long ones are for people and nights."""

import subprocess
import sys

from support.repo_examples import ROOT


def test_a_few_seconds_of_random_kills_never_make_a_second_copy() -> None:
    """Owner and workers are SIGKILLed at random; no worker ever has two processes, and the deck recovers."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "chaos.py"), "--seconds", "8", "--seed", "2026"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "most copies of one worker ever seen: 1; OK" in done.stdout
