"""Every verb of the deck, from a caller's side."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from everdeck import (
    AsyncDeck,
    Deck,
    Exited,
    Health,
    Limits,
    LimitUnavailable,
    Log,
    NameRefused,
    Restart,
    Secret,
    SpecChanged,
    SpecError,
    State,
    Stop,
    UnknownWorker,
    WorkerFailed,
    WorkerSpec,
)
from everdeck.errors import DeckClosed, DeckOwned, LockConflict, ResourceExhausted, SpawnFailed
from everdeck.kernel import flock, native, spawn
from everdeck.kernel import identity as ids
from everdeck.logs import reader as logreader
from everdeck.model import Event, Identity
from support.waiting import until

FOREVER = ["sleep", "1000"]
_listeners: list[list[str]] = []


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if _listeners and event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/fs/cgroup/")):
        _listeners[-1].append(str(arguments[0]))


sys.addaudithook(_hear)


@contextlib.contextmanager
def opened_in_proc() -> Iterator[list[str]]:
    """The files of the kernel that this process opens meanwhile."""
    _listeners.append([])
    try:
        yield _listeners[-1]
    finally:
        _listeners.pop()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory that does not exist yet."""
    return tmp_path / "state"


def test_start_returns_a_running_worker(state: Path) -> None:
    """Its program has been exec'ed, in its own directory, and everything on disk is closed to others."""
    with Deck(state) as deck:
        status = deck.start("alice", FOREVER, env={"TZ": "UTC"})
        assert status.state == "running"
        assert status.pid is not None
        assert Path(f"/proc/{status.pid}/cwd").readlink() == state / "workers" / "alice" / "data"
        assert state.stat().st_mode & 0o777 == 0o700
        names = {entry.name for entry in state.iterdir()}
        assert {"deck.lock", "deck.db", "workers"} <= names
        assert {"lock", "log", "data"} <= {entry.name for entry in (state / "workers" / "alice").iterdir()}
        deck.stop_all()


