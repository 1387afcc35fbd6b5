"""A real cluster: made by ``make test-kubernetes``, which runs these tests inside of its network."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck import Deck
from support.cluster_machines import IN_THE_NETWORK, Cluster, Operator, fresh_namespace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Elsewhere they say what they need."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(1800))
        if not IN_THE_NETWORK:
            item.add_marker(pytest.mark.skip(reason="needs the cluster of `make test-kubernetes`"))


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The machines."""
    return Cluster()


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
