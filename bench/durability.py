"""What it costs that an answer survives a power cut: the same verbs with both settings, in turns, on one disk.

    python -m bench.durability [--rounds 10]

A lone verb pays for one sync; verbs that wait together share it. Both settings are measured in turns, so that what else
the machine does hits both; the ratio is what can be compared between machines.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from everdeck import Deck, Restart

MODES = ("power", "process")
TOGETHER = 100


def rounds(where: Path, count: int) -> dict[str, Any]:
    """Medians per verb, in milliseconds, and power over process."""
    lone: dict[str, list[float]] = {mode: [] for mode in MODES}
    together: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(count):
        for mode in MODES:
            with Deck(where / f"{mode}-{number}", durability=mode) as deck:  # type: ignore[arg-type]
                for turn in range(10):
                    began = time.perf_counter()
                    deck.start(f"w{turn}", ["true"], restart=Restart("never"))
                    lone[mode].append(time.perf_counter() - began)
                began = time.perf_counter()
                deck.start_many({f"m{n}": ["true"] for n in range(TOGETHER)}, restart=Restart("never"))
                together[mode].append((time.perf_counter() - began) / TOGETHER)
    found: dict[str, Any] = {}
    for what, taken in (("lone_start", lone), (f"start_of_{TOGETHER}", together)):
        for mode in MODES:
            found[f"{what}_{mode}_ms"] = round(statistics.median(taken[mode]) * 1000, 3)
        found[f"{what}_ratio"] = round(statistics.median(taken["power"]) / statistics.median(taken["process"]), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--where", help="a directory on the disk to be measured (default: the temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="everdeck-durability-", dir=options.where) as folder:
        print(json.dumps(rounds(Path(folder), options.rounds)))


if __name__ == "__main__":
    main()