def test_a_list_does_not_wait_long_for_what_was_measured_before(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes for ever, as with thousands: the list tells what was measured last, and reads no /proc."""

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start_many({f"w{number}": FOREVER for number in range(3)})
            before = {status.name: status.rss_bytes for status in await deck.list()}
            assert all(before.values())

            async def for_ever(*_: object) -> None:
                await asyncio.Event().wait()

            monkeypatch.setattr("everdeck.deck.owner.RECENT_SECONDS", 0.0)
            monkeypatch.setattr("everdeck.deck.owner.Owner._measure", for_ever)
            with opened_in_proc() as opened:
                assert {status.name: status.rss_bytes for status in await deck.list()} == before
            # Whoever joined its cgroup after its birth (without the C side) is looked for there each time.
            assert not opened or not native.available()
            await deck.stop_all()

    asyncio.run(scenario())


def test_a_glance_at_everybody_measures_nobody(state: Path) -> None:
    """It tells what a list tells but for uptime, cpu and memory, asks /proc nothing, and sees each change at once."""
    moving = {"uptime_seconds": None, "cpu_percent": None, "rss_bytes": None}

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            await deck.start_many({f"w{number}": FOREVER for number in range(20)})
            everybody = await deck.list()
            with opened_in_proc() as opened:
                glanced = await deck.glance()
            assert not opened
            assert glanced == [replace(status, **moving) for status in everybody]
            with opened_in_proc() as opened:
                again = await deck.list()
            assert not opened, "measured within the last second"
            assert again[0].rss_bytes == everybody[0].rss_bytes

            with opened_in_proc() as opened:
                await deck.status("w3")
            assert opened, "one worker is measured when it is asked for"
            await deck.stop("w3")
            told = {status.name: status for status in await deck.glance()}
            assert told["w3"].state is State.STOPPED
            assert told["w3"].pid is None
            assert "w3" not in await deck.usage()
            await deck.remove("w3")
            assert "w3" not in {status.name for status in await deck.glance()}
            fresh = await deck.start("w3", FOREVER)
            assert fresh.pid in {status.pid for status in await deck.glance()}
            await deck.remove("w4")
            await deck.start("x4", FOREVER)  # as many as before, and not the same ones
            assert [status.name for status in await deck.glance()] == sorted({*told, "x4"} - {"w4"})
            assert "w3" in await deck.usage()
            await deck.stop_all()

    asyncio.run(scenario())


def test_many_are_started_together(state: Path) -> None:
    """Each is as a start of its own would leave it; more than one group of them, and those that run already stay."""
    with Deck(state) as deck:
        first = deck.start("w0", FOREVER, env={"A": "b"})
        told: list[str] = []
        wanted = {f"w{number}": FOREVER for number in range(150)}
        found = deck.start_many(wanted, progress=lambda name, _: told.append(name), env={"A": "b"})
        assert [status.name for status in found] == list(wanted)
        assert told == [*list(wanted)[1:], "w0"], "who runs already keeps nobody waiting"
        assert found[0].pid == first.pid
        assert {status.state for status in found} == {State.RUNNING}
        pids = {status.pid for status in found}
        assert len(pids) == 150
        assert [event.worker for event in deck.events() if event.kind == "started"] == list(wanted)
        for name in ("w1", "w149"):
            assert flock.is_held(state / "workers" / name / "lock")
            assert deck.spec(name).env == {"A": "b"}
        deck.stop_all()
        again = deck.start_many(dict.fromkeys(wanted))
        assert {status.state for status in again} == {State.RUNNING}
        assert not pids & {status.pid for status in again}
        deck.stop_all()


def test_of_many_each_has_its_own_failure(state: Path) -> None:
    """One that cannot be executed, one that is unknown and one that has changed do not keep the others from it."""
    with Deck(state) as deck:
        changed = deck.start("changed", FOREVER)
        told: dict[str, object] = {}
        with pytest.raises(ExceptionGroup, match="3 of 5 workers could not be started") as caught:
            deck.start_many(
                {"a": FOREVER, "broken": ["/no/such/program"], "nobody": None, "changed": ["sleep", "99"], 7: FOREVER},
                progress=told.__setitem__,
            )
        assert [type(error) for error in caught.value.exceptions] == [SpawnFailed, UnknownWorker, SpecChanged]
        assert caught.value.exceptions[0].__notes__ == ["while starting worker 'broken'"]
        assert list(told) == ["a", "broken", "nobody", "7", "changed"]
        assert {status.name: status.state for status in deck.list()} == {
            "7": State.RUNNING,
            "a": State.RUNNING,
            "changed": State.RUNNING,
        }
        assert deck.status("changed").pid == changed.pid
        assert not (state / "workers" / "broken").exists()
        deck.stop_all()


def test_many_are_checked_before_any_is_started(state: Path) -> None:
    """A name that is no name, a name twice, a field that is none: nothing was written."""
    with Deck(state) as deck:
        with pytest.raises(NameRefused):
            deck.start_many({"a": FOREVER, "../b": FOREVER})
        with pytest.raises(SpecError, match="each name once"):
            deck.start_many({"7": FOREVER, 7: FOREVER})
        with pytest.raises(SpecError, match="colour"):
            deck.start_many({"a": FOREVER}, colour="red")
        with pytest.raises(SpecError, match="a command, when other fields are given"):
            deck.start_many({"a": None}, env={"A": "b"})
        assert deck.start_many({}) == []
        assert deck.list() == []
        assert list((state / "workers").iterdir()) == []


def test_nobody_of_many_waits_for_a_slow_one(state: Path) -> None:
    """One worker is being stopped and takes its time, another has to be replaced: the others are started meanwhile."""
    slow = ["bash", "-c", "trap '' TERM; echo deaf; while :; do sleep 1000 & wait; done"]
    with Deck(state) as deck:
        for name in ("stopping", "replaced"):
            deck.start(name, slow, stop=Stop(grace_seconds=2))
        until(lambda: all("deaf" in deck.logs(name) for name in ("stopping", "replaced")))
        stop = threading.Thread(target=deck.stop, args=["stopping"])
        stop.start()
        until(lambda: deck.status("stopping").state is State.STOPPING)
        told: list[str] = []
        wanted = {"stopping": FOREVER, "replaced": FOREVER, "a": FOREVER, "b": FOREVER}
        deck.start_many(wanted, replace=True, progress=lambda name, _: told.append(name))
        assert told[:2] == ["a", "b"]
        assert set(told[2:]) == {"stopping", "replaced"}
        assert {status.state for status in deck.list()} == {State.RUNNING}
        stop.join()
        deck.stop_all()


def test_many_leave_the_loop_to_others(state: Path) -> None:
    """Workers that speak while many others are being started are heard: the loop is never away for long."""
    code = "from everdeck.child import notify; import time; notify('READY=1'); time.sleep(1000)"

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            turns = 0

            async def count_turns() -> None:
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1

            counting = asyncio.ensure_future(count_turns())
            await asyncio.sleep(0)
            before = turns
            command = [sys.executable, "-c", code]
            await deck.start_many(
                {f"w{n}": command for n in range(30)}, health=Health(notify=True), limits=Limits(nice=1)
            )
            assert turns - before >= 2, "a start through the launcher takes a Python's start: thirty are not one go"
            counting.cancel()
            ready = set()
            async with asyncio.timeout(60):
                async for event in deck.follow(after=0):
                    if event.kind == "ready":
                        ready.add(event.worker)
                        if len(ready) == 30:
                            break
            await deck.stop_all()

    asyncio.run(scenario())


def test_a_worker_that_cannot_be_identified_leaves_nobody(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its tree nothing stays, its lock is free, and the others of its group run."""
    identity_of = ids.identity_of
    refused = []

    def refuse_the_first(pidfd: int, pid: int) -> Identity:
        if not refused:
            refused.append(pid)
            raise ResourceExhausted("no descriptor is left")
        return identity_of(pidfd, pid)

    monkeypatch.setattr(ids, "identity_of", refuse_the_first)
    monkeypatch.setattr(spawn, "identity_of_first", lambda _: None)  # nor was it told at its birth
    tree = ["sh", "-c", "setsid sleep 1000 & sleep 1000 & echo forked; wait"]
    with Deck(state) as deck:
        with pytest.raises(ExceptionGroup, match="1 of 20 workers"):
            deck.start_many({f"w{number}": tree for number in range(20)})
        assert "w0" not in {status.name for status in deck.list()}
        assert not flock.is_held(state / "workers" / "w0" / "lock")
        assert len(deck.list()) == 19
        assert deck.start("w0", FOREVER).state is State.RUNNING
        deck.stop_all()


def test_a_text_without_an_encoding_is_refused(state: Path) -> None:
    """A lone surrogate can be neither an argument nor a variable nor a file; nothing was written."""
    with Deck(state) as deck:
        for fields in ({"env": {"A": "\ud800"}}, {"secrets": {"A": "\udfff"}}, {"labels": {"a": "\ud800"}}):
            with pytest.raises(SpecError, match="surrogate"):
                deck.start("a", FOREVER, **fields)
        with pytest.raises(SpecError, match="surrogate"):
            deck.start("a", ["sleep", "\udc80"])
        assert deck.list() == []


def test_start_is_idempotent_and_refuses_another_spec(state: Path) -> None:
    """The same spec: the same process. Another one: an error that names the fields, unless replace is asked for."""
    with Deck(state) as deck:
        first = deck.start("alice", FOREVER, env={"A": "1"})
        assert deck.start("alice", FOREVER, env={"A": "1"}).pid == first.pid
        assert deck.start("alice").pid == first.pid
        with pytest.raises(SpecChanged, match="env"):
            deck.start("alice", FOREVER, env={"A": "2"})
        with pytest.raises(SpecChanged, match="secrets"):
            deck.start("alice", FOREVER, env={"A": "1"}, secrets={"T": "x"})
        assert deck.status("alice").pid == first.pid
        second = deck.start("alice", FOREVER, env={"A": "2"}, replace=True)
        assert second.pid != first.pid
        deck.stop_all()


def test_a_changed_secret_value_is_a_changed_spec(state: Path) -> None:
    """The registry does not hold the value, and still a new value is not overlooked."""
    with Deck(state) as deck:
        deck.start("alice", FOREVER, secrets={"T": "one"})
        deck.start("alice", FOREVER, secrets={"T": "one"})
        with pytest.raises(SpecChanged, match="secrets"):
            deck.start("alice", FOREVER, secrets={"T": "two"})
        deck.start("alice", FOREVER, secrets={"T": "two"}, replace=True)
        assert (state / "workers/alice/secrets/T").read_text() == "two"
        deck.stop_all()


def test_a_worker_that_is_replaced_keeps_no_secret_that_it_no_longer_has(state: Path) -> None:
    """Also when it has none any more."""
    with Deck(state) as deck:
        deck.start("alice", FOREVER, secrets={"ONE": "1", "TWO": "2"})
        deck.start("alice", FOREVER, secrets={"TWO": "2"}, replace=True)
        assert [path.name for path in (state / "workers/alice/secrets").iterdir()] == ["TWO"]
        deck.start("alice", FOREVER, replace=True)
        assert list((state / "workers/alice/secrets").iterdir()) == []
        deck.stop_all()


def test_secrets_reach_the_worker_and_nobody_else(state: Path) -> None:
    """A 0600 file in $CREDENTIALS_DIRECTORY, or env if asked; not in the registry, events, status or command line."""
    with Deck(state) as deck:
        command = ["sh", "-c", "echo $(cat $CREDENTIALS_DIRECTORY/FILE); echo $ENV; exec sleep 1000"]
        deck.start("alice", command, secrets={"FILE": "in-a-file", "ENV": Secret("in-env", env=True)})
        until(lambda: {"in-a-file", "in-env"} <= set(deck.logs("alice")))
        path = state / "workers/alice/secrets/FILE"
        assert path.stat().st_mode & 0o777 == 0o600
        assert deck.spec("alice").secrets["FILE"].value is None
        assert "in-a-file" not in repr(deck.list()) + repr(deck.events()) + repr(deck.spec("alice"))
        deck.stop_all()
    for file in state.glob("deck.db*"):
        assert b"in-a-file" not in file.read_bytes()
        assert b"in-env" not in file.read_bytes()


def test_integers_are_names_and_bad_names_are_refused(state: Path) -> None:
    """Nothing is written for a name that is refused, and none can leave the state directory."""
    with Deck(state) as deck:
        assert deck.start(42, FOREVER).name == "42"
        for bad in ("", ".", "..", "a/b", "../x", "a b", "ü", "x" * 129, None, True, b"x", "a\n", "a\0"):
            with pytest.raises(NameRefused):
                deck.start(bad, FOREVER)  # type: ignore[arg-type]
        assert [entry.name for entry in (state / "workers").iterdir()] == ["42"]
        deck.stop_all()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"command": "sleep 1"}, "command"),
        ({"command": []}, "command"),
        ({"comand": 1}, "comand"),
        ({"env": {"A": 1}}, "env"),
        ({"env": {"A=B": "x"}}, "env"),
        ({"env": {"EVERDECK_COOKIE": "x"}}, "EVERDECK_COOKIE"),
        ({"lifetime": "forever"}, "lifetime"),
        ({"umask": 0o1000}, "umask"),
        ({"user": "no-such-user"}, "user"),
        ({"labels": {"a": 1}}, "labels"),
        ({"stop": 5}, "stop"),
    ],
)
def test_a_bad_spec_says_which_field_and_writes_nothing(state: Path, fields: dict[str, object], named: str) -> None:
    """Field, what was given, what is accepted; no directory, no record."""
    given = dict(fields)
    command = given.pop("command", FOREVER)
    with Deck(state) as deck:
        with pytest.raises(SpecError, match=named) as caught:
            deck.start("alice", command, **given)  # type: ignore[arg-type]
        assert "accepted" in str(caught.value)
        assert deck.list() == []
        assert list((state / "workers").iterdir()) == []


