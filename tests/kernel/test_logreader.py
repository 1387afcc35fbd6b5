"""Reading a log that is written and rotated meanwhile: its end, a span of time, and what comes next."""

import io
import os
import re
import select
import shutil
import subprocess
import sys
import tracemalloc
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from everdeck.errors import SpecError
from everdeck.logs import files as logfiles
from everdeck.logs import ledger as logledger
from everdeck.logs import reader as logreader
from everdeck.logs import show as logshow
from everdeck.logs import text as logtext
from everdeck.logs.reader import Follower, Line
from everdeck.model import Log
from support.logs_namespace import CANNOT
from support.logs_writer import assert_numbered, numbered, writer_command

NOW = 1_800_000_000.0
SMALL = Log(max_bytes=20_000, keep=1000, compress=False)


def append(log_dir: Path, data: bytes) -> None:
    """Write as a worker does."""
    fd, _ = logfiles.open_for_worker(log_dir, split_stderr=False)
    os.write(fd, data)
    os.close(fd)


def rotate(log_dir: Path, *, compress: bool = False) -> None:
    """Rotate, and compress all archives if asked for."""
    assert logfiles.rotate_if_due(log_dir, SMALL, NOW) is not None
    if compress:
        for _ in logfiles.compressing(log_dir):
            pass


def drained(follower: Follower) -> list[Line]:
    """Everything a follower has to say now."""
    found: list[Line] = []
    while lines := follower.ready():
        found += lines
    return found


# --- the end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "compressed"])
@pytest.mark.parametrize("lines", [0, 1, 7, 163, 164, 165, 600, 999, 1000, 5000])
def test_tail_reaches_across_archives(tmp_path: Path, lines: int, compress: bool) -> None:
    """Lines are counted back from the end, wherever they lie, also those that straddle two files."""
    append(tmp_path, numbered(0, 1000))
    rotate(tmp_path, compress=compress)
    expected = numbered(0, 1000).decode().splitlines()
    assert logreader.tail(tmp_path, lines) == (expected[-lines:] if lines else [])


def test_an_unfinished_line_counts(tmp_path: Path) -> None:
    """What a worker has not ended yet is shown, because it may be its last word."""
    append(tmp_path, b"one\ntwo\nthr")
    assert logreader.tail(tmp_path, 2) == ["two", "thr"]
    append(tmp_path, b"ee\n\n")
    assert logreader.tail(tmp_path, 2) == ["three", ""]


def test_tail_of_a_large_log_takes_little_memory(tmp_path: Path) -> None:
    """The end of 60 MB, with archives compressed, is read in a few blocks."""
    append(tmp_path, numbered(0, 1000))
    for _ in range(60):
        append(tmp_path, b"x" * 99 + b"\n" + b"y" * 999_900)
    logfiles.rotate_if_due(tmp_path, Log(max_bytes=10_000_000, keep=100), NOW)
    for _ in logfiles.compressing(tmp_path):
        pass
    logreader.tail(tmp_path, 1)
    tracemalloc.start()
    try:
        assert len(logreader.tail(tmp_path, 40)) == 40
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000


