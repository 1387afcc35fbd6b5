"""How fast a durable bot is beside a stock one, and what one slow handler does to the others.

    python bench/feed/throughput.py [--quick]

Both bots do the same: 50 ms per update, every update in its own chat, a backlog waiting. Wanted: durable at least 0.8
of stock; with one handler of 20 s among 1,000 updates at least 97 % of the others done after 10 s.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.tg_bots import BotProcess, Handled
from tidelock.testing.telegram import TelegramServer, text_update

CONCURRENCY = {"aiogram": (), "ptb": ("--concurrency", "256")}


def updates_per_second(library: str, count: int, *, durable: bool) -> float:
    """One run: from the first finished handler to the last."""
    with tempfile.TemporaryDirectory() as directory, TelegramServer() as server:
        server.push(*(text_update("work", chat_id=number) for number in range(1, count + 1)))
        with BotProcess(library, server, Path(directory), *CONCURRENCY[library], durable=durable) as bot:
            first = len(bot.wait_for(lambda handled: bool(handled.ended)).ended)
            began = time.monotonic()
            bot.wait_for(lambda handled: len(handled.ended) == count)
            return (count - first) / (time.monotonic() - began)


def done_beside_a_slow_one(library: str, count: int = 1000, seconds: float = 10.0) -> float:
    """The share of the other updates that are done this long after the bot began."""
    with tempfile.TemporaryDirectory() as directory, TelegramServer() as server:
        updates = [text_update("work", chat_id=number) for number in range(1, count + 1)]
        updates[count // 100] = text_update("slow 20", chat_id=-1)
        server.push(*updates)
        with BotProcess(library, server, Path(directory), *CONCURRENCY[library]) as bot:
            bot.wait_for(lambda handled: bool(handled.began))
            began = time.monotonic()
            enough: Handled = bot.journal()
            while len(enough.ended) < count - 1 and time.monotonic() < began + seconds:
                time.sleep(0.05)
                enough = bot.journal()
            return len(enough.ended) / (count - 1)


def main() -> int:
    """Print both tables; 1 if something wanted was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small run each, numbers are rough")
    parser.add_argument("--only", choices=sorted(CONCURRENCY))
    given = parser.parse_args()
    runs, count = (1, 2000) if given.quick else (5, 5000)
    missed = False
    print(
        "| library | stock, updates/s | durable, updates/s | durable / stock | others done 10 s beside a 20 s handler |"
    )
    print("|---|---|---|---|---|")
    for library in [given.only] if given.only else sorted(CONCURRENCY):
        speed: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(runs):
            for durable in (False, True):
                speed[durable].append(updates_per_second(library, count, durable=durable))
        stock, ours = statistics.median(speed[False]), statistics.median(speed[True])
        share = done_beside_a_slow_one(library)
        missed |= ours / stock < 0.8 or share < 0.97
        print(f"| {library} | {stock:,.0f} | {ours:,.0f} | {ours / stock:.2f} | {share:.1%} |", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
