"""Writes the page from the raw numbers: the words are in ``template.md``, the tables are made here.

Every figure is the median of its samples; where there were several, the range stands beside it. A cell is empty where
a manager was not measured (too many workers for it, or it has no such thing).
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from bench import plots
from bench.bars import Bar, judged, percentile
from bench.companions import COMPANIONS
from bench.drivers import DRIVERS
from bench.places import BENCH
from bench.store import Key, Result, Store

Results = Mapping[Key, Result]

_ORDER = list(DRIVERS)
_TEMPLATE = BENCH / "template.md"


def headline_of(result: Result) -> str:
    """One measurement in a few words, for the progress display."""
    count = result.key.count
    match result.key.measure:
        case "spawn":
            text = f"{result.median('spawn_ms') / count:.3f} ms per worker, stop {result.median('stop_ms'):.1f} ms"
        case "idle":
            text = f"{result.median('switches'):.0f} wake-ups in {result.median('seconds'):.0f} s"
        case "restart":
            delays = _delays(result)
            text = f"p50 {statistics.median(delays):.2f} ms of {len(delays)}"
        case "deaf":
            text = f"all dead after {result.median('stop_ms') / 1e3:.2f} s"
        case "adopt":
            text = f"{result.median('open_ms') / count:.3f} ms per worker"
        case "logs":
            text = f"{result.median('mb_per_second'):.0f} MB/s, {result.median('lost'):.0f} lost"
        case _:
            text = ", ".join(f"{name} {value:g}" for name, value in result.samples[-1].items() if name != "load")
    return text


_GOALS = """# What we want to reach

Ours alone: users find the numbers beside peers in [docs/benchmarks.md](../docs/benchmarks.md).
Written by `make bench` from the same run.

{bars}

