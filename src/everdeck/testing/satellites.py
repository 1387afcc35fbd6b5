"""The kill -9 suite for kinds of satellites: ours, and those of other packages.

An :class:`Outside` is the other side of the account: it delivers messages and sees what was sent back. The suite starts
an owner with the satellite, a host that answers every message, and kills one of the three with SIGKILL at random
moments while messages arrive. Afterwards every message must have been answered; answers that came twice are counted.

    trial = kill_trial(outside, state, who="satellite", messages=500, kills=20)
    assert trial.lost == []

For a kind that cannot answer (``replies=False``) what the host has handled counts instead. The host is a process of its
own that reads as a member of the deck does. Also a program: that is what it runs.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec.structs import replace

from everdeck.child import lifeline
from everdeck.errors import KernelError
from everdeck.kernel import flock
from everdeck.kernel import identity as ids
from everdeck.model import Restart, WorkerSpec
from everdeck.satellites import FEED
from everdeck.statedir import StateDir

__all__ = ["Outside", "Trial", "kill_trial"]

Victim: TypeAlias = Literal["satellite", "host", "owner"]

NAME: Final = "under-test"
DEADLINE_SECONDS: Final = 120.0
LOOK_SECONDS: Final = 0.02


class Outside(Protocol):
    """The other side of one account."""

    def spec(self) -> WorkerSpec:
        """The satellite that joins it."""

    def deliver(self, text: str, conversation: int) -> str | None:
        """Somebody writes this text in that conversation; returns what it says if the text is not ours to choose."""

    def received(self) -> list[str]:
        """The texts that were sent back, in the order they came."""


@dataclass(slots=True)
class Trial:
    """What became of the messages of one trial.

    ``twice`` are answers that came again, ``disorder`` conversations that were answered out of order.
    """

    delivered: list[str]
    kills: int
    lost: list[str] = field(default_factory=list)
    twice: Counter[str] = field(default_factory=Counter)
    handled_again: int = 0
    disorder: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def duplicates(self) -> int:
        """How many answers came again."""
        return sum(self.twice.values())


def kill_trial(
    outside: Outside,
    state: Path,
    *,
    who: Victim,
    messages: int = 500,
    kills: int = 20,
    conversations: int = 7,
    seed: int = 1,
    replies: bool = True,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Trial:
    """Deliver messages while one of the three is killed again and again; then wait until all are answered."""
    chance = random.Random(seed)  # noqa: S311 - moments, not secrets
    began = time.monotonic()
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    spec = replace(
        outside.spec(), restart=Restart("always", max_crashes=10_000, backoff_seconds=0.02, backoff_cap_seconds=0.1)
    )
    (state / "spec.json").write_bytes(msgspec.json.encode(spec))
    answered = state / "answered"
    answered.touch()
    received = outside.received if replies else lambda: [f"re: {text}" for text in _lines(answered)]
    texts = [f"{number % conversations}/{number}" for number in range(messages)]
    with _running("own", state) as owner, _running("read" if replies else "note", state) as host:
        texts[0] = outside.deliver(texts[0], 0) or texts[0]
        _wait(lambda: f"re: {texts[0]}" in received(), "the first answer", deadline_seconds)
        moments = sorted(chance.sample(range(1, messages), min(kills, messages - 1)))
        done = 0
        for number in range(1, messages):
            texts[number] = outside.deliver(texts[number], number % conversations) or texts[number]
            if moments and number == moments[0]:
                moments.pop(0)
                time.sleep(chance.random() * 0.2)  # noqa: TID251 - at a random moment is the point
                done += _kill(who, state, owner, host)
        _wait(
            lambda: len(set(received())) >= messages or not (owner.alive() and host.alive()),
            f"{messages} answers",
            deadline_seconds,
        )
    seen = received()
    counts = Counter(seen)
    trial = Trial(texts, done, seconds=time.monotonic() - began)
    trial.lost = [text for text in texts if f"re: {text}" not in counts]
    trial.twice = Counter({text: count - 1 for text, count in counts.items() if count > 1})
    handled = _lines(answered)
    trial.handled_again = len(handled) - len(set(handled))
    for conversation in range(conversations):
        of_one = list(dict.fromkeys(text for text in seen if text.startswith(f"re: {conversation}/")))
        if of_one != sorted(of_one, key=lambda text: int(text.rpartition("/")[2])):
            trial.disorder.append(str(conversation))
    return trial


def _lines(file: Path) -> list[str]:
    return file.read_text().split("\n")[:-1]


# --- the processes ----------------------------------------------------------------------------------------------


class _Running:
    """A process of the suite that can be killed and started again."""

    def __init__(self, role: str, state: Path) -> None:
        self.role = role
        self.state = state
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":  # noqa: TID251 - a process of the suite, not a worker
        with (self.state / f"{self.role}.log").open("ab") as log:
            return subprocess.Popen(  # noqa: TID251 - as above
                [sys.executable, "-m", __spec__.name if __spec__ else __name__, self.role, str(self.state)],
                stdout=log,
                stderr=log,
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill_and_start(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def end(self) -> None:
        if self.alive():
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def _running(role: str, state: Path) -> Iterator[_Running]:
    running = _Running(role, state)
    try:
        yield running
    finally:
        running.end()


def _kill(who: Victim, state: Path, owner: _Running, host: _Running) -> int:
    if who == "owner":
        owner.kill_and_start()
        return 1
    if who == "host":
        host.kill_and_start()
        return 1
    _wait(lambda: _kill_satellite(StateDir(state).worker(NAME).lock), "a satellite to kill", DEADLINE_SECONDS)
    return 1


def _kill_satellite(lock: Path) -> bool:
    for pid in flock.holders(lock):
        with contextlib.suppress(KernelError, ProcessLookupError):
            pidfd = ids.open_pidfd(pid)
            try:
                if b"everdeck.satellites" in ids.read_proc(pid, "cmdline"):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    return True
            finally:
                os.close(pidfd)
    return False


def _wait(fact: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(LOOK_SECONDS)  # noqa: TID251 - the other side tells nobody


async def _own(state: Path) -> None:
    from everdeck.deck import AsyncDeck  # noqa: PLC0415 - only this process needs it

    spec = msgspec.json.decode((state / "spec.json").read_bytes(), type=WorkerSpec)
    async with lifeline(), AsyncDeck(state) as deck:
        await deck.start(NAME, spec, replace=True)
        await asyncio.get_running_loop().create_future()


async def _read(state: Path, *, replies: bool = True) -> None:
    from everdeck.satellites.bridge import Reader  # noqa: PLC0415 - only this process needs it

    data = StateDir(state).worker(NAME).data
    while not data.is_dir():  # noqa: ASYNC110 - the owner makes it, some time
        await asyncio.sleep(LOOK_SECONDS)  # noqa: TID251 - as above
    answered = os.open(state / "answered", os.O_WRONLY | os.O_APPEND)
    async with lifeline():
        with Reader() as reader:
            reader.add(NAME, data / FEED)
            while True:
                message = await reader.get()
                async with message:
                    os.write(answered, f"{message.text.strip()}\n".encode())
                    if replies:
                        await message.reply(f"re: {message.text.strip()}")


def main() -> None:
    """``python -m everdeck.testing.satellites own|read|note STATE``: the suite's own processes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("role", choices=("own", "read", "note"))
    parser.add_argument("state", type=Path)
    options = parser.parse_args()
    if options.role == "own":
        asyncio.run(_own(options.state))
    else:
        asyncio.run(_read(options.state, replies=options.role == "read"))


if __name__ == "__main__":
    main()
