"""The three stories that Everdeck was made for, told as their users saw them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from everdeck import Deck, Restart, State, Stop
from everdeck.kernel.identity import read_stat
from support.deck_owner import copies, owner
from support.waiting import until

# A bot that polls for ever, cares neither for its standard input nor for SIGTERM, and is found by its mark.
STUBBORN_BOT = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"


def _bot(mark: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", STUBBORN_BOT, mark]


def test_the_daemon_died_thirteen_times_and_one_bot_polls(tmp_path: Path) -> None:
    """Story 1: SIGKILL sends no SIGTERM and the bot is stubborn; still there is never a second bot."""
    mark = f"bot-{os.getpid()}-{tmp_path.name}"
    state = tmp_path / "state"
    for _ in range(13):
        with owner(state) as daemon:
            daemon.ask("start", "bot", _bot(mark), lifetime="bound", stop={"grace_seconds": 0.2})
            # Right after its exec a process has no command line yet: wait for one, never accept two.
            assert len(until(lambda: copies(mark))) == 1
            daemon.kill()
    until(lambda: copies(mark) == [], "every bot leaves though its daemon was killed and it does not listen")

    with Deck(state) as deck:
        assert deck.status("bot").state is State.RUNNING
        assert until(lambda: copies(mark)) == [deck.status("bot").pid]
        deck.stop("bot")
        assert copies(mark) == []


def test_a_deploy_empties_no_dict(tmp_path: Path) -> None:
    """Story 3: the manager is killed and started again; every user still runs, once, and can be stopped."""
    mark = str(50_000 + os.getpid())
    users = {f"user-{number}": ["sleep", f"{mark}.{number + 1}"] for number in range(5)}
    state = tmp_path / "state"
    with owner(state) as manager:
        pids = {name: manager.ask("start", name, command)["pid"] for name, command in users.items()}
        manager.kill()

    with Deck(state) as deck:
        shown = {status.name: status for status in deck.list()}
        assert {name: status.pid for name, status in shown.items()} == pids, "nobody is shown as stopped"
        assert all(status.adopted and status.state is State.RUNNING for status in shown.values())
        for name, command in users.items():
            assert deck.start(name, command).pid == pids[name], "start makes no second copy"
        for name in users:
            deck.stop(name)
        assert copies(f"sleep {mark}.") == [], "stop stops"


def test_a_zombie_does_not_make_stop_hang(tmp_path: Path) -> None:
    """Story 3: a worker that died and was not reaped by its parent is dead: it is restarted, and stop returns."""
    state = tmp_path / "state"
    # The first owner closes its deck but lives on, and never waits for its children: they stay zombies.
    code = (
        "import sys,json\nfrom everdeck import Deck\ndeck=Deck(sys.argv[1])\n"
        "print(deck.start('user',['sleep','100']).pid,flush=True)\ndeck.close()\nprint('closed',flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert parent.stdout.readline() == "closed\n"
            os.kill(pid, signal.SIGKILL)
            until(lambda: read_stat(pid).state == "Z", "its parent does not reap it")

            with Deck(state) as deck:
                status = deck.status("user")
                assert status.state is State.RUNNING
                assert status.pid != pid
                assert deck.stop("user").state is State.STOPPED
            assert read_stat(pid).state == "Z", "it was a zombie all the time"
        finally:
            parent.kill()


def test_a_worker_that_crashes_after_adoption_is_restarted_with_everything(tmp_path: Path) -> None:
    """Adopted, then killed: it comes back with its environment, its secrets and its history."""
    state = tmp_path / "state"
    told = tmp_path / "told"
    command = ["sh", "-c", f'echo "$COLOUR $(cat $CREDENTIALS_DIRECTORY/TOKEN)" >> {told}; exec sleep 1000']
    with owner(state) as manager:
        first = manager.ask(
            "start",
            "user",
            command,
            env={"COLOUR": "green"},
            secrets={"TOKEN": "s3cret"},
            restart={"backoff_seconds": 0},
        )["pid"]
        until(lambda: told.exists() and told.read_text().count("\n") == 1)
        manager.kill()

    with Deck(state) as deck:
        assert deck.status("user").adopted
        os.kill(first, signal.SIGKILL)
        until(lambda: deck.status("user").restarts == 1, "it is restarted")
        until(lambda: told.read_text() == "green s3cret\n" * 2, "with its environment and its secret")
        # Its new parent may reap late (or the kernel be older than 6.15): then how it ended is unknown, and said so.
        ended = next(event for event in deck.events() if event.kind in {"crashed", "exited"})
        assert (ended.kind, ended.detail["exit"]) in (
            ("crashed", {"kind": "killed", "signal": 9}),
            ("exited", {"kind": "unknown"}),
        )
        deck.stop("user")


def test_children_of_a_dead_leader_are_ended_before_the_restart(tmp_path: Path) -> None:
    """The leader crashes and leaves a child that holds the lock: the child is ended, then the worker starts again."""
    mark = f"{60_000 + os.getpid()}.5"
    with Deck(tmp_path / "state") as deck:
        script = f"setsid sleep {mark} & exec sleep 1000"
        deck.start("user", ["sh", "-c", script], restart=Restart(backoff_seconds=0), stop=Stop(grace_seconds=1))
        child = until(lambda: copies(f"sleep {mark}"))[0]
        pid = deck.status("user").pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

        until(lambda: deck.status("user").restarts == 1, "it is restarted")

        until(lambda: len(copies(f"sleep {mark}")) == 1)
        assert copies(f"sleep {mark}") != [child], "the old child is gone, the new life has its own"
        deck.stop("user")
        assert copies(f"sleep {mark}") == []
