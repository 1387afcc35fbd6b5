"""A worker leaves when its lifeline closes: under every event loop, under none, and however it waits."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.child_program import SOURCE, Program

ASYNCIO_POLL = """
    import asyncio, sys
    from everdeck.child import lifeline

    async def poll():
        reader, writer = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
        try:
            writer.write(b"getUpdates")
            await reader.read()
        finally:
            writer.close()

    async def work():
        async with lifeline() as life:
            await poll()
        print("farewell", life.reason, flush=True)

    asyncio.run(work())
"""
ANYIO_ON_TRIO_POLL = """
    import anyio, sys
    from everdeck.child import lifeline

    async def poll():
        async with await anyio.connect_tcp("127.0.0.1", int(sys.argv[1])) as stream:
            await stream.send(b"getUpdates")
            await stream.receive()

    async def work():
        async with lifeline() as life:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(poll)
        print("farewell", life.reason, flush=True)

    anyio.run(work, backend="trio")
"""
ANYIO_ON_ASYNCIO_POLL = ANYIO_ON_TRIO_POLL.replace('backend="trio"', 'backend="asyncio"')
TRIO_POLL = """
    import sys, trio
    from everdeck.child import lifeline

    async def work():
        async with lifeline() as life:
            stream = await trio.open_tcp_stream("127.0.0.1", int(sys.argv[1]))
            await stream.send_all(b"getUpdates")
            await stream.receive_some()
        await stream.aclose()
        print("farewell", life.reason, flush=True)

    trio.run(work)
"""
SCRIPT_POLL = """
    import socket, sys
    from everdeck.child import lifeline

    with lifeline() as life, socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as server:
        server.sendall(b"getUpdates")
        server.recv(1)
    print("farewell", life.reason, flush=True)
"""
THREAD_POLL = """
    import socket, sys, threading
    from everdeck.child import lifeline

    def poll(life):
        with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as server:
            server.sendall(b"getUpdates")
            life.wait()

    with lifeline(interrupt=False) as life:
        worker = threading.Thread(target=poll, args=(life,))
        worker.start()
        worker.join()
    print("farewell", life.reason, flush=True)
"""
MAIN_POLL = """
    import asyncio, sys
    from everdeck.child import main

    async def work():
        reader, writer = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
        try:
            writer.write(b"getUpdates")
            await reader.read()
        finally:
            writer.close()

    print("farewell", main(work), flush=True)
"""
WAYS = {
    "asyncio": ASYNCIO_POLL,
    "trio": TRIO_POLL,
    "anyio on trio": ANYIO_ON_TRIO_POLL,
    "anyio on asyncio": ANYIO_ON_ASYNCIO_POLL,
    "plain script": SCRIPT_POLL,
    "threads": THREAD_POLL,
    "main": MAIN_POLL,
}


class DeafServer:
    """A long poll's other side: it takes the request and never answers."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(30)
        self.port = str(self.listener.getsockname()[1])
        self.polls: list[socket.socket] = []

    def request(self) -> None:
        """Wait until a poll is in flight."""
        connection, _ = self.listener.accept()
        self.polls.append(connection)
        assert connection.recv(100) == b"getUpdates"


@pytest.fixture
def server() -> Iterator[DeafServer]:
    """A server that holds every poll open."""
    deaf = DeafServer()
    yield deaf
    for connection in [*deaf.polls, deaf.listener]:
        connection.close()


@pytest.mark.parametrize("way", WAYS)
def test_an_inflight_long_poll_ends_with_the_parent(way: str, server: DeafServer) -> None:
    """The lifeline closes: the poll in flight is cancelled, the farewell runs, the process leaves with code 0."""
    with Program(WAYS[way], server.port) as program:
        server.request()
        program.cut_lifeline()
        assert program.line() == ("farewell None" if way == "main" else "farewell parent-death")
        assert program.ended() == 0
        assert program.errors() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("way", ["asyncio", "trio", "plain script", "threads"])
