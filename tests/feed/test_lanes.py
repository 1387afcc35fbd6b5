"""Whose turn it is: pure decisions, checked as properties."""

from hypothesis import given, settings
from hypothesis import strategies as st

from everdeck.feed.blame import Suspicion
from everdeck.feed.lanes import Lanes


def test_a_flooded_key_delays_another_by_one_item() -> None:
    """Ten thousand items of one key, then one of another: with one slot it is second."""
    lanes = Lanes()
    for seq in range(10_000):
        lanes.add(seq, "flood")
    lanes.add(10_000, "other")
    order = []
    for _ in range(3):
        ((seq, lane),) = lanes.pick(1, 0.0)
        order.append(seq)
        lanes.release(lane)
    assert order == [0, 10_000, 1]


def test_items_without_a_key_do_not_wait_for_each_other() -> None:
    """None is not a key."""
    lanes = Lanes()
    for seq in range(5):
        lanes.add(seq, None)
    assert [seq for seq, _ in lanes.pick(10, 0.0)] == [0, 1, 2, 3, 4]


def test_a_retry_holds_back_its_key_only() -> None:
    """Order per key: what is behind a failed item waits with it; other keys go on."""
    lanes = Lanes()
    lanes.add(1, "a")
    lanes.add(2, "a")
    lanes.add(3, "b")
    assert lanes.pick(10, 0.0) == [(1, "a"), (3, "b")]
    lanes.put_back(1, "a", due=5.0)
    lanes.release("b")
    assert not lanes.may_pick(4.9)
    assert lanes.next_due() == 5.0
    assert lanes.pick(10, 5.0) == [(1, "a")]


def test_innocents_first_and_suspects_in_their_own_slots() -> None:
    """A suspect takes no turn from fresh work; several watched ones run together, one alone runs with no other."""
    lanes = Lanes()
    for seq, key in enumerate("abcdef"):
        lanes.add(seq, key)
    lanes.suspect(0, Suspicion.ALONE)
    lanes.suspect(1, Suspicion.WATCHED)
    lanes.suspect(2, Suspicion.WATCHED)
    lanes.suspect(3, Suspicion.ALONE)
    assert lanes.pick(10, 0.0) == [(4, "e"), (5, "f")]
    assert lanes.pick_suspects(10, 0.0) == [(0, "a")]
    assert not lanes.may_pick_suspects(0.0)
    lanes.release("a")
    assert lanes.pick_suspects(10, 0.0) == [(1, "b"), (2, "c")]
    lanes.release("b")
    assert lanes.pick_suspects(10, 0.0) == []
    lanes.excuse("c")  # it takes long
    assert lanes.pick_suspects(10, 0.0) == [(3, "d")]
    lanes.release("d")
    assert not lanes.may_pick(0.0)


def test_whoever_is_accused_goes_before_the_other_suspects_once_it_may() -> None:
    """Until then the others are tried, and the time at which it may is known."""
    lanes = Lanes()
    for seq, how in enumerate([Suspicion.WATCHED, Suspicion.ALONE, Suspicion.ACCUSED, Suspicion.ACCUSED]):
        lanes.add(seq, f"key {seq}")
        lanes.suspect(seq, how)
    lanes.hold_accused(5.0)
    assert lanes.pick_suspects(10, 0.0) == [(0, "key 0")]
    assert lanes.next_due() == 5.0
    assert lanes.pick_suspects(10, 5.0) == []
    lanes.release("key 0")
    assert lanes.pick_suspects(10, 5.0) == [(2, "key 2")]
    assert lanes.seqs() == {1, 3}
    lanes.release("key 2")
    assert lanes.pick_suspects(10, 5.0) == [(3, "key 3")]
    lanes.release("key 3")
    assert lanes.pick_suspects(10, 5.0) == [(1, "key 1")]
    assert lanes.next_due() is None


def test_stepping_aside_frees_the_key() -> None:
    """Work in the background no longer holds back its key, and can still be put back."""
    lanes = Lanes()
    lanes.add(1, "a")
    lanes.add(2, "a")
    assert lanes.pick(10, 0.0) == [(1, "a")]
    own = lanes.step_aside(1, "a")
    assert lanes.pick(10, 0.0) == [(2, "a")]
    lanes.put_back(1, own, due=1.0)
    assert lanes.pick(10, 1.0) == [(1, own)]
    lanes.release(own)
    lanes.release("a")
    assert lanes.in_flight == 0
    assert not lanes.seqs()


@settings(max_examples=200, deadline=None)
@given(
    keys=st.lists(st.sampled_from(["a", "b", "c", None]), max_size=40),
    slots=st.integers(1, 5),
    fates=st.lists(st.sampled_from(["done", "retry", "back", "aside"]), max_size=200),
    suspects=st.sets(st.integers(0, 39), max_size=4),
)
def test_everything_is_served_in_order_and_never_two_of_a_key(
    keys: list[str | None], slots: int, fates: list[str], suspects: set[int]
) -> None:
    """Whatever fails and comes back: each item ends exactly once, in order per key, suspects alone."""
    lanes = Lanes()
    for seq, key in enumerate(keys):
        lanes.add(seq, key)
    for seq in suspects:
        if seq < len(keys):
            lanes.suspect(seq, Suspicion.ALONE)
    flying: list[tuple[int, str | int]] = []
    finished: list[int] = []
    strayed: set[int] = set()
    script = iter(fates)
    now = 0.0
    for _ in range(1000):
        now += 1.0
        flying += lanes.pick(slots - len(flying), now)
        flying += lanes.pick_suspects(slots, now)
        lanes_in_use = [lane for _, lane in flying]
        assert len(set(lanes_in_use)) == len(lanes_in_use)
        assert len(suspects & {seq for seq, _ in flying}) <= 1
        if not flying:
            if not lanes.seqs():
                break
            continue
        seq, lane = flying.pop(0)
        match next(script, "done"):
            case "retry":
                lanes.put_back(seq, lane, due=now + 2.0)
            case "back":
                lanes.put_back(seq, lane)
            case "aside":
                strayed.add(seq)
                flying.append((seq, lanes.step_aside(seq, lane)))
            case _:
                lanes.release(lane)
                finished.append(seq)
    assert sorted(finished) == list(range(len(keys)))
    for key in {key for key in keys if key is not None}:
        served = [seq for seq in finished if keys[seq] == key and seq not in strayed]
        assert served == sorted(served)
