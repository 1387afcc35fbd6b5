"""Kill a bot at random, again and again: nothing is lost, nobody innocent is set aside, and fresh messages do not wait.

    python bench/feed/kills.py [--kills 1000] [--seed 1] [--poison segv exit memory]

An aiogram bot with handlers of 50 ms and of 1 s is fed without pause and killed with SIGKILL after a random time. With
``--poison`` messages are among them that end the bot by themselves: SIGSEGV, ``os._exit``, and memory (it dies of
SIGABRT, as an allocator that gives up does).
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


def main() -> int:
    """Print what was seen; 1 if somebody innocent paid or something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--poison", nargs="*", default=[])
    given = parser.parse_args()
    chance = random.Random(given.seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.feed.kills", "everdeck.feed.aiogram"])
    pushed: dict[int, tuple[float, str]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place, TelegramServer() as server:
        directory = Path(place)
        died_by_itself = 0
        chat = 0
        poison = list(given.poison)
        for kill in range(given.kills):
            bot = context.Process(target=run_bot, args=(server.url, server.token, place))
            bot.start()
            ends_at = time.monotonic() + chance.uniform(0.25, 1.4)
            while time.monotonic() < ends_at and bot.exitcode is None:
                chat += 1
                text = "long" if chat % 7 == 0 else "short"
                if poison and kill > 20 and kill % 40 == 0:
                    text = poison.pop()
                (update_id,) = server.push(text_update(text, chat_id=chat))
                pushed[update_id] = (time.monotonic(), text)
                time.sleep(0.06)
            if bot.exitcode is None and bot.pid is not None:
                os.kill(bot.pid, signal.SIGKILL)
            else:
                died_by_itself += 1
            bot.join()
            if kill % 100 == 99:
                print(f"{kill + 1} kills, {len(pushed)} updates, dead: {dead_of(directory)}", flush=True)
        deaths = 0
        deadline = time.monotonic() + 300
        wanted = {number for number, (_, text) in pushed.items() if text in {"long", "short"}}
        while time.monotonic() < deadline:
            bot = context.Process(target=run_bot, args=(server.url, server.token, place))
            bot.start()
            while bot.exitcode is None and time.monotonic() < deadline:
                done = {number for number, _ in read(directory / "journal")["end"]}
                if wanted <= done and len(dead_of(directory)) >= len(given.poison):
                    break
                time.sleep(0.2)
            if bot.exitcode is None:
                bot.kill()
                bot.join()
                break
            deaths += 1
        seen = read(directory / "journal")
        done = {number for number, _ in seen["end"]}
        dead = dead_of(directory)
        innocent = [text for text in dead if text in {"long", "short"}]
        readies = [at for _, at in seen["ready"]]
        waits = []
        first: dict[int, float] = {}
        for number, at in seen["begin"]:
            first.setdefault(number, at)
        for number, at in first.items():
            up_since = max((ready for ready in readies if ready <= at), default=at)
            if pushed[number][0] > up_since:  # sent to a bot that was up, and begun by the same one: fresh
                waits.append(at - pushed[number][0])
        waits.sort()
        p99 = waits[int(len(waits) * 0.99)]
        print(
            f"kills {given.kills} (bot ended itself {died_by_itself + deaths} times), updates {len(pushed)}: "
            f"lost {len(wanted - done)}, innocent set aside {len(innocent)}, poison set aside "
            f"{sorted(text for text in dead if text not in {'long', 'short'})} of {sorted(given.poison)}, "
            f"repeated {len(seen['end']) - len(done)}; a fresh message waited "
            f"p50 {statistics.median(waits) * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms, most {waits[-1] * 1000:.0f} ms"
        )
        return int(bool(wanted - done) or bool(innocent) or len(dead) - len(innocent) < len(given.poison))


if __name__ == "__main__":
    sys.exit(main())
