"""A clock of its own for one satellite: it runs faster, and a test can set it; see ``sat_clock.c``."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc (make setup installs it)")


class FastClock:
    """``env`` makes a program live by it."""

    def __init__(self, directory: Path, rate: float = 1.0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        library = directory / "sat_clock.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True, timeout=60)
        self._file = directory / "clock"
        self._rate = rate
        self._wall, self._monotonic = time.time_ns(), time.monotonic_ns()
        self._added = 0
        self._tell()
        self.env = {"LD_PRELOAD": str(library), "EVERDECK_FAST_CLOCK": str(self._file)}

    def now(self) -> float:
        """What time it is by this clock."""
        return (self._wall + (time.time_ns() - self._wall) * self._rate + self._added) / 1e9

    def set_by(self, seconds: float) -> None:
        """Somebody sets the wall clock, forwards or back."""
        self._added += round(seconds * 1e9)
        self._tell()

    def _tell(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{self._wall} {self._monotonic} {self._rate} {self._added}\n")
        new.replace(self._file)