def test_tail_in_the_middle_of_rotations(tmp_path: Path) -> None:
    """While a writer writes and another process rotates, the end is always a run of consecutive lines."""
    count, part = 150_000, 7_500
    log_dir = tmp_path / "log"
    fd, _ = logfiles.open_for_worker(log_dir, split_stderr=False)
    rotator = subprocess.Popen(
        [sys.executable, "-c", _ROTATE_FOREVER, str(log_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert rotator.stdout is not None
    assert rotator.stdout.readline() == b"ready\n"
    writer = subprocess.Popen(writer_command(tmp_path, count, part), stdin=subprocess.PIPE, stdout=fd)
    assert writer.stdin is not None
    os.close(fd)
    begun = 1
    try:
        while writer.poll() is None:
            lines = logreader.tail(log_dir, 2000)
            if lines and len(lines[-1]) < 99:
                lines.pop()  # a write across a page boundary is seen in two steps: the last line is not whole yet
            numbers = [int(line[:12]) for line in lines]
            assert numbers == [*range(numbers[0], numbers[0] + len(numbers))] if numbers else True
            if begun < count // part and len(logledger.archives(log_dir)) > begun:
                writer.stdin.write(b".")  # only now, so that there are looks and rotations while it writes
                writer.stdin.flush()
                begun += 1
    finally:
        writer.communicate(timeout=60)
        rotator.communicate(timeout=60)
    assert writer.returncode == rotator.returncode == 0
    assert begun == count // part
    assert_numbered(logreader.raw(log_dir), count)


_ROTATE_FOREVER = """
import select, sys
from pathlib import Path
from everdeck.logs import files as logfiles
from everdeck.model import Log
policy = Log(max_bytes=100_000, keep=10_000)
compression = iter(())
print("ready", flush=True)
while not select.select([0], [], [], 0)[0]:
    if logfiles.rotate_if_due(Path(sys.argv[1]), policy, 1.8e9):
        compression = logfiles.compressing(Path(sys.argv[1]))
    next(compression, None)
"""


# --- a span of time, a pattern ----------------------------------------------------------------------------------


def at(seconds: float) -> datetime:
    """A moment of the test's clock."""
    return datetime.fromtimestamp(NOW + seconds, UTC)


def test_since_and_until_use_the_index(tmp_path: Path) -> None:
    """A span holds every line written in it, and none that is known to be outside."""
    written = 0
    for minute in range(10):
        logfiles.note(tmp_path, [(NOW + minute * 60, written)])
        lines = "".join(f"minute {minute} line {number}\n" + "." * 20 + "\n" for number in range(100)).encode()
        append(tmp_path, lines)
        written += len(lines)
    rotate(tmp_path, compress=True)
    os.utime(tmp_path / "current", (NOW + 600, NOW + 600))
    found = list(logreader.read(tmp_path, since=at(180), until=at(300)))
    assert found[0] == "minute 3 line 0"
    assert found[-2] == "minute 4 line 99"
    assert next(logreader.read(tmp_path, since=at(570))) == "minute 9 line 0"
    assert len(list(logreader.read(tmp_path, since=at(-100)))) == 2000
    assert list(logreader.read(tmp_path, until=at(-100))) == []
    assert list(logreader.read(tmp_path, since=at(180), until=at(240), lines=2, grep="line")) == [
        "minute 3 line 98",
        "minute 3 line 99",
    ]


def test_a_log_without_an_index_is_shown_rather_too_wide(tmp_path: Path) -> None:
    """Where no times are known nothing is hidden."""
    append(tmp_path, b"one\ntwo\n")
    now = datetime.now(UTC)
    assert list(logreader.read(tmp_path, since=now - timedelta(hours=2), until=now - timedelta(hours=1))) == [
        "one",
        "two",
    ]


def test_a_log_that_was_not_written_since_is_not_shown(tmp_path: Path) -> None:
    """The file's own time tells, also without an index."""
    append(tmp_path, b"one\n")
    assert list(logreader.read(tmp_path, since=datetime.now(UTC) + timedelta(minutes=1))) == []


def test_lines_before_a_later_start_are_not_taken_for_later_ones(tmp_path: Path) -> None:
    """A mark says when the log began only if the log still has its beginning."""
    logfiles.mark(tmp_path, "started pid=1")
    earlier = datetime.now(UTC) - timedelta(minutes=1)
    assert list(logreader.read(tmp_path, until=earlier)) == []
    append(tmp_path, numbered(0, 230))
    logfiles.rotate_if_due(tmp_path, Log(max_bytes=20_000, keep=0), NOW)
    logfiles.mark(tmp_path, "started pid=2")
    assert len(list(logreader.read(tmp_path, until=earlier))) > 30


def test_grep(tmp_path: Path) -> None:
    """Only matching lines, and of these the last ones; a bad pattern is refused by name."""
    append(tmp_path, numbered(0, 1000))
    rotate(tmp_path)
    found = [line[:12] for line in logreader.read(tmp_path, grep=r"^0{9}\d99 ", lines=2)]
    assert found == ["000000000899", "000000000999"]
    with pytest.raises(SpecError, match="grep"):
        list(logreader.read(tmp_path, grep="("))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10m", "2026-11-15T20:30:00+00:00"),
        ("1.5h", "2026-11-15T19:10:00+00:00"),
        ("2d", "2026-11-13T20:40:00+00:00"),
        ("07:05", "2026-11-15T07:05:00+00:00"),
        ("2026-11-14T08:00:00Z", "2026-11-14T08:00:00+00:00"),
        ("2026-11-14T08:00:00+02:00", "2026-11-14T08:00:00+02:00"),
    ],
)
def test_moments_as_people_type_them(text: str, expected: str) -> None:
    """Durations count back from now; times of day are today's."""
    now = datetime(2026, 11, 15, 20, 40, tzinfo=UTC)
    assert logreader.moment(text, now) == datetime.fromisoformat(expected)


@pytest.mark.parametrize("text", ["", "yesterday", "10", "25:00", "2026-13-01", "10 parsecs"])
def test_other_moments_are_refused(text: str) -> None:
    """The refusal says what is accepted."""
    with pytest.raises(SpecError, match=r"until.*2h"):
        logreader.moment(text, field="until")


# --- safe to look at --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "plain", "coloured"),
    [
        (b"caf\xc3\xa9 \t tab", "café \t tab", "café \t tab"),
        (b"\x1b[31mred\x1b[0m", "red", "\x1b[31mred\x1b[0m\x1b[0m"),
        (b"\x1b[1;38:5:1mbold", "bold", "\x1b[1;38:5:1mbold\x1b[0m"),
        (b"\x1b[2J\x1b[Hwiped", "wiped", "wiped"),
        (b"\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link", "textlink", "textlink"),
        (b"bell\x07 nul\x00", "bell\\x07 nul\\x00", "bell\\x07 nul\\x00"),
        (b"broken \xff\xfe", "broken \\xff\\xfe", "broken \\xff\\xfe"),
        (b"progress 1%\rprogress 2%\r", "progress 2%", "progress 2%"),
        ("right\u202eleft".encode(), "right\\u202eleft", "right\\u202eleft"),
        (b"\x1b[31", "\\x1b[31", "\\x1b[31"),
        ("c1 \u009b2J".encode(), "c1 \\x9b2J", "c1 \\x9b2J"),
    ],
)
def test_a_line_cannot_steer_the_terminal(line: bytes, plain: str, coloured: str) -> None:
    """Colours stay on a terminal; everything else that would act on it is taken out or written as an escape."""
    assert logtext.shown(line) == plain
    assert logtext.shown(line, colour=True) == coloured