def test_a_signal_ends_the_body_the_same_way(way: str, number: signal.Signals, server: DeafServer) -> None:
    """SIGTERM and SIGINT are told apart by the reason and end the body like the parent's death does."""
    with Program(WAYS[way], server.port) as program:
        server.request()
        program.signal(number)
        assert program.line() == f"farewell {number.name}"
        assert program.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_the_main_thread_sleeps_through_is_heard(number: signal.Signals, server: DeafServer) -> None:
    """The kernel gave it to another thread, so it interrupted nothing; the poll in flight is ended all the same."""
    source = f"""
        import signal, socket, sys, threading
        from everdeck.child import lifeline

        def take_it():
            server_is_polled.wait()
            signal.pthread_kill(threading.get_ident(), signal.{number.name})
            threading.Event().wait()

        server_is_polled = threading.Event()
        threading.Thread(target=take_it, daemon=True).start()
        with lifeline() as life:
            with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as poll:
                poll.sendall(b"getUpdates")
                threading.Timer(0.2, server_is_polled.set).start()
                poll.recv(100)
        print("farewell", life.reason, flush=True)
    """
    with Program(source, server.port) as program:
        server.request()
        assert program.line() == f"farewell {number.name}"
        assert program.ended() == 0
        assert program.errors() == ""


@pytest.mark.parametrize("how", ["a signal", "the parent's death"])
def test_an_interruption_that_a_finaliser_swallowed_is_said_again(how: str) -> None:
    """What a handler raises while a destructor runs is dropped by Python; the body is interrupted all the same."""
    source = """
        import os, signal, sys, time
        from everdeck.child import lifeline

        class Closing:
            def __del__(self):
                print("closing", flush=True)
                time.sleep(1000)

        with lifeline() as life:
            Closing()
            signal.pause()
        print("farewell", life.reason, flush=True)
    """
    with Program(source) as program:
        assert program.line() == "closing"
        if how == "a signal":
            program.signal(signal.SIGTERM)
        else:
            program.cut_lifeline()
        assert program.line() == ("farewell SIGTERM" if how == "a signal" else "farewell parent-death")
        assert program.ended() == 0
        assert program.errors() == ""


def test_a_wait_that_sleeps_through_a_signal_is_ended() -> None:
    """``life.wait()`` with ``interrupt=False``: the signal went to another thread, and the wait hears of it."""
    source = """
        import signal, threading
        from everdeck.child import lifeline

        def take_it():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            threading.Event().wait()

        with lifeline(interrupt=False) as life:
            threading.Timer(0.2, threading.Thread(target=take_it, daemon=True).start).start()
            life.wait()
        print("farewell", life.reason, flush=True)
    """
    with Program(source) as program:
        assert program.line() == "farewell SIGTERM"
        assert program.ended() == 0


def test_a_signal_after_the_parents_death_harms_nothing() -> None:
    """The thread that listened is gone; a SIGTERM in the farewell is neither an error nor, with SIGPIPE, an end."""
    source = """
        import os, signal, sys
        from everdeck.child import lifeline

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with lifeline(linger_seconds=None) as life:
            try:
                print("in", flush=True)
                signal.pause()
            finally:
                threads = len(os.listdir("/proc/self/task"))
                while threads > 1:
                    threads = len(os.listdir("/proc/self/task"))
                os.kill(os.getpid(), signal.SIGTERM)
                print("still here", flush=True)
        print("farewell", life.reason, flush=True)
    """
    with Program(source) as program:
        assert program.line() == "in"
        program.cut_lifeline()
        assert program.line() == "still here"
        assert program.line() == "farewell parent-death"
        assert program.ended() == 0
        assert program.errors() == ""


@pytest.mark.parametrize("way", ["asyncio", "plain script"])
def test_the_process_is_gone_within_100_ms(way: str, server: DeafServer) -> None:
    """From end-of-file to the end of the process, interpreter teardown included: the best of five is under 100 ms.

    Where an interpreter that does nothing takes longer than 25 ms to come and go, it is four times that.
    """
    took, bare = [], []
    for _ in range(5):
        with Program(WAYS[way], server.port) as program:
            server.request()
            cut_at = program.cut_lifeline()
            program.ended()
            took.append(time.monotonic() - cut_at)
        began = time.monotonic()
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True, timeout=60)
        bare.append(time.monotonic() - began)
    print(f"{way}: " + ", ".join(f"{seconds * 1000:.0f} ms" for seconds in took))
    assert min(took) < max(0.1, 4 * min(bare))
    assert max(took) < 30


