"""The deck's socket: whatever arrives on it gets an answer or an error, and costs the owner nothing."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everdeck import Deck, Restart, State, UnknownWorker
from everdeck.access import Grant, LocalPeople, Role
from everdeck.errors import NoOwner, SpecError
from everdeck.kernel import unixsocket
from everdeck.kernel.unixsocket import peer_of
from everdeck.verbs import Caller
from everdeck.wire import frames, requests
from everdeck.wire import server as wire_server
from everdeck.wire.client import WireClient
from support.waiting import until

FOREVER = ["sleep", "1000"]
FRAMES = int(os.environ.get("EVERDECK_FUZZ_FRAMES", "1500"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deck, Path]]:
    """A deck inside this very process, and its directory."""
    state = tmp_path_factory.mktemp("wire") / "state"
    with Deck(state, durability="process") as deck:
        deck.start("alice", FOREVER)
        yield deck, state
        deck.stop_all()


def connected(state: Path) -> socket.socket:
    """A raw connection that has read its welcome."""
    raw = unixsocket.connect(state, "deck.sock", 30)
    assert isinstance(answers(raw, 1)[0], frames.Welcome)
    return raw


def answers(raw: socket.socket, count: int) -> list[frames.Answered]:
    """The next frames of the owner; fewer if it hangs up."""
    cutter, found = frames.Cutter(1 << 28), []
    while len(found) < count and (data := raw.recv(1 << 16)):
        found += [frames.decode_answered(body) for body in cutter.feed(data)]
    return found


def sent(raw: socket.socket, *bodies: bytes) -> None:
    """Bodies with their lengths before them."""
    for body in bodies:
        raw.sendall(struct.pack(">I", len(body)) + body)


def test_the_command_lines_end_asks_an_embedded_deck(served: tuple[Deck, Path]) -> None:
    """Typed answers, errors as they were raised, progress, and who owns it, without an event loop."""
    _, state = served
    with WireClient(state) as owner:
        assert owner.connect().owner_pid == os.getpid()
        assert owner.ask(requests.Status("alice")).state is State.RUNNING
        assert [status.name for status in owner.ask(requests.List())] == ["alice"]
        with pytest.raises(UnknownWorker) as caught:
            owner.ask(requests.Status("alcie"))
        assert caught.value.suggestions == ("alice",)
        told: list[requests.Told] = []
        owner.ask(requests.StartMany({"b": requests.WorkerSpec(("sleep", "9"))}, progress=True), told.append)
        assert [one.name for one in told] == ["b"]
        stream = owner.stream(requests.Follow(0))
        assert [next(stream).id for _ in range(3)] == [1, 2, 3]
        stream.close()
        assert owner.ask(requests.StopMany(["b"]))[0].state is State.STOPPED
        owner.ask(requests.Remove("b"))


def test_the_command_lines_end_loads_no_event_loop() -> None:
    """``everdeck ps`` starts in a few tens of milliseconds because of what it does not load."""
    code = "import sys, everdeck.wire.client; print(sorted({'asyncio', 'sqlite3', 'psutil'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_nobody_owns_the_deck(tmp_path: Path) -> None:
    """NoOwner at once, where there is no directory and where a dead owner left its socket."""
    with pytest.raises(NoOwner):
        WireClient(tmp_path / "nowhere").connect()
    unixsocket.listen(tmp_path, "deck.sock").close()
    (tmp_path / "deck.lock").touch()
    began = time.monotonic()
    with pytest.raises(NoOwner):
        WireClient(tmp_path).connect()
    assert time.monotonic() - began < 30, "at once, though the machine may be busy"


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 0),
        struct.pack(">I", 6) + msgspec.msgpack.encode(["ask"]) + b"\xc0",
    ],
)
def test_what_is_not_a_frame_gets_an_error_and_the_end(served: tuple[Deck, Path], garbage: bytes) -> None:
    """One Refused for the connection, then end-of-file; the owner serves on."""
    deck, state = served
    with connected(state) as raw:
        raw.sendall(garbage)
        (refused,) = answers(raw, 2)
        assert isinstance(refused, frames.Refused)
        assert refused.number == 0
    assert deck.status("alice").state is State.RUNNING


def test_a_length_that_is_too_large_is_refused_before_its_bytes_are_kept(served: tuple[Deck, Path]) -> None:
    """The owner's memory does not follow what a peer announces."""
    _, state = served
    before = _resident()
    for _ in range(20):
        with connected(state) as raw, contextlib.suppress(OSError):
            raw.sendall(struct.pack(">I", frames.MOST_ASKED_BYTES + 1) + b"x" * 4096)
            (refused,) = answers(raw, 2)
            assert isinstance(refused, frames.Refused)
            assert "at most" in refused.fault.message
    assert _resident() - before < 20 << 20