def test_values_are_validated_when_they_are_made() -> None:
    """A policy that cannot work is refused at its own line, not at some restart at night."""
    for make in (
        lambda: Restart("sometimes"),  # type: ignore[arg-type]
        lambda: Restart(max_crashes=-1),
        lambda: Restart(backoff_seconds=5, backoff_cap_seconds=1),
        lambda: Restart(window_seconds=float("nan")),
        lambda: Stop("NOSUCH"),
        lambda: Stop(grace_seconds=-1),
        lambda: Log(max_bytes=1),
        lambda: Limits(nice=99),
        lambda: Limits(open_files=True),
    ):
        with pytest.raises(SpecError):
            make()
    assert Stop("sigint").signal == "INT"


def test_a_program_that_cannot_run_leaves_no_worker(state: Path) -> None:
    """The error names it; there is no record, no directory, no process, and no event that tells of a start."""
    with Deck(state) as deck:
        with pytest.raises(SpawnFailed, match="/no/such"):
            deck.start("alice", ["/no/such"])
        assert deck.list() == []
        assert [event.kind for event in deck.events(0) if event.worker == "alice"] == []
        with pytest.raises(UnknownWorker):
            deck.status("alice")


def test_unknown_names_get_a_suggestion(state: Path) -> None:
    """A typing error costs one look."""
    with Deck(state) as deck:
        deck.start("alice", FOREVER)
        with pytest.raises(UnknownWorker, match="did you mean 'alice'"):
            deck.stop("alcie")
        deck.stop_all()


