"""A real cluster: made by ``make test-kubernetes``, which runs these tests inside of its network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from everdeck import Deck
from support.cluster_beats import COMMAND, Beats, beats_file, overlaps
from support.cluster_machines import CALM, IN_THE_NETWORK, Cluster, Operator, fresh_namespace, until

ONE_AFTER_THE_OTHER = {
    **dict.fromkeys(("test_power.py", "test_many.py"), "a"),  # the pair of nodes that they harm
    **dict.fromkeys(("test_partition.py", "test_satellites.py", "test_export.py"), "b"),
    "test_rights.py": "rights",  # they share a worker
}
"""Files whose tests are run by one process; every other test is taken by whoever is free."""


class _Turns(LoadScopeScheduling):
    """The longest queue is begun first."""

    def _split_scope(self, nodeid: str) -> str:
        return ONE_AFTER_THE_OTHER.get(Path(nodeid.partition("::")[0]).name, nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """``--dist loadgroup``, without its marks: xdist 3.8 writes them into ids, where pytest 9 does not look."""
    return _Turns(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Elsewhere they say what they need."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(1800))
        if not IN_THE_NETWORK:
            item.add_marker(pytest.mark.skip(reason="needs the cluster of `make test-kubernetes`"))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The machines; those of the file's own ``PAIR``, if it harms them."""
    return Cluster(getattr(request.module, "PAIR", CALM))


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of its own, gone afterwards; and a cluster in which all is well before and after."""
    cluster.all_is_well()
    with fresh_namespace(cluster) as name:
        yield name
        cluster.all_is_well()


@pytest.fixture
def deck(namespace: str) -> Iterator[Deck]:
    """The deck of that namespace."""
    with Deck(f"kubernetes:{namespace}") as opened:
        yield opened


@pytest.fixture
def operator(namespace: str) -> Iterator[Operator]:
    """An operator for it."""
    made = Operator(namespace)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def home(cluster: Cluster) -> Iterator[str]:
    """The namespace of ``alice``, one for all harms of a file."""
    cluster.all_is_well()
    with fresh_namespace(cluster) as name:
        yield name
        cluster.all_is_well()


@pytest.fixture(scope="module")
def rescuer(home: str) -> Iterator[Operator]:
    """An operator for it."""
    made = Operator(home)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def every_beat(cluster: Cluster, home: str) -> Beats:
    """What ``alice`` writes."""
    with Deck(f"kubernetes:{home}") as deck:
        assert deck.start("alice", COMMAND).state == "running"
    beats = Beats(beats_file(cluster.volume(home, "alice"), "alice"))
    until(beats.stretches, "the first beat")
    return beats


@pytest.fixture
def beats(cluster: Cluster, every_beat: Beats, rescuer: Operator) -> Iterator[Beats]:
    """The same, of a worker that is well, on a cluster that is; and nothing of before is forgiven."""
    cluster.all_is_well()
    assert not overlaps(every_beat.settled())
    yield every_beat
    cluster.all_is_well()