def test_a_half_frame_costs_nobody_anything(served: tuple[Deck, Path]) -> None:
    """A peer that dies in the middle of a frame is forgotten."""
    deck, state = served
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for length in (1, 3, 4, 10, 100):
        with connected(state) as raw:
            raw.sendall((struct.pack(">I", 1000) + b"y" * 1000)[:length])
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors)
    assert deck.status("alice").state is State.RUNNING


@pytest.mark.parametrize("guest", [False, True])
def test_half_a_frame_has_a_deadline(
    served: tuple[Deck, Path], monkeypatch: pytest.MonkeyPatch, *, guest: bool
) -> None:
    """The first frame comes in time; another account's every frame does, and a byte now and then is no life."""
    _, state = served
    monkeypatch.setattr(wire_server, "WHOLE_FRAME_SECONDS" if guest else "FIRST_FRAME_SECONDS", 0.5)
    if guest:
        monkeypatch.setattr(LocalPeople, "grant_of", lambda *_: Grant("guest", Role.READ))
    with connected(state) as raw:
        if guest:  # a whole one before: from then on only the whole frames are watched
            raw.sendall(frames.packed(frames.Ask(1, frames.raw(requests.LastEventId()))))
            answers(raw, 1)
        raw.settimeout(60)
        raw.sendall(struct.pack(">I", 1000) + b"y")
        with contextlib.suppress(ConnectionError):
            while raw.recv(4096):
                pass


def test_a_stream_that_is_cancelled_at_once_is_ended(served: tuple[Deck, Path]) -> None:
    """Asked for and cancelled in one write: it gets its end, and its number is free again."""
    _, state = served
    follow = frames.packed(frames.Ask(1, frames.raw(requests.FollowLogs("alice"))))
    with connected(state) as raw:
        for _ in range(3):
            raw.sendall(follow + frames.packed(frames.Cancel(1)))
            (ended,) = answers(raw, 1)
            assert isinstance(ended, frames.Answer)


def test_a_verb_that_is_not_known_gets_an_error_and_nothing_else(served: tuple[Deck, Path]) -> None:
    """The connection goes on: two releases may meet on one socket."""
    _, state = served
    with connected(state) as raw:
        for number, verb in enumerate(({"verb": "fly"}, {"verb": "stop"}, {"verb": "status", "name": 7}, 5), start=1):
            sent(raw, frames.packed(frames.Ask(number, frames.raw(verb)))[4:])
            (refused,) = answers(raw, 1)
            assert isinstance(refused, frames.Refused)
            assert (refused.number, refused.fault.error) == (number, "SpecError")
        sent(raw, frames.packed(frames.Ask(9, frames.raw(requests.LastEventId())))[4:])
        (answer,) = answers(raw, 1)
        assert isinstance(answer, frames.Answer)


def test_a_spec_that_is_not_valid_is_refused_by_its_field(served: tuple[Deck, Path]) -> None:
    """Also when a peer does not check what it sends."""
    _, state = served
    with connected(state) as raw:
        verb = {"verb": "start", "name": "x", "spec": {"command": ["true"], "lifetime": "eternal"}}
        sent(raw, frames.packed(frames.Ask(1, frames.raw(verb)))[4:])
        (refused,) = answers(raw, 1)
        assert isinstance(refused, frames.Refused)
        assert "lifetime" in refused.fault.message


