"""Fixtures of the kernel's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck.kernel import containment
from support.kernel_trees import Nursery


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    """Starts trees; ends all of them afterwards, also when the test fails."""
    nursery = Nursery(tmp_path)
    try:
        yield nursery
    finally:
        nursery.end()


@pytest.fixture
def cgroup_dir(tmp_path: Path) -> Iterator[Path]:
    """A cgroup directory for one test; skipped where none can be made."""
    home = containment.cgroup_home()
    if home is None:
        pytest.skip("no writable cgroup v2 directory here")
    path = home / f"everdeck-test-{tmp_path.name}-{id(tmp_path)}"
    path.mkdir()
    try:
        yield path
    finally:
        for below in path.iterdir():
            if below.is_dir():
                containment.kill_cgroup(below)
                containment.remove_cgroup(below)
        containment.remove_cgroup(path)
