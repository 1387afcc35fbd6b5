"""Every verb, on every kind of deck: what it answers and what holds afterwards."""

import asyncio
import itertools
import os
import signal
import subprocess
from collections.abc import Callable
from datetime import datetime

import pytest

from everdeck import (
    Abilities,
    EventKind,
    Inspection,
    Limits,
    Restart,
    Secret,
    State,
    Stop,
    Verbs,
    WorkerSpec,
    WorkerStatus,
)
from everdeck.errors import SpecError, UnknownWorker
from everdeck.kernel.identity import command_line
from support.waiting import eventually

FOREVER = ["sleep", "1000"]
SOON = Restart("never")
OnDeck = Callable[[Callable[[Verbs], object]], None]


async def is_here(deck: Verbs) -> bool:
    """Are the workers' pids those of this machine?"""
    return (await deck.abilities()).kind != "cluster"


async def some(deck: Verbs, many: int) -> int:
    """So many, or a few where each is a pod of seven processes that takes seconds to start."""
    return many if await is_here(deck) else 8


def process(status: WorkerStatus) -> tuple[int | None, datetime | None]:
    """Which process it is; in a pod the first one has the same number each time."""
    return status.pid, status.started_at


def test_start_answers_with_the_status_of_the_running_worker(on_deck: OnDeck) -> None:
    """The program was executed, the fields arrived, and the same spec again starts nothing."""

    async def scenario(deck: Verbs) -> None:
        fields = {
            "env": {"TZ": "UTC"},
            "secrets": {"TOKEN": Secret("hidden", env=True)},
            "labels": {"plan": "free"},
            "restart": Restart("always", max_crashes=3),
            "stop": Stop("INT", grace_seconds=1),
            "limits": Limits(nice=3),
        }
        status = await deck.start("alice", FOREVER, **fields)
        assert isinstance(status, WorkerStatus)
        assert (status.name, status.state, status.labels) == ("alice", State.RUNNING, {"plan": "free"})
        assert status.pid is not None
        if await is_here(deck):
            assert command_line(status.pid) == "sleep 1000"
        assert process(await deck.start("alice", FOREVER, **fields)) == process(status)
        spec = await deck.spec("alice")
        assert spec == WorkerSpec.of(FOREVER, **fields).without_secret_values()
        assert process(await deck.start("alice", ["sleep", "1001"], replace=True)) != process(status)
        assert (await deck.start(7, FOREVER)).name == "7"

    on_deck(scenario)


def test_a_known_worker_is_started_again_without_a_command(on_deck: OnDeck) -> None:
    """As it is known, with all its fields."""

    async def scenario(deck: Verbs) -> None:
        first = await deck.start("alice", FOREVER)
        assert (await deck.stop("alice")).state is State.STOPPED
        again = await deck.start("alice")
        assert again.state is State.RUNNING
        assert process(again) != process(first)

    on_deck(scenario)


def test_start_many_and_stop_many_tell_of_each(on_deck: OnDeck) -> None:
    """Progress hears of every worker once, and the answers come in the order that was asked."""

    async def scenario(deck: Verbs) -> None:
        started: list[str] = []
        names = [f"w{number}" for number in range(await some(deck, 30))]
        statuses = await deck.start_many(
            dict.fromkeys(names, FOREVER), progress=lambda name, _: started.append(name), labels={"a": "b"}
        )
        assert [status.name for status in statuses] == names
        assert sorted(started) == sorted(names)
        assert {status.labels["a"] for status in await deck.list()} == {"b"}
        stopped: list[str] = []
        gone = await deck.stop_many(names[:5], lambda status: stopped.append(status.name))
        assert {status.state for status in gone} == {State.STOPPED}
        assert sorted(stopped) == sorted(names[:5])
        rest = await deck.stop_all()
        assert len(rest) == len(names)
        assert {status.state for status in await deck.list()} == {State.STOPPED}

    on_deck(scenario)


