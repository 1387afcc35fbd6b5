"""The first start of a worker in one call: its home, its lock, its log and its process, or nothing of a process."""

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck.kernel import flock, inotify, native, posix, spawn
from everdeck.kernel import identity as ids
from everdeck.kernel.birth import Birth
from support.repo_processes import own_children
from support.waiting import until

_MARK = "--- a mark ---\n"
_OF_THE_C_LIBRARY = 32  # which it hides from sigaction(3); a program's parent may have it ignored all the same
_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}


class Deck:
    """A directory of homes, and the processes that were started in it."""

    def __init__(self, workers: Path, way: type[spawn.FirstStarts]) -> None:
        self.workers = workers
        self.way = way
        self.places = native.Places(str(workers), os.open(workers, os.O_RDONLY), os.open(os.devnull, os.O_RDWR))
        self.born: list[native.Made] = []
        self.ear = inotify.open_inotify()

    def start(self, **commands: list[str]) -> list[native.Made]:
        """Start these, by name, in one call."""
        starts = self.ready(**commands)
        starts.call()
        told = starts.told()
        self.born += [made for made in told if made.step < 0]
        return told

    def ready(self, **commands: list[str]) -> spawn.FirstStarts:
        """These, made ready to be called."""
        path = os.environ["PATH"]
        firsts = [
            native.First(name, "", b"{}", _MARK, command, f"{self.workers}/{name}/data", path, [f"PATH={path}"])
            for name, command in commands.items()
        ]
        starts = self.way(self.places, Birth(), firsts, inotify_fd=self.ear)
        starts.make_ready()
        return starts

    def refused(self, number: int) -> tuple[str, int]:
        """How it is told that a program cannot be executed: the C library's way leaves that to the steps."""
        return ("exec", number) if self.way is native.FirstStarts else ("clone", errno.ENOSYS)

    def ticks(self, made: native.Made) -> set[int]:
        """What may be told of when it began; without the C side it may have to be asked for."""
        return {ids.read_stat(made.pid).start_ticks} | ({-1} if self.way is posix.FirstStarts else set())

    def close(self) -> None:
        """End what was started."""
        for made in self.born:
            with contextlib.suppress(ProcessLookupError):
                os.kill(made.pid, signal.SIGKILL)
            os.waitid(os.P_PIDFD, made.pidfd, os.WEXITED)
            os.close(made.pidfd)
        for fd in (self.places.workers_fd, self.places.null_fd, self.ear):
            os.close(fd)


@pytest.fixture(params=["the C side", "posix_spawn"])
def deck(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Deck]:
    """No worker yet."""
    if request.param == "posix_spawn":
        if not posix.starts_first():
            pytest.skip("this C library has no contexts, or no posix_spawn that could do it")
        one = Deck(tmp_path, posix.FirstStarts)
    else:
        if not native.available():
            pytest.skip("the C side is not built here")
        one = Deck(tmp_path, native.FirstStarts)
    yield one
    one.close()


def test_everything_of_a_first_start_is_there_after_one_call(deck: Deck) -> None:
    """Its directories are its own, its lock is held by it alone, its log begins with the mark, and it works in data."""
    [made] = deck.start(alice=["sleep", "100"])

    home = deck.workers / "alice"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()}
    assert modes == {"lock": 0o600, "note": 0o600, "log": 0o700, "data": 0o700}
    assert (home / "note").read_bytes() == b"{}"
    assert (home / "log" / "current").read_text() == _MARK
    assert flock.holders(home / "lock") == [made.pid]
    told = ids.read_stat(made.pid)
    assert (told.session, told.ppid) == (made.pid, os.getpid())
    assert made.start_ticks in deck.ticks(made)
    assert made.pidfd_inode == os.fstat(made.pidfd).st_ino
    assert Path(f"/proc/{made.pid}/cwd").readlink() == home / "data"


