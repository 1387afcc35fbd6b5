"""What another account may do at ``deck.sock``: nothing, unless it is listed, and then what its role says."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from everdeck.access import LocalPeople, Role
from everdeck.kernel.unixsocket import Peer
from everdeck.wire import frames, requests, server
from everdeck.wire.client import WireClient
from everdeck.wire.server import MOST_OF_ANOTHER_ACCOUNT
from support.cli_daemon import PATIENCE_SECONDS, Person
from support.hostile_accounts import Account, open_place
from support.repo_processes import end_all_under
from support.waiting import eventually

PRELUDE = """
import json, os, socket, sys
from pathlib import Path
from everdeck.errors import EverdeckError
from everdeck.kernel import unixsocket
from everdeck.model import EventKind, WorkerSpec
from everdeck.verbs import Caller
from everdeck.wire import frames, requests
from everdeck.wire.client import WireClient

state, uid, gid, groups = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
os.setgroups(groups); os.setgid(gid); os.setuid(uid)

def connected():
    raw = unixsocket.connect(state, "deck.sock", 60)
    first = next_frame(raw)
    assert isinstance(first, frames.Welcome), first
    return raw

def next_frame(raw):
    cutter = frames.Cutter(frames.MOST_ANSWERED_BYTES)
    while True:
        try:
            data = raw.recv(1)
        except ConnectionResetError:
            return None
        if not data:
            return None
        for body in cutter.feed(data):
            return frames.decode_answered(body)

def say(found):
    print(json.dumps(found))
"""

EVERY_VERB = """
verbs = [
    requests.Status("alice"), requests.List(), requests.Inspect("alice"), requests.Spec("alice"),
    requests.Tree("alice"), requests.Layers("alice"), requests.Logs("alice"), requests.Events(),
    requests.LastEventId(), requests.AskAbilities(), requests.Members(),
    requests.Restart("alice"), requests.Reset("alice"), requests.Start("alice"), requests.StartMany({"alice": None}),
    requests.RestartMany(["alice"]), requests.StopMany(["bob"]), requests.StopAll(), requests.Reconcile(),
    requests.Start("mine", WorkerSpec(("sleep", "1000"))),
    requests.StartMany({"mine": WorkerSpec(("sleep", "1000"))}),
    requests.Adopt("mine", os.getpid()), requests.Remove("bob"),
    requests.RecordEvent("alice", EventKind.FEED, {"forged": True}),
    requests.Follow(0), requests.FollowLogs("alice"), requests.Wakes(),
]
assert {type(verb) for verb in verbs} == set(requests.ALL)
raw, found = connected(), {}
for number, verb in enumerate(verbs, 1):
    raw.sendall(frames.packed(frames.Ask(number, frames.raw(verb), None)))
    if isinstance(verb, requests.FollowLogs):  # nothing is written to that log
        raw.sendall(frames.packed(frames.Cancel(number)))
    while (frame := next_frame(raw)).number != number:
        pass
    if isinstance(verb, requests.Follow):
        raw.sendall(frames.packed(frames.Cancel(number)))
    key = type(verb).__name__
    key += " anew" if "mine" in (getattr(verb, "name", ""), *getattr(verb, "workers", ())) else ""
    fault = frame.fault if isinstance(frame, frames.Refused) else None
    found[key] = "done" if fault is None else [fault, *fault.inside][-1].error
say(found)
"""


@pytest.fixture(scope="module")
def person(mallory: Account, victim: Account) -> Iterator[Person]:
    """A daemon of root: mallory may read, and the victim's group may operate."""
    with open_place() as place:
        config = place / "everdeck.toml"
        config.write_text(
            f'[server]\nhttp = false\nusers = {{ {mallory.name} = "read" }}\ngroups = {{ {victim.name} = "operate" }}\n'
            '[worker.alice]\ncommand = ["sleep", "1000"]\nenv = { KEY = "hush" }\n'
            '[worker.bob]\ncommand = ["sleep", "1000"]\n'
        )
        person = Person(place / "state")
        try:
            person.types("up", str(config), "--detach", "--no-http")
            yield person
        finally:
            person.leaves()
            end_all_under(place)


