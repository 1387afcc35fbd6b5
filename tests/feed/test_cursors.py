"""FileCursor: one whole number in a text file, and what happens around it."""

import stat
from pathlib import Path

import pytest

from everdeck.errors import CursorUnreadable, InboxUnavailable, SpecError
from everdeck.feed import FileCursor


def test_a_missing_file_is_no_cursor(tmp_path: Path) -> None:
    """Before the first update there is nothing, which is not the number zero."""
    assert FileCursor(tmp_path / "offset.txt").load() is None


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """The file holds the number as text, and nothing else stays behind."""
    cursor = FileCursor(tmp_path / "offset.txt")
    cursor.save(824_001)
    cursor.save(824_002)
    assert cursor.load() == 824_002
    assert (tmp_path / "offset.txt").read_text() == "824002\n"
    assert [file.name for file in tmp_path.iterdir()] == ["offset.txt"]


@pytest.mark.parametrize("content", ["17", "17\n", "  17 \r\n", "00017"])
def test_an_existing_file_is_taken_over(tmp_path: Path, content: str) -> None:
    """A file that somebody's own script wrote goes on being the cursor."""
    (tmp_path / "offset").write_text(content)
    assert FileCursor(tmp_path / "offset").load() == 17


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"abc", b"12 34", b"-1", b"1.5", b"0x10", b"{}", b"\xff\xfe1", b"9" * 30, "\u0661\u0667".encode()],
)
def test_bad_content_is_named_and_kept(tmp_path: Path, content: bytes) -> None:
    """It is never taken for zero, the error names the file and what it holds, and the file stays."""
    path = tmp_path / "offset"
    path.write_bytes(content)
    with pytest.raises(CursorUnreadable) as caught:
        FileCursor(path).load()
    assert str(path) in str(caught.value)
    assert repr(content[:80]) in str(caught.value)
    assert path.read_bytes() == content


def test_a_directory_is_not_a_cursor(tmp_path: Path) -> None:
    """What cannot be read is an error as well."""
    with pytest.raises(CursorUnreadable, match="directory"):
        FileCursor(tmp_path).load()


@pytest.mark.parametrize("value", [-1, 1.5, True, "7", None])
def test_only_whole_numbers_are_saved(tmp_path: Path, value: object) -> None:
    """A negative offset would delete a backlog; it never reaches the file."""
    cursor = FileCursor(tmp_path / "offset")
    with pytest.raises(SpecError, match="whole number"):
        cursor.save(value)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_mode_and_link_survive(tmp_path: Path) -> None:
    """Replacing the file keeps its mode, and a link keeps pointing at it."""
    real = tmp_path / "real"
    real.write_text("5")
    real.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(real)
    FileCursor(link).save(6)
    assert link.is_symlink()
    assert real.read_text() == "6\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_leftover_of_a_crash_is_overwritten(tmp_path: Path) -> None:
    """A temporary file that a killed process left is neither read nor in the way."""
    (tmp_path / "offset").write_text("5\n")
    (tmp_path / "offset.new").write_text("9999999")
    cursor = FileCursor(tmp_path / "offset")
    assert cursor.load() == 5
    cursor.save(6)
    assert cursor.load() == 6


def test_where_nothing_can_be_written_the_old_number_stands(tmp_path: Path) -> None:
    """A save that fails says so; the number is the old one."""
    cursor = FileCursor(tmp_path / "gone" / "offset")
    with pytest.raises(InboxUnavailable, match="offset"):
        cursor.save(1)
    assert cursor.load() is None