def test_binary_of_every_kind_is_shown_safely(tmp_path: Path) -> None:
    """Random bytes come out as printable lines only."""
    append(tmp_path, os.urandom(200_000) + b"\n" + bytes(range(256)) * 100)
    unsafe = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f]")
    assert not any(unsafe.search(line) for line in logreader.read(tmp_path))


def test_an_overlong_line_is_cut_with_a_word_about_it(tmp_path: Path) -> None:
    """Ten megabytes without a newline are one short line, and the next line is whole."""
    append(tmp_path, b"a\n" + b"x" * 10_000_000 + b"\nb\n")
    first, long, last = logreader.tail(tmp_path, 5)
    assert (first, last) == ("a", "b")
    assert long == "x" * logreader.LINE_BYTES + f" … [line cut at {logreader.LINE_BYTES} bytes]"
    assert logreader.tail(tmp_path, 1) == ["b"]


# --- what comes next --------------------------------------------------------------------------------------------


def test_following_sees_each_line_once_across_rotations(tmp_path: Path) -> None:
    """Lines come when they are finished, whether they are in current or in an archive by then."""
    append(tmp_path, b"before\nhalf")
    with Follower() as follower:
        follower.add("a", tmp_path)
        assert drained(follower) == []
        append(tmp_path, b" and half\n")
        assert follower.wait(60)
        assert [line.text for line in drained(follower)] == ["half and half"]
        seen = 0
        for turn in range(20):
            append(tmp_path, numbered(turn * 250, 250))
            if turn % 3 == 0:
                seen += _expect(follower, seen)
            rotate(tmp_path, compress=turn % 2 == 0)
            if turn % 2 == 0:
                seen += _expect(follower, seen)
        seen += _expect(follower, seen)
        assert seen == 5000
        assert drained(follower) == []