def test_stopping_a_stopped_worker_writes_nothing(state: Path) -> None:
    """It is noted already: whoever asks again, for thousands perhaps, waits for no disk."""
    with Deck(state) as deck, contextlib.closing(sqlite3.connect(state / "deck.db")) as reader:
        deck.start("alice", FOREVER)
        assert deck.stop("alice").state is State.STOPPED
        before = reader.execute("PRAGMA data_version").fetchone()

        assert deck.stop("alice").state is State.STOPPED

        assert reader.execute("PRAGMA data_version").fetchone() == before


def test_stop_tells_who_needed_killing(state: Path) -> None:
    """A killed event names what survived SIGTERM, and the worker is stopped all the same."""
    with Deck(state) as deck:
        command = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1000; done"]
        deck.start("deaf", command, stop=Stop(grace_seconds=0.3))
        until(lambda: "ready" in deck.logs("deaf"))
        status = deck.stop("deaf")
        assert status.state is State.STOPPED
        killed = [event for event in deck.events(worker="deaf") if event.kind == "killed"]
        assert len(killed) == 1
        assert any("sleep" in one["command"] or "sh" in one["command"] for one in killed[0].detail["survivors"])
        kinds = [event.kind.value for event in deck.events(worker="deaf")]
        assert kinds == ["started", "stopping", "killed", "stopped"]


