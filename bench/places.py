"""Where things are: everything the harness builds or installs stays below ``bench/work``, which git ignores."""

from pathlib import Path
from typing import Final

BENCH: Final = Path(__file__).resolve().parent
REPO: Final = BENCH.parent
WORK: Final = BENCH / "work"
BIN: Final = WORK / "bin"
PEERS: Final = WORK / "peers"
RUNS: Final = WORK / "runs"
RESULTS: Final = BENCH / "results"
NATIVE: Final = BENCH / "native"
PAGE: Final = REPO / "docs" / "benchmarks.md"
IMAGES: Final = REPO / "docs" / "img"

STAMP: Final = BIN / "stamp"
NEST: Final = BIN / "nest"
SPAWNLOOP: Final = BIN / "spawnloop"