def _expect(follower: Follower, seen: int) -> int:
    numbers = [int(line.text[:12]) for line in drained(follower)]
    assert numbers == list(range(seen, seen + len(numbers)))
    return len(numbers)


def test_following_begins_with_the_last_lines(tmp_path: Path) -> None:
    """The past that was asked for comes first; a line's position resumes after it."""
    append(tmp_path, numbered(0, 450))
    rotate(tmp_path)
    with Follower() as follower:
        follower.add("a", tmp_path, lines=300)
        found = drained(follower)
        assert [int(line.text[:12]) for line in found] == list(range(150, 450))
    append(tmp_path, numbered(450, 10))
    with Follower() as follower:
        follower.add("a", tmp_path, position=found[100].position)
        assert [int(line.text[:12]) for line in drained(follower)] == list(range(251, 460))


def test_a_silent_log_does_not_wake_its_follower(tmp_path: Path) -> None:
    """The descriptor is readable only after something happened."""
    append(tmp_path, b"x\n")
    with Follower() as follower:
        follower.add("a", tmp_path)
        drained(follower)
        assert select.select([follower], [], [], 0)[0] == []
        append(tmp_path, b"y\n")
        assert select.select([follower], [], [], 10)[0] == [follower]


def test_several_logs_are_followed_by_one_descriptor(tmp_path: Path) -> None:
    """Each line says whose it is; no descriptor is held per log."""
    logs = {f"w{number}": tmp_path / f"w{number}" for number in range(50)}
    for log_dir in logs.values():
        append(log_dir, b"before\n")
    with Follower(grep="ell") as follower:
        fds = len(list(Path("/proc/self/fd").iterdir()))
        for name, log_dir in logs.items():
            follower.add(name, log_dir)
        assert len(list(Path("/proc/self/fd").iterdir())) == fds
        drained(follower)
        for name in ("w3", "w7"):
            append(logs[name], b"hello\nother\n")
        assert [(line.name, line.text) for line in drained(follower)] == [("w3", "hello"), ("w7", "hello")]
        follower.remove("w3")
        append(logs["w3"], b"hello\n")
        assert drained(follower) == []


def test_a_log_that_comes_and_goes(tmp_path: Path) -> None:
    """A log may be followed before it exists; when its directory is removed, following it ends."""
    log_dir = tmp_path / "log"
    log_dir.mkdir()
    with Follower() as follower:
        follower.add("a", log_dir)
        assert drained(follower) == []
        append(log_dir, b"born\n")
        assert follower.wait(60)
        found: list[Line] = []
        while not found:
            found = drained(follower)
        assert found[0].text == "born"
        append(log_dir, b"last\n")
        assert [line.text for line in drained(follower)] == ["last"]
        shutil.rmtree(log_dir)
        assert list(follower) == []
        assert follower.names == []


def test_a_log_emptied_by_hand_is_followed_on(tmp_path: Path) -> None:
    """After `: > current` the follower goes on with what is written then."""
    append(tmp_path, b"one\n" * 100)
    with Follower() as follower:
        follower.add("a", tmp_path)
        drained(follower)
        os.truncate(tmp_path / "current", 0)
        assert drained(follower) == []
        append(tmp_path, b"two\n")
        assert [line.text for line in drained(follower)] == ["two"]


def test_a_follower_that_is_too_slow_is_told(tmp_path: Path) -> None:
    """What was pruned before it could be read is missing, and a line says how much."""
    append(tmp_path, numbered(0, 10))
    with Follower() as follower:
        follower.add("a", tmp_path, lines=10)
        append(tmp_path, numbered(10, 5000))
        logfiles.rotate_if_due(tmp_path, Log(max_bytes=20_000, keep=1, compress=False), NOW)
        found = drained(follower)
        assert re.fullmatch(r"--- everdeck \d+ bytes were pruned before they were read ---", found[0].text)
        assert found[-1].text.startswith("000000005009")


