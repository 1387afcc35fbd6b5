"""Writes the page from the raw numbers, and nothing but the raw numbers.

Every figure is the median of its samples; where there were several, the range stands beside it. A cell is empty where
a manager was not measured (too many workers for it, or it has no such thing).
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import plots
from bench.bars import judged
from bench.drivers import DRIVERS
from bench.places import BENCH
from bench.store import Key, Result, Store

Results = Mapping[Key, Result]

_ORDER = list(DRIVERS)


def headline_of(result: Result) -> str:
    """One measurement in a few words, for the progress display."""
    key = result.key
    match key.measure:
        case "spawn":
            per_worker = result.median("spawn_ms") / key.count
            return f"{per_worker:.3f} ms per worker, stop {result.median('stop_ms'):.1f} ms"
        case "idle":
            return f"{result.median('switches'):.0f} wake-ups in {result.median('seconds'):.0f} s"
        case "restart":
            delays = _delays(result)
            return f"p50 {statistics.median(delays):.2f} ms of {len(delays)}"
        case "deaf":
            return f"all dead after {result.median('stop_ms') / 1e3:.2f} s"
        case "adopt":
            return f"{result.median('open_ms') / key.count:.3f} ms per worker"
        case "logs":
            return f"{result.median('mb_per_second'):.0f} MB/s, {result.median('lost'):.0f} lost"
        case _:
            return ", ".join(f"{name} {value:g}" for name, value in result.samples[-1].items() if name != "load")


def write_page(store: Store, page: Path, images: Path) -> None:
    """The whole page and its pictures."""
    results = {key: result for key, result in store.all().items() if result.failure is None and result.samples}
    failures = {key: result.failure for key, result in store.all().items() if result.failure is not None}
    _draw(results, images)
    sections = [
        _opening(results),
        _bars(results),
        _spawn(results),
        _memory(results),
        _idle(results),
        _restart(results),
        _stop(results),
        _crash(results),
        _escape(results),
        _adopt(results),
        _logs(results),
        _notes(),
        _method(failures),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(section for section in sections if section))


# --- sections, in the order of the page ----------------------------------------------------------------------------


def _opening(results: Results) -> str:
    newest = max(results.values(), key=lambda result: result.taken_at, default=None)
    taken = ""
    if newest is not None:
        oldest = min(result.taken_at for result in results.values())
        about = newest.machine
        taken = (
            f"Machine: {about['processor']}, {about['cores']} cores, {about['memory']}, Linux {about['kernel']}, "
            f"Python {about['python']}, {about['filesystem']}.\n"
            f"Taken from {oldest} to {newest.taken_at}.\n"
        )
    return f"""# Benchmarks

Tidelock beside what people would otherwise use, and beside what the kernel itself asks, measured in one run on one machine.
Ratios are the result; the absolute numbers are this machine's on this date.