def test_the_breaker_trips_and_waits_for_a_person(state: Path) -> None:
    """More crashes than allowed: failed, also for the next owner; reset starts it again."""
    spec = WorkerSpec.of(["sh", "-c", "exit 3"], restart=Restart(max_crashes=2, backoff_seconds=0))
    with Deck(state) as deck:
        deck.start("crashy", spec)
        until(lambda: deck.status("crashy").state is State.FAILED)
        assert deck.status("crashy").crashes == 3
        assert deck.status("crashy").exit == Exited(3)
        with pytest.raises(WorkerFailed, match="reset"):
            deck.start("crashy", spec)
    with Deck(state) as deck:
        assert deck.status("crashy").state is State.FAILED
        deck.reset("crashy")
        until(lambda: deck.status("crashy").state is State.FAILED)
        kinds = [event.kind.value for event in deck.events(worker="crashy")]
        assert kinds.count("failed") == 2
        assert "reset" in kinds


def test_a_backoff_deadline_survives_the_owner(state: Path) -> None:
    """The wait is recorded: a new owner neither forgets it nor begins it anew."""
    with Deck(state) as deck:
        deck.start("slow", ["sh", "-c", "exit 1"], restart=Restart(backoff_seconds=1000, backoff_cap_seconds=1000))
        until(lambda: deck.status("slow").state is State.BACKOFF)
        until_before = deck.status("slow").backoff_until
    with Deck(state) as deck:
        status = deck.status("slow")
        assert status.state is State.BACKOFF
        assert until_before is not None
        assert status.backoff_until is not None
        assert abs((status.backoff_until - until_before).total_seconds()) < 1
        assert deck.stop("slow").state is State.STOPPED, "a stop is heard while it waits"


