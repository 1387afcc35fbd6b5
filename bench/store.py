"""The raw numbers: one file of JSON lines per run in ``bench/results``, never edited by hand.

A line is one measurement, or what a companion printed; the last one of a kind counts. Each is appended whole, so an
interrupted run leaves complete measurements and at most one torn line, which is not read, and the next run goes on in
the same file. ``--fresh`` begins another; the page is made from the newest.
"""

import contextlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which measurement: what, of whom, how many, in which variant."""

    measure: str
    driver: str
    count: int
    variant: str = ""

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
    def stored(cls, line: dict[str, Any]) -> Self:
        """A result as it was stored."""
        return cls(**{**line, "key": Key(**line["key"])})


class Store:
    """The results of one run: the newest in a directory, or a new one."""

    def __init__(self, directory: Path, *, fresh: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        runs = sorted(directory.glob("*.jsonl"))
        begun = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S-%f")
        self.path = directory / f"{begun}.jsonl" if fresh or not runs else runs[-1]

    def has(self, key: Key) -> bool:
        """Whether it was measured; a failure counts as not measured, so the next run tries again."""
        found = self.all().get(key)
        return found is not None and found.failure is None

    def put(self, result: Result) -> None:
        """Store a result whole."""
        self._append(asdict(result))

    def put_printed(self, script: str, text: str) -> None:
        """Keep what a companion printed."""
        self._append({"companion": script, "printed": text})

    def all(self) -> dict[Key, Result]:
        """Every stored result."""
        found = [Result.stored(line) for line in self._lines() if "key" in line]
        return {result.key: result for result in sorted(found, key=lambda result: result.taken_at)}

    def printed(self, script: str) -> str | None:
        """What a companion printed last, if it ran."""
        texts: list[str] = [line["printed"] for line in self._lines() if line.get("companion") == script]
        return texts[-1] if texts else None

    def _append(self, line: dict[str, Any]) -> None:
        torn = self.path.exists() and self.path.stat().st_size > 0 and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            file.write(("\n" if torn else "") + json.dumps(line) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for text in self.path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # torn by an interruption
                yield json.loads(text)