{taken}
`make bench` repeats all of it anywhere, installs the peers below `bench/work`, resumes where it stopped and writes this page;
`make bench ARGS=--quick` is a tour of under three minutes, `ARGS="--only spawn --driver tidelock --driver popen"` a part.
The raw numbers are in `bench/results`, one file per measurement.
"""


def _bars(results: Results) -> str:
    rows = [[bar.work, bar.wanted, bar.measured, bar.verdict] for bar in judged(results)]
    return "## The bars\n\n" + _table(["work", "bar", "measured", ""], rows)


def _spawn(results: Results) -> str:
    sizes = sorted({key.count for key in results if key.measure == "spawn"})
    if not sizes:
        return ""
    rows = []
    for driver in _ORDER:
        cells = [_cell(results.get(Key("spawn", driver, size)), "spawn_ms", size, "{:.3f}") for size in sizes]
        ratio = _ratio(results, driver, "spawn_ms", 1000 if 1000 in sizes else sizes[-1])
        if any(cells):
            rows.append([_name(driver), *cells, ratio])
    heads = ["ms per worker, until all run and the call has returned", *(f"{size:,}" for size in sizes), "÷ Popen loop"]
    return (
        "## Starting\n\n"
        + _table(heads, rows)
        + "\n![cost of a start over the number of workers](img/bench-spawn.svg)\n"
    )


def _memory(results: Results) -> str:
    rows = []
    for driver in _ORDER:
        for size in (1000, 100):
            result = results.get(Key("spawn", driver, size))
            if result is not None:
                grown = (result.median("pss_full") - result.median("pss_empty")) / size
                cells = [f"{size:,}", f"{result.median('pss_full') / 1e6:.1f}", f"{grown / 1024:.1f}"]
                rows.append([_name(driver), *cells])
                break
    if not rows:
        return ""
    heads = ["", "workers", "manager side, MB PSS", "KiB per worker over the empty manager"]
    after = "\nrunit and honcho have no empty state: they start what they find, so their second number holds the manager too.\n"
    return "## Memory\n\n" + _table(heads, rows) + after + "\n![memory per worker](img/bench-memory.svg)\n"


def _idle(results: Results) -> str:
    rows = [
        [
            _name(key.driver),
            f"{key.count:,}",
            f"{result.median('switches'):.0f}",
            f"{result.median('cpu_ms'):.2f}",
            f"{result.median('seconds'):.0f}",
        ]
        for key, result in _of(results, "idle")
    ]
    return _section("## Idling", ["", "workers", "context switches", "CPU, ms", "in seconds"], rows)


def _restart(results: Results) -> str:
    rows = []
    for key, result in _of(results, "restart"):
        delays = sorted(_delays(result))
        rows.append(
            [
                _name(key.driver),
                f"{statistics.median(delays):.2f}",
                f"{_percentile(delays, 0.99):.2f}",
                str(len(delays)),
            ]
        )
    text = _section("## kill -9 until the replacement runs", ["", "p50, ms", "p99, ms", "kills"], rows)
    return text and (
        text
        + "\nEach worker is killed once, one at a time; where a manager delays the first restart, that is in the number.\n"
        "\n![time until a replacement runs](img/bench-restart.svg)\n"
    )


def _stop(results: Results) -> str:
    rows = []
    for driver in _ORDER:
        hundred, deaf = (
            results.get(Key("spawn", driver, 100)),
            [r for k, r in _of(results, "deaf") if k.driver == driver],
        )
        if hundred is None and not deaf:
            continue
        ratio = _ratio(results, driver, "stop_ms", 100)
        slow = f"{deaf[0].median('stop_ms') / 1e3:.2f}" if deaf else ""
        rows.append([_name(driver), _cell(hundred, "stop_ms", 1, "{:.1f}"), ratio, slow])
    heads = ["", "stop all of 100, ms", "÷ bare kill loop", "20 deaf workers, grace 2 s: all dead after, s"]
    return _section("## Stopping", heads, rows)


def _crash(results: Results) -> str:
    rows = []
    said = {"": "", "plain": "silent workers", "talk": "workers that print", "helpers": "helpers killed too"}
    for key, result in _of(results, "crash"):
        names = ("died_with_manager", "duplicates", "lost", "not_stoppable")
        counts = [f"{result.median(name):.0f}" for name in names]
        rows.append([_name(key.driver), said[key.variant], f"{key.count}", *counts])
    heads = ["", "", "workers", "died with it", "running twice after", "lost after", "not stopped by stop"]
    return _section("## The manager is killed (-9) and started again", heads, rows)


def _escape(results: Results) -> str:
    rows = [
        [_name(key.driver), *(f"{result.median(kind):.0f} of {key.count}" for kind in ("child", "setsid", "daemon"))]
        for key, result in _of(results, "escape")
    ]
    return _section(
        "## What survives stop", ["planted by the worker", "a child", "a child in its own session", "a daemon"], rows
    )


def _adopt(results: Results) -> str:
    sizes = sorted({key.count for key, _ in _of(results, "adopt")})
    rows = []
    for driver in _ORDER:
        cells = [_cell(results.get(Key("adopt", driver, size)), "open_ms", size, "{:.3f}") for size in sizes]
        if any(cells):
            rows.append([_name(driver), *cells])
    text = _section("## Opening again with live workers", ["ms per worker", *(f"{size:,}" for size in sizes)], rows)
    return text and (
        text + "\nThe daemon's number begins with launching its process; the libraries' with opening.\n"
        "\n![cost of adoption over the number of workers](img/bench-adopt.svg)\n"
    )


def _logs(results: Results) -> str:
    plain = {
        key.variant: result.median("mb_per_second") for key, result in _of(results, "logs") if key.driver == "popen"
    }
    rows = []
    for key, result in _of(results, "logs"):
        speed = result.median("mb_per_second")
        ratio = f"{speed / plain[key.variant]:.2f}" if key.variant in plain else ""
        counts = [f"{result.median(name):,.0f}" for name in ("lost", "torn", "twice")]
        rows.append(
            [
                _name(key.driver),
                _written(key),
                f"{speed:,.0f}{_range(result, 'mb_per_second', 1, '{:,.0f}')}",
                ratio,
                *counts,
            ]
        )
    heads = ["", "lines of 100 bytes", "MB/s", "÷ plain file", "lost", "torn", "twice"]
    text = _section("## Logs, rotated at 10 MB", heads, rows)
    return text and (
        text
        + "\n`popen` writes to one plain file, never rotated: the limit. pm2 and workerdeck do not rotate by themselves.\n"
    )


def _notes() -> str:
    notes = BENCH / "notes.md"
    return notes.read_text() if notes.exists() else ""


def _method(failures: Mapping[Key, str | None]) -> str:
    how = _table(["", "driven as"], [[_name(name), driver.about] for name, driver in DRIVERS.items()])
    failed = "".join(f"- {key}: {why}\n" for key, why in sorted(failures.items()))
    not_measured = f"\nAsked for and not measured:\n\n{failed}" if failed else ""
    return f"""## How it is measured

