"""Inside somebody else's process: any thread, with or without a loop, forks, and nothing of the host is changed."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from everdeck import AsyncDeck, Deck, Event, EventKind, Restart, State
from support.repo_processes import end_all_under, own_children
from support.waiting import until

FOREVER = ["sleep", "1000"]


def test_any_thread_may_call_any_verb(tmp_path: Path) -> None:
    """Twenty threads start and stop their own worker at once; nobody's verb is lost."""
    failures: list[BaseException] = []

    with Deck(tmp_path / "state") as deck:

        def use(name: str) -> None:
            try:
                assert deck.start(name, FOREVER).state is State.RUNNING
                assert deck.stop(name).state is State.STOPPED
            except BaseException as err:  # noqa: BLE001 - told in the main thread
                failures.append(err)

        threads = [threading.Thread(target=use, args=(f"w{number}",)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(deck.list()) == 20


def test_the_same_worker_from_many_threads_is_started_once(tmp_path: Path) -> None:
    """Twenty threads start one name with one spec: one process, twenty equal answers."""
    pids: list[int | None] = []
    with Deck(tmp_path / "state") as deck:
        threads = [threading.Thread(target=lambda: pids.append(deck.start("one", FOREVER).pid)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(pids) == 20
        assert len(set(pids)) == 1
        deck.stop_all()


def test_it_works_inside_a_running_loop(tmp_path: Path) -> None:
    """The synchronous deck has a loop of its own; the asynchronous one uses the host's."""

    async def host() -> None:
        with Deck(tmp_path / "one") as deck:
            deck.start("a", FOREVER)
            deck.stop_all()
        async with AsyncDeck(tmp_path / "two") as other:
            await other.start("a", FOREVER)
            await other.stop_all()

    asyncio.run(host())


def test_the_host_keeps_its_signals_its_children_and_its_directory(tmp_path: Path) -> None:
    """No handler is installed, no foreign child is reaped, the working directory stays."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    cwd = Path.cwd()
    own = subprocess.Popen(["sh", "-c", "exit 5"])
    with Deck(tmp_path / "state") as deck:
        deck.start("a", ["true"], restart=Restart("never"))
        until(lambda: deck.status("a").state is State.EXITED)
        assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
        deck.stop_all()
    assert own.wait() == 5, "the host's child kept its exit status for the host"
    assert Path.cwd() == cwd


def test_a_host_that_ignores_sigchld_starts_many_short_lives(tmp_path: Path) -> None:
    """They are gone and reaped before anybody can look who they are: all are started, and nothing of them is left."""
    code = (
        "import signal,sys,time\nsignal.signal(signal.SIGCHLD,signal.SIG_IGN)\nfrom everdeck import *\n"
        "with Deck(sys.argv[1]) as deck:\n"
        "  started=deck.start_many({f'w{n}': ['sh','-c','setsid sleep 1000 & exit 0'] for n in range(20)},"
        " restart=Restart('never'))\n"
        "  while {s.state for s in deck.list()}!={'exited'}: time.sleep(0.01)\n"
        "  print(len(started), [len(deck.tree(s.name)) for s in started].count(0))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "s"], check=True, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.split() == ["20", "20"]
        assert end_all_under(tmp_path) == []
    finally:
        end_all_under(tmp_path)


def test_a_host_that_ignores_sigchld_still_learns_of_deaths(tmp_path: Path) -> None:
    """The kernel reaps for such a host; deaths come from pidfds all the same."""
    code = (
        "import signal,sys,time\nsignal.signal(signal.SIGCHLD,signal.SIG_IGN)\nfrom everdeck import *\n"
        "with Deck(sys.argv[1]) as deck:\n"
        "  deck.start('a',['sh','-c','exit 3'],restart=Restart('never'))\n"
        "  while deck.status('a').state!='exited': time.sleep(0.01)\n"
        "  print(deck.status('a').exit)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "s"], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() in {"exit code 3", "unknown"}


def test_a_forked_copy_of_an_owner_is_a_member(tmp_path: Path) -> None:
    """At its first verb the copy asks the owner; it never owns the deck, and the parent's deck is as before."""
    state = tmp_path / "state"
    with Deck(state) as deck:
        deck.start("a", FOREVER)
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                deck.start("b", FOREVER)
                seen = [deck.abilities().kind, deck.owner_pid, deck.status("a").pid, len(deck.members())]
                deck.close()
                os.write(write_fd, json.dumps(seen).encode())
            finally:
                os._exit(0)
        os.close(write_fd)
        os.waitpid(pid, 0)
        said = json.loads(os.read(read_fd, 4096))
        os.close(read_fd)
        assert said == ["member", os.getpid(), deck.status("a").pid, 2]
        assert deck.status("b").state is State.RUNNING
        assert deck.abilities().kind == "owner"
        deck.stop_all()


def test_an_owner_with_loop_and_listeners_is_whole_after_many_forks(tmp_path: Path) -> None:
    """Copies that use the deck and end take nothing from the parent: its deaths, events and verbs go on."""
    with Deck(tmp_path / "state") as deck:
        heard: list[Event] = []
        deck.on_event(heard.append)
        for number in range(5):
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    deck.start(f"w{number}", ["sh", "-c", "exit 0"], restart=Restart("never"))
                    gc.collect()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        until(lambda: {status.state for status in deck.list()} == {State.EXITED})
        until(lambda: [event.kind for event in heard].count(EventKind.EXITED) == 5)


def test_a_fork_that_outlives_the_owner_does_not_keep_the_deck(tmp_path: Path) -> None:
    """A pre-forking server's children must not hold the deck's lock when their parent dies."""
    code = (
        "import os,sys,time\nfrom everdeck import Deck\ndeck=Deck(sys.argv[1])\npid=os.fork()\n"
        "if pid==0:\n  print('forked',os.getpid(),flush=True)\n  time.sleep(100)\nos.wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "state")], stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdout is not None
        forked = int(host.stdout.readline().split()[1])
        try:
            host.kill()
            host.wait()
            with Deck(tmp_path / "state") as deck:
                assert deck.list() == []
        finally:
            os.kill(forked, signal.SIGKILL)


def test_opening_in_a_fork_of_an_opened_host_works(tmp_path: Path) -> None:
    """The child may open a deck of its own."""
    with Deck(tmp_path / "parent"):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with Deck(tmp_path / "child") as own:
                    own.start("a", ["true"], restart=Restart("never"))
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def test_a_quiet_deck_does_not_wake_up(tmp_path: Path) -> None:
    """With workers that just run there is no timer, no tick: the kernel switches to no thread of the owner."""
    with Deck(tmp_path / "state") as deck:
        for number in range(10):
            deck.start(f"w{number}", FOREVER)
        until(lambda: all(status.containment == deck.list()[0].containment for status in deck.list()))
        threading.Event().wait(1.5)  # the last batch of cgroup moves and log looks is over

        def switches() -> dict[str, int]:
            counts = {}
            for task in Path("/proc/self/task").iterdir():
                if int(task.name) != os.getpid() and "everdeck" in (task / "comm").read_text() + _names().get(
                    task.name, ""
                ):
                    text = (task / "status").read_text()
                    counts[task.name] = int(text.split("voluntary_ctxt_switches:")[1].split()[0])
            return counts

        before = switches()
        assert before, "the deck's own thread is among those that are watched"
        threading.Event().wait(2.0)
        assert switches() == before
        deck.stop_all()


def _names() -> dict[str, str]:
    return {str(thread.native_id): thread.name for thread in threading.enumerate()}


def test_descriptors_do_not_leak_over_many_lives(tmp_path: Path) -> None:
    """A hundred starts and stops, and the owner has as many descriptors as before."""
    with Deck(tmp_path / "state") as deck:
        deck.start("w", FOREVER)
        deck.stop("w")
        before = len(list(Path("/proc/self/fd").iterdir()))
        children = own_children()
        for _ in range(100):
            deck.start("w", FOREVER)
            deck.stop("w")
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert own_children() == children, "no zombie is left"