@pytest.mark.parametrize(
    ("policy", "code", "ends_as"),
    [("on-failure", 0, State.EXITED), ("never", 1, State.EXITED), ("on-failure", 1, State.FAILED)],
)
def test_policies(state: Path, policy: str, code: int, ends_as: State) -> None:
    """A success rests under on-failure; never rests always; failures end in the breaker."""
    with Deck(state) as deck:
        restart = Restart(policy, max_crashes=1, backoff_seconds=0)  # type: ignore[arg-type]
        deck.start("one", ["sh", "-c", f"exit {code}"], restart=restart)
        until(lambda: deck.status("one").state is ends_as)
    with Deck(state) as deck:
        assert deck.status("one").state is ends_as, "and the next owner leaves it so"


def test_always_restarts_a_success(state: Path) -> None:
    """Under always an exit code of 0 is no reason to rest."""
    with Deck(state) as deck:
        deck.start("one", ["true"], restart=Restart("always", backoff_seconds=0.001))
        until(lambda: deck.status("one").restarts >= 3)
        assert deck.status("one").crashes == 0
        deck.stop("one")


def test_restart_and_remove(state: Path) -> None:
    """Restart makes a new process with the same spec; remove leaves nothing of the worker but its events."""
    with Deck(state) as deck:
        first = deck.start("alice", FOREVER)
        second = deck.restart("alice")
        assert second.pid != first.pid
        assert second.restarts == 1
        deck.remove("alice")
        assert deck.list() == []
        assert list((state / "workers").iterdir()) == []
        assert deck.events(worker="alice")[-1].detail == {"removed": True}


def test_ports_are_stable_free_and_told(state: Path) -> None:
    """port=True gives each worker its own port in PORT, the same one at each start."""
    with Deck(state) as deck:
        command = ["sh", "-c", "echo port=$PORT; exec sleep 1000"]
        ports = {name: deck.start(name, command, port=True).port for name in ("a", "b", "c")}
        assert len(set(ports.values())) == 3
        until(lambda: f"port={ports['a']}" in deck.logs("a"))
        assert deck.restart("a").port == ports["a"]
        deck.stop_all()
    with Deck(state) as deck:
        assert deck.start("b").port == ports["b"]
        deck.stop_all()


