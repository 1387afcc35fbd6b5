"""What holds for every test: its kind follows from its folder, and no process outlives the session.

Kinds (``unit kernel process crash feed browser docs``) are markers given by the folder, so ``-m "unit or kernel"``
works and nobody has to remember them. Tests run in the sorted order of their files.

The orphan check is the suite's own guarantee: when a session ends, no living process belongs to a state
directory that was made under this session's temporary directory. It reads ``/proc``: the environment tells the
worker (``TIDELOCK_COOKIE`` and ``TIDELOCK_DIR``), the command line tells the daemons and guardians. A process that
is just leaving is waited for on its pidfd; one that stays is ended and fails the session.
"""

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

KINDS = ("unit", "kernel", "process", "crash", "feed", "browser", "docs")
HERE = Path(__file__).parent
LEAVING_SECONDS = 10


def pytest_configure(config: pytest.Config) -> None:
    """Register the kinds, so that --strict-markers knows them."""
    for kind in KINDS:
        config.addinivalue_line("markers", f"{kind}: a test in tests/{kind}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its folder's kind, and sort the files; the order within a file stays as written."""
    for item in items:
        kind = item.path.relative_to(HERE).parts[0]
        if kind not in KINDS:
            raise pytest.UsageError(f"{item.path} is in none of tests/{{{','.join(KINDS)}}}")
        item.add_marker(kind)
    items.sort(key=lambda item: (KINDS.index(item.path.relative_to(HERE).parts[0]), str(item.path)))


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After the last test nothing runs that belongs to a state directory of this session."""
    base = str(tmp_path_factory.getbasetemp())
    yield
    staying = [(pid, who) for pid, who in _processes_of(base) if _stays(pid)]
    assert not staying, "processes outlived the test session (they were ended now):\n" + "\n".join(
        f"  pid {pid}: {who}" for pid, who in staying
    )


def _processes_of(base: str) -> list[tuple[int, str]]:
    """The living processes whose worker directory or command line is under ``base``, with their command."""
    found = []
    ours = {os.getpid(), os.getppid()}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in ours:
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it left while we looked, or is not ours to read
            continue
        by_cookie = any(line.startswith(b"TIDELOCK_COOKIE=") for line in environment) and any(
            line.startswith(b"TIDELOCK_DIR=" + base.encode()) for line in environment
        )
        if command and (by_cookie or base in command):
            found.append((int(entry.name), command))
    return found


def _stays(pid: int) -> bool:
    """Whether the process is alive after a fair time to leave; if so, it is ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        left = bool(select.select([pidfd], [], [], LEAVING_SECONDS)[0])
        if not left:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        left = True
    finally:
        os.close(pidfd)
    return not left