{notes}
"""


def _goals(page: Path) -> Path:
    """Beside the page of a quick run; in this folder for the real one."""
    return (
        BENCH / "GOALS.md"
        if page.name == "benchmarks.md" and page.parent.name == "docs"
        else page.with_name("GOALS.md")
    )


def write_page(store: Store, page: Path, images: Path) -> None:
    """The whole page and its pictures."""
    everything = store.all()
    results = {key: result for key, result in everything.items() if result.failure is None and result.samples}
    _draw(results, images)
    parts = {
        "machine": _machine(results),
        "companions": _companions(store),
        "ratio_size": f"{_ratio_size(results):,}",
        "spawn": _spawn(results),
        "memory": _memory(results),
        "idle": _idle(results),
        "restart": _restart(results),
        "stop": _stop(results),
        "crash": _crash(results),
        "escape": _escape(results),
        "adopt": _adopt(results),
        "logs": _logs(results),
        "drivers": _table(["", "driven as"], [[_name(name), driver.about] for name, driver in DRIVERS.items()]),
        "failures": _failures(everything),
    }
    bars = _table(["work", "bar", "measured", ""], [_bar_row(bar) for bar in judged(results)])
    _goals(page).write_text(_GOALS.format(bars=bars.strip(), notes=_optional(BENCH / "notes.md").strip()))
    text = Template(_TEMPLATE.read_text()).substitute({name: part.strip() for name, part in parts.items()})
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n")


# --- what the template's names stand for, in the order of the page -------------------------------------------------


def _machine(results: Results) -> str:
    if not results:
        return ""
    newest = max(results.values(), key=lambda result: result.taken_at)
    oldest = min(result.taken_at for result in results.values())
    about = newest.machine
    steady = any("scheduling" in result.machine for result in results.values())
    note = "\nOther programs shared the machine; the samples ran at real-time priority (`--steady`)." if steady else ""
    return (
        f"Machine: {about['processor']}, {about['cores']} cores, {about['memory']}, Linux {about['kernel']}, "
        f"Python {about['python']}, {about['filesystem']}.\n"
        f"Taken from {oldest} to {newest.taken_at}.{note}"
    )


def _bar_row(bar: Bar) -> list[str]:
    return [bar.work, bar.wanted, bar.measured, bar.verdict]


def _spawn(results: Results) -> str:
    sizes = sorted({key.count for key in results if key.measure == "spawn"})
    rows = []
    for driver in _ORDER:
        cells = [_cell(results.get(Key("spawn", driver, size)), "spawn_ms", size, "{:.3f}") for size in sizes]
        if any(cells):
            rows.append([_name(driver), *cells, _ratio(results, driver, "spawn_ms", _ratio_size(results))])
    return _table(["", *(f"{size:,}" for size in sizes), "÷ `Popen` loop"], rows)


def _memory(results: Results) -> str:
    rows = []
    for driver, size, result in _largest_common(results):
        cells = [f"{size:,}", f"{result.median('pss_full') / 1e6:.1f}", f"{_kib_per_worker(results, driver, size):.1f}"]
        rows.append([_name(driver), *cells])
    return _table(["", "workers", "in all, MB PSS", "KiB per worker"], rows)


def _idle(results: Results) -> str:
    rows = []
    for key, result in _of(results, "idle"):
        numbers = [f"{result.median(name):{form}}" for name, form in (("switches", ".0f"), ("cpu_ms", ".2f"))]
        rows.append([_name(key.driver), f"{key.count:,}", *numbers, f"{result.median('seconds'):.0f}"])
    return _table(["", "workers", "context switches", "CPU, ms", "in seconds"], rows)


def _restart(results: Results) -> str:
    rows = []
    for key, result in _of(results, "restart"):
        delays = sorted(_delays(result))
        numbers = [f"{statistics.median(delays):.2f}", f"{percentile(delays, 0.99):.2f}"]
        rows.append([_name(key.driver), *numbers, str(len(delays))])
    return _table(["", "p50, ms", "p99, ms", "kills"], rows)


def _stop(results: Results) -> str:
    slow = {key.driver: result.median("stop_ms") / 1e3 for key, result in _of(results, "deaf")}
    rows = []
    for driver in _ORDER:
        hundred = results.get(Key("spawn", driver, 100))
        if hundred is not None or driver in slow:
            cells = [_cell(hundred, "stop_ms", 1, "{:.1f}"), _ratio(results, driver, "stop_ms", 100)]
            rows.append([_name(driver), *cells, f"{slow[driver]:.2f}" if driver in slow else ""])
    heads = ["", "stop all of 100, ms", "÷ bare kill loop", "20 deaf workers, grace 2 s: all dead after, s"]
    return _table(heads, rows)


def _crash(results: Results) -> str:
    said = {"plain": "silent workers", "talk": "workers that print", "helpers": "helpers killed too"}
    rows = []
    for key, result in _of(results, "crash"):
        names = ("died_with_manager", "duplicates", "lost", "not_stoppable")
        counts = [f"{result.median(name):.0f}" for name in names]
        rows.append([_name(key.driver), said[key.variant], f"{key.count}", *counts])
    heads = ["", "", "workers", "died with it", "second copies after", "missing after", "not ended by stop"]
    return _table(heads, rows)


def _escape(results: Results) -> str:
    rows = []
    for key, result in _of(results, "escape"):
        counts = [f"{result.median(kind):.0f} of {key.count}" for kind in ("child", "setsid", "daemon")]
        rows.append([_name(key.driver), *counts])
    return _table(["planted by the worker", "a child", "a child in its own session", "a daemon"], rows)


def _adopt(results: Results) -> str:
    sizes = sorted({key.count for key, _ in _of(results, "adopt")})
    rows = []
    for driver in _ORDER:
        cells = [_cell(results.get(Key("adopt", driver, size)), "open_ms", size, "{:.3f}") for size in sizes]
        if any(cells):
            rows.append([_name(driver), *cells])
    return _table(["ms per worker", *(f"{size:,}" for size in sizes)], rows)


def _logs(results: Results) -> str:
    found = _of(results, "logs")
    plain = {key.variant: result.median("mb_per_second") for key, result in found if key.driver == "popen"}
    rows = []
    for key, result in found:
        speed = result.median("mb_per_second")
        shown = f"{speed:,.0f}{_range(result, 'mb_per_second', 1, '{:,.0f}')}"
        ratio = f"{speed / plain[key.variant]:.2f}" if key.variant in plain else ""
        counts = [f"{result.median(name):,.0f}" for name in ("lost", "torn", "twice")]
        rows.append([_name(key.driver), _written(key), shown, ratio, *counts])
    return _table(["", "lines", "MB/s", "÷ plain file", "lost", "torn", "twice"], rows)


def _failures(everything: Results) -> str:
    failed = {key: result.failure for key, result in everything.items() if result.failure is not None}
    if not failed:
        return ""
    return "Asked for and not measured:\n\n" + "".join(f"- {key}: {why}\n" for key, why in sorted(failed.items()))


def _companions(store: Store) -> str:
    shown = []
    for companion in COMPANIONS:
        printed = store.printed(companion.script)
        if printed is not None:
            shown.append(f"`python {companion.script}`: {companion.about}\n\n```text\n{printed.rstrip()}\n```\n")
    return "\n".join(shown) or "Not measured yet."


def _optional(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# --- pictures ------------------------------------------------------------------------------------------------------


def _draw(results: Results, images: Path) -> None:
    _draw_growth(results, "spawn", "spawn_ms", images / "bench-spawn.svg", "Starting workers", "ms per worker")
    _draw_growth(
        results, "adopt", "open_ms", images / "bench-adopt.svg", "Opening again with live workers", "ms per worker"
    )
    per_worker = {
        driver: max(_kib_per_worker(results, driver, size), 0.01) for driver, size, _ in _largest_common(results)
    }
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


def _largest_common(results: Results) -> list[tuple[str, int, Result]]:
    """Each manager's start at the largest size that most of them were asked for, a thousand at the most."""
    found = []
    for driver in _ORDER:
        size = max((key.count for key in results if _starts(key, driver)), default=None)
        if size is not None:
            found.append((driver, size, results[Key("spawn", driver, size)]))
    return found


def _kib_per_worker(results: Results, driver: str, size: int) -> float:
    """What each worker adds: over the empty manager, or, where there is no empty one, over its smallest size."""
    full = results[Key("spawn", driver, size)]
    empty, count = full.median("pss_empty"), 0
    smallest = min(key.count for key in results if _starts(key, driver))
    if empty == 0 and smallest < size:
        empty, count = results[Key("spawn", driver, smallest)].median("pss_full"), smallest
    return (full.median("pss_full") - empty) / (size - count) / 1024


def _ratio_size(results: Results) -> int:
    return max((key.count for key in results if _starts(key, "popen")), default=1000)


def _starts(key: Key, driver: str) -> bool:
    return key.measure == "spawn" and key.driver == driver and key.count <= 1000


def _delays(result: Result) -> list[float]:
    return [float(delay) for sample in result.samples for delay in sample["delays_ms"]]


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
    return f"**{driver}**" if driver.startswith("everdeck") else driver


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "Not measured yet."
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