def test_limits_are_applied_or_refused_never_ignored(state: Path) -> None:
    """What this machine can do is done before the program runs; what it cannot is refused by name."""
    code = "import resource,os;print(resource.getrlimit(resource.RLIMIT_NOFILE)[0],os.nice(0),flush=True)"
    with Deck(state) as deck:
        deck.start(
            "a", [sys.executable, "-c", code + "\nimport time;time.sleep(999)"], limits=Limits(open_files=99, nice=7)
        )
        until(lambda: "99 7" in deck.logs("a"))
        try:
            deck.start("b", FOREVER, limits=Limits(memory_bytes=100_000_000))
        except LimitUnavailable as err:
            assert "limits.memory_bytes" in str(err)  # noqa: PT017 - both answers are right, on different machines
            assert [status.name for status in deck.list()] == ["a"]
        else:
            assert deck.status("b").state is State.RUNNING
        deck.stop_all()


def test_a_lock_that_somebody_else_holds_is_a_conflict(state: Path) -> None:
    """The error and the event name the holder; it is not touched, and there is no second copy."""
    with Deck(state) as deck:
        deck.start("alice", FOREVER)
        deck.stop("alice")
        lock_fd = flock.take(state / "workers/alice/lock")
        assert lock_fd is not None
        import subprocess

        holder = subprocess.Popen(["sleep", "1000"], pass_fds=[lock_fd])
        os.close(lock_fd)
        try:
            with pytest.raises(LockConflict, match=str(holder.pid)):
                deck.start("alice")
            assert holder.poll() is None
            conflict = deck.events(worker="alice")[-1]
            assert conflict.kind == "lock-conflict"
            assert conflict.detail["pid"] == holder.pid
        finally:
            holder.kill()
            holder.wait()
        assert deck.start("alice").state is State.RUNNING
        deck.stop_all()


