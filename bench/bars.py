"""What we want to reach, judged by the numbers of the same run."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.store import Key, Result

Results = Mapping[Key, Result]

_MANAGERS = ("s6", "runit", "supervisor", "circus", "pm2", "workerdeck")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar and whether it is reached; ``passed`` is None where something was not measured."""

    work: str
    wanted: str
    measured: str
    passed: bool | None

    @property
    def verdict(self) -> str:
        """Pass, fail or not measured."""
        return {True: "pass", False: "**fail**", None: "not measured"}[self.passed]


def judged(results: Results) -> list[Bar]:
    """Every bar."""
    return [_judge(results, *bar) for bar in _BARS]


# --- the bars: (work, wanted, how it is judged) ----------------------------------------------------------------------

Verdict = tuple[str, bool]


def _against_popen(driver: str, most: float) -> Callable[[Results], Verdict]:
    def verdict(results: Results) -> Verdict:
        size = _largest(results, (driver, "popen"))
        ratio = _spawn(results, driver, size) / _spawn(results, "popen", size)
        return f"{ratio:.2f} ×{_at(size)}", ratio <= most

    return verdict


def _spawn_flat(results: Results) -> Verdict:
    per_worker = {size: _spawn(results, "everdeck", size) / size for size in (100, 1000, 5000)}
    bare = {size: _spawn(results, "popen", size) / size for size in (100, 5000)}
    growth, bare_growth = per_worker[5000] / per_worker[100], bare[5000] / bare[100]
    text = ", ".join(f"{size:,}: {value:.3f} ms" for size, value in per_worker.items())
    # As flat as the kernel allows: the bare loop is the measure of what the growing process table itself costs.
    return f"{text} ({growth:.2f} ×; the bare loop {bare_growth:.2f} ×)", growth <= 1.15 * max(1.0, bare_growth)


def _spawn_against_peers(results: Results) -> Verdict:
    size = _largest(results, ("everdeck", *_MANAGERS))
    peers = {name: _spawn(results, name, size) for name in _MANAGERS}
    fastest = min(peers, key=lambda name: peers[name])
    ratio = _spawn(results, "everdeck", size) / peers[fastest]
    return f"{ratio:.2f} × {fastest}{_at(size)}", ratio <= 0.4


def _replacement(results: Results) -> Verdict:
    ours = _delay(results, "everdeck")
    ratio = ours / _delay(results, "popen")
    others = {name: _delay(results, name) for name in _MANAGERS if Key("restart", name, 100) in results}
    faster = [name for name, other in others.items() if other <= ours]
    place = f"behind {', '.join(faster)}" if faster else "ahead of every peer"
    return f"{ratio:.2f} ×, {place}", ratio <= 1.5 and not faster


def _replacement_at_worst(results: Results) -> Verdict:
    ratio = _delay(results, "everdeck", 0.99) / _delay(results, "popen", 0.99)
    kills = len(_delays(results, "everdeck"))
    return f"{ratio:.2f} × ({kills} kills)", ratio <= 2


def _idle(results: Results) -> Verdict:
    switches = {name: _only(results, Key("idle", name, 1000), "switches") for name in ("everdeck", "everdeck-daemon")}
    text = ", ".join(f"{name}: {value:.0f}" for name, value in switches.items())
    return text, not any(switches.values())


def _memory_per_worker(results: Results) -> Verdict:
    result = results[Key("spawn", "everdeck", 1000)]
    grown = (result.median("pss_full") - result.median("pss_empty")) / 1000 / 1024
    return f"{grown:.1f} KiB", grown <= 4


def _memory(driver: str, most: float) -> Callable[[Results], Verdict]:
    def verdict(results: Results) -> Verdict:
        megabytes = results[Key("spawn", driver, 1000)].median("pss_full") / 1e6
        return f"{megabytes:.1f} MB", megabytes <= most

    return verdict


def _stop_hundred(results: Results) -> Verdict:
    ratio = _only(results, Key("spawn", "everdeck", 100), "stop_ms") / _only(
        results, Key("spawn", "popen", 100), "stop_ms"
    )
    return f"{ratio:.2f} ×", ratio <= 3


def _through_a_member(results: Results) -> Verdict:
    ratio = _only(results, Key("member", "everdeck", 1000), "ratio")
    return f"{ratio:.2f} ×", ratio <= 1.5


def _sandbox(results: Results) -> Verdict:
    more = _only(results, Key("sandbox", "everdeck", 300), "strict_more_ms")
    return f"{more:+.2f} ms of processor time", more <= 1


