"""``/metrics`` in Prometheus' text format, by the standard client library.

The library is loaded at the first scrape: a deck that nobody scrapes pays nothing for it. Nothing is counted beside the
deck; a scrape reads the same statuses that ``ps`` shows.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from everdeck import __version__
from everdeck.model import Exited, Killed, State, WorkerStatus


def exposition(statuses: Sequence[WorkerStatus], last_event_id: int, connections: int) -> tuple[bytes, str]:
    """The text of one scrape and its media type. Slow for thousands of workers: call it in a thread."""
    from prometheus_client import CollectorRegistry  # noqa: PLC0415 - 4 MB and 80 ms that only a scraped deck pays
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415 - as above
    from prometheus_client.registry import Collector  # noqa: PLC0415 - as above

    class Snapshot(Collector):
        def collect(self) -> Iterable[Any]:
            yield from _deck_families(statuses, last_event_id, connections)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshot())
    return generate_latest(registry) + _worker_text(statuses).encode(), CONTENT_TYPE_LATEST


def _deck_families(statuses: Sequence[WorkerStatus], last_event_id: int, connections: int) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily  # noqa: PLC0415 - as above

    yield InfoMetricFamily("everdeck_build", "The daemon's version.", value={"version": __version__})
    yield GaugeMetricFamily("everdeck_deck_supervised", "1 while an owner answers.", value=1)
    counts = Counter(status.state for status in statuses)
    workers = GaugeMetricFamily("everdeck_deck_workers", "Workers by state.", labels=["state"])
    for state in State:
        workers.add_metric([state.value], counts[state])
    yield workers
    yield CounterMetricFamily("everdeck_deck_events", "Events recorded since the deck was made.", value=last_event_id)
    yield GaugeMetricFamily("everdeck_deck_connections", "Connections to the daemon now.", value=connections)


def _worker_text(statuses: Sequence[WorkerStatus]) -> str:
    """The families of single workers, written here: through the library they cost 20 µs a line, and there are seven
    lines per worker.
    """
    families: dict[str, tuple[str, str, list[str]]] = {
        name: (help_text, kind, [])
        for name, kind, help_text in (
            ("up", "gauge", "1 while the worker runs."),
            ("restarts_total", "counter", "Times it was started again, by its policy or by restart."),
            ("crashes", "gauge", "Crashes since its last reset or change of spec."),
            ("cpu_percent", "gauge", "Percent of one core, whole tree."),
            ("resident_memory_bytes", "gauge", "Resident memory, whole tree."),
            ("uptime_seconds", "gauge", "Seconds since its start."),
            ("exit_code", "gauge", "How it last ended: its code, or minus the signal."),
        )
    }
    for status in statuses:
        measured: dict[str, float | None] = {
            "up": 1 if status.state.is_live and status.pid is not None else 0,
            "restarts_total": status.restarts,
            "crashes": status.crashes,
            "cpu_percent": status.cpu_percent,
            "resident_memory_bytes": status.rss_bytes,
            "uptime_seconds": status.uptime_seconds,
            "exit_code": _exit_code(status),
        }
        for name, value in measured.items():
            if value is not None:  # a worker's name has no character that would have to be escaped
                families[name][2].append(f'everdeck_worker_{name}{{worker="{status.name}"}} {float(value)!r}\n')
    text = []
    for name, (help_text, kind, lines) in families.items():
        text.append(f"# HELP everdeck_worker_{name} {help_text}\n# TYPE everdeck_worker_{name} {kind}\n")
        text.extend(lines)
    return "".join(text)


def _exit_code(status: WorkerStatus) -> int | None:
    match status.exit:
        case Exited(code):
            return code
        case Killed(signal):
            return -signal
        case _:
            return None