def test_a_slow_reader_cannot_grow_the_owner(served: tuple[Deck, Path]) -> None:
    """A stream sends a window and waits; ten readers that never read cost ten windows."""
    deck, state = served
    for _ in range(50):
        deck.restart("alice")
    readers = [connected(state) for _ in range(10)]
    before = _resident()
    for raw in readers:
        sent(raw, frames.packed(frames.Ask(1, frames.raw(requests.Follow(0))))[4:])
    assert deck.status("alice").state is State.RUNNING
    assert len(answers(readers[0], frames.WINDOW)) == frames.WINDOW
    readers[0].settimeout(0.5)
    with pytest.raises(TimeoutError):
        readers[0].recv(1)
    sent(readers[0], frames.packed(frames.More(1, 5))[4:])
    readers[0].settimeout(30)
    assert len(answers(readers[0], 5)) == 5
    assert _resident() - before < 20 << 20
    for raw in readers:
        raw.close()


def test_who_reads_no_answers_is_not_read_either(served: tuple[Deck, Path]) -> None:
    """Thousands of questions whose answers nobody takes fill the peer's own buffers, not the owner's."""
    deck, state = served
    before = _resident()
    with connected(state) as raw:
        raw.settimeout(1)
        question = frames.packed(frames.Ask(1, frames.raw(requests.Events(0))))
        with contextlib.suppress(TimeoutError):
            for _ in range(20_000):
                raw.sendall(question)
    assert _resident() - before < 100 << 20
    assert deck.status("alice").state is State.RUNNING


def test_a_caller_that_dies_leaves_its_verb_to_be_finished(served: tuple[Deck, Path]) -> None:
    """A start whose caller hangs up at once is carried out."""
    deck, state = served
    verb = frames.raw(requests.Start("orphaned", requests.WorkerSpec(("sleep", "99"))))
    with connected(state) as raw:
        sent(raw, frames.packed(frames.Ask(1, verb, "a-request-id"))[4:])
    until(lambda: "orphaned" in {status.name for status in deck.list()})
    assert deck.status("orphaned").state is State.RUNNING
    deck.remove("orphaned")


def test_a_request_that_is_repeated_is_answered_and_not_repeated(served: tuple[Deck, Path]) -> None:
    """Restarted once, though it was asked for three times under one id, at once and later."""
    deck, state = served
    begin = deck.last_event_id()
    with connected(state) as raw:
        for number in (1, 2):
            sent(raw, frames.packed(frames.Ask(number, frames.raw(requests.Restart("alice")), "one"))[4:])
        first, second = answers(raw, 2)
        sent(raw, frames.packed(frames.Ask(3, frames.raw(requests.Restart("alice")), "one"))[4:])
        (third,) = answers(raw, 1)
    pids = {requests.decoder(requests.Restart.answers).decode(one.value).pid for one in (first, second, third)}
    assert pids == {deck.status("alice").pid}
    assert [event.kind for event in deck.events(begin)].count("restarted") == 1


def test_events_say_who_asked(served: tuple[Deck, Path]) -> None:
    """Uid and pid by the kernel's word; a member may say on whose behalf it asks; our own acts have no caller."""
    deck, state = served
    with connected(state) as raw:
        assert peer_of(raw).pid == os.getpid()
        begin = deck.last_event_id()
        sent(raw, frames.packed(frames.Ask(1, frames.raw(requests.Restart("alice")), "by-1"))[4:])
        answers(raw, 1)
        asked = deck.events(begin, worker="alice")
        assert [event.kind.value for event in asked] == ["stopping", "stopped", "restarted"]
        assert [event.detail["by"] for event in asked] == [{"uid": os.getuid(), "pid": os.getpid()}] * 3
        begin = deck.last_event_id()
        ask = frames.Ask(2, frames.raw(requests.Reset("alice")), "by-2", Caller(token="ops", address="10.0.0.7"))
        sent(raw, frames.packed(ask)[4:])
        answers(raw, 1)
        assert [event.detail["by"] for event in deck.events(begin)] == [{"token": "ops", "address": "10.0.0.7"}]
    begin = deck.last_event_id()
    with WireClient(state) as owner:
        short = requests.WorkerSpec(("sh", "-c", "sleep 0.3; exit 1"), restart=Restart("always", backoff_seconds=0))
        owner.ask(requests.Start("short", short))
    until(lambda: "restarted" in [event.kind for event in deck.events(begin, worker="short")])
    told = {event.kind.value: event.detail.get("by") for event in deck.events(begin, worker="short")}
    assert told["started"] == {"uid": os.getuid(), "pid": os.getpid()}
    assert told["crashed"] is None
    assert told["restarted"] == "policy"
    deck.remove("short")