def _adoption(results: Results) -> Verdict:
    sizes = [size for size in (100, 1000, 5000) if Key("adopt", "everdeck", size) in results]
    each = {size: _only(results, Key("adopt", "everdeck", size), "open_ms") / size for size in sizes}
    text = ", ".join(f"{size:,}: {value:.3f} ms" for size, value in each.items())
    return text, each[1000] <= 0.3 and each[sizes[-1]] <= 1.5 * each[sizes[0]]


def _manager_killed(results: Results) -> Verdict:
    names = ("duplicates", "lost", "not_stoppable")
    counts = {
        name: sum(_only(results, Key("crash", "everdeck", 50, how), name) for how in ("plain", "talk"))
        for name in names
    }
    text = ", ".join(f"{value:.0f} {name.replace('_', ' ')}" for name, value in counts.items())
    return text, not any(counts.values())


def _logs(results: Results) -> Verdict:
    ours, plain = (results[Key("logs", name, 2_000_000, "lines")] for name in ("everdeck", "popen"))
    ratio = ours.median("mb_per_second") / plain.median("mb_per_second")
    lost = max(ours.values("lost"))
    return f"{ratio:.2f}, {lost:.0f} lost", ratio >= 0.9 and lost == 0


_BARS: list[tuple[str, str, Callable[[Results], Verdict]]] = [
    ("spawn of 1,000, library, all guarantees on ÷ bare `Popen` loop", "≤ 1.25 ×", _against_popen("everdeck", 1.25)),
    ("the same without the C side", "≤ 1.5 ×", _against_popen("everdeck-pure", 1.5)),
    ("the same one by one, each answered when the disk has it", "≤ 2 ×", _against_popen("everdeck-each", 2.0)),
    ('the same one by one, `durability="process"`', "≤ 2 ×", _against_popen("everdeck-each-process", 2.0)),
    ("in a group, per worker from 100 to 5,000", "≤ 1.15 × the bare loop's growth", _spawn_flat),
    ("in a group ÷ the fastest of s6, runit, supervisor, circus, pm2, workerdeck", "≤ 0.4 ×", _spawn_against_peers),
    ("kill -9 → replacement running, p50 ÷ bare `Popen` loop", "≤ 1.5 ×, ahead of every peer", _replacement),
    ("the same, p99", "≤ 2 ×", _replacement_at_worst),
    ("idle, 1,000 workers, wake-ups in 20 s", "0", _idle),
    ("memory per worker on the manager's side, 1,000 workers", "≤ 4 KiB PSS", _memory_per_worker),
    ("the library with 1,000 workers, its host in all", "≤ 22 MB PSS", _memory("everdeck", 22)),
    ("the daemon after one `apply` of 1,000 workers, in all", "≤ 40 MB PSS", _memory("everdeck-daemon", 40)),
    ("stop all of 100 ÷ bare kill loop, each tree proven gone", "≤ 3 ×", _stop_hundred),
    ("start through a member ÷ on the owner", "≤ 1.5 ×", _through_a_member),
    ("start with a `strict` sandbox, over a plain one", "+ ≤ 1 ms", _sandbox),
    ("adopt 1,000 on open, each", "≤ 0.3 ms, linear", _adoption),
    ("manager kill -9, reopened", "0 duplicates, 0 lost, all stoppable", _manager_killed),
    ("log throughput with rotation ÷ plain file", "≥ 0.9, 0 lines lost", _logs),
]


def _judge(results: Results, work: str, wanted: str, verdict: Callable[[Results], Verdict]) -> Bar:
    try:
        measured, passed = verdict(results)
    except (KeyError, ValueError, statistics.StatisticsError):
        return Bar(work, wanted, "", None)
    return Bar(work, wanted, measured, passed)


def _largest(results: Results, drivers: tuple[str, ...]) -> int:
    """The largest size up to the bar's own thousand at which all of them were measured."""
    return max(size for size in (10, 100, 1000) if all(Key("spawn", driver, size) in results for driver in drivers))


def _at(size: int) -> str:
    return "" if size == 1000 else f" (at {size})"


def _spawn(results: Results, driver: str, size: int) -> float:
    return _only(results, Key("spawn", driver, size), "spawn_ms")


def _only(results: Results, key: Key, name: str) -> float:
    return results[key].median(name)


def _delay(results: Results, driver: str, share: float = 0.5) -> float:
    delays = _delays(results, driver)
    return statistics.median(delays) if share == 0.5 else percentile(delays, share)


def _delays(results: Results, driver: str) -> list[float]:
    """Every delay, the shortest first."""
    samples = results[Key("restart", driver, 100)].samples
    return sorted(float(delay) for sample in samples for delay in sample["delays_ms"])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of them lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
