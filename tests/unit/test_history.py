"""CPU and memory on disk: bounded, readable by the next daemon, and honest about what is old."""

from pathlib import Path

from everdeck.server.history import FILE_BYTES, History, Point

NOW = 1_800_000_000.0
DAY = 86_400


def _filled(folder: Path, name: str, begins: float, ends: float, step: float) -> History:
    history = History(folder)
    history.recall()
    at = begins
    while at < ends:
        history.write(history.add(name, Point(at, 10.0 + at % 7, 1000 << 10)))
        at += step
    history.leave()
    return history


def _next(folder: Path) -> History:
    history = History(folder)
    history.recall()
    return history


def test_a_month_of_samples_takes_no_more_than_its_file(tmp_path: Path) -> None:
    """Forty days every ten minutes: the last thirty are there, minutes for the last day, quarters before."""
    _filled(tmp_path, "alice", NOW - 40 * DAY, NOW, 600)
    assert (tmp_path / "alice").stat().st_size <= FILE_BYTES
    points = _next(tmp_path).read("alice", 0, NOW)
    assert NOW - 30 * DAY <= points[0].at < NOW - 29 * DAY
    assert [point.at for point in points] == sorted({point.at for point in points})
    assert sum(point.at >= NOW - DAY for point in points) >= 140
    assert all(point.cpu is not None and 10 <= point.cpu <= 17 and point.rss == 1000 << 10 for point in points)


def test_the_next_daemon_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Two of them, with a pause between: what one left, the other reads, and the pause is a gap."""
    _filled(tmp_path, "alice", NOW - 7200, NOW - 3600, 10)
    _filled(tmp_path, "alice", NOW - 600, NOW, 10)
    points = _next(tmp_path).read("alice", NOW - 7200, NOW)
    assert sum(point.at < NOW - 3500 for point in points) >= 58
    assert not [point for point in points if NOW - 3500 < point.at < NOW - 700]
    assert History(tmp_path).read("alice", NOW - 300, NOW)[0].at >= NOW - 300


def test_a_worker_that_is_gone_leaves_nothing(tmp_path: Path) -> None:
    """Its file goes; somebody who was never sampled has none; a torn file is read as far as it makes sense."""
    history = _filled(tmp_path, "alice", NOW - 600, NOW, 10)
    (tmp_path / "torn").write_bytes(b"\x01\x02\x03" * 99)
    assert history.read("torn", 0, NOW) == []
    history.keep_only({"bob"})
    assert [one.name for one in tmp_path.iterdir()] == ["unfinished~"]
    following = _next(tmp_path)
    following.keep_only({"bob"})
    assert not list(tmp_path.iterdir())
    assert following.read("alice", 0, NOW) == []
    assert following.read("bob", 0, NOW) == []


def test_whoever_leaves_writes_one_file_for_all(tmp_path: Path) -> None:
    """Not one per worker, which at thousands would hold up the program that replaces this one."""
    history = History(tmp_path)
    for number in range(100):
        assert not history.add(f"worker-{number}", Point(NOW, 5.0, 1 << 20))
    history.leave()
    assert [one.name for one in tmp_path.iterdir()] == ["unfinished~"]
    assert [point.rss for point in _next(tmp_path).read("worker-42", 0, NOW + 1)] == [1 << 20]


def test_a_slot_counts_both_sides_of_a_reload(tmp_path: Path) -> None:
    """A minute at 10 percent, a reload, and the same minute at 30: the minute had 20, and the most memory of both."""
    before = History(tmp_path)
    before.add("alice", Point(NOW, 10.0, 8 << 20))
    before.leave()
    after = _next(tmp_path)
    after.add("alice", Point(NOW + 10, 30.0, 4 << 20))
    after.write(after.add("alice", Point(NOW + 70, 50.0, 4 << 20)))
    minute = History(tmp_path).read("alice", NOW - 60, NOW + 60)[0]
    assert (minute.cpu, minute.rss) == (20.0, 8 << 20)


def test_what_cannot_be_read_again_is_left_out(tmp_path: Path) -> None:
    """Half of it, or of another release: the daemon samples on."""
    for content in (b"", b'[["alice",60,', b'[["alice","minute"]]', b'[["alice",61,0,1,1.0,1],["alice",60,0,0,1.0,1]]'):
        (tmp_path / "unfinished~").write_bytes(content)
        history = _next(tmp_path)
        assert history.read("alice", 0, NOW) == []
        history.add("alice", Point(NOW, 1.0, 1))


def test_who_leaves_before_it_sampled_leaves_what_it_found(tmp_path: Path) -> None:
    """Two reloads in a row lose nothing."""
    _filled(tmp_path, "alice", NOW - 30, NOW, 10)
    History(tmp_path).leave()
    assert _next(tmp_path).read("alice", NOW - 60, NOW)