def test_restart_many_has_only_so_many_down_at_once(on_deck: OnDeck) -> None:
    """Each is another process in the end and is told of once; one that cannot start keeps nobody else from it."""

    async def scenario(deck: Verbs) -> None:
        names = [f"w{number}" for number in range(7)]
        before = {one.name: process(one) for one in await deck.start_many(dict.fromkeys(names, FOREVER))}
        told: list[str] = []
        after = await deck.restart_many(names, parallel=3, progress=lambda name, _: told.append(name))
        assert [one.name for one in after] == sorted(told) == names
        assert all(one.state is State.RUNNING and one.pid is not None for one in after)
        assert not [one.name for one in after if process(one) == before[one.name]]
        assert {one.restarts for one in await deck.list()} == {1}
        # The events tell the order: nobody of the next group is touched before all of this one run again.
        kinds = ("stopping", "restarted")
        told_in_order = [(one.worker, one.kind) for one in await deck.events() if one.kind in kinds]
        down = itertools.accumulate(1 if kind == "stopping" else -1 for _, kind in told_in_order)
        assert max(down) == 3
        with pytest.raises(UnknownWorker):
            await deck.restart_many(["w0", "nobody"])
        with pytest.raises(SpecError):
            await deck.restart_many(["w0"], parallel=0)
        assert (await deck.status("w0")).restarts == 1

    on_deck(scenario)


def test_stop_proves_the_whole_tree_gone(on_deck: OnDeck) -> None:
    """Also what it forked."""

    async def scenario(deck: Verbs) -> None:
        await deck.start("family", ["sh", "-c", "sleep 1000 & sleep 1000 & wait"], stop=Stop(grace_seconds=1))

        async def has_children() -> bool:
            return len(await deck.tree("family")) == 3

        await eventually(has_children)
        pids = [process.pid for process in await deck.tree("family")]
        status = await deck.stop("family")
        assert (status.state, status.pid) == (State.STOPPED, None)
        assert await deck.tree("family") == []
        if await is_here(deck):
            assert not [pid for pid in pids if command_line(pid).startswith("sleep")]

    on_deck(scenario)


def test_restart_and_reset_and_remove(on_deck: OnDeck) -> None:
    """Another process; an empty crash history; and then nobody of that name."""

    async def scenario(deck: Verbs) -> None:
        first = await deck.start("alice", FOREVER)
        second = await deck.restart("alice")
        assert second.pid is not None
        assert process(second) != process(first)
        assert (await deck.reset("alice")).crashes == 0
        assert await deck.remove("alice") is None
        assert await deck.list() == []
        assert await deck.reconcile() is None

    on_deck(scenario)


def test_adopt_takes_over_a_stranger(on_deck: OnDeck) -> None:
    """It is not stopped, and its fields are kept."""

    async def scenario(deck: Verbs) -> None:
        with subprocess.Popen(FOREVER, start_new_session=True) as stranger:
            try:
                status = await deck.adopt("strange", stranger.pid, labels={"x": "y"})
                assert (status.pid, status.adopted, status.labels) == (stranger.pid, True, {"x": "y"})
                assert (await deck.spec("strange")).command == ("sleep", "1000")
                ended = asyncio.get_running_loop().run_in_executor(None, stranger.wait)
                assert (await deck.stop("strange")).state is State.STOPPED
                await ended
            finally:
                stranger.kill()

    on_deck(scenario)


def test_inspect_tells_everything_about_one(on_deck: OnDeck) -> None:
    """Status, spec, layers, tree and crashes in one answer."""

    async def scenario(deck: Verbs) -> None:
        status = await deck.start("alice", FOREVER)
        seen = await deck.inspect("alice")
        assert isinstance(seen, Inspection)
        assert seen.status.pid == status.pid
        assert seen.spec.command == ("sleep", "1000")
        assert [layer.layer for layer in seen.layers] == ["L1", "L2", "L3", "L4"]
        assert seen.layers == await deck.layers("alice")
        assert [process.pid for process in seen.tree] == [status.pid]
        assert seen.crash_times == []
        await deck.start("bob", ["sh", "-c", "exit 3"], restart=SOON)

        async def crashed() -> bool:
            return bool((await deck.inspect("bob")).crash_times)

        await eventually(crashed)
        assert isinstance((await deck.inspect("bob")).crash_times[0], datetime)

    on_deck(scenario)


def test_logs_are_read_and_followed(on_deck: OnDeck) -> None:
    """The last lines, those that match, and then each new one as it is written."""

    async def scenario(deck: Verbs) -> None:
        script = "for n in 1 2 3; do echo line $n; done; exec sleep 1000"
        await deck.start("talker", ["sh", "-c", script])

        async def said() -> bool:
            return "line 3" in await deck.logs("talker")

        await eventually(said)
        assert [line for line in await deck.logs("talker", 100) if line.startswith("line")] == [
            "line 1",
            "line 2",
            "line 3",
        ]
        assert await deck.logs("talker", None, grep="line 2") == ["line 2"]
        await deck.stop("talker")
        lines = deck.follow_logs("talker", 100, grep="line [13]")
        seen = [await anext(lines), await anext(lines)]
        await deck.start("talker")
        seen += [await anext(lines), await anext(lines)]
        assert seen == ["line 1", "line 3"] * 2

    on_deck(scenario)


