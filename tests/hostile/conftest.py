"""Attacks need two accounts and root; both accounts are made for the session and removed with it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hostile_accounts import Account, made, open_place
from support.repo_processes import end_all_under


def _needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: accounts are made for the attack, and workers run as them")
    if shutil.which("useradd") is None:
        pytest.skip("needs useradd to make an account")


@pytest.fixture(scope="session")
def mallory() -> Iterator[Account]:
    """The account whose worker attacks."""
    _needs_root()
    with made("m") as account:
        yield account


@pytest.fixture(scope="session")
def victim() -> Iterator[Account]:
    """Another account on the same machine."""
    _needs_root()
    with made("v") as account:
        yield account


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the accounts can pass through; what runs in it is ended with the test."""
    with open_place() as path:
        yield path
        end_all_under(path)