def test_without_inotify_following_looks_by_itself(tmp_path: Path) -> None:
    """Where the user may have no inotify descriptor at all, new lines still come."""
    append(tmp_path, b"before\n")
    program = f"""
import os, sys
from pathlib import Path
from everdeck.logs.reader import Follower
sys.path.insert(0, sys.argv[1])
from support.logs_namespace import forbid_inotify
forbid_inotify()
with Follower() as follower:
    assert follower.fileno() == -1, follower.fileno()
    follower.add("a", Path({str(tmp_path)!r}))
    with open({str(tmp_path / "current")!r}, "a") as log:
        log.write("after\\n")
    for line in follower:
        print(line.text)
        break
"""
    tests = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", program, tests], capture_output=True, text=True, check=False)
    if done.returncode == CANNOT:
        pytest.skip("no user namespace of our own to set the limit in")
    assert done.stdout == "after\n", done.stderr


# --- what is printed --------------------------------------------------------------------------------------------


def test_show_prints_one_log_bare_and_several_with_names(tmp_path: Path) -> None:
    """Names stand in front only where there is a choice of them."""
    append(tmp_path / "a", b"\x1b[31mone\x1b[0m\ntwo\n")
    append(tmp_path / "bob", b"three\n")
    out = io.StringIO()
    logshow.show({"a": tmp_path / "a"}, out)
    assert out.getvalue() == "one\ntwo\n"
    out = io.StringIO()
    logshow.show({"a": tmp_path / "a", "bob": tmp_path / "bob"}, out, lines=1)
    assert out.getvalue() == "a   | two\nbob | three\n"
    out = io.StringIO()
    logshow.show({"a": tmp_path / "a", "bob": tmp_path / "bob"}, out, lines=5, colour=True)
    assert "\x1b[31mone" in out.getvalue()
    assert re.search("\x1b\\[\\d+mbob\x1b\\[0m | three", out.getvalue())


def test_neighbours_have_different_colours() -> None:
    """A dozen workers shown together are told apart, and a hundred at least from their neighbours."""
    names = [f"user-{number}" for number in range(100)]
    colours = logshow._colours(names)
    assert len({colours[name] for name in names[:12]}) == 12
    assert all(colours[one] != colours[other] for one, other in pairwise(names))


def test_show_leaves_out_neither_stream(tmp_path: Path) -> None:
    """A stderr that is kept apart is shown beside the rest."""
    for fd, text in zip(logfiles.open_for_worker(tmp_path, split_stderr=True), (b"said\n", b"wept\n"), strict=True):
        os.write(fd, text)
        os.close(fd)
    out = io.StringIO()
    logshow.show({"a": tmp_path}, out)
    assert out.getvalue() == "a        | said\na/stderr | wept\n"


@pytest.mark.parametrize(
    "options", [{"lines": 3}, {"lines": 3, "grep": "l"}, {"since": datetime.now(UTC) - timedelta(1)}]
)
def test_show_goes_on_after_the_past(tmp_path: Path, options: dict[str, object]) -> None:
    """The past and what follows it are printed once each, without a seam."""
    log_dir = tmp_path / "log"
    append(log_dir, b"l1\nl2\nl3\nhalf a l")
    out = _Ended(log_dir, ends_after=4)
    with pytest.raises(BrokenPipeError):
        logshow.show({"a": log_dir}, out, follow=True, **options)  # type: ignore[arg-type]  # options vary by case
    assert out.lines == ["l1\n", "l2\n", "l3\n", "half a line\n"]


class _Ended(io.StringIO):
    """A reader that makes the worker write one more line, and goes away after having read enough."""

    def __init__(self, log_dir: Path, ends_after: int) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._log_dir = log_dir
        self._ends_after = ends_after

    def writelines(self, lines: object) -> None:  # type: ignore[override]  # any iterable will do
        self.lines += lines  # type: ignore[operator]  # it is one
        if len(self.lines) == 3:
            append(self._log_dir, b"ine\n")
        if len(self.lines) >= self._ends_after:
            raise BrokenPipeError