def test_it_has_nothing_but_its_streams_and_its_lock(deck: Deck) -> None:
    """Whatever we have open, block or ignore stays ours."""
    leaky = os.open(deck.workers, os.O_RDONLY)
    os.set_inheritable(leaky, True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    handled = _exchanged(_OF_THE_C_LIBRARY, (1).to_bytes(64, "little"))
    try:
        look = "ls -l /proc/$$/fd; grep Sig /proc/self/status; echo over"
        deck.start(bob=["sh", "-c", f"{look}; exec sleep 100"])
    finally:
        _exchanged(_OF_THE_C_LIBRARY, handled)
        signal.signal(signal.SIGUSR2, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(leaky)
    log = deck.workers / "bob" / "log" / "current"
    until(lambda: log.read_text().endswith("over\n"), "it has said everything")
    said = log.read_text()
    targets = sorted(line.split(" -> ")[1] for line in said.splitlines() if " -> " in line)
    assert targets == sorted(["/dev/null", str(log), str(log), str(deck.workers / "bob" / "lock")])
    masks = dict(line.split(":") for line in said.splitlines() if line.startswith("Sig"))
    assert int(masks["SigBlk"], 16) == 0
    assert int(masks["SigIgn"], 16) == 0


def test_a_refused_program_leaves_no_process_and_no_descriptor(deck: Deck) -> None:
    """The others of the call are started all the same."""
    children, descriptors = own_children(), set(os.listdir("/proc/self/fd"))  # noqa: PTH208

    refused, started, lost = deck.start(no=["no-such-program"], yes=["sleep", "100"], gone=["/", "x"])

    assert (native.STEPS[refused.step], refused.error) == deck.refused(errno.ENOENT)
    assert (native.STEPS[lost.step], lost.error) == deck.refused(errno.EACCES)
    assert own_children() - children == {str(started.pid)}
    assert set(os.listdir("/proc/self/fd")) - descriptors == {str(started.pidfd)}  # noqa: PTH208
    assert not flock.is_held(deck.workers / "no" / "lock")


def test_the_lock_of_a_refused_program_is_free_at_once(deck: Deck) -> None:
    """Those that are started beside it have a copy of its descriptor, and an exec would close that late."""
    for turn in range(50):
        beside = {f"b{turn}-{number}": ["sleep", "100"] for number in range(8)}
        told = deck.start(**{f"no{turn}": ["no-such-program"]}, **beside)
        assert not flock.is_held(deck.workers / f"no{turn}" / "lock")
        assert all(flock.is_held(deck.workers / name / "lock") for name in beside)
        assert [made.step < 0 for made in told] == [False] + [True] * len(beside)


def test_a_home_that_is_there_already_is_left_to_python(deck: Deck) -> None:
    """Whose it is has to be judged: nothing in it is opened, and a name that leads elsewhere is not followed."""
    (deck.workers / "old").mkdir()
    (deck.workers / "link").symlink_to(deck.workers / "old")

    told = deck.start(old=["sleep", "100"], link=["sleep", "100"])

    assert [(native.STEPS[made.step], made.error) for made in told] == [("home", errno.EEXIST)] * 2
    assert not list((deck.workers / "old").iterdir())


def test_many_in_one_call_are_who_they_are_said_to_be(deck: Deck) -> None:
    """More than are under way at once."""
    told = deck.start(**{f"w{number}": ["sleep", "100"] for number in range(40)})

    assert all(made.start_ticks in deck.ticks(made) for made in told)
    assert any(made.start_ticks >= 0 for made in told)
    assert len({made.pid for made in told}) == len(told)
    for number, made in enumerate(told):
        assert Path(f"/proc/{made.pid}/cwd").readlink() == deck.workers / f"w{number}" / "data"


def test_the_first_write_to_a_log_is_heard_of_whenever_it_comes(deck: Deck) -> None:
    """The watch was armed before its first instruction, and after the mark; of one that was refused none is left."""
    said, refused, silent = deck.start(a=["echo", "hello"], b=["no-such-program"], c=["sleep", "100"])
    log = deck.workers / "a" / "log" / "current"
    until(lambda: log.read_text() == f"{_MARK}hello\n", "it has said it")

    assert refused.watch == -1
    assert silent.watch >= 0
    heard = [one for one in inotify.heard(deck.ear) if one.mask & inotify.MODIFY]
    assert heard == [inotify.Heard(said.watch, inotify.MODIFY)]
    watched = Path(f"/proc/self/fdinfo/{deck.ear}").read_text().count("inotify wd:")
    assert watched == 1, "the silent one's, and no other"


def test_who_it_is_can_be_told_before_its_program_runs(deck: Deck) -> None:
    """And nothing but its process and its watch is left of the start when that is over, however often one asks."""
    descriptors = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    starts = deck.ready(alice=["sleep", "100"])

    starts.begin()
    [made] = starts.told()
    deck.born.append(made)
    told = ids.read_stat(made.pid)
    starts.end()
    starts.end()

    assert starts.told() == [made]
    assert told.ppid == os.getpid()
    assert made.start_ticks in deck.ticks(made)
    assert set(os.listdir("/proc/self/fd")) - descriptors == {str(made.pidfd)}  # noqa: PTH208
    assert flock.holders(deck.workers / "alice" / "lock") == [made.pid]


def test_who_is_refused_after_that_is_nobody(deck: Deck) -> None:
    """Its process is reaped, its lock is free, its watch is gone."""
    children, descriptors = own_children(), set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    starts = deck.ready(no=["no-such-program"])

    starts.begin()
    [begun] = starts.told()
    starts.end()
    [over] = starts.told()

    assert begun.step < 0 or begun == over
    assert (native.STEPS[over.step], over.error) == deck.refused(errno.ENOENT)
    assert over.watch == -1
    assert own_children() == children
    assert set(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208
    assert not flock.is_held(deck.workers / "no" / "lock")


def test_what_an_owner_has_open_is_not_copied_for_each_start(tmp_path: Path) -> None:
    """Processes are born from a table that ends with what they need: it may have thousands of pidfds above that."""
    if not posix.starts_first():
        pytest.skip("this C library has no contexts, or no posix_spawn that could do it")
    deck, other = Deck(tmp_path, posix.FirstStarts), os.pipe()
    high = fcntl.fcntl(other[1], fcntl.F_DUPFD_CLOEXEC, 900)
    os.close(other[1])
    try:
        threads = set(os.listdir("/proc/self/task"))  # noqa: PTH208
        deck.start(**{f"w{number}": ["sleep", "100"] for number in range(3)})
        assert set(os.listdir("/proc/self/task")) == threads  # noqa: PTH208
        os.write(high, b"still ours")
        os.close(high)
        assert os.read(other[0], 100) == b"still ours"
        assert os.read(other[0], 100) == b"", "nobody else has it open"
    finally:
        os.close(other[0])
        deck.close()


def test_a_word_with_a_nul_is_refused_before_anything_is_made(deck: Deck) -> None:
    """It would be cut there, and another program or argument be taken."""
    with pytest.raises(native.Refused):
        deck.start(alice=["sleep", "1\x0000"])
    assert not list(deck.workers.iterdir())


def _exchanged(number: int, action: bytes) -> bytes:
    """Tell the kernel what to do with a signal (one byte of 1: ignore it), and return what it did before."""
    call = _RT_SIGACTION.get(platform.machine())
    if call is None:
        return action
    before = ctypes.create_string_buffer(len(action))
    assert ctypes.CDLL(None).syscall(call, number, action, before, 8) == 0
    return before.raw
