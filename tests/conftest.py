"""What holds for every test: its kind follows from its folder, and no process outlives the session.

Kinds (``unit kernel process crash feed satellites browser hostile docs``) are markers given by the folder, so
``-m "unit or kernel"`` works and nobody has to remember them. Tests run in the sorted order of their files.

The orphan check is the suite's own guarantee: when a session ends, no living process belongs to a state
directory that was made under this session's temporary directory (``support.repo_processes`` says how that is seen).
A process that is just leaving is waited for; one that stays is ended and fails the session.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.repo_processes import end_all_under, leaves, processes_under

KINDS = (
    "unit", "kernel", "process", "crash", "feed", "satellites", "contract", "browser", "hostile", "kubernetes",
    "machine", "docs",
)  # fmt: skip
HERE = Path(__file__).parent
LEAVING_SECONDS = 10


def pytest_configure(config: pytest.Config) -> None:
    """Register the kinds, so that --strict-markers knows them; and be asked to leave as in a person's terminal.

    A shell that runs us in the background lets us ignore SIGINT and SIGQUIT, and every program of a test would
    inherit that.
    """
    for number, wanted in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, wanted)
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
    base = tmp_path_factory.getbasetemp()
    yield
    staying = [process for process in processes_under(base) if not leaves(process, LEAVING_SECONDS)]
    end_all_under(base)
    assert not staying, "processes outlived the test session (they were ended now):\n" + "\n".join(
        f"  pid {process.pid}: {process.command}" for process in staying
    )
