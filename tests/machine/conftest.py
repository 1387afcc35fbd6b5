"""A virtual machine: made and booted by ``make test-machine``, which runs these tests."""

from pathlib import Path

import pytest

from support import machine as machines
from support.machine import Machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Elsewhere they say what they need."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(7200))
        if machines.from_environment() is None:
            item.add_marker(pytest.mark.skip(reason="needs the machine of `make test-machine`"))


@pytest.fixture(scope="session")
def machine() -> Machine:
    """The one that runs."""
    found = machines.from_environment()
    assert found is not None
    return found