def test_a_deep_state_directory_has_its_socket_all_the_same(tmp_path: Path) -> None:
    """An AF_UNIX address holds 107 bytes; this path has more than 200."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    with Deck(deep), WireClient(deep) as owner:
        assert owner.ask(requests.List()) == []
        assert (deep / "deck.sock").stat().st_mode & 0o777 == 0o600


_names = st.text(max_size=8)
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | _names | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=8,
)
_kinds = st.sampled_from(["hello", "ask", "more", "cancel", "welcome", "item", "answer", "refused", "offer", ""])
_verbs = st.sampled_from([*sorted(verb.__struct_config__.tag for verb in requests.ALL), "fly", ""])
_bodies = st.one_of(
    st.binary(max_size=64),
    _values.map(msgspec.msgpack.encode),
    st.tuples(_kinds, _values, _values, _values).map(msgspec.msgpack.encode),
    st.tuples(
        st.just("ask"),
        st.integers(-3, 300),
        st.fixed_dictionaries({"verb": _verbs.filter(lambda verb: verb not in {"stop_all", "wakes", "follow"})}),
        st.none() | _names,
    ).map(msgspec.msgpack.encode),
)


@settings(max_examples=FRAMES, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies=st.lists(_bodies, min_size=1, max_size=4), torn=st.integers(0, 3))
def test_whatever_arrives_the_owner_serves_on(served: tuple[Deck, Path], bodies: list[bytes], torn: int) -> None:
    """Random frames, some of them torn: each connection is answered or ended, and the next one is served."""
    _, state = served
    raw = unixsocket.connect(state, "deck.sock", 30)
    data = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    with contextlib.suppress(OSError):
        raw.sendall(data[: len(data) - torn])
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(1 << 16):
            pass
    raw.close()
    frames_sent["all"] += len(bodies)
    frames_sent["examples"] += 1
    if frames_sent["examples"] % 10 == 0:
        with WireClient(state) as owner:
            assert owner.ask(requests.Status("alice")).name == "alice"


frames_sent: Counter[str] = Counter()


def test_that_many_frames_were_sent(served: tuple[Deck, Path]) -> None:
    """After all of them the owner has no connection left and answers as before."""
    deck, state = served
    print(f"{frames_sent['all']} frames in {frames_sent['examples']} connections")
    assert frames_sent["examples"] >= FRAMES
    with WireClient(state) as owner:
        assert owner.ask(requests.Status("alice")).name == "alice"
    assert [member.owner for member in deck.members()] == [True]


def test_a_pattern_that_is_none_is_the_callers_fault(served: tuple[Deck, Path]) -> None:
    """SpecError over the wire, not a failure of the owner."""
    _, state = served
    with WireClient(state) as owner, pytest.raises(SpecError, match="grep"):
        owner.ask(requests.Logs("alice", grep="("))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_threads_share_one_deck_over_one_line(served: tuple[Deck, Path]) -> None:
    """Twenty threads of a member, one connection, every answer at its own caller."""
    _, state = served
    with Deck(state) as member:
        assert member.abilities().kind == "member"
        wrong: list[str] = []

        def ask(name: str) -> None:
            for _ in range(10):
                if member.start(name, FOREVER).name != name or member.status(name).name != name:
                    wrong.append(name)

        threads = [threading.Thread(target=ask, args=(f"t{number}",)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        member.stop_many([f"t{number}" for number in range(20)])