def test_a_parent_that_died_before_the_body_is_noticed(server: DeafServer) -> None:
    """Dead before we looked is dead: the body is ended at its first wait."""
    source = """
        import asyncio, sys
        from everdeck.child import lifeline
        sys.stdin.read()                       # returns when the parent is gone
        async def work():
            async with lifeline() as life:
                await asyncio.Event().wait()
            print("farewell", life.reason, flush=True)
        asyncio.run(work())
    """
    with Program(source) as program:
        program.cut_lifeline()
        assert program.line() == "farewell parent-death"
        assert program.ended() == 0


STUBBORN = {
    "a blocked loop": """
        import asyncio, time
        from everdeck.child import lifeline

        async def work():
            async with lifeline(linger_seconds=0.2):
                print("in", flush=True)
                time.sleep(60)

        asyncio.run(work())
    """,
    "a thread that asyncio waits for": """
        import asyncio, time
        from everdeck.child import lifeline

        async def work():
            async with lifeline(linger_seconds=0.2):
                print("in", flush=True)
                await asyncio.to_thread(time.sleep, 60)

        asyncio.run(work())
    """,
    "a farewell that hangs": """
        import time
        from everdeck.child import lifeline

        with lifeline(linger_seconds=0.2):
            try:
                print("in", flush=True)
                time.sleep(60)
            finally:
                time.sleep(60)
    """,
}


@pytest.mark.parametrize("kind", STUBBORN)
def test_a_body_that_cannot_leave_is_ended(kind: str) -> None:
    """After the parent's death nobody escalates, so the process ends itself after its linger time."""
    with Program(STUBBORN[kind]) as program:
        assert program.line() == "in"
        program.cut_lifeline()
        assert program.ended() == 70


def test_the_lifeline_is_seen_though_the_program_closed_its_stdin() -> None:
    """The watch has a copy of its own; what the program does with its stdin is its business."""
    source = """
        import sys, os
        from everdeck.child import lifeline
        with lifeline() as life:
            os.close(0)
            print("in", flush=True)
            life.wait()
        print("farewell", life.reason, flush=True)
    """
    with Program(source) as program:
        assert program.line() == "in"
        program.cut_lifeline()
        assert program.line() == "farewell parent-death"
        assert program.ended() == 0


def test_what_the_parent_writes_is_left_unread() -> None:
    """The lifeline is never read from: a program whose stdin carries data still gets all of it."""
    source = """
        import os
        from everdeck.child import lifeline
        with lifeline():
            print("in", flush=True)
            print(os.read(0, 100).decode(), flush=True)
    """
    with Program(source) as program:
        assert program.line() == "in"
        os.write(program._write_fd, b"for you")
        assert program.line() == "for you"
        assert program.ended() == 0


def test_outside_everdeck_nothing_happens(server: DeafServer) -> None:
    """Without the variable an end-of-file on stdin means nothing, notify says False, and SIGTERM still works."""
    source = """
        import os
        from everdeck.child import lifeline, notify, on_parent_death, watchdog_thread, watchdog_seconds
        on_parent_death(lambda: print("wrong", flush=True))
        watchdog_thread()()
        with lifeline() as life:
            print(life.present, notify("READY=1"), watchdog_seconds(), flush=True)
            os.read(0, 1)
            print("read", flush=True)
            life.wait()
        print("farewell", life.reason, flush=True)
    """
    with Program(source, has_lifeline=False) as program:
        assert program.line() == "False False None"
        program.cut_lifeline()
        assert program.line() == "read"
        program.signal(signal.SIGTERM)
        assert program.line() == "farewell SIGTERM"
        assert program.ended() == 0


@pytest.mark.parametrize("value", ["", "seven", "-1", "99", "99999999999999999999", "1"])
def test_a_variable_that_names_no_pipe_is_no_lifeline(value: str) -> None:
    """A grandchild inherits the variable but not the pipe; a bad number is no reason to die."""
    source = "import sys\nfrom everdeck.child import lifeline\nwith lifeline() as life: pass\nsys.exit(life.present)"
    with Program(source, env={"EVERDECK_LIFELINE_FD": value}, has_lifeline=False) as program:
        # The number 1 is a pipe here: stdout. Watching a pipe's read-less end is harmless too.
        assert program.ended() in ({0, 1} if value == "1" else {0})


