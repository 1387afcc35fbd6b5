"""The disk of the power cuts: it loses what was not flushed, some of it in any order, and tears no piece of 4 KiB."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from support.repo_examples import ROOT

PIECE, PIECES = 4096, 32


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    """One that is full of zeros."""
    spec = importlib.util.spec_from_file_location("machine_disk", ROOT / "scripts" / "machine_disk.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "image").write_bytes(bytes(PIECES * PIECE))
    return module.Disk(str(tmp_path / "image"))


def _pieces(disk: Any) -> list[bytes]:
    return [disk.read(number * PIECE, PIECE) for number in range(PIECES)]


@pytest.mark.parametrize("seed", range(8))
def test_a_piece_that_was_not_flushed_is_there_or_not_and_never_in_part(disk: Any, seed: int) -> None:
    """ext4 takes a torn commit of its journal for a broken disk, and is not mounted any more."""
    for number in range(PIECES):
        disk.write(number * PIECE, b"n" * PIECE, through=False)
    lost = disk.switch_off(str(seed))
    after = _pieces(disk)
    assert {*after} <= {bytes(PIECE), b"n" * PIECE}
    assert lost * 512 == after.count(bytes(PIECE)) * PIECE


def test_some_are_lost_and_some_are_not(disk: Any) -> None:
    """Over several cuts, in any order: else a cut would show nothing."""
    seen = set()
    for seed in range(8):
        for number in range(PIECES):
            disk.write(number * PIECE, b"o" * PIECE, through=False)
        disk.flush()
        for number in range(PIECES):
            disk.write(number * PIECE, b"n" * PIECE, through=False)
        disk.switch_off(str(seed))
        seen.add("".join(piece[:1].decode() for piece in _pieces(disk)))
    assert any("no" in one and "on" in one for one in seen)


def test_what_was_flushed_or_written_through_stays(disk: Any) -> None:
    """All that is not is gone when all is lost, and there when only the machine is reset."""
    disk.write(0, b"f" * PIECE, through=False)
    disk.flush()
    disk.write(PIECE, b"t" * PIECE, through=True)
    disk.write(2 * PIECE, b"c" * PIECE, through=False)
    assert disk.switch_off("all") * 512 == PIECE
    assert _pieces(disk)[:3] == [b"f" * PIECE, b"t" * PIECE, bytes(PIECE)]
    disk.write(2 * PIECE, b"c" * PIECE, through=False)
    assert disk.switch_off("none") == 0
    assert _pieces(disk)[2] == b"c" * PIECE
