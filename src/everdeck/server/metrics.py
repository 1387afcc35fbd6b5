"""``/metrics`` in Prometheus' text format, by the standard client library.

The library is loaded at the first scrape: a deck that nobody scrapes pays nothing for it. Nothing is counted beside the
deck; a scrape reads the same statuses that ``ps`` shows.
"""

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
            yield from _worker_families(statuses)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshot())
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _deck_families(statuses: Sequence[WorkerStatus], last_event_id: int, connections: int) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily  # noqa: PLC0415 - as above

    yield InfoMetricFamily("everdeck_build", "The daemon's version.", value={"version": __version__})
    yield GaugeMetricFamily("everdeck_deck_supervised", "1 while an owner answers.", value=1)
    workers = GaugeMetricFamily("everdeck_deck_workers", "Workers by state.", labels=["state"])
    for state in State:
        workers.add_metric([state.value], sum(status.state is state for status in statuses))
    yield workers
    yield CounterMetricFamily("everdeck_deck_events", "Events recorded since the deck was made.", value=last_event_id)
    yield GaugeMetricFamily("everdeck_deck_connections", "Connections to the daemon now.", value=connections)


def _worker_families(statuses: Sequence[WorkerStatus]) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - as above

    up = GaugeMetricFamily("everdeck_worker_up", "1 while the worker runs.", labels=["worker"])
    restarts = CounterMetricFamily(
        "everdeck_worker_restarts", "Times it was started again, by its policy or by restart.", labels=["worker"]
    )
    crashes = GaugeMetricFamily(
        "everdeck_worker_crashes", "Crashes since its last reset or change of spec.", labels=["worker"]
    )
    cpu = GaugeMetricFamily("everdeck_worker_cpu_percent", "Percent of one core, whole tree.", labels=["worker"])
    rss = GaugeMetricFamily("everdeck_worker_resident_memory_bytes", "Resident memory, whole tree.", labels=["worker"])
    uptime = GaugeMetricFamily("everdeck_worker_uptime_seconds", "Seconds since its start.", labels=["worker"])
    ended = GaugeMetricFamily(
        "everdeck_worker_exit_code", "How it last ended: its code, or minus the signal.", labels=["worker"]
    )
    for status in statuses:
        label = [status.name]
        up.add_metric(label, 1 if status.state.is_live and status.pid is not None else 0)
        restarts.add_metric(label, status.restarts)
        crashes.add_metric(label, status.crashes)
        for family, value in ((cpu, status.cpu_percent), (rss, status.rss_bytes), (uptime, status.uptime_seconds)):
            if value is not None:
                family.add_metric(label, value)
        match status.exit:
            case Exited(code):
                ended.add_metric(label, code)
            case Killed(signal):
                ended.add_metric(label, -signal)
            case _:
                pass
    yield from (up, restarts, crashes, cpu, rss, uptime, ended)
