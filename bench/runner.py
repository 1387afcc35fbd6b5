"""Takes the samples: each in a nest of its own, repeated while they disagree, stored as soon as they are there."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.cgroups import remove_cgroups
from bench.drivers import DRIVERS
from bench.machine import machine
from bench.measures import MEASURES
from bench.places import NEST, REPO, RUNS
from bench.store import Key, Result, Store

# Samples that lie further apart than this are noise until proven otherwise: up to twice as many are taken.
_NOISY = 0.25
_SAMPLE_SECONDS = 420.0
# What takes this long is slow enough to be told from noise by one sample.
_LONG_SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What of everything is measured in this run."""

    quick: bool = False
    measures: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    largest: int | None = None
    steady: bool = False
    """Take each sample at real-time priority, where other programs of the machine would disturb it (needs root)."""


def keys_for(choice: Choice) -> list[Key]:
    """Every measurement of a run, small sizes first."""
    return sorted(_keys(choice), key=lambda key: (list(MEASURES).index(key.measure), key.count, key.variant))


def _keys(choice: Choice) -> Iterator[Key]:
    for name, measure in MEASURES.items():
        if choice.measures and name not in choice.measures:
            continue
        for driver_name, driver in DRIVERS.items():
            if choice.drivers and driver_name not in choice.drivers:
                continue
            for count in measure.quick_sizes if choice.quick else measure.sizes:
                if choice.largest is not None and count > choice.largest:
                    continue
                for variant in measure.variants:
                    if measure.applies(driver, variant, count, choice.quick):
                        yield Key(name, driver_name, count, variant)


def measured(key: Key, choice: Choice, runs: Path) -> Result:
    """Take the samples of one measurement."""
    measure = MEASURES[key.measure]
    wanted = measure.repeats if measure.headline and not choice.quick else 1
    most = 2 * wanted if wanted > 1 else 1
    samples: list[dict[str, Any]] = []
    failure = DRIVERS[key.driver].missing()
    while failure is None and len(samples) < wanted:
        begin = time.monotonic()
        sample = _sample(key, choice, runs)
        if isinstance(sample, str):
            failure = sample
            break
        samples.append(sample)
        if time.monotonic() - begin > _LONG_SECONDS:
            break
        agrees = _result(key, choice, samples, None).spread(measure.headline) <= _NOISY if measure.headline else True
        if len(samples) == wanted < most and not agrees:
            wanted += 1
    return _result(key, choice, samples, failure)


def run_all(keys: Iterable[Key], store: Store, choice: Choice) -> Iterator[tuple[Key, Result, float]]:
    """Measure and store one after another."""
    with run_directory() as runs:
        for key in keys:
            begin = time.monotonic()
            result = measured(key, choice, runs)
            store.put(result)
            yield key, result, time.monotonic() - begin


def _result(key: Key, choice: Choice, samples: list[dict[str, Any]], failure: str | None) -> Result:
    about = machine() | ({"scheduling": "SCHED_FIFO"} if choice.steady else {})
    return Result(key, about, datetime.now(UTC).isoformat(timespec="seconds"), choice.quick, samples, failure)


@contextmanager
def run_directory() -> Iterator[Path]:
    """Where the samples of one run keep their state; removed when all are taken, not in between.

    ext4 passes over inodes that were deleted within the last minutes one by one when it makes new ones, so removing
    one sample's thousands of files would be paid for by the next sample: 0.4 ms instead of 0.02 ms for a directory.
    """
    RUNS.mkdir(parents=True, exist_ok=True)
    # Each sample in another block group (chattr(1), "T: top of directory hierarchy"); best effort.
    subprocess.run(["chattr", "+T", str(RUNS)], capture_output=True, check=False)
    # Short names: sockets of peers live below, and a path to a socket holds 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="", dir=RUNS))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sample(key: Key, choice: Choice, runs: Path) -> dict[str, Any] | str:
    """One sample, or why there is none."""
    directory = tempfile.mkdtemp(prefix="", dir=runs)
    order = [key.measure, key.driver, str(key.count), key.variant, directory]
    priority = ["chrt", "-f", "10"] if choice.steady else []
    command = [*priority, str(NEST), sys.executable, "-m", "bench.one", *order, *(["--quick"] if choice.quick else [])]
    # The nest lives as long as our end of its stdin: if we are killed, it ends everything below itself.
    nest = subprocess.Popen(
        command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert nest.stdin is not None  # noqa: S101 - asked for above
    stdin = nest.stdin
    nest.stdin = None  # communicate() would close it at once
    try:
        out, err = nest.communicate(timeout=_SAMPLE_SECONDS)
    except subprocess.TimeoutExpired:
        stdin.close()
        nest.communicate()
        return f"not done after {_SAMPLE_SECONDS:g} s"
    finally:
        stdin.close()
        remove_cgroups(Path(directory) / "manager" / "state")
        if key.measure == "logs":  # few files, many bytes: these can go at once
            shutil.rmtree(directory, ignore_errors=True)
    if nest.returncode != 0:
        return err.strip().splitlines()[-1] if err.strip() else f"exit code {nest.returncode}"
    sample: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return sample
