"""A worker has its log open for writing and can do to the file what it likes; the logs of others are kept as ever."""

from pathlib import Path

from everdeck.logs import files


def test_a_log_longer_than_any_number_is_only_not_timed(tmp_path: Path) -> None:
    """Made 2^63 bytes long and emptied, twice: an error here would leave the other logs of the same turn unwatched."""
    files.note(tmp_path, [(1.0, 10)])
    files.note(tmp_path, [(2.0, 1 << 64)])
    files.note(tmp_path, [(3.0, 20)])

    assert (tmp_path / "index").stat().st_size == 2 * 16
    assert files.first_noted(tmp_path) == 1.0