def test_events_are_complete_and_in_order(on_deck: OnDeck) -> None:
    """Replayed, followed and called back: the same events, each once, ids without a gap."""

    async def scenario(deck: Verbs) -> None:
        begin = await deck.last_event_id()
        heard: list[int] = []
        unsubscribe = deck.on_event(lambda event: heard.append(event.id))
        followed: list[int] = []

        async def follow() -> None:
            async for event in deck.follow(begin):
                followed.append(event.id)

        following = asyncio.ensure_future(follow())
        many = await some(deck, 20)
        for number in range(many):
            await deck.start(f"w{number}", ["true"], restart=SOON)

        async def all_exited() -> bool:
            return {status.state for status in await deck.list()} == {State.EXITED}

        await eventually(all_exited)

        async def all_recorded() -> bool:
            return len(await deck.events(begin)) >= 2 * many

        if not await is_here(deck):  # a pod's end may be seen a moment before its event is carried over
            await eventually(all_recorded)
        events = await deck.events(begin)
        ids = [event.id for event in events]
        assert ids == list(range(begin + 1, begin + 1 + len(ids)))
        assert [event.kind for event in events].count(EventKind.STARTED) == many
        assert [event.kind for event in events].count(EventKind.EXITED) == many

        async def all_told() -> bool:
            return len(heard) >= len(ids) and len(followed) >= len(ids)

        await eventually(all_told)
        assert heard == ids
        assert followed == ids
        assert [event.worker for event in await deck.events(begin, worker="w3")] == ["w3", "w3"]
        assert len(await deck.events(begin, limit=5)) == 5
        unsubscribe()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    on_deck(scenario)


def test_a_raising_callback_harms_nobody(on_deck: OnDeck) -> None:
    """The next callback and the next event are told."""

    async def scenario(deck: Verbs) -> None:
        heard: list[EventKind] = []

        def raising(_: object) -> None:
            raise RuntimeError("a callback of somebody's")

        deck.on_event(raising)
        deck.on_event(lambda event: heard.append(event.kind))
        await deck.start("a", FOREVER)
        await deck.stop("a")

        async def told() -> bool:
            return EventKind.STOPPED in heard

        await eventually(told)

    on_deck(scenario)


def test_abilities_and_members(on_deck: OnDeck) -> None:
    """Which kind of deck it is, and who has it open, the owner first."""

    async def scenario(deck: Verbs) -> None:
        abilities = await deck.abilities()
        assert isinstance(abilities, Abilities)
        assert abilities.can("start")
        members = await deck.members()
        owners = [True] if abilities.kind != "cluster" else []  # a cluster's deck is nobody's
        assert [member.owner for member in members] == owners + [False] * (len(members) - len(owners))
        if abilities.kind in {"owner", "member"}:
            assert os.getpid() in {member.pid for member in members}

    on_deck(scenario)


def test_a_verb_is_carried_to_its_end_when_its_caller_is_cancelled(on_deck: OnDeck) -> None:
    """A stop whose caller stops waiting stops the worker all the same."""

    async def scenario(deck: Verbs) -> None:
        deaf = ["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"]
        await deck.start("deaf", deaf, stop=Stop(grace_seconds=1))
        await asyncio.sleep(0.3)
        with_caller = asyncio.ensure_future(deck.stop("deaf"))

        async def stopping() -> bool:
            return (await deck.status("deaf")).state is State.STOPPING

        await eventually(stopping)
        with_caller.cancel()
        await asyncio.gather(with_caller, return_exceptions=True)

        async def stopped() -> bool:
            return (await deck.status("deaf")).state is State.STOPPED

        await eventually(stopped)

    on_deck(scenario)


def test_many_verbs_at_once_each_get_their_own_answer(on_deck: OnDeck) -> None:
    """Answers come in any order and are not mixed up."""

    async def scenario(deck: Verbs) -> None:
        names = [f"w{number}" for number in range(await some(deck, 40))]
        statuses = await asyncio.gather(*(deck.start(name, FOREVER) for name in names))
        assert [status.name for status in statuses] == names
        told = await asyncio.gather(*(deck.status(name) for name in names))
        assert [(one.name, one.pid) for one in told] == [(one.name, one.pid) for one in statuses]
        if await is_here(deck):
            assert len({one.pid for one in told}) == 40
            os.kill(told[0].pid or 0, signal.SIGKILL)
        await deck.stop_all()

    on_deck(scenario)