def test_on_parent_death_calls_once_and_can_be_taken_back() -> None:
    """Each promise is called once, from its own thread; one that was taken back is not."""
    source = """
        import threading
        from everdeck.child import on_parent_death
        called = threading.Event()
        on_parent_death(lambda: (print("called", flush=True), called.set()))
        on_parent_death(lambda: print("wrong", flush=True))()
        print("in", flush=True)
        called.wait()
    """
    with Program(source) as program:
        assert program.line() == "in"
        program.cut_lifeline()
        assert program.line() == "called"
        assert program.ended() == 0
        assert program.process.stdout is not None
        assert program.process.stdout.read() == b""


def test_the_programs_own_handlers_come_back() -> None:
    """After the block SIGTERM and SIGINT are what they were before, and no descriptor stays open."""
    source = """
        import os, signal
        from everdeck.child import lifeline
        mine = lambda *_: None
        signal.signal(signal.SIGTERM, mine)
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(20):
            with lifeline():
                assert signal.getsignal(signal.SIGTERM) != mine
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        while sorted(os.listdir("/proc/self/fd")) != before:      # the threads close theirs when they leave
            pass
        print("clean", flush=True)
    """
    with Program(source) as program:
        assert program.line() == "clean"
        assert program.ended() == 0


def test_a_cancellation_from_elsewhere_is_not_swallowed() -> None:
    """Only the lifeline's own cancellation ends at the block; a timeout around it still fires."""
    source = """
        import asyncio
        from everdeck.child import lifeline

        async def work():
            try:
                async with asyncio.timeout(0.05):
                    async with lifeline():
                        await asyncio.Event().wait()
            except TimeoutError:
                print("timeout", flush=True)
            async with lifeline() as life:
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)                 # the late cancellation must not arrive here
            print("after", life.reason, flush=True)

        import os, signal
        asyncio.run(work())
    """
    with Program(source) as program:
        assert program.line() == "timeout"
        assert program.line() == "after SIGTERM"
        assert program.ended() == 0
        assert program.errors() == ""


def test_a_second_interrupt_does_not_wait_for_the_farewell() -> None:
    """The first Ctrl-C asks, the second insists."""
    source = """
        import time
        from everdeck.child import lifeline
        with lifeline():
            try:
                print("in", flush=True)
                time.sleep(60)
            finally:
                print("farewell", flush=True)
                time.sleep(60)
    """
    with Program(source) as program:
        assert program.line() == "in"
        program.signal(signal.SIGINT)
        assert program.line() == "farewell"
        program.signal(signal.SIGINT)
        assert program.ended() == -signal.SIGINT


def test_importing_the_child_loads_no_event_loop_and_no_database() -> None:
    """A plain script pays for what it uses: neither asyncio nor threading nor sqlite3 nor the deck."""
    source = """
        import sys
        import everdeck.child
        heavy = {"asyncio", "threading", "sqlite3", "socket", "msgspec", "psutil"}
        print(sorted(m for m in sys.modules if m in heavy or m.startswith("everdeck.")), flush=True)
    """
    with Program(source) as program:
        assert program.line() == "['everdeck.child']"


def test_the_file_works_when_copied_alone(tmp_path: Path) -> None:
    """child.py is one file: copied next to a script, it needs nothing else of the package."""
    shutil.copy(Path(SOURCE) / "everdeck" / "child.py", tmp_path / "mychild.py")
    source = """
        import sys
        sys.path[:] = [sys.argv[1], *(p for p in sys.path if "everdeck" not in p and not p.endswith("src"))]
        from mychild import lifeline
        with lifeline() as life:
            print("in", flush=True)
            life.wait()
        print([m for m in sys.modules if m.startswith("everdeck")], flush=True)
    """
    with Program(source, str(tmp_path)) as program:
        assert program.line() == "in"
        program.cut_lifeline()
        assert program.line() == "[]"
        assert program.ended() == 0
