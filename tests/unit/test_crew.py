"""The thread beside the loop: what it is given is called, whatever becomes of it."""

import asyncio
import queue
import signal
import threading

import pytest

from everdeck.deck.crew import Crew, Done


def test_calls_are_made_beside_the_loop_with_every_signal_blocked() -> None:
    """A handler of the host runs in the host's threads; a call that raises costs nobody else anything."""
    crew, done, seen = Crew(), Done(), []

    def call() -> None:
        seen.append((threading.current_thread().name, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        raise ValueError("its own")

    crew.give(call, "one", done)
    crew.give(call, "two", done)

    assert [crew.take(done), crew.take(done)] == ["one", "two"]
    crew.close()
    assert {name for name, _ in seen} == {"everdeck-spawn"}
    assert all({signal.SIGINT, signal.SIGTERM, signal.SIGCHLD} <= blocked for _, blocked in seen)
    assert "everdeck-spawn" not in {thread.name for thread in threading.enumerate()}


def test_without_a_thread_the_loop_calls_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more threads allowed (ulimit -u): a start costs time, and is made."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    crew, done, called = Crew(), Done(), []

    crew.give(lambda: called.append(threading.current_thread()), "one", done)

    assert crew.take(done) == "one"
    assert called == [threading.current_thread()]
    crew.close()


def test_what_a_thread_left_that_died_is_called_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next call has a thread again."""
    crew, done, called = Crew(), Done(), []
    with monkeypatch.context() as dying:
        dying.setattr(crew, "_run", lambda: None)
        crew.give(lambda: called.append("left"), "one", done)
        assert crew.take(done) == "one"
    assert called == ["left"]

    crew.give(lambda: called.append("again"), "two", done)

    assert crew.take(done) == "two"
    assert called == ["left", "again"]
    crew.close()
    with pytest.raises(queue.Empty):
        done.get_nowait()


def test_the_loop_is_everybodys_while_a_call_is_under_way() -> None:
    """Who waits for it does not leave before it is over, though cancelled, and tells that he was."""

    async def scenario() -> None:
        crew, others, called = Crew(), threading.Event(), []
        over = crew.begin(lambda: called.append(others.wait(60)))
        waiting = asyncio.ensure_future(crew.outlasted(over))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        others.set()
        assert isinstance(await waiting, asyncio.CancelledError)
        assert called == [True]
        crew.close()

    asyncio.run(scenario())


def test_who_waits_for_a_thread_that_died_calls_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread is a means; a start is a promise."""

    async def scenario() -> None:
        crew, called = Crew(), []
        monkeypatch.setattr(crew, "_run", lambda: None)
        over = crew.begin(lambda: called.append(threading.current_thread()))
        assert await crew.outlasted(over) is None
        assert called == [threading.current_thread()]
        crew.close()

    asyncio.run(scenario())


def test_several_hands_are_at_work_at_the_same_time() -> None:
    """Each waits here for the other, and all of them end with the crew."""
    crew, done, together = Crew(hands=2), Done(), threading.Barrier(2)
    crew.give(lambda: together.wait(60), "one", done)
    crew.give(lambda: together.wait(60), "two", done)

    assert {crew.take(done), crew.take(done)} == {"one", "two"}
    assert not together.broken
    crew.close()
    assert "everdeck-spawn" not in {thread.name for thread in threading.enumerate()}
