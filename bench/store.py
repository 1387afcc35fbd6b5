"""The raw numbers: one JSON file per measurement in ``bench/results``, never edited by hand.

A file is written whole (temporary name, then rename), so an interrupted run leaves only complete measurements, and
the next run takes up where it stopped.
"""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which measurement: what, of whom, how many, in which variant."""

    measure: str
    driver: str
    count: int
    variant: str = ""

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return "-".join(filter(None, (self.measure, self.driver, self.variant, str(self.count)))) + ".json"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.measure, self.driver, self.variant, f"n={self.count:,}")))


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement with every sample that was taken, or the reason why there is none."""

    key: Key
    machine: dict[str, str]
    taken_at: str
    quick: bool
    samples: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    def values(self, name: str) -> list[float]:
        """One number of every sample."""
        return [float(sample[name]) for sample in self.samples if name in sample]

    def median(self, name: str) -> float:
        """The middle of the samples."""
        return statistics.median(self.values(name))

    def spread(self, name: str) -> float:
        """How far the samples lie apart, as a share of their median."""
        values = self.values(name)
        middle = statistics.median(values)
        return (max(values) - min(values)) / middle if middle else 0.0

    @classmethod
    def load(cls, path: Path) -> Self:
        """A result as it was stored."""
        stored = json.loads(path.read_text())
        return cls(**{**stored, "key": Key(**stored["key"])})


class Store:
    """A directory of results."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def has(self, key: Key) -> bool:
        """Whether it was measured; a failure counts as not measured, so the next run tries again."""
        path = self.directory / key.file_name
        return path.exists() and Result.load(path).failure is None

    def put(self, result: Result) -> None:
        """Store a result whole."""
        path = self.directory / result.key.file_name
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(result), indent=1) + "\n")
        fresh.replace(path)

    def all(self) -> dict[Key, Result]:
        """Every stored result."""
        found = [Result.load(path) for path in sorted(self.directory.glob("*.json"))]
        return {result.key: result for result in found}