def test_a_foreign_process_is_taken_over_without_stopping_it(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """adopt: the same pid, shown and watched; when it dies it is started again from its command line.

    Right after its exec a process has no command line yet: it is waited for.
    """
    import subprocess

    too_early, read = [b"", b""], ids.read_proc
    monkeypatch.setattr(
        ids, "read_proc", lambda pid, name: too_early.pop() if name == "cmdline" and too_early else read(pid, name)
    )
    foreign = subprocess.Popen(FOREVER, cwd=tmp_path, start_new_session=True)
    try:
        with Deck(state) as deck:
            status = deck.adopt("taken", foreign.pid, restart=Restart(backoff_seconds=0))
            assert (status.pid, status.adopted, status.state) == (foreign.pid, True, State.RUNNING)
            with pytest.raises(SpecError):
                deck.adopt("again", foreign.pid)
        assert foreign.poll() is None
        with Deck(state) as deck:
            assert deck.status("taken").pid == foreign.pid
            foreign.kill()
            until(lambda: deck.status("taken").restarts + 0 >= 1 or deck.status("taken").pid not in {None, foreign.pid})
            assert deck.spec("taken").command == tuple(FOREVER)
            deck.stop_all()
    finally:
        foreign.kill()
        foreign.wait()


def test_events_are_durable_ordered_and_replayable(state: Path) -> None:
    """Ids grow by one without gaps, across owners; after= replays from there."""
    with Deck(state) as deck:
        deck.start("alice", FOREVER)
        deck.stop("alice")
    with Deck(state) as deck:
        events = deck.events()
        assert [event.id for event in events] == list(range(1, len(events) + 1))
        assert [event.id for event in deck.events(after=2)] == list(range(3, len(events) + 1))
        assert deck.events(after=1, limit=1)[0].id == 2
        assert deck.last_event_id() == events[-1].id


def test_a_raising_or_slow_callback_harms_nothing(state: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One callback raises, one never returns, one is well: verbs go on and the well one hears everything in order."""
    import threading

    heard: list[Event] = []
    stuck = threading.Event()

    def raising(event: Event) -> None:
        raise RuntimeError("mine")

    with Deck(state) as deck:
        deck.on_event(raising)
        deck.on_event(lambda _: stuck.wait(30))
        unsubscribe = deck.on_event(heard.append)
        deck.start("alice", FOREVER)
        deck.stop("alice")
        until(lambda: len(heard) >= 3)
        assert [event.kind.value for event in heard[:3]] == ["started", "stopping", "stopped"]
        unsubscribe()
        deck.start("alice")
        deck.stop("alice")
        stuck.set()
        until(lambda: "mine" in caplog.text, "the failure is reported")
    assert len(heard) == 3


def test_follow_streams_what_happens(state: Path) -> None:
    """The asynchronous deck: old events from an id, then each new one as it happens."""

    async def scenario() -> list[str]:
        async with AsyncDeck(state) as deck:
            await deck.start("alice", FOREVER)
            seen = []

            async def listen() -> None:
                async for event in deck.follow(after=0):
                    seen.append(event.kind.value)
                    if event.kind == "stopped":
                        return

            listening = asyncio.ensure_future(listen())
            await deck.stop("alice")
            await asyncio.wait_for(listening, 30)
            return seen

    assert asyncio.run(scenario()) == ["owner-changed", "started", "stopping", "stopped"]


def _log_of(deck: AsyncDeck, name: str) -> str:
    return (deck.log_dir(name) / "current").read_text()


def test_one_workers_backoff_or_grace_delays_nobody(state: Path) -> None:
    """While one worker takes its grace, others start and stop."""

    async def scenario() -> None:
        async with AsyncDeck(state) as deck:
            deaf = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1000; done"]
            await deck.start("deaf", deaf, stop=Stop(grace_seconds=90))
            await asyncio.to_thread(until, lambda: "ready" in _log_of(deck, "deaf"))
            stopping = asyncio.ensure_future(deck.stop("deaf"))
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                for number in range(5):
                    await deck.start(f"w{number}", FOREVER)
                    await deck.stop(f"w{number}")
            assert not stopping.done()
            pid = (await deck.status("deaf")).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            for process in await deck.tree("deaf"):
                os.kill(process.pid, signal.SIGKILL)
            await stopping

    asyncio.run(scenario())


def test_opening_takes_as_long_as_its_recovery(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience is with an owner that says nothing; on a slow disk one's own recovery may take minutes."""
    monkeypatch.setattr("everdeck.deck.membership._PATIENCE_SECONDS", 0.0)
    with Deck(state) as deck:
        assert deck.list() == []


def test_a_second_owner_is_told_who_owns_the_deck(state: Path) -> None:
    """Who does not want to join gets DeckOwned with the owner's pid, and the owner is as before."""
    with Deck(state) as deck:
        with pytest.raises(DeckOwned, match=str(os.getpid())) as caught:
            Deck(state, join=False)
        assert caught.value.pid == os.getpid()
        deck.start("still", FOREVER)
        deck.stop("still")
    with Deck(state):
        pass
    with pytest.raises(DeckClosed):
        deck.list()


def test_a_very_deep_state_directory_works(tmp_path: Path) -> None:
    """A socket's address holds 107 bytes; the state directory may be deeper."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    with Deck(deep) as deck:
        command = [
            sys.executable,
            "-c",
            "from everdeck.child import notify\nnotify(STATUS='deep')\nimport time;time.sleep(999)",
        ]
        deck.start("alice", command)
        until(lambda: deck.status("alice").status_text == "deep")
        deck.stop_all()


def test_a_log_that_was_just_begun_knows_its_times(state: Path) -> None:
    """Nothing of today's log lies before 2020 or after 2090, though nobody has had time to index it."""
    with Deck(state) as deck:
        deck.start("alice", ["sh", "-c", "echo hello; exec sleep 1000"])
        until(lambda: "hello" in deck.logs("alice"))
        log_dir = state / "workers/alice/log"
        assert list(logreader.read(log_dir, until=datetime(2020, 1, 1, tzinfo=UTC))) == []
        assert list(logreader.read(log_dir, since=datetime(2090, 1, 1, tzinfo=UTC))) == []
        assert "hello" in list(logreader.read(log_dir, since=datetime(2020, 1, 1, tzinfo=UTC)))
        deck.stop_all()