The worker is a static C program of 40 lines of work: it writes the monotonic time at which it began to run into a file that
the harness has mapped, wakes the harness through a futex when the awaited number is reached, and waits for a signal.
So nothing scans `/proc` and nothing polls while a clock runs; deaths are seen on pidfds that were opened before.
Libraries run in a host process of their own, which takes the times itself.
Every sample runs below a process that collects all orphans and ends what is left, so one measurement cannot disturb the next.
A timing is the median of at least three samples, more when they lie more than a quarter apart; the range stands in brackets.

{how}{not_measured}"""


# --- pictures ------------------------------------------------------------------------------------------------------


def _draw(results: Results, images: Path) -> None:
    _draw_growth(results, "spawn", "spawn_ms", images / "bench-spawn.svg", "Starting workers", "ms per worker")
    _draw_growth(
        results, "adopt", "open_ms", images / "bench-adopt.svg", "Opening again with live workers", "ms per worker"
    )
    per_worker = {}
    for driver in _ORDER:
        for size in (1000, 100):
            result = results.get(Key("spawn", driver, size))
            if result is not None:
                grown = (result.median("pss_full") - result.median("pss_empty")) / size / 1024
                per_worker[driver] = max(grown, 0.01)
                break
    if per_worker:
        plots.bars(images / "bench-memory.svg", per_worker, "Manager's memory per worker", "KiB PSS per worker")
    delays = {key.driver: statistics.median(_delays(result)) for key, result in _of(results, "restart")}
    if delays:
        plots.bars(images / "bench-restart.svg", delays, "kill -9 until the replacement runs, p50", "ms")


def _draw_growth(results: Results, measure: str, name: str, path: Path, title: str, ylabel: str) -> None:
    series: dict[str, dict[int, list[float]]] = {}
    for key, result in _of(results, measure):
        series.setdefault(key.driver, {})[key.count] = [value / key.count for value in result.values(name)]
    if series:
        plots.growth(path, series, title, ylabel)


# --- cells ---------------------------------------------------------------------------------------------------------


def _of(results: Results, measure: str) -> list[tuple[Key, Result]]:
    found = [(key, result) for key, result in results.items() if key.measure == measure]
    return sorted(found, key=lambda item: (item[0].variant, _ORDER.index(item[0].driver), item[0].count))


def _delays(result: Result) -> list[float]:
    return [float(delay) for sample in result.samples for delay in sample["delays_ms"]]


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _cell(result: Result | None, name: str, divisor: int, form: str) -> str:
    if result is None:
        return ""
    return form.format(result.median(name) / divisor) + _range(result, name, divisor, form)


def _range(result: Result, name: str, divisor: int, form: str) -> str:
    values = result.values(name)
    if len(values) < 2:
        return ""
    return f" [{form.format(min(values) / divisor)}–{form.format(max(values) / divisor)}]"


def _ratio(results: Results, driver: str, name: str, size: int) -> str:
    ours, bare = results.get(Key("spawn", driver, size)), results.get(Key("spawn", "popen", size))
    return f"{ours.median(name) / bare.median(name):.2f}" if ours is not None and bare is not None else ""


def _written(key: Key) -> str:
    return f"{key.count:,}, {'one write each' if key.variant == 'lines' else '640 per write'}"


def _name(driver: str) -> str:
    return f"**{driver}**" if driver.startswith("tidelock") else driver


def _section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"{title}\n\n{_table(heads, rows)}" if rows else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    line: Callable[[Sequence[str]], str] = lambda cells: "| " + " | ".join(cells) + " |\n"  # noqa: E731 - three uses below
    return line(heads) + line(["---"] * len(heads)) + "".join(line(row) for row in rows)