def attempt(person: Person, script: str, uid: int, gid: int, groups: tuple[int, ...] = ()) -> Any:
    """What a program with these ids says it got."""
    command = [sys.executable, "-c", PRELUDE + script, str(person.state), str(uid), str(gid), json.dumps(groups)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOOKS = {
    *("Status", "List", "Inspect", "Spec", "Tree", "Layers", "Logs", "Events", "LastEventId", "AskAbilities"),
    *("Members", "Follow", "FollowLogs"),
}
OPERATES = {"Restart", "RestartMany", "Reset", "Start", "StartMany", "StopMany", "StopAll", "Reconcile"}


def test_a_reader_looks_and_every_other_verb_is_refused(person: Person, mallory: Account) -> None:
    """Every verb that travels is tried; what the role does not include is refused, and nothing happens."""
    found = attempt(person, EVERY_VERB, mallory.uid, mallory.gid)
    assert {verb for verb, answer in found.items() if answer == "done"} == LOOKS
    assert {answer for verb, answer in found.items() if verb not in LOOKS} == {"AccessDenied"}
    assert person.worker("bob")["state"] == "running"


ENVIRONMENT = """
raw = connected()
for number, verb in enumerate((requests.Spec("alice"), requests.Inspect("alice")), 1):
    raw.sendall(frames.packed(frames.Ask(number, frames.raw(verb), None)))
say([(b"KEY" in bytes(frame.value), b"hush" in bytes(frame.value)) for frame in (next_frame(raw), next_frame(raw))])
"""


@pytest.mark.parametrize("operates", [False, True])
def test_values_of_an_environment_are_not_for_readers(
    person: Person, mallory: Account, victim: Account, *, operates: bool
) -> None:
    """A token may stand in a variable: a reader sees its name."""
    groups = (victim.gid,) if operates else ()
    assert attempt(person, ENVIRONMENT, mallory.uid, mallory.gid, groups) == [[True, operates]] * 2


def test_a_group_operates_and_runs_nothing_new(person: Person, mallory: Account, victim: Account) -> None:
    """The best role of an account and of its groups counts, also of those that are not its first."""
    found = attempt(person, EVERY_VERB, mallory.uid, mallory.gid, (victim.gid,))
    assert {verb for verb, answer in found.items() if answer == "done"} == LOOKS | OPERATES
    assert {answer for verb, answer in found.items() if verb not in LOOKS | OPERATES} == {"AccessDenied"}
    person.types("start", "alice")
    person.types("start", "bob")


def test_who_is_not_listed_is_cut_off_before_a_word(person: Person) -> None:
    """Any account can reach the socket; only those that are listed are spoken to."""
    script = "say(repr(next_frame(unixsocket.connect(state, 'deck.sock', 60))))"
    assert attempt(person, script, 65533, 65533) == "None"


def test_the_caller_is_the_kernels_word_whatever_the_peer_says(
    person: Person, mallory: Account, victim: Account
) -> None:
    """Another account cannot act in root's name; a process of the deck's account may pass its own caller on."""
    script = """
raw = connected()
forged = Caller(uid=0, pid=1, token="deck", address="192.0.2.1")
raw.sendall(frames.packed(frames.Ask(1, frames.raw(requests.Restart("alice")), "a" * 32, forged)))
assert isinstance(next_frame(raw), frames.Answer)
say(os.getpid())
"""
    pid = attempt(person, script, mallory.uid, mallory.gid, (victim.gid,))
    with WireClient(person.state) as owner:
        last = [event for event in owner.ask(requests.Events(worker="alice")) if event.kind == "restarted"][-1]
        assert last.detail["by"] == {"uid": mallory.uid, "pid": pid}
    attempt(person, script, 0, 0)
    with WireClient(person.state) as owner:
        last = [event for event in owner.ask(requests.Events(worker="alice")) if event.kind == "restarted"][-1]
        assert last.detail["by"]["token"] == "deck"


def test_another_account_never_joins_or_fetches_the_deck(person: Person, mallory: Account) -> None:
    """A member is handed the deck's lock and its sockets when the owner leaves."""
    script = """
found = []
for hello in (frames.Hello(frames.VERSION, "me", True), frames.Hello(frames.VERSION, "fetch:" + "a" * 32)):
    raw = connected()
    raw.sendall(frames.packed(hello))
    found.append(next_frame(raw).fault.message)
say(found)
"""
    found = attempt(person, script, mallory.uid, mallory.gid)
    assert all("only the account that owns the deck" in message for message in found)


def test_one_account_has_so_many_connections_and_so_large_frames(person: Person, mallory: Account) -> None:
    """Beyond them it is cut off, and the owner's own command line works on."""
    script = f"""
kept = [connected() for _ in range({MOST_OF_ANOTHER_ACCOUNT})]
over = next_frame(unixsocket.connect(state, "deck.sock", 60))
kept[0].sendall((2 << 20).to_bytes(4, "big"))
refused = next_frame(kept[0]).fault.message
say([repr(over), refused])
"""
    over, refused = attempt(person, script, mallory.uid, mallory.gid)
    assert over == "None"
    assert "at most" in refused
    assert person.worker("bob")["state"] == "running"


class _Library:
    """A deck in which looking at a log lasts until somebody lets it end."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | None]] = []
        self.enough = asyncio.Event()

    async def logs(self, name: str, lines: int | None, **_: Any) -> list[str]:
        self.asked.append((name, lines))
        await self.enough.wait()
        return []


class _Deeds:
    async def once(self, _request: object, _deed: object, act: Callable[[], Awaitable[Any]], **_: Any) -> Any:
        return await act()


def test_an_account_that_asks_for_every_log_at_once_gets_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer may be a whole log in our memory. Who hangs up is not read for; a log is ten thousand lines of it."""
    monkeypatch.setattr(server, "peer_of", lambda _: Peer(1, 12345))

    async def scenario() -> None:
        library = _Library()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            welcome = frames.Welcome(frames.VERSION, 1, "id", "1")
            people = LocalPeople(users={12345: Role.READ})
            served = server.WireServer(cast("Any", library), _Deeds(), listener, welcome, people)
            await served.open()
            peers = [await asyncio.open_unix_connection(str(tmp_path / "s")) for _ in range(2)]
            most = server.MOST_LOOKS_OF_ANOTHER_ACCOUNT
            for name, (_, to) in zip("ab", peers, strict=True):
                for number in range(1, 2 * most + 1):
                    to.write(frames.packed(frames.Ask(number, frames.raw(requests.Logs(name, None)), None)))
                await eventually(lambda: len(library.asked) == most)
            await eventually(lambda: sum(len(one.acts) for one in served._connections) == 4 * most)
            assert library.asked == [("a", 10_000)] * most
            await served.drain()  # who leaves does not wait for them

            peers[1][1].close()
            await eventually(lambda: len(served._connections) == 1)
            library.enough.set()
            await eventually(lambda: not any(one.acts for one in served._connections))
            assert library.asked == [("a", 10_000)] * 2 * most
            peers[0][1].close()
            await served.close()

    asyncio.run(scenario())


def test_the_deck_stays_closed_without_a_list(mallory: Account) -> None:
    """Nobody is listed: the socket is 0600 and its directory 0700."""
    with open_place() as place:
        person = Person(place / "state")
        try:
            person.types("up", "--detach", "--no-http")
            assert (person.state / "deck.sock").stat().st_mode & 0o777 == 0o600
            assert person.state.stat().st_mode & 0o777 == 0o700
            mallory.run("cat", person.state / "deck.sock", expect=1)
        finally:
            person.leaves()
            end_all_under(place)


def test_the_command_line_of_a_reader_looks_and_is_refused_the_rest(person: Person, mallory: Account) -> None:
    """It may pass through the directory to the socket, and that is enough."""
    # The modules are loaded first, by a look as root: the interpreter may be where only root can read.
    script = """
import os, sys
from everdeck.cli import main
main(["--state", sys.argv[1], "ps"]); main(["--state", sys.argv[1], "reset", "alice"])
os.setgroups([]); os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[2]))
codes = [main(["--state", sys.argv[1], "ps"]), main(["--state", sys.argv[1], "reset", "alice"])]
print("codes", *codes)
"""
    command = [sys.executable, "-c", script, str(person.state), str(mallory.uid), str(mallory.gid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.stdout.endswith("codes 0 1\n"), done.stdout + done.stderr
    assert "it needs role operate; this caller has role read" in done.stderr
