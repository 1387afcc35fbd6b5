"""How fast one may send: decided with times that are given in."""

from everdeck.feed.pace import TELEGRAM, Limits, Pace


def sent_at(pace: Pace, keys: list[str]) -> list[tuple[float, str]]:
    """When each message goes out if each goes as soon as it may, in order per key, by a clock of milliseconds."""
    waiting = {}
    for key in keys:
        waiting[key] = waiting.get(key, 0) + 1
    gone: list[tuple[float, str]] = []
    now = 0.0
    while waiting:
        ready = next((key for key in waiting if pace.wait_of(key, now) <= 0), None)
        if pace.wait_of_all(now) > 0 or ready is None:
            now += 0.001
            continue
        pace.sent(ready, now)
        gone.append((now, ready))
        waiting[ready] -= 1
        if not waiting[ready]:
            del waiting[ready]
    return gone


def test_six_hundred_messages_to_three_hundred_chats_take_twenty_seconds() -> None:
    """Never more than thirty in any second, never two to one chat within one; little slower than the ideal of 20 s."""
    gone = sent_at(Pace(TELEGRAM), [str(chat) for chat in range(300)] * 2)
    times = [at for at, _ in gone]
    assert len(gone) == 600
    assert 19.5 < times[-1] < 23
    assert all(later - earlier >= 1.0 for earlier, later in zip(times, times[30:], strict=False))
    for chat in range(300):
        first, second = (at for at, key in gone if key == str(chat))
        assert second - first >= 1.0


def test_a_group_gets_twenty_a_minute() -> None:
    """The twenty-first waits for the first one's minute to end."""
    gone = sent_at(Pace(Limits(per_group_per_minute=20)), ["-100"] * 21)
    assert gone[19][0] < 1
    assert gone[20][0] >= 60


def test_a_refusal_pauses_that_chat_and_a_second_one_pauses_all() -> None:
    """What a 429 concerns is not told; two of them at once are about the bot."""
    pace = Pace(TELEGRAM)
    pace.refused("1", 5.0, 0.0)
    assert pace.wait_of("1", 0.0) == 5.0
    assert pace.wait_of("2", 0.0) == 0.0
    assert pace.wait_of_all(0.0) == 0.0
    pace.refused("2", 3.0, 0.1)
    assert pace.wait_of_all(0.1) == 3.0
