"""Kill a bot at random, again and again: nothing is lost, nobody innocent is set aside, and fresh messages do not wait.

    python bench/feed/kills.py [--kills 1000] [--seed 1] [--poison segv exit memory] [--beside]

An aiogram bot with handlers of 50 ms and of 1 s is fed without pause and killed with SIGKILL after a random time. With
``--poison`` messages are among them that end the bot by themselves: SIGSEGV, ``os._exit``, and memory (it dies of
SIGABRT, as an allocator that gives up does). With ``--beside`` a second bot lives the same lives at the same times and
is ended by order (it is told to stop, then killed), so that nothing is ever suspected there: the waits of the two tell
what suspects cost.
"""

import argparse
import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from aiogram import Bot, Dispatcher
from aiogram.client.session.aiohttp import AiohttpSession
from aiogram.client.telegram import TelegramAPIServer
from aiogram.types import Message

from everdeck.feed.aiogram import durable
from everdeck.testing.telegram import TelegramServer, text_update


def note(path: str, line: str) -> None:
    """One whole line in one write."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


def run_bot(url: str, token: str, directory: str) -> None:
    """Poll until killed; ``begin ID WHEN`` and ``end ID`` are written down."""
    logging.disable(logging.CRITICAL)
    journal = f"{directory}/journal"
    dp = Dispatcher()

    @dp.message()
    async def on_message(message: Message, event_update: Any) -> None:
        note(journal, f"begin {event_update.update_id} {time.monotonic()}")
        deed = message.text or ""
        if deed == "segv":
            ctypes.string_at(0)
        elif deed == "exit":
            os._exit(3)
        elif deed == "memory":
            ctypes.CDLL(None).abort()
        await asyncio.sleep(1.0 if deed == "long" else 0.05)
        note(journal, f"end {event_update.update_id} {time.monotonic()}")

    async def main() -> None:
        bot = Bot(token, session=AiohttpSession(api=TelegramAPIServer.from_base(url)))
        durable(dp, bot, f"{directory}/bot.db")
        dp.startup.register(lambda: note(journal, f"ready 0 {time.monotonic()}"))
        await dp.start_polling(bot, polling_timeout=5)

    asyncio.run(main())


def read(path: Path) -> dict[str, list[tuple[int, float]]]:
    """What was written down, by kind."""
    found: dict[str, list[tuple[int, float]]] = {"begin": [], "end": [], "ready": []}
    if path.exists():
        for line in path.read_text().splitlines():
            kind, number, at = line.split()
            found[kind].append((int(number), float(at)))
    return found


def dead_of(directory: Path) -> list[str]:
    """The texts of the dead letters."""
    if not (directory / "bot.db").exists():
        return []
    with contextlib.closing(sqlite3.connect(directory / "bot.db", timeout=30)) as db:
        return [
            text for (text,) in db.execute("SELECT payload ->> '$.message.text' FROM everdeck_item WHERE state = 2")
        ]


class Trial:
    """A bot, its server and its directory."""

    def __init__(self, server: TelegramServer, directory: Path, signals: tuple[signal.Signals, ...]) -> None:
        self.server = server
        self.directory = directory
        self.signals = signals
        self.pushed: dict[int, tuple[float, str]] = {}
        self.ended_itself = 0
        self.bot: Any = None
        directory.mkdir()

    def start(self, context: Any) -> None:
        """One more life."""
        self.bot = context.Process(target=run_bot, args=(self.server.url, self.server.token, str(self.directory)))
        self.bot.start()

    @property
    def is_up(self) -> bool:
        """Does it live?"""
        return self.bot is not None and self.bot.exitcode is None

    def end(self) -> None:
        """End it in its way."""
        self.ended_itself += not self.is_up
        for number in self.signals:
            if self.is_up:
                with contextlib.suppress(ProcessLookupError):  # it has just ended itself
                    os.kill(self.bot.pid, number)
                self.bot.join(0.5)  # a stop is noted before it waits for anybody
        self.bot.join()

    def push(self, text: str, chat: int) -> None:
        """One more message."""
        (update_id,) = self.server.push(text_update(text, chat_id=chat))
        self.pushed[update_id] = (time.monotonic(), text)

    def left(self) -> set[int]:
        """The good ones that are not done."""
        done = {number for number, _ in read(self.directory / "journal")["end"]}
        return {number for number, (_, text) in self.pushed.items() if text in {"long", "short"}} - done

    def in_file(self) -> int:
        """How many wait in the inbox."""
        with contextlib.closing(sqlite3.connect(self.directory / "bot.db", timeout=30)) as db:
            (count,) = db.execute("SELECT count(*) FROM everdeck_item WHERE state != 2").fetchone()
        return int(count)

    def finish(self, context: Any, poison: int) -> float:
        """Let it live until nothing is left to do, or nothing has moved for two minutes; the seconds it took."""
        began = moved = time.monotonic()
        before = -1
        while time.monotonic() < moved + 120:
            if not self.is_up:
                self.ended_itself += self.bot.exitcode is not None and before >= 0
                self.start(context)
            left = len(self.left())
            if left != before:
                before, moved = left, time.monotonic()
            if not left and len(dead_of(self.directory)) >= poison and not self.in_file():
                break
            time.sleep(0.2)
        self.bot.kill()
        self.bot.join()
        return time.monotonic() - began

    def deaths_of_poison(self) -> dict[str, int]:
        """How often each poison was begun: each time it ended the bot."""
        began = [number for number, _ in read(self.directory / "journal")["begin"]]
        poison = {number: text for number, (_, text) in self.pushed.items() if text not in {"long", "short"}}
        return {f"{text} {number}": began.count(number) for number, text in poison.items()}

    def waits(self) -> list[float]:
        """How long fresh messages waited: sent to a bot that was up, and begun by the same one."""
        seen = read(self.directory / "journal")
        readies = [at for _, at in seen["ready"]]
        first: dict[int, float] = {}
        for number, at in seen["begin"]:
            first.setdefault(number, at)
        found = []
        for number, at in first.items():
            up_since = max((ready for ready in readies if ready <= at), default=at)
            if self.pushed[number][0] > up_since:
                found.append(at - self.pushed[number][0])
        return sorted(found)

    def told_waits(self) -> str:
        """The same in words."""
        waits = self.waits()
        p99 = waits[int(len(waits) * 0.99)]
        return f"p50 {statistics.median(waits) * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms, most {waits[-1] * 1000:.0f} ms"


def main() -> int:
    """Print what was seen; 1 if somebody innocent paid or something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--poison", nargs="*", default=[])
    parser.add_argument("--beside", action="store_true")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.feed.kills", "everdeck.feed.aiogram"])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place, TelegramServer() as server, TelegramServer() as other:
        killed = Trial(server, Path(place) / "killed", (signal.SIGKILL,))
        trials = [killed]
        if given.beside:
            trials.append(Trial(other, Path(place) / "ordered", (signal.SIGTERM, signal.SIGKILL)))
        chat = 0
        poison = list(given.poison)
        for kill in range(given.kills):
            for trial in trials:
                trial.start(context)
            ends_at = time.monotonic() + chance.uniform(0.25, 1.4)
            while time.monotonic() < ends_at and killed.is_up:
                chat += 1
                text = "long" if chat % 7 == 0 else "short"
                for trial in trials:
                    is_poison = poison and kill > 20 and kill % 40 == 0 and trial is killed
                    trial.push(poison.pop() if is_poison else text, chat)
                time.sleep(0.06)
            for trial in trials:
                trial.end()
            if kill % 100 == 99:
                print(f"{kill + 1} kills, {len(killed.pushed)} updates, dead: {dead_of(killed.directory)}", flush=True)
        suspects = killed.in_file()
        seconds = killed.finish(context, len(given.poison))
        dead = dead_of(killed.directory)
        innocent = [text for text in dead if text in {"long", "short"}]
        seen = read(killed.directory / "journal")
        left = killed.left()
        lost = len(left) - min(len(left), killed.in_file())
        print(
            f"kills {given.kills} (bot ended itself {killed.ended_itself} times), updates {len(killed.pushed)}: "
            f"lost {lost}, innocent set aside {len(innocent)}, poison set aside "
            f"{sorted(text for text in dead if text not in {'long', 'short'})} of {sorted(given.poison)}, "
            f"repeated {len(seen['end']) - len({number for number, _ in seen['end']})}; {suspects} were left at the "
            f"last kill and {len(left)} after {seconds:.0f} s of peace; a fresh message waited {killed.told_waits()}"
        )
        if given.poison:
            print(f"each poison's own deaths (goal 3): {killed.deaths_of_poison()}")
        if given.beside:
            print(f"beside it, where nothing is suspected: {trials[1].told_waits()}")
        return int(bool(lost) or bool(left) or bool(innocent) or len(dead) - len(innocent) < len(given.poison))


if __name__ == "__main__":
    sys.exit(main())
