"""CPU and memory on disk: bounded, readable by the next daemon, and honest about what is old."""

from pathlib import Path

from everdeck.server.history import FILE_BYTES, History, Point

NOW = 1_800_000_000.0
DAY = 86_400


def _filled(folder: Path, name: str, begins: float, ends: float, step: float) -> History:
    history = History(folder)
    at = begins
    while at < ends:
        history.write(history.add(name, Point(at, 10.0 + at % 7, 1000 << 10)))
        at += step
    history.write(history.unfinished())
    return history


def test_a_month_of_samples_takes_no_more_than_its_file(tmp_path: Path) -> None:
    """Forty days every ten minutes: the last thirty are there, minutes for the last day, quarters before."""
    _filled(tmp_path, "alice", NOW - 40 * DAY, NOW, 600)
    assert (tmp_path / "alice").stat().st_size <= FILE_BYTES
    points = History(tmp_path).read("alice", 0, NOW)
    assert NOW - 30 * DAY <= points[0].at < NOW - 29 * DAY
    assert [point.at for point in points] == sorted({point.at for point in points})
    assert sum(point.at >= NOW - DAY for point in points) >= 140
    assert all(point.cpu is not None and 10 <= point.cpu <= 17 and point.rss == 1000 << 10 for point in points)


def test_the_next_daemon_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Two of them, with a pause between: what one left, the other reads, and the pause is a gap."""
    _filled(tmp_path, "alice", NOW - 7200, NOW - 3600, 10)
    _filled(tmp_path, "alice", NOW - 600, NOW, 10)
    points = History(tmp_path).read("alice", NOW - 7200, NOW)
    assert sum(point.at < NOW - 3500 for point in points) >= 58
    assert not [point for point in points if NOW - 3500 < point.at < NOW - 700]
    assert History(tmp_path).read("alice", NOW - 300, NOW)[0].at >= NOW - 300


def test_a_worker_that_is_gone_leaves_nothing(tmp_path: Path) -> None:
    """Its file goes; somebody who was never sampled has none; a torn file is read as far as it makes sense."""
    history = _filled(tmp_path, "alice", NOW - 600, NOW, 10)
    (tmp_path / "torn").write_bytes(b"\x01\x02\x03" * 99)
    assert history.read("torn", 0, NOW) == []
    history.keep_only({"bob"})
    assert not list(tmp_path.iterdir())
    assert history.read("bob", 0, NOW) == []
