"""What a power cut, or somebody's hand, may leave in a log directory: told, refused, and never waited for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everdeck import Deck, disk
from everdeck.errors import StateDirRefused
from everdeck.logs import files as logfiles
from everdeck.logs import ledger as logledger
from everdeck.logs.ledger import CURRENT, INDEX, LEDGER
from everdeck.logs.reader import Follower, read, tail
from everdeck.model import Log


@pytest.mark.parametrize("zeros", [512, 4096, 200_000])
def test_zeros_that_nobody_wrote_are_told_as_a_gap(tmp_path: Path, zeros: int) -> None:
    """In the middle and at the end; the lines around them stay."""
    (tmp_path / CURRENT).write_bytes(b"one\ntw" + bytes(zeros) + b"three\nfour\n" + bytes(zeros))
    shown = list(read(tmp_path))
    gap = f"--- everdeck {zeros} bytes were lost, as by a power cut ---"
    assert shown == ["one", "tw", gap, "three", "four", gap]
    assert tail(tmp_path, 2) == ["four", gap]
    with Follower() as follower:
        follower.add("w", tmp_path, position=0)
        assert [line.text for line in follower.ready()] == ["one", "tw", gap, "three", "four"]


def test_a_few_zeros_are_the_writers_own(tmp_path: Path) -> None:
    """Programs do print them."""
    (tmp_path / CURRENT).write_bytes(b"a\0b" + bytes(100) + b"c\n")
    assert list(read(tmp_path)) == ["a\\x00b" + "\\x00" * 100 + "c"]


def test_the_front_is_gone_from_the_disk_before_the_ledger_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed, synced, and only then noted: a power cut between leaves a stamp, and rotation goes on from it."""
    done: list[str] = []
    fallocate, write = logfiles._fallocate, logledger.write

    def removing(fd: int, mode: int, offset: int, length: int) -> None:
        fallocate(fd, mode, offset, length)
        if mode == logfiles._COLLAPSE_RANGE and _is_current(fd):
            done.append("removed")

    def syncing(fd: int) -> None:
        if _is_current(fd):
            done.append("synced")

    def writing(ledger_fd: int, ledger: logledger.Ledger, *, durable: bool = False) -> None:
        write(ledger_fd, ledger, durable=durable)
        done.append("noted" if not ledger.dropping else "announced")

    monkeypatch.setattr(logfiles, "_fallocate", removing)
    monkeypatch.setattr(disk, "sync", syncing)
    monkeypatch.setattr(logledger, "write", writing)
    (tmp_path / CURRENT).write_bytes(b"line of a log\n" * 4000)
    rotation = logfiles.rotate_if_due(tmp_path, Log(max_bytes=16_384, keep=3), now=0)
    assert rotation is not None
    if rotation.method is not logfiles.Method.COLLAPSE:
        pytest.skip(f"this file system takes the front away by {rotation.method}")
    assert done[done.index("removed") :] == ["removed", "synced", "noted"]


def _is_current(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").readlink().name == CURRENT


@pytest.mark.parametrize("trap", ["directory", "fifo", "link"])
@pytest.mark.parametrize("name", [CURRENT, LEDGER, INDEX])
def test_what_is_no_plain_file_is_no_log(tmp_path: Path, trap: str, name: str) -> None:
    """Reading shows what there is; nothing is followed, and nobody waits for the other end of a pipe."""
    log_dir = tmp_path / "log"
    log_dir.mkdir()
    if name != CURRENT:
        (log_dir / CURRENT).write_bytes(b"one\n")
    secret = tmp_path / "secret"
    secret.write_text("not for you\n")
    match trap:
        case "directory":
            (log_dir / name).mkdir()
        case "fifo":
            os.mkfifo(log_dir / name)
        case _:
            (log_dir / name).symlink_to(secret)
    code = (
        "import sys; from pathlib import Path; from everdeck.logs import files; from everdeck.logs.reader import read;"
        "d = Path(sys.argv[1]); files.mark(d, 'text'); files.note(d, [(1.0, 1)]); files.waiting_bytes(d);"
        "files.first_noted(d); print(list(read(d)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, str(log_dir)], check=False, capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert "not for you" not in shown.stdout
    assert secret.read_text() == "not for you\n"


def test_a_pipe_in_place_of_a_log_fails_its_own_worker_at_once(tmp_path: Path) -> None:
    """The others are started and heard as ever."""
    with Deck(tmp_path / "state") as deck:
        deck.start("w", ["sleep", "1000"])
        deck.stop("w")
        current = tmp_path / "state" / "workers" / "w" / "log" / CURRENT
        current.unlink()
        os.mkfifo(current)
        with pytest.raises(StateDirRefused, match=r"not a plain file|No such device"):
            deck.start("w")
        assert deck.logs("w") == []
        assert deck.start("other", ["sleep", "1000"]).pid
        deck.stop_all()


def test_the_mark_of_a_start_stands_before_the_first_line(tmp_path: Path) -> None:
    """However quick the worker is."""
    with Deck(tmp_path / "state", durability="process") as deck:
        for number in range(20):
            name = f"w{number}"
            deck.start(name, ["/bin/echo", "first"])
            with Follower(grep="first") as follower:
                follower.add(name, tmp_path / "state" / "workers" / name / "log", lines=10)
                assert next(iter(follower)).text == "first"
            assert "started cookie=" in deck.logs(name)[0]
