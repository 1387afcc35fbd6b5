"""Fixtures of the feed's tests that end processes."""

import multiprocessing
import multiprocessing.forkserver
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.feed_places import quick_directory


@pytest.fixture
def directory() -> Iterator[Path]:
    """Files that outlive the processes of a test, in memory."""
    with quick_directory() as place:
        yield place


@pytest.fixture(scope="module")
def processes() -> Iterator[multiprocessing.context.ForkServerContext]:
    """Fresh processes in milliseconds: the fork server has loaded the feed and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.feed_scenario", "support.feed_bots"])
    yield context
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
